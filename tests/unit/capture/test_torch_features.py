"""What torch offers beside plain modules: compiled and scripted code, parametrizations, views of other kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences
from tests.twins import SmallNet, Twins, World, mse_step, observe, pair, small_world
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer

import wholestep

Step = Callable[..., Any]
X, Y = pair()


def trained(loss: Tensor, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def bounded() -> nn.Module:
    layer = nn.Linear(4, 3)
    parametrize.register_parametrization(layer, "weight", Tanh())
    return layer


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))),
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))),
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))),
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3))),
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 3))),
        lambda: nn.Sequential(bounded()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_parametrized_parts(make_model: Callable[[], nn.Module]) -> None:
    twins = Twins(small_world(make_model), mse_step)
    for features, targets in (pair(seed=0), pair(seed=1), pair(seed=2)):
        twins.step(features, targets)
    assert twins.num_captures == 1


@pytest.mark.filterwarnings("ignore")
def test_compiled_parts() -> None:
    """Eager leaves notes of torch's on what it compiles: compared is what is trained."""
    worlds = [small_world(compiled_part)() for _ in range(2)]
    worlds[1].model.load_state_dict(worlds[0].model.state_dict())
    steps: list[Step] = [mse_step, wholestep.compile(mse_step)]
    for _ in range(3):
        losses = [step(world.model, world.optimizer, X, Y) for step, world in zip(steps, worlds, strict=True)]
        assert torch.equal(*losses)
        values = [{**observe(World(state=world.model.state_dict()))} for world in worlds]
        assert differences(*values) == []


def compiled_part() -> nn.Module:
    part: Any = torch.compile(nn.Linear(4, 5), backend="eager", fullgraph=True)
    return nn.Sequential(part, nn.Tanh(), nn.Linear(5, 3))


SCALE = {0: 2.0}


@torch.compile(backend="eager", fullgraph=True)
def compiled_helper(hidden: Tensor) -> Tensor:
    return hidden.sin() * SCALE[0]


def shifted(hidden: Tensor) -> Tensor:
    return hidden.cos() + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_helper = torch.jit.script(shifted)


def with_helpers(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    return trained(F.mse_loss(compiled_helper(scripted_helper(model(features))), targets), optimizer)


@pytest.mark.filterwarnings("ignore")
def test_compiled_and_scripted_helpers_are_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled one reads is guarded like what others read."""
    twins = Twins(small_world(), with_helpers)
    twins.steps(3, X, Y)
    assert twins.num_captures == 1
    monkeypatch.setitem(SCALE, 0, 3.0)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_a_compiled_helper_compiles_after_the_capture_as_before() -> None:
    world = small_world()()
    wholestep.compile(with_helpers)(world.model, world.optimizer, X, Y)
    torch._dynamo.reset()
    compiled_helper(X)
    assert torch._dynamo.eval_frame._debug_get_cache_entry_list(compiled_helper._torchdynamo_orig_callable.__code__)


@pytest.mark.parametrize("convert", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torch_jit_are_refused_by_name(convert: Callable[[nn.Module], nn.Module]) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = convert(nn.Linear(4, 3))

        def forward(self, features: Tensor) -> Tensor:
            return self.part(features)

    world = small_world(Holder)()
    with pytest.raises(wholestep.CaptureError, match=r":\d+: 'model.part' is a module of torch.jit.*Train the plain"):
        wholestep.compile(mse_step)(world.model, world.optimizer, X, Y)


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "view"),
    [
        (torch.float32, torch.view_as_complex),
        (torch.float32, lambda w: w[1:, 1:].view(torch.int32)),
        (torch.float32, lambda w: w[1:].view(torch.int16)),
        (torch.float32, torch._neg_view),  # pyright: ignore[reportPrivateImportUsage]
        (torch.float32, lambda w: w.unsafe_chunk(2)[1]),
        (torch.float32, lambda w: w.unsafe_split_with_sizes([2, 3])[0]),
        (torch.complex64, torch.conj),
        (torch.complex64, lambda w: w.mH),
        (torch.complex64, lambda w: w.conj().imag),
        (torch.complex64, torch.view_as_real),
    ],
)
def test_views_of_parameters_that_are_returned(dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> None:
    """They show the memory of the parameter, also after the update."""

    def step(model: Weight, optimizer: Optimizer) -> tuple[Tensor, Tensor]:
        loss = trained(model.weight.abs().square().sum(), optimizer)
        return loss, view(model.weight.detach())

    def early(model: Weight, optimizer: Optimizer) -> tuple[Tensor, Tensor]:
        seen = view(model.weight.detach())
        return trained(model.weight.abs().square().sum(), optimizer), seen

    for function in (step, early):
        build = small_world(lambda: Weight(dtype), lambda p: torch.optim.SGD(p, lr=0.1))
        twins = Twins(build, function)
        twins.steps(3)
        assert twins.num_captures == 1


class Scaled(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * self.scale


def test_a_truth_value_as_index() -> None:
    """`Rprop` does so with parameters that are one number."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        factor = loss.detach().clone()
        factor[factor > 1.0] = 0.5
        factor[factor.isnan()] = 0
        return trained(loss * factor, optimizer)

    def build() -> World:
        model = Scaled()
        return World(model=model, optimizer=torch.optim.Rprop(model.parameters()))

    twins = Twins(build, step)
    for seed in range(4):
        twins.step(*pair(seed=seed))
    assert twins.num_captures == 1


def closes(model: nn.Module, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        return loss

    return optimizer.step(closure)


def test_lbfgs_is_refused_by_name_and_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    world = small_world(make_optimizer=torch.optim.LBFGS)()
    with pytest.raises(wholestep.CaptureError, match=r":\d+: LBFGS.step\(\) depends on a value.*on_refusal='eager'"):
        wholestep.compile(closes)(world.model, world.optimizer, X, Y)
    twins = Twins(small_world(make_optimizer=torch.optim.LBFGS), closes, on_refusal="eager")
    twins.steps(2, X, Y)
    assert "LBFGS.step()" in caplog.text
