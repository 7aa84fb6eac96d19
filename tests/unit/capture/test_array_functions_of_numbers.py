"""NumPy's functions of Python numbers: schedules made of them cost no capture for each step."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import SmallNet, Twins, World, momentum

FACTORS = [
    "np.minimum(w.count / 5, 1.0)",
    "np.maximum(w.share, w.count)",
    "np.power(w.count, -0.5)",
    "np.cos(w.count / 7) * np.sin(w.share)",
    "float(np.sqrt(w.count)) * np.exp(-w.share)",
]
LINES = [
    "w.log.append(np.exp(loss.item()))",
    "w.log.append(float(np.log(abs(loss.item()) + 1)))",
    "w.optimizer.param_groups[0]['lr'] = 0.1 * np.minimum(w.count / 4, 1.0)",
]


def train(factor: str, line: str) -> Twins:
    body = [
        "def step(w, x):",
        "    w.optimizer.zero_grad()",
        f"    loss = w.model(x).mean() * ({factor})",
        "    loss.backward()",
        "    w.optimizer.step()",
        f"    {line}",
        "    w.count += 1; w.share += 0.125",
        "    return loss",
    ]
    namespace: dict[str, Any] = {"np": np}
    exec("\n".join(body), namespace)

    def build() -> World:
        model = SmallNet()
        return World(model=model, optimizer=momentum(model.parameters()), count=1, share=0.5, log=[])

    twins = Twins(build, namespace["step"], call=lambda world, step, x: step(world, x))
    for number in range(6):
        twins.step(torch.randn(3, 4, generator=torch.Generator().manual_seed(number)))
    return twins


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_of_the_loss(factor: str) -> None:
    assert train(factor, "pass").num_captures == 1


@pytest.mark.parametrize("line", LINES)
def test_what_is_logged_or_set(line: str) -> None:
    assert train("1.0", line).num_captures <= 4
