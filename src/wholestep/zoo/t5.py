"""A T5-style encoder-decoder: relative position bias shared by layers, and tied embeddings."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo.case import Batch, ZooCase, seeded_generator
from wholestep.zoo.llama import RMSNorm

START_TOKEN = 0
FIRST_WORD_TOKEN = 1


@dataclass(frozen=True)
class T5Config:
    """Sizes of a `T5`; the defaults are for tests."""

    vocab_size: int = 64
    source_length: int = 12
    target_length: int = 8
    width: int = 32
    heads: int = 4
    layers: int = 2
    feed_forward_width: int = 64
    buckets: int = 8
    furthest: int = 16
    dropout: float = 0.1


def bucket_distances(distances: Tensor, buckets: int, furthest: int) -> Tensor:
    """Number distances >= 0: near ones get a bucket each, far ones share logarithmic buckets."""
    exact = buckets // 2
    # Distance 0 has no logarithm; it is always in an exact bucket, so any stand-in will do.
    growth = torch.log(distances.clamp(min=1).float() / exact) / math.log(furthest / exact)
    logarithmic = (exact + growth * (buckets - exact)).long().clamp(max=buckets - 1)
    return torch.where(distances < exact, distances, logarithmic)


class RelativePositionBias(nn.Module):
    """A learned attention bias per head and bucket of the distance between two positions."""

    def __init__(self, config: T5Config, bidirectional: bool) -> None:
        super().__init__()
        self.buckets = config.buckets
        self.furthest = config.furthest
        self.bidirectional = bidirectional
        self.table = nn.Embedding(config.buckets, config.heads)

    def forward(self, length: int, device: torch.device) -> Tensor:
        positions = torch.arange(length, device=device)
        offsets = positions[None, :] - positions[:, None]
        if self.bidirectional:
            side = self.buckets // 2
            numbers = bucket_distances(offsets.abs(), side, self.furthest) + (offsets > 0) * side
        else:
            numbers = bucket_distances((-offsets).clamp(min=0), self.buckets, self.furthest)
        return self.table(numbers).permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    """Unscaled attention of `hidden` over `memory` under an additive bias."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def _split(self, projected: Tensor) -> Tensor:
        batch_size, length, width = projected.shape
        return projected.view(batch_size, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, hidden: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        query = self._split(self.query(hidden))
        key, value = self._split(self.key(memory)), self._split(self.value(memory))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self attention, cross attention where there is an encoder to look at, and a feed-forward."""

    def __init__(self, config: T5Config, cross: bool) -> None:
        super().__init__()
        self.self_norm = RMSNorm(config.width)
        self.self_attention = Attention(config)
        self.cross_norm = RMSNorm(config.width) if cross else None
        self.cross_attention = Attention(config) if cross else None
        self.feed_forward_norm = RMSNorm(config.width)
        self.expand = nn.Linear(config.width, config.feed_forward_width, bias=False)
        self.contract = nn.Linear(config.feed_forward_width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, bias: Tensor, memory: Tensor | None = None, memory_bias: Tensor | None = None
    ) -> Tensor:
        normed: Tensor = self.self_norm(hidden)
        hidden = hidden + self.dropout(self.self_attention(normed, normed, bias))
        if self.cross_norm is not None and self.cross_attention is not None:
            crossed = self.cross_attention(self.cross_norm(hidden), memory, memory_bias)
            hidden = hidden + self.dropout(crossed)
        expanded: Tensor = self.dropout(F.relu(self.expand(self.feed_forward_norm(hidden))))
        return hidden + self.dropout(self.contract(expanded))


class T5(nn.Module):
    """Source ids with their mask and target ids in, logits of the targets out."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.width = config.width
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder_bias = RelativePositionBias(config, bidirectional=True)
        self.encoder = nn.ModuleList(Block(config, cross=False) for _ in range(config.layers))
        self.encoder_norm = RMSNorm(config.width)
        self.decoder_bias = RelativePositionBias(config, bidirectional=False)
        self.decoder = nn.ModuleList(Block(config, cross=True) for _ in range(config.layers))
        self.decoder_norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def _encode(self, source: Tensor, padding_bias: Tensor) -> Tensor:
        bias = self.encoder_bias(source.shape[1], source.device) + padding_bias
        hidden: Tensor = self.dropout(self.embedding(source))
        for block in self.encoder:
            hidden = block(hidden, bias)
        return self.dropout(self.encoder_norm(hidden))

    def forward(self, source: Tensor, source_mask: Tensor, targets: Tensor) -> Tensor:
        # The bias of a padded position is the most negative number rather than -inf, which
        # would turn into NaN where it meets another one.
        lowest = torch.finfo(self.embedding.weight.dtype).min
        padding_bias = (1.0 - source_mask.to(self.embedding.weight.dtype))[:, None, None, :] * lowest
        memory = self._encode(source, padding_bias)
        shifted = torch.roll(targets, shifts=1, dims=1)
        shifted[:, 0] = START_TOKEN
        length = targets.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=targets.device).triu(1)
        bias = self.decoder_bias(length, targets.device).masked_fill(future, lowest)
        hidden: Tensor = self.dropout(self.embedding(shifted))
        for block in self.decoder:
            hidden = block(hidden, bias, memory, padding_bias)
        # Tied embeddings have unit variance; scaling brings the logits back to it.
        return self.head(self.dropout(self.decoder_norm(hidden)) * self.width**-0.5)


def make_batch(config: T5Config, batch_size: int, seed: int) -> Batch:
    """Padded random sources and random targets."""
    generator = seeded_generator(seed)
    source_shape = (batch_size, config.source_length)
    target_shape = (batch_size, config.target_length)
    source = torch.randint(FIRST_WORD_TOKEN, config.vocab_size, source_shape, generator=generator)
    shortest = config.source_length // 2
    lengths = torch.randint(shortest, config.source_length + 1, (batch_size, 1), generator=generator)
    real = torch.arange(config.source_length) < lengths
    return {
        "source": source.masked_fill(~real, START_TOKEN),
        "source_mask": real.long(),
        "targets": torch.randint(FIRST_WORD_TOKEN, config.vocab_size, target_shape, generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the targets under teacher forcing."""
    logits: Tensor = model(batch["source"], batch["source_mask"], batch["targets"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_case(name: str, config: T5Config) -> ZooCase:
    """A zoo case that trains a `T5` of these sizes."""
    return ZooCase(name, partial(T5, config), partial(make_batch, config), loss)
