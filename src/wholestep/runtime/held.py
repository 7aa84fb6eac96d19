"""Tensors that are kept from readers while an update waits, and what happens to those who read them anyway.

A held tensor looks as ever (shape, dtype, device, `requires_grad`), but

    its class            has a `__torch_function__`, so that whatever Python does with it comes here first
    its dispatch key     brings every operator in C++ here first, wherever it was called (`_waiting_torch`)
    its memory           is away, so that C++ that asks for its address raises; unless other threads run, one of which
                         may just be about to read there
    its module           hands out parameters only after they have been applied, as what they were before
    its gradient         cannot be read or written either, if it has yet to come, or if the update still needs it

Each of these can be taken away or put back at any time, any number of times.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from wholestep import _torch, _waiting_torch
from wholestep._threads import is_only_thread
from wholestep.errors import WholestepError

Errors = list[WholestepError]

_appliers: list[tuple[Callable[[object], Errors], Callable[[torch.Tensor], None]]] = []


def when_looked_at(apply: Callable[[object], Errors], let_go: Callable[[torch.Tensor], None]) -> None:
    """Say what applies everything that waits; it is told who looks, and returns why something could not be applied.

    `let_go` is given a tensor that is held although all was applied: it gives it back if nobody has left work again.
    """
    _appliers[:] = [(apply, let_go)]


def _apply(func: object, looked_at: Any) -> None:
    """Apply what waits; raises if that cannot be done for one of the tensors that are looked at."""
    errors = [error for apply, _ in _appliers for error in apply(func)]
    for value in _torch.tree_leaves(looked_at):
        if type(value) in _PLAIN and id(value) not in _by_tensor:
            value.__class__ = _PLAIN[type(value)]  # somebody has given the class of a held tensor to another one
        elif errors and isinstance(value, torch.Tensor) and (type(value) in _PLAIN or _waiting_torch.is_marked(value)):
            raise errors[0]
        elif type(value) in _PLAIN:
            for _, let_go in _appliers:
                let_go(value)


def _apply_and_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    _apply(func, (args, kwargs))
    return func(*args, **(kwargs or {}))


def require_applied(values: Iterable[Any]) -> None:
    """Apply what waits if one of these values is held; raises if that cannot be done."""
    if any(type(value) in _PLAIN for value in values):
        _apply(require_applied, list(values))


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


# Ways to a tensor's memory past operators; torch functions may be switched off, or not be asked at all. `as_subclass`
# calls one, but cannot take what comes out of Python.
for _name in (
    *("__deepcopy__", "__reduce_ex__", "data_ptr", "untyped_storage", "storage", "_typed_storage"),
    *("share_memory_", "is_shared", "__dlpack__", "__array__", "numpy", "_use_count", "as_subclass"),
):
    for _class in (GuardedParameter, GuardedTensor):
        setattr(_class, _name, _touching(_name))

_GUARDED: dict[type, type] = {nn.Parameter: GuardedParameter, torch.Tensor: GuardedTensor}

_PLAIN: dict[type, type] = {guarded: plain for plain, guarded in _GUARDED.items()}


def plain_class(tensor: torch.Tensor) -> type:
    """The class of a tensor, held or not."""
    return _PLAIN.get(type(tensor), type(tensor))


# What is known of a tensor, by its identity and by that of the storages that stand in for its own and its gradient's.
_by_tensor: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
_by_storage: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
_by_gradient: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


def is_guarded(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the class of those that are held."""
    return type(tensor) in _PLAIN


