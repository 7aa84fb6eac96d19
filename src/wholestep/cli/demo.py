"""`wholestep demo`: train a small GPT in eager and compiled from the same start, and compare them.

On two local ranks by default: DistributedDataParallel against `data_parallel="replicate"`. With one rank there is no
process group, and plain eager is the peer.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep
from wholestep._output import require_writable
from wholestep._settings import Settings
from wholestep.cli.comparison import MIN_STEPS, Comparison, Side, compare
from wholestep.cli.corpus import Corpus, load_corpus
from wholestep.cli.launch import launch
from wholestep.cli.present import print_result, write_report
from wholestep.cli.progress import say, training_progress
from wholestep.errors import WholestepError
from wholestep.zoo import gpt
from wholestep.zoo.case import Batch

_BATCH_SIZE = 12
_SLOW_LATENCY = "200us"
_NUM_TRIALS = 3


def add_parser(commands: Any) -> None:
    """Make `demo` a command of the command line."""
    text = "Train a small character GPT several times from the same start, in eager and compiled, and compare them."
    parser = commands.add_parser("demo", help="compare a compiled training with eager", description=text)
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a demo can be told; its ranks are told the same."""
    parser.add_argument("--steps", type=_num_steps, default=60, help="training steps of each (default %(default)s)")
    parser.add_argument(
        "--ranks",
        type=_at_least_one,
        default=2,
        help="train data parallel on this many local processes; 1 is a plain training (default %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs", "report.html"),
        help="where the report goes (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    # So small a model hardly gains from a second thread, and a single one is not upset by what else the machine does.
    parser.add_argument(
        "--threads", type=_at_least_one, default=1, help="CPU threads of torch, per rank (default %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Train, print the comparison, write the report; 1 if the losses differ."""
    if Settings.from_environ().disable:
        raise WholestepError("there is nothing to compare with eager while WHOLESTEP_DISABLE is set; unset it")
    require_writable(options.output)
    if options.ranks == 1:
        return run_here(options)
    say(f"starting {options.ranks} ranks")
    command = [sys.executable, "-m", "wholestep.cli.rank"]
    for name in ("steps", "ranks", "output", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    return launch([*command, "--json"] if options.json else command, options.ranks)


def run_here(options: argparse.Namespace) -> int:
    """The demo in this process, which may be a rank of several; rank 0 prints and writes."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        started = time.perf_counter()
        comparison = _train(load_corpus(), options.steps)
        if _rank() == 0:
            path = write_report(comparison, options.output)
            print_result(comparison, path, time.perf_counter() - started, as_json=options.json)
    finally:
        torch.set_num_threads(previous_threads)
    return 0 if comparison.agrees else 1


def _train(corpus: Corpus, num_steps: int) -> Comparison:
    config = gpt.GPTConfig(vocab_size=len(corpus.alphabet), context=64, width=128, heads=4, layers=4, dropout=0.1)
    torch.manual_seed(0)
    model = gpt.GPT(config)
    make_batch = partial(_batch_of_rank, corpus, config.context)
    is_parallel = dist.is_initialized()
    sides = _parallel_sides(model, num_steps, make_batch(0)[0]) if is_parallel else _plain_sides(model, num_steps)
    title = f"DDP and wholestep on {_num_ranks()} ranks" if is_parallel else "eager and wholestep"
    with training_progress(title, num_steps, is_shown=_rank() == 0) as on_step:
        return compare(sides, make_batch, num_steps, on_step)


def _batch_of_rank(corpus: Corpus, context: int, number: int) -> tuple[Batch, int]:
    """This rank's batch of a step, and the seed of its dropout: no two of all steps and ranks are alike."""
    seed = number * _num_ranks() + _rank()
    return corpus.make_batch(_BATCH_SIZE, context, seed), seed


def clipping_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
    """Everything between two batches, on one rank."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
    """The same without clipping: a global norm needs all gradients before any update, so that none could move."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _plain_sides(model: nn.Module, num_steps: int) -> dict[str, Side]:
    compiled = wholestep.compile(clipping_step)
    steps: dict[str, Callable[..., torch.Tensor]] = {"eager": clipping_step, "wholestep": compiled}
    return {name: Side.of(step, copy.deepcopy(model), num_steps) for name, step in steps.items()}


def _parallel_sides(model: nn.Module, num_steps: int, batch: Batch) -> dict[str, Side]:
    """DDP, wholestep as it comes, and wholestep as it would run elsewhere: on the loopback no update has to move."""
    measured = wholestep.compile(train_step, data_parallel="replicate")
    slow_link = wholestep.DataParallel(link=_slow_link(model, batch))
    planned = wholestep.compile(train_step, data_parallel=slow_link)
    return {
        "eager DDP": Side.of(train_step, DistributedDataParallel(copy.deepcopy(model)), num_steps),
        "wholestep": Side.of(measured, copy.deepcopy(model), num_steps),
        "slow link": Side.of(planned, copy.deepcopy(model), num_steps),
    }


def _slow_link(model: nn.Module, batch: Batch) -> str:
    """A link on which all gradients travel about as long as forward and backward take; the same on every rank."""
    times_s: list[float] = []
    for _ in range(_NUM_TRIALS):
        started = time.thread_time()  # whatever else the machine does, it is the same model
        gpt.loss(model, batch).backward()
        times_s.append(time.thread_time() - started)
    model.zero_grad()
    num_bits = sum(8 * parameter.numel() * parameter.element_size() for parameter in model.parameters())
    mbit_per_s = torch.tensor(max(1, round(num_bits / min(times_s) / 1e6)))
    dist.broadcast(mbit_per_s, src=0)
    return f"{mbit_per_s.item()}mbit,{_SLOW_LATENCY}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _num_steps(text: str) -> int:
    return _at_least(text, MIN_STEPS)


def _at_least_one(text: str) -> int:
    return _at_least(text, 1)


def _at_least(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
    return number
