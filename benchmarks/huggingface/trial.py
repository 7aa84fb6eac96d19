"""One class: its train step in eager and compiled, step by step, and with `torch.compile(fullgraph=True)`."""

from __future__ import annotations

import dataclasses
import importlib
import re
import traceback
from typing import Any

import torch
from tests.parity import differences
from tests.twins import Twins, World, observe
from torch import Tensor, nn

import wholestep
from benchmarks.huggingface.classes import Found, Unbuilt, find, loss_of
from wholestep.errors import WholestepError

FAILURE_CHARACTERS = 300


@dataclasses.dataclass
class Row:
    """What came of one class; `outcome` is bitwise, close, wrong, refused, crashed, unbuilt or out of time."""

    name: str
    outcome: str
    detail: str = ""
    captures: int = 0
    eager_calls: int = 0
    upstream: str = ""
    """What `torch.compile` did: runs, or its error."""


def measure(name: str, model_type: str, *, num_steps: int, upstream: bool) -> Row:
    """The row of a class."""
    try:
        found = find(name, model_type)
    except Unbuilt as error:
        return Row(name, "unbuilt", str(error))
    row = _compare(name, found, num_steps)
    if upstream:
        row.upstream = _upstream(found)
    return row


def _compare(name: str, found: Found, num_steps: int) -> Row:
    twins = Twins(lambda: world(found), make=lambda world: step_of(found))
    row = Row(name, "bitwise")
    try:
        for number in range(num_steps):
            twins.step(found.batch(number))
    except AssertionError as error:
        row.outcome = "close" if _is_close(twins) else "wrong"
        row.detail = _first_line(str(error), lines=2)
    except WholestepError as error:
        row.outcome, row.detail = "refused", f"{type(error).__name__}: {_first_line(str(error))}"
    except Exception as error:
        row.outcome, row.detail = "crashed", _told(error)
    row.captures, row.eager_calls = twins.compiled.num_captures, twins.compiled.num_eager_calls
    return row


def warm_up() -> None:
    """Import before the first class what all need, and each would import again in its own process."""
    for name in ("modeling_utils", "generation", "models.bert.modeling_bert", "models.llama.modeling_llama"):
        importlib.import_module(f"transformers.{name}")
    net = nn.Linear(2, 2)
    with torch.no_grad():
        torch.compile(net, fullgraph=True, backend="aot_eager")(torch.ones(1, 2))
        wholestep.compile(lambda net, x: net(x))(net, torch.ones(1, 2))


def world(found: Found) -> World:
    """A model of the class, and its optimizer."""
    model = found.build()
    return World(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def step_of(found: Found) -> Any:
    """The ordinary train step of the class."""
    way = found.way

    def train_step(model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch, way)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _is_close(twins: Twins) -> bool:
    eager, compiled = (observe(world) for world in twins.worlds)
    return not differences(eager, compiled, rtol=1e-4, atol=1e-5)


def _upstream(found: Found) -> str:
    """Whether `torch.compile` takes the model whole, with a backward through it."""
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            own, step = world(found), step_of(found)
            compiled = torch.compile(own.model, fullgraph=True, backend="aot_eager")
            step(compiled, own.optimizer, found.batch(0))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line and not line.endswith("raised:")]
        return f"{type(error).__name__}: {_first_line(lines[0] if lines else '')}"
    return "runs"


def _told(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_first_line(str(error))} ({_short(frame.filename)}:{frame.lineno})"


def _first_line(text: str, lines: int = 1) -> str:
    return _short(" ".join(text.split("\n")[:lines]))[:FAILURE_CHARACTERS]


def _short(text: str) -> str:
    """Without the folders of this machine."""
    text = re.sub(r"\S*/site-packages/", "", text)
    text = re.sub(r"\S*/(src/wholestep|benchmarks|tests)/", r"\1/", text)
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def version_line() -> str:
    """What the table was made with."""
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}, wholestep {wholestep.__version__}"
