# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Learning from preferences."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, loop
from benchmarks.loops.pieces import integers, normal

KIND = "preferences"
VOCAB = 11


class TinyLM(nn.Module):
    """A causal language model of one attention layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, width), nn.Embedding(16, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def features(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.embed(input_ids) + self.position(torch.arange(length))
        return self.block(hidden, src_mask=causal, src_key_padding_mask=padding)

    def forward(self, input_ids, attention_mask=None):
        return World(logits=self.lm_head(self.features(input_ids, attention_mask)))


def pad_to_length(tensor, length, pad_value, dim=-1):
    if tensor.size(dim) >= length:
        return tensor
    pad_size = list(tensor.shape)
    pad_size[dim] = length - tensor.size(dim)
    return torch.cat([tensor, pad_value * torch.ones(*pad_size, dtype=tensor.dtype)], dim=dim)


def concatenated_inputs(batch):
    max_length = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    concatenated_batch = {}
    for k in batch:
        if k.startswith("chosen") and isinstance(batch[k], torch.Tensor):
            pad_value = -100 if "labels" in k else 0
            concatenated_key = k.replace("chosen", "concatenated")
            concatenated_batch[concatenated_key] = pad_to_length(batch[k], max_length, pad_value=pad_value)
    for k in batch:
        if k.startswith("rejected") and isinstance(batch[k], torch.Tensor):
            pad_value = -100 if "labels" in k else 0
            concatenated_key = k.replace("rejected", "concatenated")
            concatenated_batch[concatenated_key] = torch.cat(
                (concatenated_batch[concatenated_key], pad_to_length(batch[k], max_length, pad_value=pad_value)), dim=0
            )
    return concatenated_batch


def _get_batch_logps(logits, labels):
    assert logits.shape[:-1] == labels.shape
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1)


def concatenated_forward(model, batch):
    concatenated_batch = concatenated_inputs(batch)
    all_logits = model(
        concatenated_batch["concatenated_input_ids"], attention_mask=concatenated_batch["concatenated_attention_mask"]
    ).logits.to(torch.float32)
    all_logps = _get_batch_logps(all_logits, concatenated_batch["concatenated_labels"])
    size = batch["chosen_input_ids"].shape[0]
    return all_logps[:size], all_logps[size:]


def dpo_world() -> World:
    policy = TinyLM()
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-4)
    return World(
        policy=policy,
        reference_model=copy.deepcopy(policy).eval(),
        optimizer=optimizer,
        beta=0.1,
        batch_metrics=defaultdict(list),
        example_counter=0,
        batch_counter=0,
    )


def preferences(n):
    batch = {}
    for kind, length in (("chosen", 7), ("rejected", 6)):
        ids = integers(n, VOCAB, 3, length, seed=len(kind))
        labels = ids.clone()
        labels[:, :3] = -100
        batch |= {
            f"{kind}_input_ids": ids,
            f"{kind}_attention_mask": torch.ones_like(ids),
            f"{kind}_labels": labels,
        }
    return (batch,)


def dpo_losses(w, batch):
    policy_chosen_logps, policy_rejected_logps = concatenated_forward(w.policy, batch)
    with torch.no_grad():
        reference_chosen_logps, reference_rejected_logps = concatenated_forward(w.reference_model, batch)
    logits = (policy_chosen_logps - policy_rejected_logps) - (reference_chosen_logps - reference_rejected_logps)
    losses = -F.logsigmoid(w.beta * logits)
    chosen_rewards = w.beta * (policy_chosen_logps - reference_chosen_logps).detach()
    rejected_rewards = w.beta * (policy_rejected_logps - reference_rejected_logps).detach()
    return losses, chosen_rewards, rejected_rewards, policy_chosen_logps


def dpo_update(w, losses, metrics):
    for k, v in metrics.items():
        w.batch_metrics[k].extend(v)
    losses.mean().backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(w.policy.parameters(), 10.0).item()
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.batch_metrics["grad_norm"].append(grad_norm)
    w.batch_counter += 1
    w.example_counter += 3


@loop(
    "DPO, metrics by .numpy().tolist()",
    kind=KIND,
    source="eric-mitchell/direct-preference-optimization trainers.py",
    build=dpo_world,
    batch=preferences,
)
def dpo(w, batch):
    metrics = {}
    losses, chosen_rewards, rejected_rewards, chosen_logps = dpo_losses(w, batch)
    reward_accuracies = (chosen_rewards > rejected_rewards).float()
    metrics["rewards_train/chosen"] = chosen_rewards.cpu().numpy().tolist()
    metrics["rewards_train/rejected"] = rejected_rewards.cpu().numpy().tolist()
    metrics["rewards_train/accuracies"] = reward_accuracies.cpu().numpy().tolist()
    metrics["rewards_train/margins"] = (chosen_rewards - rejected_rewards).cpu().numpy().tolist()
    metrics["logps_train/chosen"] = chosen_logps.detach().cpu().numpy().tolist()
    metrics["loss/train"] = losses.detach().cpu().numpy().tolist()
    dpo_update(w, losses, metrics)


def grpo_world() -> World:
    model = TinyLM()
    return World(
        model=model,
        ref_model=copy.deepcopy(model).eval().requires_grad_(False),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        args=World(beta=0.04, epsilon=0.2, num_generations=3, accumulation=2),
        _metrics={"train": defaultdict(list)},
        metrics=defaultdict(list),
        state=World(global_step=0),
        micro=0,
    )


def completions(n):
    mask = (torch.arange(5)[None] < (2 + integers(n, 4, 6, seed=9))[:, None]).int()
    return integers(n, VOCAB, 6, 4), integers(n, VOCAB, 6, 5, seed=8), mask, normal(n, 6)


@loop(
    "GRPO, accumulated",
    kind=KIND,
    source="huggingface/trl trl/trainer/grpo_trainer.py",
    build=grpo_world,
    batch=completions,
)
def grpo(w, prompt_ids, completion_ids, completion_mask, rewards):
    mean_grouped_rewards = (
        rewards.view(-1, w.args.num_generations).mean(dim=1).repeat_interleave(w.args.num_generations, dim=0)
    )
    std_grouped_rewards = (
        rewards.view(-1, w.args.num_generations).std(dim=1).repeat_interleave(w.args.num_generations, dim=0)
    )
    advantages = (rewards - mean_grouped_rewards) / (std_grouped_rewards + 1e-4)
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)

    def per_token_logps_of(model):
        logits = model(input_ids).logits[:, :-1, :][:, -completion_ids.size(1) :]
        return torch.gather(logits.log_softmax(-1), dim=-1, index=completion_ids.unsqueeze(-1)).squeeze(-1)

    per_token_logps = per_token_logps_of(w.model)
    with torch.inference_mode():
        ref_per_token_logps = per_token_logps_of(w.ref_model)
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    old_per_token_logps = per_token_logps.detach()
    coef_1 = torch.exp(per_token_logps - old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 1 - w.args.epsilon, 1 + w.args.epsilon)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    per_token_loss = per_token_loss + w.args.beta * per_token_kl
    loss = ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()
    (loss / w.args.accumulation).backward()
    w.micro += 1
    if w.micro % w.args.accumulation == 0:
        w.metrics["grad_norm"].append(nn.utils.clip_grad_norm_(w.model.parameters(), 1.0).item())
        w.optimizer.step()
        w.optimizer.zero_grad()
        w.state.global_step += 1
    completion_length = completion_mask.sum(1).float().mean().item()
    w.metrics["completions/mean_length"].append(completion_length)
    mean_kl = ((per_token_kl * completion_mask).sum() / completion_mask.sum()).item()
    w.metrics["kl"].append(mean_kl)
    w.metrics["reward"].append(rewards.mean().item())
    w.metrics["reward_std"].append(std_grouped_rewards.mean().item())
    return loss.detach()


class RewardModel(TinyLM):
    """A score of the last token that is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        logits = self.score(self.features(input_ids))
        sequence_lengths = torch.eq(input_ids, 0).int().argmax(-1) - 1
        sequence_lengths = sequence_lengths % input_ids.shape[-1]
        return logits[torch.arange(input_ids.shape[0]), sequence_lengths]


def reward_world() -> World:
    model = RewardModel()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return World(model=model, optimizer=optimizer, correct=0, seen=0, step=0)


@loop(
    "reward model, pairs",
    kind=KIND,
    source="huggingface/trl trl/trainer/reward_trainer.py",
    build=reward_world,
    batch=preferences,
)
def reward(w, inputs):
    rewards_chosen = w.model(inputs["chosen_input_ids"], attention_mask=inputs["chosen_attention_mask"])
    rewards_rejected = w.model(inputs["rejected_input_ids"], attention_mask=inputs["rejected_attention_mask"])
    loss = -nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()
    loss = loss + 0.01 * torch.mean((rewards_chosen + rewards_rejected) ** 2)
    w.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    w.optimizer.step()
    w.correct += (rewards_chosen > rewards_rejected).sum().item()
    w.seen += len(rewards_chosen)
    w.step += 1
    if w.step % 4 == 0:
        print(f"step {w.step} loss {loss.item():.4f} accuracy {w.correct / w.seen:.3f}")
    return {"loss": loss, "rewards_chosen": rewards_chosen, "rewards_rejected": rewards_rejected}