class Held:
    """One tensor, held or not. `real` is the tensor to work with meanwhile, in the same memory; None if not held.

    `real_gradient` is its gradient meanwhile; None if that has yet to come. `holder` is who holds it, or is about to.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.real: torch.Tensor | None = None
        self.real_gradient: torch.Tensor | None = None
        self.holder: object = None
        self._class = _PLAIN.get(type(tensor), type(tensor))
        self._stand_in = _waiting_torch.stand_in(tensor)
        self._gradient: torch.Tensor | None = None
        # The class that the tensor had when somebody began to change it, and is not through yet.
        self._changing_from: type | None = None
        _by_storage[_waiting_torch.storage_id(self._stand_in)] = self
        _by_tensor[id(tensor)] = self

    @staticmethod
    def of(tensor: torch.Tensor) -> Held:
        """What is known of a tensor: the same for all who hold it one after the other."""
        return _by_tensor.get(id(tensor)) or Held(tensor)

    def suit_class(self) -> None:
        """Give the tensor the class that a held one has, or its own.

        That may take a while: Python tells audit hooks of it first, which may be Python, in which signal handlers run
        and look at the tensor, which changes its class as well.
        """
        guarded = _GUARDED[self._class]
        while type(self.tensor) is not (suited := self._class if self.holder is None else guarded):
            if type(self.tensor) not in (self._class, guarded):
                return  # somebody else has given it another one
            outer = self._changing_from
            if outer is not None:  # Python will let go of that class once more, although we have done so here
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(outer))
            self._changing_from = type(self.tensor)
            try:
                self.tensor.__class__ = suited
            finally:
                self._changing_from = outer

    def real_now(self) -> torch.Tensor:
        """The tensor to work with while this one is held."""
        return self.tensor.detach() if self.real is None else self.real

    def holding(self, real: torch.Tensor, *, without_memory: bool) -> list[Callable[[], Any]]:
        """What to call, past everything, to keep the memory from readers; it does no harm if it is kept already."""
        data = self._stand_in if without_memory else _waiting_torch.marked_alias(real)
        return [partial(setattr, self, "real", real), _waiting_torch.setting_data(self.tensor, data)]

    def holding_gradient(self, *, keep: bool) -> list[Callable[[], Any]]:
        """What to call, past everything, to keep the gradient from readers; it is put back only if `keep`."""
        is_held = self._is_gradient_held()
        real = self.real_gradient if is_held else self._current_gradient()
        is_taken = _waiting_torch.is_gradient_taken(self.tensor, self._gradient)
        if self._gradient is None or is_taken:  # whoever has taken that one shall not find the next gradient there
            made = _waiting_torch.stand_in(self.tensor)
            _by_gradient[_waiting_torch.storage_id(made)] = self
            self._gradient = made
        return [
            partial(setattr, self, "real_gradient", real if keep else None),
            _waiting_torch.setting_gradient_alias(self.tensor, self._gradient),
        ]

    def giving_back(self) -> list[Callable[[], Any]]:
        """What to call, past everything, to let everybody have the memory again; it does no harm if they have."""
        back = [] if self.real is None else [_waiting_torch.setting_data(self.tensor, self.real)]
        if self._is_gradient_held():
            back.append(_waiting_torch.setting_gradient(self.tensor, self.real_gradient))
        return [
            *back,
            partial(setattr, self, "real_gradient", None),
            partial(setattr, self, "real", None),
            partial(setattr, self, "holder", None),
        ]

    def drop_gradient(self) -> None:
        """Let go of the gradient if the tensor has none, or another one by now."""
        if self.real_gradient is not None and not self._is_gradient_held():
            self.real_gradient = None

    def _current_gradient(self) -> torch.Tensor | None:
        with _waiting_torch.past_traps():
            return self.tensor.grad

    def _is_gradient_held(self) -> bool:
        gradient = self._current_gradient()
        return gradient is not None and _waiting_torch.is_marked(gradient)

    def resolve(self, tensor: torch.Tensor) -> None:
        """Let an alias that was taken from the held tensor lie where that lies now."""
        source = self.real if self.real is not None else self.tensor
        _waiting_torch.unmark(tensor, source.untyped_storage())

    def resolve_gradient(self, tensor: torch.Tensor) -> None:
        """Let an alias that was taken from its gradient lie where that lies now."""
        source = self._current_gradient()
        is_current = self._gradient is not None and (
            _waiting_torch.storage_id(self._gradient) == _waiting_torch.storage_id(tensor)
        )
        if not is_current or source is None or _waiting_torch.is_marked(source):
            raise WholestepError(
                "this gradient was taken while it had yet to come, and the next step began before anybody read it; "
                "read gradients before the next step"
            )
        _waiting_torch.set_data(tensor, source.detach())


def behind(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that has the memory of another one, held or not; None if it has yet to come."""
    if is_guarded(tensor):
        held = _by_tensor.get(id(tensor))
        return None if held is None else held.real
    if _waiting_torch.is_marked(tensor):
        held = _by_gradient.get(_waiting_torch.storage_id(tensor))
        return None if held is None else held.real_gradient
    return tensor


