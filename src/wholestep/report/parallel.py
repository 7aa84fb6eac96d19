"""What a report says about ranks and iterations: the plan with its reasons, and the graphs of the loop."""

from __future__ import annotations

from wholestep.comm.plan import DataParallelPlan
from wholestep.report.document import Bar, Cell, Code, Prose, Section, Table
from wholestep.report.summary import format_bytes, format_seconds
from wholestep.runtime import StepRunner

_MAX_BUCKETS = 60


def plan_sections(step: StepRunner) -> tuple[Section, ...]:
    """How gradients travel, if they do."""
    plan = step.plan
    if plan is None:
        return ()
    return (Section("Data parallel", (Prose(_verdict(plan)), _bucket_table(plan))),)


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
    listings = (Code(f"{name}: {graph.num_ops} ops", str(graph)) for name, graph in named.items())
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
        f"{text} Predicted for a link of {plan.link}: {compute} of forward and backward, {travel} of communication, "
        f"{exposed} of it exposed, {step} for a step; {unmoved} if nothing moved."
    )


def _bucket_table(plan: DataParallelPlan) -> Table:
    whole = sum(bucket.num_bytes for bucket in plan.buckets)
    rows: list[tuple[Cell, ...]] = []
    for index, bucket in enumerate(plan.buckets[:_MAX_BUCKETS]):
        names = bucket.keys[0] + (f" and {len(bucket.keys) - 1} more" if len(bucket.keys) > 1 else "")
        share = Bar(format_bytes(bucket.num_bytes), bucket.num_bytes / max(whole, 1), "comm")
        rows.append((f"{index}: {names}", share, bucket.reason))
    hidden = len(plan.buckets) - len(rows)
    caption = "In the order in which every rank issues them." + (f" {hidden} more are left out." if hidden else "")
    return Table(("bucket", "bytes", "its update"), tuple(rows), caption=caption)
