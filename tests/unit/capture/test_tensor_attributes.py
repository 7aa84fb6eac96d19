"""Attributes that users give to parameters and tensors, and tensors as objects: compared, looked up, counted."""

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

X, Y = pair()


def parameter(world: World) -> Any:
    return world.model.first.weight


def stepping(change: Callable[[Any, Any], None]) -> Callable[[World], Callable[..., Tensor]]:
    """A step that hands the world's state and each parameter with its gradient to a function before it updates."""

    def make(world: World) -> Callable[..., Tensor]:
        state = world.state

        def step(model: nn.Module, optimizer: Optimizer, *_: Any) -> Tensor:
            optimizer.zero_grad()
            loss = (model(X) - Y).square().mean()
            loss.backward()
            for p in model.parameters():
                change(state, p)
            optimizer.step()
            return loss

        return step

    return make


def build() -> World:
    world = small_world()()
    world.state = SimpleNamespace(kept=parameter(world), by_parameter={}, ids=set(), seen=[])
    for p in world.model.parameters():
        p.scale = 2.0
        p.average = p.detach().clone()
        p.count = 0
        p.norms = []
    return world


def skip(_: Any, p: Any) -> None:
    if getattr(p, "skip", False):
        p.grad.zero_()


def scale_where_marked(_: Any, p: Any) -> None:
    if hasattr(p, "skip"):
        p.grad.mul_(3.0)


def set_skip(value: bool) -> Callable[[World], None]:
    return lambda world: setattr(parameter(world), "skip", value)


def scale_to(value: float) -> Callable[[World], None]:
    return lambda world: setattr(parameter(world), "scale", value)


READS: dict[str, tuple[Callable[[Any, Any], Any], list[Callable[[World], Any]]]] = {
    "a mark that comes and goes": (skip, [set_skip(True), set_skip(False), set_skip(True)]),
    "whether there is one": (
        scale_where_marked,
        [set_skip(False), lambda world: delattr(parameter(world), "skip")],
    ),
    "a number": (lambda _, p: p.grad.mul_(p.scale), [scale_to(3.0), scale_to(4.0), scale_to(5.0)]),
    "a number, by a getter": (lambda _, p: p.grad.mul_(operator.attrgetter("scale")(p)), [scale_to(3.0)]),
    "a tensor": (
        lambda _, p: p.grad.add_(p.average),
        [lambda world: parameter(world).average.zero_(), lambda world: setattr(parameter(world), "average", X[:5])],
    ),
    "of one kept elsewhere": (lambda s, p: p.grad.mul_(s.kept.scale), [scale_to(3.0), scale_to(4.0)]),
}


@pytest.mark.parametrize("kind", READS)
def test_an_attribute_is_read_at_each_call(kind: str) -> None:
    read, changes = READS[kind]
    twins = Twins(build, make=stepping(read))
    twins.step()
    for change in changes:
        twins.change(change)
        twins.step()
    assert twins.num_captures <= 3


def count(_: Any, p: Any) -> None:
    p.count += 1


def keep(_: Any, p: Any) -> None:
    p.last = p.grad.norm()
    p.norms.append(p.last)
    p.average.lerp_(p.detach(), 0.1)


def replace(_: Any, p: Any) -> None:
    p.average = p.average * 0.9 + p.detach() * 0.1
    if hasattr(p, "scale"):
        del p.scale


WRITES = {"a counter": count, "tensors": keep, "replaced": replace}


@pytest.mark.parametrize("kind", WRITES)
def test_an_attribute_is_written_at_each_call(kind: str) -> None:
    twins = Twins(build, make=stepping(WRITES[kind]))
    twins.steps(4)
    assert twins.num_captures <= 3


def test_hooks_read_and_write_attributes() -> None:
    def hooked() -> World:
        world = build()
        for p in world.model.parameters():
            p.register_hook(lambda gradient, p=p: gradient * p.scale)
            p.register_post_accumulate_grad_hook(count_and_keep)
        return world

    def count_and_keep(p: Any) -> None:
        p.count += 1
        p.norm = p.grad.norm()

    twins = Twins(hooked, mse_step, compare_kept=False)
    for value in (2.0, 3.0, 4.0):
        twins.change(scale_to(value))
        twins.step(X, Y)


