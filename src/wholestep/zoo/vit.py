"""A vision transformer: convolutional patches, a class token and a pre-norm encoder."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo.case import Batch, ZooCase, init_normal, seeded_generator


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a `ViT`; the defaults are for tests."""

    image_size: int = 16
    patch_size: int = 4
    channels: int = 3
    width: int = 32
    heads: int = 4
    layers: int = 2
    classes: int = 10
    dropout: float = 0.1

    @property
    def patches(self) -> int:
        """How many patches tile one image."""
        return (self.image_size // self.patch_size) ** 2


class Block(nn.Module):
    """PyTorch's own multi-head attention and a GELU feed-forward network, normalised first."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        # No biases: a key bias has a true gradient of zero, whose rounding noise Adam would blow up.
        self.attention = nn.MultiheadAttention(
            config.width, config.heads, dropout=config.dropout, bias=False, batch_first=True
        )
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.attention_norm(hidden)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class ViT(nn.Module):
    """Images in, class logits out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            config.channels, config.width, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.position_embedding = nn.Parameter(torch.empty(1, config.patches + 1, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.final_norm = nn.LayerNorm(config.width)
        self.classifier = nn.Linear(config.width, config.classes)
        init_normal(self)
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.position_embedding, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.patch_embedding(images).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(images.shape[0], -1, -1)
        hidden = torch.cat([class_tokens, patches], dim=1) + self.position_embedding
        hidden = self.blocks(self.dropout(hidden))
        return self.classifier(self.final_norm(hidden[:, 0]))


def make_batch(config: ViTConfig, batch_size: int, seed: int) -> Batch:
    """Normal noise images with uniform labels."""
    generator = seeded_generator(seed)
    shape = (batch_size, config.channels, config.image_size, config.image_size)
    return {
        "images": torch.randn(shape, generator=generator),
        "labels": torch.randint(config.classes, (batch_size,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the class logits."""
    logits: Tensor = model(batch["images"])
    return F.cross_entropy(logits, batch["labels"])


def make_case(name: str, config: ViTConfig) -> ZooCase:
    """A zoo case that trains a `ViT` of these sizes."""
    return ZooCase(name, partial(ViT, config), partial(make_batch, config), loss)
