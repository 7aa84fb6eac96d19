"""What is advised where a library looks at a value: an option only where it leaves out the look itself."""

import json
from typing import Any

import pytest
import torch
from tests.twins import mse_step, pair, small_world
from torch import Tensor, nn
from torch.distributions import Normal

import wholestep
from wholestep.capture import remedies

X, Y = pair()


def advice_for(call: Any) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call()
    return remedies.for_error(caught.value)


def test_a_check_that_an_argument_turns_off() -> None:
    advice = advice_for(lambda: Normal(torch.zeros(2), -torch.ones(2), validate_args=True))
    assert advice == "Pass validate_args=False to Normal: it does not look then"


def test_a_check_that_a_method_makes() -> None:
    advice = advice_for(lambda: Normal(torch.zeros(2), torch.ones(2), validate_args=True).log_prob(torch.zeros(3)))
    assert advice == "Pass validate_args=False to Normal: it does not look then"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_question_that_an_argument_answers() -> None:
    layer = nn.TransformerEncoderLayer(4, 1, 4, device="meta")
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, mask = torch.zeros(3, 2, 4, device="meta"), torch.zeros(3, 3, device="meta")
    advice = advice_for(lambda: encoder(x, mask=mask))
    assert advice == "Pass is_causal=True or False to TransformerEncoder.forward: it does not look then"


def test_a_short_way_is_no_remedy() -> None:
    """What json.dumps does without its options' defaults looks at the numbers, too."""
    assert "Pass" not in advice_for(lambda: json.dumps(object()))


def test_a_refused_dumps() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> str:
        loss = mse_step(model, optimizer, x, y).item()
        try:  # without a handler, it would run behind the graph
            return json.dumps({"loss": loss})
        except ValueError:
            return ""

    world = small_world()()
    with pytest.raises(wholestep.CaptureError) as caught:
        wholestep.compile(step)(world.model, world.optimizer, X, Y)
    assert "skipkeys" not in str(caught.value)


def either(value: Tensor, *, plain: bool = True, careful: bool = True, exact: bool = True) -> Any:
    if plain and careful:
        return float(value)
    if careful:
        return None
    return float(value.sum())


def falls_through(value: Tensor, *, check: bool = True) -> Any:
    if check and float(value) < 0:
        raise ValueError
    return value


def looks_first(value: Tensor, *, check: bool = True) -> Any:
    if float(value) < 0 and check:
        raise ValueError
    return value


def looks_in_both(value: Tensor, *, check: bool = True) -> Any:
    if check:
        found = float(value)
    else:
        found = float(value.sum())
    return found


def either_of_two(value: Tensor, *, check: bool = True, strict: bool = False) -> Any:
    if check or strict:
        float(value)
    return value


def leaves_early(value: Tensor, *, fast: bool = True) -> Any:
    found = None
    if fast:
        if value.dim() == 1:
            found = float(value)
            return found, 1
        found = 2.0
    return found, float(value.sum())


def answers_plainly(value: Tensor, *, search: bool = True) -> Any:
    if search:
        return float(value)
    return None


@pytest.mark.parametrize(
    ("function", "offered"),
    [
        (either, None),
        (falls_through, "check"),
        (looks_first, None),
        (looks_in_both, None),
        (either_of_two, None),
        (leaves_early, None),
        (answers_plainly, "search"),
    ],
)
def test_which_conditions_guard_a_look(function: Any, offered: str | None) -> None:
    with pytest.raises(RuntimeError) as caught:
        function(torch.zeros(2, device="meta")[:1])
    traceback = caught.tb
    while traceback.tb_next is not None and traceback.tb_frame.f_code is not function.__code__:
        traceback = traceback.tb_next
    found = [name for name, _, _ in remedies._switches(traceback.tb_frame, traceback.tb_lineno)]
    assert found == ([offered] if offered else [])
