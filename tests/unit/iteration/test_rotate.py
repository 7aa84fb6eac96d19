"""Which updates move: all that can, those asked for by number or by name, and why others do not (ITER-3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.simulated import Trial
from tests.twins import Twins, mse_step, pair, small_world
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

import wholestep
from wholestep.errors import PassError, WholestepError
from wholestep.graph import StepGraph
from wholestep.iteration import moved_nodes, update_blocks
from wholestep.iteration.moves import SHARED
from wholestep.passes import Pipeline

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SEND = 'allreduce{group=g,world=2},bucket{groups="2.weight 2.bias;0.weight 0.bias"},split_optimizer,overlap'


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def returning(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    step(model, optimizer, x)
    return model[2].bias.detach().clone()


MAKE: Callable[..., Optimizer] = partial(AdamW, fused=True)


@cache
def trial(function: Callable[..., Any] = step, make: Callable[..., Optimizer] = MAKE) -> Trial:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return Trial.of(function, model, make(model.parameters()), X)


def late(graph: StepGraph) -> set[str]:
    """Names of the parameters whose update moves."""
    moved = set(moved_nodes(graph))
    return {key.removeprefix("param.") for key, node in graph.updates.items() if key[:6] == "param." and node in moved}


ALL = {"0.weight", "0.bias", "2.weight", "2.bias"}


# By bucket


def test_everything_that_can_move_moves() -> None:
    for function in (step, clipped):
        tested = trial(function)
        for passes in ("rotate", f"{SEND},rotate"):
            after = tested.after(passes)
            assert late(after) == ALL
            tested.assert_same(after, average=0.5 if "allreduce" in passes else None)


def test_buckets_are_chosen_by_number() -> None:
    tested = trial()
    for buckets, names in (("0", {"2.weight", "2.bias"}), ("1", {"0.weight", "0.bias"}), ("1 0", ALL), ("", set())):
        after = tested.after(f'{SEND},rotate{{buckets="{buckets}"}}')
        assert late(after) == names
        tested.assert_same(after, average=0.5)


def test_the_state_moves_with_its_parameter() -> None:
    after = trial().after(f"{SEND},rotate{{buckets=1}}")
    moved = set(moved_nodes(after))
    assert {key for key, node in after.updates.items() if node in moved} == {
        key for key in after.updates if ".0." in key
    }


def test_what_cannot_move_stays_behind() -> None:
    tested = trial(returning)
    after = tested.after(f"{SEND},rotate")
    assert late(after) == {"0.weight", "0.bias"}
    tested.assert_same(after, average=0.5)
    assert late(tested.after("rotate")) == set()


def test_blocks_say_what_holds_them() -> None:
    graph = trial(returning).after(SEND)
    blocks = update_blocks(graph)
    assert [block.buckets for block in blocks] == [(0,), (1,)]
    assert blocks[0].problem.endswith("cannot move: the step returns it")
    assert blocks[1].problem == ""
    assert blocks[0].nodes.isdisjoint(blocks[1].nodes)


def test_a_global_norm_joins_all_buckets() -> None:
    [block] = update_blocks(trial(clipped).after(SEND))
    assert (block.buckets, block.problem) == ((0, 1), "")


def test_without_communication_there_is_one_block() -> None:
    [block] = update_blocks(trial().graph)
    assert (block.buckets, block.problem) == ((0,), "")


def test_what_several_blocks_share_belongs_to_none() -> None:
    """The learning rate as a tensor is made from a carried number: it can be made again at any time."""
    after = trial().after(f"{SEND},rotate")
    shared = [str(node.target) for node in moved_nodes(after) if node.meta["next_iteration"] == SHARED]
    assert "aten.scalar_tensor.default" in shared
    assert not any("_fused_" in target for target in shared)


@pytest.mark.parametrize(
    ("function", "buckets", "message"),
    [
        (step, "2", "there is no bucket 2; this step has 2"),
        (step, "0 7 9", "there is no bucket 7; this step has 2"),
        (clipped, "1", "bucket 0 cannot move to the next iteration: its update also needs bucket 0, which is to stay"),
        (clipped, "0", "bucket 0 cannot move to the next iteration: its update also needs bucket 1, which is to stay"),
        (returning, "0", "bucket 0 cannot move to the next iteration: '.*' cannot move: the step returns it"),
        (returning, "0 1", "bucket 0 cannot move to the next iteration: '.*' cannot move: the step returns it"),
    ],
)
def test_refusals(function: Callable[..., Any], buckets: str, message: str) -> None:
    tested = trial(function)
    with pytest.raises(PassError, match=message):
        tested.after(f'{SEND},rotate{{buckets="{buckets}"}}')


def test_a_bucket_that_is_no_number_is_refused() -> None:
    with pytest.raises(PassError, match="first"):
        trial().after(f"{SEND},rotate{{buckets=first}}")


@pytest.mark.parametrize("later", ["overlap", "split_optimizer", "bucket", "cse", "simplify"])
def test_it_comes_last(later: str) -> None:
    with pytest.raises(PassError, match=f"'rotate' must come after '{later}'"):
        trial().after(f"allreduce{{group=g,world=2}},bucket,rotate,{later}")


def test_it_is_data() -> None:
    pipeline = Pipeline.parse('rotate{buckets="0 2 3",names="a.b c"}')
    assert Pipeline.parse(str(pipeline)) == pipeline
    assert str(Pipeline.parse("rotate")) == "rotate"


# By name, on one rank

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adam foreach": partial(Adam, lr=0.01, foreach=True),
    "adamw fused": partial(AdamW, lr=0.01, fused=True),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["first"], {"first.weight", "first.bias"}),
        (["second.bias"], {"second.bias"}),
        (["first.weight", "second"], {"first.weight", "second.weight", "second.bias"}),
        (["first", "second"], {"first.weight", "first.bias", "second.weight", "second.bias"}),
    ],
)
def test_named_updates_move_on_one_rank(name: str, names: list[str], expected: set[str]) -> None:
    twins = Twins(small_world(make_optimizer=MAKERS[name]), mse_step, cross_iteration=names)
    for size in (6, 6):
        twins.step(*pair(size))
    flush = twins.compiled.iteration.flush
    written = {slot.name for slot in flush.slots.values() if slot.kind == "param"}
    assert written == expected


@pytest.mark.parametrize("name", ["firs", "first.weigh", "secnod"])
def test_a_name_that_fits_nothing_is_refused(name: str) -> None:
    world = small_world()()
    compiled = wholestep.compile(mse_step, cross_iteration=["first", name])
    with pytest.raises(WholestepError, match=f"no parameter or module '{name}'"):
        compiled(world.model, world.optimizer, *pair())


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_on_one_rank_nothing_moves_unless_told_to(choice: str) -> None:
    twins = Twins(small_world(), mse_step, cross_iteration=choice)
    twins.steps(2, *pair())
    assert twins.compiled.iteration.main is twins.compiled.iteration.setup
    assert not any("rotate" in record.text for record in twins.compiled.graph.history)
