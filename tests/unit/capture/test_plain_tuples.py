"""Tuples of texts and numbers among the arguments: what the step reads of them is looked at at each call."""

import copy
import itertools
import operator
from typing import Any

import pytest
import torch
from tests.twins import SmallNet, Twins, World, momentum
from torch import Tensor

TABLE = {"ab": 1.0, "ed": 2.0, "edc": 3.0, ("ab", "ed"): 4.0}


def build() -> World:
    model = SmallNet()
    return World(
        model=model, optimizer=momentum(model.parameters()), log=[], last=None, sizes={}, options={"size": (0, 1)}
    )


def features(number: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def trained(body: str, values: list[Any], change: Any = None) -> Twins:
    """A step whose loss is multiplied by `factor`, with a line before it and one after the update."""
    before, _, after = body.partition("|")
    namespace: dict[str, Any] = {
        "torch": torch,
        "copy": copy,
        "itertools": itertools,
        "operator": operator,
        "TABLE": TABLE,
    }
    lines = [
        "def step(w, x, given):",
        f"    factor = {before.strip() or '1.0'}",
        "    w.optimizer.zero_grad()",
        "    loss = w.model(x).mean() * factor",
        "    loss.backward()",
        "    w.optimizer.step()",
        f"    {after.strip() or 'pass'}",
        "    return loss",
    ]
    exec("\n".join(lines), namespace)
    twins = Twins(build, namespace["step"], call=lambda world, step, *args: step(world, *args))
    for number, value in enumerate(values):
        if change is not None:
            twins.change(lambda world, number=number: change(world, number))
        twins.step(features(number), value)
    return twins


NAMES = [("ab", "edc"[: 2 + number % 2]) for number in range(4)]
READS = [
    "len(given[1])",
    "TABLE[given[-1]]",
    "2.0 if given[1] == 'edc' else 3.0",
    "2.0 if given == ('ab', 'edc') else 3.0",
    "2.0 if 'edc' in given else 3.0",
    "TABLE.get(given, 5.0)",
    "(lambda first, second: len(second))(*given)",
    "torch.Tensor([len(text) for text in given]).sum()",
    "sum(map(len, given))",
    "len('-'.join(given))",
    "len(operator.itemgetter(1)(given))",
    "len((given + ('k',))[1])",
    "1.0 + given.count('ed')",
    "1.0 + (hash(given) == hash(('ab', 'ed')))",
    "len(copy.deepcopy(given)[1])",
    "sum(len(text) for text in itertools.chain(given))",
]


@pytest.mark.parametrize("read", READS)
def test_texts_that_are_read(read: str) -> None:
    assert trained(read, NAMES).num_captures == 2


WRITES = [
    "w.last = given",
    "w.log.append(given)",
    "w.log.extend(given)",
    "w.log.append({'names': [given]})",
    "w.last = (given, loss.detach())",
    "w.last = copy.deepcopy(given)",
    "w.sizes[given] = loss.item()",
    "w.sizes.setdefault(given, []).append(loss.item())",
    "w.last = f'{given}'",
    "return given, loss",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("values", [NAMES, [(1, 5 + number % 3) for number in range(4)]], ids=["texts", "numbers"])
def test_tuples_that_are_kept(write: str, values: list[Any]) -> None:
    trained(f"|{write}", values)


def test_numbers() -> None:
    assert trained("given[0] * given[1]", [(2, number) for number in range(2, 6)]).num_captures == 2


def test_tuples_in_tuples() -> None:
    trained("len(given[0][0]) + given[1][0]", [((f"{'a' * (1 + number % 2)}",), (number, "b")) for number in range(4)])


def test_sizes_in_containers() -> None:
    trained("float(given[0][0])", [(torch.Size([1 + number % 2, 3]), 1) for number in range(4)])
    trained("float(given[0][0])", [[torch.Size([1 + number % 2, 3])] for number in range(4)])


def test_an_index_of_a_tensor() -> None:
    trained("x[given].sum()", [(number % 3, number % 2) for number in range(4)])


def test_what_nobody_reads_may_change() -> None:
    values = [("name", f"{number}.png", number) for number in range(4)]
    assert trained("len(given[0])", values).num_captures == 1


def test_a_copy_of_options_with_a_tuple_of_numbers() -> None:
    def change(world: World, number: int) -> None:
        world.options["size"] = (number, 1)

    trained("|w.last = copy.deepcopy(w.options)", [()] * 4, change)
