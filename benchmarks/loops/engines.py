# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Engines of image models: their meters, engines that call hooks, several models and tasks at once."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import OrderedDict, defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.parts import SmallConvNet, images
from benchmarks.loops.pieces import AverageMeter, accuracy, integers, mlp, normal


class SmoothedValue:
    """Of the vision references: a window of values and the total."""

    def __init__(self, window_size=20, fmt=None):
        self.deque = deque(maxlen=window_size)
        self.total, self.count = 0.0, 0
        self.fmt = fmt or "{median:.4f} ({global_avg:.4f})"

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    @property
    def value(self):
        return self.deque[-1]

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, value=self.value)


class MetricLogger:
    """Meters by name, made when a name is first met."""

    def __init__(self, delimiter="\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters[k].update(v)

    def add_meter(self, name, meter):
        self.meters[name] = meter

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())


class SetCriterion(nn.Module):
    """Of DETR, with queries matched in order: losses by name, weights by name."""

    def __init__(self):
        super().__init__()
        self.weight_dict = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
        empty_weight = torch.ones(5)
        empty_weight[-1] = 0.1
        self.register_buffer("empty_weight", empty_weight)
        self.losses = ["labels", "boxes"]

    def loss_labels(self, outputs, targets, num_boxes):
        src_logits = outputs["pred_logits"]
        target_classes_o = torch.cat([t["labels"] for t in targets])
        target_classes = torch.full(src_logits.shape[:2], 4, dtype=torch.int64)
        idx = self.places(targets)
        target_classes[idx] = target_classes_o
        loss_ce = F.cross_entropy(src_logits.transpose(1, 2), target_classes, self.empty_weight)
        return {"loss_ce": loss_ce, "class_error": 100 - accuracy(src_logits[idx], target_classes_o)[0][0]}

    def loss_boxes(self, outputs, targets, num_boxes):
        src_boxes = outputs["pred_boxes"][self.places(targets)]
        target_boxes = torch.cat([t["boxes"] for t in targets], dim=0)
        losses = {"loss_bbox": F.l1_loss(src_boxes, target_boxes, reduction="none").sum() / num_boxes}
        losses["loss_giou"] = (1 - F.cosine_similarity(src_boxes, target_boxes, dim=1)).sum() / num_boxes
        return losses

    def places(self, targets):
        batch_idx = torch.cat([torch.full_like(t["labels"], i) for i, t in enumerate(targets)])
        return batch_idx, torch.cat([torch.arange(len(t["labels"])) for t in targets])

    def forward(self, outputs, targets):
        num_boxes = sum(len(t["labels"]) for t in targets)
        num_boxes = torch.as_tensor([num_boxes], dtype=torch.float, device=next(iter(outputs.values())).device)
        num_boxes = torch.clamp(num_boxes / 1, min=1).item()
        losses = {}
        for loss in self.losses:
            losses.update(getattr(self, f"loss_{loss}")(outputs, targets, num_boxes))
        return losses


class Queries(nn.Module):
    """Six queries over an image's features."""

    def __init__(self):
        super().__init__()
        self.backbone = SmallConvNet(8, p=0.0)
        self.query_embed = nn.Embedding(6, 8)
        self.class_embed, self.bbox_embed = nn.Linear(8, 5), mlp(8, 8, 4)

    def forward(self, samples):
        hs = torch.relu(self.backbone(samples).unsqueeze(1) + self.query_embed.weight)
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


