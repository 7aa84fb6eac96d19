"""Pieces of worlds that write in Python: counters, meters, averages, histories, caches and hooks."""

from __future__ import annotations

from tests.world_pieces import parse

STORED = (
    "loss.detach()",
    "loss.detach()",
    "loss",
    "loss.detach() * 2",
    "hidden.detach().mean(0)",
    "(x.shape[0], loss.detach())",
    "{'loss': loss.detach(), 'size': x.shape[0]}",
    "x.shape[0]",
    "0.5",
    "'text'",
    "x[0]",
    "model.first.weight.detach().clone()",
    "model.first.weight.detach()",
)
"""What the word STORED of a piece may stand for."""

WRITES = parse("""
## a counter that is only kept
defs:
    state@ = types.SimpleNamespace(n=0)
after:
    state@.n += 1
change:
    state@.n = 10
## a counter that is printed
defs:
    state@ = {"n": 0}
after:
    state@["n"] += 1
    print(f"step {state@['n']}")
## a counter that scales the loss
defs:
    class State@:
        n = 0
    state@ = State@()
loss:
    state@.n += 1
    loss = loss * (state@.n / (state@.n + 1))
change:
    state@.n = 0
## a counter that warms up
defs:
    state@ = types.SimpleNamespace(n=0)
loss:
    loss = loss * min(1.0, (state@.n + 1) / 3)
after:
    state@.n += 1
## a counter of the module
defs:
    model.seen@ = 0
hidden:
    model.seen@ += 1
    if model.seen@ > 2:
        hidden = hidden * 0.5
## a global counter
defs:
    N@ = 0
    def count@():
        global N@
        N@ += 1
        return N@
after:
    count@()
return:
    N@
## a counter of the library
lib:
    N@ = 0
    def count@(loss):
        global N@
        N@ += 1
        return loss * N@
loss:
    loss = lib.count@(loss)
change:
    lib.N@ = 5
## a counter in a closure
defs:
    def make@():
        n = 0
        def count():
            nonlocal n
            n += 1
            return n
        return count
    count@ = make@()
loss:
    loss = loss * (1 + 0.1 * count@())
## a counter of a class
defs:
    class Calls@:
        total = 0
        @classmethod
        def count(cls):
            cls.total += 1
after:
    Calls@.count()
## a counter in an array
defs:
    counts@ = np.zeros(3)
after:
    counts@[x.shape[0] % 3] += 1
change:
    counts@[:] = 0
## a counter that branches on its parity
defs:
    state@ = types.SimpleNamespace(n=0)
before:
    state@.n += 1
loss:
    if state@.n % 2 == 0:
        loss = loss + model.first.weight.square().mean()
## a counter behind no_grad
defs:
    class Counter@:
        def __init__(self):
            self.n = 0
        @torch.no_grad()
        def tick(self):
            self.n += 1
    counter@ = Counter@()
after:
    counter@.tick()
## the loss in an attribute
defs:
    trainer@ = types.SimpleNamespace(loss=None)
after:
    trainer@.loss = STORED
## the loss in a new attribute
defs:
    trainer@ = types.SimpleNamespace()
after:
    trainer@.fresh = STORED
change:
    vars(trainer@).clear()
## setattr with a computed name
defs:
    trainer@ = types.SimpleNamespace()
after:
    setattr(trainer@, "lo" + "ss", STORED)
## a slot
defs:
    class Slot@:
        __slots__ = ("value", "n")
    slot@ = Slot@()
    slot@.n = 0
after:
    slot@.value = STORED
    slot@.n += 1
## a property with a setter
defs:
    class Kept@:
        def __init__(self):
            self._value, self.writes = None, 0
        @property
        def value(self):
            return self._value
        @value.setter
        def value(self, value):
            self._value = value
            self.writes += 1
    kept@ = Kept@()
after:
    kept@.value = STORED
## a list that grows
defs:
    history@ = []
after:
    history@.append(STORED)
change:
    history@.clear()
---
    history@ = []
## a list of two kinds
defs:
    history@ = []
after:
    history@.append((len(history@), STORED))
## a list inside a dict
defs:
    log@ = collections.defaultdict(list)
after:
    log@["loss"].append(STORED)
    log@["size"].append(x.shape[0])
change:
    del log@["loss"]
## a list that is extended and cut
defs:
    history@ = [0.0]
after:
    history@.extend([STORED, 1.0])
    history@[0] = 2.0
    if len(history@) > 4:
        del history@[:2]
## a list with insert and pop
defs:
    recent@ = []
after:
    recent@.insert(0, STORED)
    if len(recent@) > 2:
        recent@.pop()
## a deque
defs:
    window@ = collections.deque(maxlen=2)
after:
    window@.append(STORED)
## a deque on the left
defs:
    window@ = collections.deque([1.0], maxlen=3)
after:
    window@.appendleft(STORED)
return:
    len(window@)
## a dict item
defs:
    metrics@ = {}
after:
    metrics@["loss"] = STORED
change:
    metrics@.clear()
---
    metrics@["other"] = 1
## a dict updated
defs:
    metrics@ = {"epoch": 0}
after:
    metrics@.update(loss=STORED, epoch=metrics@["epoch"] + 1)
    metrics@.setdefault("first", STORED)
## a dict by name
defs:
    metrics@ = {}
after:
    for name, parameter in model.named_parameters():
        metrics@[f"norm/{name}"] = parameter.detach().norm()
## a dict with deletion
defs:
    metrics@ = {"old": 1, "kept": 2}
after:
    metrics@.pop("old", None)
    metrics@["new"] = STORED
    del metrics@["new"]
    metrics@["last"] = STORED
## a Counter
defs:
    seen@ = collections.Counter()
after:
    seen@[f"size {x.shape[0]}"] += 1
## a set
defs:
    sizes@ = set()
after:
    sizes@.add(x.shape[0])
## a meter
defs:
    class Meter@:
        def __init__(self):
            self.reset()
        def reset(self):
            self.val, self.sum, self.count, self.avg = 0, 0, 0, 0
        def update(self, val, n=1):
            self.val = val
            self.sum = self.sum + val * n
            self.count += n
            self.avg = self.sum / self.count
    meter@ = Meter@()
after:
    meter@.update(loss.detach(), x.shape[0])
change:
    meter@.reset()
## a running mean
defs:
    class Mean@:
        value = None
        def add(self, new):
            self.value = new if self.value is None else 0.9 * self.value + 0.1 * new
    mean@ = Mean@()
after:
    mean@.add(loss.detach())
## a running mean that is read
defs:
    state@ = types.SimpleNamespace(mean=torch.ones(()))
loss:
    loss = loss / (1 + state@.mean)
after:
    state@.mean = 0.5 * state@.mean + 0.5 * loss.detach()
## an average of the weights
defs:
    class Ema@:
        def __init__(self, parameters):
            self.shadow = [p.detach().clone() for p in parameters]
            self.n = 0
        @torch.no_grad()
        def step(self, parameters):
            self.n += 1
            decay = min(0.9, (1 + self.n) / (10 + self.n))
            for kept, p in zip(self.shadow, parameters):
                kept.sub_((1 - decay) * (kept - p))
    ema@ = Ema@(model.parameters())
after:
    ema@.step(model.parameters())
## an average of the weights by name
defs:
    ema@ = {name: p.detach().clone() for name, p in model.named_parameters()}
    ema_options@ = types.SimpleNamespace(decay=0.5)
after:
    with torch.no_grad():
        for name, p in model.named_parameters():
            ema@[name].lerp_(p, 1 - ema_options@.decay)
change:
    ema_options@.decay = 0.75
---
    ema_options@.decay = 0.875
## swapped objects
defs:
    pair@ = types.SimpleNamespace(a=[0.5], b=[1.5])
loss:
    loss = loss * pair@.a[0]
after:
    pair@.a, pair@.b = pair@.b, pair@.a
## a report made anew
defs:
    @dataclasses.dataclass
    class Report@:
        loss: object
        size: int
    trainer@ = types.SimpleNamespace(report=None)
after:
    trainer@.report = Report@(STORED, x.shape[0])
## one object in two places
defs:
    a@, b@ = [], {}
after:
    kept@ = [STORED]
    a@.append(kept@)
    b@["last"] = kept@
## a cache by size
defs:
    cache@ = {}
hidden:
    if hidden.shape[0] not in cache@:
        cache@[hidden.shape[0]] = torch.linspace(0.5, 1.0, hidden.shape[0]).unsqueeze(1)
    hidden = hidden * cache@[hidden.shape[0]]
change:
    cache@.clear()
## an lru_cache
defs:
    @functools.lru_cache(maxsize=None)
    def table@(n):
        return torch.linspace(0.5, 1.0, n).unsqueeze(1)
hidden:
    hidden = hidden * table@(hidden.shape[0])
change:
    table@.cache_clear()
## an attribute made at the first call
defs:
    model.table@ = None
hidden:
    if model.table@ is None or len(model.table@) != hidden.shape[0]:
        model.table@ = torch.linspace(0.5, 1.0, hidden.shape[0]).unsqueeze(1)
    hidden = hidden * model.table@
## a cache with the size it was made for
lib:
    class Labels@:
        def __init__(self):
            self.size, self.kept = 0, {}
        def of(self, n, device):
            if self.size != n or device not in self.kept:
                self.kept[device] = torch.arange(n, device=device) % 3
                self.size = n
            return self.kept[device]
defs:
    labels@ = lib.Labels@()
loss:
    loss = loss + F.cross_entropy(hidden, labels@.of(hidden.shape[0], hidden.device))
## a forward hook that collects
defs:
    outputs@ = []
    handle@ = model.first.register_forward_hook(lambda module, args, out: outputs@.append(out.detach().mean()))
change:
    outputs@.clear()
## a forward hook that keeps by name
defs:
    outputs@ = {}
    def keep@(name):
        def hook(module, args, out):
            outputs@[name] = out.detach().abs().mean()
        return hook
    for name@, module@ in model.named_children():
        module@.register_forward_hook(keep@(name@))
## a forward hook that counts
defs:
    model.second.calls = 0
    def count@(module, args, out):
        module.calls += 1
    model.second.register_forward_hook(count@)
## a gradient hook that collects
defs:
    norms@ = []
    model.first.weight.register_hook(lambda grad: norms@.append(grad.norm()))
## a backward hook that keeps
defs:
    grads@ = {}
    def keep@(module, grad_in, grad_out):
        grads@["second"] = grad_out[0].norm()
    model.second.register_full_backward_hook(keep@)
## a queue with a pointer
defs:
    class Queue@(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("items", torch.zeros(6, 3))
            self.ptr = 0
        @torch.no_grad()
        def put(self, keys):
            self.items[self.ptr : self.ptr + 2] = keys[:2]
            self.ptr = (self.ptr + 2) % 6
    queue@ = Queue@()
after:
    queue@.put(hidden.detach())
## gradients that are kept
defs:
    kept@ = {}
grads:
    kept@["first"] = model.first.weight.grad.clone()
    kept@["norm"] = sum(p.grad.norm() for p in model.parameters())
## a tensor written in place
defs:
    total@ = torch.zeros(())
after:
    total@.add_(loss.detach())
change:
    total@.zero_()
""")
