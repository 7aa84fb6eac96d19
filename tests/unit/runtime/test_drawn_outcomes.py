"""Draws that decide which graph is run: a bounded number of them, and eager for what never comes again."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, mse_step, pair, small_world
from torch import Tensor

import wholestep
from wholestep.capture import capture
from wholestep.errors import CaptureError
from wholestep.runtime.outcomes import MAX_OUTCOMES


def resized(sizes: list[int]) -> Any:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        size = random.choice(sizes)
        grown = F.interpolate(features[None], size=(size,), mode="linear")[0]
        shrunk = F.interpolate(grown[None], size=(4,), mode="linear")[0]
        return mse_step(model, optimizer, shrunk, targets), size

    return step


def test_sizes_that_are_drawn() -> None:
    """A size gets a graph when it is drawn again; the first call has one at once."""
    twins = Twins(small_world(), resized([6, 8, 10]))
    for seed in range(24):
        twins.step(*pair(6, seed))
    assert twins.num_captures == 3
    assert twins.compiled.num_eager_calls == 2


def test_no_more_than_some_graphs() -> None:
    twins = Twins(small_world(), resized([*range(5, 17)]))
    for seed in range(50):
        twins.step(*pair(6, seed % 4))
    assert twins.num_captures == MAX_OUTCOMES
    assert 0 < twins.compiled.num_eager_calls < 40


def test_the_cache_is_not_emptied_for_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_SIZE", "2")
    twins = Twins(small_world(), resized([6, 8, 10, 12]))
    for seed in range(16):
        twins.step(*pair(6, seed))
    assert twins.num_captures == 2


def test_two_ways_are_captured_at_once() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features * (2 if random.random() < 0.5 else 1), targets)

    twins = Twins(small_world(), step)
    twins.steps(8, *pair())
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (2, 0)


def test_values_that_never_come_again() -> None:
    """Boxes of CutMix."""

    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        features, middle = features.clone(), np.random.uniform(0, 6)
        low, high = int(max(middle - 1, 0)), int(min(middle + 2, 6))
        features[low:high] = features[torch.randperm(6)][low:high]
        lam = 1 - (high - low) / 6
        return mse_step(model, optimizer, features, targets * lam), lam, str(middle)

    twins = Twins(small_world(), step)
    twins.steps(6, *pair())
    assert twins.compiled.num_eager_calls > 0


@pytest.mark.parametrize("options", [{"memory_budget": "10MB"}, {"verify": 3}, {"cross_iteration": "all"}])
def test_with_other_options(options: dict[str, Any]) -> None:
    twins = Twins(small_world(), resized([6, 8]), **options)
    for seed in range(7):
        twins.step(*pair(6, seed))
    assert twins.num_captures == 2


def test_what_changes_besides_is_captured_as_ever() -> None:
    twins = Twins(small_world(), resized([6, 8]))
    for seed in range(5):
        twins.step(*pair(6, seed))
    twins.change(lambda world: world.model.eval())
    for seed in range(5):
        twins.step(*pair(6, seed))
    assert twins.num_captures == 4


def test_on_several_ranks_it_is_refused() -> None:
    """They have no eager call."""
    world = small_world()()
    with pytest.raises(CaptureError, match="a draw where torch needs a fixed number"):
        capture(resized([6, 8]), (world.model, world.optimizer, *pair()), {}, answers=False)


def test_to_prepare_draws_nothing() -> None:
    world, step = small_world()(), wholestep.compile(resized([6, 8]))
    before = random.getstate()
    for _ in range(2):
        step.prepare(world.model, world.optimizer, *pair())
        assert random.getstate() == before


class Mixed(SmallNet):
    """Layers dropped by torch, noise by NumPy, a scale by Python."""

    def forward(self, features: Tensor) -> Tensor:
        noise = np.random.rand(6, 4) * 2
        if torch.rand([]) < 0.3:
            features = features * 2
        if random.random() < 0.3:
            features = features + torch.from_numpy(noise).float()
        if np.random.rand(1) < 0.2:
            features = features.flip(0)
        return super().forward(torch.dropout(features, 0.1, True))


def test_draws_of_all_kinds_lead_elsewhere() -> None:
    def step(model: Any, optimizer: Any, memory: list[Tensor], targets: Tensor) -> Any:
        rows = torch.stack(random.sample(memory, 6))
        return mse_step(model, optimizer, rows, targets), random.random(), np.random.rand(), torch.rand([])

    twins = Twins(small_world(Mixed), step)
    memory, targets = [*torch.randn(9, 4)], pair()[1]
    for _ in range(25):
        twins.step(memory, targets)
    assert twins.num_captures <= 2 * MAX_OUTCOMES
