# ruff: noqa: E501 - tables with one world a line
"""One tensor that a step finds in several places, and that later is two; or two that become one."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.capture.test_stale_reads import all_of, outcome_of
from tests.unit.capture.test_unseen import STATE, Case
from tests.worlds import run

import wholestep

BUFFERS = "model.register_buffer('b', torch.ones(3, 3)); model.register_buffer('c', torch.ones(3, 3))\n"
SHARED = "model.first.register_buffer('pe', torch.ones(3)); model.second.register_buffer('pe', model.first.pe)\n"
W = "optimizer.state[model.first.weight]['momentum_buffer']"
V = "optimizer.state[model.second.weight]['momentum_buffer']"
READ = "loss = loss * (1 + k.t.mean())"
APART = "k.t = torch.zeros(3, 3)"

CASES = [
    Case("buffers", BUFFERS + "model.c = model.b\n", loss="loss = loss * model.c.mean()", after="model.b.add_(1)", changes=("model.c = torch.zeros(3, 3)", "model.b = model.c")),
    Case("buffers of two layers", SHARED, loss="loss = loss * model.first.pe.sum() * model.second.pe.sum()", changes=("model.second.pe = torch.zeros(3)", "model.first.pe = model.first.pe * 3")),
    Case("buffer in an object", f"{BUFFERS}{STATE}k.t = model.b\n", loss=READ, after="model.b.add_(1)", changes=(APART, "k.t = model.b")),
    Case("buffer that is exchanged", f"{BUFFERS}{STATE}k.t = model.b\n", loss=READ, after="model.b.add_(1)", changes=("model.b = torch.zeros(3, 3)", "k.t = model.b")),
    Case("state in an object", f"{STATE}k.t = torch.zeros(3, 3)\n{W} = k.t\n", loss=READ, changes=(APART, f"k.t = {W}")),
    Case("state of two parameters", changes=(f"{W} = {V}", f"{W} = torch.zeros(3, 3)")),
    Case("state that is a buffer", BUFFERS, after="model.b.add_(1)", changes=(f"{W} = model.b", "model.b = torch.zeros(3, 3)")),
    Case("parameter in an object", f"{STATE}k.t = model.first.weight\n", loss="loss = loss * (1 + k.t.detach().mean())", changes=("k.t = model.second.weight", "k.t = model.first.weight")),
    Case("gradients of the call before", STATE, loss="loss = loss + sum(g.sum() for g in k.h.values())", after="k.h = {n: p.grad for n, p in model.named_parameters()}", changes=("model.zero_grad()", "k.h = {}")),
    Case("two in objects", f"{STATE}k.t = torch.zeros(3, 3); k.u = torch.zeros(3, 3)\n", loss=READ, after="k.u.add_(1)", changes=("k.t = k.u", APART)),
]  # fmt: skip


@all_of(CASES)
def test_a_tensor_in_two_places(case: Case) -> None:
    outcome_of(case)


ARGUMENTS = [
    ("was a buffer", BUFFERS, "model.b.add_(1)", "return model.b if call < 2 else a, b"),
    ("becomes a buffer", BUFFERS, "model.b.copy_(a); model.c.add_(x)", "return model.b if call in (1, 3) else a, b"),
    ("was state", "", "", f"return {W} if call == 2 else a, b"),
    ("was another parameter", "", "", "return model.first.weight if call < 2 else model.second.weight, b"),
    (
        "was in an object",
        f"{STATE}k.t = None\n",
        "k.t.add_(1)",
        "k.t = a if call < 2 else torch.zeros(3, 3); return a, b",
    ),
]


@pytest.mark.parametrize(("defs", "after", "given"), [row[1:] for row in ARGUMENTS], ids=[row[0] for row in ARGUMENTS])
def test_an_argument_that_is_found_elsewhere_as_well(defs: str, after: str, given: str) -> None:
    program = Case("", defs, loss="a = x * 2\nloss = loss * (1 + x.detach().mean())", after=after).program()
    main = program.main.replace("return batch(call, size)", f"a, b = batch(call, 3); {given}")
    assert not run(dataclasses.replace(program, main=main), wholestep.compile).refused


def test_a_gradient_that_is_a_buffer_is_refused() -> None:
    program = Case("", BUFFERS, changes=("model.b = model.first.weight.grad", "")).program()
    main = program.main.replace("optimizer.zero_grad()\n", "pass\n")
    assert "are one tensor" in run(dataclasses.replace(program, main=main), wholestep.compile).refused
