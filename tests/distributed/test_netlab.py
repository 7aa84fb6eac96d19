"""The lab for slow links: what it would run, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.netlab import Lab, LabError, Rate
from benchmarks.netlab import lab as lab_module
from benchmarks.netlab.__main__ import main
from benchmarks.netlab.lab import rank_environment
from benchmarks.netlab.processes import TIMED_OUT, RankCommand, run_together
from benchmarks.netlab.topology import link_commands, namespaces

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("1gbit", 10**9), ("0.5gbit", 5 * 10**8), ("500mbit", 5 * 10**8), ("64kbit", 64_000), ("unlimited", None)],
)
def test_a_rate_is_parsed(text: str, bits_per_s: int | None) -> None:
    rate = Rate.parse(text)
    assert rate.bits_per_s == bits_per_s
    assert Rate.parse(str(rate)) == rate


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "1gb", "1 gbit", "-1gbit", "0gbit", "1e3mbit", "infinite", "7.9kbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate: write 1gbit"):
        Rate.parse(text)


def test_two_ranks_share_one_limited_link() -> None:
    commands = [" ".join(command) for command in link_commands("x", 2, Rate.parse("1gbit"))]
    assert namespaces("x", 2) == ["x-rank0", "x-rank1"]
    assert commands[0] == "ip -n x-rank0 link add lab0 type veth peer name lab0 netns x-rank1"
    assert [command for command in commands if command.startswith("tc")] == [
        f"tc -n x-rank{rank} qdisc add dev lab0 root tbf rate 1000000000bit burst 250000 latency 50ms"
        for rank in (0, 1)
    ]


def test_more_ranks_meet_in_a_hub_and_both_ends_of_each_link_are_limited() -> None:
    commands = [" ".join(command) for command in link_commands("x", 3, Rate.parse("8mbit"))]
    assert namespaces("x", 3) == ["x-rank0", "x-rank1", "x-rank2", "x-hub"]
    limited = {tuple(command.split()[2:7:4]) for command in commands if command.startswith("tc")}
    ranks = range(3)
    assert limited == {("x-hub", f"port{rank}") for rank in ranks} | {(f"x-rank{rank}", "lab0") for rank in ranks}
    assert all("burst 16384" in command for command in commands if command.startswith("tc"))


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_an_unlimited_lab_uses_no_traffic_control(num_ranks: int) -> None:
    assert not [command for command in link_commands("x", num_ranks, Rate(None)) if command[0] == "tc"]


def test_a_rank_sees_what_torchrun_sets() -> None:
    environment = rank_environment({"HOME": "/home/me", "RANK": "7"}, rank=1, num_ranks=2, port=29501)
    assert environment == {
        "HOME": "/home/me",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29501",
        "GLOO_SOCKET_IFNAME": "lab0",
        "TP_SOCKET_IFNAME": "lab0",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    assert rank_environment({"OMP_NUM_THREADS": "4"}, 0, 2, 29500)["OMP_NUM_THREADS"] == "4"


def test_without_root_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--", "true"]) == 2
    assert capsys.readouterr().err == "netlab needs root, to make network namespaces and limit their links\n"


def test_without_iproute2_the_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab_module.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LabError, match=r"needs iproute2 .*not found: tc$"), Lab(2, "1gbit"):
        pass


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="needs Linux"), Lab(2, "1gbit"):
        pass


@pytest.mark.parametrize(("arguments", "message"), [(["--rate", "1gb", "ls"], "is no rate"), ([], "COMMAND")])
def test_usage_errors_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_pinning_needs_a_core_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5})
    with pytest.raises(LabError, match="3 ranks, 2 cores"):
        Lab(3, "1gbit", pin=True)


@pytest.mark.parametrize("ranks", [0, 251])
def test_the_number_of_ranks_is_limited(ranks: int) -> None:
    with pytest.raises(LabError, match="1 to 250 ranks"):
        Lab(ranks, "1gbit")


def shell(*scripts: str) -> list[RankCommand]:
    """Commands for `run_together`, which knows nothing of namespaces."""
    return [RankCommand(["sh", "-c", script], os.environ) for script in scripts]


def test_lines_come_with_their_rank() -> None:
    output = io.StringIO()
    assert run_together(shell("echo one; echo two >&2", "printf three"), output) == 0
    assert sorted(output.getvalue().splitlines()) == ["[rank 0] one", "[rank 0] two", "[rank 1] three"]


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_first_failure_ends_the_others(script: str, code: int, tmp_path: Path) -> None:
    sleeper = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    failing = f"while [ ! -s {tmp_path}/pid ]; do sleep 0.01; done; {script}"
    assert run_together(shell(sleeper, failing), io.StringIO()) == code
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_timeout_ends_all() -> None:
    assert run_together(shell("exec sleep 1000", "true"), io.StringIO(), timeout_s=0.05) == TIMED_OUT


def test_a_pinned_command_stays_on_its_core_and_we_do_not() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    script = "import os; print(os.sched_getaffinity(0))"
    output = io.StringIO()
    assert run_together([RankCommand([sys.executable, "-c", script], os.environ, core)], output) == 0
    assert output.getvalue() == f"[rank 0] {{{core}}}\n"
    assert os.sched_getaffinity(0) == before


ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
print("sum", int(total))
dist.destroy_process_group()
"""


