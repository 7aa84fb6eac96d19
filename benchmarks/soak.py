"""A long training with everything on, beside the same in eager DDP: equal losses at every step, and memory stays flat.

    python -m benchmarks.soak [--steps 2000] [--warmup 200] [--lower auto] [--json FILE]

Two gloo ranks of this machine train a small GPT twice from the same start, step by step in turns: with
DistributedDataParallel, and compiled with lowered regions (where there is a compiler), half the activations' memory,
averaged gradients whose updates all wait for the next call, and a symbolic batch size. Both have dropout with the same
masks, clipped gradients, batches of changing sizes that differ between ranks, a learning rate schedule and evaluation;
the compiled one is saved in the background every so often. What a rank holds (memory, Python objects, threads, open
files) is counted after the warm-up and up to the end. Exit code 1 if losses differ or something has grown. Linux only.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import wholestep
from wholestep.cli.launch import end_with_launcher, launch, reporting_errors
from wholestep.zoo import gpt
from wholestep.zoo.case import Batch, seeded_generator

NUM_RANKS = 2
CONFIG = gpt.GPTConfig(vocab_size=23, context=16, width=32, heads=4, layers=2, dropout=0.1)
BATCH_SIZES = (4, 6, 3, 8, 5)
MEMORY_BUDGET = 0.5
SAVES, EVALUATIONS, NUM_COUNTS = 20, 20, 6
"""How many checkpoints and evaluations a run has, and how often holdings are counted behind the warm-up."""
TOLERANCE = {"none": 0.0, "inductor": 1e-4}
"""Of a loss, relative: not lowered, two ranks have DDP's bits; lowered, each step rounds in its own way."""
MOST_GROWTH, MOST_LATE_GROWTH, MOST_OBJECTS = 0.02, 0.005, 200
"""Of resident memory behind the warm-up and in the second half of that, as shares; of Python objects."""


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    resident_bytes: int
    objects: int
    threads: int
    files: int

    @staticmethod
    def now() -> Holdings:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Holdings(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(gc.get_objects()),
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
        )


