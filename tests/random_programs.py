"""Random problems for the rematerialization planner: forward ops, and late ops that read back into them."""

from __future__ import annotations

from hypothesis import strategies as st

from wholestep.remat.problem import INPUT, Op, Problem, Value


@st.composite
def problems(draw: st.DrawFn, max_forward: int = 8, max_late: int = 6, *, fused: bool = False) -> Problem:
    """A problem with resident inputs, several results per op, ops that must not run again, and returned values."""
    values = [Value("input", 0, INPUT)]
    ops: list[Op] = []

    def add(name: str, *, is_late: bool, sources: list[int]) -> None:
        num_reads = draw(st.integers(1, min(3, len(sources))))
        reads = tuple(draw(st.permutations(sources))[:num_reads])
        num_made = draw(st.sampled_from((1, 1, 1, 2)))
        makes = tuple(range(len(values), len(values) + num_made))
        for index in range(num_made):
            flags = draw(st.tuples(st.booleans(), st.booleans())) if fused else (False, False)
            keep_cost = float(draw(st.integers(0, 3))) if fused else 0.0
            values.append(Value(f"{name}.{index}", draw(st.integers(0, 9)), len(ops), *flags, keep_cost))
        cost = draw(st.integers(0, 9))
        reason = "" if is_late or draw(st.integers(0, 5)) else "because"
        in_place = fused and draw(st.booleans())
        ops.append(
            Op(
                name,
                reads,
                makes,
                is_late=is_late,
                cost=float(cost),
                flops=cost,
                unrepeatable=reason,
                in_place=in_place,
            )
        )

    num_forward = draw(st.integers(1, max_forward))
    for index in range(num_forward):
        add(f"f{index}", is_late=False, sources=list(range(len(values))))
    num_late = draw(st.integers(1, max_late))
    for index in range(num_late):
        add(f"b{index}", is_late=True, sources=list(range(len(values))))
    made = range(1, len(values))
    returned = frozenset(draw(st.lists(st.sampled_from(list(made)), max_size=2)))
    return Problem(tuple(ops), tuple(values), returned)
