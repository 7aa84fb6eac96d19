"""The Trainer with compiled steps trains as it does without, bit for bit, in few captures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.finetuning import Case, Watch, rows, tiny_llama, train_both, transformers, without_times
from tests.parity import differences

from wholestep.errors import WholestepError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

# One for the first sizes, one for all others, one for batches without padding, which models of transformers ask for.
MAX_CAPTURES = 3


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"max_grad_norm": 0.0, "average_tokens_across_devices": False}, id="no-clipping"),
        pytest.param({"label_smoothing_factor": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine"}, id="smoothing"),
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, id="reentrant"
        ),
        pytest.param({"train_sampling_strategy": "group_by_length", "optim": "adafactor"}, id="by-length"),
        pytest.param({"torch_empty_cache_steps": 2, "include_num_input_tokens_seen": "all"}, id="counters"),
    ],
)
def test_the_same_as_without(arguments: dict[str, Any], tmp_path: Path) -> None:
    trainer = train_both(Case(num_rows=8), tmp_path, **arguments)
    assert trainer.compiled_step.num_captures <= MAX_CAPTURES


def test_a_shorter_last_group_is_one_more_graph_however_many_epochs(tmp_path: Path) -> None:
    case = Case(data=rows(10, lengths=(8,)))
    trainer = train_both(case, tmp_path, gradient_accumulation_steps=3, num_train_epochs=3)
    assert trainer.compiled_step.num_captures == 2


def test_long_groups_and_callbacks_between_the_parts_run_in_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="wholestep.integrations.transformers"):
        trainer = train_both(Case(num_rows=8), tmp_path, {"max_unrolled": 1}, gradient_accumulation_steps=2)
    assert trainer.compiled_step.__name__ == "micro_step"
    [record] = [one for one in caplog.records if one.name.endswith("integrations.transformers")]
    assert "it has 2 micro-batches (max_unrolled=1)" in record.getMessage()


class SeesGradients(transformers.TrainerCallback):
    """Looks at what only eager has: gradients before the update."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.sums.append(sum(p.grad.sum().item() for p in kwargs["model"].parameters() if p.grad is not None))


def test_a_callback_that_looks_at_gradients_sees_them(tmp_path: Path) -> None:
    seen: list[SeesGradients] = []

    def callbacks() -> list[Any]:
        seen.append(SeesGradients())
        return [seen[-1]]

    train_both(Case(num_rows=8, callbacks=callbacks), tmp_path)
    assert seen[0].sums == seen[1].sums
    assert any(seen[1].sums)


class Entropy(transformers.Trainer):
    """A loss of its own, a value that is kept for the log, and a counter."""

    num_steps = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        self.kept.append(entropy.item())
        loss = loss - 0.01 * entropy
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.num_steps += 1
        return super().training_step(model, inputs, num_items_in_batch)


def test_subclasses_with_a_step_of_their_own(tmp_path: Path) -> None:
    trainer = train_both(Case(num_rows=8, trainer=Entropy), tmp_path)
    assert trainer.num_steps == len(trainer.kept) == 8
    assert trainer.compiled_step.num_captures <= MAX_CAPTURES + 1


def lora_llama() -> Any:
    peft: Any = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def test_lora(tmp_path: Path) -> None:
    trainer = train_both(Case(num_rows=8, model=lora_llama), tmp_path)
    assert trainer.compiled_step.num_captures <= MAX_CAPTURES


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_evaluation_saving_the_best_and_stopping_early(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [transformers.EarlyStoppingCallback(early_stopping_patience=2)]

    trainer = train_both(
        Case(num_rows=12, num_eval_rows=4, callbacks=callbacks, options={"compute_metrics": accuracy}),
        tmp_path,
        num_train_epochs=4,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.compiled_step.num_captures <= MAX_CAPTURES


def test_a_run_that_is_resumed_ends_like_one_that_was_not_broken(tmp_path: Path) -> None:
    from wholestep.integrations.transformers import compile_trainer

    case = Case(num_rows=8)
    whole, watched = case.train(tmp_path, compile_trainer, save_strategy="steps", save_steps=3)
    case.resume_from = "checkpoint-3"
    resumed, again = case.train(tmp_path, compile_trainer, save_strategy="steps", save_steps=3)
    assert len(again.pictures) == len(watched.pictures) - 3
    for expected, actual in zip(watched.pictures[3:], again.pictures, strict=True):
        assert not differences(expected, actual)
    assert [entry.get("loss") for entry in resumed.state.log_history] == [
        entry.get("loss") for entry in whole.state.log_history
    ]


def test_the_drop_in_class(tmp_path: Path) -> None:
    from wholestep.integrations.transformers import Trainer

    case = Case(num_rows=8)
    eager, watched = case.train(tmp_path / "eager", lambda trainer: trainer)
    case.trainer, case.options = Trainer, {"compile_options": {"verify": 1}}
    trainer, own = case.train(tmp_path / "compiled", lambda trainer: trainer)
    assert isinstance(own, Watch)
    assert not differences(watched.pictures[-1], own.pictures[-1])
    assert without_times(trainer.state.log_history) == without_times(eager.state.log_history)
    assert 0 < trainer.compiled_step.num_captures <= MAX_CAPTURES


def refusal(case: Case, folder: Path, **arguments: Any) -> str:
    from wholestep.integrations.transformers import compile_trainer

    with pytest.raises(WholestepError) as caught:
        case.train(folder, compile_trainer, **arguments)
    return str(caught.value)


def test_what_cannot_be_compiled_is_refused_by_name(tmp_path: Path) -> None:
    assert "torch_compile=True compiles the model already" in refusal(Case(), tmp_path, torch_compile=True)

    class Several(transformers.Trainer):
        """As if Accelerate had been configured for others."""

        kind = "FSDP"

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            real = self.accelerator.distributed_type

            class Accelerator(type(self.accelerator)):
                distributed_type = type(real)(self.kind)

            self.accelerator.__class__ = Accelerator

    assert "FSDP runs them; leave it out" in refusal(Case(trainer=Several), tmp_path)
    Several.kind = "DEEPSPEED"
    assert "DEEPSPEED runs them" in refusal(Case(trainer=Several), tmp_path)
    Several.kind = "MULTI_CPU"
    assert "pass data_parallel='replicate'" in refusal(Case(trainer=Several), tmp_path)


def test_200_steps_padded_to_the_longest_with_evaluation_and_saving_are_three_captures(tmp_path: Path) -> None:
    # The first sizes, all others, and the smaller last batch of an epoch.
    case = Case(num_eval_rows=8, data=rows(403, lengths=tuple(range(5, 25))))
    often = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 50,
        "save_steps": 50,
        "logging_steps": 50,
    }
    trainer = train_both(case, tmp_path, max_steps=200, per_device_train_batch_size=4, **often)
    assert trainer.state.global_step == 200
    assert trainer.compiled_step.num_captures <= 3
