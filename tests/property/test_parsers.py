"""Text from anywhere: schedules, split plans and pass pipelines are read, or refused with an error of ours.

Each reader gets noise, and good text in which something was cut, doubled, exchanged or put in. Whatever comes, reading
opens nothing, imports nothing and runs nothing; what is read is written back as the same thing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import operator
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.errors import PassError, ScheduleError, SplitError, WholestepError
from wholestep.passes import Pipeline
from wholestep.pipe import FAMILIES, Schedule, build_schedule, validate
from wholestep.pipe.split import PlannedStage, SplitPlan

NUM_EXAMPLES, NUM_SLOW_EXAMPLES = 200, 10_000
LONGEST_S = 60
"""A reader that takes so long for one text hangs."""
MOST_MESSAGE = 1000
FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=NUM_EXAMPLES)
SLOW_FUZZ = settings(FUZZ, max_examples=NUM_SLOW_EXAMPLES)
SEEDS = st.integers(0, 2**32)


# What a reader does behind our back

_FORBIDDEN = (
    "compile",
    "exec",
    "import",
    "open",
    "marshal",
    "pickle",
    "os.",
    "subprocess",
    "socket",
    "ctypes",
    "code.",
)
_seen: list[str] | None = None


def _audit(event: str, _: Any) -> None:
    if _seen is not None and event.startswith(_FORBIDDEN):
        _seen.append(event)


@functools.cache
def _listen() -> None:
    sys.addaudithook(_audit)  # for good: Python has no way to take one off


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What the interpreter reports while the block runs: files, imports, code; the block is ended if it hangs."""
    global _seen

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"a reader hangs: it is not done after {LONGEST_S} s")

    _listen()
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST_S)
    _seen = found = list[str]()
    try:
        yield found
    finally:
        _seen = None
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_watch_sees_code_and_files() -> None:
    with watched() as seen:
        exec("1")
        with contextlib.suppress(OSError):
            Path("/nowhere/at/all").read_text()
    assert {"compile", "exec", "open"} <= set(seen)
    with watched() as seen:
        json.loads("{}")
    assert seen == []


def is_read(read: Callable[[str], Any], text: str, error: type[WholestepError]) -> bool:
    """Whether a text is read; if not the error is the one of this reader, in a short sentence."""
    with watched() as seen:
        try:
            read(text)
            message = ""
        except error as refusal:
            message = str(refusal)
            assert message
    assert seen == []
    assert message.isprintable()
    assert len(message) < MOST_MESSAGE
    return not message


# Readers, each with what must hold of a text that it reads


def read_schedule(text: str) -> None:
    schedule = Schedule.from_csv(text)
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    with contextlib.suppress(ScheduleError):
        validate(schedule)


def read_split_plan(text: str) -> None:
    plan = SplitPlan.from_json(text)
    assert SplitPlan.from_json(plan.to_json()) == plan
    assert len(str(plan).splitlines()) == 1 + len(plan.stages)
    assert plan.slowest_us >= 0


def read_pipeline(text: str) -> None:
    pipeline = Pipeline.parse(text)
    assert Pipeline.parse(str(pipeline)) == pipeline


# Good texts, and what to do to them


@functools.cache
def schedules() -> list[str]:
    return [build_schedule(name, 2, 4).to_csv() for name in FAMILIES]


@functools.cache
def split_plan() -> dict[str, Any]:
    stages = [PlannedStage(begin, f"'blocks.{begin}'", "balanced", 1.5, 3.25, 64, 2**20, 2**22) for begin in (0, 7, 9)]
    return json.loads(SplitPlan(tuple(stages), 12).to_json())


PIPELINES = [
    "simplify,cse{across_phases=true},dce,reinplace",
    'allreduce,bucket{mb=4.0,groups="a.weight b;c"},split_optimizer,overlap{late="x,y"}',
    "rotate{buckets=all,strict=false}",
    'remat{kept="add mul_1",starts=""},lower{min_ops=3}',
    "chunk_loss{chunks=8} , pad_logits{multiple=64, min_classes=10}",
]
PIECES = [
    *(",", "\n", "{", "}", '"', "\\", "'", "=", ";", " ", "\t", "\r", "\x00", "\x1b[2J", "\ufeff", "\ud800", "٣", "…"),
    *("0F0", "9999999F9999999", "-1F0", "0X0", "0F", "00000001B1", "1e3", "1W1"),
    *("NaN", "Infinity", "-0", "1e999", "9" * 5000, "null", "true", "[]", "{}", "[" * 2000, '{"a":' * 2000),
    *("__import__('os').system('true')", "os.system", "${HOME}", "{{7*7}}", "%s%n", "../../etc/passwd", "x" * 4000),
    *('"\\u0000"', '"\\x"', "mb=", "mb=nan", "strict=maybe", "cse", "no_such_pass", "cse{across_phases=true,"),
]
EVIL: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**63, 10**400, 0.5, -0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "a\nb", "\x1b[2J", "\ud800", "x" * 4000, "os.system", [], {}, [[]], {"begin": 0}, [0] * 50),
]


