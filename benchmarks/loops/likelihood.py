"""Normalising flows and energy-based models."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, edit, loop
from wholestep.zoo.case import seeded_generator


def points(number: int) -> tuple[Tensor]:
    return (torch.randn(8, 4, generator=seeded_generator(number)),)


class Coupling(nn.Module):
    """Half of the features scale and shift the other half."""

    mask: Tensor

    def __init__(self, flip: bool) -> None:
        super().__init__()
        mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
        self.register_buffer("mask", 1 - mask if flip else mask)
        self.scale_net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.translate_net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        masked = x * self.mask
        log_s = self.scale_net(masked) * (1 - self.mask)
        t = self.translate_net(masked) * (1 - self.mask)
        return x * torch.exp(log_s) + t, log_s.sum(-1, keepdim=True)


class BatchNormFlow(nn.Module):
    """A batch norm as a flow, whose averages are attributes that it updates by hand."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.log_gamma, self.beta = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.momentum, self.eps = 0.1, 1e-5
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.batch_mean = x.mean(0)
        self.batch_var = (x - self.batch_mean).pow(2).mean(0) + self.eps
        self.running_mean.mul_(1 - self.momentum)
        self.running_var.mul_(1 - self.momentum)
        self.running_mean.add_(self.batch_mean.data * self.momentum)
        self.running_var.add_(self.batch_var.data * self.momentum)
        x_hat = (x - self.batch_mean) / self.batch_var.sqrt()
        y = torch.exp(self.log_gamma) * x_hat + self.beta
        return y, (self.log_gamma - 0.5 * torch.log(self.batch_var)).sum(-1, keepdim=True)


class FlowSequential(nn.Sequential):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.num_inputs = inputs.size(-1)
        logdets = torch.zeros(inputs.size(0), 1, device=inputs.device)
        for module in self._modules.values():
            inputs, logdet = module(inputs)  # type: ignore[misc]
            logdets += logdet
        return inputs, logdets

    def log_probs(self, inputs: Tensor) -> Tensor:
        u, log_jacob = self(inputs)
        log_probs = (-0.5 * u.pow(2) - 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)
        return (log_probs + log_jacob).sum(-1, keepdim=True)


def flow_world() -> World:
    model = FlowSequential(Coupling(False), BatchNormFlow(), Coupling(True), BatchNormFlow())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    return World(model=model, optimizer=optimizer, train_loss=0, global_step=0, writer=[])


@loop("RealNVP", kind="flow", source="ikostrikov/pytorch-flows main.py", build=flow_world, batch=points)
def real_nvp(w: World, data: Tensor) -> Any:
    data = data.to("cpu")
    w.optimizer.zero_grad()
    loss = -w.model.log_probs(data).mean()
    w.train_loss += loss.item()
    loss.backward()
    w.optimizer.step()
    w.writer.append(("training/loss", loss.item(), w.global_step))
    w.global_step += 1


