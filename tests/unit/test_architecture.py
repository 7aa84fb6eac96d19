"""The rules of the house that a parser can check: private torch, import direction, sizes, environment reads.

Nothing of the package is imported: files are parsed, so a broken room cannot hide from its rules. Every rule
is also fed sources that break it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = "wholestep"

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

# Private by PyTorch's own word though nothing in the name says so.
PRIVATE_TORCH = ("torch.fx.experimental",)
# Below these stand operator names, the data that graphs are made of: aten._fused_adamw_ and the like.
OPERATOR_NAMESPACES = ("torch.ops",)

TORCH_FILE = "_torch.py"
# What `torch.compile` is made of, and tensors without memory, have files of their own.
_PRIVATE = (
    "_aot_torch",
    "_autograd_torch",
    "_branches_torch",
    "_bytecode_torch",
    "_fake_torch",
    "_inductor_torch",
    "_loading_torch",
    "_memory_torch",
    "_ranks_torch",
    "_sizes_torch",
)
_PRIVATE += ("_recording_torch", "_waiting_torch")
TORCH_FILES = (TORCH_FILE, *(f"{name}.py" for name in _PRIVATE))
SETTINGS_FILE = "_settings.py"

# Packages of other people's training loops.
FRAMEWORKS = {"transformers", "accelerate", "lightning", "timm", "peft"}

# Modules beside the rooms that every room may import; they import no room themselves.
GROUND = {"errors", "_torch", *_PRIVATE, "_version", "_logging", "_settings", "_output", "_strict_json", "_threads"}
# Below runtime options are passed in one by one: no room there reads settings or installs log handlers.
SETTINGS = {"_logging", "_settings"}

_FRONT = {"graph"}
_ANALYSIS = _FRONT | {"capture", "passes", "cost"}
_REWRITES = _ANALYSIS | {"remat", "comm", "iteration", "pipe", "lower"}
_PLANNED = _REWRITES | {"compiler"}
_JOINED = _PLANNED | {"runtime"}
_VIEWS = _JOINED | {"report", "sim"}

# room -> the other rooms it may import
ROOMS: dict[str, set[str]] = {
    "graph": set(),
    "capture": _FRONT,
    "passes": _FRONT,
    "cost": _FRONT,
    "remat": _ANALYSIS,
    "comm": _ANALYSIS | {"iteration"},
    "iteration": _ANALYSIS,
    "pipe": _ANALYSIS,
    "lower": _ANALYSIS,
    "compiler": _REWRITES,
    "runtime": _PLANNED,
    "report": _JOINED,
    "sim": _JOINED,
    "api": _VIEWS,
    "cli": _VIEWS | {"api", "zoo", PACKAGE},
    # adapters for frameworks, which a user of those imports; they call what every user calls
    "integrations": {PACKAGE},
    "zoo": set(),
    # the package's own __init__ lists the public names
    PACKAGE: _VIEWS | {"api"},
}
KNOW_SETTINGS = {"runtime", "report", "sim", "api", "cli", PACKAGE}

Finding = tuple[int, str]
Checker = Callable[[ast.Module, str], Iterator[Finding]]


def room_of(path: str) -> str:
    """Of a path inside the package: `graph/edit.py` is in graph, `__init__.py` in wholestep itself."""
    first = path.split("/", 1)[0].removesuffix(".py")
    return PACKAGE if first in ("__init__", "__main__") else first


def private_torch(tree: ast.Module, path: str) -> Iterator[Finding]:
    if path in TORCH_FILES:
        return
    bound = _torch_names(tree)
    for node in ast.walk(tree):
        for name in _torch_paths(node, bound):
            if _is_private(name):
                yield getattr(node, "lineno", 1), f"{name} is private to torch: wrap it in {TORCH_FILE}"


def _torch_names(tree: ast.Module) -> dict[str, str]:
    """Local names that stand for something of torch, by import or by plain assignment: {"fx": "torch.fx"}."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                for alias in names:
                    if _under(alias.name, "torch"):
                        bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            case ast.ImportFrom(module=str(module), names=names, level=0) if _under(module, "torch"):
                bound.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in names})
            case _:
                pass
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = _dotted(node.value, bound)
            if name is not None:
                bound.setdefault(node.targets[0].id, name)
    return bound


def _torch_paths(node: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    """The full torch names that one syntax node reaches for."""
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names if _under(alias.name, "torch"))
        case ast.ImportFrom(module=str(module), names=names, level=0) if _under(module, "torch"):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Attribute(value=value, attr=attr):
            owner = _dotted(value, bound)
            # An owner that is private itself has been reported already, as the inner attribute.
            if owner is not None and not _is_private(owner):
                yield f"{owner}.{attr}"
        case ast.Call(func=ast.Name("getattr"), args=[target, ast.Constant(str(attr)), *_]):
            owner = _dotted(target, bound)
            if owner is not None:
                yield f"{owner}.{attr}"
        case ast.Call(
            func=ast.Name("import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(str(name))],
        ):
            if _under(name, "torch"):
                yield name
        case _:
            pass


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, bound)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _is_private(name: str) -> bool:
    if any(_under(name, namespace) for namespace in OPERATOR_NAMESPACES):
        return False
    parts = name.split(".")
    underscored = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return underscored or any(_under(name, prefix) for prefix in PRIVATE_TORCH)


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def import_direction(tree: ast.Module, path: str) -> Iterator[Finding]:
    room = room_of(path)
    if room not in ROOMS and room not in GROUND:
        yield 1, f"{room} is no known room: give it a row in ROOMS, or a place in GROUND"
        return
    for line, target in _imported_rooms(tree, path):
        if target == room:
            continue
        if target in SETTINGS and room in ROOMS and room not in KNOW_SETTINGS:
            yield line, f"{room} imports {target}: below runtime options are passed in"
        elif target not in GROUND and target not in ROOMS.get(room, set()):
            yield line, f"{room} imports {target}, which it must not know"


