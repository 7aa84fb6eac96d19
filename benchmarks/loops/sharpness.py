"""Sharpness-aware minimisation and gradient penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, loop
from benchmarks.loops.parts import SmallConvNet, images


class SAM(torch.optim.Optimizer):
    """Climbs to the worst point nearby, and steps with the gradient of there."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, adaptive: bool = False, **kwargs: Any):
        assert rho >= 0.0, f"Invalid rho, should be non-negative: {rho}"
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
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
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self) -> Tensor:
        shared_device = self.param_groups[0]["params"][0].device
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2).to(shared_device)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


def disable_running_stats(model: nn.Module) -> None:
    def disable(module: Any) -> None:
        if isinstance(module, nn.BatchNorm2d):
            module.backup_momentum = module.momentum  # type: ignore[assignment]
            module.momentum = 0

    model.apply(disable)


def enable_running_stats(model: nn.Module) -> None:
    def enable(module: Any) -> None:
        if isinstance(module, nn.BatchNorm2d) and hasattr(module, "backup_momentum"):
            module.momentum = module.backup_momentum  # type: ignore[assignment]

    model.apply(enable)


def smooth_crossentropy(pred: Tensor, gold: Tensor, smoothing: float = 0.1) -> Tensor:
    n_class = pred.size(1)
    one_hot = torch.full_like(pred, fill_value=smoothing / (n_class - 1))
    one_hot.scatter_(dim=1, index=gold.unsqueeze(1), value=1.0 - smoothing)
    return F.kl_div(input=F.log_softmax(pred, dim=1), target=one_hot, reduction="none").sum(-1)


class Log:
    """Running sums of losses and accuracies."""

    def __init__(self) -> None:
        self.step, self.state = 0, {"loss": 0.0, "accuracy": 0.0, "steps": 0}

    def __call__(self, loss: Tensor, accuracy: Tensor, learning_rate: float) -> None:
        self.state["loss"] += loss.sum().item()
        self.state["accuracy"] += accuracy.sum().item()
        self.state["steps"] += loss.size(0)
        if self.step % 3 == 0:
            average = self.state["loss"] / self.state["steps"]
            print(
                f"{self.step:3d} {average:12.4f} {100 * self.state['accuracy'] / self.state['steps']:10.2f} %", end=""
            )
        self.step += 1


class StepLR:
    """A schedule by hand that writes the rate into the groups."""

    def __init__(self, optimizer: Any, learning_rate: float, total_epochs: int) -> None:
        self.optimizer, self.total_epochs, self.base = optimizer, total_epochs, learning_rate

    def __call__(self, epoch: int) -> None:
        if epoch < self.total_epochs * 3 / 10:
            lr = self.base
        elif epoch < self.total_epochs * 6 / 10:
            lr = self.base * 0.2
        else:
            lr = self.base * 0.2**2
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr

    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def sam_world(adaptive: bool = False) -> Callable[[], World]:
    def build() -> World:
        model = SmallConvNet(p=0.0)
        optimizer = SAM(
            model.parameters(), torch.optim.SGD, rho=2.0 if adaptive else 0.05, adaptive=adaptive, lr=0.1, momentum=0.9
        )
        return World(model=model, optimizer=optimizer, log=Log(), scheduler=StepLR(optimizer, 0.1, 10), epoch=0)

    return build


def sam_step(w: World, inputs: Tensor, targets: Tensor) -> Any:
    enable_running_stats(w.model)
    predictions = w.model(inputs)
    loss = smooth_crossentropy(predictions, targets, smoothing=0.1)
    loss.mean().backward()
    w.optimizer.first_step(zero_grad=True)
    disable_running_stats(w.model)
    smooth_crossentropy(w.model(inputs), targets, smoothing=0.1).mean().backward()
    w.optimizer.second_step(zero_grad=True)
    with torch.no_grad():
        correct = torch.argmax(predictions.data, 1) == targets
        w.log(loss.cpu(), correct.cpu(), w.scheduler.lr())
        w.scheduler(w.epoch)


def next_epoch(w: World, returned: Any, number: int) -> None:
    w.epoch = number // 2


SOURCE = {"kind": "SAM", "source": "davda54/sam example/train.py", "batch": images, "between": next_epoch}
loop("SAM", build=sam_world(), **SOURCE)(sam_step)
loop("ASAM", build=sam_world(adaptive=True), **SOURCE)(sam_step)


@loop("SAM by a closure", kind="SAM", source="davda54/sam README.md", build=sam_world(), batch=images)
def sam_closure(w: World, inputs: Tensor, targets: Tensor) -> Any:
    def closure() -> Tensor:
        loss = F.cross_entropy(w.model(inputs), targets)
        loss.backward()
        return loss

    loss = F.cross_entropy(w.model(inputs), targets)
    loss.backward()
    w.optimizer.step(closure)
    w.optimizer.zero_grad()
    return loss


