"""Generative adversarial networks."""

from __future__ import annotations

import itertools
import math
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, autograd, nn, optim
from torch.autograd import Variable

from benchmarks.loops import World, edit, loop
from benchmarks.loops.parts import Logger, images
from wholestep.zoo.case import seeded_generator

NZ = 4
FloatTensor: Any = torch.FloatTensor
LongTensor: Any = torch.LongTensor


def real_images(number: int, size: int = 4) -> tuple[Tensor]:
    return (torch.rand(size, 3, 8, 8, generator=seeded_generator(number)),)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NZ, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


class Discriminator(nn.Module):
    def __init__(self, norm: bool = True, sigmoid: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 6, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        layers += [nn.Conv2d(6, 8, 3, 1, 1, bias=False)]
        layers += [nn.BatchNorm2d(8)] if norm else []
        layers += [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, 1, 0, bias=False)]
        self.main = nn.Sequential(*layers, *([nn.Sigmoid()] if sigmoid else []))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1, 1).squeeze(1)


def weights_init(m: nn.Module) -> None:
    if m.__class__.__name__.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.1)  # type: ignore[arg-type]


def dcgan_world() -> World:
    net_g, net_d = generator(), Discriminator()
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    return World(
        net_g=net_g,
        net_d=net_d,
        optimizer_g=optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        optimizer_d=optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        criterion=nn.BCELoss(),
        i=0,
    )


@loop("DCGAN", kind="GAN", source="pytorch/examples dcgan/main.py", build=dcgan_world, batch=real_images)
def dcgan(w: World, data: Tensor) -> Any:
    real_label, fake_label = 1, 0
    w.net_d.zero_grad()
    real_cpu = data.to("cpu")
    batch_size = real_cpu.size(0)
    label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device="cpu")
    output = w.net_d(real_cpu)
    err_d_real = w.criterion(output, label)
    err_d_real.backward()
    d_x = output.mean().item()
    noise = torch.randn(batch_size, NZ, 1, 1, device="cpu")
    fake = w.net_g(noise)
    label.fill_(fake_label)
    output = w.net_d(fake.detach())
    err_d_fake = w.criterion(output, label)
    err_d_fake.backward()
    d_g_z1 = output.mean().item()
    err_d = err_d_real + err_d_fake
    w.optimizer_d.step()
    w.net_g.zero_grad()
    label.fill_(real_label)
    output = w.net_d(fake)
    err_g = w.criterion(output, label)
    err_g.backward()
    d_g_z2 = output.mean().item()
    w.optimizer_g.step()
    print(
        "[%d/%d][%d/%d] Loss_D: %.4f Loss_G: %.4f D(x): %.4f D(G(z)): %.4f / %.4f"
        % (0, 25, w.i, 100, err_d.item(), err_g.item(), d_x, d_g_z1, d_g_z2)
    )
    w.i += 1


def compute_gradient_penalty(discriminator: nn.Module, real_samples: Tensor, fake_samples: Tensor) -> Tensor:
    alpha = FloatTensor(np.random.random((real_samples.size(0), 1, 1, 1)))
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = discriminator(interpolates)
    fake = Variable(FloatTensor(real_samples.shape[0]).fill_(1.0), requires_grad=False)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def wgan_gp_world() -> World:
    net_g, net_d = generator(), Discriminator(norm=False, sigmoid=False)
    return World(
        generator=net_g,
        discriminator=net_d,
        optimizer_g=optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        optimizer_d=optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        lambda_gp=10,
        n_critic=3,
        i=0,
        batches_done=0,
    )


