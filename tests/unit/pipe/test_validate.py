"""What is refused, with the rank and the action; what looks odd and can run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from wholestep.errors import ScheduleError
from wholestep.pipe import Action, Schedule, validate


def schedule_of(*rows: str, stage_ranks: tuple[int, ...] = (0, 1), num_micro_batches: int = 2) -> Schedule:
    actions = tuple(tuple(map(Action.from_text, row.split())) for row in rows)
    return Schedule("mine", actions, stage_ranks, num_micro_batches)


GOOD = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    "schedule",
    [
        GOOD,
        schedule_of("0F1 0F0 0B0 0B1", "1F1 1F0 1B0 1B1"),
        schedule_of("0F0 0F1 0I0 0I1 0W1 0W0", "1F0 1I0 1F1 1B1 1W0"),
        schedule_of("0F0 0F1", "1F0 1F1"),
        schedule_of("0F0 1F0 1B0 0B0", stage_ranks=(0, 0), num_micro_batches=1),
    ],
)
def test_what_can_run_passes(schedule: Schedule) -> None:
    validate(schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedule_of("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "rank 0: 0B1 has no 0F1 before it"),
        (
            schedule_of("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"),
            "never runs 0B1 on rank 0; it has 2 stages and 2 micro-batches",
        ),
        (schedule_of("0F0 0B0", "1F0 1B0 1F1 1B1"), "never runs 0F1 on rank 0"),
        (schedule_of("0F0 0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "runs 0F0 twice on rank 0"),
        (schedule_of("0F0 0F1 0B0 0B1 1B1", "1F0 1B0 1F1"), "runs 1B1 on rank 0, but stage 1 is on rank 1"),
        (schedule_of("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1"), "never runs 0W0 on rank 0, the other half of 0I0"),
        (schedule_of("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"), "rank 0: 0W0 has no 0I0 before it"),
        (schedule_of("0F0 0F1 0I0 0B0 0B1", "1F0 1B0 1F1 1B1"), "rank 0: 0B0 repeats 0I0; a backward is B, or I and W"),
        (schedule_of("0F0 0F1 0B0 0B1 0I1", "1F0 1B0 1F1 1B1"), "rank 0: 0I1 repeats 0B1"),
        (schedule_of("0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"), "rank 0: 0F2 is of none of the 2 micro-batches"),
        (schedule_of("0F0 0F1 0B0 0B1 2F0", "1F0 1B0 1F1 1B1"), "rank 0: 2F0 is of none of the 2 stages"),
        (replace(GOOD, num_micro_batches=0), "has 0 micro-batches; it takes at least one"),
        (replace(GOOD, num_micro_batches=10**9), "never runs 0F2 on rank 0"),
        (replace(GOOD, stage_ranks=(0, 2)), "puts stage 1 on rank 2, of 2 ranks"),
        (replace(GOOD, stage_ranks=(0, 0)), "gives rank 1 no stage; each rank has at least one"),
        (schedule_of(stage_ranks=()), "gives rank 0 no stage"),
    ],
)
def test_what_is_wrong_is_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^schedule 'mine',? {re.escape(message)}"):
        validate(schedule)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    crossed = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    expected = (
        "schedule 'mine' deadlocks: rank 0 waits forever in 0B0 for 1B0, which rank 1 has later; "
        "rank 1 waits forever in 1F1 for 0F1, which rank 0 has later"
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
        validate(crossed)


def test_a_deadlock_names_the_circle_not_those_who_wait_for_it() -> None:
    rows = "0F0 0F1 0I0 0W0 0B1", "1F0 1F1 1B1 1I0 1W0", "2F0 2I0 2W0 2F1 2B1", "3F1 3B1 3F0 3I0 3W0"
    with pytest.raises(
        ScheduleError, match=r"deadlocks: rank 2 waits forever in 2I0 for 3I0.*; rank 3 waits"
    ) as caught:
        validate(schedule_of(*rows, stage_ranks=(0, 1, 2, 3)))
    assert "rank 0" not in str(caught.value)


def test_a_long_circle_is_cut_short() -> None:
    """Each rank begins with its second stage, which waits for the rank before it: rank 0 for the last one."""
    rows = [f"{rank + 6}F0 {rank}F0" for rank in range(6)]
    with pytest.raises(ScheduleError, match=r"deadlocks: (rank . waits[^;]*; ){3}rank .*, and so on over 6 ranks$"):
        validate(schedule_of(*rows, stage_ranks=(*range(6), *range(6)), num_micro_batches=1))


def test_edges_decide_who_waits_for_whom() -> None:
    """Stage 1 and 2 are branches that need each other only if there is an edge between them."""
    branches = schedule_of("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0", stage_ranks=(0, 1, 2, 3), num_micro_batches=1)
    validate(branches)
    swapped = schedule_of("0F0 0B0", "2F0 1F0 1B0 2B0", "3F0 3B0", stage_ranks=(0, 1, 1, 2), num_micro_batches=1)
    with pytest.raises(ScheduleError, match="rank 1 waits forever in 2F0 for 1F0, which rank 1 has later"):
        validate(swapped)
    validate(swapped, [(0, 1), (0, 2), (1, 3), (2, 3)])


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2), (-1, 1)])
def test_an_edge_goes_from_an_earlier_to_a_later_stage(edge: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"edge {edge[0]} -> {edge[1]} does not go from an earlier to a later"):
        validate(GOOD, [edge])
