"""What a step returns and leaves behind: the right values, in memory of their own."""

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences
from tests.twins import SmallNet, Twins, World, adam, mse_step, observe, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep import CaptureError

X, Y = pair()
OTHER_X, OTHER_Y = pair(seed=1)
PASSES = [None, "", "simplify", "cse"]


class Metrics(NamedTuple):
    loss: Tensor
    count: int


@dataclasses.dataclass
class Report:
    loss: Tensor
    steps: int
    details: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Tensor


def test_nested_metrics() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        counts: defaultdict[str, Any] = defaultdict(int, seen=loss)
        return {
            "loss": loss,
            "tuple": (loss * 2, None),
            "named": Metrics(loss, 3),
            "report": Report(loss, 2, {"list": [loss, 1.5, "text", True, None]}),
            "frozen": Frozen(loss),
            "ordered": OrderedDict(b=loss, a=1),
            "default": counts,
            "empty": [(), {}, []],
            "size": features.shape[0],
            "dtype": features.dtype,
            "device": features.device,
        }

    twins = Twins(small_world(), step)
    for batch in ((X, Y), (OTHER_X, OTHER_Y), (X, Y)):
        twins.step(*batch)
    assert twins.num_captures == 1


def test_a_shape() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), features.shape

    Twins(small_world(), step).steps(2, X, Y)


def test_nothing() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> None:
        mse_step(model, optimizer, features, targets)

    Twins(small_world(), step).steps(2, X, Y)


def test_the_output_carries_no_history() -> None:
    twins = Twins(small_world(), mse_step)
    loss = twins.step(X, Y)
    assert not loss.requires_grad
    assert loss.grad_fn is None


def test_an_argument() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), features, {"targets": targets}

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    twins.step(OTHER_X, OTHER_Y)


def test_views_and_copies_of_arguments() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        return loss, features[0], targets.t(), features.clone(), targets.detach()

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    twins.step(OTHER_X, OTHER_Y)
    assert twins.num_captures == 1


def test_the_learning_rate() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), optimizer.param_groups[0]["lr"]

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.5))
    twins.step(X, Y)


def test_a_number_computed_from_the_learning_rate() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), optimizer.param_groups[0]["lr"] * 2

    twins = Twins(small_world(), step)
    twins.step(X, Y)
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.5))
    assert twins.step(X, Y)[1] == 1.0


def test_parameters_are_the_models_own() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), model.first.weight, list(model.parameters())

    twins = Twins(small_world(), step)
    twins.steps(2, X, Y)
    _, weight, parameters = twins.step(X, Y)
    assert weight is twins.worlds[1].model.first.weight
    assert all(map(lambda a, b: a is b, parameters, twins.worlds[1].model.parameters()))


@pytest.mark.parametrize("passes", [None, "simplify,cse,dce,reinplace"])
def test_views_of_parameters_follow_them(passes: str | None) -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        weight = model.first.weight
        before = weight.detach()
        loss = mse_step(model, optimizer, features, targets)
        return loss, before, weight[0], weight.t(), weight.detach().view(-1)[3:]

    Twins(small_world(), step, passes=passes).steps(3, X, Y)


