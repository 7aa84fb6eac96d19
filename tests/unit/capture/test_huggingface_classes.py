"""A few classes of `benchmarks.huggingface`, one for each thing that kept some from being captured."""

from typing import Any

import pytest
import torch
from tests.twins import Twins

from benchmarks.huggingface import classes, families, trial

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

CLASSES = [
    "MixtralForCausalLM",  # grouped products in float32
    "DebertaForMaskedLM",  # functions under torch.jit.script
    "Wav2Vec2ForCTC",  # masks of spans drawn by NumPy, boolean masks, CTC
    "Qwen2VLForConditionalGeneration",
    "MobileNetV2ForImageClassification",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_bit_of_eager(name: str) -> None:
    row = trial.measure(name, classes.class_names()[name], num_steps=3, upstream=False)
    assert row.outcome == "bitwise", row.detail
    assert row.eager_calls <= 1


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


@pytest.mark.slow
def test_routed_experts_with_changing_lengths() -> None:
    found = classes.find("MixtralForCausalLM", "mixtral")
    twins = Twins(lambda: trial.world(found), make=lambda world: trial.step_of(found))
    for seed, (size, length) in enumerate(((2, 12), (2, 9), (2, 7), (3, 11), (4, 5))):
        words = torch.randint(5, 90, (size, length), generator=torch.Generator().manual_seed(seed))
        twins.step({"input_ids": words, "labels": words.clone()})
    assert twins.num_captures == 3, twins.reasons
