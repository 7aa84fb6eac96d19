"""Capture: run the user's train step once on traced twins of everything it touches, and keep the graph.

    reachable      who takes part: models, optimizers, argument leaves
    lift           every tensor they hold becomes an input (a slot)
    trace          the user's own function runs: forward, backward, clipping, optimizer.step()
    collect        what it returned, and the last value of each slot
    build          the recorded ops become a StepGraph

The step runs on fake tensors, so nothing is computed and no random number is drawn; in-place ops are functionalised, so
the graph is SSA. Whatever goes wrong, the model, the optimizer and the RNG are as before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from wholestep import _recording_torch, _torch
from wholestep._threads import one_at_a_time
from wholestep.capture import (
    binding,
    blank,
    build,
    discover,
    entries,
    failures,
    options,
    refusals,
    remedies,
    source,
    swap,
    switches,
    tree,
)
from wholestep.capture.arguments import argument_paths
from wholestep.capture.attempt import Attempt, Function, NumberPaths
from wholestep.capture.collect import Collected, collect, foreign_state
from wholestep.capture.discover import Reachable
from wholestep.capture.functional import Functional
from wholestep.capture.interpose import interposed, others_waiting
from wholestep.capture.leftovers import HandedOut, garbage_collection_paused
from wholestep.capture.optimizer_state import fresh_state, require_as_it_is, state_before
from wholestep.capture.questions import Answers, Asked
from wholestep.capture.record import (
    AsksBefore,
    CallsLater,
    DrawsWhole,
    HasSizes,
    LooksAtState,
    Missed,
    Moves,
    NotWhole,
    Program,
    Raises,
    Recording,
    Template,
    Unimported,
    Unseen,
    Unsymbolic,
    drawing,
    listening,
    participants,
    require_none_moved,
    sequences,
)
from wholestep.capture.record.calls import choose
from wholestep.capture.record.numbers import is_real
from wholestep.capture.record.places import ARGUMENTS, Rooted, Step
from wholestep.capture.trail import Trail
from wholestep.errors import CaptureError
from wholestep.graph import Slot, SlotKind, StepGraph


@dataclass(frozen=True)
class Capture:
    """A captured step and all that is needed to run it again.

    `bindings` says where each slot of the graph (and each result) lives; `any_incoming_grad` are parameters whose
    gradient before the call does not matter, `cleared_late` those of them whose gradient is there until after a look
    that may leave the graph; `initial_state` is optimizer state the first run starts from; `flags_left` are the values
    of `requires_grad` that the step leaves changed, and where; `stepped` are the optimizers whose `step()` the graph
    contains; `state` is what it leaves in their state besides tensors and numbers, `empty_states` for which parameters
    it asks for state and leaves it empty; `state_keys` what it asks about the keys of state, for each optimizer by ids
    of parameters; `written` the ids of the slots it writes to; `trail` says which ops each call of a module made and
    where `pipe_split()` stood; `asked` are values that the step has looked at; `recording` is the Python around the
    graph, which is checked and done again at each call. One that `is_blank` has tensors without memory among its slots
    (`no_weights`) and cannot run.
    """

    graph: StepGraph
    found: Reachable
    outputs: Template
    state: tuple[tuple[binding.StateOf, Template], ...]
    empty_states: tuple[tuple[Optimizer, torch.Tensor], ...]
    state_keys: tuple[dict[int, entries.KeysAsked], ...]
    recording: Recording
    bindings: dict[str, binding.Binding]
    any_incoming_grad: tuple[torch.Tensor, ...]
    cleared_late: tuple[torch.Tensor, ...]
    initial_state: list[tuple[Optimizer, torch.Tensor, dict[str, Any]]]
    flags_left: tuple[tuple[binding.Binding, bool], ...]
    stepped: tuple[Optimizer, ...]
    written: frozenset[str]
    spec: tree.Spec
    dynamic_dims: frozenset[tuple[int, int]]
    num_checkpoint_regions: int
    trail: Trail
    seconds: float
    asked: Asked | None = None
    is_blank: bool = False
    sizes_of_values: str | None = None
    """The first line that makes a tensor whose size depends on values."""


def capture(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_dims: frozenset[tuple[int, int]] = frozenset(),
    zero_gradients: frozenset[str] = frozenset(),
    numbers: NumberPaths = (),
    answers: bool = False,
) -> Capture:
    """Capture one call of a train step; the dimensions of argument leaves in `dynamic_dims` stay symbolic.

    So do the Python numbers at the paths `numbers`, but for those that torch needs the value of.

    Parameters named in `zero_gradients` that this step leaves without a gradient get one of zeros, as if they had been
    used with no effect on the loss. With `answers`, the step may look at values that its arguments decide; whoever runs
    the graph then has to check for each call that they are what they were (`Capture.asked`).

    Raises `CaptureError` with the user's file and line when the step cannot be captured as one graph.
    """
    refusals.refuse_nested(function)
    with one_at_a_time(), garbage_collection_paused(), failures.told(function):
        handed_out = HandedOut()
        call = (function, args, kwargs, discover.reachable(function, args, kwargs))
        captured = _capture(Attempt(*call, dynamic_dims, zero_gradients, numbers, answers, handed_out))
        handed_out.require_gone()
        return captured


def _capture(call: Attempt) -> Capture:
    started = time.perf_counter()
    function, args, kwargs, dynamic_dims = call.function, call.args, call.kwargs, call.dynamic_dims
    with blank.where_made(discover.tensors(call.found, args, kwargs)):
        call, module, result = _trace_until_complete(call)
    discover.require_any(call.found, function)
    graph, asked = build.build_graph(module, call.session, result, call.bindings)
    indifferent = _indifferent_parameters(call, graph)
    graph.accumulating = _accumulating(call, indifferent)
    return Capture(
        graph=graph,
        found=call.found,
        outputs=result.outputs,
        state=tuple(result.state),
        empty_states=tuple(call.session.empty_states),
        state_keys=result.state_keys,
        recording=_recording(call, result, graph),
        bindings=call.bindings,
        any_incoming_grad=indifferent,
        cleared_late=tuple(p for p in indifferent if id(p) in call.session.looks.gradients_before),
        initial_state=fresh_state(call.found.optimizers, call.states, call.session, graph),
        flags_left=call.flags_left,
        stepped=tuple(call.session.stepped),
        written=frozenset(graph.updates),
        spec=tree.flatten((args, kwargs))[1],
        dynamic_dims=dynamic_dims,
        num_checkpoint_regions=call.session.num_checkpoint_regions,
        trail=call.session.trail.settled(graph.calls()),
        asked=asked,
        seconds=time.perf_counter() - started,
        sizes_of_values=None if call.sizes is None else call.sizes.where,
        is_blank=any(blank.is_blank(lifted.real) for lifted in call.session.lifted.values()),
    )


def _trace(call: Attempt) -> tuple[Attempt, fx.GraphModule, Collected]:
    """Trace one call; whatever the step raises becomes a `CaptureError`."""
    function, found = call.function, call.found
    refusals.refuse_wrappers(found, function)
    if call.dynamic_dims:
        refusals.refuse_recurrent(found)
    call.states, call.session.made_of_rates = state_before(found.optimizers, call.as_it_is)
    call.flags = {name: options.flags(opt) for name, opt in found.optimizers.items()}
    collected: list[Collected] = []
    try:
        module = _torch.trace(
            lambda: _traced_run(call, collected), call.session.fake_mode, symbolic_sizes=call.session.has_symbolic_sizes
        )
    except CaptureError as error:
        failures.locate(error, function)
        raise
    except _torch.DATA_DEPENDENT_ERRORS as error:
        if isinstance(error, _torch.SIZE_ERROR) and call.pretends is None:
            raise HasSizes(pretends=True) from error
        if not call.asks_before:
            raise AsksBefore from error
        raise failures.of_data_dependence(error, function, call.session.optimizer) from error
    except SystemExit as error:
        raise Raises("the step exits", location=source.raising_line(error, function)) from error
    except Exception as error:
        call.recorder.caught.require_none()  # which the step may have turned into this one
        raise failures.of_step(error, function, call.session.looks, divides=call.pretends is False) from error
    return call, module, collected[0]


def _trace_until_complete(call: Attempt) -> tuple[Attempt, fx.GraphModule, Collected]:
    """Trace again as long as a trace meets models or functions that nobody knew of, or numbers that must be fixed."""
    while True:
        try:
            return _trace(call)
        except Missed as missed:
            call = call.again(found=discover.with_missed(call.found, missed.owner))
        except DrawsWhole as error:
            call = call.again(whole_draws=[error.drawer])
        except NotWhole as error:
            call = call.again(whole_calls=call.whole_calls.without(error.function))
        except CallsLater as error:
            call = call.again(whole_calls=call.whole_calls.with_chosen(error.function))
        except Unsymbolic as error:
            fixed = frozenset(map(_fixed, error.paths))
            if not fixed - call.fixed:
                raise CaptureError(
                    "the step computes with a number in a way that needs its value, and gets another one each time",
                    location=source.location_of(call.function),
                    advice="Keep it in a tensor",
                ) from error
            call = call.again(numbers=tuple(p for p in call.numbers if p not in error.paths), fixed=fixed)
        except Moves as error:
            # Those that torch had to have the value of stay as they are.
            moved = [path for path in error.paths if path not in call.fixed]
            call = call.again(numbers=tuple(dict.fromkeys([*call.numbers, *moved])), moved=error.paths)
        except LooksAtState as error:
            call = call.again(as_it_is=error.optimizers)
        except HasSizes as error:
            call = call.again(pretends=error.pretends)
        except Unimported as error:
            error.load()
            call = call.again()
        except AsksBefore as error:
            if call.asks_before:
                raise CaptureError(
                    "the step makes text of a value that is only known when it runs",
                    location=source.raising_line(error, call.function),
                    advice=remedies.for_error(error),
                ) from error
            call = call.again(asks_before=True)
        except Unseen as error:
            functions = frozenset(error.functions())
            if not functions or any(known.__code__ is error.code for known in call.unseen):
                raise CaptureError(
                    f"the step runs {error.code.co_qualname}, which was made out of sight and cannot be followed",
                    location=f"{error.code.co_filename}:{error.code.co_firstlineno}",
                    advice="Call it outside the step, or define it with def",
                ) from None
            call = call.again(unseen=functions)
        except CaptureError:
            if call.pretends:
                call = call.again(pretends=False)
            elif call.recorder.late.has_early_texts and not call.settles_texts:
                # Somebody may have looked into one, or an error may show one.
                call = call.again(settles_texts=True)
            elif call.numbers:  # somebody takes nothing but real numbers: each value is a capture then
                call = call.again(numbers=())
                call.recorder.whole_draws = call.whole_draws = drawing.without_failures(call.whole_draws)
            else:
                raise


def _fixed(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A path as it is known in another trace, whose answers to questions are others."""
    return (Answers, path[-1][1]) if isinstance(path[0].owner, Answers) else path


