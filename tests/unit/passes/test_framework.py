"""Passes and pipelines: order, text form, what the manager does around a pass, and the history a graph keeps."""

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep.capture import capture
from wholestep.errors import GraphError, PassError, SettingsError
from wholestep.graph import StepGraph
from wholestep.passes import (
    DEFAULT_PIPELINE,
    Pass,
    Pipeline,
    base,
    manager,
    new_dump_folder,
    register,
    registered,
    run_passes,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Scripted(Pass):
    """Does nothing, or what `doing` says."""

    name: ClassVar[str] = "scripted"
    repeatable: ClassVar[bool] = True

    def apply(self, graph: StepGraph) -> StepGraph:
        return graph


@dataclass(frozen=True)
class Alpha(Scripted):
    name: ClassVar[str] = "alpha"
    repeatable: ClassVar[bool] = False
    wide: bool = False
    depth: int = 3
    rate: float = 0.5
    label: str = "none"


@dataclass(frozen=True)
class NeedsAlpha(Scripted):
    name: ClassVar[str] = "needs-alpha"
    requires: ClassVar[tuple[str, ...]] = ("alpha",)


@dataclass(frozen=True)
class BehindAlpha(Scripted):
    name: ClassVar[str] = "behind_alpha"
    after: ClassVar[tuple[str, ...]] = ("alpha",)


@dataclass(frozen=True)
class OnWrites(Scripted):
    name: ClassVar[str] = "on_writes"
    needs_functional: ClassVar[bool] = False


OWN = (Scripted, Alpha, NeedsAlpha, BehindAlpha, OnWrites)


def doing(script: Callable[[StepGraph], Any], cls: type[Pass] = Scripted) -> Pass:
    """A pass like `cls` that calls `script`; where that returns a graph, it is the pass's result."""

    class Doing(cls):
        def apply(self, graph: StepGraph) -> StepGraph:
            return script(graph) or graph

    return Doing()


@pytest.fixture(autouse=True)
def _known_only_here() -> Iterator[None]:
    kept = dict(base._REGISTRY)  # pyright: ignore[reportPrivateUsage]
    for cls in OWN:
        register(cls)
    yield
    base._REGISTRY.clear()  # pyright: ignore[reportPrivateUsage]
    base._REGISTRY.update(kept)  # pyright: ignore[reportPrivateUsage]


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    hidden = model(x)
    loss = (hidden.detach() * hidden).sum() + (hidden.detach() * hidden).mean()
    loss.backward()
    optimizer.step()
    return loss, hidden.clone()


@pytest.fixture(name="original", scope="module")
def _original() -> StepGraph:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return capture(train_step, (model, optimizer, torch.ones(4, 3)), {}).graph


@pytest.fixture(name="graph")
def _graph(original: StepGraph) -> StepGraph:
    return original.copy()


def body(graph: StepGraph) -> str:
    """The printed graph without its first line, which holds history and times."""
    return str(graph).partition("\n")[2]


# PASS-1: names, options, order


def test_a_pass_that_requires_another_names_both(graph: StepGraph) -> None:
    for pipeline in ([NeedsAlpha()], [NeedsAlpha(), Alpha()]):
        with pytest.raises(PassError, match="'needs-alpha' requires 'alpha'"):
            run_passes(graph, pipeline)
    assert graph.history == []
    run_passes(graph, [Alpha(), Scripted(), NeedsAlpha()])
    run_passes(graph, [NeedsAlpha()])


def test_a_pass_that_comes_before_its_predecessor_names_both(graph: StepGraph) -> None:
    with pytest.raises(PassError, match="'behind_alpha' must come after 'alpha'"):
        run_passes(graph, [BehindAlpha(), Scripted(), Alpha()])
    assert graph.history == []


def test_a_predecessor_in_the_same_pipeline_or_none_at_all_is_fine(graph: StepGraph) -> None:
    run_passes(graph.copy(), [BehindAlpha()])
    run_passes(graph, [Alpha(), BehindAlpha()])
    assert [record.name for record in graph.history] == ["alpha", "behind_alpha"]


def test_a_predecessor_may_not_follow_in_a_later_pipeline(graph: StepGraph) -> None:
    run_passes(graph, [BehindAlpha()])
    with pytest.raises(PassError, match=r"'behind_alpha'.*'alpha'|'alpha'.*'behind_alpha'"):
        run_passes(graph, [Alpha()])


def test_nothing_runs_when_the_order_is_wrong_further_down(graph: StepGraph) -> None:
    ran: list[str] = []
    with pytest.raises(PassError):
        run_passes(graph, [doing(lambda _: ran.append("first")), NeedsAlpha()])
    assert ran == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nope", ["no pass 'nope'", "cse", "reinplace"]),
        ("alpha{nope=1}", ["'alpha'", "'nope=1'", "wide, depth, rate, label"]),
        ("alpha{depth}", ["'alpha'", "'depth'"]),
        ("alpha{depth=deep}", ["'depth'", "'alpha'", "int", "'deep'"]),
        ("alpha{depth=1.5}", ["'depth'", "int", "'1.5'"]),
        ("alpha{rate=fast}", ["'rate'", "float", "'fast'"]),
        ("alpha{wide=1}", ["'wide'", "true or false", "'1'"]),
        ("dce{x=1}", ["'dce'", "'x=1'", "none"]),
        ("cse{", ["cannot read", "'cse{'"]),
        ("cse}", ["cannot read", "'cse}'"]),
        ("cse dce", ["cannot read", "'cse dce'"]),
        ("cse,,dce", ["cannot read", "',dce'"]),
        (",cse", ["cannot read", "',cse'"]),
        ("cse;dce", ["cannot read", "'cse;dce'"]),
    ],
)
def test_what_cannot_be_read_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(PassError) as caught:
        Pipeline.parse(text)
    for word in words:
        assert word in str(caught.value)


