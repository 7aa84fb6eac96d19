# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Rays of scenes and clouds of points: NeRF, PointNet."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import SummaryWriter, integers, mlp, normal

H, W, FOCAL = 6, 6, 4.0


class Field(nn.Module):
    """Colour and density of a place: a small network over sines of its coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3 * 5, 12, 4)
        self.freq_bands = 2.0 ** torch.linspace(0.0, 1.0, steps=2)

    def forward(self, pts):
        parts = [pts] + [fn(pts * freq) for freq in self.freq_bands for fn in (torch.sin, torch.cos)]
        return self.net(torch.cat(parts, -1))


def get_rays(c2w):
    i, j = torch.meshgrid(torch.linspace(0, W - 1, W), torch.linspace(0, H - 1, H), indexing="ij")
    i, j = i.t(), j.t()
    dirs = torch.stack([(i - W * 0.5) / FOCAL, -(j - H * 0.5) / FOCAL, -torch.ones_like(i)], -1)
    rays_d = torch.sum(dirs[..., np.newaxis, :] * c2w[:3, :3], -1)
    return c2w[:3, -1].expand(rays_d.shape), rays_d


def raw2outputs(raw, z_vals, rays_d, raw_noise_std):
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.Tensor([1e10]).expand(dists[..., :1].shape)], -1)
    dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
    noise = 0.0
    if raw_noise_std > 0.0:
        noise = torch.randn(raw[..., 3].shape) * raw_noise_std
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3] + noise) * dists)
    kept = torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * kept
    return torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2), weights


def sample_pdf(bins, weights, samples):
    weights = weights + 1e-5
    pdf = weights / torch.sum(weights, -1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.rand([*cdf.shape[:-1], samples]).contiguous()
    inds = torch.searchsorted(cdf, u, right=True)
    below = torch.max(torch.zeros_like(inds - 1), inds - 1)
    above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(inds), inds)
    inds_g = torch.stack([below, above], -1)
    matched_shape = [inds_g.shape[0], inds_g.shape[1], cdf.shape[-1]]
    cdf_g = torch.gather(cdf.unsqueeze(1).expand(matched_shape), 2, inds_g)
    bins_g = torch.gather(bins.unsqueeze(1).expand(matched_shape), 2, inds_g)
    denom = cdf_g[..., 1] - cdf_g[..., 0]
    denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
    t = (u - cdf_g[..., 0]) / denom
    return bins_g[..., 0] + t * (bins_g[..., 1] - bins_g[..., 0])


def render(w, batch_rays):
    rays_o, rays_d = batch_rays
    t_vals = torch.linspace(0.0, 1.0, steps=5)
    z_vals = (2.0 * (1.0 - t_vals) + 6.0 * t_vals).expand([rays_o.shape[0], 5])
    mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
    upper = torch.cat([mids, z_vals[..., -1:]], -1)
    lower = torch.cat([z_vals[..., :1], mids], -1)
    z_vals = lower + (upper - lower) * torch.rand(z_vals.shape)
    pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
    rgb0, weights = raw2outputs(w.coarse(pts), z_vals, rays_d, 1.0)
    z_vals_mid = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
    z_samples = sample_pdf(z_vals_mid, weights[..., 1:-1], 4).detach()
    z_vals, _ = torch.sort(torch.cat([z_vals, z_samples], -1), -1)
    pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
    rgb, _ = raw2outputs(w.fine(pts), z_vals, rays_d, 1.0)
    return rgb, rgb0


def optimize(w, batch_rays, target_s) -> None:
    rgb, rgb0 = render(w, batch_rays)
    w.optimizer.zero_grad()
    img_loss = torch.mean((rgb - target_s) ** 2)
    psnr = -10.0 * torch.log(img_loss) / torch.log(torch.Tensor([10.0]))
    loss = img_loss + torch.mean((rgb0 - target_s) ** 2)
    loss.backward()
    w.optimizer.step()
    new_lrate = 5e-4 * (0.1 ** (w.global_step / 250000))
    for param_group in w.optimizer.param_groups:
        param_group["lr"] = new_lrate
    if w.i % 3 == 0:
        print(f"[TRAIN] Iter: {w.i} Loss: {loss.item()}  PSNR: {psnr.item()}")
        w.writer.add_scalar("Train/Loss", loss.item(), w.i)
        w.writer.add_scalar("Train/PSNR", psnr.item(), w.i)
    w.global_step += 1
    w.i += 1


def scene_world() -> World:
    coarse, fine = Field(), Field()
    poses = torch.cat([torch.eye(3).expand(3, 3, 3), normal(0, 3, 3, 1)], -1)
    images = torch.sigmoid(normal(1, 3, H, W, 3))
    parts = [torch.stack([*get_rays(pose), image]) for pose, image in zip(poses, images)]
    return World(
        coarse=coarse,
        fine=fine,
        optimizer=torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4, betas=(0.9, 0.999)),
        poses=poses,
        images=images.numpy(),
        i_train=np.arange(3),
        rays_rgb=torch.stack(parts).permute(0, 2, 3, 1, 4).reshape(-1, 3, 3).contiguous(),
        i_batch=0,
        N_rand=24,
        i=1,
        global_step=0,
        writer=SummaryWriter(),
    )


NERF = {"kind": "rays and points", "source": "yenchenlin/nerf-pytorch run_nerf.py", "build": scene_world}


@loop("NeRF, rays of all images in batches", batch=lambda n: (), calls=10, **NERF)
def batches_of_rays(w):
    batch = torch.transpose(w.rays_rgb[w.i_batch : w.i_batch + w.N_rand], 0, 1)
    batch_rays, target_s = batch[:2], batch[2]
    w.i_batch += w.N_rand
    if w.i_batch >= w.rays_rgb.shape[0]:
        print("Shuffle data after an epoch!")
        rand_idx = torch.randperm(w.rays_rgb.shape[0])
        w.rays_rgb = w.rays_rgb[rand_idx]
        w.i_batch = 0
    optimize(w, batch_rays, target_s)


@loop("NeRF, rays of one image, chosen by NumPy", batch=lambda n: (), **NERF)
def rays_of_one_image(w):
    img_i = np.random.choice(w.i_train)
    target = torch.Tensor(w.images[img_i])
    pose = w.poses[img_i, :3, :4]
    rays_o, rays_d = get_rays(torch.Tensor(pose))
    grid = torch.meshgrid(torch.linspace(0, H - 1, H), torch.linspace(0, W - 1, W), indexing="ij")
    coords = torch.reshape(torch.stack(grid, -1), [-1, 2])
    select_inds = np.random.choice(coords.shape[0], size=[w.N_rand], replace=False)
    select_coords = coords[select_inds].long()
    rays_o = rays_o[select_coords[:, 0], select_coords[:, 1]]
    rays_d = rays_d[select_coords[:, 0], select_coords[:, 1]]
    target_s = target[select_coords[:, 0], select_coords[:, 1]]
    optimize(w, torch.stack([rays_o, rays_d], 0), target_s)


@edit(
    "NeRF, rays of one image, chosen by NumPy",
    "`torch.randint` and `torch.randperm` in place of `np.random.choice`, images in a tensor",
    build=lambda: tensor_scene(),
)
def rays_chosen_by_torch(w):
    img_i = torch.randint(len(w.images), (1,))
    target = w.images[img_i][0]
    pose = w.poses[img_i][0]
    rays_o, rays_d = get_rays(pose)
    grid = torch.meshgrid(torch.linspace(0, H - 1, H), torch.linspace(0, W - 1, W), indexing="ij")
    coords = torch.reshape(torch.stack(grid, -1), [-1, 2])
    select_coords = coords[torch.randperm(coords.shape[0])[: w.N_rand]].long()
    rays_o = rays_o[select_coords[:, 0], select_coords[:, 1]]
    rays_d = rays_d[select_coords[:, 0], select_coords[:, 1]]
    target_s = target[select_coords[:, 0], select_coords[:, 1]]
    optimize(w, torch.stack([rays_o, rays_d], 0), target_s)


def tensor_scene() -> World:
    world = scene_world()
    world.images = torch.from_numpy(world.images)
    return world


class Transform(nn.Module):
    """A square matrix for each cloud, close to the identity."""

    def __init__(self, k) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(k, 8, 1), nn.Conv1d(8, 16, 1)
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(8), nn.BatchNorm1d(16), nn.BatchNorm1d(8)
        self.k = k

    def forward(self, x):
        batchsize = x.size()[0]
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 16)
        x = self.fc2(F.relu(self.bn3(self.fc1(x))))
        iden = Variable(torch.from_numpy(np.eye(self.k).flatten().astype(np.float32)))
        iden = iden.view(1, self.k * self.k).repeat(batchsize, 1)
        if x.is_cuda:
            iden = iden.cuda()
        return (x + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    def __init__(self, k=4) -> None:
        super().__init__()
        self.stn, self.fstn = Transform(3), Transform(8)
        self.conv1, self.conv2 = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 16, 1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(8), nn.BatchNorm1d(16), nn.BatchNorm1d(8)
        self.fc1, self.fc2, self.dropout = nn.Linear(16, 8), nn.Linear(8, k), nn.Dropout(p=0.3)

    def forward(self, x):
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        trans_feat = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), trans_feat).transpose(2, 1)
        x = torch.max(self.bn2(self.conv2(x)), 2, keepdim=True)[0].view(-1, 16)
        x = F.relu(self.bn3(self.dropout(self.fc1(x))))
        return F.log_softmax(self.fc2(x), dim=1), trans, trans_feat


def feature_transform_regularizer(trans):
    d = trans.size()[1]
    eye = torch.eye(d)[None, :, :]
    if trans.is_cuda:
        eye = eye.cuda()
    return torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - eye, dim=(1, 2)))


def cloud(n):
    return normal(n, 6, 12, 3), integers(n, 4, 6, 1)


def cloud_world() -> World:
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.9, 0.999))
    return World(classifier=model, optimizer=optimizer, i=0, mean_correct=[])


def decay(w, returned, n) -> None:
    for group in w.optimizer.param_groups:
        group["lr"] = 0.001 * 0.5 ** (n // 3)


@loop(
    "PointNet, feature transforms held orthogonal",
    kind="rays and points",
    source="fxia22/pointnet.pytorch utils/train_classification.py",
    build=cloud_world,
    batch=cloud,
    between=decay,
)
def pointnet(w, points, target):
    points, target = Variable(points), Variable(target[:, 0])
    points = points.transpose(2, 1)
    w.optimizer.zero_grad()
    w.classifier = w.classifier.train()
    pred, _, trans_feat = w.classifier(points)
    loss = F.nll_loss(pred, target)
    loss += feature_transform_regularizer(trans_feat) * 0.001
    loss.backward()
    w.optimizer.step()
    pred_choice = pred.data.max(1)[1]
    correct = pred_choice.eq(target.data).cpu().sum()
    print("[%d: %d/%d] train loss: %f accuracy: %f" % (0, w.i, 8, loss.item(), correct.item() / 6.0))
    if w.i % 4 == 0:
        w.classifier = w.classifier.eval()
        pred, _, _ = w.classifier(points)
        loss = F.nll_loss(pred, target)
        correct = pred.data.max(1)[1].eq(target.data).cpu().sum()
        print("[%d: %d/%d] test loss: %f accuracy: %f" % (0, w.i, 8, loss.item(), correct.item() / 6.0))
    w.i += 1


def random_point_dropout(batch_pc, max_dropout_ratio=0.875):
    for b in range(batch_pc.shape[0]):
        dropout_ratio = np.random.random() * max_dropout_ratio
        drop_idx = np.where(np.random.random(batch_pc.shape[1]) <= dropout_ratio)[0]
        if len(drop_idx) > 0:
            batch_pc[b, drop_idx, :] = batch_pc[b, 0, :]
    return batch_pc


def shift_point_cloud(batch_data, shift_range=0.1):
    shifts = np.random.uniform(-shift_range, shift_range, (batch_data.shape[0], 3))
    for batch_index in range(batch_data.shape[0]):
        batch_data[batch_index, :, :] += shifts[batch_index, :]
    return batch_data


def pointnet2_rest(w, points, target):
    points = points.transpose(2, 1)
    pred, _, trans_feat = w.classifier(points)
    loss = F.nll_loss(pred, target.long()) + feature_transform_regularizer(trans_feat) * 0.001
    pred_choice = pred.data.max(1)[1]
    correct = pred_choice.eq(target.long().data).cpu().sum()
    w.mean_correct.append(correct.item() / float(points.size()[0]))
    loss.backward()
    w.optimizer.step()
    w.i += 1


@loop(
    "PointNet, clouds augmented in NumPy",
    kind="rays and points",
    source="yanx27/Pointnet_Pointnet2_pytorch train_classification.py",
    build=cloud_world,
    batch=lambda n: (cloud(n)[0], cloud(n)[1][:, 0]),
)
def pointnet2(w, points, target):
    w.optimizer.zero_grad()
    points = points.data.numpy()
    points = random_point_dropout(points)
    points[:, :, 0:3] = shift_point_cloud(points[:, :, 0:3])
    pointnet2_rest(w, torch.Tensor(points), target)


@edit("PointNet, clouds augmented in NumPy", "the clouds are augmented before the step, as a loader would")
def pointnet2_augmented(w, points, target):
    w.optimizer.zero_grad()
    pointnet2_rest(w, points, target)
