"""DistributedDataParallel as the measure: train with it, train with a candidate, compare them step by step.

Both sides run one after the other on the same ranks; a rank compares its own two sides, so only differences travel.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.trainings import Training
from tests.parity import RandomStream, differences, named_leaves, snapshot
from tests.raw_memory import raw_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import wholestep

NUM_STEPS = 6
SMALL_BUCKET_MB = 0.004
"""Small enough for several buckets in every model of the tests."""
MOST_LINES = 12

PLANS = ("every", "end", "both")
"""When a run is looked at: after every step; only after the last one, so that nothing but losses is read before; or
six steps without a look and then six with one after each, which needs only one capture."""


@dataclass(frozen=True)
class Side:
    """What runs the steps: `function(model, optimizer, *arguments)`, and the model it is to be given."""

    function: Any
    model: nn.Module


MakeSide = Callable[[Callable[..., Any], nn.Module, Training], Side]


class Eager:
    """A train step as it is, with the additional handles of a compiled one."""

    num_captures = 0

    def __init__(self, train_step: Callable[..., Any]) -> None:
        self._train_step = train_step

    def __call__(self, *args: Any, last: bool = False) -> Any:
        return self._train_step(*args)

    def flush(self) -> None:
        pass

    def __enter__(self) -> Eager:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def eager_side(train_step: Callable[..., Any], model: nn.Module, training: Training) -> Side:
    """No data parallelism, nothing compiled."""
    return Side(Eager(train_step), model)


def ddp_side(
    train_step: Callable[..., Any],
    model: nn.Module,
    training: Training,
    *,
    bucket_cap_mb: float = 25,
    data_parallel: str = "replicate",
) -> Side:
    """PyTorch's own data parallelism. Every rank keeps its own BatchNorm statistics."""
    group = resolve_data_parallel(data_parallel) if data_parallel == "pairs" else None
    wrapped = DistributedDataParallel(
        model,
        find_unused_parameters=training.find_unused,
        bucket_cap_mb=bucket_cap_mb,
        process_group=group,
        **_buffers_from_rank_0_at_the_start(model),
    )
    return Side(Eager(train_step), wrapped)


def _buffers_from_rank_0_at_the_start(model: nn.Module) -> dict[str, Any]:
    """DDP's option for buffers that are sent once and then stay each rank's own; torch 2.13 has renamed it."""
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return {"forward_sync_buffers": False}
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return {"broadcast_buffers": False}


def wholestep_side(
    train_step: Callable[..., Any],
    model: nn.Module,
    training: Training,
    *,
    data_parallel: str | None = "replicate",
    bucket_mb: float = SMALL_BUCKET_MB,
    cross_iteration: str | list[str] = "all",
    **options: Any,
) -> Side:
    """The candidate: the only place that calls `wholestep.compile` for these tests."""
    # Until the options exist pyright would refuse them one by one.
    compile: Any = wholestep.compile
    compiled = compile(
        train_step,
        data_parallel=resolve_data_parallel(data_parallel),
        bucket_mb=bucket_mb,
        cross_iteration=cross_iteration,
        **options,
    )
    return Side(compiled, model)


def resolve_data_parallel(kind: str | None) -> Any:
    """What `data_parallel=` is given: groups and meshes are made on the ranks, they do not travel."""
    if kind == "group":
        return dist.new_group(list(range(dist.get_world_size())))
    if kind == "mesh":
        return init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "pairs":
        pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
        return pairs[dist.get_rank() // 2]
    return kind


class Trainer:
    """One side of a comparison: a model, its optimizer and what runs the steps.

    `step` runs the next step on the next batch. `see` keeps clones of values under a name, to be compared with the
    other side's. `aliases` are the parameters' memory, taken before anything could stand guard over them.
    """

    def __init__(self, training: Training, make_side: MakeSide) -> None:
        self.training = training
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model, self.optimizer = training.build(self.rank)
        self.aliases = {name: raw_memory(parameter) for name, parameter in self.model.named_parameters()}
        self.train_step = training.train_step()
        self._make_side = make_side
        self._side = make_side(self.train_step, self.model, training)
        self.stream = RandomStream(100 + self.rank)
        self.number = 0
        self.outputs: list[Any] = []
        self.seen: dict[str, Tensor] = {}
        self._step_name = training.step
        self._functions: dict[str, Any] = {}

    @property
    def compiled(self) -> Any:
        """The compiled step, or a stand-in with the same handles."""
        return self._side.function

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Run the next step; `arguments` replace those of the training."""
        self.number += 1
        given = arguments or self.training.arguments(self.rank, self.number)
        with self.stream.active():
            output = self._side.function(self._side.model, self.optimizer, *given, **options)
        self.outputs.append(output)
        self.see(f"step {self.number}", output)
        return output

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def see(self, name: str, tree: Any) -> None:
        """Remember values as they are now."""
        assert f"{name}: count" not in self.seen, f"{name} was already seen"
        leaves = named_leaves(f"{name}: ", tree)
        self.seen |= leaves | {f"{name}: count": torch.tensor(len(leaves))}

    def see_all(self, name: str) -> None:
        with self.stream.active():
            self.see(name, snapshot(self.model, self.optimizer))

    def switch_step(self, name: str) -> None:
        """Go on with another of `STEPS`, compiled apart, on the same model; switching back finds the old one again."""
        self._functions[self._step_name] = self._side.function
        if name not in self._functions:
            train_step = replace(self.training, step=name).train_step()
            is_eager = isinstance(self.compiled, Eager)
            # A second DDP around the model would reduce everything twice.
            made = Eager(train_step) if is_eager else self._make_side(train_step, self.model, self.training).function
            self._functions[name] = made
        self._step_name = name
        self._side = Side(self._functions[name], self._side.model)

    def forget_step(self) -> None:
        """Drop the compiled step, as a function does that returns its model."""
        self._side = Side(None, self.model)
        gc.collect()

    def use_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train another model from now on, with the same compiled step."""
        self.model, self.optimizer = model, optimizer
        if isinstance(self.compiled, Eager):
            self._side = self._make_side(self.train_step, model, self.training)
        else:
            self._side = Side(self.compiled, model)


@dataclass
class Outcome:
    """What one rank found: a line per difference, and the captures of each candidate in each plan."""

    differences: list[str] = field(default_factory=list)
    num_captures: dict[str, int] = field(default_factory=dict)


def record(training: Training, make_side: MakeSide, looks: Sequence[bool]) -> tuple[list[dict[str, Tensor]], int]:
    """Train as many steps as there are looks; by step, what was returned and, if looked at, all there is to see."""
    trainer = Trainer(training, make_side)
    scheduler = None
    if training.schedule:
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=2, gamma=0.5)
    records: list[dict[str, Tensor]] = []
    for look in looks:
        output = trainer.step()
        if scheduler is not None:
            scheduler.step()
        seen = named_leaves("output", output)
        with trainer.stream.active():
            seen["rng"] = torch.get_rng_state()
            if look:
                seen |= snapshot(trainer.model, trainer.optimizer)
        records.append(seen)
    # What a step returned must outlive later steps rather than be overwritten by them.
    records[-1] |= named_leaves("kept output", trainer.outputs)
    return records, trainer.compiled.num_captures


