# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Symbols for sizes that values decide, and what a trace takes for granted of them. As private as `_torch`.

Torch's own symbols for such sizes have no value: code that has to branch on one takes the side of many rows, unasked.
These have the value of the call that is traced, so that the trace branches as eager does, and each branch is noted.

Seen in torch 2.13; the names are the same in 2.11 and 2.12.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_impls
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import ToFloat
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from wholestep._threads import only_where

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PACKING: tuple[Any, ...] = (torch._pack_padded_sequence, torch._pad_packed_sequence)
_PRETENDED = {0: 4, 1: 3}
_MANY = 3
"""What stands for a size of no row or one where the layout of many is wanted."""


class SizesEnv(ShapeEnv):
    """An environment of symbols, some of which stand for sizes that values decide.

    While it `is_quiet`, questions about those for which torch has an answer in case that it cannot know are answered
    so, and no branch is noted; `asked_quietly` has the symbols that were asked about.
    """

    def __init__(self, pretends: bool = False) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self._pretends = pretends
        self.of_values: dict[Any, int] = {}
        """Symbols, and what they are in this call."""
        self.is_quiet = False
        self.asked_quietly: set[Any] = set()
        self.num_asked = 0
        """How many of the assumptions each call is asked about."""

    def evaluate_expr(self, orig_expr: Any, *args: Any, **options: Any) -> Any:
        fallback = options.get("fallback_value")
        expression = None if fallback is None else self.replace(orig_expr)
        asked = set() if expression is None else expression.free_symbols & self.of_values.keys()
        if not asked or self._maybe_evaluate_static(expression) is not None:
            return super().evaluate_expr(orig_expr, *args, **options)
        if self.is_quiet:
            self.asked_quietly |= asked
            return sympy.true if fallback else sympy.false
        if fallback is False and self._is_no_single_row(expression) and _is_broadcasting():
            return sympy.false
        return super().evaluate_expr(orig_expr, *args, **options)

    def _is_no_single_row(self, expression: Any) -> bool:
        """Whether it is asked if a size is 1, which it is not in this call."""
        if not isinstance(expression, sympy.Eq) or expression.rhs != 1 or expression.lhs not in self.of_values:
            return False
        return self.hint_of(expression.lhs) != 1

    @contextlib.contextmanager
    def quiet(self, is_quiet: bool = True) -> Generator[None]:
        """Be quiet inside, or not."""
        before, self.is_quiet = self.is_quiet, is_quiet
        try:
            yield
        finally:
            self.is_quiet = before

    def new_size(self, size: int, largest: int | None) -> torch.SymInt:
        """A symbol for a size that is `size` in this call, and from 0 to `largest` in others.

        If it `pretends`, no row and one are traced as some: what holds for many mostly holds for them, too.
        """
        source = ConstantSource(f"size_of_values_{len(self.of_values)}")
        hint = _PRETENDED.get(size, size) if self._pretends else size
        hint = size if largest is not None and hint > largest else hint
        symbol: Any = self.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
        )
        self.var_to_range[symbol] = ValueRanges(0, int_oo if largest is None else largest)
        self.of_values[symbol] = size
        made = self.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    def hint_of(self, symbol: Any) -> int:
        """What a symbol is in the call that is traced."""
        known: dict[Any, Any] = vars(self).get("backed_var_to_val") or vars(self)["var_to_val"]  # renamed in 2.12
        return int(known[symbol])

    def forget(self, symbols: Iterable[Any]) -> None:
        """Symbols without a value that torch has just made are not going to be used."""
        gone = {*symbols}
        self.pending_fresh_unbacked_symbols[:] = [one for one in self.pending_fresh_unbacked_symbols if one not in gone]

    def may_be(self, symbol: Any, size: int) -> bool:
        """Whether a symbol can have some value, by all that has been noted."""
        return self._maybe_evaluate_static(sympy.Eq(self.replace(symbol), size)) is not sympy.false

    def require_class(self, symbol: Any) -> None:
        """Note whether a size is 0, 1, or more."""
        for size in (0, 1):
            expression = sympy.Eq(self.replace(symbol), size)
            if expression not in (sympy.true, sympy.false) and self.evaluate_expr(expression):
                return

    def holds_now(self) -> bool:
        """Whether all that has been noted is true of this call."""

        def value(symbol: Any) -> int:
            return self.of_values[symbol] if symbol in self.of_values else self.hint_of(symbol)

        noted = self.assumptions()
        symbols = [*{symbol for one in noted for symbol in one.symbols}]
        return all(one.compiled(symbols)(*map(value, symbols)) for one in noted)

    def assumptions(self) -> list[Assumption]:
        """All that has been noted about sizes that values decide."""
        noted = [guard.expr for guard in self.guards]
        noted += [sympy.Eq(symbol, value) for symbol, value in self.replacements.items()]
        return [Assumption(expression) for expression in noted if expression.free_symbols & self.of_values.keys()]


