"""The public verbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from wholestep._logging import attach_handler
from wholestep._settings import Settings
from wholestep.errors import WholestepError
from wholestep.passes import DEFAULT_PIPELINE, Pipeline
from wholestep.report.explain import explain_step
from wholestep.report.html import write_step_report
from wholestep.runtime import StepOptions, StepRunner


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


@overload
def compile(fn: Callable[..., Any]) -> CompiledStep: ...


@overload
def compile(
    fn: None = None, *, dynamic_batch: bool | str = ..., verify: int | None = ..., passes: str | Pipeline | None = ...
) -> Callable[[Callable[..., Any]], CompiledStep]: ...


@overload
def compile(
    fn: Callable[..., Any],
    *,
    dynamic_batch: bool | str = ...,
    verify: int | None = ...,
    passes: str | Pipeline | None = ...,
) -> CompiledStep: ...


def compile(
    fn: Callable[..., Any] | None = None,
    *,
    dynamic_batch: bool | str = "auto",
    verify: int | None = None,
    passes: str | Pipeline | None = None,
) -> Any:
    """Compile a whole training step: forward, loss, backward and optimizer become one graph.

    `fn` is the train step you already have, with any arguments; it comes back as a callable of the same signature.
    Use it as a decorator or as a function:

        @wholestep.compile
        def train_step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

    Args:
        dynamic_batch: `"auto"` captures the first batch size as it is and switches to a symbolic one when another size
            comes along; `True` is symbolic from the start; `False` captures every size apart.
        verify: check the first N steps against eager and raise `VerificationError` naming what differs.
        passes: the pass pipeline, as text (`"simplify,cse,reinplace"`) or as a `Pipeline`; `""` runs the graph as
            captured.

    The first call captures; later calls run the graph. The returned value carries no autograd history.
    """
    if fn is None:
        return lambda function: compile(function, dynamic_batch=dynamic_batch, verify=verify, passes=passes)
    if not callable(fn):
        raise WholestepError(f"wholestep.compile takes a train step (a function), not a {type(fn).__name__}")
    if not (isinstance(dynamic_batch, bool) or dynamic_batch == "auto"):
        raise WholestepError(f"dynamic_batch is True, False or 'auto', not {dynamic_batch!r}")
    if verify is not None and not _is_count(verify):
        raise WholestepError(f"verify is the number of steps to check, 0 or more, not {verify!r}")
    if not _is_pipeline(passes):
        raise WholestepError(f"passes is a pipeline as text or a Pipeline, not {passes!r}")
    settings = Settings.from_environ()
    if settings.log_level is not None:
        attach_handler(settings.log_level)
    if settings.disable:
        return fn
    pipeline = DEFAULT_PIPELINE if passes is None else passes
    options = StepOptions(
        dynamic_batch=dynamic_batch,
        verify=settings.verify if verify is None else verify,
        pipeline=Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline,
        cache_size=settings.cache_size,
        recompile_warning=settings.recompile_warning,
        dump_dir=Path(settings.dump_dir) if settings.dump_dir else None,
    )
    return CompiledStep(fn, options)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_pipeline(value: object) -> bool:
    return value is None or isinstance(value, (str, Pipeline))
