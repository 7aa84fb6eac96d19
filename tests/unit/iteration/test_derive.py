"""Setup, main, cleanup and flush: four graphs from one, which together are the loop (ITER-1, ITER-4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.simulated import PlainLoop, RotatedLoop, Trial, Wire, unequal
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from wholestep.graph import Phase, SlotKind, StepGraph, ops
from wholestep.iteration import Kind, carried_nodes, derive, leaf_closure, move_to_next_iteration, moved_nodes

aten = torch.ops.aten
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SEND = "allreduce{group=g,world=2},bucket{mb=0.00005,first_mb=0.00005},split_optimizer,overlap"


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


class Counting(nn.Module):
    """A buffer that every forward changes, and dropout."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.last(torch.dropout(self.norm(self.first(x)), 0.3, True)) / self.count


def averaging(model: nn.Module, optimizer: Optimizer, average: nn.Module, x: Tensor) -> Tensor:
    """Keeps a moving average of the weights, as part of the step."""
    loss = step(model, optimizer, x)
    with torch.no_grad():
        for kept, parameter in zip(average.parameters(), model.parameters()):
            kept.lerp_(parameter, 0.1)
    return loss


MOMENTUM: Callable[..., Optimizer] = partial(SGD, lr=0.1, momentum=0.9)


@cache
def trial(make: Callable[..., Optimizer] = MOMENTUM) -> Trial:
    torch.manual_seed(0)
    model = Counting()
    return Trial.of(step, model, make(model.parameters()), X)


@cache
def averaging_trial() -> Trial:
    torch.manual_seed(0)
    model, average = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    return Trial.of(averaging, model, SGD(model.parameters(), lr=0.1), average, X)


TRIALS: dict[str, Callable[[], Trial]] = {
    "sgd": trial,
    "adamw": partial(trial, partial(AdamW, foreach=False)),
    "foreach": partial(trial, partial(AdamW, foreach=True)),
    "fused": partial(trial, partial(AdamW, fused=True)),
    "averaged": averaging_trial,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("passes", ["rotate", f"{SEND},rotate"])
@pytest.mark.parametrize("name", TRIALS)
def test_every_graph_is_well_formed(name: str, passes: str) -> None:
    source = TRIALS[name]().after(passes)
    assert moved_nodes(source)
    for kind in Kind:
        derived = derive(source, kind)
        derived.verify(deep=True)
        assert derived.is_functional
        assert [record.name for record in derived.history] == [record.name for record in source.history]
        compile(str(derived), kind, "exec")


@pytest.mark.sample(6)
@pytest.mark.parametrize("finish", ["", "reinplace"])
@pytest.mark.parametrize("passes", ["rotate", f"{SEND},rotate"])
@pytest.mark.parametrize("name", TRIALS)
def test_setup_main_and_cleanup_are_the_loop(name: str, passes: str, finish: str) -> None:
    tested = TRIALS[name]()
    source = tested.after(passes)
    average = (lambda value: (value * 0.5) * Wire().factor) if "allreduce" in passes else None
    loop = RotatedLoop(source, tested.state, Wire(), finish)
    for num_steps in (1, 2, 4):
        plain, loop = PlainLoop(tested.graph, tested.state, average), loop.again(tested.state)
        for number in range(num_steps):
            seen: list[Any] = []
            for run in (plain.step, partial(loop.step, is_last=number + 1 == num_steps)):
                torch.manual_seed(number)
                seen.append(dict(enumerate(run(tested.batch))))
            assert unequal(*seen) == []
        assert not loop.waiting
        assert not loop.wire.travelling
        assert unequal(plain.state, loop.state) == []


def slots_of(graph: StepGraph, *kinds: SlotKind) -> set[str]:
    return {slot.id for slot in graph.slots_of_kind(*kinds)}


def targets(graph: StepGraph) -> list[Any]:
    return sorted(str(node.target) for node in graph.calls())


def test_what_each_graph_holds() -> None:
    source = trial().after("rotate")
    setup, main, cleanup, flush = (derive(source, kind) for kind in Kind)
    moved = sorted(str(node.target) for node in moved_nodes(source))
    clones = ["aten.clone.default"] * (targets(setup).count("aten.clone.default"))
    whole = targets(source)
    assert targets(flush) == moved
    assert sorted([*targets(setup), *moved]) == sorted([*whole, *clones])
    assert targets(main) == sorted([*whole, *clones])
    assert targets(cleanup) == sorted([*whole, *moved])

    carries = {f"carry.{node.name}" for node in carried_nodes(source)}
    assert [slots_of(graph, SlotKind.CARRY) for graph in (setup, main, cleanup, flush)] == [set(), *[carries] * 3]
    returned = [{key for key in graph.results if key.startswith("carry.")} for graph in (setup, main, cleanup, flush)]
    assert returned == [carries, carries, set(), set()]

    late = {key for key, value in source.updates.items() if "next_iteration" in value.meta}
    assert set(setup.updates) == set(source.updates) - late
    assert set(main.updates) == set(cleanup.updates) == set(source.updates)
    assert set(flush.updates) == late
    assert [len(graph.outputs) for graph in (setup, main, cleanup, flush)] == [1, 1, 1, 0]
    assert slots_of(flush, SlotKind.BATCH, SlotKind.BUFFER, SlotKind.LR) == set()


def test_the_source_is_left_alone() -> None:
    source = trial().after("rotate")
    before = str(source)
    for kind in Kind:
        derive(source, kind).set_returned(outputs=())
    assert str(source) == before


def code(graph: StepGraph) -> str:
    calls = [f"{n.name} = {getattr(n.target, '__name__', '')}({', '.join(map(str, n.args))})" for n in graph.calls()]
    return "\n".join([*calls, f"updates {graph.updates}", f"results {graph.results}"]) + "\n"


def small_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) * x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_main_before_and_after() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    source = Trial.of(small_step, model, SGD(model.parameters(), lr=0.1), X).after("rotate")
    assert_expected_inline(
        code(source),
        """\
t = t.default(param_weight)
mm = mm.default(batch_x, t)
mul = mul.Tensor(mm, batch_x)
sum_1 = sum.default(mul)
ones_like = ones_like.default(sum_1)
expand = expand.default(ones_like, [3, 4])
mul_1 = mul.Tensor(expand, batch_x)
t_1 = t.default(mul_1)
mm_1 = mm.default(t_1, batch_x)
neg = neg(lr_0)
add = add.Tensor(param_weight, mm_1)
updates {'param.weight': add}
results {}
""",
    )
    assert_expected_inline(
        code(derive(source, Kind.MAIN)),
        """\
neg = neg(carry_lr_0)
add = add.Tensor(param_weight, carry_mm_1)
t = t.default(add)
mm = mm.default(batch_x, t)
mul = mul.Tensor(mm, batch_x)
sum_1 = sum.default(mul)
ones_like = ones_like.default(sum_1)
expand = expand.default(ones_like, [3, 4])
mul_1 = mul.Tensor(expand, batch_x)
t_1 = t.default(mul_1)
mm_1 = mm.default(t_1, batch_x)
updates {'param.weight': add}
results {'carry.lr_0': lr_0, 'carry.mm_1': mm_1}
""",
    )
    assert_expected_inline(
        code(derive(source, Kind.FLUSH)),
        """\
neg = neg(carry_lr_0)
add = add.Tensor(param_weight, carry_mm_1)
updates {'param.weight': add}
results {}
""",
    )


