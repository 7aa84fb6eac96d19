"""What may change between two calls: what is an input costs nothing, what is not costs one recompile with a reason."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, adam, mse_step, observe, pair, small_world
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

import wholestep
from wholestep.runtime.guards import Call

X, Y = pair()
OTHER_X, OTHER_Y = pair(seed=1)


class Regularised(SmallNet):
    """With dropout and batch norm, so that train and eval differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.dropout(self.norm(features)))


def set_option(**options: Any) -> Callable[[World], None]:
    """Change options of the first parameter group."""
    return lambda world: world.optimizer.param_groups[0].update(options)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": partial(StepLR, step_size=2, gamma=0.5),
    "cosine": partial(CosineAnnealingLR, T_max=10),
    "warmup": partial(LambdaLR, lr_lambda=lambda step: (step + 1) / 10),
    "one_cycle": partial(OneCycleLR, max_lr=0.1, total_steps=12, cycle_momentum=False),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=3), ExponentialLR(optimizer, 0.9)], milestones=[3]
    ),
}
RATES: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, lr=0.01),
    "adam_foreach": partial(Adam, lr=0.01, foreach=True),
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adamw_fused": partial(AdamW, lr=0.01, fused=True),
    "adam_tensor": lambda parameters: Adam(parameters, lr=torch.tensor(0.01), foreach=False),
    "adamw_fused_tensor": lambda parameters: AdamW(parameters, lr=torch.tensor(0.01), fused=True),
    "sgd_tensor": lambda parameters: SGD(parameters, lr=torch.tensor(0.1), momentum=0.9, foreach=True),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("optimizer_name", RATES)
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
def test_a_scheduled_learning_rate_costs_no_recompile(scheduler_name: str, optimizer_name: str) -> None:
    def build() -> World:
        world = small_world(make_optimizer=RATES[optimizer_name])()
        world.scheduler = SCHEDULERS[scheduler_name](world.optimizer)
        return world

    twins = Twins(build, mse_step)
    rates: set[float] = set()
    for _ in range(10):
        twins.step(X, Y)
        twins.change(lambda world: world.scheduler.step())
        rates.add(float(twins.worlds[1].optimizer.param_groups[0]["lr"]))
    assert len(rates) > 2
    assert twins.num_captures == 1


def test_a_plateau_scheduler_fed_with_the_loss() -> None:
    def build() -> World:
        world = small_world()()
        world.scheduler = ReduceLROnPlateau(world.optimizer, patience=0, threshold=10.0)
        return world

    twins = Twins(build, mse_step)
    for _ in range(4):
        loss = float(twins.step(X, Y))
        twins.change(lambda world, loss=loss: world.scheduler.step(loss))
    assert twins.worlds[1].optimizer.param_groups[0]["lr"] < 0.01
    assert twins.num_captures == 1


def test_two_groups_with_rates_of_their_own() -> None:
    def build() -> World:
        model = SmallNet()
        groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.second.parameters()}]
        return World(model=model, optimizer=SGD(groups, lr=0.01))

    twins = Twins(build, mse_step)
    twins.step(X, Y)
    twins.change(lambda world: world.optimizer.param_groups[1].update(lr=0.2))
    twins.step(X, Y)
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.0))
    twins.step(X, Y)
    assert twins.num_captures == 1


def test_two_groups_may_stop_sharing_a_rate_tensor() -> None:
    def build() -> World:
        model = SmallNet()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
        return World(model=model, optimizer=Adam(groups, lr=torch.tensor(0.01), foreach=False))

    twins = Twins(build, mse_step)
    twins.step(X, Y)
    twins.change(lambda world: world.optimizer.param_groups[1].update(lr=torch.tensor(0.2)))
    twins.step(X, Y)


def test_a_rate_that_becomes_a_tensor_is_a_recompile() -> None:
    twins = Twins(small_world(make_optimizer=partial(Adam, lr=0.01, foreach=False)), mse_step)
    twins.step(X, Y)
    twins.change(set_option(lr=torch.tensor(0.02)))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2
    assert "learning rate" in twins.reasons[0] or "lr" in twins.reasons[0]


def test_weight_decay_is_one_recompile_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    twins = Twins(small_world(), mse_step)
    twins.steps(2, X, Y)
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        twins.change(set_option(weight_decay=0.1))
        twins.steps(3, X, Y)
    assert twins.num_captures == 2
    assert twins.reasons == ("'weight_decay' of optimizer.param_groups[0] changed from 0 to 0.1",)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("wholestep")]
    assert len(logged) == 1
    assert "weight_decay" in logged[0]
    assert "recompiled" in logged[0]


