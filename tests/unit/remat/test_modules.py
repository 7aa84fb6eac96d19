"""Budgets of modules: kept whatever else is planned, eager's numbers, and who is meant by which name."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.checkpoints import UnderPolicy
from tests.joint import trace_joint
from tests.parity import assert_parity
from tests.random_programs import problems
from torch import fx, nn
from torch.utils import checkpoint

import wholestep
from wholestep import BudgetError, WholestepError, zoo
from wholestep.cost import profile_memory
from wholestep.graph import Replay
from wholestep.remat import RematPlan, StepBudget, partition_joint
from wholestep.remat.budget import Budget, ModuleBudget
from wholestep.remat.mincut import min_cut
from wholestep.remat.modules import best_within, fix_modules, governed, name_modules
from wholestep.remat.plan import values_read
from wholestep.remat.problem import INPUT, Decision, Op, Problem, Value
from wholestep.remat.search import Planner
from wholestep.remat.simulate import Simulator

BATCH = 32
Written = Mapping[str, float | str]


def is_in(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def kept_bytes(plan: RematPlan, name: str, but: str | None = None) -> int:
    """What a module keeps, less what is made in another one."""
    return sum(
        value.num_bytes
        for value in plan.kept
        if is_in(value.module, name) and not (but is not None and is_in(value.module, but))
    )


def repeated_in(plan: RematPlan, name: str) -> list[str]:
    return [op.name for op in plan.repeated if is_in(op.module, name)]


def gpt_step(budget: Any, steps: int = 1) -> tuple[Any, RematPlan]:
    """The zoo's GPT (it has dropout), trained for some steps bit for bit like in eager, and its memory plan."""
    options = {"memory_budget": budget, "dynamic_batch": False}
    step = assert_parity(zoo.get("gpt"), "adamw_fused", steps=steps, batch_sizes=[BATCH], compile_options=options)
    assert step.num_captures == 1
    step.graph.verify()
    plan = step.plan.memory
    assert plan.peak_bytes == profile_memory(step.graph).peak_bytes
    again = {node.meta["again"] for node in step.graph.calls() if "again" in node.meta}
    assert {op.name for op in plan.repeated} <= again  # the graph does what the plan says
    assert not {value.name for value in plan.kept} & again
    return step, plan


@pytest.fixture(scope="module")
def unlimited() -> RematPlan:
    return gpt_step(1.0)[1]


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_shares_are_kept_and_every_step_is_eagers(share: float, unlimited: RematPlan) -> None:
    step, plan = gpt_step({"blocks.*": share}, steps=3)
    for name in ("blocks.0", "blocks.1"):
        whole = kept_bytes(unlimited, name)
        assert 0.7 * share * whole <= kept_bytes(plan, name) <= share * whole  # what is allowed is used
        assert repeated_in(plan, name)
    assert not repeated_in(plan, "dropout")  # nobody has said anything about it
    assert plan.peak_bytes < unlimited.peak_bytes == plan.unlimited_peak_bytes
    if share < 0.5:
        assert any(isinstance(node.target, Replay) for node in step.graph.calls())


def test_less_for_a_module_costs_more(unlimited: RematPlan) -> None:
    more, less = gpt_step({"blocks": 0.7})[1], gpt_step({"blocks": 0.2})[1]
    assert 0 < more.repeated_share < 0.7 * less.repeated_share
    for plan, share in ((more, 0.7), (less, 0.2)):
        assert kept_bytes(plan, "blocks") <= share * kept_bytes(unlimited, "blocks")


def test_bytes_are_kept() -> None:
    _, plan = gpt_step({"blocks.1": "300kB"}, steps=3)
    assert 200_000 <= kept_bytes(plan, "blocks.1") <= 300_000
    assert not repeated_in(plan, "blocks.0")


def test_all_of_it_is_a_right_that_the_whole_step_respects(unlimited: RematPlan) -> None:
    _, plan = gpt_step({"": 0.0, "blocks.0": 1.0}, steps=3)
    assert not repeated_in(plan, "blocks.0")
    kept = {value.name for value in plan.kept}
    assert {value.name for value in unlimited.kept if is_in(value.module, "blocks.0")} <= kept
    assert repeated_in(plan, "blocks.1")
    assert any(value.reason == "within the budget of 'blocks.0' (1)" for value in plan.kept)


def test_nothing_is_nothing() -> None:
    _, plan = gpt_step({"blocks.1": 0}, steps=3)
    assert kept_bytes(plan, "blocks.1") == 0
    assert not repeated_in(plan, "blocks.0")


