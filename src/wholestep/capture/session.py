"""One tracing session: which real tensor has which traced twin, and where in the step each op was born."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from wholestep import _torch
from wholestep.capture import binding, blank, source
from wholestep.capture.leftovers import HandedOut
from wholestep.capture.optimizer_state import defaults, rates_of, refuse_other_defaults, refuse_other_rates
from wholestep.capture.questions import Questions, ancestors
from wholestep.capture.record import participants
from wholestep.capture.record.again import Missed
from wholestep.capture.record.numbers import Number, is_late, kind_of, name_of, settled, value_of
from wholestep.capture.record.places import Rooted, Step, find
from wholestep.capture.record.recorder import Recorder
from wholestep.capture.record.recording import Current
from wholestep.capture.trail import TrailNotes
from wholestep.errors import CaptureError
from wholestep.graph import Phase, Slot, SlotKind, map_nodes, ops

if TYPE_CHECKING:
    from wholestep.capture.looks import Looks

_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)
_NOT_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)


@dataclass
class Lifted:
    """A real tensor or number and the traced value that stands for it."""

    slot: Slot
    node: fx.Node
    real: Any
    twin: Any


@dataclass(frozen=True)
class Reassigned:
    """A traced tensor whose `.data` the step has exchanged, the memory it had before, and where it did so last."""

    twin: torch.Tensor
    memory: int
    location: str | None

    @property
    def has_moved(self) -> bool:
        """Whether it is not back in the memory it had."""
        return _torch.storage_key(self.twin) != self.memory


@dataclass
class Session:
    """The books of one trace.

    `lift` makes a value an input of the graph; `annotate` gives the nodes made since the last call their phase, module
    path and source line. Both may be called at any time while the trace runs.
    """

    fake_mode: Any
    looks: Looks = field(init=False)
    """What Python asks of values that the step computes."""
    handed_out: HandedOut = field(default_factory=HandedOut)
    has_symbolic_sizes: bool = False
    recorder: Recorder = field(default_factory=Recorder)
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    """The numbers of the call that is running, by name; filled before the graph runs."""
    current: Current = field(default_factory=Current)
    tracer: Any = None
    calling: Any = None
    """The function of torch that the step has called last."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that traces: all of a step runs in it, backwards too."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the trace has ended and models hold their own tensors again."""
    phase: Phase = Phase.FORWARD
    lifted: dict[str, Lifted] = field(default_factory=dict)
    twins: dict[int, torch.Tensor] = field(default_factory=dict)
    module_stack: list[str] = field(default_factory=list)
    trail: TrailNotes = field(default_factory=TrailNotes)
    questions: Questions = field(default_factory=Questions)
    checkpoint_region: int | None = None
    num_checkpoint_regions: int = 0
    gradients: dict[str, fx.Node] = field(default_factory=dict)
    earlier_gradients: list[tuple[str, fx.Node]] = field(default_factory=list)
    """Gradients as a backward before the last one left them."""
    zero_gradients: frozenset[str] = frozenset()
    """Parameters that get a gradient of zeros where the backward leaves none (other ranks have one)."""
    buffer_slots: dict[tuple[int, str], str] = field(default_factory=dict)
    """(id of a module, name) of each buffer -> its slot; several places may share one."""
    state_before: dict[tuple[int, int, Any], Any] = field(default_factory=dict[tuple[int, int, Any], Any])
    """What there was besides tensors in the state of optimizers, by optimizer, twin of the parameter, and key."""
    empty_states: list[tuple[Optimizer, torch.Tensor]] = field(default_factory=list[tuple[Optimizer, torch.Tensor]])
    """Optimizers, and parameters that they have asked for the state of and left it empty (it is a defaultdict)."""
    optimizers: set[int] = field(default_factory=set)
    """Ids of the optimizers whose state has been lifted."""
    wrappers: set[int] = field(default_factory=set)
    """Ids of those that merely stand for one of them."""
    defaults: tuple[Any, ...] = field(default_factory=defaults)
    """Dtype and device of tensors that are made without naming one, where the step begins."""
    looked_in: str = ""
    """Where optimizers were looked for, in words."""
    made_of_rates: set[int] = field(default_factory=set)
    """Ids of optimizers whose state was made beforehand, of their learning rates."""
    _rates: dict[int, list[Any]] = field(default_factory=dict)
    """Their learning rates as the step finds them."""
    stepped: list[Optimizer] = field(default_factory=list)
    optimizer: Optimizer | None = None
    """The optimizer whose `step()` is running."""
    touched: set[tuple[int, int]] = field(default_factory=set)
    """(optimizer, twin) pairs that had a gradient when the optimizer stepped: these have state afterwards."""
    cleared_first: set[int] = field(default_factory=set)
    """Twins whose gradient was cleared before anything looked at it: what it was before the call is irrelevant."""
    read_first: set[int] = field(default_factory=set)
    reassigned: dict[int, Reassigned] = field(default_factory=dict)
    """Traced tensors whose `.data` the step has exchanged, by their ids."""
    fixed_answers: frozenset[int] = frozenset()
    """Which of the questions torch must have a plain number for."""
    _numbers_in_state: dict[fx.Node, Number] = field(default_factory=dict[fx.Node, Number])
    _own_gradients: set[int] = field(default_factory=set)
    """Twins whose gradient is the step's own by now, though it may have been added to the one from before."""
    _clearing: bool = False
    _last_annotated: fx.Node | None = None
    _has_trail: list[bool] = field(default_factory=list[bool])
    _checkpoint_policy: Callable[..., Any] | None = None

    def is_here(self) -> bool:
        """Whether this is asked in the thread that traces; what others do is none of the step's business."""
        return threading.get_ident() == self.thread

    def lift(self, real: Any, slot: Slot, dynamic_dims: tuple[int, ...] = ()) -> Any:
        """Make a real tensor or number an input of the graph under `slot`; returns its traced twin."""
        if isinstance(real, torch.Tensor):
            if id(real) in self.twins:
                return self.twins[id(real)]
            twin, node = self._lift_tensor(real, slot, dynamic_dims)
            self.twins[id(real)] = twin
            self.recorder.twins.add(real, twin, slot.kind, slot.name)
        else:
            symbolic = _torch.new_symbolic_int if isinstance(real, int) else _torch.new_symbolic_float
            twin = symbolic(self.fake_mode)
            node = _torch.track_as_placeholder(self.tracer, twin, _identifier(slot))
        self.lifted[node.name] = Lifted(slot, node, real, twin)
        return twin

    def refuse_known(self, gradient: torch.Tensor, slot: Slot) -> None:
        """A gradient that is another input as well: eager adds to it in place, or does not, as the backward goes."""
        known = self.recorder.twins.pair(gradient)
        if known is not None and known.kind is not SlotKind.GRAD:
            raise CaptureError(
                f"{slot.id} and {known.kind.value}.{known.name} are one tensor",
                advice="Clone one of the two, or clear the gradient before the step",
            )

    def _lift_tensor(self, real: torch.Tensor, slot: Slot, dynamic_dims: tuple[int, ...]) -> tuple[Any, fx.Node]:
        if type(real) not in _PLAIN_TYPES and not blank.is_blank(real):
            raise CaptureError(
                f"{slot.id} is a {type(real).__name__}, a tensor subclass that cannot be traced",
                advice=_instead_of(real),
            )
        if real.layout is not torch.strided:
            raise CaptureError(f"{slot.id} has layout {real.layout}", advice="Only dense (strided) tensors are traced")
        fake = self._fake(real, slot, dynamic_dims)
        node = _torch.track_as_placeholder(self.tracer, fake, _identifier(slot))
        twin = _torch.to_functional(fake)
        self.handed_out.add(twin)
        if real.requires_grad:
            twin.requires_grad_(True)
        if isinstance(real, nn.Parameter):
            _torch.mark_as_parameter(twin)
        return twin, node

    def _fake(self, real: torch.Tensor, slot: Slot, dynamic_dims: tuple[int, ...]) -> torch.Tensor:
        if not blank.is_blank(real):
            return _torch.fake_like(self.fake_mode, real, slot.id, dynamic_dims)
        if dynamic_dims:
            raise CaptureError(
                f"{slot.id} was made without memory, so its batch size is taken as it is",
                advice="Give it memory, or pass dynamic_batch=False",
            )
        return blank.blank_twin(self.fake_mode, real)

    def symbol(self, number: Number) -> Any:
        """The traced value of a number that may change: an input of the graph."""
        if is_late(number):
            made = self.looks.symbol(number)
            return settled(number) if made is None else made
        if kind_of(number) is bool:  # torch has no symbol for one that is not
            return settled(number)
        name = name_of(number)
        known = next((entry.twin for entry in self.lifted.values() if entry.slot == Slot(SlotKind.NUMBER, name)), None)
        if known is not None:
            return known
        value = value_of(number)
        return self.lift(value.item() if isinstance(value, np.generic) else value, Slot(SlotKind.NUMBER, name))

    def symbol_node(self, number: Number) -> fx.Node:
        """The input that a number which is known before the graph runs is."""
        twin = self.symbol(number)
        return next(entry.node for entry in self.lifted.values() if entry.twin is twin)

    def where_adopted(self, real: torch.Tensor) -> binding.Binding:
        """Where a tensor that is neither an argument nor a model's is to be found at each call."""
        drawn = self.recorder.drawn_tensors.get(id(real))
        if drawn is not None:
            _, name, make = drawn
            self.recorder.needed.add(name)
            return binding.DrawnTensor(self.numbers, name, make, id(real) in self.recorder.drawn_items)
        place = self.recorder.place_of(real)
        if place is None:
            return binding.FixedTensor(real)
        return binding.AtPlace(functools.partial(_find_now, place.path, self.current))

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        """The twin of a real tensor that surfaced in the step without being an argument: a constant from outside."""
        known = self.twins.get(id(real))
        if known is not None:
            return known
        if real.requires_grad:
            owner = participants.met_owner(self.recorder, real, self.optimizers)
            if owner is not None:
                raise Missed(owner)
            raise CaptureError(
                f"the step uses a trainable tensor of shape {list(real.shape)} that belongs to no model it was given",
                location=source.current_location(),
                advice="Pass the module that owns it as an argument of the train step",
            )
        number = sum(lifted.slot.kind is SlotKind.CONSTANT for lifted in self.lifted.values())
        return self.lift(real, Slot(SlotKind.CONSTANT, str(number)))

    def node_of(self, traced: torch.Tensor) -> fx.Node:
        """The node that holds the current value of a traced tensor."""
        return _torch.node_of(self.tracer, _torch.from_functional(traced))

    def can_answer(self, *values: Any) -> bool:
        """Whether what some traced tensors hold is known before the step runs."""
        questions = self.questions
        if self.phase is Phase.OPTIMIZER and not questions.of_state:
            return False
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return all(self.has_node(value) and self.is_answerable(self.node_of(value)) for value in tensors)

    def is_answerable(self, node: fx.Node) -> bool:
        """Whether what a node computes is known before the step runs; what is drawn is so only after all questions."""
        slots = {name: entry.slot for name, entry in self.lifted.items()}
        is_known = self.questions.can_answer(node, self.reals(), slots)
        return is_known and not any(map(self.is_drawn_input, ancestors(node) if self.recorder.drawn_tensors else ()))

    def is_drawn_input(self, node: fx.Node) -> bool:
        """Whether a node is an input that is made of what Python draws at each call."""
        entry = self.lifted.get(node.name) if node.op == "placeholder" else None
        return entry is not None and id(entry.real) in self.recorder.drawn_tensors

    def answer(self, func: Any, args: tuple[Any, ...], *, is_open: bool = False) -> Any:
        """What an operator that looks at values gives for the arguments of this very call."""
        nodes = tuple(self.node_of(value) if isinstance(value, torch.Tensor) else value for value in args)
        return self.questions.answer(self.tracer, func, nodes, self.reals(), is_open=is_open)

    def number_in_state(self, tensor: torch.Tensor) -> Number | None:
        """The number that an optimizer makes of its state, for Python to compute with; None if it is not that."""
        questions = self.questions
        if not questions.of_state or self.phase is not Phase.OPTIMIZER or not self.can_answer(tensor):
            return None
        node = self.node_of(tensor)
        if tensor.numel() != 1 or tensor.dtype in _NOT_NUMBERS:
            return None
        if node not in self._numbers_in_state:
            index = len(questions.found)
            if index in self.fixed_answers:
                return None
            value = self.answer(torch.ops.aten._local_scalar_dense.default, (tensor,), is_open=True)
            path = (Rooted(questions.found), (Step.ITEM, index))
            self._numbers_in_state[node] = self.recorder.ledger.steady_leaf(value, path)
        return self._numbers_in_state[node]

    def is_reassigned(self, tensor: torch.Tensor) -> bool:
        """Whether the step has given a tensor other `.data`."""
        return id(tensor) in self.reassigned

    def has_node(self, value: torch.Tensor) -> bool:
        is_functional = isinstance(value, _torch.FunctionalTensor)
        return is_functional and _torch.has_node(self.tracer, _torch.from_functional(value))

    def reals(self) -> dict[str, Any]:
        return {name: lifted.real for name, lifted in self.lifted.items()}

    @property
    def parameters(self) -> list[Lifted]:
        return [lifted for lifted in self.lifted.values() if lifted.slot.kind is SlotKind.PARAM]

    def note_gradients(self) -> None:
        """Remember which node holds each parameter's gradient now (called after each backward)."""
        for lifted in self.parameters:
            if not (lifted.real.requires_grad or lifted.twin.requires_grad):
                continue  # a gradient of before it was frozen: no backward adds to it, and ranks do not share it
            name = lifted.slot.name
            if lifted.twin.grad is None and name in self.zero_gradients:
                with torch.no_grad(), self.in_phase(Phase.BACKWARD):
                    lifted.twin.grad = torch.zeros_like(lifted.twin)
            if lifted.twin.grad is None:
                continue
            self._refuse_sparse(lifted)
            before, now = self.gradients.get(name), self.node_of(lifted.twin.grad)
            if before is not None and before is not now:
                self.earlier_gradients.append((name, before))
            self.gradients[name] = now

    @staticmethod
    def _refuse_sparse(lifted: Lifted) -> None:
        if lifted.twin.grad.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of '{lifted.slot.name}' is sparse",
                location=source.current_location(),
                advice="Use dense gradients (nn.Embedding(..., sparse=False))",
            )

    def note_grad_read(self, twin: torch.Tensor) -> None:
        """The step looks at `.grad`; before the first backward that makes the gradient from outside an input."""
        if not (self._clearing or id(twin) in self._own_gradients | self.cleared_first):
            self.read_first.add(id(twin))

    def note_grad_cleared(self, parameters: Sequence[torch.Tensor]) -> None:
        """The step replaces these gradients: where it has not looked at them, any may be there before the call."""
        self.cleared_first |= self._twin_ids(parameters) - self.read_first - self._own_gradients

    @contextlib.contextmanager
    def clearing_gradients(self, parameters: Sequence[torch.Tensor]) -> Generator[None]:
        """`zero_grad` runs inside: looking at a gradient in order to clear it does not count as reading it."""
        self.note_grad_cleared(parameters)
        previous, self._clearing = self._clearing, True
        try:
            yield
        finally:
            self._clearing = previous

    def own_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on these gradients are the step's own: a backward has added to them, or an update has used them."""
        self._own_gradients |= self._twin_ids(parameters)

    def _twin_ids(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        return {id(self.twins.get(id(tensor), tensor)) for tensor in tensors}

    def note_rates(self, optimizers: Iterable[Optimizer]) -> None:
        """The step begins, with these learning rates."""
        self._rates = {id(one): rates_of(one) for one in optimizers if id(one) in self.made_of_rates}

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note which parameters `optimizer.step()` will update; refuses an optimizer that would update none."""
        members = [p for group in optimizer.param_groups for p in group["params"]]
        if id(optimizer) not in self.optimizers:
            if id(optimizer) in self.wrappers:
                return  # the one inside says so itself, if it steps
            if members and not any(map(_torch.is_traced, members)):
                raise Missed(optimizer)
            if self._are_own(members):
                return
            raise CaptureError(
                f"the step updates with a {type(optimizer).__name__} that it has made itself, or that could not be "
                f"found in {self.looked_in}",
                location=source.current_location(),
                advice="Pass the optimizer itself as an argument of the train step, not only what wraps it",
            )
        self.stepped.append(optimizer)
        self.own_gradients(members)
        refuse_other_defaults(optimizer, self.defaults)
        refuse_other_rates(optimizer, self._rates.get(id(optimizer), []))
        updated = {id(p) for p in members if _torch.is_traced(p) and p.grad is not None}
        if not updated:
            raise CaptureError(
                f"{type(optimizer).__name__}.step() would update nothing: none of its {len(members)} parameters has a "
                "gradient in this step",
                location=source.current_location(),
                advice="Build the optimizer from the parameters of the model that the step trains",
            )
        self.touched |= {(id(optimizer), key) for key in updated}

    def _are_own(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether some tensors are none of the inputs: an optimizer of such ones is arithmetic like any other."""
        twins = {id(lifted.twin) for lifted in self.lifted.values()}
        return all(_torch.is_traced(tensor) and id(tensor) not in twins for tensor in tensors)

    @contextlib.contextmanager
    def in_phase(self, phase: Phase) -> Generator[None]:
        """Tag what is traced inside with another phase."""
        self.annotate()
        previous, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.annotate()
            self.phase = previous

    @contextlib.contextmanager
    def in_checkpoint_region(self, context_fn: Callable[[], Any] | None = None) -> Generator[None]:
        """Tag what is traced inside as one region of `torch.utils.checkpoint`, whose `context_fn` may have a policy."""
        self.annotate()
        previous = self.checkpoint_region, self._checkpoint_policy
        self.checkpoint_region = self.num_checkpoint_regions
        self._checkpoint_policy = None if context_fn is None else getattr(context_fn()[0], "policy_fn", None)
        self.num_checkpoint_regions += 1
        before = self._deeds()
        try:
            yield
        finally:
            self.annotate()
            self.checkpoint_region, self._checkpoint_policy = previous
        if self._deeds() != before:
            raise CaptureError(
                "a region under torch.utils.checkpoint writes to a buffer or to Python objects, draws from Python or "
                "prints: eager does so once more in the backward",
                location=source.current_location(),
                advice="Keep batch norms, counters and prints out of checkpointed regions, or pass memory_budget "
                "instead of checkpointing by hand",
            )

    def _deeds(self) -> tuple[Any, ...]:
        """What a region does besides computing: it would be done again when it is computed again."""
        buffers = [entry.twin for entry in self.lifted.values() if entry.slot.kind is SlotKind.BUFFER]
        return self.recorder.num_deeds, len(self.recorder.outputs), [self.node_of(twin) for twin in buffers]

    def _note_checkpoint(self, node: fx.Node) -> None:
        """Which region a node is in, and whether the region's policy saves it: `must_save`, `prefer_recompute`, ..."""
        node.meta["checkpoint_region"] = self.checkpoint_region
        if self._checkpoint_policy is None or not ops.is_op(node) or ops.is_view(node.target):
            return
        args, kwargs = map_nodes((node.args, node.kwargs), lambda source: source.meta.get("val"))
        context = SelectiveCheckpointContext(is_recompute=False)
        answer = self._checkpoint_policy(context, node.target, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["checkpoint_policy"] = answer.name.lower()

    def enter_module(self, path: str, *, is_known: bool) -> None:
        """A module's forward begins; calls of modules that belong to no model of the step leave no trail."""
        self.annotate()
        self.module_stack.append(path)
        self._has_trail.append(is_known and self.phase is Phase.FORWARD)
        if self._has_trail[-1]:
            self.trail.enter(path)

    def leave_module(self) -> None:
        self.annotate()
        self.module_stack.pop()
        if self._has_trail.pop():
            self.trail.leave()

    def note_mark(self) -> None:
        """`pipe_split()` was called."""
        self.annotate()
        self.trail.mark(self.phase, self.module_stack[-1] if self.module_stack else "")

    def phase_now(self) -> Phase:
        """After the update, work without gradients (averaging weights) belongs to the optimizer."""
        is_after = self.phase is Phase.FORWARD and bool(self.stepped) and not torch.is_grad_enabled()
        return Phase.OPTIMIZER if is_after else self.phase

    def annotate(self, line: str = "", *, out_of_place: bool = False) -> None:
        """Give every node made since the last call its phase, module path, checkpoint region and source line.

        `out_of_place` marks ops the user called in their functional form, as opposed to functionalised in-place ones.
        """
        for node in reversed(self.tracer.graph.nodes):
            if node is self._last_annotated:
                break
            if node.op != "call_function" or "phase" in node.meta:
                continue
            node.meta["epoch"] = self.trail.epoch
            node.meta["phase"] = self.phase_now()
            if self.module_stack:
                node.meta["fqn"] = self.module_stack[-1]
            if line:
                node.meta["source"] = line
            if out_of_place:
                node.meta["out_of_place"] = True
            if self.checkpoint_region is not None:
                self._note_checkpoint(node)
        self._last_annotated = next(iter(reversed(self.tracer.graph.nodes)), None)


def _instead_of(tensor: torch.Tensor) -> str:
    """What to pass in place of a tensor of another class."""
    if nn.parameter.is_lazy(tensor):
        return "Initialise lazy modules with one forward call first"
    if hasattr(tensor, "full_tensor"):
        return 'Pass the model as it was before it was distributed, and compile with data_parallel="replicate"'
    return 'Pass it as a plain tensor, or compile with on_refusal="eager", which runs the step as it is'


def _identifier(slot: Slot) -> str:
    """A Python identifier for a slot's input node; FX makes it unique."""
    return re.sub(r"\W+", "_", slot.id).strip("_")


def _find_now(path: tuple[Any, ...], current: Current) -> Any:
    return find(path, current.call)
