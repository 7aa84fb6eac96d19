"""One case: a world trained in eager and compiled, compared bit for bit after every step, and how that went."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
import signal
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from tests.parity import RandomStream
from tests.pictures import Picture, differences, picture
from tests.twins import Twins, World

import wholestep

SECONDS = 60
HELD_BACK_SEED = 16
_CLOSE = 1e-5
_RAW = re.compile(r"\w+(Error|Exception|Exit|Interrupt): ")


class Kind(StrEnum):
    """How a case ended, the best first."""

    BITWISE = "bitwise"
    CLOSE = "close"
    REFUSED = "refused"
    UNTOLD = "refused, untold"
    """With an error of torch's instead of a sentence of ours."""
    SLOW = "too slow"
    WRONG = "wrong"
    EXCLUDED = "excluded"
    """Eager itself raises, or gives something else the second time."""


@dataclass(frozen=True)
class Case:
    """`step(world, *args)` for each of `args` in turn; `family` is what a table counts."""

    family: str
    name: str
    build: Callable[[], World]
    step: Callable[..., Any]
    args: Sequence[tuple[Any, ...]]
    between: Callable[..., None] | None = None
    """What is done to the world before a step, from outside: a schedule."""
    most_captures: int | None = None
    excluded: str = ""


@dataclass(frozen=True)
class Outcome:
    case: Case
    kind: Kind
    detail: str = ""
    num_captures: int = 0


class _TooSlow(BaseException):
    """Not an Exception: nothing that runs in between may take it for one of its own."""


def run(case: Case) -> Outcome:
    """Train a case; whatever goes wrong is an outcome."""
    if case.excluded:
        return Outcome(case, Kind.EXCLUDED, case.excluded)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            with _within(SECONDS):
                reason = _is_eager_steady(case)
                return Outcome(case, Kind.EXCLUDED, reason) if reason else _trained(case)
        except _TooSlow:
            return Outcome(case, Kind.SLOW, f"not done in {SECONDS} s")


def _trained(case: Case) -> Outcome:
    twins: Twins | None = None
    try:
        twins = Twins(case.build, case.step, call=_call)
        for number, args in enumerate(case.args):
            if case.between is not None:
                twins.change(functools.partial(case.between, number=number))
            twins.step(*args)
    except wholestep.CaptureError as error:
        return Outcome(case, Kind.REFUSED if _is_told(error) else Kind.UNTOLD, str(error))
    except AssertionError as error:
        captures = 0 if twins is None else twins.num_captures
        return Outcome(case, _kind_of_difference(str(error)), str(error), captures)
    except Exception as error:
        return Outcome(case, Kind.UNTOLD, f"{type(error).__name__}: {error}")
    if case.most_captures is not None and twins.num_captures > case.most_captures:
        return Outcome(case, Kind.SLOW, f"{twins.num_captures} captures: {twins.reasons}", twins.num_captures)
    return Outcome(case, Kind.BITWISE, "", twins.num_captures)


def _call(world: World, step: Callable[..., Any], *args: Any) -> Any:
    return step(world, *args)


def _is_told(error: wholestep.CaptureError) -> bool:
    """Whether it is a sentence of ours with a line and a remedy."""
    is_ours = _RAW.match(error.message) is None and "data-dependent expression" not in error.message
    return is_ours and error.location is not None and error.advice is not None


def _kind_of_difference(text: str) -> Kind:
    lines = text.splitlines()[1:]
    gaps = [re.search(r": max abs difference (\S+) in", line) for line in lines]
    are_close = bool(lines) and all(gap is not None and float(gap[1]) <= _CLOSE for gap in gaps)
    return Kind.CLOSE if are_close else Kind.WRONG


def _is_eager_steady(case: Case) -> str:
    """Why eager is nothing to compare with, if it is not."""
    seen: list[Picture] = []
    for _ in range(2):
        try:
            with RandomStream(0).active():
                world = case.build()
            with RandomStream(1).active():
                returned = [_stepped(case, world, number) for number in range(len(case.args))]
        except Exception as error:
            return f"eager raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        seen.append(picture({**vars(world), "returned": returned}, torchs_by_value=True)[0])
    lines = differences(seen[0], seen[1])
    return f"eager differs from itself: {lines[0]}" if lines else ""


def _stepped(case: Case, world: World, number: int) -> Any:
    if case.between is not None:
        case.between(world, number=number)
    return case.step(world, *copy.deepcopy(case.args[number]))


@contextlib.contextmanager
def _within(seconds: int) -> Generator[None]:
    def stop(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def held_back(families: Iterable[str]) -> frozenset[str]:
    """A fifth of the families, which nobody looks at while working on the others."""
    names = sorted(set(families))
    return frozenset(random.Random(HELD_BACK_SEED).sample(names, len(names) // 5))
