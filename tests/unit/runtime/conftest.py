"""What tests of waiting updates share."""

import gc
from collections.abc import Iterator

import pytest
from tests.waiting import is_anything_waiting

from wholestep.runtime.pending import flush_all, flush_others


@pytest.fixture
def nothing_waits() -> Iterator[None]:
    """Nothing waits before a test (others may have left models that nobody has collected yet), and nothing after it."""
    flush_others(None)
    if is_anything_waiting():
        gc.collect()
    yield
    flush_all()
    assert not is_anything_waiting()
