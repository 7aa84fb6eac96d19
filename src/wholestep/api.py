"""The public verbs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import fx, nn
from torch.optim import Optimizer

from wholestep._logging import attach_handler
from wholestep._settings import Settings
from wholestep.compiler import DataParallel, Plan, StepOptions, names_or_choice, pipeline_of, plan_of
from wholestep.errors import WholestepError
from wholestep.lower import lower_module
from wholestep.passes import Pipeline
from wholestep.pipe import Schedule
from wholestep.pipe.borders import Points, Policy
from wholestep.remat import BanRules, InductorBackend, StepBudget, partition_joint
from wholestep.report.explain import explain_step
from wholestep.report.html import write_step_report
from wholestep.report.memory_plan import write_memory_pictures
from wholestep.report.pipeline import explain_pipe, pipe_report
from wholestep.runtime import StepRunner
from wholestep.runtime.pipeline import Pipe, PipeOptions

MemoryBudget = float | str | Mapping[str, float | str]


logger = logging.getLogger(__name__)


class CompiledStep(StepRunner):
    """What `wholestep.compile` returns: called like the user's function, with its graph to look at.

    `graph` is the `StepGraph` of the most recent call (`print(step.graph)` is readable code), `num_captures` and
    `recompile_reasons` tell how often and why the step was captured.
    """

    def explain(self) -> str:
        """Phases with op counts, flops and bytes, memory, passes, captures: the step in one page of text."""
        return explain_step(self)

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML report about the step and return its path."""
        return write_step_report(self, Path(path))

    def memory_pictures(self, folder: str | Path, format: str = "svg") -> tuple[Path, ...]:
        """Draw the memory plan into a folder and return the files; `format` is `"svg"`, or `"png"` with matplotlib.

        `pareto`: the work that each peak costs, with the chosen plan. `memory`: live bytes op by op, with everything
        kept and with the plan. `modules`: bytes kept and work repeated by module. Many budgets are planned for the
        first, which takes about as long as the first call's planning did.
        """
        return write_memory_pictures(self, Path(folder), format)


