"""Graphs go through JSON unchanged, whatever their arguments; hostile files give errors of ours and nothing else."""

from __future__ import annotations

import copy
import functools
import json
import operator
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cuts import micro_step
from tests.random_graphs import GraphBuilder
from torch import Tensor, fx, nn

from wholestep import _torch
from wholestep._strict_json import dump, fingerprint, parse
from wholestep.capture.layouts import new_fake_mode
from wholestep.errors import WholestepError
from wholestep.graph import Replay, Slot, SlotKind, StepGraph, rng_state
from wholestep.pipe import Kind
from wholestep.pipe.cut import cut
from wholestep.pipe.files.graphs import read_graph, write_graph
from wholestep.pipe.files.stage_json import stage_from_json, stage_to_json, weight_names
from wholestep.pipe.files.values import ValueReader, ValueWriter
from wholestep.runtime.codegen import generate

aten = torch.ops.aten

# Graphs

SHAPE = (2, 3)
FLOATS = st.floats(width=16)  # fits every dtype; infinities, NaN and both zeros are among them
NUMBERS = st.one_of(FLOATS, st.integers(-(2**31), 2**31), st.booleans())
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def _item(builder: GraphBuilder, node: fx.Node, index: int) -> fx.Node:
    return builder.call(operator.getitem, node, index)


def _replayed(builder: GraphBuilder, node: fx.Node) -> fx.Node:
    """Dropout, and once more with the same mask: their difference is zero."""
    state = builder.call(rng_state, "cpu")
    first = builder.call(aten.native_dropout.default, node, 0.5, True)
    again = builder.call(Replay(aten.native_dropout.default, "cpu"), state, node, 0.5, True)
    return builder.call(aten.sub.Tensor, _item(builder, first, 0), _item(builder, again, 0))


def grow(draw: st.DrawFn, builder: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    """A value of the same shape as all others, made of two of them."""
    call = builder.call
    match draw(st.integers(0, 13)):
        case 0:
            return call(aten.add.Tensor, x, y, alpha=draw(st.integers(-3, 3)))
        case 1:
            return call(aten.mul.Tensor, x, draw(NUMBERS))
        case 2:
            return call(aten.clamp.default, x, draw(st.none() | FLOATS), draw(FLOATS))
        case 3:
            return call(aten.transpose.int, call(aten.mul.Tensor, call(aten.transpose.int, x, 0, 1), 2.0), 0, 1)
        case 4:
            memory_format = draw(st.sampled_from([torch.contiguous_format, torch.preserve_format]))
            return call(aten.clone.default, x, memory_format=memory_format)
        case 5:
            return call(aten._to_copy.default, x, dtype=draw(DTYPES))
        case 6:
            parts = call(aten.split_with_sizes.default, x, [1, 2], 1)
            return call(aten.cat.default, [_item(builder, parts, 1), _item(builder, parts, 0)], 1)
        case 7:
            options = {"dtype": draw(DTYPES), "layout": torch.strided, "device": torch.device("cpu")}
            return call(aten.full.default, list(SHAPE), draw(FLOATS), **options, pin_memory=False)
        case 8:
            return call(aten.gelu.default, x, approximate=draw(st.sampled_from(["none", "tanh"])))
        case 9:
            return _item(builder, call(aten.native_dropout.default, x, draw(st.floats(0, 0.9)), True), 0)
        case 10:
            return call(aten.masked_fill.Scalar, x, call(aten.lt.Tensor, x, y), draw(FLOATS))
        case 11:
            total = call(aten.sum.dim_IntList, x, [0], True)
            return call(aten.expand.default, total, list(SHAPE))
        case 12:
            return call(_torch.BERNOULLI_LIKE, x, draw(st.floats(0, 1)))
        case _:
            return _replayed(builder, x)


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    builder = GraphBuilder()
    values = [
        builder.slot(Slot(SlotKind.PARAM, "w", aliases=("v",)), SHAPE),
        builder.slot(Slot(SlotKind.BATCH, "x"), SHAPE),
    ]
    for _ in range(draw(st.integers(1, 8))):
        x, y = (draw(st.sampled_from(values)) for _ in range(2))
        values.append(grow(draw, builder, x, y))
    returned = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    if draw(st.booleans()):
        builder.results["grad.w"] = values[-1]
    return builder.finish(returned)


def through_json(graph: StepGraph) -> StepGraph:
    writer = ValueWriter()
    text = dump({"graph": write_graph(graph, writer, ()), "tensors": writer.table()})
    found = parse(text, "the test")
    mode = new_fake_mode()
    return read_graph(found["graph"], ValueReader(found["tensors"], mode, None), mode, ())


def lines(graph: StepGraph) -> list[str]:
    return str(graph).splitlines()


def memory(graph: StepGraph) -> list[Any]:
    """How the fake values of a graph lie in memory, and which of them share it."""
    first_seen: dict[int, int] = {}
    found: list[Any] = []
    for node in graph.nodes:
        for value in _torch.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor):
                number = first_seen.setdefault(_torch.storage_key(value), len(first_seen))
                found.append((node.name, number, value.stride(), value.storage_offset(), value.dtype))
    return found


@settings(derandomize=True, database=None, deadline=None, max_examples=40)
@given(graphs())
def test_a_graph_through_json_is_the_same_code_and_computes_the_same(graph: StepGraph) -> None:
    again = through_json(graph)
    assert lines(again) == lines(graph)
    assert memory(again) == memory(graph)
    assert again.slots == graph.slots
    results: list[Any] = []
    for one in (graph, again):
        torch.manual_seed(0)
        inputs = [torch.randn(SHAPE), torch.randn(SHAPE)][: len(one.placeholders())]
        with torch.no_grad():
            results.append(_torch.tree_leaves(generate(one)(inputs)))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


