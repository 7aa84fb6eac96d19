"""What to keep for the backward: upstream's partitioner against ours, on the same joint graphs.

    python -m benchmarks.remat [--models NAME ...] [--json FILE]

For each model, upstream's `min_cut_rematerialization_partition` at 13 budgets (its activation_memory_budget), and our
planner asked for each of the peaks upstream reaches and for those below. Peaks are live bytes without parameters and
inputs, counted on the emitted forward and backward graphs by one and the same walk (`memory_of`); flops are those of
matrix products, convolutions and attention. Nothing is run, no weights are allocated.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.joint_graphs import MODELS, Build, JointGraph, capture_joint, gpt2, memory_of
from wholestep.remat.estimate import estimated_costs
from wholestep.remat.joint import deduplicated, read_joint, split_joint
from wholestep.remat.problem import Decision
from wholestep.remat.search import Planner

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02, 0.0)
# Below upstream's smallest peak, as shares of it.
FURTHER = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Point:
    """One way to cut a graph: its peak and what is computed again, as a share of the forward's flops."""

    label: str
    peak_mb: float
    again: float
    seconds: float


@dataclass
class Curves:
    """All points of one model."""

    model: str
    upstream: list[Point] = field(default_factory=list)
    ours: list[Point] = field(default_factory=list)
    plan_s: float = 0.0

    def smallest(self) -> tuple[float, float]:
        return min(point.peak_mb for point in self.upstream), min(point.peak_mb for point in self.ours)

    def peak_at(self, again: float) -> float:
        """Our lowest peak at no more recomputation."""
        return min((point.peak_mb for point in self.ours if point.again <= again + 1e-9), default=math.inf)

    def again_at(self, peak_mb: float) -> float:
        """Our least recomputation at no higher peak."""
        return min((point.again for point in self.ours if point.peak_mb <= peak_mb * (1 + 1e-9)), default=math.inf)


def compare(name: str, build: Build) -> Curves:
    """Both partitioners on one model."""
    joint = capture_joint(name, build)
    curves = Curves(name)
    baseline = _upstream(joint, 1.0)
    least_flops, forward_flops = _flops(joint)
    for budget in BUDGETS:
        started = time.perf_counter()
        pair = baseline if budget == 1.0 else _upstream(joint, budget)
        seconds = time.perf_counter() - started
        memory = memory_of(*pair, joint.num_fwd_outputs)
        again = (memory.flops - least_flops) / forward_flops
        curves.upstream.append(Point(f"{budget:g}", memory.peak_bytes / 1e6, again, seconds))
    started = time.perf_counter()
    merged = deduplicated(joint.module)
    read = read_joint(merged, joint.num_fwd_outputs, estimated_costs(merged.graph.nodes, "flops"))
    planner = Planner(read.program.problem)
    lowest = min(point.peak_mb for point in curves.upstream)
    limits = sorted({point.peak_mb for point in curves.upstream} | {share * lowest for share in FURTHER}, reverse=True)
    choices = [planner.plan(int(limit * 1e6)) for limit in limits]
    choices += [planner.without_flops, planner.smallest]
    choices += [planner.smallest_without_flops()]
    curves.plan_s = time.perf_counter() - started
    seen: set[Decision] = set()
    for choice in choices:
        if choice is None or choice.decision in seen:
            continue
        seen.add(choice.decision)
        started = time.perf_counter()
        pair = split_joint(read, choice.decision)
        seconds = time.perf_counter() - started
        memory = memory_of(*pair, joint.num_fwd_outputs)
        again = (memory.flops - least_flops) / forward_flops
        curves.ours.append(Point(f"{choice.outcome.peak_bytes / 1e6:.0f}", memory.peak_bytes / 1e6, again, seconds))
    curves.ours.sort(key=lambda point: -point.peak_mb)
    return curves


