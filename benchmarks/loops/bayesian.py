# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Distributions over weights and outputs, and regularisers that draw."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import AverageMeter, integers, mlp, normal

KIND, REGULAR = "Bayesian", "regularisers"


def labelled(n):
    return normal(n, 6, 10), integers(n, 4, 6)


class BayesLinear(nn.Module):
    """A mean and a deviation for each weight; keeps the divergence of its last draw."""

    def __init__(self, n_in, n_out) -> None:
        super().__init__()
        self.W_mu = nn.Parameter(torch.empty(n_in, n_out).uniform_(-0.1, 0.1))
        self.W_p = nn.Parameter(torch.empty(n_in, n_out).uniform_(-3, -2))
        self.lqw = 0
        self.lpw = 0

    def forward(self, X, sample=True):
        if not self.training and not sample:
            return torch.mm(X, self.W_mu)
        eps_W = torch.autograd.Variable(self.W_mu.data.new(self.W_mu.size()).normal_())
        std_w = 1e-6 + F.softplus(self.W_p, beta=1, threshold=20)
        W = self.W_mu + 1 * std_w * eps_W
        self.lqw = (-0.5 * math.log(2 * math.pi) - torch.log(std_w) - 0.5 * ((W - self.W_mu) / std_w) ** 2).sum()
        self.lpw = (-0.5 * math.log(2 * math.pi) - 0.5 * W**2).sum()
        return torch.mm(X, W)


class BayesNet(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bfc1, self.bfc2 = BayesLinear(10, 8), BayesLinear(8, 4)

    def forward(self, x):
        out = self.bfc2(F.relu(self.bfc1(x)))
        return out, self.bfc1.lqw + self.bfc2.lqw, self.bfc1.lpw + self.bfc2.lpw


def bayes_world() -> World:
    model = BayesNet()
    return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), Nbatches=10, kl=[])


@loop(
    "Bayes by backprop, several draws",
    kind=KIND,
    source="JavierAntoran/Bayesian-Neural-Networks src/Bayes_By_Backprop/model.py",
    build=bayes_world,
    batch=labelled,
)
def bayes(w, x, y):
    w.optimizer.zero_grad()
    mlpdw_cum = 0
    Edkl_cum = 0
    for _ in range(2):
        out, tlqw, tlpw = w.model(x)
        Edkl_cum = Edkl_cum + (tlqw - tlpw) / w.Nbatches
        mlpdw_cum = mlpdw_cum + F.cross_entropy(out, y, reduction="sum")
    loss = Edkl_cum / 2 + mlpdw_cum / 2
    loss.backward()
    w.optimizer.step()
    err = out.max(dim=1, keepdim=False)[1].ne(y).sum()
    w.kl.append((Edkl_cum.data / 2).item())
    return err


class SGLD(torch.optim.Optimizer):
    """Gradient steps with noise as large as the step asks for."""

    def __init__(self, params, lr=1e-2, norm_sigma=0.1, addnoise=True) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=1 / (norm_sigma**2), addnoise=addnoise))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d_p = p.grad.data
                if group["weight_decay"] != 0:
                    d_p.add_(p.data, alpha=group["weight_decay"])
                if group["addnoise"]:
                    langevin_noise = p.data.new(p.data.size()).normal_(mean=0, std=1) / np.sqrt(group["lr"])
                    p.data.add_(0.5 * d_p + langevin_noise, alpha=-group["lr"])
                else:
                    p.data.add_(0.5 * d_p, alpha=-group["lr"])


def sgld_world() -> World:
    model = mlp(10, 8, 4)
    return World(model=model, optimizer=SGLD(model.parameters(), lr=1e-4), weight_set_samples=[], N_train=60, it=0)


def keep_sample(w, returned, n) -> None:
    w.it += 1
    if n % 3 == 2:
        w.weight_set_samples.append({name: value.clone() for name, value in w.model.state_dict().items()})


