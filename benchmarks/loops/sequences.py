# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Trainers of sequence models: text, speech, series, decisions."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import SummaryWriter, accuracy, integers, mlp, normal


class BertLM(nn.Module):
    """Embeddings summed, one encoder layer, two heads of log-probabilities."""

    def __init__(self, hidden=8):
        super().__init__()
        self.hidden = hidden
        self.token, self.segment = nn.Embedding(20, hidden, padding_idx=0), nn.Embedding(3, hidden, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(hidden, 2, 16, batch_first=True)
        self.next_sentence, self.mask_lm = nn.Linear(hidden, 2), nn.Linear(hidden, 20)

    def forward(self, x, segment_label):
        x = self.layer(self.token(x) + self.segment(segment_label))
        return F.log_softmax(self.next_sentence(x[:, 0]), dim=-1), F.log_softmax(self.mask_lm(x), dim=-1)


class ScheduledOptim:
    """A wrapper that sets the rate before each step."""

    def __init__(self, optimizer, d_model, n_warmup_steps):
        self._optimizer, self.n_warmup_steps, self.n_current_steps = optimizer, n_warmup_steps, 0
        self.init_lr = np.power(d_model, -0.5)

    def step_and_update_lr(self):
        self._update_learning_rate()
        self._optimizer.step()

    def zero_grad(self):
        self._optimizer.zero_grad()

    def _get_lr_scale(self):
        return np.min(
            [np.power(self.n_current_steps, -0.5), np.power(self.n_warmup_steps, -1.5) * self.n_current_steps]
        )

    def _update_learning_rate(self):
        self.n_current_steps += 1
        lr = self.init_lr * self._get_lr_scale()
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = lr


class BERTTrainer:
    """Keeps sums of an epoch."""

    def __init__(self):
        self.model = BertLM()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
        self.optim_schedule = ScheduledOptim(self.optim, self.model.hidden, n_warmup_steps=4)
        self.masked_criterion, self.next_criterion = nn.NLLLoss(ignore_index=0), nn.NLLLoss()
        self.log_freq, self.i, self.avg_loss, self.total_correct, self.total_element = 2, 0, 0.0, 0, 0

    def iteration(self, epoch, data, train=True):
        data = {key: value.to("cpu") for key, value in data.items()}
        next_sent_output, mask_lm_output = self.model.forward(data["bert_input"], data["segment_label"])
        next_loss = self.next_criterion(next_sent_output, data["is_next"])
        mask_loss = self.masked_criterion(mask_lm_output.transpose(1, 2), data["bert_label"])
        loss = next_loss + mask_loss
        if train:
            self.optim_schedule.zero_grad()
            loss.backward()
            self.optim_schedule.step_and_update_lr()
        correct = next_sent_output.argmax(dim=-1).eq(data["is_next"]).sum().item()
        self.avg_loss += loss.item()
        self.total_correct += correct
        self.total_element += data["is_next"].nelement()
        post_fix = {
            "epoch": epoch,
            "iter": "[%d/%d]" % (self.i, 8),
            "avg_loss": self.avg_loss / (self.i + 1),
            "mask_loss": mask_loss.item(),
            "next_loss": next_loss.item(),
            "avg_next_acc": self.total_correct / self.total_element * 100,
            "loss": loss.item(),
        }
        if self.i % self.log_freq == 0:
            print(post_fix)
        self.i += 1


def sentences(n):
    data = {"bert_input": integers(n, 19, 4, 6) + 1, "segment_label": integers(n, 2, 4, 6, seed=51) + 1}
    data["bert_label"] = data["bert_input"] * (integers(n, 3, 4, 6, seed=52) == 0)
    data["is_next"] = integers(n, 2, 4, seed=53)
    return 0, data


@loop(
    "BERT, two tasks, an optimizer wrapped by its schedule",
    kind="language",
    source="codertimo/BERT-pytorch bert_pytorch/trainer/pretrain.py, optim_schedule.py",
    build=lambda: World(trainer=BERTTrainer()),
    batch=sentences,
    closure=True,
    held_back=True,
    calls=10,
)
def bert(w):
    return w.trainer.iteration


class Tacotron(nn.Module):
    """A recurrent encoder, frames before and after a net, a gate."""

    def __init__(self):
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(12, 8), nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.decoder, self.gate = nn.Linear(8 + 4, 4), nn.Linear(8 + 4, 1)
        self.postnet = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5))
        self.mask_padding, self.packs = True, True

    def parse_batch(self, batch):
        text_padded, input_lengths, mel_padded, gate_padded, output_lengths = batch
        text_padded = text_padded.long()
        max_len = torch.max(input_lengths.data).item()
        return (text_padded, input_lengths, mel_padded.float(), max_len, output_lengths), (mel_padded, gate_padded)

    def forward(self, inputs):
        text_inputs, text_lengths, mels, max_len, output_lengths = inputs
        x = self.embedding(text_inputs)
        if self.packs:
            x = nn.utils.rnn.pack_padded_sequence(x, text_lengths.cpu().numpy(), batch_first=True)
        self.encoder.flatten_parameters()
        outputs, _ = self.encoder(x)
        if self.packs:
            outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
        else:
            outputs = outputs * (torch.arange(outputs.size(1)) < text_lengths.unsqueeze(1)).unsqueeze(-1)
        context = outputs.mean(1, keepdim=True).expand(-1, mels.size(2), -1)
        hidden = torch.cat([context, mels.transpose(1, 2)], dim=2)
        mel_outputs, gate_outputs = self.decoder(hidden).transpose(1, 2), self.gate(hidden).squeeze(-1)
        return self.parse_output([mel_outputs, mel_outputs + self.postnet(mel_outputs), gate_outputs], output_lengths)

    def parse_output(self, outputs, output_lengths=None):
        if self.mask_padding and output_lengths is not None:
            max_len = torch.max(output_lengths).item()
            ids = torch.arange(0, max_len, out=torch.LongTensor(max_len))
            mask = ~(ids < output_lengths.unsqueeze(1)).bool()
            mask = mask.expand(4, mask.size(0), mask.size(1)).permute(1, 0, 2)
            if not self.packs:
                keep = (~mask).float()
                return [outputs[0] * keep, outputs[1] * keep, outputs[2].masked_fill(mask[:, 0, :], 1e3)]
            outputs[0].data.masked_fill_(mask, 0.0)
            outputs[1].data.masked_fill_(mask, 0.0)
            outputs[2].data.masked_fill_(mask[:, 0, :], 1e3)
        return outputs


