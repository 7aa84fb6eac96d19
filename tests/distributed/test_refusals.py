"""What data parallelism refuses (SAFE-1, SAFE-4): on every rank, soon, with the difference and the rank named."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.distributed.reference import resolve_data_parallel, wholestep_side
from tests.distributed.trainings import Training
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholestep import CaptureError, WholestepError

pytestmark = pytest.mark.distributed

SOON_S = 10.0


def _model(width: int = 8, name: str = "second", extra: bool = False) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, width))
    model.add_module(name, nn.Linear(width, 3))
    if extra:
        model.add_module("third", nn.Linear(3, 3))
    return model


def _frozen() -> nn.Module:
    model = _model()
    model.get_parameter("second.weight").requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": _model,
    "wide": partial(_model, width=9),
    "renamed": partial(_model, name="other"),
    "extra": partial(_model, extra=True),
    "frozen": _frozen,
    "double": lambda: _model().double(),
}


def plain_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(features), targets)
    loss.backward()
    optimizer.step()
    return loss


def item_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(features), targets)
    if loss.item() > 1000:
        loss = loss * 0.5
    loss.backward()
    optimizer.step()
    return loss


def failing_on(rank: int, how: str) -> Callable[..., Tensor]:
    """A step that one rank cannot capture."""

    def train_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        if dist.get_rank() == rank and how == "item":
            return item_step(model, optimizer, features, targets)
        if dist.get_rank() == rank and how == "raise":
            raise KeyError("a column that is not there")
        return plain_step(model, optimizer, features, targets)

    return train_step


STEPS: dict[str, Callable[..., Tensor]] = {"plain": plain_step, "item": item_step}
STEPS |= {f"{how} on {rank}": failing_on(rank, how) for how in ("item", "raise") for rank in (0, 1)}


@dataclass(frozen=True)
class Setup:
    """What one rank compiles and calls."""

    model: str = "plain"
    step: str = "plain"
    data_parallel: str = "replicate"
    bucket_mb: Any = 25
    cross_iteration: Any = "all"
    memory_budget: Any = None

    def compile(self, model: nn.Module, data_parallel: Any = None) -> Any:
        side = partial(
            wholestep_side,
            bucket_mb=self.bucket_mb,
            cross_iteration=self.cross_iteration,
            memory_budget=self.memory_budget,
        )
        chosen = data_parallel if data_parallel is not None else self.data_parallel
        return side(STEPS[self.step], model, Training(), data_parallel=chosen).function


@dataclass(frozen=True)
class Refusal:
    """How one rank's call ended."""

    is_wholestep_error: bool
    is_capture_error: bool
    text: str
    seconds: float
    is_untouched: bool
    others_answer: bool


def _data(model: nn.Module, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    dtype = next(model.parameters()).dtype
    features, targets = torch.randn(6, width, generator=generator), torch.randn(6, 3, generator=generator)
    return features.to(dtype), targets.to(dtype)


def _call(setups: list[Setup]) -> Refusal:
    """Compile and call as this rank's setup says."""
    setup = setups[dist.get_rank()]
    torch.manual_seed(0)
    model = MODELS[setup.model]()
    optimizer = torch.optim.AdamW(model.parameters())
    before, rng = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    dist.barrier()
    started = time.monotonic()
    try:
        setup.compile(model)(model, optimizer, *_data(model))
    except Exception as error:
        seconds = time.monotonic() - started
        untouched = (
            all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            and torch.equal(rng, torch.get_rng_state())
            and not optimizer.state
            and all(parameter.grad is None for parameter in model.parameters())
        )
        text = str(error) if isinstance(error, WholestepError) else "".join(traceback.format_exception(error))
        kinds = isinstance(error, WholestepError), isinstance(error, CaptureError)
        return Refusal(*kinds, text, seconds, untouched, _others_answer())
    return Refusal(False, False, "not refused", time.monotonic() - started, False, False)


def _others_answer() -> bool:
    """Whether the process group still works: nobody is left waiting in a collective of the refused step."""
    total = torch.ones(1)
    try:
        dist.all_reduce(total)
    except RuntimeError:  # a rank that was not refused has gone
        return False
    return total.item() == dist.get_world_size()


def _refusals(setups: list[Setup]) -> list[Refusal]:
    found: list[Refusal] = run_ranks(_call, len(setups), setups, timeout_s=30)
    for refusal in found:
        assert refusal.is_wholestep_error, refusal
        assert refusal.seconds < SOON_S, refusal
        assert refusal.is_untouched, refusal
        assert refusal.others_answer, refusal
    return found


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [
        ("bucket_mb", 25, 12.5),
        ("cross_iteration", "all", "none"),
        ("cross_iteration", "all", ["first"]),
        ("memory_budget", 0.5, 0.25),
    ],
)
def test_options_that_differ(option: str, usual: Any, other: Any, odd: int) -> None:
    setups = [Setup(**{option: other if rank == odd else usual}) for rank in range(2)]
    for refusal in _refusals(setups):
        assert option in refusal.text
        assert "rank 1" in refusal.text
        assert str(other) in refusal.text
        assert str(usual) in refusal.text


