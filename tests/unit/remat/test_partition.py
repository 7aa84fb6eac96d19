"""Joint graphs cut in two: gradients of the uncut graph, what is saved, in which order, and by which convention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.joint import Joint, trace_joint
from tests.lowering import needs_compiler
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import wholestep
from wholestep import BanRules, BudgetError, WholestepError
from wholestep.graph import Replay
from wholestep.remat import partition_joint
from wholestep.remat.joint import split_joint
from wholestep.remat.problem import Decision

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


def network(dropout: float = 0.2, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(16, dropout) for _ in range(layers)))


def calls(module: fx.GraphModule, target: Any) -> int:
    return sum(node.target == target for node in module.graph.nodes)


def saved_nodes(forward: fx.GraphModule, num_fwd_outputs: int = 1) -> list[fx.Node]:
    [output] = forward.graph.find_nodes(op="output")
    return [item for item in output.args[0][num_fwd_outputs:] if isinstance(item, fx.Node)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_halves_do_what_the_joint_graph_does_bit_for_bit(budget: float) -> None:
    model = network()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(32, 16))
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=budget)
    joint.check(forward, backward)


def test_less_budget_never_means_a_higher_peak() -> None:
    model = network(layers=6)
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(64, 16))
    results = [partition_joint(joint.module, num_fwd_outputs=1, memory_budget=budget) for budget in BUDGETS]
    peaks = [result.choice.outcome.peak_bytes for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.4 * peaks[0]
    costs = [result.choice.outcome.cost for result in results]
    assert costs[0] < costs[-1]


def test_the_measured_peak_is_the_predicted_one() -> None:
    model = network(layers=6)
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(256, 16))
    for budget in (1.0, 0.5, 0.0):
        result = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=budget)
        measured = joint.measured_peak(result.forward, result.backward)
        assert measured == pytest.approx(result.choice.outcome.peak_bytes, rel=0.02)


def test_budgets_in_bytes_are_kept_or_refused() -> None:
    model = network()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(256, 16))
    everything = partition_joint(joint.module, num_fwd_outputs=1)
    resident = everything.joint.problem.resident_bytes
    budget = resident + everything.choice.outcome.peak_bytes // 2
    half = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=budget)
    assert half.choice.outcome.peak_bytes + resident <= budget
    with pytest.raises(BudgetError, match="the smallest peak found is") as caught:
        partition_joint(joint.module, num_fwd_outputs=1, memory_budget=resident + 1000)
    again = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=caught.value.smallest_bytes)
    assert again.choice.outcome.peak_bytes + resident <= caught.value.smallest_bytes


def test_the_joint_graph_stays_as_it_is() -> None:
    model = network()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(8, 16))
    before = joint.module.print_readable(print_output=False)
    wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=0.0)
    assert joint.module.print_readable(print_output=False) == before


def test_dropout_is_replayed() -> None:
    model = network(dropout=0.5)
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(64, 16))
    plan = partition_joint(joint.module, num_fwd_outputs=1)
    forward, backward = split_joint(plan.joint, Decision(frozenset()))
    assert sum(isinstance(node.target, Replay) for node in backward.graph.nodes) == 4
    joint.check(forward, backward)


@pytest.mark.parametrize("solver", ["default", "mincut", "greedy", "dp", "ilp", "auto"])
def test_all_solvers_agree_on_gradients(solver: str) -> None:
    model = network()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(16, 16))
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=0.5, solver=solver)
    joint.check(forward, backward)


def test_the_minimum_cut_repeats_no_product() -> None:
    model = network()
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(16, 16))
    result = partition_joint(joint.module, num_fwd_outputs=1, solver="mincut")
    assert result.choice.outcome.flops == 0
    everything = partition_joint(joint.module, num_fwd_outputs=1, solver="default")
    assert result.choice.outcome.kept_bytes < everything.choice.outcome.kept_bytes


@pytest.mark.parametrize("estimator", ["flops", "roofline", "profile"])
def test_all_estimators_give_plans_that_fit(estimator: str) -> None:
    model = network(layers=3)
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(64, 16))
    result = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=0.3, estimator=estimator)
    joint.check(result.forward, result.backward)
    assert result.choice.outcome.num_again > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "magic"}, "there is no solver 'magic'; choose from auto, default, mincut, greedy, dp, ilp"),
        ({"estimator": "guess"}, "there is no estimator 'guess'; choose from flops, roofline, profile"),
        ({"memory_budget": 7.5}, "memory_budget is a share from 0 to 1"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], message: str) -> None:
    joint = trace_joint(lambda x: x.sin().sum(), None, torch.randn(3))
    with pytest.raises(WholestepError, match=message):
        wholestep.partition(joint.module, num_fwd_outputs=1, **options)


# What is saved, on small functions


def counted(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, **options: Any) -> tuple[int, int, Joint]:
    """Numbers of values the forward saves and of inputs the backward has beside them."""
    joint = trace_joint(function, None, *inputs)
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, **options)
    joint.check(forward, backward)
    saved = len(saved_nodes(forward))
    return saved, len(backward.graph.find_nodes(op="placeholder")) - saved, joint


def test_an_input_is_saved_as_it_is() -> None:
    assert counted(lambda x: x.sin().sum(), torch.randn(3))[:2] == (1, 1)


SQUARE = (8, 8)


@pytest.mark.parametrize(
    ("function", "shapes", "solver", "expected"),
    [
        # inputs and outputs of the forward, inputs and outputs of the backward
        (lambda x: x.sum(), [SQUARE], "default", (1, 1, 1, 1)),  # nothing is needed but the tangent
        (lambda x: x.sin().sum(), [SQUARE], "default", (1, 2, 2, 1)),
        (lambda x, y: (x * y).sum(), [SQUARE, SQUARE], "default", (2, 3, 3, 2)),
        (lambda x, w: (x @ w).sum(), [SQUARE, SQUARE], "default", (2, 3, 3, 2)),
        (lambda x, w: torch.tanh(x @ w).sum(), [SQUARE, SQUARE], "default", (2, 4, 4, 2)),
        (lambda x: x.sin().sin().sin().sum(), [SQUARE], "default", (1, 4, 4, 1)),
        (lambda x: x.sin().sin().sin().sum(), [SQUARE], "mincut", (1, 2, 2, 1)),
        (lambda x, w: (x.sin() @ w).sin().sum(), [SQUARE, SQUARE], "default", (2, 5, 5, 2)),
        (lambda x, w: (x.sin() @ w).sin().sum(), [SQUARE, SQUARE], "mincut", (2, 4, 4, 2)),
    ],
)
def test_counts_of_inputs_and_outputs(
    function: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], solver: str, expected: tuple[int, ...]
) -> None:
    joint = trace_joint(function, None, *(torch.randn(shape) for shape in shapes))
    halves = wholestep.partition(joint.module, num_fwd_outputs=1, solver=solver)
    joint.check(*halves)
    counts: list[int] = []
    for half in halves:
        [output] = half.graph.find_nodes(op="output")
        counts += [len(half.graph.find_nodes(op="placeholder")), len(output.args[0])]
    assert tuple(counts) == expected


def test_a_chain_of_cheap_ops_is_computed_again_from_its_input() -> None:
    x = torch.randn(64)
    saved, _, _ = counted(lambda x: x.sin().cos().exp().tanh().sum(), x, solver="mincut")
    assert saved == 1


def test_products_are_kept_and_cheap_ops_around_them_are_not() -> None:
    joint = trace_joint(lambda x, w: (x @ w).sin().sin().sin().sum(), None, torch.randn(8, 8), torch.randn(8, 8))
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, solver="mincut")
    joint.check(forward, backward)
    assert torch.ops.aten.mm.default in {node.target for node in saved_nodes(forward)}
    assert calls(backward, torch.ops.aten.sin.default) == 2
    assert calls(backward, torch.ops.aten.mm.default) == 2  # the two gradients


def test_results_of_one_op_are_saved_one_by_one() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,)).square().sum()

    joint = trace_joint(function, None, torch.randn(64, 32), decompose=False)
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, solver="default")
    joint.check(forward, backward)
    shapes = sorted(tuple(node.meta["val"].shape) for node in saved_nodes(forward))
    assert shapes == [(64, 1), (64, 1), (64, 32), (64, 32)]  # mean and deviation, input and result
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, solver="mincut")
    joint.check(forward, backward)
    assert [node.op for node in saved_nodes(forward)] == ["placeholder"]  # all of it can be had again from the input


def test_views_are_taken_again_and_their_base_is_saved_once() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y.view(4, 16).sin() * y.t().reshape(4, 16).cos()).sum()

    joint = trace_joint(function, None, torch.randn(8, 8), torch.randn(8, 8))
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, solver="mincut")
    joint.check(forward, backward)
    assert [node.target for node in saved_nodes(forward)].count(torch.ops.aten.mm.default) == 1
    assert not any("view" in str(node.target) for node in saved_nodes(forward))


def test_symbolic_sizes_are_saved_as_sizes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().mean()

    joint = trace_joint(function, None, torch.randn(6, 8), torch.randn(8, 8), dynamic=True)
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=0.0)
    sizes = [node for node in saved_nodes(forward) if isinstance(node.meta["val"], torch.SymInt)]
    assert sizes
    placeholders = backward.graph.find_nodes(op="placeholder")
    assert all(isinstance(node.meta["val"], torch.SymInt) for node in placeholders[: len(sizes)])
    joint.check(forward, backward)


def test_random_ops_are_never_merged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(x, 0.5) * F.dropout(x, 0.5)).sum()

    joint = trace_joint(function, None, torch.randn(64), decompose=False)
    for budget in (1.0, 0.0):
        forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=budget)
        drawn = [node for node in forward.graph.nodes if "dropout" in str(node.target) or "rand" in str(node.target)]
        assert len(drawn) == 2
        joint.check(forward, backward)


def test_equal_ops_are_computed_once() -> None:
    joint = trace_joint(lambda x: (x.sin() * x.sin()).sum(), None, torch.randn(8))
    forward, _ = wholestep.partition(joint.module, num_fwd_outputs=1)
    assert calls(forward, torch.ops.aten.sin.default) == 1


@pytest.mark.parametrize("widths", [(32, 32, 32, 32), (64, 16, 48, 8)])
def test_chains_of_products_at_each_budget(widths: tuple[int, ...]) -> None:
    weights = [torch.randn(a, b) / a for a, b in itertools.pairwise(widths)]

    def function(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = torch.tanh(x @ w)
        return x.sum()

    joint = trace_joint(function, None, torch.randn(128, widths[0]), *weights)
    flops: list[int] = []
    for budget in BUDGETS:
        result = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=budget)
        joint.check(result.forward, result.backward)
        flops.append(result.choice.outcome.flops)
    assert flops[0] == 0
    assert flops == sorted(flops)


def test_attention_is_kept_rather_than_a_linear_of_equal_size() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 2, 512, 16)
        a = F.scaled_dot_product_attention(q, q, q).reshape(1024, 16)
        return torch.tanh(torch.tanh(x @ w) + a).square().sum()

    joint = trace_joint(function, None, torch.randn(1024, 16), torch.randn(16, 16), decompose=False)
    result = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=0.35)
    repeated = {node.target for node in result.backward.graph.nodes}
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default not in repeated
    joint.check(result.forward, result.backward)


# Checkpoints in what `torch.compile` traces


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ w).sin() @ w)


def in_one_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(checkpoint(block, x, w, use_reentrant=False)).sum()


def in_two_regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = checkpoint(block, x, w, use_reentrant=False)
    return checkpoint(block, x, w, use_reentrant=False).sum()


def traced(function: Callable[..., torch.Tensor]) -> Joint:
    return trace_joint(function, None, torch.randn(32, 8), torch.randn(8, 8))


OPTIONS = ({"solver": "auto"}, {"solver": "default"}, {"solver": "mincut"}, {"solver": "mincut", "rules": BanRules()})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_checkpoint_region_runs_again_whatever_the_solver(options: dict[str, Any]) -> None:
    joint = traced(in_one_region)
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, **options)
    joint.check(forward, backward)
    saved = {node.name for node in saved_nodes(forward)}
    assert saved - {"tanh_2"} == {"primals_1", "primals_2", "tanh_1"}  # tanh_1 leaves the region, tanh_2 is behind it
    assert ("tanh_2" in saved) == (options["solver"] != "mincut")
    assert calls(backward, torch.ops.aten.sin.default) == 1
    assert calls(backward, torch.ops.aten.mm.default) == 4 + 1  # gradients, and the region's first product


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_border_of_two_adjacent_regions_is_saved(options: dict[str, Any]) -> None:
    joint = traced(in_two_regions)
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, **options)
    joint.check(forward, backward)
    saved = {node.name for node in saved_nodes(forward)}
    assert saved == {"primals_1", "primals_2", "tanh_1", "tanh_3"}
    assert calls(backward, torch.ops.aten.mm.default) == 8 + 2


def selective(depth: int = 1, **policies: CheckpointPolicy) -> Callable[..., torch.Tensor]:
    """Regions in which ops have a policy by name, `PREFER_RECOMPUTE` if none."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return policies.get(op.__name__.split(".")[0], CheckpointPolicy.PREFER_RECOMPUTE)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for _ in range(depth):
            x = checkpoint(block, x, w, use_reentrant=False, context_fn=contexts)
        return torch.tanh(x).sum()

    return function


