# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Gradients of samples, of gradients, of tasks that come one after the other."""

from __future__ import annotations

import copy
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import integers, mlp, normal

SAMPLES, META, CONTINUAL = "per-sample gradients", "meta-learning", "continual learning"


def labelled(n):
    return normal(n, 6, 10), integers(n, 4, 6)


def private_world() -> World:
    model = mlp(10, 8, 4)
    return World(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_norm=0.5, sigma=0.8, losses=[], norms=[]
    )


@loop(
    "DP-SGD, vmap of grad",
    kind=SAMPLES,
    source="pytorch/tutorials intermediate_source/per_sample_grads.py",
    build=private_world,
    batch=labelled,
)
def dp_sgd(w, data, targets):
    params = {k: v.detach() for k, v in w.model.named_parameters()}
    buffers = {k: v.detach() for k, v in w.model.named_buffers()}

    def compute_loss(params, buffers, sample, target):
        batch = sample.unsqueeze(0)
        targets = target.unsqueeze(0)
        predictions = functional_call(w.model, (params, buffers), (batch,))
        return F.cross_entropy(predictions, targets)

    ft_compute_sample_grad = vmap(grad(compute_loss), in_dims=(None, None, 0, 0))
    per_sample_grads = ft_compute_sample_grad(params, buffers, data, targets)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample_grads.values()], dim=1).norm(dim=1)
    factor = (w.max_norm / (norms + 1e-6)).clamp(max=1.0)
    for name, p in w.model.named_parameters():
        summed = torch.einsum("i,i...", factor, per_sample_grads[name])
        noise = torch.normal(mean=0, std=w.sigma * w.max_norm, size=p.shape)
        p.grad = (summed + noise) / len(data)
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.norms.append(norms.mean().item())


def hooked_world() -> World:
    world = private_world()
    kept = {}

    def keep_input(module, args, output):
        kept[module] = args[0].detach()

    def keep_samples(module, grad_input, grad_output):
        a, b = kept.pop(module), grad_output[0] * grad_output[0].shape[0]
        for p, sample in ((module.weight, torch.einsum("n...i,n...j->nij", b, a)), (module.bias, b)):
            p.grad_sample = sample

    for module in world.model:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep_input)
            module.register_full_backward_hook(keep_samples)
    return world


@loop(
    "DP-SGD, samples kept by hooks",
    kind=SAMPLES,
    source="pytorch/opacus opacus/optimizers/optimizer.py",
    build=hooked_world,
    batch=labelled,
)
def opacus(w, images, target):
    w.optimizer.zero_grad()
    output = w.model(images)
    loss = F.cross_entropy(output, target)
    preds = np.array([0])
    w.losses.append(loss.item())
    loss.backward()
    params = [p for p in w.model.parameters() if p.requires_grad]
    per_param_norms = [p.grad_sample.reshape(len(p.grad_sample), -1).norm(2, dim=-1) for p in params]
    per_sample_norms = torch.stack(per_param_norms, dim=1).norm(2, dim=1)
    per_sample_clip_factor = (w.max_norm / (per_sample_norms + 1e-6)).clamp(max=1.0)
    for p in params:
        summed_grad = torch.einsum("i,i...", per_sample_clip_factor, p.grad_sample)
        noise = torch.normal(mean=0, std=w.sigma * w.max_norm, size=summed_grad.shape)
        p.grad = (summed_grad + noise).view_as(p) / len(images)
        p.grad_sample = None
    w.optimizer.step()
    return len(preds)


