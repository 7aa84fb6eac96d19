# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Tensors without memory, for models that nobody wants to allocate. As private as `_torch`.

Seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

# Tables that model code reads back: drop rates of layers, the order and the seed of a shuffled data set.
_TABLES = frozenset(
    [
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.linspace.default,
        aten.randperm.default,
        aten.randperm.generator,
        aten.random_.default,
        aten.random_.to,
    ]
)
_MAX_TABLE = 2**16


class UnloggedRefusals:
    """Let torch log no error for a fake kernel that refuses its inputs: whoever catches the error may go on."""

    def __enter__(self) -> None:
        fake_tensor.log.addFilter(_is_no_refusal)

    def __exit__(self, *_: Any) -> None:
        fake_tensor.log.removeFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


class BlankMode(FakeTensorMode):
    """A fake mode whose tensors stand for real ones: a capture lifts them as it lifts those.

    They have no values, except what was written as numbers (`torch.tensor(3.0)`) and short tables (`torch.linspace`).
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().dispatch(func, types, args, kwargs)
        if func in _TABLES and isinstance(result, FakeTensor) and result.numel() <= _MAX_TABLE:
            result.constant = _table(func, args, kwargs or {})
            self.fake_tensor_converter.add_constant_storage_mapping(result)
        return result


def _table(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with _disable_current_modes():
        if func.overloadpacket is not aten.random_:
            return func(*args, **{**kwargs, "device": "cpu"})
        filled, *others = args
        return func(torch.empty(filled.shape, dtype=filled.dtype), *others, **kwargs)


def blank_mode(tensor: object) -> BlankMode | None:
    """The mode that a blank tensor was made under; None for all others."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, BlankMode) else None


def is_blank(tensor: object) -> bool:
    """Whether a tensor was made under a `BlankMode`."""
    return blank_mode(tensor) is not None


def blank_twin(mode: FakeTensorMode, blank: torch.Tensor) -> FakeTensor:
    """A fake tensor of another mode like a blank one; modes do not take each other's tensors."""
    with _disable_current_modes(), mode:
        twin = torch.empty_strided(blank.shape, blank.stride(), dtype=blank.dtype, device=blank.device)
    assert isinstance(twin, FakeTensor)
    return twin


def convert_blank_module(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """What `module.to()` and its kin do, for blank tensors: parameters stay the objects that they are.

    Torch exchanges the contents of fake parameters, which fails for those that somebody refers to: tied weights, and
    parameters that an optimizer has.
    """
    seen: set[int] = set()
    for owner in module.modules() if recurse else [module]:
        for parameter in owner._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            _convert(parameter, function)
            if parameter.grad is not None:
                _convert(parameter.grad, function)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = function(buffer)
    return module


def _convert(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        converted = function(tensor)
    if converted is tensor:
        return
    tensor.data = converted
    if isinstance(tensor, FakeTensor) and isinstance(converted, FakeTensor):
        tensor.fake_device = converted.fake_device


def _copying(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`copy.deepcopy` of a tensor; torch copies everything that a fake one refers to, its mode included."""

    def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) in memo or not is_blank(tensor):
            return original(tensor, memo)
        with torch.no_grad():
            twin = tensor.clone()
        twin = nn.Parameter(twin) if isinstance(tensor, nn.Parameter) else twin
        memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            twin.grad = deepcopy(tensor.grad, memo)
        return twin

    return deepcopy


@contextlib.contextmanager
def working_with_blank_modules() -> Generator[None]:
    """Let modules of blank tensors be converted and copied."""
    with (
        mock.patch.object(nn.Module, "_apply", convert_blank_module),
        mock.patch.object(torch.Tensor, "__deepcopy__", _copying(torch.Tensor.__deepcopy__)),
    ):
        yield
