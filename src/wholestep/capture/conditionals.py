"""`torch.cond` in a step: one node of the graph that runs one of two branches.

    torch.cond(flag, f, g, (x,))        branches = Branches(f, g)(flag, x, weight)         forward
                                        branches_1 = Branches(df, dg)(flag, x, weight, grad)   backward

Eager computes no more than the branch that is taken, computes it once more in the backward, and gives all that either
branch could have used a gradient, of zeros where the other was taken. So each branch is traced where it stands, and the
nodes that it has made are cut out of the graph. What a branch uses from outside (weights of a module) is found by
tracing both a first time. A branch must do nothing but compute: no writes, draws, prints or looks at values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from wholestep import _autograd_torch, _branches_torch, _torch
from wholestep.capture import build, source
from wholestep.capture.record import Raises
from wholestep.capture.record.calls import choose
from wholestep.capture.session import Session
from wholestep.errors import CaptureError
from wholestep.graph import ops

aten = torch.ops.aten

_ADVICE = (
    "Choose with torch.where(flag, f(x), g(x)), which computes both, or compile with on_refusal='eager', which runs "
    "the step as it is"
)
_LOOP_ADVICE = 'Write the loop in Python, or compile with on_refusal="eager", which runs the step as it is'
Function = Callable[..., Any]


class Branches:
    """The target of a node: runs one of two graphs, by a value."""

    is_pure_call: ClassVar[bool] = True
    reads_values: ClassVar[bool] = True

    def __init__(self, when: tuple[fx.GraphModule, fx.GraphModule], places: tuple[list[int], list[int]]) -> None:
        self._when = when
        self._places = places
        self.__name__ = "branches"

    def __call__(self, flag: Any, *inputs: Any) -> tuple[Any, ...]:
        which = 0 if _torch.is_faking() or flag else 1
        return tuple(self._when[which](*[inputs[place] for place in self._places[which]]))


def follow(session: Session, interposer: Callable[[], TorchFunctionMode]) -> None:
    """Let the recorder of a trace hand calls of these functions over."""
    handlers = session.recorder.handlers
    handlers[torch.cond] = lambda *_: functools.partial(_cond, session, interposer)
    for loop in _branches_torch.loops():
        handlers[loop] = functools.partial(_refuse_loop, session)


def _refuse_loop(session: Session, _recorder: Any, function: Any, _args: Any, _kwargs: Any) -> Any:
    session.recorder.refuse(f"calls torch's {function.__name__}(), which cannot be captured", _LOOP_ADVICE)


def _refuse(what: str) -> CaptureError:
    return CaptureError(f"torch.cond() {what}", location=source.current_location(), advice=_ADVICE)


def _cond(
    session: Session,
    interposer: Callable[[], TorchFunctionMode],
    pred: Any,
    true_fn: Function,
    false_fn: Function,
    operands: Any = (),
) -> Any:
    """`torch.cond`, traced."""
    if not isinstance(pred, torch.Tensor):
        return choose(session.recorder, true_fn if pred else false_fn, tuple(operands), {})(*operands)
    leaves, spec = _branches_torch.flattened(operands)
    is_usable = pred.numel() == 1 and isinstance(operands, (tuple, list)) and all(map(_is_tensor, leaves))
    if not is_usable:
        raise Raises("torch.cond() raises for these arguments", advice=_ADVICE)
    if session.has_symbolic_sizes:
        raise _refuse("is captured for each size apart")
    if any(map(torch.is_autocast_enabled, {"cpu", pred.device.type})):
        raise _refuse("under autocast computes its gradient outside of it")
    with _branches_torch.seen_by_nobody():
        flag, *leaves = (value if _torch.is_traced(value) else session.adopt(value) for value in (pred, *leaves))
    call = _Call(session, interposer, (true_fn, false_fn), spec, leaves, flag)
    return call.traced()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _Outside(TorchFunctionMode):
    """Finds the trainable tensors from outside that a branch uses, and puts others in their place."""

    def __init__(self, known: Sequence[torch.Tensor], instead: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}
        self._own = {id(tensor): tensor for tensor in known}
        self._instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _torch.tree_map_only(torch.Tensor, self._exchanged, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for leaf in _torch.tree_leaves((result,)):
            if isinstance(leaf, torch.Tensor):
                self._own[id(leaf)] = leaf
        return result

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._own:
            return tensor
        if tensor.requires_grad and _torch.is_traced(tensor):
            self.found[id(tensor)] = tensor
        return self._instead.get(id(tensor), tensor)


@dataclass
class _Cut:
    """The nodes of a branch as a graph of their own: what it needs from outside, and what it gives."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    fakes: list[torch.Tensor]


