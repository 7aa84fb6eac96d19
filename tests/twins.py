"""Two worlds built alike, one trained eagerly and one compiled, compared after every step.

`tests.parity` does this for one model, one optimizer and one dict of tensors; this does it for any train step.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import RandomStream
from tests.pictures import Picture, differences, generators, picture
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim import Optimizer

import wholestep

World = SimpleNamespace
"""Models, optimizers and whatever else a step works on, as attributes; those that begin with `_` are not compared."""


class SmallNet(nn.Module):
    """Two linear layers: four features in, three out."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.second = nn.Linear(hidden, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(features)))


def momentum(parameters: Any) -> Optimizer:
    """An optimizer with state of its own, and the fewest ops: to trace Adam takes twice as long."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def is_captured() -> bool:
    """Whether a step is being traced: what no step should ask, and a test of what happens if one can."""
    return get_proxy_mode() is not None


def small_world(
    make_model: Callable[[], nn.Module] = SmallNet, make_optimizer: Callable[..., Optimizer] = momentum
) -> Callable[[], World]:
    """A builder of a world with a `model` and an `optimizer` of its parameters."""

    def build() -> World:
        model = make_model()
        return World(model=model, optimizer=make_optimizer(model.parameters()))

    return build


def mse_step(model: Callable[..., Tensor], optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    """The ordinary train step on `pair`'s data."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(features), targets)
    loss.backward()
    optimizer.step()
    return loss


def square_step(model: Callable[..., Tensor], optimizer: Optimizer, features: Tensor) -> Tensor:
    """The ordinary train step without targets."""
    optimizer.zero_grad()
    loss = model(features).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def pair(size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Four features and three targets for each example."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)


def _call_with_model(world: World, step: Callable[..., Any], *args: Any) -> Any:
    return step(world.model, world.optimizer, *args)


class Twins:
    """An eager and a compiled trainer.

    `build()` is called once for each side, from the same seed. The train step is `function`, or `make(world)` where it
    has to be a closure or a method of that side's own objects. `call(world, step, *args)` runs it; by default as
    `step(world.model, world.optimizer, *args)`. All other options go to `wholestep.compile`.
    """

    def __init__(
        self,
        build: Callable[[], World],
        function: Callable[..., Any] | None = None,
        *,
        make: Callable[[World], Callable[..., Any]] | None = None,
        call: Callable[..., Any] = _call_with_model,
        seed: int = 0,
        compare_kept: bool = True,
        **options: Any,
    ) -> None:
        self.worlds: list[World] = []
        for _ in range(2):
            with RandomStream(seed).active():
                self.worlds.append(build())
        functions = [make(world) if make is not None else function for world in self.worlds]
        assert functions[0] is not None
        self._functions = functions
        self.eager: Callable[..., Any] = functions[0]
        self.compiled: Any = wholestep.compile(functions[1], **options)
        self._call = call
        self._streams = (RandomStream(seed + 1), RandomStream(seed + 1))
        self._kept: tuple[list[Any], list[Any]] = ([], [])
        self._compare_kept = compare_kept
        self._before: list[list[Any]] = [[], []]
        for side in range(2):
            self._look(side)
        self._number = 0

    @property
    def num_captures(self) -> int:
        return self.compiled.num_captures

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.compiled.recompile_reasons

    def step(self, *args: Any) -> Any:
        """Run one step on both sides, each with its own copy of `args`, and compare; returns the compiled output.

        Compared are the returned value, everything in the world and in the closure of the step, the arguments and the
        generators of torch, Python and NumPy; what the world held after the last step, which is changed in place or
        replaced as eager does; and what earlier steps returned, which must not be overwritten.
        """
        self._number += 1
        seen: list[Picture] = []
        for side, (step, stream, kept) in enumerate(zip((self.eager, self.compiled), self._streams, self._kept)):
            own_args = copy.deepcopy(args)
            with stream.active():
                kept.append(self._call(self.worlds[side], step, *own_args))
                seen.append(self._look(side) | picture({"argument": own_args, **generators()})[0])
            seen[-1] |= picture({"output": kept[-1]}, torchs_by_value=True)[0]
        self._compare(f"step {self._number}", seen[0], seen[1])
        if self._compare_kept:
            eager, compiled = (picture({"output": kept}, torchs_by_value=True)[0] for kept in self._kept)
            self._compare(f"outputs kept until step {self._number}", eager, compiled)
        return self._kept[1][-1]

    def _compare(self, where: str, eager: Picture, compiled: Picture) -> None:
        _fail_on(where, differences(eager, compiled))

    def _look(self, side: int) -> Picture:
        # Whoever looks has waiting updates applied; a picture looks past the ways in which that is noticed.
        for value in vars(self.worlds[side]).values():
            if isinstance(value, nn.Module):
                list(value.parameters())
        compared = {name: value for name, value in vars(self.worlds[side]).items() if not name.startswith("_")}
        roots = {**compared, "step": self._functions[side]}
        seen, self._before[side] = picture(roots, self._before[side], torchs_by_value=True)
        return seen

    def steps(self, number: int, *args: Any) -> None:
        """The same batch several times."""
        for _ in range(number):
            self.step(*args)

    def change(self, action: Callable[[World], Any]) -> None:
        """Do the same to both worlds between steps."""
        for world in self.worlds:
            action(world)


def observe(world: World) -> dict[str, Tensor]:
    """Clone everything a step may change, by name: parameters, gradients, buffers, optimizer state and options."""
    names = _parameter_names(world)
    seen: dict[str, Tensor] = {}
    for key, value in vars(world).items():
        if isinstance(value, nn.Module):
            seen |= _module_values(key, value)
        elif isinstance(value, Optimizer):
            seen |= _optimizer_values(key, value, names)
        elif isinstance(value, Tensor | list | tuple | Mapping | int | float | str):
            seen |= named_values(key, value)
    return seen


def _parameter_names(world: World) -> dict[int, str]:
    modules = {key: value for key, value in vars(world).items() if isinstance(value, nn.Module)}
    return {id(p): f"{key}.{name}" for key, module in modules.items() for name, p in module.named_parameters()}


def _module_values(key: str, module: nn.Module) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        seen |= named_values(f"{key}.{name}", parameter)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        seen |= named_values(f"{key}.{name}", buffer)
    return seen


def _optimizer_values(key: str, optimizer: Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        seen |= named_values(f"{key}.groups[{index}]", options)
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{key}.groups[{index}].params[{position}]")
            seen |= named_values(f"{key}.state[{name}]", dict(optimizer.state.get(parameter, {})))
            if id(parameter) not in names:
                seen |= named_values(name, parameter)
    return seen


def named_values(prefix: str, value: Any) -> dict[str, Tensor]:
    """Clones of all tensors in a nested value by path; of anything else its type and, for plain values, its text."""
    if isinstance(value, Tensor):
        seen = {prefix: value.detach().clone()}
        if value.is_leaf and value.grad is not None:
            seen[f"{prefix}.grad"] = value.grad.detach().clone()
        return seen
    children: dict[str, Any]
    if isinstance(value, list | tuple):
        children = {f"[{index}]": item for index, item in enumerate(value)}
    elif isinstance(value, Mapping):
        children = {f"[{key!r}]": item for key, item in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return {prefix: _text(f"{type(value).__name__} {value!r}")}
    seen = {f"type of {prefix}": _text(type(value).__name__)}
    for key, item in children.items():
        seen |= named_values(prefix + key, item)
    return seen


def _text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _fail_on(where: str, lines: list[str]) -> None:
    if lines:
        raise AssertionError("\n  ".join([f"{where}: compiled differs from eager", *lines]))
