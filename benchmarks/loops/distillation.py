# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Distillation: students of teachers."""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import AverageMeter, integers, mlp, normal

KIND = "distillation"


def labelled(n):
    return normal(n, 6, 10), integers(n, 4, 6)


def kd_world() -> World:
    student, teacher = mlp(10, 8, 4), mlp(10, 16, 4)
    return World(
        model=student,
        teacher_model=teacher.eval(),
        optimizer=torch.optim.Adam(student.parameters(), lr=1e-2),
        params=World(alpha=0.9, temperature=6, save_summary_steps=3),
        loss_avg=AverageMeter(),
        summ=[],
        i=0,
    )


def loss_fn_kd(outputs, labels, teacher_outputs, params):
    alpha = params.alpha
    T = params.temperature
    KD_loss = nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(outputs / T, dim=1), F.softmax(teacher_outputs / T, dim=1)
    ) * (alpha * T * T) + F.cross_entropy(outputs, labels) * (1.0 - alpha)
    return KD_loss


@loop(
    "knowledge distillation, accuracy in NumPy",
    kind=KIND,
    source="haitongli/knowledge-distillation-pytorch train.py",
    build=kd_world,
    batch=labelled,
)
def kd(w, train_batch, labels_batch):
    output_batch = w.model(train_batch)
    with torch.no_grad():
        output_teacher_batch = w.teacher_model(train_batch)
    loss = loss_fn_kd(output_batch, labels_batch, output_teacher_batch, w.params)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.i % w.params.save_summary_steps == 0:
        output_batch = output_batch.data.cpu().numpy()
        labels_batch = labels_batch.data.cpu().numpy()
        summary_batch = {"accuracy": np.sum(np.argmax(output_batch, axis=1) == labels_batch) / float(labels_batch.size)}
        summary_batch["loss"] = loss.item()
        w.summ.append(summary_batch)
    w.loss_avg.update(loss.item())
    w.i += 1


@edit(
    "knowledge distillation, accuracy in NumPy",
    "the accuracy in torch: `(output.argmax(1) == labels).float().mean().item()`",
)
def kd_in_torch(w, train_batch, labels_batch):
    output_batch = w.model(train_batch)
    with torch.no_grad():
        output_teacher_batch = w.teacher_model(train_batch)
    loss = loss_fn_kd(output_batch, labels_batch, output_teacher_batch, w.params)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.i % w.params.save_summary_steps == 0:
        summary_batch = {"accuracy": (output_batch.argmax(dim=1) == labels_batch).float().mean().item()}
        summary_batch["loss"] = loss.item()
        w.summ.append(summary_batch)
    w.loss_avg.update(loss.item())
    w.i += 1


