"""Which way a step goes may depend on draws: each way is a graph, whoever looks, and whoever has drawn."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, mse_step, pair, small_world
from torch import Tensor, nn

from wholestep.errors import CaptureError

LOOKS: dict[str, Any] = {
    "equal": lambda: torch.equal(torch.bernoulli(torch.tensor([0.5])), torch.ones(1)),
    "the method": lambda: torch.zeros(2).equal(torch.bernoulli(torch.full((2,), 0.3))),
    "allclose": lambda: torch.allclose(torch.bernoulli(torch.tensor([0.5])), torch.ones(1)),
    "is_nonzero": lambda: torch.is_nonzero(torch.bernoulli(torch.tensor([0.5]))),
    "an index": lambda: [True, False, True][torch.randint(3, ())],
    "a range": lambda: len([*range(torch.randint(0, 2, (1,)))]),
    "drawn by NumPy": lambda: torch.from_numpy(np.random.rand(3))[1] > 0.5,
    "all of what NumPy draws": lambda: (torch.from_numpy(np.random.rand(2)) > 0.3).all(),
    "by both": lambda: torch.equal(torch.from_numpy(np.random.rand(1)) > 0.5, torch.rand(1) > 0.5),
}


class Dropping(nn.Module):
    """Leaves out a layer, where somebody says so."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.layer, self.head, self.look = nn.Linear(4, 4), nn.Linear(4, 3), look

    def forward(self, hidden: Tensor) -> Tensor:
        if self.look():
            hidden = hidden + torch.tanh(self.layer(hidden))
        return self.head(torch.dropout(hidden, 0.2, True))


@pytest.mark.parametrize("kind", LOOKS)
def test_a_look_at_what_is_drawn(kind: str) -> None:
    twins = Twins(small_world(lambda: Dropping(LOOKS[kind])), mse_step)
    for seed in range(8):
        twins.step(*pair(6, seed))
    assert 1 < twins.num_captures <= 4
    assert twins.compiled.num_eager_calls < 4


def test_a_comparison_with_anything_else_is_no_look_at_draws() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        if torch.equal(torch.rand(6, 3), model(features)):
            features = features * 2
        return mse_step(model, optimizer, features, targets)

    with pytest.raises(CaptureError, match="depends on a value that is only known when it runs at equal"):
        Twins(small_world(), step).step(*pair())


def test_a_comparison_that_leads_to_an_error() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        if not torch.allclose(model(features), model(features).clamp(-100, 100)):
            raise FloatingPointError("too large")
        return mse_step(model, optimizer, features, targets)

    def call(world: Any, function: Any, *batch: Tensor) -> Any:
        try:
            return function(world.model, world.optimizer, *batch)
        except FloatingPointError as error:
            return str(error)

    twins = Twins(small_world(), step, call=call)
    features, targets = pair()
    twins.step(features, targets)
    assert twins.step(features * torch.nan, targets) == "too large"
    twins.step(features, targets)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 1)
