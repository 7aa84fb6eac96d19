"""Batches for any model, from the names of its forward's arguments and of its class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BATCH = 2
LENGTH = 12
FIRST_WORD = 5
"""Smaller ids are left to padding, start and end."""

_WORDS = (
    "CausalLM",
    "LMHead",
    "MaskedLM",
    "ConditionalGeneration",
    "ForPreTraining",
    "Seq2Seq",
    "SpeechSeq2Seq",
    "LMHeadModel",
    "Generation",
)
_CLASSES = (
    "ImageClassification",
    "SequenceClassification",
    "AudioClassification",
    "VideoClassification",
    "ImageClassificationWithTeacher",
)


class Maker:
    """Draws the batches of one model: the same names and sizes each time, other values."""

    def __init__(self, model: Any, variant: dict[str, Any]) -> None:
        self._model, self._config, self._variant = model, model.config, variant
        self._names = set(inspect.signature(model.forward).parameters)

    def batch(self, seed: int) -> dict[str, Any]:
        """The batch of a step."""
        generator = torch.Generator().manual_seed(seed)
        made = {
            name: make(self, generator)
            for name, make in _MAKERS.items()
            if name in self._names and name in self._wanted()
        }
        return {name: value for name, value in made.items() if value is not None}

    def _wanted(self) -> set[str]:
        main = getattr(self._model, "main_input_name", "input_ids")
        wanted = {main, *self._variant["with"]}
        if main in ("input_ids",) or "input_ids" in wanted:
            wanted |= {"attention_mask"} if self._variant["mask"] else set()
        if self._variant["labels"]:
            wanted |= {
                "labels",
                "mask_labels",
                "class_labels",
                "start_positions",
                "end_positions",
                "return_loss",
                "past_values",
                "future_values",
            }
        if "decoder_input_ids" in self._names and not (self._variant["labels"] and "labels" in self._names):
            wanted |= {"decoder_input_ids"}
        return wanted

    def option(self, *names: str, default: Any = None) -> Any:
        """The first option of that name, in the configuration or its parts."""
        parts = [self._config, *(part for part in vars(self._config).values() if hasattr(part, "model_type"))]
        for name in names:
            for part in parts:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    def words(self, generator: torch.Generator, length: int = LENGTH) -> Tensor:
        text = self._config.get_text_config()
        size = getattr(text, "vocab_size", None) or self.option("vocab_size", default=99)
        forbidden = self._special()
        ids = torch.randint(FIRST_WORD, min(size, 90), (BATCH, length), generator=generator)
        return torch.where(torch.isin(ids, forbidden), FIRST_WORD, ids) if len(forbidden) else ids

    def _special(self) -> Tensor:
        known = {
            value for name, value in vars(self._config).items() if name.endswith("token_id") and isinstance(value, int)
        }
        return torch.tensor(sorted(known - {FIRST_WORD}))

    def mask(self, generator: torch.Generator) -> Tensor:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, -3:] = 0
        return mask

    def image(self, generator: torch.Generator) -> Tensor:
        size = self.option("image_size", "img_size", "input_size", default=self._variant["image"])
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = [BATCH, self.option("num_channels", "in_channels", default=3), height, width]
        if self._variant.get("video"):
            shape.insert(
                1 if not self._variant.get("channels_first") else 2,
                self.option("num_frames", "frames_per_clip", default=4),
            )
        return torch.randn(shape, generator=generator)

    def wave(self, generator: torch.Generator) -> Tensor:
        if self._variant.get("spectrogram"):
            return torch.randn(
                BATCH,
                self.option("max_length", default=64),
                self.option("num_mel_bins", default=16),
                generator=generator,
            )
        return torch.randn(BATCH, 4000, generator=generator)

    def features(self, generator: torch.Generator) -> Tensor:
        bins = self.option(
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_size",
            "n_mels",
            "feature_projection_input_dim",
            default=16,
        )
        length = 2 * self.option("max_source_positions", default=32)
        shape = (BATCH, length, bins) if self._variant.get("time_first") else (BATCH, bins, length)
        return torch.randn(shape, generator=generator)

    def boxes(self, generator: torch.Generator) -> Tensor:
        corners = torch.randint(0, 30, (BATCH, LENGTH, 2), generator=generator)
        return torch.cat([corners, corners + 5], -1)

    def labels(self, generator: torch.Generator) -> Any:
        name = type(self._model).__name__
        num_labels = self._config.num_labels
        if name.endswith("CTC"):
            return self.words(generator, 3)
        if name.endswith(("ObjectDetection", "ForSegmentation")):
            return [self._objects(generator) for _ in range(BATCH)]
        if name.endswith("SemanticSegmentation"):
            return torch.randint(0, num_labels, (BATCH, *self.image(generator).shape[-2:]), generator=generator)
        if name.endswith("DepthEstimation"):
            return None
        if name.endswith(_CLASSES):
            return torch.randint(0, num_labels, (BATCH,), generator=generator)
        if name.endswith("TokenClassification"):
            return torch.randint(0, num_labels, (BATCH, LENGTH), generator=generator)
        return self.words(generator)

    def _objects(self, generator: torch.Generator) -> dict[str, Tensor]:
        found = {"class_labels": torch.randint(0, self._config.num_labels, (2,), generator=generator)}
        return found | {"boxes": torch.rand(2, 4, generator=generator) * 0.4 + 0.1}


_MAKERS: dict[str, Any] = {
    "input_ids": Maker.words,
    "attention_mask": Maker.mask,
    "decoder_input_ids": Maker.words,
    "pixel_values": Maker.image,
    "pixel_values_videos": Maker.image,
    "input_values": Maker.wave,
    "input_features": Maker.features,
    "bbox": Maker.boxes,
    "labels": Maker.labels,
    "return_loss": lambda maker, generator: True,
    "mask_labels": lambda maker, generator: [
        torch.randint(0, 2, (2, *maker.image(generator).shape[-2:]), generator=generator).float() for _ in range(BATCH)
    ],
    "class_labels": lambda maker, generator: [
        torch.randint(0, maker._config.num_labels, (2,), generator=generator) for _ in range(BATCH)
    ],
}


def variants() -> Iterator[dict[str, Any]]:
    """Ways to feed a model, likeliest first."""
    plain = {"labels": True, "mask": True, "with": (), "image": 32}
    yield plain
    yield plain | {"with": ("input_ids", "pixel_values")}
    yield plain | {"with": ("input_ids",)}
    yield plain | {"time_first": True, "spectrogram": True, "video": True}
    yield plain | {"with": ("bbox",)}
    yield plain | {"video": True, "channels_first": True}
    yield plain | {"mask": False}
    yield plain | {"labels": False}
    yield plain | {"labels": False, "with": ("input_ids", "pixel_values")}
    yield plain | {"labels": False, "time_first": True, "spectrogram": True, "video": True}
