"""The generated function: the graph's ops and no others, in order, each value dropped as soon as nobody needs it."""

import linecache
import re
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep._torch import BERNOULLI_LIKE, TorchDispatchMode, direct_call, storage_key
from wholestep.api import CompiledStep
from wholestep.capture import capture, tree
from wholestep.graph import StepGraph, ops
from wholestep.passes import DEFAULT_PIPELINE, run_passes
from wholestep.passes.reinplace import storage_keys
from wholestep.runtime.codegen import best_binding, generate
from wholestep.zoo import get
from wholestep.zoo.optimizers import OPTIMIZERS

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Calls `before` with each operator, remembers the operators and calls `after` with what they return."""

    def __init__(
        self, before: Callable[[], None] = lambda: None, after: Callable[[Any], None] = lambda result: None
    ) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.before()
        self.ops.append(func)
        result = func(*args, **(kwargs or {}))
        self.after(result)
        return result


def settled(name: str, optimizer: str, passes: str | None) -> tuple[CompiledStep, list[Any]]:
    """A step of the zoo that has run once, and copies of what its slots hold now."""
    case = get(name)

    def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    model = case.build()
    args = (model, OPTIMIZERS[optimizer](model.parameters()), case.make_batch(2, 0))
    step = wholestep.compile(train_step, passes=passes)
    step(*args)
    leaves, _ = tree.flatten((args, {}))
    return step, [step.captured.bindings[slot_id].read(leaves) for slot_id in step.graph.placeholders()]


def cloned(values: list[Any]) -> list[Any]:
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in values]


def assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


STEPS = [
    ("mlp", "adamw"),
    ("mlp", "adafactor"),
    ("gpt", "adam_foreach"),
    ("resnet", "sgd_fused"),
    ("custom_function", "sgd_nesterov"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("passes", [None, ""], ids=["compiled", "captured"])
@pytest.mark.parametrize(("name", "optimizer"), [*STEPS, ("lstm", "sgd")])
def test_the_function_computes_what_fx_computes(name: str, optimizer: str, passes: str | None) -> None:
    step, values = settled(name, optimizer, passes)
    graph, ours, theirs = step.graph, cloned(values), cloned(values)
    rng = torch.get_rng_state()
    with torch.no_grad():
        outputs, updates, results = generate(graph)(list(ours))
        drawn = torch.get_rng_state()
        torch.set_rng_state(rng)
        expected = graph.recompile()(*theirs)
    assert torch.equal(drawn, torch.get_rng_state())
    for slot, found, wanted in zip(graph.placeholders(), ours, theirs, strict=True):
        assert_equal(found, wanted, slot)
    found = [*outputs, *updates, *results]
    names = [*(f"output {i}" for i in range(len(outputs))), *graph.updates, *graph.results]
    wanted = [*expected["outputs"], *expected["updates"].values(), *expected["results"].values()]
    for where, mine, other in zip(names, found, wanted, strict=True):
        assert_equal(mine, other, where)


@pytest.mark.sample(4)
@pytest.mark.parametrize("passes", [None, ""], ids=["compiled", "captured"])
@pytest.mark.parametrize(("name", "optimizer"), STEPS)
def test_the_function_calls_the_graphs_operators_and_no_others(name: str, optimizer: str, passes: str | None) -> None:
    step, values = settled(name, optimizer, passes)
    function = generate(step.graph)
    with torch.no_grad(), Recorder() as recorder:
        function(values)
    assert recorder.ops == [node.target for node in step.graph.calls() if ops.is_op(node)]


# Bindings


def losses(x: Tensor, y: Tensor) -> list[Tensor]:
    """Calls whose generated binding has other defaults than the operator, or resolves to another one."""
    return [
        F.mse_loss(x, y),
        F.smooth_l1_loss(x, y),
        F.huber_loss(x, y),
        F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        F.soft_margin_loss(x, y),
        F.nll_loss(x, torch.zeros(4, dtype=torch.int64)),
        F.softmax(x, 0),
        x.var(),
        x.std(0, correction=0),
        torch.add(x, y, alpha=2),
        x.sum(),
        x.sum(0),
        x.to(torch.float64),
        torch.where(x > 0, x, 0.0),
        x.pow(2),
        2**x,
        x.masked_fill(x > 0, float("-inf")),
        torch.full((2,), float("nan")).nan_to_num(1.0),
        x.clamp(max=0.5),
        x.contiguous(memory_format=torch.contiguous_format).max(1).values,
        torch.cat([x, y]).split(3)[1],
    ]


def test_bindings_reach_the_operator_with_its_own_defaults() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        return losses(x, y)

    model, x, y = nn.Linear(1, 1), torch.randn(4, 4), torch.randn(4, 4)
    function = generate(capture(step, (model, x, y), {}).graph)
    with torch.no_grad():
        found, _, _ = function([model.weight, model.bias, x, y])
    for index, (mine, eager) in enumerate(zip(found, losses(x, y), strict=True)):
        assert mine.dtype is eager.dtype
        assert torch.equal(mine, eager), index


def test_a_generated_binding_is_preferred_and_the_operator_itself_is_the_last_resort() -> None:
    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [x + 1, x.relu(), F.dropout(x, 0.5)]

    graph = capture(step, (nn.Linear(1, 1), torch.ones(3)), {}).graph
    chosen = {node.target: best_binding(graph, node) for node in graph.calls()}
    assert chosen[aten.add.Tensor] in (torch.add, torch.Tensor.add)
    assert chosen[aten.relu.default] in (torch.relu, torch.Tensor.relu)
    assert chosen[BERNOULLI_LIKE] is direct_call(BERNOULLI_LIKE)


# Lifetimes


def lifetimes(graph: StepGraph) -> dict[int, tuple[int, int]]:
    """Of each piece of memory that the graph allocates: the first and the last operator call that needs it."""
    calls = [node for node in graph.calls() if ops.is_op(node)]
    when: dict[Any, int] = {node: index for index, node in enumerate(calls)}
    for node in graph.calls():  # an item is taken out of its tuple before the next operator
        when.setdefault(node, when.get(node.args[0], -1))
    inputs = {key for node in graph.placeholders().values() for key in storage_keys(node)}
    spans: dict[int, tuple[int, int]] = {}
    for node in graph.calls():
        readers = [len(calls) if user.op == "output" else when[user] for user in node.users]
        for key in set(storage_keys(node)) - inputs:
            first, last = spans.get(key, (when[node], when[node]))
            spans[key] = (first, max([last, *readers]))
    return spans


@pytest.mark.parametrize("name", ["mlp", "custom_function", "vit"])
def test_memory_is_released_after_its_last_use(name: str) -> None:
    step, values = settled(name, "sgd_plain", "")
    graph = step.graph
    spans = lifetimes(graph)
    values_to_come = iter([node.meta["val"] for node in graph.calls() if ops.is_op(node)])
    held: dict[int, list[weakref.ref[Any]]] = {}
    history: list[set[int]] = []

    def before() -> None:
        history.append({key for key, refs in held.items() if any(ref() is not None for ref in refs)})

    def after(result: Any) -> None:
        leaves, fakes = (tree.flatten(value)[0] for value in (result, next(values_to_come)))
        for leaf, fake in zip(leaves, fakes, strict=True):
            if isinstance(leaf, Tensor) and storage_key(fake) in spans:
                held.setdefault(storage_key(fake), []).append(weakref.ref(leaf.untyped_storage()))

    function = generate(graph)
    with torch.no_grad(), Recorder(before, after) as recorder:
        returned = function(values)
    assert len(recorder.ops) == len(history)
    for index, alive in enumerate(history):
        expected = {key for key, (first, last) in spans.items() if first < index <= last}
        assert alive == expected, recorder.ops[index]
    del returned
    assert not any(ref() is not None for refs in held.values() for ref in refs)


def test_inputs_are_taken_out_of_the_list_and_released_too() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return x.exp().sin()

    graph = capture(step, (nn.Linear(1, 1), torch.ones(3)), {}).graph
    inputs = [*nn.Linear(1, 1).parameters(), torch.ones(3)]
    held = weakref.ref(inputs[2].untyped_storage())
    alive: list[bool] = []
    function = generate(graph)
    with torch.no_grad(), Recorder(before=lambda: alive.append(held() is not None)):
        function(inputs)
    assert inputs == []
    assert alive == [True, False]


# Errors


def test_an_error_shows_the_generated_line() -> None:
    model = nn.Linear(3, 2)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, (model, SGD(model.parameters(), lr=0.1), torch.ones(4, 3)), {}).graph
    function = generate(run_passes(graph, DEFAULT_PIPELINE))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        function([model.weight, model.bias, 0.1, torch.ones(4, 5)])
    text = "".join(traceback.format_exception(caught.value))
    [line] = re.findall(r'File "<wholestep step \d+>", line \d+, in step\n +(.*)\n', text)
    assert re.fullmatch(r"addmm = addmm_\d+_\(param_bias, batch_x, t\)", line)


def test_each_generated_function_has_a_file_of_its_own() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return x.exp()

    graph = capture(step, (nn.Linear(1, 1), torch.ones(3)), {}).graph
    names = [generate(graph).__code__.co_filename for _ in range(2)]
    assert names[0] != names[1]
    linecache.checkcache()
    assert [linecache.getline(name, 1) for name in names] == ["def step(inputs):\n"] * 2


def test_a_graph_without_inputs_or_ops_is_a_function_too() -> None:
    def step(model: nn.Module) -> int:
        return 1

    graph = capture(step, (nn.ReLU(),), {}).graph
    assert generate(graph)([]) == ((), (), ())
