"""The families of schedules: known orders, refusals, and the plan for measured costs."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from wholestep.errors import ScheduleError
from wholestep.pipe import FAMILIES, Kind, StageCosts, build_schedule, simulate, validate
from wholestep.pipe.schedule import loop_placement, v_placement
from wholestep.pipe.schedules import forward_only, planned
from wholestep.pipe.simulate import fill_bound

UNEVEN = StageCosts(1.0, 1.3, 0.7)


def rows_of(name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None) -> list[str]:
    schedule = build_schedule(name, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_gpipe_and_1f1b_are_the_textbook_orders() -> None:
    assert rows_of("gpipe", 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert rows_of("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_1f1b_goes_round_in_groups() -> None:
    assert rows_of("interleaved-1f1b", 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    first = [row.split()[:7] for row in rows_of("interleaved-1f1b", 2, 5)]
    assert first == [
        ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "2B0"],
        ["1F0", "1F1", "1F2", "3F0", "3B0", "3F1", "3B1"],
    ]


def test_interleaved_with_one_stage_per_rank_is_1f1b() -> None:
    assert rows_of("interleaved-1f1b", 4, 7, 1) == rows_of("1f1b", 4, 7)


def test_looped_bfs_is_breadth_first() -> None:
    assert rows_of("looped-bfs", 2, 2)[0] == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


def test_the_forward_schedule_keeps_the_placement_of_training() -> None:
    schedule = forward_only(2, 3, stage_ranks=v_placement(2))
    validate(schedule)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert schedule.is_forward_only
    with pytest.raises(ScheduleError, match=r"has stages on ranks \[0, 1\], not on all 3"):
        forward_only(3, 3, stage_ranks=(0, 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_impossible_numbers_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"^schedule '{name}' takes 1 to 4096 ranks, not 0$"):
        build_schedule(name, 0, 1)
    with pytest.raises(ScheduleError, match=f"^schedule '{name}' takes 1 to 4096 ranks, not 1000000000000$"):
        build_schedule(name, 10**12, 1)
    with pytest.raises(ScheduleError, match=f"^schedule '{name}' takes 1 to 1000000 micro-batches, not 0$"):
        build_schedule(name, 1, 0)
    with pytest.raises(
        ScheduleError, match=rf"^schedule '{name}' would have [0-9]+ actions; at most 2000000 are built$"
    ):
        build_schedule(name, 4000, 1_000_000)


def test_an_unknown_name_and_a_wrong_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"^there is no schedule 'zb'; known are gpipe, 1f1b, "):
        build_schedule("zb", 2, 2)
    with pytest.raises(ScheduleError, match=r"^schedule 'zbv' has 2 stage\(s\) per rank, not 3$"):
        build_schedule("zbv", 2, 2, stages_per_rank=3)
    with pytest.raises(ScheduleError, match="takes 1 to 32768 stages per rank, not 0"):
        build_schedule("looped-bfs", 2, 2, stages_per_rank=0)
    with pytest.raises(ScheduleError, match="takes 1 to 32768 stages per rank, not 1000000000000"):
        build_schedule("interleaved-zb", 2, 2, stages_per_rank=10**12)


def test_zb_h2_leaves_no_gap_on_any_rank() -> None:
    timeline = simulate(build_schedule("zb-h2", 8, 15), StageCosts())
    assert [timeline.gaps(rank) for rank in range(8)] == [0] * 8
    assert max(simulate(build_schedule("zb-h1", 8, 15), StageCosts()).gaps(rank) for rank in range(8)) > 0


@pytest.mark.parametrize("num_ranks", [16, 24, 32])
def test_v_half_and_v_min_for_many_ranks(num_ranks: int) -> None:
    """Half and a third of 1F1B's memory, at about half and two thirds of its bubble."""
    num_micro_batches = 2 * num_ranks
    idle = (
        2 * simulate(build_schedule("1f1b", num_ranks, num_micro_batches), StageCosts()).makespan
        - 6 * num_micro_batches
    )
    for name, most_idle, most_held in (("v-half", 0.6, 0.57), ("v-min", 0.71, 0.42)):
        timeline = simulate(build_schedule(name, num_ranks, num_micro_batches), StageCosts())
        assert timeline.makespan - 6 * num_micro_batches <= most_idle * idle
        assert max(timeline.peaks) <= most_held * 2 * num_ranks


