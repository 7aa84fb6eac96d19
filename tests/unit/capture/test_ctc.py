"""`F.ctc_loss`: lengths are values, and the memory of its kernel has a size that they decide."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, small_world
from torch import Tensor, nn

NUM_EXAMPLES, NUM_STEPS, NUM_LABELS = 4, 6, 3
KINDS = ("padded", "joined", "numbers")


class Labels(nn.Module):
    """Four features in, a blank and four labels out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).log_softmax(-1).transpose(0, 1)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, labels, and how many steps and labels of each example count; in some there is no label, or no way."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(NUM_EXAMPLES, NUM_STEPS, 4, generator=generator)
    labels = torch.randint(1, 5, (NUM_EXAMPLES, NUM_LABELS), generator=generator)
    label_lengths = torch.randint(0, NUM_LABELS + 1, (NUM_EXAMPLES,), generator=generator)
    lengths = torch.randint(3, NUM_STEPS + 1, (NUM_EXAMPLES,), generator=generator)
    if seed == 2:
        label_lengths.zero_()
    if seed == 3:
        lengths[0], label_lengths[0] = 1, 3
    return features, labels, lengths, label_lengths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.sample(5)
def test_parity(reduction: str, zero_infinity: bool, kind: str) -> None:
    def step(
        model: nn.Module, optimizer: Any, features: Tensor, labels: Tensor, lengths: Any, label_lengths: Any
    ) -> Any:
        optimizer.zero_grad()
        if kind == "joined":
            counts = torch.arange(NUM_LABELS) < label_lengths.unsqueeze(1)
            labels = labels.masked_select(counts)
        if kind == "numbers":
            lengths, label_lengths = [6, 5, 6, 6], [3, 0, 2, 1]
        loss = F.ctc_loss(
            model(features), labels, lengths, label_lengths, reduction=reduction, zero_infinity=zero_infinity
        )
        loss.sum().backward()
        optimizer.step()
        return loss.detach()

    twins = Twins(small_world(Labels), step)
    for seed in range(4):
        if seed == 3 and not zero_infinity:
            continue  # parameters would be NaN from there on
        twins.step(*batch(seed))
    assert twins.num_captures == 1, twins.reasons


def test_a_module_and_one_example() -> None:
    def step(model: nn.Module, optimizer: Any, features: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        lengths = torch.tensor(NUM_STEPS), torch.tensor(labels.shape[0])
        loss = nn.CTCLoss()(model(features[:1]).squeeze(1), labels, *lengths)
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(Labels), step)
    twins.step(batch(0)[0], batch(0)[1][0])
    twins.step(batch(1)[0], batch(1)[1][0])


def test_lengths_that_are_too_long_raise_what_eager_raises() -> None:
    def step(model: nn.Module, optimizer: Any, features: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.ctc_loss(model(features), labels, lengths, torch.full((NUM_EXAMPLES,), 2))
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(Labels), step)
    features, labels, lengths, _ = batch(0)
    twins.step(features, labels, lengths)
    for world, run in zip(twins.worlds, (step, twins.compiled), strict=True):
        with pytest.raises(RuntimeError, match="Expected input_lengths to have value at most"):
            run(world.model, world.optimizer, features, labels, lengths + NUM_STEPS)
    twins.step(features, labels, lengths)
