"""What the target rests on: the frameworks are there, the package does without them, the page about them is true."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.test_docs import NEEDS_FRAMEWORKS, name_of, run

pytestmark = pytest.mark.integration

FRAMEWORKS = ("transformers", "accelerate", "lightning", "timm", "peft")
MISSING = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]


def test_nothing_of_the_package_imports_a_framework_unasked() -> None:
    script = f"import sys, wholestep.integrations; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("page", sorted(NEEDS_FRAMEWORKS), ids=name_of)
def test_the_code_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    run(page, folder=tmp_path, after="tests.integrations.torchvision_operators")
