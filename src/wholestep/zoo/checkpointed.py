"""A GPT whose blocks, dropout and all, are recomputed in the backward pass."""

from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.utils import checkpoint

from wholestep.zoo import gpt
from wholestep.zoo.case import ZooCase


class CheckpointedGPT(gpt.GPT):
    """A `GPT` that runs every block under `torch.utils.checkpoint`."""

    def __init__(self, config: gpt.GPTConfig, use_reentrant: bool) -> None:
        super().__init__(config)
        self.use_reentrant = use_reentrant

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Apply one block without keeping its activations."""
        recomputed = checkpoint.checkpoint(  # pyright: ignore[reportUnknownMemberType] (torch has no type)
            block, hidden, use_reentrant=self.use_reentrant
        )
        return cast(Tensor, recomputed)


def make_case(name: str, config: gpt.GPTConfig, use_reentrant: bool) -> ZooCase:
    """A zoo case that trains a `CheckpointedGPT` of these sizes."""
    build = partial(CheckpointedGPT, config, use_reentrant)
    return ZooCase(name, build, partial(gpt.make_batch, config), gpt.loss)
