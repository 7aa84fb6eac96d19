"""Lightning's Trainer with and without `WholeStep`: the same losses, metrics, parameters and counters, bit for bit."""

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep

pytestmark = pytest.mark.integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    from wholestep.integrations.lightning import WholeStep


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers, loggers and deprecated parts of its own
        yield
    for one, level in zip(loggers, levels, strict=True):
        one.setLevel(level)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets = batch
        loss = F.mse_loss(self.net(features), targets)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, targets = batch
        self.log("val", F.mse_loss(self.net(features), targets))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Logging(Net):
    @property
    def first(self) -> Any:
        return self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, targets = batch
        output = self.net(features)
        loss = F.mse_loss(output, targets)
        self.log_dict({"mean": output.mean(), "batch": float(len(features))}, on_epoch=True)
        self.log("weight", self.first.weight[0, 0], reduce_fx="max")
        return {"loss": loss, "output": output.detach()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class Warmup(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 5)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Indexing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (0.9**batch_idx)


class StepSchedule(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class EpochSchedule(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Gan(LightningModule):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        both: Any = self.optimizers()
        generators, critics = both
        noise = torch.randn(len(real), 3)
        self.toggle_optimizer(generators)
        loss = F.softplus(-self.critic(self.generator(noise))).mean()
        generators.zero_grad()
        self.manual_backward(loss)
        generators.step()
        self.untoggle_optimizer(generators)
        self.toggle_optimizer(critics)
        fake = self.generator(noise).detach()
        other = (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake))).mean()
        critics.zero_grad()
        self.manual_backward(other)
        self.clip_gradients(critics, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critics.step()
        self.untoggle_optimizer(critics)
        self.log_dict({"generator": loss, "critic": other}, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.critic(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.02),
        )


class Watching(Callback):
    """What everybody can see after each batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = {name: value.item() for name, value in trainer.callback_metrics.items()}
        bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        outputs = {name: value.tolist() for name, value in outputs.items()} if outputs else outputs
        self.seen.append(
            (outputs, shown, bar, trainer.global_step, [g["lr"] for g in trainer.optimizers[0].param_groups])
        )


def data(size: int = 20) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(size, 4, generator=generator)
    return DataLoader(TensorDataset(features, torch.randn(size, 2, generator=generator)), batch_size=4)


def fitted(
    make: Callable[[], LightningModule],
    callbacks: list[Any],
    *,
    size: int = 20,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[LightningModule, Any, list[Any]]:
    seed_everything(0, verbose=False)
    module, watching = make(), Watching()
    given = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options}
    trainer = Trainer(**given, enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, watching])
    trainer.fit(module, data(size), data(8), ckpt_path=ckpt_path)
    return module, trainer, watching.seen


def state_of(module: LightningModule, trainer: Any) -> list[Tensor]:
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    kept = [value for state in states for entries in state.values() for value in entries.values()]
    return [*module.state_dict().values(), *kept, torch.get_rng_state()]


def assert_same(
    make: Callable[[], LightningModule], num_captures: int, *, more: Callable[[], list[Any]] = list, **options: Any
) -> WholeStep:
    whole = WholeStep()
    eager = fitted(make, more(), **options)
    ours = fitted(make, [*more(), whole], **options)
    assert ours[2] == eager[2]
    assert ours[1].global_step == eager[1].global_step
    for left, right in zip(state_of(*eager[:2]), state_of(*ours[:2]), strict=True):
        assert torch.equal(left, right)
    assert whole.step.num_captures == num_captures, whole.step.recompile_reasons
    return whole


@pytest.mark.parametrize(
    ("make", "num_captures", "options"),
    [
        pytest.param(Net, 1, {}, id="plain"),
        pytest.param(Net, 2, {"size": 22}, id="last batch is smaller"),
        pytest.param(Net, 1, {"gradient_clip_val": 0.1}, id="clipped by norm"),
        pytest.param(Net, 1, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, id="clipped by value"),
        pytest.param(Net, 1, {"val_check_interval": 2}, id="validated in between"),
        pytest.param(Net, 1, {"precision": "bf16-mixed"}, id="bf16"),
        pytest.param(Logging, 1, {}, id="logs"),
        pytest.param(Warmup, 1, {}, id="its own optimizer_step"),
        pytest.param(Indexing, 2, {}, id="uses the batch's number"),
        pytest.param(StepSchedule, 2, {}, id="one cycle"),
        pytest.param(EpochSchedule, 1, {}, id="schedule by epoch"),
        pytest.param(Plateau, 1, {}, id="plateau"),
        pytest.param(Gan, 1, {}, id="by hand"),
    ],
)
def test_a_fit_is_the_same(make: Callable[[], LightningModule], num_captures: int, options: dict[str, Any]) -> None:
    assert_same(make, num_captures, **options)


def test_accumulation() -> None:
    """A graph that only accumulates, and one that updates."""
    assert_same(Net, 2, accumulate_grad_batches=2, size=24)


def test_moving_averages() -> None:
    assert_same(Net, 1, more=lambda: [EMAWeightAveraging(decay=0.9)])


def test_stochastic_weight_averaging() -> None:
    assert_same(Net, 1, more=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=3)


def test_a_checkpoint_goes_on_in_either(tmp_path: Path) -> None:
    """Saved by a compiled fit, resumed by a plain and a compiled one."""
    _, trainer, _ = fitted(Net, [WholeStep()], max_epochs=1)
    path = tmp_path / "one.ckpt"
    trainer.save_checkpoint(path)
    eager = fitted(Net, [], ckpt_path=path, max_epochs=3)
    ours = fitted(Net, [WholeStep()], ckpt_path=path, max_epochs=3)
    assert ours[2] == eager[2]
    assert len(ours[2]) == 10
    for left, right in zip(state_of(*eager[:2]), state_of(*ours[:2]), strict=True):
        assert torch.equal(left, right)


def test_after_the_fit_the_trainer_is_its_own() -> None:
    _, trainer, _ = fitted(Net, [WholeStep()], max_epochs=1)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    assert "_make_closure" not in vars(loop)
    assert "optimizer_step" not in vars(trainer.strategy)
    assert "log" not in vars(trainer.lightning_module)


def test_several_devices_are_refused() -> None:
    with pytest.raises(wholestep.WholestepError, match=r"DDPStrategy trains on several devices.*devices=1"):
        fitted(Net, [WholeStep()], strategy="ddp", devices=1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_refusal_names_the_line_of_the_module() -> None:
    class Branching(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss > 3 else loss  # refused

    with pytest.raises(wholestep.CaptureError, match=r"test_lightning.py:\d+: an `if`"):
        fitted(Branching, [WholeStep()])
