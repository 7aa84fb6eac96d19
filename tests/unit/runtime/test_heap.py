"""Memory that was freed is still there when it is asked for again. In a process of its own: it is for good."""

import platform
import subprocess
import sys

import pytest

from wholestep.runtime import heap

COUNT_FAULTS = """
import resource

import torch

from wholestep.runtime.heap import keep_freed_memory

torch.set_num_threads(1)


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(1 << 18) for _ in range(64)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print((64 << 20) // resource.getpagesize(), faults(), keep_freed_memory(), faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_a_second_round_finds_its_pages() -> None:
    command = [sys.executable, "-c", COUNT_FAULTS]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    num_pages, before, is_kept, _, after = words
    assert is_kept == "True"
    if int(before) < int(num_pages) / 2:
        pytest.skip("the system hands out larger pages here")
    assert int(after) < int(num_pages) / 20


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not heap.keep_freed_memory.__wrapped__()
