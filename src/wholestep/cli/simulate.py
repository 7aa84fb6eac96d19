"""`wholestep simulate`: a train step on a cluster that need not be there, and the best way to run it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from wholestep._output import require_writable, write_output
from wholestep.capture import capture
from wholestep.capture.blank import no_weights
from wholestep.cli.options import load
from wholestep.cli.progress import say, working
from wholestep.cli.target import Target
from wholestep.comm.plan import decide
from wholestep.errors import UsageError
from wholestep.graph import StepGraph
from wholestep.pipe.schedules import FAMILIES
from wholestep.remat import StepBudget, readable
from wholestep.sim.calibrate import calibrate
from wholestep.sim.chrome import chrome_trace
from wholestep.sim.cluster import Cluster
from wholestep.sim.costs import CostModel
from wholestep.sim.facts import StepFacts, gather_step, schedule_of
from wholestep.sim.jobs import Job
from wholestep.sim.search import CROSSINGS, Found, Ranked, search
from wholestep.sim.simulate import Prediction, simulate, trace


def add_parser(commands: Any) -> None:
    """Make `simulate` a command of the command line."""
    text = (
        "Capture the train step of a file without allocating its weights and simulate it on a cluster: data parallel, "
        "or as a pipeline with --schedule; --search tries many ways and prints the best. --calibrate measures this "
        "machine instead (its links too, under torchrun) and writes a cost model that --costs reads."
    )
    parser = commands.add_parser("simulate", help="simulate a train step on a cluster", description=text)
    parser.add_argument("target", nargs="?", type=Target.of, metavar="FILE.py:FUNCTION", help="what returns the step")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="the cluster, as JSON")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="a cost model with devices and links by name")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure this machine and write a cost model")
    parser.add_argument("--search", action="store_true", help="look for the best plans")
    parser.add_argument("--best", type=_count, default=5, metavar="N", help="how many (default %(default)s)")
    parser.add_argument(
        "--memory-budget", type=str, action="append", default=[], metavar="SIZE", help="may be repeated"
    )
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="of gradient buckets (default %(default)s)")
    parser.add_argument("--cross-iteration", choices=CROSSINGS, default="auto", help="(default %(default)s)")
    schedules = [name for name in FAMILIES if name not in ("forward", "planned")]
    parser.add_argument("--schedule", choices=schedules, help="simulate a pipeline")
    parser.add_argument("--pipeline-ranks", type=_count, metavar="P", help="ranks of one pipeline (default: all)")
    parser.add_argument("--micro-batches", type=_count, metavar="M", help="(default: as many as ranks)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of the (best) plan")
    parser.add_argument("--trace-ranks", type=_rank, nargs="+", default=[0], metavar="R", help="(default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Calibrate, or simulate and print."""
    if options.calibrate is not None:
        return _calibrate(options)
    if options.target is None or options.cluster is None:
        raise UsageError("simulate takes FILE.py:FUNCTION and --cluster FILE, or --calibrate FILE")
    require_writable(options.trace)
    costs = CostModel.builtin()
    if options.costs is not None:
        costs = costs.with_others(CostModel.load(options.costs))
    cluster = Cluster.load(options.cluster, costs)
    steps = _facts(options, cluster)
    if options.search:
        with working("simulating plans"):
            found = search(steps, cluster, num_best=options.best)
        _write_trace(options, found.best[0].job, cluster)
        if options.json:
            print(json.dumps(_found_json(found), indent=1))
        else:
            _print_found(found, cluster)
        return 0
    with working("planning and simulating"):
        job = _job(options, steps[0], cluster)
        prediction = simulate(job, cluster)
    _write_trace(options, job, cluster)
    if options.json:
        print(json.dumps(_json(prediction), indent=1))
    else:
        _print_predictions([prediction], cluster)
    return 0


def _facts(options: argparse.Namespace, cluster: Cluster) -> list[StepFacts]:
    """The step by the figures of the cluster's device: under each budget, or as it is.

    A step that a device cannot hold is also looked at with what the device has for a budget.
    """
    with no_weights():
        made = load(options.target)
        with working("capturing the step"):
            graph = capture(made.eager, made.args, made.kwargs).graph
        with working("planning memory"):
            budgets = [StepBudget.of(text) for text in options.memory_budget]
            return _under(graph, options, cluster, budgets)


