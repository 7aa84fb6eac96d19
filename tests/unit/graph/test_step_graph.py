"""What a step graph says about the step it stands for, and what its edits leave as they found it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, mse_step, pair, small_world
from torch import Tensor, fx, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer

from wholestep.capture import Capture, capture, tree
from wholestep.errors import GraphError
from wholestep.graph import PassRecord, Phase, Slot, SlotKind, StepGraph, ops
from wholestep.passes import Pipeline, run_passes

aten = torch.ops.aten
X, Y = pair()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # line: count
        hidden = self.inner(x)  # line: inner
        return torch.relu(hidden) + x  # line: relu


class Model(nn.Module):
    """Two layers and a head whose weight is the second layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[1].get_parameter("inner.weight")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))[:, :3]  # line: head


def clipped_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor], scale: float) -> Tensor:
    """Two backward passes, clipping between backward and update."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(batch["x"]), batch["y"])  # line: loss
    (loss * scale).backward()
    F.l1_loss(model(batch["x"]), batch["y"]).backward()
    clip_grad_norm_(model.parameters(), 0.1, foreach=False)  # line: clip
    optimizer.step()  # line: update
    return loss


def arguments() -> tuple[Any, ...]:
    model = Model()
    optimizer = Adam([*model.layers.parameters()], lr=0.01, foreach=False)
    return model, optimizer, {"x": X.clone(), "y": Y.clone()}, 2.0


def captured(*args: Any) -> Capture:
    return capture(clipped_step, args, {})


@pytest.fixture(name="original", scope="module")
def _original() -> StepGraph:
    return captured(*arguments()).graph


@pytest.fixture(name="graph")
def _graph(original: StepGraph) -> StepGraph:
    return original.copy()


def line(marker: str) -> str:
    """`file:line` of the line that a comment in this file marks."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    [number] = [index for index, text in enumerate(lines, 1) if text.endswith(f"# line: {marker}")]
    return f"test_step_graph.py:{number}"


def values_of(found: Capture, graph: StepGraph, *args: Any) -> dict[fx.Node, Any]:
    """The value of every node when the graph runs on what its slots hold now."""
    for optimizer, parameter, entries in found.initial_state:
        optimizer.state[parameter] = entries
    leaves, _ = tree.flatten((args, {}))
    interpreter = fx.Interpreter(graph.module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*(found.bindings[slot_id].read(leaves) for slot_id in graph.placeholders()))
    return interpreter.env


def calls_at(graph: StepGraph, marker: str) -> list[fx.Node]:
    return [node for node in graph.calls() if node.meta.get("source") == line(marker)]


# Slots


