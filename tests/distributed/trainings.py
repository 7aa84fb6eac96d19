"""What the distributed tests train, by name: only names and numbers travel to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import TrainStep, default_step
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from wholestep import zoo
from wholestep.zoo import Batch, ZooCase, gpt, mlp
from wholestep.zoo.optimizers import OPTIMIZERS, two_groups


@dataclass(frozen=True)
class Training:
    """One way to train one model.

    `case` is a name of the zoo or of `OWN_CASES`, `optimizer` one of `make_optimizer`, `step` one of `STEPS`.
    `batch_sizes` has a row per rank, taken in turn by ranks, and in a row a size per step, taken in turn by steps.
    Parameters whose names begin with one of `frozen` are not trained. `find_unused` is DDP's.
    """

    case: str = "mlp"
    optimizer: str = "adamw"
    step: str = "plain"
    batch_sizes: tuple[tuple[int, ...], ...] = ((4,),)
    frozen: tuple[str, ...] = ()
    schedule: bool = False
    seed_by_rank: bool = False
    find_unused: bool = False

    def build(self, rank: int) -> tuple[nn.Module, Optimizer]:
        """The model, from the training's seed, and its optimizer."""
        torch.manual_seed(rank if self.seed_by_rank else 0)
        model = get_case(self.case).build()
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen):
                parameter.requires_grad_(False)
        return model, make_optimizer(self.optimizer, model)

    def train_step(self) -> TrainStep:
        return STEPS[self.step](get_case(self.case))

    def arguments(self, rank: int, number: int) -> tuple[Any, ...]:
        """What the step is called with, besides model and optimizer, on this rank in step `number`, from 1."""
        case = get_case(self.case)
        sizes = self.batch_sizes[rank % len(self.batch_sizes)]
        size = sizes[(number - 1) % len(sizes)]
        seed = 1000 * number + 10 * rank
        if self.step.startswith("accumulate"):
            return ([case.make_batch(size, seed + index) for index in range(3)],)
        if self.step == "branch":
            return case.make_batch(size, seed), rank == 0
        if self.step == "branch_in_turn":
            return case.make_batch(size, seed), rank == number % 2
        return (case.make_batch(size, seed),)


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a call uses one; a third head nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 12)
        self.left = nn.Linear(12, 10)
        self.right = nn.Linear(12, 10)
        self.never = nn.Linear(12, 10)

    def forward(self, features: Tensor, go_left: bool) -> Tensor:
        hidden = torch.tanh(self.trunk(features))
        return self.left(hidden) if go_left else self.right(hidden)


class Offset(nn.Module):
    """A linear layer with a buffer, which is drawn at random like the weights; used but not changed."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)
        self.register_buffer("offset", torch.randn(10))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) + self.offset


class Encoder(nn.Module):
    """PyTorch's own transformer layer, first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        self.classifier = nn.Linear(8, 10)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.layer(features.view(-1, 2, 8))[:, 0])


class TiedWords(nn.Module):
    """The smallest language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.mix(self.embedding(tokens)))))


def _normed() -> nn.Module:
    # No bias before batch norm: its true gradient is zero, and Adam would blow up the rounding noise left in it.
    parts = [nn.Linear(16, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(24, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def _words() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 20))


_FEATURES = partial(mlp.make_batch, mlp.MLPConfig())
_TOKENS = partial(gpt.make_batch, gpt.GPTConfig(vocab_size=20, context=6, width=8))

OWN_CASES: dict[str, ZooCase] = {
    "two_heads": ZooCase("two_heads", TwoHeads, _FEATURES, mlp.loss),
    "offset": ZooCase("offset", Offset, _FEATURES, mlp.loss),
    "normed": ZooCase("normed", _normed, _FEATURES, mlp.loss),
    "encoder": ZooCase("encoder", Encoder, _FEATURES, mlp.loss),
    "tied_words": ZooCase("tied_words", TiedWords, _TOKENS, gpt.loss),
    # No dropout: these are for steps that fail half-way, after which the random streams may differ from eager's.
    "words": ZooCase("words", _words, _TOKENS, gpt.loss),
    "dry_mlp": mlp.make_case("dry_mlp", mlp.MLPConfig(dropout=0.0)),
    "one_block_gpt": gpt.make_case("one_block_gpt", gpt.GPTConfig(layers=1, context=8)),
}


def get_case(name: str) -> ZooCase:
    return OWN_CASES[name] if name in OWN_CASES else zoo.get(name)


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """One of the zoo's by its name, with `_two_groups` behind it for matrices and vectors in a group each."""
    if name == "adamw_tensor_lr":
        return optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), weight_decay=1e-2, foreach=False)
    if name.endswith("_two_groups"):
        return OPTIMIZERS[name.removesuffix("_two_groups")](two_groups(model))
    return OPTIMIZERS[name](model.parameters())


def _clipped(case: ZooCase, clip: Callable[[nn.Module], Any]) -> TrainStep:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Any:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        clipped = clip(model)
        optimizer.step()
        return {"loss": loss, "clipped": clipped}

    return train_step


def _by_norm(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _accumulated(case: ZooCase, clip: Callable[[nn.Module], Any] | None = None) -> Callable[..., Tensor]:
    """Several micro-batches, one reduction: DDP must be told so, a plain model has no `no_sync`."""

    def train_step(model: nn.Module, optimizer: Optimizer, batches: list[Batch]) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else getattr(model, "no_sync", nullcontext)():
                loss = case.loss(model, batch) / len(batches)
                loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            clip(model)
        optimizer.step()
        return torch.stack(losses).sum()

    return train_step


def _autocast(case: ZooCase) -> TrainStep:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _branch(case: ZooCase) -> Callable[..., Tensor]:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch, use_branch: bool) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["features"], use_branch), batch["labels"])
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _zero_filled(case: ZooCase) -> TrainStep:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _zero_last(case: ZooCase) -> TrainStep:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def _never_zero(case: ZooCase) -> TrainStep:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _failing(case: ZooCase) -> Callable[..., Tensor]:
    """A step that raises half-way if asked to."""

    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch, fail: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        if fail:
            raise ValueError("the user's own error")
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _after_update(case: ZooCase) -> TrainStep:
    """The step itself reads what it has just updated."""

    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Any:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return {"before": loss, "after": case.loss(model, batch)}

    return train_step


STEPS: dict[str, Callable[[ZooCase], Callable[..., Any]]] = {
    "plain": default_step,
    "clip_norm": partial(_clipped, clip=_by_norm),
    "clip_value": partial(_clipped, clip=_by_value),
    "accumulate": _accumulated,
    "accumulate_clip": partial(_accumulated, clip=_by_norm),
    "autocast": _autocast,
    "branch": _branch,
    "branch_in_turn": _branch,
    "zero_filled": _zero_filled,
    "zero_last": _zero_last,
    "never_zero": _never_zero,
    "after_update": _after_update,
    "failing": _failing,
}