class CompiledPipe(Pipe):
    """What `wholestep.pipeline` returns: a `Pipe` that shows what it does.

    Both methods are to be called by all ranks of the job, after a step: each tells when it was busy.
    """

    def explain(self) -> str:
        """Stages with their costs, ranks with their idle time, and the measured schedule: one page of text."""
        return explain_pipe(self)

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML report with planned and measured timelines, on rank 0, and return its path."""
        report = pipe_report(self)
        is_first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        return report.write(Path(path)) if is_first else Path(path)


@overload
def compile(fn: Callable[..., Any]) -> CompiledStep: ...


@overload
def compile(
    fn: None = None,
    *,
    memory_budget: MemoryBudget | None = ...,
    chunk_loss: int | str | None = ...,
    data_parallel: Any = ...,
    bucket_mb: float = ...,
    cross_iteration: str | Sequence[str] = ...,
    lower: str = ...,
    cuda_graphs: bool = ...,
    dynamic_batch: bool | str = ...,
    verify: int | None = ...,
    max_iters: int | None = ...,
    passes: str | Pipeline | None = ...,
    plan: Plan | str | Path | None = ...,
    on_refusal: str = ...,
) -> Callable[[Callable[..., Any]], CompiledStep]: ...


@overload
def compile(
    fn: Callable[..., Any],
    *,
    memory_budget: MemoryBudget | None = ...,
    chunk_loss: int | str | None = ...,
    data_parallel: Any = ...,
    bucket_mb: float = ...,
    cross_iteration: str | Sequence[str] = ...,
    lower: str = ...,
    cuda_graphs: bool = ...,
    dynamic_batch: bool | str = ...,
    verify: int | None = ...,
    max_iters: int | None = ...,
    passes: str | Pipeline | None = ...,
    plan: Plan | str | Path | None = ...,
    on_refusal: str = ...,
) -> CompiledStep: ...


def compile(
    fn: Callable[..., Any] | None = None,
    *,
    memory_budget: MemoryBudget | None = None,
    chunk_loss: int | str | None = None,
    data_parallel: Any = None,
    bucket_mb: float = 25,
    cross_iteration: str | Sequence[str] = "auto",
    lower: str = "none",
    cuda_graphs: bool = False,
    dynamic_batch: bool | str = "auto",
    verify: int | None = None,
    max_iters: int | None = None,
    passes: str | Pipeline | None = None,
    plan: Plan | str | Path | None = None,
    on_refusal: str = "raise",
) -> Any:
    """Compile a whole training step: forward, loss, backward, gradient collectives and optimizer become one graph.

    `fn` is the train step you already have, with any arguments; it comes back as a callable of the same signature:

        @wholestep.compile
        def train_step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

    Args:
        memory_budget: the highest peak of the whole step: bytes (`"12GiB"`, `800_000_000`), or a share from 0 (the
            least that is possible) to 1 (no limit). Forward ops run again in the backward to get there. A mapping
            bounds what modules keep for the backward, by name or pattern, `""` being the peak of the whole step:
            `{"": "12GiB", "encoder.layers.*": 0.3, "head": 1.0}`. A module's share is one of what it keeps now.
        chunk_loss: how many chunks the last linear layer and the cross entropy run in, 2 or more, or `"auto"`; only the
            order of sums over rows changes.
        data_parallel: `"replicate"` trains the same model on all ranks of the default process group, a `ProcessGroup`
            or a one-dimensional `DeviceMesh` on those; a `wholestep.DataParallel` says more. Pass the plain model:
            gradients are averaged like DDP's, rank 0's parameters and buffers are broadcast before the first step.
        bucket_mb: about how many megabytes of gradients travel together at most.
        cross_iteration: whether an update may wait for its gradients in the next call, under the next forward. `"auto"`
            moves what shortens the step, `"all"` whatever can move, `"none"` nothing, a list the updates of the
            parameters and modules it names. Whoever looks at the model or the optimizer sees applied updates.
        lower: `"inductor"` compiles runs of ops with Inductor, equal to eager within the rounding of the dtype;
            `"none"` runs eager's own kernels, `"auto"` is `"inductor"` where there is a compiler for it.
        cuda_graphs: record the step on its third call and launch it as one from then on. Gradients then live in memory
            that the next step writes to. A step that cannot be recorded runs as usual, and a warning says why.
        dynamic_batch: `"auto"` captures the first sizes of the arguments as they are, and switches to symbols for those
            that change (batch size, sequence length, ...); `True` has a symbolic batch size (dimension 0) from the
            start; `False` captures all sizes apart.
        verify: check the first N steps against eager; raises `VerificationError` naming what differs.
        max_iters: how many steps there will be, of an epoch, say: the last one leaves nothing pending, the next one
            begins to count again. `step(..., last=True)` says the same of a single call.
        passes: the pass pipeline, as text (`"simplify,cse,reinplace"`) or as a `Pipeline`; `""` runs the graph as
            captured. The passes of `data_parallel` and `cross_iteration` come before `reinplace`.
        plan: run exactly this plan, a `wholestep.Plan` or the path of a `plan.json`, as `step.plan.save` and
            `wholestep plan --save` write it. It was made for one step, on so many ranks: for any other `PlanError` says
            what differs. What it has decided (budget, lowering, buckets) cannot be asked for as well.
        on_refusal: what happens if the step cannot be captured: `"raise"` the `CaptureError`, or run it as it is, in
            `"eager"`, with one warning that says why. Eager knows no ranks and no budgets, so that it takes neither.

    The first call captures; later calls run the graph. What is returned carries no autograd history.
    """
    given = {name: value for name, value in locals().items() if name != "fn"}
    if fn is None:
        return functools.partial(compile, **given)
    if isinstance(fn, nn.Module):
        raise WholestepError(
            f"wholestep.compile takes a train step (a function that runs {type(fn).__name__}, the backward and the "
            "optimizer), not a model; for a model alone there is torch.compile(model, backend=wholestep.inductor())"
        )
    if not callable(fn):
        raise WholestepError(f"wholestep.compile takes a train step (a function), not a {type(fn).__name__}")
    settings = Settings.from_environ()
    options = _step_options(settings, **given)
    if settings.log_level is not None:
        attach_handler(settings.log_level)
    return fn if settings.disable else CompiledStep(fn, options)


def _step_options(
    settings: Settings,
    memory_budget: Any,
    data_parallel: Any,
    cross_iteration: Any,
    verify: int | None,
    passes: Any,
    plan: Any,
    **others: Any,
) -> StepOptions:
    """Arguments of `compile` and settings in one; options check themselves."""
    return StepOptions(
        **others,
        cross_iteration=names_or_choice(cross_iteration),
        memory_budget=None if memory_budget is None else StepBudget.of(memory_budget),
        data_parallel=DataParallel.of(data_parallel),
        verify=settings.verify if verify is None else verify,
        pipeline=pipeline_of(passes),
        plan=plan_of(plan),
        cache_size=settings.cache_size,
        recompile_warning=settings.recompile_warning,
        dump_dir=Path(settings.dump_dir) if settings.dump_dir else None,
        agreement_timeout_s=settings.agreement_timeout_s,
        keep_heap=settings.keep_heap,
        is_debugging=settings.debug,
    )


def partition(
    joint_gm: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    memory_budget: MemoryBudget = 1.0,
    solver: str = "auto",
    estimator: str = "flops",
    rules: BanRules | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph, as AOTAutograd traces it, into a forward and a backward module.

    Args:
        num_fwd_outputs: how many of the graph's outputs the forward returns; the others are gradients.
        memory_budget: the highest peak of the two: bytes (`"12GiB"`), parameters and inputs included, or a share from 0
            (the least that is possible) to 1 (keep whatever the backward needs). A mapping is also for modules, as in
            `wholestep.compile`.
        solver: `"auto"` plans for the peak. `"exact"` does, too, and looks for the cheapest plan there is, in graphs of
            up to 1000 ops. `"greedy"`, `"dp"` and `"ilp"` choose by a knapsack which matrix products, convolutions and
            attentions to keep; `"mincut"` keeps the fewest bytes without repeating any of those, `"default"` keeps
            everything, both whatever the budget.
        estimator: what a second run costs: `"flops"`, `"roofline"` (flops and bytes on a typical device) or `"profile"`
            (measured here).
        rules: cheap ops that `"mincut"`, `"greedy"`, `"dp"` and `"ilp"` must not repeat either; `wholestep.BanRules()`
            is what compilers that fuse usually go by. None is no such rule.

    The joint graph is left as it is. Raises `BudgetError`, which names the smallest feasible budget.
    """
    result = partition_joint(
        joint_gm,
        num_fwd_outputs=num_fwd_outputs,
        memory_budget=memory_budget,
        solver=solver,
        estimator=estimator,
        rules=rules,
    )
    return result.forward, result.backward


