"""`wholestep.compile` as users meet it: decorator or function, options, what comes back, what is refused."""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.twins import SmallNet, mse_step, pair
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep import errors
from wholestep.api import CompiledStep
from wholestep.graph import StepGraph
from wholestep.passes import DEFAULT_PIPELINE, Pipeline

X, Y = pair()


def world() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = SmallNet()
    return model, SGD(model.parameters(), lr=0.1)


def assert_trains_like_eager(step: Callable[..., Any], num_steps: int = 2) -> None:
    (model, optimizer), (twin, twin_optimizer) = world(), world()
    for _ in range(num_steps):
        assert torch.equal(step(model, optimizer, X, Y), mse_step(twin, twin_optimizer, X, Y))
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other)


# Ways to write it


def test_a_decorator() -> None:
    @wholestep.compile
    def train_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets)

    assert isinstance(train_step, CompiledStep)
    assert_trains_like_eager(train_step)


def test_a_decorator_with_options() -> None:
    @wholestep.compile(dynamic_batch=True, verify=1, passes="cse,reinplace")
    def train_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets)

    assert_trains_like_eager(train_step)
    assert train_step.options.verify == 1
    assert train_step.captured.dynamic_dims
    assert [record.name for record in train_step.graph.history] == ["cse", "reinplace"]


def test_a_decorator_with_brackets_and_no_options() -> None:
    @wholestep.compile()
    def train_step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets)

    assert_trains_like_eager(train_step)


def test_a_function() -> None:
    step = wholestep.compile(mse_step, dynamic_batch=False, passes="")
    assert_trains_like_eager(step)
    assert step.graph.history == []
    assert step.graph.is_functional


def test_a_lambda() -> None:
    assert_trains_like_eager(wholestep.compile(lambda model, optimizer, x, y: mse_step(model, optimizer, x, y)))


def test_a_pipeline_instead_of_its_text() -> None:
    step = wholestep.compile(mse_step, passes=Pipeline.parse("dce"))
    assert_trains_like_eager(step)
    assert [record.name for record in step.graph.history] == ["dce"]


def test_keyword_arguments() -> None:
    model, optimizer = world()
    step = wholestep.compile(mse_step)
    loss = step(model, targets=Y, optimizer=optimizer, features=X)
    assert torch.equal(loss, mse_step(*world(), X, Y))