class TestPlanned:
    @pytest.mark.parametrize(("placement", "cap"), [(v_placement(8), 24), (loop_placement(8, 2), 32), (None, None)])
    def test_unequal_kinds_reach_the_bound(self, placement: tuple[int, ...] | None, cap: float | None) -> None:
        costs = [UNEVEN] * 16
        schedule = planned(8, 16, 2, costs=costs, stage_ranks=placement, memory_cap=cap)
        timeline = simulate(schedule, costs)
        assert timeline.makespan == pytest.approx(fill_bound(schedule.stage_ranks, 16, costs)) == pytest.approx(103)
        assert timeline.bubble == pytest.approx(7 / 103)
        assert max(timeline.peaks) <= (cap or 32)

    def test_unequal_stages_come_near_the_bound(self) -> None:
        """Over the bound's bubble: at most 5 % in most cases. The bound itself is not always within reach."""
        over = sorted(self.over_the_bound(seed) for seed in range(6))
        assert over[-2] <= 1.05
        assert over[-1] <= 1.15

    @staticmethod
    def over_the_bound(seed: int) -> float:
        draw = random.Random(seed)
        forwards = [draw.uniform(0.5, 1.5) for _ in range(16)]
        costs = [StageCosts(each, each * draw.uniform(1, 1.5), each * draw.uniform(0.5, 1)) for each in forwards]
        transfers = {(stage, stage + 1): 0.1 for stage in range(15)}
        schedule = planned(8, 16, 2, costs=costs, transfers=transfers)
        timeline = simulate(schedule, costs, transfers=transfers)
        bound = fill_bound(schedule.stage_ranks, 16, costs, transfers)
        work = sum(timeline.busy(rank) for rank in range(8)) / 8
        return timeline.bubble / (1 - work / bound)

    def test_less_memory_takes_longer_and_is_kept(self) -> None:
        costs = [UNEVEN] * 8
        makespans: list[float] = []
        for cap in (2, 3, 4, 6, 8, 12):
            schedule = planned(4, 8, 2, costs=costs, memory_cap=cap)
            validate(schedule)
            timeline = simulate(schedule, costs)
            assert max(timeline.peaks) <= cap
            makespans.append(timeline.makespan)
        assert makespans == sorted(makespans, reverse=True)
        assert makespans[-1] < makespans[0] / 2

    @pytest.mark.parametrize("name", ["zbv", "v-half", "v-min", "zb-h1", "interleaved-zb"])
    def test_it_is_as_fast_as_the_named_ones_in_their_memory(self, name: str) -> None:
        named = build_schedule(name, 5, 10)
        timeline = simulate(named, UNEVEN)
        cap = max(timeline.peaks)
        costs = [UNEVEN] * named.num_stages
        mine = planned(5, 10, named.num_stages // 5, costs=costs, memory_cap=cap, stage_ranks=named.stage_ranks)
        assert simulate(mine, costs).makespan <= timeline.makespan + 1e-9

    def test_a_cap_that_cannot_be_kept_names_the_smallest(self) -> None:
        sizes = [100.0, 200.0, 300.0, 50.0]
        options: dict[str, Any] = {"activations": sizes, "stage_ranks": (0, 1, 0, 1)}
        expected = (
            "schedule 'planned' cannot keep rank 0 within 399: one micro-batch of its stages alone holds 400; "
            "the smallest memory cap that works is 400"
        )
        with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
            planned(2, 4, 2, memory_cap=399, **options)
        smallest = planned(2, 4, 2, memory_cap=400, **options)
        assert simulate(smallest, StageCosts(), activations=sizes).peaks == (400, 250)
        with pytest.raises(
            ScheduleError, match=r"rank 1 within 249.*the smallest memory cap that works is 250 for this"
        ):
            planned(2, 4, 2, memory_cap=[400, 249], **options)

    def test_what_the_input_gradients_free_is_used(self) -> None:
        costs = [UNEVEN] * 8
        plain, shared = (planned(8, 16, costs=costs, memory_cap=4, input_share=share) for share in (0.0, 1.0))
        assert simulate(shared, costs).makespan < simulate(plain, costs).makespan
        assert max(simulate(shared, costs, input_share=1.0).peaks) <= 4

    def test_whole_backwards_are_used_where_they_are_cheaper(self) -> None:
        whole = [StageCosts(1, 1, 1, whole=1.5)] * 2
        schedule = planned(2, 8, costs=whole)
        assert simulate(schedule, whole).makespan == (8 + 1) * 2.5
        assert {action.kind for row in schedule.actions for action in row} == {Kind.FORWARD, Kind.BACKWARD}

    def test_parts_that_follow_each_other_are_one_backward(self) -> None:
        """With room for one micro-batch there is nothing to fill a gap with."""
        assert planned(1, 2, memory_cap=1).to_csv() == "0F0,0B0,0F1,0B1\n"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"costs": [UNEVEN]}, "has 2 stages on 2 ranks and 1 costs"),
            ({"activations": [1.0]}, "has 2 stages on 2 ranks and 1 activations"),
            ({"memory_cap": [1.0] * 3}, "has 2 stages on 2 ranks and 3 memory caps"),
            ({"memory_cap": float("nan")}, "cannot keep rank 0 within nan"),
            ({"activations": [1.0, -1.0]}, "activations are finite sizes"),
            ({"input_share": 1.5}, "a share from 0 to 1 is free after I"),
            ({"stage_ranks": (0, 2)}, "has stages on ranks [0, 2], not on all 2"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ScheduleError, match=re.escape(message)):
            planned(2, 4, **options)

    def test_costs_of_nothing_are_fine(self) -> None:
        nothing = [StageCosts(0, 0, 0)] * 4
        validate(planned(2, 3, 2, costs=nothing, memory_cap=2, transfers={(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0}))
