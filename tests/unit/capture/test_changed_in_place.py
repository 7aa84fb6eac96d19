"""What a step does to its inputs that no graph could leave there: it is refused, and everything is as before."""

from __future__ import annotations

import pytest
from tests.unit.capture.test_stale_reads import outcome_of
from tests.unit.capture.test_unseen import STATE, Case

BUFFER = f"{STATE}k.t = torch.ones(3, 3)\nmodel.register_buffer('b', torch.ones(3, 3))\n"
STATE_OF = "optimizer.state[model.{}.weight]['momentum_buffer']"


@pytest.mark.parametrize("tensor", ["x", "k.t", "model.b"])
@pytest.mark.parametrize("change", ["unsqueeze_(0)", "t_()", "transpose_(0, 1).add_(1)", "as_strided_((2,), (1,))"])
def test_another_shape_or_layout_in_place_is_refused_with_its_line(tensor: str, change: str) -> None:
    outcome = outcome_of(Case("layout", BUFFER, after=f"{tensor}.{change}", refused="in place"))
    assert outcome.refused.startswith("world.py:")


@pytest.mark.parametrize("change", ["model.b.set_(torch.zeros(3))", "torch.neg(hidden[0], out=model.b)"])
def test_another_shape_by_other_ways_is_refused(change: str) -> None:
    body = f"hidden = model.first(x).detach()\n{change}"
    outcome_of(Case("shape", BUFFER, after=body, refused="changes the shape of buffer.b in place"))


def test_what_keeps_the_layout_is_done_in_place() -> None:
    outcome_of(Case("same", BUFFER, after="x.squeeze_(); model.b.squeeze_().add_(1)"))


def test_a_parameter_group_that_the_step_adds_is_gone_after_the_refusal() -> None:
    body = "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(2))]})"
    outcome_of(Case("group", after=body, refused="changes a flag or the parameters"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.first.weight.grad", "model.second.weight.grad"),
        (STATE_OF.format("first"), STATE_OF.format("second")),
        (STATE_OF.format("first"), "model.first.weight.grad"),
    ],
)
def test_one_tensor_that_the_step_leaves_as_two_is_refused(one: str, other: str) -> None:
    outcome_of(Case("one", after=f"{one} = {other}", refused="leaves one tensor as"))
