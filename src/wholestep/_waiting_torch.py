# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""What PyTorch keeps private and updates that wait need: a tensor that nobody can read unseen.

A tensor can be read in Python, where its class may define `__torch_function__`, and in C++, where it is asked for its
dispatch keys by every operator. One of the keys is reserved for tests of PyTorch itself and stands above all others:
a tensor that has it reaches the function registered here before autograd, autocast or any transform sees the call,
whether it came from Python, from TorchScript or from a kernel of another operator, in any thread.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from wholestep import _torch

_C: Any = torch._C
_KEY = _C._dispatch_key_parse("TESTING_ONLY_GenericWrapper")
_KEYS = _C.DispatchKeySet(_KEY)


def _fresh_thread_keys() -> tuple[Any, Any]:
    """Which keys a thread includes and excludes when it starts: here and now somebody may have changed them."""
    found: list[Any] = []

    def look() -> None:
        found.extend((_C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0], found[1]


_INCLUDED, _EXCLUDED = _fresh_thread_keys()


def ordinary_keys() -> contextlib.AbstractContextManager[Any]:
    """Dispatch as in a thread of its own, although we are somewhere inside of another operator."""
    return _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Run ops for real although somebody traces, fakes or transforms them just now.

    If nobody does, nothing is left to undo, which an interrupt might keep from being done in time.
    """
    is_ordinary = not (
        _C._len_torch_dispatch_stack()
        or _torch.num_modes_before_dispatch()
        or torch.is_inference_mode_enabled()
        or _C._functorch.peek_interpreter_stack() is not None
    )
    return contextlib.nullcontext() if is_ordinary else _torch.outside_modes()


def past_traps() -> contextlib.AbstractContextManager[Any]:
    """In this block, attributes of a held tensor are read and written without anybody being told."""
    return _C.DisableTorchFunctionSubclass()


def is_past_traps() -> bool:
    """Whether we are in such a block, or somebody has switched torch functions off."""
    return not _C._is_torch_function_enabled()


def at_once(calls: Iterable[Callable[[], Any]]) -> None:
    """Call one function of C after the other without any Python in between: no signal handler runs meanwhile."""
    deque(map(operator.call, calls), maxlen=0)


def past_everything(calls: Iterable[Callable[[], Any]]) -> None:
    """Call functions of C at once, for which neither the class of a tensor nor the key means anything.

    Garbage is not collected meanwhile: that would run finalizers, which are Python. If one of them raises, the others
    behind it are not called.
    """
    functions_before = _C._get_torch_function_state()
    keys, functions = _C._ExcludeDispatchKeyGuard(_KEYS), _C.DisableTorchFunctionSubclass()
    leave = [partial(functions.__exit__, None, None, None), partial(keys.__exit__, None, None, None)]
    collecting = [gc.enable] if gc.isenabled() else []
    try:
        at_once([gc.disable, keys.__enter__, functions.__enter__, *calls, *leave, *collecting])
    except BaseException:
        at_once([leave[1], partial(_C._set_torch_function_state, functions_before), *collecting])
        raise


class Switches:
    """What contexts change for a thread: an interrupt between two opcodes may leave one without its end."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._functions = _C._get_torch_function_state()

    def put_back(self) -> None:
        if torch.is_grad_enabled() is not self._grad:
            _C._set_grad_enabled(self._grad)
        if _C._get_torch_function_state() != self._functions:
            _C._set_torch_function_state(self._functions)


class _StandIn(torch.Tensor):
    """Only its type is needed: PyTorch makes tensors with further dispatch keys for such classes only."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with the key and without memory: asking for its address raises."""
    made = torch.Tensor._make_wrapper_subclass(
        _StandIn,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=tensor.device,
        _extra_dispatch_keys=_KEYS,
    )
    _C._set_throw_on_mutable_data_ptr(made)
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    set_data(plain, made)
    return plain


def marked_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of another one, with the key."""
    made = stand_in(tensor)
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    past_everything([partial(_C.TensorBase.set_, made, *place)])
    return made


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`, whichever of them has the key; the tensor has it afterwards if `data` has."""
    past_everything([setting_data(tensor, data)])


def setting_data(tensor: torch.Tensor, data: torch.Tensor) -> Callable[[], None]:
    """A call of C that does the same past everything."""
    return partial(_C.TensorBase.data.__set__, tensor, data)


def setting_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> Callable[[], None]:
    """A call of C that sets the gradient of a tensor."""
    return partial(_C.TensorBase.grad.__set__, tensor, gradient)


def setting_gradient_alias(tensor: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
    """A call of C that makes another tensor in the place of `gradient`, with its key, the gradient of a tensor.

    It is made when that is called, past everything; no mode is told.
    """
    made = map(_C.TensorBase._make_subclass, (torch.Tensor,), (gradient,))
    return partial(deque, map(_C.TensorBase.grad.__set__, (tensor,), made), 0)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the key."""
    return _C._dispatch_keys(tensor).has(_KEY)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, which is not read."""
    return tensor.untyped_storage()._cdata


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor with the key lies in memory, and does not only stand in for one that does."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def unmark(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> None:
    """Take the key off a tensor; with `storage` it lies there from now on, in the same place."""
    storage = tensor.untyped_storage() if storage is None else storage
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    set_data(tensor, plain)


def storage_users(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """Identity of the storage of a tensor, how many have it, and whether others than PyTorch may know of it.

    Counted are tensors and storages wherever they are held, in Python or C++. Others are NumPy, DLPack, files and other
    processes: memory that came from them, or was shown to them once, cannot be resized, or is shared.
    """
    key, num_owners, num_references, is_known_elsewhere = _storage_counts(tensor)
    return key, 1 + num_owners - _ALONE[1] + num_references - _ALONE[2], is_known_elsewhere


def _storage_counts(tensor: torch.Tensor) -> tuple[int, int, int, bool]:
    storage = tensor.untyped_storage()
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    key = storage._cdata
    return key, _C._storage_Use_Count(key), sys.getrefcount(storage), is_shared or not storage.resizable()


# What is counted if there is one tensor and nobody else; it depends on how PyTorch keeps the objects alive.
_ALONE = _storage_counts(torch.empty(1))


def is_held_in_cpp(tensor: torch.Tensor) -> bool:
    """Whether C++ has a tensor, and not only Python: a TorchScript module, a graph of autograd."""
    return _C.TensorBase._use_count(tensor) > _ALONE_IN_PYTHON


_ALONE_IN_PYTHON: int = _C.TensorBase._use_count(torch.empty(1))


def is_gradient_taken(tensor: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    """Whether somebody has the alias of `gradient` that a tensor has, or had, or one made of it."""
    if gradient is None:
        return False
    with past_traps():
        current = tensor.grad
        num_expected = 1
        if current is not None and is_marked(current):
            num_expected = 2
            if (sys.getrefcount(current), _C.TensorBase._use_count(current)) != _OF_GRADIENT:
                return True
        return _C._storage_Use_Count(storage_id(gradient)) - _ALONE[1] + 1 != num_expected


def _counts_of_gradient() -> tuple[int, int]:
    tensor = torch.empty(1)
    past_everything([setting_gradient_alias(tensor, stand_in(tensor))])
    current = tensor.grad
    return sys.getrefcount(current), _C.TensorBase._use_count(current)


# What is counted of a gradient if only its tensor has it.
_OF_GRADIENT = _counts_of_gradient()


def increment_versions(tensors: list[torch.Tensor]) -> None:
    """What in-place operators do, so that a backward through values of before raises."""
    torch.autograd.graph.increment_version(tensors)


def is_making_parameter() -> bool:
    """Whether the caller of our caller is `nn.Parameter(...)`, which wants to be given its own type back."""
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """What `nn.Parameter(tensor)` makes of a parameter."""
    return torch.Tensor._make_subclass(nn.Parameter, tensor, True)  # pyright: ignore[reportArgumentType]


def when_compiling(apply: Callable[[Any], None]) -> None:
    """From now on, call `apply` whenever `torch.compile` begins to compile; it serves until torch forgets its caches.

    Torch's tracer follows Python and knows the class of a tensor: it would try to trace what applies an update.
    """
    if apply not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(apply)


_library = torch.library.Library("_", "IMPL")


def when_read(apply: Callable[[Any, Any], None], resolve: Callable[[torch.Tensor], None]) -> None:
    """From now on, whenever an operator is given tensors with the key, call `apply(operator, arguments)` first.

    Then `resolve(tensor)` for those tensors that still have the key; it must take it off, or raise.
    """

    def before(operator: Any, *args: Any, **kwargs: Any) -> Any:
        apply(operator, (args, kwargs))
        for value in _torch.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and is_marked(value):
                resolve(value)
        return operator(*args, **kwargs)

    _library.fallback(before, "TESTING_ONLY_GenericWrapper")
