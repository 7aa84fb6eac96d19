"""From a compiled step to a report: which figures go where."""

from __future__ import annotations

import torch

from wholestep._version import __version__
from wholestep.cost import dominant_logits
from wholestep.graph import StepGraph
from wholestep.report.browser import graph_browser
from wholestep.report.charts import memory_chart
from wholestep.report.document import Bar, Card, Cell, Figure, Prose, Report, Section, Table
from wholestep.report.lowering import cuda_graph_sections, lowering_sections
from wholestep.report.memory_plan import memory_sections
from wholestep.report.parallel import loop_sections, plan_sections
from wholestep.report.summary import (
    GraphSummary,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    summarise,
)
from wholestep.report.timeline import StepTimeline, predicted_timeline
from wholestep.report.timing import measured_section, timeline_section
from wholestep.runtime import StepRunner

_MAX_ROWS = 12
_MAX_PASS_TEXT = 72


def step_report(step: StepRunner, *, pictures: bool = True) -> Report:
    """The report about a step that has been called at least once.

    `pictures` costs time: for other memory plans if there is one, and to get to know the device. That is also needed to
    hold what was measured against predictions.
    """
    graph = step.graph
    summary = summarise(graph)
    timeline = predicted_timeline(step) if pictures or not step.measured.is_empty else None
    return Report(
        title=getattr(step, "__name__", "step"),
        subtitle=f"wholestep {__version__}, torch {torch.__version__}",
        cards=_cards(step, summary),
        sections=(
            *_recompile_section(step),
            *_time_sections(step, timeline, summary),
            *plan_sections(step, timeline),
            *memory_sections(step, pictures=pictures),
            *lowering_sections(graph),
            *cuda_graph_sections(graph),
            _phase_section(summary),
            _memory_section(summary),
            _module_section(summary),
            _slot_section(summary),
            _pass_section(graph),
            *loop_sections(step),
            Section("Graph", (graph_browser(graph),)),
        ),
    )


def _cards(step: StepRunner, summary: GraphSummary) -> tuple[Card, ...]:
    total, graph = summary.total, step.graph
    pass_seconds = sum(record.seconds for record in graph.history)
    times = f"{format_seconds(step.captured.seconds)} to capture, {format_seconds(pass_seconds)} in passes"
    return (
        Card("Graph", f"{graph.num_ops} ops", f"{len(graph.slots)} slots"),
        Card("Captures", str(step.num_captures), times),
        Card(
            "Arithmetic", f"{format_count(total.flops)}FLOP", f"+ {format_count(total.elementwise_flops)} elementwise"
        ),
        Card("Memory traffic", format_bytes(total.bytes_moved), "read and written, if nothing stays in cache"),
        Card("Peak memory", format_bytes(summary.memory.peak_bytes), "predicted, slots included"),
    )


def _recompile_section(step: StepRunner) -> tuple[Section, ...]:
    if not step.recompile_reasons:
        return ()
    return (Section("Recompiles", tuple(Prose(f"Captured again because {why}.") for why in step.recompile_reasons)),)


def _time_sections(step: StepRunner, timeline: StepTimeline | None, summary: GraphSummary) -> tuple[Section, ...]:
    """The timeline, and measurements; what was planned for another device cannot be measured here."""
    if timeline is None:
        return ()
    drawn = timeline_section(step, timeline)
    if step.options.dry_run is not None:
        return (drawn,)
    peak_bytes = summary.memory.peak_bytes if step.plan.memory is None else step.plan.memory.peak_bytes
    return (drawn, measured_section(step.measured, timeline, peak_bytes))


