# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""What a recording needs of torch's tracing: real calls in the middle of it, sizes as text. As private as `_torch`.

Seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from types import CodeType, FunctionType, GetSetDescriptorType
from typing import Any, cast
from unittest import mock

import torch
from torch import _tensor_str
from torch._C._dynamo import eval_frame as _eval_frame
from torch._C._dynamo import guards as _guards
from torch._dynamo import eval_frame as _compiling
from torch._dynamo.guards import GuardManagerType
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch.fx.experimental.proxy_tensor import _MakefxTracer
from torch.nn.modules import activation
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wholestep._threads import only_where
from wholestep._torch import outside_modes

ScriptFunction = torch.jit.ScriptFunction
SCRIPTED = "_torchdynamo_inline"
"""Where such a function keeps the Python function that it was made of."""


@contextlib.contextmanager
def untraced() -> Generator[None]:
    """Run Python for real in the middle of a trace: no mode sees what it calls."""
    with outside_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def no_other_trace(refuse: Callable[[], None], is_here: Callable[[], bool]) -> Generator[None]:
    """Refuse `make_fx` inside a trace: its graph would hold what stands in for tensors here, as constants."""

    def trace(*_: Any) -> None:
        refuse()

    chosen = only_where(is_here, trace, _MakefxTracer.trace)
    with mock.patch.object(_MakefxTracer, "trace", chosen):
        yield


@contextlib.contextmanager
def fast_paths(is_here: Callable[[], bool]) -> Generator[None]:
    """Let torch's layers take the fast paths that eager takes: they ask first whether somebody looks on.

    Attention and transformer layers do, where no gradient is asked for; the other path rounds otherwise, and gives
    other values for padding.
    """

    def is_overridden(tensors: Iterable[Any]) -> bool:
        own = [getattr(type(tensor), "__torch_function__", None) for tensor in tensors]
        return any(how not in (None, torch.Tensor.__torch_function__, _NOT_OVERRIDDEN) for how in own)

    asked = only_where(is_here, is_overridden, torch.overrides.has_torch_function)
    traced = only_where(is_here, lambda: False, activation._is_make_fx_tracing)
    with (
        mock.patch.object(torch.overrides, "has_torch_function", asked),
        mock.patch.object(activation, "_is_make_fx_tracing", traced),
    ):
        yield


_NOT_OVERRIDDEN = torch._C._disabled_torch_function_impl
NESTED = frozenset([torch._nested_tensor_from_mask])
"""What gives a nested tensor of tensors that are none."""


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


@contextlib.contextmanager
def text_of_rates(is_asking: Callable[[Any], bool], ask: Callable[[], Any]) -> Generator[None]:
    """Call `ask()` where text is made of a symbolic float and `is_asking(frame)`: torch would show the symbol."""

    def shown(original: Callable[..., str]) -> Callable[..., str]:
        def show(number: torch.SymFloat, *spec: Any) -> str:
            return ask() if is_asking(sys._getframe(1)) else original(number, *spec)

        return show

    with contextlib.ExitStack() as stack:
        for name in ("__str__", "__repr__", "__format__"):
            original = getattr(torch.SymFloat, name)
            stack.enter_context(mock.patch.object(torch.SymFloat, name, shown(original)))
        yield


# Hooks that a step runs. Of a module: `_parameters` comes first, then all other dicts that it keeps its parts in.
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_MODULE_HOOKS)
_GLOBAL_HOOKS: list[dict[int, Any]] = [
    *(getattr(torch.nn.modules.module, f"_global{name}") for name in _MODULE_HOOKS),
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
]


def hooks_of(owner: torch.nn.Module | torch.optim.Optimizer) -> list[Any]:
    """The hooks of a module or optimizer; hooks are traced, so another one needs a new capture."""
    names = _MODULE_HOOKS if isinstance(owner, torch.nn.Module) else _OPTIMIZER_HOOKS
    namespace = vars(owner)
    return [hook for name in names for hook in namespace.get(name, _NO_HOOKS).values()]


def global_hooks() -> list[Any]:
    """The hooks that are called for all modules or all optimizers."""
    return [hook for hooks in _GLOBAL_HOOKS for hook in hooks.values()]


_NO_HOOKS: dict[int, Any] = {}


def registries(module: torch.nn.Module) -> list[Any]:
    """The dicts that hold a module's parameters (the first), buffers, submodules and hooks."""
    return [*map(vars(module).get, _REGISTRIES)]


def library_namespaces() -> list[dict[str, Any]]:
    """The namespaces that torch's own code finds most of its functions in."""
    modules = [torch, torch.nn.functional, torch.autograd]
    classes = [torch.Tensor, torch.nn.Module, torch.optim.Optimizer]
    return [*map(vars, modules), *map(class_namespace, classes)]


def class_namespace(cls: type) -> dict[str, Any]:
    """The very dict that holds what a class defines: `vars` hands out a view of it, which has no version."""
    [namespace] = gc.get_referents(vars(cls))
    return namespace


_AS_EVER = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
_UNTOLD = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)
_GO_ON = ConvertFrameReturn(frame_exec_strategy=_AS_EVER, apply_to_code=False)