def looks_of(plan: str) -> list[bool]:
    unseen = [False] * (NUM_STEPS - 1) + [True]
    return {"every": [True] * NUM_STEPS, "end": unseen, "both": unseen + [True] * NUM_STEPS}[plan]


def compare(
    training: Training,
    candidates: Mapping[str, MakeSide],
    plans: Sequence[str],
    reference: MakeSide,
    rtol: float,
    atol: float,
) -> Outcome:
    """On a rank: train the reference once and every candidate in every plan, and report where they part."""
    outcome = Outcome()
    expected: dict[int, list[dict[str, Tensor]]] = {}
    for plan in plans:
        looks = looks_of(plan)
        if len(looks) not in expected:
            expected[len(looks)], _ = record(training, reference, [True] * len(looks))
        for label, candidate in candidates.items():
            actual, num_captures = record(training, candidate, looks)
            outcome.num_captures[f"{label}, {plan}"] = num_captures
            lines = _first_differences(expected[len(looks)], actual, looks, rtol, atol)
            outcome.differences += [f"{label}, {plan}: {line}" for line in lines]
    return outcome


def _first_differences(
    expected: list[dict[str, Tensor]], actual: list[dict[str, Tensor]], looks: Sequence[bool], rtol: float, atol: float
) -> list[str]:
    """The differences in the first step that has any: later ones follow from it."""
    for index, (wanted, got, look) in enumerate(zip(expected, actual, looks, strict=True)):
        comparable = wanted if look else {name: wanted[name] for name in wanted if name in got}
        lines = differences(comparable, got, rtol=rtol, atol=atol)
        if lines:
            return [f"step {index + 1}: {line}" for line in shortened(lines)]
    return []


def shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more"]


def tolerances(num_summands: int) -> tuple[float, float]:
    """`rtol` and `atol`: `torch.testing.assert_close`'s for float32, and none where two ranks add up, which commutes.

    With more ranks the order of additions depends on where in its bucket a gradient lies.
    """
    return (0.0, 0.0) if num_summands <= 2 else (1.3e-6, 1e-5)


def assert_ddp_parity(
    training: Training,
    candidates: Mapping[str, MakeSide],
    *,
    plans: Sequence[str] = ("every", "end"),
    num_ranks: int = 2,
    reference: MakeSide = ddp_side,
    num_summands: int | None = None,
    timeout_s: float = 120,
) -> list[Outcome]:
    """Every candidate is what DDP is, on every rank, at every step; returns each rank's outcome."""
    limits = tolerances(num_ranks if num_summands is None else num_summands)
    outcomes: list[Outcome] = run_ranks(
        compare, num_ranks, training, dict(candidates), plans, reference, *limits, timeout_s=timeout_s
    )
    lines = [f"rank {rank}: {line}" for rank, outcome in enumerate(outcomes) for line in outcome.differences]
    if lines:
        raise AssertionError("\n  ".join([f"{training}: not what DDP computes", *lines]))
    return outcomes


Scenario = Callable[[Trainer], None]


def compare_scenario(scenario: Scenario, training: Training, reference: MakeSide, candidate: MakeSide) -> list[str]:
    """Play a scenario on both sides and list what differs in what was seen on the way and at the end."""
    sides: list[dict[str, Tensor]] = []
    for make_side in (reference, candidate):
        trainer = Trainer(training, make_side)
        scenario(trainer)
        trainer.see_all("at the end")
        sides.append(trainer.seen)
    return shortened(differences(sides[0], sides[1]))
