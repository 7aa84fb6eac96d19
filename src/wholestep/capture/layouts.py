"""Fake tensors that promise the strides real kernels have.

Tracing decides from strides which reshape is a view and which gradient needs a copy, dropout fills memory in its order,
and kernels choose their memory format by them: those of dimensions of size 1 included, which say nothing about where
elements lie and still tell a 1x1 image in channels_last from one that is not. Torch's fake kernels are often written
anew in Python, and wrong about some of that; this is the correction.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from wholestep import _fake_torch, _torch
from wholestep.capture import imagined
from wholestep.graph import ops

# Kernels are asked on zeros; for a step that is only looked at, no larger ones than this are made.
_MAX_IMAGINED_BYTES = 2**26
_UNLOGGED = _fake_torch.UnloggedRefusals()


class TrueLayouts(_torch.FakeTensorMode):
    """Fake tensors with the strides that real kernels give.

    Where all tensors of a call lie in memory in the order of their dimensions, fake kernels are right. Anywhere else
    the real kernel is run once on zeros of the same geometry; with `max_bytes`, not on more than that.
    `x.bernoulli_()` keeps the layout of `x`, though functionalisation turns it into an operator that would not: unless
    it was the user who called that one (`draws_out_of_place`).
    """

    def __init__(self, max_bytes: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._max_bytes = max_bytes
        self._known: dict[Any, list[Any]] = {}
        self._imagined: imagined.Trials = {}
        self.draws_out_of_place = False
        self.has_kept_layout = False
        self._overwritten: tuple[Any, torch.Tensor] | None = None
        self.sizes: Any = None
        """What finds out about sizes that values decide, in a trace that has such."""

    @property
    def _is_trying(self) -> bool:
        return self.sizes is not None and self.sizes.is_trying

    @contextlib.contextmanager
    def in_place(self, func: Any, tensor: torch.Tensor) -> Generator[None]:
        """An in-place operator on `tensor` is traced inside: the function it becomes keeps the layout of the tensor.

        `has_kept_layout` tells whether that took a correction.
        """
        self.has_kept_layout, self._overwritten = False, (func, tensor)
        try:
            yield
        finally:
            self._overwritten = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli.p and not self.draws_out_of_place:
            func = _torch.BERNOULLI_LIKE
        if self.sizes is None:
            return self._dispatched(func, types, args, kwargs)
        return self.sizes.dispatch(
            lambda args, kwargs: self._dispatched(func, types, args, kwargs), func, args, kwargs or {}
        )

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        dispatch = super().dispatch
        if self.sizes is not None:  # what is made of other operators in C++ would ask for plain numbers
            dispatch = _torch.with_symbolic_sizes(dispatch)
        try:
            with _UNLOGGED:
                result = dispatch(func, types, args, kwargs)
        except (RuntimeError, ZeroDivisionError) as error:  # the latter for a mean of nothing
            if self.sizes is not None and self.sizes.is_quiet:
                raise
            return self._from_kernel(func, args, kwargs or {}, error)
        # Views are right where they are used; of a size that is tried, torch may promise another stride if it is 1.
        is_asked = chooses_layout(func) or (self._is_trying and func.is_view)
        tensors = list(tensors_in((args, kwargs or {}, result))) if is_asked else []
        if all(map(_is_plain, tensors)) or not all(tensor.layout is torch.strided for tensor in tensors):
            return result
        result = self._as_kernels_do(func, args, kwargs or {}, result)
        return self._as_overwritten(func, args, result)

    def _as_kernels_do(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        tensors = list(tensors_in(result))
        true = {id(fake): strides for fake, strides in zip(tensors, self._strides(func, args, kwargs), strict=False)}
        return _torch.tree_map_only(torch.Tensor, lambda fake: self._corrected(fake, true.get(id(fake))), result)

    def _from_kernel(self, func: Any, args: Any, kwargs: Any, error: RuntimeError | ZeroDivisionError) -> Any:
        """What the real kernel makes of zeros, where the fake one refuses its inputs: it may know fewer than run.

        The error stands if the kernel raises as well, and where more than a check has failed: the sizes of the result
        depend on values, or nobody knows them.
        """
        inputs = list(tensors_in((args, kwargs)))
        if (
            not (type(error) in (RuntimeError, ZeroDivisionError) or _knows_sizes(func, args, kwargs))
            or not chooses_layout(func)
            or any(map(_may_be_note, inputs))
            or (self._is_trying and any(map(_is_empty, inputs)))
        ):
            raise error
        if self._max_bytes is not None and sum(map(_num_bytes, inputs)) > self._max_bytes:
            raise error
        made = imagined.results(self, self._imagined, func, args, kwargs)
        if made is None:
            raise error
        return made[0] if len(_torch.schema(func).returns) == 1 else tuple(made)

    def _as_overwritten(self, func: Any, args: Any, result: Any) -> Any:
        """The result of the function that an in-place operator becomes, in the layout of what it overwrites."""
        if self._overwritten is None or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        in_place, tensor = self._overwritten
        if ops.in_place_twin(func) is not in_place or not isinstance(args[0], torch.Tensor):
            return result
        strides = _hints(tensor.stride())
        if strides == _hints(result.stride()) or strides != _hints(args[0].stride()) or result.dtype != tensor.dtype:
            return result
        self.has_kept_layout = True
        with self:
            return torch.empty_strided(result.shape, args[0].stride(), dtype=result.dtype, device=result.device)

    def _strides(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """Shapes and strides of the real results; computed once for each geometry of the inputs."""
        counts = [self._num_elements(tensor) for tensor in tensors_in((args, kwargs))]
        key = (func, *counts, *map(str, _torch.tree_leaves((_geometry_of((args, kwargs)),))))
        if key not in self._known:
            self._known[key] = self._real_strides(func, args, kwargs)
        return self._known[key]

    def _real_strides(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        inputs = list(tensors_in((args, kwargs)))
        if any(map(_may_be_note, inputs)) or any(map(_is_empty, inputs)):
            return []
        if self._max_bytes is not None and sum(map(_num_bytes, inputs)) > self._max_bytes:
            return []
        devices = {tensor.device for tensor in inputs if tensor.device.type == "cuda"}
        draws = torch.Tag.nondeterministic_seeded in _torch.tags(func)
        with _torch.real_kernels(devices if draws else ()):
            try:
                real_args, real_kwargs = _torch.tree_map_only((torch.Tensor, torch.SymInt), self._real, (args, kwargs))
                return [(tuple(real.shape), real.stride()) for real in tensors_in(func(*real_args, **real_kwargs))]
            except (RuntimeError, IndexError, NotImplementedError):
                # Zeros will not do (a singular matrix, an index into nothing), there is not enough memory, or another
                # fake kernel was wrong about a dtype. The first run checks layouts again.
                return []

    def _real(self, fake: torch.Tensor | torch.SymInt) -> torch.Tensor | int:
        """Zeros in place of a fake tensor, the number itself in place of a symbolic one (which a kernel would pin).

        A mask has as many elements as it has in this call.
        """
        if not isinstance(fake, torch.Tensor):
            return _torch.optimization_hint(fake)
        sizes, strides = _hints(fake.shape), _hints(fake.stride())
        real = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device).zero_()
        count = self._num_elements(fake)
        if count:
            real.view(-1)[:count] = True
        return real

    def _num_elements(self, fake: torch.Tensor) -> int:
        if self.sizes is None or fake.dtype is not torch.bool or not _is_plain(fake):
            return 0
        return self.sizes.num_elements(fake)

    def _corrected(self, fake: torch.Tensor, real: tuple[tuple[int, ...], tuple[int, ...]] | None) -> torch.Tensor:
        sizes = _hints(fake.shape)
        if real is None or real[0] != sizes or 0 in sizes:  # sizes may depend on values
            return fake
        strides = real[1]
        if _hints(fake.stride()) == strides:
            return fake
        with self:
            if not any(isinstance(size, torch.SymInt) for size in fake.shape):  # comparing them would pin them
                return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
            order = memory_order(strides)
            if dense_strides(sizes, order) != strides:
                return fake
            inverse = [order.index(dim) for dim in range(len(order))]
            lying = torch.empty([fake.shape[dim] for dim in order], dtype=fake.dtype, device=fake.device)
            return lying.permute(inverse)


def _knows_sizes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether sizes follow from those of the inputs though torch says that values decide them: residuals of `lstsq`
    are computed by none but the drivers that find out the rank by themselves.
    """
    if func is not torch.ops.aten.linalg_lstsq.default:
        return False
    driver = kwargs.get("driver", args[3] if len(args) > 3 else None)
    return driver in (None, "gels", "gelsy")


