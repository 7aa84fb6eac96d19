"""Random small models and train steps, drawn by hypothesis as plain data that prints and shrinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tests.twins import World
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH, VOCABULARY = 3, 4, 7
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """One model and one way to train it.

    `layers` are names of `LAYERS`, `frozen` are positions of parameters that get no gradient, `sizes` are the batch
    sizes of the steps.
    """

    layers: tuple[str, ...]
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    two_groups: bool
    frozen: tuple[int, ...]
    from_tokens: bool
    micro_batches: int
    clip: str
    clear: str
    outputs: tuple[str, ...]
    average: bool
    autocast: bool
    sizes: tuple[int, ...]
    dynamic_batch: bool | str
    seed: int


class Layer(nn.Module):
    """A layer from (batch, LENGTH, WIDTH) to the same."""

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Simple(Layer):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


class OverChannels(Simple):
    """Layers that want (batch, channels, length)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden.transpose(1, 2)).transpose(1, 2)


class OverRows(Simple):
    """Layers that want (rows, channels)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden.flatten(0, 1)).view(hidden.shape)


class Residual(Simple):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class InPlaceActivation(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * 1.5).relu_()


class Scale(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Bias(Layer):
    """Two parameters with equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.first + self.second


class AssignSlice(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[:, 0] = 0.5
        hidden[..., ::2] *= 2
        hidden[:, 1:].add_(1)
        return hidden


class SplitAndJoin(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        left, right = hidden.chunk(2, dim=-1)
        return torch.cat([right.tanh(), left * right], dim=-1)


class Attention(Layer):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.project(hidden).view(*hidden.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(hidden.shape)


class Counter(Layer):
    """Buffers counted in place, rebound and averaged."""

    count: Tensor
    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        self.calls = self.calls + 1
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        return hidden - self.mean / self.calls + self.count * 0.01


class Tied(Layer):
    """Shares the weight of a linear layer of its own, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.second(F.silu(self.first(hidden))), self.first.weight.t())


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        return gradients[0] * (hidden.abs() < 2)


class Rounded(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        result = StraightThrough.apply(hidden)
        assert isinstance(result, Tensor)
        return result


class Checkpointed(Simple):
    def forward(self, hidden: Tensor) -> Tensor:
        result = checkpoint(self.inner, hidden, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result


class Noise(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden) * 0.1 + torch.rand(WIDTH) * 0.1


LAYERS: dict[str, Callable[[], Layer]] = {
    "linear": lambda: Simple(nn.Linear(WIDTH, WIDTH)),
    "conv": lambda: OverChannels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "layer_norm": lambda: Simple(nn.LayerNorm(WIDTH)),
    "batch_norm": lambda: OverChannels(nn.BatchNorm1d(WIDTH)),
    "batch_norm_over_rows": lambda: OverRows(nn.BatchNorm1d(WIDTH)),
    "dropout": lambda: Simple(nn.Dropout(0.2)),
    "relu_": InPlaceActivation,
    "gelu": lambda: Simple(nn.GELU()),
    "softmax": lambda: Simple(nn.Softmax(dim=-1)),
    "scale": Scale,
    "bias": Bias,
    "residual": lambda: Residual(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))),
    "tied": Tied,
    "assign": AssignSlice,
    "split": SplitAndJoin,
    "attention": lambda: Attention(0.1),
    "counter": Counter,
    "rounded": Rounded,
    "checkpointed": lambda: Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Sigmoid())),
    "noise": Noise,
}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "nadam": NAdam,
}
FAMILIES: dict[str, tuple[str, ...]] = {
    "sgd": ("sgd",),
    "adam": ("adam", "adamw"),
    "others": ("rmsprop", "adagrad", "nadam"),
}


class RandomModel(nn.Module):
    """Tokens or features, the layers of a plan, and a linear head; `head` reuses the embedding where there is one."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if plan.from_tokens else None
        self.layers = nn.ModuleList([LAYERS[name]() for name in plan.layers])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def build_world(plan: Plan) -> World:
    """Model and optimizer of a plan, and an average of the weights where it asks for one."""
    model = RandomModel(plan)
    parameters = list(model.parameters())
    for index in plan.frozen:
        parameters[index % len(parameters)].requires_grad_(False)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        trained = [parameters[0].requires_grad_(True)]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if plan.two_groups and len(trained) > 1:
        groups = [{"params": trained[::2], "lr": 0.02}, {"params": trained[1::2], "weight_decay": 0.05}]
    world = World(model=model, optimizer=OPTIMIZERS[plan.optimizer](groups, lr=0.05, **dict(plan.options)))
    world.average = None
    if plan.average:
        world.average = nn.ParameterList([parameter.detach().clone() for parameter in parameters]).requires_grad_(False)
    return world


def make_step(plan: Plan) -> Callable[..., Any]:
    """The train step of a plan: `step(model, optimizer, average, inputs, targets)`."""

    def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), logits

    def step(model: RandomModel, optimizer: Optimizer, average: Any, inputs: Tensor, targets: Tensor) -> Any:
        clear(model, optimizer, "start")
        seen: dict[str, Any] = {}
        losses: list[Tensor] = []
        for part, wanted in zip(inputs.chunk(plan.micro_batches), targets.chunk(plan.micro_batches)):
            loss, logits = loss_of(model, part, wanted)
            (loss / plan.micro_batches).backward()
            losses.append(loss.detach())
            seen["logits"] = logits
        if plan.clip == "norm":
            seen["norm"] = clip_grad_norm_(model.parameters(), 0.1)
        elif plan.clip == "value":
            clip_grad_value_(model.parameters(), 0.05)
        seen["weight"] = model.head.weight.detach().clone()
        optimizer.step()
        if average is not None:
            with torch.no_grad():
                for kept, parameter in zip(average, model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.1)
        seen["new_weight"] = model.head.weight.clone()
        seen["gradient"] = None if model.head.bias.grad is None else model.head.bias.grad.clone()
        clear(model, optimizer, "end")
        return {"loss": torch.stack(losses).mean(), **{name: seen.get(name) for name in plan.outputs}}

    def clear(model: nn.Module, optimizer: Optimizer, place: str) -> None:
        if plan.clear == f"zeros at {place}":
            optimizer.zero_grad(set_to_none=False)
        elif plan.clear == f"model at {place}":
            model.zero_grad()
        elif plan.clear == place:
            optimizer.zero_grad()

    return step


def call(world: World, step: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Any:
    return step(world.model, world.optimizer, world.average, inputs, targets)


def make_batch(plan: Plan, number: int) -> tuple[Tensor, Tensor]:
    """Data of one step."""
    generator = torch.Generator().manual_seed(plan.seed * 10 + number)
    shape = (plan.sizes[number], LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    inputs = tokens if plan.from_tokens else torch.randn(*shape, WIDTH, generator=generator)
    return inputs, torch.randint(VOCABULARY, shape, generator=generator)


def _options(optimizer: str) -> st.SearchStrategy[dict[str, Any]]:
    implementation = {"foreach": st.sampled_from([False, True])}
    decay = {"weight_decay": st.sampled_from([0.0, 0.01])}
    fused = {"fused": st.sampled_from([False, True])}
    if optimizer == "sgd":
        plain = st.fixed_dictionaries({**decay, **fused, "momentum": st.sampled_from([0.0, 0.9])})
        dampened = st.fixed_dictionaries({**implementation, "momentum": st.just(0.9), "dampening": st.just(0.3)})
        nesterov = st.fixed_dictionaries({**implementation, "momentum": st.just(0.9), "nesterov": st.just(True)})
        return st.one_of(plain, dampened, nesterov)
    if optimizer in ("adam", "adamw"):
        flags = {"amsgrad": st.booleans(), "maximize": st.booleans()}
        return st.one_of(
            st.fixed_dictionaries({**decay, **flags, **implementation}),
            st.fixed_dictionaries({**decay, **flags, "fused": st.just(True)}),
        )
    if optimizer == "rmsprop":
        return st.fixed_dictionaries({**decay, **implementation, "centered": st.booleans()})
    return st.fixed_dictionaries({**decay, **implementation})


@st.composite
def plans(draw: st.DrawFn, optimizers: Sequence[str] = tuple(OPTIMIZERS), max_layers: int = 3) -> Plan:
    """Random plans; the simplest is one SGD step of a linear head."""
    optimizer = draw(st.sampled_from(optimizers))
    micro_batches = draw(st.sampled_from([1, 1, 2, 3]))
    size = draw(st.integers(2, 4)) * micro_batches
    same_size = draw(st.sampled_from([True, True, False]))
    others = st.integers(2, 5).map(lambda number: number * micro_batches)
    sizes = (size, *(size if same_size else draw(others) for _ in range(STEPS - 1)))
    return Plan(
        layers=tuple(draw(st.lists(st.sampled_from(list(LAYERS)), max_size=max_layers))),
        optimizer=optimizer,
        options=tuple(draw(_options(optimizer)).items()),
        two_groups=draw(st.booleans()),
        frozen=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        from_tokens=draw(st.booleans()),
        micro_batches=micro_batches,
        clip=draw(st.sampled_from(["none", "norm", "value"])),
        clear=draw(st.sampled_from(["start", "end", "zeros at start", "zeros at end", "model at start", "never"])),
        outputs=tuple(sorted(draw(st.sets(st.sampled_from(["gradient", "logits", "new_weight", "norm", "weight"]))))),
        average=draw(st.booleans()),
        autocast=draw(st.sampled_from([False, False, False, True])),
        sizes=sizes,
        dynamic_batch=draw(st.sampled_from(["auto", "auto", True, False])),
        seed=draw(st.integers(0, 99)),
    )
