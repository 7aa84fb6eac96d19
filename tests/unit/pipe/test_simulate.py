"""Timelines of schedules that can be worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from wholestep.errors import ScheduleError
from wholestep.pipe import Action, Schedule, StageCosts, Timeline, build_schedule, simulate
from wholestep.pipe.simulate import fill_bound, transfer_times

ONE = StageCosts()


def times_of(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for row in timeline.spans for span in row}


def test_one_micro_batch_through_two_stages() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1I0,1W0")
    timeline = simulate(schedule, [StageCosts(1, 2, 3), StageCosts(10, 20, 30)])
    expected = {"0F0": (0, 1), "1F0": (1, 11), "1I0": (11, 31), "0B0": (31, 36), "1W0": (31, 61)}
    assert times_of(timeline) == expected
    assert timeline.makespan == 61
    assert [timeline.busy(rank) for rank in (0, 1)] == [6, 60]
    assert timeline.rank_bubble(1) == pytest.approx(1 / 61)
    assert timeline.bubble == pytest.approx((55 + 1) / 122)
    assert [timeline.gaps(rank) for rank in (0, 1)] == [30, 0]
    assert timeline.peaks == (1, 1)


def test_a_whole_backward_may_cost_less_than_its_parts() -> None:
    schedule = Schedule.from_csv("0F0,0B0")
    assert simulate(schedule, StageCosts(1, 2, 3)).makespan == 6
    assert simulate(schedule, StageCosts(1, 2, 3, whole=4)).makespan == 5


def test_values_travel_between_ranks_only() -> None:
    schedule = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    transfers = {(0, 1): 10.0, (1, 2): 100.0, (2, 3): 1.0}
    times = times_of(simulate(schedule, ONE, transfers=transfers))
    assert times["1F0"] == (11, 12)
    assert times["2F0"] == (12, 13)
    assert times["3F0"] == (14, 15)
    assert times["2B0"] == (18, 20)
    assert times["0B0"] == (32, 34)


def test_values_may_skip_stages() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0")
    times = times_of(simulate(schedule, ONE, transfers={(0, 1): 0.0, (1, 2): 0.0, (0, 2): 50.0}))
    assert times["2F0"] == (51, 52)
    assert times["0B0"] == (104, 106)
    assert times_of(simulate(schedule, ONE, transfers={(0, 2): 0.0}))["1B0"] == (1, 3)


def test_transfer_times_are_latency_and_bytes_over_bandwidth() -> None:
    assert transfer_times({(0, 1): 1000, (0, 2): 0}, latency=5.0, bytes_per_time=100.0) == {(0, 1): 15.0, (0, 2): 5.0}
    with pytest.raises(ScheduleError, match="no link has a latency of 1 and carries 0 bytes"):
        transfer_times({}, 1, 0)


def test_activations_are_held_from_forward_to_what_frees_them() -> None:
    split = Schedule.from_csv("0F0,0F1,0I0,0F2,0W0,0I1,0W1,0B2")
    assert simulate(split, ONE).peaks == (3,)
    assert simulate(split, ONE, activations=[100.0]).peaks == (300,)
    assert simulate(split, ONE, activations=[100.0], input_share=0.25).peaks == (275,)
    assert simulate(split, ONE, input_share=1.0).peaks == (2,)
    assert simulate(Schedule.from_csv("0F0,0F1"), ONE).peaks == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": [ONE]}, "there are 1 costs for 2 stages; give one for each"),
        ({"activations": [1.0] * 3}, "there are 3 activations for 2 stages"),
        ({"transfers": {(0, 1): -1.0}}, "the transfer from stage 0 to 1 takes -1.0"),
        ({"transfers": {(1, 0): 1.0}}, "edge 1 -> 0 does not go"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        simulate(build_schedule("1f1b", 2, 2), **{"costs": ONE, **options})


@pytest.mark.parametrize("cost", [-1.0, float("inf"), float("nan")])
def test_a_cost_is_a_time(cost: float) -> None:
    with pytest.raises(ScheduleError, match="is no time"):
        StageCosts(forward=cost)
    with pytest.raises(ScheduleError, match="is no time"):
        StageCosts(whole=cost)


def test_a_measured_timeline_begins_at_zero_and_is_in_order() -> None:
    forward, backward = Action.from_text("0F0"), Action.from_text("0B0")
    timeline = Timeline.measured("run", [[(backward, 107.0, 110.0), (forward, 100.0, 104.0)]])
    assert times_of(timeline) == {"0F0": (0, 4), "0B0": (7, 10)}
    assert timeline.unit == "us"
    assert timeline.bubble == pytest.approx(0.3)
    with pytest.raises(ScheduleError, match=r"rank 0: 0F0 runs from 2.0 to 1.0"):
        Timeline.measured("run", [[(forward, 2.0, 1.0)]])
    assert Timeline.measured("nothing", [[], []]).bubble == 0


def test_a_large_schedule_is_simulated() -> None:
    """64 ranks and 512 micro-batches: what would take minutes if anything grew with the square of it."""
    timeline = simulate(build_schedule("1f1b", 64, 512), ONE)
    assert timeline.makespan == 3 * (512 + 63)
    assert timeline.peaks == tuple(float(64 - rank) for rank in range(64))


def test_the_bound_counts_what_cannot_begin_earlier() -> None:
    assert fill_bound((0, 1), 4, [ONE, ONE]) == 12 + 1
    # The first gradient is back on rank 0 at 13: F, 5, F, I, 5. Until then rank 0 had only forwards to do.
    assert fill_bound((0, 1), 4, [ONE, ONE], {(0, 1): 5.0}) == 13 + 8
    assert fill_bound((0,), 4, [StageCosts(1, 1, 1, whole=1.5)]) == 10
    # One micro-batch has to go there and back whatever the ranks have to do.
    assert fill_bound((0, 1), 1, [StageCosts(10, 1, 1), ONE]) == 10 + 1 + 1 + 2
