# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Optimizers as people publish them in one file."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import AverageMeter, integers, mlp, normal

KIND = "optimizers"


def labelled(n):
    return normal(n, 6, 10), integers(n, 4, 6)


def with_optimizer(make, norm: bool = False):
    def build() -> World:
        model = mlp(10, 8, 4, norm=norm)
        return World(model=model, optimizer=make(model), losses=AverageMeter(), it=0, clip_time=0)

    return build


def plain(w, x, y):
    w.optimizer.zero_grad()
    loss = F.cross_entropy(w.model(x), y)
    loss.backward()
    w.optimizer.step()
    w.losses.update(loss.item(), x.size(0))


class Lookahead(Optimizer):
    """Wraps another optimizer; the slow weights follow every k steps."""

    def __init__(self, optimizer, la_steps=3, la_alpha=0.8) -> None:
        self.optimizer = optimizer
        self._la_step = 0
        self.la_alpha = la_alpha
        self._total_la_steps = la_steps
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                param_state = self.state[p]
                param_state["cached_params"] = torch.zeros_like(p.data)
                param_state["cached_params"].copy_(p.data)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self._la_step += 1
        if self._la_step >= self._total_la_steps:
            self._la_step = 0
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    param_state = self.state[p]
                    p.data.mul_(self.la_alpha).add_(param_state["cached_params"], alpha=1.0 - self.la_alpha)
                    param_state["cached_params"].copy_(p.data)
        return loss


loop(
    "Lookahead around SGD",
    kind=KIND,
    source="michaelrzhang/lookahead lookahead_pytorch.py",
    build=with_optimizer(lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))),
    batch=labelled,
    calls=9,
)(plain)


