"""Budgets as people write them."""

from __future__ import annotations

import pytest

from wholestep.errors import WholestepError
from wholestep.remat.budget import Budget, readable


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (0, Budget(share=0.0)),
        (1, Budget(share=1.0)),
        (0.25, Budget(share=0.25)),
        ("0.25", Budget(share=0.25)),
        (800, Budget(num_bytes=800)),
        (8e9, Budget(num_bytes=8_000_000_000)),
        ("12GiB", Budget(num_bytes=12 * 2**30)),
        ("1.5 gb", Budget(num_bytes=1_500_000_000)),
        ("800MB", Budget(num_bytes=800_000_000)),
        ("4096", Budget(num_bytes=4096)),
        ("3 TiB", Budget(num_bytes=3 * 2**40)),
    ],
)
def test_what_can_be_read(written: object, read: Budget) -> None:
    assert Budget.of(written) == read
    assert Budget.of(str(read)) == read


@pytest.mark.parametrize("written", [-1, 1.5, True, None, [], float("nan"), float("inf")])
def test_what_is_no_budget(written: object) -> None:
    with pytest.raises(WholestepError, match="memory_budget is a share from 0 to 1"):
        Budget.of(written)


@pytest.mark.parametrize("written", ["", "lots", "12 GiBs", "-3GB", "1e9"])
def test_text_that_is_no_budget(written: str) -> None:
    with pytest.raises(WholestepError, match="cannot read the memory budget"):
        Budget.of(written)


def test_sizes_for_people() -> None:
    assert [readable(size) for size in (12, 2048, 3 * 2**20, 5 * 2**29)] == [
        "12 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "2.5 GiB",
    ]