def tacotron_loss(model_output, targets):
    mel_target, gate_target = targets[0], targets[1]
    mel_target.requires_grad = False
    gate_target.requires_grad = False
    gate_target = gate_target.view(-1, 1)
    mel_out, mel_out_postnet, gate_out = model_output
    gate_out = gate_out.view(-1, 1)
    mel_loss = nn.MSELoss()(mel_out, mel_target) + nn.MSELoss()(mel_out_postnet, mel_target)
    return mel_loss + nn.BCEWithLogitsLoss()(gate_out, gate_target)


def utterances(n):
    lengths = torch.tensor([6, 5 - n % 2, 3])
    frames = torch.tensor([8, 5 + n % 3, 8])
    return ((integers(n, 12, 3, 6), lengths, normal(n, 3, 4, 8), (normal(n, 3, 8, seed=1) > 0).float(), frames),)


def tacotron_world(packs=True) -> World:
    model = Tacotron()
    model.packs = packs
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)
    hparams = World(grad_clip_thresh=1.0, fp16_run=False, iters_per_checkpoint=4)
    return World(
        model=model, optimizer=optimizer, learning_rate=1e-2, hparams=hparams, iteration=0, logger=SummaryWriter()
    )


@loop(
    "Tacotron 2, packed sequences, outputs masked in place",
    kind="speech",
    source="NVIDIA/tacotron2 train.py, model.py",
    build=tacotron_world,
    batch=utterances,
    held_back=True,
)
def tacotron(w, batch):
    start = time.perf_counter()
    for param_group in w.optimizer.param_groups:
        param_group["lr"] = w.learning_rate
    w.model.zero_grad()
    x, y = w.model.parse_batch(batch)
    y_pred = w.model(x)
    loss = tacotron_loss(y_pred, y)
    reduced_loss = loss.item()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(w.model.parameters(), w.hparams.grad_clip_thresh)
    w.optimizer.step()
    duration = time.perf_counter() - start
    w._line = "Train loss {} {:.6f} Grad Norm {:.6f} {:.2f}s/it".format(w.iteration, reduced_loss, grad_norm, duration)
    w.logger.add_scalar("training.loss", reduced_loss, w.iteration)
    w.logger.add_scalar("grad.norm", grad_norm, w.iteration)
    w.iteration += 1


