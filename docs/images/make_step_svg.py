"""Draw docs/images/step.svg from a real step graph: values that cross the phases, and the memory they take.

    python docs/images/make_step_svg.py [PATH]

The figures come from the library itself (capture, passes, `profile_memory`); the same code gives the same bytes.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import torch

import wholestep
from wholestep.cost import MemoryProfile, profile_memory
from wholestep.graph import Phase, StepGraph
from wholestep.report.summary import format_bytes
from wholestep.zoo import gpt

WIDTH, HEIGHT = 960, 448
LEFT, RIGHT = 24, WIDTH - 24
ARC_BASE, ARC_TOP = 196, 82
STRIP_HEIGHT = 24
MEMORY_TOP, MEMORY_BASE = 266, 402

CONFIG = gpt.GPTConfig(vocab_size=256, context=128, width=128, heads=4, layers=4)
BATCH_SIZE = 8

STYLE = """
.card { fill: #ffffff; stroke: #d5dae3; }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #5b6577; }
.title { font-size: 17px; font-weight: 650; fill: #1b2230; }
.strong { font-weight: 650; fill: #1b2230; }
.on-strip { font-weight: 650; fill: #ffffff; }
.grid { stroke: #dfe3ea; }
.arc { fill: none; stroke-width: 1; opacity: 0.38; }
.area { opacity: 0.24; }
.edge { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.floor { fill: #8a94a6; opacity: 0.4; }
.peak { fill: #1b2230; stroke: #ffffff; stroke-width: 2; }
.halo { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round; }
.fill-forward { fill: #3567d6; } .fill-backward { fill: #c25a17; } .fill-optimizer { fill: #15805c; }
.line-forward { stroke: #3567d6; } .line-backward { stroke: #c25a17; } .line-optimizer { stroke: #15805c; }
@media (prefers-color-scheme: dark) {
  .card { fill: #161b22; stroke: #2c3340; }
  text { fill: #9aa5b8; }
  .title, .strong { fill: #e6e9ef; }
  .on-strip { fill: #12151b; }
  .grid { stroke: #2c3340; }
  .floor { fill: #7d889b; }
  .peak { fill: #e6e9ef; stroke: #161b22; }
  .halo { stroke: #161b22; }
  .fill-forward { fill: #7ba4ff; } .fill-backward { fill: #f0935a; } .fill-optimizer { fill: #4fc79b; }
  .line-forward { stroke: #7ba4ff; } .line-backward { stroke: #f0935a; } .line-optimizer { stroke: #4fc79b; }
}
"""


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: gpt.Batch) -> torch.Tensor:
    """The step in the picture."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def captured_graph() -> StepGraph:
    """The graph that runs: after all passes."""
    torch.manual_seed(0)
    model = gpt.GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = wholestep.compile(train_step)
    step(model, optimizer, gpt.make_batch(CONFIG, BATCH_SIZE, seed=0))
    return step.graph


def draw(graph: StepGraph) -> str:
    """The whole picture as SVG text."""
    profile = profile_memory(graph)
    num_ops = len(profile.live_bytes)
    counts = {phase: sum(other is phase for other in profile.phases) for phase in dict.fromkeys(profile.phases)}
    description = (
        f"A GPT train step as one graph of {num_ops} ops: "
        + ", ".join(f"{count} {phase}" for phase, count in counts.items())
        + f". Live memory starts and ends near {format_bytes(profile.slot_bytes)} and peaks at "
        f"{format_bytes(profile.peak_bytes)} during {profile.phases[profile.peak_index]}."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>One train step, one graph</title>",
        f"<desc>{description}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>',
        _text(LEFT, 34, f"One train step of a small GPT is one graph of {num_ops} ops", "start", "title"),
        _text(LEFT, 55, "Each arc is a value that crosses from one phase into another.", "start"),
        *_arcs(graph),
        *_strip(profile),
        *_memory(profile),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(op: float, num_ops: int) -> float:
    return round(LEFT + op / num_ops * (RIGHT - LEFT), 1)


def _arcs(graph: StepGraph) -> list[str]:
    """Edges between ops of different phases, in the colour of the phase that made the value."""
    position = {node: index for index, node in enumerate(graph.calls())}
    spans = [
        (position[source] + 0.5, index + 0.5, source.meta["phase"])
        for node, index in position.items()
        for source in node.all_input_nodes
        if source in position and source.meta["phase"] is not node.meta["phase"]
    ]
    longest = max(end - start for start, end, _ in spans)
    parts: list[str] = []
    for start, end, phase in spans:
        x0, x1 = _x(start, len(position)), _x(end, len(position))
        # A cubic curve reaches three quarters of the height of its control points.
        y = round(ARC_BASE - (ARC_BASE - ARC_TOP) / 0.75 * (end - start) / longest, 1)
        parts.append(
            f'<path class="arc line-{phase}" d="M{x0:g} {ARC_BASE}C{x0:g} {y:g} {x1:g} {y:g} {x1:g} {ARC_BASE}"/>'
        )
    return parts


def _strip(profile: MemoryProfile) -> list[str]:
    """One bar per phase, with its name and number of ops."""
    parts: list[str] = []
    for phase, start, end in _runs(profile.phases):
        left, right = _x(start, len(profile.phases)), _x(end, len(profile.phases))
        parts.append(
            f'<rect class="fill-{phase}" x="{left:g}" y="{ARC_BASE + 2}" width="{right - left - 1.5:.1f}" '
            f'height="{STRIP_HEIGHT}" rx="4"/>'
        )
        parts.append(_text((left + right) / 2, ARC_BASE + 19, f"{phase} · {end - start}", "middle", "on-strip"))
    return parts


def _memory(profile: MemoryProfile) -> list[str]:
    """Live bytes while each op runs, above the slots that are always there."""
    num_ops = len(profile.live_bytes)

    def y(num_bytes: float) -> float:
        return round(MEMORY_BASE - num_bytes / profile.peak_bytes * (MEMORY_BASE - MEMORY_TOP), 1)

    parts = [f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{MEMORY_BASE}" y2="{MEMORY_BASE}"/>']
    for phase, start, end in _runs(profile.phases):
        steps = [(index + side, profile.live_bytes[index]) for index in range(start, end) for side in (0, 1)]
        outline = "L".join(f"{_x(op, num_ops):g} {y(live):g}" for op, live in steps)
        left, right = _x(start, num_ops), _x(end, num_ops)
        parts.append(
            f'<path class="area fill-{phase}" d="M{outline}L{right:g} {MEMORY_BASE}L{left:g} {MEMORY_BASE}Z"/>'
        )
        parts.append(f'<path class="edge line-{phase}" d="M{outline}"/>')
    floor = y(profile.slot_bytes)
    parts.append(
        f'<rect class="floor" x="{LEFT}" y="{floor:g}" width="{RIGHT - LEFT}" height="{MEMORY_BASE - floor:.1f}"/>'
    )
    peak_x = _x(profile.peak_index + 0.5, num_ops)
    parts.append(f'<circle class="peak" cx="{peak_x:g}" cy="{y(profile.peak_bytes):g}" r="5"/>')
    peak_text = f"peak {format_bytes(profile.peak_bytes)} at {profile.peak_node}"
    parts.append(_text(peak_x + 10, y(profile.peak_bytes) - 10, peak_text, "start", "strong halo"))
    parts.append(_text(LEFT, MEMORY_TOP - 10, "live memory, predicted", "start", "strong halo"))
    slots = f"parameters, optimizer state and batch: {format_bytes(profile.slot_bytes)}, always there"
    parts.append(_text(LEFT, MEMORY_BASE + 24, slots, "start"))
    parts.append(_text(RIGHT, MEMORY_BASE + 24, "ops in execution order →", "end"))
    return parts


def _runs(phases: tuple[Phase, ...]) -> list[tuple[Phase, int, int]]:
    """Neighbouring ops of one phase: (phase, first, behind the last)."""
    runs: list[tuple[Phase, int, int]] = []
    start = 0
    for phase, members in groupby(phases):
        end = start + len(list(members))
        runs.append((phase, start, end))
        start = end
    return runs


def _text(x: float, y: float, text: str, anchor: str, style: str = "label") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main(argv: list[str]) -> int:
    path = Path(argv[0]) if argv else Path(__file__).with_name("step.svg")
    path.write_text(draw(captured_graph()), encoding="utf-8")
    print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
