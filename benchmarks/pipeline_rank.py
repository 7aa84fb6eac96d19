"""One rank of `benchmarks.pipeline`: all contenders in one process, in turns. Rank 0 writes the figures as JSON.

All ranks begin a window at one instant, which rank 0 names; it ends when the last of them is done. A window has one
step where the time of a step is what counts, and several where its cost is.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import pipeline_emulated, pipeline_real
from benchmarks.pipeline_emulated import Contender

_AHEAD_S = 0.005


@dataclass(frozen=True)
class Window:
    """Per step: wall seconds until the last rank is done, CPU seconds of a rank on average."""

    wall_s: float
    cpu_s: float


def measure(
    contenders: Mapping[str, Contender], *, warmup: int, repeats: int, window_steps: int
) -> dict[str, list[Window]]:
    """Windows of all contenders in turns."""
    for contender in contenders.values():
        for _ in range(warmup):
            contender.step()
    windows: dict[str, list[Window]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            windows[name].append(_window(contender, window_steps))
    return windows


def _window(contender: Contender, num_steps: int) -> Window:
    dist.barrier()
    start = torch.tensor(time.monotonic() + _AHEAD_S, dtype=torch.float64)  # one clock for all processes of a machine
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    cpu_s = _cpu_s()
    for _ in range(num_steps):
        contender.step()
    found = torch.tensor([time.monotonic() - start.item(), _cpu_s() - cpu_s], dtype=torch.float64)
    ranks = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, found)
    walls_s, cpus_s = torch.stack(ranks, dim=1).tolist()
    return Window(max(walls_s) / num_steps, sum(cpus_s) / len(cpus_s) / num_steps)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
    return usage.ru_utime + usage.ru_stime


def emulated(arguments: argparse.Namespace) -> dict[str, Any]:
    """Schedules of stages that sleep, or that do nothing at all."""
    found = pipeline_emulated.contenders(arguments.names, arguments.micro_batches, arguments.sleep_ms / 1e3)
    windows = measure(found, warmup=arguments.warmup, repeats=arguments.repeats, window_steps=arguments.window_steps)
    dist.barrier()
    for contender in found.values():
        contender.close()
    return {
        name: {"ideal_s": one.ideal_s, "num_stages": one.num_stages, "windows": [asdict(w) for w in windows[name]]}
        for name, one in found.items()
    }


def real(arguments: argparse.Namespace) -> dict[str, Any]:
    """A GPT in stages: time, memory, and what it costs to split a backward."""
    found = {
        f"{side} {name}": make(name, arguments.micro_batches)
        for name in arguments.names
        for side, make in (("wholestep", pipeline_real.ours), ("torch", pipeline_real.upstream))
    }
    windows = measure(
        {name: Contender(one.step) for name, one in found.items()},
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        window_steps=arguments.window_steps,
    )
    result: dict[str, Any] = {}
    for name, one in found.items():
        dist.barrier()
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, one.peak_bytes())
        result[name] = {"windows": [asdict(window) for window in windows[name]], "peak_bytes": peaks}
    for name in arguments.names:
        difference = pipeline_real.difference(found[f"wholestep {name}"], found[f"torch {name}"])
        differences: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(differences, difference)
        result[f"torch {name}"]["difference"] = max(differences)
    result["backward"] = pipeline_real.backward_times(arguments.repeats) if dist.get_rank() == 0 else None
    dist.barrier()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("emulated", "cost", "real"))
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--sleep-ms", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--window-steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = (real if arguments.part == "real" else emulated)(arguments)
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
