"""Regions are parts of the graph and nothing else: op by op they give eager's bits, whatever else happens to a step."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.lowering import compile_with, in_two_groups, keep_ops_whole, op_by_op
from tests.parity import assert_parity
from torch import Tensor, fx, nn

from wholestep import zoo
from wholestep.graph import ops
from wholestep.lower import Lower, Region, regions_of
from wholestep.zoo.case import ZooCase, seeded_generator

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"memory_budget": 0.3},
    "rotated": {"cross_iteration": "all"},
    "dynamic": {"dynamic_batch": True},
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch)
    keep_ops_whole(monkeypatch)
    monkeypatch.setattr(Lower.__init__, "__defaults__", (2,))


def lowered(case: ZooCase, optimizer: Any, **options: Any) -> Any:
    """Three steps, bit for bit those of eager; regions are small, so that there are many."""
    sizes = (4, 7, 16) if options.get("dynamic_batch") else (4,)
    step = assert_parity(case, optimizer, steps=3, batch_sizes=sizes, compile_options={"lower": "inductor", **options})
    assert regions_of(step.graph)
    assert all(region.is_compiled for region in regions_of(step.graph))
    step.graph.verify(deep=True)
    return step


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(options: str) -> None:
    assert lowered(zoo.get("custom_function"), "adamw_foreach", **OPTIONS[options]).num_captures == 1


def test_random_ops_that_run_again() -> None:
    step = lowered(zoo.get("checkpointed"), "adamw_fused")
    assert any("replay" in remark for remark in step.graph.remarks["lower"])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", zoo.CASES)
def test_the_zoo(name: str, options: str) -> None:
    lowered(zoo.get(name), "adamw_foreach", **OPTIONS[options])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_foreach", "sgd_fused"])
def test_several_groups_that_cross_iterations(optimizer: str) -> None:
    lowered(zoo.get("mlp"), in_two_groups(optimizer), cross_iteration="all")


class Pieces(nn.Module):
    """Pieces of a split and of an input, sizes, views of both, and a tuple of which one item is wanted later."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        left, middle, right = self.into(x).sin().split(4, dim=1)
        first, second = x.chunk(2, dim=1)
        mixed = self.norm(left * middle) + right * x.shape[0]
        return mixed.square().mean(), left.t(), right[:, 1:], first, second.exp()


def pieces() -> ZooCase:
    def make_batch(size: int, seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(size, 4, generator=seeded_generator(seed))}

    return ZooCase("pieces", Pieces, make_batch, lambda model, batch: model(batch["x"]))  # pyright: ignore


def pieces_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Any:
    optimizer.zero_grad()
    loss, *rest = model(batch["x"])
    loss.backward()
    optimizer.step()
    return loss, *(value.detach() for value in rest)


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_views_sizes_and_tuples_stay_behind(dynamic_batch: bool) -> None:
    step = assert_parity(
        pieces(),
        "sgd",
        steps=3,
        train_step=pieces_step,
        batch_sizes=(4, 6) if dynamic_batch else (4,),
        compile_options={"lower": "inductor", "dynamic_batch": dynamic_batch},
    )
    assert step.num_captures == 1
    inner = [node for region in regions_of(step.graph) for node in region.calls]
    assert any(ops.is_view(node.target) and isinstance(node.meta["val"], list | tuple) for node in inner)
    for region in regions_of(step.graph):
        for node in exports(region):
            source = node.args[0] if ops.getitem_index(node) is not None else node
            assert not ops.shares_memory(source.target)  # pyright: ignore
            assert isinstance(node.meta["val"], Tensor)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["checkpointed_reentrant", "custom_function"])
def test_sizes_are_inputs_of_a_region(name: str) -> None:
    """Inductor's cache asks for each symbol, and knows those only that are inputs by themselves."""
    step = lowered(zoo.get(name), "sgd", dynamic_batch=True)
    assert step.num_captures == 1
    used = [symbols_of(region.module.graph.nodes) for region in regions_of(step.graph)]
    assert any(used)
    for region, symbols in zip(regions_of(step.graph), used):
        inputs = [node.meta["val"] for node in region.module.graph.find_nodes(op="placeholder")]
        assert symbols <= {value.node.expr for value in inputs if isinstance(value, torch.SymInt)}


def symbols_of(nodes: Any) -> set[Any]:
    values = [node.meta.get("val") for node in nodes]
    sizes = [size for value in values if isinstance(value, Tensor) for size in (*value.shape, *value.stride())]
    return {
        symbol for size in (*values, *sizes) if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
    }


def exports(region: Region) -> list[fx.Node]:
    [returned] = region.module.graph.output_node().args
    assert isinstance(returned, Sequence)
    return list(returned)  # pyright: ignore


def test_no_region_has_an_op_twice_or_misses_one() -> None:
    plain = assert_parity(zoo.get("mlp"), "sgd", steps=1)
    step = lowered(zoo.get("mlp"), "sgd", memory_budget=1.0)
    inside = sum(ops.is_op(node) and not ops.is_view(node.target) for r in regions_of(step.graph) for node in r.calls)
    outside = [node for node in step.graph.calls() if ops.is_op(node) and not ops.is_view(node.target)]
    working = [node for node in plain.graph.calls() if ops.is_op(node) and not ops.is_view(node.target)]
    writes = [node for node in outside if node.target is torch.ops.aten.copy_.default]
    assert 0 < inside <= len(working)
    assert abs(inside + len(outside) - len(writes) - len(working)) <= len(writes)


def test_inputs_die_while_a_region_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward's inputs that nobody needs behind it are gone once it has dropped them, in generated code too."""
    alive: list[list[str]] = []

    def compile(module: fx.GraphModule, fake_mode: Any) -> Any:
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        run = op_by_op(module, fake_mode)

        def watched(inputs: list[Any]) -> Sequence[Any]:
            held = {name: weakref.ref(value) for name, value in zip(names, inputs) if isinstance(value, Tensor)}
            outputs = run(inputs)
            alive.append([name for name, reference in held.items() if reference() is not None])
            return outputs

        return watched

    compile_with(monkeypatch, compile)
    step = assert_parity(zoo.get("mlp"), "adamw_fused", steps=3, compile_options={"lower": "inductor"})
    calls = [node for node in step.graph.calls() if isinstance(node.target, Region)]
    assert len(alive) == 3 * len(calls)
    num_dying = 0
    for run in range(3):
        for call, names in zip(calls, alive[run * len(calls) :]):
            inputs: list[fx.Node] = call.args[0]  # pyright: ignore
            dying = {node.name for node in inputs if node.op == "call_function" and max(node.users) is call}
            assert not dying & set(names)
            num_dying += len(dying)
    assert num_dying > 0
