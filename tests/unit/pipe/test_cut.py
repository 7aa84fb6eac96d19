"""What a cut graph is made of, and that it computes what the whole one does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cuts import CutRun, MicroStep, micro_step, zoo_step
from torch import Tensor, nn

from wholestep.errors import SplitError
from wholestep.pipe import Kind, build_schedule, plan_split
from wholestep.pipe.cut import CutGraph, Stage, cut
from wholestep.pipe.placement import find_anchors, forward_calls, place

aten = torch.ops.aten

NAMES = [
    "mlp",
    "gpt",
    "resnet",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "custom_function", "lstm")),
]
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zb-h2"]


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def features(count: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def cut_at(step: MicroStep, points: Sequence[str], **options: Any) -> CutGraph:
    return cut(step.graph, plan_split(step.captured, step.graph, points=points).borders, **options)


def run(step: MicroStep, parts: CutGraph, schedule: str = "1f1b") -> CutRun:
    return CutRun(step, parts).run(build_schedule(schedule, len(parts.stages), len(step.batches)))


def borders_of(step: MicroStep, data: st.DataObject) -> list[int]:
    count = len(forward_calls(step.graph))
    return sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=4)))


def travelling(parts: CutGraph) -> dict[str, int]:
    """Values that travel, with the stage that makes them."""
    return {name: parts.source[name] for name in parts.readers}


def op_counts(stage: Stage, kind: Kind) -> Counter[Any]:
    return Counter(node.target for node in stage.program(kind).graph.calls())


# Results


@settings(derandomize=True, database=None, deadline=None, max_examples=4)
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", ["replicate", "transmit"])
def test_any_borders_give_the_gradients_of_one_process(name: str, shared: Any, data: st.DataObject) -> None:
    step = zoo_step(name)
    parts = cut(step.graph, borders_of(step, data), shared=shared)
    finished = run(step, parts, data.draw(st.sampled_from(SCHEDULES)))
    finished.assert_like_eager()
    whole = run(step, cut(step.graph, []))
    for given_back, expected in zip(finished.outputs, whole.outputs, strict=True):
        assert given_back.keys() == expected.keys() == {0}
        torch.testing.assert_close(given_back[0], expected[0])


# Shape of the programs


@settings(derandomize=True, database=None, deadline=None, max_examples=6)
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_every_bound_call_is_in_one_program_and_reads_what_exists(name: str, data: st.DataObject) -> None:
    step = zoo_step(name)
    borders = borders_of(step, data)
    parts = cut(step.graph, borders)
    placement = place(step.graph, borders)
    names = {node.name for node in step.graph.calls()}
    free = {node.name for node in placement.free}
    homes: dict[str, list[int]] = {}
    for stage in parts.stages:
        for program in stage.programs:
            program.graph.verify()
            assert not free & {*program.values, *program.outputs}
            for node in program.graph.calls():
                homes.setdefault(node.name, []).append(stage.index)
    bound = {node.name: stage for node, stage in placement.stage_of.items()}
    sums = names - homes.keys() - free  # sums across stages, which no stage computes
    assert all(re.fullmatch(r"add(_\d+)?", name) for name in sums)
    for name, stages in homes.items():
        if name in bound:
            assert stages == [bound[name]]
    for stage in parts.stages:
        order = (stage.forward, stage.backward_input, stage.backward_weight)
        seen: set[str] = set()
        for program in order:
            outside = set(program.values) - seen
            assert outside <= parts.source.keys()
            assert not {name for name in outside if parts.source[name] == stage.index}
            seen |= set(program.outputs)
        assert set(stage.backward.values) <= set(stage.forward.outputs) | stage.wanted


MASKED = (aten.convolution_backward.default, aten.native_layer_norm_backward.default)


@settings(derandomize=True, database=None, deadline=None, max_examples=6)
@given(st.data())
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_nobody_waits_for_weight_gradients(name: str, data: st.DataObject) -> None:
    step = zoo_step(name)
    parts = cut(step.graph, borders_of(step, data))
    for stage in parts.stages:
        late = set(stage.backward_weight.outputs)
        assert not late & parts.readers.keys()
        assert late <= {*stage.gradients.values(), *stage.returns.values()}
        whole = {*stage.backward_input.outputs, *late}
        assert set(stage.backward.outputs) <= whole
        early, late_ops, found = (op_counts(stage, kind) for kind in (Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD))
        both = early + late_ops
        for target in MASKED:  # one op in a whole backward, two in its halves
            assert max(early[target], late_ops[target]) == found[target]
        views = {aten.t.default, aten.view.default, aten.transpose.int}
        ignored = {*views, *_rebuilt(step), *MASKED}
        assert {t: n for t, n in both.items() if t not in ignored} == {
            t: n for t, n in found.items() if t not in ignored
        }


def _rebuilt(step: MicroStep) -> set[Any]:
    """Ops of free values: a backward in two parts may have one twice."""
    return {node.target for node in place(step.graph, []).free}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.LayerNorm(4), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_gradients_of_inputs_and_weights_that_one_op_makes_are_made_apart() -> None:
    step = micro_step(Normed(), squared, features(2, 2, 2, 8))
    parts = cut_at(step, ["layers.3"])
    stage = parts.stages[1]
    for target in MASKED:
        masks: dict[Kind, list[Any]] = {
            kind: [node.args[-1] for node in stage.program(kind).graph.calls() if node.target is target]
            for kind in (Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD)
        }
        ((wanted,), (late,)) = masks[Kind.INPUT], masks[Kind.WEIGHT]
        assert list(wanted) == [True, False, False]
        assert late[0] is False
        assert late[1] is True
        assert masks[Kind.BACKWARD] == [[one or other for one, other in zip(wanted, late, strict=True)]]
    first = parts.stages[0]
    assert op_counts(first, Kind.INPUT) == Counter()
    run(step, parts, "zb-h1").assert_like_eager()


class Skipping(nn.Module):
    """The first layer's value is read by the second and the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x).tanh()
        third = self.layers[2](self.layers[1](first).tanh()).tanh()
        return self.layers[3](third + first)


