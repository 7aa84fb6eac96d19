"""Language models."""

from __future__ import annotations

import collections
import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, loop
from benchmarks.loops.parts import TinyGPT, tokens, warmup_cosine
from wholestep.zoo.case import seeded_generator


def nanogpt_world() -> World:
    model = TinyGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return World(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        ctx=contextlib.nullcontext(),
        iter_num=0,
        local_iter_num=0,
        decay_lr=True,
        gradient_accumulation_steps=2,
        grad_clip=1.0,
        log_interval=3,
        running_mfu=-1.0,
    )


def micro_batches(number: int) -> tuple[list[tuple[Tensor, Tensor]]]:
    return ([tokens(2 * number), tokens(2 * number + 1)],)


@loop(
    "nanoGPT", kind="language", source="karpathy/nanoGPT train.py", build=nanogpt_world, batch=micro_batches, calls=14
)
def nanogpt(w: World, batches: list[tuple[Tensor, Tensor]]) -> Any:
    lr = warmup_cosine(w.iter_num) if w.decay_lr else 0.01
    for param_group in w.optimizer.param_groups:
        param_group["lr"] = lr
    loss = torch.zeros(())
    for micro_step in range(w.gradient_accumulation_steps):
        x, y = batches[micro_step]
        with w.ctx:
            _, loss = w.model(x, y)
            loss = loss / w.gradient_accumulation_steps
        w.scaler.scale(loss).backward()
    if w.grad_clip != 0.0:
        w.scaler.unscale_(w.optimizer)
        torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.grad_clip)
    w.scaler.step(w.optimizer)
    w.scaler.update()
    w.optimizer.zero_grad(set_to_none=True)
    if w.iter_num % w.log_interval == 0:
        lossf = loss.item() * w.gradient_accumulation_steps
        if w.local_iter_num >= 5:
            mfu = 1e-3 / lr
            w.running_mfu = mfu if w.running_mfu == -1.0 else 0.9 * w.running_mfu + 0.1 * mfu
        print(f"iter {w.iter_num}: loss {lossf:.4f}, mfu {w.running_mfu * 100:.2f}%")
    w.iter_num += 1
    w.local_iter_num += 1


class MinGPTTrainer:
    """The trainer object with callbacks of minGPT."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
        self.device = "cpu"
        self.iter_num = 0
        self.loss: Any = None
        self.callbacks: dict[str, list[Any]] = collections.defaultdict(list)

    def add_callback(self, onevent: str, callback: Any) -> None:
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent: str) -> None:
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run_one(self, batch: tuple[Tensor, Tensor]) -> None:
        batch = [t.to(self.device) for t in batch]  # type: ignore[assignment]
        x, y = batch
        _logits, self.loss = self.model(x, y)
        self.model.zero_grad(set_to_none=True)
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.trigger_callbacks("on_batch_end")
        self.iter_num += 1


def batch_end_callback(trainer: MinGPTTrainer) -> None:
    if trainer.iter_num % 4 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")


def mingpt_world() -> World:
    trainer = MinGPTTrainer(TinyGPT())
    trainer.add_callback("on_batch_end", batch_end_callback)
    return World(trainer=trainer)


@loop("minGPT", kind="language", source="karpathy/minGPT mingpt/trainer.py", build=mingpt_world, batch=tokens)
def mingpt(w: World, x: Tensor, y: Tensor) -> Any:
    w.trainer.run_one((x, y))


class RNNModel(nn.Module):
    """An LSTM over embeddings with dropout."""

    def __init__(self, ntoken: int = 23, ninp: int = 6, nhid: int = 6) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 2, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)
        self.ntoken, self.nhid = ntoken, nhid

    def forward(self, ids: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        emb = self.drop(self.encoder(ids))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, self.nhid), weight.new_zeros(2, bsz, self.nhid)


def repackage_hidden(h: Any) -> Any:
    if isinstance(h, torch.Tensor):
        return h.detach()
    else:
        return tuple(repackage_hidden(v) for v in h)


def rnn_world() -> World:
    model = RNNModel()
    return World(
        model=model, criterion=nn.NLLLoss(), hidden=model.init_hidden(4), total_loss=0.0, lr=0.5, clip=0.25, batch=0
    )


def columns(number: int) -> tuple[Tensor, Tensor]:
    ids, targets = tokens(number, rows=6, length=4)
    return ids, targets.reshape(-1)


@loop(
    "RNN language model",
    kind="language",
    source="pytorch/examples word_language_model/main.py",
    build=rnn_world,
    batch=columns,
)
def rnn_language_model(w: World, data: Tensor, targets: Tensor) -> Any:
    w.model.zero_grad()
    w.hidden = repackage_hidden(w.hidden)
    output, w.hidden = w.model(data, w.hidden)
    loss = w.criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.clip)
    for p in w.model.parameters():
        p.data.add_(p.grad, alpha=-w.lr)
    w.total_loss += loss.item()
    if w.batch % 3 == 0 and w.batch > 0:
        cur_loss = w.total_loss / 3
        print(f"| {w.batch:5d} batches | lr {w.lr:02.2f} | loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}")
        w.total_loss = 0
    w.batch += 1


class SkipGram(nn.Module):
    """Skip-gram with negative sampling."""

    def __init__(self, vocabulary: int = 23, dim: int = 6, sparse: bool = False) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(vocabulary, dim, sparse=sparse)
        self.v_embeddings = nn.Embedding(vocabulary, dim, sparse=sparse)
        nn.init.uniform_(self.u_embeddings.weight.data, -1.0 / dim, 1.0 / dim)
        nn.init.constant_(self.v_embeddings.weight.data, 0)

    def forward(self, pos_u: Tensor, pos_v: Tensor, neg_v: Tensor) -> Tensor:
        emb_u, emb_v, emb_neg_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v), self.v_embeddings(neg_v)
        score = torch.clamp(torch.sum(torch.mul(emb_u, emb_v), dim=1), max=10, min=-10)
        score = -F.logsigmoid(score)
        neg_score = torch.clamp(torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze(), max=10, min=-10)
        neg_score = -torch.sum(F.logsigmoid(-neg_score), dim=1)
        return torch.mean(score + neg_score)


def skip_gram_world() -> World:
    model = SkipGram()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return World(model=model, optimizer=optimizer, scheduler=scheduler, running_loss=0.0, i=0, device="cpu")


def skip_gram_batch(number: int) -> tuple[list[Tensor]]:
    generator = seeded_generator(number)
    return ([torch.randint(23, shape, generator=generator) for shape in ((6,), (6,), (6, 5))],)


@loop(
    "skip-gram",
    kind="language",
    source="Andras7/word2vec-pytorch word2vec/trainer.py",
    build=skip_gram_world,
    batch=skip_gram_batch,
)
def skip_gram(w: World, sample_batched: list[Tensor]) -> Any:
    if len(sample_batched[0]) > 1:
        pos_u = sample_batched[0].to(w.device)
        pos_v = sample_batched[1].to(w.device)
        neg_v = sample_batched[2].to(w.device)
        w.scheduler.step()
        w.optimizer.zero_grad()
        loss = w.model.forward(pos_u, pos_v, neg_v)
        loss.backward()
        w.optimizer.step()
        w.running_loss = w.running_loss * 0.9 + loss.item() * 0.1
        if w.i > 0 and w.i % 5 == 0:
            print(" Loss: " + str(w.running_loss))
    w.i += 1