@pytest.mark.root
@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "rate"), [(2, "1gbit"), (2, "unlimited"), (3, "1gbit")])
def test_ranks_reach_each_other(num_ranks: int, rate: str) -> None:
    output = io.StringIO()
    with Lab(num_ranks, rate) as lab:
        for _ in range(2):  # a lab can be used again
            assert lab.run([sys.executable, "-c", ALL_REDUCE], output=output, timeout_s=120) == 0
        assert set(namespaces(lab.name, num_ranks)) == left_behind(lab.name)
    sums = [line for line in output.getvalue().splitlines() if "sum" in line]
    assert sorted(sums) == sorted(2 * [f"[rank {rank}] sum {2**num_ranks - 1}" for rank in range(num_ranks)])
    assert not left_behind(lab.name)


@pytest.mark.root
@pytest.mark.distributed
def test_links_are_limited_on_both_ends() -> None:
    output = io.StringIO()
    with Lab(2, "500mbit") as lab:
        lab.run(["tc", "qdisc", "show", "dev", "lab0"], output=output)
    lines = sorted(output.getvalue().splitlines())
    assert [line.split()[1] for line in lines] == ["0]", "1]"]
    assert all("tbf" in line and "rate 500Mbit" in line for line in lines)


@pytest.mark.root
@pytest.mark.distributed
def test_a_failing_rank_decides_the_exit_code_and_nothing_is_left(tmp_path: Path) -> None:
    # setsid: a process that left its group is found through its namespace.
    script = f"setsid sleep 1000 & echo $! > {tmp_path}/$RANK; if [ $RANK = 1 ]; then exit 7; fi; sleep 1000"
    with Lab(2, "unlimited") as lab:
        assert lab.run(["sh", "-c", script], output=io.StringIO(), timeout_s=60) == 7
    assert not left_behind(lab.name)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert pids
    assert not [pid for pid in pids if is_running(pid)]


@pytest.mark.root
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_everything(number: signal.Signals, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/$RANK; ip netns identify $$ > {tmp_path}/space$RANK; exec sleep 1000"
    command = [sys.executable, "-m", "benchmarks.netlab", "--rate", "1gbit", "--", "sh", "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: all((tmp_path / f"space{rank}").exists() for rank in (0, 1)))
    wait_for(lambda: (tmp_path / "space0").read_text().strip() != "")
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    name = (tmp_path / "space0").read_text().strip().removesuffix("-rank0")
    assert name.startswith("netlab-")
    assert not left_behind(name)
    assert not [rank for rank in (0, 1) if is_running(int((tmp_path / str(rank)).read_text()))]


@pytest.mark.root
@pytest.mark.distributed
def test_a_lab_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = ["tc", "qdisc", "add", "dev", "none", "root", "tbf"]
    monkeypatch.setattr(lab_module, "link_commands", lambda *_: [impossible])
    lab = Lab(2, "1gbit")
    with pytest.raises(LabError, match=r"could not be built: `tc qdisc add dev none root tbf` said: \S"), lab:
        pass
    assert not left_behind(lab.name)


def left_behind(name: str) -> set[str]:
    """Namespaces whose name starts like this."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(name)}


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie, which only waits for its parent to look."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
