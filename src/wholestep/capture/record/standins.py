"""What stands in for the user's values while a step is traced, and what it is taken for: nobody is to notice it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from wholestep import _torch
from wholestep.capture.record.arrays import LateArray, LateObject
from wholestep.capture.record.early_arrays import EarlyArray
from wholestep.capture.record.numbers import Number, is_late, kind_of, kinds_of

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

# Sizes, step counts and learning rates are symbols.
_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_ARRAYS = (LateArray, LateObject, EarlyArray)


class OfClass:
    """Something that says to be of a class when it is asked for `__class__`."""

    __slots__ = ("_kind",)

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        return self._kind


def is_number(value: Any) -> bool:
    """Whether a value stands in for a number of Python."""
    return type(value) is Number or type(value) in _KINDS


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether values are numbers of Python or stand in for one."""
    return all(is_number(value) or type(value) in (int, float) for value in values)


def is_stand_in(value: Any) -> bool:
    """Whether a value is one of the trace's own: none may be left in a user's object."""
    return is_number(value) or _torch.is_traced(value) or type(value) in _ARRAYS


def type_of(recorder: Recorder, value: Any) -> type:
    """`type(value)` as it would be in eager."""
    if type(value) is Number:
        _require_kind(recorder, value)
        if len(kinds_of(value)) > 1:
            _refuse_types(recorder)
        return kind_of(value)
    if type(value) in _ARRAYS:
        return np.ndarray
    if _torch.is_traced(value):
        return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
    return recorder.type_of_rate(value) or _KINDS.get(type(value), type(value))


def is_instance(recorder: Recorder, value: Any, kinds: Any) -> bool:
    """`isinstance(value, kinds)` for a number as it would be in eager."""
    if type(value) is not Number:
        return isinstance(type_of(recorder, value)(), kinds)
    _require_kind(recorder, value)
    [answer, *others] = {isinstance(kind(), kinds) for kind in kinds_of(value)}
    if others:
        _refuse_types(recorder)
    return answer


def refuse_identity(recorder: Recorder, left: Any, right: Any) -> None:
    """Refuse `flag is True` for a value that stands for another: Python has one object for each truth value."""
    are_others = any(is_late(one) or (type(one) is Number and kind_of(one) is bool) for one in (left, right))
    if left is not right and are_others and {*kinds_of(left)} & {*kinds_of(right)} & {bool, int}:
        recorder.refuse(
            "asks with is for a value that is only known when the step runs",
            "Compare with ==, or use the truth value itself",
        )


def _require_kind(recorder: Recorder, number: Number) -> None:
    if is_late(number):
        recorder.late.require_kind(number)


def _refuse_types(recorder: Recorder) -> None:
    recorder.escalate()
    recorder.refuse(
        "asks for the type of a number that depends on a value which is only known when the step runs",
        "Convert it with float(), or ask after the call",
    )
