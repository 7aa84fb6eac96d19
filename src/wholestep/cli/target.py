"""`FILE.py:FUNCTION`: the user's file is imported, its function called, and a train step with its arguments comes back.

The function takes no arguments and returns `(train_step, args)` or `(train_step, args, kwargs)`, such that
`train_step(*args, **kwargs)` is one training step. It makes everything the step needs: model, optimizer, batch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import wholestep
from wholestep import _torch
from wholestep._settings import Settings
from wholestep.api import CompiledStep
from wholestep.errors import ScriptError, UsageError, WholestepError

_RETURNS = "(train_step, args) or (train_step, args, kwargs)"


@dataclass(frozen=True)
class Target:
    """A file and the function in it that makes a train step."""

    file: Path
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"

    @staticmethod
    def of(text: str) -> Target:
        """For argparse: read `train.py:make_step`, of a file that is there."""
        file, _, function = text.rpartition(":")
        if not file.endswith(".py") or not function.isidentifier():
            raise argparse.ArgumentTypeError(f"'{text}' does not name a function of a file, as in train.py:make_step")
        if not Path(file).is_file():
            raise argparse.ArgumentTypeError(f"there is no file '{file}'")
        return Target(Path(file), function)

    def load(self) -> Callable[[], Any]:
        """Import the file and find the function; what the file prints goes to stderr."""
        module = self._import()
        function = getattr(module, self.function, None)
        if not callable(function):
            what = "has no function" if function is None else "has something that is no function called"
            raise UsageError(f"{self.file} {what} '{self.function}'")
        return function

    def make(self, function: Callable[[], Any]) -> MadeStep:
        """Call the function."""
        with self._blaming(f"{self.function}()"):
            made: Any = function()
        if not isinstance(made, tuple) or len(made) not in (2, 3):
            raise ScriptError(f"{self} returns {_kind(made)}, not {_RETURNS}")
        step, args, kwargs = (*made, {}) if len(made) == 2 else made
        if not callable(step) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
            raise ScriptError(f"{self} returns ({', '.join(map(_kind, made))}), not {_RETURNS}")
        return MadeStep(_compiled(step), tuple(args), kwargs)

    def _import(self) -> ModuleType:
        # A name of its own: the file may be called like a module that it imports.
        name = f"wholestep_script_{self.file.stem}"
        spec = importlib.util.spec_from_file_location(name, self.file.resolve())
        if spec is None or spec.loader is None:
            raise UsageError(f"{self.file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        folder = str(self.file.resolve().parent)
        if folder not in sys.path:  # where Python looks if the file is run
            sys.path.insert(0, folder)
        sys.modules[name] = module  # dataclasses look for the module of their class there
        with self._blaming("it"):
            spec.loader.exec_module(module)
        return module

    @contextlib.contextmanager
    def _blaming(self, what: str) -> Generator[None]:
        """Errors of the user's file as one sentence with their line."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except WholestepError:
            raise
        except SyntaxError as error:
            raise ScriptError(f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}") from error
        except SystemExit as error:
            raise ScriptError(f"{self.file} ends the process while {what} runs; do that under __main__") from error
        except _torch.DATA_DEPENDENT_ERRORS as error:
            raise ScriptError(
                f"{self._line_of(error)}: the value of a tensor is read, and without weights there is none; "
                "take it from Python numbers"
            ) from error
        except Exception as error:
            first = next(iter(str(error).splitlines()), "no message")
            raise ScriptError(f"{self._line_of(error)}: {type(error).__name__}: {first}") from error

    def _line_of(self, error: BaseException) -> str:
        """The innermost line of the user's file that an error came through."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if os.path.realpath(frame.filename) == os.path.realpath(self.file)]
        return f"{self.file}:{own[-1].lineno}" if own else str(self.file)


@dataclass(frozen=True)
class MadeStep:
    """What a user's function has made: the step, compiled with the user's options or plainly, and its arguments."""

    step: CompiledStep
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def eager(self) -> Callable[..., Any]:
        """The step as the user wrote it."""
        return self.step.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]


def _compiled(step: Callable[..., Any]) -> CompiledStep:
    if Settings.from_environ().disable:
        raise UsageError("there is nothing to look at while WHOLESTEP_DISABLE is set; unset it")
    return step if isinstance(step, CompiledStep) else wholestep.compile(step)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
