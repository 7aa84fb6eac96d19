"""What goes into a checkpoint, under which names, and what is refused; a refusal changes nothing."""

from __future__ import annotations

import copy
import functools
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity import differences
from tests.training_runs import Run, TiedNet, newest
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, OneCycleLR, SequentialLR

import wholestep
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.reading import Archive

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
KEYS = st.text(max_size=3) | st.integers() | st.booleans()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=2).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def saved(folder: Path, **state: Any) -> wholestep.Checkpoints:
    checkpoints = wholestep.Checkpoints(folder)
    checkpoints.save(1, **state, wait=True)
    return checkpoints


def test_names_are_those_of_the_model(tmp_path: Path) -> None:
    run = Run()
    run.train(0, 1)
    saved(tmp_path, **run.state)
    content = Archive(newest(tmp_path)).read([("model",), ("optimizer",)])
    assert set(content["model"]) == set(run.model.state_dict())
    assert {"embedding.weight", "head.weight", "norm.running_mean"} <= set(content["model"])
    assert "scratch" not in content["model"]
    assert set(content["optimizer"]["state"]) == {"embedding.weight", "hidden.weight", "norm.weight", "norm.bias"}
    assert [group["params"] for group in content["optimizer"]["param_groups"]] == [
        ["embedding.weight"],
        ["hidden.weight", "norm.weight", "norm.bias"],
    ]


def test_wrappers_add_nothing_to_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = torch.compile(model)
    optimizer = SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    saved(tmp_path, model=wrapped, optimizer=optimizer)
    assert set(Archive(newest(tmp_path)).read([("model",)])["model"]) == {"0.weight", "0.bias"}


def test_two_models_and_an_optimizer_of_both(tmp_path: Path) -> None:
    def life() -> dict[str, Any]:
        models = {"maker": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
        both = AdamW([p for model in models.values() for p in model.parameters()])
        return models | {"own": AdamW(models["critic"].parameters()), "both": both}

    first, second = life(), life()
    for optimizer in (first["own"], first["both"]):
        first["critic"](first["maker"](torch.randn(3, 2))).sum().backward()
        optimizer.step()
    saved(tmp_path, **first).resume(**second)
    for name in ("own", "both"):
        states = [list(life[name].state.values()) for life in (first, second)]
        assert [state["exp_avg"].tolist() for state in states[0]] == [state["exp_avg"].tolist() for state in states[1]]
    content = Archive(newest(tmp_path)).read([("own",), ("both",)])
    assert set(content["own"]["state"]) == {"weight", "bias"}
    assert "critic.weight" in content["both"]["state"]


def test_an_optimizer_without_its_model_goes_by_order(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer, fresh = (AdamW(model.parameters(), lr=rate) for rate in (0.3, 0.1))
    model(torch.ones(2)).backward()
    optimizer.step()
    saved(tmp_path, optimizer=optimizer).resume(optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.3
    assert torch.equal(fresh.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_saving_takes_no_step_of_an_optimizer_without_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters())
    saved(tmp_path, model=model, optimizer=optimizer).resume(model=model, optimizer=optimizer)
    assert not optimizer.state
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: MultiStepLR(optimizer, [1, 1, 4]),
        lambda optimizer: LambdaLR(optimizer, lambda number: 0.9**number),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False),
        lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [2])], [3]),
    ],
    ids=["milestones", "lambda", "one cycle", "sequence"],
)
def test_schedules_go_on(make: Any, tmp_path: Path) -> None:
    def life() -> tuple[Any, Any]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, make(optimizer)

    def rates(optimizer: Any, schedule: Any, number: int) -> list[float]:
        found: list[float] = []
        for _ in range(number):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    expected = rates(*life(), 6)
    optimizer, schedule = life()
    rates(optimizer, schedule, 2)
    checkpoints = saved(tmp_path, optimizer=optimizer, schedule=schedule)
    optimizer, schedule = life()
    checkpoints.resume(optimizer=optimizer, schedule=schedule)
    assert rates(optimizer, schedule, 4) == expected[2:]


@settings(derandomize=True, database=None, deadline=None, max_examples=10)
@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_dicts_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, value: dict[Any, Any]) -> None:
    found: dict[Any, Any] = {"stale": 1}
    saved(tmp_path_factory.mktemp("run"), extra=value).resume(extra=found)
    assert repr(found) == repr(value)


def test_containers_and_tensors_in_dicts(tmp_path: Path) -> None:
    value = {
        "counts": Counter({3: 1}),
        "ordered": OrderedDict([(2, "b"), (1, "a")]),
        "words": [Counter("aab"), {"deep": OrderedDict([("b", 1), ("a", (2,))])}],
        "odd text": (("wholestep: kept whole", 5), ("wholestep: kept whole", {"a": ("wholestep: kept whole", [1])})),
        "tensors": [torch.arange(3), {"deep": (torch.ones(2, dtype=torch.bfloat16),)}],
        "dtype": (torch.float16, torch.Size([2]), 1 + 2j, float("inf")),
    }
    found: dict[str, Any] = {}
    saved(tmp_path, extra=value).resume(extra=found)
    assert repr(found) == repr(value)
    assert type(found["counts"]) is Counter


