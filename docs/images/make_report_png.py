"""Take the pictures of docs/report.md: real reports in a headless browser.

    python docs/images/make_report_png.py [FOLDER]

`report.png` is about a small GPT that was trained and measured here, `report_parallel.png` about one that was planned
for eight ranks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import wholestep
from wholestep.api import CompiledStep
from wholestep.cost import DeviceModel, Link
from wholestep.runtime import DataParallel, StepOptions
from wholestep.runtime.dry_run import DryRun
from wholestep.zoo import gpt

CONFIG = gpt.GPTConfig(vocab_size=512, context=64, width=128, heads=4, layers=3)
BATCH_SIZE = 8
# A device and a link at which communication is about as long as computation.
DEVICE = DeviceModel(flops_per_us=100e3, bytes_per_us=20e3, overhead_us=5.0)
LINK = Link.from_text("1gbit,50us")
SIZE = (1000, 1060)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    f"--window-size={SIZE[0]},{SIZE[1]}",
)
DARK = "--blink-settings=preferredColorScheme=0"


def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    logits = model(batch["tokens"])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def make_parts() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = gpt.GPT(CONFIG)
    return model, AdamW(model.parameters(), lr=1e-3, fused=True)


def measured_step() -> CompiledStep:
    """A step with a memory budget, after ten measured calls."""
    step = wholestep.compile(train_step, memory_budget=0.5)
    model, optimizer = make_parts()
    for number in range(3):
        step(model, optimizer, gpt.make_batch(CONFIG, BATCH_SIZE, seed=number))
    for number in range(10):
        step.measure(model, optimizer, gpt.make_batch(CONFIG, BATCH_SIZE, seed=number))
    return step


def planned_step() -> CompiledStep:
    """A step that was planned for ranks that are not here."""
    options = StepOptions(
        data_parallel=DataParallel(), dry_run=DryRun(DEVICE, 8, LINK), bucket_mb=1, dynamic_batch=False
    )
    step = CompiledStep(train_step, options)
    step.prepare(*make_parts(), gpt.make_batch(CONFIG, BATCH_SIZE, seed=0))
    return step


def take_picture(browser: str, page: Path, picture: Path, *flags: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, *flags, f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    print(f"{picture}: {picture.stat().st_size} bytes")


def main() -> int:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print("there is no chromium to take pictures with", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "report.html"
        take_picture(browser, measured_step().report(page), folder / "report.png")
        take_picture(browser, planned_step().report(page), folder / "report_parallel.png", DARK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
