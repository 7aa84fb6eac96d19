"""The loss head in chunks: eager's numbers up to the order of sums, and logits that are never there all at once.

Most models run in double precision, where another order of sums is no more than 1e-12: any other change would show.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.heads import (
    LOSSES,
    TIGHT,
    Loss,
    Untied,
    case_of,
    double,
    mean_loss,
    shifted_loss,
    time_major_loss,
)
from tests.parity import assert_parity
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import wholestep
from wholestep import BudgetError, PassError, WholestepError, zoo
from wholestep.comm.overlap import own_nodes
from wholestep.cost import dominant_logits, measure_peak, profile_memory
from wholestep.graph import Phase, StepGraph
from wholestep.passes import ChunkLoss, Pipeline
from wholestep.remat.build import step_program
from wholestep.zoo import gpt
from wholestep.zoo.case import Batch, ZooCase

aten = torch.ops.aten

BATCH = 5
ROWS = 30


def assert_chunked(case: ZooCase, chunks: int | str, optimizer: str = "adamw_fused", **options: Any) -> Any:
    """Parity with eager in double precision, and that chunks were really made; returns the step."""
    compile_options = {"chunk_loss": chunks} | options.pop("compile_options", {})
    settings = {"steps": 4, "batch_sizes": [BATCH], "prepare": double, **TIGHT} | options
    step = assert_parity(case, optimizer, compile_options=compile_options, **settings)
    assert num_chunks(step.graph) > 1
    return step


def num_chunks(graph: StepGraph) -> int:
    return sum(node.target is aten._log_softmax.default for node in graph.calls())


def trained(case: ZooCase, batch_size: int = BATCH, step: Any = None, **options: Any) -> Any:
    """A step that has been called twice, and the arguments of a third call."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = case.make_batch(batch_size, 1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = wholestep.compile(step or train_step, **options)
    for _ in range(2):
        compiled(model, optimizer, batch)
    optimizer.zero_grad()
    return compiled, (model, optimizer, batch)


# Numbers


@pytest.mark.parametrize("name", LOSSES)
def test_every_step_is_eagers(name: str) -> None:
    step = assert_chunked(case_of(LOSSES[name]), 3)
    assert num_chunks(step.graph) == 3
    step.graph.verify()


@pytest.mark.parametrize("chunks", [7, 1000])
def test_chunks_need_not_divide_the_rows_and_may_be_single_rows(chunks: int) -> None:
    step = assert_chunked(case_of(model=Untied), chunks, steps=2)
    assert num_chunks(step.graph) == min(chunks, ROWS)
    sizes = [node.meta["val"].shape[0] for node in step.graph.calls() if node.target is aten._log_softmax.default]
    assert sum(sizes) == ROWS
    assert max(sizes) - min(sizes) <= 1


def test_as_many_rows_as_classes() -> None:
    assert_chunked(case_of(vocab_size=ROWS, width=ROWS), 4, steps=2)


def test_the_shift_leaves_out_rows_that_count_for_nothing() -> None:
    step = assert_chunked(case_of(shifted_loss), 3, steps=1)
    sizes = [node.meta["val"].shape[0] for node in step.graph.calls() if node.target is aten._log_softmax.default]
    assert sum(sizes) == BATCH * 5


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_whole_models(name: str) -> None:
    assert_chunked(zoo.get(name), 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "hf_bert"])
def test_hugging_face_models(name: str) -> None:
    """They compute the loss in float32, whatever the model is in."""
    assert_chunked(zoo.HF_CASES[name], 5, "sgd", steps=2, rtol=1e-6, atol=1e-9)


def test_a_head_of_which_only_the_bias_is_trained() -> None:
    def frozen(model: nn.Module) -> nn.Module:
        model.double().requires_grad_(False)
        model.get_parameter("head.bias").requires_grad_(True)
        return model

    step = assert_chunked(case_of(model=Untied), 3, steps=2, prepare=frozen)
    assert list(step.graph.gradients) == ["head.bias"]


