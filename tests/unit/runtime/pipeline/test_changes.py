"""What is done to a model after the first step counts in the next one, as in eager, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import wholestep
from wholestep import PipelineError

Change = Callable[[nn.Sequential], Any]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def losses(change: Change, *, is_piped: bool) -> list[float]:
    """Four steps with a change after the second; what it returns is removed at the end if it can be."""
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = wholestep.pipeline(model, num_stages=2, num_micro_batches=2, loss_fn=loss_fn, optimizer=optimizer)
    found: list[float] = []
    handle = None
    try:
        for number in range(4):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).double()
            if is_piped:
                result = pipe.step(batch, target=batch).loss
                assert result is not None
                found.append(float(result))
            else:
                parts = [loss_fn(model(part), part) for part in batch.chunk(2)]
                optimizer.zero_grad()
                for part in parts:
                    (part / 2).backward()
                optimizer.step()
                found.append(float(torch.stack(parts).detach().mean()))
            handle = change(model) if number == 1 else handle
    finally:
        if handle is not None:
            handle.remove()
    return found


def replace_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.eye(4).double())


def doubled_outputs(module: nn.Module, _args: Any, output: Tensor) -> Any:
    return output * 2 if isinstance(module, nn.Linear) else None


CHANGES: dict[str, Change] = {
    "a forward hook": lambda model: model[0].register_forward_hook(doubled_outputs),
    "a forward pre-hook": lambda model: model[2].register_forward_pre_hook(lambda _module, args: (args[0] * 2,)),
    "a backward hook": lambda model: model[2].register_full_backward_hook(lambda _module, given, _: (given[0] * 9,)),
    "a hook of a parameter": lambda model: model.get_parameter("0.weight").register_hook(lambda grad: grad * 30),
    "a hook of all modules": lambda _: register_module_forward_hook(doubled_outputs),
    "another parameter": replace_weight,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_step_counts_as_in_eager(name: str) -> None:
    found, expected = (losses(CHANGES[name], is_piped=is_piped) for is_piped in (True, False))
    assert found == pytest.approx(expected, rel=1e-9)
    assert found[2:] != pytest.approx(losses(lambda _: None, is_piped=False)[2:], rel=1e-3)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_hook_after_accumulation_is_refused(is_later: bool) -> None:
    """In eager it sees the sum after each micro-batch."""
    model = tower()
    pipe = wholestep.pipeline(model, num_stages=2, num_micro_batches=2, loss_fn=loss_fn)
    batch = torch.randn(8, 4).double()
    if is_later:
        pipe.step(batch, target=batch)
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(PipelineError, match=r"test_changes.py:\d+: parameter '2.weight' has a hook"):
        pipe.step(batch, target=batch)


def test_a_copied_pipeline_trains_the_copy() -> None:
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipe = wholestep.pipeline(model, num_stages=2, num_micro_batches=2, loss_fn=loss_fn, optimizer=optimizer)
    batch = torch.randn(8, 4).double()
    pipe.step(batch, target=batch)
    twin = copy.deepcopy(pipe)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    twin.step(batch, target=batch)
    assert all(map(torch.equal, before, model.parameters()))
    pipe.step(batch, target=batch)
    assert all(map(torch.equal, twin.model.parameters(), model.parameters()))
    assert twin.num_steps == pipe.num_steps == 2
