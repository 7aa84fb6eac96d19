"""Gradient scalers in fp16 on a CUDA device, overflows forced: what is decided is eager's, numbers agree closely."""

from __future__ import annotations

import pytest
import torch
from tests.scalers import OPTIMIZERS, RECIPES, Recipe, assert_scaled_alike

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scaler_decides_as_eager_does(recipe: Recipe, optimizer: str, deterministic: None) -> None:
    assert_scaled_alike(recipe, "cuda", torch.float16, optimizer, most_captures=6)
