"""Data parallel training: the same step on every rank, gradients averaged, by a plan all ranks have agreed on."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from wholestep.capture import Capture, source
from wholestep.comm import reducible_gradients
from wholestep.comm.facts import gather_facts
from wholestep.comm.plan import DataParallelPlan, Facts, decide
from wholestep.compiler import Draft, StepOptions
from wholestep.cost import Link, calibrate_link
from wholestep.errors import CaptureError, RankError
from wholestep.graph import SlotKind, StepGraph
from wholestep.runtime.agreement import Ranks, is_due, mark_of, require_same
from wholestep.runtime.replica_facts import (
    all_optimizer_facts,
    code_mark,
    describe,
    local_update,
    mode_facts,
    option_facts,
    tensor_facts,
    update_facts,
    update_inputs,
    value_facts,
)
from wholestep.runtime.roll_call import Part, RollCall

logger = logging.getLogger(__name__)

_BROADCAST_BYTES = 64 * 2**20
# Tensors that updates may be made with, each rank its own: also gradients that nobody averages (of frozen parameters).
_READ_BY_UPDATES = (SlotKind.CONSTANT, SlotKind.BUFFER, SlotKind.GRAD)


@dataclass(frozen=True)
class Prepared:
    """A capture, the draft of its plan, how its gradients travel, and what ranks do alike in each call of it."""

    captured: Capture
    draft: Draft
    communication: DataParallelPlan
    part: Part


class _Shared:
    """Objects that all ranks have, numbered in the order in which they agreed on them."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0

    def number_of(self, value: Any) -> int | None:
        known = self._numbers.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def add(self, value: Any) -> None:
        self._numbers[id(value)] = weakref.ref(value), self._count
        self._count += 1


CaptureStep = Callable[[frozenset[str]], tuple[Capture, Draft]]
"""Captures the step, some parameters getting a gradient of zeros, and decides what a rank decides for itself."""