@pytest.mark.parametrize(
    ("make_optimizer", "option", "value"),
    [
        (partial(Adam, lr=0.01), "betas", (0.5, 0.9)),
        (partial(Adam, lr=0.01), "eps", 1e-3),
        (partial(Adam, lr=0.01), "maximize", True),
        (partial(SGD, lr=0.1, momentum=0.9), "momentum", 0.5),
        (partial(SGD, lr=0.1, momentum=0.9), "nesterov", True),
        (partial(AdamW, lr=0.1, fused=True), "weight_decay", 0.3),
    ],
)
def test_any_other_option_is_one_recompile(make_optimizer: Any, option: str, value: Any) -> None:
    twins = Twins(small_world(make_optimizer=make_optimizer), mse_step)
    before = twins.worlds[0].optimizer.param_groups[0][option]
    twins.step(X, Y)
    twins.change(set_option(**{option: value}))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2
    assert f"'{option}' of optimizer.param_groups[0] changed from {before!r} to {value!r}" in twins.reasons[0]
    twins.change(set_option(**{option: before}))
    twins.step(X, Y)
    assert twins.num_captures == 2


def test_train_and_eval_are_two_captures_and_then_none() -> None:
    twins = Twins(small_world(Regularised), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: world.model.eval())
    twins.steps(2, X, Y)
    assert twins.num_captures == 2
    assert ".training' changed" in twins.reasons[0]
    for _ in range(2):
        twins.change(lambda world: world.model.train())
        twins.step(X, Y)
        twins.change(lambda world: world.model.eval())
        twins.step(X, Y)
    assert twins.num_captures == 2


def test_one_submodule_in_eval() -> None:
    twins = Twins(small_world(Regularised), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: world.model.norm.eval())
    twins.step(X, Y)
    assert twins.reasons == ("'model.norm.training' changed from True to False",)


def test_freezing_and_thawing_a_layer() -> None:
    twins = Twins(small_world(), mse_step)
    twins.steps(2, X, Y)
    twins.change(lambda world: world.model.first.requires_grad_(False))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2
    assert "requires_grad True -> False" in twins.reasons[0]
    twins.change(lambda world: world.model.first.requires_grad_(True))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_a_layer_that_starts_frozen_gets_its_state_when_it_thaws() -> None:
    def build() -> World:
        world = small_world()()
        world.model.first.requires_grad_(False)
        return world

    twins = Twins(build, mse_step)
    twins.steps(2, X, Y)
    assert twins.worlds[1].model.first.weight not in twins.worlds[1].optimizer.state
    twins.change(lambda world: world.model.first.requires_grad_(True))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_adding_a_parameter_group() -> None:
    def build() -> World:
        model = SmallNet()
        return World(model=model, optimizer=Adam(model.first.parameters(), lr=0.01))

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(build, step)
    twins.steps(2, X, Y)
    twins.change(lambda world: world.optimizer.add_param_group({"params": world.model.second.parameters(), "lr": 0.2}))
    twins.steps(3, X, Y)
    assert twins.num_captures == 2
    assert twins.reasons == ("optimizer has 2 parameter groups instead of 1",)


def test_a_module_attribute() -> None:
    twins = Twins(small_world(Regularised), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: setattr(world.model.dropout, "p", 0.25))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2
    assert twins.reasons == ("'model.dropout.p' changed from 0.5 to 0.25",)
    twins.change(lambda world: setattr(world.model.dropout, "p", 0.5))
    twins.step(X, Y)
    assert twins.num_captures == 2