class Trainer:
    """Keeps model and optimizer, and a compiled method."""

    def __init__(self) -> None:
        self.model, self.optimizer = world()

    @wholestep.compile
    def step(self, features: Tensor, targets: Tensor) -> Tensor:
        """One step."""
        return mse_step(self.model, self.optimizer, features, targets)

    @wholestep.compile
    def given_step(self, model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return mse_step(model, optimizer, features, targets)


def test_a_decorated_method_gets_its_object() -> None:
    trainer, (twin, twin_optimizer) = Trainer(), world()
    assert_trains_like_eager(trainer.given_step)
    for _ in range(2):
        assert torch.equal(trainer.step(X, Y), mse_step(twin, twin_optimizer, X, Y))
    assert torch.equal(trainer.model.get_parameter("first.bias"), twin.get_parameter("first.bias"))
    assert isinstance(Trainer.step, CompiledStep)
    assert Trainer.step.__doc__ == "One step."


# What comes back


def test_the_step_looks_like_the_function() -> None:
    step = wholestep.compile(mse_step)
    assert step.__wrapped__ is mse_step  # pyright: ignore[reportAttributeAccessIssue]
    assert step.__name__ == "mse_step"  # pyright: ignore[reportAttributeAccessIssue]
    assert step.__doc__ == mse_step.__doc__
    assert step.__module__ == mse_step.__module__
    assert inspect.signature(step) == inspect.signature(mse_step)


def test_nothing_happens_before_the_first_call() -> None:
    calls: list[int] = []
    step = wholestep.compile(lambda *args: calls.append(1))
    assert (calls, step.num_captures, step.recompile_reasons) == ([], 0, ())


@pytest.mark.parametrize(
    "look",
    [
        lambda step, folder: step.graph,
        lambda step, folder: step.captured,
        lambda step, folder: step.explain(),
        lambda step, folder: step.report(folder / "report.html"),
    ],
    ids=["graph", "captured", "explain", "report"],
)
def test_looking_at_a_step_that_has_not_been_called_says_so(look: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(wholestep.GuardError, match="mse_step has not been called yet"):
        look(wholestep.compile(mse_step), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_has_been_called_can_be_looked_at(tmp_path: Path) -> None:
    step = wholestep.compile(mse_step)
    step(*world(), X, Y)
    assert isinstance(step.graph, StepGraph)
    assert (step.num_captures, step.recompile_reasons) == (1, ())
    assert "mse_step" in step.explain()
    written = step.report(str(tmp_path / "report.html"))
    assert written == tmp_path / "report.html"
    assert "<html" in written.read_text()


def test_the_graph_is_that_of_the_most_recent_call() -> None:
    step = wholestep.compile(mse_step, dynamic_batch=False)
    model, optimizer = world()
    shapes: list[Any] = []
    for size in (6, 4, 6):
        step(model, optimizer, X[:size], Y[:size])
        shapes.append(step.graph.placeholder("batch.features").meta["val"].shape[0])
    assert (shapes, step.num_captures, len(step.recompile_reasons)) == ([6, 4, 6], 2, 1)


def test_what_comes_back_has_no_autograd_history() -> None:
    loss = wholestep.compile(mse_step)(*world(), X, Y)
    assert not loss.requires_grad
    assert loss.grad_fn is None


# Refusals


@pytest.mark.parametrize("given", [3, "train_step", [mse_step]])
def test_only_a_function_can_be_compiled(given: Any) -> None:
    with pytest.raises(wholestep.WholestepError, match=f"takes a train step .*, not a {type(given).__name__}"):
        wholestep.compile(given)


@pytest.mark.parametrize("value", [None, "always", 2, [True]])
def test_dynamic_batch_is_one_of_three(value: Any) -> None:
    with pytest.raises(wholestep.WholestepError, match=r"dynamic_batch is True, False or 'auto', not"):
        wholestep.compile(mse_step, dynamic_batch=value)


@pytest.mark.parametrize(
    "options",
    [
        {"verify": -1},
        {"verify": "2"},
        {"verify": 1.5},
        {"passes": ["cse"]},
        {"passes": 3},
        {"dynamic_batch": 0},
        {"dynamic_batch": 1},
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(wholestep.WholestepError, match=name):
        wholestep.compile(mse_step, **options)


def test_a_bad_pipeline_is_refused_when_the_step_is_compiled_not_when_it_is_called() -> None:
    with pytest.raises(wholestep.PassError, match="no pass 'nope'"):
        wholestep.compile(mse_step, passes="nope")
    with pytest.raises(wholestep.PassError, match="no option 'nope=1'"):
        wholestep.compile(passes="cse{nope=1}")(mse_step)


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        wholestep.compile(mse_step, True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="nope"):
        wholestep.compile(mse_step, nope=True)  # pyright: ignore[reportCallIssue]


# Settings


def test_the_environment_can_switch_compilation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_DISABLE", "1")
    assert wholestep.compile(mse_step) is mse_step
    assert wholestep.compile(verify=3)(mse_step) is mse_step
    with pytest.raises(wholestep.WholestepError, match="takes a train step"):
        wholestep.compile(3)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_settings_reach_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WHOLESTEP_VERIFY", "2")
    monkeypatch.setenv("WHOLESTEP_CACHE_SIZE", "3")
    monkeypatch.setenv("WHOLESTEP_RECOMPILE_WARNING", "5")
    monkeypatch.setenv("WHOLESTEP_DUMP_DIR", str(tmp_path / "dumps"))
    step = wholestep.compile(mse_step, passes="cse")
    options = step.options
    assert (options.verify, options.cache_size, options.recompile_warning) == (2, 3, 5)
    step(*world(), X, Y)
    assert sorted(path.name for path in (tmp_path / "dumps" / "mse_step-1").iterdir()) == [
        "01_cse.after.py",
        "01_cse.before.py",
        "01_cse.diff",
        "step.py",
    ]


def test_defaults() -> None:
    options = wholestep.compile(mse_step).options
    assert (options.dynamic_batch, options.verify, options.pipeline) == ("auto", 0, DEFAULT_PIPELINE)
    assert options.dump_dir is None


def test_a_bad_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_VERIFY", "often")
    with pytest.raises(wholestep.SettingsError, match="WHOLESTEP_VERIFY"):
        wholestep.compile(mse_step)


def test_captures_are_logged_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="wholestep"):
        wholestep.compile(mse_step)(*world(), X, Y)
    messages = [record.getMessage() for record in caplog.records if record.name == "wholestep.runtime.runner"]
    assert [message.split(":")[0] for message in messages] == ["captured mse_step"]
    assert capfd.readouterr() == ("", "")


# Names


def test_the_public_names_exist_and_are_listed() -> None:
    assert sorted(wholestep.__all__) == wholestep.__all__
    assert all(hasattr(wholestep, name) for name in wholestep.__all__)
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    others = {"BanRules", "Checkpoints", "DataParallel", "Plan", "Schedule", "SplitPoint", "__version__"}
    verbs = {"compile", "inductor", "load_checkpoint", "lower", "partition", "pipe_split", "pipeline"}
    assert kinds | others | verbs == set(wholestep.__all__)


@pytest.mark.parametrize("name", [name for name in wholestep.__all__ if name.endswith("Error")])
def test_every_error_is_a_value_error_of_wholestep(name: str) -> None:
    kind = getattr(wholestep, name)
    assert issubclass(kind, wholestep.WholestepError)
    assert issubclass(kind, ValueError)
    assert kind.__doc__


def test_an_error_of_capture_knows_where_and_what_to_do() -> None:
    error = wholestep.CaptureError("no", location="train.py:3", advice="Try again")
    assert str(error) == "train.py:3: no. Try again"
    assert (error.location, error.advice) == ("train.py:3", "Try again")
    assert str(wholestep.CaptureError("no")) == "no"
