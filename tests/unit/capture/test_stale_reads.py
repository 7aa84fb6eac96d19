# ruff: noqa: E501 - tables with one world a line
"""What a step reads by unusual ways, and whether later calls read it again: small worlds that were once stale."""

from __future__ import annotations

import functools
import sys

import pytest
from tests.unit.capture.test_unseen import STATE, Case
from tests.worlds import Outcome, run

import wholestep
from wholestep.capture.record.places import slot_names


def outcome_of(case: Case) -> Outcome:
    """Compare with eager at every call; raises where they differ, or where only one of case and step is refused."""
    outcome = run(case.program(), wholestep.compile)
    assert case.refused in (outcome.refused or "")
    assert bool(outcome.refused) is bool(case.refused)
    return outcome


def all_of(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


# Values that are equal and yet not the same

SIGN = "loss = loss * (2.0 + math.copysign(1.0, C.imag))"
KINDS = [
    Case("complex", "C = complex(1.0, 0.0)\n", loss=SIGN, changes=("C = complex(1.0, -0.0)", "C = complex(1.0, 0.0)")),
    Case("complex of NumPy", "C = np.complex64(complex(1.0, 0.0))\n", loss=SIGN, changes=("C = np.complex64(complex(1.0, -0.0))", "")),
    Case("float of NumPy", "C = np.float32(0.0)\n", loss="loss = loss * (2.0 + math.copysign(1.0, C))", changes=("C = np.float32(-0.0)", "")),
    Case("slice", "S = slice(0.0, None)\n", loss="loss = loss * (2.0 + math.copysign(1.0, S.start))", changes=("S = slice(-0.0, None)", "")),
    Case("range", "R = range(0, 3, 2)\n", loss="loss = loss * R.stop", changes=("R = range(0, 4, 2)", "")),
]  # fmt: skip


@all_of(KINDS)
def test_values_that_are_equal_and_not_the_same(case: Case) -> None:
    assert outcome_of(case).captures > 1


def test_numbers_that_are_no_numbers_stay_the_same() -> None:
    case = Case(
        "NaN",
        "C = np.float32('nan')\n",
        loss="loss = loss * (2.0 if C != C else 1.0)",
        changes=("C = np.float32('nan')", ""),
    )
    assert outcome_of(case).captures == 1


# Arrays that are too large to be compared at each call

LARGE = "A = np.ones(300_000, dtype=np.float32)\nI = np.array([0, 1])\nB = [0.0]\nK = {'a': A}\n"
LARGE_READS = {
    "mean": "A.mean()",
    "sum": "np.sum(A)",
    "take": "A.take(I).sum()",
    "max": "A.max()",
    "item": "A.item(0)",
    "astype": "A.astype(np.float64)[0]",
    "view": "A.T[0]",
    "function of C": "np.dot(A, A)",
    "in a list": "np.stack([A, A])[0, 0]",
    "in a dict": "np.mean([*K.values()])",
    "operator": "(A * 2)[0]",
    "tensor": "torch.tensor(A)[0]",
    "text": "len(f'{A}')",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("read", LARGE_READS.values(), ids=LARGE_READS)
def test_content_of_a_large_array_is_refused(read: str) -> None:
    outcome_of(
        Case("large", LARGE, loss=f"loss = loss * {read}", changes=("A[:] = 5", ""), refused="large NumPy array")
    )


def test_a_large_array_may_be_handed_on() -> None:
    """Its shape is read, it is kept, and a tensor in its memory is an input like any other."""
    body = "loss = loss + torch.from_numpy(A)[:3].sum() * len(A) / A.shape[0]"
    case = Case(
        "large",
        LARGE,
        loss=body,
        after="B.append(A); B.insert(0, [A]); K.get('b', A)",
        changes=("A[:2] = 5", "A[0] = 3"),
    )
    assert outcome_of(case).captures == 1


# Variables of the context

SCALED = """
import contextlib
import contextvars
V = contextvars.ContextVar("V", default=1.0)
@contextlib.contextmanager
def scaled(value):
    token = V.set(value)
    try: yield token
    finally: V.reset(token)
"""
VARIABLES = [
    Case("reset", SCALED, loss="with scaled(2.0): loss = loss * V.get()\nloss = loss * V.get()", changes=("V.set(3.0)", "V.set(5.0)")),
    Case("nested", SCALED, loss="with scaled(2.0), scaled(4.0): loss = loss * V.get()\nloss = loss * V.get()", changes=("V.set(3.0)", "V.set(5.0)")),
    Case("old value", SCALED, loss="with scaled(7.0) as t: loss = loss * (1.0 if t.old_value is t.MISSING else t.old_value)", changes=("V.set(3.0)", "V.set(5.0)")),
    Case("left set", SCALED, loss="loss = loss * V.get()\nV.set(2.0)\nloss = loss * V.get()", changes=("V.set(3.0)", "V.set(5.0)")),
]  # fmt: skip


@all_of(VARIABLES)
def test_a_variable_of_the_context_that_is_set_and_reset(case: Case) -> None:
    outcome_of(case)


# Weak references to methods

CALLBACKS = """
import weakref
class Callback:
    n = 0
    def on_step(self, loss): self.n += 1; self.last = loss
CB, OTHER = Callback(), Callback()
REFS = [weakref.WeakMethod(CB.on_step)]
"""


def test_a_weak_method_leads_to_its_object() -> None:
    changes = ("REFS.append(weakref.WeakMethod(OTHER.on_step))", "REFS[0] = weakref.WeakMethod(OTHER.on_step)")
    outcome_of(Case("weak method", CALLBACKS, after="for ref in REFS: ref()(loss.detach())", changes=changes))


# Attributes that are set in roundabout ways

COUNTED = "class C: n = 0\n"
ROUNDABOUT = [
    Case("type.__setattr__", COUNTED, after="type.__setattr__(C, 'n', C.n + 1)", changes=("C.n = 10", "")),
    Case("type.__delattr__", COUNTED, after="C.k = 1; type.__delattr__(C, 'k'); type.__delattr__(C, 'n'); C.n = 2"),
    Case("type.__getattribute__", COUNTED, loss="loss = loss * (1 + type.__getattribute__(C, 'n'))", changes=("C.n = 1", "C.n = 2")),
    Case("object.__delattr__", STATE, after="k.m = 1; object.__delattr__(k, 'm'); object.__delattr__(k, 'n'); k.n = 2"),
]  # fmt: skip


@all_of(ROUNDABOUT)
def test_attributes_that_are_set_and_read_by_the_methods_for_it(case: Case) -> None:
    outcome_of(case)


# Objects of C

DATED = "import datetime, decimal\nC = {'a': decimal.Decimal('0.5'), 'b': datetime.date(2026, 1, 1)}\n"
MADE_ANEW = "C['a'] = decimal.Decimal('0.5'); C['b'] = datetime.date(2026, 1, 1)"


def test_values_of_c_that_are_made_anew_are_the_same() -> None:
    read = "loss = loss * float(C['a']) * (1 + C['b'].day)"
    assert outcome_of(Case("anew", DATED, loss=read, changes=(MADE_ANEW, MADE_ANEW))).captures == 1


def test_values_of_c_that_are_written_otherwise_are_others() -> None:
    read = "loss = loss * len(str(C['a'])) * (1 + C['b'].day)"
    changes = ("C['a'] = decimal.Decimal('0.50')", "C['b'] = datetime.date(2026, 1, 2)")
    assert outcome_of(Case("otherwise", DATED, loss=read, changes=changes)).captures == 3


def test_the_layout_of_objects_of_c_is_not_read() -> None:
    assert not [name for name in slot_names(functools.partial) if name.startswith("__")]


def test_a_file_in_memory_is_refused_as_one() -> None:
    outcome_of(
        Case("file", "import io\nB = io.StringIO()\n", after="B.write('x')", refused="writes a file (a StringIO)")
    )


# Code and classes that are exchanged in place, as tools that reload edited modules do

SCALES = "def scale(v): return v * 2\nclass S:\n    def twice(self, v): return v * 2\ns = S()\n"
BASES = "class A:\n    w = 1.0\nclass B:\n    w = 5.0\nclass C(A): pass\nclass D(C): pass\nk = D()\n"
RELOADED = [
    Case("function", SCALES, loss="loss = scale(loss)", changes=("scale.__code__ = (lambda v: v * 5).__code__", "scale.__code__ = (lambda v: v * 7).__code__")),
    Case("method", SCALES, loss="loss = s.twice(loss)", changes=("S.twice.__code__ = (lambda self, v: v * 5).__code__", "")),
    Case("bases", BASES, loss="loss = loss * k.w", changes=("C.__bases__ = (B,)", "C.__bases__ = (A,)")),
    Case("bases of a class", BASES, loss="loss = loss * C.w", changes=("C.__bases__ = (B,)", "")),
]  # fmt: skip


@all_of(RELOADED)
def test_what_is_exchanged_in_place_is_noticed(case: Case) -> None:
    assert outcome_of(case).captures >= 2


@pytest.mark.parametrize("write", ["C.__bases__ = (B,)", "k.__class__ = C", "k.__dict__ = {}"])
def test_what_makes_an_object_another_one_is_refused_in_the_step(write: str) -> None:
    outcome_of(Case("write", BASES, after=write, refused="from outside"))


# What `vars` gives of a class

CFG = """
import inspect
class Base:
    other = 2.0
class CFG(Base):
    scale = 1.0
cfg = CFG()
VIEW = types.MappingProxyType(TABLE := {"scale": 1.0})
"""
SET, ADDED = "CFG.scale = TABLE['scale'] = 3.0", "CFG.k = TABLE['k'] = 1.0"
VIEWS = {
    "vars": "vars(CFG)['scale']",
    "__dict__": "CFG.__dict__['scale']",
    "get": "CFG.__dict__.get('scale') + vars(CFG).get('k', 5.0)",
    "in": "(vars(CFG)['scale'] if 'k' in vars(CFG) else 7.0)",
    "items": "sum(v for k, v in vars(CFG).items() if k[0] != '_')",
    "keys": "len([k for k in vars(CFG)])",
    "values": "len(CFG.__dict__.values())",
    "dict": "dict(vars(CFG))['scale']",
    "unpacked": "{**vars(CFG)}['scale']",
    "len": "len(vars(CFG))",
    "of a dict": "VIEW['scale'] * len(VIEW)",
    "made of a dict": "types.MappingProxyType(TABLE).get('scale')",
    "dir": "len(dir(CFG))",
    "dir of an object": "len([name for name in dir(cfg) if name[0] != '_'])",
    "getmembers": "dict(inspect.getmembers(CFG))['scale']",
    "getmembers of an object": "dict(inspect.getmembers(cfg))['scale']",
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("read", VIEWS.values(), ids=VIEWS)
def test_members_of_a_class_that_are_read_through_a_view(read: str) -> None:
    if read.startswith("VIEW") and sys.version_info < (3, 12):
        outcome_of(Case("view", CFG, loss=f"loss = loss * {read}", refused="mappingproxy"))
        return
    assert outcome_of(Case("view", CFG, loss=f"loss = loss * {read}", changes=(SET, ADDED))).captures <= 3


# Descriptors of Python's library, protocols

DESCRIPTORS = """
class T:
    def act(self, k): return k
    with_two = functools.partialmethod(act, 2.0)
    @functools.singledispatchmethod
    def f(self, v): return 2.0
    @functools.cached_property
    def kept(self): return 2.0
t = T()
"""
OF_LIBRARY = [
    Case("partialmethod", DESCRIPTORS, loss="loss = loss * t.with_two()", changes=("T.with_two = functools.partialmethod(T.act, 5.0)", "T.with_two = functools.partialmethod(lambda self, k: k * 3, 5.0)")),
    Case("singledispatchmethod", DESCRIPTORS, loss="loss = loss * t.f(1)", changes=("T.__dict__['f'].register(int, lambda self, v: 7.0)", "T.__dict__['f'].register(int, lambda self, v: 9.0)")),
    Case("cached_property", DESCRIPTORS, loss="loss = loss * t.kept", changes=("t = T(); t.__class__.kept = functools.cached_property(lambda self: 4.0); T.kept.attrname = 'kept'", "")),
]  # fmt: skip
PROTOCOL = """
from typing import Any, Protocol, runtime_checkable
@runtime_checkable
class HasGain(Protocol):
    def gain(self): ...
@runtime_checkable
class HasScale(Protocol):
    scale: Any
class C: pass
c = C()
"""
PROTOCOLS = [
    Case("method", PROTOCOL, loss="loss = loss * (2.0 if isinstance(c, HasGain) else 1.0)", changes=("c.gain = lambda: 1", "del c.gain; C.gain = lambda self: 1")),
    Case("among others", PROTOCOL, loss="loss = loss * (2.0 if isinstance(c, (int, HasScale)) else 1.0)", changes=("c.scale = 1", "del c.scale")),
    Case("union", PROTOCOL, loss="loss = loss * (2.0 if isinstance(c, HasGain | HasScale) else 1.0)", changes=("c.scale = 1", "del c.scale")),
]  # fmt: skip


@all_of(OF_LIBRARY + PROTOCOLS)
def test_descriptors_and_protocols_of_the_library(case: Case) -> None:
    assert outcome_of(case).captures >= 2


# Sets, and dicts with objects for keys

MEMBERS = "class K:\n    def __init__(self, w): self.w = w\na, b = K(1.0), K(2.0)\nS, D = {a}, {a: 1.0}\n"
OBJECTS = [
    Case("attribute of a member", MEMBERS, loss="for k in S: loss = loss * k.w", changes=("a.w = 3.0", "a.w = 5.0")),
    Case("another member", MEMBERS, loss="for k in S: loss = loss * k.w", changes=("S.clear(); S.add(b)", "S.add(a); S.discard(b)")),
    Case("one more key", MEMBERS, loss="loss = loss * len([k for k in D])", changes=("D[b] = 1.0", "")),
    Case("attribute of a key", MEMBERS, loss="for k in D: loss = loss * k.w", changes=("a.w = 3.0", "D.clear(); D[b] = 1.0")),
]  # fmt: skip


@all_of(OBJECTS)
def test_objects_in_sets_and_keys_are_read(case: Case) -> None:
    assert outcome_of(case).captures >= 2


# Tensors that become one, memory of tensors and arrays

TWO = "P = torch.ones(3)\nst = types.SimpleNamespace(p=P, q=torch.zeros(3))\n"
ASKED = "loss = loss * (2.0 if st.p is st.q else 1.0)"
IDENTITIES = [
    Case("in an object", TWO, loss=ASKED, after="st.q.mul_(0.5)", changes=("st.q = st.p", "st.q = st.p.clone()")),
    Case("one at first", TWO + "st.q = P\n", loss=ASKED, after="st.q.mul_(0.5)", changes=("st.q = P.clone()", "st.q = st.p")),
    Case("parameter", TWO, loss="loss = loss * (2.0 if model.first.bias is st.q else 1.0)", changes=("st.q = model.first.bias", ""), refused="found elsewhere"),
]  # fmt: skip


@all_of(IDENTITIES)
def test_tensors_that_come_to_be_one(case: Case) -> None:
    outcome_of(case)


SHARED = "A = np.ones(3, dtype=np.float32)\nT = torch.from_numpy(A)\n"
MEMORIES = [
    Case("read after", SHARED, loss="T.mul_(0.5)\nloss = loss * float(A.sum())", refused="as NumPy array"),
    Case("written before", SHARED, loss="A[:] = A * 0.5\nloss = loss * T.sum()", refused="as NumPy array"),
    Case("made in the step", SHARED, loss="t = torch.from_numpy(A)\nt.mul_(0.5)\nloss = loss * float(A[::-1].sum())", refused="as NumPy array"),
    Case("only read", SHARED, loss="loss = loss * float(A.mean()) * T.sum()", changes=("A[:] = 2", "")),
    Case("side by side", SHARED + "T = T[:1]; A = A[1:]\n", loss="T.mul_(0.5)\nloss = loss * float(A.mean())", changes=("A[:] = 2", "")),
]  # fmt: skip


@all_of(MEMORIES)
def test_a_tensor_and_an_array_in_one_memory(case: Case) -> None:
    outcome_of(case)


def test_copies_of_tensors_are_refused_where_they_are_asked_for() -> None:
    outcome_of(
        Case(
            "copy",
            STATE,
            after="k.best = copy.deepcopy(model.state_dict())",
            refused="world.py:30: the step copies a tensor",
        )
    )
    outcome_of(Case("cloned", STATE, after="k.best = {n: v.clone() for n, v in model.state_dict().items()}"))