def _phase_section(summary: GraphSummary) -> Section:
    total = summary.total
    rows: list[tuple[Cell, ...]] = []
    for phase, cost in summary.phases.items():
        flops = Bar(format_share(cost.flops, total.flops), cost.flops / max(total.flops, 1), phase)
        moved = Bar(
            format_share(cost.bytes_moved, total.bytes_moved), cost.bytes_moved / max(total.bytes_moved, 1), phase
        )
        elementwise = format_count(cost.elementwise_flops)
        rows.append(
            (
                phase,
                str(cost.num_ops),
                format_count(cost.flops),
                flops,
                elementwise,
                format_bytes(cost.bytes_moved),
                moved,
            )
        )
    sums = (format_count(total.flops), "", format_count(total.elementwise_flops), format_bytes(total.bytes_moved), "")
    columns = ("phase", "ops", "flops", "share of flops", "elementwise", "bytes moved", "share of bytes")
    caption = "flops are those of matrix products, convolutions and attention; elementwise counts one per element."
    return Section("Phases", (Table(columns, tuple(rows), ("total", str(total.num_ops), *sums), caption),))


def _memory_section(summary: GraphSummary) -> Section:
    memory = summary.memory
    where = ""
    if memory.phases:
        phase = memory.phases[memory.peak_index]
        where = f" at {memory.peak_node} ({phase}, op {memory.peak_index + 1} of {len(memory.phases)})"
    text = (
        f"Predicted peak {format_bytes(memory.peak_bytes)}{where}; {format_bytes(memory.slot_bytes)} of it are slots."
    )
    rows = [_size_row(name, num_bytes, memory.peak_bytes) for name, num_bytes in summary.at_peak[:_MAX_ROWS]]
    rest = sum(num_bytes for _, num_bytes in summary.at_peak[_MAX_ROWS:])
    if rest:
        rows.append(_size_row(f"{len(summary.at_peak) - _MAX_ROWS} others", rest, memory.peak_bytes))
    table = Table(
        ("alive at the peak", "bytes", "share"),
        tuple(rows),
        caption="By kind of slot or by the module that made the value; * is any layer number.",
    )
    figure = (Figure(memory_chart(memory), "Live memory while each op runs"),) if memory.phases else ()
    logits = dominant_logits(memory)
    advice = () if logits is None else (Prose(f"{logits}; only the order of sums over rows would change."),)
    return Section("Memory", (Prose(text), *advice, *figure, table))


def _size_row(name: str, num_bytes: int, whole: int) -> tuple[Cell, ...]:
    return (name, format_bytes(num_bytes), Bar(format_share(num_bytes, whole), num_bytes / max(whole, 1)))


def _module_section(summary: GraphSummary) -> Section:
    total = summary.total.flops
    rows: list[tuple[Cell, ...]] = [
        (
            module.name,
            str(module.num_modules),
            str(module.total.num_ops),
            format_count(module.forward.flops),
            format_count(module.backward.flops),
            Bar(format_share(module.total.flops, total), module.total.flops / max(total, 1)),
            format_bytes(module.total.bytes_moved),
        )
        for module in summary.modules[:_MAX_ROWS]
    ]
    columns = ("module", "count", "ops", "forward flops", "backward flops", "share of flops", "bytes moved")
    hidden = len(summary.modules) - len(rows)
    more = f"; {hidden} more with fewer flops are left out" if hidden > 0 else ""
    return Section("Modules", (Table(columns, tuple(rows), caption=f"Most flops first; * is any layer number{more}."),))


def _slot_section(summary: GraphSummary) -> Section:
    whole = sum(slot.num_bytes for slot in summary.slots)
    rows: list[tuple[Cell, ...]] = [
        (slot.name, str(slot.num_slots), *_size_row("", slot.num_bytes, whole)[1:]) for slot in summary.slots
    ]
    total = ("total", str(sum(slot.num_slots for slot in summary.slots)), format_bytes(whole), "")
    return Section("Slots", (Table(("inputs of the step", "slots", "bytes", "share"), tuple(rows), total),))


def _pass_section(graph: StepGraph) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (_shortened(record.text), format_seconds(record.seconds), str(record.num_ops_before), str(record.num_ops_after))
        for record in graph.history
    ]
    if not rows:
        return Section("Passes", (Prose("None: the graph runs as it was captured."),))
    return Section("Passes", (Table(("pass", "time", "ops before", "ops after"), tuple(rows)),))


def _shortened(text: str) -> str:
    """A pass without the tail of very long options (the names of all gradients, say)."""
    return text if len(text) <= _MAX_PASS_TEXT else f"{text[:_MAX_PASS_TEXT]}…"
