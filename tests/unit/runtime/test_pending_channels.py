"""Readers that ask no torch function, things that must not notice that updates wait, and when they must not (P3-P6)."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.waiting import WORDS, Pair, Side, X, is_pending
from torch import Tensor, nn
from torch._C import _to_dlpack as to_dlpack  # what torch.utils.dlpack has under another name
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from wholestep.errors import WholestepError
from wholestep.runtime import held

pytestmark = pytest.mark.usefixtures("nothing_waits")


def _unasked(function: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return function()


def _step_of(side: Side) -> Tensor:
    return side.optimizer.state[side.parameters[0]]["step"]


def _moment_of(side: Side) -> Tensor:
    return side.optimizer.state[side.parameters[0]]["exp_avg"]


def _set_data(side: Side) -> Tensor:
    other = torch.empty(5, 4)
    other.data = side.parameters[0]
    return other.detach()


def _swapped(side: Side) -> Tensor:
    other = nn.Parameter(torch.ones(5, 4))
    torch.utils.swap_tensors(side.parameters[0], other)
    return other.detach()


def _jitted(side: Side, compile: Callable[[nn.Module], Any]) -> Tensor:
    return compile(side.model.first)(X).detach()


# How somebody who holds a parameter, or a tensor of the optimizer's state, may come to its values.
CHANNELS: dict[str, Callable[[Side], Any]] = {
    "torch.tensor([step])": lambda s: torch.tensor([_step_of(s)]),
    "numpy.array([step])": lambda s: torch.from_numpy(numpy.array([_step_of(s)])),
    "torch.full": lambda s: torch.full((2,), _step_of(s)),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "alpha": lambda s: torch.add(torch.ones(2), 1, alpha=_step_of(s)),  # pyright: ignore[reportArgumentType]
    "index": lambda s: list(range(999))[int(_step_of(s))],
    "new_tensor": lambda s: torch.zeros(1).new_tensor(_moment_of(s)),
    "as_subclass": lambda s: s.parameters[0].as_subclass(Tensor).detach(),
    "to_dlpack": lambda s: torch.from_dlpack(to_dlpack(s.model.first.weight.detach())),
    "__dlpack__": lambda s: torch.from_dlpack(_moment_of(s)),
    "nested": lambda s: torch.nested.nested_tensor([s.parameters[0]], layout=torch.jagged)[0].detach(),
    "t.data = p": _set_data,
    "jit.trace": lambda s: _jitted(s, lambda module: torch.jit.trace(module, X)),
    "func.grad": lambda s: torch.func.grad(lambda p: p.square().sum())(s.parameters[0]),
    "func.vjp": lambda s: torch.func.vjp(lambda p: p.square().sum(), s.parameters[0])[0].detach(),
    "nn.Parameter": lambda s: nn.Parameter(s.parameters[0]).detach(),
    "nn.Parameter of a fetched one": lambda s: nn.Parameter(s.model.first.weight).detach(),
    "type": lambda s: type(s.model.first.weight).__name__,
    "types": lambda s: [type(parameter).__name__ for parameter in s.model.parameters()],
    "a mode": lambda s: _under_a_mode(s),
    "unasked: arithmetic": lambda s: _unasked(lambda: s.parameters[0] + 1).detach(),
    "unasked: evaluation": lambda s: _unasked(lambda: s.model(X, WORDS)).detach(),
    "unasked: data": lambda s: _unasked(lambda: s.parameters[0].data.clone()),
    "unasked: data, read later": lambda s: _unasked(lambda: s.parameters[0].data).clone(),
    "unasked: data, part of it": lambda s: _unasked(lambda: s.parameters[0].data)[1:3, 1].clone(),
    "unasked: numpy": lambda s: torch.from_numpy(_unasked(lambda: _moment_of(s).numpy()).copy()),
    "unasked: storage": lambda s: _unasked(lambda: _moment_of(s).untyped_storage().tolist()),
    "unasked: address": lambda s: _unasked(lambda: int(_moment_of(s).data_ptr() != 0)),
    "unasked: gradient": lambda s: _unasked(lambda: s.parameters[0].grad).clone(),
    "unasked: deepcopy": lambda s: _unasked(lambda: copy.deepcopy(s.parameters[0])).detach(),
    "operator": lambda s: torch.ops.aten.mul.Tensor(s.parameters[0], 2).detach(),
    # It gives modules a new attribute, so that the step is captured again; hence last.
    "jit.script": lambda s: _jitted(s, torch.jit.script),
}


def _under_a_mode(side: Side) -> Tensor:
    with FlopCounterMode(display=False):
        return side.model(X, WORDS).detach()


@pytest.fixture(scope="module")
def shared_pair() -> Pair:
    return Pair("adamw")


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CHANNELS)
def test_nobody_reads_an_old_value(name: str, shared_pair: Pair) -> None:
    shared_pair.steps(2)
    assert is_pending(shared_pair.ours)
    shared_pair.both(lambda model, _: CHANNELS[name](next(s for s in shared_pair.sides if s.model is model)))
    shared_pair.steps(2)
    shared_pair.assert_same()


def test_tensors_are_swapped_with_their_updates() -> None:
    pair = Pair("sgd")
    pair.steps(2)
    pair.both(lambda model, _: _swapped(next(side for side in pair.sides if side.model is model)))
    pair.steps(2)
    pair.assert_same()


def test_what_cannot_be_seen_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ that is given a parameter asks for its address; if no thread may be about to read there, it has none."""
    monkeypatch.setattr(held, "is_only_thread", lambda: True)
    pair = Pair()
    pair.steps(3)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        to_dlpack(pair.ours.parameters[0])
    assert is_pending(pair.ours)
    pair.steps(2)
    pair.assert_same()


