"""One plan: it prints what is done and why, goes to a file and back, and runs as it was made or says what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.parity import default_step
from tests.unit.cli.scripts import write_script
from torch import nn
from torch.optim import AdamW

import wholestep
from wholestep import CaptureError, Plan, PlanError, WholestepError, zoo
from wholestep.api import CompiledStep
from wholestep.capture import capture
from wholestep.cli import main
from wholestep.compiler import STAGES, Hardware, StepOptions, build, plan, table
from wholestep.cost import DeviceModel, Link
from wholestep.graph import StepGraph
from wholestep.remat import StepBudget


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made(width: int = 16) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers)
    return model, AdamW(model.parameters(), lr=1e-2), torch.randn(32, width)


def ops_of(graph: StepGraph) -> str:
    """A graph's code, without the remarks on passes above it."""
    return str(graph).partition("\ndef ")[2]


def compiled(**options: Any) -> tuple[CompiledStep, Any]:
    step = wholestep.compile(train_step, **options)
    arguments = made()
    step(*arguments)
    return step, arguments


def test_the_table_has_every_stage_and_a_plan_says_why() -> None:
    assert [line.split()[0] for line in table().splitlines()] == [stage.name.split()[0] for stage in STAGES]
    step, _ = compiled(memory_budget=0.3)
    lines = str(step.plan).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["simplify", "memory", "in place"]
    assert "memory budget 0.3: peak" in lines[1]


def test_what_is_planned_is_what_runs() -> None:
    """The two verbs give the graph that a compiled step runs, whoever calls them."""
    step, _ = compiled(memory_budget=0.3)
    options = StepOptions(memory_budget=StepBudget.of(0.3))
    graph = capture(train_step, made(), {}).graph
    found = plan(graph, options)
    assert ops_of(build(graph, found).main) == ops_of(step.graph)
    assert found.fingerprint == step.plan.fingerprint


def test_a_saved_plan_runs_node_by_node(tmp_path: Path) -> None:
    step, _ = compiled(memory_budget=0.3)
    file = step.plan.save(tmp_path / "plans" / "plan.json")
    again, (model, *_) = compiled(plan=file)
    assert ops_of(again.graph) == ops_of(step.graph)
    assert again.plan == Plan.load(file)
    reference, (other, *_) = compiled()
    assert again.plan.memory is not None
    assert again.plan.memory.repeated
    assert ops_of(reference.graph) != ops_of(again.graph)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_plan_of_the_command_line_runs(tmp_path: Path) -> None:
    """Made without weights and with figures of another device, it fits the step with weights."""
    script, file = write_script(tmp_path), tmp_path / "p.json"
    assert main(["plan", f"{script}:make_step", "--memory-budget", "0.2", "--save", str(file)]) == 0
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), namespace)
    function, arguments = namespace["make_step"]()
    step = wholestep.compile(function, plan=str(file))
    step(*arguments)
    loaded = Plan.load(file)
    assert step.plan == loaded
    assert loaded.memory is not None
    assert loaded.memory.repeated
    fresh = capture(function, namespace["make_step"]()[1], {}).graph
    assert ops_of(build(fresh, loaded).main) == ops_of(step.graph)


@pytest.mark.parametrize("name", ["gpt", "checkpointed", "resnet"])
def test_models_of_the_zoo_run_their_plans(name: str, tmp_path: Path) -> None:
    case = zoo.get(name)
    graphs: list[str] = []
    options: dict[str, Any] = {"memory_budget": 0.5}
    for _ in range(2):
        torch.manual_seed(0)
        model = case.build()
        step = wholestep.compile(default_step(case), **options)
        step(model, AdamW(model.parameters()), case.make_batch(4, 1))
        graphs.append(ops_of(step.graph))
        options = {"plan": step.plan.save(tmp_path / "plan.json")}
    assert graphs[0] == graphs[1]


def test_another_step_is_refused_with_what_differs(tmp_path: Path) -> None:
    step, (model, optimizer, x) = compiled()
    file = step.plan.save(tmp_path / "plan.json")
    for arguments, words in (
        ((model, optimizer, x[:8]), "parameters, state and batch"),
        (made(width=8), "parameters, state and batch"),
        ((nn.Sequential(nn.Linear(16, 16)), None, x), "number of ops"),
    ):
        other, given, batch = arguments
        given = AdamW(other.parameters(), lr=1e-2) if given is None else given
        before = [parameter.detach().clone() for parameter in other.parameters()]
        with pytest.raises(PlanError, match=words):
            wholestep.compile(train_step, plan=file, dynamic_batch=False)(other, given, batch)
        assert all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wholestep": "0.0.1"}, r"version of wholestep \(0.0.1 in the plan"),
        ({"world": 2}, r"number of ranks \(2 in the plan, 1 here\)"),
        ({"num_ops": 3}, r"number of ops \(3 in the plan"),
    ],
)
def test_a_plan_of_another_version_or_world_is_refused(change: dict[str, Any], words: str) -> None:
    step, arguments = compiled()
    other = replace(step.plan, made_for=replace(step.plan.made_for, **change))
    with pytest.raises(PlanError, match=words):
        wholestep.compile(train_step, plan=other)(*arguments)


def test_what_a_plan_has_decided_is_not_asked_for_as_well() -> None:
    step, _ = compiled()
    with pytest.raises(WholestepError, match="plan= says what memory_budget asks for"):
        wholestep.compile(train_step, plan=step.plan, memory_budget=0.5)
    with pytest.raises(WholestepError, match=r"plan is a wholestep.Plan or the path of a plan.json, not 3"):
        wholestep.compile(train_step, plan=cast("Any", 3))


def test_ranks_that_are_not_there_are_planned_alike() -> None:
    """Facts in, plan out: the same for the same hardware, and another one for another."""
    graph = capture(train_step, made(64), {}).graph
    options = StepOptions(data_parallel=wholestep.DataParallel(), bucket_mb=0.01)
    device = DeviceModel(1e3, 1e3, 1.0)
    plans = [plan(graph, options, Hardware(device, world, Link(50.0, 10.0))) for world in (2, 2, 4)]
    assert plans[0] == plans[1]
    assert plans[0].fingerprint != plans[2].fingerprint
    assert plans[0].communication is not None
    assert len(plans[0].communication.buckets) > 1
    assert "buckets over 2 ranks" in str(plans[0])


def test_options_check_themselves() -> None:
    with pytest.raises(WholestepError, match="bucket_mb is a size in megabytes, more than 0, not 0"):
        StepOptions(bucket_mb=0)
    with pytest.raises(WholestepError, match="lower is 'inductor', 'none' or 'auto', not 'maybe'"):
        StepOptions(lower="maybe")


def test_a_refused_step_is_refused_with_a_plan_too() -> None:
    step, (model, optimizer, x) = compiled()

    def branching(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = train_step(model, optimizer, x)
        return loss * 2 if loss.item() > 1 else loss

    with pytest.raises(CaptureError, match="only known when the step runs"):
        wholestep.compile(branching, plan=step.plan)(model, optimizer, x)


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    assert f"```\n{table()}\n```" in page
