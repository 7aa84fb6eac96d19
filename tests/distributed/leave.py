"""A script for `test_pending.py`: train three steps and leave the interpreter with updates pending.

    python -m tests.distributed.leave RANK NUM_RANKS FOLDER {return, destroy, raise, sys.exit}

The comparison with DDP, or eager, is registered before anything else: exit functions run backwards, so it comes last
and finds in the parameters' memory what everybody else has left there.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import Any

_seen: list[dict[str, Any]] = []


def _compare(file: Path) -> None:
    import torch

    expected, memory = _seen
    differing = [name for name in expected if not torch.equal(expected[name], memory[name])]
    file.write_text(f"differing: {', '.join(differing)}" if differing else "equal")


def _train(rank: int, num_ranks: int, folder: Path, how: str) -> Any:
    import torch
    import torch.distributed as dist
    from tests.distributed.reference import Trainer, ddp_side, eager_side, wholestep_side
    from tests.distributed.trainings import Training

    torch.set_num_threads(1)
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    training = Training(optimizer="adamw_fused")
    reference = Trainer(training, eager_side if num_ranks == 1 else ddp_side)
    reference.steps(3)
    _seen.append({name: memory.clone() for name, memory in reference.aliases.items()})
    del reference
    gc.collect()
    mode = None if num_ranks == 1 else "replicate"
    trainer = Trainer(training, lambda *parts: wholestep_side(*parts, data_parallel=mode, cross_iteration="all"))
    trainer.steps(3)
    _seen.append(trainer.aliases)
    if how == "destroy":
        dist.destroy_process_group()
    return trainer


def main() -> None:
    rank, num_ranks, folder, how = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    atexit.register(_compare, folder / f"found{rank}.txt")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Kept until the end: a step that is dropped before is another test.
    _kept.append(_train(rank, num_ranks, folder, how))
    if how == "raise":
        raise RuntimeError("the training script fails after its last step")
    if how == "sys.exit":
        sys.exit(3)


_kept: list[Any] = []

if __name__ == "__main__":
    main()
