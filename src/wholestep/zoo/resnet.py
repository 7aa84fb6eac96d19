"""A small residual convolutional network that works in place wherever it can."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from wholestep.zoo import vit
from wholestep.zoo.case import Batch, ZooCase, seeded_generator


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a `ResNet`: every stage after the first halves the image."""

    image_size: int = 12
    channels: int = 3
    stage_widths: tuple[int, ...] = (8, 16)
    blocks_per_stage: int = 2
    classes: int = 10


class Block(nn.Module):
    """Two convolutions with batch norm and a residual added in place."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        # Batch norm subtracts the mean, so a convolution's bias before it would never get a gradient.
        self.first = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width_out)
        self.second = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out)
            )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.relu(self.first_norm(self.first(images)))
        out = self.second_norm(self.second(out))
        out += self.shortcut(images)
        return self.relu(out)


class ResNet(nn.Module):
    """Images in, class logits out."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        width = config.stage_widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(config.channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        blocks: list[nn.Module] = []
        for stage, stage_width in enumerate(config.stage_widths):
            for index in range(config.blocks_per_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(width, stage_width, stride))
                width = stage_width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.blocks(self.stem(images)))
        return self.classifier(pooled.flatten(1))


def make_batch(config: ResNetConfig, batch_size: int, seed: int) -> Batch:
    """Normal noise images with uniform labels."""
    generator = seeded_generator(seed)
    shape = (batch_size, config.channels, config.image_size, config.image_size)
    return {
        "images": torch.randn(shape, generator=generator),
        "labels": torch.randint(config.classes, (batch_size,), generator=generator),
    }


def make_case(name: str, config: ResNetConfig) -> ZooCase:
    """A zoo case that trains a `ResNet` of these sizes."""
    return ZooCase(name, partial(ResNet, config), partial(make_batch, config), vit.loss)
