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

_VALUE = r'"(?:[^"\\]|\\.)*"|[^",{}]*'
_OPTION = re.compile(rf"\s*(?P<key>[\w-]+)\s*=\s*(?P<value>{_VALUE})\s*(?:,|$)")
_ITEM = re.compile(rf"\s*(?P<name>[\w-]+)\s*(?:\{{(?P<options>(?:{_VALUE}|,)*)\}})?\s*(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """An ordered tuple of passes. `Pipeline.parse(str(pipeline)) == pipeline`."""

    passes: tuple[Pass, ...] = ()

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Read the text form; raises `PassError` with the position of what cannot be read."""
        passes: list[Pass] = []
        position, text = 0, text.strip()
        while position < len(text):
            match = _ITEM.match(text, position)
            if match is None or match.end() == position:
                raise PassError(f"cannot read pipeline at '{text[position:]}'; the form is name{{option=value}},name,…")
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
            raise PassError(f"pass '{name}' has no option '{options_text[position:].strip()}'; its options: {known}")
        value = match["value"]
        text = json.loads(value) if value.startswith('"') else value.strip()
        options[match["key"]] = _convert(name, match["key"], text, fields[match["key"]].default)
        position = match.end()
    return cls(**options)


def _convert(name: str, key: str, value: str, default: Any) -> Any:
    """An option's text as the type of its default."""
    if isinstance(default, bool):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise PassError(f"option '{key}' of pass '{name}' is true or false, not '{value}'")
    try:
        return type(default)(value)
    except ValueError as error:
        raise PassError(f"option '{key}' of pass '{name}' is a {type(default).__name__}, not '{value}'") from error
