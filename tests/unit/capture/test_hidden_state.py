"""State that is easily overlooked: of partials, arguments, switches of torch, the process. It is seen, or refused."""

import functools
import logging
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep import CaptureError
from wholestep.capture.overlap import Span, first_overlap

X, Y = pair()


def scaled_step(model: nn.Module, optimizer: Optimizer, scale: Any) -> Tensor:
    optimizer.zero_grad()
    loss = (model(X) - Y).square().mean() * scale
    loss.backward()
    optimizer.step()
    return loss


def test_the_keywords_of_a_partial_are_read_at_every_call() -> None:
    def make(world: World) -> Callable[..., Tensor]:
        world.partial = functools.partial(scaled_step, world.model, world.optimizer, scale=1.0)
        return world.partial

    twins = Twins(small_world(), make=make, call=lambda _, step: step())
    for value in (1.0, 2.0, 0.5, 3.0):
        twins.change(lambda world, value=value: world.partial.keywords.update(scale=value))
        twins.step()
    assert twins.num_captures == 2
    assert "partial.keywords['scale']" in twins.reasons[0]


# Arguments


class Tripled:
    """An augmentation."""

    def __call__(self, features: Tensor) -> Tensor:
        return features * 3


@pytest.mark.parametrize("order", [(1, 0, 1, 0), (0, 1, 0, 1)])
def test_an_object_that_is_left_out_at_other_calls(order: tuple[int, ...]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, augment: Tripled | None) -> Tensor:
        features = X if augment is None else augment(X)
        return mse_step(lambda _: model(features), optimizer, X, Y)

    twins = Twins(small_world(), step)
    for is_given in order:
        twins.step(Tripled() if is_given else None)
    assert twins.num_captures == 2


@pytest.mark.parametrize("order", [(1, 0, 1, 0), (0, 1, 0, 1)])
def test_arguments_that_are_one_tensor_at_other_calls(order: tuple[int, ...]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, one: Tensor, other: Tensor) -> Tensor:
        return scaled_step(model, optimizer, 2.0 if one is other else 1.0)

    def call(world: World, compiled: Callable[..., Tensor], is_one: int) -> Tensor:
        one = torch.ones(2)
        return compiled(world.model, world.optimizer, one, one if is_one else torch.ones(2))

    twins = Twins(small_world(), step, call=call)
    for is_one in order:
        twins.step(is_one)
    assert twins.num_captures == 2


def written_and_read(model: nn.Module, optimizer: Optimizer, written: Tensor, read: Tensor) -> Tensor:
    written.add_(1.0)
    scale = read.sum()
    written.mul_(3.0)
    return scaled_step(model, optimizer, scale)


def test_arguments_that_share_memory_at_a_later_call_are_refused() -> None:
    twins = Twins(small_world(), written_and_read)
    twins.step(torch.ones(4), torch.ones(4))
    both = torch.ones(6)
    with pytest.raises(CaptureError, match=r"batch\.written and batch\.read share memory"):
        twins.compiled(twins.worlds[1].model, twins.worlds[1].optimizer, both[:4], both[2:])
    assert both.equal(torch.ones(6))


def test_arguments_that_lie_side_by_side_in_one_memory() -> None:
    def call(world: World, compiled: Callable[..., Tensor], at: int) -> tuple[Tensor, Tensor]:
        both = torch.ones(8)
        return compiled(world.model, world.optimizer, both[:at], both[at : 2 * at]), both

    twins = Twins(small_world(), written_and_read, call=call)
    twins.step(4)
    twins.step(4)
    assert twins.num_captures == 1


def test_arrays_that_share_memory_at_a_later_call_are_refused() -> None:
    """Which are two storages in PyTorch."""
    twins = Twins(small_world(), written_and_read)
    twins.step(torch.ones(4), torch.ones(4))
    both = np.ones(6, dtype=np.float32)
    one, other = torch.from_numpy(both[:4]), torch.from_numpy(both[2:])
    with pytest.raises(CaptureError, match="share memory"):
        twins.compiled(twins.worlds[1].model, twins.worlds[1].optimizer, one, other)


def test_buffers_that_come_to_share_memory_are_refused() -> None:
    class Counting(nn.Module):
        seen: Tensor
        weights: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(X.shape[1], 1)
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("weights", torch.ones(4))

        def forward(self, features: Tensor) -> Tensor:
            self.seen.add_(1.0)
            return self.layer(features) * self.weights.sum()

    twins = Twins(small_world(Counting), lambda model, optimizer: scaled_step(model, optimizer, 1.0))
    twins.steps(2)
    model, both = twins.worlds[1].model, torch.ones(6)
    model.seen, model.weights = both[:4], both[2:]
    with pytest.raises(CaptureError, match=r"buffer\.\S+ and buffer\.\S+ share memory"):
        twins.compiled(model, twins.worlds[1].optimizer)


