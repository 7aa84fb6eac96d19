"""Simulated steps as a Chrome trace, for Perfetto or chrome://tracing: one process per rank, one thread per lane."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.errors import SimulationError
from wholestep.sim.simulate import TraceSpan

MAX_RANKS = 64
MAX_EVENTS = 500_000
_LANES = ("compute", "send", "reduce")


def chrome_trace(spans: Mapping[int, Sequence[TraceSpan]]) -> str:
    """The trace of some ranks, as JSON; raises `SimulationError` if it would be too large to look at."""
    num_events = sum(map(len, spans.values()))
    if len(spans) > MAX_RANKS or num_events > MAX_EVENTS:
        raise SimulationError(
            f"a trace of {len(spans)} ranks and {num_events} events is too large to look at; choose at most "
            f"{MAX_RANKS} ranks and {MAX_EVENTS} events"
        )
    events: list[dict[str, Any]] = []
    for rank, found in spans.items():
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, number, lane) for number, lane in enumerate(_LANES)]
        events += [
            {
                "name": span.name,
                "cat": span.lane,
                "ph": "X",
                "ts": round(span.start_us, 3),
                "dur": round(span.end_us - span.start_us, 3),
                "pid": rank,
                "tid": _LANES.index(span.lane),
            }
            for span in found
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False)


def _named(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
