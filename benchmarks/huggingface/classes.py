"""The model classes of the installed `transformers`, one for each type of model, and how to build a small one."""

from __future__ import annotations

import dataclasses
import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.huggingface.configs import SCALES, Scale, small_config
from benchmarks.huggingface.inputs import Maker, variants

TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "PRETRAINING",
)
"""The tasks whose model a type is measured with: the first that it has."""
MAX_PARAMETERS = 4_000_000


def class_names() -> dict[str, str]:
    """The type of model of each class, in an order drawn once: a part of a run is a fair sample of it."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    chosen: dict[str, str] = {}
    types: set[str] = set()
    for task in TASKS:
        for model_type, names in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            if model_type not in types and name not in chosen:
                chosen[name] = model_type
                types.add(model_type)
    return dict(sorted(chosen.items(), key=lambda item: zlib.crc32(item[0].encode())))


def is_held_back(name: str) -> bool:
    """Whether a class is in the fifth that nobody looks at while causes are worked on."""
    return zlib.crc32(f"held back {name}".encode()) % 5 == 0


class Unbuilt(Exception):
    """No small model of this class could be built and trained in eager."""


@dataclasses.dataclass(frozen=True)
class Found:
    """How to build a small model of a class, the batch of a step, and the way to its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    way: tuple[Any, ...]


def loss_of(model: Any, batch: dict[str, Any], way: tuple[Any, ...]) -> Tensor:
    """The loss of a model, or the mean of an output if it has none."""
    value = model(**batch)
    for key in way:
        value = value[key]
    return value.mean()


def _way_to_loss(output: Any) -> tuple[Any, ...]:
    """Where the loss is in an output: what is called so, or else its first part that has a gradient."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return ("loss",)
    for way, value in _parts(output):
        if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point():
            return way
    raise ValueError("nothing in the output has a gradient")


def _parts(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        children: Any = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    else:
        yield (), value
        return
    for key, child in children:
        for way, part in _parts(child):
            yield (key, *way), part


def find(name: str, model_type: str) -> Found:
    """How to build and feed a small model of a class; tried in eager."""
    transformers: Any = importlib.import_module("transformers")
    auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    model_class = getattr(transformers, name)
    config_class = model_class.config_class or auto.CONFIG_MAPPING[model_type]
    reasons: list[str] = []
    for scale in SCALES:

        def build(scale: Scale = scale) -> nn.Module:
            return model_class(small_config(config_class, scale)).train()

        try:
            torch.manual_seed(0)
            model = build()
            if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                raise ValueError("too large")
        except Exception as error:
            reasons.append(_told("build", error))
            continue
        for variant in variants():
            maker = Maker(model, variant | {"image": scale.image})
            try:
                return Found(build, maker.batch, _tried(model, maker))
            except Exception as error:
                reasons.append(_told("run", error))
    raise Unbuilt("; ".join(dict.fromkeys(reasons)))


def _tried(model: nn.Module, maker: Maker) -> tuple[Any, ...]:
    """The way to the loss, after a forward and a backward."""
    batch = maker.batch(0)
    way = _way_to_loss(model(**batch))
    loss = loss_of(model, batch, way)
    loss.backward()
    if not loss.isfinite():
        raise ValueError("the loss is not finite")
    return way


def _told(what: str, error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"{what}: {type(error).__name__}: {first[:150]}"