@loop(
    "SGLD, noise in the optimizer",
    kind=KIND,
    source="JavierAntoran/Bayesian-Neural-Networks src/Stochastic_Gradient_Langevin_Dynamics/optimizers.py",
    build=sgld_world,
    batch=labelled,
    between=keep_sample,
)
def sgld(w, x, y):
    w.optimizer.zero_grad()
    out = w.model(x)
    loss = F.cross_entropy(out, y, reduction="mean")
    loss = loss * w.N_train
    loss.backward()
    w.optimizer.step()
    pred = out.data.max(dim=1, keepdim=False)[1]
    err = pred.ne(y.data).sum()
    return loss.data * x.shape[0] / w.N_train, err


def mdn_world() -> World:
    model = nn.ModuleDict({"z_h": mlp(1, 8), "pi": nn.Linear(8, 3), "sigma": nn.Linear(8, 3), "mu": nn.Linear(8, 3)})
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), epoch=0)


@loop(
    "a mixture density network",
    kind=KIND,
    source="hardmaru/pytorch_notebooks mixture_density_networks.ipynb",
    build=mdn_world,
    batch=lambda n: (normal(n, 8, 1), normal(n, 8, 1, seed=1)),
)
def mdn(w, x_variable, y_variable):
    z_h = torch.tanh(w.model["z_h"](x_variable))
    pi = F.softmax(w.model["pi"](z_h), -1)
    sigma, mu = torch.exp(w.model["sigma"](z_h)), w.model["mu"](z_h)
    result = (y_variable.expand_as(mu) - mu) * torch.reciprocal(sigma)
    result = -0.5 * (result * result)
    result = (torch.exp(result) * torch.reciprocal(sigma)) * (1.0 / np.sqrt(2.0 * np.pi))
    result = -torch.log(torch.sum(result * pi, dim=1))
    loss = torch.mean(result)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.epoch % 4 == 0:
        print(w.epoch, loss.data.tolist())
    w.epoch += 1


def gaussian_world() -> World:
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), history=[])


@loop(
    "MC dropout, uncertainty of several forwards in the step",
    kind=KIND,
    source="yaringal/DropoutUncertaintyExps (in torch, as in its ports)",
    build=gaussian_world,
    batch=lambda n: (normal(n, 6, 10), normal(n, 6, seed=1)),
)
def mc_dropout(w, x, y):
    w.model.train()
    mean, log_var = w.model(x).unbind(-1)
    loss = torch.distributions.Normal(mean, (0.5 * log_var).exp()).log_prob(y).neg().mean()
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    with torch.no_grad():
        samples = torch.stack([w.model(x)[:, 0] for _ in range(4)])
    w.history.append({"nll": loss.item(), "epistemic": samples.std(0).mean().item()})


def net_world() -> World:
    net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return World(
        net=net,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        train_loss=0,
        correct=0,
        total=0,
        beta=1.0,
        cutmix_prob=0.6,
    )


@loop("R-Drop", kind=REGULAR, source="dropreg/R-Drop vit_src/train.py", build=net_world, batch=labelled)
def r_drop(w, x, y):
    logits, logits2 = w.net(x), w.net(x)
    ce_loss = 0.5 * (w.criterion(logits, y) + w.criterion(logits2, y))
    p_loss = F.kl_div(F.log_softmax(logits, dim=-1), F.softmax(logits2, dim=-1), reduction="none")
    q_loss = F.kl_div(F.log_softmax(logits2, dim=-1), F.softmax(logits, dim=-1), reduction="none")
    loss = ce_loss + 0.3 * (p_loss.sum() + q_loss.sum()) / 2
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.net.parameters(), 1.0)
    w.optimizer.step()
    w.optimizer.zero_grad()
    w.train_loss += loss.item()


def mixup_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    batch_size = x.size()[0]
    index = torch.randperm(batch_size)
    mixed_x = lam * x + (1 - lam) * x[index, :]
    y_a, y_b = y, y[index]
    return mixed_x, y_a, y_b, lam


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