def memory_order(strides: Iterable[Any]) -> tuple[int, ...]:
    """Dimensions as they lie in memory, outermost first."""
    hints = _hints(strides)
    return tuple(sorted(range(len(hints)), key=lambda dim: -hints[dim]))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions lie in memory in this order, outermost first."""
    strides, stride = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= max(shape[dim], 1)
    return tuple(strides)


@functools.cache
def chooses_layout(func: Any) -> bool:
    """Whether an operator decides how its results lie in memory.

    Views and in-place operators do not; those that return lists (fused and foreach updates) follow their inputs.
    """
    if _torch.namespace(func) != "aten" or func.is_view:
        return False
    schema = _torch.schema(func)
    return not any(map(_torch.is_written, schema.arguments)) and all(
        str(returned.type) == "Tensor" for returned in schema.returns
    )


@functools.cache
def _plain_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return dense_strides(sizes, range(len(sizes)))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the very strides of a fresh one of its shape."""
    if tensor.layout is not torch.strided:
        return False
    return _hints(tensor.stride()) == _plain_strides(_hints(tensor.shape))


def _hints(sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple([_torch.optimization_hint(size) for size in sizes])


def _may_be_note(fake: torch.Tensor) -> bool:
    """Whether a kernel may have left a tensor for its backward, which trusts what it reads there.

    Recurrent layers leave bytes; attention leaves the state of its generator, which fake kernels say is on the device,
    and which real ones read on the host: the process would end there.
    """
    is_number = fake.dim() == 0 and not fake.dtype.is_floating_point
    return fake.dtype is torch.uint8 or (is_number and fake.device.type != "cpu")


def _is_empty(fake: torch.Tensor) -> bool:
    """Whether a tensor has no elements: some kernels divide by sizes, which ends the process.

    Eager asks them nothing then, as what chooses between kernels takes another one.
    """
    return 0 in _hints(fake.shape)


def _num_bytes(fake: torch.Tensor) -> int:
    return _torch.optimization_hint(fake.numel()) * fake.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers."""
    return (leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _geometry_of(value: Any) -> Any:
    describe = lambda t: (*_hints((*t.shape, *t.stride())), t.dtype, t.device)  # noqa: E731
    return _torch.tree_map_only(torch.Tensor, describe, value)


def new_fake_mode(*, is_imagined: bool = True, env: _torch.ShapeEnv | None = None) -> TrueLayouts:
    """A fake mode with symbolic shapes; real tensors it meets (constants made inside the step) are faked on the fly.

    `capture_scalar_outputs` is what lets the optimizer's `step.item()` become a symbolic number instead of an error.
    With an `env` of its own, sizes that values decide may be symbols (`sizes`): torch remembers no results then, as one
    that was found for many rows would be taken for that of this call. With `is_imagined`, no real step will ever run
    with such tensors: kernels are asked about small ones only.
    """
    mode = TrueLayouts(
        max_bytes=_MAX_IMAGINED_BYTES if is_imagined else None,
        shape_env=env or _torch.ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False),
        allow_non_fake_inputs=True,
    )
    mode.cache_enabled = env is None and mode.cache_enabled
    return mode
