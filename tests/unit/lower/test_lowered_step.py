"""Lowered steps train like eager ones, within rounding; a few of them through Inductor itself."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lowering import DOUBLE, compile_with, in_double, in_two_groups, needs_compiler, op_by_op
from tests.parity import assert_parity, default_step
from torch import Tensor, fx, nn
from torch.profiler import profile

import wholestep
from wholestep import _inductor_torch, zoo
from wholestep.errors import WholestepError
from wholestep.graph import Phase, ops
from wholestep.lower import Lower, Region, region, regions_of
from wholestep.zoo import Batch, ZooCase, gpt, mlp
from wholestep.zoo.optimizers import OPTIMIZERS

aten = torch.ops.aten
LOWERED: dict[str, Any] = {"lower": "inductor"}
# Normalised and rotated in float32 whatever the model's dtype is.
LOOSE: dict[str, dict[str, Any]] = {name: {"rtol": 1e-5, "atol": 1e-6} for name in ("llama", "t5")}


@pytest.fixture
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch)


class Tied(nn.Module):
    """Embedding and head in one, a norm and dropout: what a language model has, but small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.seen: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.mix(self.norm(self.embedding(tokens)))), 0.2, self.training)
        self.seen += hidden.detach().mean((0, 1))
        return F.linear(F.dropout(hidden, 0.1, self.training), self.embedding.weight)


def tied() -> ZooCase:
    batch: Any = gpt.make_case("tied", gpt.GPTConfig(vocab_size=20, context=6, width=8)).make_batch
    return in_double(ZooCase("tied", Tied, batch, gpt.loss))


def trained(case: ZooCase, optimizer: Any, **options: Any) -> Any:
    """Three steps like eager's: losses, parameters, gradients, state, buffers and random streams."""
    limits = LOOSE.get(case.name, DOUBLE)
    sizes = options.pop("batch_sizes", (4,))
    step = assert_parity(
        in_double(case), optimizer, steps=3, batch_sizes=sizes, compile_options={**LOWERED, **options}, **limits
    )
    assert regions_of(step.graph)
    assert all(item.is_compiled for item in regions_of(step.graph))
    return step


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("gpt", "adamw_fused", {}),
        ("mlp", "adamw_foreach", {"cross_iteration": "all"}),
        ("mlp", "sgd", {"dynamic_batch": True, "batch_sizes": (4, 7, 16)}),
        ("custom_function", "sgd_foreach", {"chunk_loss": 2}),
    ],
)
@pytest.mark.usefixtures("_without_inductor")
def test_decomposed_ops_compute_the_same(name: str, optimizer: str, options: dict[str, Any]) -> None:
    step = trained(zoo.get(name), optimizer, **options)
    assert step.num_captures == 1
    step.graph.verify(deep=True)
    assert not any(_has_leftovers(item) for item in regions_of(step.graph))


def _has_leftovers(item: Region) -> bool:
    """Whether Inductor would have to break ops down that it wants broken down beforehand."""
    targets = {node.target for node in item.calls}
    return not targets.isdisjoint({aten.t.default, aten.gelu.default, aten.native_layer_norm.default})


@pytest.mark.usefixtures("_without_inductor")
def test_a_decomposition_keeps_module_phase_and_gradients() -> None:
    case = tied()
    plain = assert_parity(case, "sgd", steps=1, **DOUBLE)
    step = assert_parity(case, "sgd", steps=1, compile_options=LOWERED, **DOUBLE)
    assert set(step.graph.gradients) == set(plain.graph.gradients)
    inner = [node for item in regions_of(step.graph) for node in item.calls]
    assert {"norm", "mix"} <= {node.meta.get("fqn") for node in inner if node.meta["phase"] is Phase.FORWARD}


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_foreach"])
@pytest.mark.usefixtures("_without_inductor")
def test_tied_weights_and_several_groups(optimizer: str) -> None:
    for options in ({}, {"cross_iteration": "all"}):
        trained(tied(), in_two_groups(optimizer), **options)


@pytest.mark.usefixtures("_without_inductor")
def test_a_budget_plans_for_fused_ops() -> None:
    case = mlp.make_case("deep", mlp.MLPConfig(hidden_layers=6))
    step = trained(case, "sgd_plain", memory_budget=0.0, batch_sizes=(512,))
    assert step.plan.memory is not None
    assert step.plan.memory.peak_bytes < step.plan.memory.unlimited_peak_bytes


