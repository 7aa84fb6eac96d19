"""What is refused before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from wholestep import _torch
from wholestep.capture import source
from wholestep.capture.discover import Reachable
from wholestep.errors import CaptureError


def refuse_nested(function: Callable[..., Any]) -> None:
    if _torch.is_tracing():
        raise CaptureError(
            f"a compiled step calls another one ({function.__qualname__})",
            location=source.current_location(),
            advice="Compile the outer one alone: it takes in whatever it calls",
        )


def refuse_wrappers(found: Reachable, function: Callable[..., Any]) -> None:
    for name, module in found.modules.items():
        inner = "module" if isinstance(module, (DataParallel, DistributedDataParallel)) else "_orig_mod"
        if inner in dict(module.named_children()):
            raise CaptureError(
                f"'{name}' is wrapped in {type(module).__name__}",
                location=source.location_of(function),
                advice=f"Pass the plain module ({name}.{inner})",
            )
        for path, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule) and [*part.parameters(), *part.buffers()]:
                raise CaptureError(
                    f"'{f'{name}.{path}'.rstrip('.')}' is a module of torch.jit, which keeps its tensors out of sight",
                    location=source.location_of(function),
                    advice="Train the plain module, and script or trace it afterwards",
                )


def refuse_recurrent(found: Reachable) -> None:
    """Eager's fused recurrent kernels cannot be traced with a symbolic batch; their unfused form rounds differently."""
    for name, module in found.modules.items():
        for path, submodule in module.named_modules():
            if isinstance(submodule, nn.RNNBase):
                raise CaptureError(
                    f"'{path or name}' is a {type(submodule).__name__}, which needs a fixed batch size",
                    advice="Leave dynamic_batch as it is: each size is captured apart then",
                )
