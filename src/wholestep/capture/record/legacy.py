"""Tensors made by the names of old (`torch.FloatTensor([[1, 2]])`), which torch makes past all that a trace sees."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep import _torch

if TYPE_CHECKING:
    from wholestep.capture.record.calls import Handler
    from wholestep.capture.record.recorder import Recorder


def _make(recorder: Recorder, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of data, as today's functions make them; of sizes (`torch.FloatTensor(2, 3)`), as it is."""
    if len(args) != 1 or kwargs or not isinstance(args[0], (list, tuple, np.ndarray)) or type(args[0]) is torch.Size:
        return kind
    is_general = kind is torch.Tensor
    dtype = torch.get_default_dtype() if is_general else kind.dtype
    device = torch.device("cuda") if not is_general and kind.is_cuda else torch.device("cpu")
    # Of an array, both keep its memory if they can.
    function: Any = torch.as_tensor if isinstance(args[0], np.ndarray) else torch.tensor
    chosen = (
        recorder.handlers[function](recorder, function, args, kwargs) if function in recorder.handlers else function
    )
    return functools.partial(chosen, dtype=dtype, device=device)


def _wrap(recorder: Recorder, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Variable(tensor)`, which hands a tensor from outside to C as it is: the trace's own is to take its place."""
    if not args or not isinstance(args[0], torch.Tensor) or _torch.is_traced(args[0]):
        return kind
    return lambda data, *args, **kwargs: kind(data.detach(), *args, **kwargs)


_KINDS: tuple[Any, ...] = tuple(
    getattr(module, f"{name}Tensor")
    for module in (torch, torch.cuda)
    for name in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)
HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((torch.Tensor, *_KINDS), _make),
    torch.autograd.Variable: _wrap,
}