class Sampler:
    """Langevin dynamics that begin at examples of before, drawn by Python."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.examples = [(torch.rand((1, 4)) * 2 - 1) for _ in range(8)]

    def sample_new_exmps(self, steps: int = 3, step_size: float = 0.1) -> Tensor:
        old = torch.cat(random.choices(self.examples, k=6), dim=0)
        inp = torch.cat([torch.rand(2, 4) * 2 - 1, old], dim=0).detach()
        inp = self.generate(inp, steps, step_size)
        self.examples = list(inp.chunk(8, dim=0)) + self.examples
        self.examples = self.examples[:16]
        return inp

    def generate(self, inp: Tensor, steps: int, step_size: float) -> Tensor:
        is_training = self.model.training
        self.model.eval()
        for p in self.model.parameters():
            p.requires_grad = False
        inp.requires_grad = True
        had_gradients_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        noise = torch.randn(inp.shape)
        for _ in range(steps):
            noise.normal_(0, 0.005)
            inp.data.add_(noise.data)
            inp.data.clamp_(min=-1.0, max=1.0)
            out = -self.model(inp)
            out.sum().backward()
            assert inp.grad is not None
            inp.grad.data.clamp_(-0.03, 0.03)
            inp.data.add_(-step_size * inp.grad.data)
            inp.grad.detach_()
            inp.grad.zero_()
            inp.data.clamp_(min=-1.0, max=1.0)
        for p in self.model.parameters():
            p.requires_grad = True
        self.model.train(is_training)
        torch.set_grad_enabled(had_gradients_enabled)
        return inp.detach()


def energy_world() -> World:
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.999))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)
    return World(cnn=model, optimizer=optimizer, scheduler=scheduler, sampler=Sampler(model), log={}, alpha=0.1)


def losses_of(w: World, real_imgs: Tensor, fake_imgs: Tensor) -> None:
    """The rest of the step, given samples."""
    real_out, fake_out = w.cnn(torch.cat([real_imgs, fake_imgs], dim=0)).chunk(2, dim=0)
    reg_loss = w.alpha * (real_out**2 + fake_out**2).mean()
    cdiv_loss = fake_out.mean() - real_out.mean()
    loss = reg_loss + cdiv_loss
    w.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.cnn.parameters(), 0.1)
    w.optimizer.step()
    w.log["loss"] = loss.item()
    w.log["metrics_avg_real"] = real_out.mean().item()


@loop(
    "energy-based model",
    kind="energy",
    source="phlippe/uvadlc_notebooks Tutorial 8 (Deep Energy Models)",
    build=energy_world,
    batch=points,
    between=lambda w, returned, number: w.scheduler.step(),
)
def energy(w: World, batch: Tensor) -> Any:
    small_noise = torch.randn_like(batch) * 0.005
    batch = batch + small_noise
    batch.clamp_(min=-1.0, max=1.0)
    losses_of(w, batch, w.sampler.sample_new_exmps())


@edit("energy-based model", "examples in one tensor, with rows chosen by torch.randint in place of random.choices")
def energy_edited(w: World, batch: Tensor) -> Any:
    batch = batch + torch.randn_like(batch) * 0.005
    batch.clamp_(min=-1.0, max=1.0)
    sampler = w.sampler
    if isinstance(sampler.examples, list):
        sampler.examples = torch.cat(sampler.examples)
    old = sampler.examples[torch.randint(0, len(sampler.examples), (6,))]
    inp = torch.cat([torch.rand(2, 4) * 2 - 1, old], dim=0).detach()
    inp = sampler.generate(inp, 3, 0.1)
    sampler.examples = torch.cat([inp, sampler.examples])[:16]
    losses_of(w, batch, inp)


@loop(
    "score matching",
    kind="energy",
    source="ermongroup/ncsn losses/dsm.py, runners/anneal_runner.py",
    build=lambda: World(
        score=(net := nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 4))),
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-3, amsgrad=True),
        sigmas=torch.logspace(0, -2, 5),
        step=0,
        tb_logger=[],
    ),
    batch=points,
)
def score_matching(w: World, x: Tensor) -> Any:
    w.step += 1
    w.score.train()
    x = x / 256.0 * 255.0 + torch.rand_like(x) / 256.0
    labels = torch.randint(0, len(w.sigmas), (x.shape[0],), device=x.device)
    used_sigmas = w.sigmas[labels].view(x.shape[0], *([1] * len(x.shape[1:])))
    perturbed = x + torch.randn_like(x) * used_sigmas
    target = -1 / (used_sigmas**2) * (perturbed - x)
    scores = w.score(perturbed)
    loss = (1 / 2.0 * ((scores - target) ** 2).sum(dim=-1) * used_sigmas.squeeze() ** 2.0).mean(dim=0)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.tb_logger.append(("loss", loss, w.step))
    print(f"step: {w.step}, loss: {loss.item()}")


@loop(
    "contrastive divergence (RBM)",
    kind="energy",
    source="odie2630463/Restricted-Boltzmann-Machines-in-pytorch RBM.ipynb",
    build=lambda: World(rbm=(rbm := RBM()), train_op=torch.optim.SGD(rbm.parameters(), 0.1), loss_=[]),
    batch=lambda number: (torch.rand(6, 8, generator=seeded_generator(number)),),
)
def rbm_step(w: World, data: Tensor) -> Any:
    sample_data = data.bernoulli()
    v, v1 = w.rbm(sample_data)
    loss = w.rbm.free_energy(v) - w.rbm.free_energy(v1)
    w.loss_.append(loss.data)
    w.train_op.zero_grad()
    loss.backward()
    w.train_op.step()


class RBM(nn.Module):
    """A restricted Boltzmann machine with a few Gibbs steps."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(5, 8) * 1e-2)
        self.v_bias, self.h_bias, self.k = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(5)), 2

    def sample_from_p(self, p: Tensor) -> Tensor:
        return F.relu(torch.sign(p - torch.rand(p.size())))

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        h_ = self.sample_from_p(torch.sigmoid(F.linear(v, self.W, self.h_bias)))
        v_ = v
        for _ in range(self.k):
            v_ = self.sample_from_p(torch.sigmoid(F.linear(h_, self.W.t(), self.v_bias)))
            h_ = self.sample_from_p(torch.sigmoid(F.linear(v_, self.W, self.h_bias)))
        return v, v_

    def free_energy(self, v: Tensor) -> Tensor:
        vbias_term = v.mv(self.v_bias)
        wx_b = F.linear(v, self.W, self.h_bias)
        hidden_term = wx_b.exp().add(1).log().sum(1)
        return (-hidden_term - vbias_term).mean()
