"""Steps as published projects write them, with their Python left in: no edit, eager's values, few captures."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.trainers import STEPS, WIDTH, Trainer, train
from tests.twins import World
from torch import Tensor, nn
from torch.optim import SGD, Adam


class EmaModel:
    """The weight average of a diffusion library: counts its steps, warms its decay up, keeps the decay it used."""

    def __init__(self, parameters: Any, decay: float = 0.999, update_after: int = 1) -> None:
        self.shadow_params = [parameter.clone().detach() for parameter in parameters]
        self.decay, self.update_after = decay, update_after
        self.optimization_step = 0
        self.cur_decay_value: float | None = None
        self.temp_stored_params: list[Tensor] | None = None

    def get_decay(self, optimization_step: int) -> float:
        step = max(0, optimization_step - self.update_after - 1)
        if step <= 0:
            return 0.0
        return max(min((1 + step) / (10 + step), self.decay), 0.0)

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        self.optimization_step += 1
        decay = self.get_decay(self.optimization_step)
        self.cur_decay_value = decay
        one_minus_decay = 1 - decay
        for kept, parameter in zip(self.shadow_params, list(parameters)):
            if parameter.requires_grad:
                kept.sub_(one_minus_decay * (kept - parameter))
            else:
                kept.copy_(parameter)


class WithEma(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.ema = EmaModel(self.model.parameters())

    def step(self, features: Tensor, labels: Tensor) -> Any:
        loss = super().step(features, labels)
        self.ema.step(self.model.parameters())
        return {"loss": loss.detach(), "ema_decay": self.ema.cur_decay_value}


def test_an_average_of_weights() -> None:
    twins = train(WithEma, max_captures=4)
    assert twins.worlds[1].trainer.ema.optimization_step == STEPS


class ClipLoss(nn.Module):
    def __init__(self, cache_labels: bool = True) -> None:
        super().__init__()
        self.cache_labels = cache_labels
        self.prev_num_logits = 0
        self.labels: dict[torch.device, Tensor] = {}

    def get_ground_truth(self, device: torch.device, num_logits: int) -> Tensor:
        if self.prev_num_logits != num_logits or device not in self.labels:
            labels = torch.arange(num_logits, device=device, dtype=torch.long)
            if self.cache_labels:
                self.labels[device] = labels
                self.prev_num_logits = num_logits
        else:
            labels = self.labels[device]
        return labels

    def forward(self, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        logits = scale * images @ texts.T
        labels = self.get_ground_truth(images.device, logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Clip(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Embedding(3, 3)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.optimizer = Adam([*self.model.parameters(), *self.text.parameters(), self.scale], lr=0.01)
        self.criterion = ClipLoss()

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        images, texts = F.normalize(self.model(features), dim=-1), F.normalize(self.text(labels), dim=-1)
        return self.criterion(images, texts, self.scale.exp())


def test_a_contrastive_loss_with_cached_labels() -> None:
    train(Clip)


class Mixup(Trainer):
    """Mixes examples, and cuts and pastes features, by turns of a coin."""

    def __init__(self, alpha: float = 0.4, cutmix: float = 0.0) -> None:
        super().__init__()
        self.alpha, self.cutmix = alpha, cutmix

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        lam = np.random.beta(self.alpha, self.alpha) if self.alpha > 0 else 1.0
        index = torch.randperm(features.size(0))
        if self.cutmix and np.random.rand() < self.cutmix:
            width = int(WIDTH * (1 - lam))
            start = np.random.randint(WIDTH)
            stop = min(start + width, WIDTH)
            mixed = features.clone()
            mixed[:, start:stop] = features[index, start:stop]
            lam = 1 - (stop - start) / WIDTH
        else:
            mixed = lam * features + (1 - lam) * features[index]
        outputs = self.model(mixed)
        return lam * F.cross_entropy(outputs, labels) + (1 - lam) * F.cross_entropy(outputs, labels[index])


def test_mixup() -> None:
    train(Mixup)


def test_mixup_and_cutmix() -> None:
    """Bounds of a slice are drawn, and a branch: each may be a capture, or the step is refused."""
    train(lambda: Mixup(cutmix=0.5), max_captures=STEPS, may_refuse=True)


class Gan:
    """A critic with a gradient penalty at points that NumPy draws; the generator is trained every third step."""

    def __init__(self) -> None:
        self.generator, self.critic = (
            nn.Linear(2, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)),
        )
        self.optimizer_g = Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        self.optimizer_d = Adam(self.critic.parameters(), lr=0.01, betas=(0.5, 0.9))
        self.batches_done = 0

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        alpha = torch.tensor(np.random.random((real.size(0), 1)), dtype=torch.float32)
        points = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        (gradients,) = torch.autograd.grad(self.critic(points).sum(), points, create_graph=True)
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    def step(self, features: Tensor, labels: Tensor) -> Any:
        noise = torch.randn(features.size(0), 2)
        fake = self.generator(noise)
        self.optimizer_d.zero_grad()
        loss_d = self.critic(fake.detach()).mean() - self.critic(features).mean()
        loss_d = loss_d + 10 * self.penalty(features, fake.detach())
        loss_d.backward()
        self.optimizer_d.step()
        loss_g = None
        if self.batches_done % 3 == 0:
            self.optimizer_g.zero_grad()
            loss_g = -self.critic(fake).mean()
            loss_g.backward()
            self.optimizer_g.step()
        self.batches_done += 1
        return loss_d, loss_g


def test_a_critic_with_a_gradient_penalty() -> None:
    train(Gan, max_captures=4)


class DinoLoss(nn.Module):
    center: Tensor

    def __init__(self, warmup: int = 3) -> None:
        super().__init__()
        self.center_momentum = 0.9
        self.register_buffer("center", torch.zeros(1, 3))
        self.teacher_temp_schedule = np.concatenate([np.linspace(0.04, 0.07, warmup), np.ones(20) * 0.07])

    def forward(self, student: Tensor, teacher: Tensor, epoch: int) -> Tensor:
        temperature = self.teacher_temp_schedule[epoch]
        targets = F.softmax((teacher - self.center) / temperature, dim=-1).detach()
        loss = torch.sum(-targets * F.log_softmax(student / 0.1, dim=-1), dim=-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        self.center = self.center * self.center_momentum + teacher.mean(0, keepdim=True) * (1 - self.center_momentum)


class Dino(Trainer):
    """Schedules of momentum, weight decay and temperature, by iteration and by epoch."""

    def __init__(self, sets_options: bool = False) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model)
        self.criterion = DinoLoss()
        self.momentum_schedule = 0.996 + 0.004 * np.linspace(0, 1, 20)
        self.decay_schedule = np.linspace(0.04, 0.4, 20)
        self.it = self.epoch = 0
        self.sets_options = sets_options

    def step(self, features: Tensor, labels: Tensor) -> Any:
        for group in self.optimizer.param_groups if self.sets_options else ():
            group["weight_decay"] = self.decay_schedule[self.it]
        with torch.no_grad():
            teacher = self.teacher(features)
        loss = self.criterion(self.model(features), teacher, self.epoch)
        self.update(loss)
        with torch.no_grad():
            momentum = self.momentum_schedule[self.it]
            for student, kept in zip(self.model.parameters(), self.teacher.parameters()):
                kept.data.mul_(momentum).add_((1 - momentum) * student.detach().data)
        self.it += 1
        return loss


def test_self_distillation_with_schedules() -> None:
    train(Dino, max_captures=4, change=lambda world, number: setattr(world.trainer, "epoch", number // 2))


def test_self_distillation_that_sets_options_of_the_optimizer() -> None:
    train(lambda: Dino(sets_options=True), max_captures=4)


class Moco(nn.Module):
    """A queue of keys with a pointer, in a buffer of whole numbers or in an attribute."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.register_buffer("queue", F.normalize(torch.randn(3, 12), dim=0))
        self.ptr = 0
        self.m = 0.99

    @torch.no_grad()
    def _momentum_update(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        size = keys.shape[0]
        assert self.queue.shape[1] % size == 0
        self.queue[:, self.ptr : self.ptr + size] = keys.T
        self.ptr = (self.ptr + size) % self.queue.shape[1]

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(features), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.encoder_k(features + 0.1), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        self._enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


class MocoTrainer(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.model = Moco()
        self.optimizer = SGD(self.model.encoder_q.parameters(), lr=0.1, momentum=0.9)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(*self.model(features))


def test_a_queue_with_a_pointer() -> None:
    """The pointer is a bound of a slice: each of its three values may be a capture."""
    train(MocoTrainer, max_captures=4)


class ReplayBuffer:
    """A ring of transitions in NumPy arrays; batches are drawn by index."""

    def __init__(self, capacity: int = 16) -> None:
        self.capacity, self.ptr, self.size = capacity, 0, 0
        self.obs = np.zeros((capacity, WIDTH), dtype=np.float32)
        self.rewards = np.zeros((capacity, 1), dtype=np.float32)

    def add(self, obs: np.ndarray, reward: float) -> None:
        self.obs[self.ptr], self.rewards[self.ptr] = obs, reward
        self.ptr = (self.ptr + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        indices = np.random.randint(0, self.size, size=number)
        return torch.as_tensor(self.obs[indices]), torch.as_tensor(self.rewards[indices])


class Critic(Trainer):
    """A value network on batches drawn from a replay buffer, with a slow target network."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(WIDTH, 1)
        self.target = copy.deepcopy(self.model)
        self.optimizer = Adam(self.model.parameters(), lr=0.01)
        self.replay = ReplayBuffer()
        for number in range(5):
            self.replay.add(np.full(WIDTH, number, dtype=np.float32), float(number))
        self.total_it, self.policy_freq, self.tau = 0, 2, 0.05

    def step(self, features: Tensor, labels: Tensor) -> Any:
        self.total_it += 1
        obs, rewards = self.replay.sample(4)
        with torch.no_grad():
            wanted = rewards + 0.9 * self.target(obs)
        loss = F.mse_loss(self.model(obs), wanted)
        self.update(loss)
        if self.total_it % self.policy_freq == 0:
            for parameter, kept in zip(self.model.parameters(), self.target.parameters()):
                kept.data.copy_(self.tau * parameter.data + (1 - self.tau) * kept.data)
        return loss


def test_a_replay_buffer() -> None:
    def add(world: World, number: int) -> None:
        world.trainer.replay.add(np.full(WIDTH, -number, dtype=np.float32), 0.5)

    train(Critic, max_captures=STEPS, change=add, may_refuse=True)


class StochasticDepth(nn.Module):
    """Residual blocks that a Python coin drops while training."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)
        self.rates = [drop * i / 2 for i in range(3)]

    def forward(self, hidden: Tensor) -> Tensor:
        for block, rate in zip(self.blocks, self.rates):
            if self.training and random.random() < rate:
                continue
            hidden = hidden + F.relu(block(hidden))
        return self.head(hidden)


class WithStochasticDepth(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.model = StochasticDepth(0.5)
        self.optimizer = Adam(self.model.parameters(), lr=0.01)


def test_stochastic_depth() -> None:
    """Each set of dropped blocks is another graph: at most four here, and one more for the first."""
    train(WithStochasticDepth, max_captures=5)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [WithEma, Mixup, Gan, Dino])
def test_for_longer(trainer: Callable[[], Any]) -> None:
    train(trainer, max_captures=5, num_steps=20)
