# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""Lightning: a callback that runs each training step of a `Trainer` as one graph.

    trainer = Trainer(..., callbacks=[wholestep.integrations.lightning.WholeStep()])

What is compiled lies between the loop and the optimizer: `training_step`, `zero_grad`, the backward, clipping and
`optimizer.step()`, with all hooks in between, as the strategy and its precision plugin do it; in manual optimization
the whole of `training_step`. The loop around it is Lightning's own: counters, schedulers, validation, checkpoints. What
is logged is put off until the graph has run, as it is bookkeeping about values that the trace does not have.
"""

# What lies between the loop and the optimizer has no public name in Lightning.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call

import wholestep


class WholeStep(Callback):
    """Compiles the training step of the `Trainer` it is given to; options are those of `wholestep.compile`.

    `step` is the compiled step of the present fit: `step.num_captures`, `step.explain()`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.step: Any = None
        self._put_back = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_several_devices(trainer)
        put_in = _automatic if pl_module.automatic_optimization else _manual
        self.step = put_in(_Fit(trainer, pl_module), self.options, self._put_back)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._put_back.close()


def _refuse_several_devices(trainer: Trainer) -> None:
    if isinstance(trainer.strategy, SingleDeviceStrategy) and trainer.world_size == 1:
        return
    raise wholestep.WholestepError(
        f"{type(trainer.strategy).__name__} trains on several devices, with communication of its own: use devices=1, "
        'or write the loop yourself and compile its step with data_parallel="replicate"'
    )


class _Fit:
    """One fit: who takes part, and what its steps have logged."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer = trainer
        self.module = module
        self.logged: list[tuple[str | None, tuple[Any, ...], dict[str, Any]]] = []
        self.later = self._log_later

    def _log_later(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`self.log` while a step runs: what it is given then, which may change afterwards."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        self.logged.append((self.module._current_fx_name, (name, value, *args), kwargs))

    @contextlib.contextmanager
    def logging_later(self) -> Generator[None]:
        """Inside, what is logged is kept; it is logged at the end."""
        vars(self.module)["log"] = self.later
        try:
            yield
        finally:
            del vars(self.module)["log"]
            logged = self.logged.copy()
            self.logged.clear()
        before = self.module._current_fx_name
        for hook, args, kwargs in logged:
            self.module._current_fx_name = hook
            self.module.log(*args, **kwargs)
        self.module._current_fx_name = before


class _OneBatch(Closure):
    """The closure of one batch: called by itself, it accumulates; an optimizer's step runs it and the update."""

    def __init__(self, closure: Closure, run: Callable[[bool, bool, dict[str, Any]], Any]) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self._run = run

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(updates=False, options={})

    def run(self, *, updates: bool, options: dict[str, Any]) -> Any:
        self._result = self._run(self._zero_grad_fn is not None, updates, options)
        return self._result


def _automatic(fit: _Fit, options: dict[str, Any], put_back: contextlib.ExitStack) -> Any:
    """Compile what `optimizer.step(closure)` does, and the closure alone for batches that only accumulate."""
    loop = fit.trainer.fit_loop.epoch_loop.automatic_optimization
    strategy = fit.trainer.strategy
    make_closure, update = loop._make_closure, strategy.optimizer_step
    trainer, progress = fit.trainer, loop.optim_progress.optimizer.zero_grad
    clears_by_itself = type(fit.module).optimizer_zero_grad is LightningModule.optimizer_zero_grad
    is_unused = _is_batch_index_unused(fit.module)

    def whole_step(
        module: LightningModule,
        optimizer: Any,
        inputs: dict[str, Any],
        clears: bool,
        updates: bool,
        rest: dict[str, Any],
    ) -> Any:
        def clear() -> None:
            call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
            call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
            if clears_by_itself:
                optimizer.zero_grad()
            else:
                epoch_and_batch = trainer.current_epoch, rest["batch_idx"]
                call._call_lightning_module_hook(trainer, "optimizer_zero_grad", *epoch_and_batch, optimizer)

        closure = Closure(
            loop._make_step_fn(OrderedDict(inputs)),
            loop._make_backward_fn(optimizer),
            zero_grad_fn=clear if clears else None,
        )
        if updates:
            update(optimizer, closure, module, **rest["options"])
        else:
            closure()
        result = closure.consume_result()
        return result.loss, result.extra

    step = wholestep.compile(whole_step, **options)

    def run(inputs: Any, optimizer: Any, batch_idx: int, clears: bool, updates: bool, kwargs: dict[str, Any]) -> Any:
        rest = {"batch_idx": batch_idx, "options": kwargs}
        with fit.logging_later():
            loss, extra = step(fit.module, optimizer, inputs, clears, updates, rest)
        if clears:
            progress.increment_ready()
            progress.increment_started()
            progress.increment_completed()
        return loop.output_result_cls(loss, extra=extra)

    def make(inputs: Any, optimizer: Any, batch_idx: int) -> Closure:
        closure = make_closure(inputs, optimizer, batch_idx)
        if loop._skip_backward:  # as while stochastic weight averaging computes its statistics
            return closure
        told = {**inputs, "batch_idx": 0} if is_unused and "batch_idx" in inputs else inputs
        return _OneBatch(closure, functools.partial(run, told, optimizer, batch_idx))

    def optimizer_step(optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if not isinstance(closure, _OneBatch):  # made by the user's own optimizer_step
            return update(optimizer, closure, model, **kwargs)
        return closure.run(updates=True, options=kwargs).loss

    _exchange(loop, "_make_closure", make, put_back)
    _exchange(strategy, "optimizer_step", optimizer_step, put_back)
    return step


def _manual(fit: _Fit, options: dict[str, Any], put_back: contextlib.ExitStack) -> Any:
    """Compile `training_step`, which does everything itself."""
    training_step, is_unused = fit.trainer.strategy.training_step, _is_batch_index_unused(fit.module)

    def whole_step(module: LightningModule, optimizers: list[Any], args: tuple[Any, ...]) -> Any:
        return training_step(*args)

    step = wholestep.compile(whole_step, **options)
    for optimizer in fit.trainer.strategy._lightning_optimizers:  # weak references cannot be watched
        put_back.callback(setattr, optimizer, "_strategy", optimizer._strategy)
        optimizer._strategy = fit.trainer.strategy

    def run(*args: Any) -> Any:
        with fit.logging_later():
            told = (args[0], 0, *args[2:]) if is_unused and len(args) > 1 else args
            return step(fit.module, fit.trainer.optimizers, told)

    _exchange(fit.trainer.strategy, "training_step", run, put_back)
    return step


def _is_batch_index_unused(module: LightningModule) -> bool:
    """Whether `training_step` never looks at its second argument: else the second batch would be a capture."""
    code = inspect.unwrap(type(module).training_step).__code__
    used = {one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD")}
    index = code.co_varnames[2] if code.co_argcount > 2 else "batch_idx"
    return index not in used and not used & {"locals", "vars", "eval"}


def _exchange(owner: Any, name: str, function: Callable[..., Any], put_back: contextlib.ExitStack) -> None:
    setattr(owner, name, function)
    put_back.callback(delattr, owner, name)
