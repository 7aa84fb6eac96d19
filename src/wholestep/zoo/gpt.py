"""A GPT: pre-norm causal transformer with learned positions and tied embeddings."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo.case import Batch, ZooCase, init_normal, seeded_generator


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`; the defaults are for tests."""

    vocab_size: int = 64
    context: int = 16
    width: int = 32
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of the {self.heads} heads")


class CausalSelfAttention(nn.Module):
    """Multi-head attention over the past, with one fused projection for query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        # A key bias shifts all scores of a row alike, so its true gradient is zero and Adam would
        # blow up the rounding noise left in it: parity within a tolerance needs it gone.
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch_size, length, width = hidden.shape
        fused: Tensor = self.query_key_value(hidden)
        by_head = fused.view(batch_size, length, 3, self.heads, width // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        joined = mixed.transpose(1, 2).reshape(batch_size, length, width)
        return self.residual_dropout(self.projection(joined))


class Block(nn.Module):
    """Attention and a GELU feed-forward network, each normalised first and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        expanded = F.gelu(self.expand(self.feed_forward_norm(hidden)), approximate="tanh")
        return hidden + self.dropout(self.contract(expanded))


class GPT(nn.Module):
    """Token ids in, next-token logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        init_normal(self)
        # Every block adds to the stream twice; shrinking what it adds keeps the variance flat in depth.
        residual_deviation = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "contract.weight")):
                nn.init.normal_(parameter, mean=0.0, std=residual_deviation)

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Apply one block; a subclass may wrap the call."""
        return block(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = self.run_block(block, hidden)
        return self.head(self.final_norm(hidden))


def make_batch(config: GPTConfig, batch_size: int, seed: int) -> Batch:
    """Uniform random token ids, with the next token at each position as its target."""
    generator = seeded_generator(seed)
    stream = torch.randint(config.vocab_size, (batch_size, config.context + 1), generator=generator)
    return {"tokens": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Next-token cross entropy, averaged over all positions."""
    logits: Tensor = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_case(name: str, config: GPTConfig) -> ZooCase:
    """A zoo case that trains a `GPT` of these sizes."""
    return ZooCase(name, partial(GPT, config), partial(make_batch, config), loss)
