"""Random worlds: objects of the user's, a train step that reads, writes and draws from them, and changes between calls.

A world is a program of two modules, drawn by hypothesis as text; the text is the reproduction. `run` executes it twice,
once eagerly and once compiled, and compares all that the program can see after every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import linecache
import logging
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hypothesis import strategies as st
from tests.parity import RandomStream
from tests.pictures import Picture, differences, generators, picture, replaced
from tests.world_pieces import DRAWS, RARE, SAYS, Piece
from tests.world_reads import value_reads
from tests.world_writes import STORED, WRITES

from wholestep import CaptureError

LIBRARY, MAIN = "world_lib", "world"
IMPORTS = """\
import argparse, collections, copy, dataclasses, functools, itertools, json, logging, math, operator, random, time
import types, warnings
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""
LIBRARY_HEAD = f"{IMPORTS}\ndef read(owner, name):\n    return getattr(owner, name)\n"
HEAD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

model = Net()
optimizer = OPTIMIZER

def batch(call, size):
    generator = torch.Generator().manual_seed(call)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 3, generator=generator)
"""
OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.1)",
    "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)",
    "torch.optim.Adam(model.parameters(), lr=0.01)",
)
FORMS = ("function", "method")
OPTIMIZER_CHANGES = (
    "optimizer.param_groups[0]['lr'] = 0.05",
    "optimizer.param_groups[0]['weight_decay'] = 0.01",
    "model.eval()",
    "model.train()",
)


@dataclasses.dataclass(frozen=True)
class Program:
    """Two modules and what happens before each call; a call is `step(*arguments(number, size))`."""

    library: str
    main: str
    calls: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        lines = [f"# {LIBRARY}.py", self.library, f"# {MAIN}.py", self.main]
        for number, (change, size) in enumerate(self.calls):
            lines += [change] if change else []
            lines.append(f"step(*arguments({number}, {size}))")
        return "\n".join(lines)


@st.composite
def programs(draw: Any) -> Program:
    """Two to five pieces, four or five calls. Pieces that can only be refused are rare."""
    pieces = [draw(value_reads()) for _ in range(draw(st.integers(1, 2)))]
    pieces += [WRITES[name] for name in draw(st.lists(st.sampled_from(sorted(WRITES)), max_size=2, unique=True))]
    for table, chance in ((DRAWS, 3), (SAYS, 5), (RARE, 30)):
        if draw(st.integers(1, chance)) == chance:
            pieces.append(table[draw(st.sampled_from(sorted(table)))])
    stored = draw(st.sampled_from(STORED))
    pieces = [piece.numbered(number).storing(stored) for number, piece in enumerate(pieces, 1)]
    changes = [change for piece in pieces for change in piece.changes] + [draw(st.sampled_from(OPTIMIZER_CHANGES))]
    calls = [("", 2)]
    for _ in range(draw(st.integers(3, 4))):
        change = draw(st.sampled_from(changes)) if draw(st.integers(1, 5)) > 2 else ""
        calls.append((change, draw(st.sampled_from([2, 2, 2, 3]))))
    return program(pieces, calls, draw(st.sampled_from(OPTIMIZERS)), draw(st.sampled_from(FORMS)))


def program(pieces: list[Piece], calls: list[tuple[str, int]], optimizer: str, form: str) -> Program:
    """A step made of numbered pieces, as a function or as a method of a trainer."""
    library = "\n".join([LIBRARY_HEAD, *(piece.lib for piece in pieces if piece.lib)])
    return Program(library, _main(pieces, optimizer, form), tuple(calls))


def _main(pieces: list[Piece], optimizer: str, form: str) -> str:
    named = [(f"arg{number}", piece.argument) for number, piece in enumerate(pieces, 1) if piece.argument]
    returned = ["loss", *(piece.returned for piece in pieces if piece.returned)]
    body = [
        "optimizer.zero_grad()",
        *(piece.before for piece in pieces),
        "hidden = torch.tanh(model.first(x))",
        *(piece.hidden for piece in pieces),
        "loss = F.mse_loss(model.second(hidden), y)",
        *(piece.loss for piece in pieces),
        "loss.backward()",
        *(piece.grads for piece in pieces),
        "optimizer.step()",
        *(piece.after for piece in pieces),
        f"return {', '.join(returned)}",
    ]
    parameters, values = (
        ["x", "y", *(name for name, _ in named)],
        ["*batch(call, size)", *(value for _, value in named)],
    )
    if form == "method":
        body.insert(0, "model, optimizer = self.model, self.optimizer")
        parameters.insert(0, "self")
    else:
        parameters, values = ["model", "optimizer", *parameters], ["model", "optimizer", *values]
    step = f"def step({', '.join(parameters)}):\n" + textwrap.indent("\n".join(part for part in body if part), "    ")
    if form == "method":
        init = "def __init__(self):\n    self.model, self.optimizer = model, optimizer\n"
        step = "class Trainer:\n" + textwrap.indent(f"{init}\n{step}", "    ") + "\n\nstep = Trainer().step"
    return "\n".join(
        [
            f"{IMPORTS}import {LIBRARY} as lib",
            HEAD.replace("OPTIMIZER", optimizer),
            *(piece.defs for piece in pieces if piece.defs),
            "",
            step,
            "",
            f"def arguments(call, size):\n    return {', '.join(values)}{',' if len(values) == 1 else ''}",
        ]
    )


class Side:
    """One of the two worlds: its modules, its generators, and what it has said."""

    def __init__(self, program: Program, compile: Callable[..., Any] | None) -> None:
        self._library, self.main = types.ModuleType(LIBRARY), types.ModuleType(MAIN)
        self._stream = RandomStream(0)
        self.said: list[str] = []
        with self.active():
            _execute(program.library, self._library)
            _execute(program.main, self.main)
            self.plain = self.main.__dict__["step"]
            self.step = self.plain if compile is None else compile(self.plain)
        self.returned: tuple[Any, ...] = ()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """This side's modules are imported, its generators are the global ones, and what is said is kept."""
        sys.modules[LIBRARY], sys.modules[MAIN] = self._library, self.main
        logger, handler = logging.getLogger("world"), _Kept(self.said)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        text = io.StringIO()
        try:
            with self._stream.active(), contextlib.redirect_stdout(text), warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                yield
        finally:
            logger.removeHandler(handler)
            del sys.modules[LIBRARY], sys.modules[MAIN]
        self.said += [text.getvalue()] if text.getvalue() else []
        self.said += [str(each.message) for each in seen if "world" in str(each.message)]

    def change(self, text: str) -> None:
        with self.active():
            exec(compile(text, f"{MAIN}_changes.py", "exec"), self.main.__dict__)

    def call(self, number: int, size: int, step: Callable[..., Any] | None = None) -> None:
        with self.active():
            arguments = self.main.__dict__["arguments"](number, size)
            self.returned = ((step or self.step)(*arguments), arguments)

    def look(self, before: Iterable[Any] = ()) -> tuple[Picture, list[Any]]:
        """All that the program can see, and the objects of `before`, which it could see then."""
        with self.active():
            roots = {"world": self.main, "returned": self.returned, "said": tuple(self.said), **generators()}
        return picture(roots, before)