@pytest.mark.usefixtures("_without_inductor")
def test_the_first_steps_can_be_verified() -> None:
    trained(tied(), "adamw", verify=2)


def test_a_region_that_cannot_be_compiled_runs_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile(module: fx.GraphModule, fake_mode: Any) -> Any:
        if any(node.meta["phase"] is Phase.BACKWARD for node in module.graph.nodes if node.op == "call_function"):
            raise RuntimeError("no compiler today\nand more about it")
        return op_by_op(module, fake_mode)

    compile_with(monkeypatch, compile)
    with caplog.at_level(logging.WARNING):
        step = assert_parity(tied(), "adamw", steps=3, compile_options={**LOWERED, "cross_iteration": "all"}, **DOUBLE)
    warnings = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    assert warnings == ["region 'backward' is not compiled and runs op by op: RuntimeError: no compiler today"]
    states = {item.name: item.failure for item in regions_of(step.graph)}
    assert states["backward"] == "RuntimeError: no compiler today"
    assert "RuntimeError: no compiler today" in step.explain()


@pytest.mark.usefixtures("_without_inductor")
def test_explain_tells_regions_and_breaks() -> None:
    plain = assert_parity(in_double(zoo.get("mlp")), "sgd", steps=1)
    step = trained(zoo.get("mlp"), "sgd")
    section = step.explain().split("\nLowering\n", 1)[1].split("\n\n", 1)[0]
    rows = [line.split() for line in section.splitlines()]
    num_ops = {item.name: str(item.num_ops) for item in regions_of(step.graph)}
    assert ["forward", "forward", num_ops["forward"], "compiled"] in rows
    assert ["backward", "backward", num_ops["backward"], "compiled"] in rows
    assert "bernoulli and 1 more (forward): it draws random numbers, in eager's order." in section
    assert "\nLowering\n" not in plain.explain()
    # What is in regions is counted like anything else.
    flops = [line for text in (plain.explain(), step.explain()) for line in text.splitlines() if "Arithmetic" in line]
    assert flops[0].split()[1] == flops[1].split()[1]


@pytest.mark.usefixtures("_without_inductor")
def test_a_lowered_graph_prints_and_reports(tmp_path: Any) -> None:
    step = trained(zoo.get("mlp"), "sgd", cross_iteration="all")
    assert "= regions.backward([" in str(step.graph)
    assert "backward" in {item.name for item in regions_of(step.graph)}
    step.report(tmp_path / "report.html")
    assert "Lowering" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("_without_inductor")
def test_regions_have_their_names_in_profiles() -> None:
    case = zoo.get("mlp")
    model = case.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = wholestep.compile(default_step(case), lower="inductor")
    step(model, optimizer, case.make_batch(4, 0))
    with profile() as profiled:
        step(model, optimizer, case.make_batch(4, 1))
    assert {"wholestep::forward", "wholestep::backward"} <= {event.key for event in profiled.key_averages()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"cross_iteration": "all"}])