def test_the_rank_that_differs_is_named_among_four() -> None:
    setups = [Setup(bucket_mb=12.5 if rank == 2 else 25) for rank in range(4)]
    for refusal in _refusals(setups):
        assert "bucket_mb" in refusal.text
        assert "rank 2" in refusal.text


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("wide", "first.weight"),
        ("renamed", "other"),
        ("extra", "third"),
        ("frozen", "second.weight"),
        ("double", "float64"),
    ],
)
def test_models_that_differ(model: str, named: str) -> None:
    for refusal in _refusals([Setup(), Setup(model=model)]):
        assert named in refusal.text
        assert "rank 1" in refusal.text


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["item", "raise"])
def test_a_rank_that_cannot_capture_its_step(how: str, failing: int) -> None:
    found = _refusals([Setup(step=f"{how} on {failing}")] * 2)
    assert found[failing].is_capture_error
    assert "test_refusals.py:" in found[failing].text
    assert f"rank {failing}" in found[1 - failing].text
    if how == "raise":
        assert all("a column that is not there" in refusal.text for refusal in found)


def test_all_ranks_fail_to_capture() -> None:
    for refusal in _refusals([Setup(step="item")] * 2):
        assert refusal.is_capture_error
        assert "test_refusals.py:" in refusal.text


def test_ranks_that_compile_different_functions() -> None:
    for refusal in _refusals([Setup(step="plain"), Setup(step="item")]):
        assert "rank 1" in refusal.text or refusal.is_capture_error


def _train_until_a_bad_batch() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    step = Setup().compile(model)
    for number in range(1, 10):
        step(model, optimizer, *_data(model, 5 if (number, dist.get_rank()) == (4, 1) else 4))


def test_a_rank_that_cannot_capture_a_later_batch() -> None:
    """SAFE-4: it raises, and its process ends; the others, which have nothing to capture, do not wait for it."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_train_until_a_bad_batch, 2, timeout_s=30)
    assert "CaptureError" in caught.value.failures[1]
    assert "hung" not in caught.value.failures[0]


def _refused_then_right() -> list[Tensor]:
    """A refused step is corrected and goes on in the same process group."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    wrong = Setup(bucket_mb=25 + dist.get_rank()).compile(model)
    with pytest.raises(WholestepError, match="bucket_mb"):
        wrong(model, optimizer, *_data(model))
    right = Setup().compile(model)
    for _ in range(3):
        right(model, optimizer, *_data(model))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_refused_step_can_be_corrected() -> None:
    first, second = run_ranks(_refused_then_right, 2, timeout_s=30)
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(WholestepError, match=r"(?s)(init_process_group.*torchrun|torchrun.*init_process_group)"):
        Setup().compile(model)(model, optimizer, torch.randn(6, 4), torch.randn(6, 3))


def _message_of_wrapped_model() -> tuple[bool, str]:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        Setup().compile(model)(model, optimizer, *_data(model))
    except WholestepError as error:
        return isinstance(error, CaptureError), str(error)
    return False, "not refused"


def test_a_model_wrapped_in_ddp() -> None:
    for is_capture_error, text in run_ranks(_message_of_wrapped_model, 2, timeout_s=30):
        assert is_capture_error, text
        assert "is wrapped in DistributedDataParallel" in text
        assert "model.module" in text


def _message_of_mesh_with_two_axes() -> str:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    try:
        Setup().compile(model, data_parallel=mesh)(model, optimizer, *_data(model))
    except WholestepError as error:
        return str(error)
    return "not refused"


def test_a_mesh_with_two_axes() -> None:
    for text in run_ranks(_message_of_mesh_with_two_axes, 4, timeout_s=30):
        assert "DeviceMesh" in text
        assert "dimension" in text


def _message_of_foreign_group() -> str:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    group = dist.new_group([0])
    try:
        Setup().compile(model, data_parallel=group)(model, optimizer, *_data(model))
    except WholestepError as error:
        return str(error)
    return "trained"


def test_a_group_that_the_rank_is_not_in() -> None:
    texts = run_ranks(_message_of_foreign_group, 2, timeout_s=30)
    assert texts[0] == "trained"
    assert "data_parallel" in texts[1]


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        (Setup(data_parallel="shard"), "data_parallel"),
        (Setup(bucket_mb=0), "bucket_mb"),
        (Setup(bucket_mb=-1), "bucket_mb"),
        (Setup(bucket_mb="25"), "bucket_mb"),
        (Setup(cross_iteration="some"), "cross_iteration"),
        (Setup(cross_iteration=3), "cross_iteration"),
        (Setup(cross_iteration=[1, 2]), "cross_iteration"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(setup: Setup, named: str) -> None:
    with pytest.raises(WholestepError, match=named):
        setup.compile(_model())


@pytest.mark.parametrize("max_iters", [0, -1, 2.5, "three"])
def test_a_number_of_steps_that_makes_no_sense(max_iters: Any) -> None:
    with pytest.raises(WholestepError, match="max_iters"):
        wholestep_side(plain_step, _model(), Training(), data_parallel=None, max_iters=max_iters)


def _message_of_missing_name() -> str:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        Setup(cross_iteration=["first", "secnd.weight"]).compile(model)(model, optimizer, *_data(model))
    except WholestepError as error:
        return str(error)
    return "not refused"


def test_a_name_that_the_model_does_not_have() -> None:
    for text in run_ranks(_message_of_missing_name, 2, timeout_s=30):
        assert "secnd.weight" in text
        assert "cross_iteration" in text


def test_groups_are_made_on_the_ranks() -> None:
    """The helper itself: plain options go through as they are."""
    assert resolve_data_parallel("replicate") == "replicate"
    assert resolve_data_parallel(None) is None
