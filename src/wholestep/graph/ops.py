"""What an operator does to its arguments, read off its schema: views, randomness, effects, in-place twins."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph.in_layout import InLayout

aten = torch.ops.aten

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

# Alias their input although their schema does not say so, or say so only for autograd's sake.
_UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default, aten.lift_fresh.default, aten.detach.default})

# Write to running statistics although their schema does not say so: a second run would count a batch twice.
_UNDECLARED_WRITERS = frozenset(
    {"cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm", "batch_norm_update_stats"}
    | {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
)

# Operators of other libraries may do more than their schema says: they are kept and never merged.
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "wholestep"})

# Symbolic arithmetic: plain Python on numbers, free of effects.
_PYTHON_MODULES = frozenset({"_operator", "math", "builtins", "torch"})


# In-place twins whose overload is called something else.
_RENAMED_TWINS: dict[Any, Any] = {
    _torch.BERNOULLI_LIKE: aten.bernoulli_.float,
    ALL_REDUCE: torch.ops._c10d_functional.all_reduce_.default,
}


def is_op(node: fx.Node) -> bool:
    """Whether a node calls an aten (or custom) operator, as opposed to Python arithmetic or graph plumbing."""
    return node.op == "call_function" and _torch.is_op_overload(node.target)


@functools.cache
def is_view(target: Any) -> bool:
    """Whether the operator's result aliases an argument that it does not write to."""
    if not _torch.is_op_overload(target):
        return False
    return target in _UNDECLARED_VIEWS or any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in _torch.schema(target).returns
    )


@functools.cache
def shares_memory(target: Any) -> bool:
    """Whether the operator's result lives in the memory of its first tensor argument: a view, or a finished wait."""
    return is_view(target) or target is WAIT


@functools.cache
def is_random(target: Any) -> bool:
    """Whether the operator draws from a random number generator; its place in the stream must not change."""
    return _torch.is_op_overload(target) and torch.Tag.nondeterministic_seeded in _torch.tags(target)


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers, as opposed to an operator that could: attention without dropout does not."""
    return draws_with(node.target, node.args, node.kwargs)


def draws_with(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The same, of an operator and its arguments."""
    if not is_random(target):
        return False
    names = [argument.name for argument in _torch.schema(target).arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


@functools.cache
def is_collective(target: Any) -> bool:
    """Whether the operator talks to other ranks (or waits for them)."""
    return _torch.is_op_overload(target) and "c10d" in _torch.namespace(target)


@functools.cache
def written_arguments(target: Any) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes to."""
    if not _torch.is_op_overload(target):
        return ()
    return tuple(index for index, argument in enumerate(_torch.schema(target).arguments) if _torch.is_written(argument))


@functools.cache
def is_pure(target: Any) -> bool:
    """Whether a call may be dropped when unused and merged with an equal one."""
    if not _torch.is_op_overload(target):
        is_ours = getattr(target, "is_pure_call", False)
        return is_ours or getattr(target, "__module__", None) in _PYTHON_MODULES
    if _torch.namespace(target) not in _KNOWN_NAMESPACES or _torch.packet_name(target) in _UNDECLARED_WRITERS:
        return False
    return not (is_random(target) or written_arguments(target) or _torch.has_side_effect(target))


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay where it is relative to other such nodes: randomness, collectives, writes, effects."""
    return node.op == "call_function" and not is_pure(node.target)


def is_number_of_tensors(node: fx.Node) -> bool:
    """Whether Python makes a number, or a tensor, of what tensors hold (`x.item() * 2`, for torch to compute with)."""
    is_made = node.op == "call_function" and not is_op(node)
    is_number = is_made and isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymInt))
    is_number |= is_made and getattr(node.target, "is_python", False)
    return is_number and any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)


def may_raise_in_python(nodes: Iterable[fx.Node]) -> bool:
    """Whether one of some nodes computes a number in Python in a way that raises for some values (`1 / x.item()`)."""
    return any(getattr(node.target, "may_raise", False) for node in nodes)


@functools.cache
def in_place_twin(target: Any) -> Callable[..., Any] | None:
    """The operator that computes the same into its own arguments: `add.Tensor` -> `add_.Tensor`, or None.

    Only twins with the same arguments and no further write count, so that swapping the target is the whole rewrite.
    """
    if isinstance(target, InLayout):
        return target.in_place
    if not _torch.is_op_overload(target) or written_arguments(target) or is_view(target):
        return None
    twin = _RENAMED_TWINS.get(target)
    if twin is None and is_collective(target):
        return None
    twin = twin or _torch.overload_by_name(_torch.packet_name(target) + "_", _torch.overload_name(target))
    if twin is None or not written_arguments(twin):
        return None
    functional, in_place = _torch.schema(target), _torch.schema(twin)
    names = [argument.name for argument in functional.arguments]
    return twin if names == [argument.name for argument in in_place.arguments] else None


def getitem_index(node: fx.Node) -> int | None:
    """The index of a `getitem` node, None for any other node."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    index = node.args[1]
    return index if isinstance(index, int) else None


def with_plain_numbers(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that fake tensors can be called with: some number where an operator wants a plain one.

    Options of fused optimizers may be inputs of the graph; no fake value depends on them.
    """
    if not _torch.is_op_overload(target):
        return args, kwargs
    plain = {argument.name for argument in _torch.schema(target).arguments if str(argument.type) == "float"}
    names = [argument.name for argument in _torch.schema(target).arguments]

    def exchanged(name: str, value: Any) -> Any:
        return 0.5 if name in plain and isinstance(value, torch.SymFloat) else value

    return (
        tuple(exchanged(name, value) for name, value in zip(names, args, strict=False)),
        {name: exchanged(name, value) for name, value in kwargs.items()},
    )
