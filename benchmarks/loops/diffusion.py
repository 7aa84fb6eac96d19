"""Diffusion and flow matching."""

from __future__ import annotations

import copy
import math
from random import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, edit, loop
from wholestep.zoo.case import seeded_generator

STEPS = 20


def pictures(number: int, size: int = 4) -> tuple[Tensor]:
    return (torch.rand(size, 3, 8, 8, generator=seeded_generator(number)),)


def micro_batches(number: int) -> tuple[list[Tensor]]:
    return ([pictures(2 * number)[0], pictures(2 * number + 1)[0]],)


def labelled(number: int) -> tuple[Tensor, Tensor]:
    return pictures(number)[0], torch.randint(5, (4,), generator=seeded_generator(number))


class Denoiser(nn.Module):
    """A small network that knows the time and, if it is told, a first guess or a class."""

    def __init__(self, channels: int = 3, classes: int = 0) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(2, 8), nn.Linear(4, 8)
        self.classes = nn.Embedding(classes + 1, 8) if classes else None

    def forward(self, x: Tensor, t: Tensor, extra: Tensor | None = None) -> Tensor:
        frequencies = torch.exp(torch.arange(2, device=x.device) * -(math.log(10000) / 1))
        angles = t[:, None].float() * frequencies[None, :]
        embedding = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        if self.classes is not None:
            embedding = embedding + self.classes(extra)
        elif self.conv1.in_channels == 6:
            extra = torch.zeros_like(x) if extra is None else extra
            x = torch.cat((extra, x), dim=1)
        return self.conv2(F.silu(self.norm(self.conv1(x)) + embedding[:, :, None, None]))


def extract(a: Tensor, t: Tensor, shape: Any) -> Tensor:
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))


class GaussianDiffusion(nn.Module):
    """Noise that is predicted at random times, half of the time with a first guess of the picture."""

    def __init__(self, model: nn.Module, self_condition: bool = True) -> None:
        super().__init__()
        self.model, self.self_condition, self.objective = model, self_condition, "pred_noise"
        self.num_timesteps, self.offset_noise_strength = STEPS, 0.1
        betas = torch.linspace(1e-3, 0.2, STEPS)
        alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())
        self.register_buffer("loss_weight", torch.ones(STEPS))

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        kept, noisy = self.get_buffer("sqrt_alphas_cumprod"), self.get_buffer("sqrt_one_minus_alphas_cumprod")
        return extract(kept, t, x_start.shape) * x_start + extract(noisy, t, x_start.shape) * noise

    def predict_start(self, x: Tensor, t: Tensor) -> Tensor:
        kept, noisy = self.get_buffer("sqrt_alphas_cumprod"), self.get_buffer("sqrt_one_minus_alphas_cumprod")
        out = (x - extract(noisy, t, x.shape) * self.model(x, t, None)) / extract(kept, t, x.shape)
        return out.clamp(-1.0, 1.0)

    def p_losses(self, x_start: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        noise = torch.randn_like(x_start) if noise is None else noise
        if self.offset_noise_strength > 0.0:
            offset_noise = torch.randn(x_start.shape[:2], device=x_start.device)
            noise += self.offset_noise_strength * offset_noise[:, :, None, None]
        x = self.q_sample(x_start=x_start, t=t, noise=noise)
        x_self_cond = None
        if self.self_condition and random() < 0.5:
            with torch.no_grad():
                x_self_cond = self.predict_start(x, t)
                x_self_cond.detach_()
        model_out = self.model(x, t, x_self_cond)
        if self.objective == "pred_noise":
            target = noise
        elif self.objective == "pred_x0":
            target = x_start
        else:
            raise ValueError(f"unknown objective {self.objective}")
        loss = F.mse_loss(model_out, target, reduction="none").flatten(1).mean(1)
        loss = loss * extract(self.get_buffer("loss_weight"), t, loss.shape)
        return loss.mean()

    def forward(self, img: Tensor) -> Tensor:
        b, _, h, w = img.shape
        assert (h, w) == (8, 8), "height and width of image must be 8"
        t = torch.randint(0, self.num_timesteps, (b,), device=img.device).long()
        return self.p_losses(img * 2 - 1, t)


class EMA:
    """An average that starts after some steps, every few of them, with a decay that warms up."""

    def __init__(
        self, model: nn.Module, beta: float = 0.995, update_after_step: int = 3, update_every: int = 2
    ) -> None:
        self.online_model, self.ema_model = model, copy.deepcopy(model)
        self.ema_model.requires_grad_(False)
        self.beta, self.update_after_step, self.update_every, self.step = beta, update_after_step, update_every, 0
        self.initted = False

    def get_current_decay(self) -> float:
        epoch = max(0.0, self.step - self.update_after_step - 1)
        value = 1 - (1 + epoch / 1.0) ** -(2 / 3)
        return 0.0 if epoch <= 0 else min(max(value, 0.0), self.beta)

    @torch.no_grad()
    def copy_params(self) -> None:
        for kept, new in zip(self.ema_model.parameters(), self.online_model.parameters()):
            kept.data.copy_(new.data)
        for kept, new in zip(self.ema_model.buffers(), self.online_model.buffers()):
            kept.data.copy_(new.data)

    @torch.no_grad()
    def update(self) -> None:
        step = self.step
        self.step += 1
        if (step % self.update_every) != 0:
            return
        if step <= self.update_after_step:
            self.copy_params()
            return
        if not self.initted:
            self.copy_params()
            self.initted = True
        decay = self.get_current_decay()
        for kept, new in zip(self.ema_model.parameters(), self.online_model.parameters()):
            kept.data.lerp_(new.data, 1.0 - decay)
        for kept, new in zip(self.ema_model.buffers(), self.online_model.buffers()):
            kept.data.lerp_(new.data, 1.0 - decay)


class Bar:
    """What a step sees of a progress bar."""

    def __init__(self) -> None:
        self.n, self.desc = 0, ""

    def set_description(self, desc: str) -> None:
        self.desc = desc

    def update(self, n: int) -> None:
        self.n += n


def ddpm_world() -> World:
    model = GaussianDiffusion(Denoiser(6))
    return World(
        model=model,
        opt=torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99)),
        ema=EMA(model),
        pbar=Bar(),
        gradient_accumulate_every=2,
        max_grad_norm=1.0,
        step=0,
    )


