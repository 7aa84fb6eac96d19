"""One rank of `benchmarks.data_parallel`: all contenders in one process, in turns. Rank 0 writes the figures as JSON.

A window is `window_steps` consecutive steps, timed together and divided by their number, so that work a step leaves
pending is charged to the steps that wait for it. Windows of the contenders alternate, after a barrier. A window under 8
steps starts with one untimed step, which leaves behind what a steady stream of steps would find; a longer one is
timed up to the end of all pending work instead. A window in which the rest of the machine was busy is measured again.

Another contender is a function from `World` to `Contender`, and a line in `CONTENDERS`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholestep
from wholestep.zoo import gpt

BUCKETS_MB = (1, 4, 8, 25, 100)
CHUNK_BYTES = 25_000_000
FLUSH_INSIDE_FROM_STEPS = 8
# A window is quiet if the rest of the machine used less than this; a tick or two of its coarse clock are forgiven.
QUIET_CORES = 0.2
CLOCK_SLACK_S = 0.02
# Inductor writes C++ for the CPU; without a compiler, torch.compile can still run the captured graphs op by op.
BACKEND = "inductor" if any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")) else "aot_eager"


@dataclass(frozen=True)
class ModelSize:
    """A model, its batch, and the links where its all-reduce takes 0.3 to 2 times its local step (here, one thread)."""

    config: gpt.GPTConfig
    batch_size: int
    rates: tuple[str, ...]


# The same model with a large and a small batch: more and less compute for the same bytes. The last one is the hard
# case: a third of its bytes are one gradient, of the embedding, which is tied to the head. It is complete only at the
# very end of the backward pass and its weight is the first one that the next step needs.
MODELS = {
    "GPT 10M, batch 6x128": ModelSize(
        gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=8, layers=12),
        6,
        ("unlimited", "2gbit", "1gbit", "0.7gbit", "0.5gbit"),
    ),
    "GPT 10M, batch 3x128": ModelSize(
        gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=8, layers=12),
        3,
        ("1gbit", "0.7gbit", "0.5gbit"),
    ),
    "GPT 14M, vocabulary 16384": ModelSize(
        gpt.GPTConfig(vocab_size=16384, context=128, width=256, heads=8, layers=12),
        4,
        ("1gbit", "0.5gbit"),
    ),
}


@dataclass(frozen=True)
class World:
    """What every contender starts from; the batch is this rank's own."""

    base: nn.Module
    batch: dict[str, torch.Tensor]

    @property
    def gradient_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.base.parameters())

    def model(self) -> nn.Module:
        return copy.deepcopy(self.base)

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@dataclass(frozen=True)
class Contender:
    """One step, and the end of all that steps left pending."""

    step: Callable[[], Any]
    flush: Callable[[], Any] = lambda: None


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """The user's step."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def local(world: World) -> Contender:
    """No communication: what the step costs by itself."""
    model = world.model()
    return Contender(partial(train_step, model, world.optimizer(model), world.batch))


def bare_all_reduce(world: World) -> Contender:
    """No computation: as many bytes as all gradients have, queued at once."""
    return side_by_side(world, lambda: None)


def both(world: World) -> Contender:
    """Both at once, neither waiting for the other: no training, but what sharing a core leaves of max(C, M)."""
    return side_by_side(world, local(world).step)


def side_by_side(world: World, compute: Callable[[], Any]) -> Contender:
    left_bytes = range(world.gradient_bytes, 0, -CHUNK_BYTES)
    chunks = [torch.zeros(min(CHUNK_BYTES, num_bytes) // 4) for num_bytes in left_bytes]

    def step() -> None:
        works = [dist.all_reduce(chunk, async_op=True) for chunk in chunks]
        compute()
        for work in works:
            assert work is not None
            work.wait()

    return Contender(step)


def ddp(world: World, bucket_mb: int, backend: str | None = None) -> Contender:
    """DistributedDataParallel, its compiled form if there is a backend."""
    model = DistributedDataParallel(world.model(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer = world.optimizer(model)
    forward: Any = model if backend is None else torch.compile(model, backend=backend)
    return Contender(partial(train_step, forward, optimizer, world.batch))


def ours(world: World, cross_iteration: str, lower: str = "none") -> Contender:
    """Wholestep's own data parallelism."""
    options = {"data_parallel": "replicate", "bucket_mb": 25, "cross_iteration": cross_iteration, "lower": lower}
    return compiled_step(world, **options)


