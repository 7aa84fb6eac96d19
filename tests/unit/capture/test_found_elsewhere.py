# ruff: noqa: E501 - a table with one world a line
"""Names that Python finds elsewhere at later calls: in a class that lacked them, in a dict that stands in for another."""

from __future__ import annotations

import pytest
from tests.unit.capture.test_stale_reads import all_of, outcome_of
from tests.unit.capture.test_unseen import STATE, Case

PROXY = """
class Proxy:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
inner = types.SimpleNamespace(a=1.0)
p = Proxy(inner)
"""
LAYER = """
class Layer(nn.Linear):
    def forward(self, v): return super().forward(v) * (self.scale if hasattr(self, "scale") else 1.0)
model.first = Layer(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SHARED = """
class Shared:
    content = {"n": 1}
    def __init__(self): self.__dict__ = Shared.content
"""
FAMILY = "class Base: w = 1.0\nclass First(Base): w = 2.0\n"
DEFAULTS = "d = collections.defaultdict(lambda: [1.0])\n"

CASES = [
    Case("class of a proxy", PROXY, loss="loss = loss * p.a", changes=("Proxy.a = 3.0", "del Proxy.a; inner.a = 5.0")),
    Case("class of a proxy without it", PROXY, loss="loss = loss * (p.b if hasattr(p, 'b') else 1.0)", changes=("Proxy.b = 3.0", "del Proxy.b; inner.b = 5.0")),
    Case("class of a layer", LAYER, changes=("Layer.scale = 3.0", "del Layer.scale")),
    Case("call of a layer", LAYER, changes=("Layer.__call__ = lambda self, v: v * self.weight.sum()", "del Layer.__call__")),
    Case("dict that objects share", SHARED, loss="loss = loss * Shared().n", changes=("Shared.content['n'] = 3", "Shared.content = {'n': 5}")),
    Case("dict that objects share and write to", SHARED, after="Shared().n += 1; Shared().last = loss.detach()", changes=("Shared.content['n'] = 7", "")),
    Case("dict of an object that the step makes", STATE, after="class K: pass\nmade = K(); made.__dict__ = k.h; made.n = getattr(made, 'n', 0) + 1", changes=("k.h['n'] = 7", "k.h = {}")),
    Case("classes further down", FAMILY, loss="loss = loss * sum(c.w for c in Base.__subclasses__())", changes=("class Second(Base): w = 3.0", "class Third(Base): w = 5.0")),
    Case("default of a dict", DEFAULTS, loss="loss = loss * d['a'][0]", changes=("d.clear(); d.default_factory = lambda: [3.0]", "d.clear()")),
]  # fmt: skip


@all_of(CASES)
def test_a_name_that_is_found_elsewhere_later(case: Case) -> None:
    outcome_of(case)


# Tuples of classes

KINDS = "KINDS = (int,)\nclass A: pass\nclass B: pass\n"
TRIED = """
try:
    try: s = k.h["a"]
    except KINDS: s = 2.0
except Exception: s = 3.0
loss = loss * s
"""
CLASSES = [
    Case("isinstance", KINDS, loss="loss = loss * (2 if isinstance(1, KINDS) else 3)", changes=("KINDS = (str,)", "KINDS = (str, (float, int))")),
    Case("isinstance of layers", KINDS, loss="loss = loss * (2 if isinstance(model.first, KINDS) else 3)", changes=("KINDS += (nn.Linear,)", "KINDS = (nn.Tanh,)")),
    Case("issubclass", KINDS, loss="loss = loss * (2 if issubclass(A, KINDS) else 3)", changes=("KINDS = (B, A)", "KINDS = (B,)")),
    Case("except", f"{STATE}KINDS = (KeyError,)\n", loss=TRIED, changes=("KINDS = (IndexError,)", "KINDS = (IndexError, LookupError)")),
]  # fmt: skip


@all_of(CLASSES)
def test_a_tuple_of_classes_that_changes(case: Case) -> None:
    assert outcome_of(case).captures == 3


# Arrays

ARRAY = "A = np.ones(3)\nold = A\n"
OTHER = ("A = np.ones(3) * 5", "old[:] = 9; A = np.ones(3)")
"""An equal array comes back, while the memory of the first one holds something else."""


@pytest.mark.parametrize("read", ["from_numpy(A)", "as_tensor(A)", "asarray(A)", "frombuffer(A, dtype=torch.float64)"])
def test_an_equal_array_in_other_memory(read: str) -> None:
    case = Case("array", ARRAY, loss=f"loss = loss * torch.{read}.float().sum()", changes=OTHER)
    assert outcome_of(case).captures == 2


@pytest.mark.parametrize("function", ["from_numpy", "as_tensor", "asarray"])
def test_to_write_to_an_array_as_a_tensor_is_refused(function: str) -> None:
    outcome_of(Case("array", ARRAY, after=f"torch.{function}(A).add_(1)", refused="both as NumPy array"))


def test_the_default_device_of_tensors_made_of_arrays() -> None:
    device = "with torch.device('meta'): k.d = str(torch.as_tensor(A).device)"
    outcome_of(Case("array", ARRAY + STATE, after=device))


def test_functions_of_numpy_that_draw_and_are_no_methods() -> None:
    drawn = "np.random.seed(0)\nloss = loss * np.random.rand() * np.random.sample() * np.random.ranf()"
    assert outcome_of(Case("draws", loss=drawn, changes=("np.random.seed(5)", ""))).captures == 1