@loop(
    "denoising diffusion",
    kind="diffusion",
    source="lucidrains/denoising-diffusion-pytorch denoising_diffusion_pytorch.py",
    build=ddpm_world,
    batch=micro_batches,
    calls=14,
)
def ddpm(w: World, batches: list[Tensor]) -> Any:
    w.model.train()
    total_loss = 0.0
    for micro_step in range(w.gradient_accumulate_every):
        data = batches[micro_step].to("cpu")
        with torch.autocast("cpu", enabled=False):
            loss = w.model(data)
            loss = loss / w.gradient_accumulate_every
            total_loss += loss.item()
        loss.backward()
    w.pbar.set_description(f"loss: {total_loss:.4f}")
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.max_grad_norm)
    w.opt.step()
    w.opt.zero_grad()
    w.step += 1
    w.ema.update()
    w.pbar.update(1)


class DiT(nn.Module):
    """A denoiser for classes, some of which are dropped while it trains."""

    def __init__(self, dropout_prob: float = 0.3) -> None:
        super().__init__()
        self.net, self.dropout_prob, self.num_classes = Denoiser(classes=5), dropout_prob, 5

    def token_drop(self, labels: Tensor, force_drop_ids: Tensor | None = None) -> Tensor:
        if force_drop_ids is None:
            drop_ids = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
        else:
            drop_ids = force_drop_ids == 1
        return torch.where(drop_ids, self.num_classes, labels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        if self.training and self.dropout_prob > 0:
            y = self.token_drop(y)
        return self.net(x, t, y)


def dit_world() -> World:
    model = DiT()
    return World(
        model=model,
        ema=copy.deepcopy(model).requires_grad_(False),
        opt=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0),
        running_loss=0,
        log_steps=0,
        train_steps=0,
        log_every=3,
    )


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, decay: float = 0.99) -> None:
    ema_params = dict(ema_model.named_parameters())
    for name, param in model.named_parameters():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