@loop(
    "WGAN-GP",
    kind="GAN",
    source="eriklindernoren/PyTorch-GAN implementations/wgan_gp",
    build=wgan_gp_world,
    batch=real_images,
)
def wgan_gp(w: World, imgs: Tensor) -> Any:
    real_imgs = Variable(imgs.type(FloatTensor))
    w.optimizer_d.zero_grad()
    z = Variable(FloatTensor(np.random.normal(0, 1, (imgs.shape[0], NZ, 1, 1))))
    fake_imgs = w.generator(z)
    real_validity = w.discriminator(real_imgs)
    fake_validity = w.discriminator(fake_imgs)
    gradient_penalty = compute_gradient_penalty(w.discriminator, real_imgs.data, fake_imgs.data)
    d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + w.lambda_gp * gradient_penalty
    d_loss.backward()
    w.optimizer_d.step()
    w.optimizer_g.zero_grad()
    if w.i % w.n_critic == 0:
        fake_imgs = w.generator(z)
        fake_validity = w.discriminator(fake_imgs)
        g_loss = -torch.mean(fake_validity)
        g_loss.backward()
        w.optimizer_g.step()
        print("[Batch %d/%d] [D loss: %f] [G loss: %f]" % (w.i, 100, d_loss.item(), g_loss.item()))
        w.batches_done += w.n_critic
    w.i += 1


class ReplayBuffer:
    """Earlier fakes, some of which are handed out in place of new ones."""

    def __init__(self, max_size: int = 6) -> None:
        self.max_size = max_size
        self.data: list[Tensor] = []

    def push_and_pop(self, data: Tensor) -> Tensor:
        to_return = []
        for element in data.data:
            element = torch.unsqueeze(element, 0)
            if len(self.data) < self.max_size:
                self.data.append(element)
                to_return.append(element)
            else:
                if random.uniform(0, 1) > 0.5:
                    i = random.randint(0, self.max_size - 1)
                    to_return.append(self.data[i].clone())
                    self.data[i] = element
                else:
                    to_return.append(element)
        return Variable(torch.cat(to_return))


def translator() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


def patch_discriminator(channels: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3, padding=1))


