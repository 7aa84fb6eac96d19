"""Reading files that describe costs and clusters: strict, within limits, and nothing in them is ever run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from wholestep import _strict_json as strict_json
from wholestep.errors import SimulationError

T = TypeVar("T")

MAX_BYTES = 2**20
"""Of a file; a description of a cluster has a few hundred."""


def read_bytes(path: Path) -> bytes:
    """What is in a file, unless it is too large to be one of ours."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SimulationError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise SimulationError(f"{path} has more than {MAX_BYTES} bytes and is read no further")
    return data


def parsed(data: bytes, what: str, kind: str, version: int, make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` makes of a JSON object that says of itself what it is: `{"format": kind, "version": version, ...}`.

    Whatever is wrong with it is a `SimulationError` that begins with `what`.
    """
    if len(data) > MAX_BYTES:
        raise SimulationError(f"{what} has more than {MAX_BYTES} bytes")
    with strict_json.refused_as(SimulationError):
        found = strict_json.parse(data, what)
        if found.get("format") != kind:
            raise SimulationError(f"{what} is no {kind} file: its 'format' is not '{kind}'")
        if strict_json.integer(found.get("version"), f"version of {what}") != version:
            raise SimulationError(f"{what} has version {found['version']}; this release reads {version}")
        return make({key: value for key, value in found.items() if key not in ("format", "version")})


def number(value: Any, what: str, *, least: float = 0.0, most: float = 1e15, above: bool = False) -> float:
    """A number within limits; `above` excludes the least one itself."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SimulationError(f"{what} is a number, not {strict_json.shown(value)}")
    is_enough = value > least if above else value >= least
    if not (is_enough and value <= most):
        bound = f"above {least:g}" if above else f"{least:g} or more"
        raise SimulationError(f"{what} is {strict_json.shown(value)}; give a number {bound}, at most {most:g}")
    return float(value)


def readable(value: Any) -> str:
    """A value as JSON that people can read and edit."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