def _imported_rooms(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Rooms named by any import: one inside a function or under TYPE_CHECKING is knowledge too."""
    package = [PACKAGE, *path.split("/")[:-1]]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                stem = ".".join([*base, *([module] if module else [])])
                modules = [_module_or_room(stem, alias.name) for alias in names]
            case _:
                continue
        for module in modules:
            if _under(module, PACKAGE):
                yield node.lineno, module.split(".")[1] if "." in module else PACKAGE


def _module_or_room(stem: str, name: str) -> str:
    """`from wholestep import graph` names the room, `from wholestep import compile` the package itself."""
    is_room = stem == PACKAGE and (name in ROOMS or name in GROUND)
    return f"{stem}.{name}" if is_room else stem


def sizes(tree: ast.Module, path: str) -> Iterator[Finding]:
    last = max((node.end_lineno or 0 for node in tree.body), default=0)
    if last > MAX_FILE_LINES:
        yield 1, f"{last} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def environment_reads(tree: ast.Module, path: str) -> Iterator[Finding]:
    """A setting's name as a whole string is a read of it, unless it is written for a child process."""
    if path == SETTINGS_FILE:
        return
    written = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=key, ctx=ast.Store() | ast.Del()):
                written.add(id(key))
            case ast.Dict(keys=keys):
                written.update(id(key) for key in keys)
            case ast.Constant(str(text)) if re.fullmatch(r"WHOLESTEP_[A-Z0-9_]*", text) and id(node) not in written:
                yield node.lineno, f"{text!r} read outside {SETTINGS_FILE}"
            case _:
                pass


def frameworks(tree: ast.Module, path: str) -> Iterator[Finding]:
    """Who imports the package needs no framework: each is imported by its own adapter alone, and the room by nobody."""
    own = path.removeprefix("integrations/").removesuffix(".py").split("/")[0] if "/" in path else ""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                continue
        for module in modules:
            package = module.split(".")[0]
            if package in FRAMEWORKS and package != own:
                yield node.lineno, f"{package} is imported outside integrations/{package}"


CHECKERS: list[Checker] = [private_torch, import_direction, sizes, environment_reads, frameworks]


def violations(checker: Checker, source: str, path: str) -> list[str]:
    found = {f"{path}:{line}: {message}" for line, message in checker(ast.parse(source), path)}
    return sorted(found)


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_sources_keep_the_rule(checker: Checker) -> None:
    files = sorted((SRC / PACKAGE).rglob("*.py"))
    assert len(files) > 1
    found: list[str] = []
    for file in files:
        path = file.relative_to(SRC / PACKAGE).as_posix()
        found += violations(checker, file.read_text(encoding="utf-8"), path)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._inductor", "torch._inductor"),
        ("import torch\nx = torch._C", "torch._C"),
        ("import torch\nx = torch._C._nn.f()", "torch._C"),
        ("import torch.fx.experimental.proxy_tensor", "torch.fx.experimental.proxy_tensor"),
        (
            "from torch.fx.experimental.proxy_tensor import make_fx",
            "torch.fx.experimental.proxy_tensor.make_fx",
        ),
        ("from torch.fx import experimental", "torch.fx.experimental"),
        ("from torch import _guards", "torch._guards"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("import torch.nn as nn\nnn._x", "torch.nn._x"),
        ("from torch import fx\nfx.graph._y", "torch.fx.graph._y"),
        ("from torch.fx import Graph\nGraph._codegen", "torch.fx.Graph._codegen"),
        ("import torch\nfx = torch.fx\nfx._x", "torch.fx._x"),
        ("import torch\ndef f():\n    return torch.fx._x", "torch.fx._x"),
        ("import torch\ngetattr(torch, '_C')", "torch._C"),
        ("import importlib\nimportlib.import_module('torch._C')", "torch._C"),
    ],
)
def test_private_torch_is_found(source: str, name: str) -> None:
    found = violations(private_torch, source, "graph/x.py")
    assert found == [f"graph/x.py:{source.count(chr(10)) + 1}: {name} is private to torch: wrap it in _torch.py"]
    assert violations(private_torch, source, "_torch.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._fused_adamw_.default",
        "import torch\naten = torch.ops.aten\naten._softmax.default",
        "from wholestep import _torch\n_torch.trace",
        "import torchvision._internally",
        "class A:\n    def f(self): return self._x",
    ],
)
def test_what_is_not_private_torch_passes(source: str) -> None:
    assert violations(private_torch, source, "graph/x.py") == []


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("graph/x.py", "from wholestep.capture import trace", "capture"),
        ("graph/x.py", "import wholestep.passes.base", "passes"),
        ("graph/x.py", "from ..passes import base", "passes"),
        ("graph/x.py", "from wholestep import passes", "passes"),
        ("graph/deep/x.py", "from ...passes import base", "passes"),
        ("graph/x.py", "from wholestep import compile", "wholestep"),
        ("graph/x.py", "import wholestep", "wholestep"),
        ("graph/x.py", "def f():\n    import wholestep.cost", "cost"),
        ("capture/x.py", "from wholestep.passes import Pass", "passes"),
        ("remat/x.py", "from wholestep.comm import bucket", "comm"),
        ("lower/x.py", "from wholestep.runtime import step", "runtime"),
        ("runtime/x.py", "from wholestep.report import html", "report"),
        ("report/x.py", "from wholestep.api import compile", "api"),
        ("api.py", "from wholestep.cli import main", "cli"),
        ("zoo/x.py", "from wholestep.graph import StepGraph", "graph"),
        ("errors.py", "from .graph import StepGraph", "graph"),
        ("cli/x.py", "import wholestep.attic", "attic"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, target: str) -> None:
    line = source.count("\n") + 1
    found = violations(import_direction, source, path)
    assert found == [f"{path}:{line}: {room_of(path)} imports {target}, which it must not know"]