class Scaled(SmallNet):
    """Reads attributes that are no plain numbers, or are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: Any = (1.0, 2.0)
        self.config = SimpleNamespace(factor=1.0)
        self.options = {"factor": 1.0}

    def forward(self, features: Tensor) -> Tensor:
        factor = self.factors[0] * self.config.factor * self.options["factor"] * getattr(self, "extra", 1.0)
        return super().forward(features) * factor


@pytest.mark.parametrize(
    "change",
    [
        lambda world: setattr(world.model, "factors", (3.0, 2.0)),
        lambda world: setattr(world.model.config, "factor", 3.0),
        lambda world: world.model.options.update(factor=3.0),
        lambda world: setattr(world.model, "extra", 3.0),
    ],
    ids=["tuple", "object", "dict", "new"],
)
def test_module_attributes_that_are_no_numbers(change: Callable[[World], Any]) -> None:
    twins = Twins(small_world(Scaled), mse_step)
    twins.step(X, Y)
    twins.change(change)
    twins.step(X, Y)
    assert twins.num_captures == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda world: world.model.first.register_forward_hook(lambda module, inputs, output: output * 2),
        lambda world: world.model.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
        lambda world: world.model.first.weight.register_hook(lambda gradient: gradient * 2),
    ],
    ids=["forward", "forward_pre", "parameter"],
)
def test_hooks_added_later(change: Callable[[World], Any]) -> None:
    twins = Twins(small_world(), mse_step)
    twins.step(X, Y)
    twins.change(change)
    twins.step(X, Y)


def test_a_submodule_replaced() -> None:
    def replace(world: World) -> None:
        world.model.second = nn.Sequential(world.model.second, nn.Tanh())

    twins = Twins(small_world(), mse_step)
    twins.step(X, Y)
    twins.change(replace)
    twins.step(X, Y)
    assert twins.num_captures == 2


def test_another_dtype() -> None:
    twins = Twins(small_world(make_optimizer=partial(SGD, lr=0.1)), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: world.model.double())
    twins.steps(2, X.double(), Y.double())
    assert twins.num_captures == 2
    assert "dtype torch.float32 -> torch.float64" in twins.reasons[0]
    twins.change(lambda world: world.model.float())
    twins.step(X, Y)
    assert twins.num_captures == 2


def test_the_default_dtype() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features * torch.ones(4).float(), targets) + torch.ones(())

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    torch.set_default_dtype(torch.float64)
    try:
        assert twins.step(X, Y).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert "torch.get_default_dtype() changed" in twins.reasons[0]


class Attending(SmallNet):
    """With an op that torch chooses by its switches."""

    def forward(self, features: Tensor) -> Tensor:
        heads = features.reshape(1, 1, *features.shape)
        return super().forward(F.scaled_dot_product_attention(heads, heads, heads)[0, 0])


SWITCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "flash attention": (
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        "torch.backends.cuda.flash_sdp_enabled()",
    ),
    "oneDNN": (
        lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=cast(Any, None)),  # to set that warns
        "torch.backends.mkldnn.enabled",
    ),
    "cuDNN": (lambda: torch.backends.cudnn.flags(enabled=False), "torch.backends.cudnn.enabled"),
    "device": (lambda: torch.device("cpu"), "torch.get_default_device()"),
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_switches_of_torch(kind: str) -> None:
    switched, name = SWITCHES[kind]
    twins = Twins(small_world(Attending), mse_step)
    twins.step(X, Y)
    with switched():
        twins.step(X, Y)
        twins.step(OTHER_X, OTHER_Y)
    twins.step(X, Y)
    assert twins.num_captures == 2
    assert f"{name} changed" in twins.reasons[0]


def test_a_replaced_parameter() -> None:
    def replace(world: World) -> None:
        world.model.first.weight = nn.Parameter(torch.ones(5, 4))
        world.optimizer = adam(world.model.parameters())

    twins = Twins(small_world(), mse_step)
    twins.step(X, Y)
    twins.change(replace)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_a_parameter_replaced_behind_the_optimizer() -> None:
    def replace(world: World) -> None:
        world.model.first.weight = nn.Parameter(torch.ones(5, 4))

    twins = Twins(small_world(make_optimizer=partial(SGD, lr=0.1)), mse_step)
    twins.step(X, Y)
    twins.change(replace)
    # The new weight is in no optimizer, so that nothing clears its gradient: it accumulates.
    twins.steps(3, X, Y)
    assert "a parameter of module 'first' was replaced" in twins.reasons[0]


def test_another_optimizer_for_the_same_model() -> None:
    twins = Twins(small_world(), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: setattr(world, "optimizer", SGD(world.model.parameters(), lr=0.1)))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_another_model_and_back() -> None:
    def build() -> World:
        models, optimizers = [SmallNet(), SmallNet(7)], []
        for model in models:
            optimizers.append(adam(model.parameters()))
        return World(first=models[0], second=models[1], a=optimizers[0], b=optimizers[1], use_second=False)

    def call(world: World, step: Callable[..., Any], *args: Any) -> Any:
        return step(*((world.second, world.b) if world.use_second else (world.first, world.a)), *args)

    twins = Twins(build, mse_step, call=call)
    for use_second in (False, True, False, True):
        twins.change(lambda world, value=use_second: setattr(world, "use_second", value))
        twins.step(X, Y)
    assert twins.num_captures == 2


FACTOR = 1.0


def step_with_global(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    return mse_step(model, optimizer, features, targets * FACTOR)


def test_a_global_number(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(small_world(), step_with_global)
    twins.step(X, Y)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    twins.steps(2, X, Y)
    assert twins.reasons == (f"'{__name__}.FACTOR' changed from 1.0 to 2.0",)
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    twins.step(X, Y)
    assert twins.num_captures == 2


def test_a_closure_number() -> None:
    factor = 1.0

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets * factor)

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    factor = 2.0
    twins.steps(2, X, Y)
    assert twins.reasons == ("'factor' changed from 1.0 to 2.0",)


def test_a_closure_tensor() -> None:
    weight = torch.ones(3)

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets * weight)

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    weight.mul_(2)  # its value is read anew by every call
    twins.step(X, Y)
    assert twins.num_captures == 1
    weight = torch.full((3,), 5.0)  # so is another tensor of the same type
    twins.steps(2, X, Y)
    assert twins.num_captures == 1
    weight = torch.full((1,), 5.0)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


@pytest.mark.parametrize("kind", ["dict", "object", "list"])
def test_a_number_in_a_closure_container(kind: str) -> None:
    config: Any = {"dict": {"factor": 1.0}, "object": SimpleNamespace(factor=1.0), "list": [1.0]}[kind]

    def read() -> float:
        return config.factor if kind == "object" else config["factor" if kind == "dict" else 0]

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets * read())

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    if kind == "object":
        config.factor = 2.0
    else:
        config["factor" if kind == "dict" else 0] = 2.0
    twins.step(X, Y)
    assert twins.num_captures == 2


class Settings:
    factor = 1.0


@pytest.mark.parametrize("kind", ["object in object", "class", "python module"])
def test_a_number_further_away(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder: Any = {
        "object in object": SimpleNamespace(train=SimpleNamespace(factor=1.0)),
        "class": SimpleNamespace(train=Settings),
        "python module": SimpleNamespace(train=ModuleType("settings")),
    }[kind]
    monkeypatch.setattr(holder.train, "factor", 1.0, raising=False)

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets * holder.train.factor)

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    monkeypatch.setattr(holder.train, "factor", 2.0)
    twins.step(X, Y)


def test_a_number_in_the_settings_of_a_trainer() -> None:
    class Trainer:
        def __init__(self, world: World) -> None:
            self.model, self.optimizer, self.args = world.model, world.optimizer, SimpleNamespace(factor=1.0)

        def step(self, features: Tensor, targets: Tensor) -> Tensor:
            return mse_step(self.model, self.optimizer, features, targets * self.args.factor)

    def make(world: World) -> Callable[..., Any]:
        world.trainer = Trainer(world)
        return world.trainer.step

    twins = Twins(small_world(), make=make, call=lambda world, step, *args: step(*args))
    twins.step(X, Y)
    twins.change(lambda world: setattr(world.trainer.args, "factor", 2.0))
    twins.step(X, Y)


class Property:
    """Shows a number through a property."""

    def __init__(self) -> None:
        self._factor = 1.0

    @property
    def factor(self) -> float:
        return self._factor

    def change(self) -> None:
        self._factor = 2.0


def test_a_number_behind_a_property() -> None:
    settings = Property()

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets * settings.factor)

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    settings.change()
    twins.step(X, Y)


def test_a_number_in_a_default_argument() -> None:
    settings = {"factor": 1.0}

    def step(
        model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, options: Any = settings
    ) -> Tensor:
        return mse_step(model, optimizer, features, targets * options["factor"])

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    settings["factor"] = 2.0
    twins.step(X, Y)


@pytest.mark.parametrize("kind", ["closure", "attribute"])
def test_a_model_exchanged_outside_the_arguments(kind: str) -> None:
    class Trainer:
        def __init__(self, world: World) -> None:
            self.model, self.optimizer = world.model, world.optimizer

        def step(self, features: Tensor, targets: Tensor) -> Tensor:
            return mse_step(self.model, self.optimizer, features, targets)

    def make(world: World) -> Callable[..., Any]:
        model, optimizer = world.model, world.optimizer
        world.trainer = Trainer(world)

        def step(features: Tensor, targets: Tensor) -> Tensor:
            return mse_step(model, optimizer, features, targets)

        def exchange() -> None:
            nonlocal model, optimizer
            model = world.model = world.trainer.model = copy.deepcopy(model)
            optimizer = world.optimizer = world.trainer.optimizer = SGD(model.parameters(), lr=0.1)

        world.exchange = exchange
        return step if kind == "closure" else world.trainer.step

    twins = Twins(small_world(), make=make, call=lambda world, step, *args: step(*args))
    twins.step(X, Y)
    twins.change(lambda world: world.exchange())
    twins.step(X, Y)


def test_a_python_argument() -> None:
    def step(
        model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, factor: float, mode: str = "plain"
    ) -> Tensor:
        return mse_step(model, optimizer, features, -targets * factor if mode == "minus" else targets * factor)

    twins = Twins(small_world(), step)
    for factor in (1.0, 1.0, 2.0, 1.0, 2.0):
        twins.step(X, Y, factor)
    assert twins.num_captures == 2
    assert twins.reasons == ("factor changed from 1.0 to 2.0",)
    twins.step(X, Y, 2.0, "minus")
    assert twins.num_captures == 3


def test_true_and_one_are_two_arguments() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, flag: Any) -> Any:
        return mse_step(model, optimizer, features, targets), flag

    twins = Twins(small_world(), step)
    for flag in (True, 1, 1.0, True):
        twins.step(X, Y, flag)
    assert twins.num_captures == 3


def test_one_tensor_in_two_places_may_become_two() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets[:, :3])

    twins = Twins(small_world(), step)
    twins.step(X, X)
    twins.step(X, OTHER_X)


def test_two_tensors_may_become_one() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets[:, :3])

    twins = Twins(small_world(), step)
    twins.step(X, OTHER_X)
    twins.step(X, X)
    twins.step(OTHER_X, X)
    assert twins.num_captures <= 2


def test_other_structures_shapes_and_types_of_arguments() -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        features = sum(tensor.float() for key, tensor in batch.items() if key != "targets")
        return mse_step(model, optimizer, features, batch["targets"])  # pyright: ignore[reportArgumentType]

    plain = {"features": X, "targets": Y}
    others = {
        "the structure of the arguments changed": {"features": X, "more": OTHER_X, "targets": Y},
        "batch['features'] changed: dtype torch.float32 -> torch.float64": {"features": X.double(), "targets": Y},
        "batch['features'] changed: stride (4, 1) -> (1, 6)": {"features": X.t().contiguous().t(), "targets": Y},
        "batch['features'] changed: shape (6, 4) -> (1, 4)": {"features": X[:1], "targets": Y[:1]},
    }
    twins = Twins(small_world(), step)
    twins.step(plain)
    for number, (reason, batch) in enumerate(others.items(), 2):
        twins.step(batch)
        assert twins.num_captures == number
        assert reason in twins.reasons[-1]
        twins.step(plain)
    for batch in others.values():
        twins.step(batch)
    assert twins.num_captures == 5


def test_a_tensor_argument_that_becomes_none() -> None:
    def step(
        model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, weight: Tensor | None
    ) -> Tensor:
        return mse_step(model, optimizer, features if weight is None else features * weight, targets)

    twins = Twins(small_world(), step)
    for weight in (torch.ones(4), None, torch.ones(4), None):
        twins.step(X, Y, weight)
    assert twins.num_captures == 2
    assert "was a tensor before and is none now" in twins.reasons[0]


def reload(world: World) -> None:
    world.model.load_state_dict(world.saved[0])
    world.optimizer.load_state_dict(world.saved[1])


@pytest.mark.parametrize("optimizer_name", ["adam", "sgd", "adamw_fused", "adam_tensor"])
def test_loading_state_dicts_needs_no_recompile(optimizer_name: str) -> None:
    def save(world: World) -> None:
        world.saved = copy.deepcopy((world.model.state_dict(), world.optimizer.state_dict()))

    twins = Twins(small_world(Regularised, RATES[optimizer_name]), mse_step)
    twins.steps(2, X, Y)
    twins.change(save)
    twins.steps(2, X, Y)
    twins.change(reload)
    twins.steps(3, X, Y)
    assert twins.num_captures == 1


def test_a_fresh_process_continues_from_state_dicts() -> None:
    trained = small_world(Regularised, adam)()
    for _ in range(3):
        mse_step(trained.model, trained.optimizer, X, Y)

    def build() -> World:
        world = small_world(Regularised, adam)()
        world.saved = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
        reload(world)
        return world

    twins = Twins(build, mse_step)
    twins.steps(3, X, Y)
    assert twins.num_captures == 1
    assert float(twins.worlds[1].optimizer.state[twins.worlds[1].model.first.weight]["step"]) == 6


def test_the_state_loaded_into_a_compiled_step_that_has_none_yet() -> None:
    twins = Twins(small_world(make_optimizer=partial(SGD, lr=0.1, momentum=0.9)), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: world.optimizer.state.clear())
    twins.steps(3, X, Y)


def test_parameters_changed_in_place_between_steps() -> None:
    def change(world: World) -> None:
        with torch.no_grad():
            world.model.first.weight.mul_(0.5)
            world.model.norm.running_mean.add_(1)
            world.optimizer.state[world.model.second.weight]["exp_avg"].zero_()

    twins = Twins(small_world(Regularised, adam), mse_step)
    twins.step(X, Y)
    twins.change(change)
    twins.steps(2, X, Y)
    assert twins.num_captures == 1


def test_eager_and_compiled_steps_may_be_mixed() -> None:
    twins = Twins(small_world(Regularised), mse_step)
    twins.steps(2, X, Y)
    torch.manual_seed(5)
    mse_step(twins.worlds[0].model, twins.worlds[0].optimizer, X, Y)
    torch.manual_seed(5)
    mse_step(twins.worlds[1].model, twins.worlds[1].optimizer, X, Y)
    twins.steps(2, OTHER_X, OTHER_Y)
    assert twins.num_captures == 1


def test_gradients_left_over_from_outside_are_cleared_by_zero_grad() -> None:
    def leave_gradients(world: World) -> None:
        for parameter in world.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    twins = Twins(small_world(), mse_step)
    twins.step(X, Y)
    twins.change(leave_gradients)
    twins.step(X, Y)
    twins.change(lambda world: world.model.zero_grad())
    twins.step(X, Y)
    assert twins.num_captures == 1


def test_the_cache_keeps_what_fits_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_SIZE", "2")
    twins = Twins(small_world(), mse_step, dynamic_batch=False)
    for size in (3, 4, 3, 4):
        twins.step(*pair(size))
    assert twins.num_captures == 2
    for size in (5, 4, 5):
        twins.step(*pair(size))
    assert twins.num_captures == 3
    twins.step(*pair(3))
    assert twins.num_captures == 4


def test_many_recompiles_are_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WHOLESTEP_RECOMPILE_WARNING", "3")

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, number: str) -> Tensor:
        return mse_step(model, optimizer, features, targets * len(number))

    twins = Twins(small_world(), step)
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        for number in range(6):
            twins.step(X, Y, str(number))
    warned = [record.getMessage() for record in caplog.records if "has been recompiled 3 times" in record.getMessage()]
    assert len(warned) == 1
    assert "number changed from '2' to '3'" in warned[0]
    assert "should be tensors" in warned[0]


def test_the_environment_of_the_call() -> None:
    def call(world: World, step: Callable[..., Any], *args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=world.autocast):
            return step(world.model, world.optimizer, *args)

    def build() -> World:
        world = small_world()()
        world.autocast = False
        return world

    twins = Twins(build, mse_step, call=call)
    for autocast in (False, True, False, True):
        twins.change(lambda world, value=autocast: setattr(world, "autocast", value))
        twins.step(X, Y)
    assert twins.num_captures == 2
    assert "autocast on cpu changed from False to torch.bfloat16" in twins.reasons[0]


def test_a_failed_recompile_leaves_everything_and_the_old_capture_works() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor, strict: bool) -> Tensor:
        loss = mse_step(model, optimizer, features, targets)
        if strict and loss.item() > 0:
            loss = loss * 2
        return loss

    twins = Twins(small_world(), step)
    twins.step(X, Y, False)
    compiled_world = twins.worlds[1]
    before = observe(compiled_world)
    with pytest.raises(ValueError, match="a comparison needs a value"):
        twins.compiled(compiled_world.model, compiled_world.optimizer, X, Y, True)
    after = observe(compiled_world)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    twins.steps(2, X, Y, False)
    assert twins.num_captures == 1


def scaled(factor: float) -> Callable[..., Any]:
    """A forward hook."""
    return lambda _module, _args, output: output * factor


def shrink(factor: float, world: World) -> Callable[..., None]:
    """A hook of an optimizer."""
    return lambda *_: world.model.first.weight.data.mul_(factor)


HOOKS: dict[str, Callable[[World, float], Any]] = {
    "module": lambda world, factor: world.model.first.register_forward_hook(scaled(factor)),
    "parameter": lambda world, factor: world.model.first.weight.register_hook(lambda grad: grad * factor),
    "optimizer": lambda world, factor: world.optimizer.register_step_post_hook(shrink(factor, world)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_exchanged_for_another_one(kind: str) -> None:
    def build() -> World:
        world = small_world()()
        world.handles = [HOOKS[kind](world, 2.0)]
        return world

    def exchange(world: World) -> None:
        world.handles.pop().remove()
        world.handles.append(HOOKS[kind](world, 0.5))

    twins = Twins(build, mse_step)
    twins.steps(2, X, Y)
    assert twins.num_captures == 1
    twins.change(exchange)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def halve(optimizer: Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.mul_(0.5)


@pytest.mark.parametrize("is_there_first", [False, True])
def test_hooks_for_all_modules_and_all_optimizers(is_there_first: bool) -> None:
    twins = Twins(small_world(), mse_step)
    if not is_there_first:
        twins.step(X, Y)
    factors = [2.0]
    handles = [
        register_module_forward_hook(
            lambda module, _args, output: output * factors[0] if isinstance(module, nn.Linear) else None
        ),
        register_optimizer_step_post_hook(halve),
    ]
    try:
        twins.steps(2, X, Y)
        factors[0] = 3.0
        twins.step(X, Y)
    finally:
        for handle in handles:
            handle.remove()
    twins.steps(2, X, Y)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_another_class_for_a_module() -> None:
    twins = Twins(small_world(), mse_step)
    twins.steps(2, X, Y)
    for cls in (Doubled, nn.Linear):
        twins.change(lambda world, cls=cls: setattr(world.model.first, "__class__", cls))
        twins.steps(2, X, Y)
    assert twins.num_captures == 2
    assert "is a Doubled now instead of a Linear" in twins.reasons[0]


def absolute(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs().mean()


def tripled(module: nn.Linear, features: Tensor) -> Tensor:
    return F.linear(features, module.weight, module.bias) * 3


def halved(features: Tensor, *_: Any, **__: Any) -> Tensor:
    return features * 0.5


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a function": (F, "mse_loss", absolute),
    "a method": (nn.Linear, "forward", tripled),
    "a function that torch calls": (F, "dropout", halved),
    "a method of tensors": (Tensor, "relu", lambda tensor: tensor.tanh()),
}


class Attentive(SmallNet):
    """Whose attention is computed by functions of torch that call others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.25)

    def forward(self, features: Tensor) -> Tensor:
        mixed = self.attention(features, features, features, need_weights=True)[0]
        return super().forward(mixed.relu())


