"""Facts of captured steps, peaks of plans and pipelines, traces, calibration and the command line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.twins import square_step
from torch import nn

from wholestep.capture import capture
from wholestep.cli import main
from wholestep.comm.plan import decide
from wholestep.cost import DEVICES, DeviceModel, Wire, profile_memory
from wholestep.errors import SimulationError
from wholestep.graph import Phase, StepGraph
from wholestep.passes import Pipeline, run_passes
from wholestep.remat import StepBudget
from wholestep.sim import Cluster, CostModel, simulate, trace
from wholestep.sim.calibrate import calibrate
from wholestep.sim.chrome import MAX_RANKS, chrome_trace
from wholestep.sim.facts import StepFacts, all_reduce_link, gather_step, schedule_of
from wholestep.sim.simulate import TraceSpan

MODEL = DeviceModel(1e5, 1e4, 1.0)
CLUSTER = Cluster(2, 2, DEVICES["cpu"], Wire(1.0, 1e4), Wire(20.0, 100.0))


def make_step() -> tuple[Any, tuple[Any, ...]]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    return square_step, (model, torch.optim.AdamW(model.parameters(), fused=True), torch.randn(512, 64))


@cache
def graph() -> StepGraph:
    function, args = make_step()
    return capture(function, args, {}).graph


@cache
def facts() -> StepFacts:
    return gather_step(graph(), MODEL)


def test_facts_of_a_step() -> None:
    found = facts()
    parameter_bytes = 6 * (64 * 64 + 64) * 4
    assert sum(gradient.num_bytes for gradient in found.data_parallel.gradients) == parameter_bytes
    assert found.state_share == pytest.approx(2.0, rel=0.01)
    assert 0 < found.forward_us < found.data_parallel.compute_us
    assert found.update_us > 0
    assert sum(found.chain.forward_us) == pytest.approx(found.forward_us)
    total_us = sum(found.chain.forward_us) + sum(found.chain.backward_us)
    assert total_us == pytest.approx(found.data_parallel.compute_us, rel=0.01)
    assert sum(tally.num_bytes for tally in found.chain.parameters) == parameter_bytes
    # Products for weights are half of the backward's, and nobody but the weights waits for them.
    assert 0.3 < sum(found.places.weight_us) / sum(found.chain.backward_us) < 0.7
    assert not any(node.meta["phase"] is Phase.COMM for node in graph().calls())


def test_stages_share_the_work() -> None:
    job = facts().pipeline_job(schedule_of("1f1b", 2, 2))
    costs = [stage.costs for stage in job.stages]
    assert sum(cost.forward for cost in costs) == pytest.approx(facts().forward_us)
    assert sum(sum(stage.gradient_bytes) for stage in job.stages) == 6 * (64 * 64 + 64) * 4
    assert costs[0].input > 0
    assert sum(stage.update_us for stage in job.stages) == pytest.approx(facts().update_us)
    assert 512 * 64 * 4 in (crossing.forward_bytes for crossing in job.crossings.values())


def test_the_peak_of_a_plan_counts_buckets_and_what_is_carried() -> None:
    found = facts()
    given = found.for_cluster(CLUSTER)
    assert found.peak_of is not None
    stays, moves = (found.peak_of(decide(given, bucket_mb=1, cross_iteration=way)) for way in ("none", "all"))
    assert found.peak_bytes <= stays <= moves
    assert moves <= found.peak_bytes + 2 * 6 * (64 * 64 + 64) * 4


def test_a_budget_makes_another_step() -> None:
    plain = facts()
    within = StepBudget.of(plain.slot_bytes + (plain.peak_bytes - plain.slot_bytes) * 4 // 5)
    assert within.whole is not None
    lean = gather_step(graph(), MODEL, budget=within)
    assert lean.peak_bytes <= int(str(within).removesuffix("B")) < plain.peak_bytes
    assert lean.data_parallel.compute_us > plain.data_parallel.compute_us
    assert lean.budget == str(within)


def test_the_planner_is_told_what_the_cluster_takes() -> None:
    link = all_reduce_link(CLUSTER)
    ranks = range(CLUSTER.num_ranks)
    for num_bytes in (10**6, 10**8):
        expected = CLUSTER.all_reduce(ranks, num_bytes).time_us
        assert link.time_us(num_bytes) == pytest.approx(expected, rel=0.01)
    with pytest.raises(SimulationError, match="a cluster of one rank"):
        all_reduce_link(Cluster(1, 1, DEVICES["cpu"], Wire(1, 1), Wire(1, 1)))


def test_a_planned_step_is_simulated_as_planned() -> None:
    found = facts()
    plan = decide(found.for_cluster(CLUSTER), bucket_mb=0.02, cross_iteration="auto")
    prediction = simulate(found.data_parallel_job(plan), CLUSTER)
    assert prediction.step_us == pytest.approx(plan.predicted_us, rel=0.02)
    assert prediction.exposed_us == pytest.approx(plan.exposed_us, rel=0.05)
    other = decide(found.for_cluster(CLUSTER), bucket_mb=0.02, cross_iteration="none")
    wrong = StepFacts(**{**vars(found), "data_parallel": gather_step(small_graph(), MODEL).data_parallel})
    with pytest.raises(SimulationError, match="which the step has not; plan again"):
        wrong.data_parallel_job(other)


def small_graph() -> StepGraph:
    model = nn.Linear(64, 64)
    return capture(square_step, (model, torch.optim.SGD(model.parameters()), torch.randn(4, 64)), {}).graph


def test_a_chrome_trace_has_ranks_and_lanes() -> None:
    job = facts().pipeline_job(schedule_of("1f1b", 2, 4))
    found = json.loads(chrome_trace(trace(job, CLUSTER, (0, 3))))
    events = found["traceEvents"]
    assert {event["pid"] for event in events} == {0, 3}
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"compute", "send", "reduce"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    names = {event["name"] for event in events}
    assert {"0F0", "1B3", "update"} <= names
    many = {rank: [TraceSpan("compute", "x", 0.0, 1.0)] for rank in range(MAX_RANKS + 1)}
    with pytest.raises(SimulationError, match="is too large to look at"):
        chrome_trace(many)


def test_this_machine_can_be_measured() -> None:
    model = calibrate(torch.device("cpu"))
    device = model.devices["here"]
    assert device.flops_per_us > 0
    assert device.memory_bytes > 2**20
    assert not model.links
    assert CostModel.from_json(model.to_json().encode()) == model


SCRIPT = """
import torch
from torch import nn

