"""Network namespaces that exist while a `with` block runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import TextIO

from benchmarks.netlab.processes import RankCommand, run_together
from benchmarks.netlab.rate import Rate
from benchmarks.netlab.topology import DEVICE, MAX_RANKS, Command, address, link_commands, namespaces

_FIRST_PORT = 29500
_LINK_TIMEOUT_S = 10.0
_STRAY_TIMEOUT_S = 5.0


class LabError(RuntimeError):
    """The lab cannot be built here, or not as asked; the message says why in one sentence."""


class Lab:
    """Ranks that reach each other only through links of a given rate.

    Each rank stands for a machine with one process: a network namespace with one device. `run` may be called many
    times; leaving the `with` block ends every process inside and removes the namespaces. Names are random, so labs do
    not meet. Only `kill -9` leaves something behind: namespaces called `netlab-...`, which `ip netns delete` removes.

    Args:
        ranks: How many.
        rate: Of each link in each direction: `1gbit`, `500mbit`, `unlimited`.
        pin: Keep rank N, with all its threads, on core N. The price of communication is then paid by the rank that
            communicates and nothing moves between cores; but a communication thread can no longer use an idle core.

    Raises:
        ValueError: The rate is none.
        LabError: No root, not Linux, no iproute2, too many ranks.
    """

    def __init__(self, ranks: int, rate: str | Rate, *, pin: bool = False) -> None:
        self.num_ranks = ranks
        self.rate = rate if isinstance(rate, Rate) else Rate.parse(rate)
        self.name = f"netlab-{secrets.token_hex(4)}"
        self._cores = _choose_cores(ranks) if pin else None
        self._created: list[str] = []
        self._num_runs = 0
        if not 1 <= ranks <= MAX_RANKS:
            raise LabError(f"a lab has 1 to {MAX_RANKS} ranks, not {ranks}")

    def __enter__(self) -> Lab:
        check_possible()
        try:
            for space in namespaces(self.name, self.num_ranks):
                self._created.append(space)  # first: an interrupt between the two lines must not lose it
                _call(["ip", "netns", "add", space])
            for command in link_commands(self.name, self.num_ranks, self.rate):
                _call(command)
            self._wait_for_links()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: TextIO | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Run the command once per rank, with torchrun's variables; see `run_together` for output and exit code."""
        outer = {**os.environ, **(env or {})}
        port = _FIRST_PORT + self._num_runs  # the last run's port may still linger in TIME_WAIT
        self._num_runs += 1
        commands = [
            RankCommand(
                ["ip", "netns", "exec", space, *command],
                rank_environment(outer, rank, self.num_ranks, port),
                None if self._cores is None else self._cores[rank],
            )
            for rank, space in enumerate(self._created[: self.num_ranks])
        ]
        try:
            return run_together(commands, output or sys.stdout, timeout_s)
        finally:
            self._end_strays()

    def close(self) -> None:
        """End what still runs inside and remove the namespaces, with their devices; does nothing the second time."""
        self._end_strays()
        while self._created:
            _try(["ip", "netns", "delete", self._created[-1]])
            self._created.pop()

    def _wait_for_links(self) -> None:
        """The kernel notices a carrier up to a second late; until then packets of a bridge are lost."""
        deadline_s = time.monotonic() + _LINK_TIMEOUT_S
        for space in self._created:
            while "state DOWN" in (state := _try(["ip", "-n", space, "link", "show"])):
                if time.monotonic() > deadline_s:
                    raise LabError(
                        f"netlab could not be built: a link of {space} stays down: {' '.join(state.split())}"
                    )
                time.sleep(0.02)

    def _end_strays(self) -> None:
        """Kill what left its process group: whatever lives in one of our namespaces was started by us."""
        deadline_s = time.monotonic() + _STRAY_TIMEOUT_S
        for space in self._created:
            while (pids := _try(["ip", "netns", "pids", space]).split()) and time.monotonic() < deadline_s:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.01)  # a killed process needs a moment to be gone


def rank_environment(outer: Mapping[str, str], rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set on the machine that the namespace stands for; one thread, unless asked otherwise."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **outer,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "TP_SOCKET_IFNAME": DEVICE,
    }


def check_possible() -> None:
    """Raise a `LabError` if this machine or user cannot make namespaces."""
    if sys.platform != "linux":
        raise LabError(f"netlab needs Linux, for its network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabError("netlab needs root, to make network namespaces and limit their links")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabError(f"netlab needs iproute2 (Debian: apt install iproute2); not found: {', '.join(missing)}")


def exit_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exit that cleans up, and let no second signal disturb it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def _choose_cores(num_ranks: int) -> list[int]:
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cores) < num_ranks:
        raise LabError(f"pinning needs a core per rank: {num_ranks} ranks, {len(cores)} cores")
    return cores[:num_ranks]


def _call(command: Command) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"netlab could not be built: `{' '.join(command)}` said: {done.stderr.strip()}")


def _try(command: Command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