def mangled(text: str, draw: random.Random) -> str:
    """A text with one to four pieces cut, doubled, moved or put in."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(text))
        end = min(len(text), start + draw.choice((0, 1, 1, 2, 5, 20, 200)))
        piece = text[start:end]
        other = draw.choice(("", draw.choice(PIECES), draw.choice(PIECES), piece * 2, piece[::-1], piece * 50))
        text = text[:start] + other + text[end:]
    return text if draw.random() < 0.8 else text[: draw.randint(0, len(text))]


def mangled_plan(draw: random.Random) -> str:
    """The split plan with something else in one to three places, and sometimes with its text mangled, too."""
    plan: Any = copy.deepcopy(split_plan())
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        stage = draw.randrange(3)
        places = [("version",), ("num_calls",), ("stages",), ("stages", stage)]
        places += [("stages", stage, name) for name in split_plan()["stages"][0]]
        *way, last = draw.choice(places)
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change has removed the place
            change(functools.reduce(operator.getitem, way, plan), last, draw)
    text = json.dumps(plan)
    return mangled(text, draw) if draw.random() < 0.3 else text


def change(parent: Any, key: Any, draw: random.Random) -> None:
    way = draw.randrange(6)
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif way == 2 and isinstance(parent, dict):
        parent[draw.choice(["x", "", "self", "begin "])] = parent.pop(key)
    elif way == 3 and type(parent[key]) in (int, float):
        parent[key] += draw.choice((-1, 1, 2**40))
    else:
        parent[key] = copy.deepcopy(draw.choice(EVIL))


READERS: dict[str, tuple[Callable[[str], Any], type[WholestepError], Callable[[random.Random], str]]] = {
    "schedule": (read_schedule, ScheduleError, lambda draw: mangled(draw.choice(schedules()), draw)),
    "split plan": (read_split_plan, SplitError, mangled_plan),
    "pipeline": (read_pipeline, PassError, lambda draw: mangled(draw.choice(PIPELINES), draw)),
}
each_reader = pytest.mark.parametrize("name", READERS)


def is_mangled_text_read(name: str, seed: int) -> bool:
    read, error, mangle = READERS[name]
    return is_read(read, mangle(random.Random(seed)), error)


@each_reader
@FUZZ
@given(seed=SEEDS)
def test_mangled_text_is_read_or_refused(name: str, seed: int) -> None:
    is_mangled_text_read(name, seed)


@pytest.mark.slow
@each_reader
@SLOW_FUZZ
@given(seed=SEEDS)
def test_ten_thousand_mangled_texts_are_read_or_refused(name: str, seed: int) -> None:
    is_mangled_text_read(name, seed)


@each_reader
@FUZZ
@given(text=st.text(max_size=80) | st.text("0123FBIW,\n {}=\"\\'abc_", max_size=200))
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    read, error, _ = READERS[name]
    is_read(read, text, error)


@each_reader
def test_mangled_texts_are_neither_all_refused_nor_all_read(name: str) -> None:
    outcomes = [is_mangled_text_read(name, seed) for seed in range(300)]
    assert 5 <= outcomes.count(True) <= 295


def test_the_texts_are_good_before_they_are_mangled() -> None:
    assert all(is_read(read_schedule, text, ScheduleError) for text in schedules())
    assert is_read(read_split_plan, json.dumps(split_plan()), SplitError)
    assert all(is_read(read_pipeline, text, PassError) for text in PIPELINES)


@settings(FUZZ, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=10,
    )
)
def test_other_json_is_no_split_plan(value: Any) -> None:
    assert not is_read(read_split_plan, json.dumps(value), SplitError)
    whole = {**split_plan(), "stages": value}
    assert not is_read(read_split_plan, json.dumps(whole), SplitError)


# Texts that take a careless reader very long, or all the memory there is

LONG = 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("schedule", "0F0," * LONG + "x"),
        ("schedule", "0F0\n" * LONG),
        ("schedule", "," * (2 * 10**6)),
        ("schedule", "0F999999,65535F0"),
        ("schedule", "1" * (33 * 2**20)),
        ("split plan", "[" * LONG),
        ("split plan", '{"a":' * LONG),
        ("split plan", '{"version":1,"num_calls":' + "9" * LONG + "}"),
        ("split plan", " " * (33 * 2**20)),
        ("split plan", '{"version":1,"num_calls":9,"stages":[' + "0," * LONG + "0]}"),
        ("pipeline", "cse{" + "a" * LONG),
        ("pipeline", "cse{" + "a=1," * LONG),
        ("pipeline", "cse" + " " * LONG + "x"),
        ("pipeline", "cse{across_phases=" + " " * LONG + '"x" "}'),
        ("pipeline", "cse{across_phases" + " " * LONG + "}"),
        ("pipeline", 'cse{across_phases="' + "\\\\" * LONG + "}"),
        ("pipeline", "cse," * LONG + "{"),
        ("pipeline", "x" * LONG),
        ("pipeline", "cse," * (5 * 2**20)),
    ],
    ids=lambda value: value if len(value) < 12 else f"{value[:12]!r}",
)
def test_text_that_would_keep_a_careless_reader_busy(name: str, text: str) -> None:
    read, error, _ = READERS[name]
    assert not is_read(read, text, error)
