"""Where calls are placed: along the forward, gradients towards the first stage, free values nowhere."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cuts import zoo_step
from torch import fx

from wholestep.cost import node_flops
from wholestep.errors import SplitError
from wholestep.graph import Phase, StepGraph, nodes_in, ops
from wholestep.pipe.placement import find_anchors, forward_calls, free_nodes, place

NAMES = ["mlp", "gpt", "resnet", pytest.param("t5", marks=pytest.mark.slow)]


def slow_place(graph: StepGraph, borders: list[int]) -> dict[fx.Node, int]:
    """Stage by stage, straight from the rules, without anchors."""
    free = set(free_nodes(graph)) - set(nodes_in(graph.output_node.args))
    stage_of: dict[fx.Node, int] = {}
    early = forward_calls(graph)
    twins = graph.forward_twins()
    for node in graph.calls():
        if node in free:
            continue
        producer = node.args[0] if node.target is operator.getitem else None
        sources = [source for source in node.all_input_nodes if source in stage_of]
        late = [stage_of[source] for source in sources if source.meta["phase"] is not Phase.FORWARD]
        twin = twins.get(node)
        own = [stage_of[twin]] if twin in stage_of and node.meta["phase"] is not Phase.FORWARD else []
        if isinstance(producer, fx.Node) and producer in stage_of:
            stage_of[node] = stage_of[producer]
        elif node in early:
            stage_of[node] = sum(border <= early.index(node) for border in borders)
        elif late or own:
            stage_of[node] = min(late + own)
        else:
            stage_of[node] = max((stage_of[source] for source in sources), default=0)
    return stage_of


@settings(derandomize=True, database=None, deadline=None, max_examples=8)
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_stages_are_as_the_rules_say_and_edges_go_the_right_way(name: str, data: st.DataObject) -> None:
    graph = zoo_step(name).graph
    count = len(forward_calls(graph))
    borders = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=5)))
    placement = place(graph, borders)
    assert dict(placement.stage_of) == slow_place(graph, borders)
    assert placement.num_stages == len(borders) + 1
    early = set(forward_calls(graph))
    for node, stage in placement.stage_of.items():
        for source in node.all_input_nodes:
            if source not in placement.stage_of:
                continue
            if node in early:
                assert placement.stage_of[source] <= stage
            elif source.meta["phase"] is not Phase.FORWARD:
                assert placement.stage_of[source] >= stage


@pytest.mark.parametrize("name", NAMES)
def test_every_call_is_bound_or_free(name: str) -> None:
    graph = zoo_step(name).graph
    placement = place(graph, [5])
    calls = set(graph.calls())
    assert placement.stage_of.keys() | placement.free == calls
    assert not placement.stage_of.keys() & placement.free
    assert not placement.free & set(nodes_in(graph.output_node.args))


def test_free_values_are_cheap_and_made_of_weights_alone_or_of_data_alone() -> None:
    step = zoo_step("t5")
    free = set(free_nodes(step.graph))
    assert any(node.target is not operator.getitem and ops.is_view(node.target) for node in free)
    assert not any(node_flops(node) or ops.has_effect(node) for node in free)
    for node in free:
        kinds = {slot.kind for slot in map(step.graph.slot_of, _roots(node)) if slot is not None}
        assert len(kinds - {"buffer", "constant"}) <= 1


def _roots(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        found |= {source} if source.op == "placeholder" else _roots(source)
    return found


def test_a_buffer_that_the_forward_changes_makes_nothing_free() -> None:
    step = zoo_step("resnet")
    changed = {step.graph.placeholder(slot) for slot in step.graph.updates}
    assert changed
    assert not any(_roots(node) & changed for node in free_nodes(step.graph))


def test_borders_that_do_not_rise_are_refused() -> None:
    with pytest.raises(SplitError, match=r"borders rise along the forward, unlike \[5, 3\]"):
        place(zoo_step("mlp").graph, [5, 3])


def test_items_of_a_tuple_are_anchored_with_it() -> None:
    graph = zoo_step("gpt").graph
    anchors, _ = find_anchors(graph)
    items = [node for node in anchors if node.target is operator.getitem and node.args[0] in anchors]
    assert items
    assert all(anchors[item] == anchors[item.args[0]] for item in items)  # pyright: ignore[reportArgumentType]
