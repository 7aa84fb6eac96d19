# ruff: noqa: E501 - a table with one world a line
"""Names that Python finds elsewhere at later calls: in a class that lacked them, in a dict that stands in for another."""

from __future__ import annotations

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
