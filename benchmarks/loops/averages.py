# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Moving averages of weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, loop
from benchmarks.loops.pieces import AverageMeter, integers, mlp, normal

KIND = "averages of weights"


def labelled(n):
    return normal(n, 6, 10), integers(n, 4, 6)


def timm_world() -> World:
    from timm.utils import ModelEmaV3

    model = mlp(10, 12, 4, norm=True)
    ema = ModelEmaV3(model, decay=0.99, use_warmup=True, update_after_step=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return World(model=model, model_ema=ema, optimizer=optimizer, losses_m=AverageMeter(), num_updates=0)


@loop(
    "ModelEmaV3 with warm-up",
    kind=KIND,
    source="huggingface/pytorch-image-models train.py",
    build=timm_world,
    batch=labelled,
    calls=9,
)
def timm_ema(w, input, target):
    output = w.model(input)
    loss = F.cross_entropy(output, target)
    w.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    w.optimizer.step()
    w.num_updates += 1
    w.model_ema.update(w.model, step=w.num_updates)
    w.losses_m.update(loss.item(), input.size(0))


def diffusers_world() -> World:
    from diffusers.training_utils import EMAModel

    model = mlp(10, 12, 4)
    ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return World(unet=model, ema_unet=ema, optimizer=optimizer, global_step=0, train_loss=0.0)


@loop(
    "EMAModel of diffusers",
    kind=KIND,
    source="huggingface/diffusers examples/text_to_image/train_text_to_image.py",
    build=diffusers_world,
    batch=labelled,
)
def diffusers_ema(w, x, y):
    loss = F.cross_entropy(w.unet(x), y)
    w.train_loss += loss.repeat(6).mean().item() / 1
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.unet.parameters(), 1.0)
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.ema_unet.step(w.unet.parameters())
    w.global_step += 1
    w.train_loss = 0.0
    return {"step_loss": loss.detach().item()}


def swa_world() -> World:
    model = mlp(10, 12, 4, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return World(
        model=model,
        swa_model=torch.optim.swa_utils.AveragedModel(model),
        optimizer=optimizer,
        swa_scheduler=torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2),
        epoch=0,
    )


def anneal(w, returned, n) -> None:
    w.epoch += 1
    if w.epoch > 3:
        w.swa_scheduler.step()


@loop(
    "stochastic weight averaging, from an epoch on",
    kind=KIND,
    source="pytorch/pytorch docs/source/optim.md",
    build=swa_world,
    batch=labelled,
    between=anneal,
    calls=9,
)
def swa(w, input, target):
    w.optimizer.zero_grad()
    loss = F.cross_entropy(w.model(input), target)
    loss.backward()
    w.optimizer.step()
    if w.epoch > 2:
        w.swa_model.update_parameters(w.model)
    return loss


class EMA:
    """A shadow of each parameter by name, with the number of updates: the one of the tutorials."""

    def __init__(self, model, decay, use_num_updates=True) -> None:
        self.decay, self.num_updates = decay, 0 if use_num_updates else None
        self.shadow = {name: param.data.clone() for name, param in model.named_parameters() if param.requires_grad}
        self.backup = {}

    def update(self, model):
        decay = self.decay
        if self.num_updates is not None:
            self.num_updates += 1
            decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert name in self.shadow
                self.shadow[name] = (1.0 - decay) * param.data + decay * self.shadow[name].clone()

    def apply_shadow(self, model):
        for name, param in model.named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def restore(self, model):
        for name, param in model.named_parameters():
            param.data = self.backup[name]
        self.backup = {}


def shadow_world() -> World:
    model = mlp(10, 12, 4)
    return World(model=model, ema=EMA(model, 0.9), optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), val=[])


@torch.no_grad()
def validate_with_shadow(w, returned, n) -> None:
    if n % 3 == 2:
        w.ema.apply_shadow(w.model)
        w.val.append(w.model(normal(99, 2, 10)).sum().item())
        w.ema.restore(w.model)


