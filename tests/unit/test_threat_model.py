"""What docs/threat_model.md says of the sources: where they may unpickle, execute, import or start processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from wholestep.report.html import _ENVIRONMENT as REPORTS  # pyright: ignore[reportPrivateUsage]

SRC = Path(__file__).parents[2] / "src" / "wholestep"

MODULES = {"pickle", "marshal", "shelve", "yaml", "subprocess", "runpy", "dill", "cloudpickle", "code"}
CALLS = {"eval", "exec", "__import__"}
ATTRIBUTES = {
    *("torch.load", "os.system", "os.popen", "os.execv", "importlib.import_module"),
    "importlib.util.spec_from_file_location",
}
# Collectives of Python objects, which travel as pickles.
OBJECTS = re.compile(r"dist\.\w+_object(_list)?")

# file -> what it may use, for the reason that the page gives
KNOWN: dict[str, set[str]] = {
    "capture/record/guard.py": {"exec"},  # of text made from numbered names and keys as Python writes them
    "capture/record/program.py": {"exec"},  # likewise, of arithmetic on numbered names
    "_sizes_torch.py": {"eval"},  # of expressions of numbered symbols, as sympy writes them
    "_branches_torch.py": {"importlib.import_module"},  # loops of torch's, of which a version may lack some
    "capture/record/calls.py": {"importlib.import_module"},  # a name for it: the step calls that itself
    "capture/record/imports.py": {"importlib.import_module"},  # what the step imports for the first time
    "capture/record/late.py": {"exec"},  # likewise; what is said of formats is spelled by repr()
    "runtime/codegen.py": {"exec"},  # of text made from a graph whose names were checked
    "runtime/checkpoint/metadata.py": {"pickle"},  # an interpreter that makes records
    "runtime/checkpoint/reading.py": {"pickle", "torch.load"},  # its error; with weights_only
    "cli/launch.py": {"subprocess"},  # ranks of the demo
    "cli/target.py": {"importlib.util.spec_from_file_location"},  # the user's own file
    "cli/corpus.py": {"importlib.import_module"},  # texts of the standard library
    "zoo/huggingface.py": {"importlib.import_module"},  # transformers
    "runtime/checkpoint/ranks.py": {"objects"},  # ranks trust each other
    "runtime/pipeline/clock.py": {"objects"},
    "runtime/pipeline/runs.py": {"objects"},
}


def used(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names if (name := alias.name.split(".")[0]) in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id
        elif isinstance(node, ast.Attribute) and (text := ast.unparse(node)) in ATTRIBUTES:
            yield text
        elif isinstance(node, ast.Attribute) and OBJECTS.fullmatch(ast.unparse(node)):
            yield "objects"


def test_code_and_processes_come_from_known_places_only() -> None:
    found = {path.relative_to(SRC).as_posix(): set(used(path.read_text("utf-8"))) for path in SRC.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == KNOWN


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from subprocess import run", "subprocess"),
        ("def f(x):\n    return eval(x)", "eval"),
        ("import torch\ntorch.load(file)", "torch.load"),
        ("dist.broadcast_object_list(values)", "objects"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, name: str) -> None:
    assert list(used(source)) == [name]


def test_checkpoints_are_loaded_as_weights_only() -> None:
    tree = ast.parse((SRC / "runtime/checkpoint/reading.py").read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert len(calls) == 1
    assert {word.arg: ast.unparse(word.value) for word in calls[0].keywords}["weights_only"] == "True"


def test_reports_escape_everything_but_their_own_style_and_script() -> None:
    assert REPORTS.autoescape is True
    template = (SRC / "report/template.py").read_text("utf-8")
    assert set(re.findall(r"\{\{([^}]*)\|\s*safe", template)) == {" style", " script"}
