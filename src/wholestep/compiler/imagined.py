"""How gradients would travel over ranks that are not there: the same decisions, from figures not measured here."""

from __future__ import annotations

from dataclasses import replace

from wholestep.comm import reducible_gradients
from wholestep.comm.facts import gather_facts
from wholestep.comm.plan import DataParallelPlan, Facts, decide
from wholestep.comm.timeline import Message, simulate
from wholestep.compiler.hardware import Hardware
from wholestep.compiler.options import StepOptions
from wholestep.cost import Link
from wholestep.errors import RankError
from wholestep.graph import StepGraph


def imagined_communication(graph: StepGraph, options: StepOptions, hardware: Hardware) -> DataParallelPlan | None:
    """The plan for the gradients of a graph, all ranks taken to be like this one; None without `data_parallel`."""
    if options.data_parallel is None:
        return None
    if not reducible_gradients(graph):
        raise RankError("data_parallel has nothing to do: no parameter of this step gets a gradient")
    facts = gather_facts(
        graph,
        world=hardware.world,
        average=options.data_parallel.reduce == "mean",
        link=hardware.link,
        is_measured=False,
        device=hardware.device,
    )
    plan = decide(facts, bucket_mb=options.bucket_mb, cross_iteration=options.cross_iteration)
    return plan if plan.link else _timed(plan, facts)


def _timed(plan: DataParallelPlan, facts: Facts) -> DataParallelPlan:
    """A plan for which nothing had to be simulated, with what a simulation says."""
    if facts.link is None:
        return plan
    messages = _messages(plan, facts, facts.link)
    timeline = simulate(messages, facts.compute_us)
    unmoved = simulate([replace(message, moved=False) for message in messages], facts.compute_us)
    return replace(
        plan,
        link=str(facts.link),
        compute_us=facts.compute_us,
        travel_us=sum(message.travel_us for message in messages),
        predicted_us=timeline.period_us,
        exposed_us=sum(timeline.exposed_us),
        unmoved_us=unmoved.period_us,
    )


def _messages(plan: DataParallelPlan, facts: Facts, link: Link) -> list[Message]:
    known = {gradient.key: gradient for gradient in facts.gradients}
    return [
        Message(
            ready_us=max(known[key].ready_us for key in bucket.keys),
            needed_us=min(known[key].needed_us for key in bucket.keys),
            update_us=sum(known[key].update_us for key in bucket.keys),
            travel_us=link.time_us(bucket.num_bytes),
            moved=bucket.moved,
        )
        for bucket in plan.buckets
    ]
