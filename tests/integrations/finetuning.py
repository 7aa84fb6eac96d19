"""A tiny Llama and the Trainer, once as it is and once compiled, compared after every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity import differences, named_leaves, snapshot
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
transformers: Any = pytest.importorskip("transformers", reason="needs transformers")

VOCABULARY = 48
_TIMES = ("runtime", "per_second", "jit_compilation")


def tiny_llama(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, num_key_value_heads=1, **sizes, **options
    )
    return transformers.LlamaForCausalLM(config)


def rows(number: int, lengths: tuple[int, ...] = (5, 6, 7, 8)) -> list[dict[str, list[int]]]:
    """Sequences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    picked = torch.randint(0, len(lengths), (number,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(1, VOCABULARY, (lengths[index],), generator=generator).tolist()} for index in picked
    ]


def pad_to_longest(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """What `DataCollatorForLanguageModeling` does, without a tokenizer."""
    tokens = [torch.tensor(row["input_ids"]) for row in batch]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Watch(transformers.TrainerCallback):
    """Takes a picture after each step: parameters, gradients, buffers, state of the optimizer, generators."""

    def __init__(self) -> None:
        self.pictures: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scheduler = named_leaves("scheduler", kwargs["lr_scheduler"].state_dict())
        kept = {name: value for name, value in vars(state).items() if name != "best_model_checkpoint"}  # a path
        seen = named_leaves("state", {**kept, "log_history": without_times(state.log_history)})
        self.pictures.append(snapshot(kwargs["model"], kwargs["optimizer"]) | scheduler | seen)


@dataclass
class Case:
    """How to train; what is called is called once for each side."""

    model: Callable[[], nn.Module] = tiny_llama
    trainer: Callable[..., Any] = transformers.Trainer
    callbacks: Callable[[], list[Any]] = list
    num_rows: int = 12
    num_eval_rows: int = 0
    data: Any = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other arguments of the Trainer."""
    resume_from: str | None = None

    def train(self, folder: Path, prepare: Callable[[Any], Any], **arguments: Any) -> tuple[Any, Watch]:
        defaults = {
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        watch = Watch()
        trainer = self.trainer(
            model=self.model(),
            args=transformers.TrainingArguments(output_dir=str(folder), **{**defaults, **arguments}),
            train_dataset=copy.deepcopy(self.data or rows(self.num_rows)),
            eval_dataset=rows(self.num_eval_rows) or None,
            data_collator=pad_to_longest,
            callbacks=[*self.callbacks(), watch],
            **self.options,
        )
        prepare(trainer)
        trainer.train(resume_from_checkpoint=None if self.resume_from is None else str(folder / self.resume_from))
        return trainer, watch


def train_both(case: Case, folder: Path, compile_options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Train as it is and compiled, compare all that can be seen after each step, return the compiled Trainer."""
    from wholestep.integrations.transformers import compile_trainer

    def compiled(trainer: Any) -> Any:
        return compile_trainer(trainer, **(compile_options or {}))

    eager, watched = case.train(folder / "eager", lambda trainer: trainer, **arguments)
    trainer, own = case.train(folder / "compiled", compiled, **arguments)
    assert len(own.pictures) == len(watched.pictures) > 0
    for number, (expected, actual) in enumerate(zip(watched.pictures, own.pictures), 1):
        assert (number, differences(expected, actual)) == (number, [])
    assert without_times(trainer.state.log_history) == without_times(eager.state.log_history)
    return trainer


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if not key.endswith(_TIMES)} for entry in history]
