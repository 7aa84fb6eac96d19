"""Every schedule there is, by name, with how many stages each rank has and what that costs and buys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wholestep.errors import ScheduleError
from wholestep.pipe.schedule import Schedule
from wholestep.pipe.schedules.classic import forward_only, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from wholestep.pipe.schedules.dualpipe import dualpipe_v
from wholestep.pipe.schedules.planned import planned
from wholestep.pipe.schedules.repeated import v_half, v_min
from wholestep.pipe.schedules.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2, zbv


@dataclass(frozen=True)
class Family:
    """A way to build schedules. `stages_per_rank` is None where any number goes; then two are the default."""

    name: str
    build: Callable[..., Schedule]
    stages_per_rank: int | None
    summary: str


_FAMILIES = (
    Family("gpipe", gpipe, 1, "all forwards, then all backwards; holds every micro-batch"),
    Family("1f1b", one_f_one_b, 1, "GPipe's bubble, holds one micro-batch for each rank from here on"),
    Family("interleaved-1f1b", interleaved_1f1b, None, "1F1B with the bubble divided by the stages per rank"),
    Family("looped-bfs", looped_bfs, None, "GPipe with the bubble divided by the stages per rank"),
    Family("zb-h1", zb_h1, 1, "a third of 1F1B's bubble in its memory"),
    Family("zb-h2", zb_h2, 1, "no gap on any rank, in twice 1F1B's memory"),
    Family("interleaved-zb", interleaved_zero_bubble, None, "ZB-H1's bubble divided by the stages per rank"),
    Family("zbv", zbv, 2, "half of ZB-H1's bubble in 1F1B's memory, equal on all ranks"),
    Family("v-half", v_half, 2, "half of 1F1B's memory at about half its bubble"),
    Family("v-min", v_min, 2, "a third of 1F1B's memory at two thirds of its bubble"),
    Family("dualpipe-v", dualpipe_v, 2, "ZBV's bubble with forwards and whole backwards side by side"),
    Family("planned", planned, None, "built for measured costs, under a memory cap"),
    Family("forward", forward_only, None, "forwards alone, for evaluation"),
)
FAMILIES = {family.name: family for family in _FAMILIES}

_DEFAULT_STAGES_PER_RANK = 2


def build_schedule(
    name: str, num_ranks: int, num_micro_batches: int, *, stages_per_rank: int | None = None
) -> Schedule:
    """The schedule of this name; any number of micro-batches goes with any number of ranks.

    Raises `ScheduleError` for a name or a number of stages per rank that there is no schedule for. What is special to
    one of them (costs and memory caps of `planned`, the placement of `forward`) are options of its own function.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ScheduleError(f"there is no schedule '{name}'; known are {', '.join(FAMILIES)}")
    if family.stages_per_rank is None:
        num_each = _DEFAULT_STAGES_PER_RANK if stages_per_rank is None else stages_per_rank
        return family.build(num_ranks, num_micro_batches, num_each)
    if stages_per_rank not in (None, family.stages_per_rank):
        raise ScheduleError(f"schedule '{name}' has {family.stages_per_rank} stage(s) per rank, not {stages_per_rank}")
    return family.build(num_ranks, num_micro_batches)


__all__ = [
    "FAMILIES",
    "Family",
    "build_schedule",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "planned",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
