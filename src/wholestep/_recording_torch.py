# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""What a recording needs of torch's tracing: real calls in the middle of it, sizes as text. As private as `_torch`.

Seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
from torch._C._dynamo import guards as _guards

from wholestep._torch import FunctionalTensor, outside_modes


@contextlib.contextmanager
def untraced() -> Generator[None]:
    """Run Python for real in the middle of a trace: no mode sees what it calls."""
    with outside_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def sizes_are_shown(is_asking: Callable[[Any], bool]) -> Generator[None]:
    """Let the text of a symbolic size be that of its value where `is_asking(frame)`; the size is fixed then.

    Torch would show the symbol, which must not get into the names and messages that a step makes of sizes.
    """

    def shown(original: Callable[..., str]) -> Callable[..., str]:
        def show(size: torch.SymInt, *spec: Any) -> str:
            if not is_asking(sys._getframe(1)):
                return original(size, *spec)
            value = int(size)
            return format(value, *spec)

        return show

    with contextlib.ExitStack() as stack:
        for name in ("__str__", "__repr__", "__format__"):
            original = getattr(torch.SymInt, name)
            stack.enter_context(mock.patch.object(torch.SymInt, name, shown(original)))
        yield


def class_in_eager(value: Any) -> type:
    """The class that a value has when the step is not traced."""
    if isinstance(value, FunctionalTensor):
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return type(value)


def num_hooks(owner: torch.nn.Module | torch.optim.Optimizer) -> tuple[int, ...]:
    """How many hooks of each kind a module or optimizer has; hooks are traced, so a new one needs a new capture."""
    return tuple([len(value) for name, value in vars(owner).items() if name.endswith("_hooks")])


# The properties of `torch.backends` that say so, without their detour.
is_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
is_mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
# Default devices are such modes.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack

# A number that changes with every write to a dict.
dict_version: Callable[[dict[Any, Any]], int] = _guards.dict_version


def tensor_types(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A check of whether tensors still have the sizes, strides, dtypes, devices and classes they have now.

    Asked in C++. It may also say no when only a mode of torch has changed.
    """
    return _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def num_hooks_ever() -> int:
    """How many hooks have been registered in this process: the same number means that none was added anywhere."""
    return torch.utils.hooks.RemovableHandle.next_id


def _nothing(_: Any = None) -> torch.Tensor:
    return torch.empty(0)


_OPS = torch.library.Library("wholestep", "FRAGMENT")
_OPS.define("rng_state() -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
# Nodes of a step graph have values, be it empty ones.
_OPS.define("set_rng_state(Tensor state) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_OPS.define("seed(int seed) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
# Bound here: while a step is traced, torch's functions of these names are ours.
_get_state, _set_state, _manual_seed = torch.get_rng_state, torch.set_rng_state, torch.manual_seed
_STATE_BYTES = _get_state().numel()
_OPS.impl("rng_state", lambda: _get_state(), "CompositeExplicitAutograd")
_OPS.impl("set_rng_state", lambda state: _nothing(_set_state(state)), "CompositeExplicitAutograd")
_OPS.impl("seed", lambda seed: _nothing(_manual_seed(seed)), "CompositeExplicitAutograd")
torch.library.register_fake("wholestep::rng_state", lambda: torch.empty(_STATE_BYTES, dtype=torch.uint8), lib=_OPS)
torch.library.register_fake("wholestep::set_rng_state", lambda state: _nothing(), lib=_OPS)
torch.library.register_fake("wholestep::seed", lambda seed: _nothing(), lib=_OPS)

RANDOM_STATE = frozenset(
    [torch.ops.wholestep.rng_state.default, torch.ops.wholestep.set_rng_state.default, torch.ops.wholestep.seed.default]
)
"""Ops that read or write the state of the random number generator, in the order of the step's draws."""


@contextlib.contextmanager
def traced_generator(refuse: Callable[[str], None]) -> Generator[None]:
    """Let `get_rng_state`, `set_rng_state` and `manual_seed` be ops of the graph; other ways to seed are refused.

    Drawing is part of the graph, so what decides what is drawn has to be as well: `fork_rng` and libraries that save,
    change and restore the state all end here.
    """

    def manual_seed(seed: Any) -> torch.Generator:
        torch.ops.wholestep.seed(int(seed))
        return torch.default_generator

    def set_state(new_state: torch.Tensor) -> None:
        torch.ops.wholestep.set_rng_state(new_state)

    stands_in: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda: torch.ops.wholestep.rng_state(),
        "set_rng_state": set_state,
        "manual_seed": manual_seed,
        "seed": lambda: refuse("torch.seed()"),
    }
    with contextlib.ExitStack() as stack:
        for name, function in stands_in.items():
            for module in (torch, torch.random):
                stack.enter_context(mock.patch.object(module, name, function))
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
            if torch.cuda.is_available():
                stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, n=name: refuse(f"torch.cuda.{n}()")))
        yield
