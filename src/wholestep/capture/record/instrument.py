"""Code that tells what it reads, writes and calls: a function's bytecode with a call before each such instruction.

The instructions themselves stay as they are, so the function does what it did; only a call may be given another
callable than the one it was about to use, and `[]` another owner. `HOOKS` says which instruction is told to whom:

    LOAD_ATTR beta        ->   attribute(<owner>, "beta");  LOAD_ATTR beta
    BINARY_SUBSCR         ->   owner = item(<owner>, <key>);  BINARY_SUBSCR
    CALL 2                ->   callable = call(<callable>, (<args>), <keywords>);  CALL 2

An instruction that is in neither table is one that we do not know: such a function cannot be followed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from wholestep import _bytecode_torch as bytecode
from wholestep._bytecode_torch import Instruction, create_instruction

REMAINDER = (6, 19)
"""How bytecode numbers `%` and `%=`."""

# Hook and how many values on top of the stack it is told, for instructions without a name.
_OPERANDS: dict[str, tuple[str, int]] = {
    "BINARY_SLICE": ("slice", 3),
    "STORE_SUBSCR": ("set_item", 3),
    "STORE_SLICE": ("set_slice", 4),
    "DELETE_SUBSCR": ("delete_item", 2),
    "GET_ITER": ("iterate", 1),
    "GET_YIELD_FROM_ITER": ("iterate", 1),
    "UNPACK_SEQUENCE": ("iterate", 1),
    "UNPACK_EX": ("iterate", 1),
    "LIST_EXTEND": ("iterate", 1),
    "SET_UPDATE": ("iterate", 1),
    "DICT_UPDATE": ("iterate", 1),
    "DICT_MERGE": ("iterate", 1),
    "CONTAINS_OP": ("contains", 2),
    "COMPARE_OP": ("operands", 2),
    "IS_OP": ("identity", 2),
    "FORMAT_SIMPLE": ("formatted", 1),
    "FORMAT_WITH_SPEC": ("formatted", 2),
    "GET_LEN": ("iterate", 1),
    "MATCH_MAPPING": ("iterate", 1),
    "MATCH_SEQUENCE": ("iterate", 1),
    "BEFORE_WITH": ("entered", 1),
    "UNARY_NOT": ("truth", 1),
    "UNARY_NEGATIVE": ("unary", 1),
    "UNARY_POSITIVE": ("unary", 1),
    "UNARY_INVERT": ("unary", 1),
    "TO_BOOL": ("truth", 1),
    "JUMP_IF_TRUE_OR_POP": ("truth", 1),
    "JUMP_IF_FALSE_OR_POP": ("truth", 1),
    "PUSH_EXC_INFO": ("handled", 1),
    "CHECK_EXC_MATCH": ("compared_class", 1),
    "CHECK_EG_MATCH": ("compared_class", 1),
}
# Hook, operands and what else it is told, for instructions that name something.
_NAMED: dict[str, tuple[str, int]] = {
    "LOAD_ATTR": ("attribute", 1),
    "LOAD_METHOD": ("attribute", 1),
    "STORE_ATTR": ("set_attribute", 2),
    "DELETE_ATTR": ("delete_attribute", 1),
    "IMPORT_FROM": ("attribute", 1),
}
_GLOBALS: dict[str, tuple[str, int]] = {
    "LOAD_GLOBAL": ("global_name", 0),
    "LOAD_NAME": ("global_name", 0),
    "STORE_GLOBAL": ("set_global", 1),
    "DELETE_GLOBAL": ("delete_global", 0),
    "IMPORT_NAME": ("imported", 2),
}
_CELLS: dict[str, tuple[str, int]] = {
    "LOAD_DEREF": ("cell", 0),
    "LOAD_CLASSDEREF": ("cell", 0),
    "STORE_DEREF": ("set_cell", 1),
    "DELETE_DEREF": ("delete_cell", 0),
}
_INERT = frozenset(
    [
        "CACHE",
        "RESUME",
        "NOP",
        "PUSH_NULL",
        "POP_TOP",
        "COPY",
        "SWAP",
        "EXTENDED_ARG",
        "COPY_FREE_VARS",
        "MAKE_CELL",
        "LOAD_CLOSURE",
        "LOAD_FAST",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_AND_CLEAR",
        "LOAD_FAST_LOAD_FAST",
        "STORE_FAST",
        "STORE_FAST_LOAD_FAST",
        "STORE_FAST_STORE_FAST",
        "STORE_FAST_MAYBE_NULL",
        "DELETE_FAST",
        "LOAD_CONST",
        "RETURN_CONST",
        "RETURN_VALUE",
        "RETURN_GENERATOR",
        "YIELD_VALUE",
        "SEND",
        "END_SEND",
        "END_FOR",
        "POP_JUMP_IF_NONE",
        "POP_JUMP_IF_NOT_NONE",
        "ASYNC_GEN_WRAP",
        "CLEANUP_THROW",
        "POP_JUMP_FORWARD_IF_NONE",
        "POP_JUMP_FORWARD_IF_NOT_NONE",
        "POP_JUMP_BACKWARD_IF_NONE",
        "POP_JUMP_BACKWARD_IF_NOT_NONE",
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
        "JUMP_NO_INTERRUPT",
        "JUMP",
        "FOR_ITER",
        "BUILD_TUPLE",
        "BUILD_LIST",
        "BUILD_SET",
        "BUILD_MAP",
        "BUILD_CONST_KEY_MAP",
        "BUILD_STRING",
        "BUILD_SLICE",
        "LIST_APPEND",
        "SET_ADD",
        "MAP_ADD",
        "LIST_TO_TUPLE",
        "MAKE_FUNCTION",
        "SET_FUNCTION_ATTRIBUTE",
        "PRECALL",
        "KW_NAMES",
        "POP_EXCEPT",
        "RERAISE",
        "PREP_RERAISE_STAR",
        "RAISE_VARARGS",
        "LOAD_ASSERTION_ERROR",
        "WITH_EXCEPT_START",
        "LOAD_BUILD_CLASS",
        "CALL_INTRINSIC_1",
        "CALL_INTRINSIC_2",
        "MATCH_KEYS",
        "COPY_DICT_WITHOUT_KEYS",
        "GET_AWAITABLE",
        "GET_AITER",
        "GET_ANEXT",
        "BEFORE_ASYNC_WITH",
        "END_ASYNC_FOR",
        "SETUP_ANNOTATIONS",
        "LOAD_LOCALS",
        "STORE_NAME",
        "DELETE_NAME",
        "EXIT_INIT_CHECK",
        "LOAD_FROM_DICT_OR_GLOBALS",
        "LOAD_FROM_DICT_OR_DEREF",
        "INTERPRETER_EXIT",
    ]
)
_CONDITIONAL = (
    "POP_JUMP_IF_TRUE",
    "POP_JUMP_IF_FALSE",
    "POP_JUMP_FORWARD_IF_TRUE",
    "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_FALSE",
)

_HAS_SPEC = 4
"""The bit of FORMAT_VALUE that says that what comes after the colon lies on top of the value."""
_HAS_CONVERSION = 3
"""Its bits for `!s`, `!r` and `!a`."""
_HAS_PRECALL = sys.version_info < (3, 12)
_HAS_METHOD_BIT = sys.version_info >= (3, 12)

Hooks = dict[str, Callable[..., Any]]


class UnknownInstruction(Exception):
    """A function has an instruction that is in no table: `str()` names it."""


class Instrumenter:
    """Makes instrumented code that calls `hooks`; keeps what it has made."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._made: weakref.WeakKeyDictionary[CodeType, CodeType] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[CodeType] = weakref.WeakSet()

    def is_instrumented(self, code: CodeType) -> bool:
        return code in self._known

    def tells_of(self, code: CodeType, original: CodeType) -> bool:
        """Whether some code is the instrumented one of another."""
        return self._made.get(original) is code

    def instrumented(self, code: CodeType) -> CodeType:
        """The code of a function, telling; raises `UnknownInstruction`."""
        known = self._made.get(code)
        if known is None:
            known = bytecode.rewritten(code, lambda *about: _Editor(self._hooks, *about).edit)
            self._made[code] = known
            self._note(known)
        return known

    def _note(self, code: CodeType) -> None:
        self._known.add(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._note(constant)


class _Editor:
    """Puts hooks into one code object."""

    def __init__(self, hooks: Hooks, code: CodeType, instructions: list[Instruction]) -> None:
        self._hooks = hooks
        self._free = frozenset((*code.co_freevars, *code.co_cellvars))
        self._keywords: tuple[str, ...] = ()
        stacks = bytecode.null_stacks(instructions)
        # Comprehensions, decorators and assertions are called with their argument in the empty place.
        self._odd = {
            id(instruction)
            for index, instruction in enumerate(instructions)
            if instruction.opname in ("PRECALL", "CALL") and not _has_null(stacks.get(index), instruction)
        }

    def edit(self, instruction: Instruction) -> list[Instruction]:
        name = instruction.opname
        if name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "PRECALL", "KW_NAMES"):
            return self._call(instruction)
        if name == "LOAD_SUPER_ATTR":
            return self._super_attribute(instruction)
        if name in _INERT:
            return [instruction]
        if name in _CONDITIONAL:
            return [*self._insert("truth", 1), bytecode.kept(instruction)]
        if name in _OPERANDS:
            hook, count = _OPERANDS[name]
            return [*self._insert(hook, count), bytecode.kept(instruction)]
        if name == "CONVERT_VALUE":
            return [*self._insert(_conversion(instruction), 1), bytecode.kept(instruction)]
        if name == "FORMAT_VALUE":
            return self._format(instruction)
        if name == "BINARY_SUBSCR":
            return [*self._exchange_left("item"), bytecode.kept(instruction)]
        if name == "BINARY_OP":
            operator = create_instruction("LOAD_CONST", argval=instruction.arg or 0)
            exchanged = self._exchange_left("remainder") if instruction.arg in REMAINDER else []
            return [*self._insert("binary", 2, operator), *exchanged, bytecode.kept(instruction)]
        if name == "MATCH_CLASS":
            count = create_instruction("LOAD_CONST", argval=instruction.arg or 0)
            return [*self._insert("match_class", 3, count), bytecode.kept(instruction)]
        if name in _CELLS:
            return self._cell(instruction)
        if name in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == "__class__":
            exchange = [create_instruction("SWAP", arg=2), create_instruction("POP_TOP")]
            return [*bytecode.observe(self._hooks["class_of"], [1]), *exchange, *_loaded(instruction)]
        if name in _NAMED or name in _GLOBALS:
            hook, count = (_NAMED | _GLOBALS)[name]
            inserted = self._insert(hook, count, create_instruction("LOAD_CONST", argval=instruction.argval))
            return [*inserted, *_loaded(instruction)]
        raise UnknownInstruction(name)

    def _insert(self, hook: str, count: int, *extra: Instruction) -> list[Instruction]:
        # Deepest first: depths are counted from the top of the stack.
        return bytecode.inserted(self._hooks[hook], range(count, 0, -1), extra)

    def _exchange_left(self, hook: str) -> list[Instruction]:
        """Exchange the left one of two operands for what a hook says."""
        exchange = [create_instruction("SWAP", arg=3), create_instruction("POP_TOP")]
        return [*bytecode.observe(self._hooks[hook], [2, 1]), *exchange]

    def _format(self, instruction: Instruction) -> list[Instruction]:
        """Of `{value!s:>12}` two instructions: the hook is told what is formatted, which is text then."""
        bits = instruction.arg or 0
        conversion = _conversion(instruction)
        if not bits & _HAS_SPEC:
            return [*self._insert(conversion, 1), bytecode.kept(instruction)]
        converted: list[Instruction] = []
        if bits & _HAS_CONVERSION:
            convert = create_instruction("FORMAT_VALUE", arg=bits & _HAS_CONVERSION)
            swap = [create_instruction("SWAP", arg=2) for _ in range(2)]
            converted = [swap[0], *self._insert(conversion, 1), convert, swap[1]]
        return [*converted, *self._insert("formatted", 2), create_instruction("FORMAT_VALUE", arg=_HAS_SPEC)]

    def _cell(self, instruction: Instruction) -> list[Instruction]:
        if instruction.argval not in self._free:
            return [instruction]
        hook, count = _CELLS[instruction.opname]
        name = create_instruction("LOAD_CONST", argval=instruction.argval)
        return [*self._insert(hook, count, bytecode.load_cell(instruction.argval), name), bytecode.kept(instruction)]

    def _super_attribute(self, instruction: Instruction) -> list[Instruction]:
        """`super().name`, one instruction from 3.12 on, as the two that it stands for: each tells of itself."""
        swaps = (3, 2) if bytecode.NULL_ABOVE else (4, 3, 2)
        empty = [create_instruction("PUSH_NULL"), *(create_instruction("SWAP", arg=depth) for depth in swaps)]
        load = create_instruction("LOAD_ATTR", arg=(instruction.arg or 0) & 1, argval=instruction.argval)
        return [*empty, *self._call(create_instruction("CALL", arg=2)), *self.edit(load)]

    def _call(self, instruction: Instruction) -> list[Instruction]:
        """Before a call (and its `KW_NAMES` and `PRECALL`), exchange the callable for what the hook says."""
        name = instruction.opname
        if name == "KW_NAMES":
            # Set for the next call, which would be the hook's: it is set again behind that.
            self._keywords = instruction.argval
            return [create_instruction("NOP")]
        if id(instruction) in self._odd or (name == "CALL" and _HAS_PRECALL):
            return [instruction]
        keywords, self._keywords = self._keywords, ()
        count = instruction.arg or 0
        names = create_instruction("LOAD_CONST", argval=keywords)
        if name == "CALL_FUNCTION_EX":
            num_above, extra = 1 + (count & 1), []
        else:
            num_above, extra = (count + 1, []) if name == "CALL_KW" else (count, [names])
        depth = num_above + (2 if bytecode.NULL_ABOVE else 1)
        hook = self._hooks["call_with" if name == "CALL_FUNCTION_EX" else "call"]
        chosen = bytecode.observe(hook, [depth, *range(num_above, 0, -1)], extra)
        exchange = [create_instruction("SWAP", arg=depth + 1), create_instruction("POP_TOP")]
        again = [create_instruction("KW_NAMES", argval=keywords)] if keywords else []
        return [*chosen, *exchange, *again, bytecode.kept(instruction)]