def _under(
    graph: StepGraph, options: argparse.Namespace, cluster: Cluster, budgets: Sequence[StepBudget]
) -> list[StepFacts]:
    device, name = cluster.device, str(options.target)
    if budgets:
        return [gather_step(graph, device, name=name, budget=budget) for budget in budgets]
    plain = gather_step(graph, device, name=name)
    if not options.search or not 0 < device.memory_bytes < plain.peak_bytes:
        return [plain]
    limit = StepBudget.of(device.memory_bytes)
    return [plain, gather_step(graph, device, name=name, budget=limit)]


def _job(options: argparse.Namespace, step: StepFacts, cluster: Cluster) -> Job:
    if options.schedule is None:
        plan = decide(step.for_cluster(cluster), bucket_mb=options.bucket_mb, cross_iteration=options.cross_iteration)
        peak_bytes = 0 if step.peak_of is None else step.peak_of(plan)
        name = f"data parallel, {options.bucket_mb:g} MB, {options.cross_iteration}"
        return step.data_parallel_job(plan, name, peak_bytes)
    num_ranks = options.pipeline_ranks or cluster.num_ranks
    schedule = schedule_of(options.schedule, num_ranks, options.micro_batches or num_ranks)
    return step.pipeline_job(schedule, bucket_mb=options.bucket_mb)


def _write_trace(options: argparse.Namespace, job: Job, cluster: Cluster) -> None:
    if options.trace is None:
        return
    text = chrome_trace(trace(job, cluster, tuple(options.trace_ranks)))
    say(f"trace: {write_output(options.trace, text)}")


def _calibrate(options: argparse.Namespace) -> int:
    """Measure this machine; under torchrun all its ranks do, and the first one writes."""
    require_writable(options.calibrate)
    is_joined = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_joined:
        dist.init_process_group("gloo")
    try:
        with working("measuring"):
            model = calibrate()
        if not is_joined or dist.get_rank() == 0:
            model.save(options.calibrate)
            print(model.to_json(), end="")
    finally:
        if is_joined:
            dist.destroy_process_group()
    return 0


def _json(prediction: Prediction) -> dict[str, Any]:
    return {
        "name": prediction.name,
        "ranks": prediction.num_ranks,
        "step_us": prediction.step_us,
        "first_step_us": prediction.first_us,
        "compute_us": prediction.compute_us,
        "exposed_us": prediction.exposed_us,
        "bubble": prediction.bubble,
        "peak_bytes": prediction.peak_bytes,
        "by_rank": [
            {
                "rank": rank.rank,
                "num_equal": rank.num_equal,
                "busy": prediction.busy(index),
                "peak_bytes": rank.peak_bytes,
            }
            for index, rank in enumerate(prediction.ranks)
        ],
    }


def _found_json(found: Found) -> dict[str, Any]:
    return {
        "num_options": found.num_options,
        "num_simulated": found.num_simulated,
        "refused": list(found.refused),
        "best": [_ranked_json(one) for one in found.best],
    }


def _ranked_json(one: Ranked) -> dict[str, Any]:
    return {"options": one.options, "reason": one.reason, **_json(one.prediction), "peak_bytes": one.peak_bytes}


def _print_found(found: Found, cluster: Cluster) -> None:
    _print_predictions([one.prediction for one in found.best], cluster, [one.peak_bytes for one in found.best])
    for number, one in enumerate(found.best, 1):
        budget = one.options.get("memory_budget")
        print(f"{number}. {one.job.name}{f', memory budget {budget}' if budget else ''}: {one.reason}")
    print(f"{found.num_simulated} of {found.num_options} plans simulated, {len(found.refused)} do not fit")


def _print_predictions(predictions: Sequence[Prediction], cluster: Cluster, peaks: Sequence[int] | None = None) -> None:
    table = Table(title=f"{cluster.num_ranks} ranks, {cluster.ranks_per_node} in a node", title_justify="left")
    table.add_column("plan")
    for heading in ("step ms", "computes ms", "exposed ms", "bubble", "peak"):
        table.add_column(heading, justify="right")
    for index, one in enumerate(predictions):
        peak_bytes = one.peak_bytes if peaks is None else peaks[index]
        times = (f"{time_us / 1e3:.2f}" for time_us in (one.step_us, one.compute_us, one.exposed_us))
        table.add_row(one.name, *times, f"{100 * one.bubble:.1f}%", readable(peak_bytes) if peak_bytes else "-")
    Console(width=None if os.isatty(1) else 120).print(table)


def _count(text: str) -> int:
    return _number(text, 1)


def _rank(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least or len(text) > 9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of {least} or more")
    return int(text)
