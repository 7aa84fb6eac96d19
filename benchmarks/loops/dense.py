"""Losses over pixels, boxes and pairs: segmentation, detection, restoration, style, siamese."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, loop
from benchmarks.loops.parts import images
from wholestep.zoo.case import seeded_generator


def masks(number: int) -> tuple[Tensor, Tensor]:
    """Images with a class for each pixel, some of them to be ignored."""
    generator = seeded_generator(number)
    true = torch.randint(0, 4, (3, 8, 8), generator=generator)
    true[torch.rand(3, 8, 8, generator=generator) < 0.1] = 255
    return torch.rand(3, 3, 8, 8, generator=generator), true


def dice_coeff(input: Tensor, target: Tensor, epsilon: float = 1e-6) -> Tensor:
    assert input.size() == target.size()
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


class Bar:
    def __init__(self) -> None:
        self.n, self.postfix = 0, {}

    def update(self, n: int) -> None:
        self.n += n

    def set_postfix(self, **kwargs: Any) -> None:
        self.postfix = kwargs


class UNet(nn.Module):
    def __init__(self, n_classes: int = 4) -> None:
        super().__init__()
        self.n_channels, self.n_classes = 3, n_classes
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.low, self.up = nn.Conv2d(6, 6, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear")
        self.out = nn.Conv2d(12, n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.up(torch.relu(self.low(F.max_pool2d(high, 2))))
        diff = high.size()[2] - low.size()[2]
        low = F.pad(low, [diff // 2, diff - diff // 2, diff // 2, diff - diff // 2])
        return self.out(torch.cat([high, low], dim=1))


def unet_world() -> World:
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.999, foreach=True)
    return World(
        model=model,
        optimizer=optimizer,
        grad_scaler=torch.amp.GradScaler("cpu", enabled=False),
        criterion=nn.CrossEntropyLoss(ignore_index=255),
        experiment=[],
        pbar=Bar(),
        global_step=0,
        epoch_loss=0,
    )


@loop("U-Net with dice", kind="segmentation", source="milesial/Pytorch-UNet train.py", build=unet_world, batch=masks)
def unet(w: World, inputs: Tensor, true_masks: Tensor) -> Any:
    assert inputs.shape[1] == w.model.n_channels, f"Network has been defined with {w.model.n_channels} input channels"
    inputs = inputs.to(device="cpu", dtype=torch.float32, memory_format=torch.channels_last)
    true_masks = true_masks.to(device="cpu", dtype=torch.long)
    with torch.autocast("cpu", enabled=False):
        masks_pred = w.model(inputs)
        loss = w.criterion(masks_pred, true_masks)
        valid = (true_masks != 255).unsqueeze(1)
        one_hot = F.one_hot(true_masks.clamp(max=3), w.model.n_classes).permute(0, 3, 1, 2).float() * valid
        loss += 1 - dice_coeff((F.softmax(masks_pred, dim=1).float() * valid).flatten(0, 1), one_hot.flatten(0, 1))
    w.optimizer.zero_grad(set_to_none=True)
    w.grad_scaler.scale(loss).backward()
    w.grad_scaler.unscale_(w.optimizer)
    torch.nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    w.grad_scaler.step(w.optimizer)
    w.grad_scaler.update()
    w.pbar.update(inputs.shape[0])
    w.global_step += 1
    w.epoch_loss += loss.item()
    w.experiment.append({"train loss": loss.item(), "step": w.global_step, "epoch": 1})
    w.pbar.set_postfix(**{"loss (batch)": loss.item()})


def boxes(number: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded_generator(number)
    corner, size = torch.rand(2, 3, 2, generator=generator) * 4, torch.rand(2, 3, 2, generator=generator) * 3 + 1
    labels = torch.randint(1, 4, (2, 3), generator=generator)
    return torch.rand(2, 3, 8, 8, generator=generator), torch.cat([corner, corner + size], -1), labels


def box_iou(one: Tensor, other: Tensor) -> Tensor:
    area1, area2 = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (one, other))
    low, high = torch.max(one[:, None, :2], other[:, :2]), torch.min(one[:, None, 2:], other[:, 2:])
    size = (high - low).clamp(min=0)
    inter = size[:, :, 0] * size[:, :, 1]
    return inter / (area1[:, None] + area2 - inter)


class Retina(nn.Module):
    """Anchors on a grid, each with classes and offsets."""

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.classes, self.offsets = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)
        grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).view(-1, 2) * 2
        self.register_buffer("anchors", torch.cat([grid, grid + 3], -1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x))
        return tuple(head(x).flatten(2).transpose(1, 2) for head in (self.classes, self.offsets))  # type: ignore[return-value]


def matched(iou: Tensor, high: float = 0.3, low: float = 0.1) -> Tensor:
    """For each anchor the box it is nearest to, -1 for background and -2 for those in between."""
    values, matches = iou.max(dim=0)
    all_matches = matches.clone()
    matches[values < low] = -1
    matches[(values >= low) & (values < high)] = -2
    best = iou.max(dim=1).values
    pairs = torch.where(iou == best[:, None])
    matches[pairs[1]] = all_matches[pairs[1]]
    return matches


def sigmoid_focal_loss(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2) -> Tensor:
    p = torch.sigmoid(inputs)
    ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * ce_loss * ((1 - p_t) ** gamma)).sum()


def retina_world() -> World:
    model = Retina()
    return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), log=[])


@loop(
    "RetinaNet losses",
    kind="detection",
    source="pytorch/vision torchvision/models/detection/retinanet.py, references/detection/engine.py",
    build=retina_world,
    batch=boxes,
)
def retina(w: World, inputs: Tensor, all_boxes: Tensor, all_labels: Tensor) -> Any:
    logits, offsets = w.model(inputs)
    class_losses, box_losses = [], []
    for index in range(inputs.shape[0]):
        matches = matched(box_iou(all_boxes[index], w.model.anchors))
        foreground = matches >= 0
        num_foreground = foreground.sum()
        target = torch.zeros_like(logits[index])
        target[foreground, all_labels[index][matches[foreground]]] = 1.0
        valid = matches != -2
        class_losses.append(sigmoid_focal_loss(logits[index][valid], target[valid]) / max(1, num_foreground))
        wanted = all_boxes[index][matches[foreground]] - w.model.anchors[foreground]
        box_losses.append(F.l1_loss(offsets[index][foreground], wanted, reduction="sum") / max(1, num_foreground))
    loss_dict = {"classification": sum(class_losses) / 2, "bbox_regression": sum(box_losses) / 2}
    losses = sum(loss for loss in loss_dict.values())
    loss_value = losses.item()  # type: ignore[union-attr]
    if not torch.isfinite(torch.tensor(1.0)):
        print(f"Loss is {loss_value}, stopping training")
    w.optimizer.zero_grad()
    losses.backward()  # type: ignore[union-attr]
    w.optimizer.step()
    w.log.append(loss_value)


def small_and_large(number: int) -> tuple[list[Tensor]]:
    large = torch.rand(3, 1, 8, 8, generator=seeded_generator(number))
    return ([F.avg_pool2d(large, 2), large],)


def super_resolution_world() -> World:
    model = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return World(model=model, optimizer=optimizer, criterion=nn.MSELoss(), epoch_loss=0, iteration=1)


@loop(
    "super resolution",
    kind="image to image",
    source="pytorch/examples super_resolution/main.py",
    build=super_resolution_world,
    batch=small_and_large,
)
def super_resolution(w: World, batch: list[Tensor]) -> Any:
    small, target = batch[0].to("cpu"), batch[1].to("cpu")
    w.optimizer.zero_grad()
    loss = w.criterion(w.model(small), target)
    w.epoch_loss += loss.item()
    loss.backward()
    w.optimizer.step()
    print("===> Epoch[{}]({}/{}): Loss: {:.4f}".format(1, w.iteration, 100, loss.item()))
    w.iteration += 1


class VGG(nn.Module):
    """Features of a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.slice1, self.slice2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x: Tensor) -> Any:
        h1 = torch.relu(self.slice1(x))
        h2 = torch.relu(self.slice2(F.max_pool2d(h1, 2)))
        return collections.namedtuple("VggOutputs", ["relu1_2", "relu2_2"])(h1, h2)


