"""A `Plan` for readers: the same page of text whether it was just made or comes from a file."""

from __future__ import annotations

import re
from collections import defaultdict

from wholestep.comm.plan import BucketPlan, DataParallelPlan
from wholestep.compiler import Plan
from wholestep.compiler.predictions import Predictions, StepSize
from wholestep.cost import Link
from wholestep.errors import WholestepError
from wholestep.remat import RematPlan
from wholestep.report import Card, Prose, Report, Section, Table
from wholestep.report.document import Cell
from wholestep.report.summary import format_bytes, format_count, format_seconds, format_share, module_pattern

_MAX_ROWS = 12
_MAX_BUCKETS = 8
_EXACT_BYTES = re.compile(r"\b(\d{1,18})B\b")


def plan_report(plan: Plan) -> Report:
    """What there is to say about a plan; of one without predictions, what is done and why."""
    sections = [_stage_section(plan)]
    predicted = plan.predictions
    if predicted is not None:
        sections = [_time_section(plan, predicted), _memory_section(plan, predicted), *sections]
    if plan.memory is not None and plan.memory.repeated:
        sections.append(_repeated_section(plan.memory))
    if plan.communication is not None:
        sections.append(_travel_section(plan.communication))
    made = plan.made_for
    return Report(
        title=f"plan of {made.step}",
        subtitle=", ".join([*filter(None, [made.source]), f"wholestep {made.wholestep}", f"torch {made.torch}"]),
        cards=() if predicted is None else _cards(plan, predicted),
        sections=tuple(sections),
    )


def _cards(plan: Plan, predicted: Predictions) -> tuple[Card, ...]:
    memory, size, travel = predicted.memory, predicted.size, plan.communication
    num_ops = sum(work.num_ops for work in predicted.phases.values())
    rate = predicted.flops / max(predicted.step_us * predicted.device.flops_per_us, 1e-9)
    time = format_seconds(predicted.step_us / 1e6)
    cards = [
        Card("Parameters", format_count(size.num_parameters).replace(" ", ""), _size_note(size)),
        Card("Arithmetic", f"{format_count(predicted.flops)}FLOP", f"{num_ops} ops"),
        Card("Peak memory", format_bytes(memory.peak_bytes), _budget_note(plan, predicted)),
        Card("  everything kept", format_bytes(memory.unlimited_peak_bytes)),
    ]
    if memory.smallest_peak_bytes is not None:
        cards.append(Card("  smallest possible", format_bytes(memory.smallest_peak_bytes), "as a budget or more"))
    cards.append(Card("Step time", time, f"on {predicted.device.name}, {rate:.0%} of its arithmetic"))
    if travel is not None:
        num_bytes = sum(bucket.num_bytes for bucket in travel.buckets)
        cards += [
            Card("Communication", format_bytes(num_bytes), f"in {len(travel.buckets)} buckets, {travel.world} ranks"),
            Card("  of it exposed", format_seconds(travel.exposed_us / 1e6), f"of {_s(travel.travel_us)} travelling"),
        ]
    return tuple(cards)


def _size_note(size: StepSize) -> str:
    frozen = size.num_parameters - size.num_trainable
    parts = [
        format_bytes(size.parameter_bytes),
        *([f"{format_count(frozen).replace(' ', '')} of them frozen"] if frozen else []),
        f"{format_bytes(size.state_bytes)} of optimizer state",
        f"{format_bytes(size.batch_bytes)} of batch",
    ]
    return ", ".join(parts)


def _budget_note(plan: Plan, predicted: Predictions) -> str:
    limit, peak = predicted.device.memory_bytes, predicted.memory.peak_bytes
    told = "" if plan.memory is None else f"budget {_in_units(plan.memory.budget)}"
    room = f"more than the {format_bytes(limit)} of one {predicted.device.name}" if 0 < limit < peak else ""
    return ", ".join(part for part in (told, room) if part)


def _stage_section(plan: Plan) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (choice.stage, ", ".join(item.name for item in choice.passes) or "-", _in_units(choice.reason))
        for choice in (*plan.rewrites, *plan.loop)
    ]
    return Section("What is done", (Table(("stage", "passes", "why"), tuple(rows), ends_in_text=True),))


def _in_units(text: str) -> str:
    """Text with exact numbers of bytes (`85899345920B`) in units for people."""
    return _EXACT_BYTES.sub(lambda found: format_bytes(int(found[1])), text)


