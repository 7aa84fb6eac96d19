"""A tensor of the trace that somebody keeps, unseen by the recording, is found when the trace is over."""

import gc
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.twins import small_world, square_step
from torch import Tensor, nn

import wholestep
from wholestep import _torch
from wholestep.capture import capture
from wholestep.capture.leftovers import HandedOut
from wholestep.capture.record import follow
from wholestep.errors import CaptureError

UNFOLLOWED = "<as C code would>"


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that keeps what it is given, in code that no recording looks into."""
    monkeypatch.setitem(follow._is_followed, UNFOLLOWED, False)  # pyright: ignore[reportPrivateUsage]
    namespace: dict[str, Any] = {}
    exec(compile("kept = []\ndef keep(value): kept.append(value)", UNFOLLOWED, "exec"), namespace)
    return namespace["keep"]


def test_what_is_kept_unseen_is_refused(keep: Any) -> None:
    world = small_world()()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor) -> Tensor:
        loss = model(features).square().mean()
        keep(loss)
        loss.backward()
        optimizer.step()
        return loss.detach()

    # The fixture of all tests looks too, and finds it where it is: the refusal is what its error comes from.
    with pytest.raises(AssertionError, match="left behind by a refused call: a FunctionalTensor") as found:
        wholestep.compile(step)(world.model, world.optimizer, torch.randn(4, 4))
    refusal = found.value.__context__
    assert isinstance(refusal, CaptureError)
    assert re.search(r"a tensor of shape \[\].*was kept by", str(refusal))


def functional() -> Tensor:
    with _torch.FunctionalTensorMode():
        return _torch.to_functional(torch.ones(2))


def test_whoever_keeps_it_is_named() -> None:
    handed_out, owner, tensor = HandedOut(), SimpleNamespace(), functional()
    handed_out.add(tensor)
    owner.cache = [{"loss": tensor}]
    del tensor
    with pytest.raises(CaptureError, match=r"kept by a types\.SimpleNamespace"):
        handed_out.require_gone()


def test_cycles_are_not_kept() -> None:
    handed_out = HandedOut()
    gc.disable()
    try:
        cycle: list[Any] = [functional()]
        handed_out.add(cycle[0])
        cycle.append(cycle)
        gc.collect(0)  # by now it is not among the young
        del cycle
        handed_out.require_gone()
    finally:
        gc.enable()


def test_a_capture_looks_among_the_young_only() -> None:
    """A full collection walks over all that the process holds, which takes longer than most captures."""
    world = small_world()()
    gc.collect()
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(100, 2, 2)  # what survives two collections is old
    try:
        capture(square_step, (world.model, world.optimizer, torch.randn(4, 4)), {})
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert 2 not in generations


def test_a_capture_leaves_nothing() -> None:
    world = small_world()()
    compiled = wholestep.compile(square_step)
    for size in (4, 3):
        compiled(world.model, world.optimizer, torch.randn(size, 4))
    assert not [value for value in gc.get_objects() if type(value) is _torch.FunctionalTensor]
