"""Buckets: one message for many gradients, of one kind, in real bytes, whatever their shape (COMM-2)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.simulated import Trial
from torch import Tensor, fx, nn
from torch.optim import SGD, Optimizer

from wholestep.comm import find_blocks
from wholestep.comm.bucket import fill_buckets, format_groups, parse_groups
from wholestep.errors import PassError
from wholestep.graph import Phase, StepGraph, ops
from wholestep.passes import Pipeline, run_passes

aten = torch.ops.aten
MEAN = "allreduce{group=g,world=2}"
SUM = "allreduce{group=g,world=2,average=false}"


class Parts(nn.Module):
    """A parameter for each given tensor; each scales its own share of the input's sum."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for parameter in self.parameters():
            total = total + (parameter * x.mean()).float().tanh().sum()
        return total


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def trial(model: nn.Module, x: Tensor = X, function: Callable[..., Any] = step) -> Trial:
    torch.manual_seed(0)
    return Trial.of(function, model, SGD(model.parameters(), lr=0.1, foreach=False), x)


@functools.cache
def three() -> Trial:
    return trial(Parts(a=torch.ones(2), b=torch.ones(3, 2), c=torch.ones(4)))


def members(graph: StepGraph) -> list[list[str]]:
    """Keys of each bucket, by bucket number."""
    issues = sorted((n for n in graph.calls() if n.target is ops.ALL_REDUCE), key=lambda node: node.meta["bucket"])
    return [[key for key, _ in node.meta["reduces"]] for node in issues]


def comm_code(graph: StepGraph) -> str:
    lines: list[str] = []
    for node in graph.calls(Phase.COMM):
        arguments = ", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
        lines.append(f"{node.name} = {getattr(node.target, '__name__', node.target)}({arguments})")
    return "\n".join(lines) + "\n"


# The rewrite


def test_two_gradients_before_and_after() -> None:
    tested = trial(Parts(a=torch.ones(2), b=torch.ones(3, 2)))
    assert_expected_inline(
        comm_code(tested.after(MEAN)),
        """\
mul_tensor = mul.Tensor(mul_4, 0.5)
all_reduce_default = all_reduce.default(mul_tensor, sum, g)
wait_tensor_default = wait_tensor.default(all_reduce_default)
mul_tensor_1 = mul.Tensor(mul_5, 0.5)
all_reduce_default_1 = all_reduce.default(mul_tensor_1, sum, g)
wait_tensor_default_1 = wait_tensor.default(all_reduce_default_1)
""",
    )
    assert_expected_inline(
        comm_code(tested.after(f"{MEAN},bucket")),
        """\
view_default = view.default(mul_4, [6])
cat_default = cat.default([view_default, mul_5])
mul_tensor_2 = mul.Tensor(cat_default, 0.5)
all_reduce_default_2 = all_reduce.default(mul_tensor_2, sum, g)
wait_tensor_default_2 = wait_tensor.default(all_reduce_default_2)
split_with_sizes_default = split_with_sizes.default(wait_tensor_default_2, [6, 2])
getitem = getitem(split_with_sizes_default, 0)
getitem_1 = getitem(split_with_sizes_default, 1)
view_default_1 = view.default(getitem, [3, 2])
""",
    )


def test_one_collective_for_each_bucket() -> None:
    tested = three()
    for groups in ("a b c", "c b a", "a;b;c", "b c;a", "c;a b"):
        after = tested.after(f'{MEAN},bucket{{groups="{groups}"}}')
        assert members(after) == parse_groups(groups)
        assert len(find_blocks(after)) == len(parse_groups(groups))
        tested.assert_same(after, average=0.5)


def test_a_bucket_of_one_is_not_copied_together() -> None:
    after = trial(Parts(a=torch.ones(5))).after(f"{MEAN},bucket")
    assert_expected_inline(
        comm_code(after),
        """\
mul_tensor_1 = mul.Tensor(mul_3, 0.5)
all_reduce_default_1 = all_reduce.default(mul_tensor_1, sum, g)
wait_tensor_default_1 = wait_tensor.default(all_reduce_default_1)
""",
    )


def test_sums() -> None:
    tested = three()
    for groups in ("a b c", "a;b;c", "a c;b"):
        after = tested.after(f'{SUM},bucket{{groups="{groups}"}}')
        # What is sent is never the gradient's own memory, which the step hands out or still reads.
        for block in find_blocks(after):
            assert block.inputs[0].meta["phase"] is Phase.COMM
        tested.assert_same(after, average=1.0)


def test_gradients_are_noted_behind_the_bucket() -> None:
    after = three().after(f"{MEAN},bucket")
    [block] = find_blocks(after)
    reduced = {name for node in block.unpacking for name in node.meta.get("reduced_gradient_of", ())}
    assert reduced == {"a", "b", "c"}
    assert block.collective.meta["bucket"] == block.wait.meta["bucket"] == 0