# Hostile files


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.first(features)).relu(), 0.5)


@functools.cache
def document() -> dict[str, Any]:
    """A stage with everything in it, as JSON."""
    torch.manual_seed(0)
    step = micro_step(Small(), lambda model, batch: model(batch).square().mean(), [torch.randn(2, 3)])
    [stage] = cut(step.graph, []).stages
    weights = step.model.state_dict()
    return json.loads(stage_to_json(stage, {name: weights[name] for name in weight_names(stage).values()})[0])


Path = tuple[str | int, ...]


@functools.cache
def places() -> dict[str, list[Path]]:
    """Every place of the document, by what it is about, so that rare ones are hit too."""
    found: dict[str, list[Path]] = {}

    def walk(value: Any, path: Path) -> None:
        if path:
            about = "/".join("*" if isinstance(key, int) else key for key in path if not str(key).startswith("param."))
            found.setdefault(about, []).append(path)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            walk(item, (*path, key))

    walk(document(), ())
    return found


NESTED: Any = functools.reduce(lambda inner, _: {"tuple": [inner]}, range(200), 1)
EVIL: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**62, 2**63, -(2**63), 10**400, 0.5, 1e308, "", "x", [], {}, [[]], NESTED),
    *("os.system", "os.system.default", "__import__('os').system('true')", "aten.from_file.default", "builtins.eval"),
    *("aten.save.default", "aten.add_.Tensor", "aten.relu.default", "operator.getitem", "wholestep.rng_state"),
    *("inputs", "lambda", "a\nb", "x" * 5000, "\ud800", "\x00", "cuda:99", "meta", "qint8", "float32", "relu"),
    *({"node": "relu"}, {"node": 1}, {"tensor": 0}, {"tensor": 10**9}, {"tuple": []}, {"float": "nan"}, {"x": 1}),
    *({"dtype": "quint4x2"}, {"device": "cuda"}, {"replay": "aten.relu.default", "device": "cpu"}, {"complex": [0]}),
    *([0], [1, 2, 3], [-1], [2**61] * 3, ["x"], {"a": "b"}, {"tensor": 0, "node": "x"}, {"layout": "sparse_coo"}),
]


def mutated(draw: random.Random) -> bytes:
    """The document with one to three places exchanged, removed, doubled or swapped with another one."""
    hostile: Any = copy.deepcopy(document())
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice(places()[draw.choice(list(places()))])
        try:
            parent = functools.reduce(operator.getitem, path[:-1], hostile)
            change(parent, path[-1], draw)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has removed the place
    if draw.random() < 0.9:
        hostile.pop("fingerprint", None)
        hostile["fingerprint"] = fingerprint(hostile)
    return json.dumps(hostile).encode()


def change(parent: Any, key: Any, draw: random.Random) -> None:
    way = draw.randrange(8)
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif way == 2 and isinstance(parent, list):
        parent.append(parent.pop(key))
    elif way == 3:
        parent[key] = [parent[key]]
    elif way == 4 and isinstance(parent, dict):
        parent[draw.choice(["x", "", "op", "node", "self", "a b", "x=1,y"])] = parent.pop(key)
    elif way == 5 and isinstance(parent[key], int):
        parent[key] += draw.choice((-1, 1, 2**40))
    else:
        parent[key] = copy.deepcopy(draw.choice(EVIL))


def assert_harmless(data: bytes) -> bool:
    """Whether a file was loaded; if so its graphs can be looked at, and if not the error is one of ours."""
    try:
        stage = stage_from_json(data).stage
    except WholestepError as error:
        message = str(error)
    else:
        assert all(str(stage.program(kind).graph) for kind in Kind)
        return True
    assert message.isprintable()
    assert len(message) < 1000
    return False


SEEDS = st.integers(0, 2**32)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(SEEDS)
def test_mutated_stages_give_errors_of_ours_only(seed: int) -> None:
    assert_harmless(mutated(random.Random(seed)))


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=10_000)
@given(SEEDS)
def test_ten_thousand_mutated_stages(seed: int) -> None:
    assert_harmless(mutated(random.Random(seed)))


def test_mutations_are_neither_all_refused_nor_all_harmless() -> None:
    assert assert_harmless(json.dumps(document()).encode())
    outcomes = [assert_harmless(mutated(random.Random(seed))) for seed in range(150)]
    assert 75 <= outcomes.count(False) < 150


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_stage(data: bytes) -> None:
    assert not assert_harmless(data)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_random_json_is_no_stage(value: Any) -> None:
    assert not assert_harmless(json.dumps(value).encode())
    signed = {"format": "wholestep stage", "version": 1, "programs": value}
    try:
        signed["fingerprint"] = fingerprint(signed)
    except WholestepError:
        return  # numbers that JSON has not
    assert not assert_harmless(json.dumps(signed).encode())


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(st.data())
def test_a_stage_with_changed_bytes_is_refused_or_the_same(data: st.DataObject) -> None:
    text = bytearray(json.dumps(document()).encode())
    before = bytes(text)
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    if assert_harmless(bytes(text)):  # only where the bytes mean the same: another kind of blank
        assert json.loads(text) == json.loads(before)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"9" * 100_000 + b"}",
        b'{"a":1e999999}',
        b'{"format":"wholestep stage","version":1,"fingerprint":"x","a":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format":"wholestep stage","version":1e0,"fingerprint":"x"}',
        b'{"format":"wholestep stage","version":true,"fingerprint":"x"}',
        b"\xef\xbb\xbf{}",
        b"null",
        b"",
    ],
)
def test_text_that_would_hurt_a_careless_reader(text: bytes) -> None:
    assert not assert_harmless(text)
