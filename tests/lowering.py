"""Lowered steps without Inductor: regions run op by op, and are held to what generated code relies on."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import wholestep
from wholestep import _inductor_torch
from wholestep.graph import StepGraph
from wholestep.lower import Decompose, lower, region
from wholestep.passes import LossGradient
from wholestep.zoo import ZooCase
from wholestep.zoo.optimizers import OPTIMIZERS, two_groups

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor compiles C++, and there is no compiler here"
)

Run = Callable[[list[Any]], Sequence[Any]]
Compile = Callable[[fx.GraphModule, Any], Run]

# Lowering rounds otherwise than eager. In float64 that is far below what a wrong rewrite does, even behind Adam.
DOUBLE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def op_by_op(module: fx.GraphModule, fake_mode: Any) -> Run:
    """In the place of `compile_functional`; only tensors and sizes may go in, only tensors of their own come out."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        assert all(isinstance(value, Tensor | int) for value in inputs)
        seen = [value.untyped_storage() for value in inputs if isinstance(value, Tensor)]
        pointers = {storage.data_ptr() for storage in seen if storage.nbytes()}
        outputs = fx.Interpreter(module).boxed_run(inputs)
        assert inputs == []
        for output in outputs:
            assert isinstance(output, Tensor)
            pointer = output.untyped_storage().data_ptr()
            assert not output.numel() or pointer not in pointers, "an output shares memory"
            pointers.add(pointer)
        return outputs

    return run


def compile_with(monkeypatch: pytest.MonkeyPatch, compile: Compile = op_by_op) -> None:
    """Let regions be compiled by something else than Inductor, from an empty cache."""

    def compile_functional(module: fx.GraphModule, fake_mode: Any, free_outputs: Any = ()) -> tuple[Run, None]:
        return compile(module, fake_mode), None

    monkeypatch.setattr(_inductor_torch, "compile_functional", compile_functional)
    monkeypatch.setattr(region, "_outcomes", {})


def keep_ops_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what rounds otherwise: regions that run op by op then give the very bits of eager."""
    for rewrite in (Decompose, LossGradient):
        monkeypatch.setattr(rewrite, "apply", lambda self, graph: graph)
    monkeypatch.setattr(lower, "lower_numbers", lambda graph, **options: None)
    monkeypatch.setattr(region, "replace_tanh", lambda graph: None)


def in_double(case: ZooCase) -> ZooCase:
    """The case in float64."""

    def make_batch(size: int, seed: int) -> dict[str, Tensor]:
        batch = case.make_batch(size, seed)
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    return dataclasses.replace(case, build=lambda: case.build().double(), make_batch=make_batch)


def in_two_groups(name: str) -> Callable[[nn.Module], Optimizer]:
    """An optimizer of the zoo over matrices and vectors apart."""
    return functools.partial(_two_groups, name)


def _two_groups(name: str, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[name](two_groups(model))


def functional_graph(function: Callable[..., Any], *args: Any) -> StepGraph:
    """The graph of a step as rewrites see it, before anything runs in place."""
    step = wholestep.compile(function, passes="simplify,cse,dce")
    with torch.random.fork_rng():
        step(*args)
    return step.graph.copy()