class Meta(nn.Module):
    """MAML: weights that were updated in the step, and gradients through their updates."""

    def __init__(self, first_order: bool = False) -> None:
        super().__init__()
        self.net = mlp(5, 8, 3)
        self.meta_optim = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.update_lr, self.update_step = 0.1, 3

    def apply_net(self, x, vars):
        x = F.linear(x, vars[0], vars[1])
        return F.linear(F.relu(x), vars[2], vars[3])

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        task_num, querysz = x_spt.size(0), x_qry.size(1)
        losses_q = [0 for _ in range(self.update_step + 1)]
        corrects = [0 for _ in range(self.update_step + 1)]
        for i in range(task_num):
            logits = self.net(x_spt[i])
            loss = F.cross_entropy(logits, y_spt[i])
            grad = torch.autograd.grad(loss, self.net.parameters(), create_graph=True)
            fast_weights = list(map(lambda p: p[1] - self.update_lr * p[0], zip(grad, self.net.parameters())))
            with torch.no_grad():
                logits_q = self.apply_net(x_qry[i], list(self.net.parameters()))
                losses_q[0] += F.cross_entropy(logits_q, y_qry[i])
                pred_q = F.softmax(logits_q, dim=1).argmax(dim=1)
                correct = torch.eq(pred_q, y_qry[i]).sum().item()
                corrects[0] = corrects[0] + correct
            for k in range(1, self.update_step):
                logits = self.apply_net(x_spt[i], fast_weights)
                loss = F.cross_entropy(logits, y_spt[i])
                grad = torch.autograd.grad(loss, fast_weights, create_graph=True)
                fast_weights = list(map(lambda p: p[1] - self.update_lr * p[0], zip(grad, fast_weights)))
                logits_q = self.apply_net(x_qry[i], fast_weights)
                loss_q = F.cross_entropy(logits_q, y_qry[i])
                losses_q[k + 1] += loss_q
                with torch.no_grad():
                    pred_q = F.softmax(logits_q, dim=1).argmax(dim=1)
                    correct = torch.eq(pred_q, y_qry[i]).sum().item()
                    corrects[k + 1] = corrects[k + 1] + correct
        loss_q = losses_q[-1] / task_num
        self.meta_optim.zero_grad()
        loss_q.backward()
        self.meta_optim.step()
        return self.accuracies(corrects, querysz * task_num)

    def accuracies(self, corrects, number):
        return np.array(corrects) / number


def episodes(n):
    return normal(n, 2, 4, 5), integers(n, 3, 2, 4), normal(n, 2, 6, 5, seed=1), integers(n, 3, 2, 6, seed=51)


@loop(
    "MAML, second order, accuracies in NumPy",
    kind=META,
    source="dragen1860/MAML-Pytorch meta.py",
    build=lambda: World(maml=Meta(), accs=[]),
    batch=episodes,
)
def maml(w, x_spt, y_spt, x_qry, y_qry):
    accs = w.maml(x_spt, y_spt, x_qry, y_qry)
    w.accs.append(accs)


class MetaInPython(Meta):
    """The same; accuracies are divided one by one."""

    def accuracies(self, corrects, number):
        return [correct / number for correct in corrects]


@edit(
    "MAML, second order, accuracies in NumPy",
    "`[c / n for c in corrects]` instead of `np.array(corrects) / n`",
    build=lambda: World(maml=MetaInPython(), accs=[]),
)
def maml_in_python(w, x_spt, y_spt, x_qry, y_qry):
    w.accs.append(w.maml(x_spt, y_spt, x_qry, y_qry))


def reptile_world() -> World:
    model = mlp(5, 8, 3)
    return World(
        model=model, fast=copy.deepcopy(model), innerstepsize=0.02, outerstepsize0=0.1, niterations=20, iteration=0
    )


@loop(
    "Reptile, a copy trained by hand",
    kind=META,
    source="openai/supervised-reptile as in the blog post (reptile_sinewaves_demo.py)",
    build=reptile_world,
    batch=lambda n: (normal(n, 6, 5), normal(n, 6, 3, seed=1)),
)
def reptile(w, x, y):
    weights_before = {name: value.clone() for name, value in w.model.state_dict().items()}
    for start in range(0, len(x), 2):
        w.model.zero_grad()
        loss = (w.model(x[start : start + 2]) - y[start : start + 2]).pow(2).mean()
        loss.backward()
        for param in w.model.parameters():
            param.data -= w.innerstepsize * param.grad.data
    weights_after = w.model.state_dict()
    outerstepsize = w.outerstepsize0 * (1 - w.iteration / w.niterations)
    w.model.load_state_dict(
        {
            name: weights_before[name] + (weights_after[name] - weights_before[name]) * outerstepsize
            for name in weights_before
        }
    )
    w.iteration += 1


class EWC:
    """Means and precisions of the task before, by name."""

    def __init__(self, model, dataset) -> None:
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._means = {n: p.data.clone() for n, p in deepcopy(self.params).items()}
        self._precision_matrices = {n: torch.zeros_like(p.data) for n, p in self.params.items()}
        for sample in dataset:
            model.zero_grad()
            output = model(sample).view(1, -1)
            F.nll_loss(F.log_softmax(output, dim=1), output.max(1)[1].view(-1)).backward()
            for n, p in model.named_parameters():
                self._precision_matrices[n].data += p.grad.data**2 / len(dataset)

    def penalty(self, model):
        loss = 0
        for n, p in model.named_parameters():
            _loss = self._precision_matrices[n] * (p - self._means[n]) ** 2
            loss += _loss.sum()
        return loss