def _time_section(plan: Plan, predicted: Predictions) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            str(work.num_ops),
            format_count(work.flops),
            format_bytes(work.moved_bytes),
            _s(work.time_us),
            format_share(work.time_us, predicted.step_us),
        )
        for name, work in predicted.phases.items()
    ]
    if plan.communication is not None:
        waiting = plan.communication.exposed_us
        rows.append(("waiting for gradients", "", "", "", _s(waiting), format_share(waiting, predicted.step_us)))
    columns = ("phase", "ops", "flops", "bytes moved", "time", "share")
    total = ("step", "", format_count(predicted.flops), "", _s(predicted.step_us), "")
    device = predicted.device
    caption = (
        f"Estimated for {device.name}: {device.flops_per_us / 1e6:g} TFLOP/s, {device.bytes_per_us / 1e6:g} TB/s, "
        f"{device.overhead_us:g} us for any op."
    )
    return Section("Time", (Table(columns, tuple(rows), total, caption),))


def _memory_section(plan: Plan, predicted: Predictions) -> Section:
    memory = predicted.memory
    rows: list[tuple[Cell, ...]] = [
        (share.name, format_bytes(share.num_bytes), format_share(share.num_bytes, memory.peak_bytes))
        for share in memory.at_peak[:_MAX_ROWS]
    ]
    hidden = memory.at_peak[_MAX_ROWS:]
    rest = sum(share.num_bytes for share in hidden)
    if hidden:
        rows.append((f"{len(hidden)} others", format_bytes(rest), format_share(rest, memory.peak_bytes)))
    blocks: list[Prose | Table] = [] if plan.memory is None else [Prose(f"{_sentence(_in_units(str(plan.memory)))}.")]
    if memory.logits is not None:
        logits = memory.logits
        blocks.append(
            Prose(
                f"{format_bytes(logits.num_bytes)} of the {format_bytes(logits.of_bytes)} at the peak, slots aside, "
                f"are logits of {logits.head or 'the loss head'}: --chunk-loss {logits.chunks} would spare most of it."
            )
        )
    where = f"The peak is at {memory.peak_at}; * is any layer number." if memory.peak_at else ""
    return Section("Memory", (*blocks, Table(("alive at the peak", "bytes", "share"), tuple(rows), caption=where)))


def _repeated_section(remat: RematPlan) -> Section:
    kept: dict[str, int] = defaultdict(int)
    runs: dict[str, int] = defaultdict(int)
    shares: dict[str, float] = defaultdict(float)
    for value in remat.kept:
        kept[module_pattern(value.module)] += value.num_bytes
    for op in remat.repeated:
        runs[module_pattern(op.module)] += op.times
        shares[module_pattern(op.module)] += op.share
    names = sorted({*kept, *runs}, key=lambda name: (-shares[name], -kept[name], name))
    rows: list[tuple[Cell, ...]] = [
        (name or "(outside modules)", format_bytes(kept[name]), str(runs[name]), f"{shares[name]:.1%}")
        for name in names[:_MAX_ROWS]
    ]
    hidden = len(names) - len(rows)
    caption = f"Most work first; * is any layer number{f'; {hidden} more are left out' if hidden > 0 else ''}."
    columns = ("module", "kept", "ops run again", "share of the forward")
    return Section("What runs again", (Table(columns, tuple(rows), caption=caption),))


def _travel_section(plan: DataParallelPlan) -> Section:
    text = (
        f"An all-reduce takes {_link(plan.link)}. Forward and backward take {_s(plan.compute_us)}, "
        f"communication {_s(plan.travel_us)}, a step {_s(plan.predicted_us)}; {_s(plan.unmoved_us)} if no update moved "
        f"to the next iteration, as those of {len(plan.moved)} buckets do."
    )
    first = text if plan.link else f"The updates of {len(plan.moved)} buckets run in the next iteration."
    rows: list[tuple[Cell, ...]] = [
        (f"{index}: {_names(bucket)}", format_bytes(bucket.num_bytes), bucket.reason)
        for index, bucket in enumerate(plan.buckets[:_MAX_BUCKETS])
    ]
    hidden = len(plan.buckets) - len(rows)
    caption = "In the order in which ranks issue them." + (f" {hidden} more are left out." if hidden > 0 else "")
    return Section(
        "Communication", (Prose(first), Table(("bucket", "bytes", "its update"), tuple(rows), caption=caption))
    )


def _names(bucket: BucketPlan) -> str:
    first, *others = bucket.keys or ("nothing",)
    return f"{first} and {len(others)} more" if others else first


def _link(text: str) -> str:
    try:
        link = Link.from_text(text)
    except WholestepError:
        return text
    return f"{link.latency_us:.3g} us, and {1000 / link.bytes_per_us:.3g} us for each kilobyte"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _s(time_us: float) -> str:
    return format_seconds(time_us / 1e6)
