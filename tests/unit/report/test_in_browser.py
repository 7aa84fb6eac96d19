"""Reports in a real browser: they say nothing on the console, ask for nothing, and can be used with keys alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import wholestep
from chromium import Page, find_browser
from dry_steps import planned_step, train_step
from wholestep.graph import StepGraph
from wholestep.report.palette import DARK, LIGHT

pytestmark = pytest.mark.browser

HOSTILE = """</script><img src=x onerror="hacked = 1">--><b>&"""
# Elements with focus: which, and how wide their outline is.
FOCUS = "[document.activeElement.textContent, getComputedStyle(document.activeElement).outlineStyle]"
SHOWN = "[...document.querySelectorAll('.browser li')].filter((line) => line.checkVisibility()).length"
# Words of pictures that stick out of them.
OUTSIDE = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const { x, y, width, height } = svg.viewBox.baseVal;
  return [...svg.querySelectorAll("text")].filter((text) => {
    const box = text.getBBox();
    return box.x < x || box.y < y || box.x + box.width > x + width || box.y + box.height > y + height;
  }).map((text) => text.textContent);
})"""
TAB, ENTER = ("Tab", 9), ("Enter", 13, "\r")


def hostile_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
    return train_step(model, optimizer, x)


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(HOSTILE)(x)


@pytest.fixture(name="page", scope="module")
def _page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip("there is no chromium on this machine")
    with Page(browser, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(name="planned", scope="module")
def _planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StepGraph]:
    """A report with a link and buckets, and the graph it is about."""
    step = planned_step("auto")
    return step.report(tmp_path_factory.mktemp("planned") / "report.html"), step.graph


@pytest.fixture(name="measured", scope="module")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with a memory plan, measurements and names that would like to be more than text."""
    hostile_step.__name__ = HOSTILE
    model = Hostile()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(hostile_step, memory_budget=1.0)
    for _ in range(5):
        step.measure(model, optimizer, torch.randn(4, 8))
    return step.report(tmp_path_factory.mktemp("measured") / "report.html")


@pytest.mark.parametrize("width", [1100, 360])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_quiet_fits_and_wears_the_readers_colours(
    page: Page, planned: tuple[Path, StepGraph], measured: Path, width: int, dark: bool
) -> None:
    for path in (planned[0], measured):
        page.open(path, width=width, dark=dark)
        assert page.problems == []
        assert page.requests == [path.as_uri()]
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value(OUTSIDE) == []
        ground = tuple(bytes.fromhex((DARK if dark else LIGHT)["page"][1:]))
        assert page.value("getComputedStyle(document.body).backgroundColor") == f"rgb{ground}"
        assert struct.unpack(">II", page.picture()[16:24]) == (width, 900)


def test_names_of_users_are_only_text(page: Page, measured: Path) -> None:
    page.open(measured)
    assert page.value("window.hacked") is None
    assert page.value("document.querySelectorAll('img, b').length") == 0
    assert page.value("document.querySelector('h1').textContent") == HOSTILE
    assert page.value("document.title").startswith(HOSTILE)
    assert page.value("document.querySelectorAll('script').length") == 1


def test_no_other_script_can_run(page: Page, measured: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    added = "<script>window.hacked = 1</script><img src='x.png' onerror='window.hacked = 2'></main>"
    broken.write_text(measured.read_text(encoding="utf-8").replace("</main>", added), encoding="utf-8")
    page.open(broken)
    assert page.value("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_the_first_key_leads_past_the_contents(page: Page, planned: tuple[Path, StepGraph]) -> None:
    page.open(planned[0])
    page.press(*TAB)
    assert page.value(FOCUS) == ["Skip to the report", "solid"]
    assert page.value("document.activeElement.getBoundingClientRect().top") >= 0
    page.press(*TAB)
    assert page.value(FOCUS) == ["Timeline", "solid"]
    page.open(planned[0])
    page.press(*TAB)
    page.press(*ENTER)
    assert page.value("document.activeElement.id") == "report-body"


def test_buckets_of_the_picture_lead_to_the_table(page: Page, planned: tuple[Path, StepGraph]) -> None:
    page.open(planned[0])
    page.value("document.querySelector('svg a[href=\"#bucket-1\"]').focus()")
    assert page.value("getComputedStyle(document.activeElement.querySelector('rect')).strokeWidth") == "3px"
    page.press(*ENTER)
    assert page.value("document.querySelector(':target').textContent").strip().startswith("1: ")


def test_ops_are_found_by_all_words_and_folded(page: Page, planned: tuple[Path, StepGraph]) -> None:
    path, graph = planned
    page.open(path)
    assert page.value(SHOWN) == 0
    page.value("document.querySelector('.tools input').focus()")
    page.write("backward MM  2.inner")
    expected = [
        node
        for node in graph.calls()
        if node.meta["phase"] == "backward" and node.meta.get("fqn") == "2.inner" and "mm" in str(node.target)
    ]
    assert expected
    assert page.value(SHOWN) >= len(expected)
    assert page.value("document.querySelector('.tools output').textContent") == f"{page.value(SHOWN)} found"
    chapters = "[...document.querySelectorAll('.chapter')].filter((part) => !part.hidden).length"
    assert page.value(chapters) == 1
    page.value("document.querySelector('.tools input').select()")
    page.write("no such op")
    assert page.value(SHOWN) == 0
    assert page.value("document.querySelector('.tools output').textContent") == "0 found"
    page.value("document.querySelector('.tools input').select()")
    page.write(" ")
    assert page.value("document.querySelectorAll('.browser details:not([hidden])').length") > 8
    page.value("document.querySelector('[data-action=open]').click()")
    assert page.value(SHOWN) == graph.num_ops
    page.value("document.querySelector('[data-action=close]').click()")
    assert page.value(SHOWN) == 0


def test_without_script_all_ops_can_be_read(page: Page, planned: tuple[Path, StepGraph]) -> None:
    path, graph = planned
    page.open(path, script=False)
    assert page.value("document.querySelector('.tools').checkVisibility()") is False
    assert page.value("document.querySelectorAll('.browser li').length") == graph.num_ops
    page.value("document.querySelector('.browser summary').focus()")
    page.press(*ENTER)
    assert page.value("document.querySelector('.browser li').checkVisibility()") is True
