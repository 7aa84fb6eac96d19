"""The one log handler Wholestep may install, and only where the user asked for it with WHOLESTEP_LOG."""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist


class _StderrHandler(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """A class of its own so that a second `attach_handler` finds the first one's handler."""


def attach_handler(level: str) -> None:
    """Print records of `level` and above to stderr, on rank 0; a second call only changes the level."""
    logger = logging.getLogger("wholestep")
    logger.setLevel(level)
    if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        return
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: _rank() == 0)
    logger.addHandler(handler)


def _rank() -> int:
    """Asked for each record: the process group is often made after the first `import wholestep`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