@dataclass(frozen=True)
class Assumption:
    """A truth about sizes, as an expression of their symbols."""

    expression: Any

    @property
    def symbols(self) -> frozenset[Any]:
        return frozenset(self.expression.free_symbols)

    def __str__(self) -> str:
        return str(self.expression)

    def compiled(self, order: Iterable[Any]) -> Callable[..., Any]:
        """A function of the values of some symbols."""
        names = ", ".join(str(symbol) for symbol in order)
        text = PythonPrinter().doprint(self.expression)
        return eval(f"lambda {names}: {text}", {"math": math, "torch": torch})


_BROADCASTS = ("InputMetadata::maybe_reduce(", "at::infer_size")


def _is_broadcasting() -> bool:
    """Whether torch's C++ compares two shapes, to broadcast one to the other or to sum a gradient.

    That asks whether a size is 1, and if not, requires that it is equal to its counterpart. If it is, one row needs
    nothing else than many: to have said no was right for that, too.
    """
    for line in torch._C._get_cpp_backtrace(0, _MAX_FRAMES).splitlines():
        if any(name in line for name in _BROADCASTS):
            return True
        if "torch::autograd::Engine::" in line or "torch::autograd::VariableType" in line:
            return False
    return False


_MAX_FRAMES = 64


def depends_on_values(value: Any) -> bool:
    """Whether a fake tensor or a number of a graph has sizes that values decide."""
    if isinstance(value, (list, tuple)):
        return any(map(depends_on_values, value))
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat)) and _has_symbols_of_values(size) for size in sizes)


def _has_symbols_of_values(size: Any) -> bool:
    env = size.node.shape_env
    return isinstance(env, SizesEnv) and bool(size.node.expr.free_symbols & env.of_values.keys())


def unasked(env: ShapeEnv | None) -> list[Assumption]:
    """What has been noted after the trace, so that no call is asked about it."""
    return env.assumptions()[env.num_asked :] if isinstance(env, SizesEnv) else []


def unknown_sizes(tensor: torch.Tensor) -> dict[int, Any]:
    """Dimensions of a fake tensor whose size torch has no value for, each with its symbol."""
    found = {dim: size.node._expr for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)}
    return {dim: expression for dim, expression in found.items() if free_unbacked_symbols(expression)}


def with_sizes(tensor: torch.Tensor, sizes: Mapping[Any, Any]) -> torch.Tensor:
    """A tensor like another one, in which some symbols are other sizes."""

    def exchanged(value: Any) -> Any:
        return sizes.get(value.node._expr, value) if isinstance(value, torch.SymInt) else value

    shape, stride = map(exchanged, tensor.shape), map(exchanged, tensor.stride())
    return torch.empty_strided([*shape], [*stride], dtype=tensor.dtype, device=tensor.device)


def symbol_of(size: torch.SymInt) -> Any:
    """The symbol that a size was made with, whatever has been found out about it since."""
    return size.node._expr


