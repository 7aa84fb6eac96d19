"""Small steps that are refused, for places that no other test leads to; the conftest reads what they are told."""

import contextvars
import copy
import datetime
import logging
import pickle
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import wholestep

X, Y = pair()

Step = Callable[[nn.Module, Optimizer, Tensor, Tensor], Any]
REFUSED: dict[str, Step] = {}
"""Words of a refusal, and a step that is told them."""

OBJECTS = np.array([object(), object()], dtype=object)
LARGE = np.zeros(300_000)
MANY = [[] for _ in range(30_000)]
NESTED = [[[] for _ in range(150)] for _ in range(150)]
LOCK = threading.Lock()
VARIABLE: Any = contextvars.ContextVar("variable")
RING: list[Any] = []
LOG = logging.getLogger("refused")
ITERATOR = iter([1.0, 2.0, 3.0])
TRAINABLE = torch.zeros(3)


def refused(words: str) -> Callable[[Step], Step]:
    def note(step: Step) -> Step:
        REFUSED[words] = step
        return step

    return note


@refused("asks the clock (time.perf_counter)")
def looks_at_the_clock(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    begin = time.perf_counter()
    mse_step(model, optimizer, x, y)
    return time.perf_counter() - begin


@refused("asks the clock (datetime.now)")
def asks_for_the_date(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x, y), datetime.datetime.now()


@refused("which cannot be followed")
def calls_code_of_c(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x, y), pickle.dumps([1, 2])


@refused("asks whether a lock is locked")
def asks_a_lock(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x, y) * (2 if LOCK.locked() else 1)


@refused("draws from the operating system (random.SystemRandom)")
def draws_from_the_system(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x * SYSTEM.random(), y)


SYSTEM = random.SystemRandom()


@refused("logs where it is (")
def logs_its_stack(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    LOG.warning("here", stack_info=True)
    return mse_step(model, optimizer, x, y)


@refused("of a torch.Generator")
def asks_a_generator(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    GENERATOR.manual_seed(3)
    return mse_step(model, optimizer, x, y)


GENERATOR = torch.Generator()


@refused("works in threads or processes of its own")
def starts_a_thread(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    thread = threading.Thread(target=print)
    thread.start()
    return mse_step(model, optimizer, x, y)


@refused("takes items from an iterator that outlives it (a list_iterator)")
def takes_the_next(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x * next(ITERATOR), y)


@refused("goes through a container of 30000 items from outside")
def goes_through_many(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x * (1 + sum(len(item) for item in MANY)), y)


@refused("copies a tensor with copy.deepcopy()")
def copies_a_tensor(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, copy.deepcopy(x), y)


@refused("the step gives an attribute 'extra' to a tensor that it has computed")
def marks_a_result(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = mse_step(model, optimizer, x, y)
    loss.extra = 1  # pyright: ignore[reportAttributeAccessIssue]
    return loss


@refused("reads a large NumPy array from outside")
def reads_a_large_array(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x * float(LARGE.sum()), y)


@refused("reads a NumPy array of objects from outside")
def reads_objects(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x * len(OBJECTS.tolist()), y)


@refused("a region under torch.utils.checkpoint writes to a buffer")
def checkpoints_a_print(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    def region(features: Tensor) -> Tensor:
        print("here")
        return model(features)

    optimizer.zero_grad()
    loss: Any = F.mse_loss(checkpoint(region, x, use_reentrant=False), y)  # pyright: ignore[reportArgumentType]
    loss.backward()
    optimizer.step()
    return loss


@refused("the step changes what autograd saves (torch.autograd.graph.saved_tensors_hooks)")
def keeps_what_it_saves_elsewhere(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return mse_step(model, optimizer, x, y)


@refused("the step calls torch.seed")
def seeds_anew(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    torch.seed()
    return mse_step(model, optimizer, x, y)


@refused("the step changes requires_grad of")
def thaws_what_it_has_found(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    TRAINABLE.requires_grad_()
    return mse_step(model, optimizer, x + TRAINABLE.sum() * 0, y)


BYTES = bytearray(b"one")
CONTENT: dict[str, Callable[[], Any]] = {
    "len": lambda: len(BYTES),
    "truth": lambda: 2 if BYTES else 1,
    "equality": lambda: 2 if BYTES == b"one" else 1,
    "items": lambda: BYTES[0],
    "membership": lambda: 2 if 1 in BYTES else 1,
    "a function of C": lambda: sum(BYTES),
    "a copy": lambda: bytes(BYTES)[0],
}


@pytest.mark.parametrize("way", CONTENT)
def test_what_only_c_knows_is_not_read(way: str) -> None:
    """It was, and the first value stayed for ever."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return mse_step(model, optimizer, x * CONTENT[way](), y)

    assert "bytearray from outside, whose content cannot be watched" in told(step)


@refused("matches the class of a size or learning rate")
def matches_a_rate(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    match optimizer.param_groups[0]["lr"]:
        case float():
            return mse_step(model, optimizer, x, y)
        case _:
            return None


@refused("reads __class__ of a size or learning rate")
def reads_the_class_of_a_rate(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    assert optimizer.param_groups[0]["lr"].__class__ is float
    return mse_step(model, optimizer, x, y)


@refused("a tuple that leads back to itself")
def returns_a_ring(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    inner: list[Any] = [mse_step(model, optimizer, x, y)]
    ring = (inner,)
    inner.append(ring)
    return ring


@refused("hands a list that leads to more than 20000 objects to code that cannot be followed")
def hands_on_a_lot(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return mse_step(model, optimizer, x * len(max(NESTED)), y)


@refused("of a logger")
def sets_a_level(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    LOG.addHandler(logging.NullHandler())
    return mse_step(model, optimizer, x, y)


def told(step: Step, **options: Any) -> str:
    world = small_world()()
    with pytest.raises(wholestep.CaptureError) as caught:
        wholestep.compile(step, **options)(world.model, world.optimizer, X, Y)
    return str(caught.value)


@pytest.mark.parametrize("words", REFUSED)
def test_a_step_is_told(words: str) -> None:
    step = REFUSED[words]
    text = told(step)
    assert words in text
    assert isinstance(step, types.FunctionType)
    assert text.startswith(f"{__file__}:")


def test_attributes_of_what_may_be_exchanged() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        mse_step(model, optimizer, x, y)
        for state in optimizer.state.values():
            state["momentum_buffer"].extra = 1

    world = small_world()()
    mse_step(world.model, world.optimizer, X, Y)
    with pytest.raises(wholestep.CaptureError, match="a state that may be another tensor next time"):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)


def test_a_batch_with_a_history() -> None:
    world = small_world()()
    with pytest.raises(
        wholestep.CaptureError, match="has a grad_fn: its gradient would have to leave the captured step"
    ):
        wholestep.compile(mse_step)(world.model, world.optimizer, X.clone().requires_grad_() * 2, Y)


def test_recurrent_layers_of_a_symbolic_batch() -> None:
    def step(model: nn.GRU, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x)[0].square().mean().backward()
        optimizer.step()

    model = nn.GRU(4, 3)
    compiled = wholestep.compile(step, dynamic_batch=True)
    compiled(model, torch.optim.SGD(model.parameters()), X[None])  # is captured with its size, and a warning
