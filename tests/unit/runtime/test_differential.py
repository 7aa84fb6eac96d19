"""`verify=N`: silent while the step is right, precise when it is wrong, and without a trace either way."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, is_captured, mse_step, observe, pair, small_world, square_step
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import wholestep
from wholestep.errors import VerificationError
from wholestep.graph import Phase, StepGraph
from wholestep.passes import Pass, base, register
from wholestep.runtime import differential
from wholestep.runtime.codegen import generate
from wholestep.runtime.differential import compare

aten = torch.ops.aten
X, Y = pair()


@dataclass(frozen=True)
class Sabotage(Pass):
    """Makes one gradient a little too large, or that of the loss and so all of them."""

    name: ClassVar[str] = "sabotage"
    parameter: str = "first.weight"
    factor: float = 1.001

    def apply(self, graph: StepGraph) -> StepGraph:
        gradient = graph.gradients[self.parameter] if self.parameter else next(graph.calls(Phase.BACKWARD))
        scaled = graph.insert(aten.mul.Tensor, (gradient, self.factor), like=gradient, after=gradient)
        for user in list(gradient.users):
            if user is not scaled:
                user.replace_input_with(gradient, scaled)
        return graph


@pytest.fixture(autouse=True)
def _sabotage_is_known_only_here() -> Iterator[None]:
    register(Sabotage)
    yield
    del base._REGISTRY[Sabotage.name]  # pyright: ignore[reportPrivateUsage]


class Regularised(SmallNet):
    """With batch norm and dropout: state and random numbers that a second run would change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.dropout(self.norm(features), 0.5))


@contextlib.contextmanager
def counting_runs(at: Callable[[int], None] = lambda number: None) -> Iterator[list[int]]:
    """The numbers of the backwards that eager has run, which `at` is told when they begin; those of a trace are not."""
    original = torch.autograd.backward
    runs: list[int] = []

    def backward(*args: Any, **kwargs: Any) -> None:
        if not is_captured():  # what is counted there would be counted again at every call
            runs.append(len(runs))
            at(runs[-1])
        original(*args, **kwargs)

    with mock.patch.object(torch.autograd, "backward", backward):
        yield runs


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


def world_of(make_model: Callable[[], nn.Module] = SmallNet) -> World:
    return small_world(make_model, lambda parameters: Adam(parameters, lr=0.01))()


# Right steps


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_first_steps_run_in_eager_too_and_the_others_do_not(number: int) -> None:
    world = world_of()
    step = wholestep.compile(mse_step, verify=number)
    with counting_runs() as runs:
        for _ in range(5):
            step(world.model, world.optimizer, X, Y)
    assert len(runs) == number
    assert step.num_captures == 1


@pytest.mark.parametrize("make_model", [SmallNet, Regularised])
def test_verification_leaves_what_eager_leaves(make_model: Callable[[], nn.Module]) -> None:
    twins = Twins(small_world(make_model), mse_step, verify=2)
    twins.steps(4, X, Y)


def test_verification_and_no_verification_leave_the_same_state() -> None:
    worlds: list[dict[str, Tensor]] = []
    for number in (0, 3):
        torch.manual_seed(0)
        world = world_of(Regularised)
        step = wholestep.compile(mse_step, verify=number)
        kept = [step(world.model, world.optimizer, X, Y) for _ in range(3)]
        worlds.append(observe(world) | {"rng": torch.get_rng_state(), "kept": torch.stack(kept)})
    assert worlds[0].keys() == worlds[1].keys()
    assert [name for name, value in worlds[0].items() if not torch.equal(value, worlds[1][name])] == []


def test_a_batch_that_the_step_writes_is_written_once() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        features.mul_(2)
        return mse_step(model, optimizer, features, targets)

    Twins(small_world(), step, verify=2).steps(3, X, Y)


def test_gradients_that_accumulate_are_accumulated_once() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> None:
        F.mse_loss(model(features), targets).backward()

    Twins(small_world(), step, verify=3).steps(4, X, Y)


def test_nan_is_equal_to_nan() -> None:
    world = world_of()
    step = wholestep.compile(mse_step, verify=1)
    loss = step(world.model, world.optimizer, X * float("nan"), Y)
    assert math.isnan(loss.item())


def test_the_environment_can_ask_for_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_VERIFY", "2")
    counts: list[int] = []
    for step in (wholestep.compile(mse_step), wholestep.compile(mse_step, verify=0)):
        world = world_of()
        with counting_runs() as runs:
            for _ in range(4):
                step(world.model, world.optimizer, X, Y)
        counts.append(len(runs))
    assert counts == [2, 0]


def test_the_gradient_of_an_argument_is_accumulated_once() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor) -> None:
        optimizer.zero_grad()
        model(features).sum().backward()
        optimizer.step()

    world = world_of()
    features = X.clone().requires_grad_()
    features.grad = torch.ones_like(features)
    wholestep.compile(step, verify=1)(world.model, world.optimizer, features)


def test_a_tensor_of_the_closure_is_written_once() -> None:
    counter = torch.zeros(())

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        counter.add_(1)
        return mse_step(model, optimizer, features, targets)

    world = world_of()
    wholestep.compile(step, verify=1)(world.model, world.optimizer, X, Y)
    assert counter.item() == 1


def test_a_returned_number_may_be_nan() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        return mse_step(model, optimizer, features, targets), float("nan")

    world = world_of()
    wholestep.compile(step, verify=1)(world.model, world.optimizer, X, Y)


# Wrong steps


def sabotaged(world: World) -> VerificationError:
    """The error of the first step with one gradient too large."""
    step = wholestep.compile(mse_step, passes="simplify,sabotage,reinplace", verify=1)
    with pytest.raises(VerificationError) as caught:
        step(world.model, world.optimizer, 10 * X, Y)
    return caught.value


