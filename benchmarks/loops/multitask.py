# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Several tasks at once; clients that train apart."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import integers, mlp, normal

KIND = "several tasks"


class TwoTasks(nn.Module):
    """A shared layer and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.task1, self.task2 = mlp(10, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x):
        hidden = torch.relu(self.shared(x))
        return self.task1(hidden), self.task2(hidden)


def tasks(n):
    return normal(n, 6, 10), normal(n, 6, 3, seed=1), normal(n, 6, 3, seed=2)


def uncertainty_world() -> World:
    model = TwoTasks()
    model.log_vars = nn.Parameter(torch.zeros(2))
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), loss_list=[])


@loop(
    "weights by uncertainty",
    kind=KIND,
    source="yaringal/multi-task-learning-example multi-task-learning-example-pytorch.ipynb",
    build=uncertainty_world,
    batch=tasks,
)
def uncertainty(w, x, y1, y2):
    outputs = w.model(x)
    loss = 0
    for index, target in enumerate((y1, y2)):
        precision = torch.exp(-w.model.log_vars[index])
        diff = (outputs[index] - target) ** 2.0
        loss += torch.sum(precision * diff + w.model.log_vars[index], -1)
    loss = torch.mean(loss)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.loss_list.append(loss.item() / 6)
    return [np.exp(0.5) * 1.0, loss.item()]


def gradnorm_world() -> World:
    model = TwoTasks()
    model.weights = nn.Parameter(torch.ones(2))
    return World(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        alpha=0.12,
        t=0,
        initial_task_loss=None,
        weights=[],
    )


@loop(
    "GradNorm, initial losses in NumPy",
    kind=KIND,
    source="brianlan/pytorch-grad-norm train.py",
    build=gradnorm_world,
    batch=tasks,
)
def gradnorm(w, x, y1, y2):
    model = w.model
    outputs = model(x)
    task_loss = torch.stack([F.mse_loss(outputs[0], y1), F.mse_loss(outputs[1], y2)])
    weighted_task_loss = torch.mul(model.weights, task_loss)
    if w.t == 0:
        w.initial_task_loss = task_loss.data.cpu().numpy()
    loss = torch.sum(weighted_task_loss)
    w.optimizer.zero_grad()
    loss.backward(retain_graph=True)
    model.weights.grad.data = model.weights.grad.data * 0.0
    W = model.shared[0]
    norms = []
    for i in range(len(task_loss)):
        gygw = torch.autograd.grad(task_loss[i], W.parameters(), retain_graph=True)
        norms.append(torch.norm(torch.mul(model.weights[i], gygw[0])))
    norms = torch.stack(norms)
    loss_ratio = task_loss.data.cpu().numpy() / w.initial_task_loss
    inverse_train_rate = loss_ratio / np.mean(loss_ratio)
    mean_norm = np.mean(norms.data.cpu().numpy())
    constant_term = torch.tensor(mean_norm * (inverse_train_rate**w.alpha), requires_grad=False)
    grad_norm_loss = torch.sum(torch.abs(norms - constant_term))
    model.weights.grad = torch.autograd.grad(grad_norm_loss, model.weights)[0]
    w.optimizer.step()
    normalize_coeff = 2 / torch.sum(model.weights.data, dim=0)
    model.weights.data = model.weights.data * normalize_coeff
    w.weights.append(model.weights.data.cpu().numpy())
    w.t += 1


@edit(
    "GradNorm, initial losses in NumPy",
    "`.data.clone()` instead of `.data.cpu().numpy()`, `torch.mean` instead of `np.mean`",
)
def gradnorm_in_torch(w, x, y1, y2):
    model = w.model
    outputs = model(x)
    task_loss = torch.stack([F.mse_loss(outputs[0], y1), F.mse_loss(outputs[1], y2)])
    weighted_task_loss = torch.mul(model.weights, task_loss)
    if w.t == 0:
        w.initial_task_loss = task_loss.data.clone()
    loss = torch.sum(weighted_task_loss)
    w.optimizer.zero_grad()
    loss.backward(retain_graph=True)
    model.weights.grad.data = model.weights.grad.data * 0.0
    W = model.shared[0]
    norms = []
    for i in range(len(task_loss)):
        gygw = torch.autograd.grad(task_loss[i], W.parameters(), retain_graph=True)
        norms.append(torch.norm(torch.mul(model.weights[i], gygw[0])))
    norms = torch.stack(norms)
    loss_ratio = task_loss.data / w.initial_task_loss
    inverse_train_rate = loss_ratio / loss_ratio.mean()
    constant_term = norms.data.mean() * (inverse_train_rate**w.alpha)
    grad_norm_loss = torch.sum(torch.abs(norms - constant_term))
    model.weights.grad = torch.autograd.grad(grad_norm_loss, model.weights)[0]
    w.optimizer.step()
    normalize_coeff = 2 / torch.sum(model.weights.data, dim=0)
    model.weights.data = model.weights.data * normalize_coeff
    w.weights.append(model.weights.data.clone())
    w.t += 1


class PCGrad:
    """Projects away what conflicts between the gradients of tasks, which it takes in random order."""

    def __init__(self, optimizer) -> None:
        self._optim = optimizer

    def pc_backward(self, objectives):
        grads, shapes, has_grads = self._pack_grad(objectives)
        pc_grad = self._project_conflicting(grads, has_grads)
        idx = 0
        for group in self._optim.param_groups:
            for p in group["params"]:
                length = int(np.prod(shapes[0][idx]))
                p.grad, pc_grad = pc_grad[:length].view(shapes[0][idx]).clone(), pc_grad[length:]
                idx += 1

    def _project_conflicting(self, grads, has_grads):
        shared = torch.stack(has_grads).prod(0).bool()
        pc_grad = copy.deepcopy(grads)
        for g_i in pc_grad:
            random.shuffle(grads)
            for g_j in grads:
                g_i_g_j = torch.dot(g_i, g_j)
                if g_i_g_j < 0:
                    g_i -= (g_i_g_j) * g_j / (g_j.norm() ** 2)
        merged_grad = torch.zeros_like(grads[0]).to(grads[0].device)
        merged_grad[shared] = torch.stack([g[shared] for g in pc_grad]).mean(dim=0)
        merged_grad[~shared] = torch.stack([g[~shared] for g in pc_grad]).sum(dim=0)
        return merged_grad

    def _pack_grad(self, objectives):
        grads, shapes, has_grads = [], [], []
        for obj in objectives:
            self._optim.zero_grad(set_to_none=True)
            obj.backward(retain_graph=True)
            parameters = [p for group in self._optim.param_groups for p in group["params"]]
            grad = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
            has_grad = [torch.zeros_like(p) if p.grad is None else torch.ones_like(p) for p in parameters]
            grads.append(torch.cat([g.flatten() for g in grad]))
            has_grads.append(torch.cat([g.flatten() for g in has_grad]))
            shapes.append([p.shape for p in parameters])
        return grads, shapes, has_grads


def pcgrad_world() -> World:
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return World(model=model, optimizer=optimizer, pcgrad=PCGrad(optimizer))


@loop(
    "PCGrad, branches on conflicts",
    kind=KIND,
    source="WeiChengTseng/Pytorch-PCGrad pcgrad.py",
    build=pcgrad_world,
    batch=tasks,
)
def pcgrad(w, x, y1, y2):
    out1, out2 = w.model(x)
    w.optimizer.zero_grad()
    w.pcgrad.pc_backward([F.l1_loss(out1, y1), F.mse_loss(out2, y2)])
    w.optimizer.step()


@edit(
    "PCGrad, branches on conflicts",
    "`.clamp(max=0)` on the dot product instead of the `if`, a fixed order, `torch.where` instead of masks",
)
def pcgrad_selected(w, x, y1, y2):
    out1, out2 = w.model(x)
    w.optimizer.zero_grad()
    grads, shapes, has_grads = w.pcgrad._pack_grad([F.l1_loss(out1, y1), F.mse_loss(out2, y2)])
    shared = torch.stack(has_grads).prod(0).bool()
    pc_grad = [g.clone() for g in grads]
    for g_i in pc_grad:
        for g_j in grads:
            g_i -= torch.dot(g_i, g_j).clamp(max=0) * g_j / (g_j.norm() ** 2)
    merged_grad = torch.where(shared, torch.stack(pc_grad).mean(dim=0), torch.stack(pc_grad).sum(dim=0))
    for p, shape in zip(w.model.parameters(), shapes[0]):
        p.grad, merged_grad = merged_grad[: shape.numel()].view(shape).clone(), merged_grad[shape.numel() :]
    w.optimizer.step()


def client_world() -> World:
    model = mlp(10, 12, 4)
    return World(
        model=model,
        global_model=copy.deepcopy(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        mu=0.1,
        batch_loss=[],
        epoch_loss=[],
        iter=0,
    )


def average_clients(w, returned, n) -> None:
    if n % 3 == 2:
        w.global_model.load_state_dict(copy.deepcopy(w.model.state_dict()))
        w.epoch_loss.append(sum(w.batch_loss) / len(w.batch_loss))
        w.batch_loss = []


@loop(
    "FedProx, a local step",
    kind="federated",
    source="ki-ljl/FedProx-PyTorch client.py",
    build=client_world,
    batch=lambda n: (normal(n, 6, 10), integers(n, 4, 6)),
    between=average_clients,
)
def fedprox(w, images, labels):
    w.model.zero_grad()
    log_probs = F.log_softmax(w.model(images), dim=1)
    proximal_term = 0.0
    for local, fixed in zip(w.model.parameters(), w.global_model.parameters()):
        proximal_term += (local - fixed).norm(2)
    loss = F.nll_loss(log_probs, labels) + (w.mu / 2) * proximal_term
    loss.backward()
    w.optimizer.step()
    if w.iter % 3 == 0:
        print(f"Local Epoch : {w.iter // 3} | [{w.iter * len(images)}/{60}]\tLoss: {loss.item():.6f}")
    w.iter += 1
    w.batch_loss.append(loss.item())


def drifting_world() -> World:
    world = client_world()
    world.c_global = {name: torch.zeros_like(p) for name, p in world.model.named_parameters()}
    world.c_local = {name: torch.full_like(p, 0.01) for name, p in world.model.named_parameters()}
    return world


@loop(
    "SCAFFOLD, gradients corrected by hand",
    kind="federated",
    source="Xtra-Computing/NIID-Bench experiments.py",
    build=drifting_world,
    batch=lambda n: (normal(n, 6, 10), integers(n, 4, 6)),
)
def scaffold(w, x, target):
    w.optimizer.zero_grad()
    x.requires_grad = False
    target.requires_grad = False
    target = target.long()
    loss = F.cross_entropy(w.model(x), target)
    loss.backward()
    w.optimizer.step()
    net_para = w.model.state_dict()
    for key in net_para:
        net_para[key] = net_para[key] - 0.05 * (w.c_global[key] - w.c_local[key])
    w.model.load_state_dict(net_para)
    w.batch_loss.append(loss.item())