class GSAM(torch.optim.Optimizer):
    """Gradients of here and of the worst point nearby, one taken apart along the other; `rho` follows the rate."""

    def __init__(self, base_optimizer: Any, model: nn.Module, alpha: float = 0.4) -> None:
        super().__init__(model.parameters(), {"adaptive": False})
        self.base_optimizer, self.model, self.alpha = base_optimizer, model, alpha
        self.param_groups = self.base_optimizer.param_groups
        self.rho_t, self.perturb_eps = 0.05, 1e-12

    @torch.no_grad()
    def update_rho_t(self, lr: float) -> float:
        self.rho_t = 0.01 + 0.04 * (lr - 0.0) / (0.1 - 0.0)
        return self.rho_t

    def _grad_norm(self, by: str | None = None) -> Tensor:
        return torch.stack(
            [(p.grad if not by else self.state[p][by]).norm(p=2) for p in self.model.parameters() if p.grad is not None]
        ).norm(p=2)

    @torch.no_grad()
    def perturb_weights(self) -> None:
        scale = self.rho_t / (self._grad_norm() + self.perturb_eps)
        for p in self.model.parameters():
            if p.grad is None:
                continue
            self.state[p]["old_g"] = p.grad.data.clone()
            e_w = p.grad * scale.to(p)
            p.add_(e_w)
            self.state[p]["e_w"] = e_w

    @torch.no_grad()
    def gradient_decompose(self) -> None:
        inner_prod = torch.zeros(())
        for p in self.model.parameters():
            if p.grad is None:
                continue
            inner_prod = inner_prod + torch.sum(self.state[p]["old_g"] * p.grad.data)
        new_grad_norm, old_grad_norm = self._grad_norm(), self._grad_norm(by="old_g")
        cosine = inner_prod / (new_grad_norm * old_grad_norm + self.perturb_eps)
        for p in self.model.parameters():
            if p.grad is None:
                continue
            vertical = self.state[p]["old_g"] - cosine * old_grad_norm * p.grad.data / (
                new_grad_norm + self.perturb_eps
            )
            p.grad.data.add_(vertical, alpha=-self.alpha)
            p.sub_(self.state[p]["e_w"])


def gsam_world() -> World:
    model = SmallConvNet(p=0.0)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(base, 20)
    return World(model=model, base=base, optimizer=GSAM(base, model), scheduler=scheduler, log=Log())


@loop("GSAM", kind="SAM", source="juntang-zhuang/GSAM gsam/gsam.py", build=gsam_world, batch=images)
def gsam(w: World, inputs: Tensor, targets: Tensor) -> Any:
    w.base.zero_grad()
    predictions = w.model(inputs)
    loss = smooth_crossentropy(predictions, targets)
    loss.mean().backward()
    w.optimizer.perturb_weights()
    disable_running_stats(w.model)
    w.base.zero_grad()
    smooth_crossentropy(w.model(inputs), targets).mean().backward()
    w.optimizer.gradient_decompose()
    w.base.step()
    enable_running_stats(w.model)
    with torch.no_grad():
        correct = torch.argmax(predictions, 1) == targets
        w.log(loss, correct, w.base.param_groups[0]["lr"])
        w.scheduler.step()
        w.optimizer.update_rho_t(w.scheduler.get_last_lr()[0])


@loop(
    "gradient penalty on inputs",
    kind="SAM",
    source="y0ast/deterministic-uncertainty-quantification train_duq_cifar.py",
    build=lambda: World(**vars(sam_world()()), l_gradient_penalty=0.5, output=[]),
    batch=images,
)
def duq(w: World, x: Tensor, y: Tensor) -> Any:
    w.model.train()
    w.optimizer.base_optimizer.zero_grad()
    x.requires_grad_(True)
    y_pred = torch.sigmoid(w.model(x))
    loss = F.binary_cross_entropy(y_pred, F.one_hot(y, 5).float())
    w.output.append(loss.item())
    if w.l_gradient_penalty > 0:
        gradients = torch.autograd.grad(
            outputs=y_pred, inputs=x, grad_outputs=torch.ones_like(y_pred), create_graph=True
        )[0]
        gradients = gradients.flatten(start_dim=1)
        grad_norm = gradients.norm(2, dim=1)
        gradient_penalty = ((grad_norm - 1) ** 2).mean()
        loss += w.l_gradient_penalty * gradient_penalty
    loss.backward()
    x.requires_grad_(False)
    w.optimizer.base_optimizer.step()
    return loss.item()
