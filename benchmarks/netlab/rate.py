"""Rates of links: `1gbit`, `500mbit`, `unlimited`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_PATTERN = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})")

# What a link may send at once after a pause: 2 ms of its rate, and never less than a few packets.
_BURST_S = 2e-3
_MIN_BURST_BYTES = 16 * 1024


@dataclass(frozen=True)
class Rate:
    """Speed of a link in each direction; None is as fast as the kernel can copy."""

    bits_per_s: int | None

    @staticmethod
    def parse(text: str) -> Rate:
        """The rate that `1gbit`, `0.5gbit`, `500mbit`, `64kbit` or `unlimited` stands for; else a ValueError."""
        if text == "unlimited":
            return Rate(None)
        match = _PATTERN.fullmatch(text)
        bits_per_s = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if bits_per_s < 8000:  # below a byte per ms no timer of tbf is worth trusting
            raise ValueError(f"'{text}' is no rate: write 1gbit, 500mbit, 64kbit (at least 8kbit) or unlimited")
        return Rate(bits_per_s)

    @property
    def burst_bytes(self) -> int:
        assert self.bits_per_s is not None
        return max(round(self.bits_per_s / 8 * _BURST_S), _MIN_BURST_BYTES)

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return "unlimited"
        unit = next(unit for unit in reversed(_UNITS) if self.bits_per_s >= _UNITS[unit])
        return f"{self.bits_per_s / _UNITS[unit]:.12g}{unit}"
