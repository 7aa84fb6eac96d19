"""Hugging Face's Trainer with compiled steps: forward, backward, clipping and update of a step are one graph.

    from wholestep.integrations.transformers import compile_trainer

    trainer = compile_trainer(Trainer(model, args, train_dataset=dataset))
    trainer.train()

The Trainer's loop stays as it is. It asks for the batches of an optimizer step (`get_batch_samples`), calls
`training_step` for each, then `_clip_grad_norm`, `_get_grad_norm`, `optimizer.step()` and `model.zero_grad()`. Here the
first `training_step` runs all of that as one compiled step; the calls after it hand out the results. What subclasses
make of `training_step` and `compute_loss` is part of the graph.

Where somebody may look between the parts, forward and backward of each micro-batch are a graph, and the update is the
Trainer's own: see `_Compiled.reason_for_parts`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import wholestep
from wholestep.errors import WholestepError

logger = logging.getLogger(__name__)

OLDEST = (5, 3)
"""The first version of transformers whose Trainer clips gradients in a method of its own."""

_MAX_UNROLLED = 8
_LOMO = ("lomo", "adalomo")


def compile_trainer(trainer: Any, *, max_unrolled: int = _MAX_UNROLLED, **options: Any) -> Any:
    """Compile the steps of a `transformers.Trainer`, or of a subclass, and return it.

    Args:
        max_unrolled: the most micro-batches of an optimizer step (`gradient_accumulation_steps`) that become one graph.
            With more, each micro-batch runs a graph of its own, and the update is the Trainer's.
        options: those of `wholestep.compile`.

    `trainer.compiled_step` is what `wholestep.compile` returned: it has `num_captures`, `recompile_reasons`,
    `explain()`. Raises `WholestepError` where others take the Trainer's step over (DeepSpeed, FSDP, ...).
    """
    if getattr(trainer, "compiled_step", None) is not None:
        raise WholestepError("the steps of this Trainer are compiled already")
    _require_supported(trainer, options)
    _Compiled(trainer, max_unrolled, options).install()
    return trainer


class Trainer(transformers.Trainer):
    """`transformers.Trainer` with compiled steps; `compile_options` are the arguments of `compile_trainer`."""

    def __init__(self, *args: Any, compile_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compile_trainer(self, **(compile_options or {}))


@dataclass(frozen=True)
class _Methods:
    """A Trainer's own methods, which others stand in for."""

    get_batch_samples: Callable[..., Any]
    training_step: Callable[..., Any]
    clip_grad_norm: Callable[..., Any]
    get_grad_norm: Callable[..., Any]


def optimizer_step(own: _Methods, trainer: Any, model: Any, batches: list[Any], num_items: Any) -> tuple[Any, Any]:
    """What the Trainer's loop does with the micro-batches of a step: all up to `model.zero_grad()`."""
    losses: list[Any] = []
    for index, inputs in enumerate(batches):
        trainer.accelerator.gradient_state._set_sync_gradients(index == len(batches) - 1)
        losses.append(own.training_step(model, inputs, num_items))
    norm = own.clip_grad_norm(model) if trainer.args.max_grad_norm > 0 else None
    norm = own.get_grad_norm(model, grad_norm=norm)
    trainer.optimizer.step()
    model.zero_grad()
    return losses, norm


def micro_step(own: _Methods, model: Any, inputs: Any, num_items: Any) -> Any:
    """Forward and backward of one micro-batch."""
    return own.training_step(model, inputs, num_items)


@dataclass(eq=False)
class _Group:
    """The micro-batches of one optimizer step."""

    samples: list[Any]
    is_complete: bool
    """Whether the loop updates after them: not if the data has ended early."""
    num_begun: int = 0
    results: tuple[list[Any], Any] | None = None
    """The losses and the norm of the gradients, if the step has run as a whole."""

    def begin(self, inputs: Any) -> bool:
        """Whether a micro-batch is the one that is due."""
        is_due = self.num_begun < len(self.samples) and self.samples[self.num_begun] is inputs
        self.num_begun += is_due
        return is_due


