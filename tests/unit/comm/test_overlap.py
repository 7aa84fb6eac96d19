"""Collectives go out as early as their gradients allow and are waited for as late as their readers allow (COMM-3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.random_graphs import GraphBuilder
from tests.simulated import Trial
from torch import Tensor, fx, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from wholestep.comm import find_blocks
from wholestep.errors import GraphError, PassError
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, ops
from wholestep.passes import Pipeline, run_passes

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SEND = "allreduce{group=g,world=2}"
LAYERS = 'bucket{groups="4.weight 4.bias;2.weight 2.bias;0.weight 0.bias"}'


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


PLAIN = partial(SGD, lr=0.1, foreach=False)


@cache
def trial(make: Callable[..., Optimizer] = PLAIN, function: Any = step) -> Trial:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return Trial.of(function, model, make(model.parameters()), X)


def positions(graph: StepGraph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(graph.graph.nodes)}


def issues(graph: StepGraph) -> list[fx.Node]:
    return [node for node in graph.calls() if node.target is ops.ALL_REDUCE]


def assert_tight(graph: StepGraph) -> None:
    """Issued right behind the last input (or the bucket before), waited for right before the first reader."""
    place = positions(graph)
    blocks = find_blocks(graph)
    assert [block.collective.meta["bucket"] for block in blocks] == list(range(len(blocks)))
    behind_previous = -1
    for block in blocks:
        chain = _prepared(block.collective)
        gradients = [source for node in chain for source in node.all_input_nodes if source not in chain]
        earliest = max(behind_previous, *(place[source] for source in gradients))
        between = [node for node in graph.graph.nodes if earliest < place[node] < place[block.collective]]
        assert {node for node in between if ops.getitem_index(node) is None} <= chain
        behind_previous = place[block.collective]
        unpacking = {block.wait, *block.unpacking}
        following = graph.nodes[place[block.wait] :]
        assert next(node for node in following if node not in unpacking) is block.users[0]


def _prepared(collective: fx.Node) -> set[fx.Node]:
    chain, pending = {collective}, [collective]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source.meta["phase"] is Phase.COMM and source.target is not ops.WAIT:
                chain.add(source)
                pending.append(source)
    return chain


@pytest.mark.parametrize("make", [PLAIN, partial(AdamW, fused=True)])
def test_each_bucket_goes_out_while_the_backward_goes_on(make: Callable[..., Optimizer]) -> None:
    tested = trial(make)
    after = tested.after(f"{SEND},{LAYERS},split_optimizer,overlap")
    assert_tight(after)
    place = positions(after)
    last_backward = max(place[node] for node in after.calls(Phase.BACKWARD))
    first, second, third = (place[node] for node in issues(after))
    assert first < second < last_backward < third
    assert min(place[block.wait] for block in find_blocks(after)) > last_backward
    tested.assert_same(after, average=0.5)


def test_updates_come_in_the_order_of_their_buckets() -> None:
    after = trial().after(f"{SEND},{LAYERS},split_optimizer,overlap")
    written = {value: slot_id.split(".")[1] for slot_id, value in after.updates.items()}
    layers = [written[node] for node in after.calls() if node in written]
    assert layers == ["4", "4", "2", "2", "0", "0"]
    kinds = [node.target for node in after.calls() if node in written or node.target is ops.WAIT]
    assert [kind is ops.WAIT for kind in kinds] == [True, False, False] * 3


def test_before_the_pass_everything_is_waited_for_at_once() -> None:
    """What the pass improves on."""
    before = trial().after(f"{SEND},{LAYERS}")
    assert all(block.collective.next is block.wait for block in find_blocks(before))
    with pytest.raises(AssertionError):
        assert_tight(before)


@pytest.mark.parametrize("order", ["012", "210", "102", "201"])
def test_the_order_of_issue_is_that_of_the_buckets(order: str) -> None:
    """Also against the order of the backward: what is ready first waits for its turn."""
    tested = trial()
    groups = ";".join(f"{2 * int(layer)}.weight {2 * int(layer)}.bias" for layer in order)
    after = tested.after(f'{SEND},bucket{{groups="{groups}"}},split_optimizer,overlap')
    assert [node.meta["reduces"][0][0][0] for node in issues(after)] == [str(2 * int(layer)) for layer in order]
    assert_tight(after)
    tested.assert_same(after, average=0.5)


def test_the_order_is_kept_by_verification() -> None:
    graph = trial().after(f"{SEND},{LAYERS},split_optimizer,overlap")
    first, second, _ = issues(graph)
    second.append(first)
    with pytest.raises(GraphError, match=rf"bucket 0 \('{first.name}'\) is issued after bucket 1"):
        graph.verify()


def test_a_whole_update_waits_for_all() -> None:
    """Not split, it reads every gradient."""
    tested = trial(partial(AdamW, fused=True))
    after = tested.after(f"{SEND},{LAYERS},overlap")
    readers = {block.users[0] for block in find_blocks(after)}
    assert len(readers) == 1
    tested.assert_same(after, average=0.5)


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    optimizer.step()
    return norm


def two_rounds(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    step(model, optimizer, x)
    return step(model, optimizer, x)


def noisy(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Draws random numbers before, between and behind updates: their order must not change."""
    loss = step(model, optimizer, x + torch.rand_like(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return loss + torch.rand(())


@pytest.mark.parametrize("function", [clipped, two_rounds, noisy])
@pytest.mark.parametrize("options", ["bucket", "bucket{mb=0.00005,first_mb=0.00005}"])
def test_no_value_changes(function: Callable[..., Any], options: str) -> None:
    tested = trial(function=function)
    after = tested.after(f"{SEND},{options},split_optimizer,overlap")
    assert [node.meta["bucket"] for node in issues(after)] == list(range(len(issues(after))))
    effects = [node.meta["effect"] for node in after.calls() if "effect" in node.meta]
    assert effects == sorted(effects)
    tested.assert_same(after, average=0.5)


def test_a_bucket_of_a_later_wave_cannot_go_first() -> None:
    tested = trial(function=two_rounds)
    late, early = (
        " ".join(f"{layer}.{kind}{suffix}" for layer in (4, 2, 0) for kind in ("weight", "bias"))
        for suffix in ("", "#1")
    )
    with pytest.raises(PassError, match="bucket 0 would have to be issued before its gradients are there"):
        tested.after(f'{SEND},bucket{{groups="{late};{early}"}},overlap')


# Late gradients


def test_late_gradients_are_computed_behind_the_rest_of_the_backward() -> None:
    tested = trial()
    order = 'bucket{groups="2.weight 2.bias;0.weight 0.bias;4.weight 4.bias"}'
    after = tested.after(f"{SEND},{order},split_optimizer,overlap{{late=2}}")
    place = positions(after)
    own = [place[after.gradients[f"4.{kind}"]] for kind in ("weight", "bias")]
    others = [place[node] for name, node in after.gradients.items() if not name.startswith("4.")]
    assert max(others) < min(own)
    assert max(place[node] for node in issues(after)[:2]) < min(own)
    tested.assert_same(after, average=0.5)


@pytest.mark.parametrize("late", ["0", "1", "2", "1 2", "2 1", "0 1 2"])
@pytest.mark.parametrize("function", [pytest.param(step, marks=pytest.mark.slow), clipped, two_rounds])
def test_late_gradients_are_the_same(function: Callable[..., Any], late: str) -> None:
    tested = trial(function=function)
    options = "bucket{mb=0.00005,first_mb=0.00005}"
    tested.assert_same(tested.after(f'{SEND},{options},split_optimizer,overlap{{late="{late}"}}'), average=0.5)


# Edges


def test_nothing_to_send_changes_nothing() -> None:
    build = GraphBuilder()
    x = build.slot(Slot(SlotKind.BATCH, "x"), (2,))
    graph = run_passes(build.finish((build.call(torch.ops.aten.neg.default, x),)), Pipeline.parse(f"{SEND},bucket"))
    before = str(graph).partition("\n")[2]
    after = run_passes(graph, Pipeline.parse("overlap"))
    assert str(after).partition("\n")[2] == before


def test_overlap_needs_buckets() -> None:
    with pytest.raises(PassError, match="'overlap' requires 'bucket'"):
        trial().after(f"{SEND},overlap")
    with pytest.raises(PassError, match="'overlap' must come after 'split_optimizer'"):
        trial().after(f"{SEND},bucket,overlap,split_optimizer")


def test_an_update_that_is_returned_is_waited_for() -> None:
    def returning(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        step(model, optimizer, x)
        return next(model.parameters()).detach().clone()

    tested = trial(function=returning)
    tested.assert_same(tested.after(f"{SEND},{LAYERS},split_optimizer,overlap"), average=0.5)
