"""Strides: traced values lie in memory as eager's do, those of dimensions of size 1 included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, small_world
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from wholestep.capture.layouts import new_fake_mode
from wholestep.runtime.codegen import with_strides


class Upsampled(nn.Module):
    """A map of one pixel, enlarged, with dropout, whose mask is drawn in the order of memory."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, kernel, stride=stride, padding=kernel // 2)

    def forward(self, image: Tensor) -> Tensor:
        features = F.relu(self.conv(image))
        return F.dropout(F.interpolate(features, scale_factor=4, mode="bilinear", align_corners=True), 0.5)


def weighted_step(model: nn.Module, optimizer: Optimizer, image: Tensor) -> Tensor:
    optimizer.zero_grad()
    output = model(image)
    loss = (output * torch.arange(8 * 16.0).view(8, 4, 4)).mean()
    loss.backward()
    optimizer.step()
    return loss


def image(size: int, *, is_channels_last: bool, batch: int = 2) -> Tensor:
    torch.manual_seed(batch)
    if is_channels_last:
        return torch.randn(batch, size, size, 8).permute(0, 3, 1, 2)
    return torch.randn(batch, 8, size, size)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


@pytest.mark.parametrize("is_channels_last", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 2, 2), (1, 1, 1)])
def test_memory_formats_are_chosen_as_in_eager(kernel: int, stride: int, size: int, is_channels_last: bool) -> None:
    """S9: a 1x1 map that eager takes for contiguous was traced as channels_last."""
    twins = Twins(small_world(lambda: Upsampled(kernel, stride), sgd), weighted_step)
    twins.steps(2, image(size, is_channels_last=is_channels_last))


def test_memory_formats_with_a_dynamic_batch() -> None:
    twins = Twins(small_world(lambda: Upsampled(3, 2), sgd), weighted_step, dynamic_batch=True)
    for batch in (3, 4, 2):
        twins.step(image(2, is_channels_last=True, batch=batch))


class TransposedDropout(nn.Module):
    """Dropout on a tensor that is not contiguous; its mask, and what comes of it, lie in memory as it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, features: Tensor) -> Tensor:
        mask = torch.empty_like(features.mT).bernoulli_(0.5)
        drawn = torch.bernoulli(features.mT, 0.5)
        return F.dropout(mask * drawn, 0.5) * self.weight.mT


def test_a_mask_drawn_in_place_keeps_the_layout_of_its_tensor() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(features)
        output.sum().backward()
        optimizer.step()
        return output

    twins = Twins(small_world(TransposedDropout, sgd), step)
    for seed in range(3):
        torch.manual_seed(seed)
        twins.step(torch.randn(3, 4, 6))


GEOMETRIES = [
    ((2, 8, 1, 1), (8, 1, 8, 8)),
    ((2, 8, 1, 1), (8, 1, 1, 1)),
    ((1, 8, 3, 3), (72, 1, 24, 8)),
    ((1, 1, 4, 4), (1, 1, 4, 1)),
    ((3, 1, 5), (1, 1, 3)),
]


@pytest.mark.parametrize(("shape", "strides"), GEOMETRIES)
@pytest.mark.parametrize(
    "function", [F.relu, F.gelu, torch.neg, lambda x: torch.cat([x, x]), lambda x: x.sum(0), lambda x: x * x[:1]]
)
def test_fake_kernels_promise_what_real_ones_give(shape: Any, strides: Any, function: Any) -> None:
    real = torch.empty_strided(shape, strides).zero_()
    with new_fake_mode() as mode:
        promised = function(mode.from_tensor(real)).stride()
    assert promised == function(real).stride()


def test_strides_of_size_one_are_exchanged_without_a_copy() -> None:
    tensor = torch.randn(2, 8, 1, 1)
    relabelled = with_strides(tensor, (8, 1, 8, 8))
    assert relabelled.stride() == (8, 1, 8, 8)
    assert relabelled.data_ptr() == tensor.data_ptr()
    assert torch.equal(relabelled, tensor)
    copied = with_strides(torch.randn(2, 3), (1, 2))
    assert copied.stride() == (1, 2)
