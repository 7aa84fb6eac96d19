"""What a user sees of an error: their own frames, and those of tracing only if they ask for them."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.twins import SmallNet, mse_step, pair, small_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.optim import Optimizer

import wholestep

X, Y = pair()


def branching_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    if loss > 3:
        loss = loss * 2
    loss.backward()
    optimizer.step()
    return loss


def files_of(step: Callable[..., Any], kind: type[Exception], *args: Any) -> list[str]:
    """The files of the frames from the test down, the causes included."""
    world = small_world()()
    with pytest.raises(kind) as caught:
        wholestep.compile(step)(world.model, world.optimizer, *(args or (X, Y)))
    errors: list[BaseException | None] = [caught.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__cause__ or errors[-1].__context__)
    return [frame.filename for error in errors if error for frame in traceback.extract_tb(error.__traceback__)]


def ours(files: list[str]) -> list[str]:
    return [file for file in files if "/src/wholestep/" in file]


def test_a_refusal_shows_the_frames_of_the_user() -> None:
    files = files_of(branching_step, wholestep.CaptureError)
    assert len(ours(files)) <= 1
    assert not any("/torch/" in file for file in files)
    assert files[-1] == __file__


def test_an_error_of_the_users_own_shows_no_other_frames() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        mse_step(model, optimizer, x, y)
        raise LookupError("not here")

    files = files_of(step, LookupError)
    assert ours(files) == []


def test_an_error_of_a_graph_hides_what_runs_it() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    assert len(ours(files_of(step, IndexError, X, torch.full((6,), 9)))) <= 1


def test_all_frames_are_shown_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_DEBUG", "1")
    assert len(ours(files_of(branching_step, wholestep.CaptureError))) > 5


# What is said of other tensors


class Own(torch.Tensor):
    """A subclass with a dispatch of its own, as quantised tensors are."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_tensors_of_another_class_are_refused_by_name() -> None:
    world = small_world()()
    batch = torch.Tensor._make_subclass(Own, X.clone())
    with pytest.raises(wholestep.CaptureError, match=r"batch.features is a Own, a tensor subclass.*plain tensor"):
        wholestep.compile(mse_step)(world.model, world.optimizer, batch, Y)


def test_distributed_tensors_are_refused_by_name(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = distribute_module(SmallNet(), init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(wholestep.CaptureError, match=r'is a DTensor, .*data_parallel="replicate"'):
            wholestep.compile(mse_step)(model, optimizer, X, Y)
    finally:
        dist.destroy_process_group()