def inductor(
    *,
    memory_budget: MemoryBudget = 1.0,
    solver: str = "auto",
    estimator: str = "roofline",
    rules: BanRules | None = None,
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A `torch.compile` backend: Inductor, with Wholestep deciding what is kept for the backward.

        torch.compile(model, backend=wholestep.inductor(memory_budget="12GiB"))

    See `wholestep.partition` for the arguments.
    """
    return InductorBackend(StepBudget.of(memory_budget), solver, estimator, rules)


def lower(
    gm: fx.GraphModule,
    *,
    node_predicate: Callable[[fx.Node], bool] | None = None,
    region_predicate: Callable[[Sequence[fx.Node]], bool] | None = None,
    min_ops: int = 10,
    dump: Callable[[str, fx.GraphModule], Any] | None = None,
) -> fx.GraphModule:
    """Compile the parts of a functional FX graph that Inductor can compile, and leave the rest where it is.

    Args:
        node_predicate: which nodes may be in a region at all.
        region_predicate: which runs of nodes become one.
        min_ops: shorter runs stay as they are.
        dump: called with the name and the graph of each region.

    The graph's nodes have fake values (`make_fx`, `torch.export`); it is left as it is. Breaks are logged with reasons.
    """
    lowered, breaks = lower_module(
        gm, node_predicate=node_predicate, region_predicate=region_predicate, min_ops=min_ops, dump=dump
    )
    for item in breaks:
        logger.info("not lowered: %s", item)
    return lowered


def pipeline(
    model: nn.Module,
    *,
    num_micro_batches: int,
    num_stages: int | None = None,
    split: Points | Policy | None = None,
    schedule: str | Schedule = "1f1b",
    stages_per_rank: int | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    loss: str | int | None = None,
    shared: Literal["replicate", "transmit"] = "replicate",
    memory_budget: MemoryBudget | None = None,
    lower: str = "none",
    returns_output: bool = False,
    optimizer: Optimizer | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
) -> CompiledPipe:
    """Cut a model into stages and train it in micro-batches over the ranks of the job, or in this process alone.

        optimizer = torch.optim.AdamW(model.parameters())
        pipe = wholestep.pipeline(model, num_stages=4, num_micro_batches=8, loss_fn=loss_fn, optimizer=optimizer)
        for tokens, targets in batches:
            result = pipe.step(tokens, target=targets)

    Args:
        num_micro_batches: how many parts a batch is cut into, along dimension 0 of its tensors.
        num_stages: how many stages there are; without `split` they are balanced by cost.
        split: where stages begin: names of modules, `{"blocks.2": wholestep.SplitPoint.END}`, or a function that gets
            the modules with their costs and returns either. `wholestep.pipe_split()` in the forward marks a place, too.
        schedule: by name (`wholestep.pipe.FAMILIES`), or a `Schedule` of your own.
        stages_per_rank: how many stages each rank has; as many as the schedule is made for if not given.
        loss_fn: `loss_fn(output, target)` is the loss of a micro-batch, a mean over its rows.
        loss: without `loss_fn`, the key, attribute or position of the loss in the output; `"loss"` if not given.
        shared: parameters that several stages use are on all of them, with their gradients summed (`"replicate"`), or
            on the first, which sends them on (`"transmit"`).
        memory_budget: as in `wholestep.compile`, for one micro-batch through the whole model.
        lower: as in `wholestep.compile`, for each stage.
        returns_output: whether results have the model's output besides the loss.
        optimizer: updates the parameters of each rank's stages at the end of a step, as a graph, and clears their
            gradients. Without one, a step leaves gradients for whatever you do with them.
        max_grad_norm: clip gradients to this norm, taken over the whole model, at the end of a step.
        seed: where random numbers begin; they depend on it, the step and the micro-batch, not on stages or ranks.

    More ranks than the schedule has are replicas that average their gradients: ranks 0 to 3 are the first pipeline of
    four, 4 to 7 the second. Pass the same model on all ranks; parameters and buffers of rank 0 are broadcast.
    """
    if lower not in ("inductor", "none"):
        raise WholestepError(f"lower is 'inductor' or 'none' for a pipeline, not {lower!r}")
    if not _is_count(num_micro_batches) or not num_micro_batches:
        raise WholestepError(f"num_micro_batches is a whole number, 1 or more, not {num_micro_batches!r}")
    if shared not in ("replicate", "transmit"):
        raise WholestepError(f"shared is 'replicate' or 'transmit', not {shared!r}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WholestepError(f"optimizer is a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    if max_grad_norm is not None and not 0 < max_grad_norm < float("inf"):
        raise WholestepError(f"max_grad_norm is a number, more than 0, not {max_grad_norm!r}")
    return CompiledPipe(
        model,
        PipeOptions(
            num_micro_batches=num_micro_batches,
            num_stages=num_stages,
            points=None if callable(split) else split,
            policy=split if callable(split) else None,
            shared=shared,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            loss_fn=loss_fn,
            loss=loss,
            returns_output=returns_output,
            memory_budget=None if memory_budget is None else StepBudget.of(memory_budget),
            lower=lower,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            seed=seed,
        ),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
