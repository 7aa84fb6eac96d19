# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Recommenders: factors, tables of embeddings, two towers."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import AverageMeter, integers, mlp, normal

KIND = "recommenders"
USERS, ITEMS = 9, 12


class MatrixFactorization(nn.Module):
    """Dot products of factors, with biases."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 6, sparse=sparse), nn.Embedding(ITEMS, 6, sparse=sparse)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1, sparse=sparse), nn.Embedding(ITEMS, 1, sparse=sparse)

    def forward(self, user, item):
        score = (self.user(user) * self.item(item)).sum(1)
        return score + self.user_bias(user).squeeze() + self.item_bias(item).squeeze()


def bpr_world() -> World:
    model = MatrixFactorization()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.001)
    return World(model=model, optimizer=optimizer, count=0, logged=[])


def triples(n):
    return integers(n, USERS, 8), integers(n, ITEMS, 8, seed=51), integers(n, ITEMS, 8, seed=52)


@loop("BPR, matrix factorisation", kind=KIND, source="guoyang9/BPR-pytorch main.py", build=bpr_world, batch=triples)
def bpr(w, user, item_i, item_j):
    w.model.zero_grad()
    prediction_i, prediction_j = w.model(user, item_i), w.model(user, item_j)
    loss = -(prediction_i - prediction_j).sigmoid().log().sum()
    loss.backward()
    w.optimizer.step()
    w.logged.append(("data/loss", loss.item(), w.count))
    w.count += 1


def sparse_world() -> World:
    model = MatrixFactorization(sparse=True)
    return World(model=model, optimizer=torch.optim.SparseAdam(list(model.parameters()), lr=0.01), losses=[])


@loop(
    "sparse embeddings by SparseAdam",
    kind=KIND,
    source="maciejkula/spotlight spotlight/factorization/explicit.py (sparse=True)",
    build=sparse_world,
    batch=lambda n: (integers(n, USERS, 8), integers(n, ITEMS, 8, seed=51), normal(n, 8)),
    between=lambda w, returned, n: w.model.zero_grad(),
)
def sparse_step(w, user, item, rating):
    prediction = w.model(user, item)
    w.optimizer.zero_grad()
    loss = ((rating - prediction) ** 2).mean()
    w.losses.append(loss.item())
    loss.backward()
    w.optimizer.step()


def dense_world() -> World:
    model = MatrixFactorization()
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), losses=[])


edit(
    "sparse embeddings by SparseAdam",
    "`sparse=False` and `Adam`",
    build=dense_world,
)(sparse_step)


class DLRM(nn.Module):
    """Bags of embeddings, a bottom and a top network, interactions by indices that are made in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum", sparse=False) for n in (7, 5)])
        self.bot_l, self.top_l = mlp(3, 6, 4), mlp(4 + 3, 6, 1, last=nn.Sigmoid)

    def apply_emb(self, lS_o, lS_i):
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            ly.append(self.emb_l[k](sparse_index_group_batch, lS_o[k], per_sample_weights=None))
        return ly

    def interact_features(self, x, ly):
        (batch_size, d) = x.shape
        T = torch.cat([x] + ly, dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x] + [Z[:, li, lj]], dim=1)

    def forward(self, dense_x, lS_o, lS_i):
        z = self.top_l(self.interact_features(self.bot_l(dense_x), self.apply_emb(lS_o, lS_i)))
        return torch.clamp(z, min=1e-6, max=1 - 1e-6)


def dlrm_world() -> World:
    dlrm = DLRM()
    optimizer = torch.optim.Adagrad(dlrm.parameters(), lr=0.05)
    return World(
        dlrm=dlrm, optimizer=optimizer, loss_fn=nn.BCELoss(reduction="mean"), total_loss=0, total_samp=0, total_iter=0
    )


def clicks(n):
    offsets = torch.tensor([[0, 2, 3, 4], [0, 1, 3, 5]])
    indices = [integers(n, 7, 6), integers(n, 5, 6, seed=51)]
    return normal(n, 4, 3), offsets, indices, integers(n, 2, 4, 1, seed=53).float()


