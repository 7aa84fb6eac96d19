# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Detection by anchors: the focal loss with masks, image by image."""

from __future__ import annotations

import collections

import numpy as np
import torch
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import integers, normal
from wholestep.zoo.case import seeded_generator

CLASSES = 3
ALPHA, GAMMA = 0.25, 2.0


class Detector(nn.Module):
    """Class probabilities and offsets of one anchor for each place of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.classes, self.offsets = nn.Conv2d(6, CLASSES, 1), nn.Conv2d(6, 4, 1)
        x, y = torch.meshgrid(torch.arange(4) * 2.0, torch.arange(4) * 2.0, indexing="xy")
        self.register_buffer("anchors", torch.stack([x, y, x + 3, y + 3], -1).view(1, -1, 4))

    def forward(self, images):
        features = self.body(images)
        classes = self.classes(features).sigmoid().permute(0, 2, 3, 1).reshape(len(images), -1, CLASSES)
        offsets = self.offsets(features).permute(0, 2, 3, 1).reshape(len(images), -1, 4)
        return classes, offsets, self.anchors

    def freeze_bn(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()


def calc_iou(a, b):
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    iw = torch.min(torch.unsqueeze(a[:, 2], dim=1), b[:, 2]) - torch.max(torch.unsqueeze(a[:, 0], 1), b[:, 0])
    ih = torch.min(torch.unsqueeze(a[:, 3], dim=1), b[:, 3]) - torch.max(torch.unsqueeze(a[:, 1], 1), b[:, 1])
    iw, ih = torch.clamp(iw, min=0), torch.clamp(ih, min=0)
    ua = torch.unsqueeze((a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1]), dim=1) + area - iw * ih
    return iw * ih / torch.clamp(ua, min=1e-8)


def centres(boxes):
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    return widths, heights, boxes[:, 0] + 0.5 * widths, boxes[:, 1] + 0.5 * heights


def focal(classification, targets):
    alpha_factor = torch.ones(targets.shape) * ALPHA
    alpha_factor = torch.where(torch.eq(targets, 1.0), alpha_factor, 1.0 - alpha_factor)
    focal_weight = torch.where(torch.eq(targets, 1.0), 1.0 - classification, classification)
    focal_weight = alpha_factor * torch.pow(focal_weight, GAMMA)
    bce = -(targets * torch.log(classification) + (1.0 - targets) * torch.log(1.0 - classification))
    return torch.where(torch.ne(targets, -1.0), focal_weight * bce, torch.zeros(targets.shape))


def offsets_to(anchor, assigned):
    """What the regression should give: from each anchor to the box that it was given."""
    widths, heights, ctr_x, ctr_y = centres(anchor)
    gt_widths, gt_heights, gt_ctr_x, gt_ctr_y = centres(assigned)
    gt_widths, gt_heights = torch.clamp(gt_widths, min=1), torch.clamp(gt_heights, min=1)
    dx, dy = (gt_ctr_x - ctr_x) / widths, (gt_ctr_y - ctr_y) / heights
    targets = torch.stack((dx, dy, torch.log(gt_widths / widths), torch.log(gt_heights / heights))).t()
    return targets / torch.Tensor([[0.1, 0.1, 0.2, 0.2]])


def smooth(diff):
    return torch.where(torch.le(diff, 1.0 / 9.0), 0.5 * 9.0 * torch.pow(diff, 2), diff - 0.5 / 9.0)


def mean_of(losses):
    return torch.stack(losses).mean(dim=0, keepdim=True)


class FocalLoss(nn.Module):
    """Masks choose the anchors that count; an image without boxes, or without near anchors, has branches of its own."""

    def forward(self, classifications, regressions, anchors, annotations):
        classification_losses, regression_losses = [], []
        anchor = anchors[0, :, :]
        for j in range(classifications.shape[0]):
            classification = torch.clamp(classifications[j, :, :], 1e-4, 1.0 - 1e-4)
            regression = regressions[j, :, :]
            bbox_annotation = annotations[j, :, :]
            bbox_annotation = bbox_annotation[bbox_annotation[:, 4] != -1]
            if bbox_annotation.shape[0] == 0:
                classification_losses.append(focal(classification, torch.zeros(classification.shape)).sum())
                regression_losses.append(torch.tensor(0).float())
                continue
            iou_max, iou_argmax = torch.max(calc_iou(anchor, bbox_annotation[:, :4]), dim=1)
            targets = torch.ones(classification.shape) * -1
            targets[torch.lt(iou_max, 0.4), :] = 0
            positive_indices = torch.ge(iou_max, 0.5)
            num_positive_anchors = positive_indices.sum()
            assigned_annotations = bbox_annotation[iou_argmax, :]
            targets[positive_indices, :] = 0
            targets[positive_indices, assigned_annotations[positive_indices, 4].long()] = 1
            cls_loss = focal(classification, targets)
            classification_losses.append(cls_loss.sum() / torch.clamp(num_positive_anchors.float(), min=1.0))
            if positive_indices.sum() > 0:
                assigned_annotations = assigned_annotations[positive_indices, :]
                wanted = offsets_to(anchor[positive_indices], assigned_annotations)
                regression_losses.append(smooth(torch.abs(wanted - regression[positive_indices, :])).mean())
            else:
                regression_losses.append(torch.tensor(0).float())
        return mean_of(classification_losses), mean_of(regression_losses)


def annotated(n):
    """Up to three boxes for each image, filled up by -1; one image of the fourth batch has none."""
    corner = torch.rand(3, 3, 2, generator=seeded_generator(n)) * 4
    boxes = torch.cat([corner, corner + 2.5 + normal(n, 3, 3, 2).abs(), integers(n, CLASSES, 3, 3, 1).float()], -1)
    counts = torch.tensor([1, 3, 2]) if n % 4 != 3 else torch.tensor([2, 0, 1])
    return normal(n, 3, 3, 8, 8), torch.where(torch.arange(3)[None, :, None] < counts[:, None, None], boxes, -1.0)


def detector_world() -> World:
    model = Detector()
    return World(
        retinanet=model,
        focal_loss=FocalLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss_hist=collections.deque(maxlen=500),
        epoch_loss=[],
        iter_num=0,
    )


def detection_step(w, images, annot):
    w.retinanet.train()
    w.retinanet.freeze_bn()
    w.optimizer.zero_grad()
    classification_loss, regression_loss = w.focal_loss(*w.retinanet(images), annot)
    classification_loss = classification_loss.mean()
    regression_loss = regression_loss.mean()
    loss = classification_loss + regression_loss
    if bool(loss == 0):
        return
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.retinanet.parameters(), 0.1)
    w.optimizer.step()
    w.loss_hist.append(float(loss))
    w.epoch_loss.append(float(loss))
    print(
        f"Epoch: 0 | Iteration: {w.iter_num} | Classification loss: {float(classification_loss):1.5f} | "
        f"Regression loss: {float(regression_loss):1.5f} | Running loss: {np.mean(w.loss_hist):1.5f}"
    )
    w.iter_num += 1


loop(
    "RetinaNet, focal loss with masks image by image",
    kind="detection",
    source="yhenon/pytorch-retinanet retinanet/losses.py, train.py",
    build=detector_world,
    batch=annotated,
)(detection_step)


@edit(
    "RetinaNet, focal loss with masks image by image",
    "no `if bool(loss == 0)`; `sum(hist) / len(hist)` in place of `np.mean`",
)
def detection_edited(w, images, annot):
    w.retinanet.train()
    w.retinanet.freeze_bn()
    w.optimizer.zero_grad()
    classification_loss, regression_loss = w.focal_loss(*w.retinanet(images), annot)
    classification_loss = classification_loss.mean()
    regression_loss = regression_loss.mean()
    loss = classification_loss + regression_loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.retinanet.parameters(), 0.1)
    w.optimizer.step()
    w.loss_hist.append(float(loss))
    w.epoch_loss.append(float(loss))
    running = sum(w.loss_hist) / len(w.loss_hist)
    print(
        f"Epoch: 0 | Iteration: {w.iter_num} | Classification loss: {float(classification_loss):1.5f} | "
        f"Regression loss: {float(regression_loss):1.5f} | Running loss: {running:1.5f}"
    )
    w.iter_num += 1