def test_a_value_that_skips_stages_goes_straight_and_once_to_each_reader() -> None:
    step = micro_step(Skipping(), squared, features(3, 2, 4))
    parts = cut_at(step, ["layers.1", "layers.2", "layers.3"])
    (first,) = [name for name in parts.stages[0].forward.outputs if name in parts.readers]
    assert parts.source[first] == 0
    assert parts.readers[first] == (1, 2)  # the sum is before the last layer, so that is stage 2
    assert first not in parts.stages[1].forward.outputs
    assert sum(first in stage.forward.values for stage in parts.stages) == 2
    run(step, parts, "zb-h1").assert_like_eager()


class Tied(nn.Module):
    """One weight for both ends, transposed at one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).tanh())


def tied_step(num_batches: int = 3) -> MicroStep:
    batches = [torch.randint(8, (2, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(num_batches)]
    return micro_step(Tied(), squared, batches)


def test_stages_have_shares_of_a_shared_gradient() -> None:
    step = tied_step()
    parts = cut_at(step, ["middle", "head"])
    assert parts.holders["param.embedding.weight"] == (0, 2)
    assert [list(stage.gradients) for stage in parts.stages] == [
        ["param.embedding.weight"],
        ["param.middle.weight", "param.middle.bias"],
        ["param.embedding.weight"],
    ]
    assert not any(
        tuple(parts.stages[source].fakes[name].shape) == (8, 4) for name, source in travelling(parts).items()
    )
    finished = run(step, parts, "zb-h1")
    finished.assert_like_eager()
    shares = [finished.gradients[stage, "param.embedding.weight"] for stage in (0, 2)]
    assert all(share.abs().max() > 0 for share in shares)


def test_a_transmitted_parameter_belongs_to_the_first_stage() -> None:
    step = tied_step()
    parts = cut_at(step, ["middle", "head"], shared="transmit")
    assert parts.holders["param.embedding.weight"] == (0,)
    assert ["param.embedding.weight" in stage.slots for stage in parts.stages] == [True, False, False]
    assert [("param.embedding.weight" in stage.gradients) for stage in parts.stages] == [True, False, False]
    sent = [name for name in parts.stages[0].forward.outputs if parts.readers.get(name) == (2,)]
    assert [tuple(parts.stages[0].fakes[name].shape) for name in sent] == [(8, 4)]
    back = [name for name in parts.stages[2].backward_input.outputs if parts.readers.get(name) == (0,)]
    assert [tuple(parts.stages[2].fakes[name].shape) for name in back] == [(8, 4)]
    run(step, parts, "zb-h1").assert_like_eager()


class LateGradient(nn.Module):
    """The first use of the weight has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.first(x) * self.weight.detach().sum()
        return self.last(scaled) @ self.weight


