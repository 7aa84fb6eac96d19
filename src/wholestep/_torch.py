# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""The one file that touches what PyTorch keeps private.

Each entry says why it is needed. Seen working with torch 2.11 and 2.13 (the supported range is 2.11 to 2.13); when a
release moves one of these, this is the only file to mend.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import sympy
import torch
import torch.distributed as dist
import torch.fx._symbolic_trace as fx_tracing
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch import fx
from torch._C import _dispatch_has_kernel as is_registered  # tells torch's operators from those of TorchScript only
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    maybe_enable_thunkify,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.node import _side_effectful_functions
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from wholestep import _sizes_torch
from wholestep._fake_torch import is_blank
from wholestep._threads import only_where
from wholestep.errors import CaptureError

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "ShapeEnv",
    "TorchDispatchMode",
    "is_registered",
    "tree_leaves",
    "tree_map_only",
]

# Raised by fake tensors and symbolic shapes when Python asks for a value that only exists at run time.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

# The one of them for shapes.
SIZE_ERROR = DynamicOutputShapeException

# What torch.optim calls with fused=True, and the functional operator that takes the learning rate as a tensor.
FUSED_OPTIMIZERS: dict[Callable[..., Any], Any] = {
    torch._fused_adam_: torch.ops.aten._fused_adam.tensor_lr,
    torch._fused_adamw_: torch.ops.aten._fused_adamw.tensor_lr,
    torch._fused_sgd_: torch.ops.aten._fused_sgd.tensor_lr,
    torch._fused_adagrad_: torch.ops.aten._fused_adagrad.tensor_lr,
}


@contextlib.contextmanager
def real_kernels(cuda_devices: Iterable[torch.device] = ()) -> Generator[None]:
    """Call operators on real tensors in the middle of a trace, below autocast, drawing no random numbers."""
    # Not by `fork_rng`: what it calls are ops of a step that is traced.
    cuda = [torch.cuda.default_generators[torch.cuda._utils._get_device_index(device)] for device in cuda_devices]
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *cuda)]
    try:
        with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextlib.contextmanager
def outside_modes() -> Generator[None]:
    """Run ops for real although somebody traces, fakes or transforms them just now."""
    with _disable_current_modes(), torch._C._DisableFuncTorch(), torch.inference_mode(mode=False):
        yield


num_modes_before_dispatch: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch


# What `torch.no_grad()` calls, in one opcode: Python may be interrupted inside of that, and the mode stays.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def is_faking() -> bool:
    """Whether ops make fake tensors just now."""
    return active_fake_mode() is not None


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, name: str, dynamic_dims: Sequence[int] = ()) -> FakeTensor:
    """A fake twin of `tensor`; equal sizes among all `dynamic_dims` of one mode share one symbol (duck shaping)."""
    sizes = [DimDynamic.DUCK if dim in dynamic_dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)  # pyright: ignore[reportCallIssue]
    with _disable_current_modes():  # else the detach itself would be traced
        return mode.from_tensor(tensor.detach(), source=ConstantSource(name), symbolic_context=context)


def new_symbolic_float(mode: FakeTensorMode) -> torch.SymFloat:
    """A float whose value the graph must not depend on while tracing (a learning rate)."""
    return _shape_env(mode).create_unbacked_symfloat()


def new_symbolic_int(mode: FakeTensorMode) -> torch.SymInt:
    """An int whose value the graph must not depend on while tracing (a step counter kept as a Python int)."""
    return _shape_env(mode).create_unbacked_symint()


def _shape_env(mode: FakeTensorMode) -> ShapeEnv:
    assert mode.shape_env is not None
    return mode.shape_env


