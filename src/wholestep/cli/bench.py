"""`wholestep bench`: some real steps of a user's file, in eager and compiled, compared."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from wholestep.api import CompiledStep
from wholestep.capture import discover
from wholestep.cli.options import add_step_options, add_target, load, with_options
from wholestep.cli.progress import training_progress
from wholestep.cli.target import MadeStep, Target
from wholestep.cost import measure_peak
from wholestep.errors import ScriptError
from wholestep.report.document import Prose, Report, Section, Table
from wholestep.report.summary import format_bytes, format_seconds

# The first step captures, the second is measured for memory; neither is timed.
_NUM_UNTIMED = 2
MIN_STEPS = _NUM_UNTIMED + 1
_SEED = 0


def add_parser(commands: Any) -> None:
    """Make `bench` a command of the command line."""
    text = (
        "Take some training steps of a file in eager and compiled, from the same start on the same batch, and compare "
        "losses, parameters, times and peaks. Exit code 1 if results differ."
    )
    parser = commands.add_parser("bench", help="compare a train step with eager", description=text)
    add_target(parser)
    parser.add_argument("--steps", type=_steps, default=10, help="steps of each (default %(default)s)")
    add_step_options(parser)
    parser.set_defaults(run=run)


@dataclass
class Contender:
    """One way to run the step: with a model, an optimizer and a batch of its own."""

    call: Callable[[], Any]
    modules: Mapping[str, nn.Module]
    held: tuple[Any, ...]
    losses: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])
    peak_bytes: int = 0

    @staticmethod
    def of(step: Callable[..., Any], made: MadeStep) -> Contender:
        found = discover.reachable(made.eager, made.args, made.kwargs)
        held = (*found.modules.values(), *found.optimizers.values(), made.args, made.kwargs)
        return Contender(lambda: step(*made.args, **made.kwargs), found.modules, held)

    def take_step(self, number: int) -> float:
        """Step `number`; both contenders draw the same random numbers in it."""
        torch.manual_seed(_SEED + number)
        if number == 1:
            measured = measure_peak(self.call, held=self.held)
            self.peak_bytes = measured.peak_bytes
            returned = measured.result
        else:
            _synchronize()
            started = time.perf_counter()
            returned = self.call()
            _synchronize()
            self.seconds.append(time.perf_counter() - started)
        self.losses += [value.item() for value in _numbers(returned)]
        return self.losses[-1] if self.losses else math.nan

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds[_NUM_UNTIMED - 1 :])


@dataclass(frozen=True)
class Result:
    """What came of it. `is_equal` allows for rounding; differences are the largest."""

    num_steps: int
    eager_s: float
    compiled_s: float
    first_call_s: float
    eager_peak_bytes: int
    compiled_peak_bytes: int
    loss_difference: float
    parameter_difference: float
    is_equal: bool
    num_captures: int


def run(options: argparse.Namespace) -> int:
    """Take turns, compare and print; 1 if results differ."""
    result = bench(options.target, options.steps, options)
    print(json.dumps(asdict(result), indent=1) + "\n" if options.json else _view(result, options.target), end="")
    return 0 if result.is_equal else 1


def bench(target: Target, num_steps: int, options: argparse.Namespace) -> Result:
    """Run both contenders, step by step."""
    first, second = _made(target), _made(target)
    step = CompiledStep(second.eager, with_options(second.step.options, options))
    eager, compiled = Contender.of(first.eager, first), Contender.of(step, second)
    _refuse_shared(eager, compiled, target)
    with training_progress("eager and compiled", num_steps) as on_step:
        for number in range(num_steps):
            eager.take_step(number)
            on_step(compiled.take_step(number))
    step.flush()
    losses = list(zip(eager.losses, compiled.losses, strict=True))
    parameters = list(_parameter_pairs(eager, compiled))
    loss_difference = max((_gap(a, b) for a, b in losses), default=0.0)
    return Result(
        num_steps=num_steps,
        eager_s=eager.median_s,
        compiled_s=compiled.median_s,
        first_call_s=compiled.seconds[0],
        eager_peak_bytes=eager.peak_bytes,
        compiled_peak_bytes=compiled.peak_bytes,
        loss_difference=loss_difference,
        parameter_difference=max((_largest_gap(a, b) for a, b in parameters), default=0.0),
        is_equal=all(_is_close(torch.tensor(a), torch.tensor(b)) for a, b in losses)
        and all(_is_close(a, b) for a, b in parameters),
        num_captures=step.num_captures,
    )


def _made(target: Target) -> MadeStep:
    torch.manual_seed(_SEED)
    return load(target)


def _refuse_shared(eager: Contender, compiled: Contender, target: Target) -> None:
    mine = {id(p) for module in eager.modules.values() for p in module.parameters()}
    if any(id(p) in mine for module in compiled.modules.values() for p in module.parameters()):
        raise ScriptError(f"{target} returns the same model twice; make model and optimizer inside the function")


def _parameter_pairs(eager: Contender, compiled: Contender) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name, module in eager.modules.items():
        pairs = zip(module.parameters(), compiled.modules[name].parameters(), strict=True)
        yield from ((a.detach(), b.detach()) for a, b in pairs)


def _numbers(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of one floating point number among what a step returns: its losses."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.is_floating_point():
            yield value.detach()
    elif isinstance(value, Mapping):
        yield from _numbers(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)


def _gap(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else 0.0 if str(a) == str(b) else math.inf


def _largest_gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding: the default tolerance of `torch.testing.assert_close` for the dtype."""
    try:
        torch.testing.assert_close(b, a, equal_nan=True)
    except AssertionError:
        return False
    return True


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _view(result: Result, target: Target) -> str:
    rows = (
        ("a step (median)", format_seconds(result.eager_s), format_seconds(result.compiled_s)),
        ("peak memory", format_bytes(result.eager_peak_bytes), format_bytes(result.compiled_peak_bytes)),
        ("first call", "", format_seconds(result.first_call_s)),
    )
    is_exact = result.loss_difference == result.parameter_difference == 0
    if not result.is_equal:
        verdict = (
            f"RESULTS DIFFER: losses by up to {result.loss_difference:.3g}, parameters by up to "
            f"{result.parameter_difference:.3g}."
        )
    elif is_exact:
        verdict = "Losses at every step and parameters at the end are equal, bit for bit."
    else:
        verdict = (
            f"Losses agree within {result.loss_difference:.3g}, parameters within {result.parameter_difference:.3g}."
        )
    text = f"{result.num_steps} steps, {result.eager_s / result.compiled_s:.2f}x eager's speed. {verdict}"
    table = Table(("", "eager", "wholestep"), rows)
    return Report(
        f"bench of {target}", f"torch {torch.__version__}", sections=(Section("", (table, Prose(text))),)
    ).to_text()


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < MIN_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {MIN_STEPS} or more")
    return int(text)