@pytest.mark.parametrize("kind", PATCHES)
def test_a_function_of_torch_replaced(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, function = PATCHES[kind]
    twins = Twins(small_world(Attentive), mse_step)
    twins.steps(2, X, Y)
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, function)
        twins.steps(2, X, Y)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def buffered(change: Callable[[nn.Module], Any]) -> Twins:
    """A model whose buffer is changed between steps."""

    class Weighted(SmallNet):
        weights: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.full((3,), 2.0))

        def forward(self, features: Tensor) -> Tensor:
            weights = self.weights
            return super().forward(features) * (weights.mean() + weights.numel() + hasattr(self, "more"))

    twins = Twins(small_world(Weighted), mse_step)
    twins.steps(2, X, Y)
    twins.change(lambda world: change(world.model))
    return twins


BUFFERS: dict[str, Callable[[Any], Any]] = {
    "other data": lambda model: setattr(model.weights, "data", torch.ones(4)),
    "resized": lambda model: model.weights.resize_(4).fill_(3.0),
    "another dtype": lambda model: setattr(model.weights, "data", torch.ones(3, dtype=torch.float64)),
    "another one": lambda model: model.register_buffer("more", torch.ones(1)),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_changed_in_place(kind: str) -> None:
    twins = buffered(BUFFERS[kind])
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_what_does_not_fit_once_does_not_fit_the_next_time() -> None:
    twins = buffered(BUFFERS["another one"])
    world, first = twins.worlds[1], twins.compiled._current
    call = Call.of(mse_step, (world.model, world.optimizer, X, Y), {})
    reasons = [first.check(call).reason for _ in range(3)]
    assert reasons == ["a buffer was added to or removed from a module"] * 3


def test_a_buffer_that_is_to_be_trained_from_now_on() -> None:
    twins = buffered(lambda model: model.weights.requires_grad_(True))
    with pytest.raises(wholestep.CaptureError, match="requires a gradient"):
        twins.step(X, Y)


def test_two_buffers_that_become_one() -> None:
    class Counting(SmallNet):
        seen: Tensor
        offset: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("offset", torch.zeros(()))

        def forward(self, features: Tensor) -> Tensor:
            self.seen.add_(1)
            return super().forward(features) + self.offset

    twins = Twins(small_world(Counting), mse_step)
    twins.steps(2, X, Y)
    twins.change(lambda world: setattr(world.model, "offset", world.model.seen))
    twins.steps(2, X, Y)


def test_submodules_in_another_order() -> None:
    def swap(world: World) -> None:
        own = world.model.layers._modules
        own["0"] = own.pop("0")

    class Layered(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, features: Tensor) -> Tensor:
            return super().forward(self.layers(features))

    twins = Twins(small_world(Layered), mse_step)
    twins.steps(2, X, Y)
    twins.change(swap)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


REGISTRIES: dict[str, Callable[[nn.Module], Any]] = {
    "item": lambda layer: vars(layer).update(_parameters=dict(copy.deepcopy(layer)._parameters)),
    "all attributes": lambda layer: vars(layer).update(vars(copy.deepcopy(layer))),
    "__dict__": lambda layer: setattr(layer, "__dict__", vars(copy.deepcopy(layer))),
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_parameters_of_a_module_replaced_at_once(kind: str) -> None:
    twins = Twins(small_world(), mse_step)
    twins.steps(2, X, Y)
    twins.change(lambda world: REGISTRIES[kind](world.model.first))
    twins.steps(2, X, Y)
    assert twins.num_captures > 1


def scaled_by_options(read: Callable[[dict[str, Any]], Any]) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets) * read(optimizer.param_groups[0])
        loss.backward()
        optimizer.step()
        return loss

    return step


def in_place(world: World) -> None:
    world.optimizer.param_groups[0]["kept"][0] = 3.0


# What a group holds, how the step reads it, and how it changes.
OPTIONS: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], Any], list[Callable[[World], Any]]]] = {
    "list": (lambda: [2.0], lambda group: group["kept"][0], [in_place, set_option(kept=[4.0])]),
    "list among all": (lambda: [2.0], lambda group: [*group.values()][-1][0], [in_place]),
    "object": (
        lambda: SimpleNamespace(scale=2.0),
        lambda group: group["kept"].scale,
        [lambda world: setattr(world.optimizer.param_groups[0]["kept"], "scale", 3.0)],
    ),
    "tensor": (
        lambda: torch.full((2,), 2.0),
        lambda group: group["kept"].sum(),
        [lambda world: world.optimizer.param_groups[0]["kept"].fill_(3.0), set_option(kept=torch.full((2,), 4.0))],
    ),
    "tensor of another shape": (
        lambda: torch.full((2,), 2.0),
        lambda group: group["kept"].sum(),
        [set_option(kept=torch.full((3,), 4.0))],
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", OPTIONS)
def test_what_a_group_holds(kind: str) -> None:
    start, read, changes = OPTIONS[kind]

    def build() -> World:
        world = small_world()()
        world.optimizer.param_groups[0]["kept"] = start()
        return world

    twins = Twins(build, scaled_by_options(read))
    twins.steps(2, X, Y)
    assert twins.num_captures == 1
    for change in changes:
        twins.change(change)
        twins.steps(2, X, Y)


def test_a_step_that_reads_the_first_rate_and_the_defaults() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        scale = optimizer.param_groups[0]["initial_lr"] + optimizer.defaults["weight_decay"]
        loss = F.mse_loss(model(features), targets) * scale
        loss.backward()
        optimizer.step()
        return loss

    def build() -> World:
        world = small_world()()
        world.optimizer.param_groups[0]["initial_lr"] = 0.5
        return world

    twins = Twins(build, step)
    twins.steps(2, X, Y)
    twins.change(set_option(initial_lr=0.25))
    twins.steps(2, X, Y)
    twins.change(lambda world: world.optimizer.defaults.update(weight_decay=0.5))
    twins.steps(2, X, Y)
    assert twins.num_captures == 3


def test_a_step_of_an_optimizer_replaced() -> None:
    def replace(world: World) -> None:
        original = world.optimizer.step
        world.optimizer.step = lambda: (original(), original())[0]

    twins = Twins(small_world(), mse_step)
    twins.steps(2, X, Y)
    twins.change(replace)
    twins.steps(2, X, Y)
