"""Switches of the process: what tracing bakes into a graph, and what a step must leave as it found it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

from wholestep import _recording_torch
from wholestep.capture import source
from wholestep.errors import CaptureError

GRAD_MODES = ("torch.is_grad_enabled()", "torch.is_inference_mode_enabled()")

# The switches of torch that a captured graph depends on: they choose dtypes, devices, and between operators.
SWITCHES: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": lambda: torch.get_default_device() if _recording_torch.num_function_modes() else None,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "autocast on cpu": lambda: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    "autocast on cuda": lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    "torch.are_deterministic_algorithms_enabled()": _recording_torch.is_deterministic,
    "torch.get_float32_matmul_precision()": _recording_torch.float32_matmul_precision,
    "torch.backends.cuda.flash_sdp_enabled()": _recording_torch.is_flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": _recording_torch.is_mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": _recording_torch.is_math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": _recording_torch.is_cudnn_sdp_enabled,
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.cudnn.enabled": _recording_torch.is_cudnn_enabled,
    "torch.backends.mkldnn.enabled": _recording_torch.is_mkldnn_enabled,
}

# What a step may set besides. No graph depends on these, so nobody would set them again.
_OTHERS: dict[str, Callable[[], Any]] = {
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.set_printoptions()": lambda: copy.copy(vars(_recording_torch.print_options())),
    "numpy.geterr()": np.geterr,
    "numpy.get_printoptions()": np.get_printoptions,
}

_SETTERS: dict[str, Callable[[Any], Any]] = {
    "torch.get_default_dtype()": torch.set_default_dtype,
    "torch.is_grad_enabled()": torch.set_grad_enabled,
    "torch.is_anomaly_enabled()": torch.autograd.set_detect_anomaly,
    "torch.are_deterministic_algorithms_enabled()": torch.use_deterministic_algorithms,
    "torch.get_float32_matmul_precision()": torch.set_float32_matmul_precision,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.enable_flash_sdp,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.enable_mem_efficient_sdp,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.enable_math_sdp,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.enable_cudnn_sdp,
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.set_fastpath_enabled,
    "torch.get_num_threads()": torch.set_num_threads,
    "torch.set_printoptions()": lambda options: vars(_recording_torch.print_options()).update(options),
    "numpy.geterr()": lambda errors: np.seterr(**errors),
    "numpy.get_printoptions()": lambda options: np.set_printoptions(**options),
}


def standing() -> dict[str, Any]:
    """How all switches stand."""
    return {name: switch() for name, switch in {**SWITCHES, **_OTHERS}.items()}


@contextlib.contextmanager
def left_alone() -> Generator[None]:
    """Raise `CaptureError` if a switch was set inside and not set back; however it ends, it is set back."""
    before = standing()
    try:
        yield
        changed = _changed(before)
        if changed:
            raise CaptureError(
                f"the step leaves {changed[0]} changed from {before[changed[0]]} to {standing()[changed[0]]}",
                location=source.current_location(),
                advice="Set it outside the step, or within a `with` block",
            )
    finally:
        for name in _changed(before):
            if name in _SETTERS:
                _SETTERS[name](before[name])


def _changed(before: dict[str, Any]) -> list[str]:
    return [name for name, now in standing().items() if now != before[name]]
