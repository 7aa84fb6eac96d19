"""Sizes that values decide: `x[mask]`, `nonzero`, `unique`.

    rows = x[mask]              the size of `rows` is a symbol, whose value in this call is found by running what the
                                mask is computed from (`preview`)
    rows.mean(), len(rows)      computed with the symbol, as with a dynamic batch
    if len(rows) > 0: ...       a branch: what this call takes is traced, and noted

What has been noted is asked again at each call: before the graph runs if arguments, buffers and constants alone decide
the size (`questions`), else by the graph, before it writes anything (`looks`). The size itself may be another one each
time. How a fake kernel finds out the layout of its result is not noted where the result is right for all sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from wholestep import _sizes_torch, _torch
from wholestep.capture import blank, layouts, source
from wholestep.capture.record.again import HasSizes
from wholestep.capture.record.late import OtherOutcome
from wholestep.errors import CaptureError
from wholestep.graph import Phase

if TYPE_CHECKING:
    from wholestep.capture.session import Session

aten = torch.ops.aten

_PROVENANCE = ("phase", "fqn", "source", "epoch")
_FAILURES = (RuntimeError, ValueError, IndexError, ZeroDivisionError)
_MAX_JOINT = 2
"""Up to so many sizes of one operator are tried in all combinations."""


@dataclass(frozen=True)
class _Size:
    """A size that values decide, where it is found, and whether it is known before the graph runs."""

    symbol: Any
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None
    dim: int
    is_known_before: bool
    where: str
    after: fx.Node
    """The last node that it needs."""
    fake: Any
    """What `func` gives."""


class _Verdict:
    """What is said of some sizes: nothing if they are as the graph takes for granted, else what they break."""

    is_pure_call = True
    __name__ = "sizes"

    def __init__(self, symbols: Sequence[Any], assumptions: Sequence[_sizes_torch.Assumption]) -> None:
        self._assumptions = [(str(one), one.compiled(symbols)) for one in assumptions]

    def __call__(self, *sizes: int) -> str:
        for text, holds in self._assumptions:
            with contextlib.suppress(ZeroDivisionError):  # of sizes for which there is no such number
                if holds(*sizes):
                    continue
            return f"{', '.join(map(str, sizes))} ({text} does not hold)"
        return ""

    def require(self, sizes: Sequence[Any]) -> None:
        """Leave the graph unless they are as it takes for granted."""
        if self(*sizes):
            raise OtherOutcome


class Sizes:
    """The sizes of one trace that values decide."""

    def __init__(self, session: Session, *, may_leave: bool) -> None:
        self._session = session
        self._may_leave = may_leave
        self._env: _sizes_torch.SizesEnv = session.fake_mode.shape_env
        self._known: dict[Any, list[_Size]] = {}
        self._made: dict[Any, torch.SymInt] = {}
        self._depth = 0
        self._probe: _Probe | None = None
        session.fake_mode.sizes = self
        session.fake_mode.cache_enabled = False  # it would give what has been found out quietly

    def num_elements(self, mask: torch.Tensor) -> int:
        """How many elements of a mask are taken to be true; 0 if nobody has asked for them."""
        original = mask if self._probe is None else self._probe.before(mask)
        tracer = self._session.tracer
        node = _torch.node_of(tracer, original) if _torch.has_node(tracer, original) else None
        known = self._known.get((aten.nonzero.default, (node,), ()))
        if known is None:
            return 0
        size = self._made[known[0].symbol]
        return _torch.optimization_hint(size) if self._probe is None else self._probe.at(size)

    @property
    def where(self) -> str | None:
        """The line of the first of them."""
        return next((size.where for sizes in self._known.values() for size in sizes), None)

    @property
    def is_quiet(self) -> bool:
        """Whether questions about sizes are answered for many rows, unnoted."""
        return self._env.is_quiet and self._probe is None

    @property
    def is_trying(self) -> bool:
        """Whether an operator is run on sizes that this call may not have."""
        return self._probe is not None

    # While operators are traced

    def dispatch(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """What `run(args, kwargs)` makes of fake tensors; it may come back here for operators inside of `func`."""
        self._depth += 1
        try:
            if self._depth > 1:
                return self._resolved(func, args, kwargs, run(args, kwargs))
            return self._outermost(run, func, args, kwargs)
        finally:
            self._depth -= 1

    def _outermost(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        env = self._env
        env.asked_quietly = set()
        try:
            with env.quiet():
                result = self._resolved(func, args, kwargs, run(args, kwargs))
        except _FAILURES as error:  # of how many rows would be taken, where this call has none or one
            asked = [*(env.asked_quietly | self._symbols_in((args, kwargs)))]
            if not asked:
                raise
            if isinstance(error, ZeroDivisionError):
                self._require_classes(asked)
        else:
            asked = [*env.asked_quietly]
            if not asked or self._is_right(run, func, args, kwargs, result, asked):
                return result
        with env.quiet(False):
            result = self._resolved(func, args, kwargs, run(args, kwargs))
        if not self._is_right(run, func, args, kwargs, result, asked):  # the kernel has branched without asking
            self._require_classes(asked)
            with env.quiet(False):
                return self._resolved(func, args, kwargs, run(args, kwargs))
        return result

    def _require_classes(self, symbols: Iterable[Any]) -> None:
        with self._env.quiet(False):
            for symbol in symbols:
                self._env.require_class(symbol)

    def _symbols_in(self, value: Any) -> set[Any]:
        sizes = [size for tensor in layouts.tensors_in(value) for size in (*tensor.shape, *tensor.stride())]
        return {
            symbol
            for size in sizes
            for symbol in _sizes_torch.expression_of(size).free_symbols & self._env.of_values.keys()
        }

    def _resolved(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """A fake result with sizes that have a value in place of those that torch knows nothing of."""
        if torch.Tag.dynamic_output_shape not in _torch.tags(func):
            return result
        tensors = [result] if isinstance(result, torch.Tensor) else [*result]
        unknown = [
            (index, dim, symbol)
            for index, tensor in enumerate(tensors)
            for dim, symbol in _sizes_torch.unknown_sizes(tensor).items()
        ]
        if not unknown:
            return result
        symbols = {symbol: (index, dim) for index, dim, symbol in reversed(unknown)}
        if self._probe is not None:
            key = self._key(func, *self._probe.before((args, kwargs)))
            sizes = {one: self._probe.at(self._made[size.symbol]) for one, size in zip(symbols, self._known[key])}
        else:
            sizes = self._sizes_of(func, args, kwargs, symbols, result)
        self._env.forget(symbols)
        return self._with_sizes(result, sizes)

    def _with_sizes(self, result: Any, sizes: dict[Any, Any]) -> Any:
        with self._session.fake_mode:
            return _torch.tree_map_only(torch.Tensor, lambda one: _sizes_torch.with_sizes(one, sizes), result)

    def _sizes_of(
        self, func: Any, args: Any, kwargs: Any, symbols: dict[Any, tuple[int, int]], result: Any
    ) -> dict[Any, Any]:
        key = self._key(func, args, kwargs)
        if key not in self._known and key[0] is not func:
            with self._session.fake_mode:
                key[0](args[1])  # which comes here for itself
        if key not in self._known:
            self._known[key] = self._measured(key, symbols, result)
        return dict(zip(symbols, [self._made[size.symbol] for size in self._known[key]], strict=True))

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a size is known by, as a call of nodes."""
        if func is aten.masked_select.default and torch.broadcast_shapes(args[0].shape, args[1].shape) == args[1].shape:
            func, args = aten.nonzero.default, (args[1],)  # whatever it takes the elements of

        def describe(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._node(value)
            if isinstance(value, (list, tuple)):
                return tuple([describe(item) for item in value])
            if isinstance(value, torch.SymInt):
                raise _refused("which depends on another size")
            return value

        return func, describe(args), tuple(sorted((name, describe(value)) for name, value in kwargs.items()))

    def _node(self, fake: torch.Tensor) -> fx.Node:
        tracer = self._session.tracer
        if not _torch.has_node(tracer, fake):
            raise _refused("which depends on a tensor that is not part of the step")
        return _torch.node_of(tracer, fake)

    def _measured(self, key: Any, symbols: dict[Any, tuple[int, int]], result: Any) -> list[_Size]:
        session = self._session
        if not self._may_leave:
            raise _refused("on several ranks all run one graph")
        if any(map(blank.is_blank, session.reals().values())):
            raise _refused("a model without memory has none")
        func, args, kwargs = key[0], key[1], dict(key[2])
        graph = session.tracer.graph
        last = next(iter(reversed(graph.nodes)))
        node = graph.call_function(func, args, kwargs)
        try:
            is_known_before = session.is_answerable(node)
            shapes = session.looks.preview.read(node, _shapes)
        finally:
            graph.erase_node(node)
        if not is_known_before:
            session.looks.begin()
        made = {
            symbol: self._env.new_size(shapes[index][dim], _largest(func, args))
            for symbol, (index, dim) in symbols.items()
        }
        self._made |= {_sizes_torch.symbol_of(size): size for size in made.values()}
        fake, is_one, line = self._with_sizes(result, made), isinstance(result, torch.Tensor), source.current_line()
        return [
            _Size(
                *(_sizes_torch.symbol_of(made[symbol]), func, args, kwargs, None if is_one else index, dim),
                *(is_known_before, line, last, fake),
            )
            for symbol, (index, dim) in symbols.items()
        ]

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Inside, nothing but the layout of tensors is asked for: that is for the kernels to say."""
        return self._env.quiet()

    # Whether a result is right for all sizes

    def _is_right(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any, result: Any, asked: Any) -> bool:
        """Whether what was found for many rows is right for none and one, too."""
        for sizes in self._trials(asked):
            probe = _Probe(self._env, sizes)
            self._probe = probe
            try:
                with self._session.fake_mode:
                    trial_args, trial_kwargs = probe.exchanged((args, kwargs))
                if _is_measured(func) and any(one.numel() == 0 for one in layouts.tensors_in(trial_args)):
                    continue  # of nothing there is nothing to be found, whatever else is tried
                found = self._resolved(func, trial_args, trial_kwargs, run(trial_args, trial_kwargs))
            except _FAILURES:
                return False
            finally:
                self._probe = None
            if not probe.agrees(result, found):
                return False
        return True

    def _trials(self, symbols: Iterable[Any]) -> list[dict[Any, int]]:
        env = self._env
        symbols = [*symbols]
        choices = {
            symbol: [size for size in (0, 1) if env.may_be(symbol, size)] + [_sizes_torch.typical(env, symbol)]
            for symbol in symbols
        }
        if len(symbols) <= _MAX_JOINT:
            return [dict(zip(symbols, sizes, strict=True)) for sizes in itertools.product(*choices.values())]
        many = {symbol: sizes[-1] for symbol, sizes in choices.items()}
        alone = [{**many, symbol: size} for symbol, sizes in choices.items() for size in sizes]
        return [
            *alone,
            *(
                {symbol: sizes[index] for symbol, sizes in choices.items()}
                for index in (0, -2, -1)
                if all(len(sizes) >= 2 for sizes in choices.values())
            ),
        ]

    # What has been noted, once the trace is over

    def settle(self) -> None:
        """Let what has been noted be asked at each call: before the graph runs, or by the graph."""
        assumptions = self._env.assumptions()
        self._env.num_asked = len(assumptions)
        if not self._env.holds_now():
            raise HasSizes(pretends=False)
        if not assumptions:
            return
        graph = self._session.tracer.graph
        sizes = {size.symbol: size for known in self._known.values() for size in known}
        early = {symbol for symbol, size in sizes.items() if size.is_known_before}
        of_batch = self._sizes_of_inputs()
        before = [one for one in assumptions if one.symbols <= early | of_batch.keys()]
        if before:
            self._ask(before, sizes, of_batch)
        later = [one for one in assumptions if one not in before]
        places = {node: index for index, node in enumerate(graph.nodes)}
        order = sorted(
            (size for size in sizes.values() if not size.is_known_before), key=lambda size: places[size.after]
        )
        for index, size in enumerate(order):
            known = {*early, *of_batch, *(other.symbol for other in order[: index + 1])}
            ready = [one for one in later if one.symbols <= known]
            if ready:
                self._look(ready, sizes, of_batch, size)
            later = [one for one in later if one not in ready]
        assert not later, f"sizes that nobody knows of: {later}"

    def end(self) -> None:
        """The trace is over; what passes compute of the graph's fake values takes no side that is noted."""
        self._session.fake_mode.sizes = None
        self._env.is_quiet = True

    def _ask(self, assumptions: Any, sizes: dict[Any, _Size], of_batch: dict[Any, Any]) -> None:
        """A question about what arguments, buffers and constants decide."""
        graph = self._session.tracer.graph
        symbols = [*dict.fromkeys(itertools.chain.from_iterable(one.symbols for one in assumptions))]
        found = [self._computed(graph, symbol, sizes, of_batch) for symbol in symbols]
        node = graph.call_function(_Verdict(symbols, assumptions), tuple(found))
        where = next(sizes[symbol].where for symbol in symbols if symbol in sizes)
        self._session.questions.expect(node, "", where)

    def _look(self, assumptions: Any, sizes: dict[Any, _Size], of_batch: dict[Any, Any], last: _Size) -> None:
        """A look of the graph, as soon as the last of some sizes is known."""
        graph = self._session.tracer.graph
        symbols = [*dict.fromkeys(itertools.chain.from_iterable(one.symbols for one in assumptions))]
        with graph.inserting_before(last.after.next):
            found = [self._computed(graph, symbol, sizes, of_batch, last.after) for symbol in symbols]
            self._session.looks.look_at_sizes(_Verdict(symbols, assumptions).require, found, last.after)

    def _computed(
        self,
        graph: fx.Graph,
        symbol: Any,
        sizes: dict[Any, _Size],
        of_batch: dict[Any, Any],
        like: fx.Node | None = None,
    ) -> fx.Node:
        meta = {name: like.meta[name] for name in _PROVENANCE if name in like.meta} if like is not None else {}

        def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
            node = graph.call_function(target, args, kwargs)
            node.meta |= {"phase": Phase.FORWARD, **meta, "val": value}
            return node

        if symbol in of_batch:
            node, dim = of_batch[symbol]
            return call(aten.sym_size.int, (node, dim), {}, node.meta["val"].shape[dim])
        size = sizes[symbol]
        node = call(size.func, size.args, size.kwargs, size.fake)
        if size.item is not None:
            node = call(operator.getitem, (node, size.item), {}, size.fake[size.item])
        return call(aten.sym_size.int, (node, size.dim), {}, self._made[symbol])

    def _sizes_of_inputs(self) -> dict[Any, tuple[fx.Node, int]]:
        """Symbols that are sizes of arguments, and where they are found."""
        found: dict[Any, tuple[fx.Node, int]] = {}
        for lifted in self._session.lifted.values():
            value = lifted.node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt):
                    found.setdefault(_sizes_torch.symbol_of(size), (lifted.node, dim))
        return found


