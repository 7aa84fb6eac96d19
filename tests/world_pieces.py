"""What a world is made of, as text: pieces of real training code that write, draw, keep and say things in Python.

`@` is the number of the piece. Sections: `lib` is code of the second module, `defs` of the first; `before`, `hidden`,
`loss`, `grads` and `after` are lines of the step at these places; `change` is what may happen between two calls (`---`
divides alternatives), `argument` an expression that is handed to the step as `arg@`, `return` one that it returns.
"""

from __future__ import annotations

import dataclasses
import textwrap

SECTIONS = ("lib", "defs", "before", "hidden", "loss", "grads", "after", "change", "argument", "return")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Lines for the sections of a program; `changes` are alternatives."""

    lib: str = ""
    defs: str = ""
    before: str = ""
    hidden: str = ""
    loss: str = ""
    grads: str = ""
    after: str = ""
    changes: tuple[str, ...] = ()
    argument: str = ""
    returned: str = ""

    def replaced(self, old: str, new: str) -> Piece:
        texts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changes = tuple(change.replace(old, new) for change in texts.pop("changes"))
        return Piece(changes=changes, **{name: text.replace(old, new) for name, text in texts.items()})

    def numbered(self, number: int) -> Piece:
        """Decorators keep their `@`: they begin a line."""
        hidden = self.replaced("\n@", "\n\0").replaced(" @", " \0")
        hidden = dataclasses.replace(hidden, defs=_hide_first(hidden.defs), lib=_hide_first(hidden.lib))
        return hidden.replaced("@", str(number)).replaced("\0", "@")

    def storing(self, stored: str) -> Piece:
        return self.replaced("STORED", stored)


def _hide_first(text: str) -> str:
    return f"\0{text[1:]}" if text.startswith("@") else text


def parse(text: str) -> dict[str, Piece]:
    """Pieces by their names: `## name`, then sections, each a line `section:` with indented lines under it."""
    pieces: dict[str, Piece] = {}
    for block in text.split("\n## ")[1:]:
        name, _, body = block.partition("\n")
        sections: dict[str, list[str]] = {}
        current: list[str] = []
        for line in body.splitlines():
            if line.removesuffix(":") in SECTIONS:
                current = sections.setdefault(line.removesuffix(":"), [])
            else:
                current.append(line)
        changes = tuple(_lines(part) for part in "\n".join(sections.pop("change", [])).split("\n---\n") if part)
        found = {key: _lines("\n".join(lines)) for key, lines in sections.items()}
        returned = found.pop("return", "")
        pieces[name.strip()] = Piece(**found, changes=changes, returned=returned)
    return pieces


def _lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


DRAWS = parse("""
## random.random scales
loss:
    loss = loss * random.random()
change:
    random.seed(5)
## random.uniform through a helper
lib:
    def jitter@(low, high):
        return random.uniform(low, high)
loss:
    loss = loss * lib.jitter@(0.5, 1.5)
## a coin for a layer
hidden:
    if random.random() < 0.5:
        hidden = hidden * 2
## a choice of strings
hidden:
    kind@ = random.choice(["relu", "tanh"])
    hidden = F.relu(hidden) if kind@ == "relu" else torch.tanh(hidden)
## a number from a range
loss:
    if random.randint(0, 2) == 0:
        loss = loss * 3
## mixup
before:
    lam@ = np.random.beta(0.4, 0.4)
    x = lam@ * x + (1 - lam@) * x.flip(0)
loss:
    loss = lam@ * loss + (1 - lam@) * F.mse_loss(hidden, y.flip(0))
change:
    np.random.seed(7)
## NumPy noise
hidden:
    hidden = hidden + torch.tensor(np.random.rand(3), dtype=torch.float32)
## a generator of its own
defs:
    rng@ = random.Random(0)
loss:
    loss = loss * (0.5 + rng@.random())
change:
    rng@.seed(3)
## NumPy's new generator
defs:
    rng@ = np.random.default_rng(0)
loss:
    loss = loss * float(rng@.random())
change:
    rng@ = np.random.default_rng(9)
## a shuffled order
defs:
    order@ = [0, 1, 2]
before:
    random.shuffle(order@)
return:
    list(order@)
## a permutation of the columns
hidden:
    hidden = hidden[:, torch.as_tensor(np.random.permutation(3))]
## an index drawn for a buffer
defs:
    bank@ = torch.arange(12.0).view(4, 3)
hidden:
    hidden = hidden + bank@[random.randrange(4)] * 0.1
## a gaussian
loss:
    loss = loss + random.gauss(0, 1) * model.first.bias.sum()
## torch noise
hidden:
    hidden = hidden + torch.randn_like(hidden) * 0.1
change:
    torch.manual_seed(11)
## torch dropout
hidden:
    hidden = F.dropout(hidden, 0.3)
## a draw that is kept
defs:
    drawn@ = []
loss:
    drawn@.append(random.random())
    loss = loss * drawn@[-1]
""")

SAYS = parse("""
## print a text
after:
    print("one step")
## print a size
after:
    print("batch of", x.shape[0])
## log a number
defs:
    state@ = types.SimpleNamespace(n=0)
after:
    state@.n += 1
    logging.getLogger("world").info("step %d", state@.n)
## warn
after:
    warnings.warn(f"world: {x.shape[0]} rows")
## a progress bar
lib:
    class Bar@:
        def __init__(self, total):
            self.n, self.total, self.note = 0, total, ""
        def update(self, by=1):
            self.n += by
            print(f"{self.n}/{self.total} {self.note}", end="")
        def set_note(self, **items):
            self.note = ", ".join(f"{name}={item}" for name, item in items.items())
defs:
    bar@ = lib.Bar@(5)
after:
    bar@.set_note(size=x.shape[0])
    bar@.update()
""")

RARE = parse("""
## an iterator that outlives the step
defs:
    numbers@ = itertools.count(1)
loss:
    loss = loss * next(numbers@)
## a clock
after:
    elapsed@ = time.perf_counter() > 0
return:
    elapsed@
## a branch on the loss
loss:
    if loss > 0.5:
        loss = loss * 0.5
## the loss as a number
after:
    number@ = loss.item()
return:
    number@
## the loss printed
after:
    print(loss.detach())
""")
