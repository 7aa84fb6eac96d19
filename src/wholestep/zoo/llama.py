"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo import gpt
from wholestep.zoo.case import Batch, ZooCase, init_normal, seeded_generator


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a `Llama`; the defaults are for tests."""

    vocab_size: int = 64
    context: int = 16
    width: int = 32
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 2
    feed_forward_width: int = 64
    rotary_base: float = 10_000.0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")
        if self.heads % self.key_value_heads:
            raise ValueError(f"{self.heads} heads do not share {self.key_value_heads} key/value heads evenly")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads


class RMSNorm(nn.Module):
    """Divide by the root mean square, then scale."""

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        # The mean of squares is taken in float32 so that a bfloat16 model normalises accurately.
        wide = hidden.float()
        normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return self.weight * normalised.to(hidden.dtype)


def rotate(features: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (feature i, feature i + half) by its position's angle."""
    first, second = features.chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share one key/value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        key_value_width = config.key_value_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, key_value_width, bias=False)
        self.value = nn.Linear(config.width, key_value_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def _split(self, projected: Tensor) -> Tensor:
        batch_size, length, _ = projected.shape
        return projected.view(batch_size, length, -1, self.config.head_width).transpose(1, 2)

    def _share(self, key_or_value: Tensor) -> Tensor:
        group = self.config.heads // self.config.key_value_heads
        return key_or_value.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        query = rotate(self._split(self.query(hidden)), cosines, sines)
        key = self._share(rotate(self._split(self.key(hidden)), cosines, sines))
        value = self._share(self._split(self.value(hidden)))
        dropout = self.config.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Feed-forward network whose expansion is gated by a SiLU branch."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feed_forward_width, bias=False)
        self.expand = nn.Linear(config.width, config.feed_forward_width, bias=False)
        self.contract = nn.Linear(config.feed_forward_width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.contract(F.silu(self.gate(hidden)) * self.expand(hidden))


class Block(nn.Module):
    """Attention and SwiGLU, each normalised first and added to the stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = GroupedQueryAttention(config)
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), cosines, sines))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class Llama(nn.Module):
    """Token ids in, next-token logits out; the output head is not tied."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        exponents = torch.arange(0, config.head_width, 2) / config.head_width
        angles = torch.outer(torch.arange(config.context).float(), config.rotary_base**-exponents)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        init_normal(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden: Tensor = self.token_embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.cosines[:length], self.sines[:length])
        return self.head(self.final_norm(hidden))


def make_batch(config: LlamaConfig, batch_size: int, seed: int) -> Batch:
    """Uniform random token ids, with the next token at each position as its target."""
    generator = seeded_generator(seed)
    stream = torch.randint(config.vocab_size, (batch_size, config.context + 1), generator=generator)
    return {"tokens": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}


def make_case(name: str, config: LlamaConfig) -> ZooCase:
    """A zoo case that trains a `Llama` of these sizes."""
    return ZooCase(name, partial(Llama, config), partial(make_batch, config), gpt.loss)