class Grip:
    """Tensors that a holder holds together, by slot id, and the modules that own them. It serves once.

    `gradients` are the slots of those whose gradient is held too, and whether it is put back afterwards (`keep`).
    """

    def __init__(
        self, holder: object, by_slot: dict[str, Held], gradients: Mapping[str, bool], modules: Iterable[nn.Module]
    ) -> None:
        self._holder = holder
        self.by_slot = by_slot
        self.is_complete = False
        """Whether all of them are held."""
        self._tensors = list({id(held): held for held in by_slot.values()}.values())
        self._gradients = [(by_slot[slot], keep) for slot, keep in gradients.items() if slot in by_slot]
        self._modules = list(map(HeldParameters, modules))
        # Empty as soon as somebody has given them back.
        self._ours = [self]

    def has(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the very tensors, slot by slot."""
        known = self.by_slot
        return tensors.keys() == known.keys() and all(known[slot].tensor is tensor for slot, tensor in tensors.items())

    def holding(self) -> Callable[[], None]:
        """What to call to keep them from readers, wherever they look; `is_complete` if nobody has looked meanwhile."""
        reals = [held.real_now() for held in self._tensors]
        calls = [own.holding() for own in self._modules]
        calls += [*self._holding_gradients(), partial(setattr, self, "is_complete", True)]
        return partial(self._hold, reals, calls)

    def _hold(self, reals: list[torch.Tensor], calls: list[Callable[[], Any]]) -> None:
        for held in self._tensors:
            held.holder = self._holder
            held.suit_class()
        # From here on readers come to us, and whoever does gives everything back. Threads that C starts come and go, so
        # that is asked as late as can be.
        is_alone = is_only_thread()
        pairs = zip(self._tensors, reals, strict=True)
        memory = [call for held, real in pairs for call in held.holding(real, without_memory=is_alone)]
        with contextlib.suppress(IndexError):
            _waiting_torch.past_everything([partial(operator.getitem, self._ours, 0), *memory, *calls])

    def hold_gradients(self) -> None:
        """Keep the gradients from readers, which another call has computed since."""
        if self._gradients:
            _waiting_torch.past_everything(self._holding_gradients())

    def drop_gradients(self) -> None:
        """Let go of gradients that their tensors do not have any more."""
        for held, _ in self._gradients:
            held.drop_gradient()

    def _holding_gradients(self) -> list[Callable[[], Any]]:
        return [call for held, keep in self._gradients for call in held.holding_gradient(keep=keep)]

    def give_back(self) -> None:
        """Let everybody have them again."""
        calls = [call for held in self._tensors for call in held.giving_back()]
        modules = [call for own in self._modules for call in own.giving_back()]
        noted = [self._ours.clear, partial(setattr, self, "is_complete", False)]
        _waiting_torch.past_everything([*calls, *modules, *noted])
        for held in self._tensors:
            held.suit_class()

    def give_back_one(self, tensor: torch.Tensor) -> None:
        """Let everybody have one of them again, if it was this holder who held it."""
        for held in self._tensors:
            if held.tensor is tensor and held.holder in (self._holder, None):
                _waiting_torch.past_everything(held.giving_back())
                held.suit_class()


class Owners:
    """Knows who else may have the memory of tensors: then nobody could see who reads there.

    Memory that PyTorch cannot resize came from elsewhere (NumPy, a file), or was shown to NumPy or DLPack once. If it
    could be resized when it was seen first, it is the latter, and does not matter once all arrays are gone: those that
    were made of an alias are counted among the users of its storage, the others hold the tensor itself.
    """

    def __init__(self) -> None:
        # By tensor: its storage, as it was when nobody else knew it, and the fewest references to the tensor then.
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def why_not_held(self, tensors: Iterable[torch.Tensor]) -> str:
        """Why somebody could look at one of these tensors unseen; "" if nobody can."""
        num_expected: dict[int, int] = {}
        num_found: dict[int, int] = {}
        for tensor in tensors:
            if type(tensor) not in _GUARDED or tensor.layout is not torch.strided:
                return f"one of them is a {type(tensor).__name__}, which has ways of its own to be read"
            if _waiting_torch.is_held_in_cpp(tensor):
                return "C++ holds one of them (a TorchScript module, an autograd graph), and may read it unasked"
            key, num_users, is_known_elsewhere = _waiting_torch.storage_users(tensor)
            num_references = sys.getrefcount(tensor) - (id(tensor) in _by_tensor)
            num_before = self._num_references_before(tensor)
            if not is_known_elsewhere:
                fewest = num_references if num_before is None else min(num_before, num_references)
                self._seen[id(tensor)] = weakref.ref(tensor.untyped_storage()), fewest
            elif num_before is None or num_references > num_before:
                return "the memory of one of them is shared with NumPy, DLPack, a file or another process"
            num_expected[key] = num_expected.get(key, 0) + 1
            num_found[key] = num_users
        if num_found != num_expected:
            return "somebody holds a view of one of them (`.data`, `.detach()` or a storage)"
        return ""

    def _num_references_before(self, tensor: torch.Tensor) -> int | None:
        """How many had a tensor when only PyTorch knew the memory it has now; None if that was never so."""
        storage, number = self._seen.get(id(tensor), (None, 0))
        return None if storage is None or storage() is not tensor.untyped_storage() else number


def _resolve(tensor: torch.Tensor) -> None:
    """Take the key off a tensor that was an alias of a held one; one that is held itself is looked at again."""
    if is_guarded(tensor):
        return
    if _waiting_torch.has_memory(tensor):
        _waiting_torch.unmark(tensor)
        return
    storage = _waiting_torch.storage_id(tensor)
    owner, owner_of_gradient = _by_storage.get(storage), _by_gradient.get(storage)
    if owner is not None:
        owner.resolve(tensor)
    elif owner_of_gradient is not None:
        owner_of_gradient.resolve_gradient(tensor)
    else:
        raise WholestepError(
            "this tensor was taken past PyTorch's torch functions while an update of it waited, and what it was taken "
            "from is gone; take it after step.flush()"
        )


class HeldParameters(dict[str, Any]):
    """The parameters of a module some of which are held; asking for one applies what waits.

    What asks in C, or past traps, still finds them, guarded; all else is asked of the module's own dict, also by those
    who keep this one when it is not in its place any more (`copy.copy(module)` does).
    """

    def __init__(self, module: nn.Module) -> None:
        own = _torch.own_parameters(module)
        self._module = module
        self._own = own._own if isinstance(own, HeldParameters) else own
        super().__init__(self._own)

    def holding(self) -> Callable[[], Any]:
        """What to call to stand in for the module's own dict."""
        return partial(operator.setitem, vars(self._module), "_parameters", self)

    def giving_back(self) -> list[Callable[[], Any]]:
        """What to call to put the module's own dict back; nothing if somebody has put another one there."""
        namespace = vars(self._module)
        is_there = namespace.get("_parameters") is self
        return [partial(operator.setitem, namespace, "_parameters", self._own)] if is_there else []

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __eq__(self, other: object) -> bool:
        return self._own == (other._own if isinstance(other, HeldParameters) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def keys(self) -> Any:
        return self._own.keys()

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
    *("get", "items", "values", "pop", "popitem", "setdefault", "update", "clear", "copy", "__repr__"),
):
    setattr(HeldParameters, _name, _asking(_name))

_waiting_torch.when_read(_apply, _resolve)
