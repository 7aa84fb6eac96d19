"""Actions and schedules as text: what is read, and what is refused with which words."""

from __future__ import annotations

import re

import pytest

from wholestep.errors import ScheduleError
from wholestep.pipe import Action, Kind, Schedule, build_schedule
from wholestep.pipe.schedule import MAX_RANKS, loop_placement, v_placement


def test_an_action_is_stage_letter_micro_batch() -> None:
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0"
    assert Action.from_text("1I3") == Action(Kind.INPUT, 1, 3)
    assert [str(Action.from_text(text)) for text in ("1W3", "0B2", "10F31")] == ["1W3", "0B2", "10F31"]


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F0", "0X0", "0f0", "-1F0", "0F-1", "0F0 ", "0F0,", "٣F0", "0.5F0", "0FF0"]
)
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action; write stage, one of F, B, I, W, and micro-batch, as in 2F0"):
        Action.from_text(text)


def test_numbers_that_are_too_large_are_refused() -> None:
    with pytest.raises(ScheduleError, match="65536F0 names stage 65536; there are at most 65536 stages"):
        Action.from_text("65536F0")
    with pytest.raises(ScheduleError, match="0F1000000 names micro-batch 1000000"):
        Action.from_text("0F1000000")
    with pytest.raises(ScheduleError, match=r"^'0F9{21}…' is no action"):
        Action.from_text("0F" + "9" * 10_000)


def test_a_schedule_is_written_line_by_line() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    assert schedule.to_csv() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert Schedule.from_csv(schedule.to_csv(), name="1f1b") == schedule


def test_empty_cells_blanks_and_other_line_ends_are_ignored() -> None:
    text = "\ufeff , 0F0,,0B0 ,\r\n1F0,1B0,,,\r\n\r\n"
    assert Schedule.from_csv(text).to_csv() == "0F0,0B0\n1F0,1B0\n"


def test_placement_follows_from_the_actions() -> None:
    schedule = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert schedule.stage_ranks == v_placement(2) == (0, 1, 1, 0)
    assert schedule.stages_of(0) == (0, 3)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches) == (2, 4, 1)
    assert loop_placement(2, 2) == (0, 1, 0, 1)
    assert not schedule.is_forward_only
    assert Schedule.from_csv("0F0").is_forward_only


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 (rank 0) has no action; each rank has at least one stage"),
        ("0F0,0B0\n\n1F0,1B0", "line 2 (rank 1) has no action; each rank has at least one stage"),
        ("0F0,0B0\n1F0,oops", "line 2, column 2 (rank 1): 'oops' is no action"),
        ("0F0;0B0", "line 1, column 1 (rank 0): '0F0;0B0' is no action"),
        ("0F0,0B0\n1F0,,0F1", "line 2, column 3 (rank 1): 0F1 belongs to rank 0, which has stage 0"),
        ("0F0\n9F0", "stage 1 has no action, but stage 9 has some; stages count from 0"),
        ("\n".join(["0F0"] * (MAX_RANKS + 1)), "the schedule has more than 4096 lines"),
        ("," * 2_000_000, "the schedule has more than 2000000 cells"),
    ],
)
def test_bad_files_are_refused_by_line_column_and_rank(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}"):
        Schedule.from_csv(text)


def test_a_file_that_is_too_long_is_not_read() -> None:
    with pytest.raises(ScheduleError, match="at most 33554432 are read"):
        Schedule.from_csv(" " * (32 * 2**20 + 1))
