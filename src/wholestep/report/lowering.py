"""What a report says about lowering (regions, whether they were compiled, what is in none and why) and CUDA graphs."""

from __future__ import annotations

from wholestep.graph import StepGraph
from wholestep.lower import Region
from wholestep.report.document import Cell, Code, Prose, Section, Table


def lowering_sections(graph: StepGraph) -> tuple[Section, ...]:
    """The regions of a graph that was lowered, and the breaks between them."""
    if "lower" not in graph.remarks:
        return ()
    found = [(node.target, str(node.meta["phase"])) for node in graph.calls() if isinstance(node.target, Region)]
    rows: list[tuple[Cell, ...]] = [
        (region.name, phase, str(region.num_ops), region.failure or "compiled") for region, phase in found
    ]
    num_ops = sum(region.num_ops for region, _ in found)
    caption = "What a region needs while it runs is not part of the memory figures of this report."
    table = Table(
        ("region", "phase", "ops", "state"), tuple(rows), ("total", "", str(num_ops), ""), caption, ends_in_text=True
    )
    text = "Runs of ops that Inductor compiles; all others run as they are." if found else "No run of ops is a region."
    breaks = (Prose(f"Outside: {remark}.") for remark in graph.remarks["lower"])
    listings = (Code(f"{region.name}: {region.num_ops} ops", region.code) for region, _ in found)
    return (Section("Lowering", (Prose(text), *((table,) if found else ()), *breaks, *listings)),)


def cuda_graph_sections(graph: StepGraph) -> tuple[Section, ...]:
    """Whether a step that was to run as a CUDA graph does, and what keeps it from doing so."""
    reasons = graph.remarks.get("cuda_graphs")
    if reasons is None:
        return ()
    text = f"Not in use: {reasons[0]}." if reasons else "The step is recorded on its third call, then launched as one."
    return (Section("CUDA graphs", (Prose(text),)),)
