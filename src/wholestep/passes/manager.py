"""Running passes: order checked, graph verified on both sides, dead code removed, time taken, history kept."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from wholestep.errors import GraphError, PassError, SettingsError
from wholestep.graph import PassRecord, StepGraph
from wholestep.passes.base import Pass, registered

logger = logging.getLogger(__name__)


def run_passes(graph: StepGraph, passes: Iterable[Pass], *, dump_dir: Path | None = None) -> StepGraph:
    """Run passes on a graph, one after the other.

    Around each: the graph is verified, dead code goes, the pass is timed, logged and recorded in `graph.history`; with
    `dump_dir`, the graph before, after and the difference are written there. Raises `PassError` when a pass comes too
    early, too late or twice, `GraphError` when a pass breaks the graph (its name is in the message).
    """
    pipeline = list(passes)
    _check_order(graph, pipeline)
    graph.verify()
    for item in pipeline:
        graph = _run_one(graph, item, dump_dir)
    return graph


def _run_one(graph: StepGraph, item: Pass, dump_dir: Path | None) -> StepGraph:
    if item.needs_functional and not graph.is_functional:
        raise PassError(f"pass '{item.name}' needs a functional graph and must come before 'reinplace'")
    graph.eliminate_dead_code()
    before, num_ops_before = str(graph) if dump_dir else "", graph.num_ops
    started = time.perf_counter()
    try:
        result = item.apply(graph)
        result.eliminate_dead_code()
        seconds = time.perf_counter() - started
        result.verify()
    except GraphError as error:
        raise GraphError(f"pass '{item}' broke the graph: {error}") from error
    except Exception as error:
        error.add_note(f"in pass '{item}'")
        raise
    result.history.append(PassRecord(str(item), seconds, num_ops_before, result.num_ops))
    logger.debug("%s: %d -> %d ops, %.1f ms", item, num_ops_before, result.num_ops, seconds * 1e3)
    if dump_dir is not None:
        _dump(dump_dir, len(result.history), item.name, before, str(result))
    return result


def _check_order(graph: StepGraph, pipeline: list[Pass]) -> None:
    done = [record.name for record in graph.history]
    names = [item.name for item in pipeline]
    for position, item in enumerate(pipeline):
        earlier, later = {*done, *names[:position]}, names[position + 1 :]
        for required in item.requires:
            if required not in earlier:
                raise PassError(f"pass '{item.name}' requires '{required}', which has not run before it")
        for name in done:
            known = registered().get(name)
            if known is not None and item.name in known.after:
                raise PassError(f"pass '{name}' must come after '{item.name}', but has already run on this graph")
        for predecessor in item.after:
            if predecessor in later:
                raise PassError(f"pass '{item.name}' must come after '{predecessor}', which follows it")
        if item.name in earlier and not item.repeatable:
            raise PassError(f"pass '{item.name}' has already run on this graph and '{item.name}' is not repeatable")


def new_dump_folder(parent: Path, name: str) -> Path:
    """A folder for the graphs of one capture, with a name of its own: `train_step-1`, on ranks `rank0-train_step-1`.

    Raises `SettingsError` if there can be none.
    """
    stem = re.sub(r"\W+", "_", name).strip("_") or "step"
    if dist.is_available() and dist.is_initialized():
        stem = f"rank{dist.get_rank()}-{stem}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                (parent / f"{stem}-{number}").mkdir()
                return parent / f"{stem}-{number}"
    except OSError as error:
        raise SettingsError(f"graphs cannot be written to {parent}: {error.strerror or error}") from error
    raise AssertionError


def dump_graphs(folder: Path, graphs: Mapping[str, StepGraph]) -> None:
    """Write graphs as they run, as Python, to files that are called as they are here."""
    for name, graph in graphs.items():
        (folder / f"{name}.py").write_text(str(graph), encoding="utf-8")


def _dump(folder: Path, index: int, name: str, before: str, after: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{index:02d}_{name}"
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
    for suffix, text in (("before.py", before), ("after.py", after), ("diff", "\n".join(diff) + "\n")):
        stem.with_suffix(f".{suffix}").write_text(text)