class Lion(Optimizer):
    """Signs of an interpolated momentum, by a function that is given everything."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                grad, lr, wd, beta1, beta2, state = (
                    p.grad,
                    group["lr"],
                    group["weight_decay"],
                    *group["betas"],
                    self.state[p],
                )
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                p.data.mul_(1.0 - lr * wd)
                update = exp_avg.clone().mul_(beta1).add(grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-lr)
                exp_avg.mul_(beta2).add_(grad, alpha=1.0 - beta2)
        return loss


loop(
    "Lion",
    kind=KIND,
    source="lucidrains/lion-pytorch lion_pytorch/lion_pytorch.py",
    build=with_optimizer(lambda model: Lion(model.parameters())),
    batch=labelled,
)(plain)


class SophiaG(Optimizer):
    """Clipped by a diagonal of the Hessian, which is estimated every few steps by a backward of sampled labels."""

    def __init__(self, params, lr=1e-2, betas=(0.965, 0.99), rho=0.04, weight_decay=1e-1) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho, weight_decay=weight_decay))

    @torch.no_grad()
    def update_hessian(self):
        for group in self.param_groups:
            _, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.zeros_like(p)
                state["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def step(self, closure=None, bs=60):
        for group in self.param_groups:
            beta1, _ = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.zeros_like(p)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                exp_avg = state["exp_avg"]
                exp_avg.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (exp_avg.abs() / (group["rho"] * bs * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(exp_avg.sign(), ratio, value=-group["lr"])


@loop(
    "Sophia, the Hessian every few steps",
    kind=KIND,
    source="Liuhong99/Sophia train_sophiag.py",
    build=with_optimizer(lambda model: SophiaG(model.parameters())),
    batch=labelled,
    calls=9,
)
def sophia(w, x, y):
    loss = F.cross_entropy(w.model(x), y)
    loss.backward()
    total_norm = torch.nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    if total_norm.item() > 1.0:
        w.clip_time += 1
    w.optimizer.step(bs=60)
    w.optimizer.zero_grad(set_to_none=True)
    w.it += 1
    if w.it % 4 == 3:
        logits = w.model(x)
        samp_dist = torch.distributions.Categorical(logits=logits)
        y_sample = samp_dist.sample()
        loss_sampled = F.cross_entropy(logits.view(-1, logits.size(-1)), y_sample.view(-1), ignore_index=-1)
        loss_sampled.backward()
        w.optimizer.update_hessian()
        w.optimizer.zero_grad(set_to_none=True)
        w.model.zero_grad()
    w.losses.update(loss.item())


@edit("Sophia, the Hessian every few steps", "`clip_time += (total_norm > 1).int().item()` instead of the `if`")
def sophia_counted(w, x, y):
    loss = F.cross_entropy(w.model(x), y)
    loss.backward()
    total_norm = torch.nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    w.clip_time += (total_norm > 1.0).int().item()
    w.optimizer.step(bs=60)
    w.optimizer.zero_grad(set_to_none=True)
    w.it += 1
    if w.it % 4 == 3:
        logits = w.model(x)
        samp_dist = torch.distributions.Categorical(logits=logits)
        y_sample = samp_dist.sample()
        loss_sampled = F.cross_entropy(logits.view(-1, logits.size(-1)), y_sample.view(-1), ignore_index=-1)
        loss_sampled.backward()
        w.optimizer.update_hessian()
        w.optimizer.zero_grad(set_to_none=True)
        w.model.zero_grad()
    w.losses.update(loss.item())


def zeropower_via_newtonschulz5(G, steps: int):
    assert G.ndim >= 2
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X


class MuonWithAuxAdam(Optimizer):
    """Orthogonalised momentum for matrices, Adam with a step count in Python for all else, in one optimizer."""

    def __init__(self, param_groups) -> None:
        super().__init__(param_groups, dict())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if group["use_muon"]:
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    momentum = state["momentum_buffer"]
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    update = zeropower_via_newtonschulz5(p.grad.lerp_(momentum, group["momentum"]), steps=5)
                    update *= max(1, p.grad.size(-2) / p.grad.size(-1)) ** 0.5
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.reshape(p.shape), alpha=-group["lr"])
                else:
                    if len(state) == 0:
                        state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg_sq"] = torch.zeros_like(p)
                        state["step"] = 0
                    state["step"] += 1
                    betas = group["betas"]
                    state["exp_avg"].lerp_(p.grad, 1 - betas[0])
                    state["exp_avg_sq"].lerp_(p.grad.square(), 1 - betas[1])
                    buf1c = state["exp_avg"] / (1 - betas[0] ** state["step"])
                    buf2c = state["exp_avg_sq"] / (1 - betas[1] ** state["step"])
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(buf1c / (buf2c.sqrt() + group["eps"]), alpha=-group["lr"])


def muon_groups(model):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return MuonWithAuxAdam(
        [
            dict(params=matrices, use_muon=True, lr=0.02, momentum=0.95, weight_decay=0.01),
            dict(params=rest, use_muon=False, lr=3e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.01),
        ]
    )


@loop(
    "Muon with Adam beside it, momentum warmed up in the step",
    kind=KIND,
    source="KellerJordan/Muon muon.py and modded-nanogpt train_gpt.py",
    build=with_optimizer(muon_groups),
    batch=labelled,
)
def muon(w, x, y):
    loss = F.cross_entropy(w.model(x), y)
    loss.backward()
    frac = min(w.it / 6, 1)
    for group in w.optimizer.param_groups:
        if group["use_muon"]:
            group["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    w.optimizer.step()
    w.model.zero_grad(set_to_none=True)
    w.it += 1
    w.losses.update(loss.detach().item())


class Shampoo(Optimizer):
    """Preconditioners for each dimension, their roots taken anew every few steps."""

    def __init__(self, params, lr=1e-1, momentum=0.0, epsilon=1e-4, update_freq=3) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, epsilon=epsilon, update_freq=update_freq))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                order = grad.ndimension()
                original_size = grad.size()
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    for dim_id, dim in enumerate(grad.size()):
                        state[f"precond_{dim_id}"] = group["epsilon"] * torch.eye(dim)
                        state[f"inv_precond_{dim_id}"] = torch.zeros(dim, dim)
                for dim_id, dim in enumerate(grad.size()):
                    precond = state[f"precond_{dim_id}"]
                    inv_precond = state[f"inv_precond_{dim_id}"]
                    grad = grad.transpose(0, dim_id).contiguous()
                    transposed_size = grad.size()
                    grad = grad.view(dim, -1)
                    precond.add_(grad @ grad.t())
                    if state["step"] % group["update_freq"] == 0:
                        u, s, vh = torch.linalg.svd(precond)
                        inv_precond.copy_(u @ s.pow_(-1 / order).diag() @ vh)
                    if dim_id == order - 1:
                        grad = (grad.t() @ inv_precond).view(original_size)
                    else:
                        grad = (inv_precond @ grad).view(transposed_size)
                state["step"] += 1
                p.data.add_(grad, alpha=-group["lr"])


loop(
    "Shampoo, roots every few steps",
    kind=KIND,
    source="moskomule/shampoo.pytorch shampoo.py",
    build=with_optimizer(lambda model: Shampoo(model.parameters())),
    batch=labelled,
    calls=8,
)(plain)


class Adafactor(Optimizer):
    """Factored second moments; the rate relative to the scale of the parameters, as transformers keeps it."""

    def __init__(self, params) -> None:
        super().__init__(
            params, dict(lr=None, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, warmup_init=True)
        )

    @staticmethod
    def _get_lr(group, state):
        min_step = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
        rel_step_sz = min(min_step, 1.0 / math.sqrt(state["step"]))
        return max(group["eps"][1], state["RMS"]) * rel_step_sz

    @staticmethod
    def _rms(tensor):
        return tensor.norm(2) / (tensor.numel() ** 0.5)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                factored = len(grad.shape) >= 2
                if len(state) == 0:
                    state["step"] = 0
                    if factored:
                        state["exp_avg_sq_row"] = torch.zeros(grad.shape[:-1]).to(grad)
                        state["exp_avg_sq_col"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:]).to(grad)
                    else:
                        state["exp_avg_sq"] = torch.zeros_like(grad)
                    state["RMS"] = 0
                state["step"] += 1
                state["RMS"] = self._rms(p)
                lr = self._get_lr(group, state)
                beta2t = 1.0 - math.pow(state["step"], group["decay_rate"])
                update = (grad**2) + group["eps"][0]
                if factored:
                    row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
                    row.mul_(beta2t).add_(update.mean(dim=-1), alpha=(1.0 - beta2t))
                    col.mul_(beta2t).add_(update.mean(dim=-2), alpha=(1.0 - beta2t))
                    r_factor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                    update = torch.mul(r_factor, col.unsqueeze(-2).rsqrt()).mul_(grad)
                else:
                    state["exp_avg_sq"].mul_(beta2t).add_(update, alpha=(1.0 - beta2t))
                    update = state["exp_avg_sq"].rsqrt().mul_(grad)
                update.div_((self._rms(update) / group["clip_threshold"]).clamp_(min=1.0))
                update.mul_(lr)
                p.add_(-update)


loop(
    "Adafactor, relative steps",
    kind=KIND,
    source="huggingface/transformers src/transformers/optimization.py",
    build=with_optimizer(lambda model: Adafactor(model.parameters())),
    batch=labelled,
)(plain)


class ClampedAdafactor(Adafactor):
    """The same; the scale of the parameters is clamped in torch."""

    @staticmethod
    def _get_lr(group, state):
        rel_step_sz = min(1e-6 * state["step"], 1.0 / math.sqrt(state["step"]))
        return state["RMS"].clamp(min=group["eps"][1]) * rel_step_sz


edit(
    "Adafactor, relative steps",
    "`rms.clamp(min=eps)` instead of `max(eps, rms)`",
    build=with_optimizer(lambda model: ClampedAdafactor(model.parameters())),
)(plain)


class AdamWScheduleFree(Optimizer):
    """Keeps its counts and sums in the group; `train()` and `eval()` move the weights."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.999), warmup_steps=3) -> None:
        defaults = dict(lr=lr, betas=betas, eps=1e-8, r=0.0, k=0, warmup_steps=warmup_steps, train_mode=False)
        super().__init__(params, {**defaults, "weight_sum": 0.0, "lr_max": -1.0, "weight_lr_power": 2.0})

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["betas"][0])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - group["betas"][0])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            k = group["k"]
            sched = (k + 1) / group["warmup_steps"] if k < group["warmup_steps"] else 1.0
            bias_correction2 = 1 - beta2 ** (k + 1)
            lr = group["lr"] * sched
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = ((k + 1) ** group["r"]) * (lr_max ** group["weight_lr_power"])
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            try:
                ckp1 = weight / weight_sum
            except ZeroDivisionError:
                ckp1 = 0
            active_p = [p for p in group["params"] if p.grad is not None]
            for p in active_p:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            y, grad, exp_avg_sq, z = zip(
                *[(p, p.grad, self.state[p]["exp_avg_sq"], self.state[p]["z"]) for p in active_p]
            )
            torch._foreach_mul_(exp_avg_sq, beta2)
            torch._foreach_addcmul_(exp_avg_sq, grad, grad, value=1 - beta2)
            denom = torch._foreach_div(exp_avg_sq, bias_correction2)
            torch._foreach_sqrt_(denom)
            torch._foreach_add_(denom, group["eps"])
            torch._foreach_div_(grad, denom)
            torch._foreach_lerp_(y, z, weight=ckp1)
            torch._foreach_add_(y, grad, alpha=lr * (beta1 * (1 - ckp1) - 1))
            torch._foreach_sub_(z, grad, alpha=lr)
            group["k"] = k + 1