def size_assumptions(mode: FakeTensorMode) -> list[tuple[str, Callable[[Mapping[int, int]], bool]]]:
    """What tracing assumed about symbolic sizes: each as text and as a predicate of what they are, by what they were.

    Covers guards (`s0 < 100`), equalities that pinned the symbol (`s0 = 4`) and divisibility.
    """
    env = _shape_env(mode)
    assumptions = [guard.expr for guard in env.guards]
    assumptions += [sympy.Eq(symbol, value) for symbol, value in env.replacements.items()]
    backed: dict[Any, Any] = vars(env).get("backed_var_to_val") or vars(env)["var_to_val"]  # renamed in 2.12

    def holds(assumption: Any, sizes: Mapping[int, int]) -> bool:
        known = {symbol: sizes.get(int(size), int(size)) for symbol, size in backed.items()}
        value = assumption.subs({symbol: known[symbol] for symbol in assumption.free_symbols & known.keys()})
        return bool(value) if not value.free_symbols else True

    of_values: dict[Any, int] = vars(env).get("of_values", {})  # what is assumed of these is asked elsewhere
    return [
        (str(item), functools.partial(holds, item))
        for item in assumptions
        if item.free_symbols & backed.keys() and not item.free_symbols & of_values.keys()
    ]


def expression(size: Any) -> Any:
    """A hashable, comparable form of a size: the sympy expression of a symbolic one, the number itself otherwise."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def optimization_hint(size: Any) -> int:
    """The size seen while tracing, for estimates of flops and bytes; symbolic sizes without one count as 1."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 1


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a (fake) tensor: equal keys alias."""
    return tensor.untyped_storage()._cdata


def to_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Wrap for functionalisation: in-place ops on the result are recorded as new values."""
    return FunctionalTensor.to_functional(tensor)


def is_functionalising() -> bool:
    """Whether operators that are called now are functionalised: not inside of the tracing of one."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def take_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value` of two functional tensors: from now on they are in one memory."""
    cast(Any, tensor).elem = cast(Any, value).elem
    torch._functionalize_unsafe_set(tensor, value)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def is_a_check(func: Any) -> bool:
    """Whether an operator does nothing but look at values, and torch does not know that it must stay in a graph."""
    is_kept = func in _side_effectful_functions and func is not torch.ops.aten._assert_async.msg
    if not isinstance(func, torch._ops.OpOverload) or is_kept:
        return False
    arguments = func._schema.arguments
    return not func._schema.returns and str(arguments[0].type) == "Tensor" and not any(map(is_written, arguments))


FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""Where torch logs what goes wrong in a fake kernel."""

INTERNAL_ATTRIBUTES = frozenset(["elem", "_is_param"])
"""What traced tensors have among their own attributes."""


def given_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes that somebody has given to a tensor, traced or not."""
    attributes: dict[str, Any] = object.__getattribute__(tensor, "__dict__")
    if not attributes or not isinstance(tensor, FunctionalTensor):
        return attributes
    return {name: value for name, value in attributes.items() if name not in INTERNAL_ATTRIBUTES}


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, torch.nn.Parameter)` true for a traced tensor."""
    tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]


def from_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The fake tensor that holds the current value of a functional one, after pending mutations."""
    torch._sync(tensor)
    assert isinstance(tensor, FunctionalTensor)
    return torch._from_functional_tensor(tensor.elem)


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor was made from Python numbers inside the step, so that its value is known now."""
    if not isinstance(tensor, FunctionalTensor):
        return False
    fake = torch._from_functional_tensor(tensor.elem)
    return isinstance(fake, FakeTensor) and fake.constant is not None


def is_traced(tensor: object) -> bool:
    """Whether a tensor is part of the trace (as opposed to a real tensor that Python still holds)."""
    if isinstance(tensor, (FunctionalTensor, FakeTensor)):
        return not is_blank(tensor)
    if not isinstance(tensor, torch.Tensor):
        return False
    return torch._is_functional_tensor(tensor) or is_traced(_behind_transform(tensor))


def _behind_transform(tensor: torch.Tensor) -> torch.Tensor | None:
    """What `torch.func` (`vmap`, `grad`) has wrapped for one of its levels; None for tensors that it has not."""
    transforms: Any = getattr(torch._C, "_functorch")  # noqa: B009
    return transforms.get_unwrapped(tensor) if transforms.is_functorch_wrapped_tensor(tensor) else None


def is_tracing() -> bool:
    """Whether a `trace` is running in this thread."""
    return get_proxy_mode() is not None


def current_tracer() -> Any:
    """The tracer of the running `trace`; its `graph` grows with every op."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None, "no trace is running"
    return proxy_mode.tracer


def track_as_placeholder(tracer: Any, value: object, name: str) -> fx.Node:
    """Make `value` (a fake tensor or symbolic number) an input of the graph being traced, at any time of the trace."""
    proxy = tracer.create_proxy("placeholder", name, (), {}, name=name)
    track_tensor_tree(value, proxy, constant=None, tracer=tracer)
    return proxy.node


def track_as_call(tracer: Any, value: object, target: Callable[..., Any], args: tuple[fx.Node, ...]) -> fx.Node:
    """Make `value` (a symbolic number) what a call in the graph being traced gives."""
    node = tracer.graph.call_function(target, args)
    track_tensor_tree(value, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return node


def node_of(tracer: Any, fake: torch.Tensor) -> fx.Node:
    """The node of the graph being traced that produces a fake tensor."""
    return get_proxy_slot(fake, tracer).proxy.node


def has_node(tracer: Any, fake: torch.Tensor) -> bool:
    """Whether a fake tensor is a value of the graph being traced: some are made beside it (by a gradient scaler)."""
    return get_proxy_slot(fake, tracer, None) is not None


def mkldnn_rnn_layer_in_training(*args: Any, **kwargs: Any) -> Any:
    """`aten.mkldnn_rnn_layer` that keeps what its backward needs; the kernel asks grad mode whether to."""
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(
            *(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs
        )


def call_with_symbolic_sizes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function whose C++ kernel cannot take symbolic sizes through torch's Python kernels.

    Not used for everything: some Python kernels (dropout, LSTM) compute in another order than eager does.
    """
    with enable_python_dispatcher():
        return function(*args, **kwargs)


def with_symbolic_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function to be called later."""
    return lambda *args, **kwargs: call_with_symbolic_sizes(function, args, kwargs)


def trace(function: Callable[[], Any], mode: FakeTensorMode, *, symbolic_sizes: bool) -> fx.GraphModule:
    """Run `function` and record every aten op it reaches, below autograd, as one FX graph.

    Convolutions ask for the batch size to choose a backend, which would pin a symbolic one to a range; as the ops
    of the graph choose again when they run, the choice is switched off while sizes are symbolic.
    """
    with (
        _sizes_torch.no_bookkeeping(mode.shape_env),
        mode,
        fx_traceback.preserve_node_meta(),
        _disable_saved_tensors_hooks_during_tracing(),
        torch.autograd.set_multithreading_enabled(False),
        torch.random.fork_rng(devices=[]),
        _sizes_torch.batch_size_choices(enabled=not symbolic_sizes),
        _use_lazy_graph_module(True),  # the code generated here is thrown away: the graph is edited first
        _sizes_torch.remembered_arithmetic(),
    ):
        return make_fx(_lazily(function), tracing_mode="real", _disable_torch_fn_metadata_mode=True)()


def _lazily(function: Callable[[], Any]) -> Callable[[], Any]:
    """Record arithmetic on symbolic sizes only where an op uses the result; most of it only serves bookkeeping."""

    caches_casts = torch.is_autocast_cache_enabled()
    seed_state = torch.get_rng_state()

    def run() -> Any:
        # make_fx switches the cache of autocast off; a weight used twice would then be cast twice, unlike in eager.
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caches_casts)
        try:
            with maybe_enable_thunkify():
                result = function()
        finally:
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(False)
        if not torch.equal(torch.get_rng_state(), seed_state):
            raise CaptureError(
                "the step sets the random seed or state itself", advice="Call torch.manual_seed outside the step"
            )
        return result

    return run


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module around a graph that generates no code unless it is called: ours does, and FX cannot for every op."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """The mode a fake tensor belongs to."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


@contextlib.contextmanager
def compiling_flag(value: bool) -> Generator[None]:
    """What `torch.compiler.is_compiling()` answers; with True, model code that asks takes its traceable branch.

    `is_fx_symbolic_tracing()` answers no: nobody gets to see proxies.
    """
    previous = torch.compiler._is_compiling_flag, fx_tracing._is_fx_tracing_flag
    torch.compiler._is_compiling_flag, fx_tracing._is_fx_tracing_flag = value, False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, fx_tracing._is_fx_tracing_flag = previous


@contextlib.contextmanager
def transparent_checkpoints(
    region: Callable[..., contextlib.AbstractContextManager[None]], is_here: Callable[[], bool]
) -> Generator[None]:
    """Run `torch.utils.checkpoint` regions as plain calls, each inside `region(context_fn)`, where `is_here`.

    Traced as they are, checkpoints redraw dropout masks in the recomputation and the reentrant kind loses gradients.
    The math is the plain call's; which tensors to recompute is a decision on the graph.
    """

    def reentrant(function: Callable[..., Any], _preserve_rng: bool, *args: Any) -> Any:
        # Eager gives parameters in such a region no gradient unless one of the inputs needs one.
        inputs_need_grad = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with region(), torch.set_grad_enabled(inputs_need_grad and torch.is_grad_enabled()):
            return function(*args)

    def non_reentrant(_function: Any, _preserve_rng: Any, context_fn: Any, *_: Any, **__: Any) -> Generator[None]:
        with region(context_fn):
            yield

    module = torch.utils.checkpoint
    name, function = "_checkpoint_without_reentrant_generator", module.CheckpointFunction
    with (
        mock.patch.object(function, "apply", only_where(is_here, reentrant, function.apply)),
        mock.patch.object(module, name, only_where(is_here, non_reentrant, getattr(module, name))),
    ):
        yield


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The dict that holds a module's own parameters; exchanging entries is how twins get in without a trace."""
    return module._parameters


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The dict that holds a module's own submodules."""
    return module._modules


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell learning rate schedulers that the optimizer has stepped (or they warn); once, as guards notice writes."""
    own = vars(optimizer)
    if "step" in own and hasattr(own["step"], "_wrapped_by_lr_sched") and own.get("_opt_called") is not True:
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def init_optimizer_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Let a torch.optim optimizer create the state of one group without taking a step.

    Every optimizer of torch.optim creates its state in `_init_group(group, *lists)`; the lists only collect what it
    finds, so empty ones will do.
    """
    init_group: Callable[..., Any] = optimizer._init_group  # pyright: ignore[reportAttributeAccessIssue]
    num_lists = len(inspect.signature(init_group).parameters) - 1
    init_group(group, *([] for _ in range(num_lists)))


def has_init_group(optimizer: Optimizer) -> bool:
    """Whether `init_optimizer_group` applies: the class is torch's own, not a subclass with ideas of its own."""
    return type(optimizer).__module__.startswith("torch.optim") and hasattr(optimizer, "_init_group")


def is_op_overload(target: object) -> bool:
    """Whether an FX target is an operator with a schema (`torch.ops.aten.add.Tensor`)."""
    return isinstance(target, torch._ops.OpOverload)


def schema(target: Any) -> Any:
    """An operator's schema: argument names, and which of them are aliased or written."""
    return target._schema


def tags(target: Any) -> list[torch.Tag]:
    """An operator's tags (`nondeterministic_seeded` marks those that draw random numbers)."""
    return target.tags


def is_written(argument: Any) -> bool:
    """Whether a schema argument is written to."""
    return argument.alias_info is not None and argument.alias_info.is_write


def namespace(target: Any) -> str:
    """`aten`, `_c10d_functional`, or a custom library's name."""
    return target.namespace


def packet_name(target: Any) -> str:
    """An operator's name without namespace and overload: `add`."""
    return target._schema.name.split("::")[1]


def overload_name(target: Any) -> str:
    """An operator's overload: `Tensor` in `add.Tensor`."""
    return target._overloadname


def overload_by_name(name: str, overload: str) -> Callable[..., Any] | None:
    """`torch.ops.aten.<name>.<overload>`, or None where there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload) if packet is not None and overload in packet.overloads() else None


def overloads(name: str) -> list[Any]:
    """All overloads of `torch.ops.aten.<name>`."""
    packet = getattr(torch.ops.aten, name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def generated_bindings(target: Any) -> list[Callable[..., Any]]:
    """Python bindings that torch generates for an operator's name; cheaper to call than the operator itself."""
    name = packet_name(target)
    if target.namespace != "aten":
        return []
    internal: Any = torch._C
    places = (internal._VariableFunctions, torch.Tensor, internal._nn, internal._linalg, internal._fft)
    return [getattr(place, name) for place in places if hasattr(place, name)]


def direct_call(target: Any) -> Callable[..., Any]:
    """An operator's C++ entry point, without the Python method around it."""
    return target._op


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the job was started with; ranks talk through it without a collective."""
    return dist.distributed_c10d._get_default_store()


def is_profiling() -> bool:
    """Whether a profiler listens; named ranges cost too much to open them for nobody."""
    return torch.autograd.profiler._is_profiler_enabled


def has_side_effect(target: Any) -> bool:
    """Whether the op is registered as effectful: it acts on something that is not among its arguments."""
    return not target._schema.returns or target in _side_effectful_functions


_OPS = torch.library.Library("wholestep", "DEF")
_OPS.define(
    "bernoulli_like(Tensor self, float p, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _bernoulli_like(like: torch.Tensor, p: float, *, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.empty_like(like).bernoulli_(p, generator=generator)


_OPS.impl("bernoulli_like", _bernoulli_like, "CompositeExplicitAutograd")
_OPS.impl("bernoulli_like", lambda like, p, *, generator=None: torch.empty_like(like), "Meta")

# What `x.bernoulli_(p)` is as a function. Functionalisation turns it into `aten.bernoulli.p`, which fills memory in
# another order when `x` is not contiguous: other dropout masks than eager.
BERNOULLI_LIKE = torch.ops.wholestep.bernoulli_like.default


_LIBRARY = torch.library.Library("aten", "IMPL")


def _register_missing_meta_kernels() -> None:
    """Fused optimizers with a tensor learning rate have no Meta kernel in 2.11 to 2.13; fake tensors need one."""
    for base in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"):
        in_place = getattr(torch.ops.aten, base + "_").tensor_lr
        functional = getattr(torch.ops.aten, base).tensor_lr
        written = [index for index, argument in enumerate(in_place._schema.arguments) if is_written(argument)]
        names = [argument.name for argument in functional._schema.arguments]

        def allocate(*args: Any, _written: list[int] = written, _names: list[str] = names, **kwargs: Any) -> Any:
            lists = [args[index] if index < len(args) else kwargs[_names[index]] for index in _written]
            return tuple([torch.empty_like(tensor) for tensor in tensors] for tensors in lists)

        if not _has_meta_kernel(functional):
            _LIBRARY.impl(f"{base}.tensor_lr", allocate, "Meta")
        if not _has_meta_kernel(in_place):
            _LIBRARY.impl(f"{base}_.tensor_lr", lambda *args, **kwargs: None, "Meta")


def _has_meta_kernel(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta") or torch._C.DispatchKey.Meta in op.py_kernels


_register_missing_meta_kernels()