class TinyBert(nn.Module):
    """Tokens to logits and hidden states."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([mlp(8, 8, 8) for _ in range(layers)])
        self.head = nn.Linear(8, 12)

    def forward(self, input_ids, attention_mask):
        hidden_states = [self.embed(input_ids) * attention_mask.unsqueeze(-1)]
        for layer in self.layers:
            hidden_states.append(hidden_states[-1] + layer(hidden_states[-1]))
        return self.head(hidden_states[-1]), hidden_states


class Distiller:
    """Of DistilBERT: keeps the last and the total losses, and counts."""

    def __init__(self) -> None:
        self.student, self.teacher = TinyBert(1), TinyBert(2).eval()
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-2)
        self.temperature, self.alpha_ce, self.alpha_mlm, self.alpha_cos = 2.0, 5.0, 2.0, 1.0
        self.ce_loss_fct = nn.KLDivLoss(reduction="batchmean")
        self.lm_loss_fct = nn.CrossEntropyLoss(ignore_index=-100)
        self.cosine_loss_fct = nn.CosineEmbeddingLoss(reduction="mean")
        self.n_iter = self.n_total_iter = 0
        self.total_loss_epoch = self.last_loss = self.last_loss_ce = self.last_loss_mlm = 0
        self.gradient_accumulation_steps = 2
        self.logged = []

    def step(self, input_ids, attention_mask, lm_labels):
        s_logits, s_hidden_states = self.student(input_ids=input_ids, attention_mask=attention_mask)
        with torch.no_grad():
            t_logits, t_hidden_states = self.teacher(input_ids=input_ids, attention_mask=attention_mask)
        assert s_logits.size() == t_logits.size()
        mask = (lm_labels > -1).unsqueeze(-1).expand_as(s_logits)
        s_logits_slct = torch.masked_select(s_logits, mask).view(-1, s_logits.size(-1))
        t_logits_slct = torch.masked_select(t_logits, mask).view(-1, s_logits.size(-1))
        assert t_logits_slct.size() == s_logits_slct.size()
        loss_ce = (
            self.ce_loss_fct(
                F.log_softmax(s_logits_slct / self.temperature, dim=-1),
                F.softmax(t_logits_slct / self.temperature, dim=-1),
            )
            * (self.temperature) ** 2
        )
        loss = self.alpha_ce * loss_ce
        loss_mlm = self.lm_loss_fct(s_logits.view(-1, s_logits.size(-1)), lm_labels.view(-1))
        loss += self.alpha_mlm * loss_mlm
        dim = s_hidden_states[-1].size(-1)
        mask = attention_mask.unsqueeze(-1).expand_as(s_hidden_states[-1]).bool()
        s_slct = torch.masked_select(s_hidden_states[-1], mask).view(-1, dim)
        t_slct = torch.masked_select(t_hidden_states[-1], mask).view(-1, dim)
        target = s_slct.new(s_slct.size(0)).fill_(1)
        loss += self.alpha_cos * self.cosine_loss_fct(s_slct, t_slct, target)
        self.total_loss_epoch += loss.item()
        self.last_loss = loss.item()
        self.last_loss_ce = loss_ce.item()
        self.last_loss_mlm = loss_mlm.item()
        self.optimize(loss)

    def optimize(self, loss):
        if (loss != loss).data.any():
            print("NaN detected")
            sys.exit(1)
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        loss.backward()
        self.iter()
        if self.n_iter % self.gradient_accumulation_steps == 0:
            nn.utils.clip_grad_norm_(self.student.parameters(), 5.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def iter(self):
        self.n_iter += 1
        self.n_total_iter += 1
        if self.n_total_iter % 4 == 0:
            self.logged.append((self.n_total_iter, self.last_loss, self.total_loss_epoch / self.n_iter))


def masked_tokens(n):
    ids = integers(n, 12, 3, 6)
    attention = torch.ones(3, 6, dtype=torch.long)
    attention[0, 4 + n % 2 :] = 0
    labels = torch.where(torch.rand(3, 6, generator=torch.Generator().manual_seed(n)) < 0.4, ids, -100)
    labels[0, 0] = 1
    return ids, attention, labels


@loop(
    "DistilBERT, the distiller's step",
    kind=KIND,
    source="huggingface/transformers-research-projects distillation/distiller.py",
    build=lambda: World(distiller=Distiller()),
    batch=masked_tokens,
    closure=True,
    calls=10,
)
def distiller(w):
    return w.distiller.step


class WeightedDistiller(Distiller):
    """The same; tokens that are not selected weigh nothing."""

    def step(self, input_ids, attention_mask, lm_labels):
        s_logits, s_hidden_states = self.student(input_ids=input_ids, attention_mask=attention_mask)
        with torch.no_grad():
            t_logits, t_hidden_states = self.teacher(input_ids=input_ids, attention_mask=attention_mask)
        T = self.temperature
        divergence = F.kl_div(F.log_softmax(s_logits / T, -1), F.softmax(t_logits / T, -1), reduction="none").sum(-1)
        mask = (lm_labels > -1).float()
        loss_ce = (divergence * mask).sum() / mask.sum() * T**2
        loss_mlm = self.lm_loss_fct(s_logits.view(-1, s_logits.size(-1)), lm_labels.view(-1))
        distance = 1 - F.cosine_similarity(s_hidden_states[-1], t_hidden_states[-1], dim=-1)
        loss_cos = (distance * attention_mask).sum() / attention_mask.sum()
        loss = self.alpha_ce * loss_ce + self.alpha_mlm * loss_mlm + self.alpha_cos * loss_cos
        self.total_loss_epoch += loss.item()
        self.last_loss = loss.item()
        self.optimize(loss)


edit(
    "DistilBERT, the distiller's step",
    "weigh tokens by the mask and divide by its sum instead of `masked_select`",
    build=lambda: World(distiller=WeightedDistiller()),
)(distiller)


class TwoHeads(nn.Module):
    """A class token and a distillation token; in eval mode their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.head_dist = mlp(10, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        x = F.gelu(self.body(x))
        x, x_dist = self.head(x), self.head_dist(x)
        return (x, x_dist) if self.training else (x + x_dist) / 2


class DistillationLoss(nn.Module):
    """Of DeiT: wraps a criterion and a teacher."""

    def __init__(self, base_criterion, teacher_model, distillation_type, alpha, tau) -> None:
        super().__init__()
        self.base_criterion, self.teacher_model = base_criterion, teacher_model
        assert distillation_type in ["none", "soft", "hard"]
        self.distillation_type, self.alpha, self.tau = distillation_type, alpha, tau

    def forward(self, inputs, outputs, labels):
        outputs_kd = None
        if not isinstance(outputs, torch.Tensor):
            outputs, outputs_kd = outputs
        base_loss = self.base_criterion(outputs, labels)
        if self.distillation_type == "none":
            return base_loss
        with torch.no_grad():
            teacher_outputs = self.teacher_model(inputs)
        if self.distillation_type == "soft":
            T = self.tau
            distillation_loss = (
                F.kl_div(
                    F.log_softmax(outputs_kd / T, dim=1),
                    F.log_softmax(teacher_outputs / T, dim=1),
                    reduction="sum",
                    log_target=True,
                )
                * (T * T)
                / outputs_kd.numel()
            )
        else:
            distillation_loss = F.cross_entropy(outputs_kd, teacher_outputs.argmax(dim=1))
        return base_loss * (1 - self.alpha) + distillation_loss * self.alpha


class MetricLogger:
    """The meters of the vision references: windows of values, printed every few steps."""

    def __init__(self) -> None:
        self.meters = {}

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters.setdefault(k, []).append(v)


def deit_world(distillation_type: str) -> World:
    model, teacher = TwoHeads(), mlp(10, 12, 4).eval()
    criterion = DistillationLoss(nn.CrossEntropyLoss(label_smoothing=0.1), teacher, distillation_type, 0.5, 3.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return World(model=model, criterion=criterion, optimizer=optimizer, metric_logger=MetricLogger(), max_norm=1.0)


def deit_step(w, samples, targets):
    samples = samples.to("cpu", non_blocking=True)
    targets = targets.to("cpu", non_blocking=True)
    with torch.amp.autocast("cpu", enabled=False):
        outputs = w.model(samples)
        loss = w.criterion(samples, outputs, targets)
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        print(f"Loss is {loss_value}, stopping training")
        sys.exit(1)
    w.optimizer.zero_grad()
    is_second_order = hasattr(w.optimizer, "is_second_order") and w.optimizer.is_second_order
    loss.backward(create_graph=is_second_order)
    if w.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.max_norm)
    w.optimizer.step()
    w.metric_logger.update(loss=loss_value)
    w.metric_logger.update(lr=w.optimizer.param_groups[0]["lr"])


for _type in ("soft", "hard"):
    loop(
        f"DeiT, {_type} distillation token",
        kind=KIND,
        source="facebookresearch/deit engine.py",
        build=lambda kind=_type: deit_world(kind),
        batch=labelled,
    )(deit_step)


def hint_world() -> World:
    student, teacher = mlp(10, 8, 8, 4), mlp(10, 16, 16, 4).eval()
    regress = nn.Linear(8, 16)
    features: dict[str, torch.Tensor] = {}

    def keep(name):
        def hook(module, args, output):
            features[name] = output

        return hook

    student[2].register_forward_hook(keep("student"))
    teacher[2].register_forward_hook(keep("teacher"))
    trainable = nn.ModuleList([student, regress])
    optimizer = torch.optim.SGD(trainable.parameters(), lr=0.05, momentum=0.9)
    losses, top1 = AverageMeter(), AverageMeter()
    return World(
        model_s=student,
        model_t=teacher,
        regress=regress,
        features=features,
        optimizer=optimizer,
        losses=losses,
        top1=top1,
    )


@loop(
    "hints of hidden features, by hooks",
    kind=KIND,
    source="HobbitLong/RepDistiller helper/loops.py",
    build=hint_world,
    batch=labelled,
)
def hints(w, input, target):
    logit_s = w.model_s(input)
    with torch.no_grad():
        logit_t = w.model_t(input)
    f_s, f_t = w.features["student"], w.features["teacher"].detach()
    loss_cls = F.cross_entropy(logit_s, target)
    loss_div = (
        F.kl_div(F.log_softmax(logit_s / 4, dim=1), F.softmax(logit_t / 4, dim=1), reduction="sum")
        * 16
        / input.shape[0]
    )
    loss_kd = F.mse_loss(w.regress(f_s), f_t)
    loss = 0.1 * loss_cls + 0.9 * loss_div + 1.0 * loss_kd
    acc1 = (logit_s.argmax(1) == target).float().mean() * 100
    w.losses.update(loss.item(), input.size(0))
    w.top1.update(acc1, input.size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.features.clear()
