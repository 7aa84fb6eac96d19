"""Lowered steps on two ranks: buckets, overlap and updates in the next call go on as before."""

from functools import partial

import pytest
from tests.distributed.reference import MakeSide, assert_ddp_parity, wholestep_side
from tests.distributed.trainings import Training

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("cross_iteration", ["all", "none"])
def test_two_ranks_train_like_ddp_within_rounding(cross_iteration: str) -> None:
    sides: dict[str, MakeSide] = {"lowered": partial(wholestep_side, cross_iteration=cross_iteration, lower="inductor")}
    outcomes = assert_ddp_parity(Training("mlp", "sgd"), sides, plans=("both",), num_summands=4, timeout_s=300)
    assert [set(outcome.num_captures.values()) for outcome in outcomes] == [{1}, {1}]