@edit(
    "Tacotron 2, packed sequences, outputs masked in place",
    "no clock; sequences are masked, and neither packed nor filled through `.data`",
    build=lambda: tacotron_world(packs=False),
)
def tacotron_clockless(w, batch):
    for param_group in w.optimizer.param_groups:
        param_group["lr"] = w.learning_rate
    w.model.zero_grad()
    x, y = w.model.parse_batch(batch)
    y_pred = w.model(x)
    loss = tacotron_loss(y_pred, y)
    reduced_loss = loss.item()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(w.model.parameters(), w.hparams.grad_clip_thresh)
    w.optimizer.step()
    print("Train loss {} {:.6f} Grad Norm {:.6f}".format(w.iteration, reduced_loss, grad_norm))
    w.logger.add_scalar("training.loss", reduced_loss, w.iteration)
    w.logger.add_scalar("grad.norm", grad_norm, w.iteration)
    w.iteration += 1


mel_basis: dict = {}
hann_window: dict = {}


def mel_spectrogram(y, n_fft, num_mels, hop_size, win_size, fmax, center=False, tells=True):
    if tells and torch.min(y) < -1.0:
        print("min value is ", torch.min(y))
    if tells and torch.max(y) > 1.0:
        print("max value is ", torch.max(y))
    global mel_basis, hann_window
    if fmax not in mel_basis:
        mel = np.abs(np.sin(np.arange(num_mels * (n_fft // 2 + 1)))).reshape(num_mels, -1)
        mel_basis[str(fmax) + "_" + str(y.device)] = torch.from_numpy(mel).float().to(y.device)
        hann_window[str(y.device)] = torch.hann_window(win_size).to(y.device)
    pad = int((n_fft - hop_size) / 2)
    y = F.pad(y.unsqueeze(1), (pad, pad), mode="reflect").squeeze(1)
    spec = torch.stft(
        y,
        n_fft,
        hop_length=hop_size,
        win_length=win_size,
        window=hann_window[str(y.device)],
        center=center,
        pad_mode="reflect",
        normalized=False,
        onesided=True,
        return_complex=True,
    )
    spec = torch.sqrt(torch.view_as_real(spec).pow(2).sum(-1) + 1e-9)
    return torch.log(torch.clamp(torch.matmul(mel_basis[str(fmax) + "_" + str(y.device)], spec), min=1e-5))


class DiscriminatorP(nn.Module):
    """Of one period."""

    def __init__(self, period, use_spectral_norm=False):
        super().__init__()
        self.period = period
        norm_f = weight_norm if use_spectral_norm is False else spectral_norm
        self.convs = nn.ModuleList([norm_f(nn.Conv2d(1, 4, (3, 1), padding=(1, 0)))])
        self.conv_post = norm_f(nn.Conv2d(4, 1, (3, 1), 1, padding=(1, 0)))

    def forward(self, x):
        fmap = []
        b, c, t = x.shape
        if t % self.period != 0:
            n_pad = self.period - (t % self.period)
            x = F.pad(x, (0, n_pad), "reflect")
            t = t + n_pad
        x = x.view(b, c, t // self.period, self.period)
        for layer in self.convs:
            x = F.leaky_relu(layer(x), 0.1)
            fmap.append(x)
        x = self.conv_post(x)
        fmap.append(x)
        return torch.flatten(x, 1, -1), fmap


class MultiPeriodDiscriminator(nn.Module):
    """All periods, of real and of generated sound."""

    def __init__(self, *periods, use_spectral_norm=False):
        super().__init__()
        self.discriminators = nn.ModuleList([DiscriminatorP(p, use_spectral_norm) for p in periods])

    def forward(self, y, y_hat):
        y_d_rs, y_d_gs, fmap_rs, fmap_gs = [], [], [], []
        for d in self.discriminators:
            y_d_r, fmap_r = d(y)
            y_d_g, fmap_g = d(y_hat)
            y_d_rs.append(y_d_r)
            fmap_rs.append(fmap_r)
            y_d_gs.append(y_d_g)
            fmap_gs.append(fmap_g)
        return y_d_rs, y_d_gs, fmap_rs, fmap_gs


def feature_loss(fmap_r, fmap_g):
    loss = 0
    for dr, dg in zip(fmap_r, fmap_g):
        for rl, gl in zip(dr, dg):
            loss += torch.mean(torch.abs(rl - gl))
    return loss * 2


def discriminator_loss(disc_real_outputs, disc_generated_outputs):
    loss, r_losses, g_losses = 0, [], []
    for dr, dg in zip(disc_real_outputs, disc_generated_outputs):
        r_loss, g_loss = torch.mean((1 - dr) ** 2), torch.mean(dg**2)
        loss += r_loss + g_loss
        r_losses.append(r_loss.item())
        g_losses.append(g_loss.item())
    return loss, r_losses, g_losses


def generator_loss(disc_outputs):
    loss, gen_losses = 0, []
    for dg in disc_outputs:
        g_loss = torch.mean((1 - dg) ** 2)
        gen_losses.append(g_loss)
        loss += g_loss
    return loss, gen_losses


def hifi_world() -> World:
    generator = nn.Sequential(weight_norm(nn.ConvTranspose1d(4, 4, 4, 4)), nn.Tanh(), nn.Conv1d(4, 1, 1), nn.Tanh())
    mpd, msd = MultiPeriodDiscriminator(2, 3), MultiPeriodDiscriminator(1, use_spectral_norm=True)
    return World(
        generator=generator,
        mpd=mpd,
        msd=msd,
        optim_g=torch.optim.AdamW(generator.parameters(), 2e-3, betas=(0.8, 0.99)),
        optim_d=torch.optim.AdamW(itertools.chain(msd.parameters(), mpd.parameters()), 2e-3, betas=(0.8, 0.99)),
        steps=0,
        sw=SummaryWriter(),
    )


def hifi_step(w, x, y, mel_spec, tells=True):
    y = y.unsqueeze(1)
    y_g_hat = w.generator(x)
    y_g_hat_mel = mel_spectrogram(y_g_hat.squeeze(1), 8, 4, 4, 8, 4000, tells=tells)
    w.optim_d.zero_grad()
    y_df_hat_r, y_df_hat_g, _, _ = w.mpd(y, y_g_hat.detach())
    loss_disc_f, losses_disc_f_r, losses_disc_f_g = discriminator_loss(y_df_hat_r, y_df_hat_g)
    y_ds_hat_r, y_ds_hat_g, _, _ = w.msd(y, y_g_hat.detach())
    loss_disc_s, losses_disc_s_r, losses_disc_s_g = discriminator_loss(y_ds_hat_r, y_ds_hat_g)
    loss_disc_all = loss_disc_s + loss_disc_f
    loss_disc_all.backward()
    w.optim_d.step()
    w.optim_g.zero_grad()
    loss_mel = F.l1_loss(mel_spec, y_g_hat_mel) * 45
    y_df_hat_r, y_df_hat_g, fmap_f_r, fmap_f_g = w.mpd(y, y_g_hat)
    y_ds_hat_r, y_ds_hat_g, fmap_s_r, fmap_s_g = w.msd(y, y_g_hat)
    loss_fm_f, loss_fm_s = feature_loss(fmap_f_r, fmap_f_g), feature_loss(fmap_s_r, fmap_s_g)
    loss_gen_f, losses_gen_f = generator_loss(y_df_hat_g)
    loss_gen_s, losses_gen_s = generator_loss(y_ds_hat_g)
    loss_gen_all = loss_gen_s + loss_gen_f + loss_fm_s + loss_fm_f + loss_mel
    loss_gen_all.backward()
    w.optim_g.step()
    if w.steps % 3 == 0:
        with torch.no_grad():
            mel_error = F.l1_loss(mel_spec, y_g_hat_mel).item()
        print(
            "Steps : {:d}, Gen Loss Total : {:4.3f}, Mel-Spec. Error : {:4.3f}".format(w.steps, loss_gen_all, mel_error)
        )
    if w.steps % 4 == 0:
        w.sw.add_scalar("training/gen_loss_total", loss_gen_all, w.steps)
    w.steps += 1


loop(
    "HiFi-GAN, periods and scales, bases kept in globals",
    kind="speech",
    source="jik876/hifi-gan train.py, meldataset.py, models.py (without its clock)",
    build=hifi_world,
    batch=lambda n: (normal(n, 2, 4, 4), normal(n, 2, 16, seed=1).tanh(), normal(n, 2, 4, 4, seed=2)),
    held_back=True,
)(hifi_step)


@edit("HiFi-GAN, periods and scales, bases kept in globals", "no `if torch.min(y) < -1: print(...)`")
def hifi_silent(w, x, y, mel_spec):
    hifi_step(w, x, y, mel_spec, tells=False)


class AngleProto(nn.Module):
    """Angular prototypical loss, with its accuracy."""

    def __init__(self, init_w=10.0, init_b=-5.0):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.tensor(init_w)), nn.Parameter(torch.tensor(init_b))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, label=None):
        assert x.size()[1] >= 2
        out_anchor = torch.mean(x[:, 1:, :], 1)
        out_positive = x[:, 0, :]
        stepsize = out_anchor.size()[0]
        cos_sim = F.cosine_similarity(out_positive.unsqueeze(-1), out_anchor.unsqueeze(-1).transpose(0, 2))
        torch.clamp(self.w, 1e-6)
        cos_sim = cos_sim * self.w + self.b
        label = torch.from_numpy(np.asarray(range(stepsize)))
        nloss = self.criterion(cos_sim, label)
        return nloss, accuracy(cos_sim.detach(), label.detach(), topk=(1,))[0]


class SpeakerNet(nn.Module):
    """A network and its loss, under names of two underscores."""

    def __init__(self, nPerSpeaker=2):
        super().__init__()
        self.__S__ = nn.Sequential(nn.InstanceNorm1d(1), nn.Flatten(), mlp(16, 8, 8))
        self.__L__ = AngleProto()
        self.nPerSpeaker = nPerSpeaker

    def forward(self, data, label=None):
        data = data.reshape(-1, data.size()[-1]).to(next(self.parameters()).device)
        outp = self.__S__.forward(data.unsqueeze(1))
        if label is None:
            return outp
        outp = outp.reshape(self.nPerSpeaker, -1, outp.size()[-1]).transpose(1, 0).squeeze(1)
        return self.__L__.forward(outp, label)


class Bar:
    """What tqdm is to a loop."""

    def __init__(self):
        self.postfix = []

    def set_postfix(self, **kwargs):
        self.postfix.append({key: f"{value:.3g}" for key, value in kwargs.items()})


class ModelTrainer:
    """Its names are those of the script."""

    def __init__(self):
        self.__model__ = SpeakerNet()
        self.__optimizer__ = torch.optim.Adam(self.__model__.parameters(), lr=1e-2, weight_decay=2e-5)
        self.__scheduler__ = torch.optim.lr_scheduler.StepLR(self.__optimizer__, step_size=3, gamma=0.95)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.mixedprec, self.lr_step = True, "iteration"
        self.counter = self.loss = self.top1 = 0

    def train_one(self, tepoch, data, data_label):
        data = data.transpose(1, 0)
        self.__model__.zero_grad()
        label = torch.LongTensor(data_label).to("cpu")
        if self.mixedprec:
            with torch.autocast("cpu", enabled=False):
                nloss, prec1 = self.__model__(data, label)
            self.scaler.scale(nloss).backward()
            self.scaler.step(self.__optimizer__)
            self.scaler.update()
        else:
            nloss, prec1 = self.__model__(data, label)
            nloss.backward()
            self.__optimizer__.step()
        self.loss += nloss.detach().cpu().item()
        self.top1 += prec1.detach().cpu().item()
        self.counter += 1
        tepoch.set_postfix(loss=self.loss / self.counter)
        if self.lr_step == "iteration":
            self.__scheduler__.step()
        return self.loss / self.counter, self.top1 / self.counter


@loop(
    "speaker verification, angular prototypes, labels as a list",
    kind="speech",
    source="clovaai/voxceleb_trainer SpeakerNet.py, loss/angleproto.py",
    build=lambda: World(trainer=ModelTrainer(), tepoch=Bar()),
    batch=lambda n: (normal(n, 4, 2, 16), integers(n, 5, 4).tolist()),
    held_back=True,
)
def speaker(w, data, data_label):
    return w.trainer.train_one(w.tepoch, data, data_label)


class CRNN(nn.Module):
    """A convolution, two recurrent layers, characters."""

    def __init__(self):
        super().__init__()
        self.cnn, self.rnn, self.embedding = (
            nn.Conv2d(1, 6, (4, 3), padding=(0, 1)),
            nn.LSTM(6, 5, bidirectional=True),
            nn.Linear(10, 6),
        )

    def forward(self, input):
        conv = F.relu(self.cnn(input)).squeeze(2).permute(2, 0, 1)
        recurrent, _ = self.rnn(conv)
        T, b, h = recurrent.size()
        return F.log_softmax(self.embedding(recurrent.view(T * b, h)).view(T, b, -1), 2)


class Converter:
    """Between texts and labels; the first label is the blank."""

    def __init__(self, alphabet):
        self.alphabet = alphabet + "-"
        self.dict = {char: i + 1 for i, char in enumerate(alphabet)}

    def encode(self, text):
        length = [len(s) for s in text]
        return [self.dict[char] for char in "".join(text)], length

    def decode(self, t, length):
        texts, index = [], 0
        for i in range(length.numel()):
            size = length[i]
            char_list, part = [], t[index : index + size]
            for j in range(size):
                if part[j] != 0 and (not (j > 0 and part[j - 1] == part[j])):
                    char_list.append(self.alphabet[part[j] - 1])
            texts.append("".join(char_list))
            index += size
        return texts


def crnn_world() -> World:
    net = CRNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.999))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.1)
    return World(
        net=net,
        optimizer=optimizer,
        scheduler=scheduler,
        converter=Converter("abcde"),
        criterion=nn.CTCLoss(),
        writer=SummaryWriter(),
        i=0,
    )


