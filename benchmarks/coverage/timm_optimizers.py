"""timm's optimizers: all that its registry names, with its own options and its own ways to group parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tests.integrations.torchvision_operators import declare_missing
from tests.twins import pair

from benchmarks.coverage import optimizers
from benchmarks.coverage.cases import Case

NUM_STEPS = 20
MOST_CAPTURES = 3
_BATCHES = [pair(seed=seed) for seed in range(NUM_STEPS)]
_LOOKAHEAD = ("sgd", "adamw", "radam", "lamb")
_GROUPED = ("adamw", "lamb", "lion", "adan", "nadamw", "muon")


def _timm() -> Any:
    """timm, also where the operators of torchvision, which it imports, were built for another device."""
    declare_missing()
    import timm.optim

    return timm


def cases() -> Iterator[Case]:
    timm = _timm()
    make = timm.optim.create_optimizer_v2
    for name in timm.optim.list_optimizers():
        info = timm.optim.get_optimizer_info(name)
        family = info.opt_class if isinstance(info.opt_class, str) else info.opt_class.__name__
        is_second = bool(info.second_order)
        options: dict[str, dict[str, Any]] = {"": {}, ", decay": {"weight_decay": 0.05}}
        if "caution" in _parameters_of(info.opt_class):
            options[", cautious"] = {"caution": True}
        if info.has_momentum:
            options[", no momentum"] = {"momentum": 0.0}
        for label, given in options.items():
            build = functools.partial(make, opt=name, lr=0.01, **given)
            yield _case(family, f"{name}{label}", build, is_second=is_second)
    for name in _LOOKAHEAD:
        yield _case("Lookahead", f"lookahead_{name}", functools.partial(make, opt=f"lookahead_{name}", lr=0.01))
    for name in _GROUPED:
        build = functools.partial(make, opt=name, lr=0.01, weight_decay=0.05, layer_decay=0.75)
        yield _case("layer decay", f"{name}, layer decay and a schedule", build, between=_warmed_up)


def _parameters_of(kind: Any) -> tuple[str, ...]:
    return () if isinstance(kind, str) else kind.__init__.__code__.co_varnames


def _warmed_up(world: Any, *, number: int) -> None:
    """As timm's schedulers do: each group has a scale of its own."""
    for group in world.optimizer.param_groups:
        group["lr"] = 0.01 * min(1.0, (number + 1) / 5) * group.get("lr_scale", 1.0)


def _case(
    family: str,
    name: str,
    make: Callable[..., Any],
    *,
    is_second: bool = False,
    between: Callable[..., None] | None = None,
) -> Case:
    step = optimizers.second_order_step if is_second else optimizers.step_of()
    build = optimizers.optimizer_of(make)
    return Case(family, name, build, step, _BATCHES, between=between, most_captures=MOST_CAPTURES)
