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


def shared(depth: int) -> bytes:
    """A program for a tuple of two tuples that are one, of two that are one, ...: 2^depth to walk or to hash."""
    return b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(depth))


def with_program(checkpoint: Path, program: bytes) -> None:
    """Let an entry be what a program makes, in an archive as torch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archived([]))) as source, zipfile.ZipFile(buffer, "w") as other:
        for name in source.namelist():
            other.writestr(name, program if name.endswith("data.pkl") else source.read(name))
    replaced_entry(checkpoint, "extra.text", buffer.getvalue())


def test_metadata_with_a_key_that_takes_for_ever_to_hash(checkpoint: Path) -> None:
    """F4: 262 bytes."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x02}" + shared(60) + b"Ns.")
    bless(checkpoint)
    refused(checkpoint, "a dict with other keys than names")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(shared(60), id="a value"),
        pytest.param(b"}" + shared(60) + b"Ns", id="a key"),
        pytest.param(b"}(" + shared(60) + b"Nu", id="keys"),
        pytest.param(b"ccollections\nOrderedDict\n](" + shared(60) + b"N\x86e\x85R", id="a key of an argument"),
        pytest.param(
            b"]q\x00("
            + b"".join(b"]q%c" % n for n in range(1, 40))
            + b"e"
            + b"".join(b"h%c(h%ch%ce" % (n, n + 1, n + 1) for n in range(1, 39))
            + b"h\x00",
            id="filled from the top",
        ),
        pytest.param(b"]q\x00h\x00a", id="a list in itself"),
    ],
)
def test_values_that_grow_out_of_proportion(program: bytes, checkpoint: Path) -> None:
    """F4: torch's own loader, or whoever walks what it returns, would take 2^60 steps."""
    with_program(checkpoint, b"\x80\x02" + program + b".")
    refused(checkpoint, "one of its entries is much larger in memory than in its file")


def test_values_that_share_a_little_are_read(checkpoint: Path) -> None:
    with_program(checkpoint, b"\x80\x02" + shared(6) + b".")
    load(checkpoint)


@pytest.mark.parametrize("program", [b"\x80\x02X\x01\x00\x00\x00aQ.", b"\x80\x04\x8c\x01a.", b"\x80\x02h\x07."])
def test_programs_that_torch_does_not_write(program: bytes, checkpoint: Path) -> None:
    with_program(checkpoint, program)
    refused(checkpoint, "cannot be loaded: ")


@pytest.mark.parametrize("value", [torch.zeros(1).expand(10**12), torch.empty(10**12, device="meta")])
def test_tensors_without_memory_of_their_own(value: torch.Tensor, checkpoint: Path) -> None:
    """F4: a few bytes that claim to be terabytes."""
    replaced_entry(checkpoint, "extra.list", archived([value]))
    refused(checkpoint, "one of its tensors has no memory of its own for each element")


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "__0_0.distcp"])
def test_a_pipe_is_not_waited_for(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """F4: opening one without a writer waits for ever."""
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(checkpoint, "is no ordinary file|is missing")
    assert wholestep.Checkpoints(tmp_path).resume(model=nn.Linear(3, 2), extra={}) == 0


def test_a_pipe_where_plain_torch_left_metadata(checkpoint: Path) -> None:
    for name in ("manifest.json", ".metadata"):
        (checkpoint / name).unlink()
    os.mkfifo(checkpoint / ".metadata")
    refused(checkpoint, r"\.metadata is no ordinary file")


def overlapping_blocks(metadata: Any) -> None:
    """Two blocks of the right volume together, one on top of the other."""
    tensor = metadata.state_dict_metadata["model.weight"]
    [block] = tensor.chunks
    kind, (index, info) = (
        type(block),
        next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "model.weight"),
    )
    first, second = torch.Size([0, 0]), torch.Size([0, 1])
    tensor.chunks[:] = [kind(offsets=first, sizes=torch.Size([2, 2])), kind(offsets=second, sizes=torch.Size([2, 1]))]
    del metadata.storage_data[index]
    half = info.length // 2
    for offset, begin in ((first, info.offset), (second, info.offset + half)):
        place = type(info)(info.relative_path, begin, half)
        metadata.storage_data[type(index)("model.weight", offset)] = place


def test_blocks_that_overlap(checkpoint: Path) -> None:
    """F4: their volumes add up, and a part of the tensor is never written."""
    data = archived(torch.zeros(2, 2)).ljust(4096, b"\0"), archived(torch.zeros(2, 1)).ljust(4096, b"\0")
    replaced_entry(checkpoint, "model.weight", b"".join(data))
    edit_metadata(checkpoint, overlapping_blocks)
    refused(checkpoint, "overlap")


def test_a_manifest_of_another_step(checkpoint: Path, tmp_path: Path) -> None:
    """F4: a folder that was renamed says two things."""
    checkpoint.rename(tmp_path / "step-00000009")
    refused(tmp_path / "step-00000009", "its manifest is that of step 1")
    assert wholestep.Checkpoints(tmp_path).resume(model=nn.Linear(3, 2), extra={}) == 0
    (tmp_path / "step-00000009").rename(tmp_path / "best")
    load(tmp_path / "best")


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
