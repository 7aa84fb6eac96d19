"""Parts of a model or a parameter are exchanged while its update waits: what stands there then stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.waiting import WORDS, Pair, Side, X, is_anything_waiting, is_pending
from torch import nn

pytestmark = pytest.mark.usefixtures("nothing_waits")


def _flush(side: Side) -> None:
    if hasattr(side.step, "flush"):
        side.step.flush()


LOOKS: dict[str, Callable[[Side], Any]] = {
    "at an old parameter": lambda side: side.parameters[0].detach().sum(),
    "at another module": lambda side: side.model.last.weight.detach().sum(),
    "flush": _flush,
    "the next call": lambda side: side.step(side.model, side.optimizer, X, WORDS),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_dict_of_parameters_that_was_replaced_stays(name: str) -> None:
    pair = Pair("sgd")
    pair.steps(3)
    assert is_pending(pair.ours)
    for side in pair.sides:
        own: Any = {"weight": nn.Parameter(torch.ones(5, 4)), "bias": nn.Parameter(torch.zeros(5))}
        side.model.first._parameters = own
        LOOKS[name](side)
        assert vars(side.model.first)["_parameters"] is own
    pair.assert_same()
    assert torch.equal(*(side.parameters[0] for side in pair.sides)), "the old one has its update"


def test_a_copy_of_a_module_has_the_parameters_of_the_module() -> None:
    """`copy.copy` makes a module that shares them: what either registers, both have."""
    pair = Pair("sgd")
    pair.steps(3)
    for side in pair.sides:
        first = side.model.first
        copied = copy.copy(first)
        assert side is pair.eager or is_anything_waiting()
        copied.register_parameter("early", nn.Parameter(torch.ones(1)))
        assert first.early is copied.early
        assert vars(copied)["_parameters"] == vars(first)["_parameters"]
        _flush(side)
        assert vars(copied)["_parameters"] == vars(first)["_parameters"]
        copied.register_parameter("late", nn.Parameter(torch.ones(1)))
        assert [*vars(first)["_parameters"]] == ["weight", "bias", "early", "late"]
    pair.assert_same()


def test_a_dict_of_parameters_that_is_kept_shows_what_there_is() -> None:
    pair = Pair("sgd")
    pair.steps(3)
    first = pair.ours.model.first
    kept = vars(first)["_parameters"]
    pair.compiled.flush()
    own = vars(first)["_parameters"]
    assert kept is not own
    first.register_parameter("late", nn.Parameter(torch.ones(1)))
    del first.bias
    assert "late" in kept
    assert "bias" not in kept
    assert [*kept] == [*kept.keys()] == [*dict(kept)] == ["weight", "late"]
    assert len(kept) == 2
    assert kept == own
    assert own == kept
    assert (kept != own) is False
    assert repr(kept) == repr(own)


class _Special(nn.Parameter):
    """A class that somebody gives to a parameter."""


def test_a_parameter_keeps_the_class_that_somebody_gave_it() -> None:
    pair = Pair("sgd")
    pair.steps(3)
    assert is_pending(pair.ours)
    for side in pair.sides:
        side.parameters[0].__class__ = _Special
    pair.both(lambda model, _: model.state_dict())
    assert type(pair.ours.parameters[0]) is _Special
    pair.steps(2)
    pair.assert_same()
    assert type(pair.ours.parameters[0]) is _Special