@dataclass(frozen=True)
class RankResult:
    """One rank's training: the largest difference of a loss, and holdings from the end of the warm-up to the end."""

    num_steps: int
    worst_difference: float
    worst_step: int
    first_loss: float
    last_loss: float
    holdings: list[Holdings]
    num_captures: int
    num_moved: int
    is_lowered: bool
    num_repeated: int
    is_checkpoint_equal: bool
    seconds: float

    def faults(self) -> list[str]:
        """What is wrong, in words."""
        tolerance = TOLERANCE["inductor" if self.is_lowered else "none"]
        early, middle, late = self.holdings[0], self.holdings[len(self.holdings) // 2], self.holdings[-1]
        grown, grown_late = (late.resident_bytes / before.resident_bytes - 1 for before in (early, middle))
        grown_objects = late.objects - early.objects
        differs = f"a loss differs by {self.worst_difference:.1e} (step {self.worst_step})"
        checks = {
            differs: self.worst_difference > tolerance,
            f"resident memory has grown by {grown:.1%}": grown > MOST_GROWTH,
            f"resident memory has grown by {grown_late:.1%} in the second half": grown_late > MOST_LATE_GROWTH,
            f"there are {grown_objects} Python objects more": grown_objects > MOST_OBJECTS,
            f"there are {late.threads} threads, once {early.threads}": late.threads > early.threads,
            f"{late.files} files are open, once {early.files}": late.files > early.files,
            "nothing was learnt": self.last_loss >= self.first_loss,
            "the last checkpoint is not what was trained": not self.is_checkpoint_equal,
            "no update waited for the next call": self.num_moved == 0,
            "nothing ran again for the memory budget": self.num_repeated == 0,
        }
        return [text for text, is_wrong in checks.items() if is_wrong]


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    """The user's step. Clipping by value, since a norm needs all gradients before any update and none could wait."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    return loss


def make_batch(number: int, rank: int) -> Batch:
    """Sequences in which each token is three more than the last, except for one in four that is anything."""
    size = BATCH_SIZES[(number + 2 * rank) % len(BATCH_SIZES)]
    generator = seeded_generator(number * NUM_RANKS + rank)
    tokens = torch.randint(CONFIG.vocab_size, (size, CONFIG.context + 1), generator=generator)
    is_ruled = torch.rand(tokens.shape, generator=generator) < 0.75
    for position in range(1, CONFIG.context + 1):
        following = (tokens[:, position - 1] + 3) % CONFIG.vocab_size
        tokens[:, position] = torch.where(is_ruled[:, position], following, tokens[:, position])
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


class Side:
    """One of the two trainings."""

    def __init__(self, model: nn.Module, step: Callable[..., Tensor], num_steps: int) -> None:
        self.model, self.step = model, step
        self.optimizer = AdamW(model.parameters(), lr=2e-3)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=num_steps)

    def take(self, batch: Batch, seed: int) -> float:
        torch.manual_seed(seed)  # both sides draw the same masks
        loss = self.step(self.model, self.optimizer, batch)
        self.scheduler.step()
        return float(loss.detach())

    def evaluate(self, batch: Batch) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = gpt.loss(self.model, batch)
        self.model.train()
        return float(loss)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def soak(options: argparse.Namespace, folder: Path) -> RankResult:
    """Train both sides on this rank."""
    rank, num_steps, warmup = dist.get_rank(), options.steps, options.warmup
    torch.manual_seed(0)
    base = gpt.GPT(CONFIG)
    eager = Side(DistributedDataParallel(copy.deepcopy(base)), train_step, num_steps)
    compiled: Any = wholestep.compile(
        train_step,
        data_parallel="replicate",
        cross_iteration="all",
        memory_budget=MEMORY_BUDGET,
        lower=options.lower,
    )
    ours = Side(base, compiled, num_steps)
    worst, worst_step, losses = 0.0, 0, (0.0, 0.0)
    holdings: list[Holdings] = []
    counted = {warmup + (num_steps - warmup) * part // NUM_COUNTS for part in range(NUM_COUNTS + 1)}
    started = time.perf_counter()
    with wholestep.Checkpoints(folder, keep=2) as checkpoints:
        for number in range(1, num_steps + 1):
            batch, seed = make_batch(number, rank), number * NUM_RANKS + rank
            expected, found = eager.take(batch, seed), ours.take(batch, seed)
            differences = [_difference(found, expected)]
            if number % max(1, num_steps // EVALUATIONS) == 0:
                differences.append(_difference(ours.evaluate(batch), eager.evaluate(batch)))
            if max(differences) > worst:
                worst, worst_step = max(differences), number
            losses = (losses[0] if number > 1 else expected, expected)
            if number % max(1, num_steps // SAVES) == 0:
                checkpoints.save(number, **ours.state)
            if number in counted:
                checkpoints.wait()
                holdings.append(Holdings.now())
    plan, memory = compiled.plan.communication, compiled.plan.memory
    return RankResult(
        num_steps,
        worst,
        worst_step,
        *losses,
        holdings,
        compiled.num_captures,
        len(plan.moved),
        "regions." in str(compiled.graph),
        len(memory.repeated),
        _is_saved(folder, ours.model),
        time.perf_counter() - started,
    )


def _difference(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def _is_saved(folder: Path, model: nn.Module) -> bool:
    """Whether the newest checkpoint has the weights of a model."""
    other = gpt.GPT(CONFIG)
    wholestep.load_checkpoint(max(folder.glob("step-*")), model=other)
    expected = model.state_dict()
    return all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def lines(results: list[RankResult]) -> Iterator[str]:
    first = results[0]
    yield (
        f"{first.num_steps} steps on {len(results)} ranks in {first.seconds:.0f} s; {first.num_captures} captures, "
        f"{first.num_moved} buckets move, {first.num_repeated} kinds of ops run again, "
        f"{'lowered' if first.is_lowered else 'not lowered'}"
    )
    yield "| rank | loss, first and last | worst difference (step) | resident MB | objects | threads | files |"
    yield "|---|---|---|---|---|---|---|"
    for rank, result in enumerate(results):
        early, late = result.holdings[0], result.holdings[-1]
        resident = " · ".join(f"{each.resident_bytes / 1e6:.1f}" for each in result.holdings)
        yield (
            f"| {rank} | {result.first_loss:.3f} · {result.last_loss:.3f} | {result.worst_difference:.1e} "
            f"({result.worst_step}) | {resident} | {early.objects} -> {late.objects} | "
            f"{early.threads} -> {late.threads} | {early.files} -> {late.files} |"
        )
    for rank, result in enumerate(results):
        yield from (f"rank {rank}: {fault}" for fault in result.faults())


def run_rank(options: argparse.Namespace) -> int:
    """One of the ranks; the first one prints what all have found, and returns 1 if something is wrong on any."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    end_with_launcher()
    with reporting_errors(options.folder, rank):
        dist.init_process_group("gloo", init_method=f"file://{options.folder}/store", rank=rank, world_size=num_ranks)
        results: list[Any] = [None] * num_ranks
        dist.all_gather_object(results, soak(options, options.folder / "checkpoints"))
        gc.collect()  # DDP must be gone before its process group is
        dist.destroy_process_group()
    if rank > 0:
        return 0
    print("\n".join(lines(results)))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(any(result.faults() for result in results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="default %(default)s")
    parser.add_argument("--warmup", type=int, default=200, help="steps before the first count, default %(default)s")
    parser.add_argument("--lower", choices=("auto", "inductor", "none"), default="auto", help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("folder", type=Path, nargs="?", help=argparse.SUPPRESS)  # where ranks meet
    options = parser.parse_args()
    if not 0 < options.warmup < options.steps:
        parser.error("--warmup is at least one step, and shorter than --steps")
    if options.folder is not None:
        return run_rank(options)
    return launch([sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]], NUM_RANKS)


if __name__ == "__main__":
    sys.exit(main())
