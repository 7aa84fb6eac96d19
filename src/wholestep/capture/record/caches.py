"""Functions with a cache (`functools.lru_cache`) that a step calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from wholestep import _recording_torch, _torch
from wholestep.capture.record.numbers import settled
from wholestep.capture.record.places import Step
from wholestep.capture.record.standins import is_stand_in

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder


def cached_call(recorder: Recorder, function: Any) -> Callable[..., Any]:
    """What to call instead: what the cache holds is computed for real, as it will be found there after the step."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.follow_all(function.__wrapped__)
        if any(isinstance(leaf, torch.Tensor) for leaf in (*args, *kwargs.values())):
            return function.__wrapped__(*args, **kwargs)
        args, kwargs = tuple(map(settled, args)), {name: settled(value) for name, value in kwargs.items()}
        if function.cache_info().currsize == 0:
            recorder.filled_caches[id(function)] = function
        deeds = recorder.num_deeds, len(recorder.outputs)
        with recorder.placed.plain(), _recording_torch.untraced():
            result = function(*args, **kwargs)
        if deeds != (recorder.num_deeds, len(recorder.outputs)):
            recorder.refuse("fills a cache with a function that also writes or prints", "Call it outside the step")
        recorder.root(function)
        recorder.note(function, Step.CALL, (args, tuple(kwargs.items())), result)
        if any(is_stand_in(value) for value in _torch.tree_leaves(result)):
            recorder.refuse("fills a cache with what it computes from the model", "Call the cached function outside")
        return result

    return call
