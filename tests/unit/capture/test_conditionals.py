"""`torch.cond` in a step: one node that runs the branch that is taken, forward and backward, with eager's bits."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, small_world
from torch import Tensor, nn

import wholestep
from wholestep._branches_torch import loops
from wholestep.capture.conditionals import Branches

# In eager torch compiles the call, and warns of what it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::UserWarning:torch")
Loss = Callable[[Any, Tensor], Any]


def step_of(loss_of: Loss) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, features).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batches(number: int, size: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, 4, generator=generator) for _ in range(number)]


class Pair(Twins):
    """Twins of which eager's parameters bear no mark of the compiler that `torch.cond` runs through there."""

    def _look(self, side: int) -> Any:
        for parameter in self.worlds[side].model.parameters():
            vars(parameter).pop("_dynamo_static_input_type", None)
        return super()._look(side)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right = ctx.saved_tensors
        return gradient @ right.t(), left.t() @ gradient


def middle(model: Any, features: Tensor) -> Tensor:
    return model.first(features)


def used_elsewhere(model: Any, features: Tensor) -> Tensor:
    hidden = middle(model, features)
    chosen = torch.cond(hidden.sum() > 0, lambda y: model.second(y).sin(), lambda y: y[:, :3].exp(), (hidden,))
    return chosen + hidden[:, :3] * model(features)


def operand_and_closure(model: Any, features: Tensor) -> Tensor:
    hidden = middle(model, features)
    return torch.cond(hidden.sum() > 0, lambda a: a * hidden.sin() + 1, lambda a: a + 2 * hidden, (hidden,))


def structured(model: Any, features: Tensor) -> Tensor:
    one, rest = torch.cond(
        features.sum() > 0,
        lambda y: (model(y).sin(), {"a": model(y).cos()}),
        lambda y: (model(y) + 1, {"a": model(y) + 2}),
        (features,),
    )
    return one * rest["a"]


def changed_afterwards(model: Any, features: Tensor) -> Tensor:
    chosen = torch.cond(features.sum() > 0, lambda y: model(y).sin(), lambda y: model(y) * 2, (features,))
    return chosen.mul_(2) * chosen


def chained(model: Any, features: Tensor) -> Tensor:
    hidden = middle(model, features)
    hidden = torch.cond(hidden.sum() > 0, lambda y: y.sin(), lambda y: y.tanh(), (hidden,))
    return torch.cond(hidden.mean() > 0, lambda: model.second(hidden), lambda: model.second(hidden * 2))


LOSSES: dict[str, Loss] = {
    "a model in both": lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y).sin(), lambda y: m(y).cos(), (x,)),
    "layers in one each": lambda m, x: torch.cond(
        x.sum() > 0, lambda y: m.first(y).sin(), lambda y: y.sum(1, keepdim=True) * m.second.weight.sum(0), (x,)
    ),
    "a flag of floats": lambda m, x: torch.cond(x[0, 0].round(), lambda y: m(y), lambda y: m(y) + 1, (x,)),
    "a plain flag": lambda m, x: torch.cond(x.shape[0] > 3, lambda y: m(y), lambda y: m(y) + 1, (x,)),
    "not a number in the other": lambda m, x: torch.cond(
        m(x).sum() > 0, lambda y: m(y).abs().sqrt(), lambda y: (m(y) - 1e3).log().nan_to_num() * 0 + m(y), (x,)
    ),
    "losses": lambda m, x: torch.cond(
        x.sum() > 0, lambda y: F.mse_loss(y, x[:, :3]), lambda y: F.l1_loss(y, x[:, :3]), (m(x),)
    ),
    "modules": lambda m, x: torch.cond(x.sum() > 0, m.second, lambda y: F.softmax(m.second(y), -1), (middle(m, x),)),
    "changed in it": lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y).sin().add_(1), lambda y: m(y) * 2, (x,)),
    "detached": lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y).detach(), lambda y: m(y) * 2, (x,)),
    "weights as operands": lambda m, x: torch.cond(
        x.sum() > 0, lambda a, w: m.first(a) @ w.t(), lambda a, w: m.first(a)[:, :3] + w.sum(), (x, m.second.weight)
    ),
    "used elsewhere": used_elsewhere,
    "structured": structured,
    "changed afterwards": changed_afterwards,
    "chained": chained,
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES.keys())
def test_branches_are_one_node_with_the_bits_of_eager(loss_of: Loss) -> None:
    twins = Pair(small_world(), step_of(loss_of))
    for features in batches(4):
        twins.step(features)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 0)


def test_the_other_branch_is_not_computed() -> None:
    step = step_of(LOSSES["a model in both"])
    world = small_world()()
    compiled = wholestep.compile(step, verify=1)
    for features in batches(2):
        compiled(world.model, world.optimizer, features)
    targets = [node.target for node in compiled.graph.calls() if isinstance(node.target, Branches)]
    assert len(targets) == 2  # forward and backward
    assert not [node for node in compiled.graph.calls() if "sin" in str(node.target) or "cos" in str(node.target)]


def test_within_a_memory_budget() -> None:
    twins = Pair(small_world(), step_of(used_elsewhere), memory_budget="1GiB")
    for features in batches(3):
        twins.step(features)


