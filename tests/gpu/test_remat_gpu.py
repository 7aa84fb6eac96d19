"""Memory budgets on a CUDA device: the same numbers with ops that run again, randomness included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import assert_parity, default_step
from torch import nn

import wholestep
from wholestep import zoo
from wholestep.graph import Replay

pytestmark = pytest.mark.gpu

BATCH = 64


class Noisy(nn.Module):
    """Every kind of randomness a layer may have, between linear layers that are worth dropping."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = F.dropout(torch.tanh(layer(x)), 0.3)
            if index == 1:
                x = x + 0.1 * torch.randn_like(x)
            elif index == 2:
                x = x * (torch.rand_like(x) > 0.1)
            elif index == 3:
                x = x * torch.bernoulli(torch.full_like(x, 0.9))
            elif index == 4:
                x = F.rrelu(x, training=True)
        return x


@pytest.mark.parametrize("share", [0.6, 0.3, 0.0])
@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "vit", "resnet"])
def test_every_step_is_that_without_a_budget(name: str, share: float, deterministic: None) -> None:
    """Bit for bit: the same kernels run on the same numbers, and dropout draws the same masks again."""
    case = zoo.get(name)
    plain, within = (_train(case, {}), _train(case, {"memory_budget": share}))
    assert within[1].plan.memory.repeated
    for one, other in zip(plain[0], within[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_every_step_is_eagers(share: float, deterministic: None) -> None:
    step = assert_parity(
        zoo.get("gpt"),
        "adamw_fused",
        steps=3,
        batch_sizes=[BATCH],
        rtol=1.3e-6,
        atol=1e-5,
        compile_options={"memory_budget": share},
        prepare=lambda model: model.cuda(),
    )
    assert step.plan.memory.repeated


@pytest.mark.parametrize("share", [0.4, 0.0])
def test_all_random_ops_draw_the_same_numbers_again(share: float, deterministic: None) -> None:
    def losses_of(**options: Any) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = Noisy().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(512, 64, device="cuda")

        def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wholestep.compile(train_step, **options) if options else train_step
        losses = [step(model, optimizer, x) for _ in range(3)]
        return [*losses, *model.parameters(), torch.cuda.get_rng_state()], step

    eager, _ = losses_of()
    ours, step = losses_of(memory_budget=share)
    assert any(isinstance(node.target, Replay) for node in step.graph.nodes)
    for one, other in zip(eager, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1.3e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_inductor_draws_the_same_masks_whatever_the_budget(share: float) -> None:
    """Gradients of a compiled model with dropout agree with those of budget 1 under the same seed."""

    def gradients(budget: float) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Noisy().cuda()
        compiled = torch.compile(model, backend=wholestep.inductor(memory_budget=budget))
        x = torch.randn(512, 64, device="cuda")
        torch.manual_seed(7)
        compiled(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for one, other in zip(gradients(1.0), gradients(share), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def _train(case: Any, options: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    """Losses, parameters and optimizer state of three steps."""
    torch.manual_seed(0)
    model = case.build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = {name: value.cuda() for name, value in case.make_batch(BATCH, 1).items()}
    step = wholestep.compile(default_step(case), **options)
    losses = [step(model, optimizer, batch) for _ in range(3)]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*losses, *model.parameters(), *model.buffers(), *states], step
