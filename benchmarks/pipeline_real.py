"""A GPT in four stages over two ranks: ours cut from the whole model, torch's from slices made by hand (its best case).

Both train the same parameters (embeddings are not tied: torch could not) and their gradients are compared.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import wholestep
from benchmarks.pipeline_emulated import stages_per_rank, upstream_schedule
from wholestep.capture import capture, tree
from wholestep.cost import measure_peak
from wholestep.passes import Pipeline, run_passes
from wholestep.pipe import Kind, build_schedule, plan_split
from wholestep.pipe.cut import cut
from wholestep.runtime.pipeline.programs import StageRunner
from wholestep.zoo import gpt

CONFIG = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=8, layers=8, dropout=0.0)
ROWS = 2
"""Of a micro-batch."""
_MIDDLE = 1


@dataclass(frozen=True)
class RealContender:
    """One step of this rank, which leaves gradients on `parameters`: those of the rank's own stages."""

    step: Callable[[], Any]
    parameters: Callable[[], dict[str, nn.Parameter]]

    def peak_bytes(self) -> int:
        """The most that is alive in a step beyond parameters, in bytes; gradients count, they begin with it."""
        own = list(self.parameters().values())
        for parameter in own:
            parameter.grad = None
        return measure_peak(self.step, held=own).allocated_bytes


def build() -> nn.Module:
    torch.manual_seed(0)
    model = gpt.GPT(CONFIG)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def split_points(num_stages: int) -> list[str]:
    return [f"blocks.{CONFIG.layers * index // num_stages}" for index in range(1, num_stages)]


def ours(name: str, num_micro_batches: int) -> RealContender:
    model = build()
    num_stages = stages_per_rank(name) * dist.get_world_size()
    pipe = wholestep.pipeline(
        model,
        num_micro_batches=num_micro_batches,
        split=split_points(num_stages),
        schedule=name,
        stages_per_rank=stages_per_rank(name),
        loss_fn=loss_fn,
    )
    batch = gpt.make_batch(CONFIG, ROWS * num_micro_batches, seed=0)

    def step() -> None:
        model.zero_grad()
        pipe.step(batch["tokens"], target=batch["targets"])

    return RealContender(step, lambda: dict(pipe.named_parameters()))


class Slice(nn.Module):
    """Some of a GPT's blocks, with embeddings before the first and the head behind the last."""

    def __init__(self, model: Any, index: int, num_stages: int) -> None:
        super().__init__()
        begin, end = (CONFIG.layers * place // num_stages for place in (index, index + 1))
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(begin, end)})
        if index == 0:
            self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        if index == num_stages - 1:
            self.final_norm, self.head = model.final_norm, model.head
        self._is_first, self._is_last = index == 0, index == num_stages - 1

    def forward(self, hidden: Tensor) -> Tensor:
        if self._is_first:
            hidden = self.token_embedding(hidden) + self.position_embedding(torch.arange(hidden.shape[1]))
        for block in self.blocks.values():
            hidden = block(hidden)
        return self.head(self.final_norm(hidden)) if self._is_last else hidden


def upstream(name: str, num_micro_batches: int) -> RealContender:
    model = build()
    num_ranks, each = dist.get_world_size(), stages_per_rank(name)
    num_stages = num_ranks * each
    own = build_schedule(name, num_ranks, num_micro_batches).stages_of(dist.get_rank())
    slices = {index: Slice(copy.deepcopy(model), index, num_stages) for index in own}
    stages = [PipelineStage(one, index, num_stages, torch.device("cpu")) for index, one in slices.items()]
    schedule = upstream_schedule(name, stages, num_micro_batches, loss_fn)
    batch = gpt.make_batch(CONFIG, ROWS * num_micro_batches, seed=0)
    args = (batch["tokens"],) if 0 in own else ()
    kwargs = {"target": batch["targets"]} if num_stages - 1 in own else {}

    def step() -> None:
        for one in slices.values():
            one.zero_grad()
        schedule.step(*args, **kwargs, return_outputs=False)

    return RealContender(step, lambda: {key: value for one in slices.values() for key, value in one.named_parameters()})


def difference(first: RealContender, second: RealContender) -> float:
    """The largest difference of two gradients of this rank after the last step, relative to the largest entry."""
    found, expected = first.parameters(), second.parameters()
    assert found.keys() == expected.keys(), f"other parameters: {found.keys() ^ expected.keys()}"
    worst = 0.0
    for name, parameter in found.items():
        gradient, other = parameter.grad, expected[name].grad
        assert gradient is not None, f"{name} has no gradient here"
        assert other is not None, f"{name} has no gradient with torch"
        worst = max(worst, ((gradient - other).abs().max() / other.abs().max()).item())
    return worst


# The price of a backward in two parts


def backward_times(repeats: int) -> dict[str, dict[str, float]]:
    """CPU seconds of a whole backward and of its two parts, for a stage in the middle, ours and torch's in turns."""
    sides = {"wholestep": _our_backward(), "torch": _upstream_backward()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(10 * repeats):
        for side, backward in sides.items():
            for way in ("whole", "parts"):
                times.setdefault((side, way), []).append(backward(way == "parts"))
    return {side: {way: statistics.median(times[side, way][2:]) for way in ("whole", "parts")} for side in sides}


def _our_backward() -> Callable[[bool], float]:
    """A function that runs a forward, then a backward, and says how long the latter took."""
    model = build()
    batch = gpt.make_batch(CONFIG, ROWS, seed=0)

    def micro_step(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model(batch["tokens"]), batch["targets"])
        loss.backward()
        return loss.detach()

    captured = capture(micro_step, (model, batch), {})
    graph = run_passes(captured.graph, Pipeline.parse("simplify,cse,dce"))
    stage = cut(graph, plan_split(captured, graph, points=split_points(4)).borders).stages[_MIDDLE]
    runner = StageRunner(stage, captured.bindings)
    leaves, _ = tree.flatten(((model, batch), {}))
    arriving = {name: torch.randn(tuple(stage.fakes[name].shape)) for name in stage.wanted}

    def run(in_parts: bool) -> float:
        values = arriving | runner.run(Kind.FORWARD, leaves, arriving)
        begin = time.thread_time()
        if in_parts:
            values |= runner.run(Kind.INPUT, leaves, values)
            runner.run(Kind.WEIGHT, leaves, values)
        else:
            runner.run(Kind.BACKWARD, leaves, values)
        return time.thread_time() - begin

    return run


def _upstream_backward() -> Callable[[bool], float]:
    module = Slice(build(), _MIDDLE, 4)
    stage = PipelineStage(module, _MIDDLE, 4, torch.device("cpu"))
    hidden, gradient = (torch.randn(ROWS, CONFIG.context, CONFIG.width) for _ in range(2))

    def run(in_parts: bool) -> float:
        value = hidden.clone().requires_grad_()
        output = (module(value),)
        begin = time.thread_time()
        known = {"stage_output": output, "output_grads": (gradient,), "input_values": [value]}
        if in_parts:
            _, groups = stage.backward_maybe_with_nosync("input", known)
            stage.backward_maybe_with_nosync("weight", {"stage_output": output, "param_groups": groups})
        else:
            stage.backward_maybe_with_nosync("full", known)
        return time.thread_time() - begin

    return run
