"""What the environment sets: the one file that reads `WHOLESTEP_*` variables (docs/settings.md)."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from wholestep.errors import SettingsError

PREFIX = "WHOLESTEP_"

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One kind of value: `parse` raises ValueError for what `allowed` does not cover."""

    allowed: str
    parse: Callable[[str], Any]


def _parse_level(text: str) -> str:
    level = text.upper()
    if level not in _LOG_LEVELS:
        raise ValueError(text)
    return level


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _whole_number(minimum: int) -> _Kind:
    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise ValueError(text)
        return number

    return _Kind(f"a whole number, {minimum} or more", parse)


_LEVEL = _Kind(f"one of {', '.join(_LOG_LEVELS)}", _parse_level)
_FOLDER = _Kind("a folder", str)
_SWITCH = _Kind("1, true, yes, on or 0, false, no, off", _parse_bool)


def _setting(name: str, default: Any, kind: _Kind, meaning: str, unset: str | None = None) -> Any:
    """A field filled from `PREFIX + name`; `unset` says in words what a default of None stands for."""
    metadata = {
        "name": PREFIX + name,
        "default": unset if unset is not None else str(default),
        "kind": kind,
        "help": meaning,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    log_level: str | None = _setting(
        "LOG",
        None,
        _LEVEL,
        "print Wholestep's log records of this level and above to stderr, on rank 0",
        unset="nothing is printed",
    )
    dump_dir: str | None = _setting(
        "DUMP_DIR",
        None,
        _FOLDER,
        "each capture writes to a new folder there: the graph before and after every pass and their difference, the "
        "graphs that run, and the ops of lowered regions",
        unset="nothing is written",
    )
    cache_size: int = _setting("CACHE_SIZE", 16, _whole_number(1), "how many specialisations of one step are kept")
    recompile_warning: int = _setting(
        "RECOMPILE_WARNING", 8, _whole_number(1), "warn once a step has been recompiled this many times"
    )
    disable: bool = _setting(
        "DISABLE", False, _SWITCH, "`wholestep.compile` returns the eager function unchanged", unset="0"
    )
    verify: int = _setting(
        "VERIFY", 0, _whole_number(0), "default of `verify=`: how many first steps are checked against eager"
    )
    agreement_timeout_s: int = _setting(
        "AGREEMENT_TIMEOUT", 300, _whole_number(1), "how many seconds a rank waits for the others to compile the step"
    )
    keep_heap: bool = _setting(
        "KEEP_HEAP", True, _SWITCH, "memory freed on the CPU stays with a process that runs a lowered step", unset="1"
    )
    debug: bool = _setting(
        "DEBUG", False, _SWITCH, "tracebacks of errors show Wholestep's own frames and those of tracing, too", unset="0"
    )
    progress: bool | None = _setting(
        "PROGRESS",
        None,
        _SWITCH,
        "show progress of long work",
        unset="a bar on a terminal, a few plain lines elsewhere",
    )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings of `environ` (the process's own by default); an empty value counts as unset.

        Raises SettingsError for a value that is not allowed and warns of a name that is none of ours.
        """
        environ = os.environ if environ is None else environ
        fields = {field.metadata["name"]: field for field in dataclasses.fields(cls)}
        _warn_of_unknown(environ, known=list(fields))
        values = {
            field.name: _parse(name, environ[name].strip(), field.metadata["kind"])
            for name, field in fields.items()
            if environ.get(name, "").strip()
        }
        return cls(**values)


def _warn_of_unknown(environ: Mapping[str, str], known: list[str]) -> None:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            warnings.warn(
                f"environment variable {name} is ignored: the known ones are {', '.join(known)}", stacklevel=3
            )


def _parse(name: str, text: str, kind: _Kind) -> Any:
    try:
        return kind.parse(text)
    except ValueError:
        raise SettingsError(f"{name}={text!r} is not allowed: set it to {kind.allowed}, or unset it") from None


def describe() -> str:
    """The table of docs/settings.md: one row for each setting."""
    rows = ["| variable | allowed | unset means | what it does |", "|---|---|---|---|"]
    for field in dataclasses.fields(Settings):
        meta = field.metadata
        rows.append(f"| `{meta['name']}` | {meta['kind'].allowed} | {meta['default']} | {meta['help']} |")
    return "\n".join(rows) + "\n"
