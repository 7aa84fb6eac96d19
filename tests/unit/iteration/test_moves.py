"""What may run in the next iteration: leaves, and nothing whose place matters; what is carried for them (ITER-2)."""

from __future__ import annotations

import operator

import pytest
import torch
from tests.random_graphs import GraphBuilder
from torch import fx

from wholestep.errors import PassError
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, ops
from wholestep.iteration import carried_nodes, leaf_closure, move_to_next_iteration, moved_nodes
from wholestep.iteration.moves import absorbed, found_again

aten = torch.ops.aten


class Linear(GraphBuilder):
    """One weight, updated with momentum and a learning rate; a loss is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.slot(Slot(SlotKind.PARAM, "w"), (3,))
        self.moment = self.slot(Slot(SlotKind.STATE, "w", "m"), (3,))
        self.rate = self.slot(Slot(SlotKind.LR, "0"), None)
        self.x = self.slot(Slot(SlotKind.BATCH, "x"), (3,))
        self.hidden = self.call(aten.mul.Tensor, self.x, self.weight)
        self.loss = self.call(aten.sum.default, self.hidden)
        self.phase = Phase.BACKWARD
        self.gradient = self.call(aten.mul.Tensor, self.x, self.hidden)
        self.gradient.meta["gradient_of"] = ("w",)
        self.phase = Phase.OPTIMIZER
        self.decayed = self.call(aten.mul.Tensor, self.moment, 0.9)
        self.current["state.w.m"] = self.call(aten.add.Tensor, self.decayed, self.gradient)
        self.minus = self.call(operator.neg, self.rate)
        self.current["param.w"] = self.call(aten.add.Tensor, self.weight, self.current["state.w.m"], alpha=self.minus)
        self.results["grad.w"] = self.gradient

    @property
    def update(self) -> set[fx.Node]:
        return leaf_closure([self.current["state.w.m"]])

    def done(self) -> StepGraph:
        return self.finish((self.loss,))


def refused(graph: StepGraph, *nodes: fx.Node) -> str:
    """The reason why nodes cannot move; the graph must be as it was."""
    before = [dict(node.meta) for node in graph.nodes]
    with pytest.raises(PassError) as caught:
        move_to_next_iteration(graph, nodes)
    assert [dict(node.meta) for node in graph.nodes] == before
    return str(caught.value)


# What moves


def test_a_leaf_moves() -> None:
    build = Linear()
    graph = build.done()
    move_to_next_iteration(graph, build.update)
    assert moved_nodes(graph) == [build.current["state.w.m"], build.current["param.w"]]
    assert [node.meta["next_iteration"] for node in moved_nodes(graph)] == [0, 0]
    graph.verify()


def test_blocks_are_numbered_one_after_the_other() -> None:
    build = Linear()
    graph = build.done()
    move_to_next_iteration(graph, [build.current["param.w"]], [build.current["state.w.m"]])
    move_to_next_iteration(graph, [build.minus])
    assert {node: node.meta["next_iteration"] for node in moved_nodes(graph)} == {
        build.current["param.w"]: 0,
        build.current["state.w.m"]: 1,
        build.minus: 2,
    }


def test_the_closure_is_all_that_depends_on_the_seeds() -> None:
    build = Linear()
    build.done()
    assert build.update == {build.current["state.w.m"], build.current["param.w"]}
    assert leaf_closure([build.minus]) == {build.minus, build.current["param.w"]}
    assert leaf_closure([build.hidden]) == {build.hidden, build.loss, build.gradient, *build.update}
    assert leaf_closure([build.decayed, build.minus]) == {build.decayed, build.minus, *build.update}
    assert leaf_closure([]) == set()


def test_what_only_the_update_needs_moves_along() -> None:
    build = Linear()
    graph = build.done()
    assert absorbed(graph, build.update) == {build.decayed, build.minus}


def test_a_wait_moves_and_the_issue_stays() -> None:
    build = Linear()
    build.phase = Phase.COMM
    sent = build.call(ops.ALL_REDUCE, build.gradient, "sum", "g")
    wait = build.call(ops.WAIT, sent)
    build.current["param.w"] = build.call(aten.add.Tensor, build.current["param.w"], wait)
    graph = build.done()
    move_to_next_iteration(graph, leaf_closure([wait]))
    assert carried_nodes(graph)[0] is sent
    assert "has an effect whose place among others must not change" in refused(
        graph, *leaf_closure([sent]) - set(moved_nodes(graph))
    )


# Refusals


def test_a_non_leaf_is_refused_naming_the_user() -> None:
    build = Linear()
    graph = build.done()
    moment, weight = build.current["state.w.m"], build.current["param.w"]
    why = f"'{weight.name}' (aten.add.Tensor) reads it in this iteration"
    assert refused(graph, moment) == f"'{moment.name}' cannot move to the next iteration: {why}"


def test_an_update_that_the_forward_reads_is_refused() -> None:
    """The move that gives wrong losses and the same final parameters."""
    build = Linear()
    build.phase = Phase.FORWARD
    later = build.call(aten.sum.default, build.current["param.w"])
    build.loss = build.call(aten.add.Tensor, build.loss, later)
    graph = build.done()
    assert f"'{later.name}' (aten.sum.default) reads it" in refused(graph, build.current["param.w"])
    assert "the step returns it" in refused(graph, *build.update)


def test_a_random_op_is_refused() -> None:
    build = Linear()
    noise = build.call(aten.rand_like.default, build.weight)
    build.current["param.w"] = build.call(aten.add.Tensor, build.current["param.w"], noise)
    graph = build.done()
    assert "aten.rand_like.default has an effect whose place" in refused(graph, *leaf_closure([noise]))


def test_an_input_is_refused() -> None:
    build = Linear()
    graph = build.done()
    assert "'param_w' cannot move to the next iteration: it is an input, not a computation" in refused(
        graph, build.weight
    )
    assert "it is an output, not a computation" in refused(graph, graph.output_node)


def test_what_the_step_returns_is_refused() -> None:
    build = Linear()
    graph = build.done()
    assert f"'{build.loss.name}' cannot move to the next iteration: the step returns it" in refused(graph, build.loss)


def test_an_update_of_an_argument_is_refused() -> None:
    build = Linear()
    build.current["batch.x"] = build.call(aten.neg.default, build.x)
    graph = build.done()
    assert "it is written to batch.x, which the next call does not have" in refused(graph, build.current["batch.x"])


@pytest.mark.parametrize("kind", [SlotKind.LR, SlotKind.GRAD, SlotKind.CONSTANT])
def test_an_update_of_what_is_not_kept_is_refused(kind: SlotKind) -> None:
    build = Linear()
    slot = Slot(kind, "other")
    before = build.slot(slot, (3,))
    build.current[slot.id] = build.call(aten.neg.default, before)
    assert f"it is written to {slot.id}," in refused(build.done(), build.current[slot.id])


def test_state_that_the_step_creates_is_refused() -> None:
    build = Linear()
    build.results["state.w.new"] = build.call(aten.neg.default, build.gradient)
    why = refused(build.done(), build.results["state.w.new"])
    assert "it becomes state.w.new, which exists only once the step has run" in why


def test_a_number_in_the_state_is_refused_too() -> None:
    """Counters kept as Python numbers are results, not tensors that could be guarded."""
    build = Linear()
    count = build.slot(Slot(SlotKind.STATE, "w", "count"), None)
    build.results["state.w.count"] = build.call(operator.add, count, 1)
    assert "it becomes state.w.count" in refused(build.done(), build.results["state.w.count"])


def test_a_gradient_may_come_late_unless_the_next_step_adds_to_it() -> None:
    build = Linear()
    build.results["grad.w"] = build.call(aten.mul.Tensor, build.gradient, 0.5)
    graph = build.done()
    graph.accumulating = frozenset({"w"})
    assert "it becomes grad.w, which the next step adds to (no zero_grad before the backward)" in refused(
        graph, build.results["grad.w"]
    )
    graph.accumulating = frozenset({"other"})
    move_to_next_iteration(graph, [build.results["grad.w"]])


def test_nothing_moves_twice() -> None:
    build = Linear()
    graph = build.done()
    move_to_next_iteration(graph, build.update)
    assert "it has already" in refused(graph, build.current["param.w"])


# What is carried over


def test_values_are_carried_once_and_slots_found_again() -> None:
    build = Linear()
    build.current["param.w"] = build.call(aten.add.Tensor, build.current["param.w"], build.gradient)
    graph = build.done()
    move_to_next_iteration(graph, leaf_closure([build.current["state.w.m"]]))
    assert carried_nodes(graph) == [build.decayed, build.gradient, build.minus]
    assert found_again(graph) == {build.weight, build.moment}


def test_learning_rates_and_arguments_are_carried_by_value() -> None:
    """They are others in the next call."""
    build = Linear()
    build.current["param.w"] = build.call(aten.add.Tensor, build.current["param.w"], build.x)
    graph = build.done()
    move_to_next_iteration(graph, {*build.update, *leaf_closure([build.minus, build.decayed])})
    assert carried_nodes(graph) == [build.gradient, build.rate, build.x]


@pytest.mark.parametrize("kind", [SlotKind.BUFFER, SlotKind.PARAM, SlotKind.STATE])
def test_a_slot_that_stays_behind_is_carried_if_it_changes(kind: SlotKind) -> None:
    build = Linear()
    slot = Slot(kind, "count", "k" if kind is SlotKind.STATE else "")
    count = build.slot(slot, (3,))
    build.current["param.w"] = build.call(aten.add.Tensor, build.current["param.w"], count)
    build.current[slot.id] = build.call(aten.add.Tensor, count, 1)
    graph = build.done()
    move_to_next_iteration(graph, build.update)
    assert count in carried_nodes(graph)


@pytest.mark.parametrize(
    ("kind", "is_carried"),
    [(SlotKind.PARAM, False), (SlotKind.STATE, False), (SlotKind.BUFFER, True), (SlotKind.CONSTANT, True)],
)
def test_a_slot_that_nobody_writes_is_found_again_if_it_is_watched(kind: SlotKind, is_carried: bool) -> None:
    """Parameters and optimizer state are guarded while updates are pending; buffers and constants may be rebound."""
    build = Linear()
    other = build.slot(Slot(kind, "other", "k" if kind is SlotKind.STATE else ""), (3,))
    build.current["param.w"] = build.call(aten.add.Tensor, build.current["param.w"], other)
    graph = build.done()
    move_to_next_iteration(graph, build.update)
    assert (other in carried_nodes(graph)) == is_carried
