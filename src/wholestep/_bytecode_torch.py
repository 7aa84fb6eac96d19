# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Rewriting Python bytecode, with the assembler that torch keeps for its own compiler. As private as `_torch`.

Torch maintains it for every Python it supports: jumps, exception tables, line tables and stack sizes are put in order
after an edit. Seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch._dynamo.bytecode_analysis import remove_extra_line_nums
from torch._dynamo.bytecode_transformation import (
    Instruction,
    assemble,
    assemble_exception_table,
    cleaned_instructions,
    compute_exception_table,
    create_instruction,
    devirtualize_jumps,
    fix_extended_args,
    fix_vars,
    get_code_keys,
    overwrite_instruction,
    propagate_line_nums,
    update_offsets,
)

__all__ = ["Instruction", "create_instruction", "inserted", "kept", "load_cell", "null_stacks", "observe", "rewritten"]

# From 3.13 on the empty place of a call lies above its callable, before that below it.
NULL_ABOVE = sys.version_info >= (3, 13)
_CALLABLE = (False, True) if NULL_ABOVE else (True, False)
"""What an instruction that loads for a call pushes, as `null_stacks` has it."""


Edit = Callable[[Instruction], list[Instruction]]


def rewritten(code: CodeType, editor: Callable[[CodeType, list[Instruction]], Edit]) -> CodeType:
    """A copy of `code` in which each instruction is exchanged for `edit(instruction)`; `[instruction]` keeps it.

    `editor` makes an `edit` for a code object and its instructions; functions defined inside are rewritten alike.
    Instructions that `edit` adds belong to the line and the `try` blocks of the one they stand for, and who jumps there
    runs them too.
    """

    options = {key: getattr(code, key) for key in get_code_keys()}
    options["co_consts"] = tuple(
        rewritten(constant, editor) if isinstance(constant, CodeType) else constant for constant in code.co_consts
    )
    instructions: list[Instruction] = []
    deepest = 0
    # "safe": as they are. Torch would also spell out `super()` and fused instructions for its own tracer.
    original = cleaned_instructions(code, safe=True)
    propagate_line_nums(original)
    edit = editor(code, original)
    for instruction in original:
        if isinstance(instruction.argval, CodeType):
            instruction.argval = options["co_consts"][instruction.arg or 0]
        new = edit(instruction)
        deepest = max(deepest, len(new))
        instructions += new if new == [instruction] else overwrite_instruction(instruction, new)
    return _assembled(instructions, {**options, "co_stacksize": code.co_stacksize + deepest})


def _assembled(instructions: list[Instruction], options: dict[str, Any]) -> CodeType:
    """What `transform_code_object` does after an edit, but for its analysis of the stack, which knows no generators."""
    fix_vars(instructions, options, varname_from_oparg=_code(options)._varname_from_oparg)
    is_settled = False
    while not is_settled:
        update_offsets(instructions)
        devirtualize_jumps(instructions)
        is_settled = not fix_extended_args(instructions)
    update_offsets(instructions)  # prefixes are made anew each time: a `try` block may begin with one
    remove_extra_line_nums(instructions)
    options["co_code"], options["co_linetable"] = assemble(instructions, options["co_firstlineno"])
    options["co_exceptiontable"] = assemble_exception_table(compute_exception_table(instructions))
    return _code(options)


def _code(options: dict[str, Any]) -> Any:
    return CodeType(*[options[key] for key in get_code_keys()])


def kept(instruction: Instruction) -> Instruction:
    """A copy of an instruction, to stand behind those that are put before it."""
    return Instruction(
        opcode=instruction.opcode,
        opname=instruction.opname,
        arg=instruction.arg,
        argval=instruction.argval,
        target=instruction.target,
    )


def load_cell(name: str) -> Instruction:
    """Push the cell of a closure variable itself."""
    return create_instruction("LOAD_FAST" if NULL_ABOVE else "LOAD_CLOSURE", argval=name)


