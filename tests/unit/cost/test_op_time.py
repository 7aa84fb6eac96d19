"""Op times: every call has one, equal ops are tried once, and trying leaves no trace; magnitudes only where huge."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.optim import SGD, Optimizer

from wholestep.capture import capture
from wholestep.cost import (
    DeviceModel,
    calibrate_device,
    estimated_times,
    measured_times,
    node_bytes,
    node_flops,
    op_time,
    product_dtype,
    trial,
)
from wholestep.cost.memory import tensors_in
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, ops
from wholestep.passes import DEFAULT_PIPELINE, run_passes
from wholestep.zoo import Batch, get
from wholestep.zoo.gpt import GPTConfig, make_case
from wholestep.zoo.optimizers import OPTIMIZERS

aten = torch.ops.aten
FUNCTIONAL_COLLECTIVES = torch.ops._c10d_functional
CPU = torch.device("cpu")
MODEL = DeviceModel(flops_per_us=1000.0, bytes_per_us=100.0, overhead_us=2.0)


def step_of(loss: Callable[[nn.Module, Batch], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return train_step


def zoo_graph(name: str, optimizer: str = "adamw", dynamic_dims: frozenset[tuple[int, int]] = frozenset()) -> StepGraph:
    case = get(name)
    model = case.build()
    args = (model, OPTIMIZERS[optimizer](model.parameters()), case.make_batch(4, 0))
    return capture(step_of(case.loss), args, {}, dynamic_dims=dynamic_dims).graph


def graph_of(target: Callable[..., Any], *args: Any, result: Any = None, **kwargs: Any) -> StepGraph:
    """A step graph of one call; tensors among the arguments become slots."""
    graph, slots = fx.Graph(), dict[str, Slot]()

    def lift(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [lift(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(slots)}")
        node.meta["val"] = value
        slots[node.name] = Slot(SlotKind.BATCH, node.name)
        return node

    node = graph.call_function(target, tuple(lift(arg) for arg in args), {key: lift(v) for key, v in kwargs.items()})
    node.meta |= {"val": result, "phase": Phase.FORWARD}
    graph.output({"outputs": (node,), "updates": {}, "results": {}})
    return StepGraph(fx.GraphModule(nn.Module(), graph), slots, None)


def only_call(graph: StepGraph) -> fx.Node:
    return next(graph.calls())


def trials(monkeypatch: pytest.MonkeyPatch, time_us: float | None = 7.0) -> list[fx.Node]:
    """Exchange the trial of an op for a fixed time; the list grows with every op that would have been tried."""
    tried: list[fx.Node] = []

    def try_us(node: fx.Node) -> float | None:
        tried.append(node)
        return time_us

    monkeypatch.setattr(op_time, "try_us", try_us)
    monkeypatch.setattr(op_time, "calibrate_device", lambda *_: MODEL)
    return tried


def is_free(node: fx.Node) -> bool:
    """Said differently than in the code: only what makes a tensor, or reads a number out of one, takes time."""
    if ops.getitem_index(node) is not None or ops.is_view(node.target):
        return True
    return not list(tensors_in(node.meta["val"])) and node.target is not aten._local_scalar_dense.default


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("gpt", "adamw"), ("resnet", "sgd_foreach"), ("lstm", "sgd_plain")),
        pytest.param("t5", "adamw_fused", marks=pytest.mark.slow),
        pytest.param("llama", "sgd_plain", marks=pytest.mark.slow),
    ],
)
def test_every_op_of_the_zoo_accepts_made_up_data(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the backward of the LSTM, whose real kernel would crash on what the fake one says its forward keeps."""
    graph, tried = zoo_graph(name, optimizer), dict[str, float | None]()

    def try_us(node: fx.Node) -> float | None:
        tried[node.name] = trial.try_us(node)
        return tried[node.name]

    monkeypatch.setattr(op_time, "try_us", try_us)
    measured, estimated = measured_times(graph, budget_s=60), estimated_times(graph, MODEL)
    assert tried
    assert [node for node, time_us in tried.items() if time_us is None] == []
    assert any("rnn_layer_backward" in node for node in tried) is (name == "lstm")
    for times in (measured, estimated):
        assert list(times) == list(graph.calls())
        assert [node for node, time_us in times.items() if (time_us == 0) is not is_free(node)] == []