def expression_of(value: Any) -> Any:
    """What a size is by now: an expression of symbols, or a number."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether sizes or strides of a tensor are no numbers, as far as is known by now."""
    return any(expression_of(value).free_symbols for value in (*tensor.shape, *tensor.stride()))


def value_at(env: SizesEnv, value: Any, sizes: Mapping[Any, int]) -> int:
    """What a size is for some values of symbols, all others as they are in this call."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = expression_of(value)
    known = {symbol: sizes.get(symbol, env.hint_of(symbol)) for symbol in expression.free_symbols}
    return int(expression.xreplace({symbol: sympy.Integer(size) for symbol, size in known.items()}))


def typical(env: SizesEnv, symbol: Any) -> int:
    """A value of a size that stands for many rows."""
    hint = env.hint_of(symbol)
    return hint if hint > 1 else _MANY


def _nothing(*_: Any, **__: Any) -> None:
    """What is known of a node's memory."""


@contextlib.contextmanager
def no_bookkeeping(env: ShapeEnv | None) -> Generator[None]:
    """Do without what torch writes down of the memory of each node, which nobody here reads, and what it would ask.

    Where values decide sizes, no branch is noted either of how a wrapper is laid out.
    """
    thread, original = threading.get_ident(), proxy_tensor._extract_tensor_metadata
    chosen = only_where(lambda: threading.get_ident() == thread, _nothing, original)
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", chosen),
        _wrapped_quietly(env) if isinstance(env, SizesEnv) else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _wrapped_quietly(env: SizesEnv) -> Generator[None]:
    original = FunctionalTensor.__new__

    def wrapped(cls: type, *args: Any, **options: Any) -> Any:
        with env.quiet():
            return original(cls, *args, **options)

    with mock.patch.object(FunctionalTensor, "__new__", wrapped):
        yield


@contextlib.contextmanager
def _no_circles() -> Generator[None]:
    """Let no size be computed from itself, as in `c = a + b; a = c - b` of two sizes that are remembered.

    The second of such is made of what its symbols stand for, as torch does for sizes that nobody has computed.
    """
    original = proxy_tensor._sym_register
    made_of: dict[Any, list[Any]] = {}

    def is_made_of(node: Any, wanted: Any) -> bool:
        pending, seen = [node], set[Any]()
        while pending:
            current = pending.pop()
            if current is wanted:
                return True
            if current not in seen:
                seen.add(current)
                pending += made_of.get(current, ())
        return False

    def register(tracer: Any, func: Any, args: Any, out: Any) -> None:
        if not isinstance(out, _SYMBOLIC):
            return
        nodes = [value.node for value in tree_leaves(args) if isinstance(value, _SYMBOLIC)]
        is_known = out.node.expr in getattr(tracer, "sympy_expr_tracker", ())  # a bare symbol
        if is_known or any(is_made_of(node, out.node) for node in nodes):
            return
        made_of.setdefault(out.node, nodes)
        original(tracer, func, args, out)

    with mock.patch.object(proxy_tensor, "_sym_register", register):
        yield


_DIVISIONS = ("truediv", "int_truediv", "float_truediv", "floordiv", "int_floordiv", "mod", "python_mod")
_SIZE_METHODS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min", "mod", "int_floordiv")


