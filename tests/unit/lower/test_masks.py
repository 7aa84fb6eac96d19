"""Dropout as CUDA devices run it: the mask is drawn by itself, and is eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.lowering import DOUBLE, compile_with, in_double
from tests.parity import assert_parity
from torch import Tensor, nn

from wholestep.lower import regions_of
from wholestep.zoo import ZooCase

aten = torch.ops.aten


class Dropping(nn.Module):
    """Layers with the fused dropout op between them, its mask in use or not."""

    def __init__(self, probability: float, is_training: bool | None = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.probability = probability
        self.is_training = is_training

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, mask = torch.native_dropout(torch.tanh(layer(x)), self.probability, self.is_training)
        return x * (1 + mask)


def case(probability: float = 0.4, is_training: bool | None = True) -> ZooCase:
    def make_batch(size: int, seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean()

    return in_double(ZooCase("dropping", lambda: Dropping(probability, is_training), make_batch, loss))


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_training", [True, None])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.0}, {"dynamic_batch": True}])
def test_masks_are_eagers_and_do_not_cut_the_forward(
    options: dict[str, Any], is_training: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch)
    sizes = (4, 7) if options.get("dynamic_batch") else (4,)
    step = assert_parity(
        case(is_training=is_training),
        "sgd",
        steps=3,
        batch_sizes=sizes,
        compile_options={"lower": "inductor"} | options,
        **DOUBLE,
    )
    if "dynamic_batch" not in options:
        assert [str(node.meta["phase"]) for node in step.graph.calls() if node.target in regions_of(step.graph)][
            :2
        ] == ["forward", "backward"]
    draws = [node for node in step.graph.calls() if node.target is aten.native_dropout.default]
    assert len(draws) == 4
    assert all(str(node.args[0].target).startswith("aten.empty") for node in draws)


@pytest.mark.parametrize(("probability", "is_training"), [(0.0, True), (1.0, True), (0.4, False)])
def test_dropout_that_does_not_draw_stays(
    probability: float, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch)
    assert_parity(case(probability, is_training), "sgd", steps=2, compile_options={"lower": "inductor"}, **DOUBLE)
