"""Autoencoders: variational, with a codebook, masked."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, loop
from benchmarks.loops.parts import images
from wholestep.zoo.case import seeded_generator


def digits(number: int) -> tuple[Tensor]:
    return (torch.rand(6, 1, 4, 4, generator=seeded_generator(number)),)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.fc3, self.fc4 = nn.Linear(3, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h1 = F.relu(self.fc1(x.view(-1, 16)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae_world() -> World:
    model = VAE()
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), train_loss=0, batch_idx=0)


@loop("VAE", kind="autoencoder", source="pytorch/examples vae/main.py", build=vae_world, batch=digits)
def vae(w: World, data: Tensor) -> Any:
    data = data.to("cpu")
    w.optimizer.zero_grad()
    recon_batch, mu, logvar = w.model(data)
    bce = F.binary_cross_entropy(recon_batch, data.view(-1, 16), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss = bce + kld
    loss.backward()
    w.train_loss += loss.item()
    w.optimizer.step()
    if w.batch_idx % 3 == 0:
        print(f"Train Epoch: 1 [{w.batch_idx * len(data)}/600]\tLoss: {loss.item() / len(data):.6f}")
    w.batch_idx += 1


class Quantize(nn.Module):
    """A codebook that follows an average of what it is asked for; gradients go straight through."""

    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def __init__(self, dim: int, n_embed: int, decay: float = 0.99, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps = dim, n_embed, decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flatten = input.reshape(-1, self.dim)
        dist = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, embed_ind = (-dist).max(1)
        embed_onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        embed_ind = embed_ind.view(*input.shape[:-1])
        quantize = F.embedding(embed_ind, self.embed.transpose(0, 1))
        if self.training:
            embed_onehot_sum = embed_onehot.sum(0)
            embed_sum = flatten.transpose(0, 1) @ embed_onehot
            self.cluster_size.data.mul_(self.decay).add_(embed_onehot_sum, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            embed_normalized = self.embed_avg / cluster_size.unsqueeze(0)
            self.embed.data.copy_(embed_normalized)
        diff = (quantize.detach() - input).pow(2).mean()
        quantize = input + (quantize - input).detach()
        return quantize, diff, embed_ind


class VQVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Conv2d(3, 4, 4, 2, 1), nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.quantize = Quantize(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quant, diff, _ = self.quantize(self.enc(x).permute(0, 2, 3, 1))
        return self.dec(quant.permute(0, 3, 1, 2)), diff.unsqueeze(0)


class Loader:
    """What a step sees of tqdm around a loader."""

    def __init__(self) -> None:
        self.description = ""

    def set_description(self, description: str) -> None:
        self.description = description


def vqvae_world() -> World:
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=20)
    return World(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        criterion=nn.MSELoss(),
        loader=Loader(),
        mse_sum=0,
        mse_n=0,
    )


@loop(
    "VQ-VAE", kind="autoencoder", source="rosinality/vq-vae-2-pytorch train_vqvae.py", build=vqvae_world, batch=images
)
def vqvae(w: World, img: Tensor, label: Tensor) -> Any:
    w.model.zero_grad()
    img = img.to("cpu")
    out, latent_loss = w.model(img)
    recon_loss = w.criterion(out, img)
    latent_loss = latent_loss.mean()
    loss = recon_loss + 0.25 * latent_loss
    loss.backward()
    if w.scheduler is not None:
        w.scheduler.step()
    w.optimizer.step()
    part_mse_sum = recon_loss.item() * img.shape[0]
    part_mse_n = img.shape[0]
    for part in [{"mse_sum": part_mse_sum, "mse_n": part_mse_n}]:
        w.mse_sum += part["mse_sum"]
        w.mse_n += part["mse_n"]
    lr = w.optimizer.param_groups[0]["lr"]
    w.loader.set_description(
        f"epoch: 1; mse: {recon_loss.item():.5f}; latent: {latent_loss.item():.3f}; "
        f"avg mse: {w.mse_sum / w.mse_n:.5f}; lr: {lr:.5f}"
    )


class MAE(nn.Module):
    """Patches, most of which are masked away by a random order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.decoder = nn.Linear(48, 8), nn.Linear(8, 48)
        self.mask_token, self.norm = nn.Parameter(torch.zeros(1, 1, 8)), nn.LayerNorm(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)

    def patchify(self, imgs: Tensor) -> Tensor:
        x = imgs.reshape(imgs.shape[0], 3, 2, 4, 2, 4)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(imgs.shape[0], 4, 48)

    def forward(self, imgs: Tensor, mask_ratio: float = 0.75) -> tuple[Tensor, Tensor, Tensor]:
        target = self.patchify(imgs)
        x = self.patch_embed(target)
        n, length, dim = x.shape
        len_keep = int(length * (1 - mask_ratio))
        noise = torch.rand(n, length, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x = torch.gather(x, dim=1, index=ids_shuffle[:, :len_keep].unsqueeze(-1).repeat(1, 1, dim))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :len_keep] = 0
        mask = torch.gather(mask, dim=1, index=ids_restore)
        x = self.norm(self.block(x))
        tokens = self.mask_token.repeat(n, length - len_keep, 1)
        x = torch.gather(torch.cat([x, tokens], dim=1), dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, dim))
        pred = self.decoder(x)
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


