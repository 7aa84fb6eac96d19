"""What stands between the user's code and torch while a step is traced.

Every torch function the step calls passes here first. Real tensors it still holds (closures, `nn.LSTM`'s flat weights)
are exchanged for their traced twins, values that exist only at run time are refused with the user's line, and the nodes
each call adds are given their provenance.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from wholestep import _autograd_torch, _branches_torch, _recording_torch, _sizes_torch, _torch
from wholestep._threads import only_where
from wholestep.capture import conditionals, fused, indexing, own_draws, remedies, source
from wholestep.capture.record import EarlyArray, LateArray, Number, drawing, sequences
from wholestep.capture.session import Reassigned, Session
from wholestep.capture.trail import listening
from wholestep.errors import CaptureError
from wholestep.graph import Phase

_READS_A_VALUE = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "an array of a tensor (np.array, np.asarray)",
    torch.Tensor.__bool__: "an `if`, `while`, `and` or bool() on a tensor",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__index__: "use as an index",
    torch.Tensor.__complex__: "complex()",
    torch.Tensor.__format__: "formatting or printing a tensor",
    torch.Tensor.__repr__: "printing a tensor",
    torch.is_nonzero: "torch.is_nonzero()",
}
_ON_ONE_NUMBER: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.item: lambda number: number,
    torch.Tensor.__index__: operator.index,
    torch.is_nonzero: bool,
}
# More than a number: an array, or text.
_SHOWS_A_VALUE = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__, torch.Tensor.__repr__)
_NO_SYMBOLIC_KERNEL = (
    *(F.pad, torch.constant_pad_nd, F.linear),
    *(F.cosine_embedding_loss, F.margin_ranking_loss, F.hinge_embedding_loss, F.cosine_similarity),
)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_DIFFERENCES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.sub: torch.add,
    torch.subtract: torch.add,
    torch.Tensor.sub: torch.Tensor.add,
    torch.Tensor.sub_: torch.Tensor.add_,
    torch.Tensor.subtract: torch.Tensor.add,
    torch.Tensor.subtract_: torch.Tensor.add_,
}
_OUT_OF_PLACE = (torch.bernoulli, torch.Tensor.bernoulli)
_OTHERS_WAIT_S = 600.0
_GRAD_GET: Any = vars(torch.Tensor.__mro__[1])["grad"].__get__
_GRAD_SET: Any = vars(torch.Tensor.__mro__[1])["grad"].__set__
_DATA_SET: Any = vars(torch.Tensor.__mro__[1])["data"].__set__


class Interposer(TorchFunctionMode):
    """The torch function mode that a step is traced under."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        session = self.session
        if not (
            _torch.is_functionalising() or func in _branches_torch.BRANCHES
        ):  # torch looks at tensors inside an operator that C++ has called
            return func(*args, **(kwargs or {}))
        session.recorder.whole_calls.refuse_inside()
        drawing.require_more_than_draws(session.recorder)
        line = source.current_line()
        session.annotate()
        if func in _READS_A_VALUE:
            args = self._with_twins(args)  # a tensor from outside may be met here for the first time
        if session.phase is not Phase.OPTIMIZER and _is_of_one_number(func, args[0] if args else None):
            number = session.looks.number(args[0])
            if number is not None:
                return _ON_ONE_NUMBER[func](number) if func in _ON_ONE_NUMBER else format(number, args[1])
        if func is torch.Tensor.numpy and _may_be_late(args[0]):
            return session.looks.array(args[0])
        if func in _READS_A_VALUE and session.phase is not Phase.OPTIMIZER and not _is_known(session, func, args[0]):
            raise CaptureError(
                f"{source.what_reads(_READS_A_VALUE[func])} needs a value that is only known when the step runs",
                location=source.current_location(),
                advice=remedies.for_values(),
            )
        generator = own_draws.of_call(args, kwargs)
        if generator is not None:
            return own_draws.drawn(session, generator, func, args, kwargs or {})
        if func in indexing.BY_PLACES:
            args = indexing.with_drawn_places(session.recorder, args)
        numbers = [*_numbers_in((*args, *(kwargs or {}).values()))]
        args = self._with_twins(args)
        kwargs = cast(dict[str, Any], self._with_twins(kwargs or {}))
        if func == _GRAD_GET:
            session.note_grad_read(args[0])
        if func == _GRAD_SET:
            session.note_grad_cleared([args[0]])
        if func is torch.Tensor.item and (number := session.number_in_state(args[0])) is not None:
            return number
        before = _layout_of_input(session, func, args)
        result = self._call(func, args, kwargs) if not numbers else self._call_with_numbers(func, args, kwargs, numbers)
        if before != _layout_of_input(session, func, args):
            session.recorder.refuse(
                f"changes the shape or the layout of a tensor from outside in place ({func.__name__})",
                "Use what gives another tensor, as in x = x.unsqueeze(0)",
            )
        session.annotate(line, out_of_place=func in _OUT_OF_PLACE)
        return result

    def _call_with_numbers(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], numbers: list[Any]
    ) -> Any:
        """A call with Python numbers that may change; if torch must know one, the step is traced again with it."""
        with self.session.recorder.symbolic(numbers):
            return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _recording_torch.NESTED:
            self.session.recorder.refuse(
                "makes a nested tensor, which cannot be traced",
                "Make the layer with enable_nested_tensor=False (torch.nn.TransformerEncoder)",
            )
        if func in _sizes_torch.PACKING:
            self.session.recorder.refuse(
                "packs sequences of several lengths, whose sizes values decide",
                "Give the layer padded sequences and mask what it returns, or compile with "
                'on_refusal="eager", which runs it as it is',
            )
        if func in fused.FUNCTIONS:
            return fused.call(self.session, func, args, kwargs)
        if indexing.fills_where(func, args):
            return indexing.fill_where(*args)
        if func in _branches_torch.BRANCHES:
            with self:
                return _branches_torch.BRANCHES[func](*args, **kwargs)
        if func is torch.Tensor.tolist:  # of a tensor from outside, which is met here
            return args[0].tolist()
        if func in _branches_torch.SPLITS:
            args, kwargs = _branches_torch.with_plain_places(args, kwargs)
        if func is torch.autograd.grad:
            outputs = args[0] if args else kwargs["outputs"]
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            _autograd_torch.use_derivatives_of_eager([output.grad_fn for output in outputs])
        if func in _DIFFERENCES and isinstance(kwargs.get("alpha"), (torch.SymFloat, torch.SymInt)):
            # As torch's kernels do it; while it is traced, a difference asks whether the factor is 1.
            return _DIFFERENCES[func](*args, **{**kwargs, "alpha": -kwargs["alpha"]})
        if func in (torch.tensor, torch.as_tensor) and args and _has_symbols(args[0]):
            return _tensor_of_symbols(*args, **kwargs)
        if func is F.ctc_loss:
            return _ctc_loss(*args, **kwargs)
        if func == _DATA_SET:  # each look-up makes a new wrapper object
            return _assign_data(self.session, *args)
        if self.session.has_symbolic_sizes and func in _NO_SYMBOLIC_KERNEL:
            return _torch.call_with_symbolic_sizes(func, args, kwargs)
        if self.session.has_symbolic_sizes and func in _RECURRENT:
            if func is torch.lstm and _has_symbolic_size(args):
                self.session.recorder.refuse(
                    "gives an LSTM a tensor whose size is decided by values",
                    "Give it rows of a fixed number: mask its result instead",
                )
            return _sizes_torch.call_with_fused_kernels(func, args, kwargs)
        self.session.calling = func
        self.session.fake_mode.draws_out_of_place = func in _OUT_OF_PLACE
        try:
            return func(*args, **kwargs)
        finally:
            self.session.fake_mode.draws_out_of_place = False

    def _with_twins(self, value: Any) -> Any:
        """`value` with every real tensor in it exchanged for its traced twin."""
        if type(value) is Number:
            return self.session.symbol(value)
        if type(value) is LateArray:
            value.refuse()
        if type(value) is EarlyArray:
            value.deny("gives to torch")
        if isinstance(value, torch.Tensor):
            return value if _torch.is_traced(value) else self.session.adopt(value)
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple([self._with_twins(item) for item in value])
        if type(value) is list:
            return [self._with_twins(item) for item in value]
        if type(value) is dict:
            return {key: self._with_twins(item) for key, item in value.items()}
        return value


