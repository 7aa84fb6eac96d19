"""Whole steps within a memory budget: eager's numbers at every step, and a peak that is what was promised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.checkpoints import UnderPolicy
from tests.parity import assert_parity, default_step
from torch import nn
from torch.utils import checkpoint

import wholestep
from wholestep import BudgetError, PassError, zoo
from wholestep.cost import measure_peak, profile_memory
from wholestep.graph import Replay
from wholestep.remat import Budget, readable
from wholestep.zoo.case import ZooCase

BATCH = 64
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)


def peak_of(case: ZooCase, **options: Any) -> tuple[int, Any]:
    """The measured peak of the third step, and the compiled step."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = case.make_batch(BATCH, 1)
    train_step = default_step(case)
    step = wholestep.compile(train_step, **options) if options else train_step
    for _ in range(2):
        step(model, optimizer, batch)
    optimizer.zero_grad()
    return measure_peak(step, model, optimizer, batch).peak_bytes, step


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.slow), 0.0])
@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "gpt", "bert", "resnet", "custom_function"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "t5", "vit")),
    ],
)
def test_every_step_is_eagers(name: str, share: float) -> None:
    step = assert_parity(
        zoo.get(name), "adamw_fused", steps=3, batch_sizes=[BATCH], compile_options={"memory_budget": share}
    )
    assert step.num_captures == 1
    assert step.plan.memory.repeated
    assert step.plan.memory.peak_bytes < step.plan.memory.unlimited_peak_bytes
    step.graph.verify()


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("optimizer_name", ["sgd", "adam", "adamw_foreach"])
@pytest.mark.parametrize("name", zoo.CASES)
def test_every_step_is_eagers_at_every_budget(name: str, optimizer_name: str, share: float) -> None:
    assert_parity(zoo.get(name), optimizer_name, steps=5, batch_sizes=[BATCH], compile_options={"memory_budget": share})


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "bert", "vit"))]
)
def test_the_measured_peak_is_the_predicted_one_and_falls_with_the_budget(name: str) -> None:
    peaks: list[int] = []
    for share in (1.0, 0.6, 0.3, 0.0):
        measured, step = peak_of(zoo.get(name), memory_budget=share)
        predicted = step.plan.memory.peak_bytes
        assert predicted == profile_memory(step.graph).peak_bytes
        assert measured == pytest.approx(predicted, rel=0.02)
        peaks.append(measured)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.75 * peaks[0]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_budget_in_bytes_is_kept(name: str) -> None:
    unlimited, _ = peak_of(zoo.get(name), memory_budget=1.0)
    budget = int(0.8 * unlimited)
    measured, step = peak_of(zoo.get(name), memory_budget=budget)
    assert measured <= budget
    assert step.plan.memory.peak_bytes <= budget
    assert step.plan.memory.peak_bytes >= 0.9 * budget  # what is allowed is used
    assert str(Budget.of(budget)) == step.plan.memory.budget


def test_an_impossible_budget_names_the_smallest_possible_one() -> None:
    case = zoo.get("gpt")
    with pytest.raises(BudgetError, match=r"memory_budget=50000B cannot be kept: the smallest peak found") as caught:
        peak_of(case, memory_budget=50_000)
    smallest = caught.value.smallest_bytes
    assert str(smallest) in str(caught.value)
    measured, _ = peak_of(case, memory_budget=smallest)
    assert measured <= smallest
    with pytest.raises(BudgetError):
        peak_of(case, memory_budget=int(0.98 * smallest))


