"""Small configurations of Hugging Face models, derived from the fields of their configuration classes.

Nearly all configurations name their sizes alike (`hidden_size`, `num_hidden_layers`), so that a table of patterns makes a
small one of any class: what is a width becomes `Scale.width`, and so on. What patterns cannot know is in `families.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
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


SCALES = (Scale(), Scale(image=64), Scale(width=64), Scale(image=224, patch=32), Scale(width=64, heads=2, image=64, patch=16))
"""Attempts, in order: a class is measured with the first that can be built and trained."""

Rule = tuple[str, Callable[[Any, Scale], Any]]

_INTEGERS: tuple[Rule, ...] = (
    (r"pad_token_id|.*_(bos|eos|pad|start|sep|cls)_token_id|(bos|eos|sep|cls)_token_id", lambda v, s: min(v, 2)),
    (r".*(vocab|vocabulary)_size(_per_layer_input)?|.*num_codes|codebook_size", lambda v, s: s.vocabulary),
    (r"(num|n)_(nextn_predict|mtp).*|.*mtp_layers", lambda v, s: 0),
    (r"first_k_dense_replace|.*num_dense_layers", lambda v, s: min(v, 1)),
    (r"num_kv_shared_layers", lambda v, s: 0),
    (r".*(num|n)_(hidden_)?(layers?|blocks)|.*_layers|layers|depth|num_stages_layers|.*_depth", lambda v, s: min(v, 2)),
    (r"num_hidden_groups", lambda v, s: 1),
    (r".*(num_key_value|kv)_heads|num_kv_heads|n_kv_heads", lambda v, s: v if v < s.heads else s.heads // 2),
    (r"(mamba|linear).*heads|mamba_expand|mamba_num_heads", lambda v, s: min(v, s.heads)),
    (r".*(attention|attn|query|num|n|nb|decoder|encoder)_heads?|.*heads", lambda v, s: min(v, s.heads)),
    (r"qk_rope_head_dim|rotary_dim|.*rope_head_dim", lambda v, s: 4),
    (r"qk_head_dim", lambda v, s: s.width // s.heads + 4),
    (r".*head_dim|.*head_size|d_kv|.*kv_channels|mamba_d_head|.*(key|value)_dim|attention_key_size", lambda v, s: s.width // s.heads),
    (r".*lora_rank|.*_rank|.*lora_dim|.*_dim_rank|gate_rank", lambda v, s: min(v, 8)),
    (r".*(d_state|state_size|ssm_state.*)", lambda v, s: min(v, 8)),
    (r".*chunk_size.*|.*block_size|.*attention_window|.*sliding_window|attention_chunk_size", lambda v, s: min(v, 8)),
    (r".*(intermediate|inner|ffn|ff|mlp|feed_?forward|filter)_?(embed_)?(size|dim|hidden_size)s?|d_ff|n_inner|ffn_dim|d_inner|dim_feedforward|.*ffn_hidden_size|moe_.*size", lambda v, s: 2 * s.width),
    (r"(num|n)_?(local|routed|shared)?_?experts|.*num_experts|num_local_experts|.*n_routed_experts|moe_num_experts", lambda v, s: min(v, 4)),
    (r".*(experts_per_tok|top_?k(_experts)?|experts_per_token|moe_k|moe_topk)", lambda v, s: min(v, 2)),
    (r"n_group|topk_group|n_groups|num_expert_group", lambda v, s: 1),
    (r".*max_(position|source_position|target_position|2d_position).*|n_positions|n_ctx|max_seq_?len.*|seq_length|.*max_position_embeddings|context_length|max_length", lambda v, s: s.positions),
    (r"image_size|img_size|input_size|.*resolution", lambda v, s: s.image),
    (r"patch_size", lambda v, s: min(v, s.patch)),
    (r"num_queries|num_object_queries|num_query_tokens|.*num_proposals|num_latents|.*two_stage_num_proposals", lambda v, s: min(v, 8)),
    (r"num_mel_bins|.*mel_bins|n_mels|feature_size|.*num_mel.*", lambda v, s: 16),
    (r"embedding_size|.*(hidden|embed|embedding|projection|proj|model|out|output|project|feature|text|vision|encoder|decoder|mask_feature|bottleneck|conv|classifier|fusion|neck|pooler_output|word_embed_proj|d_model)_?(dim|size|dims|hidden_size|hidden_dim|channels|features)|d_model|n_embd|dim|hidden_dim|d_embed|d_latents|hidden_channels|width|conv_dim|lru_width|.*hidden_size.*", lambda v, s: min(v, s.width)),
    (r"num_conv_pos_embeddings", lambda v, s: 16),
    (r"num_conv_pos_embedding_groups", lambda v, s: 2),
    (r"num_frames|frames_per_clip", lambda v, s: min(v, 4)),
)


def _halves(value: list[Any], scale: Scale) -> list[Any]:
    """Widths of stages that keep their ratios: the smallest becomes 16."""
    return [max(1, item * 16 // min(value)) if isinstance(item, int) else item for item in value]


_LISTS: tuple[Rule, ...] = (
    (r".*depths?|num_blocks|layers|num_layers|.*layer_numbers?|num_block_repeats|stage_num_blocks", lambda v, s: [1 for _ in v]),
    (r"num_conv_.*|conv_(stride|kernel)", lambda v, s: v),
    (r"conv_dim|tdnn_dim", lambda v, s: [s.width for _ in v]),
    (r"hidden_sizes|embed_dims?|.*channels|.*hidden_dims|.*widths?|.*_dims?|neck_hidden_sizes|.*_sizes|.*num_filters", _halves),
    (r"image_size|img_size|.*input_size", lambda v, s: [s.image for _ in v]),
)


def small_config(config_class: Any, scale: Scale, family: str | None = None) -> Any:
    """A small instance of a configuration class, its parts (`text_config`) included."""
    default = config_class()
    options: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if not field.init or field.name.startswith("_"):
            continue
        value = getattr(default, field.name, None)
        if hasattr(value, "model_type") and hasattr(type(value), "sub_configs"):
            options[field.name] = small_config(type(value), scale)
            continue
        unset = field.default is None
        if not unset or field.name.endswith("_token_id"):
            small = _small_value(field.name, value, scale)
            if small is not value:
                options[field.name] = small
    options |= OPTIONS.get(family or default.model_type, {})
    return config_class(**options)


def _small_value(name: str, value: Any, scale: Scale) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _apply(_INTEGERS, name, value, scale)
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return type(value)(_apply(_LISTS, name, list(value), scale))
    return value


def _apply(rules: tuple[Rule, ...], name: str, value: Any, scale: Scale) -> Any:
    for pattern, rule in rules:
        if re.fullmatch(pattern, name):
            return rule(value, scale)
    return value