def _noting_zero(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A division of sizes that values decide is only traced for what is not 0: Python raises there, C++ does not."""

    def divide(self: Any, other: Any) -> Any:
        env = self.shape_env
        if isinstance(env, SizesEnv) and other.expr.free_symbols & env.of_values.keys():
            with env.quiet(False):
                env.evaluate_expr(sympy.Ne(_as_integer(other.expr), 0))
        return original(self, other)

    return divide


def _as_integer(expression: Any) -> Any:
    return expression.args[0] if isinstance(expression, ToFloat) else expression


@contextlib.contextmanager
def remembered_arithmetic() -> Generator[None]:
    """Compute each expression of symbolic integers once while tracing.

    Every tensor of a symbolic shape recomputes its element count, strides and contiguity, symbol by symbol: tens of
    thousands of times the same few products. Floats are left alone: equal expressions may round differently.
    """

    def remember(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        known: dict[tuple[Any, Any], Any] = {}

        def method(self: Any, other: Any) -> Any:
            if self.pytype is not int or other.pytype is not int:
                return original(self, other)
            key = (self._expr, other._expr)
            if key not in known:
                known[key] = original(self, other)
            return known[key]

        return method

    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_circles())
        for name in _DIVISIONS:
            if hasattr(SymNode, f"_{name}"):
                stack.enter_context(mock.patch.object(SymNode, f"_{name}", _noting_zero(getattr(SymNode, f"_{name}"))))
        for name in _SIZE_METHODS:
            original = getattr(SymNode, f"_{name}")
            stack.enter_context(mock.patch.object(SymNode, f"_{name}", remember(original)))
        yield


@functools.cache
def gives_tensors(target: Any) -> bool:
    """Whether an operator has a kernel of its own (it is not made of others, which it chooses) that makes tensors."""
    if not isinstance(target, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(target.name()):
        return False
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    kinds = {str(returned.type) for returned in target._schema.returns}
    return not is_composite and bool(kinds) and kinds <= {"Tensor", "Tensor[]"}


_OPS = torch.library.Library("wholestep", "FRAGMENT")
_OPS.define("ctc_states(Tensor target_lengths) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
_OPS.impl(
    "ctc_states",
    lambda lengths: torch.empty(2 * int(lengths.max()) + 1 if lengths.numel() else 1),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "wholestep::ctc_states", lambda lengths: torch.empty(torch.library.get_ctx().new_dynamic_size()), lib=_OPS
)


# Torch has no fake kernels of these: as many states as the longest of the targets has, a blank around each label.
@fake_impls.register_op_impl([torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss.default])
def _ctc_loss(
    mode: Any, _func: Any, log_probs: Any, _targets: Any, _inputs: Any, lengths: Any, *_: Any, **__: Any
) -> Any:
    with mode:
        is_tensor = isinstance(lengths, torch.Tensor)
        states = torch.ops.wholestep.ctc_states(lengths).shape[0] if is_tensor else 2 * max(lengths, default=0) + 1
        num_steps, num_examples, _ = log_probs.shape
        return log_probs.new_empty(num_examples), log_probs.new_empty(num_examples, num_steps, states)


@fake_impls.register_op_impl([torch.ops.aten._ctc_loss_backward.Tensor, torch.ops.aten._ctc_loss_backward.default])
def _ctc_loss_backward(mode: Any, _func: Any, _grad: Any, log_probs: Any, *_: Any, **__: Any) -> Any:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def other_size(size: Any, number: int) -> int:
    """What a size would be if the symbols of its trace had other values: those of this call for 0, larger ones else."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    env = size.node.shape_env
    known: dict[Any, Any] = vars(env).get("backed_var_to_val") or vars(env)["var_to_val"]  # renamed in 2.12
    values = {symbol: int(value) + number * (place + 1) for place, (symbol, value) in enumerate(known.items())}
    return int(size.node.expr.xreplace(values))


_uses_mkldnn: list[bool] = []
"""By trace in progress: whether eager uses oneDNN."""


@contextlib.contextmanager
def batch_size_choices(enabled: bool) -> Generator[None]:
    """Switch convolution backends that are chosen by batch size (torch.backends.mkldnn.flags warns on CPU builds)."""
    previous = torch._C._get_mkldnn_enabled()
    _uses_mkldnn.append(previous)
    with torch.backends.nnpack.flags(enabled=enabled):
        torch._C._set_mkldnn_enabled(previous and enabled)
        try:
            yield
        finally:
            _uses_mkldnn.pop()
            torch._C._set_mkldnn_enabled(previous)


def call_with_fused_kernels(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a recurrent layer's function: unlike convolutions, these are traced as the kernels that are chosen now."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before or any(_uses_mkldnn[-1:]))
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(before)