# Shapes and layouts


def transposed(*shape: int) -> Tensor:
    return torch.ones(*reversed(shape)).permute(*reversed(range(len(shape))))


class Dense(nn.Module):
    """Convolutions in channels_last, a transposed product, a scalar, nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2, bias=False)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.first = nn.Parameter(transposed(4, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.to(memory_format=torch.channels_last)).mean((2, 3))
        return torch.cat([(hidden @ self.first).flatten() * self.scale, self.empty.flatten()])


def test_scalars_channels_last_and_transposed_gradients() -> None:
    tested = trial(Dense(), torch.randn(2, 3, 4, 4))
    gradients = tested.graph.gradients
    assert not all(node.meta["val"].is_contiguous() for node in gradients.values())
    for options in ("", '{groups="scale;first conv.weight"}', '{groups="conv.weight first scale"}'):
        after = tested.after(f"{MEAN},bucket{options}")
        assert "empty" not in [key for keys in members(after) for key in keys]
        for block in find_blocks(after):
            assert block.shape == (
                sum(gradients[key].meta["val"].numel() for key, _ in block.collective.meta["reduces"]),
            )
        # Every gradient comes back with the layout it had.
        for name, node in gradients.items():
            reduced = after.results[f"grad.{name}"]
            assert reduced.meta["val"].stride() == node.meta["val"].stride()
        tested.assert_same(after, average=0.5)


def test_dense_gradients_travel_as_they_lie_in_memory() -> None:
    """A view where it is possible: at most one copy, that into the bucket."""
    after = trial(Dense(), torch.randn(2, 3, 4, 4)).after(f"{MEAN},bucket")
    copies = [node for node in after.calls(Phase.COMM) if not ops.is_view(node.target)]
    kinds = {node.target for node in copies} - {ops.ALL_REDUCE, ops.WAIT, operator.getitem}
    assert kinds == {aten.cat.default, aten.mul.Tensor}


def test_a_gradient_with_gaps_is_copied() -> None:
    """Expanded gradients have strides of 0: not dense."""

    def expanding(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model.get_parameter("a").sum().backward()
        optimizer.step()

    tested = trial(Parts(a=torch.ones(3, 2)), function=expanding)
    tested.assert_same(tested.after(f"{MEAN},bucket"), average=0.5)
    tested.assert_same(tested.after(f"{SUM},bucket"), average=1.0)


# What never travels together


def test_dtypes_are_apart_and_their_bytes_real() -> None:
    model = Parts(a=torch.ones(8), h=torch.ones(8).bfloat16(), b=torch.ones(8), i=torch.ones(4).bfloat16())
    tested = trial(model)
    after = tested.after(f"{MEAN},bucket")
    assert sorted(map(sorted, members(after))) == [["a", "b"], ["h", "i"]]
    sizes = {block.dtype: block.num_bytes for block in find_blocks(after)}
    assert sizes == {torch.float32: 64, torch.bfloat16: 24}
    tested.assert_same(after, average=0.5)
    with pytest.raises(PassError, match="'a' and others of its bucket differ in group, reduce op, dtype or device"):
        tested.after(f'{MEAN},bucket{{groups="a h;b i"}}')


def test_half_the_bytes_fill_half_a_bucket() -> None:
    """Limits count bytes, not elements."""
    limit = "bucket{mb=0.00006,first_mb=0.00006}"  # 62 bytes
    wide = trial(Parts(**{name: torch.ones(8) for name in "abcd"})).after(f"{MEAN},{limit}")
    half = trial(Parts(**{name: torch.ones(8).bfloat16() for name in "abcd"})).after(f"{MEAN},{limit}")
    assert [len(keys) for keys in members(wide)] == [1, 1, 1, 1]
    assert [len(keys) for keys in members(half)] == [3, 1]


def test_waves_are_apart() -> None:
    def two_rounds(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        for _ in range(2):
            step(model, optimizer, x)

    tested = trial(Parts(a=torch.ones(2), b=torch.ones(3)), function=two_rounds)
    after = tested.after(f"{MEAN},bucket")
    assert [sorted(keys) for keys in members(after)] == [["a#1", "b#1"], ["a", "b"]]
    tested.assert_same(after, average=0.5)
    with pytest.raises(PassError, match="not all there before the first of them is used"):
        tested.after(f'{MEAN},bucket{{groups="a#1 a;b#1 b"}}')


def test_groups_and_reductions_are_apart() -> None:
    graph = three().after(MEAN)
    other = next(node for node in graph.calls() if node.target is ops.ALL_REDUCE)
    [(key, _)] = other.meta["reduces"]
    other.args = (*other.args[:2], "others")
    after = run_passes(graph, Pipeline.parse("bucket"))
    assert [key] in members(after)
    assert len(members(after)) == 2


# Refusals


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("a b c d", "'d'.* has no gradient"),
        ("a b", "'c' is left out"),
        ("a b;b c", "'b' is named twice"),
    ],
)
def test_groups_that_do_not_fit(groups: str, message: str) -> None:
    with pytest.raises(PassError, match=f"the buckets do not fit this step's gradients: {message}"):
        three().after(f'{MEAN},bucket{{groups="{groups}"}}')


@pytest.mark.parametrize("size", ["inf", "0", "-1"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(PassError, match="sizes are megabytes, more than 0, not "):
        three().after(f"{MEAN},bucket{{mb={size}}}")


def test_buckets_need_messages() -> None:
    with pytest.raises(PassError, match="'bucket' requires 'allreduce'"):
        three().after("bucket")


# Filling


def test_a_small_first_bucket_then_full_ones() -> None:
    gradients = [(str(index), 10, "kind") for index in range(8)]
    assert fill_buckets(gradients, 30, 10) == [["0"], ["1", "2", "3"], ["4", "5", "6"], ["7"]]
    assert fill_buckets(gradients, 1, 1) == [[str(index)] for index in range(8)]
    assert fill_buckets(gradients, 1000, 1000) == [[str(index) for index in range(8)]]
    assert fill_buckets([], 10, 10) == []


def test_biases_ride_with_their_weights() -> None:
    sizes = [("w2", 20), ("b2", 1), ("w1", 20), ("b1", 1)]
    assert fill_buckets([(key, size, "kind") for key, size in sizes], 20, 20) == [["w2"], ["b2", "w1"], ["b1"]]


def test_kinds_have_buckets_of_their_own_ordered_by_their_last_gradient() -> None:
    gradients = [("a", 4, "x"), ("b", 4, "y"), ("c", 4, "x"), ("d", 4, "y"), ("e", 4, "x")]
    assert fill_buckets(gradients, 100, 100) == [["b", "d"], ["a", "c", "e"]]
    assert fill_buckets(gradients, 8, 8) == [["a", "c"], ["b", "d"], ["e"]]


def test_groups_are_text() -> None:
    for groups in ([["a.weight", "a.bias"], ["b#1"]], [["a"]]):
        assert parse_groups(format_groups(groups)) == groups
        pipeline = Pipeline.parse(f'bucket{{groups="{format_groups(groups)}"}}')
        assert Pipeline.parse(str(pipeline)) == pipeline


# Into the bucket


def filled(model: nn.Module, x: Tensor, optimizing: str = "split_optimizer,overlap") -> tuple[Trial, StepGraph]:
    tested = trial(model, x)
    return tested, tested.after(f"{MEAN},bucket,{optimizing},reinplace,fill_buckets")


def test_the_backward_writes_into_the_bucket() -> None:
    tested, after = filled(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(3, 16))
    targets = [node.target for node in after.calls()]
    assert aten.cat.default not in targets
    assert aten.copy_.default not in targets
    [bucket] = [node for node in after.calls() if node.target is aten.empty.memory_format]
    written = [node for node in after.calls() if node.target in (aten.mm.out, aten.sum.IntList_out)]
    assert len(written) == 4
    assert all(bucket in _bases(node.kwargs["out"]) for node in written)
    tested.assert_same(tested.after(f"{MEAN},bucket,split_optimizer,overlap"), average=0.5)


def test_what_would_not_be_aligned_is_copied_in() -> None:
    """Kernels may add up in another order where memory is not aligned."""
    _, after = filled(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), torch.randn(3, 5))
    targets = [node.target for node in after.calls()]
    assert aten.cat.default not in targets
    assert (targets.count(aten.mm.out), targets.count(aten.copy_.default)) == (1, 3)


def test_a_gradient_that_somebody_else_reads_is_copied_in() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(16, 16)), nn.Parameter(torch.ones(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.scale).tanh() + self.shift

    def forgetful(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    tested = trial(Shift(), torch.randn(16, 16), forgetful)
    after = tested.after(f"{MEAN},bucket,overlap,reinplace,fill_buckets")
    assert [node.target for node in after.calls()].count(aten.copy_.default) == 1
    tested.assert_same(tested.after(f"{MEAN},bucket,overlap"), average=0.5)


def _bases(node: Any) -> list[fx.Node]:
    """A view and all it is a view of."""
    chain: list[fx.Node] = [node]
    while chain[-1].op == "call_function" and ops.is_view(chain[-1].target):
        chain.append(chain[-1].all_input_nodes[0])
    return chain
