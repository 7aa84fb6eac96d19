# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Few labels, other domains, adversaries."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, loop
from benchmarks.loops.pieces import AverageMeter, accuracy, integers, mlp, normal

SEMI, ROBUST, DOMAINS = "semi-supervised", "adversarial training", "domain adaptation"


class ModelEMA:
    """Of FixMatch: parameters and buffers by the keys of their state dicts."""

    def __init__(self, model, decay) -> None:
        self.ema = copy.deepcopy(model).eval()
        self.decay = decay
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            msd = model.state_dict()
            esd = self.ema.state_dict()
            for k in self.param_keys:
                model_v = msd[k].detach()
                ema_v = esd[k]
                esd[k].copy_(ema_v * self.decay + (1.0 - self.decay) * model_v)
            for k in self.buffer_keys:
                esd[k].copy_(msd[k])


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def fixmatch_world() -> World:
    model = mlp(10, 12, 4, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, float(np.cos(np.pi * step / 40))))
    meters = World(losses=AverageMeter(), losses_x=AverageMeter(), losses_u=AverageMeter(), mask_probs=AverageMeter())
    args = World(mu=2, T=1, threshold=0.4, lambda_u=1.0)
    return World(
        model=model,
        ema_model=ModelEMA(model, 0.9),
        optimizer=optimizer,
        scheduler=scheduler,
        meters=meters,
        args=args,
        bar=[],
    )


@loop(
    "FixMatch, a mask of confidence, scheduler in the step",
    kind=SEMI,
    source="kekmodel/FixMatch-pytorch train.py",
    build=fixmatch_world,
    batch=lambda n: (normal(n, 4, 10), integers(n, 4, 4), normal(n, 8, 10, seed=1), normal(n, 8, 10, seed=2)),
)
def fixmatch(w, inputs_x, targets_x, inputs_u_w, inputs_u_s):
    args = w.args
    batch_size = inputs_x.shape[0]
    inputs = interleave(torch.cat((inputs_x, inputs_u_w, inputs_u_s)), 2 * args.mu + 1).to("cpu")
    logits = w.model(inputs)
    logits = de_interleave(logits, 2 * args.mu + 1)
    logits_x = logits[:batch_size]
    logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
    del logits
    Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")
    pseudo_label = torch.softmax(logits_u_w.detach() / args.T, dim=-1)
    max_probs, targets_u = torch.max(pseudo_label, dim=-1)
    mask = max_probs.ge(args.threshold).float()
    Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()
    loss = Lx + args.lambda_u * Lu
    loss.backward()
    w.meters.losses.update(loss.item())
    w.meters.losses_x.update(Lx.item())
    w.meters.losses_u.update(Lu.item())
    w.optimizer.step()
    w.scheduler.step()
    w.ema_model.update(w.model)
    w.model.zero_grad()
    w.meters.mask_probs.update(mask.mean().item())
    w.bar.append(
        f"LR: {w.scheduler.get_last_lr()[0]:.4f}. Loss: {w.meters.losses.avg:.4f}. Mask: {w.meters.mask_probs.avg:.2f}."
    )


def pseudo_world() -> World:
    model = mlp(10, 12, 4)
    return World(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), step=20, T1=20, T2=28, af=3, unlabeled=[]
    )


def alpha_weight(w):
    if w.step < w.T1:
        return 0.0
    elif w.step > w.T2:
        return w.af
    return ((w.step - w.T1) / (w.T2 - w.T1)) * w.af


@loop(
    "pseudo labels, a weight by the step, a labelled batch every few",
    kind=SEMI,
    source="peimengsui/semi_supervised_mnist pseudo_label.py",
    build=pseudo_world,
    batch=lambda n: (n, normal(n, 6, 10), normal(n, 6, 10, seed=1), integers(n, 4, 6)),
    calls=10,
)
def pseudo_label(w, batch_idx, x_unlabeled, X_batch, y_batch):
    w.model.eval()
    output_unlabeled = w.model(x_unlabeled)
    _, pseudo_labeled = torch.max(output_unlabeled, 1)
    w.model.train()
    output = w.model(x_unlabeled)
    unlabeled_loss = alpha_weight(w) * F.nll_loss(F.log_softmax(output, dim=1), pseudo_labeled)
    w.optimizer.zero_grad()
    unlabeled_loss.backward()
    w.optimizer.step()
    if batch_idx % 4 == 3:
        labeled_loss = F.nll_loss(F.log_softmax(w.model(X_batch), dim=1), y_batch)
        w.optimizer.zero_grad()
        labeled_loss.backward()
        w.optimizer.step()
        w.step += 1
    w.unlabeled.append(unlabeled_loss.item())


