"""docs/huggingface.md, from the rows of all classes."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from benchmarks.huggingface.classes import is_held_back
from benchmarks.huggingface.trial import Row

_INTRODUCTION = """# Hugging Face models

Made by `python -m benchmarks.huggingface` with {version},
on the CPU in float32. Do not edit.

For each type of model that `transformers` has, the first class of its tasks that it has (a causal or masked language
model, a classifier, a detector, ...) is built from a small configuration, with dropout and whatever else its
configuration says, in training mode. Its step runs {steps} times in eager and compiled, on another batch each time:
forward with labels, backward from the loss (the mean of an output where a model has none), `AdamW`. What it returns,
parameters, buffers, gradients, optimizer state, generators and the model's own attributes are compared after each step:

- *bitwise*: equal in every bit, at every step;
- *close*: equal within rounding;
- *wrong*: anything else that differs;
- *refused*: `CaptureError`, with the line and what to change;
- *in eager*: so many of the steps left the graph and ran as they are ([checks](limits.md#checks-of-values)).

Beside it stands whether `torch.compile(model, fullgraph=True, backend="aot_eager")` takes the same model in the same
run, forward and backward; its values are not compared.

| | classes | bitwise | close | wrong | refused | else | `torch.compile` runs |
|---|---|---|---|---|---|---|---|
{counts}

*Held back* is a fifth of the classes, drawn by a hash of their names, which nobody looked at while causes of refusals
were worked on.

{not_measured}
"""


def page(rows: Iterable[Row], version: str, num_steps: int, num_missing: int = 0) -> str:
    """The page. `num_missing` classes have not been tried: rows are a sample, in an order drawn by hash."""
    rows = sorted(rows, key=lambda row: row.name)
    measured = [row for row in rows if row.outcome != "unbuilt"]
    unbuilt = [row for row in rows if row.outcome == "unbuilt"]
    held = [row for row in measured if is_held_back(row.name)]
    counts = "\n".join(_counts(*group) for group in (("all", measured), ("of them held back", held)))
    missing = f"\n{num_missing} more classes have not been tried: those here are the first of a drawn order." * bool(
        num_missing
    )
    not_measured = (
        f"Left out are {len(unbuilt)} classes for which no small configuration was found (last section).{missing}"
    )
    parts = [
        _INTRODUCTION.format(version=version, steps=num_steps, counts=counts, not_measured=not_measured),
        "## What is refused\n\n" + _causes(measured),
        "## Classes\n\n| class | compiled | graphs | `torch.compile` |\n|---|---|---|---|\n"
        + "\n".join(map(_line, measured)),
        "## Not built\n\n" + ", ".join(f"`{row.name}`" for row in unbuilt) + "\n",
    ]
    return "\n".join(parts).replace("\n\n\n", "\n\n")


def _counts(title: str, rows: list[Row]) -> str:
    counted = collections.Counter(row.outcome for row in rows)
    known = ("bitwise", "close", "wrong", "refused")
    cells = [counted[outcome] for outcome in known] + [sum(counted.values()) - sum(counted[name] for name in known)]
    share = f" ({counted['bitwise'] / max(len(rows), 1):.1%})"
    runs = sum(row.upstream == "runs" for row in rows)
    return f"| {title} | {len(rows)} | {cells[0]}{share} | " + " | ".join(map(str, [*cells[1:], runs])) + " |"


def _causes(rows: list[Row]) -> str:
    lines = [f"- `{row.name}`: {row.outcome}, {_plain(row.detail)}" for row in rows if row.outcome != "bitwise"]
    return "\n".join(lines) + "\n" if lines else "Nothing.\n"


def _line(row: Row) -> str:
    upstream = "runs" if row.upstream == "runs" else f"fails: {_plain(row.upstream)[:120]}" if row.upstream else ""
    eager = f", {row.eager_calls} in eager" if row.eager_calls else ""
    return f"| `{row.name}` | {row.outcome}{eager} | {row.captures} | {upstream} |"


def _plain(text: str) -> str:
    """Text that means nothing to Markdown."""
    return text.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'").replace("*", "")
