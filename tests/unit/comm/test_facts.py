"""What the planner is told about a step: when gradients are ready and parameters needed, and what cannot move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.simulated import Trial
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from wholestep.comm.facts import gather_facts
from wholestep.comm.plan import Facts, decide
from wholestep.cost import Link

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
LINK = Link(50.0, 125.0)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def facts_of(
    function: Callable[..., Any] = step,
    make: Callable[..., Optimizer] = AdamW,
    *,
    model: nn.Module | None = None,
    link: Link | None = None,
) -> Facts:
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    graph = Trial.of(function, model, make(model.parameters()), X).graph
    before = str(graph)
    facts = gather_facts(graph, world=2, average=True, link=link, is_measured=False)
    assert str(graph) == before, "looking changes nothing"
    return facts


def test_without_a_link_only_sizes_are_known() -> None:
    facts = facts_of()
    assert [(g.key, g.num_bytes) for g in facts.gradients] == [
        ("2.weight", 64),
        ("2.bias", 16),
        ("0.weight", 64),
        ("0.bias", 16),
    ]
    assert {(g.ready_us, g.needed_us, g.update_us, g.own_us) for g in facts.gradients} == {(0.0, 0.0, 0.0, 0.0)}
    assert (facts.world, facts.average, facts.compute_us, facts.link) == (2, True, 0.0, None)


def test_moments_follow_the_step() -> None:
    facts = facts_of(link=LINK)
    by_key = {gradient.key: gradient for gradient in facts.gradients}
    ready = [gradient.ready_us for gradient in facts.gradients]
    assert ready == sorted(ready)
    assert 0 <= by_key["0.weight"].needed_us < by_key["2.weight"].needed_us < ready[0]
    assert ready[-1] <= facts.compute_us
    assert all(0 <= gradient.own_us <= gradient.ready_us for gradient in facts.gradients)
    assert by_key["2.weight"].own_us > 0
    assert by_key["0.weight"].update_us == pytest.approx(4 * by_key["0.bias"].update_us, abs=0.05)


def test_kinds_tell_dtype_device_and_wave() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))

    def mixed(model: Any, optimizer: Optimizer, x: Tensor) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model[1](model[0](x).double()).square().mean().backward()
            optimizer.step()

    kinds = {gradient.key: gradient.kind for gradient in facts_of(mixed, model=model).gradients}
    assert kinds["0.bias#1"] == "float32/cpu/0"
    assert kinds["0.bias"] == "float32/cpu/1"
    assert kinds["1.bias"] == "float64/cpu/1"


# What stays, and why


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def returning_a_gradient(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    step(model, optimizer, x)
    return model[2].bias.grad


def looking_at_a_weight(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    step(model, optimizer, x)
    return model[0].weight.norm()


def without_zero_grad(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()


def stays(facts: Facts) -> dict[str, str]:
    return {gradient.key: gradient.stays for gradient in facts.gradients}


@pytest.mark.parametrize("make", [SGD, partial(AdamW, foreach=True), partial(AdamW, fused=True)])
def test_an_ordinary_update_may_move(make: Callable[..., Optimizer]) -> None:
    assert set(stays(facts_of(make=partial(make, lr=0.1))).values()) == {""}


def test_a_global_norm_needs_all_gradients() -> None:
    assert set(stays(facts_of(clipped)).values()) == {
        "its update needs 4 gradients at once (a global norm, or an op not split)"
    }


def test_what_is_returned_or_read_stays() -> None:
    found = stays(facts_of(returning_a_gradient))
    assert "the step returns it" in found.pop("2.bias")
    assert set(found.values()) == {""}
    found = stays(facts_of(looking_at_a_weight))
    assert "the step returns it" in found.pop("0.weight")
    assert set(found.values()) == {""}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_gradient_that_the_next_step_adds_to_stays(is_first: bool) -> None:
    model = nn.Linear(4, 4)
    if not is_first:
        model(X).sum().backward()
    why = "(no zero_grad before the backward)" if is_first else "it is written to grad."
    assert all(why in reason for reason in stays(facts_of(without_zero_grad, model=model)).values())


def test_updates_that_build_on_each_other_stay() -> None:
    def two_rounds(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        step(model, optimizer, x)
        step(model, optimizer, x)

    assert "" not in stays(facts_of(two_rounds)).values()


def test_facts_lead_to_a_plan() -> None:
    facts = facts_of(returning_a_gradient, link=LINK)
    plan = decide(facts, bucket_mb=25, cross_iteration="auto")
    [alone] = [bucket for bucket in plan.buckets if "2.bias" in bucket.keys]
    assert alone.reason.startswith("stays: ")
    assert alone.reason.endswith("the step returns it")
    moved = decide(facts, bucket_mb=25, cross_iteration=["0"]).buckets
    assert [bucket.keys for bucket in moved if bucket.moved] == [("0.weight", "0.bias")]
