"""Classes of ops and rules about second runs: each switch changes what is saved, none changes a gradient."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.joint import Joint, trace_joint
from torch import fx, nn

import wholestep
from wholestep import BanRules, BudgetError, WholestepError
from wholestep.graph import Replay
from wholestep.remat import Partition, partition_joint
from wholestep.remat.classes import OpClass, classify

aten = torch.ops.aten
Function = Callable[..., torch.Tensor]

ALL, NONE = BanRules(), BanRules.none()
RULES = [field.name for field in fields(BanRules) if isinstance(field.default, bool)]
CHEAP = OpClass(fusible=True, recomputable=True)


@torch.library.custom_op("wholestep_tests::doubled", mutates_args=(), tags=(torch.Tag.pointwise,))
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda context, gradient: gradient * 2)


# Classes


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node of a call, with values; tensors among the arguments become inputs."""
    graph = fx.Graph()

    def node_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            placeholder = graph.placeholder("x")
            placeholder.meta["val"] = value
            return placeholder
        return [node_of(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(node_of(arg) for arg in args), kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node


X = torch.ones(4, 4)
HEADS = torch.ones(1, 1, 4, 4)
IMAGE = torch.ones(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.mm.default, (X, X), OpClass(compute_intensive=True)),
        (aten.addmm.default, (X, X, X), OpClass(compute_intensive=True)),
        (
            aten.convolution.default,
            (IMAGE, IMAGE, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            OpClass(compute_intensive=True),
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (HEADS, HEADS, HEADS),
            OpClass(compute_intensive=True),
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (HEADS, HEADS, HEADS, 0.0),
            OpClass(compute_intensive=True),
        ),
        (aten.relu.default, (X,), CHEAP),
        (aten.index.Tensor, (X, [torch.tensor([0])]), CHEAP),
        (aten.full.default, ([4], 0.0), CHEAP),
        (aten.zeros.default, ([4],), CHEAP),
        (aten.cat.default, ([X, X],), OpClass(fusible=True)),
        (aten.view.default, (X, [16]), OpClass(fusible=True, recomputable=True, view=True)),
        (aten._unsafe_view.default, (X, [16]), OpClass(fusible=True, recomputable=True, view=True)),
        (aten.native_dropout.default, (X, 0.5, True), OpClass(fusible=True, random=True)),
        (aten.rand_like.default, (X,), OpClass(fusible=True, random=True)),
        (aten.multinomial.default, (X, 1), OpClass(random=True)),
        (aten.sum.dim_IntList, (X, [1]), OpClass(fusible=True, recomputable=True, reduction=True)),
        (torch.ops.prims.sum.default, (X, [1]), OpClass(fusible=True, recomputable=True, reduction=True)),
        (aten.max.dim, (X, 1), OpClass(fusible=True, recomputable=True, reduction=True)),
        (aten._softmax.default, (X, 1, False), OpClass()),
        (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), OpClass()),
        (aten.sort.default, (X,), OpClass()),
        (torch.ops.wholestep_tests.doubled.default, (X,), OpClass()),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else None,
)
def test_classes(target: Any, args: tuple[Any, ...], expected: OpClass) -> None:
    assert classify(call(target, *args)) == expected


def test_attention_with_dropout_is_random_as_well() -> None:
    graph = fx.Graph()
    query = graph.placeholder("query")
    query.meta["val"] = HEADS
    node = graph.call_function(aten._scaled_dot_product_flash_attention.default, (query, query, query, 0.1))
    node.meta["val"] = (HEADS,)
    assert classify(node) == OpClass(compute_intensive=True, random=True)


def test_collectives_inputs_items_and_sizes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    reduced.meta["val"] = X
    assert classify(x) == OpClass()
    assert classify(reduced) == OpClass()
    parts = graph.call_function(aten.var_mean.correction, (x, [0]))
    item = graph.call_function(operator.getitem, (parts, 0))
    assert classify(item) == OpClass(fusible=True, recomputable=True, view=True)
    size = graph.call_function(operator.mul, (4, 4))
    assert classify(size) == CHEAP


# Rules


def product_of_cheap(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ w).sum()


def far_apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    near = x.sin()
    return (near + torch.tanh(near.cos() @ w)).sin().sum()


def long_chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = x.sin()
    return x.sum()


# By rule: a function, its inputs, rules to begin with, and the ops whose results are saved if the rule holds, if not.
CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...], BanRules, list[str], list[str]]] = {
    "not_in_allow_list": (lambda x: torch.cat([x.sin(), x]).sin().sum(), (torch.randn(64),), ALL, ["cat"], []),
    "materialized_in_backward": (product_of_cheap, (torch.randn(8, 8), torch.randn(8, 8)), ALL, ["sin"], []),
    "reductions": (lambda x: x.sin().sum(1).sin().sum(), (torch.randn(64, 32),), ALL, ["sum"], []),
    "used_far_apart": (
        far_apart,
        (torch.randn(8, 8), torch.randn(8, 8)),
        ALL,
        ["add", "cos", "tanh"],
        ["cos", "tanh"],
    ),
    "long_fusible_chains": (long_chain, (torch.randn(64),), replace(ALL, max_chain=5), ["sin"], []),
}


