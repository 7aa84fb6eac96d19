"""Recurrent layers in steps with sizes that values decide: the same kernels as eager, which fuse on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, momentum
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from wholestep import CaptureError

MODES = {
    "lstm": lambda: nn.LSTM(4, 5),
    "both ways": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 5),
    "rnn": lambda: nn.RNN(4, 5),
}


class Recognizer(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.LazyLinear(6)
        self(torch.zeros(2, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(x)
        return self.head(hidden)


def train(recurrent: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]) -> Twins:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        return value

    def build() -> World:
        model = Recognizer(recurrent())
        return World(model=model, optimizer=momentum(model.parameters()))

    twins = Twins(build, step, call=lambda world, step, x: step(world.model, world.optimizer, x))
    for number in range(4):
        twins.step(torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(number)))
    return twins


def ctc(model: nn.Module, x: Tensor) -> Tensor:
    texts, lengths = torch.tensor([1, 2, 5, 4, 1]), torch.tensor([2, 2, 1])
    return F.ctc_loss(F.log_softmax(model(x), dim=2), texts, torch.full((3,), 7), lengths)


def selected(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    return outputs[outputs > 0].square().mean()


@pytest.mark.parametrize("loss", [ctc, selected])
@pytest.mark.parametrize("recurrent", MODES.values(), ids=MODES)
def test_another_part_has_sizes_of_values(recurrent: Callable[[], nn.Module], loss: Any) -> None:
    train(recurrent, loss)


def of_selected_columns(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[:, x[0].sum(1) > -1]).square().mean()


def packed(model: Any, x: Tensor) -> Tensor:
    return model.recurrent(pack_padded_sequence(x, torch.tensor([7, 5, 4])))[0].data.square().mean()


def test_sizes_of_the_input_itself() -> None:
    train(MODES["gru"], of_selected_columns)
    with pytest.raises(CaptureError, match="gives an LSTM a tensor whose size is decided by values"):
        train(MODES["lstm"], of_selected_columns)


@pytest.mark.parametrize("recurrent", MODES.values(), ids=MODES)
def test_packed_sequences(recurrent: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match="packs sequences of several lengths, whose sizes values decide"):
        train(recurrent, packed)
