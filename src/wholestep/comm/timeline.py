"""What a data-parallel step will take: a simulation of one compute stream and one link, iteration after iteration.

    compute   forward ... backward ... updates      stops where it needs a bucket that has not arrived
    link      one bucket after the other, in the order of the plan, each as soon as its gradients are there

All times are microseconds. Times within a step count compute only; where the stream has to wait, all later moments of
the step shift. The link does not care about the border of an iteration: a bucket may still travel while the next
forward runs, and that is the whole point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# After this many iterations the simulated step repeats itself.
_NUM_ITERATIONS = 4


@dataclass(frozen=True)
class Message:
    """One bucket as the simulation sees it.

    `ready_us`: when the backward has its last gradient; `needed_us`: when the next forward reads the first of its
    parameters; `update_us`: how long its slice of the update takes; `travel_us`: how long its all-reduce takes;
    `moved`: whether wait and update happen at `needed_us` of the next iteration instead of the end of this one.
    """

    ready_us: float
    needed_us: float
    update_us: float
    travel_us: float
    moved: bool = False


@dataclass(frozen=True)
class Timeline:
    """One iteration of the settled loop: its length, when each message travels and how long it is waited for.

    Moments count from the start of the iteration that issues the message; past `period_us` they lie in the next one.
    """

    period_us: float
    departs_us: tuple[float, ...]
    arrives_us: tuple[float, ...]
    exposed_us: tuple[float, ...]


def simulate(messages: Sequence[Message], compute_us: float, *, skew_us: float = 0.0) -> Timeline:
    """Run the loop until it has settled; `messages` in the order in which they are issued.

    `skew_us` is how far another rank is behind this one: no message leaves before that rank has its gradients too.
    """
    clock = link_free = 0.0
    arrived: list[float] = [0.0] * len(messages)
    timeline = Timeline(compute_us, (), (), ())
    for iteration in range(_NUM_ITERATIONS):
        stream = _Stream(clock)
        exposed = [0.0] * len(messages)
        departs, arrives = [0.0] * len(messages), [0.0] * len(messages)
        next_to_send = 0
        for moment, is_ready, index in _events(messages):
            stream.run_until(moment)
            if is_ready:
                while next_to_send < len(messages) and messages[next_to_send].ready_us <= moment:
                    departs[next_to_send] = max(stream.now + skew_us, link_free)
                    link_free = arrives[next_to_send] = departs[next_to_send] + messages[next_to_send].travel_us
                    next_to_send += 1
            elif iteration:
                exposed[index] += stream.wait_for(arrived[index])
                stream.spend(messages[index].update_us)
        stream.run_until(compute_us)
        for index, message in enumerate(messages):
            if not message.moved:
                exposed[index] += stream.wait_for(arrives[index])
                stream.spend(message.update_us)
        timeline = Timeline(
            stream.now - clock,
            tuple(moment - clock for moment in departs),
            tuple(moment - clock for moment in arrives),
            tuple(exposed),
        )
        clock, arrived = stream.now, arrives
    return timeline


def _events(messages: Sequence[Message]) -> list[tuple[float, bool, int]]:
    """Moments of a step at which something happens: (time, a bucket is ready | a moved bucket is needed, index)."""
    ready = [(message.ready_us, True, index) for index, message in enumerate(messages)]
    needed = [(message.needed_us, False, index) for index, message in enumerate(messages) if message.moved]
    return sorted([*ready, *needed])


class _Stream:
    """The compute stream: the clock on the wall, and how much of the step has been computed."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._computed = 0.0

    def run_until(self, moment: float) -> None:
        self.now += max(0.0, moment - self._computed)
        self._computed = max(self._computed, moment)

    def wait_for(self, arrival: float) -> float:
        waited = max(0.0, arrival - self.now)
        self.now += waited
        return waited

    def spend(self, time_us: float) -> None:
        self.now += time_us


def delayed(
    messages: Sequence[Message], own_us: Sequence[float], late: Sequence[int], compute_us: float
) -> list[Message]:
    """The messages if the gradients of `late` ones are computed last, in that order.

    `own_us` is the compute that serves a message's gradients alone (the products that give weight gradients): the rest
    of the backward does not need it, so it may come at the end, and everything else comes earlier by as much.
    """
    moment = compute_us - sum(own_us[index] for index in late)
    ready: dict[int, float] = {}
    for index in late:
        moment += own_us[index]
        ready[index] = moment
    for index, message in enumerate(messages):
        if index not in ready:
            before = (other for other in late if messages[other].ready_us <= message.ready_us)
            ready[index] = message.ready_us - sum(own_us[other] for other in before)
    return [replace(message, ready_us=ready[index]) for index, message in enumerate(messages)]


def order_by_need(messages: Sequence[Message]) -> list[int]:
    """An order for the link when all may arrive in the next iteration: of what is ready, always the soonest needed.

    Backward makes the gradients of the last layers first and the next forward needs them last. Sent as they come, they
    keep the link from the first layers, which the next forward waits for. So: while the link is busy, later gradients
    overtake; what is left over travels during the next forward, first layers first.
    """
    pending = set(range(len(messages)))
    order: list[int] = []
    link_free = 0.0
    while pending:
        earliest = min(messages[index].ready_us for index in pending)
        link_free = max(link_free, earliest)
        ready = [index for index in pending if messages[index].ready_us <= link_free]
        chosen = min(ready, key=lambda index: (messages[index].needed_us, -messages[index].ready_us, index))
        order.append(chosen)
        pending.remove(chosen)
        link_free += messages[chosen].travel_us
    return order
