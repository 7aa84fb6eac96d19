"""Updates that read learning rates and step counts become regions, and those write where the old values are."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lowering import DOUBLE, compile_with, in_double, needs_compiler, op_by_op
from tests.parity import assert_parity, differences, snapshot
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import wholestep
from wholestep import _inductor_torch, zoo
from wholestep.graph import Phase, ops
from wholestep.lower import Lower, Region, WriteRegions, region, regions_of
from wholestep.lower.numbers import pack
from wholestep.zoo.case import ZooCase, seeded_generator
from wholestep.zoo.optimizers import OPTIMIZERS, two_groups

aten = torch.ops.aten
# RAdam decides by a step count, and is not captured.
NOT_FUSED = [name for name in OPTIMIZERS if "fused" not in name and name != "radam"]
MakeOptimizer = Callable[[nn.Module], Optimizer]


@pytest.fixture
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def clipped_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def in_groups(name: str) -> MakeOptimizer:
    return lambda model: OPTIMIZERS[name](two_groups(model))


def trained(make: MakeOptimizer, *, dtype: torch.dtype = torch.float64, limits: Any = DOUBLE, **options: Any) -> Any:
    """Five steps with another learning rate each, compared with eager after every one; returns the compiled step."""
    eager = network(dtype)
    models = (eager, copy.deepcopy(eager))
    optimizers = [make(model) for model in models]
    schedulers = [ExponentialLR(optimizer, 0.6) for optimizer in optimizers]
    compiled = wholestep.compile(clipped_step, lower="inductor", **options)
    for number in range(5):
        x = torch.randn(5, 4, generator=seeded_generator(number)).to(dtype)
        clipped_step(models[0], optimizers[0], x)
        compiled(models[1], optimizers[1], x)
        seen = [snapshot(model, optimizer) for model, optimizer in zip(models, optimizers)]
        assert differences(*seen, **limits) == []
        for scheduler in schedulers:
            scheduler.step()
    assert compiled.num_captures <= 2
    return compiled


def updates(step: Any) -> list[Region]:
    calls = [node for node in step.graph.calls() if node.meta["phase"] is Phase.OPTIMIZER]
    return [node.target for node in calls if isinstance(node.target, Region)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NOT_FUSED)
@pytest.mark.usefixtures("_without_inductor")
def test_every_optimizer_follows_its_schedule(name: str) -> None:
    step = trained(in_groups(name))
    step.graph.verify(deep=True)
    assert updates(step)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "sgd_nesterov", "adamw_amsgrad"])
@pytest.mark.usefixtures("_without_inductor")
def test_an_update_is_one_region_that_writes_in_place(name: str) -> None:
    step = trained(in_groups(name))
    [update] = updates(step)
    num_written = sum("step" not in node.name for node in step.graph.placeholders().values() if is_state(step, node))
    assert len(update.written) == num_written
    assert len(update.module.graph.output_node().args[0]) == 6  # pyright: ignore  # clipped gradients
    packs = [node for node in step.graph.calls() if node.target is pack]
    assert len(packs) == 1
    assert not any(node.target is aten.copy_.default for node in step.graph.calls())


def is_state(step: Any, node: fx.Node) -> bool:
    return step.graph.slot_of(node).kind in ("param", "state")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "sgd"])
@pytest.mark.usefixtures("_without_inductor")
def test_updates_that_cross_iterations(name: str) -> None:
    trained(in_groups(name), cross_iteration="all")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw", "adamw_foreach"])
@pytest.mark.usefixtures("_without_inductor")
def test_short_floats_are_computed_in_long_ones(name: str) -> None:
    """150 times 0.997 is 150 in bfloat16, but 149 if 0.997 is rounded to it first."""

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1, foreach=name.endswith("foreach"))

    trained(make, dtype=torch.bfloat16, limits={"rtol": 2**-7, "atol": 1e-2})
    model = network(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(150.0)
        parameter.grad = torch.zeros_like(parameter)
    step = wholestep.compile(lambda model, optimizer: optimizer.step(), lower="inductor")
    step(model, make(model))
    assert updates(step)
    assert all(bool((parameter == 150.0).all()) for parameter in model.parameters())


@pytest.mark.usefixtures("_without_inductor")
def test_what_has_nothing_to_be_fused_with_stays() -> None:
    step = assert_parity(
        in_double(zoo.get("mlp")), "sgd_plain", steps=2, compile_options={"lower": "inductor"}, **DOUBLE
    )
    assert not updates(step)
    assert not any(node.target is pack for node in step.graph.calls())


def test_packed_numbers_are_doubles() -> None:
    packed = pack([0.1, 1 - 1e-12], torch.device("cpu"))
    assert packed.dtype is torch.float64
    assert packed.tolist() == [0.1, 1 - 1e-12]


class Memory(nn.Module):
    """Its backward needs what a buffer was before the forward changed it."""

    def __init__(self, is_needed_later: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.ones(4))
        self.seen: Tensor
        self.is_needed_later = is_needed_later

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.weight)
        scale = self.seen.clone()
        self.seen.mul_(0.9).add_(hidden.detach().mean(0).sin().cos().exp())
        return hidden * scale if self.is_needed_later else hidden


@pytest.mark.parametrize("is_needed_later", [True, False])
@pytest.mark.usefixtures("_without_inductor")
def test_a_slot_is_written_once_nobody_needs_it(is_needed_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lower.__init__, "__defaults__", (3,))
    case = ZooCase(
        "memory",
        lambda: Memory(is_needed_later).double(),
        lambda size, seed: {"x": torch.randn(size, 4, generator=seeded_generator(seed)).double()},
        lambda model, batch: F.softplus(model(batch["x"])).mean(),
    )
    step = assert_parity(case, "adamw", steps=3, compile_options={"lower": "inductor"}, **DOUBLE)
    forward = next(item for item in regions_of(step.graph) if item.name == "forward")
    names = [node.name for node in forward.module.graph.find_nodes(op="placeholder")]
    assert ("buffer_seen" in {names[index] for index in forward.written}) is not is_needed_later


def test_a_region_that_writes_has_effects() -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(2)
    copied = graph.call_function(aten.copy_.default, (source, graph.call_function(aten.sin.default, (source,))))
    graph.output(())
    module = fx.GraphModule({}, graph)
    call = fx.Graph().call_function(Region("writes", module, None, frozenset({0})), ())
    assert ops.has_effect(call)
    assert not ops.has_effect(fx.Graph().call_function(Region("reads", module, None), ()))
    assert copied.target is aten.copy_.default
    assert str(WriteRegions()) == "write_regions"


def test_regions_are_dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_with(monkeypatch)
    monkeypatch.setenv("WHOLESTEP_DUMP_DIR", str(tmp_path))
    step = trained(in_groups("adamw"))
    files = {path.stem: path.read_text() for path in next(tmp_path.iterdir()).joinpath("regions").iterdir()}
    assert files.keys() == {item.name for item in regions_of(step.graph)}
    [update] = updates(step)
    text = files[update.name]
    assert f"def {update.name}(" in text
    assert text.count("torch.ops.aten.copy_.default(") == len(update.written)
    names: dict[str, Any] = {}
    exec(text, names)
    inputs = [node.meta["val"] for node in update.module.graph.find_nodes(op="placeholder")]
    with update.fake_mode:
        assert len(names[update.name](*inputs)) == len(update.module.graph.output_node().args[0])  # pyright: ignore


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("name", ["adamw", "adamw_foreach"])
def test_inductor_compiles_an_update_once_for_all_learning_rates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[fx.GraphModule] = []
    genuine = _inductor_torch.compile_functional

    def counted(module: fx.GraphModule, *args: Any) -> Any:
        phases = {node.meta["phase"] for node in module.graph.nodes if node.op == "call_function"}
        if phases != {Phase.OPTIMIZER}:  # those are compiled elsewhere
            return op_by_op(module, args[0]), None
        compiled.append(module)
        return genuine(module, *args)

    monkeypatch.setattr(_inductor_torch, "compile_functional", counted)
    monkeypatch.setattr(region, "_outcomes", {})
    step = trained(in_groups(name))
    [update] = updates(step)
    assert update.is_compiled
    assert len(compiled) == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_FUSED)
def test_every_optimizer_through_inductor(name: str) -> None:
    assert all(item.is_compiled for item in updates(trained(in_groups(name))))
