"""A plan that was made without ranks runs on ranks. For another number of them, or unlike on two, it is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from torch import nn
from torch.optim import SGD

import wholestep
from wholestep import PlanError, RankError
from wholestep.cli import main

pytestmark = pytest.mark.distributed

SCRIPT = """\
import torch
from torch import nn
import wholestep

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

def make():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(16, 32)

def make_step():
    return wholestep.compile(train_step, data_parallel="replicate", bucket_mb=0.002, cross_iteration="all"), make()
"""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def trained(**options: Any) -> tuple[list[torch.Tensor], str, int]:
    """Parameters after three steps, the graph of the middle of the loop, and how many buckets there are."""
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)]
    model = nn.Sequential(*layers)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with wholestep.compile(train_step, data_parallel="replicate", **options) as step:
        for number in range(3):
            torch.manual_seed(10 * dist.get_rank() + number)
            step(model, optimizer, torch.randn(16, 32))
    assert step.plan.communication is not None
    code = str(step.iteration.main).partition("\ndef ")[2]
    return [parameter.detach() for parameter in model.parameters()], code, len(step.plan.communication.buckets)


def both(file: str) -> tuple[Any, Any]:
    return trained(bucket_mb=0.002, cross_iteration="all"), trained(plan=file)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two ranks, by the command line, without weights and without ranks."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    file = folder / "plan.json"
    arguments = ["--world-size", "2", "--link", "1gbit", "--device", "cpu", "--save", str(file)]
    assert main(["plan", f"{folder / 'train.py'}:make_step", *arguments]) == 0
    return file


def test_a_plan_made_without_ranks_runs_on_two(plan_file: Path) -> None:
    for planned, given in run_ranks(both, 2, str(plan_file)):
        parameters, code, num_buckets = planned
        assert num_buckets > 1
        assert (given[1], given[2]) == (code, num_buckets)
        assert all(map(torch.equal, parameters, given[0]))


def refused(file: str, *, differs: bool) -> str:
    plan = wholestep.Plan.load(file)
    if differs and dist.get_rank() == 1:
        assert plan.communication is not None
        moved = [replace(bucket, reason="another") for bucket in plan.communication.buckets]
        plan = replace(plan, communication=replace(plan.communication, buckets=tuple(moved)))
    try:
        trained(plan=plan)
    except (PlanError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def given_one_plan_each(file: str) -> str:
    return refused(file, differs=True)


def given_a_plan_for_two(file: str) -> str:
    return refused(file, differs=False)


def test_ranks_with_different_plans_say_so(plan_file: Path) -> None:
    for text in run_ranks(given_one_plan_each, 2, str(plan_file)):
        assert re.match(r"RankError: .*plan", text), text


def test_a_plan_for_another_number_of_ranks_is_refused(plan_file: Path) -> None:
    [text] = run_ranks(given_a_plan_for_two, 1, str(plan_file))
    assert "number of ranks (2 in the plan, 1 here)" in text
