"""What a report says about ranks and iterations: the plan with its reasons, and the graphs of the loop."""

from __future__ import annotations

from wholestep.comm.plan import DataParallelPlan
from wholestep.report.document import Cell, Code, Prose, Section, Table
from wholestep.report.summary import format_bytes, format_seconds, listing
from wholestep.report.timeline import StepTimeline
from wholestep.report.timeline_picture import bucket_anchor
from wholestep.runtime import StepRunner

MAX_BUCKETS = 60


def plan_sections(step: StepRunner, timeline: StepTimeline | None) -> tuple[Section, ...]:
    """How gradients travel, if they do, and when they do so in a timeline."""
    plan = step.plan.communication
    if plan is None:
        return ()
    return (Section("Data parallel", (Prose(_verdict(plan)), _bucket_table(plan, timeline))),)


def loop_sections(step: StepRunner) -> tuple[Section, ...]:
    """The graphs of the loop, if some work moves to the next iteration."""
    graphs = step.iteration
    if graphs.main is graphs.setup:
        return ()
    text = (
        "Some updates run in the call after the one that computed their gradients: the first call runs setup, each "
        "later one main, the last one cleanup; flush applies what is pending at any other time."
    )
    named = {"setup": graphs.setup, "cleanup": graphs.cleanup, "flush": graphs.flush}
    listings = (Code(f"{name}: {graph.num_ops} ops", listing(graph)) for name, graph in named.items())
    return (Section("Iterations", (Prose(text), *listings)),)


def _verdict(plan: DataParallelPlan) -> str:
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    how = "averaged" if plan.average else "summed"
    text = f"{format_bytes(num_bytes)} of gradients are {how} over {plan.world} ranks in {len(plan.buckets)} buckets; "
    text += f"the updates of {len(plan.moved)} of them run in the next iteration."
    if not plan.predicted_us:
        return text
    figures = (plan.compute_us, plan.travel_us, plan.exposed_us, plan.predicted_us, plan.unmoved_us)
    compute, travel, exposed, step, unmoved = (format_seconds(us / 1e6) for us in figures)
    return (
        f"{text} The plan expects, with a link of {plan.link}, {compute} of forward and backward, {travel} of "
        f"communication, {exposed} of it exposed, {step} for a step; {unmoved} if nothing moved."
    )


def _bucket_table(plan: DataParallelPlan, timeline: StepTimeline | None) -> Table:
    travels = {} if timeline is None else {travel.bucket: travel for travel in timeline.travels}
    rows: list[tuple[Cell, ...]] = []
    for index, bucket in enumerate(plan.buckets[:MAX_BUCKETS]):
        names = bucket.keys[0] + (f" and {len(bucket.keys) - 1} more" if len(bucket.keys) > 1 else "")
        travel = travels.get(index)
        moments: tuple[Cell, ...] = ()
        if travel is not None:
            figures = (travel.departs_us, travel.arrives_us, travel.waited_us)
            moments = tuple(format_seconds(us / 1e6) for us in figures)
        rows.append(
            (
                f"{index}: {names}",
                format_bytes(bucket.num_bytes),
                *(moments if moments or not travels else ("–",) * 3),
                bucket.reason,
            )
        )
    hidden = len(plan.buckets) - len(rows)
    caption = "In the order in which every rank issues them." + (f" {hidden} more are left out." if hidden else "")
    columns = ("bucket", "bytes", *(("leaves at", "arrives at", "waited for") if travels else ()), "its update")
    anchors = tuple(bucket_anchor(index) for index in range(len(rows)))
    return Table(columns, tuple(rows), caption=caption, ends_in_text=True, anchors=anchors)