def test_what_one_bounded_module_hands_to_another_is_kept() -> None:
    """As between two checkpoint regions; without it each block would start over at the first."""
    _, plan = gpt_step({"blocks.*": 0}, steps=3)
    assert kept_bytes(plan, "blocks.1") == 0
    streams = [value for value in plan.kept if value.module == "blocks.0"]
    width, context = 32, 16
    assert [value.num_bytes for value in streams] == [4 * BATCH * context * width]
    assert plan.repeated_share < 1


def test_the_innermost_module_decides(unlimited: RematPlan) -> None:
    _, plan = gpt_step({"blocks": 0.6, "blocks.*.attention": 0, "blocks.1.attention": 1.0}, steps=3)
    assert kept_bytes(plan, "blocks.0.attention") < 0.2 * kept_bytes(unlimited, "blocks.0.attention")
    assert kept_bytes(plan, "blocks.1.attention") == kept_bytes(unlimited, "blocks.1.attention")
    assert not repeated_in(plan, "blocks.1.attention")
    rest = [
        sum(kept_bytes(each, f"blocks.{i}", but=f"blocks.{i}.attention") for i in (0, 1)) for each in (plan, unlimited)
    ]
    assert rest[0] <= 0.6 * rest[1]
    assert [use.name for use in plan.modules] == ["blocks", "blocks.0.attention", "blocks.1.attention"]
    assert [use.budget for use in plan.modules] == ["0.6", "0", "1"]
    assert plan.modules[0].kept_bytes == rest[0]
    assert plan.modules[0].unlimited_bytes == rest[1]


def test_the_whole_step_is_planned_around_modules(unlimited: RematPlan) -> None:
    _, loose = gpt_step({"blocks.0": 0.5})
    limit = int(0.9 * loose.peak_bytes)
    _, plan = gpt_step({"": limit, "blocks.0": 0.5}, steps=3)
    assert plan.peak_bytes <= limit
    assert kept_bytes(plan, "blocks.0") <= 0.5 * kept_bytes(unlimited, "blocks.0")
    assert repeated_in(plan, "blocks.1")


def test_a_whole_that_modules_leave_no_room_for(unlimited: RematPlan) -> None:
    budget = int(0.7 * unlimited.peak_bytes)
    named = r"are kept because module budgets say so; 'blocks\.0' keeps .* \(1\)"
    with pytest.raises(BudgetError, match=named) as caught:
        gpt_step({"": budget, "blocks.*": 1.0})
    assert f"memory_budget={budget}B cannot be kept" in str(caught.value)
    assert budget < caught.value.smallest_bytes <= unlimited.peak_bytes
    _, plan = gpt_step({"": caught.value.smallest_bytes, "blocks.*": 1.0})
    assert plan.peak_bytes <= caught.value.smallest_bytes


def test_bytes_that_do_not_hold_what_must_stay_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"memory_budget=1000B of module 'blocks\.0' cannot be kept") as caught:
        gpt_step({"blocks.*": "1kB"})
    smallest = caught.value.smallest_bytes
    _, plan = gpt_step({"blocks.0": smallest, "blocks.1": "1kB"})
    assert 0 < kept_bytes(plan, "blocks.0") <= smallest


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(WholestepError, match=r"names a module 'blocks\.\*\.atention'.*'blocks\.[01]\.attention'"):
        gpt_step({"blocks.*.atention": 0.5})


def test_the_plan_and_the_page_say_what_modules_keep() -> None:
    step, plan = gpt_step({"blocks.*": 0.5})
    assert plan.budget == "none, blocks.*: 0.5"
    use = plan.modules[0]
    assert use.kept_bytes == kept_bytes(plan, "blocks.0")
    assert plan.as_dict()["modules"][0]["kept_bytes"] == use.kept_bytes
    assert str(use).startswith("'blocks.0' keeps ")
    assert str(use) in str(plan)
    assert str(use) in step.explain()


def test_checkpoint_policies_have_been_heard_before() -> None:
    aten = torch.ops.aten

    def policy(_context: Any, op: Any, *_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
        saves = op is aten.tanh.default
        return checkpoint.CheckpointPolicy.MUST_SAVE if saves else checkpoint.CheckpointPolicy.MUST_RECOMPUTE

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for share in (0.0, 1.0):
        model = UnderPolicy(policy)
        step = wholestep.compile(train_step, memory_budget={"inner": share})
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 8))
        assert step.plan.memory is not None
        repeated = {op.module for op in step.plan.memory.repeated}
        assert "inner.1" not in repeated
        assert "inner.3" in repeated
        assert "inner.1" in {value.module for value in step.plan.memory.kept}


def bounded(names: list[str], written: Written) -> dict[str, tuple[str, str]]:
    found = governed(names, StepBudget.of(written).modules)
    return {name: (module.name, str(module.budget)) for name, module in found.items()}


