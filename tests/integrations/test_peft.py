"""LoRA as peft does it, in a plain loop: one capture, the same bits."""

import warnings
from typing import Any

import pytest
import torch
from tests.twins import Twins, World
from torch import Tensor, nn
from torch.optim import Optimizer

pytestmark = pytest.mark.integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


def build(*, checkpoints: bool = False, **options: Any) -> World:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    if checkpoints:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    given = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**given)).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return World(model=model, optimizer=torch.optim.AdamW(parameters, lr=0.01))


def step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "options",
    [{}, {"modules_to_save": ["lm_head"]}, {"checkpoints": True}, {"use_dora": True}, {"use_rslora": True}],
    ids=["LoRA", "modules_to_save", "checkpoints", "DoRA", "rank-stabilised"],
)
def test_adapters_are_trained_in_one_capture(options: dict[str, Any]) -> None:
    twins = Twins(lambda: build(**options), step)
    twins.steps(3, TOKENS)
    assert twins.num_captures == 1, twins.reasons


def test_adapters_are_switched_between_calls() -> None:
    def two() -> World:
        world = build()
        world.model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        world.optimizer = torch.optim.AdamW([p for n, p in world.model.named_parameters() if "lora" in n], lr=0.01)
        return world

    twins = Twins(two, step)
    for name in ("default", "other", "default", "other"):
        twins.change(lambda world, name=name: world.model.set_adapter(name))
        twins.step(TOKENS)
    assert twins.num_captures <= 4, twins.reasons
