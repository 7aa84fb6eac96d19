# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Speech: connectionist temporal classification, masked spans."""

from __future__ import annotations

import collections

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import SummaryWriter, integers, mlp, normal

KIND = "speech"
LABELS = 6


class Recognizer(nn.Module):
    """Convolutions over time and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Conv1d(5, 8, 3, stride=2, padding=1)
        self.layer_norm = nn.LayerNorm(8)
        self.rnn = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.classifier = nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, LABELS))

    def forward(self, x):
        x = F.gelu(self.layer_norm(self.cnn(x).transpose(1, 2)))
        x, _ = self.rnn(x)
        return self.classifier(x)


def utterances(n):
    labels = 1 + integers(n, LABELS - 1, 4, 4)
    return normal(n, 4, 5, 20), labels, [10, 9, 10, 8], [4, 3, 2, 4]


class IterMeter:
    """Counts iterations."""

    def __init__(self) -> None:
        self.val = 0

    def step(self) -> None:
        self.val += 1

    def get(self):
        return self.val


def speech_world() -> World:
    model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    return World(
        model=model,
        optimizer=optimizer,
        criterion=nn.CTCLoss(blank=0),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=5e-4, steps_per_epoch=10, epochs=1, anneal_strategy="linear"
        ),
        iter_meter=IterMeter(),
        experiment=SummaryWriter(),
        batch_idx=0,
    )


@loop(
    "CTC, lengths as lists, scheduler in the step",
    kind=KIND,
    source="AssemblyAI's tutorial 'Building an end-to-end Speech Recognition model in PyTorch'",
    build=speech_world,
    batch=utterances,
    calls=9,
)
def deep_speech(w, spectrograms, labels, input_lengths, label_lengths):
    spectrograms, labels = spectrograms.to("cpu"), labels.to("cpu")
    w.optimizer.zero_grad()
    output = w.model(spectrograms)
    output = F.log_softmax(output, dim=2)
    output = output.transpose(0, 1)
    loss = w.criterion(output, labels, input_lengths, label_lengths)
    loss.backward()
    w.experiment.add_scalar("loss", loss.item(), w.iter_meter.get())
    w.experiment.add_scalar("learning_rate", w.scheduler.get_last_lr()[0], w.iter_meter.get())
    w.optimizer.step()
    w.scheduler.step()
    w.iter_meter.step()
    if w.batch_idx % 4 == 0:
        done = 100.0 * w.batch_idx / 9
        print(f"Train Epoch: 0 [{w.batch_idx * len(spectrograms)}/36 ({done:.0f}%)]\tLoss: {loss.item():.6f}")
    w.batch_idx += 1


class MetricLogger(collections.defaultdict):
    """Numbers by name, printed in one line."""

    def __init__(self, name) -> None:
        super().__init__(lambda: 0.0)
        self["name"] = name

    def __call__(self) -> None:
        print(", ".join(f"{key}: {value}" for key, value in self.items()))


def levenshtein_distance(r, h):
    row = list(range(len(h) + 1))
    for i in range(1, len(r) + 1):
        before, row = row, [i, *row[1:]]
        for j in range(1, len(h) + 1):
            row[j] = min(before[j - 1] + (r[i - 1] != h[j - 1]), before[j] + 1, row[j - 1] + 1)
    return row[-1]


def wav2letter_world() -> World:
    model = Recognizer()
    return World(
        model=model,
        optimizer=torch.optim.Adadelta(model.parameters(), lr=0.6, weight_decay=1e-5, eps=1e-8, rho=0.95),
        criterion=nn.CTCLoss(blank=0, zero_infinity=False),
        metric=MetricLogger("train"),
        clip_grad=1.0,
    )


def length_tensors(n):
    inputs, labels, input_lengths, label_lengths = utterances(n)
    return inputs, labels, torch.tensor(input_lengths), torch.tensor(label_lengths)


def train_and_count(w, inputs, targets, tensors_lengths, target_lengths):
    inputs = inputs.to("cpu", non_blocking=True)
    targets = targets.to("cpu", non_blocking=True)
    outputs = F.log_softmax(w.model(inputs), -1).transpose(0, 1)
    loss = w.criterion(outputs, targets, tensors_lengths, target_lengths)
    w.optimizer.zero_grad()
    loss.backward()
    if w.clip_grad > 0:
        w.metric["gradient"] = torch.nn.utils.clip_grad_norm_(w.model.parameters(), w.clip_grad)
    w.optimizer.step()
    return outputs, loss


def count(w, inputs, loss) -> None:
    w.metric["batch size"] = len(inputs)
    w.metric["dataset length"] += w.metric["batch size"]
    w.metric["iteration"] += 1
    w.metric["loss"] = loss.item()
    w.metric["cumulative loss"] += w.metric["loss"]
    w.metric["average loss"] = w.metric["cumulative loss"] / w.metric["iteration"]
    w.metric()


def compute_error_rates(outputs, targets, metric) -> None:
    output = outputs.transpose(0, 1).to("cpu").argmax(-1).tolist()
    target = targets.tolist()
    metric["cer"] += sum(levenshtein_distance(t, o) for t, o in zip(target, output))
    metric["total chars"] += sum(len(t) for t in target)
    metric["cer over target length"] = metric["cer"] / metric["total chars"]


WAV2LETTER = {"kind": KIND, "source": "pytorch/audio examples/pipeline_wav2letter/main.py", "build": wav2letter_world}


@loop("wav2letter, CTC, error rates by edit distance", batch=length_tensors, **WAV2LETTER)
def wav2letter(w, inputs, targets, tensors_lengths, target_lengths):
    outputs, loss = train_and_count(w, inputs, targets, tensors_lengths, target_lengths)
    compute_error_rates(outputs, targets, w.metric)
    count(w, inputs, loss)


@edit(
    "wav2letter, CTC, error rates by edit distance",
    "return the outputs, and take the edit distance after the call",
    between=lambda w, returned: compute_error_rates(*returned, w.metric),
)
def wav2letter_edited(w, inputs, targets, tensors_lengths, target_lengths):
    outputs, loss = train_and_count(w, inputs, targets, tensors_lengths, target_lengths)
    count(w, inputs, loss)
    return outputs.detach(), targets


class Masked(nn.Module):
    """Features of which spans are masked; the quantised ones are found among others."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_extractor = nn.Conv1d(1, 6, 4, stride=2)
        self.mask_emb = nn.Parameter(torch.rand(6))
        self.encoder, self.final_proj, self.project_q = mlp(6, 10, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.layer_norm, self.num_negatives = nn.LayerNorm(6), 3

    def spans(self, bsz, tsz, mask_prob=0.5, mask_length=3):
        """The same number of masked steps in each row, so that they make a rectangle."""
        mask_idcs = []
        for _ in range(bsz):
            num_mask = int(mask_prob * tsz / float(mask_length) + np.random.rand())
            mask_idc = np.random.choice(tsz - mask_length, max(num_mask, 1), replace=False)
            mask_idc = np.asarray([mask_idc[j] + offset for j in range(len(mask_idc)) for offset in range(mask_length)])
            mask_idcs.append(np.unique(mask_idc[mask_idc < tsz]))
        mask = np.full((bsz, tsz), False)
        min_len = min(len(m) for m in mask_idcs)
        for i, mask_idc in enumerate(mask_idcs):
            mask[i, np.random.choice(mask_idc, min_len, replace=False)] = True
        return mask

    def sample_negatives(self, y, num):
        bsz, tsz, fsz = y.shape
        with torch.no_grad():
            tszs = torch.arange(num).unsqueeze(-1).expand(-1, self.num_negatives).flatten()
            neg_idxs = torch.randint(low=0, high=tsz - 1, size=(bsz, self.num_negatives * num))
            neg_idxs[neg_idxs >= tszs] += 1
        for i in range(1, bsz):
            neg_idxs[i] += i * tsz
        negs = y.reshape(-1, fsz)[neg_idxs.view(-1)]
        return negs.view(bsz, num, self.num_negatives, fsz).permute(2, 0, 1, 3)

    def forward(self, source):
        features = self.feature_extractor(source.unsqueeze(1))
        features_pen = features.float().pow(2).mean()
        features = self.layer_norm(features.transpose(1, 2))
        x, bsz, tsz = features.clone(), features.size(0), features.size(1)
        mask_indices = torch.from_numpy(self.spans(bsz, tsz))
        x[mask_indices] = self.mask_emb
        y = features[mask_indices].view(bsz, -1, features.size(-1))
        x = self.final_proj(self.encoder(x)[mask_indices].view(bsz, -1, x.size(-1)))
        return self.scores(x, self.project_q(y)), features_pen

    def scores(self, x, y):
        negatives = self.sample_negatives(y, y.size(1))
        neg_is_pos = (y == negatives).all(-1)
        targets = torch.cat([y.unsqueeze(0), negatives], dim=0)
        logits = torch.cosine_similarity(x.float(), targets.float(), dim=-1) / 0.1
        if neg_is_pos.any():
            logits[1:][neg_is_pos] = float("-inf")
        return logits.transpose(0, 2).reshape(-1, logits.size(0))


class MaskedByTorch(Masked):
    """Spans in fixed number, drawn by torch; scores that hide by `masked_fill` without a question."""

    def forward(self, source):
        features = self.feature_extractor(source.unsqueeze(1))
        features_pen = features.float().pow(2).mean()
        features = self.layer_norm(features.transpose(1, 2))
        bsz, tsz, fsz = features.shape
        places = torch.rand(bsz, tsz).argsort(dim=1)[:, :4].sort(dim=1).values
        index = places.unsqueeze(-1).expand(-1, -1, fsz)
        x = features.scatter(1, index, self.mask_emb.expand(bsz, 4, fsz))
        x = self.final_proj(self.encoder(x).gather(1, index))
        return self.scores(x, self.project_q(features.gather(1, index))), features_pen

    def scores(self, x, y):
        negatives = self.sample_negatives(y, y.size(1))
        neg_is_pos = (y == negatives).all(-1)
        targets = torch.cat([y.unsqueeze(0), negatives], dim=0)
        logits = torch.cosine_similarity(x.float(), targets.float(), dim=-1) / 0.1
        hidden = torch.cat([torch.zeros_like(neg_is_pos[:1]), neg_is_pos])
        return logits.masked_fill(hidden, float("-inf")).transpose(0, 2).reshape(-1, logits.size(0))

    def sample_negatives(self, y, num):
        bsz, tsz, fsz = y.shape
        tszs = torch.arange(num).unsqueeze(-1).expand(-1, self.num_negatives).flatten()
        neg_idxs = torch.randint(low=0, high=tsz - 1, size=(bsz, self.num_negatives * num))
        neg_idxs = neg_idxs + (neg_idxs >= tszs) + torch.arange(bsz).unsqueeze(1) * tsz
        return y.reshape(-1, fsz)[neg_idxs.view(-1)].view(bsz, num, self.num_negatives, fsz).permute(2, 0, 1, 3)


def masked_world(make=Masked) -> World:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
    return World(model=model, optimizer=optimizer, logs=[], num_updates=0)


def masked_spans(w, source):
    logits, features_pen = w.model(source)
    target = logits.new_zeros(logits.size(0), dtype=torch.long)
    loss = F.cross_entropy(logits, target, reduction="sum")
    sample_size = target.numel()
    loss = loss + 10 * features_pen * sample_size
    w.optimizer.zero_grad()
    loss.backward()
    for p in w.model.parameters():
        if p.grad is not None:
            p.grad.mul_(1 / sample_size)
    w.optimizer.step()
    w.num_updates += 1
    with torch.no_grad():
        best = logits.argmax(-1) == 0
        both = best & (logits.argmin(-1) == 0)
        corr = best.long().sum().item() - both.long().sum().item()
    w.logs.append({"loss": loss.item(), "correct": corr, "count": float(best.numel())})


MASKED = {"kind": KIND, "batch": lambda n: (normal(n, 4, 26),)}
loop(
    "wav2vec 2.0, spans masked by NumPy in the step",
    build=masked_world,
    source="facebookresearch/fairseq fairseq/models/wav2vec/wav2vec2.py, fairseq/criterions/wav2vec_criterion.py",
    **MASKED,
)(masked_spans)
edit(
    "wav2vec 2.0, spans masked by NumPy in the step",
    "places in fixed number drawn by torch, `scatter`/`gather` for `x[mask]`, `masked_fill` without asking `any()`",
    build=lambda: masked_world(MaskedByTorch),
)(masked_spans)
