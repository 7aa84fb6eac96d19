# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""What draws, renders and matches: generators, scores, implicit functions, flow, point clouds."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import SummaryWriter, integers, mlp, normal


class Distribution(torch.Tensor):
    """Of BigGAN: a tensor that draws itself anew."""

    def init_distribution(self, dist_type, **kwargs):
        self.dist_type, self.dist_kwargs = dist_type, kwargs
        if self.dist_type == "normal":
            self.mean, self.var = kwargs["mean"], kwargs["var"]
        elif self.dist_type == "categorical":
            self.num_categories = kwargs["num_categories"]

    def sample_(self):
        if self.dist_type == "normal":
            self.normal_(self.mean, self.var)
        elif self.dist_type == "categorical":
            self.random_(0, self.num_categories)


class Generator(nn.Module):
    """Of classes, by shared embeddings."""

    def __init__(self):
        super().__init__()
        self.shared, self.net = nn.Embedding(3, 4), mlp(8, 8, 6, norm=True)

    def forward(self, z, y):
        return torch.tanh(self.net(torch.cat([z, y], 1)))


class Discriminator(nn.Module):
    """Projects on the class."""

    def __init__(self):
        super().__init__()
        sn = nn.utils.spectral_norm
        self.net, self.linear, self.embed = sn(nn.Linear(6, 8)), sn(nn.Linear(8, 1)), sn(nn.Embedding(3, 8))

    def forward(self, x, y=None):
        h = F.relu(self.net(x))
        return self.linear(h) + torch.sum(self.embed(y) * h, 1, keepdim=True)


class G_D(nn.Module):
    """Both in one module, as data parallel wants it."""

    def __init__(self, G, D):
        super().__init__()
        self.G, self.D = G, D

    def forward(self, z, gy, x=None, dy=None, train_G=False, return_G_z=False, split_D=False):
        with torch.set_grad_enabled(train_G):
            G_z = self.G(z, self.G.shared(gy))
        if split_D:
            D_fake = self.D(G_z, gy)
            return (D_fake, self.D(x, dy)) if x is not None else D_fake
        D_input = torch.cat([G_z, x], 0) if x is not None else G_z
        D_class = torch.cat([gy, dy], 0) if dy is not None else gy
        D_out = self.D(D_input, D_class)
        return torch.split(D_out, [G_z.shape[0], x.shape[0]]) if x is not None else D_out


class Ema:
    """Of BigGAN: over state dicts, with a start."""

    def __init__(self, source, target, decay=0.9, start_itr=3):
        self.source, self.target, self.decay, self.start_itr = source, target, decay, start_itr
        self.source_dict, self.target_dict = self.source.state_dict(), self.target.state_dict()
        with torch.no_grad():
            for key in self.source_dict:
                self.target_dict[key].data.copy_(self.source_dict[key].data)

    def update(self, itr=None):
        decay = 0.0 if itr and itr < self.start_itr else self.decay
        with torch.no_grad():
            source_dict, target_dict = self.dicts()
            for key in source_dict:
                target_dict[key].data.copy_(target_dict[key].data * decay + source_dict[key].data * (1 - decay))

    def dicts(self):
        return self.source_dict, self.target_dict


class EmaOfNow(Ema):
    """The same, which takes the state dicts at each update."""

    def __init__(self, source, target):
        super().__init__(source, target)
        del self.source_dict, self.target_dict

    def dicts(self):
        return self.source.state_dict(), self.target.state_dict()


def toggle_grad(model, on_or_off):
    for param in model.parameters():
        param.requires_grad = on_or_off


def ortho(model, strength=1e-4, blacklist=()):
    with torch.no_grad():
        for param in model.parameters():
            if len(param.shape) < 2 or any(param is item for item in blacklist):
                continue
            w = param.view(param.shape[0], -1)
            grad = 2 * torch.mm(torch.mm(w, w.t()) * (1.0 - torch.eye(w.shape[0], device=w.device)), w)
            param.grad.data += strength * grad.view(param.shape)


