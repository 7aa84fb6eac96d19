"""The most that each rank of a pipeline holds at once, followed action by action as the runtime does them.

    before an action    values that later actions read, gradients so far, messages that have not arrived yet, room for
                        those that are on their way here
    while it runs       all that, with what its program makes and frees op by op (`profile_memory`); values that nobody
                        reads after it are freed by their last op
    at its end          what it has made, and, after the first backward of a stage, new memory for its gradients

Parameters and whatever else the ranks hold all the time come on top (`held_bytes`). Time plays no part: a rank's
actions come one after the other, and messages are given back at known actions (`runtime.pipeline.messages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from wholestep import _torch
from wholestep.cost import MemoryProfile, profile_memory
from wholestep.cost.memory import storage_bytes
from wholestep.graph import SlotKind
from wholestep.pipe.cut import CutGraph, Stage
from wholestep.pipe.schedule import Action, Kind, Schedule
from wholestep.runtime.pipeline.messages import Traffic, messages

Value = tuple[int, str]
"""Of a micro-batch, by name."""


def pipeline_peaks(cut: CutGraph, schedule: Schedule, held_bytes: Sequence[int] | None = None) -> tuple[int, ...]:
    """For each rank the most bytes that are alive in a step; `held_bytes` are those that are there all the time."""
    traffic = messages(cut, schedule)
    held = [0] * schedule.num_ranks if held_bytes is None else held_bytes
    return tuple(held[rank] + _RankMemory(cut, schedule, rank, traffic).peak() for rank in range(schedule.num_ranks))


class _RankMemory:
    """Follows one rank through a step."""

    def __init__(self, cut: CutGraph, schedule: Schedule, rank: int, traffic: Traffic) -> None:
        self._cut = cut
        self._row = schedule.actions[rank]
        self._traffic = traffic
        self._plan = traffic.ranks[rank]
        self._last_reads = _last_reads(cut, self._row)
        # Storages by micro-batch and key: two values may be views of one.
        self._live: dict[tuple[int, int], int] = {}
        self._owners: dict[tuple[int, int], set[str | int]] = {}
        self._gradient_bytes = 0
        self._has_gradients: set[int] = set()
        self._profiles: dict[tuple[int, Kind, frozenset[str]], MemoryProfile] = {}
        self._fakes = [_fakes_of(stage) for stage in cut.stages]

    def peak(self) -> int:
        peak = 0
        for position, action in enumerate(self._row):
            peak = max(peak, self._run(position, action))
        return peak

    def _run(self, position: int, action: Action) -> int:
        """The most that is alive around one action."""
        stage, fakes = self._cut.stages[action.stage], self._fakes[action.stage]
        program = stage.program(action.kind)
        for number in self._plan.posts[position]:
            message = self._traffic.messages[number]
            for name in message.names:
                self._hold(message.micro_batch, self._fakes[message.stage][name], name)
        for number in self._plan.settled[position]:
            self._release(self._traffic.messages[number].micro_batch, number)
        dropped = frozenset(n for n in program.values if self._last_reads[action.micro_batch, n] == position)
        profile = self._profile(stage, action.kind, dropped)
        before = sum(self._live.values()) + self._gradient_bytes
        inputs = _storage_sizes(fakes[name] for name in program.values)
        while_bytes = before - sum(inputs.values()) + profile.peak_bytes - _fixed_bytes(profile, inputs)
        for name in dropped:
            self._release(action.micro_batch, name)
        made = _storage_sizes(fakes[name] for name in program.outputs)
        end_bytes = sum(self._live.values()) + self._gradient_bytes + sum(made.values())
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT) and action.stage not in self._has_gradients:
            self._has_gradients.add(action.stage)
            fresh = sum(_num_bytes(fakes[name]) for name in stage.gradients.values())
            self._gradient_bytes += fresh
            end_bytes += fresh
        self._keep(position, action, stage)
        return max(while_bytes, end_bytes)

    def _keep(self, position: int, action: Action, stage: Stage) -> None:
        """What an action has made and somebody reads later: here, or there until it has arrived."""
        outputs, fakes = stage.program(action.kind).outputs, self._fakes[action.stage]
        for name in outputs:
            if self._last_reads.get((action.micro_batch, name), -1) > position:
                self._hold(action.micro_batch, fakes[name], name)
        for number in self._plan.sends[position]:
            for name in self._traffic.messages[number].names:
                self._hold(action.micro_batch, fakes[name], number)

    def _hold(self, micro_batch: int, fake: torch.Tensor, owner: str | int) -> None:
        key = micro_batch, _torch.storage_key(fake)
        self._live[key] = storage_bytes(fake)
        self._owners.setdefault(key, set()).add(owner)

    def _release(self, micro_batch: int, owner: str | int) -> None:
        for key in [key for key, owners in self._owners.items() if key[0] == micro_batch and owner in owners]:
            self._owners[key].discard(owner)
            if not self._owners[key]:
                del self._owners[key], self._live[key]

    def _profile(self, stage: Stage, kind: Kind, dropped: frozenset[str]) -> MemoryProfile:
        """Live bytes in a program; inputs that are not dropped stay to its end."""
        key = stage.index, kind, dropped
        if key not in self._profiles:
            graph = stage.program(kind).graph.copy()
            for name, slot in graph.slots.items():
                if slot.kind is SlotKind.CARRY and slot.name not in dropped:
                    graph.slots[name] = replace(slot, kind=SlotKind.BATCH)
            self._profiles[key] = profile_memory(graph)
        return self._profiles[key]


def _fakes_of(stage: Stage) -> dict[str, torch.Tensor]:
    """What all values of a stage look like: those that travel, and those that its programs hand to each other."""
    found = dict(stage.fakes)
    for kind in Kind:
        graph = stage.program(kind).graph
        for slot_id, node in graph.placeholders().items():
            if slot_id.startswith(f"{SlotKind.CARRY}."):
                found.setdefault(slot_id.removeprefix(f"{SlotKind.CARRY}."), node.meta["val"])
    return found


def _last_reads(cut: CutGraph, row: Sequence[Action]) -> dict[Value, int]:
    """By micro-batch and value, the position of the last action of a rank that reads it."""
    return {
        (action.micro_batch, name): position
        for position, action in enumerate(row)
        for name in cut.stages[action.stage].program(action.kind).values
    }


def _fixed_bytes(profile: MemoryProfile, inputs: Mapping[int, int]) -> int:
    """Inputs of a program that are no values: parameters, buffers and the batch, which are counted elsewhere."""
    return profile.slot_bytes - sum(inputs.values())


def _storage_sizes(fakes: Iterable[torch.Tensor]) -> dict[int, int]:
    return {_torch.storage_key(fake): storage_bytes(fake) for fake in fakes}


def _num_bytes(fake: torch.Tensor) -> int:
    return fake.numel() * fake.element_size()
