"""plan.json: it comes back as it was, and whatever else is in a file is refused in one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wholestep._strict_json import fingerprint
from wholestep.cli.plan_view import plan_report
from wholestep.comm.plan import BucketPlan, DataParallelPlan
from wholestep.compiler import Choice, Plan
from wholestep.compiler.made_for import MadeFor
from wholestep.compiler.plan_file import FORMAT, from_json, load_plan, save_plan, to_json
from wholestep.compiler.predictions import (
    DeviceFigures,
    LogitsShare,
    MemoryFigures,
    PhaseWork,
    Predictions,
    Share,
    StepSize,
)
from wholestep.errors import PlanFileError
from wholestep.passes import Pipeline
from wholestep.remat import RematPlan
from wholestep.remat.plan import KeptValue, ModuleUse, RepeatedOp

NUM_EXAMPLES = 200
NUM_SLOW_EXAMPLES = 10_000

PLAN = Plan(
    made_for=MadeFor("train_step", "train.py:make_step", "0.1", "2.13.0", 64, 5, "0123", "4567"),
    rewrites=(
        Choice("simplify", Pipeline.parse("simplify,cse{across_phases=true}"), "the same bits"),
        Choice("memory", Pipeline.parse('remat{kept="addmm mm_1"}'), "budget 0.5"),
    ),
    loop=(Choice("in place", Pipeline.parse("reinplace"), "where it may"),),
    communication=DataParallelPlan(
        64, True, (BucketPlan(("a", "b"), 12, True, "moves: late"),), "25gbit,10us", 22.5, 4.0, 24.0, 1.5, 25.0
    ),
    memory=RematPlan(
        "0.5",
        90,
        100,
        0.25,
        (KeptValue("addmm", "layers.0", 8, "others are computed from it"),),
        (RepeatedOp("gelu", "layers.0", 2, 0, 16, 0.25),),
        (ModuleUse("layers.0", "0.3", 8, 16),),
    ),
    predictions=Predictions(
        device=DeviceFigures("h200", 6e8, 4e6, 3.0, 141 * 10**9),
        size=StepSize(7, 6, 14, 0, 56, 8),
        phases={"forward": PhaseWork(2, 100, 5, 20, 7.5), "backward": PhaseWork(3, 200, 9, 40, 15.0)},
        memory=MemoryFigures(
            90,
            100,
            80,
            "mm_3 (backward)",
            (Share("parameters", 14), Share("layers.*.mlp", 40)),
            LogitsShare(40, 60, 4, "head"),
        ),
        step_us=24.0,
    ),
)


def text_of(whole: dict[str, Any], *, is_signed: bool = True) -> bytes:
    """A file; with `is_signed` its fingerprint is made to fit, so that what is behind it is looked at."""
    if is_signed and "plan" in whole:
        whole = {**whole, "fingerprint": fingerprint(whole["plan"])}
    return json.dumps(whole).encode()


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    file = save_plan(PLAN, tmp_path / "folder" / "plan.json")
    assert load_plan(file) == PLAN
    assert plan_report(load_plan(file)).to_text() == plan_report(PLAN).to_text()


def test_a_file_that_was_changed_is_refused() -> None:
    data = text_of(to_json(PLAN), is_signed=False)
    assert from_json(data) == PLAN
    with pytest.raises(PlanFileError, match="does not have its own fingerprint"):
        from_json(data.replace(b"train_step", b"train_stop"))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def changed(whole: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place."""
    if not path:
        return new
    whole = copy.deepcopy(whole)
    owner = whole
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = new
    return whole


JSON = to_json(PLAN)
PLACES = places(JSON)


@pytest.mark.parametrize("path", PLACES[1:], ids=str)
def test_every_value_has_a_type(path: tuple[Any, ...]) -> None:
    for wrong in ({"x": [1]}, True):
        if path[-1] in ("moved", "late", "average") and wrong is True:
            continue
        with pytest.raises(PlanFileError):
            from_json(text_of(changed(JSON, path, wrong), is_signed=path[0] == "plan"))


