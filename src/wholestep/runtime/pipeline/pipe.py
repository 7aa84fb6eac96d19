"""`Pipe`: a model cut into stages, trained over the ranks of a group, or tried out in one process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from wholestep.capture import Capture, capture, tree
from wholestep.errors import PipelineError
from wholestep.graph import SlotKind, StepGraph
from wholestep.lower import Decompose, Lower, Masks
from wholestep.passes import LossGradient, Pipeline, run_passes
from wholestep.passes.reinplace import Reinplace
from wholestep.pipe import FAMILIES, Kind, Schedule, SplitPlan, build_schedule, plan_split, validate
from wholestep.pipe.borders import Points, Policy
from wholestep.pipe.cut import CutGraph, cut
from wholestep.pipe.follow import borders_like, check_slots
from wholestep.pipe.schedules import forward_only
from wholestep.remat import StepBudget, fit_lowered_step, fit_step
from wholestep.runtime.pipeline.batches import MicroBatches, joined, split_batch
from wholestep.runtime.pipeline.draws import number_draws
from wholestep.runtime.pipeline.losses import LossFunction, loss_of
from wholestep.runtime.pipeline.processes import Processes, require_agreement, share_model
from wholestep.runtime.pipeline.runs import LocalPipeline, PipelineRank

logger = logging.getLogger(__name__)

_PASSES = Pipeline.parse("simplify,cse,dce")
_PARAM = f"{SlotKind.PARAM}."


@dataclass(frozen=True)
class PipeOptions:
    """Everything `wholestep.pipeline` was told; see there."""

    num_micro_batches: int
    num_stages: int | None = None
    points: Points | None = None
    policy: Policy | None = None
    shared: Literal["replicate", "transmit"] = "replicate"
    schedule: str | Schedule = "1f1b"
    stages_per_rank: int | None = None
    loss_fn: LossFunction | None = None
    loss: str | int | None = None
    returns_output: bool = False
    memory_budget: StepBudget | None = None
    lower: str = "none"
    seed: int = 0


@dataclass(frozen=True)
class PipeResult:
    """What a step came to, as far as this rank has it: the mean loss, and the model's output if it was asked for."""

    loss: torch.Tensor | None
    output: Any = None


@dataclass(frozen=True)
class _Kind:
    """What a capture is for."""

    is_training: bool
    has_loss: bool
    num_micro_batches: int


@dataclass(frozen=True)
class _Compiled:
    """A step for micro-batches of one kind."""

    capture: Capture
    cut: CutGraph
    plan: SplitPlan | None
    schedule: Schedule
    run: LocalPipeline | PipelineRank


