"""NumPy that computes with what the graph computes: it does so after the graph has run, or inside, for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep import CaptureError

WEIGHTS = np.array([1.0, 2.0, 0.5], dtype=np.float32)
NAMES = ["one", "two", "three"]
Compute = Callable[[Any, Tensor, Tensor], Any]


def trained(step: Callable[..., Any], captures: int | None = 1, build: Any = None, **options: Any) -> Twins:
    twins = Twins(build or small_world(), step, **options)
    for seed in range(4):
        twins.step(*pair(seed=seed))
    assert captures is None or twins.num_captures == captures, twins.reasons
    assert twins.compiled.num_eager_calls == 0
    return twins


def after(compute: Compute) -> Callable[..., Any]:
    """A step that computes behind the update."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        optimizer.zero_grad()
        output = model(features)
        loss = F.mse_loss(output, targets)
        loss.backward()
        optimizer.step()
        return compute(output.detach().numpy(), output.detach(), loss.detach())

    return step


def written(array: Any) -> Any:
    copied = array.copy()
    copied[0] = 0
    copied += 1
    copied[copied > 1.5] = 7
    copied.sort(axis=1)
    return copied, copied.sum(), copied[1:]


COMPUTED: dict[str, Compute] = {
    "accuracy": lambda a, t, loss: [np.mean(np.argmax(a, axis=1) == 1), np.sum(a.argmax(1) == 2) / float(a.size)],
    "types": lambda a, t, loss: (type(a.mean()), a.dtype.name, a.ndim, a.shape, len(a), isinstance(a.max(), float)),
    "joined": lambda a, t, loss: np.concatenate([a, a[:2], np.stack([a, a])[0]], axis=0),
    "of numbers": lambda a, t, loss: (np.array([loss.item(), 2, a.max()]) / 3, np.mean([loss.item(), 1.0])),
    "python": lambda a, t, loss: (float(a.max()), round(float(a.mean()), 2), int(a[0, 0] * 9), a[0].tolist()),
    "iterated": lambda a, t, loss: [(i, row.sum(), [x.item() for x in row]) for i, row in enumerate(a)],
    "sums": lambda a, t, loss: (sum(a[0]), max(a[0]), min([loss.item(), a.mean()]), sum([loss.item(), 2.5])),
    "of values": lambda a, t, loss: (a[a > 0], np.unique(a.argmax(1)), len(np.unique(a.argmax(1))), np.where(a > 0)[0]),
    "confusion": lambda a, t, loss: np.bincount(3 * a.argmax(1) + 1, minlength=9).reshape(3, 3),
    "looked up": lambda a, t, loss: (WEIGHTS[a.argmax(1)], NAMES[a.argmax(1)[0]], a[np.arange(len(a)), a.argmax(1)]),
    "written": lambda a, t, loss: written(a),
    "compared": lambda a, t, loss: {"better": loss.item() < 1.2, "small": a.mean() < 0.1, "all": bool((a < 9).all())},
    "as text": lambda a, t, loss: (f"{a.mean():.2f} {a[0]}", "%.3f %s" % (loss.numpy(), a[0]), str(a)),  # noqa: UP031
    "scalars": lambda a, t, loss: (
        a.mean() * 3,
        2 / a.max(),
        np.float64(2) * a.min(),
        a.mean().astype(np.float64) ** 2,
    ),
    "linear": lambda a, t, loss: (np.linalg.norm(a, axis=1), np.percentile(a, [10, 50]), np.corrcoef(a.T)),
    "views": lambda a, t, loss: (a, a[0], a.T, a.reshape(-1)[1:]),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_computed_after_the_graph(compute: Compute) -> None:
    trained(after(compute))


def keeping(world: World, features: Tensor, targets: Tensor) -> None:
    world.optimizer.zero_grad()
    loss = F.mse_loss(world.model(features), targets)
    value = loss.detach().cpu().numpy()
    loss.backward()
    world.optimizer.step()
    world.total += value * features.shape[0]
    world.best = max([world.best, float(value)])
    world.seen.append(np.round(value, 2))
    print("mean %.3f" % np.mean(world.seen[-1:]), value)  # noqa: UP031


def test_kept_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> World:
        world = small_world()()
        world.total, world.best, world.seen = 0, 0.0, []
        return world

    twins = trained(keeping, None, build, call=lambda world, step, *args: step(world, *args))
    assert twins.num_captures <= 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mean")]
    assert len(lines) == 8
    assert lines[::2] == lines[1::2]


def around_the_update(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    """The array of a parameter is its memory: it is another one behind the update."""
    weight = model.first.weight.detach().numpy()
    before, copied = np.linalg.norm(weight), weight.copy()
    optimizer.zero_grad()
    F.mse_loss(model(features), targets).backward()
    optimizer.step()
    return before, np.linalg.norm(weight), np.abs(weight - copied).max(), copied


OPTIONS: list[dict[str, Any]] = [{}, {"cross_iteration": "all"}, {"passes": ""}, {"verify": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "waiting", "unchanged", "verified"])
def test_around_the_update(options: dict[str, Any]) -> None:
    trained(around_the_update, **options)


def test_what_is_printed_is_what_it_was_then(capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> None:
        bias = model.second.bias.detach()
        print("bias", bias, bias.numpy(), [bias], {"b": bias.numpy()})
        optimizer.zero_grad()
        F.mse_loss(model(features), targets).backward()
        optimizer.step()

    trained(step)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bias")]
    assert lines[::2] == lines[1::2]
    assert len({*lines}) == 4


ABOUT: dict[str, Any] = {"axes": (0,), "rows": [0, 1], "weights": np.ones(3), "digits": 1}


def test_what_it_is_told_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(array: Any, output: Tensor, loss: Tensor) -> Any:
        means = array.mean(axis=ABOUT["axes"]), np.sum(array, axis=ABOUT["axes"])
        return (
            means,
            array[ABOUT["rows"]],
            array * ABOUT["weights"],
            np.round(array, ABOUT["digits"]),
            array[ABOUT["axes"]],
        )

    twins = Twins(small_world(), after(compute))
    changes: list[dict[str, Any]] = [{}, {"axes": (1,)}, {"rows": [2]}, {"weights": np.zeros(3)}, {"digits": 2}, {}]
    for seed, change in enumerate(changes):
        for name, value in change.items():
            monkeypatch.setitem(ABOUT, name, value)
        twins.step(*pair(seed=seed))


def by_array(make: Callable[[Any, Any, Tensor], Tensor]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        optimizer.zero_grad()
        output = model(features)
        loss = make(output.detach().numpy(), targets.numpy(), (output - targets).square())
        loss.backward()
        optimizer.step()
        return loss

    return step


GIVEN: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "weights": lambda out, y, errors: (errors * torch.from_numpy(np.exp(-np.abs(out - y)))).mean(),
    "tensor": lambda out, y, errors: (errors * torch.tensor(out / np.mean(np.abs(out)))).mean(),
    "a number": lambda out, y, errors: errors.mean() * np.mean(out**2) + torch.tensor(np.std(y)) * errors.sum(),
    "double": lambda out, y, errors: (errors * torch.tensor(out.astype(np.float64).mean(axis=0))).mean().float(),
    "hardest": lambda out, y, errors: errors[np.argsort(np.abs(out - y).sum(1))[-2:].copy()].mean(),
    "old names": lambda out, y, errors: errors[torch.LongTensor(np.abs(y).argmax(0))].mean() + torch.Tensor(out).sum(),
    "of the batch": lambda out, y, errors: (errors * torch.as_tensor(WEIGHTS[(y > 0).sum(1) % 3])[:, None]).mean(),
    "as it is": lambda out, y, errors: (errors * torch.from_numpy(out) + torch.tensor(y)).mean(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
def test_given_back_to_torch(make: Callable[[Any, Any, Tensor], Tensor]) -> None:
    trained(by_array(make))


def test_given_back_within_a_memory_budget() -> None:
    trained(by_array(GIVEN["hardest"]), memory_budget=0.0)


def test_another_batch_size() -> None:
    twins = Twins(small_world(), by_array(GIVEN["tensor"]))
    for size in (6, 6, 4, 5):
        twins.step(*pair(size, seed=size))


def stale(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    row = model.first.weight.detach().numpy()[0]
    optimizer.zero_grad()
    F.mse_loss(model(features), targets).backward()
    optimizer.step()
    return row.sum()


def kept_view(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    optimizer.zero_grad()
    F.mse_loss(model(features), targets).backward()
    optimizer.step()
    return model.first.weight.detach().numpy()[0]


def two_views(array: Any, output: Tensor, loss: Tensor) -> Any:
    copied = array.copy()
    row = copied[0]
    copied += 1
    return row.sum()


REFUSED: dict[str, tuple[Any, str]] = {
    "branch": (after(lambda a, t, loss: 1 if a.mean() > 0.5 else 2), "a comparison needs a value"),
    "a set": (after(lambda a, t, loss: {*a[0]}), "needs a value"),
    "a view of a parameter, later": (stale, "uses a view of an array that was written to since"),
    "a view that is kept": (kept_view, "a view of an array of a parameter"),
    "a view, written through its base": (after(two_views), "uses a view of an array that was written to since"),
    "memory of a tensor": (after(lambda a, t, loss: a.fill(0)), "shares its memory with a tensor"),
    "out": (after(lambda a, t, loss: np.add(a, 1, out=np.zeros((6, 3)))), "with an array that is only known"),
    "a function of Python": (after(lambda a, t, loss: np.vectorize(abs)(a)), "array that is only known|looks into"),
    "an array and a tensor": (after(lambda a, t, loss: t * a), "computes with an array and a tensor"),
    "an item of a tensor": (after(lambda a, t, loss: t.__setitem__(0, a[0])), "array"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("step", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused(step: Any, reason: str) -> None:
    world = small_world()()
    with pytest.raises(CaptureError, match=reason):
        wholestep.compile(step)(world.model, world.optimizer, *pair())