@pytest.mark.parametrize("path", PLACES[1:], ids=str)
def test_every_key_is_needed_and_no_other_is_known(path: tuple[Any, ...]) -> None:
    owner = JSON
    for key in path[:-1]:
        owner = owner[key]
    if not isinstance(owner, dict) or path[:-1] == ("plan", "predictions", "phases"):
        return
    less = copy.deepcopy(JSON)
    inner = less
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(PlanFileError):
        from_json(text_of(less, is_signed=len(path) > 1))
    inner[path[-1]] = owner[path[-1]]
    inner["surprise"] = 1
    with pytest.raises(PlanFileError, match=r"surprise|fingerprint"):
        from_json(text_of(less, is_signed=len(path) > 1))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is no JSON"),
        (b"[]", "is an object, not an array"),
        (b"\xff", "is no JSON"),
        (b'{"format": "x"}', "its 'format' is not 'wholestep-plan'"),
        (json.dumps({"format": FORMAT, "version": 1}).encode(), "has version 1; this release reads 2"),
        (json.dumps({"format": FORMAT, "version": 2}).encode(), "has no 'fingerprint'"),
        (b'{"a": 1, "a": 2}', "gives a key of one object twice"),
        (b'{"a": NaN}', "has the number NaN"),
        (b'{"a": ' + b"[" * 100_000, "nests too deeply"),
        (b'{"format": ' + b"9" * 5000 + b"}", "is no JSON"),
    ],
)
def test_what_is_no_plan_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(PlanFileError, match=complaint):
        from_json(data)


@pytest.mark.parametrize("number", [-1, -0.5, 2**63, 10**400, "1e999"])
def test_numbers_are_finite_and_in_range(number: Any) -> None:
    whole = changed(JSON, ("plan", "predictions", "step_us"), "HERE" if number == "1e999" else number)
    data = json.dumps(whole).replace('"HERE"', "1e999").encode()
    if number != "1e999":
        data = text_of(whole)
    with pytest.raises(PlanFileError):
        from_json(data)


def test_text_that_would_move_a_terminal_is_refused() -> None:
    with pytest.raises(PlanFileError, match="cannot be printed"):
        from_json(text_of(changed(JSON, ("plan", "made_for", "step"), "\x1b[2Jgone")))


def test_a_file_that_is_not_there_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanFileError, match="cannot be read"):
        load_plan(tmp_path / "none.json")
    file = save_plan(PLAN, tmp_path / "plan.json")
    monkeypatch.setattr("wholestep.compiler.plan_file.MAX_BYTES", 100)
    with pytest.raises(PlanFileError, match="more than 100 bytes"):
        load_plan(file)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Noise, torn and mutated bytes of a plan, and plans with other values somewhere, signed as if they were ours."""
    kind = draw(st.sampled_from(["noise", "bytes", "values", "json"]))
    if kind == "noise":
        return draw(st.binary(max_size=200))
    if kind == "json":
        return text_of({"format": FORMAT, "version": 2, "plan": draw(VALUES)})
    if kind == "values":
        whole: Any = JSON
        for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
            try:
                whole = changed(whole, path, draw(VALUES))
            except (KeyError, IndexError, TypeError):
                continue
        return text_of(whole) if isinstance(whole, dict) else json.dumps(whole).encode()
    data = bytearray(text_of(JSON))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 6))] = draw(st.binary(max_size=6))
        if not data:
            break
    return bytes(data)


def check_file(data: bytes) -> None:
    """Only a plan that can be shown and written again, or a `PlanFileError`."""
    try:
        plan = from_json(data)
    except PlanFileError:
        return
    assert plan_report(plan).to_text()
    assert from_json(json.dumps(to_json(plan)).encode()) == plan


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files())
def test_any_file_is_a_plan_or_an_error(data: bytes) -> None:
    check_file(data)


@pytest.mark.slow
@settings(max_examples=NUM_SLOW_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files())
def test_very_many_files_are_plans_or_errors(data: bytes) -> None:
    check_file(data)
