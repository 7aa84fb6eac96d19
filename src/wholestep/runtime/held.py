"""Tensors that are kept from readers while an update waits, and what happens to those who read them anyway.

A held tensor looks as ever (shape, dtype, device, `requires_grad`), but

    its class            has a `__torch_function__`, so that whatever Python does with it comes here first
    its dispatch key     brings every operator in C++ here first, wherever it was called (`_waiting_torch`)
    its memory           is away, so that C++ that asks for its address raises; unless other threads run, one of which
                         may just be about to read there
    its module           hands out parameters only after they have been applied, as what they were before
    its gradient         cannot be read either, if it has yet to come

Each of these can be taken away or put back at any time, any number of times.
"""

from __future__ import annotations

import copy
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from wholestep import _torch, _waiting_torch
from wholestep.errors import WholestepError

Errors = list[WholestepError]

_appliers: list[Callable[[object], Errors]] = []


def when_looked_at(function: Callable[[object], Errors]) -> None:
    """Say what applies everything that waits; it is told who looks, and returns why something could not be applied."""
    _appliers[:] = [function]


def _apply(func: object, looked_at: Any) -> None:
    """Apply what waits; raises if that cannot be done for one of the tensors that are looked at."""
    errors = [error for function in _appliers for error in function(func)]
    for value in _torch.tree_leaves(looked_at):
        if type(value) in _PLAIN and id(value) not in _by_tensor:
            value.__class__ = _PLAIN[type(value)]  # somebody has given the class of a held tensor to another one
        elif errors and isinstance(value, torch.Tensor) and (type(value) in _PLAIN or _waiting_torch.is_marked(value)):
            raise errors[0]


def _apply_and_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    _apply(func, (args, kwargs))
    return func(*args, **(kwargs or {}))


class GuardedParameter(nn.Parameter):
    """A parameter with a waiting update; touching it applies the update and makes it an `nn.Parameter` again."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach and _waiting_torch.is_making_parameter():
            _apply(nn.Parameter, args)
            return _waiting_torch.as_parameter(args[0])
        return _apply_and_call(func, args, kwargs)


class GuardedTensor(torch.Tensor):
    """Optimizer state, or a buffer, with a waiting update."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _apply_and_call(func, args, kwargs)


