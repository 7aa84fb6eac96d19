"""The safetensors format: round trips of every dtype, agreement with the reference implementation, hostile files."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from wholestep.errors import StageFileError, WholestepError
from wholestep.pipe.files.safetensors import read_tensors, write_tensors

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
FUZZ = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits; truth values are 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)


def every_dtype() -> dict[str, Tensor]:
    tensors = {str(dtype): of_dtype(dtype, 3, 5) for dtype in DTYPES}
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 3).t()}


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = every_dtype()
    write_tensors(tmp_path / "x", tensors, {"who": "me"})
    metadata, found = read_tensors(tmp_path / "x")
    assert metadata.pop("sha256")
    assert metadata == {"who": "me"}
    assert_same(found, tensors)
    found["scalar"].add_(1)  # memory of one's own: the file stays as it is
    assert_same(read_tensors(tmp_path / "x")[1], tensors)


def test_the_reference_implementation_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    reference = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    tensors = every_dtype()
    write_tensors(tmp_path / "ours", tensors, {"who": "me"})
    assert_same(reference.load_file(tmp_path / "ours"), tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    reference.save_file(contiguous, tmp_path / "theirs", metadata={"who": "them"})
    metadata, found = read_tensors(tmp_path / "theirs")
    assert metadata == {"who": "them"}
    assert_same(found, tensors)


def test_data_is_aligned_and_tensors_are_in_one_order(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(1), "c": torch.ones(1)}, {})
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__").keys() == {"sha256"}
    assert {name: entry["data_offsets"] for name, entry in header.items()} == {"a": [0, 4], "c": [4, 8], "b": [8, 11]}


def test_a_dtype_that_the_format_has_no_name_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageFileError, match=r"no place for 'z' \(torch.complex128\)"):
        write_tensors(tmp_path / "x", {"z": torch.ones(1, dtype=torch.complex128)}, {})


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any = (1,), offsets: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no header of 0 bytes fits into 0"),
        (b"\xff" * 8, "no header of 18446744073709551615 bytes"),
        (file_of(b"[]"), "is an object, not an array"),
        (file_of(b"{"), "is no JSON"),
        (file_of(b"\xff\xfe"), "is no JSON"),
        (file_of(b'{"a":NaN}'), "it has the number NaN"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}"), "is no JSON"),
        (file_of(b'{"a":' * 5000 + b"1" + b"}" * 5000), "nests too deeply"),
        (file_of(b'{"a":1,"a":2}'), "a key of one object twice"),
        (file_of({"a": entry()}), "the file is torn"),
        (file_of({"a": entry()}, b"12345"), "the file is torn or goes on"),
        (file_of({"a": entry(), "b": entry()}, b"1234"), "overlaps"),
        (file_of({"a": entry(offsets=(4, 8))}, b"12345678"), "there is a gap"),
        (file_of({"a": entry(offsets=(4, 0))}, b"1234"), "has -4 bytes"),
        (file_of({"a": entry(offsets=(0, 4, 8))}, b"1234"), "has 3 offsets"),
        (file_of({"a": entry(shape=(2,))}, b"1234"), "has 4 bytes, which its shape and dtype do not need"),
        (file_of({"a": entry(shape=(-1,))}, b"1234"), "out of range"),
        (file_of({"a": entry(shape=(True,))}, b"1234"), "not a truth value"),
        (file_of({"a": entry(shape=(0, 2**61, 2**61), offsets=(0, 0))}), "is empty, and yet too large"),
        (file_of({"a": entry(shape=(1,) * 65)}, b"1234"), "more than 64 dimensions"),
        (file_of({"a": entry(dtype="F31")}, b"1234"), "there is no dtype 'F31'"),
        (file_of({"a": entry(dtype=32)}, b"1234"), "is a string, not a number"),
        (file_of({"a": entry() | {"more": 1}}, b"1234"), "not known: 'more'"),
        (file_of({"a": {}}), "has no 'data_offsets'"),
        (file_of({"__metadata__": {"a": 1}}), "metadata is a string"),
        (file_of({"a": entry(shape=(2,), offsets=(0, 2), dtype="BOOL")}, b"\1\7"), "neither true nor false"),
        (file_of(b'{"\\ud800":1}'), "cannot be printed"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(StageFileError, match=message):
        read_tensors(tmp_path / "x")


def assert_harmless(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with contextlib.suppress(WholestepError):
        read_tensors(path)


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes_are_harmless(tmp_path: Path, data: bytes) -> None:
    assert_harmless(tmp_path / "x", data)
    assert_harmless(tmp_path / "x", file_of(data, data))


@functools.cache
def small_file(folder: Path) -> bytes:
    write_tensors(folder / "x", {"a": of_dtype(torch.float32, 2, 2), "b": of_dtype(torch.bool, 3)}, {"k": "v"})
    return (folder / "x").read_bytes()


@FUZZ
@given(st.data())
def test_every_cut_and_every_changed_byte_is_harmless(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(small_file(tmp_path))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert_harmless(tmp_path / "x", bytes(content))
    cut = data.draw(st.integers(0, len(content) - 1))
    (tmp_path / "x").write_bytes(content[:cut])
    with pytest.raises(WholestepError):
        read_tensors(tmp_path / "x")
