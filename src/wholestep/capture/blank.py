"""Models without weights: whatever is made inside `no_weights()` has shapes and types, and no memory.

    with no_weights():
        model = LlamaForCausalLM(config)                  # seven billion parameters, some megabytes of Python
        optimizer = AdamW(model.parameters(), fused=True)
    captured = capture(train_step, (model, optimizer, batch), {})

A capture of such a step is for looking and planning: it has the graph, and nothing to run it on. Code that is written
for an accelerator runs where there is none: there, what it asks for is taken to be on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from wholestep import _fake_torch

is_blank = _fake_torch.is_blank
blank_twin = _fake_torch.blank_twin

_ACCELERATORS = ("cuda", "xpu", "mps", "hpu")
_MOVES = {getattr(torch.Tensor, name): name for name in _ACCELERATORS if hasattr(torch.Tensor, name)}


@contextlib.contextmanager
def no_weights() -> Generator[None]:
    """Make tensors without memory, on an accelerator that need not be there.

    Model code runs as it is, with two differences: it cannot read values back (`.item()`), and where torch has no such
    device, tensors that it puts on a GPU are on the CPU, `torch.autocast("cuda")` included.
    """
    with _inside(_fake_torch.BlankMode()):
        yield


@contextlib.contextmanager
def where_made(tensors: Iterable[torch.Tensor]) -> Generator[None]:
    """Be in the `no_weights()` in which the first blank one of some tensors was made; nowhere else if there is none."""
    mode = next((mode for tensor in tensors if (mode := _fake_torch.blank_mode(tensor)) is not None), None)
    with contextlib.nullcontext() if mode is None else _inside(mode):
        yield


@contextlib.contextmanager
def _inside(mode: _fake_torch.BlankMode) -> Generator[None]:
    with (
        warnings.catch_warnings(),
        mode,
        _fake_torch.working_with_blank_modules(),
        mock.patch.object(torch.autocast, "__init__", _autocast_here(torch.autocast.__init__)),
        _Here(),
    ):
        # Recurrent modules ask for it, and take no harm.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class _Here(TorchFunctionMode):
    """Turns devices that are not there into the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES and _is_missing(_MOVES[func]):
            return args[0]
        if func is torch.Tensor.to:
            args = tuple([_here(argument) for argument in args])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _here(kwargs["device"])}
        return func(*args, **kwargs)


def _here(device: Any) -> Any:
    """The device, or the CPU in place of one that is missing; anything else as it is."""
    if isinstance(device, (str, torch.device)) and _is_missing(str(device).split(":")[0]):
        return torch.device("cpu")
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cpu") if is_number and _is_missing("cuda") else device


@functools.cache
def _is_missing(kind: str) -> bool:
    if kind not in _ACCELERATORS:
        return False
    module = getattr(torch, kind, None)
    return module is None or not module.is_available()


def _autocast_here(original: Callable[..., None]) -> Callable[..., None]:
    def init(
        context: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kw: Any
    ) -> None:
        if _is_missing(device_type):
            dtype = dtype or torch.get_autocast_dtype(device_type)
            device_type = "cpu"
        original(context, device_type, dtype, *args, **kw)

    return init
