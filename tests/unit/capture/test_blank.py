"""Models without weights: what user code can do with them, that captures are those of real ones, and that none runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import wholestep
from wholestep.capture import capture
from wholestep.capture.blank import is_blank, no_weights
from wholestep.errors import CaptureError
from wholestep.graph import StepGraph
from wholestep.zoo import gpt, llama
from wholestep.zoo.case import Batch

Made = tuple[nn.Module, Optimizer, Batch]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Torch is as it was when the block is over."""
    before = nn.Module.to, torch.autocast.__init__, torch.get_rng_state()
    yield
    assert (nn.Module.to, torch.autocast.__init__) == before[:2]
    assert not is_blank(torch.ones(2))
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.sum().item() is not None


def make_gpt(optimizer: Callable[..., Optimizer]) -> Made:
    model = gpt.GPT(gpt.GPTConfig(vocab_size=32, context=8, width=16, heads=2, layers=1, dropout=0.1))
    tokens = torch.randint(32, (2, 8))
    return model, optimizer(model.parameters()), {"tokens": tokens, "targets": tokens}


def make_llama(optimizer: Callable[..., Optimizer]) -> Made:
    model = llama.Llama(llama.LlamaConfig()).to("cuda" if is_blank(torch.ones(1)) else "cpu", torch.bfloat16)
    tokens = torch.randint(64, (2, 16))
    return model, optimizer(model.parameters()), {"tokens": tokens, "targets": tokens}


def make_linear(optimizer: Callable[..., Optimizer]) -> Made:
    model = nn.Linear(8, 4)
    return model, optimizer(model.parameters()), {"tokens": torch.randn(2, 3, 8), "targets": torch.randint(4, (2, 3))}


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def listing(graph: StepGraph) -> tuple[str, dict[str, Any]]:
    """The graph as text, and what it takes in."""
    inputs = {
        slot_id: (node.meta["val"].shape, node.meta["val"].stride(), node.meta["val"].dtype)
        for slot_id, node in graph.placeholders().items()
        if isinstance(node.meta["val"], torch.Tensor)
    }
    return str(graph), inputs


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (make_llama, lambda p: AdamW(p, fused=True)),
        (make_gpt, lambda p: AdamW(p)),
        (make_linear, lambda p: SGD(p, lr=0.1, momentum=0.9)),
    ],
    ids=["fused", "plain", "momentum"],
)
def test_the_graph_is_that_of_real_weights(make: Callable[[Any], Made], optimizer: Callable[..., Optimizer]) -> None:
    real = capture(train_step, make(optimizer), {})
    with no_weights():
        made = make(optimizer)
    blank = capture(train_step, made, {})
    assert blank.is_blank
    assert not real.is_blank
    assert listing(blank.graph) == listing(real.graph)


def test_a_step_without_weights_does_not_run() -> None:
    step = wholestep.compile(train_step)
    with no_weights():
        made = make_linear(AdamW)
    with pytest.raises(CaptureError, match=r"made inside no_weights\(\).*Make them outside"):
        step(*made)
    # A step that was captured blank is captured anew for real tensors.
    assert torch.isfinite(step(*make_linear(AdamW)))


def test_a_billion_parameters_cost_nothing_and_draw_nothing() -> None:
    before = torch.get_rng_state()
    with no_weights():
        model = nn.Sequential(*[nn.Linear(2**15, 2**15) for _ in range(8)])
        torch.randn(2**20, 2**10)
    assert sum(parameter.numel() for parameter in model.parameters()) > 2**33
    assert torch.equal(torch.get_rng_state(), before)


def test_conversions_keep_the_objects() -> None:
    with no_weights():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        weight = model[0].weight
        optimizer = AdamW(model.parameters(), fused=True)
        model(torch.ones(2, 3)).sum().backward()
        model.to(torch.bfloat16).cuda().to("cuda:1")
        assert model[0].weight is model[2].weight is weight is optimizer.param_groups[0]["params"][0]
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        assert (weight.dtype, weight.grad.dtype, model[1].running_mean.dtype) == (torch.bfloat16,) * 3
        assert model[1].num_batches_tracked.dtype is torch.int64
        assert model.double()[0].weight.dtype is torch.float64
        twin = copy.deepcopy(model)
        assert twin[0].weight is twin[2].weight
        assert twin[0].weight is not weight
        assert isinstance(twin[0].weight, nn.Parameter)
        assert twin(torch.ones(2, 3).double()).requires_grad
        assert twin[0].weight.grad is not None
        (twin[0].weight.grad + weight).sum().backward()


def test_code_for_an_accelerator_runs_without_one() -> None:
    with no_weights():
        model = nn.Linear(4, 4, device="cuda")
        with torch.device("cuda"):
            other = nn.Linear(4, 4)
        batch = torch.randint(4, (2, 4), device=torch.device("cuda", 0)).to("cuda").float().cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert other(model(batch)).dtype is torch.bfloat16
        with torch.autocast("cuda"):
            assert model(batch).dtype is torch.float16
        assert model(batch.new_zeros((2, 4), device="cuda:0")).shape == (2, 4)
        model(batch).sum().backward()


def test_tables_and_numbers_can_be_read() -> None:
    with no_weights():
        assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0, 0.5, 1]
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.tensor(3.5).item() == 3.5
        data = torch.utils.data.TensorDataset(torch.randn(8, 3))
        [batch] = next(iter(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)))
        assert batch.shape == (4, 3)
        table = torch.arange(3)
        table += torch.ones(3, dtype=torch.int64)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            table[0].item()


def test_tensors_from_outside_are_constants() -> None:
    with no_weights():
        mask, model = torch.ones(4), nn.Linear(4, 4)
        optimizer = SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) * mask).sum()
            loss.backward()
            optimizer.step()
            return loss

        x = torch.ones(2, 4)
    graph = capture(step, (x,), {}).graph
    assert "constant.0" in graph.placeholders()


def test_other_subclasses_are_refused_as_before() -> None:
    class Special(torch.Tensor):
        pass

    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = F.relu(model(x)).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CaptureError, match="tensor subclass that cannot be traced"):
        capture(step, (model, optimizer, torch.ones(2, 4).as_subclass(Special)), {})