def biggan_world() -> World:
    G, D = Generator(), Discriminator()
    G_ema = copy.deepcopy(G)
    z_, y_ = Distribution(torch.randn(4, 4)), Distribution(torch.zeros(4))
    z_.init_distribution("normal", mean=0, var=1.0)
    y_.init_distribution("categorical", num_categories=3)
    y_ = y_.to(torch.int64) if not isinstance(y_, Distribution) else y_
    return gan_world(G, D, G_ema, z_, y_)


def plain_draw_world() -> World:
    G, D = Generator(), Discriminator()
    world = gan_world(G, D, copy.deepcopy(G), None, None)
    world.ema = EmaOfNow(G, world.G_ema)
    return world


def gan_world(G, D, G_ema, z_, y_) -> World:
    G.optim = torch.optim.Adam(G.parameters(), lr=1e-2, betas=(0.0, 0.999))
    D.optim = torch.optim.Adam(D.parameters(), lr=1e-2, betas=(0.0, 0.999))
    config = {"batch_size": 4, "num_D_steps": 2, "num_D_accumulations": 1, "num_G_accumulations": 1, "split_D": False}
    config |= {"toggle_grads": True, "D_ortho": 0.0, "G_ortho": 1e-4, "ema": True}
    state_dict = {"itr": 0}
    return World(
        G=G, D=D, GD=G_D(G, D), G_ema=G_ema, ema=Ema(G, G_ema), z_=z_, y_=y_, state_dict=state_dict, config=config
    )


def biggan_train(w, draw):
    G, D, GD, config = w.G, w.D, w.GD, w.config

    def train(x, y):
        G.optim.zero_grad()
        D.optim.zero_grad()
        x = torch.split(x, config["batch_size"])
        y = torch.split(y, config["batch_size"])
        counter = 0
        if config["toggle_grads"]:
            toggle_grad(D, True)
            toggle_grad(G, False)
        for _step_index in range(config["num_D_steps"]):
            D.optim.zero_grad()
            for _accumulation_index in range(config["num_D_accumulations"]):
                z_, y_ = draw()
                D_fake, D_real = GD(
                    z_[: config["batch_size"]],
                    y_[: config["batch_size"]],
                    x[counter],
                    y[counter],
                    train_G=False,
                    split_D=config["split_D"],
                )
                D_loss_real, D_loss_fake = torch.mean(F.relu(1.0 - D_real)), torch.mean(F.relu(1.0 + D_fake))
                D_loss = (D_loss_real + D_loss_fake) / float(config["num_D_accumulations"])
                D_loss.backward()
                counter += 1
            if config["D_ortho"] > 0.0:
                ortho(D, config["D_ortho"])
            D.optim.step()
        if config["toggle_grads"]:
            toggle_grad(D, False)
            toggle_grad(G, True)
        G.optim.zero_grad()
        for _accumulation_index in range(config["num_G_accumulations"]):
            z_, y_ = draw()
            D_fake = GD(z_, y_, train_G=True, split_D=config["split_D"])
            G_loss = -torch.mean(D_fake) / float(config["num_G_accumulations"])
            G_loss.backward()
        if config["G_ortho"] > 0.0:
            print("using modified ortho reg in G")
            ortho(G, config["G_ortho"], blacklist=list(G.shared.parameters()))
        G.optim.step()
        if config["ema"]:
            w.ema.update(w.state_dict["itr"])
        w.state_dict["itr"] += 1
        return {
            "G_loss": float(G_loss.item()),
            "D_loss_real": float(D_loss_real.item()),
            "D_loss_fake": float(D_loss_fake.item()),
        }

    return train


@loop(
    "BigGAN, tensors that draw themselves",
    kind="GAN",
    source="ajbrock/BigGAN-PyTorch train_fns.py, utils.py",
    build=biggan_world,
    batch=lambda n: (normal(n, 8, 6), integers(n, 3, 8)),
    closure=True,
    held_back=True,
)
def biggan(w):
    def draw():
        w.z_.sample_()
        w.y_.sample_()
        return w.z_, w.y_.long()

    return biggan_train(w, draw)