def test_sizes_are_captured_apart() -> None:
    twins = Pair(small_world(), step_of(LOSSES["a model in both"]))
    for size in (3, 4, 5, 3):
        twins.step(*batches(1, size))
    assert twins.num_captures == 3


REFUSED: dict[str, tuple[Loss, str]] = {
    "a draw": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: F.dropout(m(y)), lambda y: m(y), (x,)),
        "has a branch that draws, or looks at a value",
    ),
    "a look": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y) * y.sum().item(), lambda y: m(y), (x,)),
        "has a branch that draws, or looks at a value",
    ),
    "one in another": (
        lambda m, x: torch.cond(
            x.sum() > 0,
            lambda y: torch.cond(y[0, 0] > 0, lambda z: m(z), lambda z: m(z) * 2, (y,)),
            lambda y: m(y),
            (x,),
        ),
        "uses a trained tensor where nobody sees it",
    ),
    "a function": (
        lambda m, x: torch.cond(
            x.sum() > 0, lambda y: Product.apply(y.t(), m.first.weight), lambda y: y.t() @ m.first.weight, (x,)
        ),
        "uses a trained tensor where nobody sees it",
    ),
    "operand and closure": (operand_and_closure, "uses under several names"),
    "operand twice": (
        lambda m, x: torch.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: a + b, (y := m(x), y)),
        "uses under several names",
    ),
    "other strides": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: (y @ y.t()).sum(0), lambda y: y.sum(1) * 2, (m(x),)),
        "gradients lie in memory in different ways",
    ),
}


@pytest.mark.parametrize(("loss_of", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_held_is_refused_by_name(loss_of: Loss, words: str) -> None:
    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=words) as caught:
        wholestep.compile(step_of(loss_of))(world.model, world.optimizer, *batches(1))
    assert caught.value.message.startswith("torch.cond() ")
    assert caught.value.advice is not None


def test_loops_are_refused_by_name() -> None:
    loop = next(one for one in loops() if one.__name__ == "while_loop")
    step = step_of(lambda m, x: m(loop(lambda n, y: n < 3, lambda n, y: (n + 1, y.sin()), (torch.tensor(0), x))[1]))
    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=r"calls torch's while_loop\(\)"):
        wholestep.compile(step)(world.model, world.optimizer, *batches(1))


def _appending(model: nn.Module, features: Tensor) -> Tensor:
    def keep(y: Tensor) -> Tensor:
        KEPT.append(1)
        return model(y)

    return torch.cond(features.sum() > 0, keep, lambda y: model(y), (features,))


KEPT: list[int] = []
WRONG: dict[str, tuple[Loss, str]] = {
    "no tensor": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y), lambda y: 3, (x,)),
        "a branch of torch.cond() returns something else than tensors it has computed",
    ),
    "a tuple and a list": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: (m(y), y * 2), lambda y: [m(y), y * 2], (x,))[0],
        "the branches of torch.cond() return different structures",
    ),
    "other shapes": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y), lambda y: m(y)[:1], (x,)).sum(),
        "the branches of torch.cond() return tensors of different forms",
    ),
    "an append": (lambda m, x: _appending(m, x), "prints, draws from Python or writes to objects"),
    "an operand returned": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: y, lambda y: y * 2, (m(x),)),
        "a branch of torch.cond() returns memory from outside, or twice the same",
    ),
    "two flags": (
        lambda m, x: torch.cond(x > 0, lambda y: m(y), lambda y: m(y) * 2, (x,)),
        "torch.cond() raises for these arguments",
    ),
}


@pytest.mark.parametrize(("loss_of", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_torch_does_not_take_either_is_told_where_eager_cannot_run(loss_of: Loss, words: str) -> None:
    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=re.escape(words)) as caught:
        wholestep.compile(step_of(loss_of), memory_budget=1.0)(world.model, world.optimizer, *batches(1))
    assert caught.value.advice is not None


EAGERS: dict[str, Loss] = {
    "an operand returned": lambda m, x: torch.cond(x.sum() > 0, lambda y: y, lambda y: y * 2, (m(x),)),
    "other forms": lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y).sum(), lambda y: m(y), (x,)),
    "an operand written": lambda m, x: torch.cond(x.sum() > 0, lambda y: m(y.add_(1)), lambda y: m(y), (x,)),
    "two flags": lambda m, x: torch.cond(x[0] > 0, lambda y: m(y), lambda y: m(y) * 2, (x,)),
    "an object written": _appending,
}


@pytest.mark.parametrize("loss_of", EAGERS.values(), ids=EAGERS.keys())
def test_errors_are_those_of_eager(loss_of: Loss) -> None:
    raised: list[Exception] = []
    step = step_of(loss_of)
    for run in (step, wholestep.compile(step)):
        world: World = small_world()()
        with pytest.raises(Exception) as caught:
            run(world.model, world.optimizer, *batches(1))
        raised.append(caught.value)
    assert type(raised[0]) is type(raised[1])


def test_a_value_changed_in_place_that_the_backward_needs_is_eagers_error() -> None:
    def loss_of(model: nn.Module, features: Tensor) -> Tensor:
        powers = model(features).exp()
        powers.add_(1)
        return powers

    step = step_of(loss_of)
    for run in (step, wholestep.compile(step)):
        world = small_world()()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            run(world.model, world.optimizer, *batches(1))
        assert not isinstance(caught.value, wholestep.CaptureError)
