"""What a user has asked of a compiled step, in one class that checks itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wholestep.compiler.hardware import Hardware
from wholestep.compiler.plan import Plan
from wholestep.cost import Link
from wholestep.errors import WholestepError
from wholestep.passes import DEFAULT_PIPELINE, Pipeline
from wholestep.remat import StepBudget


@dataclass(frozen=True)
class DataParallel:
    """How ranks share a step, for `wholestep.compile(..., data_parallel=DataParallel(...))`.

    Args:
        group: the ranks: a process group, a one-dimensional `DeviceMesh`, or None for the default group.
        reduce: `"mean"` averages gradients like DDP, `"sum"` adds them up.
        link: what an all-reduce costs, `"1gbit,50us"`; measured at the start if None.
        op_times: `"measured"` times the step's ops at the start, `"estimated"` derives them from flops and bytes.
    """

    group: dist.ProcessGroup | DeviceMesh | None = None
    reduce: str = "mean"
    link: str | None = None
    op_times: str = "measured"

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise WholestepError(f"reduce is 'mean' or 'sum', not {self.reduce!r}")
        if self.op_times not in ("measured", "estimated"):
            raise WholestepError(f"op_times is 'measured' or 'estimated', not {self.op_times!r}")
        if self.link is not None:
            Link.from_text(self.link)
        if isinstance(self.group, DeviceMesh) and self.group.ndim != 1:
            raise WholestepError(
                f"data_parallel takes a one-dimensional DeviceMesh, not one of {self.group.ndim} dimensions; "
                "pass one of its axes: mesh['dp']"
            )

    @staticmethod
    def of(value: Any) -> DataParallel | None:
        """From what `wholestep.compile` accepts; raises `WholestepError` for anything else."""
        if value is None or isinstance(value, DataParallel):
            return value
        if value == "replicate":
            return DataParallel()
        if isinstance(value, (dist.ProcessGroup, DeviceMesh)):
            return DataParallel(value)
        raise WholestepError(
            f"data_parallel is None, 'replicate', a ProcessGroup, a 1-D DeviceMesh or a DataParallel, not {value!r}"
        )

    def resolve(self) -> dist.ProcessGroup:
        """The process group itself, looked up when the step is first called."""
        if isinstance(self.group, DeviceMesh):
            return self.group.get_group()
        if self.group is not None:
            return self.group
        if not dist.is_available() or not dist.is_initialized():
            raise WholestepError(
                "data_parallel needs a process group; start the script with torchrun and call "
                "torch.distributed.init_process_group() before the first step"
            )
        group = dist.group.WORLD
        assert group is not None
        return group


@dataclass(frozen=True)
class StepOptions:
    """Everything `wholestep.compile` was told (see there), and what settings add to it; refuses what makes no sense.

    `dry_run` is what a step is planned for that is not going to run: a device and ranks that need not be there.
    """

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
    plan: Plan | None = None
    is_debugging: bool = False
    dry_run: Hardware | None = None

    @property
    def may_run_in_eager(self) -> bool:
        """Whether single calls may run as they are: on one rank, and where no budget has been promised."""
        return self.data_parallel is None and self.memory_budget is None and self.dry_run is None

    def __post_init__(self) -> None:
        for is_right, name, what in (
            (_is_chunking(self.chunk_loss), "chunk_loss", "a number of chunks, 2 or more, or 'auto'"),
            (_is_size(self.bucket_mb), "bucket_mb", "a size in megabytes, more than 0"),
            (
                _is_choice_or_names(self.cross_iteration),
                "cross_iteration",
                "'auto', 'all', 'none' or a list of parameter and module names",
            ),
            (self.lower in ("inductor", "none", "auto"), "lower", "'inductor', 'none' or 'auto'"),
            (_is_truth(self.cuda_graphs), "cuda_graphs", "True or False"),
            (
                _is_truth(self.dynamic_batch) or self.dynamic_batch == "auto",
                "dynamic_batch",
                "True, False or 'auto'",
            ),
            (_is_count(self.verify), "verify", "the number of steps to check, 0 or more"),
            (_is_steps(self.max_iters), "max_iters", "the number of steps there will be, 1 or more"),
            (self.on_refusal in ("raise", "eager"), "on_refusal", "'raise' or 'eager'"),
        ):
            if not is_right:
                raise WholestepError(f"{name} is {what}, not {getattr(self, name)!r}")
        if self.plan is not None:
            decided = [name for name in _DECIDED_BY_PLAN if getattr(self, name) != getattr(StepOptions, name)]
            if decided:
                raise WholestepError(f"plan= says what {decided[0]} asks for: leave out one of the two")
        unknown_to_eager = {"data_parallel": self.data_parallel, "memory_budget": self.memory_budget}
        for name, value in unknown_to_eager.items():
            if self.on_refusal == "eager" and value is not None:
                raise WholestepError(f"on_refusal='eager' cannot be had with {name}, which eager does not know")

    @property
    def rank_facts(self) -> dict[str, Any]:
        """What ranks that share a step must have asked for alike, in words."""
        moved = self.cross_iteration
        return {
            "bucket_mb": self.bucket_mb,
            "cross_iteration": list(moved) if isinstance(moved, tuple) else moved,
            "reduce": None if self.data_parallel is None else self.data_parallel.reduce,
            "link": None if self.data_parallel is None else self.data_parallel.link,
            "memory_budget": None if self.memory_budget is None else str(self.memory_budget),
            "chunk_loss": self.chunk_loss,
            "lower": self.lower,
            "cuda_graphs": self.cuda_graphs,
            "passes": str(self.pipeline),
            "max_iters": self.max_iters,
            "verify": self.verify,
            "plan": None if self.plan is None else self.plan.fingerprint,
        }


_DECIDED_BY_PLAN = ("memory_budget", "chunk_loss", "lower", "bucket_mb", "cross_iteration", "pipeline")


def plan_of(value: object) -> Plan | None:
    """The plan that `plan=` says, read from a file if need be."""
    if value is None or isinstance(value, Plan):
        return value
    if isinstance(value, (str, Path)):
        return Plan.load(value)
    raise WholestepError(f"plan is a wholestep.Plan or the path of a plan.json, not {value!r}")


def pipeline_of(value: object) -> Pipeline:
    """The pass pipeline that `passes=` says."""
    if value is None:
        return DEFAULT_PIPELINE
    if isinstance(value, str):
        return Pipeline.parse(value)
    if isinstance(value, Pipeline):
        return value
    raise WholestepError(f"passes is a pipeline as text or a Pipeline, not {value!r}")


def names_or_choice(value: object) -> Any:
    """`cross_iteration` as options have it: names as a tuple; whatever is wrong stays, to be refused with all else."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _is_chunking(value: object) -> bool:
    return value in (None, "auto") or (_is_count(value) and value not in (0, 1))


def _is_size(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < float("inf")


def _is_choice_or_names(value: object) -> bool:
    if isinstance(value, str):
        return value in ("auto", "all", "none")
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value)  # pyright: ignore[reportUnknownVariableType]


def _is_steps(value: object) -> bool:
    return value is None or (_is_count(value) and bool(value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)
