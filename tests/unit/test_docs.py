"""The documentation is true: its code runs, its links lead somewhere, its example and picture can be made again."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

import wholestep.errors

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")]
)
TIMEOUT_S = 120

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE_SPAN = re.compile(r"`[^`\n]*`")

# Runs the blocks of one page in one namespace, then every test function they define. Padding with empty lines makes
# line numbers those of the page.
RUNNER = r"""
import pathlib, re, sys

page = pathlib.Path(sys.argv[1])
text = page.read_text(encoding="utf-8")
namespace = {"__name__": "__main__"}
for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
    padding = "\n" * text.count("\n", 0, match.start(1))
    exec(compile(padding + match[1], str(page), "exec", dont_inherit=True), namespace)
for name, value in list(namespace.items()):
    if name.startswith("test_"):
        value()
"""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(*arguments: str | Path, folder: Path) -> str:
    """Run Python in a process of its own: pages register passes and set environment variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WHOLESTEP_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


PAGES_WITH_CODE = [page for page in PAGES if _BLOCK.search(page.read_text(encoding="utf-8"))]


def test_the_pages_that_should_have_code_have_some() -> None:
    names = {name_of(page) for page in PAGES_WITH_CODE}
    assert {"README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/errors.md"} <= names


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
def test_the_code_runs(page: Path, tmp_path: Path) -> None:
    run("-c", RUNNER, page, folder=tmp_path)


def anchors(page: Path) -> set[str]:
    """The anchors that a renderer makes from a page's headings."""
    prose = _ANY_BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    """Targets of links and images outside code that lead to files of this project."""
    prose = _CODE_SPAN.sub("code", _ANY_BLOCK.sub("", page.read_text(encoding="utf-8")))
    yield from (target for target in _LINK.findall(prose) if "://" not in target)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_images_exist(page: Path) -> None:
    broken: list[str] = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or not place.is_relative_to(ROOT) or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert not broken


def test_links_are_found() -> None:
    readme = list(links(ROOT / "README.md"))
    assert "docs/images/step.svg" in readme
    assert "docs/quickstart.md" in readme
    assert "#captureerror" in list(links(ROOT / "docs/errors.md"))
    assert "captureerror" in anchors(ROOT / "docs/errors.md")


def test_every_page_of_the_documentation_is_linked_from_the_readme() -> None:
    linked = set(links(ROOT / "README.md"))
    assert {name_of(page) for page in ROOT.glob("docs/*.md")} <= linked


def test_every_error_is_documented() -> None:
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    classes = {name for name, _ in inspect.getmembers(wholestep.errors, inspect.isclass)}
    assert headings == classes


def test_the_example_runs(tmp_path: Path) -> None:
    printed = run(ROOT / "examples/train_gpt.py", "--steps", "4", folder=tmp_path)
    assert "1 capture(s)" in printed
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_every_example_is_listed() -> None:
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert all(f"({example.name})" in text for example in ROOT.glob("examples/*.py"))


def test_the_picture_can_be_drawn_again(tmp_path: Path) -> None:
    run(ROOT / "docs/images/make_step_svg.py", tmp_path / "step.svg", folder=tmp_path)
    for path in (tmp_path / "step.svg", ROOT / "docs/images/step.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("svg")
        assert {"forward", "backward", "optimizer"} <= set(re.findall(r"fill-(\w+)\"", path.read_text("utf-8")))