def test_an_op_is_tried_once_however_many_layers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tried: list[int] = []
    for layers in (2, 5):
        case = make_case("gpt", GPTConfig(layers=layers))
        model = case.build()
        args = (model, SGD(model.parameters(), lr=0.1, foreach=False), case.make_batch(2, 0))
        graph = capture(step_of(case.loss), args, {}).graph
        tried = trials(monkeypatch)
        times = measured_times(graph, budget_s=60)
        assert len(tried) < sum(time_us > 0 for time_us in times.values()) / 2
        num_tried.append(len(tried))
    assert num_tried[0] == num_tried[1]


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ((torch.ones(4, 6), torch.ones(6), {"alpha": 1}), True),
        ((torch.zeros(4, 6), torch.ones(6), {"alpha": 1}), True),
        ((torch.ones(4, 6), torch.ones(6), {"alpha": 2}), False),
        ((torch.ones(4, 6), torch.ones(6), {"alpha": 1.0}), False),
        ((torch.ones(5, 6), torch.ones(6), {"alpha": 1}), False),
        ((torch.ones(6, 4).t(), torch.ones(6), {"alpha": 1}), False),
        ((torch.ones(4, 6), torch.ones(6, dtype=torch.float64), {"alpha": 1}), False),
        ((torch.ones(4, 6), torch.ones(6, device="meta"), {"alpha": 1}), False),
    ],
)
def test_what_makes_two_calls_the_same(changed: tuple[Any, Any, dict[str, Any]], is_same: bool) -> None:
    def signature(left: torch.Tensor, right: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        return op_time._signature(only_call(graph_of(aten.add.Tensor, left, right, **kwargs)))

    assert (signature(torch.ones(4, 6), torch.ones(6), {"alpha": 1}) == signature(*changed)) is is_same


def test_reading_one_tensor_twice_is_not_reading_two() -> None:
    graph = graph_of(aten.mul.Tensor, torch.ones(4), torch.ones(4))
    node = only_call(graph)
    two = op_time._signature(node)
    node.args = (node.args[0], node.args[0])
    assert op_time._signature(node) != two


def test_random_generators_parameters_and_the_graph_stay_as_they_are() -> None:
    case = get("gpt")  # with dropout
    model = case.build()
    args = (model, OPTIMIZERS["adamw"](model.parameters()), case.make_batch(4, 0))
    graph = run_passes(capture(step_of(case.loss), args, {}).graph, DEFAULT_PIPELINE)
    assert not graph.is_functional
    text, seed_state = str(graph), torch.get_rng_state()
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        measured_times(graph, budget_s=60)
    assert torch.equal(torch.get_rng_state(), seed_state)
    assert str(graph) == text
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_an_in_place_op_writes_to_made_up_data_and_starts_each_repeat_from_the_same() -> None:
    real, seen = torch.full((8,), 5.0), list[float]()

    def halve_(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.sum().item())
        return values.mul_(0.5)

    node = only_call(graph_of(aten.mul_.Tensor, real, 0.5, result=real))
    assert trial.try_us(node) is not None
    assert torch.equal(real, torch.full((8,), 5.0))
    values = torch.ones(8)
    trial.clock_us(lambda: halve_(values), CPU, [values])
    assert len(seen) > 3
    assert set(seen) == {8.0}


def test_a_large_product_costs_more_than_a_small_sum() -> None:
    product = graph_of(aten.mm.default, torch.ones(600, 600), torch.ones(600, 600), result=torch.ones(600, 600))
    total = graph_of(aten.add.Tensor, torch.ones(4), torch.ones(4), result=torch.ones(4))
    device = calibrate_device(CPU)
    for times in (measured_times, lambda graph: estimated_times(graph, device)):
        assert times(product)[only_call(product)] > 10 * times(total)[only_call(total)]


def test_the_estimate_is_the_slower_of_arithmetic_and_memory_plus_overhead() -> None:
    square = torch.ones(100, 100)
    product = only_call(graph := graph_of(aten.mm.default, square, square, result=square))
    assert estimated_times(graph, MODEL) == {product: 2 * 100**3 / 1000 + 2}
    exponential = only_call(graph := graph_of(aten.exp.default, torch.ones(1000), result=torch.ones(1000)))
    assert (node_flops(exponential), node_bytes(exponential).read) == (0, 4000)
    assert estimated_times(graph, MODEL) == {exponential: 8000 / 100 + 2}


def test_collectives_cost_nothing_here() -> None:
    tensor = torch.ones(1000)
    graph = graph_of(FUNCTIONAL_COLLECTIVES.all_reduce.default, tensor, "sum", "0", result=tensor)
    assert set(estimated_times(graph, MODEL).values()) == set(measured_times(graph).values()) == {0.0}


def test_an_op_that_refuses_made_up_data_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.ones(10, dtype=torch.int64)
    graph = graph_of(aten.floor_divide.default, zeros, zeros, result=zeros)
    monkeypatch.setattr(op_time, "calibrate_device", lambda *_: MODEL)
    assert trial.try_us(only_call(graph)) is None  # made-up integers are 0
    assert measured_times(graph) == estimated_times(graph, MODEL)


def reader_of_item(target: Callable[..., Any], *args: Any, result: Any) -> fx.Node:
    """A call that reads the second result of another one, through a detach."""
    graph = graph_of(target, *args, result=result)
    node = only_call(graph)
    with graph.graph.inserting_after(node):
        item = graph.graph.call_function(operator.getitem, (node, 1))
    with graph.graph.inserting_after(item):
        detached = graph.graph.call_function(aten.detach.default, (item,))
    with graph.graph.inserting_after(detached):
        reader = graph.graph.call_function(aten.neg.default, (detached,))
    for new in (item, detached, reader):
        new.meta |= {"val": result[1], "phase": Phase.FORWARD}
    return reader


def test_workspace_comes_from_the_op_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, values = torch.ones(0, dtype=torch.int64), torch.ones(6)
    reader = reader_of_item(aten.sort.default, torch.ones(6), result=(values, empty))  # a fake value that is wrong
    [argument] = trial._Data().arguments_of(reader)[0]
    assert sorted(argument.tolist()) == [0, 1, 2, 3, 4, 5]
    assert trial.try_us(reader) is not None
    monkeypatch.setattr(trial, "clock_us", lambda *_: pytest.fail("was run"))
    pair = [torch.ones(4, dtype=torch.int64)] * 2
    collective = FUNCTIONAL_COLLECTIVES.all_reduce_coalesced.default
    assert trial.try_us(reader_of_item(collective, pair, "sum", "0", result=pair)) is None


def test_what_would_do_harm_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "clock_us", lambda *_: pytest.fail("was run"))
    tensor, index = torch.ones(2, 3, 8, 4), torch.ones((), dtype=torch.int64)
    attention = aten._scaled_dot_product_efficient_attention_backward.default
    for graph in (
        graph_of(FUNCTIONAL_COLLECTIVES.all_reduce.default, tensor, "sum", "0", result=tensor),
        graph_of(aten._assert_async.msg, torch.ones((), dtype=torch.bool), "made up"),
        graph_of(aten.neg.default, torch.ones(0), result=torch.ones(0)),
        graph_of(attention, *[tensor] * 4, None, tensor, tensor, index, index, 0.1, [True] * 4, result=[tensor] * 4),
    ):
        assert trial.try_us(only_call(graph)) is None


