"""What a pass is: a frozen dataclass with a name, typed options and `apply`; plus the registry of all passes."""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from wholestep.errors import PassError
from wholestep.graph import StepGraph


@dataclasses.dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a step graph.

    Subclasses are frozen dataclasses; their fields are the pass's options (bool, int, float, str, with a default).

    - `name`: how pipelines spell it;
    - `requires`: passes that must have run on the graph before;
    - `after`: passes that, if they run at all, must run before this one;
    - `repeatable`: whether it may run twice on one graph;
    - `needs_functional`: whether it reasons about values, so that it must come before `reinplace`.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    repeatable: ClassVar[bool] = False
    needs_functional: ClassVar[bool] = True

    @abstractmethod
    def apply(self, graph: StepGraph) -> StepGraph:
        """Rewrite the graph (in place or as a new one) and return it; leave it untouched if there is nothing to do."""

    @property
    def options(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        return {field.name: values[field.name] for field in fields if values[field.name] != field.default}

    def __str__(self) -> str:
        options = ",".join(f"{name}={_option_text(value)}" for name, value in self.options.items())
        return f"{self.name}{{{options}}}" if options else self.name


PassType = TypeVar("PassType", bound=Pass)

_REGISTRY: dict[str, type[Pass]] = {}


def register(cls: type[PassType]) -> type[PassType]:
    """Class decorator: make a pass known to pipelines by its name."""
    known = _REGISTRY.get(cls.name)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise PassError(f"two passes are called '{cls.name}': {known.__qualname__} and {cls.__qualname__}")
    _REGISTRY[cls.name] = cls
    return cls


def registered() -> dict[str, type[Pass]]:
    """All passes by name."""
    return dict(sorted(_REGISTRY.items()))


def lookup(name: str) -> type[Pass]:
    """The pass called `name`; raises `PassError` listing what there is."""
    if name not in _REGISTRY:
        raise PassError(f"there is no pass '{name[:60]}'; known passes: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def _option_text(value: Any) -> str:
    """An option as pipelines spell it; text that could be mistaken for punctuation is quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not re.fullmatch(r"[\w.:/+-]+", value):
        return json.dumps(value)
    return str(value)
