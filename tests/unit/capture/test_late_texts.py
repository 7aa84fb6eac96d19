"""Text that Python makes of what the graph computes."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
from tests.twins import Twins, World, mse_step, pair, small_world
from tests.unit.capture.test_late_numbers import assert_said_alike

import wholestep
from wholestep import CaptureError

MADE = {
    "f-string": 'f"loss {value:.4f} of {5}"',
    "several": 'f"{value}|{value!r:}|{2 * value:8.3f}"',
    "format": '"{} and {:.2e} at {step}".format(value, value, step=3)',
    "nested": '"[{}]".format(f"{value:.1f}")',
    "str": '"loss: " + str(value) + "."',
    "join": '", ".join([f"{value:.3f}", str(value), "end"])',
    "in containers": '{"text": [f"{value:.3f}", ("a", str(value))], "number": value}',
    "conversions": 'f"{value!s}|{value!s:}|{3!r:>4}|" + "{!s:>5}".format("a") + "%5s|%s" % ("a", value)',
    "percent": '"%.4f" % value',
    "percent of several": '"[%d] %5.2f%% %+e|%s %r" % (3, value, value * 2, "a", value)',
    "percent of a tensor": '"%.3f and %d" % (loss.detach(), 3 * loss.detach())',
    "percent by name": '"%(a)s %(b).3f %(b)08.2f%%" % {"a": 3, "b": value}',
    "percent of text": '"<%s> %g" % (f"{value:.2f}", value)',
    "deep in tuples": '(("a", (f"{value:.3f}",)),)',
    "nothing unusual": '"%d%%" % 3 + f"{5:>4}" + str(value)',
    "kept": 'world.log.append(f"{value:.3f}") or setattr(world, "last", str(value)) or None',
    "of the tensor": 'f"{loss:.3f} {loss}" + "{:.2e} {loss:6.2f}".format(loss, **{"loss": 2 * loss})',
    "asked what it is": "str(value) if isinstance(str(value), str) and type(str(value)) is str else 3",
}
APART = {
    "length": "len(text)",
    "slice": "text[:3]",
    "item": "text[0]",
    "comparison": "text == '0.5'",
    "order": "text < 'a'",
    "contains": "'nan' in text",
    "is contained": "text in ['nan']",
    "upper": "text.upper()",
    "padding": "text.ljust(12)",
    "padding by format": 'f"{text:>12}"',
    "padding by str.format": '"{:>12}".format(text)',
    "percent": "'%12s' % text",
    "key": "{'a': 1}.get(text)",
    "key of a literal": "len({text: 1})",
    "list of texts": "[text] == ['0.1']",
    "key that is set": "keyed(text)",
    "set": "len({text, '0.1'})",
    "split": "text.split('.')",
    "encode": "text.encode()",
    "float": "float(text)",
    "iteration": "[c for c in text]",
    "star": "[*text]",
    "repetition": "text * 2",
    "json": "json.dumps(text)",
    "json of a list": "json.dumps([text])",
    "sorted": "sorted([text, 'a'])",
    "largest": "max(text, 'a')",
    "attribute": "getattr(world, text, 3)",
    "hash": "hash(text)",
    "letters for join": "'-'.join(text)",
    "letters for print": "print(*text)",
    "conversion": 'f"{text!r}"',
    "in a list that is formatted": 'f"{[text]}"',
    "in a list for str.format": '"{}".format([text])',
    "in an object that shows itself": 'f"{types.SimpleNamespace(a=text)}"',
    "padding of a number": 'f"{value!s:>30}"',
    "padding of a number by str.format": '"{!r:>30}".format(value)',
    "padding of a number by percent": '"%30s" % value',
    "padding of one of several": '"%-4d|%30r" % (3, value)',
    "what percent cuts off": '"%.3s" % value',
    "conversion by percent": '"%r" % text',
    "in a list for percent": '"%s" % [text]',
    "a text to format with": "text % ()",
    "padding of an object": '"%60s" % types.SimpleNamespace(a=value)',
    "padding of a list": 'f"{[value]!s:>30}"',
}  # fmt: skip
PROGRAM = """
import json
import types
def keyed(text):
    found = {}
    found[text] = 1
    return len(found)
def step(world, features, targets):
    loss = mse_step(world.model, world.optimizer, features, targets)
    value = loss.item()
    text = f"{value:.3f}"
    return EXPRESSION
"""


def step_of(expression: str) -> Any:
    module = types.ModuleType("late_text")
    vars(module)["mse_step"] = mse_step
    exec(compile(PROGRAM.replace("EXPRESSION", expression), "late_text.py", "exec"), vars(module))
    return vars(module)["step"]


def build() -> World:
    world = small_world()()
    world.log, world.last = [], ""
    return world


@pytest.mark.parametrize("expression", MADE.values(), ids=MADE)
def test_text_is_that_of_each_call(expression: str) -> None:
    twins = Twins(build, step_of(expression), call=lambda world, step, *args: step(world, *args))
    seen = {repr(twins.step(*pair(seed=seed))) for seed in range(3)}
    assert twins.num_captures <= 2, twins.reasons
    assert len(seen) == 3 or "world.log" in expression


@pytest.mark.sample(9)
@pytest.mark.parametrize("expression", APART.values(), ids=APART)
def test_text_that_is_taken_apart_is_refused(expression: str) -> None:
    with pytest.raises(CaptureError, match=r"\.py:\d+: .*known when the step runs"):
        wholestep.compile(step_of(expression))(build(), *pair())


def test_text_is_printed_and_logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.late")

    def step(world: World, features: Any, targets: Any) -> None:
        loss = mse_step(world.model, world.optimizer, features, targets)
        print(f"loss {loss.item():.4f}", file=sys.stdout)
        logger.warning(f"loss {loss.item():.4f} %s", "end")

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    for seed in range(3):
        twins.step(*pair(seed=seed))
    assert_said_alike(capsys, caplog)