def _upstream(joint: JointGraph, budget: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    with functorch_config.patch(activation_memory_budget=budget):
        return min_cut_rematerialization_partition(
            joint.clone(),
            None,
            num_fwd_outputs=joint.num_fwd_outputs,
            static_lifetime_input_indices=joint.static_indices,
        )


def _flops(joint: JointGraph) -> tuple[int, int]:
    """Flops of forward and backward with nothing computed again, and of the forward alone."""
    merged = deduplicated(joint.module)
    read = read_joint(merged, joint.num_fwd_outputs, {})
    planner = Planner(read.program.problem)
    pair = split_joint(read, planner.everything.decision)
    return memory_of(*pair, joint.num_fwd_outputs).flops, planner.problem.forward_flops


def print_curves(curves: Curves) -> None:
    print(f"\n### {curves.model}  (planning all of ours: {curves.plan_s:.1f} s)\n")
    print("| upstream budget | peak MB | again | ours at no more flops, MB | ratio | ours at no higher peak, again |")
    print("|---|---|---|---|---|---|")
    for point in curves.upstream:
        peak, again = curves.peak_at(point.again), curves.again_at(point.peak_mb)
        print(
            f"| {point.label} | {point.peak_mb:.0f} | {point.again:.3f} | {peak:.0f} | {peak / point.peak_mb:.2f} | "
            f"{again:.3f} |"
        )
    theirs, ours = curves.smallest()
    print(f"\nsmallest peak: upstream {theirs:.0f} MB, ours {ours:.0f} MB, {ours / theirs:.2f}x")
    print("ours: " + ", ".join(f"{point.peak_mb:.0f} MB at {point.again:.3f}" for point in curves.ours))


def print_summary(all_curves: list[Curves]) -> None:
    ratios = [ours / theirs for theirs, ours in (curves.smallest() for curves in all_curves)]
    print(f"\nsmallest peak, geometric mean: {math.exp(statistics.mean(map(math.log, ratios))):.2f}x (target 0.50x)")
    cells = [
        (curves.peak_at(point.again) / point.peak_mb, curves.model, point.label)
        for curves in all_curves
        for point in curves.upstream
    ]
    worst = max(cells)
    print(f"peak at equal flops, worst cell: {worst[0]:.3f}x ({worst[1]}, budget {worst[2]}; target <= 1)")
    tenth = [
        curves.peak_at(point.again) / point.peak_mb
        for curves in all_curves
        for point in curves.upstream
        if point.label == "0.1"
    ]
    print(f"peak at equal flops, budget 0.1, median: {statistics.median(tenth):.2f}x (target 0.50x)")
    low = [
        (curves.again_at(point.peak_mb) / point.again if point.again > 0 else 0.0, curves.model, point.label)
        for curves in all_curves
        for point in curves.upstream
        if float(point.label) <= 0.1 and point.again > 0
    ]
    print(f"flops at equal peak, budgets <= 0.1: median {statistics.median(x for x, *_ in low):.2f}x, "
          f"worst {max(low)[0]:.2f}x ({max(low)[1]}, {max(low)[2]}; target 0.25x)")  # fmt: skip
    free = [(curves.peak_at(0.0) / curves.upstream[0].peak_mb, curves.model) for curves in all_curves]
    print("peak at zero flops over upstream's at 1.0: " + ", ".join(f"{ratio:.2f} ({name})" for ratio, name in free)
          + " (target 0.65x)")  # fmt: skip


def time_partitions(layers: list[int]) -> None:
    """Whole partition times (cut, plan, emitted modules) at budget 0.5."""
    from wholestep.remat.partition import partition_joint

    print("\n| GPT-2 layers | upstream s | ours s | ratio |\n|---|---|---|---|")
    for count in layers:
        joint = capture_joint(f"GPT-2, {count} layers", gpt2(count, 256, 5000, 4, 512))
        times: dict[str, list[float]] = {"upstream": [], "ours": []}
        for _ in range(3):
            gc.collect()
            module = joint.clone()
            started = time.perf_counter()
            with functorch_config.patch(activation_memory_budget=0.5):
                min_cut_rematerialization_partition(
                    module,
                    None,
                    num_fwd_outputs=joint.num_fwd_outputs,
                    static_lifetime_input_indices=joint.static_indices,
                )
            times["upstream"].append(time.perf_counter() - started)
            gc.collect()
            started = time.perf_counter()
            partition_joint(joint.module, num_fwd_outputs=joint.num_fwd_outputs, memory_budget=0.5)
            times["ours"].append(time.perf_counter() - started)
        theirs, ours = (statistics.median(times[name]) for name in ("upstream", "ours"))
        print(f"| {count} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} |", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, help="default all")
    parser.add_argument("--layers", nargs="*", type=int, default=[12, 48], help="sizes to time (default 12 48)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all points there too")
    arguments = parser.parse_args(argv)
    all_curves: list[Curves] = []
    for name in MODELS if arguments.models is None else arguments.models:
        print(f"{name} …", file=sys.stderr, flush=True)
        all_curves.append(compare(name, MODELS[name]))
        print_curves(all_curves[-1])
    if all_curves:
        print_summary(all_curves)
    time_partitions(arguments.layers)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(curves) for curves in all_curves], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