@pytest.mark.parametrize("options", [{"memory_budget": 0.0}, {"solver": "default"}, {"solver": "mincut"}], ids=str)
def test_must_save_is_saved_whatever_the_budget(options: dict[str, Any]) -> None:
    joint = traced(selective(mm=CheckpointPolicy.MUST_SAVE))
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, **options)
    joint.check(forward, backward)
    assert torch.ops.aten.mm.default in {node.target for node in saved_nodes(forward)}
    assert calls(backward, torch.ops.aten.mm.default) == 4  # gradients; no product runs again
    assert calls(backward, torch.ops.aten.sin.default) == 1


def test_preferences_yield_to_the_budget_and_obligations_do_not() -> None:
    joint = traced(selective(4, mm=CheckpointPolicy.PREFER_SAVE, sin=CheckpointPolicy.MUST_RECOMPUTE))
    for solver in ("auto", "mincut"):
        forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, solver=solver)
        joint.check(forward, backward)
        assert calls(backward, torch.ops.aten.mm.default) == 16  # gradients
        assert calls(backward, torch.ops.aten.sin.default) == 4
    forward, backward = wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=0.0)
    joint.check(forward, backward)
    assert calls(backward, torch.ops.aten.mm.default) > 16
    assert calls(backward, torch.ops.aten.sin.default) >= 4


