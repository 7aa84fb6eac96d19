"""Compare a compiled training step with eager execution after every single step."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from wholestep.zoo import Batch, ZooCase
from wholestep.zoo.optimizers import OPTIMIZERS

TrainStep = Callable[[nn.Module, Optimizer, Batch], Any]


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Clone everything a training step may change, by name.

    The names are `param.<name>`, `buffer.<name>`, `grad.<name>`, `state.<param name>.<key>`,
    `group.<index>.<option>`, `rng.cpu`, `rng.python`, `rng.numpy` and, where CUDA is in use, `rng.cuda.<index>`.
    """
    taken: dict[str, Tensor] = {}
    # A tied parameter is listed under each of its names, so that untying it shows.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        taken[f"param.{name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            taken[f"grad.{name}"] = parameter.grad.detach().clone()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        taken[f"buffer.{name}"] = buffer.detach().clone()
    taken |= _optimizer_snapshot(model, optimizer)
    return taken | _random_states() | _python_random_values()


def _optimizer_snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option not in ("params", "param_names"):
                taken |= named_leaves(f"group.{index}.{option}", value)
        for position, parameter in enumerate(group["params"]):
            # The optimizer may hold tensors that the model does not know.
            name = names.get(parameter, f"group.{index}.params.{position}")
            for key, value in optimizer.state.get(parameter, {}).items():
                taken |= named_leaves(f"state.{name}.{key}", value)
    return taken


def named_leaves(prefix: str, tree: Any) -> dict[str, Tensor]:
    """Flatten a pytree into cloned tensors named by their path."""
    paths_and_leaves, _ = pytree.tree_flatten_with_path(tree)
    return {prefix + pytree.keystr(path): _as_tensor(leaf) for path, leaf in paths_and_leaves}


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, float):
        # Python floats are doubles: the default dtype would hide a difference in the low bits.
        return torch.tensor(leaf, dtype=torch.float64)
    if isinstance(leaf, int):
        return torch.tensor(leaf)
    # None, strings and the like have no numbers to compare, but they still have to agree.
    return torch.tensor(list(repr(leaf).encode()), dtype=torch.uint8)


def differences(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, rtol: float = 0, atol: float = 0
) -> list[str]:
    """One line for every name whose tensors differ or that only one side has."""
    lines: list[str] = []
    for name in [*expected, *(name for name in actual if name not in expected)]:
        if name not in actual:
            lines.append(f"{name}: only in eager")
        elif name not in expected:
            lines.append(f"{name}: only in compiled")
        elif description := _difference(expected[name], actual[name], rtol, atol):
            lines.append(f"{name}: {description}")
    return lines


def _difference(expected: Tensor, actual: Tensor, rtol: float, atol: float) -> str | None:
    if (expected.shape, expected.dtype, expected.device) != (actual.shape, actual.dtype, actual.device):
        return f"{_kind(expected)} in eager, {_kind(actual)} in compiled"
    if expected.is_floating_point() or expected.is_complex():
        close = torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        close = actual == expected
    if bool(close.all()):
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    gaps = (actual.to(wide) - expected.to(wide)).abs()[~close]
    return f"max abs difference {gaps.max().item():.6g} in {gaps.numel()} of {expected.numel()} elements"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _random_states() -> dict[str, Tensor]:
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"rng.cuda.{index}"] = state
    return states


def _python_random_values() -> dict[str, Tensor]:
    _, words, gauss = random.getstate()
    numpy_words: Any = np.random.get_state(legacy=False)
    key, position = numpy_words["state"]["key"], numpy_words["state"]["pos"]
    return {
        "rng.python": torch.tensor([*words, 0.0 if gauss is None else gauss], dtype=torch.float64),
        "rng.numpy": torch.tensor([*key.tolist(), position, numpy_words["gauss"]], dtype=torch.float64),
    }


class RandomStream:
    """A position in the global streams of torch, Python and NumPy that can be switched to and left again."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self._remember()

    def _remember(self) -> None:
        self._states = _random_states()
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Continue this stream inside the block and remember where the block left it."""
        for name, state in self._states.items():
            if name == "rng.cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, int(name.rpartition(".")[2]))
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._remember()


