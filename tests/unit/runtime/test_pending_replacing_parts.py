"""Parts of a model or a parameter are exchanged while its update waits: what stands there then stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.waiting import WORDS, Pair, Side, X, is_pending
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
