"""Stages in folders: what is loaded is what was saved, runs without the model's code, and says why it will not load."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cuts import MicroStep, micro_step, zoo_step
from torch import Tensor, nn

from wholestep import zoo
from wholestep._strict_json import fingerprint
from wholestep.errors import StageFileError
from wholestep.graph import SlotKind
from wholestep.pipe import Kind
from wholestep.pipe.cut import Stage, cut
from wholestep.pipe.files import load_stage, save_stage, weight_names
from wholestep.pipe.files.safetensors import read_tensors, write_tensors
from wholestep.pipe.files.stage_json import stage_from_json, stage_to_json
from wholestep.pipe.placement import forward_calls
from wholestep.runtime.pipeline.draws import number_draws
from wholestep.runtime.pipeline.programs import StageRunner

SEED = 7


class Net(nn.Module):
    """A parameter and a buffer that lie transposed, one that is used twice, a constant, dropout."""

    frame: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("frame", torch.randn(4, 3).t(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.norm(self.first(features)) @ self.turned
        hidden = nn.functional.dropout(hidden.clamp(max=float("inf")), 0.5) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.last(hidden) @ self.frame.t()


def net_step() -> MicroStep:
    torch.manual_seed(0)
    step = micro_step(Net(), lambda model, batch: model(batch).square().mean(), [torch.randn(3, 4)])
    number_draws(step.graph)
    return step


@functools.cache
def net_stage() -> tuple[Stage, dict[str, Tensor]]:
    """The net as one stage, and its tensors; for tests that change neither."""
    step = net_step()
    [stage] = stages_of(step, 1)
    return stage, tensors_of(step)


@functools.cache
def net_text() -> bytes:
    """The file of that stage."""
    stage, tensors = net_stage()
    return stage_to_json(stage, {name: tensors[name] for name in weight_names(stage).values()})[0]


def stages_of(step: MicroStep, num_stages: int = 2) -> tuple[Stage, ...]:
    num_calls = len(forward_calls(step.graph))
    return cut(step.graph, [num_calls * number // num_stages for number in range(1, num_stages)]).stages


def tensors_of(step: MicroStep) -> dict[str, Tensor]:
    """Parameters and buffers by name, constants by slot."""
    found: dict[str, Tensor] = dict(step.model.named_parameters()) | dict(step.model.named_buffers())
    constants = [slot.id for slot in step.graph.slots_of_kind(SlotKind.CONSTANT)]
    return found | {slot: step.captured.bindings[slot].read([]) for slot in constants}


def codes(stage: Stage) -> dict[str, str]:
    return {str(kind): str(stage.program(kind).graph).split("\n", 1)[1] for kind in Kind}


def layout(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


OTHERS = [name for name in zoo.CASES if name not in ("gpt", "resnet")]


@pytest.mark.parametrize(
    "name", ["gpt", "resnet", "net", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_what_is_loaded_is_what_was_saved(name: str, tmp_path: Path) -> None:
    step = net_step() if name == "net" else zoo_step(name)
    tensors = tensors_of(step)
    for stage in stages_of(step, 3):
        loaded, weights = load_stage(save_stage(stage, tensors, tmp_path / str(stage.index)))
        assert codes(loaded) == codes(stage)
        assert (loaded.index, loaded.updates, loaded.gradients) == (stage.index, stage.updates, stage.gradients)
        assert (loaded.returns, loaded.slots, loaded.wanted) == (stage.returns, stage.slots, stage.wanted)
        assert {key: layout(fake) for key, fake in loaded.fakes.items()} == {
            key: layout(fake) for key, fake in stage.fakes.items()
        }
        for kind in Kind:
            assert [node.meta.get("effect") for node in loaded.program(kind).graph.nodes] == [
                node.meta.get("effect") for node in stage.program(kind).graph.nodes
            ]
        assert weights.keys() == set(weight_names(stage).values())
        for key, tensor in weights.items():
            assert torch.equal(tensor, tensors[key])
            assert tensor.stride() == tensors[key].stride()


# Loading without the model

CHILD = """
import importlib.util, sys
sys.modules["wholestep.zoo"] = None   # the models are not to be had
from pathlib import Path
import torch
torch.set_num_threads(1)
from wholestep.capture.binding import Argument, FixedTensor
from wholestep.pipe import Kind
from wholestep.pipe.files import load_stage, weight_names
from wholestep.pipe.files.safetensors import read_tensors, write_tensors
from wholestep.runtime.pipeline.programs import StageRunner