def test_who_is_meant() -> None:
    names = ["", "layers.0", "layers.0.norm", "layers.10.norm", "layers.10.norm.deep", "head"]
    assert bounded(names, {"layers": 0.5}) == dict.fromkeys(names[1:5], ("layers", "0.5"))
    assert bounded(names, {"layers.*": 0.5}) == {
        "layers.0": ("layers.0", "0.5"),
        "layers.0.norm": ("layers.0", "0.5"),
        "layers.10.norm": ("layers.10", "0.5"),
        "layers.10.norm.deep": ("layers.10", "0.5"),
    }
    assert list(bounded(names, {"layers.?": 0.5})) == ["layers.0", "layers.0.norm"]
    assert list(bounded(names, {"layers.[1-9]*": 0.5})) == ["layers.10.norm", "layers.10.norm.deep"]
    with pytest.raises(WholestepError, match=r"names a module 'heads'.* the closest names are 'head'"):
        bounded(names, {"heads": 0.5})
    with pytest.raises(WholestepError, match=r"names a module 'zzz'.* the closest names are 'head', 'layers'"):
        bounded(names, {"zzz": 0.5})
    with pytest.raises(WholestepError, match="nothing here runs in a module"):
        bounded([""], {"layers": 0.5})
    assert bounded(names, {"*": 0.5})["head"] == ("head", "0.5")
    assert bounded(names, {"*.*.norm": 0.5})["layers.10.norm.deep"] == ("layers.10.norm", "0.5")


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        ({"layers": 0.1, "layers.*": 0.2}, "0.2"),
        ({"layers.*": 0.2, "layers.0": 0.3, "layers.?": 0.4}, "0.3"),
        ({"layers.0": 0.3, "*.*.norm": 0.4}, "0.4"),
        ({"*.*.norm": 0.4, "layers.*.norm": 0.5, "layers.0": 0.3}, "0.5"),
        ({"layers.*.norm": 0.5, "layers.0.*": 0.6}, "0.5"),
        ({"layers.0.norm": 0.7, "layers.0.*": 0.6}, "0.7"),
    ],
)
def test_the_innermost_and_then_the_most_literal_key_wins(written: Written, budget: str) -> None:
    for order in itertools.permutations(written.items()):  # as ranks may write it
        assert bounded(["layers.0.norm"], dict(order))["layers.0.norm"][1] == budget


def with_modules(problem: Problem, modules: list[str]) -> Problem:
    ops = [replace(op, module=modules[index % len(modules)]) for index, op in enumerate(problem.ops)]
    return replace(problem, ops=tuple(ops))