@edit(
    "BigGAN, tensors that draw themselves",
    "`torch.randn` and `torch.randint` in the step; averages take state dicts at each update",
    build=plain_draw_world,
)
def biggan_plain(w):
    return biggan_train(w, lambda: (torch.randn(4, 4), torch.randint(3, (4,))))


class EMA:
    """Of ddpm-torch: by weak references, entered as a context for sampling."""

    def __init__(self, model, decay=0.9999):
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}
        self._refs = {k: weakref.ref(v) for k, v in model.named_parameters() if v.requires_grad}
        self.decay, self.num_updates, self.backup = decay, 0, None

    def update(self):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for k, _ref in self._refs.items():
            assert _ref() is not None, "referenced object no longer exists!"
            self.shadow[k] += (1 - decay) * (_ref().data - self.shadow[k])


class RunningStatistics:
    """Sums by name."""

    def __init__(self, **kwargs):
        self.count, self.stats = 0, {k: v or 0 for k, v in kwargs.items()}

    def update(self, n, **kwargs):
        self.count += n
        for k, v in kwargs.items():
            self.stats[k] = self.stats.get(k, 0) + v

    def extract(self):
        return {k: v / self.count for k, v in self.stats.items()}


class Diffusion:
    """Tables in double precision."""

    def __init__(self, timesteps=10):
        self.timesteps = timesteps
        alphas_bar = torch.cumprod(1.0 - torch.linspace(1e-3, 0.2, timesteps, dtype=torch.float64), dim=0)
        self.sqrt_alphas_bar, self.sqrt_one_minus_alphas_bar = alphas_bar.sqrt(), (1.0 - alphas_bar).sqrt()

    @staticmethod
    def _extract(arr, t, x, dtype=torch.float32, ndim=2):
        return torch.as_tensor(arr, dtype=dtype, device=t.device)[t].reshape((-1,) + (1,) * (ndim - 1))

    def train_losses(self, denoise_fn, x_0, t, noise=None):
        noise = torch.randn_like(x_0) if noise is None else noise
        x_t = self._extract(self.sqrt_alphas_bar, t, x_0) * x_0
        x_t = x_t + self._extract(self.sqrt_one_minus_alphas_bar, t, x_0) * noise
        model_out = denoise_fn(torch.cat([x_t, t.unsqueeze(1) / self.timesteps], 1))
        return torch.pow(noise - model_out, 2).flatten(start_dim=1).mean(dim=1)


class DiffusionTrainer:
    """One step at a time."""

    def __init__(self, use_ema=True):
        self.model, self.diffusion = mlp(7, 12, 6), Diffusion()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda t: min((t + 1) / 4, 1.0))
        self.num_accum, self.grad_norm, self.distributed, self.world_size = 2, 1.0, False, 1
        self.use_ema, self.ema = use_ema, EMA(self.model) if use_ema else nullcontext()
        self.stats, self.results = RunningStatistics(loss=None), {}

    @property
    def timesteps(self):
        return self.diffusion.timesteps

    @property
    def current_stats(self):
        return self.stats.extract()

    def loss(self, x):
        t = torch.randint(self.timesteps, size=(x.shape[0],), dtype=torch.int64, device="cpu")
        loss = self.diffusion.train_losses(self.model, x_0=x, t=t)
        assert loss.shape == (x.shape[0],)
        return loss

    def step(self, x, global_steps=1):
        loss = self.loss(x).mean()
        loss.div(self.num_accum).backward()
        if global_steps % self.num_accum == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            if self.use_ema and hasattr(self.ema, "update"):
                self.ema.update()
        loss = loss.detach()
        self.stats.update(x.shape[0], loss=loss.item() * x.shape[0])
        self.results.update(self.current_stats)


