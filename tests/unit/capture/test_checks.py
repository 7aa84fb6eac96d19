"""Steps that look at what they compute to check it: the graph looks at each call, and eager runs where it is not so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences
from tests.twins import SmallNet, Twins, World, adam, momentum, mse_step, observe, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

X, Y = pair()
NAN = X.clone()
NAN[0, 0] = math.nan
Step = Callable[..., Any]


def trained(loss: Tensor, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def validates(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    chosen = torch.distributions.Categorical(logits=model(features), validate_args=True)
    return trained(-chosen.log_prob(torch.zeros(len(features))).mean(), optimizer)


def clips_finite(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(features).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    return norm


def exits(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    loss = model(features).square().mean()
    if not math.isfinite(loss.item()):
        raise SystemExit(1)
    return trained(loss, optimizer)


ASSERTS = """
def asserts(model, optimizer, features):
    loss = model(features).square().mean()
    assert loss.item() < 1e6, "the loss is too large"
    return trained(loss, optimizer)
"""
names: dict[str, Any] = {"trained": trained, "__name__": __name__}
exec(compile(ASSERTS, __file__, "exec"), names)  # pytest rewrites assertions of tests
asserts: Step = names["asserts"]


def raises(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    output = model(features)
    if (output.abs() > 1e6).any() or output.isnan().any():
        name = "output" if output.dim() == 2 else "other"
        raise FloatingPointError(f"{name} is out of range")
    return trained(output.square().mean(), optimizer)


def inverts(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    output = model(features)
    square = output.T @ output + 0.1 * torch.eye(3)
    return trained(torch.linalg.inv(square).sum() + torch.linalg.cholesky(square).sum(), optimizer)


def normalizes(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    """A batch norm before the check: what it has written must not be there if the check fails."""
    loss = model(features).square().mean()
    if not torch.isfinite(loss):
        raise ValueError("not finite")
    return trained(loss, optimizer)


class Normed(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.drop(self.norm(features)))


FAILING = [validates, clips_finite, exits, asserts, raises, inverts]


def call_safely(world: World, step: Step, features: Tensor) -> Any:
    try:
        return step(world.model, world.optimizer, features)
    except (Exception, SystemExit) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("step", FAILING)
def test_a_check_that_fails_raises_what_eager_raises(step: Step) -> None:
    twins = Twins(small_world(make_optimizer=adam), step, call=call_safely)
    twins.steps(2, X)
    assert isinstance(twins.step(NAN), tuple)
    twins.steps(2, X)
    assert twins.num_captures == 1
    assert twins.compiled.num_eager_calls == 1


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_a_check_that_fails_leaves_statistics_and_masks_as_eager_does(make_optimizer: Any) -> None:
    twins = Twins(small_world(Normed, make_optimizer), normalizes, call=call_safely)
    for features in (X, NAN, X, NAN, X):
        twins.step(features)
    assert twins.compiled.num_eager_calls == 2


@pytest.mark.parametrize("features", [[X, NAN, NAN, X, NAN, X], [NAN, X, NAN, NAN, X]])
def test_an_operator_that_checks_fails_again(features: list[Tensor]) -> None:
    """Its capture asks nothing, so that the graph made for the other course is left as well."""
    twins = Twins(small_world(), inverts, call=call_safely)
    for each in features:
        assert isinstance(twins.step(each), tuple) == (each is NAN)
    assert twins.compiled.num_eager_calls == sum(each is NAN for each in features)


def test_an_operator_that_checks_fails_within_a_memory_budget() -> None:
    world = small_world()()
    step = wholestep.compile(inverts, memory_budget=1.0)
    step(world.model, world.optimizer, X)
    for _ in range(2):
        with pytest.raises(wholestep.CaptureError, match="the step raises an error, because of a value"):
            step(world.model, world.optimizer, NAN)
    step(world.model, world.optimizer, X)


def test_a_first_call_that_raises_does_not_keep_the_others_from_a_graph() -> None:
    twins = Twins(small_world(), raises, call=call_safely, on_refusal="eager")
    for features in (NAN, X, X, NAN, X):
        twins.step(features)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 2)


def test_a_check_that_fails_at_the_first_call() -> None:
    twins = Twins(small_world(make_optimizer=adam), validates, call=call_safely)
    for features in (NAN, X, NAN, X):
        twins.step(features)


def skips(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(features).square().mean()
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
    return loss.detach().nan_to_num()


def test_what_happens_again_has_a_graph_of_its_own() -> None:
    twins = Twins(small_world(), skips)
    for features in (X, NAN, X, NAN, X, NAN, NAN, X):
        twins.step(features)
    assert twins.num_captures == 2
    assert twins.compiled.num_eager_calls == 1


class Drops(nn.Module):
    """LayerDrop, as Hugging Face's speech models have it."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(4, 3)
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            skip = torch.rand([]) < self.probability
            if not self.training or not skip:
                hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        return self.head(hidden)


@pytest.mark.parametrize(("probability", "most"), [(0.0, 1), (0.5, 4)])
def test_layers_that_are_dropped_by_a_draw(probability: float, most: int) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return trained(F.mse_loss(model(features), targets), optimizer)

    def build() -> World:
        model = Drops(probability)
        return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    twins = Twins(build, step)
    twins.steps(24, X, Y)
    assert twins.num_captures <= most
    assert twins.compiled.num_eager_calls <= most


