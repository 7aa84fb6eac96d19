"""Train steps as people write them: what they call, in which order, and on what."""

import contextlib
import copy
import dataclasses
import functools
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.twins import SmallNet, Twins, World, adam, momentum, mse_step, pair, small_world
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Optimizer

import wholestep

X, Y = pair()
Step = Callable[..., Any]


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def assert_same(
    build: Callable[[], World] | None,
    function: Step | None,
    *args: Any,
    steps: int = 3,
    captures: int = 1,
    **options: Any,
) -> Twins:
    """Some steps on the same arguments; compared after each, with the number of captures there may be."""
    twins = Twins(build or small_world(), function, **options)
    twins.steps(steps, *(args or (X, Y)))
    assert twins.num_captures == captures, twins.reasons
    return twins


# Gradients: accumulating, clearing, clipping


@pytest.mark.parametrize("fused", [False, True])
def test_accumulation_clipping_and_two_groups_in_one_step(fused: bool) -> None:
    def build() -> World:
        model = SmallNet()
        groups: list[dict[str, Any]] = [
            {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
            {"params": [model.first.bias, model.second.bias], "weight_decay": 0.0, "lr": 0.05},
        ]
        return World(model=model, optimizer=AdamW(groups, lr=0.01, fused=fused))

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, wanted in zip(features.chunk(4), targets.chunk(4), strict=True):
            loss = F.mse_loss(model(part), wanted) / 4
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return total, norm

    assert_same(build, step, *pair(8), steps=5)


def test_accumulation_across_calls() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, update: bool) -> Tensor:
        loss = F.mse_loss(model(features), targets) / 2
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    twins = Twins(small_world(), step)
    for number in range(8):
        twins.step(*pair(seed=number), number % 2 == 1)
    # Without gradients and without state, with gradients, without gradients but with state.
    assert twins.num_captures <= 3


def test_accumulation_across_calls_of_a_step_that_never_updates() -> None:
    def accumulate(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        return loss

    twins = Twins(small_world(), accumulate, call=lambda world, step, *args: step(world.model, *args))
    for number in range(4):
        twins.step(*pair(seed=number))
    assert twins.num_captures == 2
    twins.change(lambda world: world.optimizer.step())
    twins.change(lambda world: world.optimizer.zero_grad())
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def clear_at_the_start(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def clear_by_the_model(model: nn.Module, optimizer: Optimizer) -> None:
    model.zero_grad()


def clear_to_zeros(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def clear_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def do_nothing(model: nn.Module, optimizer: Optimizer) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "after", "captures"),
    [
        (clear_at_the_start, do_nothing, 1),
        (clear_by_the_model, do_nothing, 1),
        (clear_to_zeros, do_nothing, 2),
        (clear_by_hand, do_nothing, 1),
        (zero_by_hand, do_nothing, 2),
        (do_nothing, clear_at_the_start, 1),
        (do_nothing, clear_to_zeros, 2),
        (do_nothing, clear_by_hand, 1),
        (do_nothing, do_nothing, 2),
        (clear_at_the_start, clear_at_the_start, 1),
    ],
)
@pytest.mark.parametrize("make_optimizer", [adam, functools.partial(AdamW, lr=0.01, fused=True)])
def test_where_and_how_gradients_are_cleared(
    make_optimizer: Any, before: Callable[..., None], after: Callable[..., None], captures: int
) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        before(model, optimizer)
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        after(model, optimizer)
        return loss

    assert_same(small_world(make_optimizer=make_optimizer), step, steps=4, captures=captures)


def test_clipping_by_value_and_by_closed_over_parameters() -> None:
    def make(world: World) -> Step:
        parameters = list(world.model.parameters())

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), targets)
            loss.backward()
            norm = clip_grad_norm_(parameters, 0.1)
            clip_grad_value_(parameters, 0.02)
            optimizer.step()
            return loss, norm

        return step

    assert_same(None, None, make=make)


def test_gradients_written_by_hand() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.sign() * 0.1
        optimizer.step()
        return loss

    assert_same(None, step)


