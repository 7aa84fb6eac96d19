"""The documentation is true: its code runs, its links lead somewhere, its example and picture can be made again."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.distributed.ranks import PRELOADED

import wholestep.errors

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")]
)
# Code that needs packages of the extra [integrations]: `tests/integrations` runs it.
NEEDS_FRAMEWORKS = {ROOT / "docs/integrations.md"}
TIMEOUT_S = 120

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE_SPAN = re.compile(r"`[^`\n]*`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(source: Path, *arguments: str | Path, folder: Path, after: str | None = None) -> str:
    """Run a script, or the code of a page, in a process of its own: pages register passes and set variables.

    It is forked from one that has imported torch, which takes longer than most pages do. `after` is imported first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    output = folder.with_name(f"{folder.name}.txt")
    process = context.Process(target=_run, args=(source, [str(source), *map(str, arguments)], folder, output, after))
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    printed = output.read_text(encoding="utf-8")
    assert process.exitcode == 0, printed[-8000:]
    return printed


def _run(source: Path, arguments: list[str], folder: Path, output: Path, after: str | None) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith("WHOLESTEP_")]:
        del os.environ[name]
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    sys.argv[:] = arguments
    warnings.filterwarnings("error", category=UserWarning)
    if after is not None:
        importlib.import_module(after)
    if source.suffix == ".md":
        _run_page(source)
    else:
        runpy.run_path(str(source), run_name="__main__")


def _run_page(page: Path) -> None:
    """Run the blocks of a page in one namespace, then every test function they define."""
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for match in _BLOCK.finditer(text):
        padding = "\n" * text.count("\n", 0, match.start(1))  # line numbers are those of the page
        exec(compile(padding + match[1], str(page), "exec", dont_inherit=True), namespace)
    for name, value in list(namespace.items()):
        if name.startswith("test_"):
            value()


PAGES_WITH_CODE = [page for page in PAGES if _BLOCK.search(page.read_text(encoding="utf-8"))]


def test_the_pages_that_should_have_code_have_some() -> None:
    names = {name_of(page) for page in PAGES_WITH_CODE}
    assert {"README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/errors.md"} <= names


@pytest.mark.parametrize("page", [page for page in PAGES_WITH_CODE if page not in NEEDS_FRAMEWORKS], ids=name_of)
def test_the_code_runs(page: Path, tmp_path: Path) -> None:
    run(page, folder=tmp_path)


def test_code_that_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nprint('begun')\nraise ValueError(1)\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"(?s)begun.*page.md\", line 5.*ValueError: 1"):
        run(page, folder=tmp_path)


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