@loop(
    "a shadow by name, swapped in for validation",
    kind=KIND,
    source="CompVis/latent-diffusion ldm/modules/ema.py",
    build=shadow_world,
    batch=labelled,
    between=validate_with_shadow,
)
def shadow(w, x, y):
    loss = F.cross_entropy(w.model(x), y)
    loss.backward()
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.ema.update(w.model)
    return loss.item()


def mean_teacher_world() -> World:
    model = mlp(10, 12, 4, norm=True)
    ema_model = copy.deepcopy(model)
    for param in ema_model.parameters():
        param.detach_()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    args = World(consistency=10.0, consistency_rampup=5, lr=0.05, lr_rampup=3, ema_decay=0.99, print_freq=3)
    return World(
        model=model,
        ema_model=ema_model,
        optimizer=optimizer,
        args=args,
        meters=AverageMeters(),
        global_step=0,
        epoch=0,
        i=0,
    )


class AverageMeters:
    """Meters by name."""

    def __init__(self) -> None:
        self.meters = {}

    def __getitem__(self, key):
        return self.meters[key]

    def update(self, name, value, n=1):
        if name not in self.meters:
            self.meters[name] = AverageMeter()
        self.meters[name].update(value, n)


def sigmoid_rampup(current, rampup_length):
    import numpy as np

    if rampup_length == 0:
        return 1.0
    current = np.clip(current, 0.0, rampup_length)
    phase = 1.0 - current / rampup_length
    return float(np.exp(-5.0 * phase * phase))


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def advance(w, returned, n) -> None:
    w.i += 1
    w.epoch = n // 3


def partly_labelled(n):
    target = integers(n, 4, 6)
    target[2 + n % 3 :] = -1
    return normal(n, 6, 10), normal(n, 6, 10, seed=1), target


@loop(
    "Mean Teacher, ramped up",
    kind="semi-supervised",
    source="CuriousAI/mean-teacher pytorch/main.py",
    build=mean_teacher_world,
    batch=partly_labelled,
    between=advance,
    calls=9,
)
def mean_teacher(w, input, ema_input, target):
    meters = w.meters
    lr = w.args.lr * min(1.0, (w.epoch + w.i / 9) / w.args.lr_rampup)
    for param_group in w.optimizer.param_groups:
        param_group["lr"] = lr
    meters.update("lr", w.optimizer.param_groups[0]["lr"])
    minibatch_size = len(target)
    labeled_minibatch_size = target.data.ne(-1).sum()
    assert labeled_minibatch_size > 0
    meters.update("labeled_minibatch_size", labeled_minibatch_size)
    with torch.no_grad():
        ema_logit = w.ema_model(ema_input)
    class_logit = w.model(input)
    class_criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-1)
    class_loss = class_criterion(class_logit, target) / minibatch_size
    meters.update("class_loss", class_loss.item())
    consistency_weight = w.args.consistency * sigmoid_rampup(w.epoch, w.args.consistency_rampup)
    meters.update("cons_weight", consistency_weight)
    softmaxes = F.softmax(class_logit, dim=1), F.softmax(ema_logit.detach(), dim=1)
    consistency_loss = consistency_weight * F.mse_loss(*softmaxes, reduction="sum") / 4 / minibatch_size
    meters.update("cons_loss", consistency_loss.item())
    loss = class_loss + consistency_loss
    assert not (torch.isnan(loss) or loss.item() > 1e5), f"Loss explosion: {loss.item()}"
    meters.update("loss", loss.item())
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.global_step += 1
    update_ema_variables(w.model, w.ema_model, w.args.ema_decay, w.global_step)
    if w.i % w.args.print_freq == 0:
        print(f"Epoch: [{w.epoch}][{w.i}]\tClass {meters['class_loss'].val:.4f}\tCons {meters['cons_loss'].avg:.4f}")