def test_updates_run_just_before_their_first_reader() -> None:
    main = derive(trial().after(f"{SEND},rotate"), Kind.MAIN)
    nodes = list(main.calls())
    last = main.updates["param.last.weight"]
    reader = next(user for user in nodes if user in last.users and "applies" not in user.meta)
    computed = [node for node in nodes if node.meta["phase"] is Phase.FORWARD and not ops.is_view(node.target)]
    assert computed[0] < last, "it does not come at the very beginning"
    assert not [node for node in computed if last < node < reader]


def test_a_message_is_waited_for_behind_the_layers_before() -> None:
    main = derive(trial().after(f"{SEND},rotate"), Kind.MAIN)
    waits = [node for node in main.calls() if node.target is ops.WAIT]
    forward = [node for node in main.calls(Phase.FORWARD) if not ops.is_view(node.target)]
    assert len(waits) > 1
    assert max(waits) > forward[0]
    issued = [node for node in main.calls() if node.target is ops.ALL_REDUCE]
    assert max(waits) < min(issued)


def test_only_some_blocks_are_flushed() -> None:
    source = trial().after(f"{SEND},rotate")
    numbers = {node.meta["next_iteration"] for node in moved_nodes(source)}
    assert len(numbers) > 1
    whole = derive(source, Kind.FLUSH)
    seen: set[str] = set()
    for number in numbers:
        part = derive(source, Kind.FLUSH, frozenset({number}))
        part.verify(deep=True)
        assert set(part.updates) < set(whole.updates)
        assert not seen & set(part.updates)
        seen |= set(part.updates)
        assert slots_of(part, SlotKind.CARRY) < slots_of(whole, SlotKind.CARRY)
    assert seen == set(whole.updates)


def test_what_the_user_may_change_is_copied_when_it_is_carried() -> None:
    """Arguments, and what the step returns: here both are what the moved update reads."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)

    def returning(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return gradient

    source = Trial.of(returning, model, SGD(model.parameters(), lr=torch.tensor(0.1)), X).after("rotate")
    setup = derive(source, Kind.SETUP)
    carried = {key: value for key, value in setup.results.items() if key.startswith("carry.")}
    assert {value.target for value in carried.values()} == {aten.clone.default}
    assert len(carried) == 2


def test_a_view_of_a_slot_is_carried_by_value() -> None:
    """The update looks at the forward's own view of the weight, whose memory it overwrites first."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    tested = Trial.of(small_step, model, SGD(model.parameters(), lr=0.1), X)
    graph, change = tested.graph, tested.graph.updates["param.weight"]
    view = next(node for node in graph.calls() if node.target is aten.t.default)
    mixed = graph.insert(aten.add.Tensor, (graph.placeholder("param.weight"), change), like=change, after=change)
    mixed = graph.insert(aten.mm.default, (mixed, view), like=change, after=mixed)
    graph.set_returned(updates={"param.weight": mixed})
    source = graph.copy()
    move_to_next_iteration(source, leaf_closure([source.updates["param.weight"].all_input_nodes[0]]))
    assert view.name in [node.name for node in carried_nodes(source)]
    tested.assert_same(source)


def test_effects_run_once_and_in_place() -> None:
    source = trial().after(f"{SEND},rotate")
    for kind in (Kind.SETUP, Kind.MAIN, Kind.CLEANUP):
        derived = derive(source, kind)
        assert [node.meta["effect"] for node in derived.calls() if "effect" in node.meta] == [
            node.meta["effect"] for node in source.calls() if "effect" in node.meta
        ]
        issued = [node.meta["bucket"] for node in derived.calls() if node.target is ops.ALL_REDUCE]
        assert issued == sorted(issued)
        assert issued
    assert not [node for node in derive(source, Kind.FLUSH).calls() if node.target is ops.ALL_REDUCE]
