# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportPrivateImportUsage=false
"""The body of timm's train_one_epoch with the parts of the package: mixup, ways to clip, averages, accumulation."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import nn

from benchmarks.loops import World, loop
from benchmarks.loops.parts import images

_logger = logging.getLogger("train")


class Small(nn.Module):
    """Adaptive clipping asks a model for its classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6)
        self.drop, self.fc = nn.Dropout(0.1), nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(self.drop(x.mean((2, 3))))


def epoch_world(clip_mode, accum_steps=1, mixup=True, opt="adamw") -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from timm.data.mixup import Mixup
        from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
        from timm.optim import create_optimizer_v2
        from timm.scheduler.cosine_lr import CosineLRScheduler
        from timm.utils import AverageMeter, ModelEmaV3
    model = Small()
    optimizer = create_optimizer_v2(model, opt=opt, lr=0.01, weight_decay=0.05, momentum=0.9)
    scheduler = CosineLRScheduler(optimizer, t_initial=20, warmup_t=3, warmup_lr_init=1e-4, t_in_epochs=False)
    mixup_fn = Mixup(mixup_alpha=0.2, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=5) if mixup else None
    return World(
        model=model,
        optimizer=optimizer,
        loss_fn=SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(0.1),
        mixup_fn=mixup_fn,
        model_ema=ModelEmaV3(model, decay=0.99, use_warmup=True),
        lr_scheduler=scheduler,
        losses_m=AverageMeter(),
        clip_grad={"norm": 1.0, "value": 0.05, "agc": 0.02}[clip_mode],
        clip_mode=clip_mode,
        accum_steps=accum_steps,
        updates_per_epoch=(10 + accum_steps - 1) // accum_steps,
        last_accum_steps=10 % accum_steps,
        batch_idx=0,
        epoch=0,
        num_updates=0,
        update_sample_count=0,
    )


def train_one_batch(w, inputs, target):
    from timm.models import model_parameters
    from timm.utils import dispatch_clip_grad

    last_batch_idx = 9
    last_batch_idx_to_accum = 10 - w.last_accum_steps
    batch_idx, accum_steps = w.batch_idx, w.accum_steps
    last_batch = batch_idx == last_batch_idx
    need_update = last_batch or (batch_idx + 1) % accum_steps == 0
    update_idx = batch_idx // accum_steps
    if batch_idx >= last_batch_idx_to_accum:
        accum_steps = w.last_accum_steps
    if w.mixup_fn is not None:
        inputs, target = w.mixup_fn(inputs, target)
    output = w.model(inputs)
    loss = w.loss_fn(output, target)
    if accum_steps > 1:
        loss /= accum_steps
    loss.backward(create_graph=False)
    if need_update:
        parameters = model_parameters(w.model, exclude_head="agc" in w.clip_mode)
        dispatch_clip_grad(parameters, value=w.clip_grad, mode=w.clip_mode)
        w.optimizer.step()
    w.losses_m.update(loss.item() * accum_steps, inputs.size(0))
    w.update_sample_count += inputs.size(0)
    w.batch_idx += 1
    if not need_update:
        return
    w.num_updates += 1
    w.optimizer.zero_grad()
    w.model_ema.update(w.model, step=w.num_updates)
    if last_batch or update_idx % 2 == 0:
        lrl = [param_group["lr"] for param_group in w.optimizer.param_groups]
        lr = sum(lrl) / len(lrl)
        _logger.warning(
            f"Train: {w.epoch} [{update_idx:>4d}/{w.updates_per_epoch} "
            f"({100.0 * (update_idx + 1) / w.updates_per_epoch:>3.0f}%)]  "
            f"Loss: {w.losses_m.val:#.3g} ({w.losses_m.avg:#.3g})  LR: {lr:.3e}"
        )
    w.lr_scheduler.step_update(num_updates=w.num_updates, metric=w.losses_m.avg)
    w.update_sample_count = 0


def of_mode(name, **options) -> None:
    loop(
        name,
        kind="timm's epoch",
        source="huggingface/pytorch-image-models train.py train_one_epoch",
        build=lambda: epoch_world(**options),
        batch=images,
        calls=10,
    )(train_one_batch)


of_mode("timm, clipped by norm, mixup", clip_mode="norm")
of_mode("timm, clipped by value, accumulated", clip_mode="value", accum_steps=3, mixup=False)
of_mode("timm, adaptive clipping, LAMB", clip_mode="agc", opt="lamb")