def _recording(call: Attempt, result: Collected, graph: StepGraph) -> Recording:
    """The Python around a graph; what the graph has taken out of it are its inputs."""
    recorder = call.recorder
    slots = {lifted.slot.id for lifted in call.session.lifted.values() if lifted.slot.kind is SlotKind.NUMBER}
    needed = [*recorder.needed, *(slot_id.removeprefix(f"{SlotKind.NUMBER}.") for slot_id in slots)]
    for root in recorder.roots:
        if root.key is ARGUMENTS:
            root.forget_objects()
    recorder.settle()
    sequences.require_unchanged(recorder, [e.real for e in call.session.lifted.values() if e.slot.id in graph.updates])
    program = Program(recorder.ledger, needed, tuple(recorder.generators))
    recorder.ledger.symbol_of, recorder.ledger.text_later = _no_symbol, None  # or kept numbers would keep the trace
    recorder.late.end()
    return Recording(
        *(tuple(recorder.roots), program, result.effects, (*call.numbers, *recorder.texts.paths())),
        *(call.session.numbers, call.session.current, result.late, tuple(call.session.looks.requirements)),
        frozenset(recorder.states_read),
    )


def _no_symbol(number: Any) -> Any:
    raise AssertionError("the trace is over")


def _traced_run(call: Attempt, collected: list[Collected]) -> list[Any]:
    """What `make_fx` traces: lift, run the user's function, collect. Returns the values of the output node."""
    session = call.session
    session.tracer = _torch.current_tracer()
    with Functional(session), contextlib.ExitStack() as stack:
        if call.sizes is not None:
            stack.callback(call.sizes.end)
        for name, module in call.found.modules.items():
            _lift_module(call, call.found.prefix_of(name), module)
        for name, optimizer in call.found.optimizers.items():
            _lift_loose_parameters(call, name, optimizer)
        args, kwargs = _lift_arguments(call)
        _lift_gradients(call)
        hooks, names = _recording_torch.global_hooks(), discover.module_names(call.found)
        stack.enter_context(others_waiting(session, names))
        stack.callback(session.over.set)
        for module in call.found.modules.values():
            stack.enter_context(swap.lent_module(module, lambda real: session.twins.get(id(real), real)))
        for name, optimizer in call.found.optimizers.items():
            stack.enter_context(_lent_optimizer(call, name, optimizer))
        _introduce(call, args, kwargs, hooks)
        stack.enter_context(call.recorder.placed_numbers())
        call.recorder.twins.show_attributes()
        stack.callback(call.recorder.restore)
        with interposed(session, names), listening(call.recorder):
            function = choose(call.recorder, call.function, args, kwargs)
            session.note_rates(call.found.optimizers.values())
            with switches.left_alone(), entries.noting():
                returned = function(*args, **kwargs)
            call.recorder.caught.require_none()
            session.annotate()
        require_none_moved(call.recorder, call.moved)
        require_as_it_is(call.found, call.states, call.recorder.states_read - call.as_it_is)
        lifted = session.lifted.values()
        options.refuse_changes(lifted, call.found, call.flags, call.rates, asks_before=call.asks_before)
        if call.sizes is not None:
            call.sizes.settle()
        call.flags_left = options.flags_left(lifted, call.bindings)
        result = collect(session, call.found, call.bindings, returned)
        collected.append(result)
        for parameter in session.parameters:
            parameter.twin.grad = None  # one with a history leads back to its parameter: a ring in C++
        return result.values


