"""Pieces of worlds that read Python values: a place, a spelling, and what the value decides."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st
from tests.world_holders import HOLDERS, NUMERIC_READERS, READERS
from tests.world_pieces import Piece, parse

# What a value decides. V is the value; uses are lines at a place of the step.
FLOAT_USES = parse("""
## scale
loss:
    loss = loss * V
## scale of the hidden layer
hidden:
    hidden = hidden * V
## penalty
loss:
    loss = loss + model.first.weight.square().sum() * V
## dropout
hidden:
    hidden = F.dropout(hidden, p=min(V / 4, 0.9))
## clamp
hidden:
    hidden = hidden.clamp(-V / 4, V / 4)
## exponent
loss:
    loss = loss ** V
## slope
hidden:
    hidden = F.leaky_relu(hidden, V / 8)
## eps
hidden:
    hidden = F.layer_norm(hidden, (3,), eps=V / 100)
## alpha
hidden:
    hidden = torch.add(hidden, y, alpha=V)
## full
hidden:
    hidden = hidden + torch.full_like(hidden, V)
## tensor
hidden:
    hidden = hidden * torch.tensor(V, dtype=torch.float32)
## branch
loss:
    if V > 1.0:
        loss = loss * 3
## two sided branch
loss:
    loss = loss * (2 if 0.4 < V < 1.7 else 1)
## key by size
loss:
    loss = loss * {'low': 0.5, 'high': 2.0}['low' if V < 1 else 'high']
## key by text
loss:
    loss = loss * {'w0': 0.5, 'w1': 0.75}.get(f'w{int(V)}', 2.0)
## whole number
loss:
    loss = loss * int(V)
## index
hidden:
    hidden = hidden + hidden[:, [int(V) % 3]]
## slice
hidden:
    hidden = torch.cat([hidden[:, int(V):], hidden[:, :int(V)]], dim=1)
## repeats
loss:
    for _ in range(int(V)):
        loss = loss * 0.5
## cosine
loss:
    loss = loss * math.cos(V)
## at most
loss:
    loss = loss * min(V, 1.0)
## rounded
loss:
    loss = loss * round(V, 1)
## text
loss:
    loss = loss * float(f'{V:.2f}')
## type
loss:
    loss = loss * (1.0 if isinstance(V, float) else 2.0)
## arithmetic
loss:
    loss = loss * (V * 0.1) * 3.0 / (1 + V)
## truth
loss:
    if not V:
        loss = loss + 1
## returned
return:
    V
## printed
after:
    print(f'rate {V}')
## kept
defs:
    kept_rates@ = []
after:
    kept_rates@.append(V)
""")
WORD_USES = parse("""
## switch
hidden:
    if V == 'relu':
        hidden = F.relu(hidden)
    elif V == 'tanh':
        hidden = torch.tanh(hidden)
## getattr
hidden:
    hidden = getattr(torch, V)(hidden)
## dispatch
hidden:
    hidden = {'relu': F.relu, 'tanh': torch.tanh, 'sigmoid': torch.sigmoid}[V](hidden)
## match
hidden:
    match V:
        case 'relu' | 'sigmoid':
            hidden = F.relu(hidden)
        case _:
            hidden = hidden * 2
## membership
loss:
    if V in ('relu', 'sigmoid'):
        loss = loss * 2
## length
loss:
    loss = loss * len(V)
## prefix
loss:
    loss = loss * (2 if V.startswith('t') else 1)
## key
loss:
    loss = loss * {'relu_w': 0.5}.get(f'{V}_w', 2.0)
## printed
after:
    print('layer', V)
""")
LIST_USES = parse("""
## sum
loss:
    for weight in V:
        loss = loss + weight * model.first.weight.mean()
## length
loss:
    loss = loss * len(V)
## truth
loss:
    if V:
        loss = loss * 2
## membership
loss:
    loss = loss * (2 if 0.5 in V else 1)
## comprehension
loss:
    loss = loss * (1 + sum(w for w in V if w > 0.3))
## zip
loss:
    for weight, parameter in zip(V, model.parameters()):
        loss = loss + weight * parameter.square().sum()
## enumerate
hidden:
    hidden = hidden * torch.tensor([w + i for i, w in enumerate(V)] + [1.0]).mean()
## map
loss:
    loss = loss * sum(map(abs, V), start=1.0)
## unpacked
loss:
    first@, *rest@ = [*V, 1.0]
    loss = loss * first@
""")
FLOATS = ("0.25", "0.5", "1.5", "2.0", "0.75", "1.25")
WORDS = ("'relu'", "'tanh'", "'sigmoid'")
COUNTS = ("0", "1", "2", "3", "4")
LISTS = ("[0.5, 1.5]", "[]", "[0.25]", "[0.25, 0.5, 2.0]")


TYPES = [(FLOATS, FLOAT_USES)] * 4 + [(COUNTS, FLOAT_USES), *[(WORDS, WORD_USES)] * 2, (LISTS, LIST_USES)]


@st.composite
def value_reads(draw: Any) -> Piece:
    """A value of some type, in some place, read in some way, for something; with ways to change it."""
    values, uses = draw(
        st.sampled_from(
            [(FLOATS, FLOAT_USES)] * 4
            + [(COUNTS, FLOAT_USES), (WORDS, WORD_USES), (WORDS, WORD_USES), (LISTS, LIST_USES)]
        )
    )
    numeric = values in (FLOATS, COUNTS)
    names = [name for name, holder in HOLDERS.items() if numeric or (holder.kind != "array" and "NumPy" not in name)]
    names = [name for name in names if numeric or name not in ("partial", "lru_cache")]
    holder = HOLDERS[draw(st.sampled_from(names))]
    readers = READERS[holder.kind] + (NUMERIC_READERS.get(holder.kind, ()) if numeric else ())
    reader = draw(st.sampled_from(readers)).replace("OWNER", holder.owner).replace("AT", holder.at)
    use = uses[draw(st.sampled_from(sorted(uses)))]
    order = draw(st.permutations(values))
    places = [holder.piece.replaced("VALUE", value) for value in order[:3]]
    changes = tuple(change for place in places[1:] for change in place.changes)
    read = f"v@ = {reader}"

    def used(lines: str) -> str:
        return "\n".join([read, re.sub(r"\bV\b", "v@", lines)]) if lines else ""

    return Piece(
        lib=places[0].lib,
        defs="\n".join(part for part in (places[0].defs, use.defs) if part),
        hidden=used(use.hidden),
        loss=used(use.loss),
        after=used(use.after) or (read if use.returned else ""),
        changes=changes,
        argument=places[0].argument,
        returned="v@" if use.returned else "",
    )