def default_step(case: ZooCase) -> TrainStep:
    """The ordinary training step of a case."""

    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def build_optimizer(make_optimizer: str | Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """Make an optimizer for the model.

    A name is looked up in `OPTIMIZERS`. Optimizer classes and partials of them, which is what
    `OPTIMIZERS` holds, are given the model's parameters; any other callable is given the model.
    """
    factory: Callable[..., Optimizer]
    factory = OPTIMIZERS[make_optimizer] if isinstance(make_optimizer, str) else make_optimizer
    made = factory.func if isinstance(factory, partial) else factory
    takes_parameters = isinstance(made, type) and issubclass(made, Optimizer)
    return factory(model.parameters() if takes_parameters else model)


def assert_parity(
    case: ZooCase,
    make_optimizer: str | Callable[..., Optimizer],
    *,
    steps: int = 5,
    train_step: TrainStep | None = None,
    compile_options: Mapping[str, Any] | None = None,
    batch_sizes: Sequence[int] = (4,),
    rtol: float = 0,
    atol: float = 0,
    seed: int = 0,
    prepare: Callable[[nn.Module], nn.Module | None] | None = None,
    compile: Callable[..., Callable[..., Any]] | None = None,
) -> Any:
    """Train two identical models, one eagerly and one compiled, and compare them after every step.

    Compared are the returned value, what `snapshot` holds and the batch, which a step may write to.
    With `rtol` and `atol` at 0 they must be equal, NaN being equal to NaN; integers and random states
    always must. Batch sizes are taken in turn. `prepare` changes the model, or returns another one,
    before it is copied. Returns the compiled step.
    """
    eager = train_step or default_step(case)
    compiled = (compile or _wholestep_compile)(eager, **(compile_options or {}))
    with torch.random.fork_rng():
        sides = _build_sides(case, make_optimizer, seed, prepare)
        device = next(sides[0][0].parameters()).device
        streams = (RandomStream(seed + 1), RandomStream(seed + 1))
        kept: tuple[list[Any], list[Any]] = ([], [])
        for number in range(1, steps + 1):
            batch_size = batch_sizes[(number - 1) % len(batch_sizes)]
            batch = case.make_batch(batch_size, seed * 1000 + number)
            observed: list[dict[str, Tensor]] = []
            for step, (model, optimizer), stream, outputs in zip((eager, compiled), sides, streams, kept):
                own_batch = {key: tensor.to(device, copy=True) for key, tensor in batch.items()}
                with stream.active():
                    outputs.append(step(model, optimizer, own_batch))
                    state = snapshot(model, optimizer)
                observed.append(_outcome(outputs[-1], own_batch) | state)
            _fail_on(
                f"{case.name}: step {number} of {steps} (batch size {batch_size})",
                differences(observed[0], observed[1], rtol=rtol, atol=atol),
            )
        # What a step returned must outlive later steps rather than be overwritten by them.
        _fail_on(
            f"{case.name}: outputs kept until after step {steps}",
            differences(*(named_leaves("output", side) for side in kept), rtol=rtol, atol=atol),
        )
    return compiled


def _wholestep_compile(train_step: TrainStep, **options: Any) -> Callable[..., Any]:
    # Imported late so that these helpers can be tested without the compiler.
    import wholestep

    return wholestep.compile(train_step, **options)


def _build_sides(
    case: ZooCase,
    make_optimizer: str | Callable[..., Optimizer],
    seed: int,
    prepare: Callable[[nn.Module], nn.Module | None] | None,
) -> list[tuple[nn.Module, Optimizer]]:
    torch.manual_seed(seed)
    model = case.build()
    if prepare is not None:
        model = prepare(model) or model
    return [(copied, build_optimizer(make_optimizer, copied)) for copied in (model, copy.deepcopy(model))]


def _outcome(output: Any, batch: Batch) -> dict[str, Tensor]:
    structure = pytree.tree_structure(output)
    return (
        {"output structure": _as_tensor(structure)}
        | named_leaves("output", output)
        | {f"batch.{key}": tensor.clone() for key, tensor in batch.items()}
    )


def _fail_on(where: str, lines: list[str]) -> None:
    if lines:
        raise AssertionError("\n  ".join([f"{where}: compiled differs from eager", *lines]))