def robust_world() -> World:
    model = mlp(10, 12, 4, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-4)
    return World(
        model=model,
        optimizer=optimizer,
        global_noise_data=torch.zeros(8, 10),
        losses=AverageMeter(),
        top1=AverageMeter(),
        train_loss=0.0,
        correct=0,
        total=0,
        step_size=0.05,
        epsilon=0.2,
        num_steps=3,
    )


def images(n):
    return torch.sigmoid(normal(n, 6, 10)), integers(n, 4, 6)


@loop(
    "PGD, an inner loop of attacks",
    kind=ROBUST,
    source="ndb796/Pytorch-Adversarial-Training-CIFAR pgd_adversarial_training.py",
    build=robust_world,
    batch=images,
)
def pgd(w, inputs, targets):
    w.optimizer.zero_grad()
    x = inputs.detach()
    x = x + torch.zeros_like(x).uniform_(-w.epsilon, w.epsilon)
    for i in range(w.num_steps):
        x.requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(w.model(x), targets)
        grad = torch.autograd.grad(loss, [x])[0]
        x = x.detach() + w.step_size * torch.sign(grad.detach())
        x = torch.min(torch.max(x, inputs - w.epsilon), inputs + w.epsilon)
        x = torch.clamp(x, 0, 1)
    adv_outputs = w.model(x)
    loss = F.cross_entropy(adv_outputs, targets)
    loss.backward()
    w.optimizer.step()
    w.train_loss += loss.item()
    _, predicted = adv_outputs.max(1)
    w.total += targets.size(0)
    w.correct += predicted.eq(targets).sum().item()


@loop(
    "TRADES, modes switched in the step",
    kind=ROBUST,
    source="yaodongyu/TRADES trades.py",
    build=robust_world,
    batch=images,
)
def trades(w, x_natural, y):
    model = w.model
    w.optimizer.zero_grad()
    criterion_kl = nn.KLDivLoss(reduction="sum")
    model.eval()
    batch_size = len(x_natural)
    x_adv = x_natural.detach() + 0.001 * torch.randn(x_natural.shape).detach()
    for _ in range(w.num_steps):
        x_adv.requires_grad_()
        with torch.enable_grad():
            loss_kl = criterion_kl(F.log_softmax(model(x_adv), dim=1), F.softmax(model(x_natural), dim=1))
        grad = torch.autograd.grad(loss_kl, [x_adv])[0]
        x_adv = x_adv.detach() + w.step_size * torch.sign(grad.detach())
        x_adv = torch.min(torch.max(x_adv, x_natural - w.epsilon), x_natural + w.epsilon)
        x_adv = torch.clamp(x_adv, 0.0, 1.0)
    model.train()
    x_adv = torch.autograd.Variable(torch.clamp(x_adv, 0.0, 1.0), requires_grad=False)
    w.optimizer.zero_grad()
    logits = model(x_natural)
    loss_natural = F.cross_entropy(logits, y)
    loss_robust = (1.0 / batch_size) * criterion_kl(
        F.log_softmax(model(x_adv), dim=1), F.softmax(model(x_natural), dim=1)
    )
    loss = loss_natural + 1.0 * loss_robust
    loss.backward()
    w.optimizer.step()
    return loss.item()


def fgsm(gradz, step_size):
    return step_size * torch.sign(gradz)


@loop(
    "free adversarial training, noise that is kept",
    kind=ROBUST,
    source="mahyarnajibi/FreeAdversarialTraining main_free.py",
    build=robust_world,
    batch=images,
)
def free(w, input, target):
    for j in range(2):
        noise_batch = torch.autograd.Variable(w.global_noise_data[0 : input.size(0)], requires_grad=True)
        in1 = input + noise_batch
        in1.clamp_(0, 1.0)
        output = w.model(in1)
        loss = F.cross_entropy(output, target)
        prec1, _ = accuracy(output, target, topk=(1, 3))
        w.losses.update(loss.item(), input.size(0))
        w.top1.update(prec1[0], input.size(0))
        w.optimizer.zero_grad()
        loss.backward()
        pert = fgsm(noise_batch.grad, 0.05)
        w.global_noise_data[0 : input.size(0)] += pert.data
        w.global_noise_data.clamp_(-w.epsilon, w.epsilon)
        w.optimizer.step()


