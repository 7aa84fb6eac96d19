"""Tensors that a step draws from a `torch.Generator` of its own: drawn again at each call, before the graph.

    torch.randint(0, 2, p.shape, generator=self.generator)      an input of the graph

That generator is asked by nobody else than such calls, so that only their own order counts. What is drawn must follow
from plain values: `x.normal_(generator=g)` is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from wholestep import _recording_torch
from wholestep.capture import source
from wholestep.capture.record.numbers import is_late, is_number, name_of, settled
from wholestep.capture.record.places import is_plain
from wholestep.capture.session import Session
from wholestep.errors import CaptureError

_DRAWS = (torch.rand, torch.randn, torch.randint, torch.randperm)


def of_call(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Generator | None:
    """The generator among the arguments of a function of torch."""
    given = (*args, *(kwargs or {}).values())
    return next((value for value in given if isinstance(value, torch.Generator)), None)


def drawn(
    session: Session, generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """What a call draws, as an input; refuses what cannot be drawn before the graph."""
    recorder = session.recorder
    others = [value for value in (*args, *kwargs.values()) if value is not generator]
    is_global = any(generator is one for one in _recording_torch.generators())  # its draws are ops, in order
    is_known = recorder.place_of(generator) is not None and not (is_global or recorder.is_drawing)
    if func not in _DRAWS or not is_known or not all(map(_is_repeatable, others)) or kwargs.get("requires_grad"):
        raise CaptureError(
            "the step draws from a torch.Generator of its own",
            location=source.current_location(),
            advice="Draw with torch.rand, randn, randint or randperm from a generator that was made before the step, "
            "or from the global generator (without generator=)",
        )
    draw = functools.partial(func, *map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
    recorder.keep_generator(generator)
    recorder.num_deeds += 1
    with _recording_torch.untraced():
        tensor = draw()
    number = recorder.ledger.computed(f"{recorder.ledger.constant(draw)}()", tensor)
    recorder.drawn_tensors[id(tensor)] = tensor, name_of(number), _as_it_is
    return session.adopt(tensor)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_repeatable(value: Any) -> bool:
    if type(value) in (tuple, list, torch.Size):
        return all(map(_is_repeatable, value))
    return is_plain(value) or (is_number(value) and not is_late(value))


def _plain(value: Any) -> Any:
    return type(value)(map(_plain, value)) if type(value) in (tuple, list, torch.Size) else settled(value)