def accumulating(loss: Loss) -> Callable[..., Tensor]:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for half in range(2):
            part = {name: value.chunk(2)[half] for name, value in batch.items()}
            value = loss(model, part) / 2
            value.backward()
            total = total + value.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return train_step


@pytest.mark.parametrize("budget", [None, 0.2])
def test_gradient_accumulation(budget: float | None) -> None:
    step = assert_chunked(
        case_of(),
        3,
        steps=2,
        batch_sizes=[6],
        train_step=accumulating(mean_loss),
        compile_options={"memory_budget": budget},
    )
    assert num_chunks(step.graph) == 6


def test_two_losses_that_multiply() -> None:
    """The gradient of each is the value of the other: the first may go ahead, then the second cannot."""

    def product(model: nn.Module, batch: Batch) -> Tensor:
        first = {name: value[:2] for name, value in batch.items()}
        return mean_loss(model, first) * mean_loss(model, {name: value[2:] for name, value in batch.items()})

    step = assert_chunked(case_of(product), 3, steps=2)
    assert num_chunks(step.graph) == 4


@pytest.mark.parametrize("loss", [mean_loss, lambda model, batch: mean_loss(model, batch).float()])
def test_autocast_to_bfloat16(loss: Loss) -> None:
    def autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    assert_chunked(case_of(autocast, model=Untied), 3, "sgd", prepare=None, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("is_autocast", [True, False])
def test_half_precision_gradients_are_as_near_to_the_truth_as_eagers(is_autocast: bool) -> None:
    case = case_of(model=Untied, dropout=0.0)
    batch = case.make_batch(32, 0)

    def run(dtype: torch.dtype, chunks: int | None) -> Tensor:
        torch.manual_seed(0)
        model = case.build().bfloat16().to(dtype)

        def train_step(model: nn.Module, batch: Batch) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                loss = case.loss(model, batch)
            loss.backward()
            return loss.detach()

        step = train_step if dtype == torch.float64 else wholestep.compile(train_step, chunk_loss=chunks)
        step(model, batch)
        return model.get_parameter("head.weight").grad.double()  # pyright: ignore[reportOptionalMemberAccess]

    dtype = torch.float32 if is_autocast else torch.bfloat16
    truth = run(torch.float64, None)
    whole, chunked = ((run(dtype, chunks) - truth).norm() for chunks in (None, 32))
    assert 0 < chunked < 1.25 * whole


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("smoothed", 3), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in LOSSES if name != "time_major")],
)
def test_a_dynamic_batch(name: str, chunks: int) -> None:
    options = {"dynamic_batch": True}
    step = assert_chunked(case_of(LOSSES[name]), chunks, batch_sizes=[5, 7, 4, 6], compile_options=options)
    assert step.num_captures == 1
    assert num_chunks(step.graph) == chunks


def test_a_dynamic_batch_whose_size_is_read_off_the_logits_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    options = {"chunk_loss": 4, "dynamic_batch": True}
    step = assert_parity(case_of(time_major_loss), "sgd", steps=1, compile_options=options)
    assert num_chunks(step.graph) == 1
    assert_warned(caplog, r"aten\.sym_numel\.default, reads the logits too")


@pytest.mark.slow
def test_a_dynamic_batch_may_have_fewer_rows_than_chunks() -> None:
    options = {"dynamic_batch": True}
    step = assert_chunked(case_of(context=2), 7, steps=2, batch_sizes=[5, 3], compile_options=options)
    assert num_chunks(step.graph) == 7


@pytest.fixture(name="group")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_data_parallel_and_updates_in_the_next_call() -> None:
    options = {"data_parallel": "replicate", "cross_iteration": "all"}
    step = assert_chunked(case_of(model=Untied), 3, compile_options=options)
    assert {"allreduce", "bucket", "chunk_loss"} <= {record.name for record in step.graph.history}