def _has_symbolic_size(args: Iterable[Any]) -> bool:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _is_of_one_number(func: Callable[..., Any], tensor: Any) -> bool:
    """Whether `tensor.item()` is called, or text made of it (`f"{tensor:.2f}"`), which torch does for no parameter."""
    if func is torch.Tensor.__format__:
        return tensor.dim() == 0 and not isinstance(tensor, nn.Parameter)
    return func in _ON_ONE_NUMBER


def _numbers_in(values: Iterable[Any]) -> Iterator[Number]:
    """The numbers among some values and in lists and tuples of them (`size=(n, n)`)."""
    for value in values:
        if type(value) is Number:
            yield value
        elif type(value) in (list, tuple):
            yield from _numbers_in(value)


def _layout_of_input(session: Session, func: Any, args: tuple[Any, ...]) -> Any:
    """How a tensor lies that a function may change in place; None for the step's own."""
    if not args or not str(getattr(func, "__name__", "")).endswith("_") or session.recorder.twins.of(args[0]) is None:
        return None
    return tuple(args[0].shape), args[0].stride()


def _has_symbols(data: Any) -> bool:
    """Whether a tensor is to be made of learning rates, counts or other numbers that change, or of a row of some."""
    row = data if type(data) in (list, tuple) else [data]
    numbers = all(type(value) in (int, float, torch.SymInt, torch.SymFloat) for value in row)
    return numbers and any(type(value) in (torch.SymInt, torch.SymFloat) for value in row)


