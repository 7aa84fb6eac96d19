"""The zoo's models train, and the parity helper notices what it should."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.parity import (
    TrainStep,
    assert_parity,
    build_optimizer,
    default_step,
    differences,
    snapshot,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep import zoo
from wholestep.zoo import Batch, custom_function
from wholestep.zoo.case import ZooCase
from wholestep.zoo.optimizers import OPTIMIZERS, two_groups
from wholestep.zoo.t5 import bucket_distances

EXPECTED_CASES = [
    "mlp",
    "gpt",
    "llama",
    "bert",
    "t5",
    "vit",
    "resnet",
    "lstm",
    "custom_function",
    "checkpointed",
    "checkpointed_reentrant",
]
HF_NAMES = ["hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "hf_vit"]
EVERY_NAME = EXPECTED_CASES + HF_NAMES


def train(name: str, optimizer_name: str = "adamw", steps: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train eagerly on one repeated batch; the losses and the final snapshot."""
    case = zoo.get(name)
    torch.manual_seed(0)
    model = case.build()
    optimizer = build_optimizer(optimizer_name, model)
    step = default_step(case)
    losses = [step(model, optimizer, case.make_batch(4, 0)).detach() for _ in range(steps)]
    return losses, snapshot(model, optimizer)


def test_the_zoo_holds_the_cases_it_promises() -> None:
    assert list(zoo.CASES) == EXPECTED_CASES
    assert list(zoo.HF_CASES) == HF_NAMES
    assert all(zoo.get(name).name == name for name in EVERY_NAME)


def test_an_unknown_case_is_refused_with_the_known_names() -> None:
    with pytest.raises(KeyError, match="no zoo case named 'gtp'; there are: mlp, gpt"):
        zoo.get("gtp")


def test_the_zoo_does_not_import_transformers() -> None:
    code = "import sys, wholestep.zoo; sys.exit('transformers' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("name", EVERY_NAME)
def test_loss_falls_when_training(name: str) -> None:
    losses, _ = train(name)
    assert torch.stack(losses).isfinite().all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", EVERY_NAME)
