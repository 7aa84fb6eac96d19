"""Hugging Face models with attention masks: the ops of eager, and its bits, whatever the mask is (S13)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import Twins, World
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep
from wholestep._torch import TorchDispatchMode
from wholestep.zoo import huggingface
from wholestep.zoo.huggingface import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, build

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "use_cache": False,
}
GROUPED: dict[str, Any] = COMMON | {"num_key_value_heads": HEADS // 2, "pad_token_id": 0}

# Without dropout in attention, which would send it to kernels that take any mask.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: huggingface.build_gpt2(attn_pdrop=0.0),
    "llama": lambda: build("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "bert": lambda: huggingface.build_bert(attention_probs_dropout_prob=0.0),
    "t5": lambda: huggingface.HF_CASES["hf_t5"].build(),
    "mistral": lambda: build("MistralForCausalLM", "MistralConfig", sliding_window=None, **GROUPED),
    "qwen2": lambda: build("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
}


def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss


def batch_of(seed: int, num_padded: int, *, is_left: bool = False) -> dict[str, Tensor]:
    """Three sequences, of which the first is padded."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(words)
    if num_padded:
        mask[0, : num_padded if is_left else None] = 0
        mask[0, num_padded if is_left else 0 : None if is_left else -num_padded] = 1
    return {"input_ids": words, "attention_mask": mask, "labels": words.clone()}


# All words count, twice; padding on the right; all count; padding on the left; another padding.
BATCHES = [batch_of(0, 0), batch_of(1, 0), batch_of(2, 3), batch_of(3, 0), batch_of(4, 2, is_left=True), batch_of(5, 4)]


def builder(name: str, dtype: torch.dtype) -> Callable[[], World]:
    def make() -> World:
        model = MODELS[name]().to(dtype)
        return World(model=model, optimizer=AdamW(model.parameters(), lr=1e-3, fused=True))

    return make


class _Operators(TorchDispatchMode):
    """Counts operators of attention with the values of their options."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen[_described(func, args, kwargs or {})] += 1
        return func(*args, **(kwargs or {}))


def _described(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """An operator, what its tensors are like, and its options."""
    if not any(word in str(func) for word in ("attention", "softmax", "bmm")):
        return ""
    shapes = [tuple(a.shape) for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    options = [a for a in args if isinstance(a, (bool, float))]
    return f"{func} {shapes} {options} { {k: v for k, v in kwargs.items() if isinstance(v, (bool, float))} }"


def operators_of(run: Callable[..., Any], *args: Any) -> Counter[str]:
    with _Operators() as operators:
        run(*args)
    operators.seen.pop("", None)
    return operators.seen


def assert_like_eager(name: str, dtype: torch.dtype, **options: Any) -> None:
    twins = Twins(builder(name, dtype), train_step, **options)
    for batch in BATCHES:
        twins.step(batch)
    assert twins.num_captures == 2, twins.reasons
    world = builder(name, dtype)()
    expected = operators_of(train_step, world.model, world.optimizer, BATCHES[0])
    found = operators_of(twins.compiled, twins.worlds[1].model, twins.worlds[1].optimizer, BATCHES[0])
    assert expected
    assert found == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float32), ("llama", torch.bfloat16)])
def test_the_ops_and_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    assert_like_eager(name, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic_batch", ["auto", True])
def test_the_ops_and_bits_of_eager_for_every_model(name: str, dtype: torch.dtype, dynamic_batch: Any) -> None:
    assert_like_eager(name, dtype, dynamic_batch=dynamic_batch)


def autocast_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss


def masters_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """The optimizer has copies of the parameters in float32."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    masters = optimizer.param_groups[0]["params"]
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk_loss", [None, 2])
@pytest.mark.parametrize(
    ("step", "dtype"),
    [(train_step, torch.bfloat16), (autocast_step, torch.float32), (masters_step, torch.bfloat16)],
    ids=["bfloat16", "autocast", "masters"],
)
def test_verify_passes_in_low_precision(name: str, chunk_loss: int | None, step: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    copies = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = AdamW(copies if step is masters_step else model.parameters(), lr=1e-3, fused=True)
    compiled = wholestep.compile(step, verify=2, chunk_loss=chunk_loss)
    for batch in (BATCHES[0], BATCHES[2]):
        compiled(model, optimizer, batch)  # pyright: ignore[reportCallIssue]


def test_transformers_does_not_know_that_it_is_captured() -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> tuple[Tensor, bool]:
        from transformers.utils import import_utils

        return train_step(model, optimizer, batch), import_utils.is_tracing(batch["attention_mask"])

    world = builder("gpt2", torch.float32)()
    _, is_tracing = wholestep.compile(step)(world.model, world.optimizer, BATCHES[0])
    assert is_tracing is False