def _compiled(look: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(look, fullgraph=True, backend="eager")


def test_a_whole_graph_is_compiled_of_a_parameter_held_before() -> None:
    """Torch's tracer would look into what applies an update."""
    pair = Pair("sgd")
    torch._dynamo.reset()
    weights = [side.parameters[0] for side in pair.sides]
    looks = [_compiled(lambda weight=weight: X @ weight.t()) for weight in weights]
    for _ in range(3):
        pair.steps(2)
        assert is_pending(pair.ours)
        assert torch.equal(looks[0]().detach(), looks[1]().detach())
    torch._dynamo.reset()
    pair.steps(2)
    assert torch.equal(*(_compiled(lambda weight: weight * 2)(weight).detach() for weight in weights))
    pair.assert_same()


class _Special(Tensor):
    """A class that somebody reads a parameter as."""


def test_a_parameter_held_before_is_read_as_another_class() -> None:
    pair = Pair("sgd")
    weights = [side.parameters[0] for side in pair.sides]
    pair.steps(2)
    assert is_pending(pair.ours)
    seen = [weight.as_subclass(_Special) for weight in weights]
    assert torch.equal(*(tensor.detach().as_subclass(Tensor) for tensor in seen))
    assert type(seen[1]) is _Special
    del seen
    pair.assert_same()


# When nothing may wait


ALIASES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "detach": lambda m, _: m.get_parameter("first.weight").detach(),
    "view": lambda m, _: m.get_parameter("first.weight").data[1:],
    "numpy": lambda m, _: m.get_parameter("first.weight").detach().numpy(),
    "numpy of the state": lambda m, o: o.state[m.get_parameter("first.weight")]["exp_avg"].numpy(),
    "dlpack": lambda m, _: to_dlpack(m.get_parameter("first.weight").detach()),
    "storage": lambda m, _: m.get_parameter("first.weight").untyped_storage(),
    "graph": lambda m, _: m.get_parameter("first.weight").t().square().sum(),
    "graph that saves nothing": lambda m, _: (m.get_parameter("first.weight") + 1).sum(),
    "jit.script": lambda m, _: torch.jit.script(m.get_submodule("first")),
    "jit.trace": lambda m, _: torch.jit.trace(m.get_submodule("first"), X),
}


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ALIASES)
def test_nothing_waits_that_others_can_see(name: str) -> None:
    pair = Pair("adamw")
    pair.steps(2)
    pair.assert_same()
    alias = ALIASES[name](pair.ours.model, pair.ours.optimizer)
    for _ in range(3):
        pair.step()
        pair.assert_applied()
    del alias
    pair.assert_same()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_saved_with_its_updates() -> None:
    """TorchScript's pickler reads memory in C++ and calls no operator."""
    pair = Pair("sgd")
    scripted = [torch.jit.script(side.model.first) for side in pair.sides]
    pair.steps(3)
    saved = [torch.jit.load(io.BytesIO(module.save_to_buffer())).weight for module in scripted]
    assert torch.equal(*saved)
    pair.assert_same()


