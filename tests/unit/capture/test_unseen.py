# ruff: noqa: E501 - a table with one world a line
"""What ran, was read or was written where nobody looked: small worlds that were once silently wrong.

Each world is a few lines of definitions, lines for one place of a train step, and what happens before later calls.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tests.worlds import HEAD, IMPORTS, LIBRARY, LIBRARY_HEAD, Program, run

import wholestep

STATE = "k = types.SimpleNamespace(n=0, f=1.0, l=[], h={})\n"


@dataclasses.dataclass(frozen=True)
class Case:
    """`loss` and `after` are lines of the step; `changes` happen before calls 3 and 5; `refused` if it must be."""

    name: str
    defs: str = ""
    loss: str = ""
    after: str = ""
    changes: tuple[str, str] = ("", "")
    refused: str = ""
    library: str = ""
    is_slow: bool = False

    def program(self) -> Program:
        body = f"""
optimizer.zero_grad()
loss = F.mse_loss(model.second(torch.tanh(model.first(x))), y)
{self.loss}
loss.backward()
optimizer.step()
{self.after}
return loss
"""
        step = "def step(x, y):\n" + textwrap.indent(body, "    ")
        head = HEAD.replace("OPTIMIZER", "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)")
        arguments = "def arguments(call, size):\n    return batch(call, size)\n"
        main = "\n".join([f"{IMPORTS}import {LIBRARY} as lib", head, self.defs, step, arguments])
        first, second = self.changes
        return Program(LIBRARY_HEAD + self.library, main, (("", 2), ("", 2), (first, 2), ("", 2), (second, 2)))


OPERATORS = """
SC = {"a": 2.0, "n": 2}
LOG = {}
class D:
    def __setitem__(self, key, value): LOG[key] = value
    def __neg__(self): return SC["a"]
    def __delitem__(self, key): LOG[key] = 0
    def __iter__(self): return iter([SC["a"]] * SC["n"])
"""
DESCRIPTOR = """
class Field:
    def __set_name__(self, owner, name): self.name = "_" + name
    def __get__(self, owner, cls=None): return owner.values[self.name]
    def __set__(self, owner, value): owner.values[self.name] = value
class K:
    b = Field()
    def __init__(self): self.values = {}; self.b = 1.0
k = K()
"""
DISPATCHED = """
SC = {"b": 1.0, "n": 0}
@functools.singledispatch
def scaled(value): return value
@scaled.register(torch.Tensor)
def _(value):
    SC["n"] += 1
    return value * SC["b"]
"""
METER = """
class Meter:
    def __init__(self): self.reset()
    def reset(self): self.sum, self.count = 0, 0
    def update(self, value, n): self.sum += value * n; self.count += n
meter = Meter()
"""
HOOKS = """
class Hook:
    n = 0
    def __call__(self, *about): self.n += 1; self.last = about[-1]
hook = Hook()
model.first.register_forward_hook(lambda *about: None)
model.second.register_forward_hook(Hook())
optimizer.register_step_post_hook(hook)
seen = []
model.first.weight.register_hook(seen.append)
"""
CONFIG = """
Config = collections.namedtuple("Config", "beta mode")
cfg = Config(2.0, "a")
"""
POINT = """
@dataclasses.dataclass
class Point:
    a: float
    b: float
