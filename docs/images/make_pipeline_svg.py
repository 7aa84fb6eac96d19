"""Train a GPT in four stages on two ranks and draw the last step, as planned and as measured.

torchrun --nproc-per-node 2 docs/images/make_pipeline_svg.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import wholestep
from wholestep.pipe import simulate
from wholestep.report.schedule_picture import schedule_picture
from wholestep.zoo import gpt

CONFIG = gpt.GPTConfig(vocab_size=512, context=128, width=192, heads=6, layers=8)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = gpt.GPT(CONFIG)
    pipe = wholestep.pipeline(
        model,
        num_stages=4,
        schedule="zbv",
        num_micro_batches=6,
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
    )
    batch = gpt.make_batch(CONFIG, 24, 0)
    for _ in range(5):
        pipe.step(batch["tokens"], target=batch["targets"])
    measured = pipe.measured()
    planned = simulate(pipe.schedule, measured.costs(), unit=measured.unit)
    if dist.get_rank() == 0:
        default = Path(__file__).with_name("pipeline.svg")
        Path(sys.argv[1] if len(sys.argv) > 1 else default).write_text(schedule_picture(planned, measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
