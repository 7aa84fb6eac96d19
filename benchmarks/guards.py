"""What the guards of a compiled step cost at each call: for a GPT-2 with 12 layers, hot and in a training loop.

    python -m benchmarks.guards [--quick] [--layers N] [--json FILE]

Hot: the same question asked again and again, the least of several rounds. In a training loop: asked before each step,
whose work has emptied the caches meanwhile; the median. Guards that look at values of the batch run a graph of their
own, and come in a second row. The peer is the step that the guards belong to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import wholestep
from wholestep.runtime.guards import Call
from wholestep.runtime.specialization import Specialization
from wholestep.zoo.huggingface import LENGTH, VOCABULARY, build_gpt2

NUM_WARM_UP = 8


@dataclass(frozen=True)
class Row:
    """Microseconds per call, of all guards and of all but those that look at values; milliseconds per step."""

    hot_us: float
    hot_without_values_us: float
    loop_us: float
    loop_without_values_us: float
    step_ms: float


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss


def prepared(num_layers: int) -> tuple[Callable[[], Any], Specialization, Call]:
    """A step that has run some times, the specialisation that it runs, and its call."""
    torch.manual_seed(0)
    model = build_gpt2(n_layer=num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    step = wholestep.compile(train_step)
    for _ in range(NUM_WARM_UP):
        step(model, optimizer, ids)
    [specialization] = step._specializations
    return lambda: step(model, optimizer, ids), specialization, Call.of(train_step, (model, optimizer, ids), {})


def timed_us(ask: Callable[[], Any], num_calls: int = 1) -> float:
    """Microseconds of one call, all of which have to fit."""
    started = time.perf_counter()
    for _ in range(num_calls):
        difference = ask()
    elapsed = time.perf_counter() - started
    assert difference is None, difference
    return elapsed / num_calls * 1e6


def measure(num_layers: int, num_rounds: int, num_calls: int) -> Row:
    run, specialization, call = prepared(num_layers)
    asked: dict[bool, Callable[[], Any]] = {
        True: lambda: specialization.check(call),
        False: lambda: specialization.check_without_values(call),
    }
    hot = {key: min(timed_us(ask, num_calls) for _ in range(num_rounds)) for key, ask in asked.items()}
    loop: dict[bool, list[float]] = {key: [] for key in asked}
    steps_ms: list[float] = []
    for index in range(2 * num_calls // 10):
        started = time.perf_counter()
        run()
        steps_ms.append((time.perf_counter() - started) * 1e3)
        key = index % 2 == 0  # to ask one warms the caches for the other
        loop[key].append(timed_us(asked[key]))
    in_loop = {key: statistics.median(values) for key, values in loop.items()}
    return Row(hot[True], hot[False], in_loop[True], in_loop[False], statistics.median(steps_ms))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default 12)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    num_rounds, num_calls = (3, 200) if arguments.quick else (10, 1000)
    row = measure(arguments.layers, num_rounds, num_calls)
    print("| us per call | hot | in a training loop | of a step |")
    print("|---|---|---|---|")
    for name, hot, loop in (
        ("guards", row.hot_without_values_us, row.loop_without_values_us),
        ("with those of values", row.hot_us, row.loop_us),
    ):
        print(f"| {name} | {hot:.1f} | {loop:.1f} | {loop / row.step_ms / 10:.2f}% |")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(row), indent=1))
    print(f"{arguments.layers} layers, {row.step_ms:.1f} ms/step, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