def _tensor_of_symbols(
    data: Any, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False, **_: Any
) -> torch.Tensor:
    """`torch.tensor(data)`, which would ask for the values of symbols."""
    row: Sequence[Any] = data if type(data) in (list, tuple) else [data]
    if dtype is None:
        are_floats = any(type(value) in (float, torch.SymFloat) for value in row)
        dtype = torch.get_default_dtype() if are_floats else torch.int64
    made = [torch.scalar_tensor(value, dtype=dtype, device=device) for value in row]
    result = made[0] if row is not data else torch.stack(made)
    return result.requires_grad_() if requires_grad else result


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`F.ctc_loss`, which puts lengths that are plain numbers into memory: nothing has any while it is traced."""
    if reduction != "mean" or isinstance(target_lengths, torch.Tensor):
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    losses = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)
    lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp_min(1)).mean()


def _tolist(session: Session) -> Callable[[torch.Tensor], Any]:
    """`tensor.tolist()` by questions that can be recorded; torch's own for traced tensors looks past the trace."""

    def tolist(tensor: torch.Tensor) -> Any:
        listed = session.looks.list_of(tensor)
        if listed is not None or tensor.dim() == 0:
            return tensor.item() if listed is None else listed
        return [tolist(item) for item in tensor.unbind()]

    return tolist