def test_late_gradients_do_not_hold_the_logits_of_their_chunk() -> None:
    step, _ = trained(case_of(model=Untied), chunk_loss=3, passes="simplify,cse,dce")
    gradients = step.graph.gradients
    assert own_nodes([gradients["head.weight"]]) == []
    assert own_nodes([gradients["hidden.weight"]]) != []


def test_verification_against_eager_passes() -> None:
    trained(case_of(), chunk_loss=3, verify=2)


# The graph


def test_all_of_a_chunk_is_backward_and_runs_once() -> None:
    step, _ = trained(case_of(), chunk_loss=3, passes="simplify,cse,dce")
    graph = step.graph
    graph.verify(deep=True)
    assert all(node.meta["phase"] is Phase.BACKWARD for node in graph.calls() if node.meta.get("in_chunk"))
    problem = step_program(graph, {}).problem
    logits = [op for op in problem.ops if "log_softmax" in op.kind or "nll_loss" in op.kind]
    assert len(logits) == 3 * 4
    assert all(op.is_late for op in logits)


def test_one_product_makes_each_chunk_of_logits_and_sums_are_added_up_in_place() -> None:
    step, _ = trained(case_of(model=Untied), chunk_loss=3)
    targets = [node.target for node in step.graph.calls() if node.meta.get("in_chunk")]
    assert targets.count(aten.addmm.default) == 3
    assert targets.count(aten.addmm_.default) == 2
    assert targets.count(aten.mm.default) == 1 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_in_place_product_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    total, left, right = (torch.randn(shape, dtype=dtype) for shape in ((33, 17), (33, 65), (65, 17)))
    expected = torch.addmm(total, left, right)
    assert torch.equal(total.addmm_(left, right), expected)


def test_the_pass_round_trips_through_text_and_wants_chunks() -> None:
    pipeline = Pipeline.parse("simplify,chunk_loss{chunks=4},reinplace")
    assert pipeline.passes[1] == ChunkLoss(4)
    assert Pipeline.parse(str(pipeline)) == pipeline
    with pytest.raises(PassError, match="chunks is a number of chunks, 2 or more, not 1"):
        trained(case_of(), passes="simplify,cse,chunk_loss{chunks=1}")


# Memory

WIDE: dict[str, Any] = {"vocab_size": 1024, "context": 16, "width": 16, "heads": 2, "layers": 1, "model": gpt.GPT}


def test_the_peak_falls_and_is_what_was_predicted() -> None:
    peaks: list[int] = []
    for chunks in (None, 2, 16):
        step, call = trained(case_of(**WIDE), 16, chunk_loss=chunks)
        measured = measure_peak(step, *call).peak_bytes
        assert measured == pytest.approx(profile_memory(step.graph).peak_bytes, rel=0.01)
        peaks.append(measured)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.3 * peaks[0]


def test_a_plan_comes_behind_the_chunks() -> None:
    peaks = {}
    for chunks in (None, "auto"):
        step, call = trained(case_of(**WIDE, dropout=0.0), 16, chunk_loss=chunks, memory_budget=0.0)
        assert step.plan.memory is not None
        peaks[chunks] = measure_peak(step, *call).peak_bytes
        assert peaks[chunks] == pytest.approx(step.plan.memory.peak_bytes, rel=0.02)
    assert peaks["auto"] < 0.2 * peaks[None]


# Saying so


def test_the_hint_names_the_head_and_goes_once_it_is_followed(tmp_path: Path) -> None:
    step, _ = trained(case_of(**WIDE), 16)
    found = dominant_logits(profile_memory(step.graph))
    assert found is not None
    assert 2 * found.num_bytes > found.total_bytes
    expected = f"{found.num_bytes} of {found.total_bytes} bytes at the peak, slots aside, are logits of the loss head"
    [linear] = [node for node in step.graph.calls() if node.name == found.head.name]
    for text in (step.explain(), step.report(tmp_path / "report.html").read_text()):
        assert f"{expected} ({linear.name}, {linear.meta['source']}); chunk_loss={found.chunks} would bring" in text
    better, _ = trained(case_of(**WIDE), 16, chunk_loss="auto")
    assert num_chunks(better.graph) == found.chunks
    assert "logits" not in better.explain()
    too_few, _ = trained(case_of(**WIDE), 16, chunk_loss=2)
    again = dominant_logits(profile_memory(too_few.graph))
    assert again is not None
    assert 2 < again.chunks <= found.chunks
    assert str(again) in too_few.explain()