def test_what_the_budget_does_not_reach_is_estimated_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = zoo_graph("mlp")
    estimated = estimated_times(graph, MODEL)
    tried = trials(monkeypatch)
    assert measured_times(graph, budget_s=0.0) == estimated
    assert not tried
    clock = iter(range(1000))  # two readings before the first trial: one op is tried within 1.5 s
    monkeypatch.setattr(op_time.time, "perf_counter", lambda: float(next(clock)))
    times = measured_times(graph, budget_s=1.5)
    assert len(tried) == 1
    signatures = {node: op_time._signature(node) for node, time_us in estimated.items() if time_us > 0}
    counts = Counter(signatures.values())
    assert tried[0] == max(signatures, key=lambda node: estimated[node] * counts[signatures[node]])
    alike = [node for node, signature in signatures.items() if signature == signatures[tried[0]]]
    ratio = 7.0 / estimated[tried[0]]
    for node, time_us in times.items():
        assert time_us == pytest.approx(7.0 if node in alike else estimated[node] * ratio)


def test_made_up_data_has_the_layout_of_the_fake_value_and_valid_values() -> None:
    for fake in (torch.ones(3, 4).t(), torch.ones(4).expand(3, 4), torch.ones(6, 8)[::2, 1::3], torch.ones(())):
        made = trial._made_up(fake, 1)
        assert (made.shape, made.stride(), made.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert made.min() >= 0
        assert made.max() <= 1
    assert trial._made_up(torch.ones(5, dtype=torch.bool), 1).all()
    assert trial._made_up(torch.ones(5, dtype=torch.int64), 1).tolist() == [0] * 5
    assert trial._made_up(torch.ones(5, dtype=torch.int64), 3).tolist() == [0, 1, 2, 0, 1]


def test_indices_are_spread_where_their_range_is_known() -> None:
    index = torch.zeros(100, dtype=torch.int64)
    weight, grad = torch.ones(20, 8), torch.ones(100, 8)
    assert trial._num_rows(only_call(graph_of(aten.embedding.default, weight, index))) == 8
    assert trial._num_rows(only_call(graph_of(aten.index_put_.default, weight, [index], grad, True))) == 8
    assert trial._num_rows(only_call(graph_of(aten.embedding_dense_backward.default, grad, index, 5, -1, False))) == 1
    backward = only_call(graph_of(aten.embedding_dense_backward.default, grad, index, 5, -1, False, result=weight))
    assert trial.try_us(backward) is not None


def test_symbolic_sizes_cost_what_the_captured_ones_do() -> None:
    fixed, symbolic = zoo_graph("mlp"), zoo_graph("mlp", dynamic_dims=frozenset({(2, 0), (3, 0)}))
    sizes = [node.meta["val"].shape[0] for node in symbolic.placeholders().values() if "batch" in node.name]
    assert any(isinstance(size, torch.SymInt) for size in sizes)
    totals = [sum(estimated_times(graph, MODEL).values()) for graph in (fixed, symbolic)]
    assert totals[0] == totals[1] > 0
    times = measured_times(symbolic, budget_s=60)
    assert {node for node, time_us in times.items() if time_us > 0} == {
        node for node, time_us in estimated_times(symbolic, MODEL).items() if time_us > 0
    }


def test_a_device_has_positive_figures_in_the_dtype_of_the_products() -> None:
    graph = zoo_graph("mlp")
    assert product_dtype(graph.calls()) is torch.float32
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    assert product_dtype(graph_of(aten.mm.default, half, half, result=half).calls()) is torch.bfloat16
    assert product_dtype(graph_of(aten.neg.default, half, result=half).calls()) is torch.float32
    device = calibrate_device(CPU, torch.float64)
    assert min(device.flops_per_us, device.bytes_per_us, device.overhead_us) > 0