def test_what_the_compiler_assumes_about_sizes_is_guarded(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Also what it assumes for the graph of the last call, which is not run before."""

    def compile(module: fx.GraphModule, fake_mode: Any) -> Any:
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            sizes = [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ())
            _ = [bool(size < 10) for size in sizes if isinstance(size, torch.SymInt)]
        return op_by_op(module, fake_mode)

    compile_with(monkeypatch, compile)
    case = zoo.get("mlp")
    model = case.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = wholestep.compile(default_step(case), lower="inductor", dynamic_batch=True, **options)
    for size in (4, 7, 9):
        step(model, optimizer, case.make_batch(size, 0))
    assert step.num_captures == 1
    step(model, optimizer, case.make_batch(12, 0), last=True)
    assert step.num_captures == 2
    assert "sizes [12] break what the captured step assumes" in step.recompile_reasons[0]


@pytest.mark.parametrize("lower", ["triton", "", None, True])
def test_an_unknown_way_of_lowering_is_refused(lower: Any) -> None:
    with pytest.raises(WholestepError, match="lower is 'inductor', 'none' or 'auto', not"):
        wholestep.compile(lambda: None, lower=lower)


@pytest.mark.parametrize("reason", ["", "there is no C++ compiler here"])
@pytest.mark.usefixtures("_without_inductor")
def test_auto_lowers_where_there_is_a_compiler(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_inductor_torch, "why_no_compiler", lambda *, is_cuda: reason)
    with caplog.at_level("INFO", "wholestep"):
        step = assert_parity(tied(), "sgd", steps=2, compile_options={"lower": "auto"}, **DOUBLE)
    assert bool(regions_of(step.graph)) == (not reason)
    assert (f"is not lowered: {reason}" in caplog.text) == bool(reason)


def test_a_machine_without_a_compiler_is_told_apart() -> None:
    with _inductor_torch.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        _inductor_torch.cpp_builder.cpp_compiler_search.cache_clear()
        assert _inductor_torch.why_no_compiler(is_cuda=False) == "there is no C++ compiler here"
    _inductor_torch.cpp_builder.cpp_compiler_search.cache_clear()


def test_op_by_op_takes_inputs_in_any_layout() -> None:
    """A region before may have been compiled, and have chosen channels last."""
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(2, 3, 4, 4)
    graph.output((graph.call_function(aten.view.default, (source, [2, 48])),))
    lone = Region("lone", fx.GraphModule({}, graph), None)
    value = torch.randn(2, 3, 4, 4)
    inputs: list[Any] = [value.to(memory_format=torch.channels_last)]
    assert torch.equal(lone._op_by_op(inputs)[0], value.view(2, 48))
    assert inputs == []


@needs_compiler
def test_inductor_trains_like_eager_and_compiles_equal_regions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    genuine = _inductor_torch.compile_functional

    def counted(module: fx.GraphModule, *args: Any) -> Any:
        compiled.append(len(module.graph.nodes))
        return genuine(module, *args)

    monkeypatch.setattr(_inductor_torch, "compile_functional", counted)
    monkeypatch.setattr(region, "_outcomes", {})
    first = trained(tied(), in_two_groups("adamw_fused"))
    assert len(compiled) == len(regions_of(first.graph)) == 2
    trained(tied(), in_two_groups("adamw_fused"))
    assert len(compiled) == 2


@needs_compiler
@pytest.mark.slow
def test_inductor_in_single_precision() -> None:
    step = assert_parity(zoo.get("mlp"), "sgd", steps=3, compile_options=LOWERED, rtol=1.3e-6, atol=1e-5)
    assert all(item.is_compiled for item in regions_of(step.graph))


@needs_compiler
def test_inductor_with_a_dynamic_batch() -> None:
    case = mlp.make_case("dry", mlp.MLPConfig(dropout=0.0))
    assert trained(case, "sgd", dynamic_batch=True, batch_sizes=(4, 7, 16)).num_captures == 1


@needs_compiler
def test_what_inductor_returns_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is computed, or the same thing twice."""
    monkeypatch.setattr(Lower.__init__, "__defaults__", (3,))

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

    def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
        optimizer.zero_grad()
        x, y = batch["x"], (batch["x"] * model.weight).sin()
        y.square().mean().backward()
        optimizer.step()
        y = y.detach()
        return x + 0, x.clone(), y, y * 1, y.t().clone(), y.clone(), x / 1, torch.ones(4, 4), torch.ones(4, 4), y.t()

    case = ZooCase("idle", Idle, lambda size, seed: {"x": torch.randn(size, 4)}, lambda model, batch: batch["x"])
    compiled = assert_parity(in_double(case), "sgd", steps=2, train_step=step, compile_options=LOWERED, **DOUBLE)
    assert all(item.is_compiled for item in regions_of(compiled.graph))
    model, batch = Idle().double(), {"x": torch.randn(4, 4).double()}
    *returned, view = compiled(model, torch.optim.SGD(model.parameters(), lr=0.05), batch)
    pointers = [value.data_ptr() for value in (*returned, batch["x"], model.weight)]
    assert len(set(pointers)) == len(pointers)
    assert view.data_ptr() == returned[2].data_ptr()
    assert regions_of(compiled.graph)
    assert not any(ops.has_effect(node) for item in regions_of(compiled.graph) for node in item.calls)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"memory_budget": 0.3}, {"cross_iteration": "all"}, {"dynamic_batch": True, "batch_sizes": (4, 7, 16)}],
    ids=["plain", "budget", "rotated", "dynamic"],
)
@pytest.mark.parametrize("name", zoo.CASES)
def test_the_zoo_through_inductor(name: str, options: dict[str, Any]) -> None:
    # Adam makes much of the rounding in small gradients.
    trained(zoo.get(name), "sgd" if name in LOOSE else "adamw_fused", **options)
