"""Tensors that code keeps from its first call hold real values afterwards, for the step and for everybody else (S3)."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, square_step
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def make_table(length: int) -> Tensor:
    return torch.linspace(0.1, 1.0, length)


class Net(nn.Module):
    """Scales each position by a table that `lookup(net, length)` keeps."""

    def __init__(self, lookup: Callable[[Any, int], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lookup = lookup
        self.cache: dict[int, Tensor] = {}
        self.seen: list[Tensor | None] = [None]
        self.length = 0
        self.table: Tensor | None = None
        self.cached_method = functools.lru_cache(maxsize=None)(make_table)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) * self.lookup(self, features.shape[1]).unsqueeze(-1)


def in_dict(net: Net, length: int) -> Tensor:
    if length not in net.cache:
        net.cache[length] = make_table(length)
    return net.cache[length]


def in_dict_with_length(net: Net, length: int) -> Tensor:
    if net.length != length or 0 not in net.cache:
        net.cache[0] = make_table(length)
        net.length = length
    return net.cache[0]


def in_list(net: Net, length: int) -> Tensor:
    kept = net.seen[0]
    if kept is None or len(kept) != length:
        net.seen[0] = kept = make_table(length)
    return kept


def in_attribute(net: Net, length: int) -> Tensor:
    if net.table is None or len(net.table) != length:
        net.table = make_table(length)
    return net.table


def in_lru_cache(net: Net, length: int) -> Tensor:
    return net.cached_method(length)


GLOBAL_TABLE = """
CACHE = {}
def lookup(net, length):
    if length not in CACHE:
        CACHE[length] = make_table(length)
    return CACHE[length]
"""


def global_lookup() -> Callable[[Any, int], Tensor]:
    """A function of a module of its own, which keeps tables in a global."""
    names: dict[str, Any] = {"make_table": make_table}
    source = (
        "CACHE = {}\ndef lookup(net, n):\n    if n not in CACHE:\n        CACHE[n] = make_table(n)\n    return CACHE[n]"
    )
    exec(source, names)
    return names["lookup"]


LOOKUPS: dict[str, Callable[[], Callable[[Any, int], Tensor]]] = {
    "dict": lambda: in_dict,
    "dict with length": lambda: in_dict_with_length,
    "list": lambda: in_list,
    "attribute": lambda: in_attribute,
    "lru_cache": lambda: in_lru_cache,
    "global": global_lookup,
}


def batch(length: int, seed: int) -> Tensor:
    return torch.randn(2, length, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 3, 5, 3)], ids=str)
@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_table_kept_from_the_first_call(kind: str, lengths: tuple[int, ...]) -> None:
    def build() -> World:
        model = Net(LOOKUPS[kind]())
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    twins = Twins(build, square_step)
    for seed, length in enumerate(lengths):
        twins.step(batch(length, seed))
    # The model is used eagerly afterwards, with the tables that the steps left.
    outputs = [world.model(batch(lengths[0], 9)) for world in twins.worlds]
    assert torch.equal(outputs[0], outputs[1])
    # One capture that fills the table, one that finds it, for each length.
    assert twins.num_captures <= 2 * len(set(lengths))


@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_table_that_was_there_before(kind: str) -> None:
    def build() -> World:
        model = Net(LOOKUPS[kind]())
        model(batch(5, 0))
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    twins = Twins(build, square_step)
    for seed in range(3):
        twins.step(batch(5, seed))
    assert twins.num_captures == 1


def test_a_table_changed_in_place_between_calls() -> None:
    def build() -> World:
        model = Net(in_dict)
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    twins = Twins(build, square_step)
    twins.step(batch(5, 0))
    twins.change(lambda world: world.model.cache[5].mul_(2))
    twins.step(batch(5, 1))
    twins.change(lambda world: world.model.cache.clear())
    twins.step(batch(5, 2))


class ContrastiveLoss(nn.Module):
    """Keeps its labels, by device, until the batch has another size."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.size = 0 if counts else 4
        self.labels: dict[torch.device, Tensor] = {}

    def forward(self, logits: Tensor) -> Tensor:
        size = logits.shape[0]
        if self.size != size or logits.device not in self.labels:
            self.labels[logits.device] = torch.arange(size, device=logits.device)
            if self.counts:
                self.size = size
        return F.cross_entropy(logits, self.labels[logits.device])


@pytest.mark.parametrize(("counts", "sizes"), [(True, (4, 4, 4)), (True, (4, 3, 4, 3)), (False, (4, 4, 4))], ids=str)
@pytest.mark.parametrize("where", ["argument", "closure"])
def test_labels_of_a_contrastive_loss(where: str, counts: bool, sizes: tuple[int, ...]) -> None:
    def build() -> World:
        model = nn.Linear(4, 4)
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1), criterion=ContrastiveLoss(counts))

    def make(world: World) -> Callable[..., Tensor]:
        own = world.criterion

        def step(model: nn.Module, optimizer: Optimizer, criterion: nn.Module | None, features: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (criterion or own)(model(features))
            loss.backward()
            optimizer.step()
            return loss

        return step

    def call(world: World, step: Callable[..., Any], features: Tensor) -> Any:
        return step(world.model, world.optimizer, world.criterion if where == "argument" else None, features)

    twins = Twins(build, make=make, call=call)
    for seed, size in enumerate(sizes):
        twins.step(torch.randn(size, 4, generator=torch.Generator().manual_seed(seed)))
    losses = [world.criterion(torch.eye(4)) for world in twins.worlds]
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("sizes", [(2, 2, 2, 3), (2, 3, 2, 2)], ids=str)
def test_a_cached_number_that_was_forgotten_is_computed_of_real_ones(sizes: tuple[int, ...]) -> None:
    """The path to what the function returned leads through a call of it, while its table holds stand-ins."""

    def build() -> World:
        table = {"rate": 0.25}
        model = nn.Linear(4, 4)
        cached = functools.lru_cache(maxsize=4)(lambda name: table[name])
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1), table=table, cached=cached)

    def make(world: World) -> Callable[..., Tensor]:
        rate = world.cached

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = torch.add(model(features), features, alpha=rate("rate")).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    twins = Twins(build, make=make, call=lambda world, step, features: step(world.model, world.optimizer, features))
    for number, size in enumerate(sizes):
        for world in twins.worlds:
            world.table["rate"] = (0.25, 0.5, 0.5, 0.75)[number]
            if number != 2:
                world.cached.cache_clear()
        twins.step(torch.randn(size, 4, generator=torch.Generator().manual_seed(number)))
        assert all(type(world.cached("rate")) is float for world in twins.worlds)