def _conversion(instruction: Instruction) -> str:
    """The hook of a conversion: `!r` and `!a` look into text, `!s` leaves it as it is."""
    return "shown" if ((instruction.arg or 0) & _HAS_CONVERSION) > 1 else "formatted"


def _loaded(instruction: Instruction) -> list[Instruction]:
    """The instruction itself; a method is loaded as an attribute, so that every call has one callable."""
    name, bits = instruction.opname, instruction.arg or 0
    if name == "LOAD_METHOD":
        plain = create_instruction("LOAD_ATTR", argval=instruction.argval)
    elif name == "LOAD_ATTR" and _HAS_METHOD_BIT and bits & 1:
        plain = create_instruction("LOAD_ATTR", arg=0, argval=instruction.argval)
    else:
        return [bytecode.kept(instruction)]
    null = create_instruction("PUSH_NULL")
    return [plain, null] if bytecode.NULL_ABOVE else [plain, null, create_instruction("SWAP", arg=2)]


def _has_null(stack: list[bool] | None, instruction: Instruction) -> bool:
    """Whether a call has an empty place; code that cannot be reached has none."""
    count = instruction.arg or 0
    depth = count + (1 if bytecode.NULL_ABOVE else 2)
    return stack is not None and len(stack) >= depth and stack[-depth]
