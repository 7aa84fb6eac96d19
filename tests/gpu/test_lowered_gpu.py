"""Steps lowered to Inductor on a CUDA device, against eager at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.lowering import DOUBLE, in_double
from tests.parity import assert_parity, default_step

import wholestep
from wholestep import zoo
from wholestep.lower import regions_of

# Inductor asks for TensorFloat32, which would be another precision than eager's.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")]

# Attention in double precision is plain math, which asks for the very sizes before torch 2.12: one capture for each.
MATH_ASKS_SIZES = torch.__version__ < "2.12"
LOOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    "options",
    [{}, {"memory_budget": 0.3}, {"cross_iteration": "all"}, {"dynamic_batch": True, "batch_sizes": (4, 7, 16)}],
    ids=["plain", "budget", "rotated", "dynamic"],
)
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "bert", "t5", "vit", "resnet", "custom_function"])
def test_every_step_is_eagers(name: str, options: dict[str, Any]) -> None:
    """In double precision, with dropout on: another mask or a lost term shows at once."""
    if options and name not in ("gpt", "resnet"):
        pytest.skip("options are tried on two models: compiling takes its time")
    is_loose = name in ("llama", "t5")
    chosen = dict(options)
    sizes = chosen.pop("batch_sizes", (4,))
    step = assert_parity(
        in_double(zoo.get(name)),
        "sgd" if is_loose else "adamw_fused",
        steps=3,
        batch_sizes=sizes,
        compile_options={"lower": "inductor", **chosen},
        prepare=lambda model: model.cuda(),
        **(LOOSE if is_loose else DOUBLE),
    )
    assert regions_of(step.graph)
    assert all(item.is_compiled for item in regions_of(step.graph))
    asks_sizes = name == "gpt" and MATH_ASKS_SIZES
    assert step.num_captures == (len(sizes) if asks_sizes else 1), step.recompile_reasons


def test_one_capture_serves_every_batch_size() -> None:
    """In single precision attention is a kernel that leaves the batch symbolic, on every release of torch."""
    case = zoo.get("gpt")
    step = wholestep.compile(default_step(case), lower="inductor", dynamic_batch=True)
    model = case.build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for size in (4, 7, 16):
        step(model, optimizer, {name: value.cuda() for name, value in case.make_batch(size, 1).items()})
    assert step.num_captures == 1, step.recompile_reasons


def test_autocast_stays_within_its_precision() -> None:
    """bf16 has three digits: losses of a lowered step stay as close to eager's as eager's to those in float32."""
    case = zoo.get("gpt")
    plain = default_step(case)

    def in_bf16(*args: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return plain(*args)

    def losses(step: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = case.build().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = {name: value.cuda() for name, value in case.make_batch(32, 1).items()}
        return torch.stack([step(model, optimizer, batch).detach() for _ in range(5)])

    single, eager = losses(plain), losses(in_bf16)
    lowered = losses(wholestep.compile(in_bf16, lower="inductor"))
    assert (lowered - eager).abs().max() <= 2 * (eager - single).abs().max()
