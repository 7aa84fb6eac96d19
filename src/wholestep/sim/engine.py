"""Discrete events: pieces of work that wait for each other, for their turn on a lane, and for their share of ports.

A task has work w, in microseconds at full speed, a lane, tasks that come before it, and perhaps ports.

    ready(t)   the largest end(d) over the tasks d before t
    start(t)   a lane runs one task at a time, in the order in which they became ready
    rate(t)    with ports: 1 / the largest number of running tasks on one of them         messages share a port evenly
               without:    1 - the sum of rate(s) steal(s) over running s that steal from its lane, at least `_LEAST`
    end(t)     the integral of rate(t) from start(t) to end(t) is w

Lanes are what a rank computes on, connections between two ranks, and channels of groups; ports are the two directions
of a rank's link. A task that steals is a message which a processor has to copy while it computes.

Between two events all rates are constant, so `run` jumps from event to event: the end of a task, foretold from its
rate, and foretold anew when the rate changes (`_rerate`). Events at the same moment are taken in the order in which
they were foretold, which makes a run the same every time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# However busy a processor is with messages, what it computes is not starved.
_LEAST = 0.02


@dataclass(slots=True)
class _Task:
    lane: int
    work_us: float
    ports: tuple[int, ...]
    steals: tuple[tuple[int, float], ...]
    num_awaited: int
    users: list[int]
    start_us: float = -1.0
    end_us: float = -1.0
    left_us: float = 0.0
    rate: float = 0.0
    since_us: float = 0.0
    version: int = 0


class Engine:
    """Tasks to be run. `add` them in any order in which none comes before what it waits for, then `run`."""

    def __init__(self) -> None:
        self._tasks: list[_Task] = []
        self._lanes: dict[Hashable, int] = {}
        self._ports: dict[Hashable, int] = {}
        self._events: list[tuple[float, int, int, int]] = []
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def add(
        self,
        lane: Hashable,
        work_us: float,
        after: Iterable[int] = (),
        *,
        ports: Sequence[Hashable] = (),
        steals: Iterable[tuple[Hashable, float]] = (),
    ) -> int:
        """Add a task and return its number; `steals` are lanes and the share of them that it takes at full speed."""
        number = len(self._tasks)
        before = set(after)
        taken = tuple((self._lane(name), share) for name, share in steals if share > 0)
        numbers = tuple(self._ports.setdefault(port, len(self._ports)) for port in ports)
        self._tasks.append(_Task(self._lane(lane), work_us, numbers, taken, len(before), [], left_us=work_us))
        for task in before:
            self._tasks[task].users.append(number)
        return number

    def _lane(self, name: Hashable) -> int:
        return self._lanes.setdefault(name, len(self._lanes))

    def run(self) -> tuple[list[float], list[float]]:
        """When each task starts and ends."""
        self._queues: list[deque[int]] = [deque() for _ in self._lanes]
        self._running: list[int | None] = [None] * len(self._lanes)
        self._stealing: list[dict[int, float]] = [{} for _ in self._lanes]
        self._active: list[dict[int, None]] = [{} for _ in self._ports]
        for number, task in enumerate(self._tasks):
            if not task.num_awaited:
                self._enqueue(number, 0.0)
        while self._events:
            now, _, number, version = heapq.heappop(self._events)
            if version == self._tasks[number].version:
                self._finish(number, now)
        assert all(task.end_us >= 0 for task in self._tasks), "a task waits for one that was added after it"
        return [task.start_us for task in self._tasks], [task.end_us for task in self._tasks]

    def _enqueue(self, number: int, now: float) -> None:
        lane = self._tasks[number].lane
        if self._running[lane] is None:
            self._start(number, now)
        else:
            self._queues[lane].append(number)

    def _start(self, number: int, now: float) -> None:
        task = self._tasks[number]
        self._running[task.lane] = number
        task.start_us = task.since_us = now
        for port in task.ports:
            self._active[port][number] = None
        if task.ports:
            self._share_ports(task.ports, now)
        else:
            self._rerate(number, self._computing_rate(task.lane), now)

    def _finish(self, number: int, now: float) -> None:
        task = self._tasks[number]
        task.end_us = now
        task.version += 1
        for port in task.ports:
            del self._active[port][number]
        for lane, _ in task.steals:
            del self._stealing[lane][number]
            self._slow_down(lane, now)
        self._share_ports(task.ports, now)
        self._running[task.lane] = None
        queue = self._queues[task.lane]
        if queue:
            self._start(queue.popleft(), now)
        for user in task.users:
            awaiting = self._tasks[user]
            awaiting.num_awaited -= 1
            if not awaiting.num_awaited:
                self._enqueue(user, now)

    def _share_ports(self, ports: Sequence[int], now: float) -> None:
        """The number of running tasks on some ports has changed."""
        for number in {number: None for port in ports for number in self._active[port]}:
            task = self._tasks[number]
            rate = 1.0 / max(len(self._active[port]) for port in task.ports)
            if rate != task.rate:
                self._rerate(number, rate, now)
                for lane, share in task.steals:
                    self._stealing[lane][number] = share * rate
                    self._slow_down(lane, now)

    def _slow_down(self, lane: int, now: float) -> None:
        running = self._running[lane]
        if running is not None:
            self._rerate(running, self._computing_rate(lane), now)

    def _computing_rate(self, lane: int) -> float:
        stealing = self._stealing[lane]
        return max(_LEAST, 1.0 - sum(stealing.values())) if stealing else 1.0

    def _rerate(self, number: int, rate: float, now: float) -> None:
        """Go on at another rate: what is left is done later or sooner than foretold."""
        task = self._tasks[number]
        task.left_us = max(0.0, task.left_us - (now - task.since_us) * task.rate)
        task.since_us, task.rate = now, rate
        task.version += 1
        self._num_events += 1
        heapq.heappush(self._events, (now + task.left_us / rate, self._num_events, number, task.version))
