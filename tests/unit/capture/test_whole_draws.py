"""Functions that draw in Python and compute with what they have drawn: each call is one draw, made anew each time."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, mse_step, pair, small_world, square_step
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


@pytest.mark.parametrize("step", [counting_step, logging_step, printing_step, torch_step, in_step])
def test_what_cannot_run_before_the_graph_is_done_by_its_lines(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    COUNTING.count, seen[:] = 0, []
    done: dict[bool, tuple[Any, ...]] = {}
    for is_compiled in (False, True):
        world = small_world_from(0)
        function = wholestep.compile(step) if is_compiled else step
        np.random.seed(0)
        losses = [function(world.model, world.optimizer, *pair(6, seed)).item() for seed in range(4)]
        done[is_compiled] = (losses, COUNTING.count, len(seen), capsys.readouterr().out, np.random.rand())
        COUNTING.count, seen[:] = 0, []
    assert done[True] == done[False]


def small_world_from(seed: int) -> World:
    torch.manual_seed(seed)
    return small_world()()


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


class Steady(SmallNet):
    """Draws in a method of its own, which reads what is set from outside."""

    rate = 0.5

    def drawn(self, rows: int) -> Any:
        mask = np.random.rand(rows, 4)
        mask[mask < self.rate] = 0
        return mask, random.choice(["twice", "once"]), np.random.rand()

    def forward(self, features: Tensor) -> Tensor:
        mask, times, shift = self.drawn(len(features))
        scale = 2.0 if times == "twice" else 1.0
        return super().forward(features * torch.from_numpy(mask).float() * scale + shift)


def test_a_method_that_draws() -> None:
    twins = Twins(small_world(Steady), mse_step)
    for seed in range(8):
        twins.step(*pair(6, seed))
        if seed == 4:
            twins.change(lambda world: setattr(world.model, "rate", 0.2))
    assert twins.num_captures <= 4


class Annealed(SmallNet):
    """The same, by a count that it keeps."""

    count = 0

    def drawn(self, rows: int) -> np.ndarray:
        mask = np.random.rand(rows, 4)
        mask[mask < 1 / (2 + self.count)] = 0
        return mask

    def forward(self, features: Tensor) -> Tensor:
        mask = self.drawn(len(features))
        self.count += 1
        return super().forward(features * torch.from_numpy(mask).float())


def test_a_method_that_draws_by_what_changes() -> None:
    twins = Twins(small_world(Annealed), mse_step)
    twins.steps(6, *pair())
    assert twins.num_captures == 2  # there is no such attribute before the first call


ORDER = [1.0, 2.0, 3.0, 4.0]


def test_the_users_list_is_not_shuffled_before_the_graph() -> None:
    """It was, once more than in eager: code of Python's own library had written to it."""

    def shuffled_order(rows: int) -> np.ndarray:
        random.shuffle(ORDER)
        return np.random.rand(rows, 1) * ORDER[0]

    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features * torch.from_numpy(shuffled_order(6)).float(), targets)

    world = small_world_from(0)
    with pytest.raises(CaptureError, match="an order"):
        wholestep.compile(step)(world.model, world.optimizer, *pair())
    assert ORDER == [1.0, 2.0, 3.0, 4.0]