@pytest.mark.parametrize("passes", PASSES)
def test_clones_of_parameters_buffers_gradients_and_state(passes: str | None) -> None:
    def step(model: nn.Sequential, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        weight, mean = model.get_parameter("1.weight"), model.get_buffer("0.running_mean")
        before = (weight.detach().clone(), mean.clone())
        loss = mse_step(model, optimizer, features, targets)
        state = optimizer.state[weight]
        assert weight.grad is not None
        after = (weight.clone(), mean.clone(), weight.grad.clone(), weight[0].detach().clone())
        return loss, before, after, state["exp_avg"].clone(), state["step"].clone()

    def make_model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    Twins(small_world(make_model, adam), step, passes=passes).steps(4, X, Y)


@pytest.mark.parametrize("passes", PASSES)
def test_values_of_a_parameter_that_changes_several_times(passes: str | None) -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        seen: list[Tensor] = []
        for factor in (2.0, 0.5, -1.0):
            seen.append(model.first.weight.detach().clone())
            with torch.no_grad():
                model.first.weight.mul_(factor)
        return loss, seen

    Twins(small_world(), step, passes=passes).steps(3, X, Y)


def test_gradients_are_the_parameters_own() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        return loss, [parameter.grad for parameter in model.parameters()]

    twins = Twins(small_world(), step)
    twins.steps(2, X, Y)
    _, gradients = twins.step(X, Y)
    for gradient, parameter in zip(gradients, twins.worlds[1].model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_a_buffer_rebound_in_the_forward() -> None:
    class Counting(SmallNet):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, features: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().forward(features)

    def step(model: Counting, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return mse_step(model, optimizer, features, targets), model.count

    Twins(small_world(Counting), step).steps(3, X, Y)


# Memory


class TwoBiases(nn.Module):
    """Two parameters whose gradients are always equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) + self.first + self.second


def storages(tensors: list[Tensor | None]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("passes", ["", "simplify", "simplify,dce,reinplace"])
def test_equal_gradients_have_memory_of_their_own(passes: str) -> None:
    twins = Twins(small_world(TwoBiases), mse_step, passes=passes)
    twins.steps(2, X, Y)
    used = storages([parameter.grad for parameter in twins.worlds[1].model.parameters()])
    assert len(set(used)) == len(used) == 3


def test_equal_gradients_have_memory_of_their_own_after_cse() -> None:
    twins = Twins(small_world(TwoBiases), mse_step)
    twins.steps(2, X, Y)
    used = storages([parameter.grad for parameter in twins.worlds[1].model.parameters()])
    assert len(set(used)) == len(used) == 3


def test_equal_gradients_accumulate() -> None:
    def step(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        return loss

    twins = Twins(small_world(TwoBiases), step, call=lambda world, step, *args: step(world.model, *args))
    twins.steps(3, X, Y)


def test_equal_gradients_clipped_outside_the_step() -> None:
    twins = Twins(small_world(TwoBiases), mse_step)
    twins.step(X, Y)
    twins.change(lambda world: nn.utils.clip_grad_value_(world.model.parameters(), 1e9))
    twins.change(lambda world: [parameter.grad.mul_(0.5) for parameter in world.model.parameters()])
    assert differences(*map(observe, twins.worlds)) == []


def test_equal_outputs_have_memory_of_their_own() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        return loss.detach().clone(), loss.detach().clone()

    twins = Twins(small_world(), step)
    first, second = twins.step(X, Y)
    assert len(set(storages([first, second]))) == 2


def test_outputs_share_no_memory_with_what_the_step_keeps() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        weight = model.first.weight
        assert weight.grad is not None
        return loss, weight.grad.clone(), weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()

    twins = Twins(small_world(make_optimizer=adam), step)
    twins.steps(2, X, Y)
    outputs = twins.step(X, Y)
    world = twins.worlds[1]
    kept = [*world.model.parameters(), *(parameter.grad for parameter in world.model.parameters())]
    kept += [value for state in world.optimizer.state.values() for value in state.values()]
    assert not set(storages(list(outputs))) & set(storages(kept))
    for output in outputs:
        output.fill_(7)
    assert differences(*map(observe, twins.worlds)) == []


def test_optimizer_state_shares_no_memory() -> None:
    twins = Twins(small_world(TwoBiases, adam), mse_step)
    twins.steps(2, X, Y)
    state = [value for entries in twins.worlds[1].optimizer.state.values() for value in entries.values()]
    assert len(state) == 9
    assert len(set(storages(state))) == 9


def test_parameters_state_and_buffers_keep_their_storage() -> None:
    class Normalised(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def tensors(world: World) -> list[Tensor | None]:
        state = [value for entries in world.optimizer.state.values() for value in entries.values()]
        return [*world.model.parameters(), *world.model.buffers(), *state]

    twins = Twins(small_world(Normalised), mse_step)
    twins.step(X, Y)
    before = storages(tensors(twins.worlds[1]))
    twins.steps(3, X, Y)
    assert storages(tensors(twins.worlds[1])) == before


def test_a_buffer_that_shares_memory_with_another_is_refused_only_if_written() -> None:
    class Viewing(SmallNet):
        whole: Tensor
        part: Tensor

        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes
            self.register_buffer("whole", torch.ones(8))
            self.register_buffer("part", self.whole[:4])

        def forward(self, features: Tensor) -> Tensor:
            if self.writes:
                self.whole.add_(1)
            return super().forward(features + self.part + self.whole[4:])

    Twins(small_world(lambda: Viewing(False)), mse_step).steps(2, X, Y)
    with pytest.raises(ValueError, match=r"buffer\.whole and buffer\.part share memory.*Clone one of the two"):
        Twins(small_world(lambda: Viewing(True)), mse_step).step(X, Y)


def test_a_shared_buffer_written_in_place() -> None:
    class Sharing(SmallNet):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.first.register_buffer("count", self.count)

        def forward(self, features: Tensor) -> Tensor:
            self.count.add_(1)
            return super().forward(features + self.first.get_buffer("count"))

    Twins(small_world(Sharing), mse_step).steps(3, X, Y)


def test_a_shared_buffer_rebound_under_one_name() -> None:
    class Sharing(SmallNet):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.first.register_buffer("count", self.count)

        def forward(self, features: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().forward(features + self.first.get_buffer("count"))

    with pytest.raises(CaptureError, match="the step replaces buffer 'count'"):
        Twins(small_world(Sharing), mse_step).step(X, Y)


def test_a_buffer_that_starts_as_none() -> None:
    class Filling(SmallNet):
        mean: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, features: Tensor) -> Tensor:
            mean = features.detach().mean()
            self.mean = mean if self.mean is None else self.mean * 0.9 + mean
            return super().forward(features)

    twins = Twins(small_world(Filling), mse_step)
    twins.steps(4, X, Y)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 1)  # eager makes it


def test_a_buffer_that_grows_is_refused() -> None:
    class Growing(SmallNet):
        history: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("history", torch.zeros(1))

        def forward(self, features: Tensor) -> Tensor:
            self.history = torch.cat([self.history, features.detach().mean()[None]])
            return super().forward(features)

    with pytest.raises(ValueError, match="replaces buffer 'history' by something of another shape"):
        Twins(small_world(Growing), mse_step).step(X, Y)