def cyclegan_world() -> World:
    g_ab, g_ba, d_a, d_b = translator(), translator(), patch_discriminator(), patch_discriminator()
    return World(
        g_ab=g_ab,
        g_ba=g_ba,
        d_a=d_a,
        d_b=d_b,
        optimizer_g=optim.Adam(itertools.chain(g_ab.parameters(), g_ba.parameters()), lr=2e-3, betas=(0.5, 0.999)),
        optimizer_d_a=optim.Adam(d_a.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        optimizer_d_b=optim.Adam(d_b.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        criterion_gan=nn.MSELoss(),
        criterion_cycle=nn.L1Loss(),
        criterion_identity=nn.L1Loss(),
        fake_a_buffer=ReplayBuffer(),
        fake_b_buffer=ReplayBuffer(),
        output_shape=(1, 4, 4),
        lambda_cyc=10.0,
        lambda_id=5.0,
        i=0,
    )


def two_domains(number: int, size: int = 2) -> tuple[dict[str, Tensor]]:
    a, b = (torch.rand(size, 3, 8, 8, generator=seeded_generator(2 * number + side)) for side in range(2))
    return ({"A": a, "B": b},)


def cyclegan_step(w: World, batch: dict[str, Tensor], draw: Any = None) -> Any:
    real_a = Variable(batch["A"].type(FloatTensor))
    real_b = Variable(batch["B"].type(FloatTensor))
    valid = Variable(FloatTensor(np.ones((real_a.size(0), *w.output_shape))), requires_grad=False)
    fake = Variable(FloatTensor(np.zeros((real_a.size(0), *w.output_shape))), requires_grad=False)
    w.g_ab.train()
    w.g_ba.train()
    w.optimizer_g.zero_grad()
    loss_id_a = w.criterion_identity(w.g_ba(real_a), real_a)
    loss_id_b = w.criterion_identity(w.g_ab(real_b), real_b)
    loss_identity = (loss_id_a + loss_id_b) / 2
    fake_b = w.g_ab(real_a)
    loss_gan_ab = w.criterion_gan(w.d_b(fake_b), valid)
    fake_a = w.g_ba(real_b)
    loss_gan_ba = w.criterion_gan(w.d_a(fake_a), valid)
    loss_gan = (loss_gan_ab + loss_gan_ba) / 2
    recov_a = w.g_ba(fake_b)
    loss_cycle_a = w.criterion_cycle(recov_a, real_a)
    recov_b = w.g_ab(fake_a)
    loss_cycle_b = w.criterion_cycle(recov_b, real_b)
    loss_cycle = (loss_cycle_a + loss_cycle_b) / 2
    loss_g = loss_gan + w.lambda_cyc * loss_cycle + w.lambda_id * loss_identity
    loss_g.backward()
    w.optimizer_g.step()
    w.optimizer_d_a.zero_grad()
    loss_real = w.criterion_gan(w.d_a(real_a), valid)
    fake_a_ = w.fake_a_buffer.push_and_pop(fake_a)
    loss_fake = w.criterion_gan(w.d_a(fake_a_.detach()), fake)
    loss_d_a = (loss_real + loss_fake) / 2
    loss_d_a.backward()
    w.optimizer_d_a.step()
    w.optimizer_d_b.zero_grad()
    loss_real = w.criterion_gan(w.d_b(real_b), valid)
    fake_b_ = w.fake_b_buffer.push_and_pop(fake_b)
    loss_fake = w.criterion_gan(w.d_b(fake_b_.detach()), fake)
    loss_d_b = (loss_real + loss_fake) / 2
    loss_d_b.backward()
    w.optimizer_d_b.step()
    loss_d = (loss_d_a + loss_d_b) / 2
    sys.stdout.write(
        "\r[Batch %d/%d] [D loss: %f] [G loss: %f, adv: %f, cycle: %f, identity: %f]"
        % (w.i, 100, loss_d.item(), loss_g.item(), loss_gan.item(), loss_cycle.item(), loss_identity.item())
    )
    w.i += 1


loop(
    "CycleGAN",
    kind="GAN",
    source="eriklindernoren/PyTorch-GAN implementations/cyclegan",
    build=cyclegan_world,
    batch=two_domains,
    calls=10,
)(cyclegan_step)


class Pix2PixDiscriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = patch_discriminator(6)

    def forward(self, img_a: Tensor, img_b: Tensor) -> Tensor:
        return self.model(torch.cat((img_a, img_b), 1))


def pix2pix_world() -> World:
    net_g, net_d = translator(), Pix2PixDiscriminator()
    return World(
        generator=net_g,
        discriminator=net_d,
        optimizer_g=optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        optimizer_d=optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        criterion_gan=nn.MSELoss(),
        criterion_pixelwise=nn.L1Loss(),
        patch=(1, 4, 4),
        lambda_pixel=100,
        i=0,
    )


@loop(
    "pix2pix",
    kind="GAN",
    source="eriklindernoren/PyTorch-GAN implementations/pix2pix",
    build=pix2pix_world,
    batch=two_domains,
)
def pix2pix(w: World, batch: dict[str, Tensor]) -> Any:
    real_a = Variable(batch["B"].type(FloatTensor))
    real_b = Variable(batch["A"].type(FloatTensor))
    valid = Variable(FloatTensor(np.ones((real_a.size(0), *w.patch))), requires_grad=False)
    fake = Variable(FloatTensor(np.zeros((real_a.size(0), *w.patch))), requires_grad=False)
    w.optimizer_g.zero_grad()
    fake_b = w.generator(real_a)
    loss_gan = w.criterion_gan(w.discriminator(fake_b, real_a), valid)
    loss_pixel = w.criterion_pixelwise(fake_b, real_b)
    loss_g = loss_gan + w.lambda_pixel * loss_pixel
    loss_g.backward()
    w.optimizer_g.step()
    w.optimizer_d.zero_grad()
    loss_real = w.criterion_gan(w.discriminator(real_b, real_a), valid)
    loss_fake = w.criterion_gan(w.discriminator(fake_b.detach(), real_a), fake)
    loss_d = 0.5 * (loss_real + loss_fake)
    loss_d.backward()
    w.optimizer_d.step()
    sys.stdout.write("\r[%d/%d] [D loss: %f] [G loss: %f]" % (w.i, 100, loss_d.item(), loss_g.item()))
    w.i += 1


class StyleGenerator(nn.Module):
    """Latents to styles to images; hands out the styles if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Sequential(nn.Linear(NZ, NZ), nn.LeakyReLU(0.2))
        self.constant = nn.Parameter(torch.randn(1, 4, 4, 4))
        self.modulate, self.to_rgb = nn.Linear(NZ, 4), nn.Conv2d(4, 3, 1)

    def forward(self, styles: list[Tensor], return_latents: bool = False, inject_index: int | None = None) -> Any:
        styles = [self.style(s) for s in styles]
        if len(styles) < 2:
            latent = styles[0].unsqueeze(1).repeat(1, 2, 1)
        else:
            if inject_index is None:
                inject_index = random.randint(1, 1)
            latent = torch.cat([styles[0].unsqueeze(1), styles[1].unsqueeze(1)], 1)
        x = self.constant.repeat(latent.shape[0], 1, 1, 1)
        for index in range(2):
            x = torch.tanh(x * (1 + self.modulate(latent[:, index])[:, :, None, None]))
        x = x + 0.1 * torch.randn(x.shape[0], 1, *x.shape[2:])
        image = self.to_rgb(F.interpolate(x, scale_factor=2))
        return (image, latent) if return_latents else (image, None)


def requires_grad(model: nn.Module, flag: bool = True) -> None:
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1: nn.Module, model2: nn.Module, decay: float = 0.999) -> None:
    par1, par2 = dict(model1.named_parameters()), dict(model2.named_parameters())
    for k in par1:
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def make_noise(batch: int, latent_dim: int, n_noise: int) -> Any:
    if n_noise == 1:
        return torch.randn(batch, latent_dim)
    return torch.randn(n_noise, batch, latent_dim).unbind(0)


def mixing_noise(batch: int, latent_dim: int, prob: float) -> Any:
    if prob > 0 and random.random() < prob:
        return make_noise(batch, latent_dim, 2)
    return [make_noise(batch, latent_dim, 1)]


def g_path_regularize(fake_img: Tensor, latents: Tensor, mean_path_length: Any, decay: float = 0.01) -> Any:
    noise = torch.randn_like(fake_img) / math.sqrt(fake_img.shape[2] * fake_img.shape[3])
    (grad,) = autograd.grad(outputs=(fake_img * noise).sum(), inputs=latents, create_graph=True)
    path_lengths = torch.sqrt(grad.pow(2).sum(2).mean(1))
    path_mean = mean_path_length + decay * (path_lengths.mean() - mean_path_length)
    path_penalty = (path_lengths - path_mean).pow(2).mean()
    return path_penalty, path_mean.detach(), path_lengths


def stylegan_world() -> World:
    net_g, net_d, g_ema = StyleGenerator(), Discriminator(norm=False, sigmoid=False), StyleGenerator()
    g_ema.eval()
    accumulate(g_ema, net_g, 0)
    return World(
        generator=net_g,
        discriminator=net_d,
        g_ema=g_ema,
        g_optim=optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.0, 0.99)),
        d_optim=optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.0, 0.99)),
        loss_dict={},
        r1_loss=torch.tensor(0.0),
        path_loss=torch.tensor(0.0),
        path_lengths=torch.tensor(0.0),
        mean_path_length=0,
        mean_path_length_avg=0,
        accum=0.5 ** (32 / (10 * 1000)),
        d_reg_every=4,
        g_reg_every=2,
        wandb=Logger(),
        i=0,
    )


def stylegan_losses(w: World, real_img: Tensor) -> None:
    """The part of the step before the regularisation of the discriminator."""
    noise = mixing_noise(4, NZ, 0.9)
    fake_img, _ = w.generator(noise)
    fake_pred = w.discriminator(fake_img)
    real_pred = w.discriminator(real_img)
    d_loss = F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()
    w.loss_dict["d"] = d_loss
    w.loss_dict["real_score"] = real_pred.mean()
    w.loss_dict["fake_score"] = fake_pred.mean()
    w.discriminator.zero_grad()
    d_loss.backward()
    w.d_optim.step()


def stylegan_generator(w: World) -> None:
    """The generator's part."""
    noise = mixing_noise(4, NZ, 0.9)
    fake_img, _ = w.generator(noise)
    g_loss = F.softplus(-w.discriminator(fake_img)).mean()
    w.loss_dict["g"] = g_loss
    w.generator.zero_grad()
    g_loss.backward()
    w.g_optim.step()
    if w.i % w.g_reg_every == 0:
        noise = mixing_noise(2, NZ, 0.9)
        fake_img, latents = w.generator(noise, return_latents=True)
        w.path_loss, w.mean_path_length, w.path_lengths = g_path_regularize(fake_img, latents, w.mean_path_length)
        w.generator.zero_grad()
        weighted_path_loss = 2 * w.g_reg_every * w.path_loss
        weighted_path_loss += 0 * fake_img[0, 0, 0, 0]
        weighted_path_loss.backward()
        w.g_optim.step()
        w.mean_path_length_avg = w.mean_path_length.item()
    w.loss_dict["path"] = w.path_loss
    w.loss_dict["path_length"] = w.path_lengths.mean()


def stylegan_end(w: World) -> None:
    """Averages and logging."""
    accumulate(w.g_ema, w.generator, w.accum)
    values = {name: loss.mean().item() for name, loss in w.loss_dict.items()}
    print(
        f"d: {values['d']:.4f}; g: {values['g']:.4f}; r1: {values['r1']:.4f}; mean path: {w.mean_path_length_avg:.4f}"
    )
    w.wandb.log({"Generator": values["g"], "Mean Path Length": w.mean_path_length, "R1": values["r1"]})
    w.i += 1


@loop(
    "StyleGAN2",
    kind="GAN",
    source="rosinality/stylegan2-pytorch train.py",
    build=stylegan_world,
    batch=real_images,
    calls=14,
)
def stylegan(w: World, real_img: Tensor) -> Any:
    requires_grad(w.generator, False)
    requires_grad(w.discriminator, True)
    stylegan_losses(w, real_img)
    if w.i % w.d_reg_every == 0:
        real_img.requires_grad = True
        real_pred = w.discriminator(real_img)
        (grad_real,) = autograd.grad(outputs=real_pred.sum(), inputs=real_img, create_graph=True)
        w.r1_loss = grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()
        w.discriminator.zero_grad()
        (10 / 2 * w.r1_loss * w.d_reg_every + 0 * real_pred[0]).backward()
        w.d_optim.step()
    w.loss_dict["r1"] = w.r1_loss
    requires_grad(w.generator, True)
    requires_grad(w.discriminator, False)
    stylegan_generator(w)
    stylegan_end(w)


def acgan_world() -> World:
    net_g = nn.Sequential(nn.Embedding(5, NZ), nn.Linear(NZ, 3 * 64), nn.Tanh(), nn.Unflatten(1, (3, 8, 8)))
    body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25), nn.Flatten())
    heads = nn.ModuleDict({"adv": nn.Sequential(nn.Linear(64, 1), nn.Sigmoid()), "aux": nn.Linear(64, 5)})
    net_d = nn.ModuleList([body, heads])
    return World(
        generator=net_g,
        discriminator=net_d,
        optimizer_g=optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        optimizer_d=optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        adversarial_loss=nn.BCELoss(),
        auxiliary_loss=nn.CrossEntropyLoss(),
    )