class _Kept(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _execute(source: str, module: types.ModuleType) -> None:
    name = f"{module.__name__}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module.__file__ = name
    exec(compile(source, name, "exec"), module.__dict__)


@dataclasses.dataclass
class Outcome:
    """How a program went; `refused` holds the message where a call was refused."""

    captures: int = 0
    refused: str = ""


def run(program: Program, compile: Callable[..., Any]) -> Outcome:
    """Compare both sides after every call; raises AssertionError where they differ.

    A call that is refused has to leave everything as it was; the calls after it, and itself, then run eagerly.
    """
    eager, compiled = Side(program, None), Side(program, compile)
    outcome = Outcome()
    for number, (change, size) in enumerate(program.calls):
        for side in (eager, compiled):
            side.change(change)
        (_, eagers_objects), (before, objects) = eager.look(), compiled.look()
        eager.call(number, size)
        try:
            compiled.call(number, size, compiled.plain if outcome.refused else None)
        except CaptureError as refusal:
            outcome.refused = str(refusal)
            _fail_on_change(f"call {number + 1}", before, compiled.look(objects)[0])
            compiled.call(number, size, compiled.plain)
        _fail_on(f"call {number + 1}", differences(eager.look(eagers_objects)[0], compiled.look(objects)[0]))
    outcome.captures = getattr(compiled.step, "num_captures", 0)
    return outcome


def _fail_on_change(where: str, before: Picture, after: Picture) -> None:
    now = {place: text for place, text in after.items() if "before[" not in place}
    lines = differences(before, now, ("before", "after")) + replaced(after)
    _fail_on(f"{where} was refused, and the world is not as before", lines)


def _fail_on(where: str, lines: list[str]) -> None:
    if lines:
        raise AssertionError("\n  ".join([f"{where}: compiled differs from eager", *lines[:12]]))
