"""What commands about a user's step have in common: options, and the step they make of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wholestep.api import CompiledStep
from wholestep.capture.blank import no_weights
from wholestep.cli.progress import working
from wholestep.cli.target import MadeStep, Target
from wholestep.compiler import DataParallel, Hardware, StepOptions
from wholestep.compiler.predictions import DeviceFigures
from wholestep.cost import DEVICES, LINKS, DeviceModel, Link, Wire, typical_name
from wholestep.errors import SimulationError, UsageError, WholestepError
from wholestep.remat import StepBudget
from wholestep.sim.costs import CostModel

_DEFAULT_LATENCY = "20us"


def add_target(parser: argparse.ArgumentParser, text: str = "") -> None:
    """The user's file and function."""
    parser.add_argument(
        "target",
        type=Target.of,
        metavar="FILE.py:FUNCTION",
        help=text or "a function without arguments that returns (train_step, args) or (train_step, args, kwargs)",
    )


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Options of `wholestep.compile`, in place of those that the step has of its own."""
    parser.add_argument("--memory-budget", type=_budget, metavar="SIZE", help="peak of the step: 12GiB, or 0.5")
    parser.add_argument("--chunk-loss", type=_chunks, metavar="N", help="chunks of the loss head, or auto")
    parser.add_argument("--lower", choices=("none", "inductor", "auto"), help="what compiles runs of ops")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_dry_run_options(parser: argparse.ArgumentParser) -> None:
    """The device and the ranks that a step without weights is planned for."""
    parser.add_argument(
        "--device",
        default="h200",
        metavar="NAME",
        help=f"whose times are estimated: {', '.join(DEVICES)}, or a cost model FILE.json[:NAME] (default %(default)s)",
    )
    parser.add_argument("--world-size", type=_count, default=1, metavar="N", help="data parallel ranks (default 1)")
    parser.add_argument(
        "--link",
        metavar="LINK",
        help=f"what joins two ranks: 25gbit, 25gbit,10us, or one of {', '.join(LINKS)}",
    )


@dataclass(frozen=True)
class Prepared:
    """A step that has a graph, and where it came from."""

    step: CompiledStep
    device: DeviceFigures
    source: str


def planned(options: argparse.Namespace) -> Prepared:
    """The step of a user's file, made without weights, captured and planned for a device and ranks; nothing has run."""
    device, run = _dry_run(options)
    with no_weights():
        made = load(options.target)
    step = CompiledStep(made.eager, _for_dry_run(with_options(made.step.options, options), run))
    with working("capturing and planning the step"):
        step.prepare(*made.args, **made.kwargs)
    return Prepared(step, device, str(options.target))


def load(target: Target) -> MadeStep:
    """Import and call what the user has written."""
    with working(f"loading {target}"):
        return target.make(target.load())


def with_options(given: StepOptions, options: argparse.Namespace) -> StepOptions:
    """A step's own options, with those of the command line in their place."""
    found: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("memory_budget", "chunk_loss", "lower")
        if getattr(options, name) is not None
    }
    return replace(given, **found)


def device_here() -> DeviceFigures:
    """Figures of a typical device of the kind that is here, for steps that are not measured."""
    return _figures(typical_name("cuda" if torch.cuda.is_available() else "cpu"), DEVICES)


def _dry_run(options: argparse.Namespace) -> tuple[DeviceFigures, Hardware]:
    device = _device(options.device)
    if options.world_size > 1 and options.link is None:
        raise UsageError("--world-size needs --link, what joins two ranks, as in --link 25gbit")
    link = None if options.world_size == 1 else _all_reduce(_wire(options.link), options.world_size)
    return device, Hardware(device.model, options.world_size, link)


def _for_dry_run(given: StepOptions, run: Hardware) -> StepOptions:
    """Options for planning: there is one batch size, nothing to verify, and a budget to compare others with."""
    return replace(
        given,
        dry_run=run,
        data_parallel=(given.data_parallel or DataParallel()) if run.world > 1 else None,
        memory_budget=given.memory_budget or StepBudget.of(1.0),
        dynamic_batch=False,
        cuda_graphs=False,
        verify=0,
    )


def _device(text: str) -> DeviceFigures:
    if text in DEVICES:
        return _figures(text, DEVICES)
    found = re.fullmatch(r"(?P<file>.+\.json)(:(?P<name>.*))?", text)
    if found is None:
        raise UsageError(f"there is no device '{text}'; choose from {', '.join(DEVICES)} or give a FILE.json")
    try:
        devices = CostModel.load(Path(found["file"])).devices
    except SimulationError as error:
        raise UsageError(str(error)) from error
    name = found["name"] or (next(iter(devices)) if len(devices) == 1 else "")
    if name not in devices:
        raise UsageError(f"{found['file']} has the devices {', '.join(devices)}; name one: {found['file']}:NAME")
    return _figures(name, devices)


def _figures(name: str, devices: Any) -> DeviceFigures:
    device: DeviceModel = devices[name]
    return DeviceFigures(name, device.flops_per_us, device.bytes_per_us, device.overhead_us, device.memory_bytes)


def _wire(text: str) -> Wire:
    if text in LINKS:
        return LINKS[text]
    try:
        return Wire.from_text(text if "," in text else f"{text},{_DEFAULT_LATENCY}")
    except WholestepError:
        raise UsageError(
            f"'{text}' is no link; write 25gbit or 25gbit,10us, or choose from {', '.join(LINKS)}"
        ) from None


def _all_reduce(wire: Wire, world: int) -> Link:
    """What an all-reduce in a ring takes: 2 (n - 1) messages of an n-th of the bytes, one after the other."""
    num_messages = 2 * (world - 1)
    return Link(num_messages * wire.latency_us, wire.bytes_per_us * world / num_messages)


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of option values whose complaints are argparse's."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _read_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ValueError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def _read_chunks(text: str) -> int | str:
    if text != "auto" and not re.fullmatch(r"[2-9]|[1-9]\d{1,5}", text):
        raise ValueError(f"'{text}' is not a number of chunks, 2 or more, or auto")
    return text if text == "auto" else int(text)


_count = _argument(_read_count)
_chunks = _argument(_read_chunks)
_budget = _argument(StepBudget.of)
