"""`Pipe`: a model cut into stages, trained over the ranks of a group, or tried out in one process."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep._threads import let_others_capture, one_at_a_time
from wholestep.capture import Capture, capture, tree
from wholestep.compiler import REWRITING_STAGES, Draft, Hardware, StepOptions, begin, plan_memory
from wholestep.errors import PipelineError
from wholestep.graph import SlotKind, StepGraph
from wholestep.lower import Lower
from wholestep.passes import Pipeline, run_passes
from wholestep.pipe import FAMILIES, Kind, Schedule, SplitPlan, Timeline, build_schedule, plan_split, validate
from wholestep.pipe.borders import Points, Policy
from wholestep.pipe.cut import CutGraph, cut
from wholestep.pipe.follow import borders_like, check_slots, is_like
from wholestep.pipe.schedules import forward_only
from wholestep.remat import StepBudget
from wholestep.runtime.agreement import is_due
from wholestep.runtime.pipeline.alike import require_same_values
from wholestep.runtime.pipeline.batches import MicroBatches, split_batch
from wholestep.runtime.pipeline.calls import Calls
from wholestep.runtime.pipeline.checks import CaptureGuard, refuse_hooks, refuse_python, signature
from wholestep.runtime.pipeline.draws import number_draws
from wholestep.runtime.pipeline.facts import call_facts, given_facts, made_facts
from wholestep.runtime.pipeline.losses import LossFunction, loss_of
from wholestep.runtime.pipeline.processes import Processes, is_distributed, require_room, share_model
from wholestep.runtime.pipeline.results import PipeResult, result_of
from wholestep.runtime.pipeline.runs import Graphs, LocalPipeline, PipelineRank
from wholestep.runtime.pipeline.update import Update, clip_gradients
from wholestep.runtime.replica_facts import option_facts, plain

logger = logging.getLogger(__name__)

_PARAM = f"{SlotKind.PARAM}."
# A border may be within the loss head: its products stay as they are.
_STAGES = tuple(stage for stage in REWRITING_STAGES if stage.name != "pad")


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
    optimizer: Optimizer | None = None
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class _Kind:
    """What a capture is for."""

    is_training: bool
    has_loss: bool
    num_micro_batches: int


@dataclass(frozen=True)
class _Compiled:
    """A step for micro-batches of one kind."""

    graphs: Graphs
    plan: SplitPlan | None
    schedule: Schedule
    run: LocalPipeline | PipelineRank
    guard: CaptureGuard


class Pipe:
    """A model that trains in stages; what `wholestep.pipeline` returns.

    `step` runs forward and backward of a batch, in micro-batches and in the order of the schedule, and leaves gradients
    on the parameters of this rank's stages, added to what is there, like `backward()` does. With an optimizer it also
    updates them, and clears the gradients. The model itself stays as it is. Micro-batches of another shape, dtype or
    mode than before are captured anew.
    """

    def __init__(self, model: nn.Module, options: PipeOptions) -> None:
        self.model = model
        self.options = options
        self._compiled: dict[Any, _Compiled] = {}
        self._current: _Compiled | None = None
        self._num_steps = 0
        self._processes: Processes | None = None
        self._calls: Calls | None = None
        self._described: dict[Any, dict[str, Any]] = {}
        self._update = Update(options.lower)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A pipeline of a copy of the model, with a copy of the optimizer; it captures anew."""
        given = {name: copy.deepcopy(getattr(self.options, name), memo) for name in ("loss_fn", "optimizer")}
        copied = type(self)(copy.deepcopy(self.model, memo), replace(self.options, **given))
        copied.num_steps = self._num_steps
        return copied

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> PipeResult:
        """Forward and backward of one batch: `loss_fn(model(*args, **kwargs), target)`, averaged over its rows."""
        result = self._run((args, kwargs, target), "step")
        self._num_steps += 1
        optimizer = self.options.optimizer
        run = self._require_current().run
        with run.telling():
            self._leave_gradients(run.gradients({} if optimizer is None else option_facts("optimizer", optimizer)))
            if self.options.max_grad_norm is not None:
                result = replace(result, grad_norm=self._clip(self.options.max_grad_norm))
            if optimizer is not None:
                self._update(self.model, optimizer)
        return result

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down if their norm over the whole model is above `max_norm`; returns that norm.

        To be called by all ranks, after `step`. With `torch.nn.utils.clip_grad_norm_` each rank would take the norm of
        its own stages only.
        """
        self._require_current()
        if self._calls is not None:
            with self._calls.one():
                self._calls.tell({"the call": "clip_grad_norm_", "max_norm": plain(max_norm)})
        return self._clip(max_norm)

    def _clip(self, max_norm: float) -> torch.Tensor:
        current = self._require_current()
        own = dict(self.named_parameters())
        counted = [parameter for name, parameter in own.items() if current.run.counts(f"{_PARAM}{name}")]
        return clip_gradients(own.values(), counted, max_norm, current.run.total, current.graphs.cut.device)

    def measured(self) -> Timeline:
        """When each action of the last step ran, on all ranks of this pipeline; all ranks of the job call it."""
        current = self._require_current()
        if self._calls is not None:
            with self._calls.one():
                self._calls.tell({"the call": "measured"})
                self._calls.require_same()
        return current.run.timeline()

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> PipeResult:
        """The forward of one batch, without gradients, with the model in the mode it is in (`model.eval()`)."""
        return self._run((args, kwargs, target), "evaluate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, computed stage by stage in this process, all rows at once."""
        return self._run((args, kwargs, None), "forward").output

    def _run(self, arguments: Any, call: str) -> PipeResult:
        if call != "forward" and self._calls is None and is_distributed():
            self._calls = Calls()
        calls = None if call == "forward" else self._calls
        with contextlib.nullcontext() if calls is None else calls.one():
            batches = split_batch(arguments, 1 if call == "forward" else self.options.num_micro_batches)
            kind = _Kind(call == "step", call != "forward", len(batches.arguments))
            compiled = self._compiled_for(batches, kind, call, calls)
        if kind.is_training:
            self._current = compiled
        scales = torch.tensor(batches.shares, dtype=torch.float64).unbind()
        leaves = [
            tree.flatten(((self.model, *one, scale), {}))[0]
            for one, scale in zip(batches.arguments, scales, strict=True)
        ]
        return result_of(compiled.graphs, compiled.run.run(leaves, self._num_steps), leaves, batches)

    @property
    def schedule(self) -> Schedule:
        """The order in which ranks work, as of the last step."""
        return self._require_current().schedule

    @property
    def cut(self) -> CutGraph:
        """The stages, as of the last step."""
        return self._require_current().graphs.cut

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

    @property
    def num_steps(self) -> int:
        """How many steps were made; random numbers depend on it, so a run that is resumed has to count on from it."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value

    def names_elsewhere(self) -> frozenset[str]:
        """Names, in the model's state dict, of what only stages of other ranks change. Empty before the first step."""
        if self._current is None:
            return frozenset()
        everywhere = {slot for stage in self.cut.stages for slot in stage.slots}
        names = {slot.partition(".")[2] for slot in everywhere.difference(self._current.run.slots)}
        tensors = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        elsewhere = {id(tensor) for name, tensor in tensors if name in names}
        return frozenset(name for name, tensor in tensors if id(tensor) in elsewhere)

    def _require_current(self) -> _Compiled:
        if self._current is None:
            raise PipelineError("this pipeline has not run yet; its stages exist after the first step")
        return self._current

    def _compiled_for(self, batches: MicroBatches, kind: _Kind, call: str, calls: Calls | None) -> _Compiled:
        smallest = () if batches.num_large == len(batches.sizes) else signature(self.model, batches.arguments[-1])
        key = (kind, batches.num_large, signature(self.model, batches.arguments[0]), smallest)
        let_others_capture()
        known = self._compiled.get(key)
        given = SimpleNamespace(args=(self.model, *batches.arguments[0], None), kwargs={})
        changed = None if known is None else known.guard.check(given)
        if changed is not None:
            logger.warning("the pipeline is captured again because %s", changed)
        if calls is not None:
            self._tell(key, batches, call, calls, is_new=known is None or changed is not None)
        if known is not None and changed is not None:
            if calls is not None:
                calls.require_same()  # connections are given back by all or by none
            self._compiled.pop(key).run.close()
        if key not in self._compiled:
            started = time.perf_counter()
            self._compiled[key] = self._compile(batches, kind, calls)
            logger.info("captured a pipeline in %.1f s", time.perf_counter() - started)
        return self._compiled[key]

    def _tell(self, key: Any, batches: MicroBatches, call: str, calls: Calls, *, is_new: bool) -> None:
        """Say what this rank does, and see now and then that optimizers are still alike."""
        if key not in self._described:
            self._described[key] = call_facts(call, self.model, batches, tree.flatten(batches.arguments[0])[0])
        runs = "a new capture" if is_new else "a known capture"
        calls.tell(self._described[key] | {"the number of steps before it": self._num_steps, "what it runs": runs})
        if self.options.optimizer is not None and is_due(calls.number):
            facts = option_facts("optimizer", self.options.optimizer)
            calls.require_same()
            calls.ranks.require_agreement(calls.moment("options"), {"the options of optimizers": facts})
            if self._current is not None and self.options.lower == "none":  # regions of other graphs round otherwise
                require_same_values(calls, self.model, self.options.optimizer, self._current.run.shared_parameters())

    def _compile(self, batches: MicroBatches, kind: _Kind, calls: Calls | None) -> _Compiled:
        """Capture, cut and connect; ranks agree first on what they were given, then on what they made of it."""
        if calls is not None:
            calls.require_same()
            calls.ranks.require_agreement(calls.moment("given"), given_facts(self.model, self.options))
        if kind.is_training:
            refuse_hooks(self.model)
        captured, draft = self._captured(batches.arguments[0], batches.shares[0], kind)
        names = [node.name for node in draft.graph.calls()]
        # What is kept for the backward is decided for the model, not for each stage.
        kept = plan_memory(draft) if kind.is_training else Pipeline()
        found, plan = self._cut(captured, draft.graph, kind)
        small = self._small(batches, names, kept, found, plan, kind)
        graphs = Graphs(captured, found, batches.num_large, small)
        if draft.is_lowered:
            for one in graphs.cuts:
                _lower_programs(one)
        schedule = self._schedule(len(found.stages), kind)
        if calls is None:
            run = LocalPipeline(graphs, schedule, self.options.seed)
        else:
            run = self._connected(graphs, schedule, calls)
        if kind.is_training:
            self._forget_evaluations()
        with one_at_a_time():  # guards keep what they see of torch
            return _Compiled(graphs, plan, schedule, run, CaptureGuard(captured))

    def _small(
        self,
        batches: MicroBatches,
        names: list[str],
        kept: Pipeline,
        large: CutGraph,
        plan: SplitPlan | None,
        kind: _Kind,
    ) -> tuple[Capture, CutGraph] | None:
        """The same stages, and the same values kept, for micro-batches with a row less, if there are such."""
        if batches.num_large == len(batches.sizes):
            return None
        captured, draft = self._captured(batches.arguments[-1], batches.shares[-1], kind)
        if [node.name for node in draft.graph.calls()] == names:
            graph = run_passes(draft.graph, kept)
            borders = borders_like(graph, large) if plan is None else plan.borders
            small = cut(graph, borders, shared=self.options.shared)
            if is_like(small, large):
                return captured, small
        raise PipelineError(
            f"micro-batches of {batches.sizes[0]} and of {batches.sizes[-1]} rows do not run through the same ops; "
            f"give a batch whose rows are a multiple of {len(batches.sizes)}"
        )

    def _captured(self, arguments: Any, share: float, kind: _Kind) -> tuple[Capture, Draft]:
        """One micro-batch as it was captured, and with ops as those who run it like them."""
        captured = self._capture(arguments, share, kind)
        refuse_python(captured)
        number_draws(captured.graph)
        options = StepOptions(memory_budget=self.options.memory_budget, lower=self.options.lower)
        return captured, begin(captured.graph, options, Hardware(), stages=_STAGES)

    def _forget_evaluations(self) -> None:
        """Earlier ones may have been cut elsewhere."""
        for key in [key for key in self._compiled if not key[0].is_training]:
            self._compiled.pop(key).run.close()

    def _connected(self, graphs: Graphs, schedule: Schedule, calls: Calls) -> PipelineRank:
        """This rank's part of the job, which is shared out once all ranks have the same to run."""
        require_room(schedule.num_ranks)
        calls.ranks.require_agreement(calls.moment("made"), made_facts(graphs.cuts, schedule))
        is_first = self._processes is None
        if self._processes is None:
            self._processes = Processes.of(schedule.num_ranks)
            share_model(self.model)
        run = PipelineRank(graphs, schedule, self.options.seed, self._processes, calls)
        if is_first or self.options.lower == "none":
            require_same_values(calls, self.model, self.options.optimizer, run.shared_parameters())
        return run

    def _cut(self, captured: Capture, graph: StepGraph, kind: _Kind) -> tuple[CutGraph, SplitPlan | None]:
        """Stages where the plan wants them, or, once there are stages for training, the same ones."""
        options = self.options
        if not kind.is_training and self._current is not None:
            trained = self._current.graphs.cut
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

    def _capture(self, arguments: Any, share: float, kind: _Kind) -> Capture:
        """The graph of one micro-batch, with gradients that begin with it."""
        # The optimizer among the options is no part of the step, which is everything that it can reach.
        loss_fn, where = self.options.loss_fn, self.options.loss
        is_returned = self.options.returns_output or not kind.has_loss

        def micro_step(
            model: nn.Module, args: Any, kwargs: Mapping[str, Any], target: Any, scale: torch.Tensor
        ) -> tuple[torch.Tensor | None, Any]:
            with torch.set_grad_enabled(kind.is_training):
                output = model(*args, **kwargs)
                loss = loss_of(output, target, loss_fn, where) if kind.has_loss else None
            if loss is not None and kind.is_training:
                (loss * scale.to(loss.dtype)).backward()
            return loss if loss is None else loss.detach(), output if is_returned else None

        gradients = {parameter: parameter.grad for parameter in self.model.parameters()}
        for parameter in gradients:
            parameter.grad = None
        try:
            return capture(micro_step, (self.model, *arguments, torch.tensor(share, dtype=torch.float64)), {})
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
            run_passes(stage.program(kind).graph, [Lower()])
