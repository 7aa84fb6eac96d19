"""Loops of one's own around models of transformers: packed rows, what happens between steps, text in the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.finetuning import VOCABULARY, tiny_llama
from tests.twins import Twins, World
from torch import Tensor, nn

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def build() -> World:
    model = tiny_llama()
    return World(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), num_steps=0, losses=[])


def call(world: World, step: Callable[..., Any], *args: Any) -> Any:
    return step(world, *args)


def step(world: World, batch: dict[str, Any]) -> Tensor:
    world.optimizer.zero_grad()
    loss = world.model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    world.optimizer.step()
    return loss.detach()


def packed(total: int, seed: int, num_rows: int = 3) -> dict[str, Tensor]:
    """Sequences in one row, one after the other, as `DataCollatorWithFlattening` makes it."""
    generator = torch.Generator().manual_seed(seed)
    ends = sorted((torch.randperm(total - 1, generator=generator)[: num_rows - 1] + 1).tolist())
    lengths = [end - begin for begin, end in zip([0, *ends], [*ends, total])]
    tokens = torch.randint(1, VOCABULARY, (1, total), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions}


@pytest.mark.parametrize(
    ("batches", "num_captures"),
    [
        ([packed(16, seed) for seed in range(4)], 1),
        ([packed(16, seed, num_rows=1 + seed) for seed in range(4)], 1),
        ([packed(16 + seed, seed) for seed in range(4)], 2),
    ],
    ids=["other borders", "another number of rows", "another length"],
)
def test_packed_rows(batches: list[dict[str, Tensor]], num_captures: int) -> None:
    twins = Twins(build, step, call=call)
    for batch in batches:
        twins.step(batch)
    assert twins.num_captures == num_captures, twins.reasons


def padded(length: int, seed: int, multiple: int = 1) -> dict[str, Tensor]:
    length = -(-length // multiple) * multiple
    tokens = torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[0, length - 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def test_rows_padded_to_a_multiple() -> None:
    twins = Twins(build, step, call=call)
    for seed, length in enumerate((5, 7, 9, 12, 15, 6)):
        twins.step(padded(length, seed, multiple=8))
    assert twins.num_captures == 2, twins.reasons


def test_what_happens_between_steps_costs_no_capture(tmp_path: Path) -> None:
    def counting(world: World, batch: dict[str, Any], index: int) -> Any:
        loss = step(world, {key: value for key, value in batch.items() if isinstance(value, Tensor)})
        world.num_steps += 1
        world.losses.append(loss.item())
        if len(world.losses) == 5:
            print(f"step {index}: {sum(world.losses) / 5:.3f}", batch["text"])
            world.losses.clear()
        return loss / batch["num_items_in_batch"]

    twins = Twins(build, counting, call=call)
    for index in range(12):
        numbers = {"num_items_in_batch": 90 + index, "text": [f"row {index}", "another"], "id": f"batch-{index}"}
        twins.step({**padded(8, index), **numbers}, index)
        if index % 3 == 2:
            twins.change(lambda world: world.model.save_pretrained(tmp_path))
            twins.change(lambda world: world.optimizer.load_state_dict(world.optimizer.state_dict()))
    # What is printed every five steps is another graph; so is the number that changes for the first time.
    assert twins.num_captures <= 4, twins.reasons


def test_a_shorter_last_group_of_micro_batches() -> None:
    def accumulated(world: World, batches: list[dict[str, Any]]) -> Tensor:
        world.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            loss = world.model(**batch).loss / len(batches)
            loss.backward()
            total += loss.detach()
        world.optimizer.step()
        return total

    twins = Twins(build, accumulated, call=call)
    for _ in range(2):
        for number in (2, 2, 1):
            twins.step([padded(8, seed) for seed in range(number)])
    assert twins.num_captures == 2, twins.reasons


def test_checkpointing_by_configuration_with_masters_in_float32() -> None:
    def bfloat16() -> World:
        model: Any = tiny_llama().bfloat16()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        return World(model=model, masters=masters, optimizer=torch.optim.AdamW(masters, lr=0.01))

    def mixed(world: World, batch: dict[str, Any]) -> Any:
        loss = world.model(**batch).loss
        loss.backward()
        if not torch.isfinite(loss):
            return None
        for master, parameter in zip(world.masters, world.model.parameters()):
            master.grad = parameter.grad.float()
        world.optimizer.step()
        for master, parameter in zip(world.masters, world.model.parameters()):
            parameter.data.copy_(master)
            parameter.grad = None
        return loss.detach()

    twins = Twins(bfloat16, mixed, call=call)
    for seed in range(4):
        twins.step(padded(8, seed))
    assert twins.num_captures == 1, twins.reasons


def titan_step(world: World, batches: list[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Any]:
    """As torchtitan and torchtune do it: losses by the number of tokens of all micro-batches, one norm, one update."""
    world.optimizer.zero_grad()
    num_tokens = sum((labels != -100).sum() for _, labels in batches)
    losses = []
    for inputs, labels in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = world.model(**inputs).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            loss = loss / num_tokens
        del logits
        loss.backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(world.model.parameters(), 1.0, foreach=True)
    world.optimizer.step()
    world.schedule.step()
    world.num_steps += 1
    return {"loss": torch.stack(losses).sum(), "norm": norm, "step": world.num_steps}


def test_a_step_like_torchtitans() -> None:
    def world() -> World:
        made = build()
        made.schedule = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: min(1.0, (step + 1) / 3))
        return made

    def split(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]

    twins = Twins(world, titan_step, call=call)
    for seed in range(4):
        twins.step([split(packed(16, 2 * seed)), split(packed(16, 2 * seed + 1))])
    assert twins.num_captures <= 2, twins.reasons


def test_a_step_of_timms_loop() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixups: Any = pytest.importorskip("timm.data.mixup", reason="needs timm")
        from timm.loss import SoftTargetCrossEntropy  # pyright: ignore[reportMissingImports]
        from timm.optim import create_optimizer_v2  # pyright: ignore[reportMissingImports]
        from timm.utils import AverageMeter, ModelEmaV3, dispatch_clip_grad  # pyright: ignore[reportMissingImports]

    def world() -> World:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
        optimizer = create_optimizer_v2(model, opt="adamw", lr=0.01, weight_decay=0.05)
        mixup = mixups.Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=5)
        others = {"mixup": mixup, "loss": SoftTargetCrossEntropy(), "losses": AverageMeter(), "num_updates": 0}
        return World(model=model, optimizer=optimizer, ema=ModelEmaV3(model, decay=0.99, use_warmup=True), **others)

    def timm_step(world: World, images: Tensor, classes: Tensor) -> Tensor:
        images, classes = world.mixup(images, classes)
        loss = world.loss(world.model(images), classes)
        world.optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(world.model.parameters(), value=1.0, mode="norm")
        world.optimizer.step()
        world.num_updates += 1
        world.ema.update(world.model, step=world.num_updates)
        world.losses.update(loss.item(), images.size(0))
        return loss

    twins = Twins(world, timm_step, call=call)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        twins.step(torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator))
    assert twins.num_captures <= 2, twins.reasons
