"""What a step computes in NumPy with what it has drawn is computed again at each call, before the graph."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.pictures import differences, generators, picture
from tests.twins import Twins, mse_step, pair, small_world
from torch import Tensor

import wholestep
from wholestep.errors import CaptureError

DATA = np.arange(40, dtype=np.float32).reshape(10, 4)


def coin(x: Tensor) -> Any:
    r = np.random.rand(1)
    return x * 2 if r < 0.5 else x


def arithmetic(x: Tensor) -> Any:
    z = (np.random.rand(6, 1) * 2 + 1) ** 2 / 3
    z = np.where(np.clip(z, 0.5, 2.0) > 1, z, 1 - z)
    return x * torch.from_numpy(z).float(), z, z.mean(), float(z[0, 0]), z.T.tolist()


def minibatches(x: Tensor) -> Any:
    """As PPO goes through a rollout."""
    places, rows = np.arange(6), list[Tensor]()
    for _ in range(2):
        np.random.shuffle(places)
        rows += [x[places[start : start + 3]] for start in range(0, 6, 3)]
    return torch.cat(rows)[:6] + torch.cat(rows)[6:], places


def hole(x: Tensor) -> Any:
    """Cutout."""
    row, mask = np.random.randint(6), np.ones((6, 4), np.float32)
    mask[np.clip(row - 2, 0, 6) : np.clip(row + 2, 0, 6), :] = 0.0
    return x * torch.from_numpy(mask)


def written(x: Tensor) -> Any:
    """Again and again the same, and views of it."""
    r = np.random.rand(3)
    view = r[:2]
    for _ in range(3):
        r[0] = 1
        r += 1
    first = torch.tensor(r)
    view *= 2
    return x * first.sum().float() * torch.tensor(r).sum().float(), r, view


def branches(x: Tensor) -> Any:
    r = np.random.rand(1)
    r += 0.0
    x = x * 2 if r[0] > 0.5 else x
    r -= 0.25
    return x * 3 if r[0] > 0.5 else x


def written_to_tensor(x: Tensor) -> Any:
    x, places = x.clone(), np.random.permutation(6)[:2]
    x[places] = 0
    x[np.random.rand(6, 4) < 0.3] = 1  # pyright: ignore[reportArgumentType]
    return x


def shuffled_list(x: Tensor) -> Any:
    places = list(range(6))
    random.shuffle(places)
    return x[places] + x[places[:1]], places


def joined(x: Tensor) -> Any:
    rows = [np.random.randn(4) for _ in range(6)]
    rows[0][0] = np.nan
    return torch.nan_to_num(x + torch.tensor(np.stack(rows)).float()), np.array(rows), np.concatenate(rows)


USES: dict[str, Any] = {
    "a branch": coin,
    "arithmetic": arithmetic,
    "minibatches": minibatches,
    "a hole": hole,
    "written to": written,
    "branches on what was written to": branches,
    "a tensor written to by places": written_to_tensor,
    "a list in another order": shuffled_list,
    "joined": joined,
    "an index of an array": lambda x: torch.from_numpy(DATA[np.random.choice(10, 6)]) + x,
    "a loop over it": lambda x: [x := x * scale for scale in np.random.rand(3)][-1],
    "its items": lambda x: (x * (r := np.random.rand(3))[1] + r.sum(), r[2].item(), r.tolist()),
    "places of draws": lambda x: x[np.random.choice(np.random.permutation(6), 6)],
    "numbers for a tensor": lambda x: x * torch.tensor([random.randint(1, 6) for _ in range(6)])[:, None],
    "a slice by NumPy": lambda x: x * np.sqrt(1.0 - np.random.beta(1, 1)),
}


@pytest.mark.parametrize("kind", USES)
def test_what_is_computed_with_draws(kind: str) -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        made = USES[kind](features)
        first, *others = made if isinstance(made, tuple) else (made,)
        return mse_step(model, optimizer, first, targets), others

    twins = Twins(small_world(), step)
    for seed in range(5):
        twins.step(*pair(6, seed))
    assert twins.num_captures <= (1 if "branch" not in kind else 4)
    assert twins.compiled.num_eager_calls == 0


def test_objects_are_not_drawn_in_arrays() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), np.random.choice(["a", None], 3)[0]  # pyright: ignore[reportCallIssue, reportArgumentType]

    world = small_world()()
    with pytest.raises(CaptureError, match="draws an array of object"):
        wholestep.compile(step)(world.model, world.optimizer, *pair())


def lent(x: Tensor) -> Any:
    r = np.random.rand(6, 1)
    scale = torch.from_numpy(r)
    r *= 2
    return x * scale.float()


def printed(x: Tensor) -> Any:
    r = np.random.rand(1)
    print(r)
    r += 1
    return x


def into_the_users(x: Tensor) -> Any:
    DATA[0] = np.random.rand(4) * 2
    return x


def in_memory(x: Tensor) -> Any:
    r = np.random.rand(6, 1) * 2
    torch.from_numpy(r).mul_(2)
    return x, r


REFUSED: dict[str, Any] = {
    "memory of a tensor": lent,
    "what was printed": printed,
    "the user's array": into_the_users,
    "a tensor in its memory": in_memory,
    "text": lambda x: (x, f"{np.random.rand(3) * 2}"),
    "an array for the result": lambda x: (x, np.add(np.random.rand(6), 1, out=np.zeros(6))),
    "a product with a tensor": lambda x: torch.ones(3, dtype=torch.float64) + (np.random.rand(3) * 2),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_told_is_refused(kind: str) -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        made = REFUSED[kind](features)
        return mse_step(model, optimizer, features, targets), made

    world = small_world()()
    before, objects = picture({**vars(world), **generators(), "data": DATA})
    with pytest.raises(CaptureError, match="that it has drawn"):
        wholestep.compile(step)(world.model, world.optimizer, *pair())
    assert differences(before, picture({**vars(world), **generators(), "data": DATA})[0]) == []
    assert len(objects) > 0