def _assign_data(session: Session, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`: from here on, whatever is written to one of them is seen in the other."""
    if _form(tensor) != _form(value):
        raise CaptureError(
            f"the step gives a tensor of shape {list(tensor.shape)} other data of shape {list(value.shape)}, or of "
            "another dtype, device or order in memory",
            location=source.current_location(),
            advice="Parameters must keep their form from step to step",
        )
    known = session.reassigned.get(id(tensor))
    memory = _torch.storage_key(tensor) if known is None else known.memory
    session.reassigned[id(tensor)] = Reassigned(tensor, memory, source.current_location())
    _torch.take_data(tensor, value)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What data must have in common; the stride of a dimension of size 1 says nothing."""
    strides = tuple([stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1])
    return tensor.shape, strides, tensor.dtype, tensor.device


def _may_be_late(tensor: torch.Tensor) -> bool:
    """Whether an array of a tensor can be made after the graph has run: where eager makes one."""
    is_plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
    return _torch.is_traced(tensor) and is_plain and not tensor.requires_grad and _has_arrays(tensor.dtype)


@functools.cache
def _has_arrays(dtype: torch.dtype) -> bool:
    """Whether NumPy knows a dtype: it has no bfloat16."""
    with _torch.outside_modes():
        try:
            torch.empty(0, dtype=dtype).numpy()
        except TypeError:
            return False
    return True


def _is_known(session: Session, func: Callable[..., Any], value: Any) -> bool:
    """Whether a value can be looked at: a constant's, or one that the arguments of the call decide."""
    if not isinstance(value, torch.Tensor):
        return False
    return _torch.is_constant(value) or (func not in _SHOWS_A_VALUE and session.can_answer(value))


@contextlib.contextmanager
def others_waiting(session: Session, module_names: Container[int]) -> Generator[None]:
    """While models hold twins, let other threads that call one of them wait until they hold their own tensors."""

    def wait(module: nn.Module, _args: Any) -> None:
        if session.is_here() or id(module) not in module_names or session.over.wait(_OTHERS_WAIT_S):
            return
        raise CaptureError(
            f"a thread calls a {type(module).__name__} that another thread has been capturing a step of for "
            f"{_OTHERS_WAIT_S:.0f} s",
            advice="A step calls its models in the thread that it is called in",
        )

    handle = register_module_forward_pre_hook(wait)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def interposed(session: Session, module_names: dict[int, str]) -> Generator[None]:
    """All hooks and stand-ins that a trace needs, for its duration. Other threads are left with torch as it is."""
    with (
        listening(session),
        _recording_torch.traced_generator(_refuse_seeding, session.is_here),
        _recording_torch.no_other_trace(_refuse_traces, session.is_here),
        _torch.compiling_flag(not session.questions.is_answering),
        _torch.transparent_checkpoints(session.in_checkpoint_region, session.is_here),
        _replaced(session, torch.autograd, "backward", _traced_backward(session)),
        _replaced(session, *_branches_torch.check_with(Number)),
        _replaced(session, Optimizer, "zero_grad", _traced_zero_grad(session, Optimizer.zero_grad)),
        _replaced(session, nn.Module, "zero_grad", _traced_zero_grad(session, nn.Module.zero_grad)),
        _replaced(session, ReduceLROnPlateau, "step", _refuse_scheduler),
        _recording_torch.fast_paths(session.is_here),
        _replaced(session, torch.inference_mode, "__enter__", _enter_inference_mode(torch.inference_mode.__enter__)),
        _replaced(session, saved_tensors_hooks, "__enter__", _enter_saved_tensors_hooks),
        _replaced(session, saved_tensors_hooks, "__exit__", _nothing),
        mock.patch.object(_torch.FunctionalTensor, "tolist", _tolist(session)),
        _replaced(session, record_function, "__enter__", _nothing),
        _replaced(session, record_function, "__exit__", _nothing),
        contextlib.ExitStack() as stack,
    ):
        for handle in (*_module_hooks(session, module_names), *_optimizer_hooks(session, stack)):
            stack.callback(handle.remove)
        for lifted in session.lifted.values():
            if isinstance(lifted.real, torch.Tensor) and lifted.real.requires_grad:
                tell = session.recorder.told
                for handle in _recording_torch.carry_hooks(lifted.real, lifted.twin, lambda: Interposer(session), tell):
                    stack.callback(handle.remove)
        stack.enter_context(_replaced(session, torch.Tensor, "__hash__", _hash(session)))
        conditionals.follow(session, lambda: Interposer(session))
        stack.enter_context(Interposer(session))
        yield


def _replaced(
    session: Session, owner: Any, name: str, stand_in: Callable[..., Any]
) -> contextlib.AbstractContextManager[Any]:
    """Let a function of torch be another one in the thread that traces."""
    return mock.patch.object(owner, name, only_where(session.is_here, stand_in, getattr(owner, name)))


def _nothing(*_: Any) -> None:
    """What is left out of a trace."""


def _traced_backward(session: Session) -> Callable[..., None]:
    """`torch.autograd.backward`, tagged as backward, with forward twins linked and leaves checked."""
    original = torch.autograd.backward

    def backward(tensors: torch.Tensor | Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        roots = [tensor.grad_fn for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
        leaves = list(_autograd_torch.accumulate_grad_variables(roots))
        for leaf in leaves:
            if not _torch.is_traced(leaf):
                session.adopt(leaf)
        session.own_gradients(leaves)
        _autograd_torch.use_derivatives_of_eager(roots)
        _autograd_torch.link_backward([root for root in roots if root is not None])
        with session.in_phase(Phase.BACKWARD):
            original(tensors, *args, **kwargs)
        session.note_gradients()

    return backward


def _traced_zero_grad(session: Session, original: Callable[..., None]) -> Callable[..., None]:
    """`zero_grad`, noting that the gradients it clears were not looked at before."""

    def zero_grad(owner: Optimizer | nn.Module, set_to_none: bool = True) -> None:
        if isinstance(owner, Optimizer):
            parameters = [p for group in owner.param_groups for p in group["params"]]
        else:
            parameters = list(owner.parameters())
        with session.clearing_gradients(parameters if set_to_none else []):
            original(owner, set_to_none)

    return zero_grad


def _hash(session: Session) -> Callable[[torch.Tensor], int]:
    """The hash of a tensor; the same one may have been drawn twice, which two that stand for it do not tell."""

    def hash_of(tensor: torch.Tensor) -> int:
        sequences.refuse_identity(session.recorder, tensor)
        return id(tensor)

    return hash_of


def _refuse_seeding(call: str) -> None:
    raise CaptureError(
        f"the step calls {call}",
        location=source.current_location(),
        advice="Use torch.manual_seed, torch.get_rng_state and torch.set_rng_state, or seed outside the step",
    )


def _refuse_traces() -> None:
    raise CaptureError(
        "the step makes a graph of a function itself (make_fx, torch.func.linearize)",
        location=source.current_location(),
        advice="Use torch.func.jvp in place of linearize; make graphs outside the step",
    )


def _refuse_scheduler(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "a learning rate scheduler that looks at a value is stepped inside the train step",
        location=source.current_location(),
        advice="Return the value and call scheduler.step(value) after the compiled step",
    )


def _enter_inference_mode(original: Callable[..., None]) -> Callable[..., None]:
    """Inference mode computes what `no_grad` does; what a trace makes is no memory that could be told apart."""

    def enter(block: Any) -> None:
        if not block.mode:
            return original(block)
        block._inference_mode_context = torch.no_grad()
        return block._inference_mode_context.__enter__()

    return enter


def _enter_saved_tensors_hooks(hooks: saved_tensors_hooks) -> None:
    """Keeping saved tensors on the CPU changes no value and is left out; other hooks may, and are refused."""
    if isinstance(hooks, save_on_cpu):
        return
    raise CaptureError(
        "the step changes what autograd saves (torch.autograd.graph.saved_tensors_hooks)",
        location=source.current_location(),
        advice="What to keep for the backward is decided on the graph; leave the hooks out",
    )


def _module_hooks(session: Session, names: dict[int, str]) -> list[Any]:
    """Keep the path of the module whose forward is running."""

    def enter(module: nn.Module, _args: Any) -> None:
        if session.is_here():
            session.enter_module(names.get(id(module), type(module).__name__), is_known=id(module) in names)

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        if session.is_here():
            session.leave_module()

    return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]


def _as_forward(session: Session, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure of `optimizer.step(closure)`: it is the forward and backward of the step."""

    def run() -> Any:
        with session.in_phase(Phase.FORWARD), _torch.compiling_flag(not session.questions.is_answering):
            result = closure()
        session.note_optimizer_step(optimizer)
        return result

    return run


def _optimizer_hooks(session: Session, stack: contextlib.ExitStack) -> list[Any]:
    """Tag `optimizer.step()`; inside it eager code paths are taken and reading counters is allowed."""
    scopes: list[contextlib.ExitStack] = []
    states_read: list[set[int]] = []

    def enter(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not session.is_here():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            session.note_optimizer_step(optimizer)
        session.optimizer = optimizer
        scope = contextlib.ExitStack()
        scope.enter_context(session.in_phase(Phase.OPTIMIZER))
        states_read.append({*session.recorder.states_read})  # it may look itself
        scope.enter_context(_torch.compiling_flag(False))
        scopes.append(scope)
        return None if closure is None else ((optimizer, _as_forward(session, optimizer, closure)), {})

    def leave(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not session.is_here():
            return
        scopes.pop().close()
        session.recorder.states_read = states_read.pop()
        session.optimizer = None

    def abandon() -> None:
        while scopes:
            scopes.pop().close()

    stack.callback(abandon)
    return [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
