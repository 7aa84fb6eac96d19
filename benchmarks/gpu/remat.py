"""Step time against peak memory on one GPU: upstream's memory budget and ours, both compiled by Inductor.

    python -m benchmarks.gpu.remat [--points "upstream 1.0" "ours 21.5GiB" ...] [--layers N] [--json FILE]
    python -m benchmarks.gpu.remat --draw FILE.json FILE.svg

GPT-2 medium, batch 32 x 1024, bf16 autocast, fused AdamW. "upstream B" is torch.compile with activation_memory_budget
B, "ours B" torch.compile with `wholestep.inductor(memory_budget=B)`; bytes there are without optimizer state.

A few processes compile the contenders side by side. Whatever is timed, Inductor's own trials included, runs with the
GPU to itself, and contenders take turns: `--rounds` times each, so that a GPU that slows down slows all of them down.
Times are medians over CUDA events, peaks those of the allocator over a step, with parameters and optimizer state.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config as functorch_config
from torch import nn

import wholestep
from benchmarks.gpu.turns import Gpu, pause, share_out
from wholestep.zoo import gpt
from wholestep.zoo.checkpointed import CheckpointedGPT

UPSTREAM = ("upstream 1.0", "upstream 0.7", "upstream 0.5", "upstream 0.3", "upstream 0.1", "upstream 0.0")
OURS = ("ours 1.0", "ours 25.9GiB", "ours 21.9GiB", "ours 17GiB", "ours 13GiB", "ours 10GiB", "ours 7.1GiB", "ours 0.0")
POINTS = ("eager", "eager checkpointed", *UPSTREAM, *OURS)
_GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """One contender: milliseconds and GiB per step, the loss of its last step, seconds to compile, GiB predicted."""

    point: str
    step_ms: float
    peak_gib: float
    loss: float
    compile_s: float
    predicted_gib: float | None


@dataclass
class Contender:
    """A model with a step of its own, compiled by its first call."""

    point: str
    config: gpt.GPTConfig
    batch: dict[str, torch.Tensor]
    compile_s: float = 0.0
    times_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        checkpointed = self.point == "eager checkpointed"
        self.model: nn.Module = (
            CheckpointedGPT(self.config, use_reentrant=False) if checkpointed else gpt.GPT(self.config)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        kind, _, budget = self.point.rpartition(" ")
        self.forward: Callable[..., torch.Tensor] = self._loss
        # What Dynamo has compiled belongs to the code, and would do for another model: everyone gets code of his own.
        loss = types.FunctionType(self._loss.__func__.__code__.replace(co_name=f"loss of {self.point}"), globals())
        loss = functools.partial(loss, self)
        if kind == "upstream":
            self.forward = functorch_config.patch(activation_memory_budget=float(budget))(torch.compile(loss))
        elif kind == "ours":
            self.forward = torch.compile(loss, backend=wholestep.inductor(memory_budget=budget))

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return gpt.loss(self.model, batch)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def compile(self) -> None:
        started = time.perf_counter()
        self.step()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - started
        self._let_go()

    def _let_go(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def _resident_bytes(self) -> int:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *states, *self.batch.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in {id(item): item for item in tensors}.values())

    def measure(self, steps: int) -> None:
        for _ in range(2):
            self.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = torch.zeros(())
        for _ in range(steps):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            loss = self.step()
            end.record()
            torch.cuda.synchronize()
            self.times_ms.append(begin.elapsed_time(end))
        self.peak_gib = (torch.cuda.max_memory_allocated() - before + self._resident_bytes()) / _GIB
        self.loss = loss.item()
        self._let_go()

    def result(self, predicted_gib: float | None) -> Measured:
        return Measured(
            self.point, statistics.median(self.times_ms), self.peak_gib, self.loss, self.compile_s, predicted_gib
        )


def work(arguments: argparse.Namespace) -> None:
    """Compile and time some contenders, as one of several processes; results go to the JSON file."""
    from wholestep.remat import inductor as backend

    torch._dynamo.config.recompile_limit = 64  # one function, a model each
    gpu = Gpu(arguments.lock)
    gpu.guard_trials()
    predicted: dict[str, float] = {}
    current = ""
    plain = backend.partition_joint

    def noting(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        num_bytes = found.choice.outcome.peak_bytes + found.joint.problem.resident_bytes
        predicted[current] = (num_bytes + 2 * parameter_bytes) / _GIB
        return found

    backend.partition_joint = noting
    config = gpt.GPTConfig(
        vocab_size=50257, context=1024, width=1024, heads=16, layers=arguments.layers, dropout=arguments.dropout
    )
    batch = {name: value.cuda() for name, value in gpt.make_batch(config, arguments.batch, 0).items()}
    contenders: list[Contender] = []
    parameter_bytes = 0
    for current in arguments.points:
        contender = Contender(current, config, batch)
        parameter_bytes = sum(item.numel() * item.element_size() for item in contender.model.parameters())
        if current.startswith("eager"):
            with gpu.alone():
                contender.compile()
        else:
            contender.compile()
        contenders.append(contender)
        print(f"{current}: compiled in {contender.compile_s:.0f} s", flush=True)
    for _ in range(arguments.rounds):
        for contender in contenders:
            with gpu.alone():
                contender.measure(arguments.steps)
            pause()
    results = [contender.result(predicted.get(contender.point)) for contender in contenders]
    arguments.json.write_text(json.dumps([asdict(result) for result in results]))


def run(arguments: argparse.Namespace) -> list[Measured]:
    """Share the points out to processes and collect what they find."""
    options = {key: getattr(arguments, key) for key in ("layers", "batch", "steps", "rounds", "dropout")}
    texts = share_out("benchmarks.gpu.remat", arguments.points, arguments.processes, options)
    found = [Measured(**item) for text in texts for item in json.loads(text)]
    return sorted(found, key=lambda result: arguments.points.index(result.point))


def table(results: Sequence[Measured]) -> str:
    lines = ["| contender | ms/step | peak GiB | predicted | loss | to compile s |", "|---|---|---|---|---|---|"]
    for item in results:
        predicted = "" if item.predicted_gib is None else f"{item.predicted_gib:.1f}"
        lines.append(
            f"| {item.point} | {item.step_ms:.1f} | {item.peak_gib:.1f} | {predicted} | {item.loss:.4f} | "
            f"{item.compile_s:.0f} |"
        )
    return "\n".join(lines)


def draw(source: Path, target: Path) -> None:
    """Both curves as a picture."""
    import matplotlib.pyplot as plt

    results = [Measured(**item) for item in json.loads(source.read_text())]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "wholestep"}
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for kind, style, label, below in (
        ("upstream", "s-", "torch.compile, activation_memory_budget", False),
        ("ours", "o-", "torch.compile, backend=wholestep.inductor(memory_budget=...)", True),
        ("eager", "^", "eager", False),
    ):
        chosen = [item for item in results if item.point.startswith(kind)]
        axes.plot([item.peak_gib for item in chosen], [item.step_ms for item in chosen], style, label=label)
        for item in chosen:
            text = item.point.removeprefix(kind).strip() or kind
            offset = (0, -13) if below else (6, 4)
            axes.annotate(text, (item.peak_gib, item.step_ms), textcoords="offset points", xytext=offset, fontsize=8)
    axes.set(xlabel="peak memory, GiB", ylabel="step time, ms", title="GPT-2 medium, 32 x 1024, bf16, one H200")
    axes.margins(x=0.08, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("JSON", "SVG"))
    arguments = parser.parse_args(argv)
    if arguments.draw:
        draw(*arguments.draw)
        return 0
    if arguments.lock:
        work(arguments)
        return 0
    results = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
