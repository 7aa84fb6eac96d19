"""Finetune a tiny Llama with the Trainer of Hugging Face: padding to the longest, evaluation, checkpoints.

    python examples/finetune_trainer.py [--steps 40] [--eager]

Needs `transformers` and `accelerate`. The model has random weights and the data is made up (count up, from anywhere),
so that nothing is downloaded. Losses are the same with `--eager`, bit for bit on the CPU.
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from wholestep.integrations.transformers import compile_trainer

VOCABULARY = 64


def make_rows(number: int, seed: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(1, VOCABULARY, (number,), generator=generator).tolist()
    lengths = torch.randint(6, 20, (number,), generator=generator).tolist()
    return [
        {"input_ids": [1 + (start + offset) % (VOCABULARY - 1) for offset in range(length)]}
        for start, length in zip(starts, lengths, strict=True)
    ]


def pad_to_longest(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def finetune(num_steps: int, eager: bool, folder: str) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=make_rows(256, seed=1),
        eval_dataset=make_rows(16, seed=2),
        data_collator=pad_to_longest,
    )
    if not eager:
        trainer = compile_trainer(trainer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="without Wholestep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = finetune(options.steps, options.eager, folder)
        if not options.eager:
            print(
                f"{trainer.compiled_step.num_captures} capture(s)", *trainer.compiled_step.recompile_reasons, sep="\n  "
            )
