"""JSON from files that nobody vouches for: parsed within limits, read with its types, refused in one sentence.

Whatever is in such a file, reading it costs time and memory in proportion to its size, and fails with a
`FileError` only, which those who read make an error of their own (`refused_as`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterable
from typing import Any, TypeVar, cast

from wholestep.errors import WholestepError

T = TypeVar("T")


class FileError(WholestepError):
    """A file is not what it should be; nobody but those who read sees it."""


_MAX_SHOWN = 60
_INT64 = range(-(2**63), 2**63)


@contextlib.contextmanager
def refused_as(kind: type[WholestepError]) -> Generator[None]:
    """What cannot be read in this block is an error of some kind."""
    try:
        yield
    except FileError as error:
        raise kind(str(error)) from error


def parse(data: bytes, what: str) -> dict[str, Any]:
    """The object that UTF-8 JSON describes. Repeated keys, NaN and what nests too deeply are refused."""

    def refuse_constant(text: str) -> Any:
        raise FileError(f"{what} is no JSON: it has the number {text}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise FileError(f"{what} gives a key of one object twice")
        return found

    try:
        value: Any = json.loads(data.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=unique)
    except FileError:
        raise
    except RecursionError as error:
        raise FileError(f"{what} nests too deeply") from error
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise FileError(f"{what} is no JSON: {shown(str(error))}") from error
    return mapping(value, what)


def dump(value: Any) -> bytes:
    """A value as JSON, with keys in the order that they have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def fingerprint(value: Any) -> str:
    """The SHA-256 of a value, however it was written down: keys are sorted for it."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (RecursionError, ValueError) as error:
        raise FileError("the file nests too deeply or has numbers out of range") from error
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def shown(value: object) -> str:
    """A piece of a hostile file as part of a message: short, and in characters that every terminal can show."""
    text = ascii(value) if not isinstance(value, str) else ascii(value)[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{what} is an object, not {_kind(value)}")
    return cast("dict[str, Any]", value)


def array(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FileError(f"{what} is an array, not {_kind(value)}")
    return cast("list[Any]", value)


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise FileError(f"{what} is a string, not {_kind(value)}")
    return value


def string(value: Any, what: str) -> str:
    """Text on one line. Names and source lines get into comments of graphs that are printed as Python."""
    if not text(value, what).isprintable():
        raise FileError(f"{what} has characters that cannot be printed")
    return value


def integer(value: Any, what: str, allowed: range = _INT64) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise FileError(f"{what} is a whole number, not {_kind(value)}")
    if value not in allowed:
        raise FileError(f"{what} is {shown(value)}, which is out of range")
    return value


def strings(value: Any, what: str) -> tuple[str, ...]:
    return tuple([string(item, what) for item in array(value, what)])


def integers(value: Any, what: str, allowed: range = _INT64) -> tuple[int, ...]:
    return tuple([integer(item, what, allowed) for item in array(value, what)])


def fields(value: Any, what: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """An object with these keys and no others."""
    found = mapping(value, what)
    required = set(required)
    missing = sorted(required - found.keys())
    if missing:
        raise FileError(f"{what} has no '{missing[0]}'")
    unknown = sorted(found.keys() - required.union(optional))
    if unknown:
        raise FileError(f"{what} has a key that is not known: '{shown(unknown[0])}'")
    return found


def one_of(name: str, known: dict[str, T], what: str) -> T:
    if name not in known:
        raise FileError(f"there is no {what} '{shown(name)}' here")
    return known[name]


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")