def _introduce(call: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Iterable[Any]) -> None:
    """Tell the recorder who takes part: models and optimizers, whose attributes it watches, and the arguments."""
    recorder = call.recorder
    recorder.ledger.symbol_of = call.session.symbol
    for name, root in call.found.modules.items():
        for path, module in root.named_modules():
            participants.add_module(recorder, module, f"{name}.{path}" if path else name)
    for name, optimizer in call.found.optimizers.items():
        participants.add_optimizer(recorder, optimizer, name)
    for lifted in call.session.lifted.values():
        if isinstance(lifted.real, torch.Tensor):
            for hook in _recording_torch.tensor_hooks(lifted.real):
                recorder.add_hook(hook)
    for hook in hooks:
        recorder.add_hook(hook)
    recorder.give(args, kwargs, (call.args, call.kwargs))
    participants.add_function(recorder, call.function)
    for unseen in call.unseen:
        recorder.follow(unseen)
    for module in call.found.modules.values():
        recorder.enter_module(module)


def _lift_module(call: Attempt, prefix: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = call.parameter_names.setdefault(id(parameter), prefix + name)
        if known == prefix + name:
            names = [other for other, p in module.named_parameters(remove_duplicate=False) if p is parameter]
            slot = Slot(SlotKind.PARAM, known, aliases=tuple(prefix + other for other in names[1:]))
            _lift(call, parameter, slot, binding.FixedTensor(parameter))
    for path, submodule in module.named_modules():
        for name, buffer in _torch.own_buffers(submodule).items():
            if buffer is not None:
                fqn = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
                if buffer.requires_grad:
                    raise CaptureError(f"buffer '{fqn}' requires a gradient", advice="Make it a parameter")
                twin = _lift(call, buffer, Slot(SlotKind.BUFFER, fqn), binding.BufferOf(submodule, name))
                slot_id = next(lifted.slot.id for lifted in call.session.lifted.values() if lifted.twin is twin)
                call.session.buffer_slots[id(submodule), name] = slot_id


def _lift_loose_parameters(call: Attempt, optimizer_name: str, optimizer: Optimizer) -> None:
    """Parameters only the optimizer knows (of a module the step was not given)."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in call.parameter_names:
                name = f"{optimizer_name}.param_groups[{group_index}][{index}]"
                call.parameter_names[id(parameter)] = name
                _lift(call, parameter, Slot(SlotKind.PARAM, name), binding.FixedTensor(parameter))


def _lift_arguments(call: Attempt) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = [*discover.argument_names(call.function, len(call.args)), *call.kwargs]
    values = [*call.args, *call.kwargs.values()]
    paths = [path for name, value in zip(names, values, strict=True) for path in tree.paths(value, name)]
    leaves, _ = tree.flatten((call.args, call.kwargs))
    ways = argument_paths(call.args, call.kwargs)
    twins: list[Any] = []
    for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            twins.append(call.recorder.argument(ways[index], leaf))
            continue
        if leaf.grad_fn is not None:
            raise CaptureError(
                f"{path} has a grad_fn: its gradient would have to leave the captured step",
                advice=f"Compute it inside the train step, or pass {path}.detach()",
            )
        dynamic_dims = call.dynamic_dims_of(index)
        twins.append(_lift(call, leaf, Slot(SlotKind.BATCH, path), binding.Argument(index), dynamic_dims))
    following = iter(twins)
    return tree.map_leaves(lambda _: next(following), (call.args, call.kwargs))


def _lift_gradients(call: Attempt) -> None:
    """Gradients that exist before the call: inputs of a step that accumulates into them."""
    for lifted in list(call.session.lifted.values()):
        where = call.bindings[lifted.slot.id]
        if isinstance(where, binding.FixedTensor):
            grad_binding: binding.Binding = binding.GradOf(where.tensor)
        elif isinstance(where, binding.Argument):
            grad_binding = binding.GradOfArgument(where.index)
        else:
            continue
        # A parameter that was frozen after it got a gradient still has it, and optimizers and clipping still use it.
        if lifted.slot.kind is not SlotKind.PARAM and not binding.may_require_grad(lifted.real):
            continue
        slot = Slot(SlotKind.GRAD, lifted.slot.name)
        call.bindings[slot.id] = grad_binding
        if lifted.real.grad is not None:
            call.session.refuse_known(lifted.real.grad, slot)
            dims = call.dynamic_dims_of(where.index) if isinstance(where, binding.Argument) else ()
            lifted.twin.grad = call.session.lift(lifted.real.grad, slot, dims)


def _lent_optimizer(call: Attempt, name: str, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    several = len(call.found.optimizers) > 1

    def lift_state(parameter: torch.Tensor, key: str, value: Any) -> Any:
        slot = Slot(SlotKind.STATE, call.parameter_names[id(parameter)], f"{name}.{key}" if several else key)
        if isinstance(value, torch.Tensor):
            value = _lift(call, value, slot, binding.StateOf(optimizer, parameter, key))
        path = (Rooted(optimizer), (Step.ATTRIBUTE, "state"), (Step.ITEM, parameter), (Step.ITEM, key))
        if type(value) in (int, float) and path not in call.fixed:
            value = call.recorder.ledger.steady_leaf(value, path)
        call.session.state_before[id(optimizer), id(twin_of(parameter)), key] = value
        return value

    def lift_rate(group: int, value: Any) -> Any:
        slot = Slot(SlotKind.LR, f"{name}.{group}" if several else str(group))
        if isinstance(value, torch.Tensor):
            return _lift(call, value, slot, binding.LearningRate(optimizer, group))
        path = (Rooted(optimizer), (Step.ATTRIBUTE, "param_groups"), (Step.ITEM, group), (Step.ITEM, "lr"))
        if not is_real(value) or path in call.fixed:
            call.rates.append(value)
            return value
        if call.asks_before or type(value) is not float:  # of NumPy's schedules, too
            call.rates.append(call.recorder.ledger.steady_leaf(value, path))
            return call.rates[-1]
        symbol = _lift(call, value, slot, binding.LearningRate(optimizer, group))
        call.recorder.add_rate(symbol, path, type(value))
        return symbol

    def twin_of(parameter: torch.Tensor) -> torch.Tensor:
        return call.session.twins[id(parameter)]

    if any(id(parameter) not in call.parameter_names for parameter in optimizer.state):
        raise foreign_state(name)
    wrappers = call.found.wrappers.get(name, [])
    return swap.lent_optimizer(optimizer, call.states[name], twin_of, lift_state, lift_rate, call.lent_groups, wrappers)


def _lift(call: Attempt, real: Any, slot: Slot, where: binding.Binding, dynamic_dims: tuple[int, ...] = ()) -> Any:
    call.bindings.setdefault(slot.id, where)
    return call.session.lift(real, slot, dynamic_dims)


def _indifferent_parameters(call: Attempt, graph: StepGraph) -> tuple[torch.Tensor, ...]:
    """Whose gradient was cleared first, unless it is read nonetheless: somebody has kept it."""
    cleared, inputs = call.session.cleared_first, graph.placeholders()
    known = [p for p in call.session.parameters if id(p.twin) in cleared]
    return tuple(p.real for p in known if Slot(SlotKind.GRAD, p.slot.name).id not in inputs)


def _accumulating(call: Attempt, indifferent: tuple[torch.Tensor, ...]) -> frozenset[str]:
    known = {id(parameter) for parameter in indifferent}
    parameters = [p for p in call.session.parameters if p.real.requires_grad or p.real.grad is not None]
    return frozenset(p.slot.name for p in parameters if id(p.real) not in known)