def schedule_free_validation(w, returned, n) -> None:
    if n % 4 == 3:
        w.model.eval()
        w.optimizer.eval()
        with torch.no_grad():
            w.losses.update(w.model(normal(99, 3, 10)).sum().item())


@loop(
    "schedule-free AdamW",
    kind=KIND,
    source="facebookresearch/schedule_free examples/mnist/main.py",
    build=with_optimizer(lambda model: AdamWScheduleFree(model.parameters())),
    batch=labelled,
    between=schedule_free_validation,
    calls=10,
)
def schedule_free(w, x, y):
    w.model.train()
    w.optimizer.train()
    w.optimizer.zero_grad()
    loss = F.cross_entropy(w.model(x), y)
    loss.backward()
    w.optimizer.step()
    if w.it % 5 == 0:
        print(f"Train [{w.it}] Loss: {loss.item():.6f}")
    w.it += 1


class SAM(Optimizer):
    """Climbs first, keeps the weights in its state meanwhile, then lets another optimizer step from there."""

    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs) -> None:
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


def disable_running_stats(model):
    def _disable(module):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.backup_momentum = module.momentum
            module.momentum = 0

    model.apply(_disable)


def enable_running_stats(model):
    def _enable(module):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and hasattr(module, "backup_momentum"):
            module.momentum = module.backup_momentum

    model.apply(_enable)


@loop(
    "SAM, batch norms held still",
    kind=KIND,
    source="davda54/sam example/train.py",
    build=with_optimizer(lambda model: SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9), norm=True),
    batch=labelled,
)
def sam(w, inputs, targets):
    enable_running_stats(w.model)
    predictions = w.model(inputs)
    loss = F.cross_entropy(predictions, targets, label_smoothing=0.1, reduction="none")
    loss.mean().backward()
    w.optimizer.first_step(zero_grad=True)
    disable_running_stats(w.model)
    F.cross_entropy(w.model(inputs), targets, label_smoothing=0.1, reduction="none").mean().backward()
    w.optimizer.second_step(zero_grad=True)
    with torch.no_grad():
        correct = torch.argmax(predictions.data, 1) == targets
        w.losses.update(loss.cpu().mean().item(), int(correct.numel()))


class CopyingSAM(SAM):
    """The same; the weights are copied back."""

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


edit(
    "SAM, batch norms held still",
    "`p.copy_(old_p)` instead of `p.data = old_p`",
    build=with_optimizer(
        lambda model: CopyingSAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9), norm=True
    ),
)(sam)
