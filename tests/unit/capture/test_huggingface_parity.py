"""Models of the transformers library, which nobody wrote with this compiler in mind: bit for bit like eager."""

import pytest
from tests.parity import assert_parity

from wholestep import zoo


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer_name", ["adamw_fused", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "hf_vit"])
def test_every_step_is_eagers(name: str, optimizer_name: str) -> None:
    step = assert_parity(zoo.get(name), optimizer_name, steps=5)
    # The first forward of the ViT leaves its kind of problem in the configuration, which the second reads.
    assert step.num_captures == (2 if name == "hf_vit" else 1)


def test_every_huggingface_case_is_tested() -> None:
    assert set(zoo.HF_CASES) == {"hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "hf_vit"}
