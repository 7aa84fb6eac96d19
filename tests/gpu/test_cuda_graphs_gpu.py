"""Steps as CUDA graphs: eager's numbers at every step, with changing rates, random numbers and moving tensors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.lowering import DOUBLE, in_double
from tests.parity import assert_parity, default_step

import wholestep
from wholestep import zoo
from wholestep.runtime import cuda_graph

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")]

# A learning rate on the device is a float32.
SINGLE_RATE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}


@pytest.fixture(name="recorded")
def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts recordings."""
    counts: list[int] = []
    record = cuda_graph.record_on_device

    def counting(function: Any) -> Any:
        counts.append(1)
        return record(function)

    monkeypatch.setattr(cuda_graph.RecordedStep.__init__, "__defaults__", (counting,))
    return counts


def cuda(model: torch.nn.Module) -> torch.nn.Module:
    return model.cuda()


@pytest.mark.parametrize("lower", ["none", "inductor"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "vit"])
def test_every_step_is_eagers(name: str, lower: str, recorded: list[int]) -> None:
    """With dropout and running statistics; the generator has drawn as much as eager's after each step."""
    options = {"cuda_graphs": True, "lower": lower}
    assert_parity(
        in_double(zoo.get(name)), "adamw_fused", steps=6, compile_options=options, prepare=cuda, **SINGLE_RATE
    )
    assert len(recorded) == 1


def test_learning_rates_change_without_a_new_recording(recorded: list[int]) -> None:
    case = in_double(zoo.get("mlp"))

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return default_step(case)(model, optimizer, batch)

    losses: list[torch.Tensor] = []
    for step in (train_step, wholestep.compile(train_step, cuda_graphs=True)):
        torch.manual_seed(0)
        model = case.build().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(8):
            batch = {key: value.cuda() for key, value in case.make_batch(4, number).items()}
            losses.append(step(model, optimizer, batch).detach())
            scheduler.step()
        losses += [parameter.detach().clone() for parameter in model.parameters()]
    half = len(losses) // 2
    for one, other in zip(losses[:half], losses[half:], strict=True):
        torch.testing.assert_close(one, other, **SINGLE_RATE)
    assert len(recorded) == 1


def test_sizes_are_recorded_apart(recorded: list[int]) -> None:
    options = {"cuda_graphs": True, "dynamic_batch": True}
    sizes = (4, 7, 4, 7, 4, 7)
    assert_parity(
        in_double(zoo.get("mlp")),
        "adamw_fused",
        steps=6,
        batch_sizes=sizes,
        compile_options=options,
        prepare=cuda,
        **SINGLE_RATE,
    )
    assert len(recorded) == 2


def test_what_has_moved_is_recorded_anew(recorded: list[int]) -> None:
    case = in_double(zoo.get("mlp"))
    sides: list[list[torch.Tensor]] = []
    for options in (None, {"cuda_graphs": True}):
        torch.manual_seed(0)
        model = case.build().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = default_step(case) if options is None else wholestep.compile(default_step(case), **options)
        found: list[torch.Tensor] = []
        for number in range(8):
            if number == 5:
                optimizer.load_state_dict(optimizer.state_dict())
                parameter = next(iter(model.parameters()))
                parameter.data = parameter.data.clone()
            batch = {key: value.cuda() for key, value in case.make_batch(4, number).items()}
            found.append(step(model, optimizer, batch).detach())
        sides.append([*found, *(parameter.detach() for parameter in model.parameters())])
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, **SINGLE_RATE)
    assert len(recorded) == 2


def test_a_step_that_cannot_be_recorded_runs_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    options = {"cuda_graphs": True}
    with caplog.at_level(logging.WARNING, "wholestep"):
        assert_parity(in_double(zoo.get("mlp")), "adamw", steps=3, compile_options=options, prepare=cuda, **DOUBLE)
    assert "runs without CUDA graphs: " in caplog.text
