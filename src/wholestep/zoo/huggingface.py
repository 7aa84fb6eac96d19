"""Tiny random-weight Hugging Face models, for checking the compiler against code it was not written for."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.zoo.case import Batch, ZooCase, seeded_generator

VOCABULARY = 64
LENGTH = 12
TARGET_LENGTH = 8
WIDTH = 32
HEADS = 4
LAYERS = 2
DROPOUT = 0.1
CLASSES = 10
IMAGE_SIZE = 16
IGNORED_LABEL = -100


def build(model_class: str, config_class: str, **options: Any) -> nn.Module:
    """A model of `transformers` with random weights, in training mode."""
    # Imported here because it takes seconds and only these cases need it.
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, config_class)(**options)
    model: nn.Module = getattr(transformers, model_class)(config)
    return model.train()


def build_gpt2(**options: Any) -> nn.Module:
    """A GPT-2; `options` are those of its configuration that shall be different."""
    chosen: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "resid_pdrop": DROPOUT,
        "embd_pdrop": DROPOUT,
        "attn_pdrop": DROPOUT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    return build("GPT2LMHeadModel", "GPT2Config", **(chosen | options))


def _build_llama() -> nn.Module:
    return build(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        num_hidden_layers=LAYERS,
        attention_dropout=DROPOUT,
        use_cache=False,
    )


def build_bert(model_class: str = "BertForMaskedLM", **options: Any) -> nn.Module:
    """A BERT with one of its heads; `options` are those of its configuration that shall be different."""
    chosen: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "hidden_dropout_prob": DROPOUT,
        "attention_probs_dropout_prob": DROPOUT,
        "use_cache": False,
    }
    return build(model_class, "BertConfig", **(chosen | options))


def _build_t5() -> nn.Module:
    return build(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_heads=HEADS,
        num_layers=LAYERS,
        dropout_rate=DROPOUT,
        decoder_start_token_id=0,
        use_cache=False,
    )


def _build_vit() -> nn.Module:
    return build(
        "ViTForImageClassification",
        "ViTConfig",
        image_size=IMAGE_SIZE,
        patch_size=4,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        num_labels=CLASSES,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )


def _words(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # Ids 0 and 1 are left to padding, start and mask tokens.
    return torch.randint(2, VOCABULARY, shape, generator=generator)


def _attention_mask(batch_size: int, generator: torch.Generator) -> Tensor:
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch_size, 1), generator=generator)
    return (torch.arange(LENGTH) < lengths).long()


def _causal_batch(batch_size: int, seed: int) -> Batch:
    tokens = _words((batch_size, LENGTH), seeded_generator(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked_batch(batch_size: int, seed: int) -> Batch:
    generator = seeded_generator(seed)
    words = _words((batch_size, LENGTH), generator)
    attention_mask = _attention_mask(batch_size, generator)
    masked = (torch.rand(words.shape, generator=generator) < 0.25) & attention_mask.bool()
    # A batch without any label would have a NaN loss.
    masked[:, 1] = True
    return {
        "input_ids": words.masked_fill(masked, 1),
        "token_type_ids": torch.randint(2, words.shape, generator=generator),
        "attention_mask": attention_mask,
        "labels": words.masked_fill(~masked, IGNORED_LABEL),
    }


def _sequence_batch(batch_size: int, seed: int) -> Batch:
    generator = seeded_generator(seed)
    return {
        "input_ids": _words((batch_size, LENGTH), generator),
        "attention_mask": _attention_mask(batch_size, generator),
        "labels": _words((batch_size, TARGET_LENGTH), generator),
    }


def _image_batch(batch_size: int, seed: int) -> Batch:
    generator = seeded_generator(seed)
    return {
        "pixel_values": torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (batch_size,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss the model computes itself when it is given labels."""
    return model(**batch).loss


HF_CASES: dict[str, ZooCase] = {
    case.name: case
    for case in (
        ZooCase("hf_gpt2", build_gpt2, _causal_batch, loss),
        ZooCase("hf_llama", _build_llama, _causal_batch, loss),
        ZooCase("hf_bert", build_bert, _masked_batch, loss),
        ZooCase("hf_t5", _build_t5, _sequence_batch, loss),
        ZooCase("hf_vit", _build_vit, _image_batch, loss),
    )
}
"""Hugging Face cases by name; `transformers` is needed only once one of them is built."""
