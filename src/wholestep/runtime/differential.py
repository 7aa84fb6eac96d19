"""`verify=N`: the step is run both ways from the same state, and every difference has a name and a likely cause."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Generator, Sequence
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch

from wholestep.errors import VerificationError
from wholestep.runtime import divergence, rounding
from wholestep.runtime.guards import Call
from wholestep.runtime.own_objects import OwnObjects
from wholestep.runtime.specialization import Specialization
from wholestep.runtime.world import Outside, World, observe

_MAX_NAMED = 8


class Peers(Protocol):
    """The other ranks, where several train together."""

    def averaging(self) -> contextlib.AbstractContextManager[None]:
        """What eager does around each backward to have the gradients of all ranks."""
        ...

    def verdicts(self, differences: dict[str, float]) -> list[dict[str, float]]:
        """What each rank has found to differ: the step is right on all of them or on none."""
        ...


def checked_run(
    chosen: Specialization,
    call: Call,
    number: int,
    peers: Peers | None = None,
    outside: Sequence[Outside] = (),
) -> Any:
    """Run a step in eager and through its graph from the same state; raise `VerificationError` if they differ.

    `peers` are the ranks that run the same call; `outside` is what else the step may change. What the step prints and
    logs is said once, by eager. The state afterwards is the graph's. If they differ by more than rounding, it is put
    back to what it was before the call, and if they do so on one rank, on all.
    """
    capture = chosen.capture
    capture.recording.program.undo_draws()
    outside = (*outside, OwnObjects(capture.recording, call))
    world = World.of(capture, call, outside)
    explanation, is_first = "", chosen.num_runs == 0
    try:
        if chosen.may_be_left:  # a call that leaves the graph must not have run in eager, and printed, before it does
            _run_quietly(chosen, call)
            world.restore()
        expected = observe(capture, call, _run_in_eager(call, peers), outside)
        world.restore()
        result = _run_quietly(chosen, call)
        found = observe(capture, call, result, outside)
        differences = compare(expected, found)
        # With several ranks all would have to look closer, or none.
        if differences and peers is None:
            after = World.of(capture, call, outside)
            differences, explanation = _look_closer(chosen, call, world, differences, expected, found)
            after.restore()
        by_rank = [differences] if peers is None else peers.verdicts(differences)
    except BaseException:
        _undo(world, chosen, is_first=is_first)
        raise
    for rank, found_there in enumerate(by_rank):
        if found_there:
            _undo(world, chosen, is_first=is_first)
            whose = "" if peers is None else f" on rank {rank}"
            raise VerificationError(_message(number, whose, found_there, explanation), found_there)
    return result


def _run_quietly(chosen: Specialization, call: Call) -> Any:
    """What the graph returns."""
    current = chosen.capture.recording.current
    current.call = call
    chosen.compute_numbers(call)
    result = chosen.run(call, is_quiet=True)
    chosen.rotation.pending.settle()
    current.call = call  # what is found by way of the arguments is looked at next
    return result


def _run_in_eager(call: Call, peers: Peers | None) -> Any:
    """What eager returns; whoever keeps it keeps its graph, which the updates of the compiled step do not wait for."""
    with _around_backward(peers):
        return call.function(*call.args, **call.kwargs)


def _look_closer(
    chosen: Specialization,
    call: Call,
    world: World,
    differences: dict[str, float],
    expected: dict[str, Any],
    found: dict[str, Any],
) -> tuple[dict[str, float], str]:
    """The differences that are more than rounding, and where they come from; leaves the world as it was before."""
    log = rounding.EagerLog()
    world.restore()
    with log, _quiet():
        call.function(*call.args, **call.kwargs)
    world.restore()
    with _quiet():
        exact = rounding.reference(chosen.capture, call, log, world.restore)
    if exact is not None:
        differences = rounding.unexplained(differences, expected, found, exact)
    explanation = divergence.explain(chosen.capture, call, log) if differences else ""
    world.restore()
    return differences, explanation


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Run what has run before without a word: prints, warnings and logs have been seen."""
    loudest = logging.root.manager.disable
    logging.disable(max(loudest, logging.CRITICAL))
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(loudest)


def _message(number: int, whose: str, differences: dict[str, float], explanation: str) -> str:
    worst = sorted(differences.items(), key=lambda item: -item[1])[:_MAX_NAMED]
    listed = ", ".join(f"{name} by {difference:.3g}" for name, difference in worst)
    return (
        f"step {number} differs from eager{whose} in {len(differences)} values: {listed}; "
        + (f"{explanation}; " if explanation else "")
        + "the state before the step has been restored. Running without wholestep.compile is safe meanwhile"
    )


@contextlib.contextmanager
def _around_backward(peers: Peers | None) -> Generator[None]:
    """Enter a context each time eager code runs a backward."""
    if peers is None:
        yield
        return
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        with peers.averaging():
            original(*args, **kwargs)

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def _undo(world: World, chosen: Specialization, *, is_first: bool) -> None:
    """Put everything back to before the call, which may have been the one that created the optimizer's state."""
    world.restore()
    if is_first:
        chosen.remove_initial_state()


def compare(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Names whose values differ beyond the dtype's default tolerance, with the largest difference."""
    differences: dict[str, float] = {}
    for name in {**expected, **found}:
        if name not in expected or name not in found:
            differences[name] = float("inf")
            continue
        old, new = map(_as_tensor, (expected[name], found[name]))
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            if old != new and not (old != old and new != new):  # NaN is equal to NaN
                differences[name] = float("inf")
            continue
        try:
            torch.testing.assert_close(new, old, equal_nan=True)
        except AssertionError:
            differences[name] = _largest_difference(old, new)
    return differences


def _as_tensor(value: Any) -> Any:
    """Arrays of numbers are compared like tensors."""
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return torch.from_numpy(value.copy()) if is_array else value


def _largest_difference(old: torch.Tensor, new: torch.Tensor) -> float:
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    return float((old.double() - new.double()).abs().nan_to_num(float("inf")).max())
