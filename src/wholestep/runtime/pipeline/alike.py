"""What ranks must have alike that update the same parameters: tied ones, and all of them on replicas of a pipeline.

They get the same gradients and update on their own. Parameters and optimizer state are compared bit by bit when a
pipeline is captured and now and then; the optimizer's options go with the gradients of each call, as one number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.errors import RankError
from wholestep.runtime.agreement import difference
from wholestep.runtime.pipeline.calls import Calls
from wholestep.runtime.replica_facts import bits_mark, plain

_ANSWER_S = 5.0


def number_of(facts: Mapping[str, Any]) -> int:
    """A number that is another for other facts."""
    text = json.dumps(facts, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def options_differ(calls: Calls, options: Mapping[str, Any], others: Iterable[int]) -> RankError:
    """The error of a rank that has found out that others have other options. They have, too, or hear of it."""
    ranks = replace(calls.ranks, timeout_s=min(_ANSWER_S, calls.timeout_s))
    what = f"in call {calls.number}, and both update the same parameters"
    for rank in sorted({*others} - {ranks.rank}):
        try:
            found = ranks.exchange_with([rank], calls.moment("options of the update"), dict(options))[rank]
        except RankError:
            continue
        if found != options:
            low, high = sorted(((ranks.rank, dict(options)), (rank, found)), key=lambda pair: pair[0])
            different = difference(low[1], high[1], low[0], high[0])
            return RankError(f"the options of optimizers differ between ranks: {different} {what}")
    return RankError(f"the options of the optimizer differ between rank {ranks.rank} and another {what}")


def require_same_values(calls: Calls, model: nn.Module, optimizer: Optimizer | None, names: Iterable[str]) -> None:
    """Raise `RankError` if ranks differ in the values or the optimizer state of parameters of these names.

    All ranks call it, each with the names of what others have, too.
    """
    parameters = dict(model.named_parameters())
    own = {name: _marks(parameters[name], optimizer) for name in names}
    found = calls.ranks.exchange(calls.moment("values"), own)
    first: dict[str, int] = {}
    for rank, by_name in enumerate(found):
        for name, marks in by_name.items():
            known = first.setdefault(name, rank)
            expected = found[known][name]
            if marks != expected:
                what = next(what for what in {**expected, **marks} if expected.get(what) != marks.get(what))
                raise RankError(
                    f"{what} of {name} differs between rank {known} and rank {rank}, which both update it: load the "
                    "same checkpoint on all ranks, and change parameters on all of them"
                )


def _marks(parameter: nn.Parameter, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
    values = {"the value": parameter} | {f"the optimizer's {key}": value for key, value in state.items()}
    return {
        what: bits_mark(value) if isinstance(value, torch.Tensor) else plain(value) for what, value in values.items()
    }
