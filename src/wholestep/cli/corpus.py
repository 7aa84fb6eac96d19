"""Text to train on without a download: the language reference that Python carries for its own `help()`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wholestep.zoo.case import Batch, seeded_generator


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: one token per character, in the order of `alphabet`."""

    tokens: torch.Tensor
    alphabet: str

    def make_batch(self, batch_size: int, context: int, seed: int) -> Batch:
        """Random windows of the text; the target of each character is the next one."""
        starts = torch.randint(len(self.tokens) - context, (batch_size, 1), generator=seeded_generator(seed))
        windows = self.tokens[starts + torch.arange(context + 1)]
        return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def load_corpus() -> Corpus:
    """The text that ships with this Python."""
    text = _help_topics() or _docstrings()
    alphabet = "".join(sorted(set(text)))
    index = {character: number for number, character in enumerate(alphabet)}
    return Corpus(torch.tensor([index[character] for character in text]), alphabet)


def _help_topics() -> str:
    """Half a million characters of reference; some distributions leave the module out."""
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return ""
    return "\n\n".join(topics[name] for name in sorted(topics))


def _docstrings() -> str:
    """Docstrings of modules that importing torch has loaded anyway."""
    names = [
        "argparse",
        "collections",
        "dataclasses",
        "functools",
        "logging",
        "pathlib",
        "random",
        "typing",
        "unittest",
    ]
    modules = [importlib.import_module(name) for name in names]
    members = [member for module in modules for _, member in sorted(vars(module).items())]
    texts = [getattr(owner, "__doc__", None) for owner in (*modules, *members)]
    return "\n\n".join(text for text in texts if isinstance(text, str))
