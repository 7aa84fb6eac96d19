"""Minimum cuts against networkx and against trying every subset; knapsacks against trying every subset."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_programs import problems

from wholestep.errors import WholestepError
from wholestep.remat.flow import FlowNetwork
from wholestep.remat.knapsack import Item, choose_items
from wholestep.remat.mincut import NoCutError, min_cut
from wholestep.remat.problem import INPUT, Decision, Op, Problem, Value
from wholestep.remat.simulate import Simulator

edges = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 2**40)), max_size=24)


@settings(max_examples=500, deadline=None)
@given(edges)
def test_flows_and_cuts_are_networkxs(listed: list[tuple[int, int, int]]) -> None:
    capacities: dict[tuple[int, int], int] = {}
    for tail, head, capacity in listed:
        if tail != head:
            capacities[tail, head] = capacities.get((tail, head), 0) + capacity
    network = FlowNetwork(7)
    oracle = nx.DiGraph()
    oracle.add_nodes_from(range(7))
    for (tail, head), capacity in capacities.items():
        network.add_edge(tail, head, capacity)
        oracle.add_edge(tail, head, capacity=capacity)
    value, (_, sink_side) = nx.minimum_cut(oracle, 0, 6)
    assert network.maximum_flow(0, 6) == value
    assert network.sink_side(6) == sink_side


def repeated(problem: Problem, kept: set[int]) -> set[int]:
    return {event.op for event in Simulator(problem).events(Decision(frozenset(kept))) if event.is_again}


@settings(max_examples=300, deadline=None)
@given(problems(max_forward=6), st.data())
def test_no_choice_of_fewer_bytes_avoids_the_banned_ops(problem: Problem, data: st.DataObject) -> None:
    forward = list(problem.forward_ops)
    banned = set(data.draw(st.lists(st.sampled_from(forward), unique=True)))
    weights = [max(1, value.num_bytes) for value in problem.values]
    kept = min_cut(problem, lambda op: op not in banned, lambda value: weights[value])
    assert not repeated(problem, set(kept)) & banned
    least = min(
        sum(weights[value] for value in subset)
        for size in range(len(problem.choices) + 1)
        for subset in itertools.combinations(problem.choices, size)
        if not repeated(problem, set(subset)) & banned
    )
    assert sum(weights[value] for value in kept) == least


def test_a_need_that_cannot_be_cut_is_shown() -> None:
    values = (Value("x", 0, INPUT), Value("a", 1, 0), Value("b", 1, 1), Value("g", 1, 2))
    ops = (Op("a", (0,), (1,)), Op("b", (1,), (2,)), Op("g", (2,), (3,), is_late=True))
    problem = Problem(ops, values, frozenset({3}), must_drop=frozenset({1, 2}))
    with pytest.raises(NoCutError, match="b <- a") as caught:
        min_cut(problem, lambda op: op != 0)
    assert caught.value.values == ["b", "a"]


items = st.lists(st.builds(Item, st.integers(0, 60), st.integers(0, 50).map(float)), max_size=9)


@settings(max_examples=500, deadline=None)
@given(items, st.integers(0, 200))
def test_knapsacks_against_every_subset(listed: list[Item], capacity: int) -> None:
    def worth(chosen: frozenset[int] | tuple[int, ...]) -> float:
        return sum(listed[index].worth for index in chosen)

    def num_bytes(chosen: frozenset[int] | tuple[int, ...]) -> int:
        return sum(listed[index].num_bytes for index in chosen)

    best = max(
        worth(subset)
        for size in range(len(listed) + 1)
        for subset in itertools.combinations(range(len(listed)), size)
        if num_bytes(subset) <= capacity
    )
    exact, quick = choose_items(listed, capacity, "dp"), choose_items(listed, capacity, "greedy")
    assert num_bytes(exact) <= capacity
    assert worth(exact) == best
    assert num_bytes(quick) <= capacity
    assert best / 2 <= worth(quick) <= best


@settings(max_examples=25, deadline=None)
@given(items, st.integers(0, 200))
def test_the_integer_program_is_as_good_as_dynamic_programming(listed: list[Item], capacity: int) -> None:
    by_ilp = choose_items(listed, capacity, "ilp")
    by_dp = choose_items(listed, capacity, "dp")
    assert sum(listed[index].num_bytes for index in by_ilp) <= capacity
    assert sum(listed[index].worth for index in by_ilp) == sum(listed[index].worth for index in by_dp)


def test_large_sizes_keep_the_capacity() -> None:
    listed = [Item(10**9 + 7 * index, float(index + 1)) for index in range(40)]
    for method in ("greedy", "dp", "ilp"):
        chosen = choose_items(listed, 7 * 10**9, method)
        assert sum(listed[index].num_bytes for index in chosen) <= 7 * 10**9
        assert len(chosen) >= 6


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(WholestepError, match="no knapsack 'magic'; choose from greedy, dp, ilp"):
        choose_items([], 0, "magic")
