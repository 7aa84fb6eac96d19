"""One rank of `benchmarks.simulate`: measures steps, and predicts them from figures that were measured apart.

Data parallel: the local step, the link and the times of single ops are measured, then steps with communication. A
pipeline: what actions take is measured where the link is fast (`--costs FILE` is written then, and read where it is
slow). Rank 0 writes all figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep
from benchmarks import simulate_emulated as emulated
from benchmarks.data_parallel_rank import MODELS, train_step
from wholestep.capture import capture
from wholestep.comm.facts import gather_facts
from wholestep.comm.plan import Facts
from wholestep.cost import DEVICES, Link, Wire, measure_peak, profile_memory
from wholestep.passes import Pipeline, run_passes
from wholestep.pipe import StageCosts, Timeline
from wholestep.sim import Cluster, DataParallelJob, Prediction, simulate
from wholestep.sim.calibrate import calibrate_wire
from wholestep.sim.cut_job import cut_job
from wholestep.zoo import gpt

NUM_LAYERS, LAYER_US, LAYER_WEIGHTS = 8, 10_000.0, 131_072
PIPE_LAYERS, PIPE_US, PIPE_WIDTH, PIPE_MICRO_BATCHES = 8, 15_000.0, 131_072, 8
PIPE_CONFIG = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=8, layers=8, dropout=0.0)
_PASSES = Pipeline.parse("simplify,cse,dce")


def emulated_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = emulated.loss_fn(model(batch), batch)
    loss.backward()
    optimizer.step()
    return loss


def median_s(steps: dict[str, Callable[[], Any]], *, repeats: int, num_steps: int) -> dict[str, float]:
    """Seconds per step of each, in turns: an untimed step, then some in a row; the median, of the slowest rank."""
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            step()
            started = time.perf_counter()
            for _ in range(num_steps):
                step()
            found = torch.tensor((time.perf_counter() - started) / num_steps, dtype=torch.float64)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            times_s[name].append(found.item())
    return {name: statistics.median(each) for name, each in times_s.items()}


def figures(prediction: Prediction) -> dict[str, float]:
    return {"step_us": prediction.step_us, "exposed_us": prediction.exposed_us, "peak_bytes": prediction.peak_bytes}


def cluster_of(wire: Wire) -> Cluster:
    return Cluster(dist.get_world_size(), 1, DEVICES["cpu"], wire, wire)


def data_parallel(arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps without communication, with buckets, and with updates in the next step."""
    is_emulated = arguments.emulated
    make = _emulated_parts if is_emulated else _real_parts
    wire = calibrate_wire(torch.device("cpu"))
    if is_emulated:  # who sleeps loses nothing to a processor that sends
        wire = replace(wire, cpu_us_per_byte=0.0)
    function, args = make()
    local: Any = wholestep.compile(function)
    steps: dict[str, Callable[[], Any]] = {"local": lambda: local(*args)}
    compiled: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for way in ("none", "all", "auto"):
        own = make()[1]
        step = wholestep.compile(
            function, data_parallel="replicate", bucket_mb=arguments.bucket_mb, cross_iteration=way
        )
        compiled[way], parts[way] = step, own
        steps[way] = lambda step=step, own=own: step(*own)
    for step in steps.values():
        step()
        step()
    facts = _facts(function, make()[1])
    measured = median_s(steps, repeats=arguments.repeats, num_steps=arguments.num_steps)
    facts = _scaled(facts, measured["local"] * 1e6)
    result: dict[str, Any] = {"wire": asdict(wire), "local_s": measured["local"]}
    for way, step in compiled.items():
        predicted_peak = profile_memory(step.graph).peak_bytes
        job = DataParallelJob.of(way, facts, step.plan.communication, peak_bytes=predicted_peak)
        peak = measure_peak(lambda step=step, own=parts[way]: step(*own), held=[parts[way], _carried(step)])
        result[way] = {
            "predicted": figures(simulate(job, cluster_of(wire))),
            "measured": {
                "step_us": measured[way] * 1e6,
                "exposed_us": (measured[way] - measured["local"]) * 1e6,
                "peak_bytes": peak.peak_bytes,
            },
            "num_buckets": len(job.buckets),
        }
        step.flush()
    return result


def _carried(step: Any) -> list[Any]:
    """What a step has left for the next one."""
    return list(step._require_current().rotation.pending.carries.values())


def _emulated_parts() -> tuple[Any, tuple[Any, ...]]:
    model = emulated.sleepers(NUM_LAYERS, LAYER_WEIGHTS, LAYER_US)
    return emulated_step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 16))


def _real_parts() -> tuple[Any, tuple[Any, ...]]:
    size = MODELS["GPT 10M, batch 3x128"]
    torch.manual_seed(0)
    model = gpt.GPT(size.config)
    batch = gpt.make_batch(size.config, size.batch_size, seed=dist.get_rank())
    return train_step, (model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch)


