"""A few classes of `benchmarks.huggingface`, one for each thing that kept some from being captured."""

from typing import Any

import pytest
from tests.twins import Twins

from benchmarks.huggingface import classes, families, trial

CLASSES = [
    "MixtralForCausalLM",  # grouped products in float32
    "DebertaForMaskedLM",  # functions under torch.jit.script
    "Qwen2VLForConditionalGeneration",
    "MobileNetV2ForImageClassification",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_bit_of_eager(name: str) -> None:
    row = trial.measure(name, classes.class_names()[name], num_steps=3, upstream=False)
    assert (row.outcome, row.eager_calls) == ("bitwise", 0), row.detail


@pytest.mark.slow
def test_layers_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerDrop: each course that the draws take is a graph, of which there are so many; all others run in eager."""
    drop: dict[str, Any] = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    monkeypatch.setitem(families.OPTIONS, "m2m_100", drop)
    found = classes.find("M2M100ForConditionalGeneration", "m2m_100")
    twins = Twins(lambda: trial.world(found), make=lambda world: trial.step_of(found))
    for number in range(24):
        twins.step(found.batch(number))
    assert twins.compiled.num_eager_calls > 0
    assert twins.num_captures <= 10