class Odd:
    """Something that a checkpoint cannot hold."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"extra": {"a": [Odd()]}}, r"extra\.a\[0\] is a Odd"),
        ({"extra": {"a": b"bytes"}}, r"extra\.a is a bytes"),
        ({"extra": 3}, "extra is a int: a checkpoint holds modules"),
        ({"extra": {"a": torch.eye(2).to_sparse()}}, r"extra\.a is a sharded or sparse tensor"),
        ({"extra": {"a": torch.ones(2, device="meta")}}, r"extra\.a is a tensor on the meta device"),
        ({"per.rank": {}}, r"'per\.rank' cannot be the name"),
        ({"extra": {"a": {"b": 1}, "a.b": 2}}, "two entries have the same name"),
    ],
)
def test_what_cannot_be_saved(state: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoints = wholestep.Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, **state)
    assert not list(tmp_path.glob("step-*"))
    checkpoints.save(1, extra={"good": 1}, wait=True)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["step-00000001"]


def other_shapes(run: Run) -> dict[str, Any]:
    return run.state | {"model": nn.Linear(3, 3)}


def missing_buffer(run: Run) -> dict[str, Any]:
    run.model.register_buffer("new", torch.zeros(1))
    return run.state


def wider(run: Run) -> dict[str, Any]:
    run.model.hidden = nn.Linear(8, 9)
    return run.state


def one_group(run: Run) -> dict[str, Any]:
    return run.state | {"optimizer": AdamW(run.model.parameters())}


def moved_parameter(run: Run) -> dict[str, Any]:
    groups = [[run.model.hidden.weight], [run.model.embedding.weight, run.model.norm.weight, run.model.norm.bias]]
    return run.state | {"optimizer": AdamW([{"params": group} for group in groups])}


def another_optimizer(run: Run) -> dict[str, Any]:
    groups = [{"params": group["params"]} for group in run.optimizer.param_groups]
    return run.state | {"optimizer": SGD(groups, lr=0.1, momentum=0.9)}


def a_relative(run: Run) -> dict[str, Any]:
    return run.state | {"optimizer": Adam([{"params": group["params"]} for group in run.optimizer.param_groups])}


def no_model(run: Run) -> dict[str, Any]:
    return {"optimizer": run.optimizer}


def more(run: Run) -> dict[str, Any]:
    return run.state | {"ema": TiedNet()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_shapes, "it has no model.bias"),
        (missing_buffer, "it has no model.new"),
        (wider, r"model\.hidden\.weight has shape \(8, 8\) in it and \(9, 8\) here"),
        (one_group, "optimizer has 2 parameter groups in it and 1 here"),
        (moved_parameter, r"optimizer\.param_groups\[0\]\.hidden\.weight"),
        (another_optimizer, "optimizer is a torch.optim.adamw.AdamW in it and a torch.optim.sgd.SGD here"),
        (a_relative, "optimizer is a torch.optim.adamw.AdamW in it and a torch.optim.adam.Adam here"),
        (no_model, "names its parameters: pass the model"),
        (more, "it has no 'ema'"),
    ],
)
def test_what_does_not_fit_changes_nothing(change: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path, **Run().state)
    run = Run(seed=3)
    state = change(run)
    before = run.seen()
    with pytest.raises(CheckpointError, match=f"checkpoint .* cannot be loaded: .*{message}"):
        wholestep.Checkpoints(tmp_path).resume(**state)
    assert not differences(before, run.seen())


def test_what_nobody_asks_for_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    checkpoints = saved(tmp_path, **run.state)
    checkpoints.resume(model=run.model)
    assert "also has optimizer, scheduler, position, which nobody asked for" in caplog.text


def test_loading_one_checkpoint(tmp_path: Path) -> None:
    """Only what is asked for; generators stay where they are."""
    source, run = Run(), Run(seed=5)
    source.train(0, 2)
    saved(tmp_path, **source.state)
    before = torch.get_rng_state()
    wholestep.load_checkpoint(newest(tmp_path), model=run.model)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(run.model.state_dict()["norm.running_mean"], source.model.state_dict()["norm.running_mean"])
    assert not run.optimizer.state
    with pytest.raises(CheckpointError, match=r"cannot be loaded: its \.metadata cannot be read"):
        wholestep.load_checkpoint(tmp_path / "nowhere", model=run.model)


def test_state_of_each_rank(tmp_path: Path) -> None:
    checkpoints = wholestep.Checkpoints(tmp_path)
    checkpoints.save(4, per_rank={"loader": {"offset": 7}}, common={"a": 1}, wait=True)
    loader: dict[str, int] = {}
    assert checkpoints.resume(per_rank={"loader": loader}, common={}) == 4
    assert loader == {"offset": 7}


def of_plain_torch(tmp_path: Path, optimizer: Any, model: nn.Module) -> Path:
    """A checkpoint as torch writes it, which does not say of which class an optimizer is."""
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    own = get_optimizer_state_dict(model, optimizer)
    dcp_save({"model": model.state_dict(), "optimizer": own}, checkpoint_id=tmp_path / "plain", no_dist=True)
    return tmp_path / "plain"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), "it was saved from another optimizer than SGD"),
        (lambda parameters: RMSprop(parameters, lr=0.1), "it was saved from another optimizer than RMSprop"),
    ],
)
def test_state_of_another_optimizer_changes_nothing(make: Any, message: str, tmp_path: Path) -> None:
    """F5: a KeyError after the model was overwritten, or an optimizer that fails in its next step."""
    model = nn.Linear(4, 2)
    path = of_plain_torch(tmp_path, AdamW(model.parameters()), model)
    other = nn.Linear(4, 2)
    optimizer, weight = make(other.parameters()), other.weight.detach().clone()
    with pytest.raises(CheckpointError, match=message):
        wholestep.load_checkpoint(path, model=other, optimizer=optimizer)
    assert torch.equal(other.weight, weight)
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.update(exp_avg=torch.zeros(3)),
            r"weight\.exp_avg has shape \(3,\) in it and \(2, 4\) here",
        ),
        (lambda state: state.pop("exp_avg_sq"), r"it has no optimizer\.state\.weight\.exp_avg_sq"),
    ],
)
def test_state_that_does_not_fit_its_parameter(change: Any, message: str, tmp_path: Path) -> None:
    """F4: state of another shape was accepted."""
    model = nn.Linear(4, 2)
    optimizer = AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    change(optimizer.state[model.weight])
    path = tmp_path / "step-00000001"
    wholestep.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, wait=True)
    other = nn.Linear(4, 2)
    weight = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match=message):
        wholestep.load_checkpoint(path, model=other, optimizer=AdamW(other.parameters()))
    assert torch.equal(other.weight, weight)


class Stubborn:
    """Something that takes no state, and an integer that is its state."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails and state["seen"]:
            raise KeyError("position")
        self.seen = state["seen"]


