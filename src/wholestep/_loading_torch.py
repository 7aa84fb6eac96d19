"""What is private to PyTorch about how modules load a state dict; seen in torch 2.11 to 2.13."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

from torch import nn

_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


def runs_own_code(module: nn.Module) -> bool:
    """Whether code that is not torch's takes part when a module loads a state dict: it may refuse half way."""
    return any(_has_hooks(part) or any(_is_own(part, name) for name in _LOADING) for part in module.modules())


def has_extra_state(part: nn.Module) -> bool:
    """Whether a module, parts aside, saves more than parameters and buffers. There is no public way to ask."""
    return type(part).get_extra_state is not nn.Module.get_extra_state


def tensor_tables(part: nn.Module) -> list[dict[str, Any]]:
    """The dicts that hold a module's own parameters and buffers."""
    return [part._parameters, part._buffers]


def _has_hooks(part: nn.Module) -> bool:
    return bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)


def _is_own(part: nn.Module, name: str) -> bool:
    function = getattr(part, name)
    return not str(getattr(function, "__module__", "")).startswith("torch.")
