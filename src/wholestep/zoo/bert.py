"""A BERT-style bidirectional encoder trained to fill in masked tokens."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo.case import Batch, ZooCase, init_normal, seeded_generator

PADDING_TOKEN = 0
MASK_TOKEN = 1
FIRST_WORD_TOKEN = 2
IGNORED_LABEL = -100
MASKED_FRACTION = 0.25


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a `Bert`; the defaults are for tests."""

    vocab_size: int = 64
    context: int = 16
    width: int = 32
    heads: int = 4
    layers: int = 2
    token_types: int = 2
    dropout: float = 0.1


class SelfAttention(nn.Module):
    """Attention written out as matrix products and a masked softmax, with dropout on the weights."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        # No key bias: its true gradient is zero and Adam would blow up the rounding noise in it.
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)
        self.weight_dropout = nn.Dropout(config.dropout)

    def _split(self, projected: Tensor) -> Tensor:
        batch_size, length, width = projected.shape
        return projected.view(batch_size, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        query, key = self._split(self.query(hidden)), self._split(self.key(hidden))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights: Tensor = self.weight_dropout(scores.masked_fill(padding, -math.inf).softmax(dim=-1))
        mixed = weights @ self._split(self.value(hidden))
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a GELU feed-forward network, each added to the stream and normalised after."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, padding)))
        fed_forward = self.contract(F.gelu(self.expand(hidden)))
        return self.feed_forward_norm(hidden + self.dropout(fed_forward))


class Bert(nn.Module):
    """Token ids with their types and attention mask in, logits of every token out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width, padding_idx=PADDING_TOKEN)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.type_embedding = nn.Embedding(config.token_types, config.width)
        self.embedding_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head_transform = nn.Linear(config.width, config.width)
        self.head_norm = nn.LayerNorm(config.width)
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        init_normal(self)

    def forward(self, tokens: Tensor, token_types: Tensor, attention_mask: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token_embedding(tokens)
        embedded = embedded + self.position_embedding(positions) + self.type_embedding(token_types)
        hidden: Tensor = self.dropout(self.embedding_norm(embedded))
        padding = (attention_mask == 0)[:, None, None, :]
        for block in self.blocks:
            hidden = block(hidden, padding)
        transformed: Tensor = self.head_norm(F.gelu(self.head_transform(hidden)))
        return F.linear(transformed, self.token_embedding.weight, self.head_bias)


def make_batch(config: BertConfig, batch_size: int, seed: int) -> Batch:
    """Two-segment sequences of differing lengths with about a quarter of the tokens masked out."""
    generator = seeded_generator(seed)
    shape = (batch_size, config.context)
    words = torch.randint(FIRST_WORD_TOKEN, config.vocab_size, shape, generator=generator)
    lengths = torch.randint(config.context // 2, config.context + 1, (batch_size, 1), generator=generator)
    positions = torch.arange(config.context)
    real = positions < lengths
    masked = (torch.rand(shape, generator=generator) < MASKED_FRACTION) & real
    # A batch without any label would have a NaN loss.
    masked[:, 1] = True
    return {
        "tokens": words.masked_fill(masked, MASK_TOKEN).masked_fill(~real, PADDING_TOKEN),
        "token_types": (positions >= lengths // 2).long(),
        "attention_mask": real.long(),
        "labels": words.masked_fill(~masked, IGNORED_LABEL),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy at the masked positions."""
    logits: Tensor = model(batch["tokens"], batch["token_types"], batch["attention_mask"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)


def make_case(name: str, config: BertConfig) -> ZooCase:
    """A zoo case that trains a `Bert` of these sizes."""
    return ZooCase(name, partial(Bert, config), partial(make_batch, config), loss)