@loop(
    "mixup, drawn by NumPy",
    kind=REGULAR,
    source="facebookresearch/mixup-cifar10 train.py",
    build=net_world,
    batch=labelled,
)
def mixup(w, inputs, targets):
    inputs, targets_a, targets_b, lam = mixup_data(inputs, targets, 1.0)
    inputs, targets_a, targets_b = map(torch.autograd.Variable, (inputs, targets_a, targets_b))
    outputs = w.net(inputs)
    loss = mixup_criterion(w.criterion, outputs, targets_a, targets_b, lam)
    w.train_loss += loss.item()
    _, predicted = torch.max(outputs.data, 1)
    w.total += targets.size(0)
    w.correct += (
        lam * predicted.eq(targets_a.data).cpu().sum().float()
        + (1 - lam) * predicted.eq(targets_b.data).cpu().sum().float()
    )
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()


def rand_bbox(size, lam):
    W, H = size[2], size[3]
    cut_rat = np.sqrt(1.0 - lam)
    cut_w, cut_h = int(W * cut_rat), int(H * cut_rat)
    cx, cy = np.random.randint(W), np.random.randint(H)
    bbx1, bby1 = np.clip(cx - cut_w // 2, 0, W), np.clip(cy - cut_h // 2, 0, H)
    bbx2, bby2 = np.clip(cx + cut_w // 2, 0, W), np.clip(cy + cut_h // 2, 0, H)
    return bbx1, bby1, bbx2, bby2


def conv_world() -> World:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
    return World(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        criterion=nn.CrossEntropyLoss(),
        losses=AverageMeter(),
    )


def pictures(n):
    return normal(n, 4, 3, 8, 8), integers(n, 4, 4)


@loop(
    "CutMix, a box drawn by NumPy",
    kind=REGULAR,
    source="clovaai/CutMix-PyTorch train.py",
    build=conv_world,
    batch=pictures,
)
def cutmix(w, input, target):
    r = np.random.rand(1)
    if r < 0.6:
        lam = np.random.beta(1.0, 1.0)
        rand_index = torch.randperm(input.size()[0])
        target_a, target_b = target, target[rand_index]
        bbx1, bby1, bbx2, bby2 = rand_bbox(input.size(), lam)
        input[:, :, bbx1:bbx2, bby1:bby2] = input[rand_index, :, bbx1:bbx2, bby1:bby2]
        lam = 1 - ((bbx2 - bbx1) * (bby2 - bby1) / (input.size()[-1] * input.size()[-2]))
        output = w.model(input)
        loss = w.criterion(output, target_a) * lam + w.criterion(output, target_b) * (1.0 - lam)
    else:
        output = w.model(input)
        loss = w.criterion(output, target)
    w.losses.update(loss.item(), input.size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()


def draw_box(w, *_) -> None:
    """Whether and where the next batch is cut, as a mask."""
    w.lam, mask = 1.0, torch.zeros(8, 8, dtype=torch.bool)
    if np.random.rand(1) < 0.6:
        bbx1, bby1, bbx2, bby2 = rand_bbox((4, 3, 8, 8), np.random.beta(1.0, 1.0))
        mask[bbx1:bbx2, bby1:bby2] = True
        w.lam = 1 - ((bbx2 - bbx1) * (bby2 - bby1) / 64)
    w.mask, w.rand_index = mask, torch.randperm(4)


def boxed_world() -> World:
    world = conv_world()
    draw_box(world)
    return world


@edit(
    "CutMix, a box drawn by NumPy",
    "draw before the step, pass the box as a mask: `torch.where(mask, input[index], input)`",
    between=draw_box,
    build=boxed_world,
)
def cutmix_masked(w, input, target):
    output = w.model(torch.where(w.mask, input[w.rand_index], input))
    loss = w.criterion(output, target) * w.lam + w.criterion(output, target[w.rand_index]) * (1.0 - w.lam)
    w.losses.update(loss.item(), input.size(0))
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()


class StochasticBlock(nn.Module):
    """A residual block that is left out with a probability, the whole batch at once."""

    def __init__(self, survival) -> None:
        super().__init__()
        self.layer, self.survival = nn.Linear(8, 8), survival

    def forward(self, x):
        if self.training:
            if torch.equal(torch.bernoulli(torch.tensor([self.survival])), torch.ones(1)):
                return x + F.relu(self.layer(x))
            return x
        return x + self.survival * F.relu(self.layer(x))


def depth_world() -> World:
    net = nn.Sequential(nn.Linear(10, 8), StochasticBlock(0.8), StochasticBlock(0.6), nn.Linear(8, 4))
    return World(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), train_loss=0)


@loop(
    "stochastic depth, blocks left out by a draw",
    kind=REGULAR,
    source="shamangary/Pytorch-Stochastic-Depth-Resnet TYY_stodepth_lineardecay.py",
    build=depth_world,
    batch=labelled,
    calls=12,
)
def stochastic_depth(w, x, y):
    w.optimizer.zero_grad()
    loss = F.cross_entropy(w.net(x), y)
    loss.backward()
    w.optimizer.step()
    w.train_loss += loss.item()


class GatedBlock(StochasticBlock):
    """The same; the draw is a factor."""

    def forward(self, x):
        if self.training:
            return x + torch.bernoulli(torch.tensor([self.survival])) * F.relu(self.layer(x))
        return x + self.survival * F.relu(self.layer(x))


def gated_world() -> World:
    net = nn.Sequential(nn.Linear(10, 8), GatedBlock(0.8), GatedBlock(0.6), nn.Linear(8, 4))
    return World(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), train_loss=0)


edit(
    "stochastic depth, blocks left out by a draw",
    "multiply with the draw: `x + torch.bernoulli(p) * f(x)` instead of the `if`",
    build=gated_world,
)(stochastic_depth)


def spectral_world() -> World:
    spectral = nn.utils.parametrizations.spectral_norm
    net = nn.Sequential(spectral(nn.Linear(10, 8)), nn.ReLU(), nn.utils.parametrizations.orthogonal(nn.Linear(8, 4)))
    return World(net=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-2), r=1e-2, losses=[])


