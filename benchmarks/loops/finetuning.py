# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Finetuning a part: LoRA by hand and by peft, adapters, prompts, fake quantisation."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import AverageMeter, integers, normal
from benchmarks.loops.rlhf import VOCAB, TinyLM

KIND = "finetuning"


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def tokens(n):
    ids = integers(n, VOCAB, 3, 6)
    return ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},)


def peft_world(make_config) -> World:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(tiny_llama(), make_config(peft))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return World(model=model, optimizer=optimizer, total_loss=0, step=0)


def lora_world() -> World:
    return peft_world(
        lambda peft: peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
        )
    )


def prompt_world() -> World:
    return peft_world(lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def peft_step(w, batch):
    batch = {k: v.to("cpu") for k, v in batch.items()}
    outputs = w.model(**batch)
    loss = outputs.loss
    w.total_loss += loss.detach().float()
    loss.backward()
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.step += 1
    if w.step % 4 == 0:
        print(f"{w.step=}: {w.total_loss / w.step:.4f}")


for _name, _build in (("LoRA by peft", lora_world), ("prompt tuning by peft", prompt_world)):
    loop(
        _name,
        kind=KIND,
        source="huggingface/peft examples/conditional_generation/peft_lora_seq2seq.ipynb",
        build=_build,
        batch=tokens,
        calls=6,
    )(peft_step)


@edit("LoRA by peft", "`model.get_base_model()(**batch)` instead of `model(**batch)`")
def lora_inside(w, batch):
    outputs = w.model.get_base_model()(**batch)
    loss = outputs.loss
    w.total_loss += loss.detach().float()
    loss.backward()
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.step += 1
    if w.step % 4 == 0:
        print(f"{w.step=}: {w.total_loss / w.step:.4f}")


class LoRALinear(nn.Linear):
    """Of loralib: merges its update into the weight in eval mode, and takes it out again in train mode."""

    def __init__(self, in_features, out_features, r=2, lora_alpha=4, lora_dropout=0.1) -> None:
        super().__init__(in_features, out_features)
        self.lora_dropout = nn.Dropout(p=lora_dropout) if lora_dropout > 0.0 else lambda x: x
        self.lora_A = nn.Parameter(torch.randn(r, in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(out_features, r))
        self.scaling, self.merged, self.merge_weights, self.r = lora_alpha / r, False, True, r
        self.weight.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        if mode and self.merge_weights and self.merged:
            self.weight.data -= (self.lora_B @ self.lora_A) * self.scaling
            self.merged = False
        elif not mode and self.merge_weights and not self.merged:
            self.weight.data += (self.lora_B @ self.lora_A) * self.scaling
            self.merged = True
        return self

    def forward(self, x):
        if self.r > 0 and not self.merged:
            result = F.linear(x, self.weight, bias=self.bias)
            return (
                result
                + (self.lora_dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling
            )
        return F.linear(x, self.weight, bias=self.bias)


def loralib_world() -> World:
    model = nn.Sequential(LoRALinear(10, 8), nn.Tanh(), LoRALinear(8, 4))
    for name, p in model.named_parameters():
        if "lora_" not in name:
            p.requires_grad = False
    params = [p for p in model.parameters() if p.requires_grad]
    return World(model=model, optimizer=torch.optim.AdamW(params, lr=1e-2), avg_lm_loss=AverageMeter(), val=[])


@torch.no_grad()
def validate(w, returned, n) -> None:
    if n % 3 == 2:
        w.model.eval()
        w.val.append(w.model(normal(99, 2, 10)).sum().item())
        w.model.train()


@loop(
    "LoRA by hand, merged for validation",
    kind=KIND,
    source="microsoft/LoRA examples/NLG/src/gpt2_ft.py",
    build=loralib_world,
    batch=lambda n: (normal(n, 6, 10), integers(n, 4, 6)),
    between=validate,
)
def loralib(w, x, y):
    loss = F.cross_entropy(w.model(x), y).mean()
    is_update = True
    if is_update:
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in w.model.parameters() if p.requires_grad], 1.0)
        w.optimizer.step()
        w.optimizer.zero_grad()
    w.avg_lm_loss.update(loss.item())


class Adapter(nn.Module):
    """A bottleneck beside a frozen layer."""

    def __init__(self, layer, width, bottleneck=3) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        x = self.layer(x)
        return x + self.up(F.gelu(self.down(x)))


def adapter_world() -> World:
    model = TinyLM().requires_grad_(False)
    model.block.linear2 = Adapter(model.block.linear2, 8)
    model.block.linear2.down.requires_grad_(True)
    model.block.linear2.up.requires_grad_(True)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    return World(model=model, optimizer=optimizer, tr_loss=0.0, logging_loss=0.0, global_step=0)


@loop(
    "adapters in a frozen model, accumulated",
    kind=KIND,
    source="google-research/adapter-bert as in huggingface/transformers run_glue.py of 2019",
    build=adapter_world,
    batch=lambda n: (integers(n, VOCAB, 3, 6), n),
)
def adapters(w, input_ids, step):
    w.model.train()
    logits = w.model(input_ids).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), input_ids[:, 1:].reshape(-1))
    loss = loss / 2
    loss.backward()
    w.tr_loss += loss.item()
    if (step + 1) % 2 == 0:
        torch.nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
        w.optimizer.step()
        w.model.zero_grad()
        w.global_step += 1
        if w.global_step % 2 == 0:
            loss_scalar = (w.tr_loss - w.logging_loss) / 2
            w.logging_loss = w.tr_loss
            print({"loss": loss_scalar, "step": w.global_step})


class Round(torch.autograd.Function):
    """Rounds, and lets gradients through where nothing was clipped."""

    @staticmethod
    def forward(ctx, x, scale, low, high):
        scaled = x / scale
        ctx.save_for_backward((scaled >= low) & (scaled <= high))
        return scaled.round().clamp(low, high) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None


class QuantLinear(nn.Linear):
    """Weights by their largest value, activations by a moving range that is set at the first batch."""

    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.register_buffer("range", torch.zeros(()))
        self.first = True

    def forward(self, x):
        if self.training:
            largest = x.detach().abs().max()
            if self.first:
                self.range.copy_(largest)
                self.first = False
            else:
                self.range.mul_(0.9).add_(largest, alpha=0.1)
        weight = Round.apply(self.weight, self.weight.detach().abs().max() / 127, -128, 127)
        return F.linear(Round.apply(x, self.range / 127, -128, 127), weight, self.bias)


def qat_world() -> World:
    model = nn.Sequential(QuantLinear(10, 8), nn.ReLU(), QuantLinear(8, 4))
    return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), losses=AverageMeter())


@loop(
    "quantisation-aware, straight-through by hand",
    kind=KIND,
    source="Xilinx/brevitas and zhutmost/lsq-net (process.py)",
    build=qat_world,
    batch=lambda n: (normal(n, 6, 10), integers(n, 4, 6)),
)
def qat(w, inputs, targets):
    outputs = w.model(inputs)
    loss = F.cross_entropy(outputs, targets)
    w.losses.update(loss.item(), inputs.size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
