"""Functionalisation that does as eager does: in-place ops leave their tensor in its layout, questions get answers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from wholestep import _sizes_torch, _torch
from wholestep.capture import looks, source
from wholestep.capture.questions import is_asking
from wholestep.capture.session import Session
from wholestep.errors import CaptureError
from wholestep.graph import Phase, ops

_MOVING = frozenset({"copy_", "fill_", "zero_", "masked_fill_", "index_fill_", "index_copy_", "scatter_", "index_put_"})


_ASKED_BY_STEP = (torch.equal, torch.Tensor.equal)
# Their schemas say that results have memory of their own, their kernels return views.
_SHARING: dict[Any, Any] = {
    torch.ops.aten.unsafe_split.Tensor: torch.ops.aten.split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default: torch.ops.aten.split_with_sizes.default,
}


class Functional(_torch.FunctionalTensorMode):
    """Traces in-place ops as functions whose results have the strides of the tensor they stand for.

    Where a function would give other ones, its node is marked `in_layout`. Operators that look at values are answered
    where the call decides them (see `Questions`).
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _torch.is_a_check(func):
            self._session.looks.check(func, args, kwargs or {})
            return None
        if self._session.looks.has_symbols:
            self._refuse_as_place(func, args, kwargs or {})
        result = self._dispatched(func, types, args, kwargs)
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, _torch.FunctionalTensor):
                if value.layout is not torch.strided and self._session.phase is Phase.FORWARD:
                    raise CaptureError(
                        f"{_torch.packet_name(func)} makes a tensor with layout {value.layout}",
                        location=source.current_location(),
                        advice="Only dense (strided) tensors are traced",
                    )
                if self._session.looks.has_symbols and _sizes_torch.unknown_sizes(value):
                    raise looks.refused(", for a size")
                self._session.handed_out.add(value)
        return result

    def _dispatched(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        func = _SHARING.get(func, func)
        if is_asking(func) and not _torch.is_constant(args[0]) and self._session.can_answer(*args):
            return self._session.answer(func, args)
        if func is torch.ops.aten.equal.default and (same := self._equal(types, args)) is not None:
            return same
        if func is torch.ops.aten.polygamma_.default:  # its function takes its arguments in another order
            computed = self._functionalised(torch.ops.aten.polygamma.default, types, (args[1], args[0]), {})
            return self._functionalised(torch.ops.aten.copy_.default, types, (args[0], computed), {})
        if func is torch.ops.aten._local_scalar_dense.default:  # as an index, which C++ asks for
            position = self._session.looks.position(args[0])
            if position is not None:
                return position
        if is_asking(func) and (outcome := self._session.looks.outcome(func, args)) is not None:
            return outcome
        sizes = self._session.fake_mode.sizes
        if sizes is None or not _sizes_torch.gives_tensors(func):
            return self._functionalised(func, types, args, kwargs)
        last = self._last_node()
        try:
            with sizes.quiet():  # a tensor is only wrapped, or checked for whether it can be written to
                return self._functionalised(func, types, args, kwargs)
        except RuntimeError:  # of many rows; this call may have one
            if self._last_node() is not last:
                raise
        return self._functionalised(func, types, args, kwargs)

    def _equal(self, types: Any, args: tuple[Any, ...]) -> bool | None:
        """Whether two numbers are the same, where an operator of torch asks, to check its arguments (`torch.cov`)."""
        if any(tensor.dim() for tensor in args) or self._session.calling in _ASKED_BY_STEP:
            return None
        same = self._functionalised(torch.ops.aten.eq.Tensor, types, args, {})
        return self._session.looks.expected(same)

    def _last_node(self) -> fx.Node | None:
        return next(iter(reversed(self._session.tracer.graph.nodes)), None)

    def _refuse_as_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A whole number that the graph computes may scale and shift; sizes and places depend on no such number."""
        arguments = _torch.schema(func).arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        for argument in arguments:
            value = given.get(argument.name)
            parts = value if isinstance(value, (list, tuple)) else (value,)
            is_scalar = any(kind in str(argument.type) for kind in ("number", "Tensor"))
            if not is_scalar and any(map(self._session.looks.has_whole, parts)):
                raise looks.refused(", for a size or a place")

    def _functionalised(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if not _computes_in_place(func) or not isinstance(args[0], _torch.FunctionalTensor):
            return super().__torch_dispatch__(func, types, args, kwargs)
        layouts, nodes = self._session.fake_mode, self._session.tracer.graph.nodes
        last = self._last_node()
        with layouts.in_place(func, args[0]):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if layouts.has_kept_layout:
                _mark(nodes, last, func)
        return result


def _mark(nodes: Any, last: fx.Node | None, func: Any) -> None:
    for node in reversed(nodes):
        if node is last:
            return
        if ops.in_place_twin(node.target) is func:
            node.meta["in_layout"] = True
            return


@functools.cache
def _computes_in_place(func: Any) -> bool:
    """Whether an operator does nothing but change its first argument, by arithmetic (values that it only moves do not
    round) and without random numbers.
    """
    if _torch.namespace(func) != "aten" or torch.Tag.nondeterministic_seeded in _torch.tags(func):
        return False
    if _torch.packet_name(func) in _MOVING:
        return False
    return ops.written_arguments(func) == (0,) and len(_torch.schema(func).returns) == 1