def test_inputs_are_slots_with_kinds_and_names_in_a_fixed_order(graph: StepGraph) -> None:
    state = [
        f"state.{name}.{key}"
        for name in ("layers.0.inner.weight", "layers.0.inner.bias", "layers.1.inner.weight", "layers.1.inner.bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    assert list(graph.placeholders()) == [
        "param.layers.0.inner.weight",
        "param.layers.0.inner.bias",
        "param.layers.1.inner.weight",
        "param.layers.1.inner.bias",
        "buffer.layers.0.seen",
        "buffer.layers.1.seen",
        *state,
        "lr.0",
        "batch.batch['x']",
        "batch.batch['y']",
    ]
    assert list(graph.slots) == [node.name for node in graph.placeholders().values()]


def test_a_tied_weight_is_one_slot_with_aliases(graph: StepGraph) -> None:
    slots = {slot.name: slot for slot in graph.slots_of_kind(SlotKind.PARAM)}
    assert slots["layers.1.inner.weight"].aliases == ("head.weight",)
    assert "head.weight" not in slots
    assert slots["layers.0.inner.weight"].aliases == ()


def test_slots_are_found_by_id_by_kind_and_by_node(graph: StepGraph) -> None:
    node = graph.placeholder("state.layers.0.inner.bias.exp_avg")
    assert graph.slot_of(node) == Slot(SlotKind.STATE, "layers.0.inner.bias", "exp_avg")
    assert graph.slot_of(next(graph.calls())) is None
    assert [str(slot) for slot in graph.slots_of_kind(SlotKind.LR, SlotKind.BUFFER)] == [
        "buffer.layers.0.seen",
        "buffer.layers.1.seen",
        "lr.0",
    ]
    with pytest.raises(GraphError, match=r"no slot 'param\.nope' in this graph"):
        graph.placeholder("param.nope")


def test_what_a_step_leaves_behind_is_sorted_into_outputs_updates_and_results(graph: StepGraph) -> None:
    written = graph.slots_of_kind(SlotKind.PARAM, SlotKind.BUFFER, SlotKind.STATE)
    assert set(graph.updates) == {slot.id for slot in written}
    assert set(graph.results) == {f"grad.{slot.name}" for slot in graph.slots_of_kind(SlotKind.PARAM)}
    [loss] = graph.outputs
    assert loss.target is aten.mse_loss.default
    assert graph.num_ops == len(list(graph.calls()))
    assert repr(graph) == f"StepGraph({graph.num_ops} ops, {len(graph.slots)} slots)"


# Provenance


def test_every_call_has_a_phase_and_phases_come_in_order(graph: StepGraph) -> None:
    phases = [node.meta["phase"] for node in graph.calls()]
    runs = [phase for index, phase in enumerate(phases) if index == 0 or phases[index - 1] is not phase]
    assert runs == [Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert list(graph.calls(Phase.BACKWARD)) == [n for n in graph.calls() if n.meta["phase"] is Phase.BACKWARD]


def test_clipping_belongs_to_the_optimizer(graph: StepGraph) -> None:
    clipping = calls_at(graph, "clip")
    assert aten.linalg_vector_norm.default in {node.target for node in clipping}
    assert {node.meta["phase"] for node in clipping} == {Phase.OPTIMIZER}
    assert {node.meta["phase"] for node in calls_at(graph, "update")} == {Phase.OPTIMIZER}


def test_weight_averaging_belongs_to_the_optimizer() -> None:
    def step(model: nn.Module, average: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)  # line: average

    model = nn.Linear(4, 3)
    average = copy.deepcopy(model).requires_grad_(False)
    graph = capture(step, (model, average, SGD(model.parameters(), lr=0.1), X), {}).graph
    averaging = calls_at(graph, "average")
    assert [node.target for node in averaging] == [aten.mul.Tensor, aten.add.Tensor] * 2
    assert {node.meta["phase"] for node in averaging} == {Phase.OPTIMIZER}


@pytest.mark.parametrize(
    ("marker", "target", "fqns"),
    [
        ("count", aten.add.Tensor, ["layers.0", "layers.1"]),
        ("inner", aten.addmm.default, ["layers.0.inner", "layers.1.inner"]),
        ("relu", aten.relu.default, ["layers.0", "layers.1"]),
        ("head", aten.mm.default, ["head"]),
        ("head", aten.slice.Tensor, [""]),
    ],
)
def test_forward_ops_know_their_module_and_the_line_of_the_users_code(
    graph: StepGraph, marker: str, target: Any, fqns: list[str]
) -> None:
    found = [n for n in calls_at(graph, marker) if n.target is target and n.meta["phase"] is Phase.FORWARD]
    assert [node.meta["fqn"] for node in found] == fqns * 2  # the model runs twice


def test_ops_outside_modules_have_a_line_and_no_module(graph: StepGraph) -> None:
    [loss] = [node for node in calls_at(graph, "loss") if node.target is aten.mse_loss.default]
    assert "fqn" not in loss.meta
    assert all("fqn" not in node.meta for node in calls_at(graph, "update"))
    assert len(calls_at(graph, "update")) > 4


# Gradients


@pytest.mark.parametrize("passes", ["", "simplify,cse,dce"])
def test_gradients_are_what_eager_has_accumulated_before_clipping(passes: str) -> None:
    args = arguments()
    found = captured(*args)
    graph = run_passes(found.graph, Pipeline.parse(passes))
    model, _, batch, scale = args
    (F.mse_loss(model(batch["x"]), batch["y"]) * scale).backward()
    F.l1_loss(model(batch["x"]), batch["y"]).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = values_of(found, graph, *args)
    assert set(graph.gradients) == set(expected)
    for name, node in graph.gradients.items():
        assert node.meta["phase"] is Phase.BACKWARD
        assert torch.equal(values[node], expected[name]), name
        assert not torch.equal(values[node], values[graph.results[f"grad.{name}"]]), "clipping changed nothing"


def test_parameters_without_a_gradient_are_not_among_the_gradients() -> None:
    args = arguments()
    args[0].layers[0].requires_grad_(False)
    assert set(captured(*args).graph.gradients) == {"layers.1.inner.weight", "layers.1.inner.bias"}


# Forward twins


@pytest.mark.parametrize("passes", ["", "simplify,cse,dce"])
def test_matrix_products_of_the_backward_point_to_the_linear_they_differentiate(graph: StepGraph, passes: str) -> None:
    graph = run_passes(graph, Pipeline.parse(passes))
    products = [node for node in graph.calls(Phase.BACKWARD) if node.target is aten.mm.default]
    seen: list[tuple[str, Any]] = []
    for node in products:
        twin = graph.forward_twin(node)
        assert twin is not None
        assert twin.meta["phase"] is Phase.FORWARD
        assert (node.meta["fqn"], node.meta["source"]) == (twin.meta["fqn"], twin.meta["source"])
        assert twin in graph.nodes[: graph.nodes.index(node)]
        seen.append((twin.meta["fqn"], twin.target))
    linear = [("layers.1.inner", aten.addmm.default)] * 2 + [("layers.0.inner", aten.addmm.default)]
    assert seen == ([("head", aten.mm.default)] * 2 + linear) * 2  # the first layer's input needs no gradient


def test_each_backward_pass_points_to_its_own_forward_pass(graph: StepGraph) -> None:
    [first, second] = [
        [n for n in graph.calls(Phase.BACKWARD) if n.target is aten.threshold_backward.default][index::2]
        for index in range(2)
    ]
    order = graph.nodes
    twins = graph.forward_twins()
    losses = [node for node in order if node.target in (aten.mse_loss.default, aten.mean.default)]
    assert order.index(twins[first[0]]) < order.index(losses[0]) < order.index(twins[first[1]])
    assert order.index(twins[second[0]]) < order.index(losses[0]) < order.index(twins[second[1]])


def test_all_of_the_backward_but_accumulation_has_a_twin(graph: StepGraph) -> None:
    twins = graph.forward_twins()
    computing = [node for node in graph.calls(Phase.BACKWARD) if not ops.is_view(node.target)]
    assert {node.target for node in computing if node not in twins} == {aten.add.Tensor}
    assert {node: graph.forward_twin(node) for node in twins} == twins
    assert not any(node.meta["phase"] is not Phase.BACKWARD for node in twins)
    assert graph.forward_twin(next(graph.calls(Phase.FORWARD))) is None


# Edits


def test_an_inserted_call_has_a_value_and_the_provenance_of_another_node(graph: StepGraph) -> None:
    relu = next(node for node in graph.calls() if node.target is aten.relu.default)
    doubled = graph.insert(aten.mul.Tensor, (relu, 2.0), like=relu, after=relu)
    cast = graph.insert(aten._to_copy.default, (doubled,), {"dtype": torch.float64}, like=relu, before=doubled.next)
    assert [relu.next, doubled.next] == [doubled, cast]
    assert (doubled.meta["val"].shape, doubled.meta["val"].dtype) == (relu.meta["val"].shape, torch.float32)
    assert cast.meta["val"].dtype is torch.float64
    assert [doubled.meta[key] for key in ("phase", "fqn", "source")] == [Phase.FORWARD, "layers.0", line("relu")]
    assert "origins" not in doubled.meta
    graph.verify(deep=True)


def test_an_inserted_call_may_belong_to_another_phase(graph: StepGraph) -> None:
    gradient = graph.gradients["layers.0.inner.bias"]
    copied = graph.insert(aten.clone.default, (gradient,), like=gradient, after=gradient, phase=Phase.COMM)
    assert (copied.meta["phase"], gradient.meta["phase"]) == (Phase.COMM, Phase.BACKWARD)


def test_behind_an_input_means_behind_all_inputs(graph: StepGraph) -> None:
    parameter = graph.placeholder("param.layers.0.inner.weight")
    negated = graph.insert(aten.neg.default, (parameter,), like=parameter, after=parameter)
    assert graph.nodes.index(negated) == len(graph.slots)
    assert negated.meta["phase"] is Phase.FORWARD
    graph.verify()


@pytest.mark.parametrize("places", [(), ("before", "after")])
def test_a_call_is_inserted_at_exactly_one_place(graph: StepGraph, places: tuple[str, ...]) -> None:
    node = next(graph.calls())
    before = str(graph)
    keywords: dict[str, Any] = dict.fromkeys(places, node)
    with pytest.raises(AssertionError, match="either before or after"):
        graph.insert(aten.neg.default, (node,), like=node, **keywords)
    assert str(graph) == before


def test_replace_follows_chains_and_hands_over_what_the_nodes_stood_for(graph: StepGraph) -> None:
    gradient = graph.gradients["layers.0.inner.bias"]
    source = gradient.args[0]
    assert isinstance(source, fx.Node)
    [copied, again] = [graph.insert(aten.clone.default, (source,), like=source, after=source) for _ in range(2)]
    origins = {*source.meta["origins"], *gradient.meta["origins"]}
    readers = set(gradient.users)
    num_ops = graph.num_ops
    graph.replace({gradient: copied, copied: again, again: source})
    assert graph.num_ops == num_ops - 3
    assert graph.gradients["layers.0.inner.bias"] is source
    assert set(source.meta["origins"]) == origins
    assert readers <= set(source.users)
    graph.verify()
    graph.replace({})
    assert graph.num_ops == num_ops - 3


def test_replace_reaches_keyword_arguments_lists_and_what_is_returned() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return torch.cat([doubled, y]), torch.add(y, doubled, alpha=3)

    graph = capture(step, (nn.Linear(1, 1), torch.ones(2), torch.ones(2)), {}).graph
    [doubled] = [node for node in graph.calls() if node.target is aten.mul.Tensor]
    x, y = graph.placeholder("batch.x"), graph.placeholder("batch.y")
    graph.set_returned(outputs=(*graph.outputs, doubled), results={"grad.weight": doubled})
    graph.replace({doubled: x})
    joined, added, returned = graph.outputs
    assert joined.args == ([x, y],)
    assert added.args == (y, x)
    assert (returned, graph.results) == (x, {"grad.weight": x})
    assert not doubled.users


def test_parts_of_what_is_returned_can_be_exchanged(graph: StepGraph) -> None:
    outputs, updates, results = graph.outputs, graph.updates, graph.results
    graph.set_returned(outputs=())
    assert (graph.outputs, graph.updates, graph.results) == ((), updates, results)
    graph.set_returned(updates={}, outputs=outputs)
    assert (graph.outputs, graph.updates, graph.results) == (outputs, {}, results)
    graph.set_returned(updates=updates, results={})
    assert (graph.outputs, graph.updates, graph.results) == (outputs, updates, {})
    assert list(graph.updates) == list(updates)


def test_a_copy_is_equal_and_independent(graph: StepGraph) -> None:
    graph.history.append(PassRecord("simplify", 0.0, 1, 1))
    before = str(graph)
    duplicate = graph.copy()
    assert str(duplicate) == before
    assert duplicate.graph is not graph.graph
    assert not set(duplicate.nodes) & set(graph.nodes)
    assert set(duplicate.gradients) == set(graph.gradients)
    assert len(duplicate.forward_twins()) == len(graph.forward_twins())

    run_passes(duplicate, Pipeline.parse("cse,reinplace"))
    duplicate.slots.clear()
    assert str(graph) == before
    assert graph.is_functional
    assert [record.name for record in graph.history] == ["simplify"]
    graph.verify(deep=True)


def test_a_copy_of_a_rewritten_graph_is_rewritten(graph: StepGraph) -> None:
    duplicate = run_passes(graph, Pipeline.parse("reinplace")).copy()
    assert not duplicate.is_functional
    assert [str(record) for record in duplicate.history] == [str(record) for record in graph.history]


# Dead code


class Wasteful(nn.Module):
    """Draws masks and computes values that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        F.dropout(x, 0.5)
        torch.rand(3)
        (x.exp() * 2).sum()
        return F.dropout(self.linear(x), 0.5)


def test_dead_code_goes_but_random_numbers_are_still_drawn() -> None:
    model = Wasteful()
    args = (model, SGD(model.parameters(), lr=0.1), X, Y)
    graph = capture(mse_step, args, {}).graph
    assert not any(node.target is aten.exp.default for node in graph.calls())
    assert sum(ops.is_random(node.target) for node in graph.calls()) == 3
    [dead, *_] = [node for node in graph.calls() if node.target is aten.addmm.default]
    graph.insert(aten.exp.default, (dead,), like=dead, after=dead)
    num_ops = graph.num_ops
    assert graph.eliminate_dead_code() == 1
    assert graph.num_ops == num_ops - 1
    assert graph.eliminate_dead_code() == 0


@pytest.mark.parametrize("passes", [None, ""])
def test_unused_random_numbers_leave_the_stream_where_eager_leaves_it(passes: str | None) -> None:
    Twins(small_world(Wasteful), mse_step, passes=passes).steps(3, X, Y)


@pytest.mark.parametrize(
    "name", ["cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm", "batch_norm_update_stats"]
)
def test_operators_that_write_running_statistics_unannounced_are_not_pure(name: str) -> None:
    """Their schema has no write; merged, dropped or run again they would count a batch too few or too many."""
    target = getattr(torch.ops.aten, name).default
    assert not ops.written_arguments(target)
    assert not ops.is_pure(target)