@loop(
    "spectral norm and orthogonal weights, a penalty in a loop over names",
    kind=REGULAR,
    source="kevinzakka/spatial-transformer-network style penalty; torch.nn.utils.parametrizations",
    build=spectral_world,
    batch=labelled,
)
def spectral(w, x, y):
    w.optimizer.zero_grad()
    loss = F.cross_entropy(w.net(x), y)
    orth_loss = torch.zeros(1)
    for name, param in w.net.named_parameters():
        if "bias" not in name:
            param_flat = param.view(param.shape[0], -1)
            sym = torch.mm(param_flat, torch.t(param_flat))
            sym -= torch.eye(param_flat.shape[0])
            orth_loss = orth_loss + (w.r * sym.abs().sum())
    (loss + orth_loss.squeeze()).backward()
    w.optimizer.step()
    w.losses.append((loss.item(), orth_loss.item()))


def focal_world() -> World:
    model = mlp(10, 8, 4)
    return World(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), losses=[], loss_normalizer=100.0, epoch=0
    )


@loop(
    "focal loss, normalised by a running number of positives",
    kind=REGULAR,
    source="facebookresearch/detectron2 detectron2/modeling/meta_arch/retinanet.py",
    build=focal_world,
    batch=lambda n: (normal(n, 8, 10), integers(n, 5, 8)),
)
def focal(w, x, gt_labels):
    logits = w.model(x)
    pos_mask = (gt_labels >= 0) & (gt_labels != 4)
    num_pos_anchors = pos_mask.sum().item()
    w.loss_normalizer = 0.9 * w.loss_normalizer + 0.1 * max(num_pos_anchors, 1)
    targets = F.one_hot(gt_labels, num_classes=5)[:, :-1].to(logits.dtype)
    p = torch.sigmoid(logits)
    ce_loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    loss = ce_loss * ((1 - p_t) ** 2.0)
    loss = ((0.25 * targets + 0.75 * (1 - targets)) * loss).sum() / w.loss_normalizer
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    w.losses.append(loss.item())
