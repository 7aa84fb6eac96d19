"""Ops that torch traces otherwise than it runs them: in place on slices, and derivatives that look at values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import Twins, World
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep.graph import InLayout


class Function(nn.Module):
    """A function of parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self) -> Tensor:
        return self.function(*self.weights)


def step(model: nn.Module, optimizer: Optimizer, *inputs: Tensor) -> Tensor:
    optimizer.zero_grad()
    output = model(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    loss = (output * torch.linspace(-1, 1.3, output.numel(), dtype=output.dtype).view(output.shape)).sum()
    loss.backward()
    optimizer.step()
    return output.detach()


def twins_of(make: Callable[[], nn.Module], **options: Any) -> Twins:
    def build() -> World:
        model = make()
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    return Twins(build, step, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.5}, {"passes": ""}], ids=["plain", "remat", "no passes"])
def test_gru_and_its_cell(options: dict[str, Any]) -> None:
    """The gates are slices of one product, on which eager works in place; the tails of rows round otherwise."""
    for make, shape in ((lambda: nn.GRU(16, 16, 2), (7, 4, 16)), (lambda: nn.GRUCell(16, 16), (5, 16))):
        twins = twins_of(make, **options)
        for seed in range(3):
            torch.manual_seed(seed)
            twins.step(torch.randn(shape))


MASK = torch.rand(64, 65, generator=torch.Generator().manual_seed(0)) > 0.5

CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "sigmoid_ on a slice": (lambda x: _changed(x * 1, lambda y: y[:, :13].sigmoid_()), ((7, 19),)),
    "tanh_ on chunks": (lambda x: torch.cat([c.tanh_() for c in (x * 1).unsafe_chunk(3, 1)]), ((7, 18),)),
    "masked_fill": (lambda x, value: x.masked_fill(MASK, value), ((64, 65), ())),
    "masked_fill_": (lambda x, value: (x * 1).masked_fill_(MASK, value), ((64, 65), ())),
    "prod": (lambda x: x.prod(), ((40,),)),
    "prod of rows": (lambda x: x.prod(-1), ((40, 30),)),
    "prod with keepdim and dtype": (lambda x: x.prod(0, keepdim=True, dtype=torch.float64), ((40, 30),)),
    "prod with one zero": (lambda x: (x * (torch.arange(9.0) - 4)).prod(), ((9,),)),
    "prod with zeros": (lambda x: (x * (torch.arange(18).view(2, 9) % 3)).prod(1), ((2, 9),)),
}


def _changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(tensor)
    return tensor


@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(name: str) -> None:
    function, shapes = CASES[name]
    twins = twins_of(lambda: Function(function, *shapes))
    twins.steps(3)


def test_a_gradient_that_is_asked_for_within_the_step() -> None:
    def function(x: Tensor, value: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad((x.masked_fill(MASK, value) * MASK).sum(), value)
        return x * gradient * value

    twins_of(lambda: Function(function, (64, 65), ())).steps(2)


def test_a_derivative_of_a_derivative_is_not_lost() -> None:
    """Exchanged for eager's, the first derivative could not be derived again; it is left as torch traces it."""

    def function(x: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad(x.prod(), x, create_graph=True)
        return gradient.square()

    torch.manual_seed(0)
    models = [Function(function, (4,)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for run, model in zip((step, wholestep.compile(step)), models, strict=True):
        run(model, SGD(model.parameters(), lr=0.1))
    gradients = [model.weights[0].grad for model in models]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_in_place_ops_on_dense_tensors_need_no_layout() -> None:
    twins = twins_of(lambda: Function(lambda x: (x * 2).add_(1).mT.sigmoid_(), (5, 6)))
    twins.step()
    assert not [node for node in twins.compiled.captured.graph.calls() if isinstance(node.target, InLayout)]