@functools.cache
def joint_of(rule: str) -> Joint:
    function, inputs, *_ = CASES[rule]
    return trace_joint(function, None, *inputs)


def cut(joint: Joint, rules: BanRules | None, **options: Any) -> Partition:
    """A partition that was checked against the uncut graph and against autograd."""
    result = partition_joint(joint.module, num_fwd_outputs=1, rules=rules, **{"solver": "mincut", **options})
    joint.check(result.forward, result.backward)
    return result


def saved_nodes(result: Partition) -> list[fx.Node]:
    [output] = result.forward.graph.find_nodes(op="output")
    return [item for item in output.args[0][1:] if isinstance(item, fx.Node)]


def saved(result: Partition) -> list[str]:
    """Names of the ops whose results are saved, without inputs."""
    ops = [node.target for node in saved_nodes(result) if node.op == "call_function"]
    return sorted(str(op).split(".")[1] for op in ops)


def repeated(result: Partition) -> set[str]:
    """Names of the forward's calls that the backward makes again."""
    forward, backward = (
        {node.name for node in half.graph.nodes if node.op == "call_function"}
        for half in (result.forward, result.backward)
    )
    return forward & backward


@pytest.mark.parametrize("rule", RULES)
def test_a_switch_changes_what_is_saved(rule: str) -> None:
    _, _, rules, with_rule, without_rule = CASES[rule]
    joint = joint_of(rule)
    held, lifted = cut(joint, rules), cut(joint, replace(rules, **{rule: False}))
    assert saved(held) == with_rule
    assert saved(lifted) == without_rule
    assert any(reason.startswith(f"{rule}: ") for reason in held.banned.values())
    assert not any(reason.startswith(rule) for reason in lifted.banned.values())


@pytest.mark.parametrize("rule", RULES)
def test_other_switches_do_not_matter_there(rule: str) -> None:
    """On its own, each rule bans what it banned in the company of the others."""
    _, _, rules, with_rule, without_rule = CASES[rule]
    alone = replace(NONE, max_chain=rules.max_chain, **{rule: True})
    together, apart = cut(joint_of(rule), rules), cut(joint_of(rule), alone)
    bans = [{op: why for op, why in result.banned.items() if why.startswith(rule)} for result in (together, apart)]
    assert bans[0] == bans[1]
    assert set(with_rule) - set(without_rule) <= set(saved(apart))


@pytest.mark.parametrize("rule", RULES)
def test_aggressive_lifts_them_all_and_no_rules_are_the_same(rule: str) -> None:
    lifted, none = cut(joint_of(rule), NONE), cut(joint_of(rule), None)
    assert saved(lifted) == saved(none)
    assert lifted.choice == none.choice
    assert all(reason.startswith("compute_intensive") for reason in lifted.banned.values())


def test_reasons() -> None:
    assert cut(joint_of("used_far_apart"), ALL).banned == {
        "cos": "materialized_in_backward: mm_1 reads it from memory",
        "mm": "compute_intensive: 1024 flops",
        "add": "used_far_apart: it reads sin again behind mm",
        "sum_1": "reductions: 4 bytes made of 256",
    }
    allowed = cut(joint_of("not_in_allow_list"), ALL).banned
    assert allowed["cat"] == "not_in_allow_list: aten.cat.default is not on it"
    chain = cut(joint_of("long_fusible_chains"), replace(NONE, long_fusible_chains=True, max_chain=5)).banned
    assert chain == dict.fromkeys(("sin_5", "sin_11"), "long_fusible_chains: it comes behind 5 fusible ops in a row")


