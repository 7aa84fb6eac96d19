"""What patterns cannot know: options of some families of models, by `model_type`."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "funnel": {"block_sizes": [1, 1, 1]},
    "speech-encoder-decoder": {},
}