def test_the_first_overlap_is_that_of_all_pairs() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        starts, sizes = generator.integers(0, 30, 6), generator.integers(1, 6, 6)
        spans = [
            Span("cpu" if index % 3 else "cuda:0", int(start), int(start + size), str(index))
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        written = {str(index) for index in range(6) if generator.random() < 0.4}
        pairs = {
            frozenset((one.name, other.name))
            for one in spans
            for other in spans
            if one is not other and one.memory == other.memory and one.start < other.end and other.start < one.end
        }
        wrong = {pair for pair in pairs if pair & written}
        found = first_overlap(spans, written)
        assert (found is None) is (not wrong)
        assert found is None or frozenset(found) in wrong


# The process


def test_the_level_of_a_logger() -> None:
    logger = logging.getLogger("tests.hidden_state")

    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        return scaled_step(model, optimizer, 2.0 if logger.isEnabledFor(logging.INFO) else 1.0)

    twins = Twins(small_world(), step)
    for level in (logging.INFO, logging.WARNING, logging.INFO):
        logger.setLevel(level)
        twins.step()


def test_attributes_of_the_thread() -> None:
    thread = threading.current_thread()
    name = thread.name

    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        return scaled_step(model, optimizer, float(len(threading.current_thread().name)))

    twins = Twins(small_world(), step)
    try:
        for length in (1, 2, 3):
            thread.name = "n" * length
            twins.step()
    finally:
        thread.name = name


def test_the_function_that_logs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.hidden_state")

    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        logger.warning("a step")
        return scaled_step(model, optimizer, 1.0)

    twins = Twins(small_world(), step)
    with caplog.at_level(logging.INFO, "tests.hidden_state"):
        twins.steps(2)
    assert [record.funcName for record in caplog.records if record.name == logger.name] == ["step"] * 4


def deep(levels: int, value: float) -> Any:
    return [deep(levels - 1, value)] if levels else [value]


def test_what_is_read_at_any_depth() -> None:
    def build() -> World:
        world = small_world()()
        world.nested = deep(12, 1.0)
        return world

    def make(world: World) -> Callable[..., Tensor]:
        return lambda model, optimizer: scaled_step(model, optimizer, float(str(world.nested).strip("[]")))

    twins = Twins(build, make=make)
    for value in (1.0, 2.0, 0.5):

        def change(world: World, value: float = value) -> None:
            inner = world.nested
            while isinstance(inner[0], list):
                inner = inner[0]
            inner[0] = value

        twins.change(change)
        twins.step()


# What is refused


def leaves_gradients_off() -> None:
    torch.set_grad_enabled(False)


def leaves_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def leaves_print_options() -> None:
    torch.set_printoptions(precision=2)


def leaves_array_errors() -> None:
    np.seterr(over="ignore")


def asks_for_the_recursion_limit() -> None:
    import sys

    sys.getrecursionlimit()


def switches_collection_off() -> None:
    import gc

    gc.disable()


def writes_to_the_environment() -> None:
    import os

    os.environ["TESTS_OF_HIDDEN_STATE"] = "1"


def records_warnings() -> None:
    with warnings.catch_warnings(record=True):
        warnings.warn("recorded", stacklevel=1)


LOG: list[int] = []


@functools.cache
def noted(number: int) -> int:
    LOG.append(number)
    return number


def fills_a_cache_and_writes() -> None:
    noted(3)


class Meters:
    """Shows what another object counts."""

    def __init__(self) -> None:
        self.inner = {"loss": types.SimpleNamespace(count=0)}

    def __str__(self) -> str:
        return str(self.inner["loss"].count)


METERS = Meters()


def prints_before_it_counts() -> None:
    print(METERS)
    METERS.inner["loss"].count += 1


REFUSED = {
    leaves_gradients_off: r"leaves torch\.is_grad_enabled\(\) changed from True to False.*within a `with` block",
    leaves_threads: r"leaves torch\.get_num_threads\(\) changed",
    leaves_print_options: r"leaves torch\.set_printoptions\(\) changed",
    leaves_array_errors: r"leaves numpy\.geterr\(\) changed",
    asks_for_the_recursion_limit: r"calls sys\.getrecursionlimit\(\)",
    switches_collection_off: r"calls gc\.disable\(\)",
    writes_to_the_environment: r"writes to a _Environ",
    records_warnings: "warns under filters that it has set itself",
    fills_a_cache_and_writes: "fills a cache with a function that also writes or prints",
    prints_before_it_counts: "changes a Meters after it was printed",
}


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
def test_it_is_refused_and_nothing_has_changed(act: Callable[[], None]) -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        loss = scaled_step(model, optimizer, 1.0)
        act()
        return loss

    def seen() -> tuple[Any, ...]:
        options = str(torch.tensor(1.23456))
        return torch.is_grad_enabled(), torch.get_num_threads(), options, np.geterr(), str(METERS), list(LOG)

    before = seen()
    twins = Twins(small_world(), step)
    with pytest.raises(CaptureError, match=REFUSED[act]):
        twins.compiled(twins.worlds[1].model, twins.worlds[1].optimizer)
    assert seen() == before


def test_warnings_that_the_step_itself_silences(recwarn: pytest.WarningsRecorder) -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("silent", stacklevel=1)
        return scaled_step(model, optimizer, 1.0)

    Twins(small_world(), step).steps(2)
    assert not recwarn.list