def test_a_wrong_step_is_refused_with_the_names_of_what_differs() -> None:
    world = small_world(SmallNet, sgd)()
    F.mse_loss(world.model(10 * X), Y).backward()
    error = sabotaged(world)
    assert set(error.differences) == {"grad.first.weight", "param.first.weight"}
    expected = 0.001 * world.model.first.weight.grad.abs().max().item()
    assert error.differences["grad.first.weight"] == pytest.approx(expected, rel=0.01)
    assert error.differences["param.first.weight"] == pytest.approx(0.1 * expected, rel=0.05)
    message = str(error)
    assert message.startswith("step 1 differs from eager in 2 values: grad.first.weight by ")
    assert "param.first.weight by " in message
    assert "state before the step has been restored" in message
    assert "the first op that differs is mul (backward of first" in message
    assert "eager runs no such op" in message
    assert "report" not in message


def test_the_step_that_went_wrong_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of()
    step = wholestep.compile(mse_step, passes="sabotage{factor=1.0}", verify=2)
    step(world.model, world.optimizer, X, Y)
    [node] = [node for node in step.graph.calls() if node.target is aten.mul.Tensor and node.args[1] == 1.0]
    node.args = (node.args[0], 1.5)
    executable = step._require_current().rotation._main  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(executable, "_step", generate(step.graph))
    with pytest.raises(VerificationError, match=r"^step 2 differs from eager"):
        step(world.model, world.optimizer, X, Y)


def test_a_wrong_step_leaves_everything_as_it_was() -> None:
    world = world_of(Regularised)
    for _ in range(2):  # state, gradients and running statistics exist
        mse_step(world.model, world.optimizer, X, Y)
    grads = {name: parameter.grad for name, parameter in world.model.named_parameters()}
    state = {p: dict(entries) for p, entries in world.optimizer.state.items()}
    before = observe(world) | {"rng": torch.get_rng_state()}
    features = 10 * X
    step = wholestep.compile(mse_step, passes="sabotage", verify=1)
    with pytest.raises(VerificationError):
        step(world.model, world.optimizer, features, Y)
    after = observe(world) | {"rng": torch.get_rng_state()}
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert all(parameter.grad is grads[name] for name, parameter in world.model.named_parameters())
    for parameter, entries in world.optimizer.state.items():
        assert all(value is state[parameter][key] for key, value in entries.items())
    assert torch.equal(features, 10 * X)


def test_a_wrong_first_step_leaves_the_optimizer_without_state() -> None:
    world = world_of()
    sabotaged(world)
    assert world.model.first.weight.grad is None
    assert len(world.optimizer.state) == 0


def test_a_step_that_fails_while_it_is_verified_leaves_everything_as_it_was() -> None:
    def interrupt(number: int) -> None:
        if number == 0:
            raise KeyboardInterrupt

    world = world_of(Regularised)
    mse_step(world.model, world.optimizer, X, Y)
    before = observe(world) | {"rng": torch.get_rng_state()}
    with counting_runs(interrupt), pytest.raises(KeyboardInterrupt):
        wholestep.compile(mse_step, verify=1)(world.model, world.optimizer, X, Y)
    after = observe(world) | {"rng": torch.get_rng_state()}
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


# Comparing values


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), math.inf),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), math.inf),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf),
        (torch.tensor([1, 5]), torch.tensor([1, 3]), 2.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (None, torch.tensor([1.0]), math.inf),
        (torch.tensor([1.0]), None, math.inf),
        (3, 4, math.inf),
    ],
)
def test_a_difference_has_a_size(old: Any, new: Any, difference: float) -> None:
    assert compare({"value": old, "same": 1}, {"value": new, "same": 1}) == {"value": pytest.approx(difference)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1.0, math.nan, math.inf])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-7])),
        (None, None),
        ("text", "text"),
    ],
)
def test_what_is_close_enough_is_no_difference(old: Any, new: Any) -> None:
    assert compare({"value": old}, {"value": new}) == {}


def test_a_value_that_only_one_side_has_differs() -> None:
    assert compare({"old": 1}, {"new": 1}) == {"old": math.inf, "new": math.inf}


def test_the_largest_differences_are_listed_and_all_are_known() -> None:
    world = small_world(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 3)), sgd)()
    step = wholestep.compile(mse_step, passes="sabotage{parameter=,factor=100.0}", verify=1)
    with pytest.raises(VerificationError) as caught:
        step(world.model, world.optimizer, X, Y)
    differences = caught.value.differences
    assert len(differences) == 20  # a gradient and a value of each parameter
    worst = sorted(differences, key=lambda name: -differences[name])[:8]
    listed = str(caught.value).split("20 values: ")[1].split(";")[0]
    assert listed == ", ".join(f"{name} by {differences[name]:.3g}" for name in worst)


def test_a_verified_step_prints_and_logs_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wholestep.compile(verify=2)
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = square_step(model, optimizer, batch)
        print("done")
        logging.getLogger("step").warning("noted")
        return loss

    for _ in range(3):
        step(model, optimizer, torch.randn(4, 3))
    assert capsys.readouterr().out == "done\n" * 3
    assert [record.getMessage() for record in caplog.records if record.name == "step"] == ["noted"] * 3


def test_looking_closer_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference is looked into by running eager again; nobody asked for that."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(differential, "compare", lambda _expected, _found: {"weight": 1.0})

    @wholestep.compile(verify=1)
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = square_step(model, optimizer, batch)
        print("done")
        return loss

    with contextlib.suppress(VerificationError):
        step(model, optimizer, torch.randn(4, 3))
    assert capsys.readouterr().out == "done\n"
