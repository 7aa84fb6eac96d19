"""`python -m wholestep.cli.rank`: one rank of the demo, started by `launch`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

import torch.distributed as dist

from wholestep.cli import demo
from wholestep.cli.launch import end_with_launcher, reporting_errors


def main() -> int:
    """Meet the other ranks and run the demo with them; 1 if the losses differ, on rank 0."""
    parser = argparse.ArgumentParser(prog="wholestep.cli.rank", description=__doc__)
    demo.add_options(parser)
    parser.add_argument("folder", type=Path, help="where ranks meet")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    end_with_launcher()
    with reporting_errors(options.folder, rank):
        dist.init_process_group(
            "gloo", init_method=f"file://{options.folder}/store", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
        )
        code = demo.run_here(options)
        # A DistributedDataParallel that outlives its process group may deadlock.
        gc.collect()
        dist.destroy_process_group()
    return code if rank == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