def test_two_backwards_and_two_optimizer_steps() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        output = model(features)
        first, second = F.mse_loss(output, targets), output.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first, mse_step(model, optimizer, features, targets)

    assert_same(None, step)


def test_a_backward_for_some_parameters_only() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward(inputs=[model.first.weight, model.first.bias])
        optimizer.step()
        return loss

    assert_same(None, step)


def test_gradient_penalty() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        inputs = features.detach().clone().requires_grad_()
        output = model(inputs)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        loss = F.mse_loss(output, targets) + 10 * penalty
        loss.backward()
        optimizer.step()
        return loss, penalty

    assert_same(None, step)


def test_an_argument_that_requires_grad() -> None:
    features = X.clone().requires_grad_()
    assert_same(None, mse_step, features, Y)


def test_a_step_without_optimizer() -> None:
    def step(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        return loss

    assert_same(None, step, call=lambda world, step, *args: step(world.model, *args))


def test_a_step_that_only_runs_forward() -> None:
    def step(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return F.mse_loss(model(features), targets)

    assert_same(small_world(WithBuffers), step, call=lambda world, step, *args: step(world.model, *args))


# Hooks


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def test_a_hook_on_an_activation() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = torch.tanh(model.first(features))
        hidden.register_hook(halve)
        loss = F.mse_loss(model.second(hidden), targets)
        loss.backward()
        optimizer.step()
        return loss

    assert_same(None, step)


def test_a_hook_on_a_parameter() -> None:
    def build() -> World:
        world = small_world()()
        world.model.first.weight.register_hook(halve)
        return world

    assert_same(build, mse_step)


def scale_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_a_post_accumulate_grad_hook() -> None:
    def build() -> World:
        world = small_world()()
        world.model.first.weight.register_post_accumulate_grad_hook(scale_accumulated)
        return world

    assert_same(build, mse_step)


def test_the_optimizer_step_in_a_post_accumulate_grad_hook() -> None:
    def build() -> World:
        model = SmallNet()
        optimizers: dict[Tensor, SGD] = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return World(model=model)

    def step(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        return loss

    twins = Twins(build, step, call=lambda world, step, *args: step(world.model, *args))
    with contextlib.suppress(wholestep.CaptureError):  # refusing the step is as good as running it
        twins.steps(3, X, Y)


def test_saved_tensors_kept_on_the_cpu() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mse_step(model, optimizer, features, targets)

    assert_same(None, step)


def test_saved_tensors_kept_in_half_precision() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.bfloat16(), lambda saved: saved.float()):
            return mse_step(model, optimizer, features, targets)

    twins = Twins(small_world(), step)
    with contextlib.suppress(wholestep.CaptureError):  # refusing the step is as good as running it
        twins.steps(3, X, Y)


def test_module_hooks() -> None:
    def build() -> World:
        world = small_world()()
        world.model.first.register_forward_hook(lambda module, inputs, output: output * 2)
        world.model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        world.model.second.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if grad is None else grad * 0.5 for grad in inputs)
        )
        return world

    assert_same(build, mse_step)


# Models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(features))))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.same_block = self.block
        self.last = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.same_block(torch.tanh(self.block(features))))


class PartlyUsed(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class WithBuffers(SmallNet):
    """Buffers of every habit: counted in place, rebound, written through `out=` and through slices."""

    count: Tensor
    calls: Tensor
    mean: Tensor
    doubled: Tensor
    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("doubled", torch.zeros(6, 4))
        self.register_buffer("history", torch.zeros(4), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        self.count += 1
        self.calls = self.calls + 1
        torch.mul(features, 2, out=self.doubled)
        output = self.norm(super().forward(self.doubled))
        self.mean = self.mean * 0.9 + output.detach().mean(0)
        self.history = self.history.roll(1)
        self.history[0] = output.detach().mean()
        return output * self.count + self.mean + self.history.sum()


class TrainableBuffer(SmallNet):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3, requires_grad=True))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * self.scale