def test_a_view_of_the_past_does_not_matter() -> None:
    pair = Pair()
    pair.steps(2)
    pair.both(lambda model, _: model.get_parameter("first.weight").detach() * 1)
    pair.step()
    assert is_pending(pair.ours)


def test_memory_of_an_array_that_came_later_does_not_wait() -> None:
    pair = Pair("sgd")
    others = list(pair.ours.model.parameters())
    pair.steps(2)
    del others
    arrays = [numpy.ones((5, 4), dtype=numpy.float32) for _ in pair.sides]
    for side, array in zip(pair.sides, arrays, strict=True):
        del side.parameters
        side.model.first.weight.data = torch.from_numpy(array)
    for _ in range(3):
        pair.step()
        assert (arrays[0] == arrays[1]).all()
    pair.assert_same()


def test_shared_memory_does_not_wait() -> None:
    pair = Pair()
    for side in pair.sides:
        side.model.share_memory()
    for _ in range(3):
        pair.step()
        assert not is_pending(pair.ours)
        pair.assert_same()


def test_nothing_waits_for_long_if_somebody_always_looks() -> None:
    pair = Pair()
    pair.both(lambda model, _: None)
    for number in range(12):
        pair.step()
        assert is_pending(pair.ours) == (number < 8)
        pair.assert_same()


def test_a_backward_of_before_the_step_is_refused_as_in_eager() -> None:
    pair = Pair("sgd")
    pair.steps(2)
    losses = [side.model(X, WORDS).sum() for side in pair.sides]
    pair.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# Forks


def _sum_of(values: Any) -> float:
    return float(sum(value.detach().double().sum() for value in values))


def _in_child(function: Callable[[], float]) -> float:
    """What a function finds in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, repr(function()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return float(text)


@pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks:DeprecationWarning")
def test_a_forked_child_finds_everything_applied() -> None:
    pair = Pair()
    pair.steps(3)
    assert is_pending(pair.ours)
    expected = _sum_of(pair.eager.parameters)
    assert _in_child(lambda: _sum_of(pair.ours.parameters)) == expected
    pair.assert_applied()
    pair.steps(2)
    pair.assert_same()


class Rows(Dataset[float]):
    """A dataset that looks at the model it is for."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return _sum_of(self.model.parameters())


@pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks:DeprecationWarning")
def test_loaders_that_look_at_the_model() -> None:
    """P4: workers are forked while updates wait."""
    pair = Pair()
    for _ in range(2):
        pair.steps(2)
        assert is_pending(pair.ours)
        fork = multiprocessing.get_context("fork")
        loader = DataLoader(Rows(pair.ours.model), batch_size=1, num_workers=2, multiprocessing_context=fork)
        expected = _sum_of(pair.eager.parameters)
        assert [float(batch) for batch in loader] == [expected] * 4
    pair.steps(2)
    pair.assert_same()


def test_what_is_lost_in_a_child_is_named() -> None:
    """Where an update could not be applied before the fork, each read says so."""
    pair = Pair()
    pair.steps(2)
    waiting = pair.compiled.captured and pair.compiled._current.rotation.pending
    work = waiting._work
    waiting.start_in_child()
    for _ in range(2):
        with pytest.raises(WholestepError, match=r"the update of call 2 of train_step was still waiting .* forked"):
            pair.ours.parameters[0].sum()
        with pytest.raises(WholestepError, match="the update of call 2"):
            pair.ours.model.state_dict()
    waiting._work = work
    pair.assert_same()