class Replicas:
    """This rank's side of a data-parallel step: agrees with the other ranks how gradients travel."""

    def __init__(self, options: StepOptions, function: Callable[..., Any]) -> None:
        assert options.data_parallel is not None
        self.options = options
        self.shared = options.data_parallel
        self.function = function
        self.ranks = Ranks.of(self.shared.resolve(), options.agreement_timeout_s)
        self._plans: dict[str, DataParallelPlan] = {}
        self._broadcast = _Shared()
        self._optimizers = _Shared()
        self._roll_call: RollCall | None = None
        self._link: Link | None = None if self.shared.link is None else Link.from_text(self.shared.link)

    def prepare(self, capture_step: CaptureStep, number: int) -> Prepared:
        """Capture, and find the plan for the gradients the capture has.

        Gradients and updates that have been agreed on need no further word between ranks: one rank may capture alone,
        for a batch of another size. New ones, new models and new optimizers have to appear on all ranks in the same
        call. Nothing is shared, and no collective runs, before ranks have agreed.
        """
        self.ranks.require_finished()
        with self.ranks.failing_together(f"{number}/step"):
            captured, draft = capture_step(frozenset())
            self._refuse_local_updates(draft.graph)
        plan = self._plans.get(_signature(captured, draft.graph))
        if plan is None or self._unseen(captured, SlotKind.PARAM) or self._unseen_optimizers(captured):
            captured, draft = self._agree_on_gradients(capture_step, captured, draft, number)
            graph = draft.graph
            with self.ranks.telling("rank 0's parameters"):
                self._share_state(captured)
            values = value_facts(captured, update_inputs(graph, *_READ_BY_UPDATES))
            self.ranks.require_agreement(f"{number}/values", {"tensors that updates are made with": values})
            plan = self._agree_on_plan(graph, number)
            self._plans[_signature(captured, graph)] = plan
        return Prepared(captured, draft, plan, self._part(captured, draft.graph, plan))

    def begin_call(self, part: Part | None, captured: Capture, number: int, leaves: list[Any]) -> None:
        """Say which call this rank runs; now and then compare options, which may change with every call."""
        self.ranks.require_finished()
        if self._roll_call is None or part is None:
            return
        self._roll_call.speak(self.ranks, self.name, part, number, leaves)
        if is_due(number):
            self.end_call()
            found = captured.found.optimizers.items()
            facts = {key: value for name, optimizer in found for key, value in option_facts(name, optimizer).items()}
            values = value_facts(captured, part.tensors)
            compared = {"the options of optimizers": facts, "tensors that updates are made with": values}
            self._roll_call.require_agreement(self.ranks, self.name, number, compared)

    def fail_call(self, number: int, error: BaseException) -> None:
        """This rank runs nothing in a call that others may run: they learn it instead of waiting."""
        if self._roll_call is not None and self.ranks.has_finished:
            self._roll_call.speak_of_failure(self.ranks, self.name, number, error)

    def end_call(self) -> None:
        """Hear what the others run, at the latest; raises `RankError` if that is something else."""
        if self._roll_call is not None:
            self._roll_call.hear()

    def note_unfinished(self, call: str) -> None:
        """A call has raised on this rank; if it has sent nothing yet, and that is so on all ranks, they may go on."""
        if self._roll_call is None or self._roll_call.has_sent:
            self.ranks.note_unfinished(call)
        if self._roll_call is not None:
            self._roll_call.forget()

    def peers(self, captured: Capture, plan: DataParallelPlan, number: int) -> Peers:
        """The ranks, as the check of a call against eager needs them; they run the same call."""
        if self._roll_call is not None:
            self._roll_call.send()
        return Peers(self.ranks, captured, plan, number)

    def _agree_on_gradients(
        self, capture_step: CaptureStep, captured: Capture, draft: Draft, number: int
    ) -> tuple[Capture, Draft]:
        """Compare all that must be alike; a parameter that only other ranks use gets a gradient of zeros."""
        facts = {
            "the compiled steps": {"function": self.name, f"the code of {self.name}": code_mark(self.function)},
            "the options of wholestep.compile": self.options.rank_facts,
            "the parameters": tensor_facts(captured, SlotKind.PARAM),
            "the buffers": tensor_facts(captured, SlotKind.BUFFER),
            "the modes of modules": mode_facts(captured.found.modules),
            "the optimizers": all_optimizer_facts(captured),
            "what ranks do not share yet": self._unseen(captured, SlotKind.PARAM, SlotKind.BUFFER),
        }
        self.ranks.require_agreement(f"{number}/step", facts)
        names = _names(draft.graph)
        by_rank = self.ranks.exchange(f"{number}/gradients", names)
        everywhere = {name for each in by_rank for name in each}
        if not all(set(each) == everywhere for each in by_rank):
            with self.ranks.failing_together(f"{number}/zeros"):
                missing = everywhere - set(names)
                if missing:
                    logger.info("%d parameters are unused on this rank and get a gradient of zeros", len(missing))
                    captured, draft = capture_step(frozenset(missing))
                by_rank = self.ranks.exchange(f"{number}/zeros", _names(draft.graph))
            require_same("the gradients", [sorted(each) for each in by_rank])
        self.ranks.require_agreement(f"{number}/update", {"clipping and updates": update_facts(draft.graph)})
        return captured, draft

    def _agree_on_plan(self, graph: StepGraph, number: int) -> DataParallelPlan:
        """Rank 0's facts, one link, the same decision everywhere, checked by its fingerprint.

        A plan that was given has been compared already, with all other options.
        """
        if self.options.plan is not None:
            assert self.options.plan.communication is not None, "made for as many ranks as there are"
            return self.options.plan.communication
        is_auto = self.options.cross_iteration == "auto" and self.ranks.world > 1
        if is_auto and self._link is None:
            with self.ranks.telling("the measurement of the link"):
                self._link = calibrate_link(self.ranks.group, _device(graph))
        with self.ranks.failing_together(f"{number}/facts"):
            facts = None
            if self.ranks.rank == 0:
                facts = gather_facts(
                    graph,
                    world=self.ranks.world,
                    average=self.shared.reduce == "mean",
                    link=self._link if is_auto else None,
                    is_measured=self.shared.op_times == "measured",
                ).to_dict()
            answers = self.ranks.exchange(f"{number}/facts", facts)
        common = Facts.from_dict(answers[0])
        plan = decide(common, bucket_mb=self.options.bucket_mb, cross_iteration=self.options.cross_iteration)
        require_same("the plans", self.ranks.exchange(f"{number}/plan", plan.fingerprint))
        return plan

    @property
    def name(self) -> str:
        """The step, as messages call it."""
        return getattr(self.function, "__qualname__", repr(self.function))

    def _refuse_local_updates(self, graph: StepGraph) -> None:
        found = local_update(graph) if self.ranks.world > 1 else None
        if found is not None:
            slot_id, node = found
            raise CaptureError(
                f"the update of {slot_id.partition('.')[2]} is computed from this rank's own batch, not from gradients "
                "that ranks average, so that each rank would train another model",
                location=source.location_of_line(node.meta.get("source")),
                advice="Compute it from .grad after backward(), or pass what it needs as a number that ranks share",
            )

    def _part(self, captured: Capture, graph: StepGraph, plan: DataParallelPlan) -> Part:
        tensors = {
            slot.name: captured.bindings[slot.id].read([]) for slot in captured.graph.slots_of_kind(SlotKind.PARAM)
        }
        facts = {
            "the compiled steps": {"function": f"{self.name} (step {self.ranks.number} of the group)"},
            "the models": _numbered(self._broadcast, tensors),
            "the optimizers": _numbered(self._optimizers, captured.found.optimizers),
            "the gradients": {key: "sent" for each in plan.buckets for key in each.keys},
            "the modes of modules": mode_facts(captured.found.modules),
            "clipping and updates": update_facts(graph),
            "the plans": plan.fingerprint,
        }
        numbers = update_inputs(graph, SlotKind.LR, SlotKind.NUMBER)
        tensors = update_inputs(graph, *_READ_BY_UPDATES)
        return Part(facts, {slot_id: captured.bindings[slot_id] for slot_id in numbers}, tensors)

    def _share_state(self, captured: Capture) -> None:
        """Give every rank rank 0's parameters and buffers, each once, by name, in messages of moderate size."""
        names = self._unseen(captured, SlotKind.PARAM, SlotKind.BUFFER)
        fresh: list[torch.Tensor] = [captured.bindings[slot_id].read([]) for slot_id in names]
        if self.ranks.world > 1:
            for tensors in _messages(fresh):
                _broadcast_together(tensors, self.ranks.group)
            self._roll_call = RollCall.of(self.ranks)
        for tensor in fresh:
            self._broadcast.add(tensor)
        for optimizer in self._unseen_optimizers(captured):
            self._optimizers.add(optimizer)

    def _unseen(self, captured: Capture, *kinds: SlotKind) -> list[str]:
        """Slots of tensors that ranks have not yet been given alike, in the order of their names."""
        found: list[str] = []
        for slot in sorted(captured.graph.slots_of_kind(*kinds)):
            tensor: torch.Tensor = captured.bindings[slot.id].read([])
            if tensor.numel() > 0 and self._broadcast.number_of(tensor) is None:
                found.append(slot.id)
        return found

    def _unseen_optimizers(self, captured: Capture) -> list[Optimizer]:
        known = sorted(captured.found.optimizers.items())
        return [optimizer for _, optimizer in known if self._optimizers.number_of(optimizer) is None]


