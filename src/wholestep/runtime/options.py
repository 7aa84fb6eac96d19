"""What a user has asked of a compiled step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wholestep.passes import DEFAULT_PIPELINE, Pipeline
from wholestep.remat import StepBudget
from wholestep.runtime.data_parallel import DataParallel
from wholestep.runtime.dry_run import DryRun


@dataclass(frozen=True)
class StepOptions:
    """Everything `wholestep.compile` was told; see there."""

    dynamic_batch: bool | str = "auto"
    memory_budget: StepBudget | None = None
    chunk_loss: int | str | None = None
    lower: str = "none"
    cuda_graphs: bool = False
    data_parallel: DataParallel | None = None
    bucket_mb: float = 25.0
    cross_iteration: str | tuple[str, ...] = "auto"
    max_iters: int | None = None
    verify: int = 0
    pipeline: Pipeline = DEFAULT_PIPELINE
    cache_size: int = 16
    recompile_warning: int = 8
    dump_dir: Path | None = None
    agreement_timeout_s: float = 300.0
    keep_heap: bool = True
    on_refusal: str = "raise"
    is_debugging: bool = False
    dry_run: DryRun | None = None