def test_thresholds() -> None:
    joint = joint_of("reductions")  # 32 to 1
    assert saved(cut(joint, replace(ALL, min_reduction=32))) == ["sum"]
    assert saved(cut(joint, replace(ALL, min_reduction=33))) == []
    joint = joint_of("long_fusible_chains")  # 12 of them
    assert saved(cut(joint, replace(ALL, max_chain=12))) == []
    assert saved(cut(joint, replace(ALL, max_chain=3))) == ["sin", "sin"]


def test_a_chain_begins_anew_behind_what_another_rule_has_banned() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
        product = x @ w
        for _ in range(4):
            x = x.sin()
        return product.sum() + x.sum()

    joint = trace_joint(function, None, torch.randn(8, 8), torch.randn(8, 8))
    rules = replace(ALL, used_far_apart=False, max_chain=6)
    assert cut(joint, rules).banned["sin_3"] == "materialized_in_backward: mm_1 reads it from memory"
    assert "long_fusible_chains" not in str(cut(joint, rules).banned)
    assert "long_fusible_chains" in str(cut(joint, replace(rules, materialized_in_backward=False)).banned)


class Gram(torch.autograd.Function):
    """Its backward has a product that needs no tangent."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        sine = x.sin()
        context.save_for_backward(sine)
        return sine.sum()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        [sine] = context.saved_tensors
        return (sine.t() @ sine) * gradients[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_what_only_the_backward_needs_counts_as_the_backward() -> None:
    joint = trace_joint(lambda x: Gram.apply(x), None, torch.randn(8, 8))
    result = cut(joint, ALL)
    assert result.banned["sin"] == "materialized_in_backward: mm reads it from memory"
    assert saved(result) == ["sin"]


def branching(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(F.dropout(x, 0.3) @ w, (16,))
    return (y + F.gelu(y @ w).cumsum(0)).softmax(-1).square().sum()


@pytest.mark.parametrize("solver", ["mincut", "greedy", "dp", "ilp"])
@pytest.mark.parametrize("rules", [ALL, NONE, *(replace(ALL, **{rule: False}) for rule in RULES)], ids=str)
def test_gradients_do_not_depend_on_rules(rules: BanRules, solver: str) -> None:
    joint = _branching_joint()
    result = cut(joint, rules, solver=solver, memory_budget=0.3)  # random: compared with the uncut graph, bit for bit
    assert not repeated(result) & set(result.banned)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_rules_hold_for_a_compiler_that_fuses(budget: float) -> None:
    result = cut(_branching_joint(), ALL, solver="greedy", memory_budget=budget, fusing=True)
    assert not repeated(result) & set(result.banned)


@functools.cache
def _branching_joint() -> Joint:
    return trace_joint(branching, None, torch.randn(64, 16), torch.randn(16, 16))


def test_gradients_are_those_of_eager_bit_for_bit() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w).sin() @ w).sum()

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    joint = trace_joint(function, None, x, w, decompose=False)
    expected = torch.autograd.grad(function(x, w), (x, w))
    for rules in (ALL, NONE):
        result = cut(joint, rules)
        _, gradients = joint.run(result.forward, result.backward)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected))


def test_random_ops_are_saved_or_replayed() -> None:
    joint = trace_joint(lambda x: (F.dropout(x.sin(), 0.5) * x).square().sum(), None, torch.randn(4096))
    held, lifted = cut(joint, ALL), cut(joint, NONE)
    assert held.banned["rand"] == "not_in_allow_list: aten.rand.default is not on it"
    assert not [node for node in held.backward.graph.nodes if isinstance(node.target, Replay)]
    assert "rand" not in lifted.banned
    assert [node for node in lifted.backward.graph.nodes if isinstance(node.target, Replay)]
    for result in (held, lifted):
        assert not [node for node in result.backward.graph.nodes if node.target is aten.rand.default]


def test_operators_of_others_never_run_again_whatever_the_rules() -> None:
    joint = trace_joint(lambda x: doubled(x).sin().sum(), None, torch.randn(64))
    result = cut(joint, NONE)
    assert result.banned["doubled"] == "it may have effects"
    assert saved(result) == ["doubled"]


def test_knapsacks_stay_within_budget_and_rules() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)),) * 3)
    joint = trace_joint(lambda x: model(x).square().sum(), model, torch.randn(128, 16))
    everything = partition_joint(joint.module, num_fwd_outputs=1, solver="default")
    resident, peak = everything.joint.problem.resident_bytes, everything.choice.outcome.peak_bytes
    half = cut(joint, ALL, solver="greedy", memory_budget=0.5)
    assert half.choice.outcome.peak_bytes < peak
    assert half.choice.outcome.flops > 0
    assert not repeated(half) & set(half.banned)
    with pytest.raises(BudgetError) as caught:
        cut(joint, ALL, solver="greedy", memory_budget=resident + 1000)
    unruled = partition_joint(joint.module, num_fwd_outputs=1, memory_budget=0.0)
    assert caught.value.smallest_bytes > unruled.choice.outcome.peak_bytes + resident
    smallest = cut(joint, ALL, solver="greedy", memory_budget=caught.value.smallest_bytes)
    assert smallest.choice.outcome.peak_bytes + resident <= caught.value.smallest_bytes


def test_symbolic_sizes_are_saved_as_sizes_under_rules_too() -> None:
    joint = trace_joint(far_apart, None, torch.randn(6, 8), torch.randn(8, 8), dynamic=True)
    result = cut(joint, ALL)
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in saved_nodes(result))
    assert {"add", "cos", "tanh"} <= set(saved(result))


# Saved tensors, with all rules and with none; torch 2.13's own partitioner saves as many of each.
COUNTS: dict[str, tuple[Function, list[tuple[int, ...]], int, int]] = {
    "pointwise": (lambda x: x.sin().cos().exp().sum(), [(64,)], 1, 1),
    "product": (lambda x, w: (x @ w).sum(), [(8, 8), (8, 8)], 2, 2),
    "product, pointwise": (lambda x, w: (x @ w).sin().sin().sum(), [(8, 8), (8, 8)], 3, 3),
    "mlp": (lambda x, a, b: (F.gelu(x @ a) @ b).square().sum(), [(8, 8), (8, 16), (16, 4)], 6, 5),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b).square().sum(), [(64, 32), (32,), (32,)], 5, 3),
    "softmax": (lambda x: F.softmax(x, -1).square().sum(), [(64, 32)], 3, 1),
    "sort": (lambda x: x.sin().sort()[0].sin().sum(), [(64,)], 3, 1),
    "convolution, batch norm": (
        lambda x, w: F.relu(F.batch_norm(F.conv2d(x, w), None, None, training=True)).square().sum(),
        [(2, 3, 8, 8), (4, 3, 3, 3)],
        5,
        3,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_saved_tensors_of_small_functions(name: str) -> None:
    function, shapes, with_rules, without = COUNTS[name]
    joint = trace_joint(function, None, *(torch.randn(shape) for shape in shapes))
    assert len(saved_nodes(cut(joint, ALL))) == with_rules
    assert len(saved_nodes(cut(joint, NONE))) == without


# Options


@pytest.mark.parametrize("solver", ["auto", "default"])
def test_rules_are_refused_by_solvers_that_do_not_ask_them(solver: str) -> None:
    message = f"the solver '{solver}' takes no rules; mincut, greedy, dp, ilp do"
    with pytest.raises(WholestepError, match=message):
        wholestep.partition(joint_of("reductions").module, num_fwd_outputs=1, solver=solver, rules=ALL)
    with pytest.raises(WholestepError, match=message):
        wholestep.inductor(solver=solver, rules=ALL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BanRules(reductions=1), "reductions is a switch, True or False, not 1"),  # type: ignore[arg-type]
        (lambda: BanRules(max_chain=0), "max_chain is a number, 1 or more, not 0"),
        (lambda: BanRules(min_reduction=True), "min_reduction is a number, 1 or more, not True"),
        (lambda: wholestep.inductor(solver="mincut", rules="all"), "rules are a wholestep.BanRules, not 'all'"),  # type: ignore[arg-type]
    ],
)
def test_rules_that_make_no_sense(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(WholestepError, match=message):
        make()


def test_rules_for_inductor() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    backend = wholestep.inductor(solver="mincut", rules=ALL)
    torch.compile(far_apart, backend=backend)(x, w).backward()
    [expected] = torch.autograd.grad(far_apart(x, w), w)
    assert w.grad is not None
    torch.testing.assert_close(w.grad, expected)
