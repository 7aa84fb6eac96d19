# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Contrastive and self-distilled representations."""

from __future__ import annotations

import copy
import math
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import AverageMeter, accuracy, mlp, normal

KIND = "contrastive"


def two_views(n):
    return normal(n, 6, 10), normal(n, 6, 10, seed=1)


class SimCLR:
    """A trainer object with its arguments, as published."""

    def __init__(self) -> None:
        self.args = World(batch_size=6, n_views=2, temperature=0.07, device="cpu", log_every_n_steps=3)
        self.model = mlp(10, 12, 5)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 3e-3, weight_decay=1e-4)
        self.criterion = nn.CrossEntropyLoss()
        self.n_iter = 0
        self.logged = []

    def info_nce_loss(self, features):
        labels = torch.cat([torch.arange(self.args.batch_size) for i in range(self.args.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        labels = labels.to(self.args.device)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(self.args.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long).to(self.args.device)
        logits = logits / self.args.temperature
        return logits, labels

    def train_one(self, *images):
        images = torch.cat(images, dim=0)
        images = images.to(self.args.device)
        features = self.model(images)
        logits, labels = self.info_nce_loss(features)
        loss = self.criterion(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.n_iter % self.args.log_every_n_steps == 0:
            top1, top5 = accuracy(logits, labels, topk=(1, 5))
            self.logged.append((self.n_iter, loss.item(), top1[0].item(), top5[0].item()))
        self.n_iter += 1


@loop(
    "SimCLR, a method of a trainer",
    kind=KIND,
    source="sthalles/SimCLR simclr.py",
    build=lambda: World(trainer=SimCLR()),
    batch=two_views,
    closure=True,
)
def simclr(w):
    return w.trainer.train_one


class MoCo(nn.Module):
    """Momentum contrast with a queue of keys."""

    def __init__(self, dim=5, K=18, m=0.99, T=0.07) -> None:
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = mlp(10, 12, dim, norm=True), mlp(10, 12, dim, norm=True)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T
        ptr = (ptr + batch_size) % self.K
        self.queue_ptr[0] = ptr

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            idx_shuffle = torch.randperm(im_k.shape[0])
            idx_unshuffle = torch.argsort(idx_shuffle)
            k = nn.functional.normalize(self.encoder_k(im_k[idx_shuffle]), dim=1)
            k = k[idx_unshuffle]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1)
        logits /= self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


def moco_world() -> World:
    model = MoCo()
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    meters = World(losses=AverageMeter(), top1=AverageMeter(), top5=AverageMeter())
    return World(model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), meters=meters, i=0)


@loop(
    "MoCo, a queue of keys", kind=KIND, source="facebookresearch/moco main_moco.py", build=moco_world, batch=two_views
)
def moco(w, *images):
    output, target = w.model(im_q=images[0], im_k=images[1])
    loss = w.criterion(output, target)
    acc1, acc5 = accuracy(output, target, topk=(1, 5))
    w.meters.losses.update(loss.item(), images[0].size(0))
    w.meters.top1.update(acc1[0], images[0].size(0))
    w.meters.top5.update(acc5[0], images[0].size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.i % 3 == 0:
        print(f"[{w.i}] Loss {w.meters.losses.val:.4e} ({w.meters.losses.avg:.4e})")
    w.i += 1


class EMA:
    """Of byol-pytorch."""

    def __init__(self, beta) -> None:
        self.beta = beta

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new


class RandomApply(nn.Module):
    """An augmentation that is drawn in Python."""

    def __init__(self, fn, p) -> None:
        super().__init__()
        self.fn, self.p = fn, p

    def forward(self, x):
        if random.random() > self.p:
            return x
        return self.fn(x)


class NetWrapper(nn.Module):
    """Catches a hidden layer's output by a hook, and makes its projector when it first sees one."""

    def __init__(self, net, layer) -> None:
        super().__init__()
        self.net, self.layer = net, layer
        self.projector = None
        self.hidden = {}
        self.hook_registered = False

    def _hook(self, _, input, output):
        self.hidden[input[0].device] = output.flatten(1)

    def get_representation(self, x):
        if not self.hook_registered:
            [*self.net.children()][self.layer].register_forward_hook(self._hook)
            self.hook_registered = True
        self.hidden.clear()
        _ = self.net(x)
        hidden = self.hidden[x.device]
        self.hidden.clear()
        assert hidden is not None, f"hidden layer {self.layer} never emitted an output"
        return hidden

    def forward(self, x):
        representation = self.get_representation(x)
        if self.projector is None:
            self.projector = mlp(representation.shape[1], 12, 5, norm=True)
        return self.projector(representation), representation


def loss_fn(x, y):
    x, y = F.normalize(x, dim=-1, p=2), F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


class BYOL(nn.Module):
    """Predicts the projections of a moving average of itself, which it makes at its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online_encoder = NetWrapper(mlp(10, 12, 8), layer=-2)
        self.online_predictor = mlp(5, 12, 5, norm=True)
        self.target_encoder = None
        self.target_ema_updater = EMA(0.99)
        self.augment = RandomApply(lambda x: x * 0.5, p=0.3)
        self.forward(torch.randn(2, 10))

    def _get_target_encoder(self):
        if self.target_encoder is None:
            self.target_encoder = copy.deepcopy(self.online_encoder)
            for p in self.target_encoder.parameters():
                p.requires_grad = False
        return self.target_encoder

    def update_moving_average(self):
        assert self.target_encoder is not None, "target encoder has not been created yet"
        for current_params, ma_params in zip(self.online_encoder.parameters(), self.target_encoder.parameters()):
            old_weight, up_weight = ma_params.data, current_params.data
            ma_params.data = self.target_ema_updater.update_average(old_weight, up_weight)

    def forward(self, x):
        assert not (self.training and x.shape[0] == 1), "you must have greater than 1 sample when training"
        images = torch.cat((self.augment(x), self.augment(x)), dim=0)
        online_projections, _ = self.online_encoder(images)
        online_pred_one, online_pred_two = self.online_predictor(online_projections).chunk(2, dim=0)
        with torch.no_grad():
            target_projections, _ = self._get_target_encoder()(images)
            target_projections = target_projections.detach()
            target_proj_one, target_proj_two = target_projections.chunk(2, dim=0)
        loss_one = loss_fn(online_pred_one, target_proj_two.detach())
        loss_two = loss_fn(online_pred_two, target_proj_one.detach())
        return (loss_one + loss_two).mean()


def byol_world() -> World:
    learner = BYOL()
    return World(learner=learner, opt=torch.optim.Adam(learner.parameters(), lr=3e-3))


@loop(
    "BYOL", kind=KIND, source="lucidrains/byol-pytorch README.md", build=byol_world, batch=lambda n: (normal(n, 6, 10),)
)
def byol(w, images):
    loss = w.learner(images)
    w.opt.zero_grad()
    loss.backward()
    w.opt.step()
    w.learner.update_moving_average()


class DINOLoss(nn.Module):
    """Cross-entropy of student and teacher, whose outputs are centred and sharpened by a schedule in NumPy."""

    def __init__(self, out_dim=6, ncrops=4, epochs=6) -> None:
        super().__init__()
        self.student_temp, self.center_momentum, self.ncrops = 0.1, 0.9, ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.teacher_temp_schedule = np.concatenate((np.linspace(0.04, 0.07, 3), np.ones(epochs - 3) * 0.07))

    def forward(self, student_output, teacher_output, epoch):
        student_out = student_output / self.student_temp
        student_out = student_out.chunk(self.ncrops)
        temp = self.teacher_temp_schedule[epoch]
        teacher_out = F.softmax((teacher_output - self.center) / temp, dim=-1)
        teacher_out = teacher_out.detach().chunk(2)
        total_loss = 0
        n_loss_terms = 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1)
                total_loss += loss.mean()
                n_loss_terms += 1
        total_loss /= n_loss_terms
        self.update_center(teacher_output)
        return total_loss

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        batch_center = batch_center / len(teacher_output)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def clip_gradients(model, clip):
    norms = []
    for _name, p in model.named_parameters():
        if p.grad is not None:
            param_norm = p.grad.data.norm(2)
            norms.append(param_norm.item())
            clip_coef = clip / (param_norm + 1e-6)
            if clip_coef < 1:
                p.grad.data.mul_(clip_coef)
    return norms


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def dino_world(clip_grad: float = 0) -> World:
    student = nn.Sequential()
    student.body = mlp(10, 12, 8)
    student.last_layer = nn.Linear(8, 6)
    teacher = copy.deepcopy(student).requires_grad_(False)
    regularized = [p for p in student.parameters() if p.ndim > 1]
    rest = [p for p in student.parameters() if p.ndim == 1]
    return World(
        student=student,
        teacher=teacher,
        dino_loss=DINOLoss(),
        optimizer=torch.optim.AdamW([{"params": regularized}, {"params": rest, "weight_decay": 0.0}]),
        lr_schedule=np.linspace(0.001, 0.01, 20),
        wd_schedule=np.linspace(0.04, 0.4, 20),
        momentum_schedule=np.linspace(0.996, 1, 20),
        args=World(clip_grad=clip_grad, freeze_last_layer=1),
        it=0,
        epoch=0,
        losses=AverageMeter(),
        lrs=AverageMeter(),
    )


def next_epoch(w, returned, n) -> None:
    w.it += 1
    w.epoch = w.it // 3


def crops(n):
    return tuple(normal(n, 4, 10, seed=seed) for seed in range(4))


@loop(
    "DINO, schedules set in the step",
    kind=KIND,
    source="facebookresearch/dino main_dino.py",
    build=dino_world,
    batch=crops,
    between=next_epoch,
    calls=12,
)
def dino(w, *images):
    for i, param_group in enumerate(w.optimizer.param_groups):
        param_group["lr"] = w.lr_schedule[w.it]
        if i == 0:
            param_group["weight_decay"] = w.wd_schedule[w.it]
    images = [im.to("cpu", non_blocking=True) for im in images]
    teacher_output = w.teacher(torch.cat(images[:2]))
    student_output = w.student(torch.cat(images))
    loss = w.dino_loss(student_output, teacher_output, w.epoch)
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training", force=True)
        sys.exit(1)
    w.optimizer.zero_grad()
    loss.backward()
    if w.args.clip_grad:
        clip_gradients(w.student, w.args.clip_grad)
    cancel_gradients_last_layer(w.epoch, w.student, w.args.freeze_last_layer)
    w.optimizer.step()
    with torch.no_grad():
        m = w.momentum_schedule[w.it]
        for param_q, param_k in zip(w.student.parameters(), w.teacher.parameters()):
            param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
    w.losses.update(loss.item())
    w.lrs.update(w.optimizer.param_groups[0]["lr"])


@loop(
    "DINO, gradients clipped one by one",
    kind=KIND,
    source="facebookresearch/dino utils.py",
    build=lambda: dino_world(clip_grad=0.05),
    batch=crops,
    between=next_epoch,
)
def dino_clipped(w, *images):
    teacher_output = w.teacher(torch.cat(images[:2]))
    student_output = w.student(torch.cat(images))
    loss = w.dino_loss(student_output, teacher_output, w.epoch)
    w.optimizer.zero_grad()
    loss.backward()
    if w.args.clip_grad:
        clip_gradients(w.student, w.args.clip_grad)
    w.optimizer.step()
    w.losses.update(loss.item())


@edit(
    "DINO, gradients clipped one by one",
    "`(clip / (norm + 1e-6)).clamp(max=1)` instead of the `if`",
)
def dino_clamped(w, *images):
    teacher_output = w.teacher(torch.cat(images[:2]))
    student_output = w.student(torch.cat(images))
    loss = w.dino_loss(student_output, teacher_output, w.epoch)
    w.optimizer.zero_grad()
    loss.backward()
    for p in w.student.parameters():
        p.grad.data.mul_((w.args.clip_grad / (p.grad.data.norm(2) + 1e-6)).clamp(max=1))
    w.optimizer.step()
    w.losses.update(loss.item())