def square_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

def make_step():
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])
    return square_step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 32))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "cluster.json").write_text(CLUSTER.to_json())
    return tmp_path


def run(script: Path, *options: str) -> int:
    return main(["simulate", f"{script}/train.py:make_step", "--cluster", f"{script}/cluster.json", *options])


def test_the_command_line_simulates(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script) == 0
    assert "data parallel, 25 MB, auto" in capsys.readouterr().out
    options = ["--schedule", "1f1b", "--pipeline-ranks", "2", "--json", "--trace", f"{script}/trace.json"]
    assert run(script, *options, "--trace-ranks", "0", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], len(found["by_rank"])) == (4, 2)
    assert found["step_us"] >= found["compute_us"]
    assert json.loads((script / "trace.json").read_text())["traceEvents"]


def test_the_command_line_searches(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, "--search", "--json", "--best", "3") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 3
    times = [one["step_us"] for one in found["best"]]
    assert times == sorted(times)
    assert run(script, "--search", "--best", "1") == 0
    assert "plans simulated" in capsys.readouterr().out


def test_the_command_line_says_what_is_wrong(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "simulate takes FILE.py:FUNCTION and --cluster FILE, or --calibrate FILE" in capsys.readouterr().err
    (script / "cluster.json").write_text("{}")
    assert run(script) == 1
    assert "is no wholestep-cluster file" in capsys.readouterr().err


def test_the_command_line_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not dist.is_initialized()
    assert main(["simulate", "--calibrate", str(tmp_path / "costs.json")]) == 0
    assert list(CostModel.load(tmp_path / "costs.json").devices) == ["here"]
    assert "flops_per_us" in capsys.readouterr().out


def test_the_peak_of_the_finished_graph_is_what_profiling_says() -> None:
    assert (
        facts().peak_bytes
        == profile_memory(run_passes(graph().copy(), Pipeline.parse("simplify,cse,dce,reinplace"))).peak_bytes
    )