def _touching(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _apply(getattr(torch.Tensor, name), self)
        return getattr(self, name)(*args, **kwargs)

    return method


# Ways to a tensor's memory past operators; torch functions may be switched off, or not be asked at all.
for _name in (
    *("__deepcopy__", "__reduce_ex__", "data_ptr", "untyped_storage", "storage", "_typed_storage"),
    *("share_memory_", "is_shared", "__dlpack__", "__array__", "numpy", "_use_count"),
):
    for _class in (GuardedParameter, GuardedTensor):
        setattr(_class, _name, _touching(_name))

_GUARDED: dict[type, type] = {nn.Parameter: GuardedParameter, torch.Tensor: GuardedTensor}

_PLAIN: dict[type, type] = {guarded: plain for plain, guarded in _GUARDED.items()}


def plain_class(tensor: torch.Tensor) -> type:
    """The class of a tensor, held or not."""
    return _PLAIN.get(type(tensor), type(tensor))


# Who holds a tensor, by its identity and by that of the storages that stand in for its own and its gradient's.
_by_tensor: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
_by_storage: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


class Held:
    """One tensor, held or not. `real` is the tensor to work with meanwhile, in the same memory; None if not held."""

    def __init__(self, tensor: torch.Tensor, *, with_gradient: bool) -> None:
        self.tensor = tensor
        self.real: torch.Tensor | None = None
        self._class = type(tensor)
        self._stand_in = _waiting_torch.stand_in(tensor)
        self._gradient = _waiting_torch.stand_in(tensor) if with_gradient else None
        _by_tensor[id(tensor)] = self
        for made in (self._stand_in, self._gradient):
            if made is not None:
                _by_storage[_waiting_torch.storage_id(made)] = self

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient cannot be read either."""
        return self._gradient is not None

    def holding(self, *, without_memory: bool) -> list[Callable[[], Any]]:
        """What to call, past everything, to keep the tensor from readers; it does no harm if it is kept already."""
        real = self.tensor.detach() if self.real is None else self.real
        data = self._stand_in if without_memory else _waiting_torch.marked_alias(real)
        return [
            partial(setattr, self, "real", real),
            partial(setattr, self.tensor, "__class__", _GUARDED[self._class]),
            _waiting_torch.setting_data(self.tensor, data),
            *self.expecting_gradient(),
        ]

    def expecting_gradient(self) -> list[Callable[[], Any]]:
        """What to call, past everything, if the gradient has yet to come."""
        return [] if self._gradient is None else [_waiting_torch.setting_gradient(self.tensor, self._gradient)]

    def giving_back(self) -> list[Callable[[], Any]]:
        """What to call, past everything, to let everybody have the tensor again; it does no harm if they have."""
        back = [] if self.real is None else [_waiting_torch.setting_data(self.tensor, self.real)]
        with _waiting_torch.past_traps():
            is_expected = self._gradient is not None and self.tensor.grad is self._gradient
        return [
            *back,
            *([_waiting_torch.setting_gradient(self.tensor, None)] if is_expected else []),
            partial(setattr, self.tensor, "__class__", self._class),
            partial(setattr, self, "real", None),
        ]

    def resolve(self, tensor: torch.Tensor) -> None:
        """Let an alias that was taken from the held tensor or its gradient lie where that lies now."""
        gradient = self._gradient
        is_gradient = gradient is not None and _waiting_torch.storage_id(gradient) == _waiting_torch.storage_id(tensor)
        source = self.tensor.grad if is_gradient else self.tensor
        if source is None or _waiting_torch.is_marked(source):
            raise WholestepError(
                "this gradient was taken while it had yet to come, and the next step began before anybody read it; "
                "read gradients before the next step"
            )
        if is_gradient:
            _waiting_torch.set_data(tensor, source.detach())
        else:
            _waiting_torch.unmark(tensor, source.untyped_storage())


def hold(tensors: Iterable[Held], modules: Iterable[HeldParameters], then: Callable[[], Any]) -> None:
    """Keep tensors from readers, wherever they look: all at once. `then` is a call of C that notes it."""
    is_alone = threading.active_count() == 1
    calls = [call for held in tensors for call in held.holding(without_memory=is_alone)]
    _waiting_torch.past_everything([*calls, *(own.holding() for own in modules), then])


def give_back(tensors: Iterable[Held], modules: Iterable[HeldParameters], then: Callable[[], Any]) -> None:
    """Let everybody have tensors again, all at once."""
    calls = [call for held in tensors for call in held.giving_back()]
    _waiting_torch.past_everything([*calls, *(own.giving_back() for own in modules), then])


class Owners:
    """Knows who else may have the memory of tensors: then nobody could see who reads there.

    Memory that PyTorch cannot resize came from elsewhere (NumPy, a file), or was shown to NumPy or DLPack once. If it
    could be resized when it was seen first, it is the latter, and does not matter once all arrays are gone: those that
    were made of an alias are counted among the users of its storage, the others hold the tensor itself.
    """

    def __init__(self) -> None:
        self._num_references: dict[int, int] = {}

    def why_not_held(self, tensors: Iterable[torch.Tensor]) -> str:
        """Why somebody could look at one of these tensors unseen; "" if nobody can."""
        num_expected: dict[int, int] = {}
        num_found: dict[int, int] = {}
        for tensor in tensors:
            if type(tensor) not in _GUARDED or tensor.layout is not torch.strided:
                return f"one of them is a {type(tensor).__name__}, which has ways of its own to be read"
            key, num_users, is_known_elsewhere = _waiting_torch.storage_users(tensor)
            num_references = sys.getrefcount(tensor) - (id(tensor) in _by_tensor)
            if not is_known_elsewhere:
                self._num_references[id(tensor)] = num_references
            elif num_references > self._num_references.get(id(tensor), 0):
                return "the memory of one of them is shared with NumPy, DLPack, a file or another process"
            num_expected[key] = num_expected.get(key, 0) + 1
            num_found[key] = num_users
        if num_found != num_expected:
            return "somebody holds a view of one of them (`.data`, `.detach()` or a storage)"
        return ""


def _resolve(tensor: torch.Tensor) -> None:
    owner = _by_storage.get(_waiting_torch.storage_id(tensor))
    if owner is not None:
        owner.resolve(tensor)
    elif _waiting_torch.has_memory(tensor):
        _waiting_torch.unmark(tensor)
    else:
        raise WholestepError(
            "this tensor was taken past PyTorch's torch functions while an update of it waited, and what it was taken "
            "from is gone; take it after step.flush()"
        )


class HeldParameters(dict[str, Any]):
    """The parameters of a module some of which are held; asking for one applies what waits.

    What asks in C, or past traps, still finds them, guarded; what writes, writes to the module's own dict.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = _torch.own_parameters(module)
        super().__init__(self._own)

    def holding(self) -> Callable[[], Any]:
        """What to call to stand in for the module's own dict."""
        return partial(operator.setitem, vars(self._module), "_parameters", self)

    def giving_back(self) -> Callable[[], Any]:
        """What to call to put the module's own dict back."""
        return partial(operator.setitem, vars(self._module), "_parameters", self._own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _apply(self._module, list(self._own.values()))
        return dict, (), None, None, iter(self._own.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _apply(self._module, list(self._own.values()))
        return copy.deepcopy(self._own, memo)


def own_dict(parameters: dict[str, Any]) -> dict[str, Any]:
    """The dict of its own that a module keeps its parameters in, some of which may be held."""
    return parameters._own if isinstance(parameters, HeldParameters) else parameters  # pyright: ignore[reportPrivateUsage]


def _asking(name: str) -> Callable[..., Any]:
    def method(self: HeldParameters, *args: Any, **kwargs: Any) -> Any:
        if not _waiting_torch.is_past_traps():
            _apply(self._module, list(self._own.values()))  # pyright: ignore[reportPrivateUsage]
        return getattr(self._own, name)(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return method


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__or__", "__ror__", "__ior__", "__reversed__"),
    *("get", "items", "values", "pop", "popitem", "setdefault", "update", "clear", "copy"),
):
    setattr(HeldParameters, _name, _asking(_name))

_waiting_torch.when_read(_apply, _resolve)