@loop(
    "DiT with dropped labels",
    kind="diffusion",
    source="facebookresearch/DiT train.py",
    build=dit_world,
    batch=labelled,
    calls=10,
)
def dit(w: World, x: Tensor, y: Tensor) -> Any:
    t = torch.randint(0, STEPS, (x.shape[0],), device="cpu")
    noise = torch.randn_like(x)
    alpha = torch.cos(t / STEPS * math.pi / 2)[:, None, None, None]
    loss = (w.model(alpha * x + (1 - alpha**2).sqrt() * noise, t, y) - noise).square().mean()
    w.opt.zero_grad()
    loss.backward()
    w.opt.step()
    update_ema(w.ema, w.model)
    w.running_loss += loss.item()
    w.log_steps += 1
    w.train_steps += 1
    if w.train_steps % w.log_every == 0:
        avg_loss = torch.tensor(w.running_loss / w.log_steps, device="cpu")
        avg_loss = avg_loss.item() / 1
        print(f"(step={w.train_steps:07d}) Train Loss: {avg_loss:.4f}")
        w.running_loss = 0
        w.log_steps = 0


@edit("DiT with dropped labels", "avg_loss = w.running_loss / w.log_steps, without the tensor that was for all_reduce")
def dit_edited(w: World, x: Tensor, y: Tensor) -> Any:
    t = torch.randint(0, STEPS, (x.shape[0],), device="cpu")
    noise = torch.randn_like(x)
    alpha = torch.cos(t / STEPS * math.pi / 2)[:, None, None, None]
    loss = (w.model(alpha * x + (1 - alpha**2).sqrt() * noise, t, y) - noise).square().mean()
    w.opt.zero_grad()
    loss.backward()
    w.opt.step()
    update_ema(w.ema, w.model)
    w.running_loss += loss.item()
    w.log_steps += 1
    w.train_steps += 1
    if w.train_steps % w.log_every == 0:
        avg_loss = w.running_loss / w.log_steps
        print(f"(step={w.train_steps:07d}) Train Loss: {avg_loss:.4f}")
        w.running_loss = 0
        w.log_steps = 0


def flow_world() -> World:
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return World(
        net_model=model,
        ema_model=copy.deepcopy(model),
        optim=optimizer,
        sched=torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda step: min(step, 5) / 5),
        global_step=0,
    )


def ema(source: nn.Module, target: nn.Module, decay: float) -> None:
    source_dict, target_dict = source.state_dict(), target.state_dict()
    for key in source_dict:
        target_dict[key].data.copy_(target_dict[key].data * decay + source_dict[key].data * (1 - decay))


@loop(
    "flow matching",
    kind="diffusion",
    source="atong01/conditional-flow-matching examples/images/cifar10/train_cifar10.py",
    build=flow_world,
    batch=pictures,
)
def flow_matching(w: World, x1: Tensor) -> Any:
    w.global_step += 1
    w.optim.zero_grad()
    x1 = x1.to("cpu")
    x0 = torch.randn_like(x1)
    t = torch.rand(x0.shape[0]).type_as(x0)
    xt = t[:, None, None, None] * x1 + (1 - t[:, None, None, None]) * x0 + 0.01 * torch.randn_like(x0)
    loss = torch.mean((w.net_model(xt, t) - (x1 - x0)) ** 2)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.net_model.parameters(), 1.0)
    w.optim.step()
    w.sched.step()
    ema(w.net_model, w.ema_model, 0.9)
    return loss.item()


def lcm_world() -> World:
    unet = Denoiser()
    teacher = copy.deepcopy(unet).requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    return World(
        unet=unet,
        target_unet=copy.deepcopy(unet).requires_grad_(False),
        teacher_unet=teacher,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
        solver_steps=torch.arange(1, 6) * 4 - 1,
        loss_type="huber",
        huber_c=0.001,
        global_step=0,
        logs=[],
    )


def boundary_scalings(t: Tensor, scaling: float = 10.0) -> tuple[Tensor, Tensor]:
    scaled = scaling * t
    return (0.25 / (scaled**2 + 0.25))[:, None, None, None], (scaled / (scaled**2 + 0.25) ** 0.5)[:, None, None, None]


