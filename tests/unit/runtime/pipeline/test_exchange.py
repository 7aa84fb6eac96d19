"""What is left of an exchange without other processes: how shares of a gradient are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from wholestep.pipe.cut import CutGraph, Stage
from wholestep.runtime.pipeline.exchange import Share, sum_shares

SHARES = {0: torch.tensor([3.0]), 1: torch.tensor([1e8]), 2: torch.tensor([-1e8]), 3: torch.tensor([1.0])}


@dataclass
class Holder:
    """A stage's runner, as far as it is asked."""

    gradients: dict[str, Tensor]


@dataclass
class Others:
    """An exchange through which the shares of other ranks come."""

    stages: list[int]

    def swap_shares(self, own: dict[Share, Tensor], mark: int) -> tuple[dict[Share, Tensor], list[int]]:
        assert {stage for stage, slot in own if slot == "param.tied"} == set(SHARES) - set(self.stages)
        return {(stage, "param.tied"): SHARES[stage] for stage in self.stages}, []


def summed(own: list[int]) -> dict[str, Tensor]:
    cut = CutGraph(cast(tuple[Stage, ...], tuple(SHARES)), 0)
    holders: Any = {stage: Holder({"param.tied": SHARES[stage], f"param.own{stage}": torch.ones(1)}) for stage in own}
    others: Any = Others([stage for stage in SHARES if stage not in own])
    return sum_shares(cut, holders, others)[0]


def test_every_rank_adds_shares_in_the_same_order_from_the_last_stage_on() -> None:
    wanted = ((SHARES[3] + SHARES[2]) + SHARES[1]) + SHARES[0]
    assert wanted != ((SHARES[0] + SHARES[1]) + SHARES[2]) + SHARES[3]
    for own in ([0], [3], [1, 2], [0, 3], [0, 1, 2, 3]):
        assert torch.equal(summed(own)["tied"], wanted)


def test_gradients_of_other_parameters_are_those_of_their_stage() -> None:
    assert set(summed([1, 2])) == {"tied", "own1", "own2"}