class _Call:
    """One call of `torch.cond`."""

    def __init__(
        self,
        session: Session,
        interposer: Callable[[], TorchFunctionMode],
        branches: tuple[Function, Function],
        spec: Any,
        operands: list[torch.Tensor],
        flag: torch.Tensor,
    ) -> None:
        self._session = session
        self._interposer = interposer
        self._branches = branches
        self._spec = spec
        self._flag = flag
        self._operands = operands
        self._outside: list[torch.Tensor] = []
        self._result: Any = None
        self._is_enabled = torch.is_grad_enabled()
        self._inputs: list[torch.Tensor] = []
        self._inputs_of_step = [*session.lifted.values()]

    def traced(self) -> Any:
        with _branches_torch.seen_by_nobody():
            outside: dict[int, torch.Tensor] = {}
            for which in (0, 1):
                with torch.set_grad_enabled(self._is_enabled):
                    _, found = self._cut(which, lambda which=which: self._run(which, self._operands, {}))
                outside |= found
            self._outside = [*outside.values()]
            given = (*self._operands, *self._outside)
            outputs = cast(Any, _Chosen).apply(self, *given)
        return _branches_torch.unflattened(list(outputs), self._result)

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return self._made(lambda which: self._outputs(which, self._inner(inputs, trained=False)), is_forward=True)

    def backward(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        def gradients_of(which: int) -> list[torch.Tensor]:
            inner = self._inner(inputs, trained=True)
            outputs = self._outputs(which, inner)
            pairs = [(one, grad) for one, grad in zip(outputs, gradients, strict=True) if one.requires_grad]
            floats = [one for one in inner if one.requires_grad]
            self._require_leaves(outputs, inner)
            found: Sequence[Any] = [None] * len(floats)
            if pairs and floats:
                roots, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(roots, floats, given, allow_unused=True)
            by_id = {id(one): grad for one, grad in zip(floats, found, strict=True)}
            known = [(one, by_id.get(id(one))) for one in inner]
            made = [torch.zeros_like(one) if grad is None else grad for one, grad in known]
            return [_as_accumulated(one, grad) for one, grad in zip(inputs, made, strict=True)]

        with torch.enable_grad():
            return self._made(gradients_of, is_forward=False)

    def _require_leaves(self, outputs: Sequence[torch.Tensor], inner: Sequence[torch.Tensor]) -> None:
        """All that the outputs were computed from, as autograd knows it, is what the branch was given."""
        known = {id(one) for one in inner}
        leaves = _autograd_torch.accumulate_grad_variables([one.grad_fn for one in outputs])
        if not all(id(leaf) in known for leaf in leaves):
            raise _refuse(
                "has a branch that uses a trained tensor where nobody sees it: in another torch.cond(), or in a "
                "torch.autograd.Function"
            )

    def _inner(self, inputs: Sequence[torch.Tensor], *, trained: bool) -> list[torch.Tensor]:
        inner = self._inputs = [one.detach() for one in inputs]
        return [one.requires_grad_() if trained and one.is_floating_point() else one for one in inner]

    def _outputs(self, which: int, inner: list[torch.Tensor]) -> list[torch.Tensor]:
        operands = inner[: len(self._operands)]
        instead = {id(old): new for old, new in zip((*self._operands, *self._outside), inner, strict=True)}
        outputs, found = self._run(which, operands, instead)
        trained = [id(one) for one in self._operands if one.requires_grad]
        if len({*trained}) < len(trained) or not found.keys().isdisjoint(trained):
            raise _refuse("has a trained operand that a branch uses under several names, whose gradients are summed up")
        if not found.keys() <= instead.keys():
            raise _refuse("has a branch that uses other tensors each time")
        return outputs

    def _run(
        self, which: int, operands: list[torch.Tensor], instead: dict[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """What a branch computes, and the trainable tensors from outside that it uses."""
        given: Any = _branches_torch.unflattened(operands, self._spec)
        mode = _Outside([*operands], instead)
        function = choose(self._session.recorder, self._branches[which], tuple(given), {})
        with _branches_torch.seen_again(), self._interposer(), mode:
            returned = function(*given)
        leaves, spec = _branches_torch.flattened(returned)
        if not all(isinstance(leaf, torch.Tensor) and _torch.is_traced(leaf) for leaf in leaves):
            raise Raises("a branch of torch.cond() returns something else than tensors it has computed", advice=_ADVICE)
        if self._result is not None and spec != self._result:
            raise Raises("the branches of torch.cond() return different structures", advice=_ADVICE)
        self._result = spec
        return leaves, mode.found

    def _cut(self, which: int, run: Callable[[], Any]) -> tuple[list[fx.Node], Any]:
        """Run something and take the nodes that it makes out of the graph again."""
        with self._only_computing() as nodes:
            _, found = run()
        for node in reversed(nodes):
            if node.op == "call_function":
                node.graph.erase_node(node)
        return nodes, found

    def _made(self, run: Callable[[int], list[torch.Tensor]], *, is_forward: bool) -> tuple[torch.Tensor, ...]:
        cuts: list[_Cut] = []
        for which in (0, 1):
            with self._only_computing() as nodes:
                outputs = run(which)
            cuts.append(self._taken_out(nodes, outputs, is_forward=is_forward))
        first, second = cuts
        if [_form(one) for one in first.fakes] != [_form(one) for one in second.fakes]:
            if is_forward:
                raise Raises("the branches of torch.cond() return tensors of different forms", advice=_ADVICE)
            raise _refuse("has branches whose gradients lie in memory in different ways")
        session, inputs = self._session, [*dict.fromkeys([*first.inputs, *second.inputs])]
        places = [inputs.index(node) for node in first.inputs], [inputs.index(node) for node in second.inputs]
        with _torch.outside_modes(), session.fake_mode:
            made = tuple(_like(fake) for fake in first.fakes)
        target = Branches((first.module, second.module), places)
        _torch.track_as_call(session.tracer, made, target, (session.node_of(self._flag), *inputs))
        session.annotate(source.current_line())
        outputs = tuple(_torch.to_functional(fake) for fake in made)
        for output in outputs:
            session.handed_out.add(output)
        return outputs

    @contextlib.contextmanager
    def _only_computing(self) -> Generator[list[fx.Node]]:
        """A branch runs inside, and must do no more than compute; its nodes."""
        session = self._session
        session.annotate()
        before = {*session.tracer.graph.nodes}
        deeds, looks, held = self._deeds(), self._looks(), self._held()
        nodes: list[fx.Node] = []
        yield nodes
        session.annotate()
        nodes += [node for node in session.tracer.graph.nodes if node not in before]
        held_now = self._held()
        if any(held_now[key] is not node for key, node in held.items() if key in held_now):
            raise Raises("a branch of torch.cond() writes to a tensor from outside", advice=_ADVICE)
        effects = any(ops.has_effect(node) for node in nodes if node.op == "call_function")
        if deeds != self._deeds():
            raise Raises("a branch of torch.cond() prints, draws from Python or writes to objects", advice=_ADVICE)
        if effects or looks != self._looks():
            raise _refuse("has a branch that draws, or looks at a value")

    def _deeds(self) -> tuple[int, ...]:
        recorder = self._session.recorder
        return recorder.num_deeds, len(recorder.outputs), len(recorder.drawers)

    def _looks(self) -> tuple[int, ...]:
        session = self._session
        return len(session.recorder.late.lines), len(session.questions.found), len(session.looks.requirements)

    def _held(self) -> dict[int, fx.Node]:
        """What is in tensors from outside just now."""
        known = [*self._operands, *self._outside, *self._inputs]
        known += [one.twin for one in self._inputs_of_step if isinstance(one.twin, torch.Tensor)]
        return {id(one): self._session.node_of(one) for one in known if self._session.has_node(one)}

    def _taken_out(self, nodes: list[fx.Node], outputs: list[torch.Tensor], *, is_forward: bool) -> _Cut:
        own = [node for node in nodes if node.op == "call_function"]
        members = {*own}
        inputs = [*dict.fromkeys(n for node in own for n in node.all_input_nodes if n not in members)]
        results = [(self._session.node_of(one), _torch.from_functional(one)) for one in outputs]
        inputs = [*dict.fromkeys([*inputs, *(node for node, _ in results if node not in members)])]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {**node.meta}
        for node in own:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].target = build.target_of(node)
        taken = {_torch.storage_key(n.meta["val"]) for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)}
        given: list[fx.Node] = []
        fakes: list[torch.Tensor] = []
        for node, fake in results:
            result = copies[node]
            key = _torch.storage_key(fake)
            if key in taken:
                if is_forward:
                    raise Raises(
                        "a branch of torch.cond() returns memory from outside, or twice the same", advice=_ADVICE
                    )
                result = graph.call_function(aten.clone.default, (result,))
                with _torch.outside_modes(), self._session.fake_mode:
                    fake = torch.clone(fake)
            taken.add(key)
            given.append(result)
            fakes.append(fake)
        graph.output(tuple(given))
        for node in reversed(own):
            node.graph.erase_node(node)
        return _Cut(_torch.graph_module(nn.Module(), graph), inputs, fakes)


class _Chosen(torch.autograd.Function):
    """The operator as autograd sees it: all outputs have a history, as in eager."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return call.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore
        if torch.is_grad_enabled():
            raise _refuse("is derived twice")
        return (None, *ctx.call.backward(ctx.saved_tensors, gradients))


def _as_accumulated(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter as it is kept: copied if it lies otherwise, as that of a sum does."""
    is_kept = tensor.is_leaf and tensor.is_contiguous() and not gradient.is_contiguous()
    return gradient.clone(memory_format=torch.contiguous_format) if is_kept else gradient


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = tuple(_torch.expression(size) for size in tensor.shape)
    return sizes, tuple(_torch.expression(one) for one in tensor.stride()), tensor.dtype, tensor.device


def _like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