class InPlace(SmallNet):
    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        hidden[:, 0] = 0
        hidden[1:3].mul_(2)
        hidden = F.relu_(hidden)
        output = self.second(hidden)
        output += 1
        output[:, ::2] = output[:, ::2] * 2
        return output.clamp_(-1, 1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent = kind(4, 4, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.last = nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.recurrent(features[None])[0][0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(features.shape[0])
        return self.last(self.layer(features[None], src_mask=mask, is_causal=True)[0])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, features: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(features.to(torch.complex64) @ self.weight)).sum(-1)


def normalised() -> nn.Module:
    parametrize = nn.utils.parametrizations
    return nn.Sequential(parametrize.spectral_norm(nn.Linear(4, 5)), parametrize.weight_norm(nn.Linear(5, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "shared": Shared,
    "partly_used": PartlyUsed,
    "buffers": WithBuffers,
    "in_place": InPlace,
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "lstm": lambda: Recurrent(nn.LSTM),
    "attention": Attention,
    "complex": Complex,
    "normalised": normalised,
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "in_place_activations": lambda: nn.Sequential(
        nn.Linear(4, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 5),
        nn.Dropout(0.3, inplace=True),
        nn.Linear(5, 3),
        nn.SiLU(True),
    ),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    assert_same(small_world(MODELS[name]), mse_step)


def test_a_buffer_that_requires_grad() -> None:
    with pytest.raises(wholestep.CaptureError, match="buffer 'scale' requires a gradient"):
        Twins(small_world(TrainableBuffer), mse_step).step(X, Y)


@pytest.mark.parametrize("name", ["tied", "shared", "partly_used", "buffers", "in_place"])
def test_models_with_a_fused_optimizer(name: str) -> None:
    assert_same(small_world(MODELS[name], functools.partial(AdamW, lr=0.01, fused=True)), mse_step)


class OverChannels(nn.Module):
    """A layer over (batch, channels, length), where the data are (batch, length, channels)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.view(2, 3, 4)).transpose(1, 2)
        return self.last(self.inner(hidden).transpose(1, 2)).flatten(0, 1)


@pytest.mark.parametrize(
    "inner",
    [
        nn.Conv1d(4, 4, 3, padding=1),
        nn.ConvTranspose1d(4, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.MaxPool1d(3, 1, 1),
        nn.AvgPool1d(3, 1, 1),
        nn.PReLU(4),
        nn.Softmax(1),
        nn.Dropout(0.3),
        nn.Dropout1d(0.3),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4).eval(),
        nn.LogSoftmax(1),
        nn.RReLU(),
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_layers_over_transposed_memory(inner: nn.Module) -> None:
    assert_same(small_world(lambda: OverChannels(copy.deepcopy(inner))), mse_step)


@pytest.mark.parametrize(
    "inner",
    [
        nn.Conv1d(4, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Softmax(1),
        nn.LogSoftmax(1),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4).eval(),
        pytest.param(
            nn.RReLU(),
            marks=pytest.mark.xfail(
                strict=True,
                reason="its result has other strides than eager's: dropout hands its numbers out differently",
            ),
        ),
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_dropout_after_a_layer_over_transposed_memory(inner: nn.Module) -> None:
    class WithDropout(OverChannels):
        def forward(self, features: Tensor) -> Tensor:
            hidden = self.inner(features.view(-1, 3, 4).transpose(1, 2)).transpose(1, 2)
            return self.last(F.dropout(self.first(features).view(hidden.shape) * F.dropout(hidden, 0.5), 0.1)).flatten(
                0, 1
            )

    assert_same(small_world(lambda: WithDropout(copy.deepcopy(inner))), mse_step, *pair(24))


@pytest.mark.parametrize(
    "inner",
    [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.MaxPool2d(3, 1, 1), nn.Dropout(0.5)],
    ids=lambda inner: type(inner).__name__,
)
def test_layers_in_channels_last(inner: nn.Module) -> None:
    def make_model() -> nn.Module:
        layers = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), copy.deepcopy(inner), nn.Flatten(), nn.Linear(16, 3))
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    assert_same(small_world(make_model), mse_step)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}, {"padding_idx": 0, "scale_grad_by_freq": True}])
def test_integer_inputs(options: dict[str, Any]) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, **options), nn.Flatten(0, 1), nn.Linear(4, 3))

    assert_same(small_world(make_model), mse_step, torch.tensor([[1, 0, 3], [3, 9, 0]]), Y)


def test_frozen_parameters() -> None:
    def build() -> World:
        world = small_world()()
        world.model.first.weight.requires_grad_(False)
        return world

    twins = assert_same(build, mse_step)
    assert twins.worlds[1].model.first.weight.grad is None


def test_a_frozen_model_inside_the_step() -> None:
    def build() -> World:
        world = small_world()()
        world.teacher = SmallNet().requires_grad_(False).eval()
        return world

    def step(model: nn.Module, teacher: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(features)
        return mse_step(model, optimizer, features, targets + wanted)

    assert_same(build, step, call=lambda world, step, *args: step(world.model, world.teacher, world.optimizer, *args))


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_that_only_the_optimizer_has(used: bool) -> None:
    def build() -> World:
        model, extra = SmallNet(), nn.Parameter(torch.ones(3))
        return World(model=model, extra=extra, optimizer=adam([*model.parameters(), extra]))

    def make(world: World) -> Step:
        extra = world.extra

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            return mse_step(lambda inputs: model(inputs) + extra, optimizer, features, targets)

        return step if used else mse_step

    assert_same(build, None, make=make)


def test_a_model_that_changes_mode_inside_the_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            before = model(features)
        model.train()
        return mse_step(model, optimizer, features, targets + before)

    assert_same(small_world(Shared), step)


def test_a_layer_frozen_during_the_step() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        model.second.requires_grad_(False)
        loss = mse_step(model, optimizer, features, targets)
        model.second.requires_grad_(True)
        return loss

    assert_same(None, step)


class Counting(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(features) * self.calls


def test_a_python_counter_on_a_module() -> None:
    twins = Twins(small_world(Counting), mse_step)
    twins.steps(5, X, Y)
    assert twins.num_captures == 1
    assert twins.worlds[1].model.calls == 5


class Remembering(SmallNet):
    """Leaves numbers behind that settle: what eager leaves must be there after a compiled step."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.is_ready = False

    def forward(self, features: Tensor) -> Tensor:
        self.size = features.shape[0]
        self.is_ready = True
        return super().forward(features)


@pytest.mark.parametrize("dynamic_batch", [False, "auto", True])
def test_numbers_that_a_forward_leaves_on_its_module(dynamic_batch: Any) -> None:
    twins = Twins(small_world(Remembering), mse_step, dynamic_batch=dynamic_batch)
    for size in (6, 6, 7, 9, 6):
        twins.step(*pair(size))
        for world in twins.worlds:
            assert type(world.model.size) is int
            assert (world.model.size, world.model.is_ready) == (size, True)


# Data


def scaled_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, scale: Any = 2.0) -> Tensor:
    return mse_step(model, optimizer, features * scale, targets * scale)


def test_zero_dimensional_tensors() -> None:
    assert_same(None, scaled_step, X, Y, torch.tensor(3.0))


def test_empty_tensors() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, empty: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        return loss, empty * 2, empty.sum(), features[:0], torch.cat([features[:0], features])

    assert_same(None, step, X, Y, torch.zeros(0, 3))


def test_in_place_ops_on_the_batch() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        features.t().mul_(2)
        features.view(-1)[::3] = 0
        first, second = features.split([2, 2], dim=1)
        second.add_(first)
        targets[0] = 1
        return mse_step(model, optimizer, features, targets)

    assert_same(None, step)


def test_in_place_ops_on_activations_and_their_views() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        optimizer.zero_grad()
        hidden = model.first(features) * 1
        hidden[:, 0] = 0
        hidden.view(-1)[1::4] *= 2
        hidden[3:].copy_(hidden[:3].detach())
        hidden.sigmoid_()
        loss = F.mse_loss(model.second(hidden), targets)
        loss.backward()
        optimizer.step()
        return loss, hidden

    assert_same(None, step)


Pair = namedtuple("Pair", ["features", "targets"])


@dataclasses.dataclass
class Batch:
    features: Tensor
    targets: Tensor
    scale: float = 2.0


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, like the batches of tokenizers."""


class ReadOnly(Mapping[str, Any]):
    def __init__(self, **content: Any) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def named(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["features"], batch["targets"]


BATCHES: dict[str, tuple[Any, Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": ((X, Y), tuple),
    "list": ([X, [Y]], lambda batch: (batch[0], batch[1][0])),
    "named tuple": (Pair(X, Y), lambda batch: (batch.features, batch.targets)),
    "dict": ({"features": X, "targets": Y}, named),
    "ordered dict": (OrderedDict(targets=Y, features=X), named),
    "nested": ({"inner": {"data": (X, None, "text", Y)}}, lambda batch: batch["inner"]["data"][::3]),
    "dataclass": (Batch(X, Y), lambda batch: (batch.features * batch.scale, batch.targets)),
    "mapping": (Encoding(features=X, targets=Y), named),
    "read-only mapping": (ReadOnly(features=X, targets=Y), named),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_kinds_of_batches(kind: str) -> None:
    batch, take = BATCHES[kind]

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        features, targets = take(batch)
        return mse_step(model, optimizer, features, targets)

    assert_same(None, step, batch)


# Several models


def gan_world() -> World:
    generator, critic = SmallNet(), nn.Linear(3, 1)
    return World(
        generator=generator, critic=critic, first=adam(generator.parameters()), second=sgd(critic.parameters())
    )


def gan_step(
    generator: nn.Module, critic: nn.Module, first: Optimizer, second: Optimizer, noise: Tensor, real: Tensor
) -> dict[str, Tensor]:
    second.zero_grad()
    fake = generator(noise)
    critic_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
    critic_loss.backward()
    second.step()
    first.zero_grad()
    generator_loss = F.softplus(-critic(generator(noise))).mean()
    generator_loss.backward()
    first.step()
    return {"critic": critic_loss, "generator": generator_loss}


def test_two_models_and_two_optimizers() -> None:
    assert_same(
        gan_world,
        gan_step,
        steps=4,
        call=lambda world, step, *args: step(world.generator, world.critic, world.first, world.second, *args),
    )


def test_models_and_optimizers_in_containers() -> None:
    def step(models: dict[str, nn.Module], optimizers: list[Optimizer], noise: Tensor, real: Tensor) -> Any:
        return gan_step(models["generator"], models["critic"], optimizers[0], optimizers[1], noise, real)

    assert_same(
        gan_world,
        step,
        call=lambda world, step, *args: step(
            {"generator": world.generator, "critic": world.critic}, [world.first, world.second], *args
        ),
    )


@pytest.mark.parametrize("used", ["first", "second"])
def test_two_optimizers_of_the_same_parameters_one_of_which_steps(used: str) -> None:
    def build() -> World:
        model = SmallNet()
        return World(model=model, first=adam(model.parameters()), second=sgd(model.parameters()))

    def step(model: nn.Module, first: Optimizer, second: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, first if used == "first" else second, features, targets)

    assert_same(build, step, call=lambda world, step, *args: step(world.model, world.first, world.second, *args))


def averaged_world() -> World:
    model = SmallNet()
    average = copy.deepcopy(model).requires_grad_(False)
    return World(model=model, average=average, optimizer=adam(model.parameters()))


def move_average(model: nn.Module, average: nn.Module) -> None:
    for new, old in zip(model.parameters(), average.parameters(), strict=True):
        old.mul_(0.9).add_(new, alpha=0.1)


def lerp_average(model: nn.Module, average: nn.Module) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)  # pyright: ignore


def copy_weights(model: nn.Module, average: nn.Module) -> None:
    for new, old in zip(model.parameters(), average.parameters(), strict=True):
        old.copy_(new)


def look_ahead(model: nn.Module, average: nn.Module) -> None:
    for fast, slow in zip(model.parameters(), average.parameters(), strict=True):
        slow.add_(fast - slow, alpha=0.5)
        fast.copy_(slow)


def copy_between_two_changes(model: nn.Module, average: nn.Module) -> None:
    for new, old in zip(model.parameters(), average.parameters(), strict=True):
        new.add_(1)
        old.copy_(new)
        new.mul_(2)


def exchange(model: nn.Module, average: nn.Module) -> None:
    for new, old in zip(model.parameters(), average.parameters(), strict=True):
        kept = new.clone()
        new.copy_(old)
        old.copy_(kept)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "update",
    [
        move_average,
        lerp_average,
        copy_weights,
        look_ahead,
        copy_between_two_changes,
        exchange,
    ],
)
def test_weights_of_a_second_model(update: Callable[..., None], when: str) -> None:
    def step(model: nn.Module, average: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        if when == "before":
            with torch.no_grad():
                update(model, average)
        loss = mse_step(model, optimizer, features, targets)
        if when == "after":
            with torch.no_grad():
                update(model, average)
        return loss

    call: Step = lambda world, step, *args: step(world.model, world.average, world.optimizer, *args)  # noqa: E731
    assert_same(averaged_world, step, call=call)


def test_sharpness_aware_minimisation() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        F.mse_loss(model(features), targets).backward()
        parameters = list(model.parameters())
        with torch.no_grad():
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            offsets = [gradient * (0.05 / (norm + 1e-12)) for gradient in gradients]
            for parameter, offset in zip(parameters, offsets, strict=True):
                parameter.add_(offset)
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        with torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                parameter.sub_(offset)
        optimizer.step()
        return loss

    assert_same(None, step)


def test_weights_written_in_every_way() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        loss = mse_step(model, optimizer, features, targets)
        with torch.no_grad():
            model.first.weight.copy_(model.first.weight.roll(1, 0))
            model.first.bias[::2].add_(1)
            model.second.weight[0].copy_(model.second.weight[1])
            model.second.bias.zero_()
        model.second.weight.data.mul_(0.9)
        return loss

    assert_same(None, step)


def test_undoing_the_update() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        loss = mse_step(model, optimizer, features, targets)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        return loss

    assert_same(None, step)


# Functions, closures, methods


class Trainer:
    def __init__(self, world: World) -> None:
        self.model, self.optimizer, self.max_norm = world.model, world.optimizer, 0.1

    def step(self, features: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(features), targets)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return loss

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        return self.step(features, targets)


def with_data_only(world: World, step: Step, *args: Any) -> Any:
    return step(*args)


def test_a_closure() -> None:
    def make(world: World) -> Step:
        model, optimizer = world.model, world.optimizer
        return lambda features, targets: mse_step(model, optimizer, features, targets)

    assert_same(None, None, make=make, call=with_data_only)


def test_a_closure_that_calls_helpers() -> None:
    def make(world: World) -> Step:
        model, optimizer = world.model, world.optimizer

        def forward(features: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(model(features), targets)

        def update(loss: Tensor) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def step(features: Tensor, targets: Tensor) -> Tensor:
            loss = forward(features, targets)
            update(loss)
            return loss

        return step

    assert_same(None, None, make=make, call=with_data_only)


GLOBAL_MODEL: Any = None
GLOBAL_OPTIMIZER: Any = None


def step_on_globals(features: Tensor, targets: Tensor) -> Tensor:
    return mse_step(GLOBAL_MODEL, GLOBAL_OPTIMIZER, features, targets)


def test_a_global_model(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, compiled = small_world()(), World()
    compiled.model = copy.deepcopy(eager.model)
    compiled.optimizer = momentum(compiled.model.parameters())
    monkeypatch.setitem(globals(), "GLOBAL_MODEL", compiled.model)
    monkeypatch.setitem(globals(), "GLOBAL_OPTIMIZER", compiled.optimizer)
    step = wholestep.compile(step_on_globals)
    for _ in range(3):
        assert torch.equal(step(X, Y), mse_step(eager.model, eager.optimizer, X, Y))
        for parameter, expected in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
            assert torch.equal(parameter, expected)
    assert step.num_captures == 1


def test_a_bound_method() -> None:
    twins = assert_same(None, None, make=lambda world: Trainer(world).step, call=with_data_only)
    assert twins.compiled.__name__ == "step"


def test_an_attribute_of_the_bound_object_is_guarded() -> None:
    def make(world: World) -> Step:
        world.trainer = Trainer(world)
        return world.trainer.step

    twins = Twins(small_world(), make=make, call=with_data_only)
    twins.step(X, Y)
    twins.change(lambda world: setattr(world.trainer, "max_norm", 0.5))
    twins.steps(2, X, Y)
    assert twins.reasons == ("'self.max_norm' changed from 0.1 to 0.5",)


class CompiledTrainer(Trainer):
    @wholestep.compile
    def compiled_step(self, features: Tensor, targets: Tensor) -> Tensor:
        return self.step(features, targets)


def test_a_decorated_method() -> None:
    eager, compiled = (CompiledTrainer(small_world()()) for _ in range(2))
    compiled.model.load_state_dict(eager.model.state_dict())
    for _ in range(3):
        assert torch.equal(compiled.compiled_step(X, Y), eager.step(X, Y))


class Lightning(SmallNet):
    def training_step(self, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(self, optimizer, features, targets)


def test_a_method_of_the_model() -> None:
    assert_same(
        small_world(Lightning),
        None,
        make=lambda world: world.model.training_step,
        call=lambda world, step, *args: step(world.optimizer, *args),
    )


def test_a_partial() -> None:
    assert_same(
        None, None, make=lambda world: functools.partial(mse_step, world.model, world.optimizer), call=with_data_only
    )


def test_a_callable_object() -> None:
    assert_same(None, None, make=Trainer, call=with_data_only)


def test_a_wrapped_function() -> None:
    def logged(function: Step) -> Step:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    assert_same(None, logged(mse_step))


def test_keyword_arguments_and_defaults() -> None:
    def step(
        model: nn.Module, optimizer: Optimizer, *, features: Tensor, targets: Tensor, scale: float = 2.0
    ) -> Tensor:
        return mse_step(model, optimizer, features, targets * scale)

    def call(world: World, step: Step, features: Tensor, targets: Tensor) -> Any:
        return step(optimizer=world.optimizer, model=world.model, targets=targets, features=features)

    assert_same(None, step, call=call)


def test_variable_arguments() -> None:
    def step(model: nn.Module, optimizer: Optimizer, *tensors: Tensor, **options: float) -> Tensor:
        return mse_step(model, optimizer, tensors[0], tensors[1] * options["scale"])

    def call(world: World, step: Step, *tensors: Tensor) -> Any:
        return step(world.model, world.optimizer, *tensors, scale=2.0)

    assert_same(None, step, call=call)


def test_the_compiled_step_keeps_the_functions_name_and_documentation() -> None:
    compiled = wholestep.compile(mse_step)
    assert vars(compiled)["__name__"] == "mse_step"
    assert compiled.__doc__ == mse_step.__doc__
    with pytest.raises(wholestep.GuardError, match="mse_step has not been called yet"):
        _ = compiled.graph


def test_a_decorator_with_options() -> None:
    @wholestep.compile(dynamic_batch=False, verify=2, passes="")
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets)

    eager, compiled = small_world()(), small_world()()
    compiled.model.load_state_dict(eager.model.state_dict())
    for _ in range(3):
        expected = mse_step(eager.model, eager.optimizer, X, Y)
        assert torch.equal(step(compiled.model, compiled.optimizer, X, Y), expected)
    assert step.graph.is_functional


# Numerics


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_inside_the_step(backward_inside: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(features)
            loss = F.mse_loss(output.float(), targets)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        optimizer.step()
        return loss, output

    twins = assert_same(None, step)
    assert twins.step(X, Y)[1].dtype is torch.bfloat16


def autocast_call(world: World, step: Step, *args: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return step(world.model, world.optimizer, *args)


def test_autocast_around_the_call() -> None:
    assert_same(small_world(WithBuffers), mse_step, call=autocast_call)


def test_autocast_around_a_shared_module() -> None:
    assert_same(small_world(Shared), mse_step, call=autocast_call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    assert_same(small_world(lambda: SmallNet().to(dtype)), mse_step, X.to(dtype), Y.to(dtype))


class Doubled(torch.autograd.Function):
    """Old style: one `forward` with a context. The backward is deliberately not the forward's derivative."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(features)
        ctx.factor = factor
        return features.clamp(min=0) * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (features,) = ctx.saved_tensors
        return gradients[0] * ctx.factor * 3 + features * 0.01, None


class SineAndSign(torch.autograd.Function):
    """New style: `setup_context`, two outputs, one of them without a gradient."""

    @staticmethod
    def forward(features: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return torch.sin(features) * factor, features.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (features,) = ctx.saved_tensors
        return gradients[0] * ctx.factor * features, None


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.mark_dirty(features)
        return features.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


CUSTOM: dict[str, Callable[[Tensor], Tensor]] = {
    "old": lambda hidden: Doubled.apply(hidden, 2.0),
    "new": lambda hidden: torch.add(*SineAndSign.apply(hidden, 3.0)),  # pyright: ignore
    "dirty": lambda hidden: DoubledInPlace.apply(hidden * 1),
}


@pytest.mark.parametrize("style", CUSTOM)
def test_custom_autograd_functions(style: str) -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        def forward(inputs: Tensor) -> Tensor:
            return model.second(CUSTOM[style](model.first(inputs)))

        return mse_step(forward, optimizer, features, targets)

    assert_same(None, step)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inputs_need_grad", [False, True])
def test_checkpoints(use_reentrant: bool, inputs_need_grad: bool) -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        def block(hidden: Tensor) -> Tensor:
            return F.dropout(torch.tanh(model.first(hidden)), 0.3)

        def forward(inputs: Tensor) -> Tensor:
            inputs = inputs.clone().requires_grad_(inputs_need_grad)
            hidden = torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=use_reentrant)
            return model.second(hidden)

        return mse_step(forward, optimizer, features, targets)

    if use_reentrant and not inputs_need_grad:
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
            assert_same(None, step)
    else:
        assert_same(None, step)


def test_a_loss_that_becomes_nan() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets.log())

    twins = assert_same(None, step)
    assert twins.step(X, Y).isnan()
    assert twins.worlds[1].model.first.weight.isnan().all()


def test_constants_made_in_the_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        scale = torch.tensor([1.0, 2.0, 3.0])
        scale[0] = 5
        offset = torch.tensor(0.5)
        offset += 1
        loss = mse_step(model, optimizer, features, targets * scale + offset)
        return loss, scale, torch.arange(3), torch.full((2,), 3.0)

    assert_same(None, step)


def test_a_closed_over_tensor_that_the_step_writes() -> None:
    def make(world: World) -> Step:
        running = world.running = torch.zeros(1)

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            loss = mse_step(model, optimizer, features, targets)
            running.mul_(0.9).add_(loss.detach())
            return loss

        return step

    assert_same(None, None, make=make)


def test_a_list_that_the_step_appends_to() -> None:
    def make(world: World) -> Step:
        losses: list[Tensor] = []
        world.losses = losses

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            loss = mse_step(model, optimizer, features, targets)
            losses.append(loss.detach())
            return loss

        return step

    assert_same(None, None, make=make)


def test_a_python_counter_outside() -> None:
    class CountingTrainer(Trainer):
        def __init__(self, world: World) -> None:
            super().__init__(world)
            self.calls = 0

        def counted_step(self, features: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return self.step(features, targets * self.calls)

    twins = Twins(small_world(), make=lambda world: CountingTrainer(world).counted_step, call=with_data_only)
    twins.steps(5, X, Y)
    assert twins.num_captures == 1


def test_a_method_that_calls_super() -> None:
    class Derived(Trainer):
        def step(self, features: Tensor, targets: Tensor) -> Tensor:
            return super().step(features, targets)

    assert_same(None, None, make=lambda world: Derived(world).step, call=with_data_only)


def test_a_model_in_a_closed_over_list() -> None:
    def make(world: World) -> Step:
        models = [world.model]

        def step(optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            return mse_step(models[0], optimizer, features, targets)

        return step

    assert_same(None, None, make=make, call=lambda world, step, *args: step(world.optimizer, *args))
