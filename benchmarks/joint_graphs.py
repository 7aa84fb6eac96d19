"""Joint graphs of well-known models, captured without allocating a weight, and what a cut of one needs.

Graphs are what `torch.compile` hands to its partitioner: Dynamo's capture, AOTAutograd's joint trace, Inductor's
decompositions. `memory_of` walks a pair of forward and backward graphs and counts live bytes; upstream's pairs and ours
are counted by the same code.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.cost import node_flops
from wholestep.cost.memory import storage_bytes, tensors_in

INPUT = "input"
Build = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class JointGraph:
    """A joint graph and what a partitioner is told with it."""

    name: str
    module: fx.GraphModule
    num_fwd_outputs: int
    static_indices: Any

    def clone(self) -> fx.GraphModule:
        """A copy for partitioners that change what they are given."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        returned = graph.graph_copy(self.module.graph, copied)
        [output] = self.module.graph.find_nodes(op="output")
        graph.output(returned).meta = copy.copy(output.meta)
        clone = fx.GraphModule(self.module, graph)
        clone.meta = copy.copy(self.module.meta)
        return clone


class _LanguageModel(nn.Module):
    def __init__(self, model: nn.Module, *, shifted: bool) -> None:
        super().__init__()
        self.model, self.shifted = model, shifted

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        extra = {"use_cache": False} if self.shifted else {}
        logits = self.model(input_ids=ids, return_dict=False, **extra)[0]
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(pixel_values=images, return_dict=False)[0], labels)


def _tokens(vocabulary: int, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, vocabulary, (batch, length))


def _images(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))


def gpt2(layers: int, width: int, vocabulary: int, batch: int, length: int, dropout: float = 0.0) -> Build:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=width // 64, n_positions=length, vocab_size=vocabulary,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        return _LanguageModel(GPT2LMHeadModel(config), shifted=True), _tokens(vocabulary, batch, length)

    return build


def llama(layers: int, width: int, vocabulary: int, batch: int, length: int) -> Build:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64,
            num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), vocab_size=vocabulary,
            max_position_embeddings=length,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        return _LanguageModel(LlamaForCausalLM(config), shifted=True), _tokens(vocabulary, batch, length)

    return build


def bert(layers: int, batch: int, length: int) -> Build:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        config._attn_implementation = "sdpa"
        return _LanguageModel(BertForMaskedLM(config), shifted=False), _tokens(config.vocab_size, batch, length)

    return build


def _thousand_classes(config: Any) -> Any:
    config.num_labels = 1000
    return config


def resnet50(batch: int) -> Build:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        from transformers import ResNetConfig, ResNetForImageClassification

        return _Classifier(ResNetForImageClassification(_thousand_classes(ResNetConfig()))), _images(batch)

    return build


def vit(layers: int, batch: int) -> Build:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        from transformers import ViTConfig, ViTForImageClassification

        config = _thousand_classes(ViTConfig(num_hidden_layers=layers, hidden_dropout_prob=0.0))
        config._attn_implementation = "sdpa"
        return _Classifier(ViTForImageClassification(config)), _images(batch)

    return build


MODELS: dict[str, Build] = {
    "BERT-base, 8x512": bert(12, 8, 512),
    "GPT-2, 12 layers, 8x1024": gpt2(12, 768, 50257, 8, 1024),
    "GPT-2, 24 layers, 4x512": gpt2(24, 256, 5000, 4, 512),
    "Llama, 16 layers, 2x512": llama(16, 256, 5000, 2, 512),
    "ResNet-50, 32x224x224": resnet50(32),
    "ViT-base, 32x224x224": vit(12, 32),
}


def capture_joint(name: str, build: Build) -> JointGraph:
    """Trace a model's joint graph under fake tensors."""
    import torch._inductor.lowering  # decompositions look it up lazily
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()
    torch.manual_seed(0)
    found: list[JointGraph] = []

    class Found(Exception):
        pass

    def record(module: fx.GraphModule, _inputs: Any, **given: Any) -> Any:
        found.append(JointGraph(name, module, given["num_fwd_outputs"], given.get("static_lifetime_input_indices")))
        raise Found

    # Initialisers look at values, which fake tensors do not have.
    no_init = mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with no_init, mode:
        model, inputs = build()
        model.train()
        backend = aot_autograd(
            fw_compiler=lambda module, _: module,
            bw_compiler=lambda module, _: module,
            partition_fn=record,
            decompositions=select_decomp_table(),
        )
        with contextlib.suppress(Exception):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    if not found:
        raise RuntimeError(f"{name} could not be captured")
    return found[0]


@dataclass(frozen=True)
class PairMemory:
    """Live bytes of a forward and backward graph without parameters and inputs, and the flops of both."""

    forward_peak_bytes: int
    backward_peak_bytes: int
    saved_bytes: int
    flops: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


def memory_of(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> PairMemory:
    """Run both graphs in thought: a storage lives from its node to the last use of any view of it."""
    resident = {key for node in forward.graph.find_nodes(op="placeholder") for key, _ in _storages(node)}
    [output] = forward.graph.find_nodes(op="output")
    saved = {
        key: num_bytes
        for item in output.args[0][num_fwd_outputs:]
        if isinstance(item, fx.Node)
        for key, num_bytes in _storages(item)
        if key not in resident
    }
    return PairMemory(
        _peak_bytes(forward.graph, resident, {}),
        _peak_bytes(backward.graph, resident, _entering(backward.graph, resident)),
        sum(saved.values()),
        sum(node_flops(node) for module in (forward, backward) for node in module.graph.nodes),
    )


def _entering(graph: fx.Graph, resident: set[Any]) -> dict[Any, int]:
    return {
        key: num_bytes
        for node in graph.find_nodes(op="placeholder")
        for key, num_bytes in _storages(node)
        if key not in resident
    }


def _storages(node: fx.Node) -> list[tuple[Any, int]]:
    tensors: Iterable[torch.Tensor] = tensors_in(node.meta.get("val")) if node.op != "output" else ()
    return [(tensor.untyped_storage()._cdata, storage_bytes(tensor)) for tensor in tensors]


def _peak_bytes(graph: fx.Graph, resident: set[Any], entering: dict[Any, int]) -> int:
    """What runs twice in one graph has the same fake value twice: instances are told apart by their makers."""
    nodes = list(graph.nodes)
    held: dict[fx.Node, tuple[Any, ...]] = {}
    num_bytes: dict[Any, int] = {}
    last: dict[Any, int] = {}
    made: list[list[Any]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        inherited = {key[0]: key for source in node.all_input_nodes for key in held.get(source, ())}
        keys: list[Any] = []
        for storage, size in _storages(node):
            if storage in resident:
                continue
            key = inherited.get(storage)
            if key is None:
                key = (storage, INPUT if node.op == "placeholder" else node.name)
                num_bytes[key] = size
                made[index].append(key)
            keys.append(key)
        held[node] = tuple(keys)
        for key in (*keys, *(key for source in node.all_input_nodes for key in held.get(source, ()))):
            last[key] = index
    dying: dict[int, list[Any]] = {}
    for key, index in last.items():
        dying.setdefault(index, []).append(key)
    live = peak = sum(entering.values())
    for index, node in enumerate(nodes):
        if node.op != "placeholder":
            live += sum(num_bytes[key] for key in made[index])
            peak = max(peak, live)
            live -= sum(num_bytes[key] for key in dying.get(index, ()))
    return peak