class Pipe:
    """A model that trains in stages; what `wholestep.pipeline` returns.

    `step` runs forward and backward of a batch, in micro-batches and in the order of the schedule, and leaves gradients
    on the parameters of this rank's stages, added to what is there, like `backward()` does. The model itself stays as
    it is. Micro-batches of another shape, dtype or mode than before are captured anew.
    """

    def __init__(self, model: nn.Module, options: PipeOptions) -> None:
        self.model = model
        self.options = options
        self._compiled: dict[Any, _Compiled] = {}
        self._current: _Compiled | None = None
        self._num_steps = 0
        self._processes: Processes | None = None

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> PipeResult:
        """Forward and backward of one batch: `loss_fn(model(*args, **kwargs), target)`, averaged over its rows."""
        result = self._run((args, kwargs, target), is_training=True)
        self._num_steps += 1
        self._leave_gradients(self._require_current().run.gradients())
        return result

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> PipeResult:
        """The forward of one batch, without gradients, with the model in the mode it is in (`model.eval()`)."""
        return self._run((args, kwargs, target), is_training=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, computed stage by stage in this process, all rows at once."""
        return self._run((args, kwargs, None), is_training=False, num_micro_batches=1, has_loss=False).output

    def _run(
        self, arguments: Any, *, is_training: bool, num_micro_batches: int | None = None, has_loss: bool = True
    ) -> PipeResult:
        batches = split_batch(arguments, num_micro_batches or self.options.num_micro_batches)
        kind = _Kind(is_training=is_training, has_loss=has_loss, num_micro_batches=len(batches.arguments))
        compiled = self._compiled_for(batches, kind)
        if is_training:
            self._current = compiled
        scale = torch.tensor(batches.share)
        leaves = [tree.flatten(((self.model, *one, scale), {}))[0] for one in batches.arguments]
        return _result(compiled, compiled.run.run(leaves, self._num_steps), leaves, batches.size)

    @property
    def schedule(self) -> Schedule:
        """The order in which ranks work, as of the last step."""
        return self._require_current().schedule

    @property
    def cut(self) -> CutGraph:
        """The stages, as of the last step."""
        return self._require_current().cut

    @property
    def plan(self) -> SplitPlan:
        """Where stages begin, why there, and what they cost, as of the last step."""
        plan = self._require_current().plan
        assert plan is not None
        return plan

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages, under the names they have in the model."""
        own = {slot.removeprefix(_PARAM) for slot in self._require_current().run.slots}
        return ((name, parameter) for name, parameter in self.model.named_parameters() if name in own)

    def _require_current(self) -> _Compiled:
        if self._current is None:
            raise PipelineError("this pipeline has not run yet; its stages exist after the first step")
        return self._current

    def _compiled_for(self, batches: MicroBatches, kind: _Kind) -> _Compiled:
        key = (kind, _signature(self.model, batches.arguments[0]))
        if key not in self._compiled:
            started = time.perf_counter()
            self._compiled[key] = self._compile(batches, kind)
            logger.info("captured a pipeline in %.1f s", time.perf_counter() - started)
        return self._compiled[key]

    def _compile(self, batches: MicroBatches, kind: _Kind) -> _Compiled:
        captured = self._capture(batches, kind)
        graph = run_passes(captured.graph, _PASSES)
        number_draws(graph)
        graph = self._rewritten(graph, kind)
        found, plan = self._cut(captured, graph, kind)
        if self.options.lower == "inductor":
            _lower_programs(found)
        schedule = self._schedule(len(found.stages), kind)
        run = self._runner(captured, found, schedule, kind)
        if kind.is_training:
            self._forget_evaluations()
        return _Compiled(captured, found, plan, schedule, run)

    def _forget_evaluations(self) -> None:
        """Earlier ones may have been cut elsewhere."""
        for key in [key for key in self._compiled if not key[0].is_training]:
            self._compiled.pop(key).run.close()

    def _runner(
        self, captured: Capture, found: CutGraph, schedule: Schedule, kind: _Kind
    ) -> LocalPipeline | PipelineRank:
        """Over the processes of the job, if there are several; a plain call stays in this one."""
        if kind.has_loss and self._processes is None:
            self._processes = Processes.of(schedule.num_ranks)
            if self._processes is not None:
                share_model(self.model)
        if self._processes is None or not kind.has_loss:
            return LocalPipeline(captured, found, schedule, self.options.seed)
        require_agreement(found, schedule)
        return PipelineRank(captured, found, schedule, self.options.seed, self._processes)

    def _rewritten(self, graph: StepGraph, kind: _Kind) -> StepGraph:
        """What is kept for the backward, and ops as Inductor likes them: decided for the model, not for each stage."""
        is_lowered = self.options.lower == "inductor"
        if is_lowered:
            graph = run_passes(graph, [LossGradient(), Masks(), Decompose()])
        if not kind.is_training:
            return graph
        if is_lowered:
            remat, _ = fit_lowered_step(graph, self.options.memory_budget)
            return run_passes(graph, [remat])
        if self.options.memory_budget is not None:
            remat, _, _ = fit_step(graph, self.options.memory_budget, partial(run_passes, passes=[Reinplace()]))
            return run_passes(graph, [remat])
        return graph

    def _cut(self, captured: Capture, graph: StepGraph, kind: _Kind) -> tuple[CutGraph, SplitPlan | None]:
        """Stages where the plan wants them, or, once there are stages for training, the same ones."""
        options = self.options
        if not kind.is_training and self._current is not None:
            trained = self._current.cut
            found = cut(graph, borders_like(graph, trained), shared=options.shared)
            check_slots(found, trained)
            return found, None
        plan = plan_split(captured, graph, num_stages=options.num_stages, points=options.points, policy=options.policy)
        return cut(graph, plan.borders, shared=options.shared), plan

    def _schedule(self, num_stages: int, kind: _Kind) -> Schedule:
        """The order of a step; evaluation has its stages where training has them."""
        trained = self._training_schedule(num_stages)
        if kind.is_training:
            return trained
        per_rank = num_stages // trained.num_ranks
        return forward_only(trained.num_ranks, kind.num_micro_batches, per_rank, stage_ranks=trained.stage_ranks)

    def _training_schedule(self, num_stages: int) -> Schedule:
        chosen, num_micro_batches = self.options.schedule, self.options.num_micro_batches
        if isinstance(chosen, Schedule):
            if (chosen.num_stages, chosen.num_micro_batches) != (num_stages, num_micro_batches):
                raise PipelineError(
                    f"schedule '{chosen.name}' is for {chosen.num_stages} stages and {chosen.num_micro_batches} "
                    f"micro-batches, and this pipeline has {num_stages} and {num_micro_batches}"
                )
            validate(chosen)
            return chosen
        family = FAMILIES.get(chosen)
        per_rank = self.options.stages_per_rank or (family.stages_per_rank or 2 if family else 1)
        num_ranks, rest = divmod(num_stages, per_rank)
        if rest:
            raise PipelineError(
                f"{num_stages} stages cannot be dealt out as {per_rank} for each rank, as schedule '{chosen}' has it"
            )
        return build_schedule(chosen, num_ranks, num_micro_batches, stages_per_rank=per_rank)

    def _capture(self, batches: MicroBatches, kind: _Kind) -> Capture:
        """The graph of one micro-batch, with gradients that begin with it."""
        options = self.options

        def micro_step(
            model: nn.Module, args: Any, kwargs: Mapping[str, Any], target: Any, scale: torch.Tensor
        ) -> tuple[torch.Tensor | None, Any]:
            with torch.set_grad_enabled(kind.is_training):
                output = model(*args, **kwargs)
                loss = loss_of(output, target, options.loss_fn, options.loss) if kind.has_loss else None
            if loss is not None and kind.is_training:
                (loss * scale).backward()
            is_returned = options.returns_output or not kind.has_loss
            return loss if loss is None else loss.detach(), output if is_returned else None

        gradients = {parameter: parameter.grad for parameter in self.model.parameters()}
        for parameter in gradients:
            parameter.grad = None
        try:
            return capture(micro_step, (self.model, *batches.arguments[0], torch.tensor(batches.share)), {})
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _leave_gradients(self, found: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, gradient in found.items():
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _lower_programs(found: CutGraph) -> None:
    """Make regions of the programs of all stages."""
    for stage in found.stages:
        for kind in Kind:
            Lower().apply(stage.program(kind).graph)


def _signature(model: nn.Module, arguments: Any) -> Any:
    """What a capture depends on: sizes and types of a micro-batch, modes of the model, autocast."""
    leaves, spec = tree.flatten(arguments)
    kinds = tuple(_kind(leaf) for leaf in leaves)
    modes = tuple(module.training for module in model.modules())
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    casts = tuple(
        (device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        for device in ("cpu", "cuda")
    )
    return kinds, str(spec), modes, trained, casts


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def _result(compiled: _Compiled, outputs: list[dict[int, Any]], leaves: list[list[Any]], size: int) -> PipeResult:
    """Losses and outputs of micro-batches as those of the batch; None for what other ranks have."""
    num_outputs = compiled.cut.num_outputs
    parts = [
        compiled.capture.outputs.fill(tuple(one.get(index) for index in range(num_outputs)), own)
        for one, own in zip(outputs, leaves, strict=True)
    ]
    losses = [loss for loss, _ in parts if loss is not None]
    loss = torch.stack(losses).mean() if losses else None
    flat = [tree.flatten(output) for _, output in parts]
    if flat[0][0] == [None] or not flat[0][0]:
        return PipeResult(loss)
    merged = iter([joined(column, size) for column in zip(*(values for values, _ in flat), strict=True)])
    return PipeResult(loss, tree.map_leaves(lambda _: next(merged), parts[0][1]))
