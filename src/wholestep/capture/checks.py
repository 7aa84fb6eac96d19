"""Which looks at values are checks: the step goes on as ever, unless something is wrong, or a draw says otherwise.

A step must not depend on values that it computes, as a graph has one course. But torch itself looks at values to check
them (`validate_args`, `error_if_nonfinite`, a gradient scaler), and so do users. Five kinds of looks are let pass:

    asked in code of torch
    about finiteness               `isfinite(loss)`, `math.isnan(loss.item())`
    with nothing but an error      `if loss > 1e4: raise ...`, `assert loss < 1e4`: read off the bytecode
    at what is drawn alone         `torch.rand([]) < 0.1` (LayerDrop)
    at the scale of a scaler       `scaler.get_scale() < scale_before`: whether the update was skipped

Where a mask has its elements (`for expert in (counts > 0).nonzero()`) is asked as well: mostly it is the same places.
"""

from __future__ import annotations

import dis
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import fx

from wholestep.capture import source
from wholestep.capture.questions import ancestors
from wholestep.capture.record.numbers import Number, function_behind
from wholestep.graph import ops

aten = torch.ops.aten

_PLUMBING = tuple(
    os.path.join(source.TORCH_ROOT, *path)
    for path in (
        *(["_subclasses"], ["_tensor.py"], ["overrides.py"], ["_ops.py"], ["fx"], ["utils", "_stats.py"]),
        *(["_compile.py"], ["_dynamo"]),
    )
)
"""Code of torch that is between somebody who asks and the answer."""
_OF_FINITENESS = (math.isfinite, math.isnan, math.isinf, np.isfinite, np.isnan, np.isinf)
_SCALING = (aten._amp_update_scale.default, aten._amp_update_scale_.default)
_HANDED_ON = (operator.getitem, aten.copy.default, aten.copy_.default, aten.detach.default, aten.alias.default)
_ENDS = frozenset(["RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "SEND"])
_PROLOGUE = 12
"""So many instructions of a handler show whether it is one: what tells the recorder comes first."""
_RAISES = frozenset(["RAISE_VARARGS", "RERAISE"])


def is_check(numbers: Collection[Number], nodes: Iterable[fx.Node], is_drawn_input: Callable[[fx.Node], bool]) -> bool:
    """Whether the step may look at some numbers now, which the graph computes at some nodes."""
    nodes = [*nodes]
    frame = _asking_frame()
    return (
        (frame is not None and _is_torchs(frame.f_code.co_filename))
        or (bool(numbers) and all(map(_is_of_finiteness, numbers)))
        or all(map(_tells_finiteness, nodes))
        or all(is_drawn([node], is_drawn_input) for node in nodes)
        or _is_of_a_scaler(nodes)
        or (frame is not None and _raises_otherwise(frame))
    )


def _asking_frame() -> FrameType | None:
    """Where Python looks: in code of the user's or of torch's, but for what passes on the answer."""
    return source.innermost_frame(lambda name: source.is_user_file(name) or _is_torchs(name))


def _is_torchs(filename: str) -> bool:
    path = source.path_of(filename)
    return path.startswith(source.TORCH_ROOT + os.sep) and not path.startswith(_PLUMBING)


def _is_of_finiteness(number: Number) -> bool:
    """`math.isfinite(loss.item())`."""
    function = function_behind(number)
    return any(function is known for known in _OF_FINITENESS)


def _tells_finiteness(node: fx.Node) -> bool:
    """Whether a truth value says of some tensors whether they are finite, and nothing else about them."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if _asks_finiteness(current):
            continue
        value = current.meta.get("val")
        is_truth = isinstance(value, torch.Tensor) and value.dtype is torch.bool
        if current.op != "call_function" or not is_truth or not current.all_input_nodes:
            return False
        pending += current.all_input_nodes
    return True


def _asks_finiteness(node: fx.Node) -> bool:
    """`isnan(x)`, `isinf(x)`, `x == x`, `abs(x) != inf`: what `isfinite` is made of."""
    if node.target in (aten.isnan.default, aten.isinf.default, aten.isfinite.default):
        return True
    if node.target in (aten.eq.Tensor, aten.ne.Tensor):
        return node.args[0] is node.args[1]
    return node.target in (aten.eq.Scalar, aten.ne.Scalar) and node.args[1] in (math.inf, -math.inf)


def is_drawn(nodes: Iterable[fx.Node], is_drawn_input: Callable[[fx.Node], bool]) -> bool:
    """Whether what is made of some nodes depends on random numbers alone, be they drawn by torch or by Python."""
    needed = {other: None for node in nodes for other in ancestors(node)}
    drawn = {other for other in needed if ops.draws(other) or is_drawn_input(other)}
    return bool(drawn) and all(other.op in ("call_function", "get_attr") for other in needed.keys() - drawn)


def _is_of_a_scaler(nodes: Collection[fx.Node]) -> bool:
    """Whether values are what a gradient scaler has made of its scale, or were there before the step."""
    made = [_origin(node) for node in nodes]
    are_known = all(node.op == "placeholder" or node.target in _SCALING for node in made)
    return are_known and any(node.target in _SCALING for node in made)


def _origin(node: fx.Node) -> fx.Node:
    """The node that a value comes from as it is."""
    while node.target in _HANDED_ON:
        node = node.all_input_nodes[-1]
    return node


def is_position(node: fx.Node) -> bool:
    """Whether a value depends on nothing but which elements of tensors are not zero."""
    pending, seen, has_position = [node], set[fx.Node](), False
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.target is aten.nonzero.default:
            has_position = True
        elif current.op != "call_function" or not ops.is_pure(current.target):
            return False
        else:
            pending += current.all_input_nodes
    return has_position


def is_handled() -> bool:
    """Whether the step would handle an error that came up now, by `except` or `finally`."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_name != "_traced_run":
        filename = frame.f_code.co_filename
        is_typed_in = filename.startswith("<") and not filename.startswith("<wholestep")  # at a prompt, or by exec
        if (source.is_user_file(filename) or is_typed_in) and _has_handler(frame):
            return True
        frame = frame.f_back
    return False


def _has_handler(frame: FrameType) -> bool:
    code = dis.Bytecode(frame.f_code)
    entries: Any = getattr(code, "exception_entries", ())
    targets = {entry.target for entry in entries if entry.start <= frame.f_lasti < entry.end}
    names = {one.offset: one.opname for one in code} if targets else {}
    offsets = [*names]
    for target in targets:
        following = [names[offset] for offset in offsets[offsets.index(target) :][:_PROLOGUE]]
        begin = following.index("PUSH_EXC_INFO") if "PUSH_EXC_INFO" in following else None
        if begin is not None and following[begin + 1] != "WITH_EXCEPT_START":
            return True
    return False


def leads_to_an_error(outcome: bool) -> bool:
    """Whether Python, which looks at a truth value now, branches on it to where it can only raise."""
    frame = _asking_frame()
    sides = {} if frame is None else _error_sides(frame)
    return sides.get(outcome, False)


def _raises_otherwise(frame: FrameType) -> bool:
    """Whether the branch that a frame is about to take has a side that can only end with an error."""
    return any(_error_sides(frame).values())


def _error_sides(frame: FrameType) -> dict[bool, bool]:
    """For both truth values that a frame may find now: whether the branch on it can only end with an error."""
    instructions = {one.offset: one for one in dis.get_instructions(frame.f_code)}
    offsets = [*instructions]
    is_negated = False
    for offset in offsets[offsets.index(frame.f_lasti) :]:
        instruction = instructions[offset]
        name = instruction.opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            following = offsets[offsets.index(offset) + 1]
            jumps = ("IF_TRUE" in name) is not is_negated
            return {
                jumps: _only_raises(instructions, offsets, instruction.argval),
                not jumps: _only_raises(instructions, offsets, following),
            }
        if "JUMP" in name or name in _ENDS or name in _RAISES or name.startswith("STORE"):
            break
        is_negated ^= name == "UNARY_NOT"
    return {}


def _only_raises(instructions: dict[int, Any], offsets: list[int], start: int) -> bool:
    position = {offset: index for index, offset in enumerate(offsets)}
    pending, seen, does_raise = [start], set[int](), False
    while pending:
        offset = pending.pop()
        if offset in seen:
            continue
        seen.add(offset)
        instruction = instructions[offset]
        name = instruction.opname
        if name in _ENDS:
            return False
        if name in _RAISES:
            does_raise = True
            continue
        is_jump = isinstance(instruction.argval, int) and ("JUMP" in name or name == "FOR_ITER")
        if is_jump:
            pending.append(instruction.argval)
        is_open = not is_jump or "IF" in name or name == "FOR_ITER"
        if is_open and position[offset] + 1 < len(offsets):
            pending.append(offsets[position[offset] + 1])
    return does_raise