def gram_matrix(y: Tensor) -> Tensor:
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch: Tensor) -> Tensor:
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch.div_(255.0) - mean) / std


def style_world() -> World:
    transformer = nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Conv2d(6, 3, 1)
    )
    vgg = VGG()
    gram_style = [gram_matrix(y).detach() for y in vgg(torch.rand(6, 3, 8, 8))]
    return World(
        transformer=transformer,
        vgg=vgg,
        optimizer=torch.optim.Adam(transformer.parameters(), 1e-3),
        mse_loss=nn.MSELoss(),
        gram_style=gram_style,
        count=0,
        batch_id=0,
        agg_content_loss=0.0,
        agg_style_loss=0.0,
    )


@loop(
    "fast neural style",
    kind="image to image",
    source="pytorch/examples fast_neural_style/neural_style/neural_style.py",
    build=style_world,
    batch=images,
)
def style(w: World, x: Tensor, _: Tensor) -> Any:
    n_batch = len(x)
    w.count += n_batch
    w.optimizer.zero_grad()
    y = w.transformer(x)
    y = normalize_batch(y)
    x = normalize_batch(x)
    features_y = w.vgg(y)
    features_x = w.vgg(x)
    content_loss = 1e5 * w.mse_loss(features_y.relu2_2, features_x.relu2_2)
    style_loss: Any = 0.0
    for ft_y, gm_s in zip(features_y, w.gram_style):
        gm_y = gram_matrix(ft_y)
        style_loss += w.mse_loss(gm_y, gm_s[:n_batch, :, :])
    style_loss *= 1e10
    total_loss = content_loss + style_loss
    total_loss.backward()
    w.optimizer.step()
    w.agg_content_loss += content_loss.item()
    w.agg_style_loss += style_loss.item()
    if (w.batch_id + 1) % 3 == 0:
        mesg = "Epoch {}:\t[{}/{}]\tcontent: {:.6f}\tstyle: {:.6f}\ttotal: {:.6f}".format(
            1,
            w.count,
            600,
            w.agg_content_loss / (w.batch_id + 1),
            w.agg_style_loss / (w.batch_id + 1),
            (w.agg_content_loss + w.agg_style_loss) / (w.batch_id + 1),
        )
        print(mesg)
    w.batch_id += 1


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.fc, self.sigmoid = nn.Sequential(nn.Linear(128, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)), nn.Sigmoid()

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        both = [self.body(x).view(x.size()[0], -1) for x in (input1, input2)]
        return self.sigmoid(self.fc(torch.cat(both, 1)))


def pairs(number: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded_generator(number)
    one, two = (torch.rand(4, 3, 8, 8, generator=generator) for _ in range(2))
    return one, two, torch.randint(2, (4,), generator=generator).float()


def siamese_world() -> World:
    model = SiameseNetwork()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return World(model=model, optimizer=optimizer, criterion=nn.BCELoss(), batch_idx=0)


@loop(
    "siamese network",
    kind="metric learning",
    source="pytorch/examples siamese_network/main.py",
    build=siamese_world,
    batch=pairs,
)
def siamese(w: World, images_1: Tensor, images_2: Tensor, targets: Tensor) -> Any:
    images_1, images_2, targets = images_1.to("cpu"), images_2.to("cpu"), targets.to("cpu")
    w.optimizer.zero_grad()
    outputs = w.model(images_1, images_2).squeeze()
    loss = w.criterion(outputs, targets)
    loss.backward()
    w.optimizer.step()
    if w.batch_idx % 3 == 0:
        print(f"Train Epoch: 1 [{w.batch_idx * len(images_1)}/400]\tLoss: {loss.item():.6f}")
    w.batch_idx += 1
