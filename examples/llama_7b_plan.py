"""A Llama with seven billion parameters, planned without allocating one of them.

    wholestep plan examples/llama_7b_plan.py:make_step --world-size 64 --link infiniband-400
    wholestep plan examples/llama_7b_plan.py:make_wide_step --memory-budget 80GiB

`make_step` is what the command line asks for: a function without arguments that returns a train step and its arguments.
It runs inside `no_weights()`, so the model costs nothing but its shapes. Needs the package `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 2048


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """One step on one batch, with weights in bfloat16."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def make_step(num_layers: int = 32, batch_size: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """The step and what it is called with."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (batch_size, CONTEXT), device="cuda")
    return train_step, (model, optimizer, tokens)


def make_wide_step() -> tuple[Any, tuple[Any, ...]]:
    """Eight sequences at once: now most of the memory is what is kept for the backward, and a budget can save much."""
    return make_step(batch_size=8)


def make_small_step() -> tuple[Any, tuple[Any, ...]]:
    """Two of the 32 layers, for a first look: planned in a few seconds."""
    return make_step(num_layers=2)
