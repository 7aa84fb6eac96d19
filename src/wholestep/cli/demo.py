"""`wholestep demo`: train a small GPT in eager and compiled from the same start, and compare the two."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as TerminalTable

from wholestep.cli.comparison import MIN_STEPS, Comparison, Side, compare
from wholestep.cli.corpus import Corpus, load_corpus
from wholestep.cli.progress import training_progress
from wholestep.report import Figure, Prose, Section, Table, step_report
from wholestep.report.charts import Series, line_chart
from wholestep.report.summary import format_bytes, format_seconds
from wholestep.zoo.gpt import GPT, GPTConfig

_BATCH_SIZE = 16
_COLUMNS = ("", "eager", "wholestep")

Rows = tuple[tuple[str, str, str], ...]


def add_parser(commands: Any) -> None:
    """Make `demo` a command of the command line."""
    text = "Train a small character GPT twice from the same start, in eager and compiled, and compare the two."
    parser = commands.add_parser("demo", help="compare a compiled training with eager", description=text)
    parser.add_argument("--steps", type=_num_steps, default=120, help="training steps of each (default %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs", "report.html"),
        help="where the report goes (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    # So small a model hardly gains from a second thread, and a single one is not upset by what else the machine does.
    parser.add_argument("--threads", type=_num_threads, default=1, help="CPU threads of torch (default %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, print the comparison, write the report; 1 if the losses differ."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        started = time.perf_counter()
        corpus = load_corpus()
        comparison = _train(corpus, options.steps)
        path = _write_report(comparison, options.output)
        _print_result(comparison, path, time.perf_counter() - started, as_json=options.json)
    finally:
        torch.set_num_threads(previous_threads)
    return 0 if comparison.agrees else 1


def _train(corpus: Corpus, num_steps: int) -> Comparison:
    config = GPTConfig(vocab_size=len(corpus.alphabet), context=64, width=128, heads=4, layers=3, dropout=0.1)
    torch.manual_seed(0)
    model = GPT(config)
    with training_progress("eager and wholestep", num_steps) as on_step:
        return compare(model, partial(corpus.make_batch, _BATCH_SIZE, config.context), num_steps, on_step)


def _rows(comparison: Comparison) -> Rows:
    eager, compiled = comparison.eager, comparison.compiled
    return (
        ("final loss", f"{eager.losses[-1]:.6f}", f"{compiled.losses[-1]:.6f}"),
        (f"largest loss difference in {len(eager.losses)} steps", "", _difference(comparison.max_loss_difference)),
        ("largest parameter difference", "", _difference(comparison.max_parameter_difference)),
        ("median step", format_seconds(eager.median_seconds), format_seconds(compiled.median_seconds)),
        ("first step, with capture", format_seconds(eager.seconds[0]), format_seconds(compiled.seconds[0])),
        ("captures", "", str(comparison.step.num_captures)),
        ("peak memory, measured", format_bytes(eager.peak_bytes), format_bytes(compiled.peak_bytes)),
        ("peak memory, predicted", "", format_bytes(comparison.predicted_peak_bytes)),
    )


def _difference(value: float) -> str:
    return "0 (bit for bit)" if value == 0 else f"{value:.3g}"


def _write_report(comparison: Comparison, path: Path) -> Path:
    losses = [Series(name, tuple(side.losses)) for name, side in _sides(comparison).items()]
    chart = line_chart(losses, title="Training loss", x_label="step")
    verdict = "The two trainings agree." if comparison.agrees else "The losses differ: this is a bug, please report it."
    return (
        step_report(comparison.step)
        .before(
            Section("Compared with eager", (Prose(verdict), Table(_COLUMNS, _rows(comparison)))),
            Section("Loss", (Figure(chart, "A character GPT on the text of Python's own help pages"),)),
        )
        .write(path)
    )


def _sides(comparison: Comparison) -> dict[str, Side]:
    return {"eager": comparison.eager, "wholestep": comparison.compiled}


def _print_result(comparison: Comparison, path: Path, seconds: float, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_dict(comparison, path, seconds), indent=2))
        return
    table = TerminalTable(title=f"GPT, {comparison.step.graph.num_ops} ops in one graph")
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in _rows(comparison):
        table.add_row(*row)
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    console.print(table)
    console.print("losses agree" if comparison.agrees else "LOSSES DIFFER: please report this", markup=False)
    console.print(f"report: {path} ({seconds:.0f} s in all)", markup=False)


def _as_dict(comparison: Comparison, path: Path, seconds: float) -> dict[str, Any]:
    sides = {
        name: {
            "final_loss": side.losses[-1],
            "losses": side.losses,
            "median_step_s": side.median_seconds,
            "first_step_s": side.seconds[0],
            "peak_bytes": side.peak_bytes,
        }
        for name, side in _sides(comparison).items()
    }
    return {
        "agrees": comparison.agrees,
        "num_steps": len(comparison.eager.losses),
        "max_loss_difference": comparison.max_loss_difference,
        "max_parameter_difference": comparison.max_parameter_difference,
        "num_captures": comparison.step.num_captures,
        "capture_s": comparison.step.captured.seconds,
        "num_ops": comparison.step.graph.num_ops,
        "predicted_peak_bytes": comparison.predicted_peak_bytes,
        **sides,
        "report": str(path),
        "total_s": seconds,
    }


def _num_steps(text: str) -> int:
    return _at_least(text, MIN_STEPS)


def _num_threads(text: str) -> int:
    return _at_least(text, 1)


def _at_least(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
    return number