class NativeScaler:
    """A scaler that clips, and steps only where gradients are not accumulated."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu", enabled=False)

    def __call__(self, loss: Tensor, optimizer: Any, parameters: Any, update_grad: bool = True) -> Any:
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        grads = [p.grad.detach() for p in parameters if p.grad is not None]
        norm = torch.norm(torch.stack([torch.norm(grad, 2.0) for grad in grads]), 2.0)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


class MetricLogger:
    """Windows of values by name."""

    def __init__(self) -> None:
        self.meters: dict[str, list[float]] = {}

    def update(self, **kwargs: Any) -> None:
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters.setdefault(k, []).append(v)


def mae_world() -> World:
    model = MAE()
    return World(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)),
        loss_scaler=NativeScaler(),
        metric_logger=MetricLogger(),
        accum_iter=2,
        data_iter_step=0,
        warmup_epochs=1,
        epochs=4,
    )


def adjust_learning_rate(optimizer: Any, epoch: float, w: World) -> float:
    if epoch < w.warmup_epochs:
        lr = 1e-3 * epoch / w.warmup_epochs
    else:
        lr = 1e-5 + (1e-3 - 1e-5) * 0.5 * (
            1.0 + math.cos(math.pi * (epoch - w.warmup_epochs) / (w.epochs - w.warmup_epochs))
        )
    for param_group in optimizer.param_groups:
        if "lr_scale" in param_group:
            param_group["lr"] = lr * param_group["lr_scale"]
        else:
            param_group["lr"] = lr
    return lr


@loop(
    "MAE", kind="autoencoder", source="facebookresearch/mae engine_pretrain.py", build=mae_world, batch=images, calls=12
)
def mae(w: World, samples: Tensor, _: Tensor) -> Any:
    if w.data_iter_step % w.accum_iter == 0:
        adjust_learning_rate(w.optimizer, w.data_iter_step / 6, w)
    samples = samples.to("cpu", non_blocking=True)
    with torch.autocast("cpu", enabled=False):
        loss, _, _ = w.model(samples, mask_ratio=0.5)
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        print(f"Loss is {loss_value}, stopping training")
        raise SystemExit(1)
    loss /= w.accum_iter
    w.loss_scaler(loss, w.optimizer, w.model.parameters(), update_grad=(w.data_iter_step + 1) % w.accum_iter == 0)
    if (w.data_iter_step + 1) % w.accum_iter == 0:
        w.optimizer.zero_grad()
    w.metric_logger.update(loss=loss_value)
    lr = w.optimizer.param_groups[0]["lr"]
    w.metric_logger.update(lr=lr)
    w.data_iter_step += 1
