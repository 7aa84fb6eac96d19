"""What scripts do around an update: scalers, skipped batches, accumulation, schedules, orthogonal updates."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.parts import AverageMeter, ProgressMeter, SmallConvNet, TinyGPT, accuracy, images, tokens
from wholestep.zoo.case import seeded_generator


def regression(number: int) -> tuple[Tensor, Tensor]:
    generator = seeded_generator(number)
    features = torch.randn(6, 4, generator=generator)
    if number == 3:
        features[0, 0] = float("inf")
    return features, torch.randn(6, 3, generator=generator)


def amp_world() -> World:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return World(
        net=net,
        opt=torch.optim.SGD(net.parameters(), lr=0.01),
        _scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3),
        loss_fn=nn.MSELoss(),
    )


def scaler_state(w: World, returned: Any, number: int) -> None:
    """The scaler keeps notes by `id(optimizer)`, which differ between two worlds; its state is compared."""
    w.scaler_state = w._scaler.state_dict()


@loop(
    "automatic mixed precision",
    kind="mixed precision",
    source="pytorch/tutorials recipes_source/recipes/amp_recipe.py",
    build=amp_world,
    batch=regression,
    between=scaler_state,
    calls=10,
)
def amp(w: World, inputs: Tensor, target: Tensor) -> Any:
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        output = w.net(inputs)
        assert output.dtype is torch.bfloat16
        loss = w.loss_fn(output, target.to(torch.bfloat16))
    w._scaler.scale(loss).backward()
    w._scaler.unscale_(w.opt)
    torch.nn.utils.clip_grad_norm_(w.net.parameters(), max_norm=0.1)
    w._scaler.step(w.opt)
    w._scaler.update()
    w.opt.zero_grad()


def skipping_world() -> World:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return World(model=model, optimizer=optimizer, skipped=0, n_iter=0, losses=AverageMeter("loss"))


@loop(
    "skip batches that are not finite",
    kind="mixed precision",
    source="SeanNaren/deepspeech.pytorch train.py (check_loss), huggingface/transformers Trainer (nan filter)",
    build=skipping_world,
    batch=regression,
    calls=10,
)
def skipping(w: World, inputs: Tensor, targets: Tensor) -> Any:
    w.n_iter += 1
    loss = F.mse_loss(w.model(inputs), targets)
    if not torch.isfinite(loss):
        print("WARNING: received an inf loss, setting loss value to 0")
        w.skipped += 1
        w.optimizer.zero_grad()
        return None
    w.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), 400)
    w.optimizer.step()
    w.losses.update(loss.item(), inputs.size(0))
    return w.losses.avg


def accumulating_world() -> World:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))
    return World(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        gradient_accumulation_steps=3,
        step=0,
        completed_steps=0,
        resume_step=2,
        total_loss=0,
        progress=[],
    )


@loop(
    "accumulation with early continue",
    kind="language",
    source="huggingface/transformers examples/pytorch/language-modeling/run_clm_no_trainer.py",
    build=accumulating_world,
    batch=tokens,
    calls=14,
)
def accumulating(w: World, input_ids: Tensor, labels: Tensor) -> Any:
    step = w.step
    w.step += 1
    if w.resume_step is not None and step < w.resume_step:
        if step % w.gradient_accumulation_steps == 0:
            w.completed_steps += 1
        return
    _, loss = w.model(input_ids, labels)
    w.total_loss += loss.detach().float()
    loss = loss / w.gradient_accumulation_steps
    loss.backward()
    if step % w.gradient_accumulation_steps == 0 or step == 13:
        w.optimizer.step()
        w.lr_scheduler.step()
        w.optimizer.zero_grad()
        w.progress.append(1)
        w.completed_steps += 1


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz iterations; the other parameters are AdamW's."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, defaults={})
        self._lr_t, self._wd_t = torch.tensor(0.0), torch.tensor(0.0)

    def _adamw(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            self._lr_t.fill_(group["lr"])
            self._wd_t.fill_(group["weight_decay"])
            beta1, beta2 = group["betas"]
            p.mul_(1 - self._lr_t * self._wd_t)
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
            bias1, bias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
            denom = (state["exp_avg_sq"] / bias2).sqrt() + group["eps"]
            p.add_(state["exp_avg"] / denom * -(self._lr_t / bias1))

    def _muon(self, group: dict[str, Any]) -> None:
        params = group["params"]
        state = self.state[params[0]]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros(len(params), *params[0].shape)
        stacked_grads, stacked_params = torch.stack([p.grad for p in params]), torch.stack(params)
        momentum = group["momentum"]
        state["momentum_buffer"].lerp_(stacked_grads, 1 - momentum)
        g = stacked_grads.lerp_(state["momentum_buffer"], momentum)
        x = g.bfloat16()
        x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-6)
        is_tall = g.size(-2) > g.size(-1)
        for a, b, c in ((8.16, -22.48, 15.88), (4.04, -2.81, 0.5), (3.89, -2.77, 0.51))[: group["ns_steps"]]:
            gram = x.mT @ x if is_tall else x @ x.mT
            poly = b * gram + c * (gram @ gram)
            x = a * x + (x @ poly if is_tall else poly @ x)
        g = x.to(stacked_params.dtype)
        lr, wd = group["lr"] * max(1, g.size(-2) / g.size(-1)) ** 0.5, group["weight_decay"]
        mask = (g * stacked_params) >= 0
        stacked_params.sub_(lr * g + lr * wd * stacked_params * mask)
        for p, value in zip(params, stacked_params.unbind(0)):
            p.copy_(value)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (self._adamw if group["kind"] == "adamw" else self._muon)(group)


def nanochat_world() -> World:
    model = TinyGPT(dropout=0.0)
    matrices = [block.c_proj.weight for block in model.h]  # type: ignore[union-attr]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    shared: dict[str, Any] = {"initial_lr": 0.01, "lr": 0.01}
    groups = [
        {"params": others, "kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0, **shared},
        {"params": matrices, "kind": "muon", "momentum": 0.85, "ns_steps": 3, "weight_decay": 0.2, **shared},
    ]
    return World(
        model=model,
        orig_model=None,
        optimizer=Muon(groups),
        scaler=None,
        grad_accum_steps=2,
        num_iterations=20,
        step=0,
        smooth_train_loss=0,
        wandb_run=[],
    )


def get_lr_multiplier(it: int, num_iterations: int) -> float:
    warmup_iters, warmdown_iters = 3, round(0.5 * num_iterations)
    if it < warmup_iters:
        return (it + 1) / warmup_iters
    elif it <= num_iterations - warmdown_iters:
        return 1.0
    else:
        progress = (num_iterations - it) / warmdown_iters
        return progress * 1.0 + (1 - progress) * 0.05


def micro_batches(number: int) -> tuple[list[tuple[Tensor, Tensor]]]:
    return ([tokens(2 * number), tokens(2 * number + 1)],)


@loop(
    "nanochat",
    kind="language",
    source="karpathy/nanochat scripts/base_train.py, nanochat/optim.py",
    build=nanochat_world,
    batch=micro_batches,
    calls=14,
)
def nanochat(w: World, batches: list[tuple[Tensor, Tensor]]) -> Any:
    train_loss = torch.zeros(())
    for micro_step in range(w.grad_accum_steps):
        x, y = batches[micro_step]
        _, loss = w.model(x, y)
        train_loss = loss.detach()
        loss = loss / w.grad_accum_steps
        if w.scaler is not None:
            w.scaler.scale(loss).backward()
        else:
            loss.backward()
    lrm = get_lr_multiplier(w.step, w.num_iterations)
    frac = min(w.step / 10, 1)
    muon_momentum = (1 - frac) * 0.85 + frac * 0.95
    muon_weight_decay = 0.2 * (1 - w.step / w.num_iterations)
    for group in w.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lrm
        if group["kind"] == "muon":
            group["momentum"] = muon_momentum
            group["weight_decay"] = muon_weight_decay
    w.optimizer.step()
    w.model.zero_grad(set_to_none=True)
    train_loss_f = train_loss.item()
    ema_beta = 0.9
    w.smooth_train_loss = ema_beta * w.smooth_train_loss + (1 - ema_beta) * train_loss_f
    debiased_smooth_loss = w.smooth_train_loss / (1 - ema_beta ** (w.step + 1))
    pct_done = 100 * w.step / w.num_iterations
    print(f"step {w.step:05d}/{w.num_iterations:05d} ({pct_done:.2f}%) | {debiased_smooth_loss:.6f} | lrm: {lrm:.2f}")
    if w.step % 5 == 0:
        w.wandb_run.append({"step": w.step, "train/loss": debiased_smooth_loss, "train/lrm": lrm})
    w.step += 1


def clocked_world() -> World:
    model = SmallConvNet()
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    return World(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        losses=losses,
        top1=top1,
        _batch_time=AverageMeter("Time", ":6.3f"),
        _end=0.0,
        progress=ProgressMeter(100, [losses, top1], prefix="Epoch: [0]"),
        i=0,
    )


def clocked_rest(w: World, inputs: Tensor, target: Tensor) -> None:
    """The step but for the time that it takes."""
    output = w.model(inputs)
    loss = w.criterion(output, target)
    w.losses.update(loss.item(), inputs.size(0))
    w.top1.update(accuracy(output, target)[0][0], inputs.size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.i % 3 == 0:
        w.progress.display(w.i + 1)
    w.i += 1


@loop(
    "ImageNet, meters and clocks",
    kind="vision",
    source="pytorch/examples imagenet/main.py (with batch_time)",
    build=clocked_world,
    batch=images,
)
def clocked(w: World, inputs: Tensor, target: Tensor) -> Any:
    clocked_rest(w, inputs, target)
    w._batch_time.update(time.time() - w._end)
    w._end = time.time()


def clock_outside(w: World, returned: Any) -> None:
    w._batch_time.update(time.time() - w._end)
    w._end = time.time()


@edit("ImageNet, meters and clocks", "the two lines that ask the clock stand after the call", between=clock_outside)
def clocked_edited(w: World, inputs: Tensor, target: Tensor) -> Any:
    clocked_rest(w, inputs, target)
