"""What every test with a framework needs: torchvision can be imported, and no framework leaves a mark on the next."""

import os
from collections.abc import Iterator

import pytest
import tests.integrations.torchvision_operators as _  # noqa: F401


@pytest.fixture(autouse=True)
def _environment_put_back() -> Iterator[None]:
    """Lightning's strategies for ranks leave `LOCAL_RANK` and others, which tell Accelerate that there are ranks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
