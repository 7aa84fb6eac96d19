"""Small models, written for this project, that tests and benchmarks train."""

from wholestep.zoo import (
    bert,
    checkpointed,
    custom_function,
    gpt,
    llama,
    lstm,
    mlp,
    resnet,
    t5,
    vit,
)
from wholestep.zoo.case import Batch, ZooCase
from wholestep.zoo.huggingface import HF_CASES

__all__ = ["CASES", "HF_CASES", "Batch", "ZooCase", "get"]

CASES: dict[str, ZooCase] = {
    case.name: case
    for case in (
        mlp.make_case("mlp", mlp.MLPConfig()),
        gpt.make_case("gpt", gpt.GPTConfig()),
        llama.make_case("llama", llama.LlamaConfig()),
        bert.make_case("bert", bert.BertConfig()),
        t5.make_case("t5", t5.T5Config()),
        vit.make_case("vit", vit.ViTConfig()),
        resnet.make_case("resnet", resnet.ResNetConfig()),
        lstm.make_case("lstm", lstm.LSTMConfig()),
        custom_function.make_case("custom_function", custom_function.QuantizedConfig()),
        checkpointed.make_case("checkpointed", gpt.GPTConfig(), use_reentrant=False),
        checkpointed.make_case("checkpointed_reentrant", gpt.GPTConfig(), use_reentrant=True),
    )
}
"""The zoo's own models by name, at sizes small enough for tests."""


def get(name: str) -> ZooCase:
    """The case of this name, whether the zoo's own or a Hugging Face one."""
    known = CASES | HF_CASES
    if name not in known:
        raise KeyError(f"no zoo case named {name!r}; there are: {', '.join(known)}")
    return known[name]