@loop(
    "DDPM, averages by weak references, accumulated",
    kind="diffusion",
    source="tqch/ddpm-torch ddpm_torch/utils/train.py",
    build=lambda: World(trainer=DiffusionTrainer()),
    batch=lambda n: (normal(n, 5, 6), n + 1),
    closure=True,
    held_back=True,
    calls=12,
)
def ddpm(w):
    return w.trainer.step


class VESDE:
    """Variances that explode."""

    def __init__(self, sigma_min=0.01, sigma_max=5.0, N=100):
        self.sigma_min, self.sigma_max, self.N, self.T = sigma_min, sigma_max, N, 1

    def marginal_prob(self, x, t):
        return x, self.sigma_min * (self.sigma_max / self.sigma_min) ** t


def get_sde_loss_fn(sde, train, reduce_mean=True, eps=1e-5):
    reduce_op = torch.mean if reduce_mean else lambda *args, **kwargs: 0.5 * torch.sum(*args, **kwargs)

    def loss_fn(model, batch):
        model.train() if train else model.eval()
        t = torch.rand(batch.shape[0], device=batch.device) * (sde.T - eps) + eps
        z = torch.randn_like(batch)
        mean, std = sde.marginal_prob(batch, t)
        perturbed_data = mean + std[:, None] * z
        score = model(torch.cat([perturbed_data, torch.log(std)[:, None]], 1)) / std[:, None]
        losses = torch.square(score * std[:, None] + z)
        losses = reduce_op(losses.reshape(losses.shape[0], -1), dim=-1)
        return torch.mean(losses)

    return loss_fn


def optimization_manager(lr=2e-2, warmup=5, grad_clip=1.0):
    def optimize_fn(optimizer, params, step, lr=lr, warmup=warmup, grad_clip=grad_clip):
        if warmup > 0:
            for g in optimizer.param_groups:
                g["lr"] = lr * np.minimum(step / warmup, 1.0)
        if grad_clip >= 0:
            nn.utils.clip_grad_norm_(params, max_norm=grad_clip)
        optimizer.step()

    return optimize_fn


class ParameterEma:
    """Of score_sde: shadows of those that are trained."""

    def __init__(self, parameters, decay=0.99):
        self.decay, self.num_updates = decay, 0
        self.shadow_params = [p.clone().detach() for p in parameters if p.requires_grad]

    def update(self, parameters):
        decay = self.decay
        if self.num_updates is not None:
            self.num_updates += 1
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        one_minus_decay = 1.0 - decay
        with torch.no_grad():
            parameters = [p for p in parameters if p.requires_grad]
            for s_param, param in zip(self.shadow_params, parameters):
                s_param.sub_(one_minus_decay * (s_param - param))