def compiled_step(world: World, **options: Any) -> Contender:
    """Wholestep without communication, if the options do not say otherwise."""
    model = world.model()
    compiled: Any = wholestep.compile(train_step, **options)
    return Contender(partial(compiled, model, world.optimizer(model), world.batch), compiled.flush)


LOCAL, BARE, BOTH = "local", "all-reduce", "both at once"
DDP = {f"DDP {bucket_mb} MB": partial(ddp, bucket_mb=bucket_mb) for bucket_mb in BUCKETS_MB}
PEERS: dict[str, Callable[[World], Contender]] = {LOCAL: local, BARE: bare_all_reduce, BOTH: both, **DDP}
COMPILED: dict[str, Callable[[World], Contender]] = {
    f"torch.compile(DDP), {BACKEND}": partial(ddp, bucket_mb=25, backend=BACKEND),
}
OURS: dict[str, Callable[[World], Contender]] = {
    "wholestep buckets": partial(ours, cross_iteration="none"),
    "wholestep auto": partial(ours, cross_iteration="auto"),
    "wholestep all": partial(ours, cross_iteration="all"),
}
# What lowering does to the overlap: exposed communication is the difference to the same step without any.
LOWERED: dict[str, Callable[[World], Contender]] = {
    "wholestep local": compiled_step,
    "wholestep auto": partial(ours, cross_iteration="auto"),
    "wholestep local, lowered": partial(compiled_step, lower="inductor"),
    "wholestep auto, lowered": partial(ours, cross_iteration="auto", lower="inductor"),
}
CONTENDERS = {**PEERS, **COMPILED, **OURS, **LOWERED}


@dataclass(frozen=True)
class Window:
    """Per step: wall seconds of the slowest rank, CPU seconds of a rank on average. Cores that others kept busy."""

    wall_s: float
    cpu_s: float
    others_cores: float

    @property
    def is_quiet(self) -> bool:
        return self.others_cores <= QUIET_CORES


def measure(contenders: dict[str, Contender], plan: argparse.Namespace) -> dict[str, list[Window]]:
    """Windows of all contenders in turns, until each has had its number of quiet ones or no more are allowed."""
    for contender in contenders.values():
        for _ in range(plan.warmup):
            contender.step()
        contender.flush()
    windows: dict[str, list[Window]] = {name: [] for name in contenders}
    for _ in range(plan.max_repeats):
        for name, contender in contenders.items():
            if sum(window.is_quiet for window in windows[name]) < plan.repeats:
                windows[name].append(_window(contender, plan.window_steps))
    return windows


def _window(contender: Contender, num_steps: int) -> Window:
    flush_inside = num_steps >= FLUSH_INSIDE_FROM_STEPS
    dist.barrier()
    if not flush_inside:
        contender.step()
    wall_s, cpu_s, machine_s = time.perf_counter(), _cpu_s(), _machine_cpu_s()
    for _ in range(num_steps):
        contender.step()
    if flush_inside:
        contender.flush()
    wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s() - cpu_s
    machine_s = _machine_cpu_s() - machine_s
    contender.flush()
    # Every rank sees the same figures and so decides alike whether the window counts.
    ranks = [torch.zeros(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor([wall_s, cpu_s, machine_s], dtype=torch.float64))
    walls_s, cpus_s, machines_s = torch.stack(ranks, dim=1).tolist()
    others_s = max(0.0, machines_s[0] - sum(cpus_s) - CLOCK_SLACK_S)
    return Window(max(walls_s) / num_steps, sum(cpus_s) / len(cpus_s) / num_steps, others_s / walls_s[0])


def _machine_cpu_s() -> float:
    """CPU time of all processes of the machine, and of its interrupts; 10 ms coarse."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--max-repeats", type=int, required=True)
    parser.add_argument("--window-steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = MODELS[arguments.model]
    torch.manual_seed(0)
    world = World(gpt.GPT(size.config), gpt.make_batch(size.config, size.batch_size, seed=dist.get_rank()))
    contenders = {name: CONTENDERS[name](world) for name in arguments.contenders}
    windows = measure(contenders, arguments)
    contenders.clear()  # DDP must be gone before its process group is
    gc.collect()
    if dist.get_rank() == 0:
        by_name = {name: [vars(window) for window in each] for name, each in windows.items()}
        arguments.output.write_text(json.dumps({"gradient_bytes": world.gradient_bytes, "windows": by_name}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