@pytest.mark.parametrize("order", [("model", "first", "second"), ("second", "first", "model")])
def test_an_object_that_refuses_its_state_leaves_all_as_it_was(order: tuple[str, ...], tmp_path: Path) -> None:
    model, first, second = nn.Linear(4, 2), Stubborn(False), Stubborn(False)
    first.seen = second.seen = 3
    optimizer = AdamW(model.parameters())
    wholestep.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, first=first, second=second, wait=True)
    state = {"model": nn.Linear(4, 2), "first": Stubborn(False), "second": Stubborn(True)}
    other = {"optimizer": AdamW(state["model"].parameters(), lr=0.5), **{name: state[name] for name in order}}
    weight = state["model"].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*KeyError"):
        wholestep.Checkpoints(tmp_path).resume(**other)
    assert torch.equal(state["model"].weight, weight)
    assert (state["first"].seen, state["second"].seen) == (0, 0)
    assert other["optimizer"].param_groups[0]["lr"] == 0.5


class Choosy(nn.Module):
    """Has state of its own, and may refuse to load it."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.seen = [0]
        self.refuses = refuses

    def get_extra_state(self) -> Any:
        return {"seen": list(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise ValueError("no such extra")
        self.seen[:] = state["seen"]


def refuse(*_: Any) -> None:
    raise KeyError("a hook refuses")


@pytest.mark.parametrize("how", ["extra state", "hook before", "hook after"])
@pytest.mark.parametrize("loader", ["resume", "load_checkpoint"])
def test_a_module_that_refuses_leaves_everything_as_it_was(how: str, loader: str, tmp_path: Path) -> None:
    """What was loaded before it is put back, and it is a `CheckpointError` that says so."""

    def world(refuses: bool) -> dict[str, Any]:
        module, other = Choosy(refuses and how == "extra state"), Choosy()
        optimizer = SGD([*module.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
        return {"note": {"n": 0}, "optimizer": optimizer, "other": other, "module": module}

    there = world(refuses=False)
    there["note"]["n"], there["other"].seen[0] = 5, 5
    for parameter in [*there["module"].parameters(), *there["other"].parameters()]:
        parameter.grad = torch.ones_like(parameter)
    there["optimizer"].step()
    there["optimizer"].param_groups[0]["lr"] = 0.5
    checkpoints = saved(tmp_path, **there)

    here = world(refuses=True)
    if how == "hook before":
        here["module"].first.register_load_state_dict_pre_hook(refuse)
    if how == "hook after":
        here["module"].first.register_load_state_dict_post_hook(refuse)
    before = {name: copy.deepcopy(here[name].state_dict()) for name in ("optimizer", "other", "module")}
    path = next(tmp_path.glob("step-*"))
    load = checkpoints.resume if loader == "resume" else functools.partial(wholestep.load_checkpoint, path)
    with pytest.raises(CheckpointError, match="no such extra" if how == "extra state" else "a hook refuses"):
        load(**here)
    assert here["note"] == {"n": 0}
    assert {name: repr(here[name].state_dict()) for name in before} == {name: repr(v) for name, v in before.items()}
