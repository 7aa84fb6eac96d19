"""What a trace that fails tells the user: which line of theirs, what happened there, and what to do.

the step's own code raises          eager raises it as well: the call runs as it is (`Raises`)
an operator of torch raises         a `CaptureError` with its words
the machinery of tracing breaks     a `CaptureError` that names the operator; the words of torch mean nothing to a user
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep import _torch
from wholestep._threads import others_may_be_why
from wholestep.capture import remedies, source, tree
from wholestep.capture.looks import Looks
from wholestep.capture.record.again import OnlyInEager, Raises
from wholestep.errors import CaptureError, WholestepError

Function = Callable[..., Any]

_INTERPOSE = os.path.join(os.path.dirname(__file__), "interpose.py")
_OF_MACHINERY = (AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError)
"""What torch raises where tracing breaks, and what users never see of it in eager but for an index out of range."""
_SYMBOL = re.compile(
    r"\b(zu|zf|zuf|u|s)\d+\b|data is not allocated|proxy|Sym(Int|Float|Bool)|[Ff]unctional|[Ff]ake ?[Tt]ensor"
    r"|torch\._|aten[.:]"
)
"""Words that only those know who trace."""
_TORCHS_LOG = logging.getLogger(_torch.FAKE_TENSOR_LOG)
_OF_VERSIONS = "has been modified by an inplace operation"
_OF_AUTOGRAD = ("backward", "grad")
_ON_BRANCHES = "Use torch.where / torch.clamp instead of Python branches on tensor values"
_ON_OPTIMIZERS = (
    "Use an optimizer that does not branch on gradients or on what it computes from them, such as AdamW, or let this "
    "step run as it is: wholestep.compile(step, on_refusal='eager')"
)
_NOT_POSITIVE: Any = getattr(torch.linalg, "LinAlgError")  # noqa: B009 (torch does not say that it exports it)
_MOST_ZEROS = 10_000_000
_ELSEWHERE = 'Do this outside the step, or compile with on_refusal="eager", which runs it as it is'


@contextlib.contextmanager
def told(function: Function) -> Generator[None]:
    """Whatever goes wrong inside becomes a `CaptureError` that says where, and torch logs nothing about it."""
    _TORCHS_LOG.addFilter(_nothing)
    try:
        yield
    except CaptureError as error:
        locate(error, function)
        raise
    except WholestepError:  # an update that is missing, say
        raise
    except Exception as error:
        raise _of_machinery(error, function) from error
    finally:
        _TORCHS_LOG.removeFilter(_nothing)


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def locate(error: CaptureError, function: Function) -> None:
    if error.location is None:
        error.locate(source.raising_line(error, function))


def of_data_dependence(error: Exception, function: Function, optimizer: Optimizer | None) -> CaptureError:
    """Torch needs a value to go on: a size or a branch that depends on it."""
    advice = remedies.for_error(error) if optimizer is None else _ON_OPTIMIZERS
    asking = f"{type(optimizer).__name__}.step()" if optimizer is not None else "the step"
    return CaptureError(
        f"{asking} depends on a value that is only known when it runs{_at_operator(error)}",
        location=source.raising_line(error, function),
        advice=_ON_BRANCHES if advice == source.VALUE_ADVICE else advice,
    )


def of_step(error: Exception, function: Function, looks: Looks, *, divides: bool) -> CaptureError:
    """Something has raised while the step was traced; `looks` at values may have led there.

    If it `divides` by sizes that values decide, one may be 0: Python raises then, C++ goes on with infinity.
    """
    if divides and isinstance(error, ZeroDivisionError):
        return OnlyInEager("the step divides by a size, which is 0", location=source.raising_line(error, function))
    is_eagers = bool(looks.requirements) or not _is_of_torch(error) or _raises_for_zeros(error)
    is_eagers |= _OF_VERSIONS in str(error)
    if not is_eagers and _is_of_machinery(error):
        return _of_machinery(error, function)
    return (Raises if is_eagers else CaptureError)(
        f"{source.kind_of(error)}: {source.first_line(error)}",
        location=source.raising_line(error, function),
        advice=f"The train step raised this while it was captured; nothing has been changed{others_may_be_why()}",
    )


def _is_of_torch(error: BaseException) -> bool:
    """Whether an error has come out of an operator, all of which are stood in for, or from somewhere below the step."""
    codes = [frame.f_code for frame, _ in source.frames_of(error)]
    if codes and codes[-1].co_name == "_traced_run" and type(error) is TypeError:
        return False  # the step takes other arguments
    files = [code.co_filename for code in codes]
    return not files or _INTERPOSE in files or not source.is_user_file(files[-1])


def _raises_for_zeros(error: Exception) -> bool:
    """Whether the operator that has raised does so for real tensors of these shapes and dtypes as well."""
    called = [frame for frame, _ in source.frames_of(error) if frame.f_code.co_filename == _INTERPOSE]
    scope = next((frame.f_locals for frame in reversed(called) if "func" in frame.f_locals), {})
    func, given = scope.get("func"), (scope.get("args", ()), scope.get("kwargs") or {})
    leaves, _ = tree.flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape]
    is_known = tensors and all(type(size) is int for size in sizes) and all(map(_is_plain, leaves))
    if (
        func is None
        or not is_known
        or getattr(func, "__name__", "") in _OF_AUTOGRAD
        or sum(t.numel() for t in tensors) > _MOST_ZEROS
    ):
        return False
    args, kwargs = tree.map_leaves(_zeros, given)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            func(*args, **kwargs)
    except Exception as other:
        return type(other) is type(error) and not isinstance(other, _NOT_POSITIVE)
    return False


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str, torch.dtype, torch.device))


def _zeros(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, torch.Tensor)
    return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device) if is_tensor else leaf


def _is_of_machinery(error: Exception) -> bool:
    text = source.first_line(error)
    is_index = type(error) is IndexError
    return (isinstance(error, _OF_MACHINERY) and not is_index) or " " not in text or bool(_SYMBOL.search(text))


def _of_machinery(error: Exception, function: Function) -> CaptureError:
    return CaptureError(
        f"the step cannot be traced{_at_operator(error)}: PyTorch's tracing fails there ({source.kind_of(error)})",
        location=source.raising_line(error, function),
        advice=f"{_ELSEWHERE}; nothing has been changed{others_may_be_why()}",
    )


def _at_operator(error: BaseException) -> str:
    """The function of torch that the step has called last."""
    called = [
        frame.f_locals.get("func") for frame, _ in source.frames_of(error) if frame.f_code.co_filename == _INTERPOSE
    ]
    name = next((getattr(func, "__name__", "") for func in reversed(called) if func is not None), "")
    return f" at {name}()" if name and not name.startswith("__") else ""
