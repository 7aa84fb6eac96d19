# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Physics, dynamics, forecasts."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, loop
from benchmarks.loops.pieces import mlp, normal

SCIENCE, FORECASTS = "physics", "forecasting"


def pinn_world() -> World:
    dnn = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    dnn.lambda_1, dnn.lambda_2 = nn.Parameter(torch.tensor([0.0])), nn.Parameter(torch.tensor([-6.0]))
    return World(dnn=dnn, optimizer_Adam=torch.optim.Adam(dnn.parameters(), lr=1e-2), iter=0)


def collocation(n):
    return normal(n, 6, 1).requires_grad_(), normal(n, 6, 1, seed=1).requires_grad_(), normal(n, 6, 1, seed=2)


@loop(
    "a physics-informed network, coefficients learned",
    kind=SCIENCE,
    source="jayroxis/PINNs Burgers Equation (PyTorch)/Burgers Identification.ipynb",
    build=pinn_world,
    batch=collocation,
)
def pinn(w, x, t, u):
    def net_u(x, t):
        return w.dnn(torch.cat([x, t], dim=1))

    w.dnn.train()
    u_pred = net_u(x, t)
    lambda_1 = w.dnn.lambda_1
    lambda_2 = torch.exp(w.dnn.lambda_2)
    f_u = net_u(x, t)
    u_t = torch.autograd.grad(f_u, t, grad_outputs=torch.ones_like(f_u), retain_graph=True, create_graph=True)[0]
    u_x = torch.autograd.grad(f_u, x, grad_outputs=torch.ones_like(f_u), retain_graph=True, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
    f_pred = u_t + lambda_1 * f_u * u_x - lambda_2 * u_xx
    loss = torch.mean((u - u_pred) ** 2) + torch.mean(f_pred**2)
    w.optimizer_Adam.zero_grad()
    loss.backward()
    w.optimizer_Adam.step()
    if w.iter % 3 == 0:
        print(
            "It: %d, Loss: %.3e, Lambda_1: %.3f, Lambda_2: %.6f"
            % (w.iter, loss.item(), w.dnn.lambda_1.item(), torch.exp(w.dnn.lambda_2.detach()).item())
        )
    w.iter += 1


class RunningAverageMeter:
    """Of torchdiffeq's demo: None until the first value."""

    def __init__(self, momentum=0.99) -> None:
        self.momentum, self.val, self.avg = momentum, None, 0

    def update(self, val):
        if self.val is None:
            self.avg = val
        else:
            self.avg = self.avg * self.momentum + val * (1 - self.momentum)
        self.val = val


class ODEFunc(nn.Module):
    """A derivative that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.nfe = 0

    def forward(self, t, y):
        self.nfe += 1
        return self.net(y**3)


def odeint_rk4(func, y, times):
    ys = [y]
    for t0, t1 in zip(times[:-1], times[1:]):
        dt = t1 - t0
        k1 = func(t0, y)
        k2 = func(t0 + dt / 3, y + dt * k1 / 3)
        k3 = func(t0 + dt * 2 / 3, y + dt * (k2 - k1 / 3))
        k4 = func(t1, y + dt * (k1 - k2 + k3))
        y = y + (k1 + 3 * (k2 + k3) + k4) * dt * 0.125
        ys.append(y)
    return torch.stack(ys)


def ode_world() -> World:
    func = ODEFunc()
    optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-2)
    return World(
        func=func,
        optimizer=optimizer,
        batch_t=torch.linspace(0.0, 1.0, 4),
        loss_meter=RunningAverageMeter(0.97),
        nfes=[],
    )


@loop(
    "a neural ODE by Runge-Kutta, calls counted",
    kind=SCIENCE,
    source="rtqichen/torchdiffeq examples/ode_demo.py",
    build=ode_world,
    batch=lambda n: (normal(n, 5, 2), normal(n, 4, 5, 2, seed=1)),
)
def neural_ode(w, batch_y0, batch_y):
    w.optimizer.zero_grad()
    pred_y = odeint_rk4(w.func, batch_y0, w.batch_t)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    w.nfes.append(w.func.nfe)
    w.func.nfe = 0
    loss.backward()
    w.optimizer.step()
    w.loss_meter.update(loss.item())


class NBeatsBlock(nn.Module):
    """A trend or a seasonality, whose basis is made by NumPy in each forward."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.kind, self.fc = kind, mlp(10, 8, 8)
        self.theta_b_fc, self.theta_f_fc = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.backcast_linspace, self.forecast_linspace = np.arange(0, 10) / 10, np.arange(0, 4) / 4

    def basis(self, thetas, t):
        p = thetas.size()[-1]
        if self.kind == "trend":
            T = torch.tensor(np.array([t**i for i in range(p)])).float()
        else:
            p1, p2 = (p // 2, p // 2) if p % 2 == 0 else (p // 2, p // 2 + 1)
            s1 = torch.tensor(np.array([np.cos(2 * np.pi * i * t) for i in range(p1)])).float()
            s2 = torch.tensor(np.array([np.sin(2 * np.pi * i * t) for i in range(p2)])).float()
            T = torch.cat([s1, s2])
        return thetas.mm(T)

    def forward(self, x):
        x = F.relu(self.fc(x))
        return self.basis(self.theta_b_fc(x), self.backcast_linspace), self.basis(
            self.theta_f_fc(x), self.forecast_linspace
        )


class NBeatsNet(nn.Module):
    """Blocks in a list of lists, their parameters in one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[NBeatsBlock("trend")], [NBeatsBlock("seasonality")]]
        self.weights = nn.ParameterList([p for stack in self.stacks for block in stack for p in block.parameters()])
        self._intermediary_outputs = []

    def forward(self, backcast):
        self._intermediary_outputs = []
        forecast = torch.zeros(size=(backcast.size()[0], 4))
        for stack_id in range(len(self.stacks)):
            for block_id in range(len(self.stacks[stack_id])):
                b, f = self.stacks[stack_id][block_id](backcast)
                backcast = backcast - b
                forecast = forecast + f
        return backcast, forecast


def nbeats_world() -> World:
    net = NBeatsNet()
    return World(net=net, _opt=torch.optim.Adam(net.parameters(), lr=1e-2), _loss=F.mse_loss, train_loss=[])


@loop(
    "N-BEATS, bases of NumPy",
    kind=FORECASTS,
    source="philipperemy/n-beats nbeats_pytorch/model.py",
    build=nbeats_world,
    batch=lambda n: (normal(n, 6, 10), normal(n, 6, 4, seed=1)),
)
def nbeats(w, batch_x, batch_y):
    w._opt.zero_grad()
    _, forecast = w.net(batch_x)
    loss = w._loss(forecast, batch_y)
    w.train_loss.append(loss.item())
    loss.backward()
    w._opt.step()


class TemporalBlock(nn.Module):
    """Dilated causal convolutions under weight norm, the old one with hooks."""

    def __init__(self, n_inputs, n_outputs, dilation) -> None:
        super().__init__()
        weight_norm = nn.utils.weight_norm
        self.padding = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_inputs, n_outputs, 3, padding=self.padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_outputs, n_outputs, 3, padding=self.padding, dilation=dilation))
        self.dropout = nn.Dropout(0.2)
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None

    def forward(self, x):
        out = self.dropout(F.relu(self.conv1(x)[:, :, : -self.padding].contiguous()))
        out = self.dropout(F.relu(self.conv2(out)[:, :, : -self.padding].contiguous()))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    """Two blocks and a linear layer on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.tcn, self.linear = nn.Sequential(TemporalBlock(2, 6, 1), TemporalBlock(6, 6, 2)), nn.Linear(6, 1)

    def forward(self, x):
        return self.linear(self.tcn(x)[:, :, -1])


def tcn_world() -> World:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TCN()
    return World(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=4e-3),
        total_loss=0,
        batch_idx=1,
        clip=0.5,
        log_interval=3,
    )


@loop(
    "TCN under weight norm",
    kind=FORECASTS,
    source="locuslab/TCN TCN/adding_problem/add_test.py",
    build=tcn_world,
    batch=lambda n: (normal(n, 4, 2, 12), normal(n, 4, 1, seed=1)),
)
def tcn(w, x, y):
    w.optimizer.zero_grad()
    output = w.model(x)
    loss = F.mse_loss(output, y)
    loss.backward()
    if w.clip > 0:
        torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.clip)
    w.optimizer.step()
    w.batch_idx += 1
    w.total_loss += loss.item()
    if w.batch_idx % w.log_interval == 0:
        cur_loss = w.total_loss / w.log_interval
        print(
            "Train [{:6d}]\tLearning rate: {:.4f}\tLoss: {:.6f}".format(
                w.batch_idx, w.optimizer.param_groups[0]["lr"], cur_loss
            )
        )
        w.total_loss = 0