def detr_world() -> World:
    model, logger = Queries(), MetricLogger(delimiter="  ")
    logger.add_meter("lr", SmoothedValue(window_size=1, fmt="{value:.6f}"))
    logger.add_meter("class_error", SmoothedValue(window_size=1, fmt="{value:.2f}"))
    groups = [
        {"params": [p for n, p in model.named_parameters() if "backbone" not in n and p.requires_grad]},
        {"params": [p for n, p in model.named_parameters() if "backbone" in n and p.requires_grad], "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=1e-4)
    return World(model=model, criterion=SetCriterion(), optimizer=optimizer, metric_logger=logger, max_norm=0.1, i=0)


def boxes(n):
    samples, _ = images(n, size=3)
    counts = [2, 1 + n % 3, 4]
    targets = [
        {"labels": integers(10 * n + i, 4, c), "boxes": normal(10 * n + i, c, 4).sigmoid()}
        for i, c in enumerate(counts)
    ]
    return samples, targets


@loop(
    "DETR, losses and meters by name",
    kind="detection",
    source="facebookresearch/detr engine.py, models/detr.py",
    build=detr_world,
    batch=boxes,
    calls=10,
    held_back=True,
)
def detr(w, samples, targets):
    w.model.train()
    w.criterion.train()
    samples = samples.to("cpu")
    targets = [{k: v.to("cpu") for k, v in t.items()} for t in targets]
    outputs = w.model(samples)
    loss_dict = w.criterion(outputs, targets)
    weight_dict = w.criterion.weight_dict
    losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
    loss_dict_reduced = loss_dict
    loss_dict_reduced_unscaled = {f"{k}_unscaled": v for k, v in loss_dict_reduced.items()}
    loss_dict_reduced_scaled = {k: v * weight_dict[k] for k, v in loss_dict_reduced.items() if k in weight_dict}
    losses_reduced_scaled = sum(loss_dict_reduced_scaled.values())
    loss_value = losses_reduced_scaled.item()
    if not math.isfinite(loss_value):
        print("Loss is {}, stopping training".format(loss_value))
        print(loss_dict_reduced)
        sys.exit(1)
    w.optimizer.zero_grad()
    losses.backward()
    if w.max_norm > 0:
        torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.max_norm)
    w.optimizer.step()
    w.metric_logger.update(loss=loss_value, **loss_dict_reduced_scaled, **loss_dict_reduced_unscaled)
    w.metric_logger.update(class_error=loss_dict_reduced["class_error"])
    w.metric_logger.update(lr=w.optimizer.param_groups[0]["lr"])
    if w.i % 3 == 0:
        print("Epoch: [0]", f"[{w.i}/10]", str(w.metric_logger))
    w.i += 1


class ReId(nn.Module):
    """A backbone, a neck of batch norm and a classifier without bias; scores and features."""

    def __init__(self):
        super().__init__()
        self.base = SmallConvNet(8, p=0.0)
        self.bottleneck = nn.BatchNorm1d(8)
        self.bottleneck.bias.requires_grad_(False)
        self.classifier = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        global_feat = self.base(x)
        return self.classifier(self.bottleneck(global_feat)), global_feat


class CenterLoss(nn.Module):
    """Distances to learned centers of the classes."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 8))

    def forward(self, x, labels):
        assert x.size(0) == labels.size(0), "features.size(0) is not equal to labels.size(0)"
        batch_size = x.size(0)
        distmat = torch.pow(x, 2).sum(dim=1, keepdim=True).expand(batch_size, 4)
        distmat = distmat + torch.pow(self.centers, 2).sum(dim=1, keepdim=True).expand(4, batch_size).t()
        distmat.addmm_(x, self.centers.t(), beta=1, alpha=-2)
        mask = labels.unsqueeze(1).expand(batch_size, 4).eq(torch.arange(4).long().expand(batch_size, 4))
        dist = []
        for i in range(batch_size):
            value = distmat[i][mask[i]]
            dist.append(value.clamp(min=1e-12, max=1e12))
        return torch.cat(dist).mean()


class Engine:
    """Of Ignite, in small: an update function, its state, handlers that are called after it."""

    def __init__(self, process_function):
        self.process_function, self.handlers = process_function, []
        self.state = World(iteration=0, output=None, metrics={})

    def on(self, handler):
        self.handlers.append(handler)
        return handler

    def run_once(self, batch):
        self.state.iteration += 1
        self.state.output = self.process_function(self, batch)
        for handler in self.handlers:
            handler(self)


def reid_world() -> World:
    model, center = ReId(), CenterLoss()
    params = []
    for key, value in model.named_parameters():
        if not value.requires_grad:
            continue
        lr, weight_decay = (2e-2, 0.0) if "bias" in key else (1e-2, 5e-4)
        params += [{"params": [value], "lr": lr, "weight_decay": weight_decay}]
    optimizer = torch.optim.Adam(params)
    optimizer_center = torch.optim.SGD(center.parameters(), lr=0.5)

    def loss_fn(score, feat, target):
        return F.cross_entropy(score, target, label_smoothing=0.1) + 0.0005 * center(feat, target)

    def _update(engine, batch):
        model.train()
        optimizer.zero_grad()
        optimizer_center.zero_grad()
        img, target = batch
        score, feat = model(img)
        loss = loss_fn(score, feat, target)
        loss.backward()
        optimizer.step()
        for param in center.parameters():
            param.grad.data *= 1.0 / 0.0005
        optimizer_center.step()
        acc = (score.max(1)[1] == target).float().mean()
        return loss.item(), acc.item()

    trainer = Engine(_update)
    logger = logging.getLogger("reid_baseline.train")
    logger.setLevel(logging.INFO)

    @trainer.on
    def running_average(engine):
        for index, name in enumerate(("avg_loss", "avg_acc")):
            before = engine.state.metrics.get(name)
            new = engine.state.output[index]
            engine.state.metrics[name] = new if before is None else before * 0.98 + (1.0 - 0.98) * new

    @trainer.on
    def log_training_loss(engine):
        if engine.state.iteration % 2 == 0:
            logger.info(
                "Epoch[{}] Iteration[{}/{}] Loss: {:.3f}, Acc: {:.3f}, Base Lr: {:.2e}".format(
                    1,
                    engine.state.iteration,
                    8,
                    engine.state.metrics["avg_loss"],
                    engine.state.metrics["avg_acc"],
                    0.01,
                )
            )

    return World(model=model, center=center, optimizer=optimizer, optimizer_center=optimizer_center, trainer=trainer)


@loop(
    "re-identification, an engine with handlers, centers with an optimizer of their own",
    kind="metric learning",
    source="michuanhaohao/reid-strong-baseline engine/trainer.py, layers/center_loss.py",
    build=reid_world,
    batch=lambda n: images(n, size=6, classes=4),
    held_back=True,
)
def reid(w, img, target):
    w.trainer.run_once((img, target))
    return w.trainer.state.output


class Chrono:
    """Of BiT: times by name."""

    def __init__(self):
        self.timings = OrderedDict()

    def measure(self, what):
        chrono = self

        class Timer:
            def __enter__(self):
                self.begin = time.time()

            def __exit__(self, *exc):
                chrono.timings.setdefault(what, []).append(time.time() - self.begin)

        return Timer()


class NoChrono(Chrono):
    """The same places, without a clock."""

    def measure(self, what):
        chrono = self

        class Timer:
            def __enter__(self):
                chrono.timings.setdefault(what, []).append(1)

            def __exit__(self, *exc):
                pass

        return Timer()


def get_lr(step, base_lr=0.003):
    supports = [3, 6, 9, 12, 20]
    if step < supports[0]:
        return base_lr * step / supports[0]
    if step >= supports[-1]:
        return None
    for s in supports[1:]:
        if s < step:
            base_lr /= 10
    return base_lr


def bit_world(chrono=Chrono) -> World:
    model = SmallConvNet()
    logger = logging.getLogger("bit")
    logger.setLevel(logging.INFO)
    return World(
        model=model,
        optim=torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9),
        cri=nn.CrossEntropyLoss(),
        _chrono=chrono(),
        logger=logger,
        step=0,
        accum_steps=0,
        mixup=0.1,
        mixup_l=0.3,
        args=World(batch_split=2, base_lr=0.03),
    )


def mixup_data(x, y, share):
    indices = torch.randperm(x.shape[0]).to(x.device)
    mixed_x = share * x + (1 - share) * x[indices]
    return mixed_x, y, y[indices]


def bit_step(w, x, y, number=lambda c: float(c.data.cpu().numpy())):
    lr = get_lr(w.step, w.args.base_lr)
    for param_group in w.optim.param_groups:
        param_group["lr"] = lr
    if w.mixup > 0.0:
        x, y_a, y_b = mixup_data(x, y, w.mixup_l)
    with w._chrono.measure("fprop"):
        logits = w.model(x)
        if w.mixup > 0.0:
            c = w.mixup_l * w.cri(logits, y_a) + (1 - w.mixup_l) * w.cri(logits, y_b)
        else:
            c = w.cri(logits, y)
        c_num = number(c)
    with w._chrono.measure("grads"):
        (c / w.args.batch_split).backward()
        w.accum_steps += 1
    accstep = f" ({w.accum_steps}/{w.args.batch_split})" if w.args.batch_split > 1 else ""
    w.logger.info(f"[step {w.step}{accstep}]: loss={c_num:.5f} (lr={lr:.1e})")
    if w.accum_steps == w.args.batch_split:
        with w._chrono.measure("update"):
            w.optim.step()
            w.optim.zero_grad()
        w.step += 1
        w.accum_steps = 0
        w.mixup_l = np.random.beta(w.mixup, w.mixup) if w.mixup > 0 else 1


loop(
    "BiT, accumulated, timed by name",
    kind="vision",
    source="google-research/big_transfer bit_pytorch/train.py",
    build=bit_world,
    batch=images,
    calls=12,
    held_back=True,
)(bit_step)


@edit(
    "BiT, accumulated, timed by name",
    "`Chrono` counts and asks no clock; `c.item()` in place of `float(c.data.cpu().numpy())`",
    build=lambda: bit_world(NoChrono),
)
def bit_without_clock(w, x, y):
    bit_step(w, x, y, number=torch.Tensor.item)


class Distiller(nn.Module):
    """Decoupled distillation of logits, warmed up by the epoch."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(10, 8, 6), mlp(10, 16, 6)
        self.ce_weight, self.alpha, self.beta, self.temperature, self.warmup = 1.0, 1.0, 8.0, 4, 3

    def train(self, mode=True):
        self.training = mode
        for module in self.children():
            module.train(mode)
        self.teacher.eval()
        return self

    def get_learnable_parameters(self):
        return [v for k, v in self.student.named_parameters()]

    def dkd_loss(self, logits_student, logits_teacher, target):
        target = target.reshape(-1)
        gt_mask = torch.zeros_like(logits_student).scatter_(1, target.unsqueeze(1), 1).bool()
        other_mask = torch.ones_like(logits_student).scatter_(1, target.unsqueeze(1), 0).bool()
        pred_student = F.softmax(logits_student / self.temperature, dim=1)
        pred_teacher = F.softmax(logits_teacher / self.temperature, dim=1)
        pred_student = torch.cat([(pred_student * m).sum(dim=1, keepdims=True) for m in (gt_mask, other_mask)], dim=1)
        pred_teacher = torch.cat([(pred_teacher * m).sum(1, keepdims=True) for m in (gt_mask, other_mask)], dim=1)
        tckd = F.kl_div(torch.log(pred_student), pred_teacher, reduction="sum") * self.temperature**2 / target.shape[0]
        part2_teacher = F.softmax(logits_teacher / self.temperature - 1000.0 * gt_mask, dim=1)
        log_part2_student = F.log_softmax(logits_student / self.temperature - 1000.0 * gt_mask, dim=1)
        nckd = F.kl_div(log_part2_student, part2_teacher, reduction="sum") * self.temperature**2 / target.shape[0]
        return self.alpha * tckd + self.beta * nckd

    def forward(self, image, target, **kwargs):
        logits_student = self.student(image)
        with torch.no_grad():
            logits_teacher = self.teacher(image)
        loss_ce = self.ce_weight * F.cross_entropy(logits_student, target)
        loss_dkd = min(kwargs["epoch"] / self.warmup, 1.0) * self.dkd_loss(logits_student, logits_teacher, target)
        return logits_student, {"loss_ce": loss_ce, "loss_kd": loss_dkd}


def dkd_world() -> World:
    distiller = Distiller()
    return World(
        distiller=distiller.train(),
        optimizer=torch.optim.SGD(distiller.get_learnable_parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        train_meters={name: AverageMeter() for name in ("losses", "top1", "top5")},
        epoch=1,
    )


def dkd_between(w, returned, n):
    w.epoch += n % 2


@loop(
    "decoupled distillation, warmed up by the epoch",
    kind="distillation",
    source="megvii-research/mdistiller mdistiller/engine/trainer.py, distillers/DKD.py",
    build=dkd_world,
    batch=lambda n: (normal(n, 6, 10), integers(n, 6, 6), integers(n, 50, 6)),
    between=dkd_between,
    calls=10,
    held_back=True,
)
def dkd(w, image, target, index):
    w.optimizer.zero_grad()
    image = image.float()
    preds, losses_dict = w.distiller(image=image, target=target, epoch=w.epoch)
    loss = sum([part.mean() for part in losses_dict.values()])
    loss.backward()
    w.optimizer.step()
    batch_size = image.size(0)
    acc1, acc5 = accuracy(preds, target, topk=(1, 5))
    w.train_meters["losses"].update(loss.cpu().detach().numpy().mean(), batch_size)
    w.train_meters["top1"].update(acc1[0], batch_size)
    w.train_meters["top5"].update(acc5[0], batch_size)
    msg = "Epoch:{}| Loss:{:.4f}| Top-1:{:.3f}| Top-5:{:.3f}".format(
        w.epoch,
        w.train_meters["losses"].avg,
        w.train_meters["top1"].avg.item(),
        w.train_meters["top5"].avg.item(),
    )
    return msg


@edit(
    "decoupled distillation, warmed up by the epoch",
    "`loss.item()` in place of `loss.cpu().detach().numpy().mean()`",
)
def dkd_item(w, image, target, index):
    w.optimizer.zero_grad()
    image = image.float()
    preds, losses_dict = w.distiller(image=image, target=target, epoch=w.epoch)
    loss = sum([part.mean() for part in losses_dict.values()])
    loss.backward()
    w.optimizer.step()
    batch_size = image.size(0)
    acc1, acc5 = accuracy(preds, target, topk=(1, 5))
    w.train_meters["losses"].update(loss.item(), batch_size)
    w.train_meters["top1"].update(acc1[0], batch_size)
    w.train_meters["top5"].update(acc5[0], batch_size)
    return "Epoch:{}| Loss:{:.4f}| Top-1:{:.3f}| Top-5:{:.3f}".format(
        w.epoch,
        w.train_meters["losses"].avg,
        w.train_meters["top1"].avg.item(),
        w.train_meters["top5"].avg.item(),
    )


def functional_net(widths, prefix):
    """Parameters and statistics in flat dicts, and the function of them."""
    params, stats = OrderedDict(), OrderedDict()
    for i, (a, b) in enumerate(zip(widths, widths[1:])):
        params[f"{prefix}group{i}.conv"] = (torch.randn(b, a, 3, 3) * 0.2).requires_grad_()
        params[f"{prefix}group{i}.bn.weight"] = torch.rand(b).requires_grad_()
        params[f"{prefix}group{i}.bn.bias"] = torch.zeros(b).requires_grad_()
        stats[f"{prefix}group{i}.bn.running_mean"] = torch.zeros(b)
        stats[f"{prefix}group{i}.bn.running_var"] = torch.ones(b)
    params[f"{prefix}fc.weight"] = (torch.randn(5, widths[-1]) * 0.1).requires_grad_()
    params[f"{prefix}fc.bias"] = torch.zeros(5).requires_grad_()
    number = len(widths) - 1

    def f(input, params, stats, mode):
        groups, x = [], input
        for i in range(number):
            base = "%sgroup%d" % (prefix, i)
            x = F.conv2d(x, params[base + ".conv"], padding=1)
            x = F.relu(
                F.batch_norm(
                    x,
                    weight=params[base + ".bn.weight"],
                    bias=params[base + ".bn.bias"],
                    running_mean=stats[base + ".bn.running_mean"],
                    running_var=stats[base + ".bn.running_var"],
                    training=mode,
                    momentum=0.1,
                    eps=1e-5,
                )
            )
            groups.append(x)
        o = F.avg_pool2d(x, 8, 1, 0)
        o = o.view(o.size(0), -1)
        return F.linear(o, params[prefix + "fc.weight"], params[prefix + "fc.bias"]), groups

    return f, params, stats


def at(x):
    return F.normalize(x.pow(2).mean(1).view(x.size(0), -1))


def attention_world() -> World:
    f_s, params, stats = functional_net([3, 4, 6], "student.")
    f_t, params_t, stats_t = functional_net([3, 6, 8], "teacher.")
    for k, v in params_t.items():
        v.requires_grad = False
        params[k] = v
    stats.update(stats_t)
    optimizable = [v for v in params.values() if v.requires_grad]
    return World(
        f_s=f_s,
        f_t=f_t,
        params=params,
        stats=stats,
        optimizer=torch.optim.SGD(optimizable, 0.1, 0.9, weight_decay=5e-4),
        meters_at=[AverageMeter() for _ in range(2)],
        meter_loss=AverageMeter(),
        opt=World(temperature=4, alpha=0.9, beta=1e3),
    )


@loop(
    "attention transfer, parameters and statistics in dicts",
    kind="distillation",
    source="szagoruyko/attention-transfer cifar.py",
    build=attention_world,
    batch=images,
    held_back=True,
)
def attention_transfer(w, inputs, targets):
    y_s, g_s = w.f_s(inputs, w.params, w.stats, True)
    y_t, g_t = w.f_t(inputs, w.params, w.stats, False)
    loss_groups = [(at(x) - at(y)).pow(2).mean() for x, y in zip(g_s, g_t)]
    loss_groups = [v.sum() for v in loss_groups]
    [m.update(v.item()) for m, v in zip(w.meters_at, loss_groups)]
    T, alpha = w.opt.temperature, w.opt.alpha
    p = F.log_softmax(y_s / T, dim=1)
    q = F.softmax(y_t / T, dim=1)
    l_kl = F.kl_div(p, q, reduction="sum") * (T**2) / y_s.shape[0]
    loss = l_kl * alpha + F.cross_entropy(y_s, targets) * (1.0 - alpha) + w.opt.beta * sum(loss_groups)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.meter_loss.update(loss.item())
    return y_s
