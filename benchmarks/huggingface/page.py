"""docs/huggingface.md, from the rows of all classes."""

from __future__ import annotations

from benchmarks.huggingface.trial import Row


def page(rows: list[Row], version: str) -> str:
    return version + "\n".join(map(str, rows))