point = Point(1.0, 2.0)
"""
ATTRIBUTE_DICT = """
class Config(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
cfg = Config(beta=1.0)
"""
CLASSES = "class Base:\n    beta = 1.0\nclass Child(Base): pass\nk = Child()\n"
SENTINELS = "class Phase: pass\nA, B = Phase(), Phase()\nk = types.SimpleNamespace(phase=A)\n"
PRINTED = "class M:\n    n = 0\n    def __str__(self): return f'M{self.n}'\nm = M()\n"
WEAK = "import weakref\nclass K: pass\nk = K(); k.b = 1.0\nref = weakref.ref(k)\n"
WEAK_DICT = f"{WEAK}d = weakref.WeakValueDictionary(); d['k'] = k\n"
REGISTER = "REG = []\ndef register(f):\n    REG.append(f.__name__)\n    return f\n"
RING = "class Node: pass\n"

CASES = [
    Case("same attribute again", STATE, after="k.stop = False", changes=("k.stop = True", "k.stop = None")),
    Case("same global again", "FLAG = 1\n", loss="global FLAG\nFLAG = 1", changes=("FLAG = 2", "")),
    Case("clear what is empty", STATE, after="k.l.clear(); k.h.clear()", changes=("k.l.append(1)", "k.h['a'] = 1")),
    Case("add what is there", "S = {1}\n", after="S.add(1)", changes=("S.clear()", "")),
    Case("train in the step", "", loss="model.train()", changes=("model.eval()", "model.eval()")),
    Case("own generator", "", loss="loss = loss * random.Random(0).random() * np.random.default_rng(1).random()"),
    Case("own generator without a seed", "", loss="loss = loss + 0 * random.Random().random()", refused="without a seed"),
    Case("iterator in zip", "C = itertools.count()\n", after="z = list(zip(C, [1, 2]))", refused="outlives it"),
    Case("next by name", "C = itertools.count()\n", after="C.__next__()", refused="outlives it", is_slow=True),
    Case("method of C in map", STATE, after="list(map(k.l.append, [loss.detach()]))"),
    Case("method of C in a hook", STATE, loss="loss.register_hook(k.l.append)"),
    Case("method of C that reads", "W = {'a': 1.0}\n", loss="loss = loss * sum(map(W.get, ['a']))", changes=("W['a'] = 3.0", "")),
    Case("pattern of a class", POINT, loss="match point:\n    case Point(a, b=b): loss = loss * a + b", changes=("point.a = 5.0", "point.b = 7.0")),
    Case("decorator", REGISTER, loss="@register\ndef scale(v): return v * 2\nloss = scale(loss)"),
    Case("operators of an object of the step", OPERATORS, loss="d = D(); d['l'] = loss.detach(); del d['x']\nfor v in d: loss = loss * (-d) * v", changes=("SC['a'] = 4.0", "SC['n'] = 3")),
    Case("named tuple", CONFIG, loss="loss = loss * cfg.beta * (2.0 if cfg.mode == 'a' else 3.0)", changes=("cfg = cfg._replace(beta=3.0)", "cfg = cfg._replace(mode='b')")),
    Case("descriptor", DESCRIPTOR, loss="loss = loss * k.b", changes=("k.b = 2.0", "k.b = 3.0")),
    Case("descriptor that is set", DESCRIPTOR, after="k.b = loss.detach()", is_slow=True),
    Case("property of C", "class K:\n    beta = property(operator.attrgetter('_c'))\nk = K(); k._c = 1.0\n", loss="loss = loss * k.beta", changes=("k._c = 2.0", "")),
    Case("property of a base", "class B:\n    @property\n    def s(self): return self.c\nclass C(B):\n    @property\n    def s(self): return super().s * 2\nk = C(); k.c = 1.0\n", loss="loss = loss * k.s", changes=("k.c = 2.0", ""), is_slow=True),
    Case("attribute of a class further down", CLASSES, loss="loss = loss * k.beta * getattr(Child, 'gamma', 1.0)", changes=("Child.beta = 2.0", "Base.gamma = 3.0")),
    Case("global that was not there", "", loss="try: s = SCALE\nexcept NameError: s = 1.0\nloss = loss * s", changes=("SCALE = 2.0", "")),
    Case("builtin that is hidden later", "", loss="loss = max([loss, loss * 2], key=lambda v: 0)", changes=("max = lambda a, key: a[1]", "")),
    Case("getattr of a module", "", loss="loss = loss * lib.beta", library="_V = {'b': 1.0}\ndef __getattr__(name):\n    if name == 'beta': return _V['b']\n    raise AttributeError(name)\n", changes=("lib._V['b'] = 2.0", "")),
    Case("objects compared", SENTINELS, loss="loss = loss * (2.0 if k.phase == A else 3.0) * (2.0 if k.phase in (A, 1) else 1.0)", changes=("k.phase = B", "k.phase = A")),
    Case("order of a set", "S = frozenset([0, 8])\nW = {0: 2.0, 8: 3.0}\n", loss="for i in S: loss = loss * W[i] + W[i]", changes=("S = frozenset([8, 0])", "")),
    Case("attributes that are items", ATTRIBUTE_DICT, loss="loss = loss * cfg.beta", after="cfg.last = loss.detach()", changes=("cfg.beta = 2.0", "")),
    Case("single dispatch", DISPATCHED, loss="loss = scaled(loss)", changes=("SC['b'] = 2.0", "")),
    Case("weak reference", WEAK, loss="loss = loss * ref().b", changes=("k.b = 2.0", "")),
    Case("weak dict", WEAK_DICT, loss="loss = loss * d['k'].b", refused="cannot be watched"),
    Case("hooks that are objects", HOOKS),
    Case("meter that is reset", METER, after="meter.update(loss.detach(), x.size(0))", changes=("meter.reset()", "")),
    Case("printed before it grows", STATE, after="print(k.l); k.l.append(1)"),
    Case("printed before it changes", PRINTED, after="print(m); m.n += 1", refused="after it was printed"),
    Case("ring of objects", STATE + RING, after="a, b = Node(), Node(); a.to, b.to, a.v = b, a, loss.detach(); k.ring = a"),
    Case("checkpointed counter", STATE + "def f(v):\n    k.n += 1\n    return v * 2\n", loss="loss = torch.utils.checkpoint.checkpoint(f, loss, use_reentrant=False)", refused="checkpoint"),
    Case("thread", STATE + "import threading\ndef f(): k.n += 1\n", after="t = threading.Thread(target=f); t.start(); t.join()", refused="threads"),
    Case("content of C", "B = bytearray(b'\\x01')\n", loss="loss = loss * B[0]", refused="cannot be watched"),
    Case("content of C of a heap type", "import array\nB = array.array('d', [1.0])\n", loss="for b in B: loss = loss * b", refused="cannot be watched"),
    Case("local to a thread", "import threading\nB = threading.local(); B.v = 1.0\n", loss="loss = loss * B.v", refused="cannot be watched", is_slow=True),
]  # fmt: skip


@pytest.mark.sample(18)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.is_slow else []) for c in CASES]
)
def test_small_worlds(case: Case) -> None:
    outcome = run(case.program(), wholestep.compile)
    assert case.refused in (outcome.refused or "")
    assert bool(outcome.refused) is bool(case.refused)


BATCHES = {
    "plain class": "class Batch:\n    def __init__(self, x, y): self.x, self.y = x, y\n",
    "namespace": "Batch = lambda x, y: types.SimpleNamespace(x=x, y=y)\n",
}


@pytest.mark.parametrize("kind", BATCHES)
def test_tensors_in_objects_among_the_arguments(kind: str) -> None:
    head = HEAD.replace("OPTIMIZER", "torch.optim.SGD(model.parameters(), lr=0.1)")
    step = """
def step(batch):
    optimizer.zero_grad()
    loss = F.mse_loss(model.second(model.first(batch.x)), batch.y)
    loss.backward()
    optimizer.step()
    batch.loss = loss.detach()
    return loss

def arguments(call, size):
    return (Batch(*batch(call, size)),)
"""
    program = Program(LIBRARY_HEAD, "\n".join([IMPORTS, head, BATCHES[kind], step]), (("", 2),) * 4)
    outcome = run(program, wholestep.compile)
    assert not outcome.refused
    assert outcome.captures == 1


def test_a_batch_with_names_that_nobody_reads() -> None:
    head = HEAD.replace("OPTIMIZER", "torch.optim.SGD(model.parameters(), lr=0.1)")
    step = """
def step(batch):
    optimizer.zero_grad()
    loss = F.mse_loss(model.second(model.first(batch["x"])), batch["y"])
    loss.backward()
    optimizer.step()
    return loss

def arguments(call, size):
    x, y = batch(call, size)
    return ({"x": x, "y": y, "file": f"image{call}.png", "epoch": call},)
"""
    outcome = run(Program(LIBRARY_HEAD, "\n".join([IMPORTS, head, step]), (("", 2),) * 4), wholestep.compile)
    assert not outcome.refused
    assert outcome.captures == 1


STEP_IN_A_FILE = """
import torch
from torch import nn

import wholestep


def step(model, optimizer, features):
    loss = model(features).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


model = nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
assert "linked" in torch.__file__ and "linked" in wholestep.__file__
wholestep.compile(step)(model, optimizer, torch.ones(2, 3))
"""


def test_environments_may_be_linked(tmp_path: Path) -> None:
    """Files of torch are told from the user's by where they are, however they were found."""
    roots = [os.path.dirname(os.path.dirname(str(module.__file__))) for module in (torch, wholestep)]
    for number, root in enumerate(roots):
        (tmp_path / f"linked{number}").symlink_to(root)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tmp_path / f"linked{n}") for n in range(len(roots)))}
    (tmp_path / "train.py").write_text(STEP_IN_A_FILE, encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / "train.py")], env=environment, check=True)
