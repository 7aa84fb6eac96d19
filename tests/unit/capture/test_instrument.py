"""Instrumented code tells of each call and attribute, in the order in which they happen, on every version of Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from wholestep.capture.record import instrument
from wholestep.capture.record.instrument import Instrumenter

Told = list[tuple[str, Any]]


class Base:
    """What `super()` finds."""

    factor = 2.0

    def scale(self, value: float = 1.0, *, by: float = 1.0) -> float:
        return value * by * self.factor


class Derived(Base):
    def by_super(self) -> float:
        return super().scale(3.0) + super().factor

    def by_arguments(self) -> float:
        return super(Derived, self).scale(by=super(Derived, self).factor)  # noqa: UP008


def calls_globals(one: Derived) -> Any:
    return max(len([1, 2]), abs(-3))


def calls_attributes(one: Derived) -> Any:
    return math.sqrt(one.scale(4.0, by=one.factor))


def calls_with_stars(one: Derived) -> Any:
    keywords = {"by": 3.0}
    return one.scale(*(2.0,), **keywords)


def calls_in_comprehensions(one: Derived) -> Any:
    return [one.scale(value) for value in range(2)], sum(abs(value) for value in (1, -1))


def calls_what_it_defines(one: Derived) -> Any:
    def scaled(value: float, extra: float = one.factor) -> float:
        return one.scale(value) + extra

    return (lambda value: scaled(value))(2.0)


def calls_under_conditions(one: Derived) -> Any:
    try:
        return one.scale(float("1") if one.factor > 1 else 0.0) if bool(one) else None
    finally:
        len("end")


CASES: dict[str, tuple[Callable[[Derived], Any], list[str], list[str]]] = {
    "super": (Derived.by_super, ["super", "scale", "super"], ["scale", "factor"]),
    "super with arguments": (Derived.by_arguments, ["super", "super", "scale"], ["scale", "factor"]),
    "globals": (calls_globals, ["len", "abs", "max"], []),
    "attributes": (calls_attributes, ["scale", "sqrt"], ["sqrt", "scale", "factor"]),
    "stars": (calls_with_stars, ["scale"], ["scale"]),
    "comprehensions": (
        calls_in_comprehensions,
        ["range", "scale", "scale", "sum", "abs", "abs"],
        ["scale", "scale"],
    ),
    "definitions": (calls_what_it_defines, ["<lambda>", "scaled", "scale"], ["factor", "scale"]),
    "conditions": (calls_under_conditions, ["bool", "float", "scale", "len"], ["scale", "factor"]),
}


def telling() -> tuple[Instrumenter, Told]:
    """An instrumenter whose hooks note what they are told, and leave everything as it is."""
    told: Told = []

    def hook(name: str) -> Callable[..., Any]:
        def tell(*about: Any) -> Any:
            told.append((name, about))
            return about[0] if about else None

        return tell

    tables = (instrument._OPERANDS, instrument._NAMED, instrument._GLOBALS, instrument._CELLS)
    names = {entry[0] for table in tables for entry in table.values()}
    others = ("call", "call_with", "item", "binary", "match_class", "truth", "shown", "formatted")
    return Instrumenter({name: hook(name) for name in names.union(others)}), told


@pytest.mark.parametrize("name", CASES)
def test_each_call_and_attribute_is_told(name: str) -> None:
    function, calls, attributes = CASES[name]
    assert isinstance(function, FunctionType)
    instrumenter, told = telling()
    code = instrumenter.instrumented(function.__code__)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    assert copy(Derived()) == function(Derived())
    assert [about[0].__name__ for hook, about in told if hook in ("call", "call_with")] == calls
    assert [about[1] for hook, about in told if hook == "attribute"] == attributes
