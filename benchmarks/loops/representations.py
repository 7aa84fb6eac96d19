# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Representations: decorrelated, supervised, of images and text."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.contrastive import KIND, two_views
from benchmarks.loops.pieces import AverageMeter, integers, mlp, normal


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class BarlowTwins(nn.Module):
    """The cross-correlation of two views, as near to the identity as can be."""

    def __init__(self, args) -> None:
        super().__init__()
        self.args = args
        self.backbone = mlp(10, 12)
        self.projector = mlp(12, 12, 7, norm=True)
        self.bn = nn.BatchNorm1d(7, affine=False)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(self.args.batch_size)
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diag = off_diagonal(c).pow_(2).sum()
        return on_diag + self.args.lambd * off_diag


class LARS(torch.optim.Optimizer):
    """Layer-wise rates for all but biases."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.9, eta=0.001) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, eta=eta))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if p.ndim != 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                    param_norm = torch.norm(p)
                    update_norm = torch.norm(dp)
                    one = torch.ones_like(param_norm)
                    q = torch.where(
                        param_norm > 0.0, torch.where(update_norm > 0, (g["eta"] * param_norm / update_norm), one), one
                    )
                    dp = dp.mul(q)
                param_state = self.state[p]
                if "mu" not in param_state:
                    param_state["mu"] = torch.zeros_like(p)
                mu = param_state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


def adjust_learning_rate(args, optimizer, step):
    max_steps = args.epochs * args.steps_per_epoch
    warmup_steps = args.steps_per_epoch
    base_lr = args.batch_size / 256
    if step < warmup_steps:
        lr = base_lr * step / warmup_steps
    else:
        step -= warmup_steps
        max_steps -= warmup_steps
        q = 0.5 * (1 + math.cos(math.pi * step / max_steps))
        end_lr = base_lr * 0.001
        lr = base_lr * q + end_lr * (1 - q)
    for group in optimizer.param_groups:
        group["lr"] = lr * args.learning_rate
    return lr


def barlow_world() -> World:
    args = World(batch_size=6, lambd=0.0051, epochs=4, steps_per_epoch=4, learning_rate=2.0, print_freq=3)
    model = BarlowTwins(args)
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = LARS([{"params": weights}, {"params": biases}], lr=0.0, weight_decay=1e-6)
    return World(model=model, optimizer=optimizer, args=args, step=0)


@loop(
    "Barlow Twins, LARS, rate set in the step",
    kind=KIND,
    source="facebookresearch/barlowtwins main.py",
    build=barlow_world,
    batch=two_views,
    calls=10,
)
def barlow(w, y1, y2):
    adjust_learning_rate(w.args, w.optimizer, w.step)
    w.optimizer.zero_grad()
    loss = w.model.forward(y1, y2)
    loss.backward()
    w.optimizer.step()
    if w.step % w.args.print_freq == 0:
        stats = dict(step=w.step, lr_weights=w.optimizer.param_groups[0]["lr"], loss=loss.item())
        print(json.dumps(stats))
    w.step += 1


@edit("Barlow Twins, LARS, rate set in the step", "print the numbers by themselves instead of `json.dumps` of them")
def barlow_printed(w, y1, y2):
    adjust_learning_rate(w.args, w.optimizer, w.step)
    w.optimizer.zero_grad()
    loss = w.model.forward(y1, y2)
    loss.backward()
    w.optimizer.step()
    if w.step % w.args.print_freq == 0:
        print("step", w.step, "lr_weights", w.optimizer.param_groups[0]["lr"], "loss", loss.item())
    w.step += 1


class VICReg(nn.Module):
    """Variance, invariance and covariance of two views."""

    def __init__(self, args) -> None:
        super().__init__()
        self.args, self.num_features = args, 7
        self.backbone, self.projector = mlp(10, 12), mlp(12, 12, 7, norm=True)

    def forward(self, x, y):
        x, y = self.projector(self.backbone(x)), self.projector(self.backbone(y))
        repr_loss = F.mse_loss(x, y)
        x = x - x.mean(dim=0)
        y = y - y.mean(dim=0)
        std_x = torch.sqrt(x.var(dim=0) + 0.0001)
        std_y = torch.sqrt(y.var(dim=0) + 0.0001)
        std_loss = torch.mean(F.relu(1 - std_x)) / 2 + torch.mean(F.relu(1 - std_y)) / 2
        cov_x = (x.T @ x) / (self.args.batch_size - 1)
        cov_y = (y.T @ y) / (self.args.batch_size - 1)
        cov_loss = off_diagonal(cov_x).pow_(2).sum().div(self.num_features) + off_diagonal(cov_y).pow_(2).sum().div(
            self.num_features
        )
        return 25.0 * repr_loss + 25.0 * std_loss + 1.0 * cov_loss


def vicreg_world() -> World:
    model = VICReg(World(batch_size=6))
    optimizer = LARS(model.parameters(), lr=0.02, weight_decay=1e-6)
    return World(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False), last_loss=None)


@loop("VICReg", kind=KIND, source="facebookresearch/vicreg main_vicreg.py", build=vicreg_world, batch=two_views)
def vicreg(w, x, y):
    w.optimizer.zero_grad()
    loss = w.model.forward(x, y)
    w.scaler.scale(loss).backward()
    w.scaler.step(w.optimizer)
    w.scaler.update()
    w.last_loss = loss.item()


class SupConLoss(nn.Module):
    """Supervised contrastive loss, with the checks of its author."""

    def __init__(self, temperature=0.07, contrast_mode="all") -> None:
        super().__init__()
        self.temperature, self.contrast_mode = temperature, contrast_mode

    def forward(self, features, labels=None, mask=None):
        if len(features.shape) < 3:
            raise ValueError("`features` needs to be [bsz, n_views, ...],at least 3 dimensions are required")
        batch_size = features.shape[0]
        if labels is not None and mask is not None:
            raise ValueError("Cannot define both `labels` and `mask`")
        if labels is None and mask is None:
            mask = torch.eye(batch_size, dtype=torch.float32)
        elif labels is not None:
            labels = labels.contiguous().view(-1, 1)
            if labels.shape[0] != batch_size:
                raise ValueError("Num of labels does not match num of features")
            mask = torch.eq(labels, labels.T).float()
        contrast_count = features.shape[1]
        contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)
        anchor_feature, anchor_count = contrast_feature, contrast_count
        anchor_dot_contrast = torch.div(torch.matmul(anchor_feature, contrast_feature.T), self.temperature)
        logits_max, _ = torch.max(anchor_dot_contrast, dim=1, keepdim=True)
        logits = anchor_dot_contrast - logits_max.detach()
        mask = mask.repeat(anchor_count, contrast_count)
        logits_mask = torch.scatter(torch.ones_like(mask), 1, torch.arange(batch_size * anchor_count).view(-1, 1), 0)
        mask = mask * logits_mask
        exp_logits = torch.exp(logits) * logits_mask
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        mask_pos_pairs = mask.sum(1)
        mask_pos_pairs = torch.where(mask_pos_pairs < 1e-6, 1, mask_pos_pairs)
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask_pos_pairs
        return (-mean_log_prob_pos).view(anchor_count, batch_size).mean()


def supcon_world() -> World:
    model = mlp(10, 12, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    opt = World(warm=True, warm_epochs=2, warmup_from=0.01, warmup_to=0.05, print_freq=2)
    return World(
        model=model, optimizer=optimizer, criterion=SupConLoss(), losses=AverageMeter(), opt=opt, idx=0, epoch=1
    )


@loop(
    "SupCon, warm-up set in the step",
    kind=KIND,
    source="HobbitLong/SupContrast main_supcon.py",
    build=supcon_world,
    batch=lambda n: (list(two_views(n)), integers(n, 3, 6)),
)
def supcon(w, images, labels):
    images = torch.cat([images[0], images[1]], dim=0)
    bsz = labels.shape[0]
    if w.opt.warm and w.epoch <= w.opt.warm_epochs:
        p = (w.idx + (w.epoch - 1) * 10) / (w.opt.warm_epochs * 10)
        lr = w.opt.warmup_from + p * (w.opt.warmup_to - w.opt.warmup_from)
        for param_group in w.optimizer.param_groups:
            param_group["lr"] = lr
    features = F.normalize(w.model(images), dim=1)
    f1, f2 = torch.split(features, [bsz, bsz], dim=0)
    features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)
    loss = w.criterion(features, labels)
    w.losses.update(loss.item(), bsz)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if (w.idx + 1) % w.opt.print_freq == 0:
        print(f"Train: [{w.epoch}][{w.idx + 1}]\tloss {w.losses.val:.3f} ({w.losses.avg:.3f})")
    w.idx += 1


class ClipLoss(nn.Module):
    """Keeps the labels that it has made once."""

    def __init__(self, cache_labels=True) -> None:
        super().__init__()
        self.cache_labels, self.prev_num_logits, self.labels = cache_labels, 0, {}

    def get_ground_truth(self, device, num_logits):
        if self.prev_num_logits != num_logits or device not in self.labels:
            labels = torch.arange(num_logits, device=device, dtype=torch.long)
            if self.cache_labels:
                self.labels[device] = labels
                self.prev_num_logits = num_logits
        else:
            labels = self.labels[device]
        return labels

    def forward(self, image_features, text_features, logit_scale):
        logits_per_image = logit_scale * image_features @ text_features.T
        logits_per_text = logit_scale * text_features @ image_features.T
        labels = self.get_ground_truth(image_features.device, logits_per_image.shape[0])
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


class CLIP(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = mlp(10, 12, 5), mlp(10, 12, 5)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def clip_world() -> World:
    model = CLIP()
    gains = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": gains, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}], lr=1e-2
    )
    return World(model=model, optimizer=optimizer, loss=ClipLoss(), losses_m={}, i=0)


@loop(
    "CLIP, cached labels and a clamped scale",
    kind=KIND,
    source="mlfoundations/open_clip src/open_clip_train/train.py",
    build=clip_world,
    batch=lambda n: two_views(n) if n != 5 else (normal(n, 4, 10), normal(n, 4, 10, seed=1)),
    calls=9,
)
def clip(w, images, texts):
    w.optimizer.zero_grad()
    image_features, text_features, logit_scale = w.model(images, texts)
    losses = {"contrastive_loss": w.loss(image_features, text_features, logit_scale)}
    total_loss = sum(losses.values())
    losses["loss"] = total_loss
    total_loss.backward()
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), 1.0, norm_type=2.0)
    w.optimizer.step()
    with torch.no_grad():
        w.model.logit_scale.clamp_(0, math.log(100))
    w.i += 1
    if w.i % 2 == 0:
        for key, val in losses.items():
            if key not in w.losses_m:
                w.losses_m[key] = AverageMeter()
            w.losses_m[key].update(val.item(), images.shape[0])
        logit_scale_scalar = logit_scale.item()
        loss_log = " ".join([f"{name.capitalize()}: {m.val:#.5g} ({m.avg:#.5g})" for name, m in w.losses_m.items()])
        print(
            f"Train {w.i} LR: {w.optimizer.param_groups[0]['lr']:5f} Logit Scale: {logit_scale_scalar:.3f} " + loss_log
        )


def triplet_world() -> World:
    model = mlp(10, 12, 5)
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), 1e-2), margin=1.0, fractions=[])


def labelled(n):
    return normal(n, 8, 10), torch.tensor([0, 0, 1, 1, 2, 2, 2, 0])[integers(n, 8, 8).argsort()]


@loop(
    "triplets of a batch, mined by masks",
    kind=KIND,
    source="omoindrot/tensorflow-triplet-loss (its port NegatraM/triplet-loss-pytorch)",
    build=triplet_world,
    batch=labelled,
)
def batch_all_triplets(w, data, labels):
    w.optimizer.zero_grad()
    embeddings = w.model(data)
    dot_product = torch.mm(embeddings, embeddings.t())
    square_norm = torch.diag(dot_product)
    distances = square_norm.unsqueeze(0) - 2.0 * dot_product + square_norm.unsqueeze(1)
    distances = torch.max(distances, torch.tensor(0.0))
    mask = distances.eq(0).float()
    distances = (1.0 - mask) * torch.sqrt(distances + mask * 1e-16)
    triplet_loss = distances.unsqueeze(2) - distances.unsqueeze(1) + w.margin
    indices_not_equal = ~torch.eye(labels.size(0)).bool()
    distinct = indices_not_equal.unsqueeze(2) & indices_not_equal.unsqueeze(1) & indices_not_equal.unsqueeze(0)
    label_equal = labels.unsqueeze(0) == labels.unsqueeze(1)
    valid = distinct & (label_equal.unsqueeze(2) & ~label_equal.unsqueeze(1))
    triplet_loss = torch.relu(valid.float() * triplet_loss)
    num_positive_triplets = triplet_loss.gt(1e-16).float().sum()
    fraction = num_positive_triplets / (valid.sum() + 1e-16)
    loss = triplet_loss.sum() / (num_positive_triplets + 1e-16)
    loss.backward()
    w.optimizer.step()
    w.fractions.append(fraction.item())
    return loss.item()


@loop(
    "triplets, chosen in NumPy",
    kind=KIND,
    source="adambielski/siamese-triplet utils.py",
    build=triplet_world,
    batch=labelled,
)
def online_triplets(w, data, target):
    w.optimizer.zero_grad()
    embeddings = w.model(data)
    triplets = get_triplets(w, embeddings.cpu(), target)
    ap_distances = (embeddings[triplets[:, 0]] - embeddings[triplets[:, 1]]).pow(2).sum(1)
    an_distances = (embeddings[triplets[:, 0]] - embeddings[triplets[:, 2]]).pow(2).sum(1)
    loss = F.relu(ap_distances - an_distances + w.margin).mean()
    loss.backward()
    w.optimizer.step()
    w.fractions.append(len(triplets))
    return loss.item()


def get_triplets(w, embeddings, labels):
    distance_matrix = torch.cdist(embeddings, embeddings).pow(2)
    labels = labels.cpu().data.numpy()
    triplets = []
    for label in sorted(set(labels)):
        label_indices = np.where(labels == label)[0]
        if len(label_indices) < 2:
            continue
        negative_indices = np.where(np.logical_not(labels == label))[0]
        anchor_positives = np.array(list(combinations(label_indices, 2)))
        ap_distances = distance_matrix[anchor_positives[:, 0], anchor_positives[:, 1]]
        for anchor_positive, ap_distance in zip(anchor_positives, ap_distances):
            an_distances = distance_matrix[
                torch.LongTensor(np.array([anchor_positive[0]])), torch.LongTensor(negative_indices)
            ]
            loss_values = (ap_distance - an_distances + w.margin).data.cpu().numpy()
            hard_negative = np.argmax(loss_values)
            if loss_values[hard_negative] > 0:
                triplets.append([anchor_positive[0], anchor_positive[1], negative_indices[hard_negative]])
    return torch.LongTensor(np.array(triplets))


@edit(
    "triplets, chosen in NumPy",
    "the hardest negative by a mask and `max`, for all pairs of a batch (as `batch-hard` does)",
)
def hard_triplets(w, data, target):
    w.optimizer.zero_grad()
    embeddings = w.model(data)
    distances = (embeddings.unsqueeze(0) - embeddings.unsqueeze(1)).pow(2).sum(-1)
    same = target.unsqueeze(0) == target.unsqueeze(1)
    positive = torch.triu(same, diagonal=1)
    nearest = distances.masked_fill(same, float("inf")).min(1).values
    losses = F.relu(distances - nearest.unsqueeze(1) + w.margin) * positive
    loss = losses.sum() / (losses > 0).sum().clamp(min=1)
    loss.backward()
    w.optimizer.step()
    w.fractions.append((losses > 0).sum().item())
    return loss.item()
