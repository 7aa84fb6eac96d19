"""Time per step of Hugging Face's Trainer with compiled steps, as a ratio to the Trainer alone, in one run.

    python -m benchmarks.trainer [--steps 40] [--hidden 128] [--layers 2] [--accumulation 1] [--batch 8] [--length 64]

Both train the same model on the same data, in turns of some steps; the first turn, which captures, is left out on both
sides. Needs `transformers` and `accelerate`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from typing import Any

import torch

PAUSE = 5
"""Steps of a turn."""


def rows(number: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Sequences of one length, each its own label."""
    tokens = torch.randint(1, 512, (number, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def build(options: argparse.Namespace, folder: str) -> Any:
    """A Trainer of a small Llama with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        max_steps=PAUSE,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    data = rows(PAUSE * options.batch * options.accumulation, options.length, seed=1)
    return transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=copy.copy(data))


def clocked(trainer: Any) -> Any:
    """Have a Trainer note when its steps begin."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = _now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.times.append(_now() - self.began)

    clock = Clock()
    trainer.add_callback(clock)
    return clock


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 40, "hidden": 128, "layers": 2, "accumulation": 1, "batch": 8, "length": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    options = parser.parse_args()
    from wholestep.integrations.transformers import compile_trainer

    with tempfile.TemporaryDirectory() as folder:
        peer, ours = build(options, f"{folder}/eager"), compile_trainer(build(options, f"{folder}/compiled"))
        clocks = clocked(peer), clocked(ours)
        for _ in range(1 + options.steps // PAUSE):  # the first turn captures
            for trainer in (peer, ours):
                trainer.train()
        times = [sorted(clock.times[PAUSE:]) for clock in clocks]
    eager, compiled = (statistics.median(one) for one in times)
    print(f"{ours.compiled_step.num_captures} capture(s) {ours.compiled_step.recompile_reasons}")
    print(f"eager {1e3 * eager:.2f} ms a step, compiled {1e3 * compiled:.2f} ms: ratio {compiled / eager:.3f}")


if __name__ == "__main__":
    main()
