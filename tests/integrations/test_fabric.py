"""Fabric: its own loop with `wholestep.compile` around the step; one changed line, the same bits."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep

pytestmark = pytest.mark.integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from lightning.fabric import Fabric

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6.0).reshape(6, 1)


def fit(compile: Callable[..., Any], num_steps: int = 5, *, clips: bool = False, **options: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def train_step(features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        fabric.backward(loss)
        if clips:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        return loss

    step = compile(train_step)
    losses = [step(X, Y).item() for _ in range(num_steps)]
    state = optimizer.state_dict()["state"]
    return losses, [*model.parameters(), *[value for entry in state.values() for value in entry.values()]], step


@pytest.mark.parametrize("options", [{}, {"clips": True}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}])
def test_a_loop_is_the_same(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, ours = fit(lambda function: function, **options), fit(wholestep.compile, **options)
    assert ours[0] == eager[0]
    for left, right in zip(eager[1], ours[1], strict=True):
        assert torch.equal(left, right)
    assert ours[2].num_captures == 1, ours[2].recompile_reasons