def test_dropout_in_a_checkpoint_region_is_replayed_or_saved() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x, w: F.dropout(x @ w, 0.5).sin() @ w, x, w, use_reentrant=False).square().sum()

    joint = traced(function)
    for fusing in (False, True):  # a compiler that fuses has no replays
        result = partition_joint(joint.module, num_fwd_outputs=1, fusing=fusing)
        joint.check(result.forward, result.backward)
        assert sum(isinstance(node.target, Replay) for node in result.backward.graph.nodes) == (not fusing)
        assert not calls(result.backward, torch.ops.aten.rand.default)


@needs_compiler
def test_inductor_as_the_backend() -> None:
    model = network(dropout=0.0)
    reference = network(dropout=0.0)
    x = torch.randn(8, 16)
    compiled = torch.compile(model, backend=wholestep.inductor(memory_budget=0.2))
    loss = compiled(x).square().sum()
    loss.backward()
    expected = reference(x).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@needs_compiler
def test_inductor_with_dropout_keeps_euler() -> None:
    """Homogeneous in each weight: <w, w.grad> is the loss, whatever the masks, unless the backward has others."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = F.dropout(torch.relu(layer(x)), 0.3)
        return x.sum()

    for budget in (1.0, 0.4, 0.0):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=wholestep.inductor(memory_budget=budget))
        layers.zero_grad()
        loss = compiled(torch.rand(64, 16))
        loss.backward()
        for parameter in layers.parameters():
            assert parameter.grad is not None
            torch.testing.assert_close((parameter * parameter.grad).sum(), loss, rtol=1e-4, atol=1e-4)