def test_pipelines_print_their_passes_and_the_options_that_were_set() -> None:
    assert str(DEFAULT_PIPELINE) == "simplify,cse,dce,reinplace"
    assert str(Pipeline()) == ""
    assert str(Pipeline((Alpha(wide=True, rate=0.25), Alpha(depth=3), Scripted()))) == (
        "alpha{wide=true,rate=0.25},alpha,scripted"
    )
    assert str(Alpha(wide=False, label="x")) == "alpha{label=x}"


def test_blanks_and_empty_options_do_not_matter() -> None:
    expected = Pipeline((Alpha(depth=4, rate=1.0), Scripted()))
    assert Pipeline.parse(" alpha {depth=4, rate=1} ,scripted{}") == expected
    assert Pipeline.parse("") == Pipeline.parse("  ") == Pipeline()


def test_pipelines_are_equal_when_their_passes_and_options_are() -> None:
    assert Pipeline((Alpha(depth=2),)) == Pipeline((Alpha(depth=2),))
    assert Pipeline((Alpha(depth=2),)) != Pipeline((Alpha(),))
    assert Pipeline((Alpha(), Scripted())) != Pipeline((Scripted(), Alpha()))
    assert Scripted() != OnWrites()
    assert list(Pipeline((Alpha(), Scripted()))) == [Alpha(), Scripted()]


