"""A printed graph is Python that runs, and says the same thing every time."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep.api import CompiledStep
from wholestep.capture import capture, tree
from wholestep.graph import StepGraph
from wholestep.passes import DEFAULT_PIPELINE, run_passes
from wholestep.zoo import get
from wholestep.zoo.optimizers import OPTIMIZERS

GOLDEN = Path(__file__).parents[2] / "golden"


def linear_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def linear_graph() -> StepGraph:
    model = nn.Linear(2, 3)
    return capture(linear_step, (model, SGD(model.parameters(), lr=0.1, foreach=False), torch.ones(4, 2)), {}).graph


def assert_golden(name: str, text: str) -> None:
    """Compare with a file of tests/golden; EXPECTTEST_ACCEPT=1 writes it instead."""
    text = re.sub(r"test_printer\.py:\d+", "test_printer.py:LINE", text)
    text = re.sub(r"\(\d+\.\d ms\)", "(TIME)", text)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def statements(graph: StepGraph) -> dict[str, str]:
    """The line of each node, by the node's name, without comments."""
    lines = [text.partition("  # ")[0].strip().replace("torch.ops.", "") for text in str(graph).splitlines()]
    return {text.split(" = ")[0]: text for text in lines if " = " in text}


def side_by_side(left: dict[str, str], right: dict[str, str]) -> Iterator[str]:
    """Rows of two columns in which equal names meet."""
    pending = iter(right.items())
    for name, text in left.items():
        if name in right:
            own = itertools.takewhile(lambda item, name=name: item[0] != name, pending)
            yield from (f"{'':<100}  {other}" for _, other in own)
        yield f"{text:<100}  {right.get(name, '')}".rstrip()
    yield from (f"{'':<100}  {other}" for _, other in pending)


def test_the_whole_text_of_a_small_step() -> None:
    graph = linear_graph()
    assert_golden("linear_sgd_captured.txt", str(graph))
    assert_golden("linear_sgd_compiled.txt", str(run_passes(graph, DEFAULT_PIPELINE)))


def test_a_small_step_before_and_after_its_passes() -> None:
    graph = linear_graph()
    before = statements(graph)
    after = statements(run_passes(graph, DEFAULT_PIPELINE))
    heading = f"{'captured':<100}  after {DEFAULT_PIPELINE}"
    assert_golden("linear_sgd_passes.txt", "\n".join([heading, *side_by_side(before, after)]) + "\n")


def test_printing_is_deterministic() -> None:
    graph, other = linear_graph(), linear_graph()
    assert str(graph) == str(graph) == str(other) == str(graph.copy())
    texts = [str(run_passes(each, DEFAULT_PIPELINE)).splitlines() for each in (graph, other)]
    assert texts[0][1:] == texts[1][1:]  # the first line tells how long the passes took


def read_slots(step: CompiledStep, *args: Any) -> dict[str, Any]:
    """What each input and each result of the graph holds now, copied."""
    leaves, _ = tree.flatten((args, {}))
    values = {
        key: step.captured.bindings[key].read(leaves) for key in [*step.graph.placeholders(), *step.graph.results]
    }
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def assert_printed_graph_runs(step: CompiledStep, *args: Any) -> None:
    """Execute the text on the slots' values, then run the step itself, and compare what they leave behind."""
    step(*args)
    before = read_slots(step, *args)
    namespace: dict[str, Any] = {}
    exec(compile(str(step.graph), "<printed>", "exec"), namespace)
    rng = torch.get_rng_state()
    with torch.no_grad():
        returned = namespace["step"](*(before[slot_id] for slot_id in step.graph.placeholders()))
    rng_printed = torch.get_rng_state()
    torch.set_rng_state(rng)
    outputs, _ = tree.flatten(step(*args))
    after = read_slots(step, *args)
    assert torch.equal(torch.get_rng_state(), rng_printed)
    found = {**before, **returned["updates"], **returned["results"]}
    found |= {f"output {index}": value for index, value in enumerate(returned["outputs"])}
    expected = after | {f"output {index}": value for index, value in enumerate(outputs)}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("passes", [None, ""], ids=["compiled", "captured"])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("mlp", "adamw"),
        ("mlp", "adafactor"),
        ("gpt", "adam_foreach"),
        ("resnet", "sgd_fused"),
        ("custom_function", "nadam"),
        pytest.param("lstm", "sgd"),
    ],
)
def test_the_text_runs_and_does_what_the_step_does(name: str, optimizer: str, passes: str | None) -> None:
    case = get(name)

    def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    model = case.build()
    step = wholestep.compile(train_step, passes=passes)
    assert_printed_graph_runs(step, model, OPTIMIZERS[optimizer](model.parameters()), case.make_batch(2, 0))


def test_the_text_runs_with_a_symbolic_batch() -> None:
    def padded_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        filled = torch.full((x.shape[0] * 2, 2), float("-inf"))
        loss = model(torch.cat([x, x.new_zeros(x.shape)])).clamp(min=filled.amax()).square().mean() * x.shape[0]
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(2, 3)
    step = wholestep.compile(padded_step, dynamic_batch=True)
    assert_printed_graph_runs(step, model, SGD(model.parameters(), lr=0.1), torch.randn(4, 2))
    assert step.captured.dynamic_dims
    assert "-inf" in str(step.graph)


def test_the_text_names_each_slot_once_in_order() -> None:
    graph = linear_graph()
    signature = str(graph).partition("def step(\n")[2].partition("):")[0]
    assert [text.split("  # ")[1].split("  ")[-1] for text in signature.splitlines()] == list(graph.placeholders())


def test_a_graph_without_ops_is_python_too() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return x

    graph = capture(step, (nn.Linear(2, 3), torch.ones(4, 2)), {}).graph
    namespace: dict[str, Any] = {}
    exec(compile(str(graph), "<printed>", "exec"), namespace)
    assert namespace["step"](1, 2, 3) == {"outputs": (), "updates": {}, "results": {}}