class _Probe:
    """Fake tensors with plain sizes in place of symbolic ones, to see what an operator makes of them."""

    def __init__(self, env: _sizes_torch.SizesEnv, sizes: dict[Any, int]) -> None:
        self._env = env
        self._sizes = sizes
        self._exchanged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._original: dict[int, torch.Tensor] = {}

    def exchanged(self, value: Any) -> Any:
        return _torch.tree_map_only((torch.Tensor, torch.SymInt), self._one, value)

    def before(self, value: Any) -> Any:
        """The other way: what was exchanged."""
        return _torch.tree_map_only(torch.Tensor, lambda one: self._original.get(id(one), one), value)

    def at(self, size: Any) -> int:
        return _sizes_torch.value_at(self._env, size, self._sizes)

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self.at(value)
        if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
            return value
        if id(value) not in self._exchanged:
            shape, stride = map(self.at, value.shape), map(self.at, value.stride())
            made = torch.empty_strided([*shape], [*stride], dtype=value.dtype, device=value.device)
            self._exchanged[id(value)] = value, made
            self._original[id(made)] = value
        return self._exchanged[id(value)][1]

    def agrees(self, expected: Any, found: Any) -> bool:
        """Whether what was found symbolically is this, for the sizes that are tried."""
        old, new = _torch.tree_leaves(expected), _torch.tree_leaves(found)
        return len(old) == len(new) and all(map(self._is_same, old, new))

    def _is_same(self, old: Any, new: Any) -> bool:
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            return self.at(old) == self.at(new) if isinstance(old, torch.SymInt) else type(old) is type(new)
        if old.layout is not torch.strided or new.layout is not torch.strided:
            return False
        shapes = ([self.at(size) for size in tensor.shape] for tensor in (old, new))
        strides = ([self.at(size) for size in tensor.stride()] for tensor in (old, new))
        shape, other_shape = shapes
        if shape != other_shape or old.dtype is not new.dtype:
            return False
        # How far it is to the next one says nothing where there is but one.
        return 0 in shape or all(size == 1 or left == right for size, left, right in zip(shape, *strides, strict=True))


def _is_measured(func: Any) -> bool:
    """Whether an operator makes a size of its own; indexing by a mask asks for that of the mask."""
    return torch.Tag.dynamic_output_shape in _torch.tags(func) and func is not aten.index.Tensor


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in ([value] if isinstance(value, torch.Tensor) else value)]


def _largest(func: Any, args: tuple[Any, ...]) -> int | None:
    """What a size cannot be above; None if nobody knows."""
    count = args[0].meta["val"].numel() if func is aten.nonzero.default else None
    return count if type(count) is int else None


def _refused(why: str) -> CaptureError:
    return CaptureError(
        f"the step makes a tensor whose size depends on values; {why}",
        location=source.current_location(),
        advice="Keep the shape and mask instead: torch.where, (x * mask).sum() / mask.sum()",
    )
