"""Image classification."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.parts import AverageMeter, ProgressMeter, SmallConvNet, accuracy, images


def mnist_world() -> World:
    model = SmallConvNet()
    return World(model=model, optimizer=torch.optim.Adadelta(model.parameters(), lr=1.0), batch_idx=0, epoch=1)


@loop("MNIST", kind="vision", source="pytorch/examples mnist/main.py", build=mnist_world, batch=images)
def mnist(w: World, data: Tensor, target: Tensor) -> Any:
    data, target = data.to("cpu"), target.to("cpu")
    w.optimizer.zero_grad()
    output = F.log_softmax(w.model(data), dim=1)
    loss = F.nll_loss(output, target)
    loss.backward()
    w.optimizer.step()
    if w.batch_idx % 3 == 0:
        done = 100.0 * w.batch_idx / 100
        print(f"Train Epoch: {w.epoch} [{w.batch_idx * len(data)}/600 ({done:.0f}%)]\tLoss: {loss.item():.6f}")
    w.batch_idx += 1


def imagenet_world() -> World:
    model = SmallConvNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    losses, top1, top5 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    return World(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        losses=losses,
        top1=top1,
        top5=top5,
        progress=ProgressMeter(100, [losses, top1, top5], prefix="Epoch: [0]"),
        i=0,
        print_freq=3,
    )


@loop("ImageNet, meters", kind="vision", source="pytorch/examples imagenet/main.py", build=imagenet_world, batch=images)
def imagenet(w: World, inputs: Tensor, target: Tensor) -> Any:
    inputs = inputs.to("cpu", non_blocking=True)
    target = target.to("cpu", non_blocking=True)
    output = w.model(inputs)
    loss = w.criterion(output, target)
    acc1, acc5 = accuracy(output, target, topk=(1, 5))
    w.losses.update(loss.item(), inputs.size(0))
    w.top1.update(acc1[0], inputs.size(0))
    w.top5.update(acc5[0], inputs.size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.i % w.print_freq == 0:
        w.progress.display(w.i + 1)
    w.i += 1


def one_hot(x: Tensor, num_classes: int, on_value: float, off_value: float) -> Tensor:
    x = x.long().view(-1, 1)
    return torch.full((x.size()[0], num_classes), off_value).scatter_(1, x, on_value)


class Mixup:
    """Mixup or cutmix, chosen by a draw, with smoothed targets; draws from `random` and NumPy as timm does."""

    def __init__(self, cutmix: bool) -> None:
        self.mixup_alpha, self.cutmix_alpha = 0.8, 1.0 if cutmix else 0.0
        self.mix_prob, self.switch_prob, self.label_smoothing = 1.0, 0.5, 0.1
        self.num_classes, self.mixup_enabled = 5, True

    def params_per_batch(self) -> tuple[float, bool]:
        import numpy as np

        lam, use_cutmix = 1.0, False
        if self.mixup_enabled and np.random.rand() < self.mix_prob:
            if self.cutmix_alpha > 0.0:
                use_cutmix = bool(np.random.rand() < self.switch_prob)
                alpha = self.cutmix_alpha if use_cutmix else self.mixup_alpha
                lam_mix = np.random.beta(alpha, alpha)
            else:
                lam_mix = np.random.beta(self.mixup_alpha, self.mixup_alpha)
            lam = float(lam_mix)
        return lam, use_cutmix

    def rand_bbox(self, img_h: int, img_w: int, lam: float) -> tuple[int, int, int, int]:
        import numpy as np

        ratio = np.sqrt(1 - lam)
        cut_h, cut_w = int(img_h * ratio), int(img_w * ratio)
        cy, cx = np.random.randint(0, img_h), np.random.randint(0, img_w)
        yl, yh = np.clip(cy - cut_h // 2, 0, img_h), np.clip(cy + cut_h // 2, 0, img_h)
        xl, xh = np.clip(cx - cut_w // 2, 0, img_w), np.clip(cx + cut_w // 2, 0, img_w)
        return yl, yh, xl, xh

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        assert len(x) % 2 == 0, "Batch size should be even when using this"
        lam, use_cutmix = self.params_per_batch()
        if lam != 1.0:
            if use_cutmix:
                yl, yh, xl, xh = self.rand_bbox(x.shape[-2], x.shape[-1], lam)
                x[:, :, yl:yh, xl:xh] = x.flip(0)[:, :, yl:yh, xl:xh]
                lam = 1.0 - (yh - yl) * (xh - xl) / float(x.shape[-1] * x.shape[-2])
            else:
                x_flipped = x.flip(0).mul_(1.0 - lam)
                x.mul_(lam).add_(x_flipped)
        off_value = self.label_smoothing / self.num_classes
        y1 = one_hot(target, self.num_classes, 1.0 - self.label_smoothing + off_value, off_value)
        y2 = one_hot(target.flip(0), self.num_classes, 1.0 - self.label_smoothing + off_value, off_value)
        return x, y1 * lam + y2 * (1.0 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class ModelEma(nn.Module):
    """An average of all entries of a model's state."""

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        super().__init__()
        import copy

        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def timm_world(cutmix: bool = False) -> World:
    model = SmallConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    return World(
        model=model,
        optimizer=optimizer,
        mixup_fn=Mixup(cutmix),
        loss_fn=SoftTargetCrossEntropy(),
        model_ema=ModelEma(model),
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        losses_m=AverageMeter("Loss"),
        num_updates=0,
        batch_idx=0,
        last_idx=7,
        log_interval=3,
        clip_grad=1.0,
    )


