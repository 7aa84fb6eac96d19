"""Gradient scalers with overflows forced: bit for bit what eager does, 50 steps."""

from __future__ import annotations

import pytest
import torch
from tests.scalers import OPTIMIZERS, RECIPES, Recipe, assert_scaled_alike


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scaler_is_bitwise(recipe: Recipe, optimizer: str, dtype: torch.dtype) -> None:
    assert_scaled_alike(recipe, "cpu", dtype, optimizer, most_captures=6)
