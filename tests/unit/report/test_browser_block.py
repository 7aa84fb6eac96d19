"""Ops to look through: each once, in its phase and module, and no more of them than a page can hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dry_steps import train_step
from torch import nn
from torch.optim import SGD

import wholestep
from wholestep.graph import StepGraph
from wholestep.report.browser import graph_browser, room_of_each
from wholestep.report.document import Browser
from wholestep.report.summary import OUTSIDE_MODULES, listing


@pytest.fixture(name="graph", scope="module")
def _graph() -> StepGraph:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    step = wholestep.compile(train_step)
    step(model, SGD(model.parameters(), lr=0.1), torch.randn(4, 8))
    return step.graph


def lines(browser: Browser) -> list[str]:
    return [line.code for _, groups in browser.chapters for group in groups for line in group.lines]


def test_every_op_is_there_once_with_its_source(graph: StepGraph) -> None:
    browser = graph_browser(graph)
    names = [line.split(" = ")[0] for line in lines(browser)]
    assert sorted(names) == sorted(node.name for node in graph.calls())
    assert browser.note == ""
    assert [name for name, _ in browser.chapters] == ["forward", "backward", "optimizer"]
    places = {
        line.code.split(" = ")[0]: (phase, group.name, line.notes[-1])
        for phase, groups in browser.chapters
        for group in groups
        for line in group.lines
    }
    for node in graph.calls():
        expected = (node.meta["phase"], node.meta.get("fqn") or OUTSIDE_MODULES, node.meta["source"])
        assert places[node.name] == expected
        assert ".py:" in expected[2]


def test_of_a_large_graph_each_module_shows_some_and_the_rest_is_counted(graph: StepGraph) -> None:
    browser = graph_browser(graph, max_ops=20)
    groups = [group for _, found in browser.chapters for group in found]
    shown = len(lines(browser))
    assert 20 - len(groups) < shown <= 20
    assert all(group.lines for group in groups)
    assert sum(group.num_left_out for group in groups) == graph.num_ops - shown
    assert browser.note.startswith(f"{graph.num_ops - shown} of {graph.num_ops} ops are left out")


def test_too_many_modules_are_put_together_by_place(graph: StepGraph) -> None:
    browser = graph_browser(graph, max_groups=6)
    assert "*" in {group.name for _, groups in browser.chapters for group in groups}
    assert len(lines(browser)) == graph.num_ops
    fewer = graph_browser(graph, max_groups=2)
    assert sum(len(groups) for _, groups in fewer.chapters) == 2
    assert fewer.note.startswith(f"{graph.num_ops - len(lines(fewer))} of {graph.num_ops} ops")


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(0, 60))
def test_the_room_of_each_is_the_largest_that_fits(sizes: list[int], limit: int) -> None:
    def total(room: int) -> int:
        return sum(min(size, room) for size in sizes)

    best = max(room for room in range(31) if total(room) <= limit)
    assert total(room_of_each(sizes, limit)) == total(best)


def test_a_very_long_call_is_cut(graph: StepGraph) -> None:
    copied = graph.copy()
    node = next(iter(copied.calls()))
    node.name = "n" * 400
    [line] = [line for line in lines(graph_browser(copied)) if line.startswith("nnn")]
    assert len(line) == 241
    assert line.endswith("…")


def test_a_listing_ends_with_how_much_is_left_out(graph: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = listing(graph).splitlines()
    assert whole == [line.rstrip() for line in str(graph).splitlines()]
    monkeypatch.setattr("wholestep.report.summary._MAX_LINES", 5)
    assert listing(graph).splitlines() == [*whole[:5], f"# … {len(whole) - 5} more lines are left out"]