def test_gradients_reach_every_parameter(name: str) -> None:
    case = zoo.get(name)
    torch.manual_seed(0)
    model = case.build()
    case.loss(model, case.make_batch(4, 0)).backward()
    without = [
        parameter_name
        for parameter_name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert without == []


@pytest.mark.parametrize("name", EVERY_NAME)
def test_training_is_deterministic_under_a_seed(name: str) -> None:
    _, first = train(name)
    _, second = train(name)
    assert differences(first, second) == []


@pytest.mark.parametrize("name", EVERY_NAME)
def test_batches_come_from_their_own_generator(name: str) -> None:
    make_batch = zoo.get(name).make_batch
    before = torch.get_rng_state()
    batch, again, other = make_batch(3, 7), make_batch(3, 7), make_batch(3, 8)
    assert torch.equal(before, torch.get_rng_state())
    assert differences(batch, again) == []
    assert differences(batch, other) != []
    assert {tensor.shape[0] for tensor in batch.values()} == {3}


@pytest.mark.parametrize("name", EVERY_NAME)
def test_dropout_is_on_except_in_the_resnet(name: str) -> None:
    case = zoo.get(name)
    torch.manual_seed(0)
    model = case.build()
    before = torch.get_rng_state()
    case.loss(model, case.make_batch(4, 0))
    assert model.training
    assert torch.equal(before, torch.get_rng_state()) == (name == "resnet")


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_batch_of_one_has_a_finite_loss(name: str) -> None:
    case = zoo.get(name)
    model = case.build()
    assert all(case.loss(model, case.make_batch(1, seed)).isfinite() for seed in range(3))


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed_reentrant"])
def test_checkpointing_changes_nothing_but_memory(name: str) -> None:
    losses, after = train(name)
    plain_losses, plain_after = train("gpt")
    assert torch.equal(torch.stack(losses), torch.stack(plain_losses))
    assert differences(plain_after, after) == []


@pytest.mark.parametrize(
    ("name", "tied_names"),
    [
        ("gpt", ["token_embedding.weight", "head.weight"]),
        ("checkpointed", ["token_embedding.weight", "head.weight"]),
        ("t5", ["embedding.weight", "head.weight"]),
    ],
)
def test_tied_weights_are_one_parameter(name: str, tied_names: list[str]) -> None:
    model = zoo.get(name).build()
    embedding, head = (model.get_parameter(tied_name) for tied_name in tied_names)
    assert embedding is head
    assert copy.deepcopy(model).get_parameter(tied_names[0]) is not embedding
    listed = [parameter_name for parameter_name, _ in model.named_parameters()]
    assert [tied_name for tied_name in tied_names if tied_name in listed] == tied_names[:1]


def test_bert_ties_its_output_to_the_token_embedding() -> None:
    case = zoo.get("bert")
    model = case.build()
    batch = case.make_batch(4, 0)
    unused = next(iter(set(range(2, 64)) - set(batch["tokens"].flatten().tolist())))
    case.loss(model, batch).backward()
    # A token absent from the input gets its embedding's gradient from the output alone.
    gradient = model.get_parameter("token_embedding.weight").grad
    assert gradient is not None
    assert gradient[unused].any()


def test_resnet_updates_its_running_statistics() -> None:
    _, after = train("resnet")
    assert after["buffer.stem.1.num_batches_tracked"] == 3
    assert not torch.equal(after["buffer.stem.1.running_mean"], torch.zeros(8))


def gradient_of(function: Callable[[Tensor], Tensor], features: Tensor) -> tuple[Tensor, Tensor]:
    leaf = features.clone().requires_grad_()
    output = function(leaf)
    (gradient,) = torch.autograd.grad(output.sum(), leaf)
    return output.detach(), gradient


@pytest.mark.parametrize(
    ("custom", "derived", "gradient_at_half"),
    [
        (
            custom_function.amplified_tanh,
            torch.tanh,
            custom_function.GRADIENT_GAIN * (1 - torch.tanh(torch.tensor(0.5)) ** 2),
        ),
        (
            custom_function.straight_through_round,
            lambda features: torch.round(features * 4) / 4,
            torch.tensor(1.0),
        ),
    ],
)
def test_custom_backward_is_not_what_autograd_derives(
    custom: Callable[[Tensor], Tensor], derived: Callable[[Tensor], Tensor], gradient_at_half: Tensor
) -> None:
    features = torch.tensor([-0.9, -0.3, 0.1, 0.5])
    output, gradient = gradient_of(custom, features)
    derived_output, derived_gradient = gradient_of(derived, features)
    assert torch.equal(output, derived_output)
    assert ((gradient - derived_gradient).abs() > 0.5).all()
    torch.testing.assert_close(gradient[3], gradient_at_half)


@pytest.mark.parametrize("function_name", ["amplified_tanh", "straight_through_round"])
def test_losing_a_custom_backward_shows_in_training(function_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept = train("custom_function")
    derived = {
        "amplified_tanh": torch.tanh,
        "straight_through_round": lambda features: torch.round(features * 4) / 4,
    }
    monkeypatch.setattr(custom_function, function_name, derived[function_name])
    _, lost = train("custom_function")
    changed = differences(kept, lost)
    assert any(line.startswith("grad.first.weight") for line in changed)


@given(distance=st.integers(0, 40), buckets=st.sampled_from([4, 8, 32]), furthest=st.integers(17, 128))
def test_bucket_numbers_are_in_range_and_never_fall(distance: int, buckets: int, furthest: int) -> None:
    distances = torch.arange(distance + 1)
    numbers = bucket_distances(distances, buckets, furthest)
    assert ((numbers >= 0) & (numbers < buckets)).all()
    assert (numbers.diff() >= 0).all()
    near = min(distance + 1, buckets // 2)
    assert torch.equal(numbers[:near], distances[:near])


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_every_optimizer_takes_steps_and_groups(optimizer_name: str) -> None:
    case = zoo.get("mlp")
    torch.manual_seed(0)
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS[optimizer_name](two_groups(model))
    for _ in range(2):
        assert default_step(case)(model, optimizer, case.make_batch(4, 0)).isfinite()
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_groups_hold_every_parameter_once() -> None:
    model = zoo.get("gpt").build()
    matrices, vectors = two_groups(model)
    assert {parameter.ndim for parameter in matrices["params"]} == {2}
    assert {parameter.ndim for parameter in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
    assert matrices["lr"] != vectors["lr"]
    assert matrices["weight_decay"] > vectors["weight_decay"] == 0


def run_eagerly(train_step: TrainStep) -> TrainStep:
    """A stand-in for the compiler that compiles nothing."""
    return train_step


def after_each_step(change: Callable[[nn.Module, Optimizer, Batch], Any]) -> Callable[..., TrainStep]:
    """A stand-in for a wrong compiler: an eager step followed by some change."""

    def compile(train_step: TrainStep) -> TrainStep:
        def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Any:
            output = train_step(model, optimizer, batch)
            with torch.no_grad():
                change(model, optimizer, batch)
            return output

        return step

    return compile


def nudge(tensor: Tensor | None) -> None:
    """Move the first element to the next representable number."""
    assert tensor is not None
    tensor.view(-1)[0] = torch.nextafter(tensor.view(-1)[0], torch.tensor(torch.inf))


def first_weight(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("classifier.weight")


@pytest.mark.parametrize("name", EVERY_NAME)
def test_parity_holds_between_eager_and_itself(name: str) -> None:
    assert_parity(zoo.get(name), "adamw", steps=2, batch_sizes=(4, 2), compile=run_eagerly)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_parity_holds_for_every_optimizer(optimizer_name: str) -> None:
    assert_parity(zoo.get("mlp"), optimizer_name, steps=2, compile=run_eagerly)


def test_parity_returns_what_was_compiled() -> None:
    made: list[TrainStep] = []

    def compile(train_step: TrainStep, *, budget: int) -> TrainStep:
        assert budget == 3
        made.append(lambda model, optimizer, batch: train_step(model, optimizer, batch))
        return made[-1]

    returned = assert_parity(zoo.get("mlp"), "sgd", compile=compile, compile_options={"budget": 3})
    assert returned is made[0]


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        (lambda model, optimizer, batch: nudge(first_weight(model)), "param.classifier.weight"),
        (lambda model, optimizer, batch: nudge(first_weight(model).grad), "grad.classifier.weight"),
        (
            lambda model, optimizer, batch: nudge(optimizer.state[first_weight(model)]["exp_avg"]),
            "state.classifier.weight.exp_avg",
        ),
        (lambda model, optimizer, batch: optimizer.zero_grad(), "grad.classifier.weight: only in eager"),
        (lambda model, optimizer, batch: optimizer.param_groups[0].update(lr=0.1), "group.0.lr"),
        (lambda model, optimizer, batch: torch.rand(1), "rng.cpu"),
        (lambda model, optimizer, batch: nudge(batch["features"]), "batch.features"),
        (
            lambda model, optimizer, batch: first_weight(model).fill_(torch.nan),
            "param.classifier.weight: max abs difference nan in 320 of 320",
        ),
    ],
)
def test_parity_fails_on_the_smallest_difference(change: Callable[..., Any], blamed: str) -> None:
    with pytest.raises(AssertionError, match=r"mlp: step 1 of 5 \(batch size 4\)") as caught:
        assert_parity(zoo.get("mlp"), "adamw", compile=after_each_step(change))
    lines = str(caught.value).splitlines()[1:]
    assert len([line for line in lines if blamed in line]) == 1
    assert len(lines) == (6 if "only in eager" in blamed else 1)


def test_parity_fails_on_a_buffer() -> None:
    def change(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
        model.get_buffer("stem.1.num_batches_tracked").add_(1)

    with pytest.raises(AssertionError, match=r"buffer\.stem\.1\.num_batches_tracked: max abs difference 1"):
        assert_parity(zoo.get("resnet"), "sgd", compile=after_each_step(change))


def test_parity_names_the_step_that_went_wrong() -> None:
    calls: list[int] = []

    def change(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
        calls.append(len(batch["labels"]))
        if len(calls) == 3:
            nudge(first_weight(model))

    with pytest.raises(AssertionError, match=r"step 3 of 5 \(batch size 5\)"):
        assert_parity(zoo.get("mlp"), "sgd", batch_sizes=(4, 6, 5), compile=after_each_step(change))
    assert calls == [4, 6, 5]


@pytest.mark.parametrize(
    ("change_output", "blamed"),
    [
        (lambda loss: loss + 1e-6, "output: max abs difference"),
        (lambda loss: loss.double(), "output: torch.float32 () on cpu in eager, torch.float64"),
        (lambda loss: loss.item(), "output: torch.float32 () on cpu in eager, torch.float64"),
        (lambda loss: (loss,), "output structure"),
        (lambda loss: None, "output: torch.float32 () on cpu in eager, torch.uint8"),
    ],
)
def test_parity_fails_on_the_output(change_output: Callable[[Tensor], Any], blamed: str) -> None:
    def compile(train_step: TrainStep) -> TrainStep:
        return lambda model, optimizer, batch: change_output(train_step(model, optimizer, batch))

    with pytest.raises(AssertionError) as caught:
        assert_parity(zoo.get("mlp"), "sgd", compile=compile)
    assert blamed in str(caught.value)


def test_parity_fails_on_a_list_where_eager_returns_a_tuple() -> None:
    case = zoo.get("mlp")

    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Any:
        return default_step(case)(model, optimizer, batch), "done"

    def compile(step: TrainStep) -> TrainStep:
        return lambda model, optimizer, batch: list(step(model, optimizer, batch))

    with pytest.raises(AssertionError, match="output structure"):
        assert_parity(case, "sgd", train_step=train_step, compile=compile)
    assert_parity(case, "sgd", train_step=train_step, compile=run_eagerly)


def test_parity_fails_on_an_output_that_later_steps_overwrite() -> None:
    reused = torch.zeros(())

    def compile(train_step: TrainStep) -> TrainStep:
        return lambda model, optimizer, batch: reused.copy_(train_step(model, optimizer, batch).detach())

    with pytest.raises(AssertionError, match=r"outputs kept until after step 2.*\n  output\[0\]: max"):
        assert_parity(zoo.get("mlp"), "sgd", steps=2, compile=compile)


def test_parity_fails_on_untied_weights() -> None:
    def untie(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
        head = model.get_submodule("head")
        head.weight = nn.Parameter(head.get_parameter("weight").clone())

    with pytest.raises(AssertionError, match=r"grad\.head\.weight: only in eager"):
        assert_parity(zoo.get("gpt"), "sgd", compile=after_each_step(untie))


def test_parity_tolerates_what_it_is_told_to() -> None:
    def change(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
        first_weight(model).add_(1e-7)

    assert_parity(zoo.get("mlp"), "sgd", rtol=1e-4, atol=1e-5, compile=after_each_step(change))
    with pytest.raises(AssertionError, match="max abs difference"):
        assert_parity(zoo.get("mlp"), "sgd", compile=after_each_step(change))


def test_a_tolerance_does_not_cover_random_states() -> None:
    compile = after_each_step(lambda model, optimizer, batch: torch.rand(1))
    with pytest.raises(AssertionError, match=r"rng\.cpu"):
        assert_parity(zoo.get("resnet"), "sgd", rtol=1e9, atol=1e9, compile=compile)


def test_parity_takes_nan_for_equal_to_nan() -> None:
    def prepare(model: nn.Module) -> None:
        with torch.no_grad():
            first_weight(model).view(-1)[0] = torch.nan

    assert_parity(zoo.get("mlp"), "sgd", steps=2, prepare=prepare, compile=run_eagerly)


def test_parity_builds_optimizers_from_models_and_prepares_once() -> None:
    prepared: list[nn.Module] = []

    def prepare(model: nn.Module) -> nn.Module:
        prepared.append(model)
        return model.double()

    case = zoo.get("mlp")
    wide = ZooCase("wide", case.build, case.make_batch, lambda model, batch: double_loss(case, model, batch))
    assert_parity(
        wide,
        lambda model: OPTIMIZERS["adamw"](two_groups(model)),
        prepare=prepare,
        compile=run_eagerly,
    )
    assert_parity(case, torch.optim.SGD, steps=1, compile=run_eagerly)
    assert len(prepared) == 1


def double_loss(case: ZooCase, model: nn.Module, batch: Batch) -> Tensor:
    return case.loss(model, batch | {"features": batch["features"].double()})


def test_parity_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert_parity(zoo.get("mlp"), "sgd", compile=run_eagerly)
    assert torch.equal(before, torch.get_rng_state())


def test_snapshot_names_and_detaches_everything() -> None:
    case = zoo.get("resnet")
    model = case.build()
    optimizer = build_optimizer("adamw", model)
    taken_before = snapshot(model, optimizer)
    default_step(case)(model, optimizer, case.make_batch(4, 0))
    taken = snapshot(model, optimizer)
    assert "grad.classifier.weight" not in taken_before
    assert {"param.classifier.weight", "grad.classifier.weight", "buffer.stem.1.running_var"} <= taken.keys()
    assert {"state.classifier.weight.step", "group.0.lr", "group.0.betas[1]", "rng.cpu"} <= taken.keys()
    assert taken["group.0.lr"].dtype == torch.float64
    assert not torch.equal(taken_before["param.classifier.weight"], taken["param.classifier.weight"])