def test_attributes_of_an_argument() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Any) -> Tensor:
        features.seen = getattr(features, "seen", 0) + 1
        return mse_step(model, optimizer, features, Y) * features.seen

    twins = Twins(small_world(), step, call=lambda world, step, seen: step(world.model, world.optimizer, marked(seen)))

    def marked(seen: int) -> Any:
        features: Any = X.clone()
        if seen:
            features.seen = seen
        return features

    for seen in (0, 0, 3, 4):
        twins.step(seen)


def test_attributes_of_a_tensor_elsewhere() -> None:
    def world_with_tensor() -> World:
        world = build()
        world.state.tensor = tensor = cast(Any, torch.ones(()))
        tensor.scale = 2.0
        return world

    def read(state: Any, p: Any) -> None:
        p.grad.mul_(state.tensor * state.tensor.scale)
        state.tensor.scale += 1

    twins = Twins(world_with_tensor, make=stepping(read))
    twins.steps(3)
    twins.change(lambda world: setattr(world.state.tensor, "scale", 0.5))
    twins.step()
    assert twins.num_captures <= 3


def set_on_gradient(_: Any, p: Any) -> None:
    p.grad.seen = True


def set_on_result(state: Any, p: Any) -> None:
    state.norm = p.grad.norm()
    state.norm.of = "gradient"


def double_if_found(state: Any, p: Any) -> None:
    if p in state.by_parameter:
        p.grad.mul_(2.0)


def double_if_kept(state: Any, p: Any) -> None:
    if state.kept is p:
        p.grad.mul_(2.0)


def scale_by_dict(_: Any, p: Any) -> None:
    p.grad.mul_(vars(p).get("scale", 1.0))


REFUSED: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "an attribute of a gradient": (set_on_gradient, "attribute 'seen'"),
    "an attribute of a result": (set_on_result, "attribute 'of'"),
    "a parameter as a key": (double_if_found, "looks for 'first.weight'"),
    "which parameter it is": (double_if_kept, "asks whether 'first.weight'"),
    "all attributes": (scale_by_dict, "__dict__ of a tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_answered_is_refused(kind: str) -> None:
    def world_with_key() -> World:
        world = build()
        world.state.by_parameter[parameter(world)] = 1
        return world

    change, message = REFUSED[kind]
    with pytest.raises(wholestep.CaptureError, match=message):
        Twins(world_with_key, make=stepping(change)).step()


def test_a_parameter_that_becomes_a_key() -> None:
    """Not found is an answer too, until somebody puts it there."""
    twins = Twins(build, make=stepping(double_if_found))
    twins.steps(2)
    assert twins.num_captures == 1
    twins.change(lambda world: world.state.by_parameter.update({parameter(world): 1}))
    with pytest.raises(wholestep.CaptureError, match=r"looks for 'first.weight'"):
        twins.step()


def test_parameters_by_their_id() -> None:
    def double_if_listed(state: Any, p: Any) -> None:
        if id(p) in state.ids or hash(p) in state.by_parameter:
            p.grad.mul_(2.0)

    model = small_world()().model
    ids: set[int] = set()
    state = SimpleNamespace(ids=ids, by_parameter={})
    seen: list[bool] = []

    def step(features: Tensor) -> Tensor:
        loss = model(features).square().sum()
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            double_if_listed(state, p)
        return loss

    compiled = wholestep.compile(step)
    for listed in ([], [model.first.weight], [model.first.weight, model.second.bias]):
        ids.clear()
        ids.update(map(id, listed))
        step(X)
        expected = [p.grad.clone() for p in model.parameters()]
        compiled(X)
        seen += [torch.equal(a, p.grad) for a, p in zip(expected, model.parameters())]
    assert all(seen)


def test_a_parameter_is_a_key_of_what_the_step_leaves() -> None:
    def keep_gradient(state: Any, p: Any) -> None:
        state.seen.append({p: p.grad.sum()})

    twins = Twins(build, make=stepping(keep_gradient))
    twins.steps(3)
    assert twins.num_captures == 1
    for world in twins.worlds:
        assert next(iter(world.state.seen[0])) is parameter(world)
