"""Communication blocks are found by operator, whole and with all that is known about them (COMM-1)."""

from __future__ import annotations

import operator

import pytest
import torch
from tests.random_graphs import GraphBuilder
from torch import fx

from wholestep.comm import find_blocks
from wholestep.errors import GraphError
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, ops

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Messages(GraphBuilder):
    """A graph of collectives over one input."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.phase = Phase.COMM
        self.x = self.slot(Slot(SlotKind.BATCH, "x"), shape, dtype)

    def sent(self, value: fx.Node, operation: str = "sum", group: str = "g") -> fx.Node:
        return self.call(ops.ALL_REDUCE, value, operation, group)

    def graph_of(self, *outputs: fx.Node) -> StepGraph:
        return self.finish(outputs)


def test_every_field() -> None:
    build = Messages(6, dtype=torch.bfloat16)
    scaled = build.call(aten.mul.Tensor, build.x, 0.5)
    sent = build.sent(scaled, "max", "ranks")
    wait = build.call(ops.WAIT, sent)
    parts = build.call(aten.split_with_sizes.default, wait, [4, 2])
    first, second = (build.call(torch.ops.aten.alias.default, build.call(operator.getitem, parts, i)) for i in range(2))
    square = build.call(aten.view.default, first, [2, 2])
    build.phase = Phase.OPTIMIZER
    used = build.call(aten.neg.default, square)
    also = build.call(aten.neg.default, second)
    [block] = find_blocks(build.graph_of(used, also, wait))
    assert block.collective is sent
    assert block.inputs == (scaled,)
    assert block.wait is wait
    assert {node.name for node in block.unpacking} == {
        node.name for node in (parts, *parts.users, first, second, square)
    }
    assert block.users == (used, also, build.graph.output_node)
    assert (block.group, block.reduce_op) == ("ranks", "max")
    assert (block.dtype, block.shape, block.num_bytes) == (torch.bfloat16, (6,), 12)
    assert block.kind == ("ranks", "max", torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(torch.float64, 48), (torch.float32, 24), (torch.float16, 12), (torch.uint8, 6)]
)
def test_bytes_are_those_of_the_dtype(dtype: torch.dtype, num_bytes: int) -> None:
    build = Messages(2, 3, dtype=dtype)
    [block] = find_blocks(build.graph_of(build.call(ops.WAIT, build.sent(build.x))))
    assert (block.shape, block.num_bytes) == ((2, 3), num_bytes)


def test_other_collectives_are_blocks_too() -> None:
    build = Messages(4)
    gathered = build.call(c10d.all_gather_into_tensor.default, build.x, 2, "g")
    scattered = build.call(c10d.reduce_scatter_tensor.default, build.call(ops.WAIT, gathered), "avg", 2, "other")
    blocks = find_blocks(build.graph_of(build.call(ops.WAIT, scattered)))
    assert [(block.collective, block.group, block.reduce_op) for block in blocks] == [
        (gathered, "g", ""),
        (scattered, "other", "avg"),
    ]
    assert [(block.shape, block.num_bytes) for block in blocks] == [((8,), 32), ((4,), 16)]
    assert blocks[0].users == (scattered,)


def test_names_mean_nothing() -> None:
    build = Messages(2)
    named = build.call(aten.neg.default, build.x)
    named.name = "all_reduce_wait_tensor"
    assert find_blocks(build.graph_of(named)) == []


def test_blocks_come_in_the_order_of_their_issue() -> None:
    build = Messages(2)
    sent = [build.sent(build.x, group=str(number)) for number in range(3)]
    waits = [build.call(ops.WAIT, node) for node in reversed(sent)]
    assert [block.group for block in find_blocks(build.graph_of(*waits))] == ["0", "1", "2"]


def test_reading_before_the_wait_is_refused() -> None:
    build = Messages(2)
    sent = build.sent(build.x)
    early = build.call(aten.neg.default, sent)
    wait = build.call(ops.WAIT, sent)
    graph = build.graph_of(early, wait)
    with pytest.raises(
        GraphError, match=f"'{sent.name}' is read by {early.name}, {wait.name}; exactly one wait_tensor"
    ):
        find_blocks(graph)


def test_reading_instead_of_waiting_is_refused() -> None:
    build = Messages(2)
    sent = build.sent(build.x)
    early = build.call(aten.neg.default, sent)
    with pytest.raises(GraphError, match=f"'{sent.name}' is read by {early.name}; exactly one wait_tensor"):
        find_blocks(build.graph_of(early))


def test_two_waits_are_refused() -> None:
    build = Messages(2)
    sent = build.sent(build.x)
    waits = [build.call(ops.WAIT, sent) for _ in range(2)]
    with pytest.raises(GraphError, match="exactly one wait_tensor must stand between"):
        find_blocks(build.graph_of(*waits))


def test_a_message_nobody_waits_for_is_refused() -> None:
    build = Messages(2)
    sent = build.sent(build.x)
    with pytest.raises(GraphError, match=f"'{sent.name}' is read by nobody"):
        find_blocks(build.graph_of(build.x))


def test_a_message_that_is_carried_over_is_waited_for_in_the_next_iteration() -> None:
    build = Messages(2)
    sent = build.sent(build.x)
    [block] = find_blocks(build.graph_of(sent))
    assert block.wait is build.graph.output_node
    assert (block.unpacking, block.users) == ((), ())