def classified(discriminator: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    body, heads = discriminator
    out = body(x)
    return heads["adv"](out), heads["aux"](out)  # type: ignore[index]


@loop(
    "AC-GAN",
    kind="GAN",
    source="eriklindernoren/PyTorch-GAN implementations/acgan",
    build=acgan_world,
    batch=images,
)
def acgan(w: World, imgs: Tensor, labels: Tensor) -> Any:
    batch_size = imgs.shape[0]
    valid = Variable(FloatTensor(batch_size, 1).fill_(1.0), requires_grad=False)
    fake = Variable(FloatTensor(batch_size, 1).fill_(0.0), requires_grad=False)
    real_imgs = Variable(imgs.type(FloatTensor))
    labels = Variable(labels.type(LongTensor))
    w.optimizer_g.zero_grad()
    gen_labels = Variable(LongTensor(np.random.randint(0, 5, batch_size)))
    gen_imgs = w.generator(gen_labels)
    validity, pred_label = classified(w.discriminator, gen_imgs)
    g_loss = 0.5 * (w.adversarial_loss(validity, valid) + w.auxiliary_loss(pred_label, gen_labels))
    g_loss.backward()
    w.optimizer_g.step()
    w.optimizer_d.zero_grad()
    real_pred, real_aux = classified(w.discriminator, real_imgs)
    d_real_loss = (w.adversarial_loss(real_pred, valid) + w.auxiliary_loss(real_aux, labels)) / 2
    fake_pred, fake_aux = classified(w.discriminator, gen_imgs.detach())
    d_fake_loss = (w.adversarial_loss(fake_pred, fake) + w.auxiliary_loss(fake_aux, gen_labels)) / 2
    d_loss = (d_real_loss + d_fake_loss) / 2
    pred = np.concatenate([real_aux.data.cpu().numpy(), fake_aux.data.cpu().numpy()], axis=0)
    gt = np.concatenate([labels.data.cpu().numpy(), gen_labels.data.cpu().numpy()], axis=0)
    d_acc = np.mean(np.argmax(pred, axis=1) == gt)
    d_loss.backward()
    w.optimizer_d.step()
    print("[D loss: %f, acc: %d%%] [G loss: %f]" % (d_loss.item(), 100 * d_acc, g_loss.item()))


@edit("AC-GAN", "torch.cat and argmax in place of .numpy(): the accuracy as a tensor")
def acgan_edited(w: World, imgs: Tensor, labels: Tensor) -> Any:
    batch_size = imgs.shape[0]
    valid, fake = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)
    w.optimizer_g.zero_grad()
    gen_labels = Variable(LongTensor(np.random.randint(0, 5, batch_size)))
    gen_imgs = w.generator(gen_labels)
    validity, pred_label = classified(w.discriminator, gen_imgs)
    g_loss = 0.5 * (w.adversarial_loss(validity, valid) + w.auxiliary_loss(pred_label, gen_labels))
    g_loss.backward()
    w.optimizer_g.step()
    w.optimizer_d.zero_grad()
    real_pred, real_aux = classified(w.discriminator, imgs)
    d_real_loss = (w.adversarial_loss(real_pred, valid) + w.auxiliary_loss(real_aux, labels)) / 2
    fake_pred, fake_aux = classified(w.discriminator, gen_imgs.detach())
    d_fake_loss = (w.adversarial_loss(fake_pred, fake) + w.auxiliary_loss(fake_aux, gen_labels)) / 2
    d_loss = (d_real_loss + d_fake_loss) / 2
    pred, gt = torch.cat([real_aux, fake_aux]), torch.cat([labels, gen_labels])
    d_acc = (pred.argmax(1) == gt).float().mean()
    d_loss.backward()
    w.optimizer_d.step()
    print("[D loss: %f, acc: %d%%] [G loss: %f]" % (d_loss.item(), 100 * d_acc.item(), g_loss.item()))