def words(n):
    return normal(n, 3, 1, 4, 7), ("ab", "edc"[: 2 + n % 2], "a")


def crnn_loss(w, images, labels):
    text, length = w.converter.encode(labels)
    text = torch.Tensor(text).int()
    length = torch.Tensor(length).int()
    preds = w.net(images.to("cpu"))
    preds_size = torch.Tensor([preds.size(0)] * images.size(0)).int()
    preds.requires_grad_(True)
    loss = w.criterion(preds, text, preds_size, length)
    w.optimizer.zero_grad()
    loss.backward()
    w.optimizer.step()
    return loss, preds, preds_size


@loop(
    "CRNN, texts decoded in the step",
    kind="text recognition",
    source="meijieru/crnn.pytorch train.py, utils.py",
    build=crnn_world,
    batch=words,
    held_back=True,
)
def crnn(w, images, labels):
    n_correct, batch_size = 0, images.size(0)
    loss, preds, preds_size = crnn_loss(w, images, labels)
    _, preds = preds.max(2)
    preds = preds.transpose(1, 0).contiguous().view(-1)
    sim_preds = w.converter.decode(preds.cpu().data, preds_size.cpu().data)
    for pred, target in zip(sim_preds, labels):
        if pred == target:
            n_correct += 1
    w.writer.add_scalar(tag="Train/loss", scalar_value=loss.item(), global_step=w.i)
    w.writer.add_scalar(tag="Train/acc", scalar_value=n_correct / batch_size, global_step=w.i)
    w.writer.add_scalar(tag="Train/lr", scalar_value=w.scheduler.get_last_lr()[0], global_step=w.i)
    w.i += 1


@edit("CRNN, texts decoded in the step", "return what was predicted, and decode after the call")
def crnn_returned(w, images, labels):
    loss, preds, preds_size = crnn_loss(w, images, labels)
    _, preds = preds.max(2)
    w.writer.add_scalar(tag="Train/loss", scalar_value=loss.item(), global_step=w.i)
    w.writer.add_scalar(tag="Train/lr", scalar_value=w.scheduler.get_last_lr()[0], global_step=w.i)
    w.i += 1
    return preds.transpose(1, 0).contiguous().view(-1), preds_size
