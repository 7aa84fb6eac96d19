"""Two paddings of one matrix, one of them transposed, become one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.remat.padding import share_paddings

aten = torch.ops.aten
INPUTS = (torch.arange(15.0).reshape(3, 5), torch.arange(24.0).reshape(8, 3), torch.arange(6.0).reshape(3, 2))


def num_paddings(module: fx.GraphModule) -> int:
    return sum(node.target is aten.constant_pad_nd.default for node in module.graph.nodes)


def check(function: Any, num_shared: int, num_left: int) -> None:
    module = make_fx(function, tracing_mode="fake")(*INPUTS)
    assert share_paddings(module) == num_shared
    module.graph.lint()
    module.graph.eliminate_dead_code()
    module.recompile()
    assert num_paddings(module) == num_left
    for one, other in zip(module(*INPUTS), function(*INPUTS)):
        assert torch.equal(one, other)
    for node in module.graph.find_nodes(op="call_function", target=aten.permute.default):
        assert node.meta["val"].shape == node.target(node.args[0].meta["val"], *node.args[1:]).shape


def plain_first(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    plain = aten.constant_pad_nd(x, [0, 3, 0, 0])
    return plain @ w, aten.constant_pad_nd(x.permute(1, 0), [0, 0, 0, 3]) @ v


def transposed_first(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    transposed = aten.constant_pad_nd(x.permute(1, 0), [0, 0, 0, 3]) @ v
    return transposed, aten.constant_pad_nd(x, [0, 3, 0, 0]) @ w


def test_whichever_comes_first() -> None:
    check(plain_first, num_shared=1, num_left=1)
    check(transposed_first, num_shared=1, num_left=1)


def test_other_amounts_stay_apart() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain = aten.constant_pad_nd(x, [0, 3, 0, 0])
        return plain @ w, aten.constant_pad_nd(x.permute(1, 0), [0, 0, 0, 4]) @ v

    check(function, num_shared=0, num_left=2)


def test_other_fillings_stay_apart() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain = aten.constant_pad_nd(x, [0, 3, 0, 0])
        return plain @ w, aten.constant_pad_nd(x.permute(1, 0), [0, 0, 0, 3], 1.0) @ v

    check(function, num_shared=0, num_left=2)


def test_whoever_may_care_for_the_layout_keeps_his_copy() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain = aten.constant_pad_nd(x, [0, 3, 0, 0])
        return plain @ w, aten.constant_pad_nd(x.permute(1, 0), [0, 0, 0, 3]).view(-1)

    check(function, num_shared=0, num_left=2)
