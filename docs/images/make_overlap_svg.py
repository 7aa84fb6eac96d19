"""Draw `overlap.svg` from a profiler trace: communication of one iteration under the forward of the next.

python -m benchmarks.netlab --ranks 2 --rate 0.5gbit -- python docs/images/trace_overlap.py trace.json
python docs/images/make_overlap_svg.py trace.json docs/images/overlap.svg
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 1000, 130, 15
LANE_HEIGHT, GAP, TOP = 34, 12, 64
NUM_ITERATIONS = 3
PHASES = {"forward": "#4c78a8", "backward": "#9ecae9"}
ITERATIONS = ("#f58518", "#54a24b", "#b279a2", "#e45756")


@dataclass(frozen=True)
class Span:
    """A stretch of time in microseconds."""

    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What the picture shows: iterations, where their backward begins, waits, and all-reduces in order of issue."""

    iterations: list[Span]
    backward_starts: list[float]
    waits: list[Span]
    all_reduces: list[Span]
    num_buckets: int


def read(path: Path) -> Trace:
    """Pick the named ranges and collectives out of a Chrome trace."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]
    mains = _spans(events, lambda name: name == "wholestep::main")
    compute = next(event["tid"] for event in events if event["name"] == "wholestep::main")
    own = [event for event in events if event["tid"] == compute]
    gradients = _spans(own, lambda name: name.startswith("aten::") and "backward" in name)
    issued = _spans(own, lambda name: name == "_c10d_functional::all_reduce_")
    shown = mains[1 : 1 + NUM_ITERATIONS]
    starts = [next(span.start for span in gradients if span.start > main.start) for main in shown]
    num_buckets = sum(shown[0].start <= span.start < shown[0].end for span in issued)
    all_reduces = _spans(events, lambda name: name.startswith("gloo:all_reduce"))
    waits = _spans(own, lambda name: name == "_c10d_functional::wait_tensor")
    return Trace(shown, starts, waits, all_reduces, num_buckets)


def _spans(events: list[dict[str, Any]], wanted: Any) -> list[Span]:
    found = [Span(event["ts"], event["ts"] + event["dur"]) for event in events if wanted(event["name"])]
    return sorted(found, key=lambda span: span.start)


def draw(trace: Trace) -> str:
    """Two lanes over three iterations: what the rank computes, and what travels meanwhile."""
    begin, end = trace.iterations[0].start, trace.iterations[-1].end
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def x(moment: float) -> float:
        return LEFT + (moment - begin) * scale

    def bar(span: Span, lane: float, height: float, fill: str, title: str) -> str:
        left, right = max(x(span.start), LEFT), min(x(span.end), WIDTH - RIGHT)
        if right - left < 0.3:
            return ""
        box = f'x="{left:.1f}" y="{lane:.1f}" width="{right - left:.1f}" height="{height:.1f}"'
        return f'<rect {box} fill="{fill}" stroke="white" stroke-width="0.5"><title>{title}</title></rect>'

    compute, link = TOP, TOP + LANE_HEIGHT + GAP
    parts: list[str] = []
    for number, (span, backward) in enumerate(zip(trace.iterations, trace.backward_starts, strict=True)):
        parts.append(bar(Span(span.start, backward), compute, LANE_HEIGHT, PHASES["forward"], "forward"))
        parts.append(bar(Span(backward, span.end), compute, LANE_HEIGHT, PHASES["backward"], "backward"))
        parts.append(_text(x(span.start) + 6, TOP - 8, f"iteration {number + 1}", ITERATIONS[number + 1]))
        border = f"M{x(span.start):.1f} {TOP - 22} V{link + LANE_HEIGHT + 8}"
        parts.append(f'<path d="{border}" stroke="#888" stroke-dasharray="3 3"/>')
    for span in trace.waits:
        if span.end - span.start > 1000 and span.start >= begin:
            parts.append(bar(span, compute, LANE_HEIGHT, "#d62728", f"waits {(span.end - span.start) / 1e3:.1f} ms"))
    half = LANE_HEIGHT / 2
    for index, (span, iteration) in enumerate(_by_iteration(trace)):
        parts.append(
            bar(span, link + half * (index % 2), half, ITERATIONS[iteration], f"all-reduce of iteration {iteration}")
        )
    parts.append(_text(8, compute + 22, "compute", "#333"))
    parts.append(_text(8, link + 22, "all-reduce", "#333"))
    return _page(parts, link + LANE_HEIGHT, (end - begin) / 1e3)


def _by_iteration(trace: Trace) -> list[tuple[Span, int]]:
    """All-reduces with the number of the iteration that issued them (0: the one before the first shown)."""
    first = trace.backward_starts[0]
    later = [span for span in trace.all_reduces if span.start >= first]
    earlier = [span for span in trace.all_reduces if span.start < first]
    numbered = [(span, 0) for span in earlier]
    return numbered + [
        (span, min(1 + index // trace.num_buckets, len(ITERATIONS) - 1)) for index, span in enumerate(later)
    ]


def _page(parts: list[str], bottom: float, milliseconds: float) -> str:
    height = bottom + 62
    legend = [("forward", PHASES["forward"]), ("backward, updates", PHASES["backward"]), ("waiting", "#d62728")]
    row: list[str] = []
    for index, (name, colour) in enumerate(legend):
        left = LEFT + 150 * index
        row.append(f'<rect x="{left}" y="{bottom + 24}" width="12" height="12" fill="{colour}"/>')
        row.append(_text(left + 18, bottom + 34, name, "#333"))
    row.append(_text(LEFT + 460, bottom + 34, "all-reduces have the colour of the iteration that issued them", "#333"))
    heading = _text(
        8, 24, f"Three iterations of a GPT on one of two ranks over 0.5 Gbit/s, {milliseconds:.0f} ms", "#111", 15
    )
    body = "\n".join(part for part in [heading, *parts, *row] if part)
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" role="img"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n'
        "<title>All-reduces of one iteration travel under the forward of the next</title>\n"
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(left: float, baseline: float, text: str, fill: str, size: int = 12) -> str:
    return f'<text x="{left:.1f}" y="{baseline:.1f}" font-size="{size}" fill="{fill}">{text}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.write_text(draw(read(arguments.trace)))
