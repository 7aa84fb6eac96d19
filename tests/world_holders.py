"""Where the Python values of a world live, and in how many ways they can be read there."""

from __future__ import annotations

import dataclasses

from tests.world_pieces import Piece, parse


@dataclasses.dataclass(frozen=True)
class Holder:
    """A place of a value.

    `kind` says how it can be read: an attribute of an object with or without a `__dict__`, of a dataclass, an item of a
    dict, a sequence or an array, or by one expression only, which `at` is then. `owner` and `at` are what readers join.
    In the texts of the piece VALUE stands for the value.
    """

    kind: str
    owner: str
    at: str
    piece: Piece


def _parse_holders(text: str) -> dict[str, Holder]:
    """Pieces whose headings are `name | kind | owner | at`."""
    holders: dict[str, Holder] = {}
    for heading, piece in parse(text).items():
        name, kind, owner, at = (part.strip() for part in heading.split("|"))
        holders[name] = Holder(kind, owner, at, piece)
    return holders


HOLDERS = _parse_holders("""
## namespace | object | cfg@ | rate
defs:
    cfg@ = types.SimpleNamespace(rate=VALUE, other=3)
change:
    cfg@.rate = VALUE
---
    cfg@ = types.SimpleNamespace(rate=VALUE, other=3)
## nested namespace | object | cfg@.loss | rate
defs:
    cfg@ = types.SimpleNamespace(loss=types.SimpleNamespace(rate=VALUE, other=3))
change:
    cfg@.loss.rate = VALUE
---
    cfg@.loss = types.SimpleNamespace(rate=VALUE, other=3)
## plain object | object | cfg@ | rate
defs:
    class Cfg@:
        def __init__(self, rate):
            self.rate, self.other = rate, 3
    cfg@ = Cfg@(VALUE)
change:
    cfg@.rate = VALUE
## dataclass | dataclass | cfg@ | rate
defs:
    @dataclasses.dataclass
    class Cfg@:
        rate: object
        other: int = 3
    cfg@ = Cfg@(VALUE)
change:
    cfg@.rate = VALUE
## frozen dataclass | dataclass | cfg@ | rate
defs:
    @dataclasses.dataclass(frozen=True)
    class Cfg@:
        rate: object
        other: int = 3
    cfg@ = Cfg@(VALUE)
change:
    cfg@ = dataclasses.replace(cfg@, rate=VALUE)
## slots | slots | cfg@ | rate
defs:
    class Cfg@:
        __slots__ = ("rate",)
    cfg@ = Cfg@()
    cfg@.rate = VALUE
change:
    cfg@.rate = VALUE
## property | slots | cfg@ | rate
defs:
    class Cfg@:
        def __init__(self, rate):
            self._rate = rate
        @property
        def rate(self):
            return self._rate
    cfg@ = Cfg@(VALUE)
change:
    cfg@._rate = VALUE
## lazy attributes | slots | cfg@ | rate
defs:
    class Cfg@:
        def __init__(self, **options):
            self.options = options
        def __getattr__(self, name):
            return self.__dict__["options"][name]
    cfg@ = Cfg@(rate=VALUE)
change:
    cfg@.options["rate"] = VALUE
## attribute dict | slots | cfg@ | rate
defs:
    class Cfg@(dict):
        __getattr__ = dict.__getitem__
    cfg@ = Cfg@(rate=VALUE)
change:
    cfg@["rate"] = VALUE
## class attribute | slots | Cfg@ | rate
defs:
    class Cfg@:
        rate = VALUE
change:
    Cfg@.rate = VALUE
## class attribute of an instance | slots | cfg@ | rate
defs:
    class Cfg@:
        rate = VALUE
    cfg@ = Cfg@()
change:
    Cfg@.rate = VALUE
---
    cfg@.rate = VALUE
## dict | dict | table@ | 'rate'
defs:
    table@ = {"other": 3, "rate": VALUE}
change:
    table@["rate"] = VALUE
---
    table@.update(rate=VALUE)
---
    table@ = {"other": 3, "rate": VALUE}
## nested tables | sequence | table@['a']['b'] | 0
defs:
    table@ = {"a": {"b": [VALUE, 0.25]}}
change:
    table@["a"]["b"][0] = VALUE
---
    table@["a"] = {"b": [VALUE, 0.25]}
## list | sequence | rates@ | 0
defs:
    rates@ = [VALUE, 0.25]
change:
    rates@[0] = VALUE
---
    rates@[:] = [VALUE, 0.125]
## tuple | sequence | cfg@.betas | 0
defs:
    cfg@ = argparse.Namespace(betas=(VALUE, 0.25))
change:
    cfg@.betas = (VALUE, 0.25)
## deque | sequence | window@ | 0
defs:
    window@ = collections.deque([VALUE, 0.25], maxlen=2)
change:
    window@[0] = VALUE
---
    window@.appendleft(VALUE)
## array | array | array@ | 0
defs:
    array@ = np.array([VALUE, 0.25])
change:
    array@[0] = VALUE
---
    array@ = np.array([VALUE, 0.25])
## array in an attribute | array | cfg@.rates | 0
defs:
    cfg@ = types.SimpleNamespace(rates=np.array([VALUE, 0.25]))
change:
    cfg@.rates[0] = VALUE
## NumPy scalar | object | cfg@ | rate
defs:
    cfg@ = types.SimpleNamespace(rate=np.float64(VALUE), other=3)
change:
    cfg@.rate = np.float64(VALUE)
## module attribute | slots | model | rate@
defs:
    model.rate@ = VALUE
change:
    model.rate@ = VALUE
## namespace of a module | object | model.first.cfg@ | rate
defs:
    model.first.cfg@ = types.SimpleNamespace(rate=VALUE, other=3)
change:
    model.first.cfg@.rate = VALUE
## library global | slots | lib | RATE@
lib:
    RATE@ = VALUE
change:
    lib.RATE@ = VALUE
## library function | call | | lib.rate@()
lib:
    RATE@ = VALUE
    def rate@():
        return RATE@
change:
    lib.RATE@ = VALUE
## library object | object | lib.CFG@.loss | rate
lib:
    CFG@ = types.SimpleNamespace(loss=types.SimpleNamespace(rate=VALUE, other=3))
change:
    lib.CFG@.loss.rate = VALUE
## library import inside the step | call | | __import__('world_lib').RATE@
lib:
    RATE@ = VALUE
change:
    lib.RATE@ = VALUE
## global | call | | RATE@
defs:
    RATE@ = VALUE
change:
    RATE@ = VALUE
## closure | call | | get@()
defs:
    def make@(value):
        def get():
            return value
        def put(new):
            nonlocal value
            value = new
        return get, put
    get@, put@ = make@(VALUE)
change:
    put@(VALUE)
## default | call | | rate@()
defs:
    def rate@(value=VALUE):
        return value
change:
    rate@.__defaults__ = (VALUE,)
## partial | call | | cfg@.rate(-2.0)
defs:
    cfg@ = types.SimpleNamespace(rate=functools.partial(max, VALUE, -1.0))
change:
    cfg@.rate = functools.partial(max, VALUE, -1.0)
## lambda | call | | cfg@.rate()
defs:
    cfg@ = types.SimpleNamespace(rate=lambda: VALUE)
change:
    cfg@.rate = lambda: VALUE
## callable object | call | | cfg@()
defs:
    class Cfg@:
        def __init__(self, rate):
            self.rate = rate
        def __call__(self):
            return self.rate
    cfg@ = Cfg@(VALUE)
change:
    cfg@.rate = VALUE
## descriptor with a value of its own | slots | cfg@ | rate
defs:
    class Rate@:
        def __init__(self, value):
            self.value = value
        def __get__(self, owner, kind=None):
            return self.value
        def __set__(self, owner, value):
            self.value = value
    class Cfg@:
        rate = Rate@(VALUE)
    cfg@ = Cfg@()
change:
    cfg@.rate = VALUE
---
    vars(Cfg@)['rate'].value = VALUE
## class attribute of a new object | call | | Cfg@().rate
defs:
    class Cfg@:
        rate = VALUE
change:
    Cfg@.rate = VALUE
## attribute of a metaclass | call | | Cfg@.rate
defs:
    class Kind@(type):
        rate = VALUE
    class Cfg@(metaclass=Kind@):
        pass
change:
    Kind@.rate = VALUE
## __getattr__ of a metaclass | call | | Cfg@.rate
defs:
    class Kind@(type):
        def __getattr__(cls, name):
            return cls.table[name]
    class Cfg@(metaclass=Kind@):
        table = {'rate': VALUE}
change:
    Cfg@.table['rate'] = VALUE
## made by a metaclass | call | | Cfg@().rate
defs:
    class Kind@(type):
        made = {}
        def __call__(cls):
            return cls.made.setdefault('one', super().__call__())
    class Cfg@(metaclass=Kind@):
        rate = VALUE
    Cfg@()
change:
    Cfg@().rate = VALUE
## defaults of a function | call | | of@.__defaults__[0]
defs:
    def of@(rate=VALUE):
        return rate
change:
    of@.__defaults__ = (VALUE,)
## lru_cache | call | | rate@('rate')
defs:
    table@ = {"rate": VALUE}
    @functools.lru_cache(maxsize=4)
    def rate@(name):
        return table@[name]
change:
    table@["rate"] = VALUE
    rate@.cache_clear()
---
    table@["rate"] = VALUE
## argument object | object | arg@ | rate
defs:
    class Cfg@:
        def __init__(self, rate):
            self.rate, self.other = rate, 3
    cfg@ = Cfg@(VALUE)
argument:
    cfg@
change:
    cfg@.rate = VALUE
## argument object made anew | object | arg@ | rate
defs:
    class Cfg@:
        def __init__(self, rate):
            self.rate, self.other = rate, 3
    RATE@ = VALUE
argument:
    Cfg@(RATE@)
change:
    RATE@ = VALUE
## argument dict | dict | arg@ | 'rate'
defs:
    RATE@ = VALUE
argument:
    {"other": 3, "rate": RATE@}
change:
    RATE@ = VALUE
## argument dataclass | dataclass | arg@ | rate
defs:
    @dataclasses.dataclass
    class Cfg@:
        rate: object
        other: int = 3
    RATE@ = VALUE
argument:
    Cfg@(RATE@)
change:
    RATE@ = VALUE
## argument | call | | arg@
defs:
    RATE@ = VALUE
argument:
    RATE@
change:
    RATE@ = VALUE
## argument array | array | arg@ | 0
defs:
    RATE@ = VALUE
argument:
    np.array([RATE@, 0.25])
change:
    RATE@ = VALUE
""")

