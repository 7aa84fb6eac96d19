"""Sequences to sequences."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, edit, loop
from wholestep.zoo.case import seeded_generator

PAD, SOS, EOS = 0, 1, 2
VOCABULARY, WIDTH, LENGTH = 17, 8, 5


def sentences(number: int) -> tuple[Tensor, Tensor]:
    """Columns of token ids that end in padding."""
    generator = seeded_generator(number)
    src, tgt = (torch.randint(3, VOCABULARY, (LENGTH + 1, 4), generator=generator) for _ in range(2))
    src[-1, :2], tgt[-1, 1:] = PAD, PAD
    return src, tgt


class Translator(nn.Module):
    """`nn.Transformer` between embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.src_embedding, self.tgt_embedding = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            d_model=WIDTH,
            nhead=2,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dim_feedforward=16,
            dropout=0.1,
        )
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src: Tensor, trg: Tensor, src_mask: Any, tgt_mask: Any, src_pad: Any, tgt_pad: Any) -> Tensor:
        outs = self.transformer(
            self.src_embedding(src),
            self.tgt_embedding(trg),
            src_mask,
            tgt_mask,
            None,
            src_pad,
            tgt_pad,
            src_pad,
        )
        return self.generator(outs)


def create_mask(src: Tensor, tgt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tgt_len = tgt.shape[0]
    mask = (torch.triu(torch.ones((tgt_len, tgt_len))) == 1).transpose(0, 1)
    tgt_mask = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
    src_mask = torch.zeros((src.shape[0], src.shape[0])).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD).transpose(0, 1), (tgt == PAD).transpose(0, 1)


def translation_world() -> World:
    model = Translator()
    optim = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    return World(model=model, optim=optim, loss_fn=nn.CrossEntropyLoss(ignore_index=PAD), losses=0)


@loop(
    "translation transformer",
    kind="translation",
    source="pytorch/examples language_translation/main.py",
    build=translation_world,
    batch=sentences,
)
def translate(w: World, src: Tensor, tgt: Tensor) -> Any:
    src, tgt = src.to("cpu"), tgt.to("cpu")
    tgt_input = tgt[:-1, :]
    src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
    logits = w.model(src, tgt_input, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask)
    w.optim.zero_grad()
    tgt_out = tgt[1:, :]
    loss = w.loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
    loss.backward()
    w.optim.step()
    w.losses += loss.item()


class EncoderRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH)

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output = self.embedding(ids).view(1, 1, -1)
        return self.gru(output, hidden)

    def init_hidden(self) -> Tensor:
        return torch.zeros(1, 1, WIDTH)


class AttnDecoderRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)
        self.attn, self.attn_combine = nn.Linear(2 * WIDTH, LENGTH + 1), nn.Linear(2 * WIDTH, WIDTH)
        self.gru, self.out = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = self.dropout(self.embedding(ids).view(1, 1, -1))
        attn_weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        attn_applied = torch.bmm(attn_weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = self.attn_combine(torch.cat((embedded[0], attn_applied[0]), 1)).unsqueeze(0)
        output, hidden = self.gru(F.relu(output), hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden, attn_weights


def seq2seq_world() -> World:
    encoder, decoder = EncoderRNN(), AttnDecoderRNN()
    return World(
        encoder=encoder,
        decoder=decoder,
        encoder_optimizer=torch.optim.SGD(encoder.parameters(), lr=0.05),
        decoder_optimizer=torch.optim.SGD(decoder.parameters(), lr=0.05),
        criterion=nn.NLLLoss(),
        teacher_forcing_ratio=0.5,
        print_loss_total=0.0,
    )


def sentence(number: int) -> tuple[Tensor, Tensor]:
    generator = seeded_generator(number)
    source, target = (torch.randint(3, VOCABULARY, (4, 1), generator=generator) for _ in range(2))
    target[-1] = EOS
    return source, target


def encoded(w: World, input_tensor: Tensor) -> tuple[Tensor, Tensor]:
    hidden = w.encoder.init_hidden()
    encoder_outputs = torch.zeros(LENGTH + 1, WIDTH)
    for ei in range(input_tensor.size(0)):
        encoder_output, hidden = w.encoder(input_tensor[ei], hidden)
        encoder_outputs[ei] = encoder_output[0, 0]
    return encoder_outputs, hidden


@loop(
    "seq2seq with teacher forcing",
    kind="translation",
    source="pytorch/tutorials intermediate_source/seq2seq_translation_tutorial.py",
    build=seq2seq_world,
    batch=sentence,
)
def seq2seq(w: World, input_tensor: Tensor, target_tensor: Tensor) -> Any:
    w.encoder_optimizer.zero_grad()
    w.decoder_optimizer.zero_grad()
    encoder_outputs, decoder_hidden = encoded(w, input_tensor)
    target_length = target_tensor.size(0)
    loss = torch.zeros(())
    decoder_input = torch.tensor([[SOS]])
    use_teacher_forcing = random.random() < w.teacher_forcing_ratio
    if use_teacher_forcing:
        for di in range(target_length):
            decoder_output, decoder_hidden, _ = w.decoder(decoder_input, decoder_hidden, encoder_outputs)
            loss = loss + w.criterion(decoder_output, target_tensor[di])
            decoder_input = target_tensor[di]
    else:
        for di in range(target_length):
            decoder_output, decoder_hidden, _ = w.decoder(decoder_input, decoder_hidden, encoder_outputs)
            _, topi = decoder_output.topk(1)
            decoder_input = topi.squeeze().detach()
            loss = loss + w.criterion(decoder_output, target_tensor[di])
            if decoder_input.item() == EOS:
                break
    loss.backward()
    w.encoder_optimizer.step()
    w.decoder_optimizer.step()
    w.print_loss_total += loss.item() / target_length


@edit(
    "seq2seq with teacher forcing",
    "no `break` at a predicted end: losses behind it are multiplied by a mask instead",
)
def seq2seq_edited(w: World, input_tensor: Tensor, target_tensor: Tensor) -> Any:
    w.encoder_optimizer.zero_grad()
    w.decoder_optimizer.zero_grad()
    encoder_outputs, decoder_hidden = encoded(w, input_tensor)
    target_length = target_tensor.size(0)
    loss = torch.zeros(())
    decoder_input = torch.tensor([[SOS]])
    use_teacher_forcing = random.random() < w.teacher_forcing_ratio
    goes_on = torch.ones(())
    for di in range(target_length):
        decoder_output, decoder_hidden, _ = w.decoder(decoder_input, decoder_hidden, encoder_outputs)
        loss = loss + goes_on * w.criterion(decoder_output, target_tensor[di])
        if use_teacher_forcing:
            decoder_input = target_tensor[di]
        else:
            decoder_input = decoder_output.topk(1)[1].squeeze().detach()
            goes_on = goes_on * (decoder_input != EOS)
    loss.backward()
    w.encoder_optimizer.step()
    w.decoder_optimizer.step()
    w.print_loss_total += loss.item() / target_length
