"""Pipelines: a sequence of passes as data, which prints, parses and compares.

simplify,cse{across_phases=true},reinplace
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from wholestep.errors import PassError
from wholestep.passes.base import Pass, lookup

# Quantifiers are possessive: nothing can be read in two ways, so what cannot be read is refused at once.
_QUOTED = r'"(?:[^"\\]|\\.)*+"'
_OPTION = re.compile(rf"\s*+(?P<key>[\w-]++)\s*+=\s*+(?P<value>{_QUOTED}|[^\",{{}}]*+)\s*+(?:,|\Z)")
_ITEM = re.compile(rf"\s*+(?P<name>[\w-]++)\s*+(?:\{{(?P<options>(?:{_QUOTED}|[^\"{{}}])*+)\}})?+\s*+(?:,|\Z)")
_MAX_TEXT = 16 * 2**20
_MAX_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """An ordered tuple of passes. `Pipeline.parse(str(pipeline)) == pipeline`."""

    passes: tuple[Pass, ...] = ()

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Read the text form; raises `PassError` with the position of what cannot be read."""
        if len(text) > _MAX_TEXT:
            raise PassError(f"the pipeline has {len(text)} characters; at most {_MAX_TEXT} are read")
        passes: list[Pass] = []
        position, text = 0, text.strip()
        while position < len(text):
            match = _ITEM.match(text, position)
            if match is None or match.end() == position:
                raise PassError(
                    f"cannot read pipeline at {_shown(text[position:])}; the form is name{{option=value}},name,…"
                )
            passes.append(_make(match["name"], match["options"] or ""))
            position = match.end()
        return Pipeline(tuple(passes))

    def __str__(self) -> str:
        return ",".join(str(item) for item in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)


def _make(name: str, options_text: str) -> Pass:
    cls = lookup(name)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    options: dict[str, Any] = {}
    position = 0
    while position < len(options_text.rstrip()):
        match = _OPTION.match(options_text, position)
        if match is None or match["key"] not in fields:
            known = ", ".join(fields) or "none"
            shown = _shown(options_text[position:].strip())
            raise PassError(f"pass '{name}' has no option {shown}; its options: {known}")
        key, value = match["key"], match["value"]
        if key in options:
            raise PassError(f"pass '{name}' is given its option '{key}' twice")
        text = _unquoted(name, key, value) if value.startswith('"') else value.strip()
        options[key] = _convert(name, key, text, fields[key].default)
        position = match.end()
    return cls(**options)


def _unquoted(name: str, key: str, value: str) -> str:
    try:
        return json.loads(value)
    except ValueError as error:
        raise PassError(f"option '{key}' of pass '{name}' is no quoted text: {error}") from error


def _convert(name: str, key: str, value: str, default: Any) -> Any:
    """An option's text as the type of its default."""
    if isinstance(default, bool):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise PassError(f"option '{key}' of pass '{name}' is true or false, not {_shown(value)}")
    try:
        converted = type(default)(value)
    except ValueError as error:
        raise PassError(
            f"option '{key}' of pass '{name}' is a {type(default).__name__}, not {_shown(value)}"
        ) from error
    if converted != converted:
        raise PassError(f"option '{key}' of pass '{name}' is a number, not {_shown(value)}")
    return converted


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…")