_ATTRIBUTE = (
    "OWNER.AT",
    "OWNER.AT",
    "getattr(OWNER, 'AT')",
    "getattr(OWNER, 'AT', 0.0)",
    "getattr(OWNER, ''.join(['AT'[:2], 'AT'[2:]]))",
    "operator.attrgetter('AT')(OWNER)",
    "next(map(operator.attrgetter('AT'), [OWNER]))",
    "(lambda c: c.AT)(OWNER)",
    "lib.read(OWNER, 'AT')",
    "[getattr(c, 'AT') for c in (OWNER,)][0]",
    "(OWNER.AT if hasattr(OWNER, 'AT') else 0.0)",
)
_OBJECT = (
    *_ATTRIBUTE,
    "vars(OWNER)['AT']",
    "OWNER.__dict__['AT']",
    "{**vars(OWNER)}['AT']",
    "[v for n, v in vars(OWNER).items() if n == 'AT'][0]",
    "copy.copy(OWNER).AT",
)
_DICT = (
    "OWNER[AT]",
    "OWNER[AT]",
    "OWNER.get(AT)",
    "operator.itemgetter(AT)(OWNER)",
    "dict(OWNER)[AT]",
    "{**OWNER}[AT]",
    "list(OWNER.values())[-1]",
    "[v for n, v in OWNER.items() if n == AT][0]",
    "sorted(OWNER.items())[-1][1]",
    "OWNER[f'{chr(114)}ate']",
    "(OWNER[AT] if AT in OWNER else 0.0)",
)
_SEQUENCE = (
    "OWNER[AT]",
    "list(OWNER)[AT]",
    "OWNER[-len(OWNER)]",
    "[w for w in OWNER][AT]",
    "operator.itemgetter(AT)(OWNER)",
    "next(iter(OWNER))",
    "next(w for w in OWNER)",
)
READERS: dict[str, tuple[str, ...]] = {
    "object": _OBJECT,
    "dataclass": (
        *_OBJECT,
        "dataclasses.asdict(OWNER)['AT']",
        "dataclasses.replace(OWNER).AT",
        "[getattr(OWNER, f.name) for f in dataclasses.fields(OWNER)][0]",
    ),
    "slots": _ATTRIBUTE,
    "dict": _DICT,
    "sequence": _SEQUENCE,
    "array": ("OWNER[AT]", "OWNER.tolist()[AT]", "OWNER.copy()[AT]", "OWNER[AT].item()"),
    "call": ("AT",),
}
NUMERIC_READERS: dict[str, tuple[str, ...]] = {
    "dict": ("json.loads(json.dumps(OWNER))[AT]",),
    "sequence": ("max(OWNER)", "sum(OWNER)", "sum(map(float, OWNER))", "float(np.sum(OWNER))", "sorted(OWNER)[-1]"),
    "array": ("float(OWNER[AT])", "OWNER.sum()", "float(np.dot(OWNER, OWNER))", "np.max(OWNER)", "OWNER.mean().item()"),
}
