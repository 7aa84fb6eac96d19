"""Whatever is in the files of a checkpoint, nothing of it runs, and `CheckpointError` is all that comes of it."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as plain_load

import wholestep
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint import folder as folders


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A good one, that plain torch would load too."""
    model = nn.Linear(3, 2)
    wholestep.Checkpoints(tmp_path).save(1, model=model, extra={"text": "a", "list": [1, 2]}, wait=True)
    return tmp_path / "step-00000001"


def load(path: Path) -> None:
    wholestep.load_checkpoint(path, model=nn.Linear(3, 2), extra={})


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(path)


def bless(path: Path) -> None:
    """Give the files as they are now a manifest: a hash does not make a file harmless."""
    (path / "manifest.json").unlink()
    files = {file.name: folders.FileFacts.of(file) for file in path.iterdir()}
    moved = path.parent / f".writing-{path.name}"
    path.rename(moved)
    assert folders.commit(moved, 1, 1, files) == path


def edit_metadata(path: Path, change: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))
    bless(path)


def test_a_program_in_the_metadata_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    edit_metadata(checkpoint, lambda _: Bomb(target))
    refused(checkpoint, r"its \.metadata wants to run 'posix\.mkdir'")
    with pytest.raises(CheckpointError, match="wants to run"):
        wholestep.Checkpoints(tmp_path).resume(model=nn.Linear(3, 2), extra={})
    assert not target.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert target.exists()  # it was a live one