def test_a_room_that_reads_settings_is_found() -> None:
    source = "from wholestep._settings import Settings"
    expected = "passes/x.py:1: passes imports _settings: below runtime options are passed in"
    assert violations(import_direction, source, "passes/x.py") == [expected]
    assert violations(import_direction, source, "api.py") == []


def test_an_unlisted_room_is_found() -> None:
    expected = "attic/x.py:1: attic is no known room: give it a row in ROOMS, or a place in GROUND"
    assert violations(import_direction, "import os", "attic/x.py") == [expected]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("graph/x.py", "from wholestep.graph.node import Node\nfrom wholestep.errors import GraphError"),
        ("graph/x.py", "from . import node\nfrom .. import _torch, errors"),
        ("passes/x.py", "from wholestep.graph import StepGraph"),
        ("pipe/schedules/x.py", "from wholestep.capture import trace\nfrom ..split import cut"),
        ("runtime/x.py", "from wholestep.iteration import rotate"),
        ("report/x.py", "from wholestep.runtime import StepRunner"),
        ("cli/demo.py", "import wholestep\nfrom wholestep.zoo import cases"),
        ("__init__.py", "from wholestep.api import compile"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert violations(import_direction, source, path) == []


def test_every_room_on_the_right_of_the_table_has_a_row_and_no_two_know_each_other() -> None:
    assert set().union(*ROOMS.values()) <= set(ROOMS)
    assert not [(a, b) for a, known in ROOMS.items() for b in known if a in ROOMS[b]]


def test_a_long_file_is_found() -> None:
    assert violations(sizes, "x = 1\n" * 600, "graph/x.py") == []
    assert violations(sizes, "x = 1\n" * 601, "graph/x.py") == ["graph/x.py:1: 601 lines, at most 600"]


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n"
    assert violations(sizes, "def f():\n" + body * 79, "graph/x.py") == []
    method = "class A:\n  async def f(self):\n" + body * 80
    assert violations(sizes, method, "graph/x.py") == ["graph/x.py:2: f has 81 lines, at most 80"]


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['WHOLESTEP_LOG']",
        "os.environ.get('WHOLESTEP_LOG', 'INFO')",
        "os.getenv('WHOLESTEP_LOG')",
        "'WHOLESTEP_LOG' in environ",
        "NAME = 'WHOLESTEP_LOG'",
        "os.environ[f'WHOLESTEP_{name}']",
    ],
)
def test_an_environment_read_is_found(source: str) -> None:
    found = violations(environment_reads, source, "api.py")
    assert len(found) == 1
    assert re.match(r"api.py:1: 'WHOLESTEP_(LOG)?' read outside _settings.py", found[0])
    assert violations(environment_reads, source, "_settings.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['RANK']",
        "raise ValueError('set WHOLESTEP_LOG=INFO to see why')",
        "env = {**os.environ, 'WHOLESTEP_DISABLE': '1'}",
        "env['WHOLESTEP_DISABLE'] = '1'",
    ],
)
def test_mentions_and_writes_pass(source: str) -> None:
    assert violations(environment_reads, source, "api.py") == []


@pytest.mark.parametrize("source", ["import transformers", "def f():\n    from accelerate.utils import x"])
def test_a_framework_outside_its_adapter_is_found(source: str) -> None:
    assert len(violations(frameworks, source, "capture/x.py")) == 1
    assert len(violations(frameworks, source, "api.py")) == 1
    assert len(violations(frameworks, source, "integrations/timm.py")) == 1
    own = "transformers" if "transformers" in source else "accelerate"
    assert violations(frameworks, source, f"integrations/{own}.py") == []