@contextlib.contextmanager
def when_functions_start(may_matter: Callable[[Any], bool], tell: Callable[[Any], None]) -> Generator[None]:
    """Call `tell(frame)` before a function starts in this thread; never again if its frame says that it cannot matter.

    By the hook of `torch.compile`, which costs next to nothing for code that it was told to leave alone; `sys.settrace`
    would slow down every instruction. Inside of what torch itself keeps from being compiled, nobody is told.
    """
    left_alone = [code for code in _left_alone if _leave_alone(code)]
    num_known = len(left_alone)
    listening = [(may_matter, tell)]  # torch keeps `start` for ever if it raises

    def start(frame: Any, _entry: Any, _state: Any) -> ConvertFrameReturn:
        code = frame.f_code
        for may_matter, tell in listening:
            if may_matter(frame):
                tell(frame)
            elif _leave_alone(code):
                left_alone.append(code)
        return _GO_ON

    before = _eval_frame.set_eval_frame(cast(Any, start))
    try:
        with _inlined(start):
            yield
    finally:
        _eval_frame.set_eval_frame(before)
        listening.clear()
        for code in left_alone:
            _eval_frame.set_code_exec_strategy(code, _AS_EVER)
        _left_alone.update(left_alone[num_known:])


@contextlib.contextmanager
def _inlined(start: Any) -> Generator[None]:
    """Have functions under `torch.compile` run as they are in this thread, told of to `start` as all others."""
    thread, of_torch = threading.get_ident(), _compiling._callback_from_stance

    def callback(compiling: Any) -> Any:
        if threading.get_ident() != thread or compiling is None:  # None: kept from `torch.compile`
            return of_torch(compiling)
        _count_compiled(-1)  # with `fullgraph=True` torch counts what it compiles, and raises if that is nothing
        return start

    with mock.patch.object(_compiling, "_callback_from_stance", callback):
        yield


# Seen from torch 2.13 on; a negative number means not to count.
_count_compiled: Callable[[int], int] = getattr(_eval_frame, "set_fullgraph_compiled_frame_count", lambda _: -1)


# Code that was found to be of no matter before: to be told of it costs more than to leave it alone from the start.
_left_alone: weakref.WeakSet[CodeType] = weakref.WeakSet()


def _leave_alone(code: CodeType) -> bool:
    """Have torch's hook ignore some code, unless somebody has compiled it."""
    if _eval_frame._debug_get_cache_entry_list(code):
        return False
    _eval_frame.set_code_exec_strategy(code, _UNTOLD)
    return True


def generators() -> list[torch.Generator]:
    """All generators that operators draw from without being given one."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


# What functions and properties of torch and `torch.backends` say, without their detours.
is_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
is_mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
is_flash_sdp_enabled: Callable[[], bool] = torch._C._get_flash_sdp_enabled
is_mem_efficient_sdp_enabled: Callable[[], bool] = torch._C._get_mem_efficient_sdp_enabled
is_math_sdp_enabled: Callable[[], bool] = torch._C._get_math_sdp_enabled
is_cudnn_sdp_enabled: Callable[[], bool] = torch._C._get_cudnn_sdp_enabled
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
float32_matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
# Default devices are such modes.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def _version_unless_empty(owner: dict[Any, Any]) -> int:
    """From Python 3.12 on, torch does not notice that an empty dict is filled with another one's items at once."""
    return _guards.dict_version(owner) if owner else -1


_NOTICES_ALL = sys.version_info[:2] < (3, 12)
# A number that changes with every write to a dict.
dict_version: Callable[[dict[Any, Any]], int] = _guards.dict_version if _NOTICES_ALL else _version_unless_empty


QUIET_CALLS = 3


class _Held(list[Any]):
    """A list that torch can refer to weakly."""


def unwritten(dicts: list[dict[Any, Any]], objects: Iterable[Any] = ()) -> Callable[[], bool] | None:
    """A check of whether nobody writes to any of some dicts from now on, asked in C++; None if torch has none.

    Nor may objects get another class, or another dict of attributes if they `have_plain_namespace`. Of functions it
    asks whether they keep their code, of classes whether they keep their order of base classes.

    Torch keeps the versions of all dicts below a node that is "tag safe" in one row, and compares that: two
    nanoseconds for each dict. Once that has failed, it asks one dict after the other. To make a check takes as long as
    many of them: it is worth it after `QUIET_CALLS` calls in which nobody has written.
    """
    if not _NOTICES_ALL:
        return None
    held = _Held({id(one): one for one in dicts}.values())
    watched = [held, *objects]
    root = _guards.RootGuardManager()
    try:
        row = _item(root, watched, 0)
        for index, one in enumerate(held):
            item = _item(row, held, index)
            item.add_dict_version_guard(one, [], None)
            item.mark_tag_safe()
        row.mark_tag_safe()
        row.mark_tag_safe_root()
        for index in range(1, len(watched)):
            _watch_object(_item(root, watched, index), watched[index])
    except (TypeError, AttributeError):  # in case a version of torch asks for them otherwise
        return None
    check = functools.partial(root.check, watched)
    _checks.add(check)
    return check