def test_a_gradient_comes_home_to_the_stage_that_has_the_parameter() -> None:
    step = micro_step(LateGradient(), squared, features(3, 2, 4))
    parts = cut_at(step, ["last"], shared="transmit")
    assert parts.holders["param.weight"] == (0,)
    assert "param.weight" in parts.stages[0].gradients
    run(step, parts, "zb-h1").assert_like_eager()


# State


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(self.first(x)).tanh()))


def test_a_buffer_of_two_stages_is_refused_by_name() -> None:
    step = micro_step(SharedNorm(), squared, features(3, 4, 4))
    with pytest.raises(
        SplitError,
        match=r"buffer 'norm\.\w+' is changed by stage 1 and read by stage 0, .*: keep the modules that share it in",
    ):
        cut_at(step, ["second"])
    parts = cut(step.graph, [1])
    run(step, parts).assert_like_eager()
    assert len(step.graph.updates) == 3


class Fading(nn.Module):
    """Multiplies by a buffer, which it changes: the backward needs the value from before."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x) * self.scale)
        self.scale = self.scale * 0.5
        return y


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h2"])
def test_a_backward_sees_the_buffer_of_its_own_forward(schedule: str) -> None:
    step = micro_step(Fading(), squared, features(3, 2, 4))
    anchors, _ = find_anchors(step.graph)
    scale = anchors[step.graph.updates["buffer.scale"]]
    early = min(anchors[user] for user in step.graph.placeholder("buffer.scale").users)
    with pytest.raises(SplitError, match="buffer 'scale' is changed by stage 1 and read by stage 0"):
        cut(step.graph, [early + 1])
    for borders in ([early], [scale + 1]):
        run(step, cut(step.graph, borders), schedule).assert_like_eager()


class Copying(nn.Module):
    """Leaves its input in a buffer, and reads what was left."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh() + self.last)
        self.last = x
        return y


def test_a_buffer_may_become_a_part_of_the_batch() -> None:
    step = micro_step(Copying(), squared, features(3, 2, 4))
    parts = cut_at(step, ["second"])
    run(step, parts).assert_like_eager()


def test_an_argument_that_is_written_to_is_refused() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["count"].add_(1)
        return squared(model, batch["x"])

    step = micro_step(nn.Linear(4, 4), loss, [{"x": torch.ones(2, 4), "count": torch.zeros(1)}])
    with pytest.raises(SplitError, match=r"writes to batch\.batch\['count'\]: only buffers may change"):
        cut(step.graph, [1])


def test_gradients_from_before_are_refused() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    step = micro_step(model, squared, features(2, 2, 4))
    with pytest.raises(SplitError, match=r"reads grad\.\w+: gradients from before"):
        cut(step.graph, [1])


def test_gradients_of_arguments_are_refused() -> None:
    step = micro_step(nn.Linear(4, 4), squared, [torch.ones(2, 4, requires_grad=True)])
    with pytest.raises(SplitError, match=r"returns grad\.batch, the gradient of an argument: detach it first"):
        cut(step.graph, [1])


class Constant(torch.autograd.Function):
    """Its gradient is a part of the batch, no matter what comes back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return weight + x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class GivenGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Constant.apply(self.weight, x).tanh()) + self.weight


def test_a_gradient_that_is_a_part_of_the_batch_is_not_lost() -> None:
    step = micro_step(GivenGradient(), squared, features(3, 2, 4))
    run(step, cut_at(step, ["last"])).assert_like_eager()
    run(step, cut_at(step, ["last"], shared="transmit")).assert_like_eager()
