"""Memory budgets as people write them: a share between 0 and 1, bytes, or text such as "12GiB"; also by module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from wholestep.errors import WholestepError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("iB", 1024))
}
"""`10G` may mean either: the smaller one is kept whichever is meant."""
_TEXT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*|%)\s*")


@dataclass(frozen=True)
class Budget:
    """A limit: `num_bytes`, or a `share`.

    For the peak of a step a share is that of the way from the smallest peak (0) to no limit (1), for a module it is one
    of what the module keeps for the backward if nothing is dropped.
    """

    share: float | None = None
    num_bytes: int | None = None

    @staticmethod
    def of(value: object) -> Budget:
        """Read a budget; raises `WholestepError` for anything that is none."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            return Budget._of_text(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if 0 <= value <= 1:
                return Budget(share=float(value))
            if value > 1 and float(value).is_integer():
                return Budget(num_bytes=int(value))
        raise WholestepError(
            f"memory_budget is a share from 0 to 1, a number of bytes or text such as '12GiB', not {value!r}"
        )

    @staticmethod
    def _of_text(text: str) -> Budget:
        match = _TEXT.fullmatch(text)
        if match is not None and match["unit"] == "%" and float(match["number"]) <= 100:
            return Budget(share=float(match["number"]) / 100)
        unit = None if match is None else next((u for u in _UNITS if u.lower() == match["unit"].lower()), None)
        if match is None or unit is None:
            raise WholestepError(
                f"cannot read the memory budget '{text}': write a share (0.5, '50%') or bytes ('12GiB', '800MB')"
            )
        number = float(match["number"])
        if not match["unit"] and 0 <= number <= 1:
            return Budget(share=number)
        num_bytes = round(number * _UNITS[unit])
        if num_bytes <= 0:
            raise WholestepError(f"a memory budget of '{text}' is no memory at all")
        return Budget(num_bytes=num_bytes)

    def __str__(self) -> str:
        return f"{self.share:g}" if self.share is not None else f"{self.num_bytes}B"


@dataclass(frozen=True)
class ModuleBudget:
    """What modules may keep for the backward: `key` is a qualified name, or a pattern that names several."""

    key: str
    budget: Budget

    def __str__(self) -> str:
        return f"{self.key}: {self.budget}"


@dataclass(frozen=True)
class StepBudget:
    """Everything `memory_budget` says: a limit for the peak of the whole step (None: no limit), and for modules."""

    whole: Budget | None = None
    modules: tuple[ModuleBudget, ...] = ()

    @staticmethod
    def of(value: object) -> StepBudget:
        """Read a budget, or a mapping of module names to budgets in which `""` is the whole step, in any order."""
        if isinstance(value, StepBudget):
            return value
        if not isinstance(value, Mapping):
            return StepBudget(Budget.of(value))
        whole: Budget | None = None
        modules: list[ModuleBudget] = []
        for key, written in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str) or (key and not all(key.split("."))):
                raise WholestepError(
                    f"memory_budget maps names of modules ('encoder', 'layers.*', '' for the whole step) to budgets, "
                    f"and {key!r} is no such name"
                )
            if not key:
                whole = Budget.of(written)
            else:
                modules.append(ModuleBudget(key, _of_module(key, written)))
        return StepBudget(whole, tuple(sorted(modules, key=lambda module: module.key)))

    def __str__(self) -> str:
        whole = "none" if self.whole is None else str(self.whole)
        return ", ".join([whole, *map(str, self.modules)])


def _of_module(key: str, written: object) -> Budget:
    try:
        return Budget.of(written)
    except WholestepError as error:
        raise WholestepError(f"the budget of module '{key}': {error}") from None


def readable(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
