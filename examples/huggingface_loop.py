"""A Hugging Face model in a loop of the shape that `accelerate` has, with gradient accumulation.

    python examples/huggingface_loop.py [--steps 30] [--eager]

Needs `transformers`, and `accelerate` only if you want it to place the model. What changes: the micro-batches of a step
are a list that goes into the compiled step, and `accelerator.backward(loss)` is `loss.backward()`. On several ranks,
`wholestep.compile(train_step, data_parallel="replicate")` takes the place of the wrapper around the model. The model is
built from a configuration, so that nothing is downloaded; the data is made up: count up, from anywhere.
"""

import argparse
import itertools

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import wholestep

VOCABULARY, LENGTH = 50, 16
MICRO_BATCH_SIZE, ACCUMULATION_STEPS = 4, 2


def train_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = torch.zeros(())
    for batch in micro_batches:
        loss = model(**batch).loss / len(micro_batches)
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def make_dataset(num_rows: int) -> TensorDataset:
    starts = torch.randint(VOCABULARY, (num_rows, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((starts + torch.arange(LENGTH)) % VOCABULARY)


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row for (row,) in rows])
    return {"input_ids": tokens, "labels": tokens}


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> tuple:
    """What `accelerator.prepare` does in one process; with accelerate, `Accelerator().prepare` is what is called."""
    try:
        from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
    except ImportError:
        return model, optimizer, batches
    accelerator = Accelerator()
    model, batches = accelerator.prepare(model, batches)
    return accelerator.unwrap_model(model), optimizer, batches


def train(num_steps: int = 30, eager: bool = False) -> list[float]:
    """Train and return the loss of every step."""
    step = train_step if eager else wholestep.compile(train_step)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = AdamW(model.parameters(), lr=5e-3)
    batches = DataLoader(
        make_dataset(512), batch_size=MICRO_BATCH_SIZE, shuffle=True, drop_last=True, collate_fn=collate
    )
    model, optimizer, batches = prepare(model, optimizer, batches)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=num_steps)

    losses = []
    micro_batches = iter(itertools.chain.from_iterable(itertools.repeat(batches)))
    for number in range(1, num_steps + 1):
        loss = step(model, optimizer, [next(micro_batches) for _ in range(ACCUMULATION_STEPS)])
        scheduler.step()
        losses.append(loss.item())
        if number % 10 == 0:
            print(f"step {number}  loss {losses[-1]:.4f}  learning rate {scheduler.get_last_lr()[0]:.2e}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="without Wholestep")
    options = parser.parse_args()
    train(options.steps, options.eager)