def timm_step(w: World, inputs: Tensor, target: Tensor) -> Any:
    last_batch = w.batch_idx == w.last_idx
    if w.mixup_fn is not None:
        inputs, target = w.mixup_fn(inputs, target)
    output = w.model(inputs)
    loss = w.loss_fn(output, target)
    w.optimizer.zero_grad()
    loss.backward()
    if w.clip_grad is not None:
        torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.clip_grad)
    w.optimizer.step()
    if w.model_ema is not None:
        w.model_ema.update(w.model)
    w.losses_m.update(loss.item() * 1, inputs.size(0))
    w.num_updates += 1
    if last_batch or w.batch_idx % w.log_interval == 0:
        lrl = [param_group["lr"] for param_group in w.optimizer.param_groups]
        lr = sum(lrl) / len(lrl)
        print(f"Train: 0 [{w.batch_idx:>4d}/8] Loss: {w.losses_m.val:#.3g} ({w.losses_m.avg:#.3g}) LR: {lr:.3e}")
    w.batch_idx += 1


def timm_between(w: World, returned: Any, number: int) -> None:
    w.lr_scheduler.step()


TIMM = {"kind": "vision", "source": "huggingface/pytorch-image-models train.py", "between": timm_between}
loop("timm with mixup and EMA", build=timm_world, batch=images, **TIMM)(timm_step)
loop("timm with cutmix", build=lambda: timm_world(cutmix=True), batch=images, **TIMM)(timm_step)


def multi_scale(w: World, inputs: Tensor, target: Tensor) -> Any:
    """Images in a size that changes every few batches, drawn by Python."""
    if w.n % 3 == 0:
        w.size = random.choice([6, 8, 10])
    inputs = F.interpolate(inputs, size=(w.size, w.size), mode="bilinear", align_corners=False)
    loss = F.cross_entropy(w.model(inputs).mean((2, 3)), target, label_smoothing=0.1)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.n += 1
    return {"loss": loss.item(), "size": w.size}


def multi_scale_world() -> World:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1))
    return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), n=0, size=8)


loop(
    "multi-scale training",
    kind="vision",
    source="ultralytics/yolov5 train.py (--multi-scale)",
    build=multi_scale_world,
    batch=images,
)(multi_scale)


def draw_size(w: World, returned: Any) -> None:
    if w.n % 3 == 0:
        w.size = random.choice([6, 8, 10])


@edit("multi-scale training", "the size is drawn after the call, for the next one", between=draw_size)
def multi_scale_edited(w: World, inputs: Tensor, target: Tensor) -> Any:
    inputs = F.interpolate(inputs, size=(w.size, w.size), mode="bilinear", align_corners=False)
    loss = F.cross_entropy(w.model(inputs).mean((2, 3)), target, label_smoothing=0.1)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.n += 1
    return {"loss": loss.item(), "size": w.size}
