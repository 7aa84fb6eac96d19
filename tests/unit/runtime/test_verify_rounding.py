"""`verify=` in low precision: rounding passes, mistakes do not, and the message says where they come from."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, World, is_captured, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep
from wholestep.errors import VerificationError
from wholestep.graph import Phase, StepGraph
from wholestep.passes import Pass, base, register
from wholestep.runtime.rounding import unexplained
from wholestep.runtime.world import World as Everything
from wholestep.zoo import get

aten = torch.ops.aten
X, Y = pair()


@dataclass(frozen=True)
class Sabotage(Pass):
    """Scales the first gradient of the backward, or draws a number too many."""

    name: ClassVar[str] = "sabotage"
    factor: float = 1.0
    draws: bool = False

    def apply(self, graph: StepGraph) -> StepGraph:
        if self.draws:
            first = next(graph.calls())
            graph.insert(aten.rand.default, ([3],), like=first, before=first).meta["effect"] = -1
            return graph
        gradient = next(node for node in graph.calls(Phase.BACKWARD) if "mm" in str(node.target))
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


def gpt(kind: str) -> tuple[World, Any]:
    """A small GPT in one of the ways to train in low precision, and its step."""
    case = get("gpt")
    torch.manual_seed(0)
    model = case.build().to(torch.float32 if kind == "autocast" else torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()] if kind == "masters" else None
    optimizer = AdamW(model.parameters() if masters is None else masters, lr=1e-3, fused=True)

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        model.zero_grad()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            loss = case.loss(model, batch)
        loss.backward()
        owned = optimizer.param_groups[0]["params"]
        if kind == "masters":
            for parameter, master in zip(model.parameters(), owned, strict=True):
                master.grad = parameter.grad.float()  # pyright: ignore[reportOptionalMemberAccess]
        optimizer.step()
        if kind == "masters":
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), owned, strict=True):
                    parameter.copy_(master)
        return loss

    return World(model=model, optimizer=optimizer, batch=case.make_batch(4, 0)), step


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bfloat16", "autocast", "masters"])
def test_sums_in_another_order_are_rounding(kind: str) -> None:
    """A loss in chunks: in low precision it differs by more than the dtype's default tolerance."""
    world, step = gpt(kind)
    compiled: Any = wholestep.compile(step, chunk_loss=3, verify=2)
    for _ in range(2):
        compiled(world.model, world.optimizer, world.batch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bfloat16", "autocast", "masters"])
def test_a_wrong_gradient_is_found_in_low_precision(kind: str) -> None:
    world, step = gpt(kind)
    before = [p.detach().clone() for p in world.model.parameters()]
    dtypes = [p.dtype for p in world.model.parameters()]
    compiled: Any = wholestep.compile(step, passes="sabotage{factor=1.5}", verify=1)
    with pytest.raises(VerificationError, match="the first op that differs is mul") as caught:
        compiled(world.model, world.optimizer, world.batch)
    assert any(name.startswith("grad.") for name in caught.value.differences)
    assert [p.dtype for p in world.model.parameters()] == dtypes
    assert all(torch.equal(p, old) for p, old in zip(world.model.parameters(), before, strict=True))


class Dropping(SmallNet):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.dropout(features, 0.5))


def test_other_random_numbers_are_the_cause() -> None:
    world = small_world(Dropping)()
    with pytest.raises(VerificationError, match=r"is bernoulli .*: it draws other random numbers") as caught:
        wholestep.compile(mse_step, passes="sabotage{draws=true}", verify=1)(world.model, world.optimizer, X, Y)
    assert "rng" in caught.value.differences


class TwoFaced(nn.Module):
    """Attention by another way while it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        heads = features.view(1, 1, *features.shape)
        if not is_captured():
            attended = F.scaled_dot_product_attention(heads, heads, heads)
        else:
            attended = heads + 1
        return self.project(attended.view_as(features))


def test_another_attention_path_is_the_cause() -> None:
    world = small_world(TwoFaced)()
    with pytest.raises(VerificationError, match="attention takes another path: none of its own, in eager _scaled_dot"):
        wholestep.compile(mse_step, verify=1)(world.model, world.optimizer, X.clone().requires_grad_(), Y)


def test_generators_of_python_and_numpy_are_compared_and_put_back() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        if not is_captured():
            random.random()
            np.random.rand()
        return mse_step(model, optimizer, features, targets)

    world = small_world()()
    python, numpy = random.getstate(), np.random.get_state()[1].tobytes()  # pyright: ignore
    with pytest.raises(VerificationError) as caught:
        wholestep.compile(step, verify=1)(world.model, world.optimizer, X, Y)
    assert set(caught.value.differences) == {"random.getstate()", "numpy.random.get_state()"}
    assert random.getstate() == python
    assert np.random.get_state()[1].tobytes() == numpy  # pyright: ignore


def test_what_else_a_step_changes_can_be_put_back() -> None:
    class Counter:
        count = 0

        def look(self) -> dict[str, Any]:
            return {"count": self.count}

        def keep(self) -> Any:
            kept = self.count
            return lambda: setattr(self, "count", kept)

    world, counter = small_world()(), Counter()
    step = wholestep.compile(mse_step)
    step(world.model, world.optimizer, X, Y)
    call = (world.model, world.optimizer, X, Y)
    from wholestep.runtime.guards import Call

    everything = Everything.of(step.captured, Call.of(mse_step, call, {}), [counter])
    counter.count += 1
    everything.restore()
    assert counter.count == 0


def test_rounding_is_held_against_eagers_own_error() -> None:
    exact = torch.linspace(1, 2, 7, dtype=torch.float64)
    eager = exact.bfloat16()
    error = (eager.double() - exact).abs().max().item()
    near, far = (eager.double() + scale * max(error, 2 * 2**-7) for scale in (4.0, 20.0))
    values = {"near": near.bfloat16(), "far": far.bfloat16()}
    differences = dict.fromkeys(values, 1.0)
    found = unexplained(differences, dict.fromkeys(values, eager), values, dict.fromkeys(values, exact))
    assert set(found) == {"far"}
