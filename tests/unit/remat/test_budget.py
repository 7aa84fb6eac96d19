"""Budgets as people write them."""

from __future__ import annotations

import pytest

from wholestep.errors import WholestepError
from wholestep.remat.budget import Budget, ModuleBudget, StepBudget, readable


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
        ("10G", Budget(num_bytes=10 * 10**9)),
        ("80%", Budget(share=0.8)),
        ("100 %", Budget(share=1.0)),
    ],
)
def test_what_can_be_read(written: object, read: Budget) -> None:
    assert Budget.of(written) == read
    assert Budget.of(str(read)) == read


@pytest.mark.parametrize("written", [-1, 1.5, True, None, [], float("nan"), float("inf")])
def test_what_is_no_budget(written: object) -> None:
    with pytest.raises(WholestepError, match="memory_budget is a share from 0 to 1"):
        Budget.of(written)


@pytest.mark.parametrize("written", ["", "lots", "12 GiBs", "-3GB", "1e9", "120%", "%"])
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


def test_a_step_has_a_budget_and_so_have_its_modules() -> None:
    read = StepBudget.of({"head": 1.0, "": "12GiB", "encoder.layers.*": "50MB"})
    assert read.whole == Budget(num_bytes=12 * 2**30)
    assert read.modules == (
        ModuleBudget("encoder.layers.*", Budget(num_bytes=50_000_000)),
        ModuleBudget("head", Budget(share=1.0)),
    )
    assert StepBudget.of({"encoder": 0.5}).whole is None
    assert StepBudget.of(0.5) == StepBudget(Budget(share=0.5))
    assert StepBudget.of(read) is read


def test_step_budgets_are_the_same_in_any_order_and_print_all_they_say() -> None:
    one, other = StepBudget.of({"a": 0.5, "b": 800, "": 0.25}), StepBudget.of({"": 0.25, "b": 800, "a": 0.5})
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == str(other) == "0.25, a: 0.5, b: 800B"
    assert str(StepBudget.of({"a": 0.5})) == "none, a: 0.5"
    assert str(StepBudget.of("4kB")) == "4000B"


@pytest.mark.parametrize("key", [3, None, "encoder.", ".layers", "a..b"])
def test_what_is_no_name_of_a_module(key: object) -> None:
    with pytest.raises(WholestepError, match="memory_budget maps names of modules"):
        StepBudget.of({key: 0.5})


@pytest.mark.parametrize("written", [None, -1, "lots", {}])
def test_a_bad_budget_names_its_module(written: object) -> None:
    with pytest.raises(WholestepError, match=r"the budget of module 'encoder': .*memory.budget"):
        StepBudget.of({"encoder": written})
