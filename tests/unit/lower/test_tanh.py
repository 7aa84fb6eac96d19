"""A tangent that nobody wants for itself is not computed; one that somebody wants is."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.lower.tanh import replace_tanh

EPS = torch.finfo(torch.float32).eps


def rewritten(function: Callable[..., object], *values: Tensor) -> fx.GraphModule:
    traced = make_fx(function, tracing_mode="fake")(*values)
    replace_tanh(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def has_tanh(module: fx.GraphModule) -> bool:
    return bool(module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    inner = torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    slope = 0.7978845608028654 * (1 + 0.134145 * x * x)
    return 0.5 * x * (inner + 1), 0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope


# In float64 the tangent that it is compared with is rounded as well.
@pytest.mark.parametrize(("dtype", "num_eps"), [(torch.float32, 8), (torch.float64, 64)])
def test_gelu_and_its_slope_are_the_same_without_a_tangent(dtype: torch.dtype, num_eps: int) -> None:
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.tensor([-1e9, -200.0, -0.0, 200.0, 1e9])]).to(dtype)
    module = rewritten(gelu_and_slope, x)
    assert not has_tanh(module)
    exact = x.double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    [slope] = torch.autograd.grad(expected.sum(), exact)
    value, rise = module(x)
    assert value.dtype == rise.dtype == dtype
    is_finite = x.abs() < 1e6  # the cube of what is larger does not fit
    limit = num_eps * torch.finfo(dtype).eps
    torch.testing.assert_close(value.double()[is_finite], expected.detach()[is_finite], rtol=limit, atol=limit)
    torch.testing.assert_close(rise.double()[is_finite], slope[is_finite], rtol=limit, atol=limit)


def test_digits_are_won_where_the_tangent_is_close_to_minus_one() -> None:
    x = torch.linspace(-5, -3, 2001)
    expected = gelu(x.double())

    def worst(values: Tensor) -> float:
        return ((values.double() - expected) / expected).abs().max().item()

    assert worst(rewritten(gelu, x)(x)) < 100 * EPS < 1e-3 < worst(gelu(x))


def test_what_is_not_a_number_stays_so_and_infinities_have_their_limits() -> None:
    x = torch.tensor([float("nan"), float("-inf"), float("inf")])
    function = rewritten(lambda u: (1 + torch.tanh(u), 1 - torch.tanh(u) * torch.tanh(u)), x)
    assert function(x)[0].tolist()[1:] == pytest.approx([0.0, 2.0])
    assert function(x)[0].isnan().tolist() == [True, False, False]


@pytest.mark.parametrize(
    "function",
    [
        lambda u: torch.tanh(u),
        lambda u: (lambda t: (t, 1 + t))(torch.tanh(u)),
        lambda u: (lambda t: 2 + t)(torch.tanh(u)),
        lambda u: (lambda t: torch.add(t, 1, alpha=2))(torch.tanh(u)),
        lambda u: (lambda t: t * t)(torch.tanh(u)),
        lambda u: (lambda s: (1 - s, s))(torch.tanh(u).square()),
        lambda u: (lambda t: 1 - t * u)(torch.tanh(u)),
    ],
)
def test_a_tangent_that_is_wanted_stays(function: Callable[[Tensor], object]) -> None:
    x = torch.randn(5)
    module = rewritten(function, x)
    assert has_tanh(module)
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)


def test_half_precision_has_no_room_for_the_exponential() -> None:
    assert has_tanh(rewritten(gelu, torch.randn(5, dtype=torch.bfloat16)))
