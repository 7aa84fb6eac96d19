"""Updates that wait for the next call, on one rank: nobody sees the world without them, however they look (ITER-5)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.waiting import MAKERS, WORDS, Pair, X, is_pending
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import AdamW, Optimizer

from wholestep import _torch
from wholestep.runtime.held import GuardedParameter

pytestmark = pytest.mark.usefixtures("nothing_waits")


# Guards


@pytest.mark.parametrize("name", MAKERS)
def test_guards_are_on_while_something_waits(name: str) -> None:
    pair = Pair(name)
    for _ in range(3):
        pair.step()
        assert is_pending(pair.ours)
        assert not torch.equal(pair.eager.memory[0], pair.ours.memory[0]), "there is something to be found"
    pair.compiled.flush()
    pair.assert_applied()
    pair.compiled.flush()
    pair.assert_applied()


def test_only_what_moves_is_guarded() -> None:
    pair = Pair(cross_iteration=["last"])
    names = [name for name, _ in pair.ours.model.named_parameters()]
    pair.steps(2)
    kinds = {name: type(parameter) for name, parameter in zip(names, pair.ours.parameters, strict=True)}
    assert {name for name, kind in kinds.items() if kind is GuardedParameter} == {"last.weight", "last.bias"}
    pair.assert_same()
    assert not is_pending(pair.ours)


def test_a_guarded_parameter_is_still_a_parameter() -> None:
    pair = Pair()
    pair.step()
    weight = pair.ours.parameters[0]
    assert isinstance(weight, nn.Parameter)
    assert is_pending(pair.ours)
    assert weight.requires_grad
    assert not is_pending(pair.ours)


# Ways to look


def _evaluate(context: Callable[[], Any], model: nn.Module, _: Optimizer) -> Tensor:
    model.eval()
    with context():
        result = model(X)
    model.train()
    return result.clone()


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _per_sample(model: nn.Module, _: Optimizer) -> Any:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (X,)).sum()

    return torch.func.grad(loss)(dict(model.named_parameters()))


def _under_fake_mode(model: nn.Module, _: Optimizer) -> Any:
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        model.get_submodule("last")(torch.ones(2, 5))
    return model.state_dict()


LOOKS: dict[str, Callable[[Any, Optimizer], Any]] = {
    "parameter": lambda m, _: m.first.weight.detach().clone(),
    "gradient": lambda m, _: m.last.bias.grad,
    "state": lambda m, o: o.state[m.words.weight]["exp_avg"] * 1,
    "counter": lambda m, o: o.state[m.words.weight]["step"].item(),
    "model.state_dict": lambda m, _: m.state_dict(),
    "state_dict of a part": lambda m, _: m.last.state_dict(),
    "optimizer.state_dict": lambda _, o: o.state_dict(),
    "deepcopy of the model": lambda m, _: copy.deepcopy(m).state_dict(),
    "deepcopy of both": lambda m, o: [x.state_dict() for x in copy.deepcopy((m, o))],
    "copy": lambda m, _: copy.copy(m.first.weight).detach(),
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m)).state_dict(),
    "torch.save": lambda m, _: _saved(m).state_dict(),
    "torch.save of a parameter": lambda m, _: _saved(m.first.bias),
    "torch.save of the state": lambda _, o: _saved(o.state_dict()),
    "evaluation": partial(_evaluate, torch.no_grad),
    "evaluation with gradients": partial(_evaluate, torch.enable_grad),
    "inference mode": partial(_evaluate, torch.inference_mode),
    "autocast": partial(_evaluate, partial(torch.autocast, "cpu", torch.bfloat16)),
    "torch.compile": lambda m, o: _evaluate(torch.no_grad, _compiled(m), o),
    "functional call": lambda m, _: torch.func.functional_call(m, dict(m.named_parameters()), (X,)),
    "vmap": lambda m, _: torch.func.vmap(m.first)(X),
    "torch.func.grad": _per_sample,
    "autograd": lambda m, _: list(torch.autograd.grad(m(X).sum(), list(m.parameters()))),
    "make_fx": lambda m, _: make_fx(m.first)(X)(X),
    "fake mode": _under_fake_mode,
    "numpy": lambda m, _: torch.from_numpy(m.first.weight.detach().numpy().copy()),
    "text": lambda m, _: repr(m.first.bias),
    "norm": lambda m, _: nn.utils.get_total_norm(list(m.parameters())),
    "vector": lambda m, _: nn.utils.parameters_to_vector(m.parameters()),
    "out of place": lambda m, _: torch.zeros(5, 4).copy_(m.first.weight.data),
    "as_tensor": lambda m, _: torch.as_tensor(m.first.weight).detach(),
    "torch.tensor": lambda m, _: torch.tensor(m.last.bias.data),
    "torch.tensor of a parameter": lambda m, _: _copied_with_warning(m.last.bias),
    "torch.Tensor": lambda m, _: torch.Tensor(m.last.bias).detach(),
    "new parameter": lambda m, _: nn.Parameter(m.first.weight).detach(),
    "new parameter of data": lambda m, _: nn.Parameter(m.first.weight.data).detach(),
}


def _copied_with_warning(parameter: Tensor) -> Tensor:
    with pytest.warns(UserWarning, match="To copy construct from a tensor"):
        return torch.tensor(parameter)


@pytest.mark.sample(14)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("name", LOOKS)
def test_looking_applies(name: str) -> None:
    pair = Pair()
    pair.steps(3)
    assert is_pending(pair.ours)
    pair.both(LOOKS[name])
    pair.assert_applied()
    pair.steps(2)
    pair.assert_same()


def test_a_converted_model() -> None:
    pair = Pair()
    pair.steps(3)
    pair.both(lambda model, _: [p.detach().clone() for p in model.double().float().parameters()])
    pair.steps(2)
    pair.assert_same()


def test_a_held_list_shows_updates() -> None:
    pair = Pair()
    held = [list(side.model.parameters()) for side in pair.sides]
    pair.steps(2)
    pair.both(lambda *_: None)
    assert is_pending(pair.ours)
    for expected, found in zip(*held, strict=True):
        assert torch.equal(found, expected)
    pair.assert_applied()


def test_what_is_applied_while_looking_is_no_inference_tensor() -> None:
    pair = Pair()
    pair.steps(2)
    with torch.inference_mode():
        pair.ours.model(X)
    assert not any(parameter.is_inference() for parameter in pair.ours.model.parameters())
    pair.eager.model(X)
    pair.steps(2)
    pair.assert_same()


# Changes between calls


def test_learning_rates_are_those_of_their_call() -> None:
    pair = Pair("sgd")
    for rate in (0.1, 0.5, 0.0, 0.2):
        for side in pair.sides:
            side.optimizer.param_groups[0]["lr"] = rate
        pair.step()
        assert is_pending(pair.ours)
    pair.assert_same()
    assert pair.compiled.num_captures == 1


def test_a_learning_rate_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, "tensor", lambda p: AdamW(p, lr=torch.tensor(0.01), foreach=False, capturable=False))
    pair = Pair("tensor")
    for rate in (0.5, 0.0, 0.2):
        pair.step()
        assert is_pending(pair.ours)
        for side in pair.sides:
            side.optimizer.param_groups[0]["lr"].fill_(rate)
        assert is_pending(pair.ours)
    pair.step()
    pair.assert_same()


def test_arguments_may_be_overwritten_at_once() -> None:
    pair = Pair("sgd")
    for number in range(3):
        batch = X + number
        pair.eager.step(pair.eager.model, pair.eager.optimizer, batch.clone(), WORDS)
        pair.ours.step(pair.ours.model, pair.ours.optimizer, batch, WORDS).fill_(torch.nan)
        batch.fill_(torch.nan)
    pair.assert_same()


def test_another_batch_size_while_something_waits() -> None:
    pair = Pair()
    for size in (6, 6, 4, 4, 5, 6, 6):
        pair.step(X[:size], WORDS[:size])
        assert is_pending(pair.ours)
    assert pair.compiled.num_captures == 2
    pair.assert_same()
