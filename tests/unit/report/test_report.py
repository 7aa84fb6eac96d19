"""Reports say what is true of the graph, in text and in HTML, and a page needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from markupsafe import Markup
from tests.dry_steps import Layer, train_step
from torch import nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep.api import CompiledStep
from wholestep.cost import profile_memory
from wholestep.graph import Phase
from wholestep.graph.printer import format_call
from wholestep.report import Bar, Card, Code, Figure, Prose, Report, Section, Table, step_report
from wholestep.report.charts import Series, line_chart
from wholestep.report.document import Browser, Group, Line
from wholestep.report.palette import DARK, LIGHT
from wholestep.report.summary import format_bytes, format_count, format_seconds, module_pattern

VOID_ELEMENTS = {"meta", "input"}  # the only ones a page uses
# Everything at once: ends a script, an attribute and a comment, and loads and runs something.
HOSTILE = """</script><img src=x onerror="alert('1')">--><b>&"""


@pytest.fixture(name="step", scope="module")
def _step() -> CompiledStep:
    model = nn.Sequential(Layer(8), Layer(8), nn.Linear(8, 2, bias=False))
    step = wholestep.compile(train_step, dynamic_batch=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, torch.randn(4, 8))
    step(model, optimizer, torch.randn(5, 8))
    return step


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The lines of a section of the text, by their first words; cells are two blanks apart."""
    section = text.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]
    cells = [re.split(r"\s{2,}", line.strip()) for line in section.splitlines()]
    return {first: rest for first, *rest in cells}


def test_the_text_counts_ops_flops_and_bytes_by_phase(step: CompiledStep) -> None:
    phases = rows(step.explain(), "Phases")
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert phases[phase][0] == str(len(list(step.graph.calls(phase))))
    assert phases["total"][0] == str(step.graph.num_ops)
    # Batch 5: two layers of 8x8 and one of 8x2; the backward skips the gradient of the batch.
    forward = 2 * 5 * 8 * (8 + 8 + 2)
    assert phases["forward"][1] == format_count(forward) == "1.4 k"
    assert phases["backward"][1] == format_count(2 * forward - 2 * 5 * 8 * 8)
    assert phases["optimizer"][1:3] == ["0", "0.0%"]
    assert Phase.COMM not in phases


def test_the_text_names_captures_slots_modules_and_passes(step: CompiledStep) -> None:
    text = step.explain()
    assert text.startswith(f"train_step  (wholestep {wholestep.__version__}, torch {torch.__version__})\n")
    assert re.search(r"^  Captures +2  ", text, re.MULTILINE)
    [reason] = step.recompile_reasons
    assert f"Captured again because {reason}." in text
    slots = rows(text, "Slots")
    num_bytes = 4 * (64 + 64 + 16)
    assert slots["parameters"][:2] == ["3", f"{num_bytes} B"]
    assert slots["optimizer state"][:2] == ["3", f"{num_bytes} B"]
    assert slots["batch"][:2] == ["1", f"{4 * 5 * 8} B"]
    modules = rows(text, "Modules")
    assert modules["*.inner"][0] == "2"
    assert modules["*.inner"][2:4] == [format_count(2 * 2 * 5 * 64), format_count(2 * 2 * 5 * 64 + 2 * 5 * 64)]
    assert list(rows(text, "Passes"))[1:] == [record.text for record in step.graph.history]