@loop(
    "latent consistency distillation",
    kind="diffusion",
    source="huggingface/diffusers examples/consistency_distillation/train_lcm_distill_sd_wds.py",
    build=lcm_world,
    batch=pictures,
)
def lcm(w: World, latents: Tensor) -> Any:
    noise = torch.randn_like(latents)
    bsz = latents.shape[0]
    index = torch.randint(0, 5, (bsz,), device=latents.device).long()
    start_timesteps = w.solver_steps[index]
    timesteps = start_timesteps - 4
    timesteps = torch.where(timesteps < 0, torch.zeros_like(timesteps), timesteps)
    c_skip_start, c_out_start = boundary_scalings(start_timesteps)
    c_skip, c_out = boundary_scalings(timesteps)
    alpha = torch.cos(start_timesteps / STEPS * math.pi / 2)[:, None, None, None]
    noisy = alpha * latents + (1 - alpha**2).sqrt() * noise
    guidance = (4.0 - 2.0) * torch.rand((bsz,)) + 2.0
    guidance = guidance.reshape(bsz, 1, 1, 1)
    noise_pred = w.unet(noisy, start_timesteps)
    model_pred = c_skip_start * noisy + c_out_start * (noisy - noise_pred)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        cond = w.teacher_unet(noisy, start_timesteps)
        uncond = w.teacher_unet(noisy, torch.zeros_like(start_timesteps))
        x_prev = noisy - 0.1 * (cond + guidance * (cond - uncond))
        target_noise = w.target_unet(x_prev.float(), timesteps)
        target = c_skip * x_prev + c_out * (x_prev - target_noise)
    if w.loss_type == "l2":
        loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
    else:
        loss = torch.mean(torch.sqrt((model_pred.float() - target.float()) ** 2 + w.huber_c**2) - w.huber_c)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.unet.parameters(), 1.0)
    w.optimizer.step()
    w.lr_scheduler.step()
    w.optimizer.zero_grad(set_to_none=True)
    for targ, src in zip(w.target_unet.parameters(), w.unet.parameters()):
        targ.detach().mul_(0.95).add_(src, alpha=1 - 0.95)
    w.global_step += 1
    w.logs.append({"loss": loss.detach().item(), "lr": w.lr_scheduler.get_last_lr()[0]})


def edm_world() -> World:
    net = Denoiser()
    return World(
        net=net,
        ema=copy.deepcopy(net).eval().requires_grad_(False),
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8),
        cur_nimg=0,
        lr_rampup_kimg=0.02,
        ema_halflife_kimg=0.05,
        ema_rampup_ratio=0.05,
    )


@loop("EDM", kind="diffusion", source="NVlabs/edm training/training_loop.py", build=edm_world, batch=micro_batches)
def edm(w: World, batches: list[Tensor]) -> Any:
    w.optimizer.zero_grad(set_to_none=True)
    for images in batches:
        images = images.to("cpu").to(torch.float32) * 2 - 1
        rnd_normal = torch.randn([images.shape[0], 1, 1, 1], device=images.device)
        sigma = (rnd_normal * 1.2 - 1.2).exp()
        weight = (sigma**2 + 0.5**2) / (sigma * 0.5) ** 2
        n = torch.randn_like(images) * sigma
        d_yn = w.net(images + n, sigma.log().flatten() / 4)
        loss = weight * ((d_yn - images) ** 2)
        loss.sum().mul(1 / 8).backward()
    for g in w.optimizer.param_groups:
        g["lr"] = 1e-3 * min(w.cur_nimg / max(w.lr_rampup_kimg * 1000, 1e-8), 1)
    for param in w.net.parameters():
        if param.grad is not None:
            torch.nan_to_num(param.grad, nan=0, posinf=1e5, neginf=-1e5, out=param.grad)
    w.optimizer.step()
    ema_halflife_nimg = w.ema_halflife_kimg * 1000
    if w.ema_rampup_ratio is not None:
        ema_halflife_nimg = min(ema_halflife_nimg, w.cur_nimg * w.ema_rampup_ratio)
    ema_beta = 0.5 ** (8 / max(ema_halflife_nimg, 1e-8))
    for p_ema, p_net in zip(w.ema.parameters(), w.net.parameters()):
        p_ema.copy_(p_net.detach().lerp(p_ema, ema_beta))
    w.cur_nimg += 8
