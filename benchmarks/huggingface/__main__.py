"""Hugging Face models: the train step of every class that can be built from a small configuration.

    python -m benchmarks.huggingface                      # all classes, and docs/huggingface.md
    python -m benchmarks.huggingface --quick BertForMaskedLM GPT2LMHeadModel
    python -m benchmarks.huggingface --quick --open-only  # without the classes that are held back

Each class runs in a process of its own with a time limit.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import torch

from benchmarks.huggingface.classes import class_names, is_held_back
from benchmarks.huggingface.page import page
from benchmarks.huggingface.trial import Row, measure, version_line, warm_up

LIMIT_S = 60
NUM_STEPS = 3
PAGE = Path("docs/huggingface.md")


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="only these classes; no page is written")
    parser.add_argument("--quick", action="store_true", help="two steps, without torch.compile; no page is written")
    parser.add_argument("--open-only", action="store_true", help="without the classes that are held back")
    parser.add_argument("--only-held-back", action="store_true", help="just the classes that are held back")
    parser.add_argument("--results", type=Path, help="keep rows in this file, and go on from there")
    parser.add_argument("--first", type=int, help="only so many classes, the first in an order drawn by hash")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the processor for each class")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    warm_up()
    rows = _rows_of(options.results)
    names = _chosen(options)
    for number, (name, model_type) in enumerate(names.items(), 1):
        if name not in rows:
            start = time.perf_counter()
            rows[name] = _in_child(name, model_type, options)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(vars(rows[name])) + "\n")
            _say(f"{number}/{len(names)} {time.perf_counter() - start:5.1f} s  {_line(rows[name])}")
    chosen = [rows[name] for name in names]
    print(dict(collections.Counter(row.outcome for row in chosen)))
    if not (options.classes or options.quick or options.open_only or options.only_held_back):
        PAGE.write_text(page(chosen, version_line(), NUM_STEPS, len(class_names()) - len(chosen)))


def _chosen(options: argparse.Namespace) -> dict[str, str]:
    names = dict([*class_names().items()][: options.first])
    if options.classes:
        return {name: names[name] for name in options.classes}
    if options.open_only:
        return {name: kind for name, kind in names.items() if not is_held_back(name)}
    if options.only_held_back:
        return {name: kind for name, kind in names.items() if is_held_back(name)}
    return names


def _rows_of(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    return {row["name"]: Row(**row) for row in map(json.loads, path.read_text().splitlines())}


def _in_child(name: str, model_type: str, options: argparse.Namespace) -> Row:
    """Measure in a process of its own: a crash or a class that never ends loses one row."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _measure_and_exit(writer, name, model_type, options)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Row(**json.loads(text))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Row(name, "out of time", f"{options.limit:.0f} s")
    return Row(name, "crashed", f"the process ended with status {status}")


def _measure_and_exit(writer: int, name: str, model_type: str, options: argparse.Namespace) -> None:
    signal.setitimer(signal.ITIMER_PROF, options.limit)
    code = 1
    try:
        quick = options.quick
        row = measure(name, model_type, num_steps=2 if quick else NUM_STEPS, upstream=not quick)
        with os.fdopen(writer, "w") as stream:
            stream.write(json.dumps(vars(row)))
        code = 0
    finally:
        os._exit(code)


def _line(row: Row) -> str:
    parts = [row.name, row.outcome, f"{row.captures} captures" if row.captures else "", row.detail]
    return "  ".join(part for part in [*parts, row.upstream and f"| torch.compile: {row.upstream}"] if part)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