@dataclass(frozen=True)
class Peers:
    """All ranks of a call that is checked against eager (`differential`)."""

    ranks: Ranks
    captured: Capture
    plan: DataParallelPlan
    number: int

    @contextlib.contextmanager
    def averaging(self) -> Generator[None]:
        """Average `.grad` of the planned parameters over the ranks after a backward, one by one: the reference.

        What was there before is the same on all ranks already, and must not be summed once more.
        """
        keys = [key for bucket in sorted(self.plan.buckets, key=lambda b: b.keys) for key in bucket.keys]
        wheres = [self.captured.bindings[f"{SlotKind.PARAM}.{key.split('#')[0]}"] for key in keys]
        parameters: list[torch.Tensor] = [where.read([]) for where in wheres]
        with torch.no_grad():
            for parameter in parameters:
                if not self.plan.average and parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.ranks.world)
        yield
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = parameter.grad.mul_(1.0 / self.ranks.world) if self.plan.average else parameter.grad
                dense = grad.contiguous()
                dist.all_reduce(dense, group=self.ranks.group)
                grad.copy_(dense)

    def verdicts(self, differences: dict[str, float]) -> list[dict[str, float]]:
        """What each rank has found to differ from eager."""
        return self.ranks.exchange(f"{self.number}/verdict", differences)


def _numbered(shared: _Shared, values: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"number {shared.number_of(value)} of those that ranks share" for name, value in values.items()}


def _signature(captured: Capture, graph: StepGraph) -> str:
    """What a plan is for: gradients, and all that is agreed on and may be another in another capture."""
    gradients = [
        f"{g.key}:{','.join(g.names)}:{g.wave}:{describe(g.node.meta['val'])}" for g in reducible_gradients(graph)
    ]
    return mark_of([gradients, update_facts(graph), mode_facts(captured.found.modules)])


def _names(graph: StepGraph) -> list[str]:
    return [name for gradient in reducible_gradients(graph) for name in gradient.names]


def _device(graph: StepGraph) -> torch.device:
    gradients = reducible_gradients(graph)
    if not gradients:
        raise RankError("data_parallel has nothing to do: no parameter of this step gets a gradient")
    return gradients[0].node.meta["val"].device


def _messages(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one dtype and device in a row, up to a size."""
    messages: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        fits = messages and size + num_bytes <= _BROADCAST_BYTES
        if fits and (messages[-1][0].dtype, messages[-1][0].device) == (tensor.dtype, tensor.device):
            messages[-1].append(tensor)
            size += num_bytes
        else:
            messages.append([tensor])
            size = num_bytes
    return messages


def _broadcast_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