LABELS = st.text(st.characters(codec="utf-8", exclude_characters=",{}"), max_size=8)
ALPHAS = st.builds(
    Alpha, wide=st.booleans(), depth=st.integers(), rate=st.floats(allow_nan=False), label=LABELS.map(str.strip)
)
CSE = registered()["cse"]
PASSES = st.one_of(ALPHAS, st.builds(CSE, across_phases=st.booleans()), st.sampled_from([Scripted(), NeedsAlpha()]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(passes=st.lists(PASSES, max_size=5))
def test_parsing_undoes_printing(passes: list[Pass]) -> None:
    pipeline = Pipeline(tuple(passes))
    assert Pipeline.parse(str(pipeline)) == pipeline
    assert str(Pipeline.parse(str(pipeline))) == str(pipeline)


@pytest.mark.parametrize("label", ["a,b", "{", "a}b", "a "])
def test_any_text_may_be_an_option(label: str) -> None:
    pipeline = Pipeline((Alpha(label=label), Scripted()))
    assert Pipeline.parse(str(pipeline)) == pipeline


def test_two_passes_cannot_share_a_name() -> None:
    class Other(Scripted):
        pass

    with pytest.raises(PassError, match=r"two passes are called 'scripted': Scripted and .*Other"):
        register(Other)
    assert registered()["scripted"] is Scripted
    assert list(registered()) == sorted(registered())


# PASS-2: what happens around a pass


def break_phase(graph: StepGraph) -> None:
    del next(graph.calls()).meta["phase"]


def test_a_graph_that_is_broken_already_is_found_before_any_pass(graph: StepGraph) -> None:
    ran: list[str] = []
    break_phase(graph)
    with pytest.raises(GraphError, match="has no phase") as caught:
        run_passes(graph, [doing(lambda _: ran.append("ran"))])
    assert ran == []
    assert getattr(caught.value, "__notes__", []) == []


def test_a_pass_that_breaks_the_graph_is_named(graph: StepGraph) -> None:
    with pytest.raises(GraphError, match=r"pass 'behind_alpha' broke the graph: .* has no phase"):
        run_passes(graph, [Scripted(), doing(break_phase, BehindAlpha), OnWrites()])
    assert [record.name for record in graph.history] == ["scripted"]


def test_dead_code_goes_before_and_after_a_pass(graph: StepGraph) -> None:
    num_ops = graph.num_ops
    node = graph.gradients["weight"]

    def leave_rubbish(graph: StepGraph) -> None:
        assert graph.num_ops == num_ops
        graph.insert(aten.exp.default, (node,), like=node, after=node)

    leave_rubbish(graph)
    assert graph.num_ops == num_ops + 1
    run_passes(graph, [doing(leave_rubbish)])
    assert graph.num_ops == num_ops


def test_a_pass_is_recorded_with_its_options_time_and_ops(graph: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate([0.0, 0.25, 1.0, 0.5])
    monkeypatch.setattr(manager, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    num_ops = graph.num_ops
    run_passes(graph, [Alpha(depth=7), *Pipeline.parse("simplify")])
    first, second = graph.history
    assert (first.name, first.text, first.num_ops_before, first.num_ops_after) == (
        "alpha",
        "alpha{depth=7}",
        num_ops,
        num_ops,
    )
    assert (second.num_ops_before, second.num_ops_after) == (num_ops, graph.num_ops)
    assert graph.num_ops < num_ops
    assert (first.seconds, second.seconds) == (0.25, 0.5)
    header, _, _ = str(graph).partition("\n")
    assert header.endswith("after alpha{depth=7} (250.0 ms), simplify (500.0 ms)")


def test_each_pass_leaves_a_line_in_the_debug_log(graph: StepGraph, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="wholestep"):
        run_passes(graph, [Alpha(depth=7), *Pipeline.parse("simplify")])
    messages = [record.getMessage() for record in caplog.records if record.name == "wholestep.passes.manager"]
    assert [re.sub(r"\d+\.\d ms", "T", message) for message in messages] == [
        f"{record.text}: {record.num_ops_before} -> {record.num_ops_after} ops, T" for record in graph.history
    ]


def test_each_pass_leaves_its_graphs_and_their_difference_in_the_dump_folder(graph: StepGraph, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "dumps"
    before = str(graph)
    run_passes(graph, Pipeline.parse("simplify"), dump_dir=folder)
    between = str(graph)
    run_passes(graph, Pipeline.parse("cse,scripted"), dump_dir=folder)
    stems = ("01_simplify", "02_cse", "03_scripted")
    names = [f"{stem}.{suffix}" for stem in stems for suffix in ("after.py", "before.py", "diff")]
    assert sorted(path.name for path in folder.iterdir()) == names
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts["01_simplify.before.py"] == before
    assert texts["01_simplify.after.py"] == texts["02_cse.before.py"] == between
    assert texts["03_scripted.after.py"] == str(graph)
    removed = [text for text in texts["01_simplify.diff"].splitlines() if text.startswith("-    detach")]
    assert removed
    assert all(f"{text[1:]}\n" in before and f"{text[1:]}\n" not in between for text in removed)


def test_captures_do_not_write_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F9: another capture, another step of the same name and another run each have a folder, with what runs in it."""
    monkeypatch.setenv("WHOLESTEP_DUMP_DIR", str(tmp_path / "dumps"))

    def train_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = wholestep.compile(train_step, dynamic_batch=False)
    texts: list[str] = []
    for rows in (3, 5):
        first(model, optimizer, torch.randn(rows, 4))
        texts.append(str(first.graph))
    second = wholestep.compile(train_step, cross_iteration="all")
    second(model, optimizer, torch.randn(3, 4))
    second.flush()
    folders = sorted((tmp_path / "dumps").iterdir())
    assert [folder.name.rpartition("-")[2] for folder in folders] == ["1", "2", "3"]
    assert [(folder / "step.py").read_text() for folder in folders[:2]] == texts
    assert texts[0] != texts[1]
    loop = {name: (folders[2] / f"{name}.py").read_text() for name in ("setup", "main", "cleanup", "flush")}
    assert loop == {name: str(graph) for name, graph in second.iteration.by_name().items()}


def test_a_dump_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"graphs cannot be written to .*: "):
        new_dump_folder(tmp_path / "file", "train_step")


def test_dump_folders_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert new_dump_folder(tmp_path, "Trainer.<locals>.step").name == "rank3-Trainer_locals_step-1"


def test_nothing_is_written_without_a_dump_folder(
    graph: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_passes(graph, DEFAULT_PIPELINE)
    assert list(tmp_path.iterdir()) == []


def test_a_pass_may_return_another_graph(graph: StepGraph) -> None:
    result = run_passes(graph, [doing(lambda given: given.copy())])
    assert result is not graph
    assert [record.name for record in result.history] == ["scripted"]
    assert graph.history == []


def test_passes_that_reason_about_values_refuse_a_graph_that_writes(graph: StepGraph) -> None:
    run_passes(graph, Pipeline.parse("reinplace,dce,on_writes"))
    for text in ("simplify", "cse", "scripted"):
        with pytest.raises(PassError, match=f"'{text}' needs a functional graph and must come before 'reinplace'"):
            run_passes(graph, Pipeline.parse(text))


# PASS-3: history belongs to the graph


def test_one_pass_may_run_on_two_graphs(original: StepGraph) -> None:
    item = Alpha()
    for _ in range(2):
        graph = run_passes(original.copy(), [item])
        assert [record.name for record in graph.history] == ["alpha"]
    assert original.history == []


@pytest.mark.parametrize("separately", [True, False])
def test_a_pass_runs_on_one_graph_once_unless_it_is_repeatable(graph: StepGraph, separately: bool) -> None:
    run_passes(graph, [Scripted(), Scripted(), *([Alpha()] if separately else [])])
    with pytest.raises(PassError, match="'alpha' has already run on this graph"):
        run_passes(graph, [Alpha()] if separately else [Alpha(), Alpha()])
    run_passes(graph, [Scripted()])


def test_a_copy_has_a_history_of_its_own(graph: StepGraph) -> None:
    run_passes(graph, [Alpha()])
    duplicate = graph.copy()
    run_passes(duplicate, [Scripted()])
    assert [record.name for record in graph.history] == ["alpha"]
    assert [record.name for record in duplicate.history] == ["alpha", "scripted"]
    with pytest.raises(PassError, match="has already run"):
        run_passes(duplicate, [Alpha()])


# PASS-4: a pass with nothing to do leaves no trace


def unrewritable(model: nn.Module, x: Tensor) -> Tensor:
    """One product of two inputs that may not be written."""
    return torch.mm(x, x)


@pytest.mark.parametrize("name", [name for name in registered() if name not in {cls.name for cls in OWN}])
def test_a_pass_without_an_opportunity_changes_nothing(name: str) -> None:
    graph = capture(unrewritable, (nn.Linear(1, 1), torch.ones(2, 2)), {}).graph
    before = body(graph)
    assert "aten.mm.default" in before
    assert body(run_passes(graph, Pipeline.parse(",".join([*requirements(name), name])))) == before


def requirements(name: str) -> list[str]:
    """All passes that must have run before one."""
    return [item for required in registered()[name].requires for item in [*requirements(required), required]]


@pytest.mark.parametrize("name", [name for name, cls in registered().items() if cls.repeatable])
def test_a_pass_that_has_run_finds_nothing_the_second_time(graph: StepGraph, name: str) -> None:
    run_passes(graph, Pipeline.parse(name))
    before = body(graph)
    assert body(run_passes(graph, Pipeline.parse(name))) == before


def test_the_whole_pipeline_finds_nothing_the_second_time(graph: StepGraph) -> None:
    pipeline = Pipeline.parse("simplify,cse,dce")
    before = body(graph)
    once = body(run_passes(graph, pipeline))
    assert once != before
    assert body(run_passes(graph, pipeline)) == once
