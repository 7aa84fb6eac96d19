"""Small configurations of Hugging Face models, derived from the fields of their configuration classes.

Nearly all configurations name their sizes alike (`hidden_size`, `num_hidden_layers`), so that a table of patterns makes
a small one of any class: what is a width becomes `Scale.width`, and so on. What patterns cannot know is in
`families.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from benchmarks.huggingface.families import OPTIONS


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of one attempt."""

    width: int = 32
    heads: int = 4
    image: int = 32
    patch: int = 8
    vocabulary: int = 99
    positions: int = 64
    sections: int = 0
    """Into how many a head is cut for positions in time, height and width."""


SCALES = (
    Scale(),
    Scale(sections=3),
    Scale(image=64),
    Scale(width=64),
    Scale(image=224, patch=32),
    Scale(width=64, heads=2, image=64, patch=16),
)
"""Attempts, in order: a class is measured with the first that can be built and trained."""

Rule = tuple[tuple[str, ...], Callable[[Any, Scale], Any]]


def _at_most(number: int) -> Callable[[Any, Scale], Any]:
    return lambda value, scale: min(value, number)


def _exactly(number: int) -> Callable[[Any, Scale], Any]:
    return lambda value, scale: number


_WIDE = (
    *("hidden", "embed", "emb", "embedding", "projection", "proj", "model", "out", "output", "project", "feature"),
    *("text", "vision", "encoder", "decoder", "mask_feature", "bottleneck", "conv", "classifier", "fusion", "neck"),
    *("pooler_output", "word_embed_proj", "d_model"),
)
_INNER = ("intermediate", "inner", "ffn", "ff", "mlp", "feed_?forward", "filter")

_INTEGERS: tuple[Rule, ...] = (
    ((r"(.*_)?(bos|eos|pad|start|sep|cls)_token_id",), _at_most(2)),
    ((r".*(vocab|vocabulary)_size.*", r".*num_codes", "codebook_size"), lambda value, scale: scale.vocabulary),
    ((r"(num|n)_(nextn_predict|mtp).*", r".*mtp_layers", "num_kv_shared_layers"), _exactly(0)),
    (("first_k_dense_replace", r".*num_dense_layers"), _at_most(1)),
    ((r".*(num|n)_(hidden_)?(layers?|blocks)", r".*_layers", "layers", r"(.*_)?depth"), _at_most(2)),
    (("num_hidden_groups",), _exactly(1)),
    ((r".*kv_heads", r".*key_value_heads"), lambda value, scale: min(value, scale.heads // 2)),
    ((r".*heads?",), lambda value, scale: min(value, scale.heads)),
    ((r".*rope_head_dim", "rotary_dim"), _exactly(4)),
    (
        (r".*head_dim", r".*head_size", "d_kv", r".*kv_channels", "mamba_d_head", r".*(key|value)_dim"),
        lambda value, scale: scale.width // scale.heads,
    ),
    ((r".*_rank", r".*lora_dim"), _at_most(8)),
    ((r".*d_state", r".*state_size"), _at_most(8)),
    ((r".*chunk_size.*", r".*block_size", r".*attention_window", r".*sliding_window"), _at_most(8)),
    (
        (rf".*({'|'.join(_INNER)})_?(embed_)?(size|dim|hidden_size)s?", "d_ff", "n_inner", "d_inner", r"moe_.*size"),
        lambda value, scale: 2 * scale.width,
    ),
    ((r".*experts",), _at_most(4)),
    (("n_group", "topk_group", "n_groups", "num_expert_group"), _exactly(1)),
    ((r".*experts_per_tok(en)?", r".*top_?k.*", "moe_k"), _at_most(2)),
    (("num_groups",), _at_most(4)),
    (
        (r".*max_.*positions?(_embeddings)?", "n_positions", "n_ctx", r"max_seq.*", r"seq_length", "context_length"),
        lambda value, scale: scale.positions,
    ),
    (("max_length",), lambda value, scale: scale.positions),
    (("image_size", "img_size", "input_size", r".*resolution"), lambda value, scale: scale.image),
    (("patch_size",), lambda value, scale: min(value, scale.patch)),
    (("num_queries", "num_object_queries", "num_query_tokens", r".*num_proposals", "num_latents"), _at_most(8)),
    ((r".*mel_bins", "n_mels", "feature_size", r".*num_mel.*"), _exactly(16)),
    (("num_conv_pos_embeddings",), _exactly(16)),
    (("num_conv_pos_embedding_groups",), _exactly(2)),
    (
        (
            rf".*({'|'.join(_WIDE)})_?(dim|size|dims|hidden_size|hidden_dim|channels|features)",
            *(
                "embedding_size",
                "d_model",
                "n_embd",
                "dim",
                "d_embed",
                "d_latents",
                "width",
                "lru_width",
                ".*hidden_size.*",
            ),
        ),
        lambda value, scale: min(value, scale.width),
    ),
    (("num_frames", "frames_per_clip"), _at_most(4)),
)


def _narrow(values: list[Any], scale: Scale) -> list[Any]:
    """Widths of stages that keep their ratios: the smallest becomes 16. Three channels are those of an image."""
    least = min((value for value in values if value > 3), default=1)
    return [value if value <= 3 else value * 16 // least for value in values]


_LISTS: tuple[Rule, ...] = (
    (
        (r".*depths?", "num_blocks", "layers", "num_layers", r"num_block_repeats", "stage_num_blocks"),
        lambda v, s: [1] * len(v),
    ),
    (("conv_dim", "tdnn_dim"), lambda values, scale: [scale.width] * len(values)),
    ((r".*heads",), lambda values, scale: [2] * len(values)),
    (
        (r"(neck_)?hidden_sizes", r".*embed_dims?", r".*channels", r".*hidden_dims", r".*widths?", r".*num_filters"),
        _narrow,
    ),
    (("image_size", "img_size", r".*input_size"), lambda values, scale: [scale.image] * len(values)),
)
_SET_ANYWAY = ("head_dim", "vocab_size")
"""Set although they are None by default."""


def small_config(config_class: Any, scale: Scale) -> Any:
    """A small instance of a configuration class, its parts (`text_config`) included."""
    default = config_class()
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    options: dict[str, Any] = {}
    for name, field in fields.items():
        if not field.init or name.startswith("_"):
            continue
        value = getattr(default, name, None)
        if hasattr(type(value), "sub_configs"):
            options[name] = small_config(type(value), scale)
        elif name == "rope_parameters" and isinstance(value, dict) and scale.sections:
            options[name] = value | {"mrope_section": _sections(scale)}
        elif field.default is not None or name.endswith("_token_id") or name in _SET_ANYWAY:
            small = _small_value(name, 64 if value is None and name in _SET_ANYWAY else value, scale)
            if small is not value:
                options[name] = small
    if "qk_rope_head_dim" in fields:
        options.pop("head_dim", None)
        options["num_key_value_heads"] = scale.heads
    return config_class(**options | OPTIONS.get(default.model_type, {}))


def _sections(scale: Scale) -> list[int]:
    """Half a head, in sections."""
    half = scale.width // scale.heads // 2
    return [half - scale.sections + 1] + [1] * (scale.sections - 1)


def _small_value(name: str, value: Any, scale: Scale) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _apply(_INTEGERS, name, value, scale)
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return type(value)(_apply(_LISTS, name, list(value), scale))
    return value


def _apply(rules: tuple[Rule, ...], name: str, value: Any, scale: Scale) -> Any:
    for patterns, rule in rules:
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            return rule(value, scale)
    return value
