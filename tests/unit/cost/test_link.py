"""Links: text and back, arithmetic, refusals, the fit of three times, and two ranks that agree to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.cost import Link, calibrate_link
from wholestep.cost.link import fit_link
from wholestep.errors import WholestepError

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("1gbit,50us", Link(50.0, 125.0)),
        ("100mbit,2ms", Link(2000.0, 12.5)),
        ("64kbit,1us", Link(1.0, 0.008)),
        ("2.5gbit,0.5us", Link(0.5, 312.5)),
    ],
)
def test_text_and_link_are_the_same(text: str, link: Link) -> None:
    assert Link.from_text(text) == link
    assert str(link) == text


def test_other_spellings_are_read() -> None:
    assert Link.from_text(" 1000 Mbit, 0.05 ms ") == Link.from_text("1e0gbit,50.us") == Link(50.0, 125.0)


FIGURES = st.floats(1e-9, 1e12, allow_nan=False)


@settings(derandomize=True, database=None, deadline=None)
@given(FIGURES, FIGURES)
def test_every_link_survives_text_to_the_last_bit(latency_us: float, bytes_per_us: float) -> None:
    link = Link(latency_us, bytes_per_us)
    assert Link.from_text(str(link)) == link


def test_time_is_latency_plus_payload() -> None:
    link = Link(latency_us=50.0, bytes_per_us=125.0)
    assert link.time_us(0) == 50.0
    assert link.time_us(125_000_000) == 50.0 + 1e6


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_figures_must_be_positive_and_finite(bad: float) -> None:
    with pytest.raises(WholestepError, match="latency"):
        Link(bad, 1.0)
    with pytest.raises(WholestepError, match="bandwidth"):
        Link(1.0, bad)


@pytest.mark.parametrize(
    "text", ["", "1gbit", "50us", "50us,1gbit", "1gbit,50", "1gbyte,50us", "-1gbit,50us", "1gbit,5s"]
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WholestepError, match="1gbit,50us"):
        Link.from_text(text)


def test_zero_in_text_is_refused() -> None:
    with pytest.raises(WholestepError, match="bandwidth"):
        Link.from_text("0gbit,50us")


def test_the_fit_finds_the_link_behind_the_times() -> None:
    link = Link(200.0, 12.5)
    assert fit_link(link.time_us(1024), link.time_us(MIB), link.time_us(8 * MIB)) == link


def test_a_burst_that_passes_at_once_spoils_neither_figure() -> None:
    link, burst = Link(200.0, 12.5), 64 * 1024
    fitted = fit_link(100.0, link.time_us(MIB - burst), link.time_us(8 * MIB - burst))
    assert fitted == Link(50.0, 12.5)  # at least half of what a small one took


def test_noise_cannot_make_a_link_too_good() -> None:
    fitted = fit_link(100.0, 900.0, 800.0)  # eight times the payload in less time
    assert fitted.bytes_per_us == pytest.approx(8 * MIB / 800.0, rel=0.01)
    assert fit_link(100.0, 799.9, 800.0) == fitted


def test_calibration_needs_a_process_group() -> None:
    with pytest.raises(WholestepError, match="init_process_group"):
        calibrate_link(None, torch.device("cpu"))


RANK = """
import sys, torch, torch.distributed as dist
from wholestep.cost import calibrate_link
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
link = calibrate_link(None, torch.device("cpu"))
again = calibrate_link(dist.new_group([1, 0]), torch.device("cpu"))
dist.destroy_process_group()
print(link.latency_us.hex(), link.bytes_per_us.hex(), link, again)
"""


@pytest.mark.distributed
def test_two_ranks_measure_the_same_link(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, env=environment, text=True
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed[0] == printed[1]
    latency, bandwidth, text, _ = printed[0].split()
    assert Link.from_text(text) == Link(float.fromhex(latency), float.fromhex(bandwidth))
