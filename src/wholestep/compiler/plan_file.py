"""plan.json: a `Plan` in a file with a version and a fingerprint.

    {"format": "wholestep-plan", "version": 2, "fingerprint": <SHA-256 of the rest>, "plan": {...}}

Reading runs nothing: every value must have the type that the dataclasses say, keys that are missing or unknown are
refused, text is on one line and numbers are finite and not negative. Whatever is wrong is a `PlanFileError`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholestep import _strict_json as strict_json
from wholestep.compiler.plan import Plan
from wholestep.errors import PassError, PlanFileError
from wholestep.passes import Pipeline

FORMAT = "wholestep-plan"
VERSION = 2
MAX_BYTES = 64 * 2**20
"""Of a file; the plan of a model with 32 layers has about one megabyte."""

_COUNT = range(2**63)


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object, with its fingerprint; raises `PlanFileError` if it could not be read back."""
    body = _plain(plan)
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError as error:
        raise PlanFileError(f"the plan has a figure that is no number: {error}") from error
    content = json.loads(text)
    whole = {"format": FORMAT, "version": VERSION, "fingerprint": strict_json.fingerprint(content), "plan": content}
    from_json(json.dumps(whole).encode("ascii"), "the plan")
    return whole


def save_plan(plan: Plan, path: Path) -> Path:
    """Write a file that `load_plan` reads, creating folders on the way."""
    text = json.dumps(to_json(plan), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise PlanFileError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def load_plan(path: Path) -> Plan:
    """Read a plan; raises `PlanFileError` if the file is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return from_json(data, str(path))


def from_json(data: bytes, what: str = "the plan") -> Plan:
    """Read what `to_json` made; raises `PlanFileError` for anything else."""
    if len(data) > MAX_BYTES:
        raise PlanFileError(f"{what} has more than {MAX_BYTES} bytes and is not read")
    try:
        with strict_json.refused_as(PlanFileError):
            return _read(data, what)
    except RecursionError as error:
        raise PlanFileError(f"{what} nests too deeply") from error


def _read(data: bytes, what: str) -> Plan:
    found = strict_json.parse(data, what)
    if found.get("format") != FORMAT:
        raise PlanFileError(f"{what} is no plan: its 'format' is not '{FORMAT}'")
    version = strict_json.integer(found.get("version"), f"version of {what}")
    if version != VERSION:
        raise PlanFileError(f"{what} has version {version}; this release reads {VERSION}")
    found = strict_json.fields(found, what, ("format", "version", "fingerprint", "plan"))
    if found["fingerprint"] != strict_json.fingerprint(found["plan"]):
        raise PlanFileError(f"{what} has been changed or is damaged: it does not have its own fingerprint")
    return _value(found["plan"], Plan, what)


def _plain(value: Any) -> Any:
    """A value as JSON has it: pipelines as their text."""
    if isinstance(value, Pipeline):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value


def _pipeline(value: Any, what: str) -> Pipeline:
    text = strict_json.string(value, what)
    try:
        return Pipeline.parse(text)
    except PassError as error:
        raise PlanFileError(f"{what} is no pipeline of passes ({error})") from error


def _value(value: Any, kind: Any, what: str) -> Any:
    """A JSON value as what a type says: a dataclass, a tuple or mapping of one kind, text, a number, or None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Pipeline:
        return _pipeline(value, what)
    if dataclasses.is_dataclass(kind):
        return _dataclass(value, typing.cast("type[Any]", kind), what)
    if origin is types.UnionType:
        [other] = [each for each in arguments if each is not types.NoneType]
        return None if value is None else _value(value, other, what)
    if origin is tuple:
        return tuple([_value(item, arguments[0], f"an item of {what}") for item in strict_json.array(value, what)])
    if origin is Mapping:
        items = strict_json.mapping(value, what).items()
        names = {key: strict_json.string(key, f"a key of {what}") for key, _ in items}
        return {names[key]: _value(item, arguments[1], f"'{names[key]}' of {what}") for key, item in items}
    return _PLAIN[kind](value, what)


def _dataclass(value: Any, kind: type[Any], what: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    found = strict_json.fields(value, what, names)
    return kind(**{name: _value(found[name], hints[name], f"'{name}' of {what}") for name in names})


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanFileError(f"{what} is a number, not {strict_json.shown(value)}")
    if isinstance(value, int):  # some have more digits than a float can take
        value = strict_json.integer(value, what, _COUNT)
    if not (math.isfinite(value) and value >= 0):
        raise PlanFileError(f"{what} is {strict_json.shown(value)}, which is out of range")
    return float(value)


def _truth(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise PlanFileError(f"{what} is true or false, not {strict_json.shown(value)}")
    return value


_PLAIN: dict[Any, Any] = {
    str: strict_json.string,
    int: lambda value, what: strict_json.integer(value, what, _COUNT),
    float: _number,
    bool: _truth,
}