class PatchModel(nn.Module):
    """Patches of a normalised series through attention; statistics are kept on the module for the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8 * 5, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def norm(self, x, mode):
        if mode == "norm":
            self.mean = x.mean(dim=-1, keepdim=True).detach()
            self.stdev = torch.sqrt(torch.var(x, dim=-1, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.stdev
        return x * self.stdev + self.mean

    def forward(self, x):
        x = self.norm(x, "norm")
        patches = self.embed(x.unfold(dimension=-1, size=4, step=2))
        hidden, _ = self.attention(patches, patches, patches, need_weights=False)
        return self.norm(self.head(hidden.flatten(1)), "denorm")


def patch_world() -> World:
    model = PatchModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=20)
    return World(
        model=model, model_optim=optimizer, scheduler=scheduler, criterion=nn.MSELoss(), train_loss=[], iter_count=0
    )


@loop(
    "PatchTST, OneCycleLR in the step",
    kind=FORECASTS,
    source="yuqinie98/PatchTST PatchTST_supervised/exp/exp_main.py",
    build=patch_world,
    batch=lambda n: (normal(n, 4, 12), normal(n, 4, 4, seed=1)),
)
def patchtst(w, batch_x, batch_y):
    w.iter_count += 1
    w.model_optim.zero_grad()
    batch_x = batch_x.float().to("cpu")
    outputs = w.model(batch_x)
    outputs = outputs[:, -4:]
    loss = w.criterion(outputs, batch_y)
    w.train_loss.append(loss.item())
    if (w.iter_count) % 4 == 0:
        print(f"\titers: {w.iter_count} | loss: {loss.item():.7f}")
    loss.backward()
    w.model_optim.step()
    for group in w.model_optim.param_groups:
        group["lr"] = group["lr"]
    w.scheduler.step()