def ewc_world() -> World:
    model = mlp(10, 8, 4)
    ewc = EWC(model, [torch.randn(1, 10) for _ in range(4)])
    return World(model=model, ewc=ewc, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), epoch_loss=0)


@loop(
    "EWC, a penalty by name", kind=CONTINUAL, source="moskomule/ewc.pytorch utils.py", build=ewc_world, batch=labelled
)
def ewc(w, input, target):
    w.model.train()
    w.optimizer.zero_grad()
    output = w.model(input)
    loss = F.cross_entropy(output, target) + 1000.0 * w.ewc.penalty(w.model)
    w.epoch_loss += loss.item()
    loss.backward()
    w.optimizer.step()


def lwf_world() -> World:
    model = mlp(10, 8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return World(
        model=model,
        model_old=copy.deepcopy(model).eval(),
        optimizer=optimizer,
        lamb=1.0,
        T=2,
        seen=4,
        correct=0,
        total=0,
    )


@loop(
    "LwF, outputs of the old model",
    kind=CONTINUAL,
    source="mmasana/FACIL src/approach/lwf.py",
    build=lwf_world,
    batch=lambda n: (normal(n, 6, 10), integers(n, 2, 6) + 4),
)
def lwf(w, images, targets):
    targets_old = None
    if w.seen > 0:
        with torch.no_grad():
            targets_old = w.model_old(images)[:, : w.seen]
    outputs = w.model(images)
    out = F.softmax(outputs[:, : w.seen], dim=1)
    tar = F.softmax(targets_old, dim=1)
    out, tar = out.pow(1 / w.T), tar.pow(1 / w.T)
    out, tar = out / out.sum(1).view(-1, 1).expand_as(out), tar / tar.sum(1).view(-1, 1).expand_as(tar)
    ce = -(tar * out.log()).sum(1)
    loss = w.lamb * ce.mean()
    loss += F.cross_entropy(outputs[:, w.seen :], targets - w.seen)
    w.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), 10000)
    w.optimizer.step()
    hits_taw = (outputs[:, w.seen :].argmax(1) + w.seen == targets).float()
    w.correct += torch.sum(hits_taw).item()
    w.total += len(targets)


class Buffer:
    """Of mammoth: a reservoir of examples, filled by draws of NumPy."""

    def __init__(self, buffer_size) -> None:
        self.buffer_size, self.num_seen_examples = buffer_size, 0
        self.examples, self.labels = torch.zeros(buffer_size, 10), torch.zeros(buffer_size, dtype=torch.long)

    def add_data(self, examples, labels):
        for i in range(examples.shape[0]):
            index = self.reservoir()
            self.num_seen_examples += 1
            if index >= 0:
                self.examples[index] = examples[i]
                self.labels[index] = labels[i]

    def reservoir(self):
        if self.num_seen_examples < self.buffer_size:
            return self.num_seen_examples
        rand = np.random.randint(0, self.num_seen_examples + 1)
        return rand if rand < self.buffer_size else -1

    def get_data(self, size):
        choice = np.random.choice(min(self.num_seen_examples, self.buffer_size), size=size, replace=False)
        return self.examples[choice], self.labels[choice]


def replay_world() -> World:
    model = mlp(10, 8, 4)
    return World(net=model, opt=torch.optim.SGD(model.parameters(), lr=0.05), buffer=Buffer(10), minibatch_size=4)


@loop(
    "experience replay, a reservoir drawn by NumPy",
    kind=CONTINUAL,
    source="aimagelab/mammoth models/er.py",
    build=replay_world,
    batch=labelled,
)
def replay(w, inputs, labels):
    real_inputs, real_labels = inputs, labels
    w.opt.zero_grad()
    if w.buffer.num_seen_examples >= w.minibatch_size:
        buf_inputs, buf_labels = w.buffer.get_data(w.minibatch_size)
        inputs = torch.cat((inputs, buf_inputs))
        labels = torch.cat((labels, buf_labels))
    outputs = w.net(inputs)
    loss = F.cross_entropy(outputs, labels)
    loss.backward()
    w.opt.step()
    w.buffer.add_data(examples=real_inputs, labels=real_labels)
    return loss.item()
