"""What every test shares: offline, seeded, one thread, and no skip without a reason."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

# Before anything imports transformers: it reads these once. Models in tests are built from configs.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest
import torch

from wholestep import CaptureError, _recording_torch
from wholestep.runtime import runner

# Pytest would have torch log each tensor that a trace begins with, with a stack: a sixth of the time of all tests.
logging.getLogger("torch.__trace").addHandler = lambda hdlr: None

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded() -> Iterator[None]:
    """Bitwise comparisons need the same seed and the same reduction order whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quiet_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards of quiet calls are used from the third call on: few tests make as many before something changes."""
    monkeypatch.setattr(_recording_torch, "QUIET_CALLS", 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--leftovers", action="store_true", help="no call of a compiled step leaves internal tensors behind"
    )


@pytest.fixture(autouse=True)
def _nothing_left_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """No call of a compiled step leaves an internal tensor in what the user has.

    A capture that succeeds makes sure itself, always: no tensor that it handed out is alive, whoever might hold it.
    Under `--leftovers`, fake tensors and symbols are looked for too, after every call.
    """
    from tests.leftovers import Leftovers, refusals_watched

    with Leftovers().watching() if pytestconfig.getoption("--leftovers") else refusals_watched():
        yield


@pytest.fixture(autouse=True)
def _refusals_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal that leaves a step, in any test, names a line of the user's and says one sentence about it."""
    from tests.refusals import faults_of

    def tell_and_read(error: BaseException, *args: object, **options: object) -> None:
        told(error, *args, **options)
        assert not isinstance(error, CaptureError) or not (faults := faults_of(error)), "; ".join(faults)

    told: Any = runner.tell
    monkeypatch.setattr(runner, "tell", tell_and_read)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Refuse nondeterministic kernels; asked for by name, since it also changes which ops a trace records."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test with `sample(number)`, so many, evenly spread, are not slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        [number] = marker.args
        kept = {index * len(group) // number for index in range(number)}
        for index, item in enumerate(group):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A skip is a hole in the suite: a mark or a module that does not say why is an error of collection."""
    report = _fail_silent_skip((yield))
    tests = [node for node in report.result or [] if isinstance(node, pytest.Item)]
    unexplained = [test.nodeid for test in tests if any(_lacks_reason(mark) for mark in test.iter_markers())]
    if unexplained:
        report.outcome = "failed"
        report.longrepr = "skip without a reason: " + ", ".join(unexplained)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """`pytest.skip()` called while a test runs is seen only here."""
    return _fail_silent_skip((yield))


def _lacks_reason(mark: pytest.Mark) -> bool:
    positional = mark.args[0] if mark.name == "skip" and mark.args else ""
    return mark.name in ("skip", "skipif") and not str(mark.kwargs.get("reason", positional)).strip()


def _fail_silent_skip(report: Report) -> Report:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else "not skipped"
    if reason.strip() in ("Skipped", "Skipped:"):
        report.outcome = "failed"
        report.longrepr = f"skip without a reason: {report.nodeid}"
    return report