_checks: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget_checks() -> None:
    """In a process that was forked, let all of these checks fail: no thread may be there to release the lock they take.

    In place, as those who ask have them at hand. They ask in Python then.
    """
    for check in list(_checks):
        check.__setstate__((bool, (), {}, {}))


os.register_at_fork(after_in_child=_forget_checks)


def _item(manager: Any, owner: list[Any], index: int) -> Any:
    return manager.list_getitem_manager(index, "", owner[index], GuardManagerType.GUARD_MANAGER)


def is_definition(one: Any) -> bool:
    """Whether it is a function or a class, and `unwritten` can ask of it."""
    return _WATCHES_DEFINITIONS and (type(one) is FunctionType or isinstance(one, type))


_WATCHES_DEFINITIONS = all(hasattr(_guards.GuardManager, name) for name in ("code_manager", "type_mro_manager"))


def _watch_object(manager: Any, one: Any) -> None:
    if is_definition(one):
        found = one.__mro__ if isinstance(one, type) else one.__code__
        ask = manager.type_mro_manager if isinstance(one, type) else manager.code_manager
        ask("", found, GuardManagerType.GUARD_MANAGER).add_id_match_guard(id(found), [], None)
        return
    manager.add_type_match_guard(id(type(one)), [], None)
    if has_plain_namespace(one):
        namespace = manager.get_generic_dict_manager("", vars(one), GuardManagerType.GUARD_MANAGER)
        namespace.add_id_match_guard(id(vars(one)), [], None)


def has_plain_namespace(one: Any) -> bool:
    """Whether `one.__dict__` is the dict that Python itself keeps its attributes in, whatever its class may say."""
    kind = type(one)
    if not kind.__dictoffset__ or kind.__getattribute__ is not object.__getattribute__:
        return False
    return all(isinstance(vars(base).get("__dict__", _A_NAMESPACE), GetSetDescriptorType) for base in kind.__mro__)


_A_NAMESPACE = vars(torch.nn.Module)["__dict__"]


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks that run when a leaf's gradient is computed or accumulated."""
    return [*_gradient_hooks(tensor), *accumulated_hooks(tensor)]


def _gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    return list((tensor._backward_hooks or {}).values())


def accumulated_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks that run after a leaf's gradient was added to what is there."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def carry_hooks(
    real: torch.Tensor,
    twin: torch.Tensor,
    inside: Callable[[], contextlib.AbstractContextManager[Any]],
    tell: Callable[[Any], Any],
) -> list[Any]:
    """Give a traced leaf what `tell` makes of the hooks of the real one; each runs inside `inside()`.

    Returns their handles: hooks that stay would keep the leaf, and all that they refer to, for ever.
    """

    def call(hook: Callable[..., Any], value: Any) -> Any:
        with inside():
            return hook(value)

    return [
        *[twin.register_hook(functools.partial(call, hook)) for hook in map(tell, _gradient_hooks(real))],
        *[
            twin.register_post_accumulate_grad_hook(lambda _, hook=hook: call(hook, real))
            for hook in map(tell, accumulated_hooks(real))
        ],
    ]


def tensor_types(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A check of whether tensors still have the sizes, strides, dtypes, devices and classes they have now.

    Asked in C++. It may also say no when only a mode of torch has changed.
    """
    return _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def print_options() -> Any:
    """How tensors are printed (`torch.set_printoptions`)."""
    return _tensor_str.PRINT_OPTS


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

_OPS.define("require(Tensor[] values, int key, SymInt[] sizes=[]) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.register_fake("wholestep::require", lambda values, key, sizes=(): torch.empty(0), lib=_OPS)
REQUIRE = torch.ops.wholestep.require.default
"""Looks at values in the middle of a graph, and raises if they are not what the graph was made for."""


def when_required(check: Callable[[list[Any], int], None]) -> None:
    """Say what `REQUIRE` does, to tensors and then to sizes."""
    _OPS.impl(
        "require", lambda values, key, sizes=(): _nothing(check([*values, *sizes], key)), "CompositeExplicitAutograd"
    )


RANDOM_STATE = frozenset(
    [torch.ops.wholestep.rng_state.default, torch.ops.wholestep.set_rng_state.default, torch.ops.wholestep.seed.default]
)
"""Ops that read or write the state of the random number generator, in the order of the step's draws."""


@contextlib.contextmanager
def traced_generator(refuse: Callable[[str], None], is_here: Callable[[], bool]) -> Generator[None]:
    """Let `get_rng_state`, `set_rng_state` and `manual_seed` be ops of the graph; other ways to seed are refused.

    Drawing is part of the graph, so what decides what is drawn has to be as well: `fork_rng` and libraries that save,
    change and restore the state all end here. Threads in which `is_here` says no draw on as they are.
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

        def replace(module: Any, name: str, function: Callable[..., Any]) -> None:
            chosen = only_where(is_here, function, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, chosen))

        for name, function in stands_in.items():
            for module in (torch, torch.random):
                replace(module, name, function)
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
            if torch.cuda.is_available():
                replace(torch.cuda, name, lambda *_, n=name: refuse(f"torch.cuda.{n}()"))
        yield
