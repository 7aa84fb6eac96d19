"""`StepRunner`: captures a step when a call needs it and runs the graph that fits. The engine of `CompiledStep`."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any, Self

from wholestep import _waiting_torch
from wholestep._threads import let_others_capture, one_at_a_time
from wholestep.capture import Capture, capture, discover, garbage_collection_paused
from wholestep.capture.record import OnlyInEager, OtherOutcome, Raises, raises_of_a_value
from wholestep.compiler import (
    Draft,
    Hardware,
    LoopGraphs,
    Plan,
    StepOptions,
    begin,
    build,
    imagined_communication,
    settle,
    with_peak,
)
from wholestep.errors import CaptureError, GuardError, RankError
from wholestep.graph import StepGraph
from wholestep.passes import dump_graphs, new_dump_folder
from wholestep.remat import MemoryStudy
from wholestep.runtime import differential, outcomes
from wholestep.runtime.arguments import refuse_tensor_keys, refuse_unplannable
from wholestep.runtime.data_parallel import Replicas
from wholestep.runtime.dynamic import choose_dynamic_dims, fewer_dims, what_is_fixed
from wholestep.runtime.guards import Call
from wholestep.runtime.heap import keep_freed_memory
from wholestep.runtime.made_once import refuse_state_made_once
from wholestep.runtime.measured import Measured, run_measured
from wholestep.runtime.pending import flush_all, flush_others
from wholestep.runtime.rotation import Rotation
from wholestep.runtime.specialization import Specialization
from wholestep.runtime.tracebacks import tell

logger = logging.getLogger(__name__)


class StepRunner:
    """A train step that captures itself on the first call and runs its graph from then on.

    Calls that do not fit a captured graph (another shape, dtype, mode, hyper-parameter, set of parameters) are captured
    again; the log says why. All captures are kept, up to `options.cache_size`.
    """

    def __init__(self, function: Callable[..., Any], options: StepOptions) -> None:
        functools.update_wrapper(self, function)
        self.options = options
        self._function = function
        self._specializations: list[Specialization] = []
        self._current: Specialization | None = None
        self._num_calls = 0
        self._num_captures = 0
        self._reasons: list[str] = []
        self._dynamic = options.dynamic_batch
        """What is left of that, where symbolic sizes turned out to be impossible."""
        self._replicas: Replicas | None = None
        self._num_attempts = 0
        self._numbers: dict[tuple[Any, ...], None] = {}
        """Paths of Python numbers that have changed from one call to another, in the order in which they did."""
        self._num_outcomes = self._num_made = 0
        self._is_refused = False
        """Whether it runs as it is from now on, but for calls that a graph is known of."""
        self._has_gone_well = self._is_in_doubt = False
        """Whether eager has run a call that raised where it was traced: the next one like that is refused."""
        self.num_eager_calls = 0
        """How many calls have run in eager, as no graph was made for the way that they took."""
        self._takes_last = discover.has_argument(function, "last")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. With `last=True` it leaves nothing pending (unless the step has an argument of that name)."""
        try:
            return self._called(args, kwargs)
        except BaseException as error:
            tell(error, self._function, is_debugging=self.options.is_debugging)
            raise

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.dry_run is not None:
            raise GuardError(f"{self._name} was planned for a device or ranks that are not there, it cannot run")
        is_last = bool(not self._takes_last and kwargs.pop("last", False))
        call = Call.of(self._function, args, kwargs)
        self._num_attempts += 1
        switches = _waiting_torch.Switches()
        try:
            flush_others(None if self._current is None else self._current.rotation.pending)
            chosen = self._choose_unless_refused(call)
            if chosen is None:
                self._num_calls += 1
                result = self._run_in_eager(call)
                self._has_gone_well |= self._is_in_doubt
                return result
            if self._replicas is not None:
                self._replicas.begin_call(chosen.part, chosen.capture, self._num_attempts, call.leaves)
            self._num_calls += 1
            try:
                return self._run(chosen, call, is_last=is_last or self._is_max_iter)
            except OtherOutcome:
                return self._run_otherwise(chosen, call)
        finally:
            switches.put_back()

    def _run(self, chosen: Specialization, call: Call, *, is_last: bool) -> Any:
        number, num_runs = self._num_calls, chosen.num_runs
        try:
            if number <= self.options.verify:
                flush_all()
                return differential.checked_run(chosen, call, number, self._peers(chosen))
            result = chosen.run(call, is_last=is_last, number=number)
            if self._replicas is not None:
                self._replicas.end_call()
            return result
        except BaseException as error:
            # Errors of ranks come from others, those of capture before anything is sent.
            is_ours = chosen.num_runs == num_runs and not isinstance(error, (RankError, CaptureError))
            if self._replicas is not None and is_ours:
                self._replicas.note_unfinished(f"call {number} of {self._name}")
            raise

    def _run_otherwise(self, left: Specialization, call: Call) -> Any:
        """A call that has left a graph with nothing done: run another one that fits, or the step as it is.

        What happens again gets a graph of its own: the second time, and only so many times, as there may be an error
        to raise, or draws may lead to ever other courses.
        """
        left.num_left += 1
        if left.num_runs == 0:
            self._forget(left)
        for known in [one for one in reversed(self._specializations) if one is not left and one.may_be_left]:
            with contextlib.suppress(OtherOutcome):
                if known.check(call) is None:
                    self._current = known
                    return self._run(known, call, is_last=False)
        is_budgeted = self.options.memory_budget is not None
        if is_budgeted or (left.num_left > 1 and self._num_outcomes < outcomes.MAX_OUTCOMES):
            self._num_outcomes += 1
            try:
                fresh = self._compile(call, "a value that the step looks at leads elsewhere")
            except CaptureError:
                if is_budgeted:
                    raise
                self._num_outcomes = outcomes.MAX_OUTCOMES
            else:
                self._current = fresh
                fresh.begin(call)
                try:
                    return self._run(fresh, call, is_last=False)
                except OtherOutcome as error:  # an operator that checks, which the trace has not asked: eager raises
                    self._forget(fresh)
                    if is_budgeted:
                        raise raises_of_a_value() from error
                    self._num_outcomes = outcomes.MAX_OUTCOMES
        return self._run_in_eager(call)

    def _choose_unless_refused(self, call: Call) -> Specialization | None:
        """What runs the call; None if it is to run as it is: the step is refused, or eager is going to raise."""
        if self._is_refused:
            fitting = next((one for one in self._specializations if one.check(call) is None), None)
            self._current = fitting or self._current
            return fitting
        try:
            return self._choose_with_others(call)
        except CaptureError as error:
            is_certain = isinstance(error, OnlyInEager) or (
                not self._has_gone_well and self.options.data_parallel is None
            )
            if isinstance(error, Raises) and is_certain and self.options.memory_budget is None:
                self._is_in_doubt = not isinstance(error, OnlyInEager)
                return None
            if self.options.on_refusal == "raise":
                raise
            self._is_refused = True
            logger.warning("%s runs in eager from now on, as it cannot be captured: %s", self._name, error)
            return None

    def _run_in_eager(self, call: Call) -> Any:
        """Run the step as it is."""
        flush_all()
        self.num_eager_calls += 1
        return call.function(*call.args, **call.kwargs)

    def _forget(self, left: Specialization) -> None:
        self._specializations = [one for one in self._specializations if one is not left]
        if self._current is left:
            self._current = None

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, like `step(...)`, and note what it takes; `measured`, `explain` and `report` tell.

            for x, y in batches[:10]:
                loss = step.measure(model, optimizer, x, y)
            step.report("report.html")

        It is a training step like any other, with the same result. Noted are the time from call to return, the time
        of each phase, the time that communication was waited for, and the peak of memory. Not measured are calls that
        capture or that run a graph for the first time, and those that `verify` checks; of the others the first is
        measured for its memory, which slows it down, and all further ones for their time. Plain calls pay nothing.
        """
        current = self._current
        if current is None or self._num_calls < self.options.verify:
            return self(*args, **kwargs)
        result, measured = run_measured(
            lambda: self(*args, **kwargs), current.rotation, (args, kwargs), current.measured
        )
        if self._current is current:
            current.measured = measured
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture and plan the step for such a call, and run nothing; there is a graph afterwards."""
        try:
            self._choose(Call.of(self._function, args, kwargs)).undo_draws()
        except BaseException as error:
            tell(error, self._function, is_debugging=self.options.is_debugging)
            raise

    def flush(self) -> None:
        """Apply whatever the last call has left for the next one; does nothing if that is nothing.

        Model, optimizer and gradients can be looked at without it: looking applies what is pending. It is for those who
        look past Python, at memory shared with another process, say.
        """
        if self._current is not None:
            self._current.rotation.pending.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    @property
    def graph(self) -> StepGraph:
        """The graph of the most recent call."""
        return self._require_current().graph

    @property
    def iteration(self) -> LoopGraphs:
        """The graphs of the loop: `setup`, `main`, `cleanup`, `flush`; all but the last are one if nothing moves."""
        return self._require_current().rotation.graphs

    @property
    def plan(self) -> Plan:
        """All that was decided about the most recent call's graph, with reasons; `print` shows it as a table."""
        return self._require_current().plan

    @property
    def measured(self) -> Measured:
        """What `measure` has found out about the graph of the most recent call; empty if it was not asked to."""
        return self._require_current().measured

    @property
    def memory_study(self) -> MemoryStudy | None:
        """The memory plan among others, for pictures; None without a plan. Made when asked for, by planning a lot."""
        survey = self._require_current().survey
        return None if survey is None else survey.study

    @property
    def smallest_peak_bytes(self) -> int | None:
        """The smallest memory budget that can be kept; None without a plan, or if the step is lowered."""
        survey = self._require_current().survey
        return None if survey is None else survey.smallest_peak_bytes

    @property
    def num_captures(self) -> int:
        """How often the step has been captured so far."""
        return self._num_captures

    @property
    def recompile_reasons(self) -> tuple[str, ...]:
        """Why each capture after the first was necessary."""
        return tuple(self._reasons)

    @property
    def captured(self) -> Capture:
        """What the most recent call's graph was built from."""
        return self._require_current().capture

    def __copy__(self) -> Self:
        """A function is its own copy, and so is a step."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As its function is copied: one of a copied object is compiled anew, for the models of the copy."""
        if isinstance(self._function, FunctionType):
            return self
        memo[id(self)] = copied = object.__new__(type(self))  # the object that is copied may hold this step
        copied.__init__(copy.deepcopy(self._function, memo), self.options)
        return copied

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Make decorated methods work: `self` is passed like any other argument."""
        return self if instance is None else functools.partial(self, instance)

    @property
    def _is_max_iter(self) -> bool:
        """Whether the call that runs is the last of `max_iters`; the next one begins to count again."""
        return self.options.max_iters is not None and self._num_calls % self.options.max_iters == 0

    def _require_current(self) -> Specialization:
        if self._current is None:
            raise GuardError(f"{self._name} has not been called yet; its graph exists after the first call")
        return self._current

    @property
    def _name(self) -> str:
        function = self._function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__qualname__)

    def _choose_with_others(self, call: Call) -> Specialization:
        try:
            return self._choose(call)
        except BaseException as error:
            if self._replicas is not None:
                self._replicas.fail_call(self._num_attempts, error)
            raise

    def _choose(self, call: Call) -> Specialization:
        """The specialisation that fits the call: the last one, another known one, or a new capture."""
        let_others_capture()
        tried: outcomes.Tried = []
        if self._current is not None:
            difference = self._current.check(call)
            if difference is None:
                return self._current
            tried.append((self._current, difference))
            self._current.rotation.pending.settle()
        for known in reversed(self._specializations):
            if known is self._current:
                continue
            other = known.check(call)
            if other is None:
                self._current = known
                return known
            tried.append((known, other))
            self._numbers |= dict.fromkeys(other.numbers)
        outcomes.require_worth(tried, self.options, len(self._specializations))
        left = None if self._current is None else tried[0][1]
        self._numbers |= dict.fromkeys([] if left is None else left.numbers)
        self._current = self._compile(call, None if left is None else left.reason)
        broken = self._current.begin(call)
        if broken is not None:
            raise GuardError(f"{self._name} does something else each time it is captured: {broken.reason}")
        return self._current

    def _compile(self, call: Call, reason: str | None) -> Specialization:
        """Capture, plan and build the step for a call."""
        started = time.perf_counter()
        refuse_tensor_keys(call.spec)
        options = self.options
        dump_dir = options.dump_dir and new_dump_folder(options.dump_dir, self._name)

        def capture_step(zero_gradients: frozenset[str]) -> tuple[Capture, Draft]:
            captured = self._capture(call, zero_gradients)
            refuse_unplannable(captured, options.memory_budget)
            draft = begin(
                captured.graph,
                options,
                options.dry_run or Hardware(),
                name=self._name,
                world=self._world,
                looks=bool(captured.recording.requirements),
                num_checkpoint_regions=captured.num_checkpoint_regions,
                dump_dir=dump_dir,
            )
            return captured, draft

        with garbage_collection_paused():
            flush_others(None)
            part, group = None, ""
            if options.data_parallel is None or options.dry_run is not None:
                captured, draft = capture_step(frozenset())
                communication = imagined_communication(draft.graph, options, draft.hardware)
            else:
                replicas = self._replicas = self._replicas or Replicas(options, self._function)
                prepared = replicas.prepare(capture_step, self._num_attempts)
                captured, draft, communication = prepared.captured, prepared.draft, prepared.communication
                part, group = prepared.part, replicas.ranks.name
            plan = settle(draft, communication, group=group)
            loop = build(draft.graph, plan, group=group, dump_dir=dump_dir)
            if plan.is_lowered and not draft.is_on_cuda and options.keep_heap:
                keep_freed_memory()
            rotation = Rotation(
                loop,
                captured,
                self._name,
                cuda_graphs=options.cuda_graphs,
                dump_dir=dump_dir,
                compiles=options.dry_run is None,
            )
            if dump_dir is not None:
                dump_graphs(dump_dir, loop.by_name())
            plan = with_peak(plan, loop, options, self._name)
            with one_at_a_time():  # guards keep what they see of torch
                fresh = Specialization(captured, rotation, call, plan, draft.survey, part)
        self._num_captures += 1
        self._remember(fresh)
        self._log(fresh, reason, time.perf_counter() - started)
        return fresh

    @property
    def _world(self) -> int:
        """How many ranks the step is planned for."""
        if self.options.dry_run is not None:
            return self.options.dry_run.world
        return 1 if self._replicas is None else self._replicas.ranks.world

    def _peers(self, chosen: Specialization) -> differential.Peers | None:
        """The other ranks of a call that is verified; None on one rank."""
        if self._replicas is None or chosen.plan.communication is None:
            return None
        return self._replicas.peers(chosen.capture, chosen.plan.communication, self._num_attempts)

    def _capture(self, call: Call, zero_gradients: frozenset[str]) -> Capture:
        """Capture with a symbolic batch where that is wanted and possible, with the sizes as they are otherwise."""
        # Ranks must run the same graph, so that none of them may look at its own batch.
        answers = self.options.data_parallel is None
        captured_with = functools.partial(
            capture, zero_gradients=zero_gradients, numbers=tuple(self._numbers), answers=answers
        )
        refusal: CaptureError | None = None
        while True:
            dims = choose_dynamic_dims(self._dynamic, call, self._specializations)
            try:
                captured = captured_with(call.function, call.args, call.kwargs, dynamic_dims=dims)
                break
            except CaptureError as error:
                if not dims:
                    raise
                refusal, self._dynamic = refusal or error, fewer_dims(self._dynamic, dims)
        if refusal is not None:
            logger.warning("%s cannot have %s: %s", self._name, what_is_fixed(self._dynamic), refusal)
        if self._specializations and self.options.may_run_in_eager and self._num_made < outcomes.MAX_OUTCOMES:
            self._num_made += 1
            refuse_state_made_once(captured)
            self._num_made -= 1
        return captured

    def _remember(self, fresh: Specialization) -> None:
        self._numbers |= dict.fromkeys(fresh.capture.recording.symbolic)
        self._specializations.append(fresh)
        if len(self._specializations) > self.options.cache_size:
            del self._specializations[0]

    def _log(self, fresh: Specialization, reason: str | None, seconds: float) -> None:
        graph, dynamic = fresh.graph, " with dynamic sizes" if fresh.capture.dynamic_dims else ""
        if reason is None:
            logger.info("captured %s%s: %d ops in %.1f s", self._name, dynamic, graph.num_ops, seconds)
        else:
            self._reasons.append(reason)
            logger.warning("recompiled %s%s in %.1f s because %s", self._name, dynamic, seconds, reason)
        if fresh.plan.memory is not None:
            logger.info("%s: %s", self._name, fresh.plan.memory)
        if len(self._reasons) == self.options.recompile_warning:
            logger.warning(
                "%s has been recompiled %d times; the last reason was: %s. Values that change from call to call should "
                "be tensors",
                self._name,
                len(self._reasons),
                reason,
            )
