"""Checkpoints are those of `torch.distributed.checkpoint`: plain PyTorch reads ours, and ours reads what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity import differences
from tests.training_runs import Run, newest
from tests.twins import World, observe
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import wholestep

# What it says when there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained(steps: int = 2) -> Run:
    run = Run(options={"cross_iteration": "none"})
    run.train(0, steps)
    return run


def values(run: Run) -> dict[str, torch.Tensor]:
    seen = observe(World(model=run.model, optimizer=run.optimizer))
    return {name: value for name, value in seen.items() if not name.endswith(".grad")}


def test_plain_torch_reads_ours(tmp_path: Path) -> None:
    source, run = trained(), Run(seed=3)
    wholestep.Checkpoints(tmp_path).save(2, **source.state, wait=True)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    found: dict[str, Any] = {"model": model, "optimizer": optimizer, "position": {"epoch": 9, "seen": []}}
    load(found, checkpoint_id=newest(tmp_path))
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert not differences(values(source), values(run))
    assert found["position"] == source.position


def test_plain_torch_reads_the_weights_alone(tmp_path: Path) -> None:
    source, run = trained(), Run(seed=3)
    wholestep.Checkpoints(tmp_path).save(2, **source.state, wait=True)
    found = {"model": run.model.state_dict()}
    load(found, checkpoint_id=newest(tmp_path))
    run.model.load_state_dict(found["model"])
    assert torch.equal(run.model.hidden.weight, source.model.hidden.weight)


def by_name(run: Run) -> Any:
    return get_state_dict(run.model, run.optimizer)


def by_number(run: Run) -> Any:
    return run.model.state_dict(), run.optimizer.state_dict()


@pytest.mark.parametrize("form", [by_name, by_number])
def test_ours_reads_what_plain_torch_wrote(form: Any, tmp_path: Path) -> None:
    source, run = trained(), Run(seed=3)
    model, optimizer = form(source)
    state = {"model": model, "optimizer": optimizer, "position": source.position}
    save(state, checkpoint_id=tmp_path / "theirs")
    wholestep.load_checkpoint(tmp_path / "theirs", model=run.model, optimizer=run.optimizer, position=run.position)
    assert not differences(values(source), values(run))
    assert run.position == source.position
