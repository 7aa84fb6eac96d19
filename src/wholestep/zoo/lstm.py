"""A language model on PyTorch's LSTM, with dropout between its layers."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from wholestep.zoo import gpt
from wholestep.zoo.case import Batch, ZooCase, seeded_generator


@dataclass(frozen=True)
class LSTMConfig:
    """Sizes of an `LSTMLanguageModel`; the defaults are for tests."""

    vocab_size: int = 64
    context: int = 8
    width: int = 32
    layers: int = 2
    dropout: float = 0.1


class LSTMLanguageModel(nn.Module):
    """Token ids in, next-token logits out."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.recurrent = nn.LSTM(config.width, config.width, config.layers, batch_first=True, dropout=config.dropout)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.dropout(self.embedding(tokens)))
        return self.head(self.dropout(hidden))


def make_batch(config: LSTMConfig, batch_size: int, seed: int) -> Batch:
    """Uniform random token ids, with the next token at each position as its target."""
    generator = seeded_generator(seed)
    stream = torch.randint(config.vocab_size, (batch_size, config.context + 1), generator=generator)
    return {"tokens": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}


def make_case(name: str, config: LSTMConfig) -> ZooCase:
    """A zoo case that trains an `LSTMLanguageModel` of these sizes."""
    return ZooCase(name, partial(LSTMLanguageModel, config), partial(make_batch, config), gpt.loss)