@dataclass(eq=False)
class _Compiled:
    """What stands in for the methods of a Trainer."""

    trainer: Any
    max_unrolled: int
    options: dict[str, Any]
    own: _Methods = field(init=False)
    whole: Any = field(init=False)
    part: Any = field(init=False)
    group: _Group = field(default_factory=lambda: _Group([], is_complete=False))
    skipped: _SkippedCall | None = None
    mentioned: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        trainer = self.trainer
        methods = (trainer.training_step, trainer._clip_grad_norm, trainer._get_grad_norm)
        self.own = _Methods(trainer.get_batch_samples, *methods)
        self.whole = wholestep.compile(optimizer_step, **self.options)
        self.part = wholestep.compile(micro_step, **self.options)

    def install(self) -> None:
        trainer = self.trainer
        trainer.get_batch_samples, trainer.training_step = self.get_batch_samples, self.training_step
        trainer._clip_grad_norm, trainer._get_grad_norm = self.clip_grad_norm, self.get_grad_norm
        trainer.compiled_step = self.whole
        if getattr(trainer, "_mixed_mesh_grads", False) is None:
            trainer._mixed_mesh_grads = False  # found in the first step, which would be captured twice for it
        if self.options.get("data_parallel") is not None:
            accelerator = trainer.accelerator
            # Mixed precision and the device, but no DistributedDataParallel.
            accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        if self.skipped is not None:
            self.skipped.require_called()
        samples, num_items = self.own.get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        self.group = _Group(samples, is_complete=len(samples) == num_batches)
        return samples, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if not self.group.begin(inputs):
            self.group = _Group([inputs], is_complete=False, num_begun=1)  # not the loop that we know
        group = self.group
        if group.num_begun == 1:
            reason = self.reason_for_parts(group)
            if reason is None:
                self._run_whole(group, model, num_items_in_batch)
            else:
                self._mention(reason)
        if group.results is None:
            return self._run_part(group, model, inputs, num_items_in_batch)
        if self.trainer.accelerator.sync_gradients != (group.num_begun == len(group.samples)):
            raise WholestepError("this Trainer does not update where get_batch_samples says that a step ends")
        return group.results[0][group.num_begun - 1]

    def clip_grad_norm(self, model: Any) -> Any:
        return self.own.clip_grad_norm(model) if self.group.results is None else self.group.results[1]

    def get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.group.results is None:
            return self.own.get_grad_norm(model, grad_norm=grad_norm)
        return self.group.results[1]

    def reason_for_parts(self, group: _Group) -> str | None:
        """Why the micro-batches and the update of a step cannot be one graph; None if they can."""
        looked_at = ["on_pre_optimizer_step", "on_optimizer_step"]
        if len(group.samples) > 1:
            looked_at.append("on_substep_end")
        for callback in self.trainer.callback_handler.callbacks:
            for name in looked_at:
                if getattr(type(callback), name) is not getattr(transformers.TrainerCallback, name):
                    return f"{type(callback).__name__}.{name} runs in the middle of it"
        if not group.is_complete:
            return "the data ends in the middle of it"
        if len(group.samples) > self.max_unrolled:
            return f"it has {len(group.samples)} micro-batches (max_unrolled={self.max_unrolled})"
        if self.trainer.accelerator.scaler is not None:
            return "a GradScaler decides about its update"
        return None

    def _run_whole(self, group: _Group, model: Any, num_items: Any) -> None:
        trainer = self.trainer
        was_stopping, was_last = _is_stopping(trainer.control), trainer.accelerator.sync_gradients
        self.group = _Group([], is_complete=False)  # the step can see the Trainer, and through it what is kept here
        with self._quiet(model):
            group.results = self.whole(self.own, trainer, model, [*group.samples], num_items)
        self.group = group
        trainer.accelerator.gradient_state._set_sync_gradients(was_last)
        if len(group.samples) > 1 and _is_stopping(trainer.control) and not was_stopping:
            raise WholestepError(
                f"{type(trainer).__name__}.training_step stops the training in the middle of an optimizer step, whose "
                "update has been made. Stop from a callback, or compile with max_unrolled=1"
            )
        self.skipped = _SkippedCall(trainer.optimizer)

    def _run_part(self, group: _Group, model: Any, inputs: Any, num_items: Any) -> Any:
        self.group = _Group([], is_complete=False)
        with self._quiet(model):
            loss = self.part(self.own, model, inputs, num_items)
        self.group = group
        return loss

    @contextlib.contextmanager
    def _quiet(self, model: Any) -> Generator[None]:
        """What the Trainer does around a micro-batch and no graph can: to empty the cache of the device."""
        trainer = self.trainer
        model.train()  # the first thing that a step does: the same mode, be it after an evaluation or not
        args, every = trainer.args, trainer.args.torch_empty_cache_steps
        args.torch_empty_cache_steps = None
        try:
            yield
        finally:
            args.torch_empty_cache_steps = every
        if every is not None and trainer.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _mention(self, reason: str) -> None:
        if self.options.get("data_parallel") is not None:
            raise WholestepError(f"on several ranks the whole optimizer step has to be one graph, but {reason}")
        self.trainer.compiled_step = self.part
        if reason not in self.mentioned:
            self.mentioned.add(reason)
            logger.warning("an optimizer step runs in parts, a graph for each micro-batch and an update: %s", reason)


class _SkippedCall:
    """The next call of an optimizer's `step` does nothing: the graph has made the update."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._before = vars(optimizer).get("step")
        self._is_due = True

        def step(closure: Any = None) -> None:
            del closure
            self._put_back()

        step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
        optimizer.step = step

    def _put_back(self) -> None:
        self._is_due = False
        if self._before is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._before

    def require_called(self) -> None:
        """Raise unless the loop has called `step`, which it does not do if it is not the one that we know."""
        if self._is_due:
            self._put_back()
            raise WholestepError("this Trainer did not call optimizer.step() after the micro-batches of a step")


def _is_stopping(control: Any) -> bool:
    return control.should_training_stop or control.should_epoch_stop


def _require_supported(trainer: Any, options: dict[str, Any]) -> None:
    """Raise `WholestepError` where the steps of a Trainer are not its own, naming who has them and what to do."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST or not isinstance(trainer, transformers.Trainer):
        oldest = ".".join(map(str, OLDEST))
        raise WholestepError(
            f"compile_trainer takes a Trainer of transformers {oldest} or newer, not a {type(trainer).__name__} of "
            f"transformers {transformers.__version__}"
        )
    args, kind = trainer.args, trainer.accelerator.distributed_type.value
    is_spread, has_ranks = kind.startswith("MULTI_"), options.get("data_parallel") is not None
    problems = {
        "torch_compile=True compiles the model already; leave it out, and pass lower='inductor' to have Inductor "
        "compile parts of the step": args.torch_compile,
        f"optim={str(args.optim)!r} updates within the backward; take another one": args.optim in _LOMO,
        "it trains on several devices by DataParallel; start a process for each of them with torchrun, and pass "
        "data_parallel='replicate'": args.n_gpu > 1,
        f"{kind} runs them; leave it out of the arguments and of Accelerate's configuration (for several ranks there "
        "is data_parallel='replicate')": kind != "NO" and not is_spread,
        "it trains on several ranks; pass data_parallel='replicate', which replaces DistributedDataParallel": (
            is_spread and not has_ranks
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise WholestepError(f"the steps of this Trainer cannot be compiled: {problem}")