assert importlib.util.find_spec("tests") is None and importlib.util.find_spec("cuts") is None
for folder in map(Path, sys.argv[1:]):
    batch = read_tensors(folder / "batch")[1]
    leaves = list(batch.values())
    arguments = {slot: Argument(index) for index, slot in enumerate(batch)}
    values, gradients, runners = {}, {}, []
    for index in range(len(list(folder.glob("stage*")))):
        stage, weights = load_stage(folder / f"stage{index}")
        fixed = {slot: FixedTensor(weights[name]) for slot, name in weight_names(stage).items()}
        runners.append(StageRunner(stage, fixed | arguments))
        values |= runners[-1].run(Kind.FORWARD, leaves, values, SEED)
    for index, runner in reversed(list(enumerate(runners))):
        values |= runner.run(Kind.BACKWARD, leaves, values, SEED)
        gradients |= {f"{index}.{slot}": value for slot, value in runner.gradients.items()}
        gradients |= {f"{index}.new.{slot}": values[name] for slot, name in runner.stage.updates.items()}
    write_tensors(folder / "gradients", gradients, {})
assert not [name for name in sys.modules if name.startswith(("tests", "wholestep.zoo."))]
"""


def run_here(step: MicroStep, stages: tuple[Stage, ...]) -> dict[str, Tensor]:
    """What the child does, with the stages as they were cut and the model as it is."""
    leaves, values, gradients = step.leaves()[0], dict[str, Any](), dict[str, Tensor]()
    runners = [StageRunner(stage, step.captured.bindings) for stage in stages]
    for runner in runners:
        values |= runner.run(Kind.FORWARD, leaves, values, SEED)
    for index, runner in reversed(list(enumerate(runners))):
        values |= runner.run(Kind.BACKWARD, leaves, values, SEED)
        gradients |= {f"{index}.{slot}": value for slot, value in runner.gradients.items()}
        gradients |= {f"{index}.new.{slot}": values[name] for slot, name in runner.stage.updates.items()}
    return gradients


@pytest.mark.slow
def test_stages_run_where_the_model_cannot_be_imported(tmp_path: Path) -> None:
    expected: dict[str, dict[str, Tensor]] = {}
    for name in ("gpt", "resnet", "t5", "net"):
        step = net_step() if name == "net" else zoo_step(name)
        folder = tmp_path / name
        stages = stages_of(step)
        for stage in stages:
            save_stage(stage, tensors_of(step), folder / f"stage{stage.index}")
        batch = {
            slot.id: step.captured.bindings[slot.id].read(step.leaves()[0])
            for slot in step.graph.slots_of_kind(SlotKind.BATCH)
        }
        write_tensors(folder / "batch", batch, {})
        expected[name] = run_here(step, stages)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    folders = [str(tmp_path / name) for name in expected]
    script = CHILD.replace("SEED", str(SEED))
    subprocess.run(
        [sys.executable, "-c", script, *folders], check=True, cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    for name, gradients in expected.items():
        found = read_tensors(tmp_path / name / "gradients")[1]
        assert found.keys() == gradients.keys()
        assert gradients
        for key, gradient in gradients.items():
            assert torch.equal(found[key], gradient), f"{name}: {key}"


def test_a_stage_can_be_made_for_another_device(tmp_path: Path) -> None:
    step = zoo_step("t5")
    stage = stages_of(step)[0]
    text, _ = stage_to_json(stage, {name: tensors_of(step)[name] for name in weight_names(stage).values()})
    moved = stage_from_json(text, torch.device("cuda:1")).stage
    assert {fake.device for fake in moved.fakes.values()} == {torch.device("cuda:1")}
    here, there = (codes(one)["F"].replace(" ", "") for one in (stage, moved))
    assert "device(type='cpu')" in here
    assert there == here.replace("device(type='cpu')", "device(type='cuda',index=1)")


# Weights


def test_a_tied_parameter_is_stored_once_and_may_go_by_any_of_its_names(tmp_path: Path) -> None:
    step = net_step()
    tensors = tensors_of(step)
    both = tensors | {"last.weight": tensors["first.weight"]}
    [stage] = stages_of(step, 1)
    _, weights = load_stage(save_stage(stage, both, tmp_path / "both"))
    assert "first.weight" in weights
    assert "last.weight" not in weights
    del both["first.weight"]
    assert torch.equal(load_stage(save_stage(stage, both, tmp_path / "other"))[1]["first.weight"], both["last.weight"])


def test_weights_that_are_missing_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    stage, tensors = net_stage()
    short = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    with pytest.raises(StageFileError, match=r"reads 'norm.weight', which is not among the tensors"):
        save_stage(stage, short, tmp_path)
    with pytest.raises(StageFileError, match=r"'norm.weight' is torch.float32 of \[5\], but the stage was made for"):
        save_stage(stage, short | {"norm.weight": torch.ones(5)}, tmp_path)
    with pytest.raises(StageFileError, match=r"'norm.weight' is torch.float64"):
        save_stage(stage, short | {"norm.weight": torch.ones(4, dtype=torch.float64)}, tmp_path)
    assert not list(tmp_path.iterdir())


# Operators


@torch.library.custom_op("stage_files::twice", mutates_args=())
def twice(features: Tensor) -> Tensor:
    return features * 2


@twice.register_fake
def _(features: Tensor) -> Tensor:
    return torch.empty_like(features)


twice.register_autograd(lambda context, gradient: gradient * 2)


def test_custom_operators_are_written_and_read_only_where_they_are_allowed(tmp_path: Path) -> None:
    step = micro_step(nn.Linear(4, 4), lambda model, batch: twice(model(batch)).sum(), [torch.randn(3, 4)])
    [stage] = stages_of(step, 1)
    with pytest.raises(StageFileError, match=r"'stage_files.twice.default' is an operator of neither"):
        save_stage(stage, tensors_of(step), tmp_path)
    save_stage(stage, tensors_of(step), tmp_path, namespaces=["stage_files"])
    with pytest.raises(StageFileError, match=r"allow it with namespaces=\['stage_files'\]"):
        load_stage(tmp_path)
    loaded, _ = load_stage(tmp_path, namespaces=["stage_files"])
    assert codes(loaded) == codes(stage)


def python_code(features: Tensor) -> Tensor:
    return features


def test_python_code_is_refused_by_name(tmp_path: Path) -> None:
    step = net_step()
    [stage] = stages_of(step, 1)
    graph = stage.forward.graph
    call = next(graph.calls())
    graph.insert(python_code, (call,), like=call, after=call)
    with pytest.raises(StageFileError, match=r"\.py:\d+\) calls '.*python_code', which is Python code and no operator"):
        save_stage(stage, tensors_of(step), tmp_path)


def changed(text: bytes, change: dict[str, str]) -> bytes:
    """A stage file with some words exchanged and the fingerprint made right again."""
    changed = text.decode()
    for old, new in change.items():
        assert old in changed
        changed = changed.replace(old, new)
    document = json.loads(changed)
    del document["fingerprint"]
    return json.dumps(document | {"fingerprint": fingerprint(document)}).encode()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "os.system",
            "os.system.default",
            "builtins.eval.default",
            "operator.attrgetter",
            "torch.ops.aten.mm.default",
        ),
        *("aten.from_file.default", "aten.save.default", "aten.__class__.default", "aten.mm.__class__", "aten.mm"),
        *("prim.Print.default", "aten.mm.default()", "aten.addmm_.default", "aten.addmm.out", "__import__('os')", ""),
    ],
)
def test_what_is_no_harmless_operator_is_not_found(name: str) -> None:
    with pytest.raises(ValueError, match=r"operator|writes to its arguments|arguments that it does not take"):
        stage_from_json(changed(net_text(), {'"aten.addmm.default"': json.dumps(name)}))


@pytest.mark.parametrize(
    "name", ["inputs", "class", "print", "a b", "a;import os", "addmm_3_", "__import__", "a.b", "", "inf", "1a"]
)
def test_names_that_would_not_be_plain_variables_are_refused(name: str) -> None:
    with pytest.raises(StageFileError, match="cannot be the name of a node"):
        stage_from_json(changed(net_text(), {'"addmm"': f'"{name}"'}))


def test_any_other_name_will_do() -> None:
    assert stage_from_json(changed(net_text(), {'"addmm"': '"fine"'}))


def test_a_source_line_cannot_hide_code_in_a_printed_graph() -> None:
    with pytest.raises(StageFileError, match="fqn has characters that cannot be printed"):
        stage_from_json(changed(net_text(), {'"fqn":"first"': '"fqn":"first\\n    import os"'}))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    step = net_step()
    [stage] = stages_of(step, 1)
    next(stage.forward.graph.calls()).meta["source"] = "model\n.py:3"
    with pytest.raises(StageFileError, match="source has characters that cannot be printed"):
        save_stage(stage, tensors_of(step), tmp_path)


# Folders


def saved(folder: Path) -> bytes:
    save_stage(*net_stage(), folder)
    return (folder / "stage.json").read_bytes()


def test_nothing_but_the_two_files_is_left_behind(tmp_path: Path) -> None:
    saved(tmp_path)
    saved(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage.json", "weights.safetensors"]


def test_a_job_that_dies_while_it_saves_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(tmp_path), (tmp_path / "weights.safetensors").read_bytes()

    def die(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path)
    assert before == ((tmp_path / "stage.json").read_bytes(), (tmp_path / "weights.safetensors").read_bytes())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_changed_stage_and_weights_of_another_one_are_refused(tmp_path: Path) -> None:
    text = saved(tmp_path)
    (tmp_path / "stage.json").write_bytes(text.replace(b"0.5", b"0.4"))
    with pytest.raises(StageFileError, match="does not have its own fingerprint"):
        load_stage(tmp_path)
    (tmp_path / "stage.json").write_bytes(changed(text, {"0.5": "0.4"}))
    with pytest.raises(StageFileError, match="belong to another stage"):
        load_stage(tmp_path)
    (tmp_path / "stage.json").write_bytes(text.replace(b'"version":1', b'"version":2'))
    with pytest.raises(StageFileError, match="is of version 2; this is version 1"):
        load_stage(tmp_path)


@pytest.mark.parametrize("name", ["stage.json", "weights.safetensors"])
def test_a_file_that_is_torn_missing_or_no_file_is_refused(tmp_path: Path, name: str) -> None:
    saved(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(StageFileError):
        load_stage(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(StageFileError, match=f"it has no file {name}"):
        load_stage(tmp_path)
    os.mkfifo(tmp_path / name)  # opening it would wait for a writer
    with pytest.raises(StageFileError, match=f"it has no file {name}"):
        load_stage(tmp_path)


def test_a_flipped_bit_in_the_weights_is_refused(tmp_path: Path) -> None:
    """S12: a single one, anywhere in the file; only the padding of its header may be another kind of white space."""
    saved(tmp_path)
    path = tmp_path / "weights.safetensors"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        changed_bit = bytearray(content)
        changed_bit[position] ^= 1 << (position % 8)
        path.write_bytes(changed_bit)
        with pytest.raises(StageFileError):
            load_stage(tmp_path)
    path.write_bytes(content)
    load_stage(tmp_path)


def test_weights_without_a_checksum_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"sha256"', b'"sha255"'))
    with pytest.raises(StageFileError, match="have no checksum: save the stage again"):
        load_stage(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StageFileError, match="cannot be written to"):
        saved(tmp_path / "file")
