"""Functions that draw in Python and compute with what they have drawn: each call is one draw, made anew each time."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, mse_step, pair, small_world, square_step
from torch import Tensor

import wholestep
from wholestep.errors import CaptureError

RATE = 0.6
seen: list[float] = []


def spans(shape: tuple[int, ...], rate: float, least: int = 1) -> np.ndarray:
    """A mask of spans of two, as many as a draw says, where draws say."""
    rows, length = shape
    extra = np.random.rand(1).item()

    def number() -> int:
        return max(int(rate * length / 2 + extra), least)

    mask = np.zeros(shape, dtype=bool)
    for row in range(rows):
        for start in np.random.choice(np.arange(length - 1), number(), replace=False):
            mask[row, start : start + 2] = True
    return mask


def masked_step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
    mask = torch.tensor(spans(features.shape, RATE), device=features.device, dtype=torch.bool)
    return mse_step(model, optimizer, torch.where(mask, 0.0, features), targets)


def test_a_mask_that_is_drawn_by_loops_and_branches() -> None:
    twins = Twins(small_world(), masked_step)
    for seed in range(5):
        twins.step(*pair(6, seed))
    assert twins.num_captures == 1
    for seed in range(3):
        twins.step(*pair(8, seed))
    assert twins.num_captures == 2


def shuffled(size: int) -> int:
    order = np.arange(size)
    np.random.shuffle(order)
    random.random()
    return int(np.argmax(order + np.random.rand(size)))


def test_a_number_of_arrays_that_are_drawn_and_draws_around_it() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        first = random.random()
        loss = mse_step(model, optimizer, features * (1 + shuffled(6)) * first, targets)
        return loss, random.random()

    twins = Twins(small_world(), step)
    for seed in range(6):
        twins.step(*pair(6, seed))
    assert twins.num_captures == 1


def test_what_it_reads_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(small_world(), masked_step)
    twins.steps(2, *pair(6))
    monkeypatch.setitem(globals(), "RATE", 0.1)
    twins.steps(2, *pair(6))


class Counting:
    """Counts, and draws by the count."""

    def __init__(self) -> None:
        self.count = 0


COUNTING = Counting()


def drawn_by_count(rows: int) -> np.ndarray:
    return np.random.rand(rows, 1) * COUNTING.count


def counting_step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
    COUNTING.count += 1
    return mse_step(model, optimizer, features * torch.from_numpy(drawn_by_count(6)).float(), targets)


def logged(rows: int) -> np.ndarray:
    drawn = np.random.rand(rows, 1) * 2
    seen.append(0.0)
    return drawn


def logging_step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
    return mse_step(model, optimizer, features * torch.from_numpy(logged(6)).float(), targets)


def printed(rows: int) -> np.ndarray:
    drawn = np.random.rand(rows, 1) * 2
    print("drawn")
    return drawn


def printing_step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
    return mse_step(model, optimizer, features * torch.from_numpy(printed(6)).float(), targets)


def with_torch(rows: int) -> np.ndarray:
    drawn = np.random.rand(rows, 1) * 2
    torch.rand(1)
    return drawn


def torch_step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
    return mse_step(model, optimizer, features * torch.from_numpy(with_torch(6)).float(), targets)


def in_step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
    return mse_step(model, optimizer, features * torch.from_numpy(np.random.rand(6, 1) * 2).float(), targets)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (counting_step, "what it has written before"),
        (logging_step, "writes to objects or prints in logged"),
        (printing_step, "writes to objects or prints in printed"),
        (torch_step, "uses torch"),
        (in_step, "computes with an array that it has drawn"),
    ],
)
def test_what_cannot_run_before_the_graph_is_refused(step: Any, reason: str) -> None:
    world: World = small_world()()
    state = np.random.get_state(legacy=False)["state"]["pos"]
    count, length = COUNTING.count, len(seen)
    with pytest.raises(CaptureError, match=reason):
        wholestep.compile(step)(world.model, world.optimizer, *pair(6))
    assert np.random.get_state(legacy=False)["state"]["pos"] == state
    assert (COUNTING.count, len(seen)) == (count, length)


def test_arrays_as_they_are_drawn_need_no_function() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(6, 4)).float()
        return F.mse_loss(noise, features) + mse_step(model, optimizer, features + noise, targets)

    Twins(small_world(), step).steps(3, *pair(6))


DRAWN = {
    "returned": lambda features: [drawn := torch.from_numpy(np.random.rand(4)), drawn, {"same": drawn}, drawn.float()],
    "the array": lambda features: np.random.rand(3),
    "written to": lambda features: torch.tensor(np.random.rand(4)).mul_(2),
}


@pytest.mark.parametrize("make", DRAWN.values(), ids=DRAWN)
def test_what_is_drawn_is_returned_as_it_is(make: Any) -> None:
    def step(model: Any, optimizer: Any, features: Tensor) -> Any:
        return square_step(model, optimizer, features), make(features)

    twins = Twins(small_world(), step)
    twins.steps(3, pair()[0])
    assert twins.num_captures == 1


OTHER_USES = {
    "an index of a tensor": lambda drawn, features: features[drawn.integers(0, 6, 2)],
    "an index that is written to": lambda drawn, features: features.clone().__setitem__(drawn.integers(0, 6, 2), 0),
    "an index of an array": lambda drawn, features: torch.from_numpy(np.arange(9)[drawn.integers(0, 9, 2)]),
    "in a list": lambda drawn, features: torch.from_numpy(np.stack([drawn.random(3), drawn.random(3)])),
    "transposed": lambda drawn, features: torch.from_numpy(drawn.random((2, 3)).T.copy()),
    "as text": lambda drawn, features: f"{drawn.random(3)}",
}


@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES)
def test_other_uses_of_drawn_arrays_are_refused(use: Any) -> None:
    """They were taken for the same at each call."""
    generator = np.random.default_rng(0)

    def step(model: Any, optimizer: Any, features: Tensor) -> Any:
        return square_step(model, optimizer, features), use(generator, features)

    world = small_world()()
    with pytest.raises(CaptureError, match="an array that it has drawn"):
        wholestep.compile(step)(world.model, world.optimizer, pair()[0])


def test_items_of_drawn_arrays_are_not_written() -> None:
    generator = np.random.default_rng(0)

    def step(model: Any, optimizer: Any, features: Tensor) -> Any:
        drawn = generator.random(4)
        drawn[0] = 5.0
        return square_step(model, optimizer, features * torch.from_numpy(drawn).float())

    world = small_world()()
    with pytest.raises(CaptureError, match="an array that it has drawn"):
        wholestep.compile(step)(world.model, world.optimizer, pair()[0])