def test_the_text_says_where_memory_peaks(step: CompiledStep) -> None:
    profile = profile_memory(step.graph)
    text = step.explain()
    assert f"Predicted peak {format_bytes(profile.peak_bytes)} at {profile.peak_node} (" in text
    memory = rows(text, "Memory")
    assert memory["parameters"][0] == "576 B"
    shares = [float(cells[1].rstrip("%")) for cells in memory.values() if len(cells) == 2 and cells[1].endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_step_that_was_never_called_has_no_report() -> None:
    with pytest.raises(wholestep.GuardError, match="has not been called"):
        wholestep.compile(train_step).explain()


class Checker(HTMLParser):
    """Fails on tags that do not nest; collects text, and attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.metas: dict[str, str] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag == "meta":
            named = dict(attrs)
            self.metas[named.get("http-equiv") or named.get("name") or "charset"] = named.get("content") or ""
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID_ELEMENTS:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def test_the_page_is_whole_and_needs_nothing_else(step: CompiledStep, tmp_path: Path) -> None:
    path = step.report(tmp_path / "deep" / "report.html")
    page = path.read_text(encoding="utf-8")
    checker = check(page)
    assert page.startswith("<!doctype html>")
    assert '<html lang="en">' in page
    assert {"svg", "table", "details", "title", "h1", "nav", "main"} <= checker.seen
    assert not checker.seen & {"link", "img", "iframe", "object", "base", "form"}
    assert checker.references
    assert all(reference.startswith("#") and reference[1:] in checker.ids for reference in checker.references)
    assert len(set(checker.ids)) == len(checker.ids)
    assert not re.search(r"https?://|@import|url\(", page)


def test_the_page_allows_its_own_script_and_nothing_else(step: CompiledStep) -> None:
    checker = check(step_report(step).to_html())
    [script] = checker.scripts
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = checker.metas["Content-Security-Policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert f"script-src 'sha256-{hashed}'" in policy
    assert {rule.split()[0] for rule in policy} == {
        "default-src",
        "style-src",
        "script-src",
        "base-uri",
        "form-action",
    }
    assert checker.handlers == []
    plain = check(Report("t", "s").to_html())
    assert plain.scripts == []
    assert "script-src 'none'" in plain.metas["Content-Security-Policy"]


def test_the_page_holds_the_graph_and_the_figures(step: CompiledStep) -> None:
    page = step_report(step).to_html()
    text = check(page).text
    for node in step.graph.calls():
        assert f"{node.name} = {format_call(node)}" in text
        assert node.meta["source"] in text
    assert f"{step.graph.num_ops} ops" in text
    assert f"peak {format_bytes(profile_memory(step.graph).peak_bytes)} at" in text
    assert page == step_report(step).to_html()


def test_every_section_has_an_anchor_and_is_listed(step: CompiledStep) -> None:
    report = step_report(step)
    checker = check(report.to_html())
    for section in report.sections:
        assert checker.references.count(f"#{section.slug}") == 2  # in the table of contents and at its heading
    assert "#report-body" in checker.references


def test_what_comes_from_outside_is_escaped() -> None:
    nasty = HOSTILE
    group = Group(nasty, (Line(nasty, (nasty,)),), 3, nasty)
    blocks = (
        Prose(nasty),
        Table((nasty, "n"), ((nasty, Bar(nasty, 2.0)),), (nasty, nasty), nasty, ends_in_text=True, anchors=(nasty,)),
        Browser(((nasty, (group,)),), nasty, nasty),
        Figure(line_chart([Series(nasty, (1.0, 2.0))], title=nasty, x_label=nasty), nasty),
        Code(nasty, nasty),
    )
    page = Report(nasty, nasty, (Card(nasty, nasty, nasty),), (Section(nasty, blocks),)).to_html()
    checker = check(page)
    assert not {"b", "img"} & checker.seen
    assert checker.handlers == []
    assert len(checker.scripts) == 1
    assert checker.text.count(nasty) >= 22
    assert 'style="width:100.0%"' in page


def test_a_step_full_of_hostile_names_is_only_text() -> None:
    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(HOSTILE, nn.Linear(8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule(HOSTILE)(x)

    def hostile_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
        return train_step(model, optimizer, x)

    hostile_step.__name__ = HOSTILE
    model = Hostile()
    step = wholestep.compile(hostile_step)
    step(model, SGD(model.parameters(), lr=0.1), torch.randn(4, 8))
    for node in step.graph.calls():
        node.meta["source"] = f"{HOSTILE}.py:3"
    checker = check(step_report(step).to_html())
    assert not {"b", "img"} & checker.seen
    assert checker.handlers == []
    assert len(checker.scripts) == 1
    assert checker.text.count(HOSTILE) > step.graph.num_ops


def test_measurements_stand_beside_predictions() -> None:
    model = nn.Sequential(Layer(8), Layer(8))
    optimizer = SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(train_step)
    step(model, optimizer, torch.randn(4, 8))
    [hint] = [section for section in step_report(step).sections if section.title == "Predicted and measured"]
    assert "step.measure(...)" in str(hint.blocks[0])
    assert "Predicted and measured" not in step.explain()
    for _ in range(4):
        step.measure(model, optimizer, torch.randn(4, 8))
    found = rows(step.explain(), "Predicted and measured")
    peak = format_bytes(profile_memory(step.graph).peak_bytes)
    assert found["peak memory"] == [peak, peak, "+0.0%"]
    typical = step.measured.typical
    assert typical is not None
    assert found["step"][1] == format_seconds(typical.step_us / 1e6)
    assert found["backward"][1] == format_seconds(typical.totals["backward"] / 1e6)
    assert "compute, measured" in step_report(step).to_html()


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_what_is_written_can_be_read(palette: dict[str, str]) -> None:
    pairs = [(text, ground) for text in ("ink", "soft", "accent") for ground in ("surface", "page")]
    pairs += [("soft", "track"), ("ink", "track"), ("ink", "code")]
    pairs += [("surface", strip) for strip in ("forward", "backward", "comm", "optimizer", "bad")]
    for text, ground in pairs:
        assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
    assert contrast(palette["floor"], palette["surface"]) >= 3  # lines, and borders of what can be used


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as the accessibility guidelines define it."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_sections_can_be_added_at_both_ends() -> None:
    report = Report("t", "s", sections=(Section("Two words", (Prose("b"),)),))
    longer = report.before(Section("First", (Prose("a"),))).after(Section("Last", (Figure(Markup("<svg></svg>")),)))
    assert [section.slug for section in longer.sections] == ["first", "two-words", "last"]
    assert longer.to_text() == "t  (s)\n\n\nFirst\n  a\n\nTwo words\n  b\n"
    assert [section.title for section in report.sections] == ["Two words"]


def test_equal_lines_are_both_drawn_and_what_is_not_finite_is_left_out() -> None:
    chart = line_chart([Series("a", (3.0, 2.0)), Series("b", (3.0, float("nan")))], title="t", x_label="x")
    assert 'class="line line-0"' in chart
    assert 'class="line line-1"' in chart
    assert "nan" not in chart.split("</title>", 1)[1]
    assert line_chart([Series("flat", (1.0, 1.0))], title="t", x_label="x")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_layers_are_grouped_by_place() -> None:
    assert module_pattern("blocks.10.expand") == "blocks.*.expand"
    assert module_pattern("conv2d") == "conv2d"
