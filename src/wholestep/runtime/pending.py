"""Work that a step has left for its next call, and the promise that nobody sees the world without it.

While updates are pending, the parameters and optimizer state they will change are *guarded*: their Python class is one
whose `__torch_function__` applies what is pending before it lets any torch function see the tensor. Whoever looks
(evaluation, `state_dict`, a checkpoint, a held reference, `p.grad`) finds applied updates; whoever does not look does
not pay. The next call of the step takes the guards off and applies the updates where they are hidden best.
"""

from __future__ import annotations

import atexit
import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture import source

logger = logging.getLogger(__name__)

_TOO_OFTEN = 8

_guarding: list[Pending] = []


def flush_all(*, but: Pending | None = None) -> None:
    """Apply everything that is pending in this process, except one."""
    for pending in list(_guarding):
        if pending is not but:
            pending.flush()


def _apply_and_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    for pending in list(_guarding):
        pending.note_interruption(func)
        pending.flush()
    return func(*args, **(kwargs or {}))


class GuardedParameter(nn.Parameter):
    """A parameter with a pending update; touching it applies the update and makes it an `nn.Parameter` again.

    `nn.Parameter` copies and pickles itself by its type, in Python, without asking any torch function first.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        flush_all()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        flush_all()
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _apply_and_call(func, args, kwargs)


class GuardedTensor(torch.Tensor):
    """Optimizer state, or a buffer, with a pending update."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _apply_and_call(func, args, kwargs)


class Pending:
    """What one graph has left for its next call.

    `carries` are the values carried over, by slot id. `apply` is given the numbers of the blocks still to be applied,
    runs them and writes their results; `tensors` lists what they change or look at. `modules` are those that ask for
    the types of their parameters before they use one: what is pending is applied when they are called.
    """

    def __init__(
        self,
        name: str,
        blocks: frozenset[int],
        carried_by: dict[str, frozenset[int]],
        apply: Callable[[frozenset[int]], None],
        tensors: Callable[[], list[torch.Tensor]],
        optimizers: Sequence[Optimizer],
        modules: Sequence[nn.Module],
    ) -> None:
        self.name = name
        self.carries: dict[str, Any] = {}
        self._all_blocks = blocks
        self._blocks: frozenset[int] = frozenset()
        self._carried_by = carried_by
        self._apply = apply
        self._tensors = tensors
        self._optimizers = optimizers
        self._modules = modules
        self._guarded: list[tuple[torch.Tensor, type]] = []
        self._handles: list[Any] = []
        self._num_interruptions = 0
        self._is_applying = False

    @property
    def is_waiting(self) -> bool:
        """Whether something is yet to be applied."""
        return bool(self._blocks)

    def guard(self) -> None:
        """A call has left its carries here: from now on whoever looks at their targets has them applied first."""
        self._blocks = self._all_blocks
        self.watch()

    def watch(self) -> None:
        """Put the guards (back) on, if something is pending."""
        if not self._blocks or self in _guarding:
            return
        for tensor in self._tensors():
            self._guarded.append((tensor, type(tensor)))
            guarded = GuardedParameter if isinstance(tensor, nn.Parameter) else GuardedTensor
            tensor.__class__ = guarded  # pyright: ignore[reportAttributeAccessIssue]
        self._handles = [opt.register_state_dict_pre_hook(lambda _: self.flush()) for opt in self._optimizers]
        self._handles += [module.register_forward_pre_hook(self._before_forward) for module in self._modules]
        _guarding.append(self)

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        self.note_interruption(module)
        self.flush()

    def release(self) -> None:
        """Take the guards off; what is pending stays pending."""
        if self not in _guarding:
            return
        _guarding.remove(self)
        for tensor, cls in self._guarded:
            tensor.__class__ = cls
        self._guarded.clear()
        for handle in self._handles:
            handle.remove()

    def applied(self, block: int) -> None:
        """A block has been applied by the call that is running; what only it needed is let go."""
        self._blocks -= {block}
        for key, users in self._carried_by.items():
            if not users & self._blocks:
                self.carries.pop(key, None)

    def finished(self) -> None:
        """The call that is running has applied everything; what it has left itself, if anything, is not pending yet."""
        self._blocks = frozenset()

    def flush(self) -> None:
        """Apply what is pending now."""
        self.release()
        if not self._blocks or self._is_applying:
            return
        blocks, self._is_applying = self._blocks, True
        try:
            self._apply(blocks)
        finally:
            self._is_applying = False
            self._blocks = frozenset()
            self.carries.clear()

    def continued(self) -> None:
        """The next call came before anybody looked."""
        self._num_interruptions = 0

    def note_interruption(self, func: object) -> None:
        """Somebody looked; if that happens after every step, nothing is ever hidden, which they should know."""
        self._num_interruptions += 1
        if self._num_interruptions == _TOO_OFTEN:
            logger.warning(
                "after each of the last %d steps, %s looked at what %s still had to update (%s), so that nothing could "
                "be hidden; look less often, or pass cross_iteration='none'",
                _TOO_OFTEN,
                source.current_location() or "something",
                self.name,
                getattr(func, "__name__", type(func).__name__),
            )


atexit.register(flush_all)
