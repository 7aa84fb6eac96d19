"""Functions under `torch.jit.script` are followed as the Python functions that they were made of."""

from typing import Any

import pytest
import torch
from tests.twins import Twins, mse_step, pair, small_world
from tests.unit.capture import scripted_functions
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def test_scripted_functions_are_eagers() -> None:
    root = torch.jit.script(scripted_functions.root_of_size)
    spread = torch.jit.script(scripted_functions.spread)

    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, spread(features / root(features, 3), targets), targets)

    twins = Twins(small_world(), step)
    for seed, size in enumerate((6, 6, 8, 5)):
        twins.step(*pair(size, seed))
    assert twins.num_captures == 2


def test_containers_that_scripts_copy_are_left_to_them() -> None:
    appended = torch.jit.script(scripted_functions.appended)

    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Any:
        items = [1, 2]
        number = appended(items)
        return mse_step(model, optimizer, features * number, targets), len(items)

    twins = Twins(small_world(), step)
    twins.steps(2, *pair())