def test_a_program_deep_in_good_metadata_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    def hide(metadata: Any) -> None:
        metadata.planner_data["extra.text"] = ("extra", Bomb(tmp_path / "made"))

    edit_metadata(checkpoint, hide)
    refused(checkpoint, "wants to run")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST, which looks up and calls at once
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0a_C.Storage\x93.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"\x80\x02c__builtin__\ngetattr\n.",
        b"\x82\x01.",  # an extension code
        b"Px\n.",  # a persistent id
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",  # a byte array of an exabyte
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"(" * 100_000 + b".",
        b"",
        b"\x80\x09.",
        b"N.",
    ],
)
def test_other_programs_are_refused(program: bytes, checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(program)
    bless(checkpoint)
    refused(checkpoint, r"cannot be loaded: its \.metadata")


def replaced_entry(checkpoint: Path, key: str, value: bytes) -> None:
    """Put other bytes where an entry is, behind the file's end, and let the metadata point there."""

    def change(metadata: Any) -> None:
        [info] = [info for index, info in metadata.storage_data.items() if index.fqn == key]
        file = checkpoint / info.relative_path
        info.offset, info.length = file.stat().st_size, len(value)
        file.write_bytes(file.read_bytes() + value)

    edit_metadata(checkpoint, change)


def archived(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("key", ["extra.text", "extra.list", "model.weight", "per_rank.0.random.python"])
def test_a_program_in_an_entry_is_not_run(key: str, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    replaced_entry(checkpoint, key, archived(Bomb(target)))
    with pytest.raises(CheckpointError, match="is more than tensors, numbers, text and containers"):
        wholestep.Checkpoints(tmp_path).resume(model=nn.Linear(3, 2), extra={})
    assert not target.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_that_program_would_run_in_plain_torch(checkpoint: Path, tmp_path: Path) -> None:
    """So the test above can fail."""
    replaced_entry(checkpoint, "extra.text", archived(Bomb(tmp_path / "made")))
    plain_load({"extra": {"text": ""}}, checkpoint_id=checkpoint)
    assert (tmp_path / "made").exists()


def test_an_old_style_pickle_is_not_even_looked_at(checkpoint: Path, tmp_path: Path) -> None:
    replaced_entry(checkpoint, "extra.text", pickle.dumps(Bomb(tmp_path / "made")))
    refused(checkpoint, "its entry extra.text is damaged or hostile: BadZipFile")
    assert not (tmp_path / "made").exists()


def test_an_entry_that_is_packed_to_be_larger_is_refused(checkpoint: Path) -> None:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archived(torch.zeros(10**6)))) as source,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    replaced_entry(checkpoint, "extra.text", buffer.getvalue())
    refused(checkpoint, "one of its entries is packed")


def point_outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../" * 9 + "etc/passwd"


def beyond_the_end(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = 10**12


def negative(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = -5


def enormous(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].size = torch.Size([2**40, 2**20])


def holes(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks.clear()


def the_same_bytes_again_and_again(metadata: Any) -> None:
    index, info = next(iter(metadata.storage_data.items()))
    for number in range(10**4):
        metadata.storage_data[type(index)(f"{index.fqn}{number}", index.offset)] = info


def encoded(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def deep(metadata: Any) -> None:
    metadata.planner_data["extra.text"] = tuple("extra" for _ in range(10**5))


def twice(metadata: Any) -> None:
    metadata.planner_data["extra.text"] = metadata.planner_data["extra.list"]


def below_a_value(metadata: Any) -> None:
    metadata.planner_data["extra.list"] = ("extra", "text", "more")


def gaps(metadata: Any) -> None:
    metadata.planner_data["extra.text"] = ("extra", "items", 10**9)


def no_dict(metadata: Any) -> None:
    metadata.planner_data |= {"extra.text": ("extra",), "extra.list": ("elsewhere",)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (point_outside, "which is no file of a checkpoint"),
        (beyond_the_end, "is missing or shorter than its entries"),
        (negative, "has no number where one should be"),
        (enormous, r"the blocks of model\.weight do not fill it"),
        (holes, r"the blocks of model\.weight do not fill it"),
        (the_same_bytes_again_and_again, "two of its entries overlap in __0_0.distcp"),
        (encoded, "encoded in a way that is not known here"),
        (deep, "has no path where one should be"),
        (twice, "it has extra.list twice"),
        (below_a_value, "it has a value and others below it"),
        (gaps, "it has a list with gaps"),
        (lambda metadata: metadata.state_dict_metadata.update({"model.weight": 3}), "something else where"),
        (lambda metadata: setattr(metadata, "storage_data", None), "has no places"),
        (no_dict, "'extra' is no dict in it"),
        (lambda metadata: metadata.state_dict_metadata, "something else where Metadata should be"),
    ],
)
def test_metadata_that_lies_is_refused(change: Callable[[Any], Any], message: str, checkpoint: Path) -> None:
    edit_metadata(checkpoint, change)
    refused(checkpoint, message)


def test_a_tensor_of_another_shape_or_dtype_than_announced(checkpoint: Path) -> None:
    replaced_entry(checkpoint, "model.weight", archived(torch.zeros(2, 3, dtype=torch.float64)))
    refused(checkpoint, "not of the shape or dtype it should have")


def test_generators_of_the_wrong_form_change_nothing(checkpoint: Path, tmp_path: Path) -> None:
    replaced_entry(checkpoint, "per_rank.0.random.python", archived((3, (1, 2), None)))
    model, before = nn.Linear(3, 2), torch.get_rng_state()
    weight = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="not of the form that these objects have"):
        wholestep.Checkpoints(tmp_path).resume(model=model, extra={})
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_value_that_nests_too_deeply(checkpoint: Path) -> None:
    """A list in a list, a hundred thousand times; no recursion of ours gets to its end."""
    program = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archived([]))) as source, zipfile.ZipFile(buffer, "w") as deep_one:
        for name in source.namelist():
            deep_one.writestr(name, program if name.endswith("data.pkl") else source.read(name))
    replaced_entry(checkpoint, "extra.text", buffer.getvalue())
    refused(checkpoint, "it nests too deeply")


@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_changed_bytes_load_or_are_refused(checkpoint: Path, data: st.DataObject) -> None:
    """Some bytes of the metadata or of the entries are others: it loads, or `CheckpointError` says that it does not."""
    good = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    name = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray(good[name])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (checkpoint / name).write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    (checkpoint / "manifest.json").unlink()
    try:
        load(checkpoint)
    except CheckpointError:
        pass
    finally:
        for file, value in good.items():
            (checkpoint / file).write_bytes(value)
