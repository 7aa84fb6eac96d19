"""Loss heads as a compiler likes them: with more classes than there are, and with a gradient in one go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.heads import LOSSES, TIGHT, Tied, Untied, case_of, double, shifted_loss
from tests.parity import assert_parity
from torch import Tensor, nn

from wholestep import PassError
from wholestep.graph import StepGraph
from wholestep.passes import PadLogits, Pipeline
from wholestep.zoo.case import Batch

aten = torch.ops.aten

PAD = "simplify,cse,pad_logits{multiple=24,min_classes=2},dce,reinplace"
JOIN = "simplify,cse,loss_gradient,dce,reinplace"
BOTH = "simplify,cse,pad_logits{multiple=24,min_classes=2},loss_gradient,dce,reinplace"
SMOOTHED = ("smoothed", "smoothed_sum")


def trained(passes: str, loss: Any, model: type[nn.Module] = Tied, **options: Any) -> StepGraph:
    """Four steps like eager's in double precision, by way of some passes; returns the graph."""
    options = {"steps": 4, "batch_sizes": [5], "prepare": double, **TIGHT} | options
    compile_options = {"passes": passes} | options.pop("compile_options", {})
    return assert_parity(case_of(loss, model), "adamw_fused", compile_options=compile_options, **options).graph


def widths(graph: StepGraph) -> set[int]:
    """How many classes the log-probabilities have."""
    return {node.meta["val"].shape[1] for node in graph.calls() if node.target is aten._log_softmax.default}


def num_calls(graph: StepGraph, target: Any) -> int:
    return sum(node.target is target for node in graph.calls())


@pytest.mark.parametrize("name", LOSSES)
def test_padded_heads_train_like_eager(name: str) -> None:
    graph = trained(PAD, LOSSES[name])
    # Label smoothing asks for the mean over all classes there are.
    assert widths(graph) == ({64} if name in SMOOTHED else {72})
    graph.verify(deep=True)


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_in_one_go_is_eagers(name: str) -> None:
    graph = trained(JOIN, LOSSES[name])
    assert num_calls(graph, aten.nll_loss_backward.default) == (name in SMOOTHED)
    assert num_calls(graph, aten._log_softmax_backward_data.default) == (name in SMOOTHED)
    graph.verify(deep=True)


def test_both_with_a_bias() -> None:
    graph = trained(BOTH, LOSSES["some_ignored"], Untied)
    assert widths(graph) == {72}
    assert num_calls(graph, aten.nll_loss_backward.default) == 0
    assert set(graph.gradients) >= {"head.weight", "head.bias"}


@pytest.mark.parametrize("options", [{"chunk_loss": 3}, {"dynamic_batch": True}], ids=["chunks", "dynamic"])
def test_both_with_other_rewrites(options: dict[str, Any]) -> None:
    sizes = [5, 7, 4] if "dynamic_batch" in options else [5]
    graph = trained(BOTH, shifted_loss, Untied, batch_sizes=sizes, compile_options=options)
    assert widths(graph) == {72}


def test_a_loss_for_each_row() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="none").square().mean()

    graph = trained(JOIN, loss)
    assert num_calls(graph, aten.nll_loss_backward.default) == 0


def test_log_probabilities_that_are_cast_for_the_loss() -> None:
    """As autocast does on CUDA devices, with wide types in the place of narrow ones."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        log_probabilities = model(batch["tokens"]).flatten(0, 1).float().log_softmax(-1)
        return nn.functional.nll_loss(log_probabilities.double(), batch["targets"].flatten())

    graph = trained(BOTH, loss, rtol=1e-5, atol=1e-7)
    assert widths(graph) == {72}
    assert num_calls(graph, aten.nll_loss_backward.default) == 0


def test_a_weight_is_padded_once_for_all_products() -> None:
    graph = trained(PAD, LOSSES["mean"])
    assert num_calls(graph, aten.constant_pad_nd.default) == 1


def test_what_fits_or_is_small_stays() -> None:
    for passes in (PAD.replace("24", "32"), PAD.replace("min_classes=2", "min_classes=65")):
        assert widths(trained(passes, LOSSES["mean"], steps=1)) == {64}


def test_something_else_with_a_number_for_each_class_stays() -> None:
    prior = torch.linspace(-1, 1, 64, dtype=torch.float64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"]).flatten(0, 1) + prior
        return nn.functional.cross_entropy(logits, batch["targets"].flatten())

    assert widths(trained(PAD, loss)) == {64}


def test_a_wrong_multiple_is_refused() -> None:
    with pytest.raises(PassError, match="multiple is a number, 2 or more, not 1"):
        trained("simplify,cse,pad_logits{multiple=1},dce,reinplace", LOSSES["mean"], steps=1)
    assert str(Pipeline.parse("pad_logits{multiple=8}")) == str(Pipeline((PadLogits(multiple=8),)))
