"""Random numbers: the same ones as eager, in the same order, and the stream ends in the same place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

X, Y = pair()


def transposed(fill: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Fill memory that is not contiguous in place: the order of its elements decides who gets which number."""

    def draw(hidden: Tensor) -> Tensor:
        noise = torch.empty(5, 6).t()
        fill(noise)
        return noise

    return draw


def fill_columns(hidden: Tensor) -> Tensor:
    noise = torch.zeros(6, 5)
    noise[:, ::2].uniform_()
    return noise


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda hidden: torch.rand(6, 5),
    "randn": lambda hidden: torch.randn(6, 5),
    "rand_like": torch.rand_like,
    "rand_like_transposed": lambda hidden: torch.rand_like(hidden.t()).t(),
    "randint": lambda hidden: torch.randint(0, 5, (6, 5)).float(),
    "randperm": lambda hidden: hidden[torch.randperm(6)],
    "normal": lambda hidden: torch.normal(hidden.detach(), torch.ones_like(hidden)),
    "bernoulli": lambda hidden: torch.bernoulli(torch.sigmoid(hidden.detach())),
    "multinomial": lambda hidden: torch.multinomial(torch.softmax(hidden.detach(), 1), 5).float(),
    "poisson": lambda hidden: torch.poisson(hidden.detach().abs()),
    "uniform_": transposed(lambda noise: noise.uniform_()),
    "normal_": transposed(lambda noise: noise.normal_()),
    "exponential_": transposed(lambda noise: noise.exponential_()),
    "cauchy_": transposed(lambda noise: noise.cauchy_()),
    "log_normal_": transposed(lambda noise: noise.log_normal_()),
    "geometric_": transposed(lambda noise: noise.geometric_(0.3)),
    "bernoulli_": transposed(lambda noise: noise.bernoulli_(0.4)),
    "bernoulli_tensor_": lambda hidden: torch.empty(5, 6).t().bernoulli_(torch.sigmoid(hidden.detach())),
    "columns": fill_columns,
    "dropout": lambda hidden: F.dropout(hidden, 0.3),
    "dropout_transposed": lambda hidden: F.dropout(hidden.t(), 0.3).t(),
    "dropout_in_place": lambda hidden: F.dropout(hidden * 1, 0.3, inplace=True),
    "dropout_2d": lambda hidden: F.dropout2d(hidden.view(1, 6, 5, 1), 0.3).view(6, 5),
    "alpha_dropout": lambda hidden: F.alpha_dropout(hidden, 0.3, True),
    "feature_alpha_dropout": lambda hidden: F.feature_alpha_dropout(hidden, 0.3, True),
    "gumbel_softmax": lambda hidden: F.gumbel_softmax(hidden, hard=True),
    "rrelu": lambda hidden: F.rrelu(hidden, training=True),
    "rsample": lambda hidden: torch.distributions.Normal(hidden, 1.0, validate_args=False).rsample(),
    "unused": lambda hidden: (torch.rand(3), hidden)[1],
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", DRAWS)
def test_every_way_to_draw(name: str) -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        drawn: list[Tensor] = []

        def forward(inputs: Tensor) -> Tensor:
            hidden = torch.tanh(model.first(inputs))
            drawn.append(DRAWS[name](hidden).detach())
            return model.second(hidden * DRAWS[name](hidden))

        loss = mse_step(forward, optimizer, features, targets)
        return loss, drawn[0], torch.rand(2)

    for passes in ("", None):
        twins = Twins(small_world(), step, passes=passes)
        twins.steps(3, X, Y)
        assert twins.num_captures == 1
        before, after = (output[1] for output in (twins.step(X, Y), twins.step(X, Y)))
        assert name in ("unused", "poisson", "randint") or not torch.equal(before, after)


def test_a_mask_is_drawn_once_for_forward_and_backward() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        optimizer.zero_grad()
        hidden = F.dropout(model.first(features), 0.5)
        hidden.retain_grad()
        loss = model.second(hidden).square().mean()
        loss.backward()
        optimizer.step()
        return loss, hidden

    twins = Twins(small_world(), step)
    for _ in range(3):
        _, hidden = twins.step(X, Y)
        assert 0 < int((hidden == 0).sum()) < hidden.numel()


def test_capturing_draws_nothing() -> None:
    world = small_world(lambda: nn.Sequential(nn.Dropout(0.5), SmallNet()))()
    step = wholestep.compile(mse_step, verify=1)
    torch.manual_seed(3)
    mse_step(world.model, world.optimizer, X, Y)
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    step(world.model, world.optimizer, X, Y)
    assert torch.equal(torch.get_rng_state(), expected)


def draws_from_its_own(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    generator = torch.Generator()
    return mse_step(model, optimizer, features + torch.randn(6, 4, generator=generator), targets)


def seeds(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    torch.manual_seed(5)
    return mse_step(model, optimizer, features + torch.randn(6, 4), targets)


def test_a_step_that_seeds() -> None:
    Twins(small_world(), seeds).steps(3, X, Y)


def test_another_stream_is_refused() -> None:
    world = small_world()()
    before = torch.get_rng_state()
    with pytest.raises(wholestep.CaptureError) as caught:
        wholestep.compile(draws_from_its_own)(world.model, world.optimizer, X, Y)
    assert "the step draws from a torch.Generator of its own. Draw with torch.rand, randn, randint or randperm" in str(
        caught.value
    )
    assert __file__ in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features + torch.empty(6, 4).random_(0, 10), targets)

    Twins(small_world(), step).steps(3, X, Y)