@pytest.mark.parametrize("make_optimizer", [momentum, adam, lambda p: torch.optim.AdamW(p, fused=True)])
@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_scaler_with_overflows(make_optimizer: Any, clip: bool) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]

    def make(scaler: torch.amp.GradScaler) -> Step:
        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), targets)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            return loss.item()

        return step

    worlds = [small_world(make_optimizer=make_optimizer)() for _ in range(2)]
    worlds[1].model.load_state_dict(worlds[0].model.state_dict())
    steps: list[Any] = [make(scalers[0]), wholestep.compile(make(scalers[1]))]
    large = X * 1e30
    for features in (large, X, X, X, X, large, X, X, large, large, X, X, X, X):
        losses = [step(world.model, world.optimizer, features, Y) for step, world in zip(steps, worlds, strict=True)]
        assert losses[0] == losses[1]
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert differences(observe(worlds[0]), observe(worlds[1])) == []
    assert steps[1].num_captures <= 5, steps[1].recompile_reasons


def test_no_graph_is_left_where_ranks_share_it() -> None:
    """Whether a look is a check or not: on ranks all must run one graph (see tests/distributed)."""
    with pytest.raises(wholestep.WholestepError, match="on_refusal='eager' cannot be had with data_parallel"):
        wholestep.compile(mse_step, on_refusal="eager", data_parallel="replicate")


def test_within_a_memory_budget_another_graph_runs_instead_of_eager() -> None:
    twins = Twins(small_world(), skips, memory_budget=1.0)
    for features in (X, NAN, X, NAN, X):
        twins.step(features)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (2, 0)


def test_checks_are_verified_too() -> None:
    twins = Twins(small_world(), skips, verify=4)
    for features in (X, NAN, X, NAN, X):
        twins.step(features)


def test_a_call_that_leaves_its_graph_is_verified_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The graph that it leaves knows nothing of what the other course prints and writes."""

    def step(world: World, features: Tensor) -> Any:
        world.seen.add_(1)
        loss = world.model(features).square().mean()
        if not torch.isfinite(loss):
            return "skipped"
        print("trained", trained(loss, world.optimizer).item())
        world.log.append(random.random())
        return loss.item()

    def build() -> World:
        world = small_world()()
        world.log, world.seen = [], torch.zeros(2)
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args), verify=5)
    for features in (NAN, NAN, X, NAN, X):
        twins.step(features)
        lines = capsys.readouterr().out.splitlines()
        assert lines[::2] == lines[1::2]
        assert len(lines) == (0 if features is NAN else 2)


def test_no_update_waits_in_a_step_that_may_be_left(caplog: pytest.LogCaptureFixture) -> None:
    twins = Twins(small_world(), skips, cross_iteration="all")
    for features in (X, NAN, X):
        twins.step(features)
    assert "no update of skips waits" in caplog.text


def test_a_refused_step_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        return trained(loss * 2 if loss > 1 else loss, optimizer)

    twins = Twins(small_world(), step, on_refusal="eager")
    twins.steps(4, X, Y)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (0, 4)
    assert caplog.text.count("runs in eager from now on") == 1
    assert "needs a value that is only known when the step runs" in caplog.text


def test_a_step_that_raises_at_first_is_not_refused() -> None:
    twins = Twins(small_world(), validates, call=call_safely, on_refusal="eager")
    for features in (NAN, X, X, NAN, X):
        twins.step(features)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 2)


@pytest.mark.slow
def test_a_lowered_graph_writes_nothing_before_it_has_looked() -> None:
    worlds = [small_world(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), adam)() for _ in range(2)]
    worlds[1].model.load_state_dict(worlds[0].model.state_dict())
    steps: list[Step] = [normalizes, wholestep.compile(normalizes, lower="inductor")]
    for features in (X, NAN, X, NAN, X):
        outcomes = [call_safely(world, step, features) for world, step in zip(worlds, steps, strict=True)]
        assert isinstance(outcomes[0], tuple) is isinstance(outcomes[1], tuple)
        seen = [observe(world) for world in worlds]
        assert seen[0].keys() == seen[1].keys()
        for name, value in seen[0].items():
            torch.testing.assert_close(seen[1][name], value, equal_nan=True, msg=name)


class Relative(Optimizer):
    """Steps relative to the size of each parameter, which is taken for no smaller than some bound."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"bound": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                size = parameter.norm() / parameter.numel() ** 0.5
                parameter.add_(-0.03 * parameter.grad * max(group["bound"], size))


def test_the_largest_of_tensors_and_numbers() -> None:
    """Python takes one of them as it is, a number or a tensor, which are rounded otherwise: the graph looks which."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(features)
        loss = max((output - targets).square().mean(), output.abs().mean()) + min(output.detach().mean(), 0.1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def build() -> World:
        world = small_world(make_optimizer=Relative)()
        nn.init.zeros_(world.model.first.bias)
        return world

    twins = Twins(build, step)
    for seed in range(8):
        features, targets = pair(seed=seed)
        twins.step(features, targets * (seed % 3))
    assert twins.num_captures + twins.compiled.num_eager_calls <= 6
