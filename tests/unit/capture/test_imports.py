"""Imports inside a step: modules are loaded outside of the trace, and calls under `with` after a call by dict."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.twins import Twins, small_world
from torch import Tensor

import wholestep


def test_a_module_that_the_step_imports_first_holds_real_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scales_of_a_step.py").write_text("import torch\n\nSCALE = torch.full((3,), 2.0)\n", encoding="utf-8")

    def step(model: Any, optimizer: Any, features: Tensor) -> Tensor:
        try:
            import no_such_module_anywhere  # pyright: ignore[reportMissingImports]
        except ImportError:
            no_such_module_anywhere = None
        from scales_of_a_step import SCALE  # pyright: ignore[reportMissingImports]

        assert no_such_module_anywhere is None
        optimizer.zero_grad()
        loss = (model(features) * SCALE).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    world, compiled = small_world()(), wholestep.compile(step)
    for _ in range(2):
        compiled(world.model, world.optimizer, torch.ones(2, 4))
    assert type(sys.modules["scales_of_a_step"].SCALE) is torch.Tensor
    assert compiled.num_captures == 1


class Hooked(torch.nn.Linear):
    """A forward as peft has one: a context made by a call with `**`, left by a return."""

    @contextmanager
    def extras(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        yield

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.extras(*args, **kwargs):
            return super().forward(*args, **kwargs)


def test_a_context_made_by_a_call_with_keywords_is_left_by_a_return() -> None:
    def step(model: Any, optimizer: Any, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input=features).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(lambda: Hooked(4, 3)), step)
    twins.steps(2, torch.ones(2, 4))
    assert twins.num_captures == 1


def test_abstract_classes_are_asked_about_the_type() -> None:
    from collections.abc import Mapping

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        features = batch["features"] if isinstance(batch, Mapping) else batch
        loss = model(features).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(), step)
    twins.steps(2, {"features": torch.ones(2, 4)})
    twins.step(torch.ones(2, 4))
    assert twins.num_captures == 2