class ReverseLayerF(torch.autograd.Function):
    """Nothing forward; the gradient turned round, by a factor that grows."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class CNNModel(nn.Module):
    """Features, a classifier of classes and one of domains."""

    def __init__(self) -> None:
        super().__init__()
        self.feature = mlp(10, 12, 8, norm=True)
        self.class_classifier, self.domain_classifier = (
            mlp(8, 8, 4, last=partial(nn.LogSoftmax, dim=1)),
            mlp(8, 8, 2, last=partial(nn.LogSoftmax, dim=1)),
        )

    def forward(self, input_data, alpha):
        input_data = input_data.expand(input_data.data.shape[0], 10)
        feature = self.feature(input_data)
        reverse_feature = ReverseLayerF.apply(feature, alpha)
        return self.class_classifier(feature), self.domain_classifier(reverse_feature)


def dann_world() -> World:
    net = CNNModel()
    for p in net.parameters():
        p.requires_grad = True
    return World(
        my_net=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-2), i=0, epoch=0, n_epoch=3, len_dataloader=4
    )


def next_batch(w, returned, n) -> None:
    w.i += 1
    if w.i == w.len_dataloader:
        w.i, w.epoch = 0, w.epoch + 1


def domains(n):
    return normal(n, 6, 10), integers(n, 4, 6), 0.5 * normal(n, 6, 10, seed=1) + 1


@loop(
    "DANN, gradients reversed by a schedule",
    kind=DOMAINS,
    source="fungtion/DANN train/main.py",
    build=dann_world,
    batch=domains,
    between=next_batch,
    calls=10,
)
def dann(w, s_img, s_label, t_img):
    p = float(w.i + w.epoch * w.len_dataloader) / w.n_epoch / w.len_dataloader
    alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
    w.my_net.zero_grad()
    batch_size = len(s_label)
    domain_label = torch.zeros(batch_size).long()
    class_output, domain_output = w.my_net(input_data=s_img, alpha=alpha)
    err_s_label = F.nll_loss(class_output, s_label)
    err_s_domain = F.nll_loss(domain_output, domain_label)
    domain_label = torch.ones(len(t_img)).long()
    _, domain_output = w.my_net(input_data=t_img, alpha=alpha)
    err_t_domain = F.nll_loss(domain_output, domain_label)
    err = err_t_domain + err_s_domain + err_s_label
    err.backward()
    w.optimizer.step()
    print(
        "\r epoch: %d, [iter: %d / all %d], err_s_label: %f, err_s_domain: %f, err_t_domain: %f"
        % (w.epoch, w.i + 1, w.len_dataloader, err_s_label.item(), err_s_domain.item(), err_t_domain.item())
    )


class MMDLoss(nn.Module):
    """Distance of two samples by Gaussian kernels whose width comes from the data."""

    def __init__(self, kernel_mul=2.0, kernel_num=5) -> None:
        super().__init__()
        self.kernel_num, self.kernel_mul, self.fix_sigma = kernel_num, kernel_mul, None

    def guassian_kernel(self, source, target, kernel_mul, kernel_num, fix_sigma):
        n_samples = int(source.size()[0]) + int(target.size()[0])
        total = torch.cat([source, target], dim=0)
        total0 = total.unsqueeze(0).expand(int(total.size(0)), int(total.size(0)), int(total.size(1)))
        total1 = total.unsqueeze(1).expand(int(total.size(0)), int(total.size(0)), int(total.size(1)))
        L2_distance = ((total0 - total1) ** 2).sum(2)
        if fix_sigma:
            bandwidth = fix_sigma
        else:
            bandwidth = torch.sum(L2_distance.data) / (n_samples**2 - n_samples)
        bandwidth /= kernel_mul ** (kernel_num // 2)
        bandwidth_list = [bandwidth * (kernel_mul**i) for i in range(kernel_num)]
        return sum([torch.exp(-L2_distance / bandwidth_temp) for bandwidth_temp in bandwidth_list])

    def forward(self, source, target):
        batch_size = int(source.size()[0])
        kernels = self.guassian_kernel(source, target, self.kernel_mul, self.kernel_num, self.fix_sigma)
        XX = torch.mean(kernels[:batch_size, :batch_size])
        YY = torch.mean(kernels[batch_size:, batch_size:])
        XY = torch.mean(kernels[:batch_size, batch_size:])
        YX = torch.mean(kernels[batch_size:, :batch_size])
        return torch.mean(XX + YY - XY - YX)


def mmd_world() -> World:
    model = nn.ModuleDict({"base": mlp(10, 12, 8), "classifier": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda x: (1.0 + 0.0003 * float(x)) ** (-0.75))
    return World(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        mmd=MMDLoss(),
        train_loss=[AverageMeter() for _ in range(3)],
    )


@loop(
    "deep adaptation by MMD, scheduler in the step",
    kind=DOMAINS,
    source="jindongwang/transferlearning code/DeepDA/main.py",
    build=mmd_world,
    batch=domains,
)
def dan(w, data_source, label_source, data_target):
    source, target = w.model["base"](data_source), w.model["base"](data_target)
    clf_loss = F.cross_entropy(w.model["classifier"](source), label_source)
    transfer_loss = w.mmd(source, target)
    loss = clf_loss + 0.5 * transfer_loss
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    if w.lr_scheduler:
        w.lr_scheduler.step()
    for meter, value in zip(w.train_loss, (clf_loss, transfer_loss, loss)):
        meter.update(value.item())
