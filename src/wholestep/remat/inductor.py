"""The backend for `torch.compile`: Inductor compiles what our partition gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep._version import __version__
from wholestep.remat.budget import StepBudget
from wholestep.remat.partition import check_solver, partition_joint
from wholestep.remat.rules import BanRules


@dataclass(frozen=True)
class InductorBackend:
    """`torch.compile(model, backend=InductorBackend(...))`; see `wholestep.inductor`."""

    budget: StepBudget
    solver: str = "auto"
    estimator: str = "roofline"
    rules: BanRules | None = None

    def __post_init__(self) -> None:
        check_solver(self.solver, self.rules)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from wholestep import _inductor_torch  # takes seconds

        identity = f"wholestep {__version__} {self.budget} {self.solver} {self.estimator} {self.rules}"
        return _inductor_torch.compile_with_partition(module, example_inputs, self.partition, identity)

    def partition(self, joint: fx.GraphModule, *, num_fwd_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of a joint graph whose random ops are pure already."""
        found = partition_joint(
            joint,
            num_fwd_outputs=num_fwd_outputs,
            memory_budget=self.budget,
            solver=self.solver,
            estimator=self.estimator,
            rules=self.rules,
            fusing=True,
        )
        return found.forward, found.backward