def test_a_budget_that_fails_for_the_logits_says_so() -> None:
    with pytest.raises(
        BudgetError, match=r"bytes at the peak, slots aside, are logits of the loss head .* chunk_loss="
    ):
        trained(case_of(**WIDE), 16, memory_budget="200kB")
    with pytest.raises(BudgetError) as caught:
        trained(case_of(**WIDE), 16, memory_budget="200kB", chunk_loss="auto")
    assert "logits" not in str(caught.value)


def test_few_classes_are_no_reason_for_chunks(caplog: pytest.LogCaptureFixture) -> None:
    step, _ = trained(zoo.get("gpt"), chunk_loss="auto")
    assert num_chunks(step.graph) == 1
    assert "logits" not in step.explain()
    assert not [record for record in caplog.records if "chunk_loss" in record.getMessage()]


# Refusals


def returning_logits(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
    optimizer.zero_grad()
    logits = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


def measuring_accuracy(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
    loss, logits = returning_logits(model, optimizer, batch)
    return loss, (logits.argmax(-1) == batch["targets"]).float().mean()


def z_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten()) + F.cross_entropy(logits, batch["tokens"].flatten())


def classes_in_the_middle(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["targets"])


def some_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"])[..., :60].flatten(0, 1), batch["targets"].flatten() % 60)


def not_a_linear_layer(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(torch.cumsum(model(batch["tokens"]), 1).flatten(0, 1), batch["targets"].flatten())


REFUSED: dict[str, tuple[Loss, str]] = {
    "z_loss": (z_loss, "reads the logits too"),
    "two_losses": (two_losses, "have another loss"),
    "weights": (partial(mean_loss, weight=torch.ones(64)), "weights its classes"),
    "no_reduction": (lambda model, batch: mean_loss(model, batch, reduction="none").max(), "a loss for each row"),
    "squared": (lambda model, batch: mean_loss(model, batch).square(), "depends on the loss itself"),
    "in_the_middle": (classes_in_the_middle, "has its classes in dimension 1"),
    "some_classes": (some_classes, "does more to the logits than to move rows|does not come from a linear layer"),
    "not_linear": (not_a_linear_layer, "does not come from a linear layer"),
    "no_cross_entropy": (lambda model, batch: model(batch["tokens"]).square().mean(), "no cross entropy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_chunked_is_left_alone_with_a_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, reason = REFUSED[name]
    step = assert_parity(case_of(loss), "sgd", steps=1, compile_options={"chunk_loss": 3})
    assert not [node for node in step.graph.calls() if node.meta.get("in_chunk")]
    assert_warned(caplog, reason)
    assert "chunk_loss=" not in step.explain()


@pytest.mark.parametrize(
    ("train_step", "reason"),
    [(returning_logits, "the step returns the logits"), (measuring_accuracy, r"argmax.*, reads the logits too")],
)
def test_other_readers_of_logits(train_step: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    step = assert_parity(case_of(), "sgd", steps=2, train_step=train_step, compile_options={"chunk_loss": "auto"})
    assert num_chunks(step.graph) == 1
    assert_warned(caplog, reason)


def assert_warned(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    [text] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "leaves a loss in one piece" in text
    assert re.search(reason, text), text


@pytest.mark.parametrize("chunks", [1, 0, -2, 2.5, True, "all", "2"])
def test_options_of_the_wrong_kind(chunks: Any) -> None:
    with pytest.raises(WholestepError, match="chunk_loss is a number of chunks, 2 or more, or 'auto', not"):
        wholestep.compile(lambda: None, chunk_loss=chunks)
