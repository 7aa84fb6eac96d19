"""What published loops do around their steps: meters, bars, hooks, configs, curricula, all inside the step."""

import collections
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.trainers import STEPS, WIDTH, Trainer, train
from tests.twins import World
from torch import Tensor, nn
from torch.optim import Adam


class AverageMeter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Metered(Trainer):
    """Losses and accuracies in meters, with a list of recent ones and a table by name."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.top1 = AverageMeter("loss"), AverageMeter("top1")
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=3)
        self.history: dict[str, list[Any]] = collections.defaultdict(list)

    def step(self, features: Tensor, labels: Tensor) -> Any:
        outputs = self.model(features)
        loss = F.cross_entropy(outputs, labels)
        correct = (outputs.argmax(1) == labels).float().mean()
        self.losses.update(loss.detach(), features.size(0))
        self.top1.update(correct, features.size(0))
        self.update(loss)
        self.recent.append(loss.detach())
        self.history["loss"].append(loss.detach())
        self.history["lr"].append(self.optimizer.param_groups[0]["lr"])
        return self.losses.avg


def test_meters() -> None:
    def change(world: World, number: int) -> None:
        if number == 3:
            world.trainer.losses.reset()
        world.trainer.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)

    twins = train(Metered, max_captures=4, change=change)
    assert len(twins.worlds[1].trainer.history["loss"]) == STEPS


class Bar:
    def __init__(self, total: int) -> None:
        self.n, self.total, self.postfix = 0, total, {}
        self.lines: list[tuple[float, int, int]] = []

    def update(self, n: int = 1) -> None:
        self.n += n
        self.lines.append((100 * self.n / self.total, self.n, self.total))

    def set_postfix(self, **items: Any) -> None:
        self.postfix = items


class WithBar(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.bar = Bar(STEPS)

    def step(self, features: Tensor, labels: Tensor) -> Any:
        loss = super().step(features, labels)
        self.bar.set_postfix(loss=loss.detach(), size=len(features))
        self.bar.update(1)
        return loss


def test_a_progress_object() -> None:
    twins = train(WithBar)
    assert twins.worlds[1].trainer.bar.lines[-1] == (100.0, 6, 6)


class Statistics:
    """Running means of what layers put out, collected by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.means: dict[str, Tensor] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.handles = [layer.register_forward_hook(self.hook(name)) for name, layer in model.named_children()]

    def hook(self, name: str) -> Callable[..., None]:
        def collect(module: nn.Module, args: Any, output: Tensor) -> None:
            new = output.detach().mean()
            self.calls[name] += 1
            self.means[name] = new if name not in self.means else 0.9 * self.means[name] + 0.1 * new

        return collect


class WithStatistics(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics(self.model)


def test_running_means_in_hooks() -> None:
    twins = train(WithStatistics)
    assert twins.worlds[1].trainer.statistics.calls == {"0": STEPS, "1": STEPS, "2": STEPS}


class WarmedUp(nn.Module):
    """A head that fades in while the module counts its own calls."""

    def __init__(self, warmup: int = 4) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.num_calls, self.warmup = 0, warmup

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        weight = min(1.0, self.num_calls / self.warmup)
        return self.head(features + weight * torch.tanh(self.body(features)))


class WithWarmup(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.model = WarmedUp()
        self.optimizer = Adam(self.model.parameters(), lr=0.01)


def test_a_warmup_counted_in_the_forward() -> None:
    train(WithWarmup, max_captures=4)


@dataclasses.dataclass
class LossConfig:
    label_smoothing: float = 0.1
    reduction: str = "mean"
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"ce": 1.0, "l2": 0.01})
    clip: float | None = None


class Configured(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(loss=LossConfig(), train=SimpleNamespace(epoch=0))

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        cfg = self.cfg.loss
        parts = {
            "ce": F.cross_entropy(
                self.model(features), labels, label_smoothing=cfg.label_smoothing, reduction=cfg.reduction
            ),
            "l2": sum(parameter.square().sum() for parameter in self.model.parameters()),
        }
        total = sum(weight * parts[name] for name, weight in cfg.weights.items() if weight)
        assert isinstance(total, Tensor)
        return total if cfg.clip is None else total.clamp(max=cfg.clip)


def test_a_config_object_with_label_smoothing() -> None:
    def change(world: World, number: int) -> None:
        cfg = world.trainer.cfg.loss
        cfg.label_smoothing = 0.1 - 0.01 * number
        cfg.weights["l2"] = 0.01 * number
        cfg.reduction = "mean" if number < 4 else "sum"

    train(Configured, max_captures=STEPS, change=change)  # torch takes the smoothing as a plain number


class Curriculum(Trainer):
    """Harder examples, a longer part of the features and another loss as epochs go by."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.stages = [(0, 2, "easy"), (3, WIDTH, "hard")]

    def stage(self) -> tuple[int, int, str]:
        return max(stage for stage in self.stages if stage[0] <= self.epoch)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        _, width, name = self.stage()
        mask = torch.zeros(WIDTH)
        mask[:width] = 1.0
        loss = F.cross_entropy(self.model(features * mask), labels, reduction="none")
        return loss.mean() if name == "easy" else loss.topk(2).values.mean()


def test_a_curriculum_by_epoch() -> None:
    train(Curriculum, max_captures=4, change=lambda world, number: setattr(world.trainer, "epoch", number))


class KlAnnealed(Trainer):
    """A variational model whose weight of the KL term follows the global step, and which keeps its parts by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)
        self.optimizer = Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=0.01)
        self.global_step, self.anneal_steps = 0, 10
        self.logged: dict[str, Any] = {}

    def step(self, features: Tensor, labels: Tensor) -> Any:
        mean, log_variance = self.encoder(features).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        reconstruction = F.mse_loss(self.decoder(latent), features)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        beta = min(1.0, self.global_step / self.anneal_steps)
        loss = reconstruction + beta * kl
        self.update(loss)
        self.logged.update(loss=loss.detach(), kl=kl.detach(), beta=beta, step=self.global_step)
        self.global_step += 1
        return loss


def test_annealing_by_the_global_step() -> None:
    train(KlAnnealed, max_captures=4)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [Metered, WithBar, WithStatistics, KlAnnealed])
def test_for_longer(trainer: Callable[[], Any]) -> None:
    train(trainer, max_captures=5, num_steps=20)
