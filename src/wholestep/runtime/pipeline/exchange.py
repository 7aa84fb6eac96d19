"""Values between the processes of a pipeline, over `torch.distributed`'s gloo or NCCL."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from wholestep import _ranks_torch, _torch
from wholestep.errors import PipelineError, RankError
from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Action, Schedule
from wholestep.runtime.agreement import lost_peer, plain, room_of
from wholestep.runtime.job_store import JobStore
from wholestep.runtime.pipeline.calls import Calls
from wholestep.runtime.pipeline.failures import Alarm, Watch, between_ranks, error_of, sentence
from wholestep.runtime.pipeline.links import Link, Links
from wholestep.runtime.pipeline.messages import Message, ShareMessage, messages, share_fake, share_messages
from wholestep.runtime.pipeline.parcels import Form, Parcel
from wholestep.runtime.pipeline.programs import StageRunner, summed_gradients

_FIRST_PAUSE_S, _LAST_PAUSE_S = 2e-5, 1e-3
_LOOK_S, _COMPARE_S = 0.25, 1.0
Share = tuple[int, str]
"""A stage and the slot of a parameter."""


class ProcessExchange:
    """What a rank sends and receives in each step of a pipeline that is one cut and one schedule.

    All ranks of the pipeline make theirs at the same time; `global_ranks` says which ranks of the job they are (all of
    them, if it is left out). `small` is the cut for micro-batches from number `num_large` on, which have a row less, if
    there are such. Nobody waits longer than collectives of the job do; with `calls`, whoever waits finds out whether
    others call the pipeline in another way. Whatever happens to one of them ends all of them, and those of other
    pipelines of the job that were made alike: then every method raises `PipelineError`, or `RankError` if ranks differ
    or one is gone or late, and a new exchange has to be made.
    """

    def __init__(
        self,
        cut: CutGraph,
        schedule: Schedule,
        rank: int,
        global_ranks: Sequence[int] | None = None,
        calls: Calls | None = None,
        small: CutGraph | None = None,
        num_large: int = 0,
    ) -> None:
        traffic = messages(cut, schedule)
        shares = share_messages(cut, schedule)
        self._rank = rank
        self._global_ranks = list(range(schedule.num_ranks)) if global_ranks is None else list(global_ranks)
        self._difference = _unknown if calls is None else calls.difference
        group = dist.group.WORLD
        assert group is not None
        store = _own_store(group)
        timeout_s = _ranks_torch.group_timeout_s(group)
        ends = [(message.source, message.target) for message in (*traffic.messages, *shares)]
        room = ",".join(map(str, self._global_ranks))
        self._links = Links.connect(PrefixStore(room, store), ends, rank, self._global_ranks, cut.device, timeout_s)
        self._messages = traffic.messages
        self._plan = traffic.ranks[rank]
        self._routes = self._make_routes(lambda number: cut if small is None or number < num_large else small)
        self._shares = [(message, *self._share_route(cut, message)) for message in shares if self._concerns(message)]
        sent = {number for numbers in self._plan.sends for number in numbers}
        self._sent_last = sorted(sent.difference(*self._plan.settled))
        self._works: list[Any] = [None] * len(traffic.messages)
        self._buffers: list[Any] = [None] * len(traffic.messages)
        self._failure: str | None = None
        self._alarm = Alarm(JobStore(store, timeout_s), room)
        self._watch = Watch(self._alarm, self._links.abort, self._difference)
        weakref.finalize(self, self._watch.stop)

    def begin(self) -> None:
        """A step begins."""
        self._require_usable()
        self._watch.is_on = True

    def receive(self, position: int, values: Sequence[dict[str, Any]]) -> None:
        """Wait for what the action at a position reads from other ranks, and store it by micro-batch and name."""
        plan, works, buffers = self._plan, self._works, self._buffers
        for number in plan.posts[position]:
            link, parcel = self._routes[number]
            buffers[number] = parcel.empty()
            try:
                works[number] = link.receive(buffers[number])
            except RuntimeError as error:
                self._lost(self._messages[number], error)
        for number in plan.needs[position]:
            self._finish(number)
            values[self._messages[number].micro_batch].update(self._routes[number][1].unpack(buffers[number]))
            buffers[number] = None
        for number in plan.settled[position]:
            self._finish(number)
            buffers[number] = None

    def send(self, position: int, made: Mapping[str, Any]) -> None:
        """Send what the action at a position made to whoever reads it."""
        for number in self._plan.sends[position]:
            link, parcel = self._routes[number]
            self._buffers[number] = data = parcel.pack(made)
            try:
                self._works[number] = link.send(data)
            except RuntimeError as error:
                self._lost(self._messages[number], error)

    def end(self) -> None:
        """A step is over: wait until everything sent has left."""
        for number in self._sent_last:
            self._finish(number)
            self._buffers[number] = None
        self._settle()
        self._watch.is_on = False

    def swap_shares(self, own: Mapping[Share, torch.Tensor], mark: int) -> tuple[dict[Share, torch.Tensor], list[int]]:
        """Between steps: give other ranks this rank's shares of gradients that they want, and get theirs.

        A number goes with each; returns the shares, and ranks of the job that have sent another number.
        """
        self._require_usable()
        self._watch.is_on = True
        try:
            found = self._swap(own, mark)
            self._settle()
        except BaseException as error:
            self.fail(None, error)
            raise
        self._watch.is_on = False
        return found

    def wait_for(self, work: Any) -> None:
        """Wait for a collective of this rank; a failure anywhere, and ranks that do something else, end the wait."""
        pause_s = _FIRST_PAUSE_S
        next_look = time.monotonic() + _LOOK_S
        next_comparison = time.monotonic() + _COMPARE_S
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            if time.monotonic() > next_look:
                self._raise_if_heard()
                next_look = time.monotonic() + _LOOK_S
            if time.monotonic() > next_comparison:
                self._raise_if_different()
                next_comparison = time.monotonic() + _COMPARE_S
        try:
            work.wait()
        except RuntimeError as error:
            self._raise_if_heard()
            self._raise_if_different()
            lost = lost_peer("a sum over ranks of the pipeline", error)
            self._ring(between_ranks(str(lost)), len(self._global_ranks) - 1)
            raise lost from error

    def fail(self, action: Action | None, error: BaseException) -> None:
        """Tell all other ranks that this one failed, unless it is told so by them; the exchange is of no use then."""
        if self._failure is None:
            self._ring(sentence(self._global_ranks[self._rank], action, error), len(self._global_ranks) - 1)

    def refuse(self, error: RankError) -> None:
        """Tell all other ranks in what this one and another differ; the exchange is of no use then."""
        if self._failure is None:
            self._ring(between_ranks(str(error)), len(self._global_ranks) - 1)

    def close(self) -> None:
        """Give connections back; to be called by all ranks once none of them is in a step."""
        self._watch.stop()
        if self._failure is None:
            self._failure = "it was closed"
            self._links.close()

    def _make_routes(self, cut_for: Callable[[int], CutGraph]) -> list[Any]:
        """By number: link and parcel of each message of this rank. Micro-batches of one size share their parcels."""
        parcels: dict[Any, Parcel] = {}
        routes: list[tuple[Link, Parcel] | None] = []
        for message in self._messages:
            if not self._concerns(message):
                routes.append(None)
                continue
            cut = cut_for(message.micro_batch)
            key = id(cut), message.stage, message.names
            if key not in parcels:
                fakes = cut.stages[message.stage].fakes
                parcels[key] = Parcel({name: Form.of(fakes[name]) for name in message.names}, self._links.wire)
            routes.append((self._links.by_ends[message.source, message.target], parcels[key]))
        return routes

    def _share_route(self, cut: CutGraph, message: ShareMessage) -> tuple[Link, Parcel]:
        forms = {slot: Form.contiguous(share_fake(cut, message.stage, slot)) for slot in message.slots}
        return self._links.by_ends[message.source, message.target], Parcel(forms, self._links.wire)

    def _concerns(self, message: Message | ShareMessage) -> bool:
        return self._rank in (message.source, message.target)

    def _swap(self, own: Mapping[Share, torch.Tensor], mark: int) -> tuple[dict[Share, torch.Tensor], list[int]]:
        started: list[tuple[ShareMessage, Parcel, torch.Tensor, torch.Tensor, list[Any]]] = []
        for message, link, parcel in self._shares:
            is_own = message.source == self._rank
            data = parcel.pack({slot: own[message.stage, slot] for slot in message.slots}) if is_own else parcel.empty()
            number = torch.tensor([mark], device=self._links.wire)
            pass_on = link.send if is_own else link.receive
            try:
                started.append((message, parcel, data, number, [pass_on(data), pass_on(number)]))
            except RuntimeError as error:
                self._lost(message, error)
        found: dict[Share, torch.Tensor] = {}
        others: list[int] = []
        for message, parcel, data, number, works in started:
            for work in works:
                self._wait(work, message)
            if message.target == self._rank:
                found |= {(message.stage, slot): value for slot, value in parcel.unpack(data)}
                others += [] if number.item() == mark else [self._global_ranks[message.source]]
        return found, others

    def _finish(self, number: int) -> None:
        self._wait(self._works[number], self._messages[number])
        self._works[number] = None

    def _wait(self, work: Any, message: Message | ShareMessage) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._lost(message, error)

    def _settle(self) -> None:
        """Find out now whether all is well where waiting only told a stream to wait."""
        if self._links.wire.type != "cuda":
            return
        torch.cuda.current_stream(self._links.wire).synchronize()
        self._raise_if_heard()

    def _raise_if_heard(self) -> None:
        text = self._alarm.heard()
        if text is not None:
            self._break(text)
            raise error_of(text)

    def _raise_if_different(self) -> None:
        text = self._difference()
        if text is not None:
            self._ring(between_ranks(text), 0)
            raise RankError(text)

    def _lost(self, message: Message | ShareMessage, error: RuntimeError) -> NoReturn:
        """A connection broke: because a rank failed and said so, or because the other end is gone."""
        peer = self._global_ranks[message.target if message.source == self._rank else message.source]
        own = self._global_ranks[self._rank]
        is_late = "imed out" in str(error)
        try:
            text = self._alarm.heard()
            if text is None and (different := self._difference()) is not None:
                text = between_ranks(different)
        except RuntimeError as no_store:
            text = between_ranks(
                f"rank {own} has lost its connection to rank {peer}, and the store that the job was started with, "
                f"which may say why, cannot be reached: {plain(no_store)}"
            )
        if text is not None:
            self._break(text)
        else:
            cause = f"rank {own} has waited in vain for rank {peer}" if is_late else f"rank {peer} is gone"
            self._ring(between_ranks(f"{cause}: {plain(error)}"), len(self._global_ranks) - 2)
        assert self._failure is not None
        raise error_of(self._failure) from error

    def _ring(self, text: str, num_others: int) -> None:
        """Say what happened, unless somebody was faster, and stay until others know."""
        stay = self._alarm.ring(text, num_others)
        self._break(self._alarm.heard() or text)
        if stay is not None:
            stay()

    def _break(self, text: str) -> None:
        self._failure = text
        self._watch.stop()
        self._links.abort()
        self._works, self._buffers = [], []

    def _require_usable(self) -> None:
        if self._failure is not None:
            failure = error_of(self._failure)
            raise PipelineError(f"this pipeline cannot be used any more; make a new one: {failure}")


def _own_store(group: dist.ProcessGroup) -> Store:
    """A part of the job's store for the n-th exchange of each rank."""
    room, number = room_of(group, "exchanges")
    return PrefixStore(f"{room}/exchanges/{number}", _torch.group_store(group))


def _unknown() -> str | None:
    """Nobody tells what it does."""


def sum_shares(
    cut: CutGraph, runners: Mapping[int, StageRunner], exchange: ProcessExchange, mark: int = 0
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Gradients of all parameters that the stages of this rank have, after a step; those of shared ones are complete.

    Every rank that has a parameter adds up the same shares in the same order, the last stage's first as in eager, and
    so gets the same bits. To be called by all ranks. Returns also the ranks whose `mark` is another.
    """
    own = {(stage, slot): share for stage, runner in runners.items() for slot, share in runner.gradients.items()}
    received, others = exchange.swap_shares(own, mark)
    shares = own | received
    by_stage: list[dict[str, torch.Tensor]] = [{} for _ in cut.stages]
    for (stage, slot), share in shares.items():
        by_stage[stage][slot] = share
    return summed_gradients(by_stage), others