def score_world() -> World:
    model = mlp(7, 12, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    state = dict(optimizer=optimizer, model=model, ema=ParameterEma(model.parameters()), step=0)
    return World(model=model, optimizer=optimizer, state=state)


@loop(
    "score SDE, a state in a dict, warm-up by NumPy",
    kind="energy",
    source="yang-song/score_sde_pytorch losses.py",
    build=score_world,
    batch=lambda n: (normal(n, 5, 6),),
    closure=True,
    held_back=True,
    calls=12,
)
def score_sde(w):
    loss_fn, optimize_fn = get_sde_loss_fn(VESDE(), train=True), optimization_manager()

    def step_fn(batch, state=w.state):
        model = state["model"]
        optimizer = state["optimizer"]
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimize_fn(optimizer, model.parameters(), step=state["step"])
        state["step"] += 1
        state["ema"].update(model.parameters())
        return loss

    return step_fn


class Sine(nn.Module):
    """Of SIREN."""

    def forward(self, input):
        return torch.sin(30 * input)


class SingleBVPNet(nn.Module):
    """Coordinates in, which get gradients, values out."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), Sine(), nn.Linear(8, 8), Sine(), nn.Linear(8, 1))

    def forward(self, model_input):
        coords = model_input["coords"].clone().detach().requires_grad_(True)
        return {"model_in": coords, "model_out": self.net(coords)}


def sdf_loss(model_output, gt):
    coords, pred = model_output["model_in"], model_output["model_out"]
    gradient = torch.autograd.grad(pred, [coords], grad_outputs=torch.ones_like(pred), create_graph=True)[0]
    sdf_constraint = torch.where(gt["sdf"] != -1, pred, torch.zeros_like(pred))
    inter = torch.where(gt["sdf"] != -1, torch.zeros_like(pred), torch.exp(-1e2 * torch.abs(pred)))
    normals = torch.where(gt["sdf"] != -1, 1 - F.cosine_similarity(gradient, gt["normals"], dim=-1)[..., None], 0.0)
    grad_constraint = torch.abs(gradient.norm(dim=-1) - 1)
    return {
        "sdf": torch.abs(sdf_constraint).mean() * 3e3,
        "inter": inter.mean() * 1e2,
        "normal_constraint": normals.mean() * 1e2,
        "grad_constraint": grad_constraint.mean() * 5e1,
    }


class LinearDecaySchedule:
    """Called with the step."""

    def __init__(self, start_val, final_val, num_steps):
        self.start_val, self.final_val, self.num_steps = start_val, final_val, num_steps

    def __call__(self, iter):
        return self.start_val + (self.final_val - self.start_val) * min(iter / self.num_steps, 1.0)


def siren_world() -> World:
    model = SingleBVPNet()
    return World(
        model=model,
        optim=torch.optim.Adam(lr=1e-4, params=model.parameters()),
        writer=SummaryWriter(),
        train_losses=[],
        total_steps=0,
        clip_grad=True,
        loss_schedules={"inter": LinearDecaySchedule(1.0, 0.1, 5)},
    )


def surface(n):
    sdf = torch.where(normal(n, 6, 1, seed=2) > 0, -1.0, 0.0)
    return {"coords": normal(n, 6, 2)}, {"sdf": sdf, "normals": F.normalize(normal(n, 6, 2, seed=1), dim=-1)}


@loop(
    "SIREN, losses by name with schedules",
    kind="rays and points",
    source="vsitzmann/siren training.py, loss_functions.py",
    build=siren_world,
    batch=surface,
    held_back=True,
)
def siren(w, model_input, gt):
    model_input = {key: value.to("cpu") for key, value in model_input.items()}
    gt = {key: value.to("cpu") for key, value in gt.items()}
    model_output = w.model(model_input)
    losses = sdf_loss(model_output, gt)
    train_loss = 0.0
    for loss_name, loss in losses.items():
        single_loss = loss.mean()
        if w.loss_schedules is not None and loss_name in w.loss_schedules:
            w.writer.add_scalar(loss_name + "_weight", w.loss_schedules[loss_name](w.total_steps), w.total_steps)
            single_loss *= w.loss_schedules[loss_name](w.total_steps)
        w.writer.add_scalar(loss_name, single_loss, w.total_steps)
        train_loss += single_loss
    w.train_losses.append(train_loss.item())
    w.writer.add_scalar("total_train_loss", train_loss, w.total_steps)
    w.optim.zero_grad()
    train_loss.backward()
    if w.clip_grad:
        if isinstance(w.clip_grad, bool):
            nn.utils.clip_grad_norm_(w.model.parameters(), max_norm=1.0)
        else:
            nn.utils.clip_grad_norm_(w.model.parameters(), max_norm=w.clip_grad)
    w.optim.step()
    if not w.total_steps % 3:
        print("Epoch %d, Total loss %0.6f" % (0, train_loss))
    w.total_steps += 1


class Raft(nn.Module):
    """Flow that is updated a few times."""

    def __init__(self):
        super().__init__()
        self.features, self.update = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(10, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def freeze_bn(self):
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()

    def forward(self, image1, image2, iters=3):
        image1, image2 = 2 * (image1 / 255.0) - 1.0, 2 * (image2 / 255.0) - 1.0
        fmap1, fmap2 = self.norm(self.features(image1)), self.norm(self.features(image2))
        flow, flow_predictions = torch.zeros_like(image1[:, :2]), []
        for _itr in range(iters):
            flow = flow.detach()
            flow = flow + self.update(torch.cat([fmap1, fmap2, flow], dim=1))
            flow_predictions.append(flow)
        return flow_predictions


def sequence_loss(flow_preds, flow_gt, valid, gamma=0.8, max_flow=400):
    n_predictions, flow_loss = len(flow_preds), 0.0
    mag = torch.sum(flow_gt**2, dim=1).sqrt()
    valid = (valid >= 0.5) & (mag < max_flow)
    for i in range(n_predictions):
        i_weight = gamma ** (n_predictions - i - 1)
        i_loss = (flow_preds[i] - flow_gt).abs()
        flow_loss += i_weight * (valid[:, None] * i_loss).mean()
    epe = torch.sum((flow_preds[-1] - flow_gt) ** 2, dim=1).sqrt()
    epe = epe.view(-1)[valid.view(-1)]
    metrics = {"epe": epe.mean().item()}
    metrics.update({f"{k}px": (epe < k).float().mean().item() for k in (1, 3, 5)})
    return flow_loss, metrics


class FlowLogger:
    """Sums that are printed every few steps and cleared."""

    def __init__(self, scheduler):
        self.scheduler, self.total_steps, self.running_loss, self.writer = scheduler, 0, {}, None

    def _print_training_status(self):
        metrics_data = [self.running_loss[k] / 4 for k in sorted(self.running_loss.keys())]
        training_str = "[{:6d}, {:10.7f}] ".format(self.total_steps + 1, self.scheduler.get_last_lr()[0])
        print(training_str + ("{:10.4f}, " * len(metrics_data)).format(*metrics_data))
        if self.writer is None:
            self.writer = SummaryWriter()
        for k in self.running_loss:
            self.writer.add_scalar(k, self.running_loss[k] / 4, self.total_steps)
            self.running_loss[k] = 0.0

    def push(self, metrics):
        self.total_steps += 1
        for key in metrics:
            if key not in self.running_loss:
                self.running_loss[key] = 0.0
            self.running_loss[key] += metrics[key]
        if self.total_steps % 4 == 3:
            self._print_training_status()
            self.running_loss = {}


def raft_world() -> World:
    model = Raft().train()
    model.freeze_bn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, 30, pct_start=0.05, cycle_momentum=False, anneal_strategy="linear"
    )
    return World(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        logger=FlowLogger(scheduler),
        args=World(add_noise=True, iters=3, gamma=0.8, clip=1.0),
    )


@loop(
    "RAFT, noise by NumPy, sums printed and cleared",
    kind="image to image",
    source="princeton-vl/RAFT train.py",
    build=raft_world,
    batch=lambda n: (
        [normal(n, 2, 3, 6, 6) * 50 + 100, normal(n, 2, 3, 6, 6, seed=1) * 50 + 100, normal(n, 2, 2, 6, 6, seed=2)]
        + [(normal(n, 2, 6, 6, seed=3) > -1).float()],
    ),
    held_back=True,
    calls=10,
)
def raft(w, data_blob):
    w.optimizer.zero_grad()
    image1, image2, flow, valid = [x.to("cpu") for x in data_blob]
    if w.args.add_noise:
        stdv = np.random.uniform(0.0, 5.0)
        image1 = (image1 + stdv * torch.randn(*image1.shape)).clamp(0.0, 255.0)
        image2 = (image2 + stdv * torch.randn(*image2.shape)).clamp(0.0, 255.0)
    flow_predictions = w.model(image1, image2, iters=w.args.iters)
    loss, metrics = sequence_loss(flow_predictions, flow, valid, w.args.gamma)
    w.scaler.scale(loss).backward()
    w.scaler.unscale_(w.optimizer)
    nn.utils.clip_grad_norm_(w.model.parameters(), w.args.clip)
    w.scaler.step(w.optimizer)
    w.scheduler.step()
    w.scaler.update()
    w.logger.push(metrics)