names_of_ops = st.lists(st.sampled_from(["", "a", "a.x", "b"]), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(problems(), names_of_ops, st.integers(2, 20), st.integers(2, 20), st.data())
def test_no_later_choice_breaks_a_bound(
    problem: Problem, modules: list[str], a_bytes: int, b_bytes: int, data: st.DataObject
) -> None:
    problem = with_modules(problem, modules)
    there = {op.module for op in problem.ops if not op.is_late}
    limits = {key: limit for key, limit in (("a", a_bytes), ("b", b_bytes)) if any(is_in(name, key) for name in there)}
    assume(limits)
    for _ in range(len(limits) + 1):
        budgets = [ModuleBudget(key, Budget(num_bytes=limit)) for key, limit in limits.items()]
        try:
            fixed = fix_modules(Planner(problem), budgets)
            break
        except BudgetError as error:
            refused = next(key for key in limits if f"module '{key}'" in str(error))
            limits[refused] = max(error.smallest_bytes, limits[refused] + 1)  # it is more, and is enough
    else:
        raise AssertionError("what was said to be enough is not")
    kept = data.draw(st.lists(st.sampled_from(fixed.problem.choices), unique=True)) if fixed.problem.choices else []
    read = values_read(fixed.problem, Decision(frozenset(kept)))
    for key, limit in limits.items():
        inside = [value for value in read if is_in(problem.ops[problem.values[value].maker].module, key)]
        assert problem.num_bytes(inside) <= limit


def layered(seed: int) -> Problem:
    """Equal layers of ops with sizes and costs at random, each op read by the next and most by a late one."""
    draw = random.Random(seed)
    kinds = [(draw.randint(1, 9), float(draw.randint(1, 9)), draw.random() < 0.8) for _ in range(draw.randint(3, 5))]
    forward = kinds * (10 // len(kinds))
    values = [Value("x", 0, INPUT)]
    ops: list[Op] = []
    for size, cost, _ in forward:
        ops.append(Op(f"f{len(ops)}", (len(values) - 1,), (len(values),), cost=cost, module="m"))
        values.append(Value(f"v{len(values)}", size, len(ops) - 1))
    for index in range(len(forward), 0, -1):
        if forward[index - 1][2]:
            ops.append(Op(f"b{index}", (index,), (len(values),), is_late=True))
            values.append(Value(f"g{index}", 0, len(ops) - 1))
    return Problem(tuple(ops), tuple(values), frozenset())


def test_what_a_module_keeps_saves_nearly_all_that_can_be_saved() -> None:
    """Against every subset that fits."""
    ours = least = 0.0
    for seed in range(40):
        problem = layered(seed)
        simulator = Simulator(problem)
        free = frozenset(problem.choices)
        room = random.Random(seed).randint(0, problem.num_bytes(free))
        kept = best_within(problem, free, room)
        assert problem.num_bytes(kept) <= room
        ours += simulator.outcome(Decision(kept)).cost
        least += min(
            simulator.outcome(Decision(frozenset(subset))).cost
            for size in range(len(free) + 1)
            for subset in itertools.combinations(sorted(free), size)
            if problem.num_bytes(subset) <= room
        )
    assert least <= ours <= 1.03 * least
    assert ours > 0


@settings(max_examples=200, deadline=None)
@given(problems(max_forward=6), st.integers(0, 5))
def test_a_priced_cut_has_the_least_sum(problem: Problem, price: int) -> None:
    simulator = Simulator(problem)

    def weight(value: int) -> int:
        return max(1, price * problem.values[value].num_bytes)

    def total(kept: frozenset[int]) -> float:
        return sum(map(weight, kept)) + simulator.outcome(Decision(kept)).cost

    kept = min_cut(problem, lambda _: True, weight, price=lambda op: int(problem.ops[op].cost))
    subsets = (
        frozenset(subset)
        for size in range(len(problem.choices) + 1)
        for subset in itertools.combinations(problem.choices, size)
    )
    assert total(kept) == min(map(total, subsets))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(3)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_joint_graphs_have_modules_too() -> None:
    torch.manual_seed(0)
    model = Net()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(64, 16))

    def cut(budget: Any, **options: Any) -> tuple[dict[str, int], int]:
        """Bytes kept by block, and how many ops run again."""
        result = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=budget, **options)
        if "fusing" not in options:
            joint.check(result.forward, result.backward)
        problem = result.joint.problem
        read = values_read(problem, result.choice.decision)
        sizes: dict[str, int] = dict.fromkeys(("blocks.0", "blocks.1", "blocks.2", "head"), 0)
        for name, value in itertools.product(sizes, read):
            if is_in(problem.ops[problem.values[value].maker].module, name):
                sizes[name] += problem.values[value].num_bytes
        return sizes, result.choice.outcome.num_again

    everything, _ = cut(1.0)
    for solver in ("auto", "mincut", "greedy", "default"):
        half, num_again = cut({"blocks.*": 0.5}, solver=solver)
        assert num_again > 0
        assert all(half[name] <= 0.5 * everything[name] for name in ("blocks.0", "blocks.1", "blocks.2"))
    assert cut({"": 0.0, "blocks.*": 1.0})[0]["blocks.1"] == everything["blocks.1"]
    assert cut({"": 0.0, "blocks.0": 1.0})[0]["blocks.1"] < everything["blocks.1"]
    assert cut({"blocks.2": 0})[0]["blocks.2"] == 0
    mask_bytes = 64 * 64 * 4  # its randomness would be another one
    assert cut({"blocks.2": 0}, fusing=True)[0]["blocks.2"] == mask_bytes < cut(1.0, fusing=True)[0]["blocks.2"]
    with pytest.raises(WholestepError, match="names a module 'tail'"):
        cut({"tail": 0.5})
    with pytest.raises(BudgetError, match=r"cannot be kept: .* because module budgets say so; 'blocks\.0' keeps"):
        cut({"": "60kB", "blocks.*": 1.0})


def test_a_part_of_a_program_may_lack_a_module(caplog: pytest.LogCaptureFixture) -> None:
    """`torch.compile` may cut a model into several graphs."""
    model = Net()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(8, 16))
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        partition_joint(joint.module, num_fwd_outputs=1, memory_budget={"tail": 0.5, "head": 0.5}, fusing=True)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("the memory budget of 'tail' does nothing in this graph: the closest names are")


def test_names_on_joint_graphs() -> None:
    def names(*paths: str) -> list[str]:
        graph = fx.Graph()
        nodes = [graph.call_function(torch.relu) for _ in paths]
        for node, path in zip(nodes, paths):
            node.meta["nn_module_stack"] = {"0": ("L['self']", nn.Module), "1": (path, nn.Module)}
        name_modules(nodes)
        return [node.meta["fqn"] for node in nodes]

    assert names("L['self'].blocks.0.norm", "L['self']") == ["blocks.0.norm", ""]
    assert names("L['a'].blocks.0", "L['b'].head", "L['b']") == ["a.blocks.0", "b.head", "b"]
    assert names("L['models'][0].head", "L['models'][1].head") == ["models.0.head", "models.1.head"]