def test_a_refused_budget_leaves_everything_as_it_was() -> None:
    case = zoo.get("gpt")
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    state = torch.get_rng_state()

    @wholestep.compile(memory_budget="1kB")
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(BudgetError):
        train_step(model, optimizer, case.make_batch(4, 0))
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_euler_holds_at_every_budget() -> None:
    """The loss is homogeneous in each weight, so <w, w.grad> is the loss: other masks in the backward would show."""

    class Homogeneous(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.dropout(torch.relu(layer(x)), 0.3, train=True)
            return x.sum()

    for share in (1.0, *SHARES):
        torch.manual_seed(0)
        model = Homogeneous()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = wholestep.compile(_plain_step, memory_budget=share)
        for _ in range(2):
            loss = step(model, optimizer, torch.rand(256, 32))
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert torch.allclose((parameter * parameter.grad).sum(), loss, rtol=1e-4)
        if share == 0.0:
            assert any(isinstance(node.target, Replay) for node in step.graph.calls())


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_regions_run_again_and_need_no_more_memory_than_in_eager(use_reentrant: bool) -> None:
    name = "checkpointed_reentrant" if use_reentrant else "checkpointed"
    eager, _ = peak_of(zoo.get(name))
    ours, step = peak_of(zoo.get(name), dynamic_batch=False)
    assert ours <= 1.01 * eager
    assert step.plan.memory is not None
    assert step.plan.memory.repeated_share <= 1.05
    plain, _ = peak_of(zoo.get("gpt"), dynamic_batch=False)
    assert ours < plain


def test_the_border_of_two_checkpoint_regions_is_kept() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return checkpoint.checkpoint(self.second, x, use_reentrant=False).square().sum()

    step = wholestep.compile(_plain_step)
    model = Two()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8))
    assert step.plan.memory is not None
    kept = {value.module for value in step.plan.memory.kept}
    assert "first.2" in kept
    assert not {"first.0", "first.1", "second.0", "second.1"} & kept
    repeated = [op.module for op in step.plan.memory.repeated]
    assert {"first.0", "first.1", "second.0", "second.1"} <= set(repeated)
    assert "first.2" not in repeated
    assert all(op.times == 1 for op in step.plan.memory.repeated)


def test_selective_checkpoint_policies() -> None:
    aten = torch.ops.aten

    def policy(_context: Any, op: Any, *_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
        if op is aten.tanh.default:
            return checkpoint.CheckpointPolicy.MUST_SAVE
        if op is aten.sigmoid.default:
            return checkpoint.CheckpointPolicy.PREFER_SAVE
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    model, reference = UnderPolicy(policy), UnderPolicy(policy)
    reference.load_state_dict(model.state_dict())
    batch = torch.randn(64, 8)
    for budget in (None, 0.0):
        step = wholestep.compile(_plain_step, memory_budget=budget)
        loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
        assert torch.equal(loss, _plain_step(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batch))
        assert step.plan.memory is not None
        repeated = {op.module for op in step.plan.memory.repeated}
        assert "inner.1" not in repeated
        if budget is None:
            assert not {"inner.0", "inner.3"} & repeated  # kept as preferred, and nobody needs what it is made from
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), reference.parameters()))


def test_gradient_accumulation_within_a_budget() -> None:
    case = zoo.get("gpt")

    def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> Any:
        optimizer.zero_grad()
        total = torch.zeros(())
        for half in range(2):
            part = {name: value.chunk(2)[half] for name, value in batch.items()}
            loss = case.loss(model, part) / 2
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    step = assert_parity(
        case, "adamw", train_step=accumulating, steps=3, batch_sizes=[32], compile_options={"memory_budget": 0.3}
    )
    assert step.plan.memory.peak_bytes < 0.8 * step.plan.memory.unlimited_peak_bytes


def test_a_dynamic_batch_within_a_budget() -> None:
    step = assert_parity(
        zoo.get("gpt"),
        "adamw_fused",
        steps=4,
        batch_sizes=[16, 12, 16, 20],
        compile_options={"memory_budget": 0.4, "dynamic_batch": True},
    )
    assert step.num_captures == 1
    assert step.plan.memory.repeated


def test_a_step_explains_its_memory() -> None:
    _, step = peak_of(zoo.get("gpt"), memory_budget=0.3)
    text = step.explain()
    assert f"Memory budget 0.3: peak {readable(step.plan.memory.peak_bytes)}" in text
    for line in ("ops run again", "blocks.0.expand"):
        assert line in text
    _, unlimited = peak_of(zoo.get("gpt"), dynamic_batch=False)
    assert "Memory budget" not in unlimited.explain()


def test_plans_are_data() -> None:
    _, step = peak_of(zoo.get("mlp"), memory_budget=0.0)
    plan = step.plan.memory
    described = plan.as_dict()
    assert described["peak_bytes"] == plan.peak_bytes
    assert {value["name"] for value in described["kept"]} == {value.name for value in plan.kept}
    assert all(value.reason for value in plan.kept)
    assert "ops run again" in str(plan)
    assert any(record.name == "remat" for record in step.graph.history)


def test_the_pass_refuses_names_it_does_not_know() -> None:
    with pytest.raises(PassError, match="there is no value to keep called 'nobody'"):
        peak_of(zoo.get("mlp"), passes='simplify,cse,remat{kept="nobody"},reinplace')


def test_the_graph_prints_as_code_that_names_replays() -> None:
    _, step = peak_of(zoo.get("gpt"), memory_budget=0.0)
    text = str(step.graph)
    assert "wholestep.graph.replay.Replay(torch.ops." in text
    assert "import wholestep.graph.replay" in text
    compile(text, "step", "exec")