def _facts(function: Any, args: tuple[Any, ...]) -> Facts:
    """Times of ops as rank 0 measures them, while the others do the same."""
    graph = run_passes(capture(function, args, {}).graph, _PASSES)
    facts = gather_facts(graph, world=dist.get_world_size(), average=True, link=Link(1.0, 1.0), is_measured=True)
    found = [facts.to_dict()]
    dist.broadcast_object_list(found, 0)
    return Facts.from_dict(found[0])


def _scaled(facts: Facts, step_us: float) -> Facts:
    """The same, as long as the whole step: ops in a row take other times than each by itself."""
    factor = step_us / (facts.compute_us + sum(gradient.update_us for gradient in facts.gradients))
    gradients = [
        replace(
            gradient,
            ready_us=gradient.ready_us * factor,
            needed_us=gradient.needed_us * factor,
            update_us=gradient.update_us * factor,
            own_us=gradient.own_us * factor,
        )
        for gradient in facts.gradients
    ]
    return replace(facts, gradients=tuple(gradients), compute_us=facts.compute_us * factor)


def pipeline(arguments: argparse.Namespace) -> dict[str, Any]:
    """A schedule of stages; what actions take comes from where the link is fast."""
    wire = calibrate_wire(torch.device("cpu"))
    if arguments.emulated:
        wire = replace(wire, cpu_us_per_byte=0.0)
    result: dict[str, Any] = {"wire": asdict(wire)}
    known = json.loads(arguments.costs.read_text()) if arguments.costs.exists() else {}
    for name in arguments.schedules:
        pipe, step, batch_bytes = (_emulated_pipe if arguments.emulated else _real_pipe)(name)
        step()
        measured_s = median_s({name: step}, repeats=arguments.repeats, num_steps=arguments.num_steps)[name]
        here = _costs_us(pipe, step, arguments.repeats)
        if arguments.is_fast:
            known[name] = here
        own = [parameter for _, parameter in pipe.named_parameters()]
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, measure_peak(step, held=own).peak_bytes)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, batch_bytes + sum(parameter.nbytes for parameter in own))
        costs = [StageCosts(**cost) for cost in known[name]]
        job = cut_job(name, pipe.cut, pipe.schedule, costs, held_bytes=held)
        predicted = simulate(job, cluster_of(wire))
        result[name] = {
            "predicted": {**figures(predicted), "peak_bytes": list(job.peak_bytes), "bubble": predicted.bubble},
            "measured": {"step_us": measured_s * 1e6, "peak_bytes": peaks, "forward_us": here[0]["forward"]},
        }
    if arguments.is_fast and dist.get_rank() == 0:
        arguments.costs.write_text(json.dumps(known))
    return result


def _costs_us(pipe: Any, step: Callable[[], Any], num_steps: int) -> list[dict[str, float]]:
    """What actions take, in microseconds: the median over some steps."""
    found: list[list[dict[str, float]]] = []
    for _ in range(num_steps):
        step()
        timeline: Timeline = pipe.measured()
        factor = {"us": 1.0, "ms": 1e3, "s": 1e6}[timeline.unit]
        found.append([{name: (time or 0.0) * factor for name, time in asdict(c).items()} for c in timeline.costs()])
    return [
        {name: statistics.median(costs[stage][name] for costs in found) for name in found[0][stage]}
        for stage in range(len(found[0]))
    ]


def _emulated_pipe(name: str) -> tuple[Any, Callable[[], Any], int]:
    num_ranks = dist.get_world_size()
    model = emulated.sleepers(PIPE_LAYERS, 1024, PIPE_US)
    pipe = wholestep.pipeline(
        model,
        num_micro_batches=PIPE_MICRO_BATCHES,
        split=[str(PIPE_LAYERS * index // num_ranks) for index in range(1, num_ranks)],
        schedule=name,
        loss_fn=emulated.loss_fn,
    )
    batch = torch.ones(PIPE_MICRO_BATCHES, PIPE_WIDTH)
    return pipe, _stepper(pipe, model, batch, batch), batch.nbytes


def _real_pipe(name: str) -> tuple[Any, Callable[[], Any], int]:
    torch.manual_seed(0)
    model = gpt.GPT(PIPE_CONFIG)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    pipe = wholestep.pipeline(
        model,
        num_micro_batches=PIPE_MICRO_BATCHES,
        split=[
            f"blocks.{PIPE_CONFIG.layers * index // dist.get_world_size()}" for index in range(1, dist.get_world_size())
        ],
        schedule=name,
        loss_fn=lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )
    batch = gpt.make_batch(PIPE_CONFIG, 2 * PIPE_MICRO_BATCHES, seed=0)
    step = _stepper(pipe, model, batch["tokens"], batch["targets"])
    return pipe, step, sum(tensor.nbytes for tensor in batch.values())


def _stepper(pipe: Any, model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    def step() -> None:
        model.zero_grad()
        pipe.step(inputs, target=targets)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("data_parallel", "pipeline"))
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--is-fast", action="store_true")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if arguments.emulated:
        emulated.wake_in_time()
    result = (pipeline if arguments.part == "pipeline" else data_parallel)(arguments)
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
