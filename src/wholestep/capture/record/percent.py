"""`"loss %.4f" % loss.item()`: text by the old operator, which asks C code for the number.

A field for a number that only the graph computes, or that changes from call to call, becomes text with a mark (see
`texts`), made by a field of its own after the graph has run; the operator is left with a plain `%s` for it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wholestep import _torch
from wholestep.capture.record import texts
from wholestep.capture.record.arrays import LateArray
from wholestep.capture.record.numbers import Number, is_late, ledger_of

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_FIELD = re.compile(r"%(?P<key>\(.*?\))?[#0 +-]*(?P<width>\*|\d+)?(?P<cut>\.(?:\*|\d*))?[hlL]?(?P<kind>.)", re.DOTALL)
_OF_NUMBERS = "diouxXeEfFgG"


class Percent:
    """A text whose fields for numbers are made later; it formats once, in place of the text."""

    def __init__(self, recorder: Recorder, text: str) -> None:
        self._recorder, self._text = recorder, text

    def __mod__(self, values: Any) -> str:
        given = values if isinstance(values, (tuple, Mapping)) else (values,)
        fields = [field for field in _FIELD.finditer(self._text) if field["kind"] != "%"]
        by_name = isinstance(given, Mapping)
        if not by_name and len(given) != len(fields):
            return self._text % values  # an error, or a width among the values
        found: dict[int, str] = {}
        for position, field in enumerate(fields):
            value = given[field["key"][1:-1]] if by_name else given[position]
            late = self._late(value) if field["kind"] in _OF_NUMBERS and "*" not in field[0] else None
            if late is not None:
                spec = field[0] if field["key"] is None else field[0].replace(field["key"], "", 1)
                found[position] = _text_of(late, spec)
        numbers = itertools.count()

        def without(field: re.Match[str]) -> str:
            return field[0] if field["kind"] == "%" or next(numbers) not in found else "%s"

        if by_name:  # each field is formatted by itself, as the same name may be asked for twice
            made = [found.get(position) or field[0] % values for position, field in enumerate(fields)]
            return _FIELD.sub(lambda field: "%%" if field["kind"] == "%" else "%s", self._text) % tuple(made)
        left = tuple(found.get(position, value) for position, value in enumerate(given))
        return _FIELD.sub(without, self._text) % left

    __imod__ = __mod__

    def _late(self, value: Any) -> Number | LateArray | None:
        if type(value) is LateArray:
            return value
        if type(value) is Number:
            return value if _is_put_in_later(self._recorder, value) else None
        number = self._recorder.number_in(value) if _torch.is_traced(value) else None
        return number if type(number) is Number else None


def formatting(recorder: Recorder, text: str, values: Any) -> Any:
    """What to use in place of `text` for `text % values`."""
    if texts.is_marked(text) or not (recorder.late.has_texts or texts.may_make(recorder)):
        return text
    given = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    _refuse_padding(recorder, text, values, [*given])
    is_later = any(_is_put_in_later(recorder, value) or _torch.is_traced(value) for value in given)
    return Percent(recorder, text) if is_later else text


def _is_put_in_later(recorder: Recorder, value: Any) -> bool:
    """Whether a value is a number whose text is made after the graph has run."""
    return (
        is_late(value) or type(value) is LateArray or (type(value) is Number and recorder.ledger.text_later is not None)
    )


def _text_of(value: Number | LateArray, spec: str) -> str:
    if type(value) is Number:
        return ledger_of(value).text(_made, value, spec)
    assert type(value) is LateArray
    return value.late.ledger.text_of(_made, value, spec)


def _refuse_padding(recorder: Recorder, text: str, values: Any, given: list[Any]) -> None:
    """Refuse `"%12s" % loss` and `"%r" % f"{loss}"`: text with a mark is to be left as it is."""
    fields = [field for field in _FIELD.finditer(text) if field["kind"] != "%"]
    is_padded = [bool(field["width"] or field["cut"]) and field["kind"] in "sra" for field in fields]
    is_whole = [field["kind"] == "s" and not padded for field, padded in zip(fields, is_padded, strict=True)]
    is_in_order = len(given) == len(fields) and not isinstance(values, Mapping)
    if any(is_padded):
        texts.refuse_made_of(recorder, itertools.compress(given, is_padded) if is_in_order else given)
    if is_in_order:
        given = [value for value, whole in zip(given, is_whole, strict=True) if not (whole and texts.is_marked(value))]
    texts.refuse_marked(recorder, given)


def _made(number: Any, spec: str) -> str:
    return spec % number
