"""Models to cut into pipelines, and what one process makes of the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.zoo import Batch
from wholestep.zoo.huggingface import CLASSES, HF_CASES, VOCABULARY, WIDTH, build, build_bert, build_gpt2


@dataclass(frozen=True)
class PipelineCase:
    """A model with dropout off. It computes its own loss from labels, or they are the target of a loss function."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """What a pipe's step gets."""
        if self.loss_fn is None:
            return dict(batch)
        return {"target" if name == "labels" else name: value for name, value in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss in eager."""
        arguments = self.arguments(batch)
        target = arguments.pop("target", None)
        output = model(**arguments)
        return output.loss if self.loss_fn is None else self.loss_fn(output, target)


def _gpt2(**options: Any) -> nn.Module:
    return without_dropout(build_gpt2(n_layer=4, **options))


def _classifying(model: Any) -> nn.Module:
    """Classifiers of Hugging Face write down in their first forward what they classify, which a pipeline refuses."""
    model.config.problem_type = "single_label_classification"
    return model


def _bert_classifier() -> nn.Module:
    model = build_bert("BertForSequenceClassification", num_hidden_layers=4, num_labels=CLASSES)
    return _classifying(without_dropout(model))


def _mamba() -> nn.Module:
    return build(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=4,
        use_cache=False,
        use_mambapy=False,
        use_associative_scan=False,
    )


def _classified_batch(batch_size: int, seed: int) -> Batch:
    batch = dict(HF_CASES["hf_bert"].make_batch(batch_size, seed))
    generator = torch.Generator().manual_seed(seed)
    return batch | {"labels": torch.randint(CLASSES, (batch_size,), generator=generator)}


def _next_word_loss(output: Any, target: Tensor) -> Tensor:
    logits = output.logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability of dropout at zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _of_zoo(name: str) -> Callable[[], nn.Module]:
    return lambda: without_dropout(HF_CASES[name].build())


_causal_batch = HF_CASES["hf_gpt2"].make_batch

MODELS: dict[str, PipelineCase] = {
    case.name: case
    for case in (
        PipelineCase("gpt2_tied", _gpt2, _causal_batch),
        PipelineCase("gpt2_untied", lambda: _gpt2(tie_word_embeddings=False), _causal_batch),
        PipelineCase("gpt2_loss_fn", _gpt2, _causal_batch, _next_word_loss),
        PipelineCase("llama", _of_zoo("hf_llama"), HF_CASES["hf_llama"].make_batch),
        PipelineCase("bert_mlm", _of_zoo("hf_bert"), HF_CASES["hf_bert"].make_batch),
        PipelineCase("bert_classifier", _bert_classifier, _classified_batch),
        PipelineCase("t5", _of_zoo("hf_t5"), HF_CASES["hf_t5"].make_batch),
        PipelineCase("vit", lambda: _classifying(_of_zoo("hf_vit")()), HF_CASES["hf_vit"].make_batch),
        PipelineCase("mamba", _mamba, _causal_batch),
    )
}

# Schedule, ranks, stages for each rank: what the best-known peer was measured with.
SETUPS: dict[str, tuple[str, int, int]] = {
    "gpipe": ("gpipe", 2, 1),
    "1f1b": ("1f1b", 2, 1),
    "1f1b on 4": ("1f1b", 4, 1),
    "interleaved": ("interleaved-1f1b", 2, 2),
    "interleaved-zb": ("interleaved-zb", 2, 2),
    "zbv": ("zbv", 2, 2),
    "dualpipe-v": ("dualpipe-v", 2, 2),
}


def reference(
    case: PipelineCase, model: nn.Module, batch: Batch, num_micro_batches: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that goes through the micro-batches one by one; the model is left alone."""
    twin = copy.deepcopy(model)
    losses: list[Tensor] = []
    for number in range(num_micro_batches):
        part = {name: value.chunk(num_micro_batches)[number] for name, value in batch.items()}
        loss = case.loss(twin, part)
        (loss / num_micro_batches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean(), {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