@loop(
    "DLRM, bags of embeddings",
    kind=KIND,
    source="facebookresearch/dlrm dlrm_s_pytorch.py",
    build=dlrm_world,
    batch=clicks,
)
def dlrm(w, X, lS_o, lS_i, T):
    Z = w.dlrm(X, lS_o, lS_i)
    E = w.loss_fn(Z, T)
    L = E.detach().cpu().numpy()
    w.optimizer.zero_grad()
    E.backward()
    w.optimizer.step()
    w.total_loss += L * X.shape[0]
    w.total_iter += 1
    w.total_samp += X.shape[0]


@edit("DLRM, bags of embeddings", "`E.item()` instead of `E.detach().cpu().numpy()`")
def dlrm_item(w, X, lS_o, lS_i, T):
    Z = w.dlrm(X, lS_o, lS_i)
    E = w.loss_fn(Z, T)
    L = E.item()
    w.optimizer.zero_grad()
    E.backward()
    w.optimizer.step()
    w.total_loss += L * X.shape[0]
    w.total_iter += 1
    w.total_samp += X.shape[0]


def towers_world() -> World:
    towers = nn.ModuleDict({"query": mlp(6, 8, 5), "item": mlp(7, 8, 5)})
    optimizer = torch.optim.Adagrad(towers.parameters(), lr=0.05)
    return World(
        towers=towers,
        optimizer=optimizer,
        log_popularity=torch.randn(ITEMS),
        meter=AverageMeter(),
        recall=AverageMeter(),
    )


@loop(
    "two towers, negatives of the batch",
    kind=KIND,
    source="pytorch/torchrec and tensorflow/recommenders tasks/retrieval.py in torch",
    build=towers_world,
    batch=lambda n: (
        normal(n, 6, 6),
        normal(n, 6, 7, seed=1),
        torch.randperm(ITEMS, generator=torch.Generator().manual_seed(n))[:6],
    ),
)
def towers(w, query, item, item_ids):
    q, i = F.normalize(w.towers["query"](query), dim=-1), F.normalize(w.towers["item"](item), dim=-1)
    scores = q @ i.T / 0.1 - w.log_popularity[item_ids]
    labels = torch.arange(len(query), device=scores.device)
    loss = F.cross_entropy(scores, labels)
    w.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    w.optimizer.step()
    w.meter.update(loss.item(), n=len(query))
    top = scores.topk(3, dim=1).indices
    w.recall.update((top == labels[:, None]).any(dim=1).float().mean().item(), n=len(query))


def ncf_world() -> World:
    model = nn.ModuleDict({"user": nn.Embedding(USERS, 4), "item": nn.Embedding(ITEMS, 4), "mlp": mlp(8, 8, 1)})
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), hits=[], count=0)


@loop(
    "NCF, negatives drawn by NumPy in the step",
    kind=KIND,
    source="hexiangnan/neural_collaborative_filtering in guoyang9/NCF data_utils.py",
    build=ncf_world,
    batch=lambda n: (integers(n, USERS, 4), integers(n, ITEMS, 4, seed=51)),
)
def ncf(w, user, item):
    negatives = torch.from_numpy(np.random.randint(ITEMS, size=8))
    users = torch.cat([user, user.repeat_interleave(2)])
    items = torch.cat([item, negatives])
    labels = torch.cat([torch.ones(4), torch.zeros(8)])
    prediction = w.model["mlp"](torch.cat([w.model["user"](users), w.model["item"](items)], dim=1)).view(-1)
    loss = F.binary_cross_entropy_with_logits(prediction, labels)
    w.model.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.count += 1
    w.hits.append((prediction.detach() > 0).eq(labels.bool()).float().mean().item())


@edit("NCF, negatives drawn by NumPy in the step", "`torch.randint` instead of `np.random.randint`")
def ncf_in_torch(w, user, item):
    negatives = torch.randint(ITEMS, (8,))
    users = torch.cat([user, user.repeat_interleave(2)])
    items = torch.cat([item, negatives])
    labels = torch.cat([torch.ones(4), torch.zeros(8)])
    prediction = w.model["mlp"](torch.cat([w.model["user"](users), w.model["item"](items)], dim=1)).view(-1)
    loss = F.binary_cross_entropy_with_logits(prediction, labels)
    w.model.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.count += 1
    w.hits.append((prediction.detach() > 0).eq(labels.bool()).float().mean().item())
