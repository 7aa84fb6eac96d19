"""Optimizers that nobody has found before the step uses them."""

from typing import Any

import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, adam, pair
from torch import nn

X, Y = pair()


class Trainer(nn.Module):
    """A module that keeps its model's optimizer, and steps it in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()
        self.hidden = {"optimizer": adam(self.net.parameters())}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.net(x), y)
        optimizer = next(iter(self.hidden.values()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss


def test_an_optimizer_in_a_dict_of_a_module() -> None:
    twins = Twins(
        lambda: World(trainer=Trainer()),
        lambda world, x, y: world.trainer(x, y),
        call=lambda world, step, *args: step(world, *args),
    )
    twins.steps(3, X, Y)
    assert twins.num_captures == 1
    assert not twins.compiled.num_eager_calls


def test_an_optimizer_that_the_step_makes_for_a_tensor_of_its_own() -> None:
    """An attack that descends on a perturbation (TRADES, l2); nothing of it outlives the call."""

    def step(world: World, x: Any, y: Any) -> Any:
        delta = (0.001 * torch.randn_like(x)).requires_grad_()
        attack = torch.optim.SGD([delta], lr=0.1, momentum=0.9)
        for _ in range(2):
            attack.zero_grad()
            (-F.mse_loss(world.model(x + delta), y)).backward()
            attack.step()
        world.optimizer.zero_grad()
        loss = F.mse_loss(world.model(x + delta.detach()), y)
        loss.backward()
        world.optimizer.step()
        return loss

    def build() -> World:
        model = SmallNet()
        return World(model=model, optimizer=adam(model.parameters()))

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    twins.steps(3, X, Y)
    assert twins.num_captures == 2  # gradients that the attack leaves are found by the second call
