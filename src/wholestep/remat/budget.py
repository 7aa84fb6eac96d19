"""Memory budgets as people write them: a share between 0 and 1, bytes, or text such as "12GiB"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wholestep.errors import WholestepError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_TEXT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


@dataclass(frozen=True)
class Budget:
    """A limit for the peak: `num_bytes`, or a `share` of the way from the smallest peak (0) to no limit (1)."""

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
        unit = None if match is None else next((u for u in _UNITS if u.lower() == match["unit"].lower()), None)
        if match is None or unit is None:
            raise WholestepError(
                f"cannot read the memory budget '{text}': write a share (0.5) or bytes ('12GiB', '800MB')"
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


def readable(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