def observe(
    function: Callable[..., Any], depths: Sequence[int], extra: Sequence[Instruction] = ()
) -> list[Instruction]:
    """Call `function` with copies of some values on the stack, then with what `extra` pushes; its result is pushed.

    Depth 1 is the top of the stack. Each instruction of `extra` pushes one value.
    """
    load = create_instruction("LOAD_CONST", argval=function)
    null = create_instruction("PUSH_NULL")
    pushed = [load, null] if NULL_ABOVE else [null, load]
    for depth in depths:
        pushed.append(create_instruction("COPY", arg=depth + len(pushed)))
    pushed += extra
    num_args = len(depths) + len(extra)
    if sys.version_info < (3, 12):
        pushed.append(create_instruction("PRECALL", arg=num_args))
    return [*pushed, create_instruction("CALL", arg=num_args)]


def null_stacks(instructions: Sequence[Instruction]) -> dict[int, list[bool]]:
    """For each instruction (by its place in the list): the stack before it, True for the empty places of calls.

    Compilers lay code out such that one pass in order meets every place after a way that leads there.
    """
    number = {id(instruction): index for index, instruction in enumerate(instructions)}
    known: dict[int, list[bool]] = {0: []}
    for index, instruction in enumerate(instructions):
        stack = known.get(index)
        if stack is None:
            continue
        entry = instruction.exn_tab_entry
        if entry is not None:
            handled = [*stack[: entry.depth], *([False] if entry.lasti else []), False]
            known.setdefault(number[id(entry.target)], handled)
        if instruction.target is not None:
            known.setdefault(number[id(instruction.target)], _stack_after(stack, instruction, is_jump=True))
        if instruction.opname not in _NEVER_CONTINUE:
            known.setdefault(index + 1, _stack_after(stack, instruction, is_jump=False))
    return known


_NEVER_CONTINUE = frozenset(
    [
        "RETURN_VALUE",
        "RETURN_CONST",
        "RAISE_VARARGS",
        "RERAISE",
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
        "JUMP_NO_INTERRUPT",
    ]
)


def _stack_after(stack: list[bool], instruction: Instruction, *, is_jump: bool) -> list[bool]:
    name, arg = instruction.opname, instruction.arg
    if name == "PUSH_NULL":
        return [*stack, True]
    if name == "LOAD_GLOBAL" and arg is not None and arg & 1:
        return [*stack, *_CALLABLE]
    if name == "LOAD_METHOD" or (
        name in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and arg is not None and _is_method(name, arg)
    ):
        return [*stack[: -3 if name == "LOAD_SUPER_ATTR" else -1], *_CALLABLE]
    if name in ("PRECALL", "KW_NAMES"):
        return stack
    if name == "CALL":
        return [*stack[: len(stack) - (arg or 0) - 2], False]
    if name == "COPY":
        return [*stack, stack[-(arg or 1)]]
    if name == "SWAP":
        swapped = [*stack]
        swapped[-1], swapped[-(arg or 1)] = swapped[-(arg or 1)], swapped[-1]
        return swapped
    effect = dis.stack_effect(
        instruction.opcode, arg if instruction.opcode >= dis.HAVE_ARGUMENT else None, jump=is_jump
    )
    if name == "CALL_FUNCTION_EX":  # whose result may lie where its empty place was
        return [*stack[: effect - 1], False]
    return [*stack, *[False] * effect] if effect >= 0 else stack[:effect]


def _is_method(name: str, arg: int) -> bool:
    return bool(arg & 1) and (name == "LOAD_SUPER_ATTR" or sys.version_info >= (3, 12))


def inserted(
    function: Callable[..., Any], depths: Sequence[int], extra: Sequence[Instruction] = ()
) -> list[Instruction]:
    """`observe`, and forget the result."""
    return [*observe(function, depths, extra), create_instruction("POP_TOP")]
