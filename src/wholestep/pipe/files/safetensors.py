"""Tensors by name in the safetensors format: a length, a JSON header, raw numbers. There is nothing to execute in it.

    8 bytes     length of the header, little endian
    header      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    data        one tensor behind the other, row-major, little endian, no gaps

Files of other writers are read too. A file is read once, from its beginning to its end, each tensor straight into its
own memory. Ours carry a checksum of all tensors, their names and types among their metadata, and are refused if it is
not theirs.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from wholestep._strict_json import (
    array,
    dump,
    fields,
    integer,
    integers,
    mapping,
    one_of,
    parse,
    refused_as,
    shown,
    string,
    text,
)
from wholestep.errors import StageFileError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_METADATA = "__metadata__"
CHECKSUM = "sha256"
"""The entry of the metadata that has the checksum."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 64  # torch's
_CHUNK_BYTES = 64 * 2**20
_SIZES = range(2**62)


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file; offsets count from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, with a checksum among its metadata, and see to it that it has reached the disk."""
    _refuse_big_endian()
    # Wide types first, so that every tensor begins at a multiple of its width; then by name, so that files compare.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: {**metadata, CHECKSUM: ""}}
    digest = hashlib.sha256(_labels(metadata))
    position = 0
    for name in names:
        tensor = tensors[name]
        if name == _METADATA or tensor.dtype not in _NAMES:
            raise StageFileError(f"the safetensors format has no place for '{name}' ({tensor.dtype})")
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
        digest.update(_title(name, tensor))
        digest.update(_bytes_of(tensor.detach().cpu().contiguous()))
    header[_METADATA][CHECKSUM] = digest.hexdigest()
    start = dump(header)
    start += b" " * (-len(start) % _LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(start).to_bytes(_LENGTH_BYTES, "little") + start)
        for name in names:
            file.write(_bytes_of(tensors[name].detach().cpu().contiguous()))
        file.flush()
        os.fsync(file.fileno())


@refused_as(StageFileError)
def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file, in main memory; raises `StageFileError` unless it is exactly what it says."""
    _refuse_big_endian()
    with path.open("rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        metadata, entries = _read_header(file, num_bytes)
        tensors = {entry.name: _read_tensor(file, entry) for entry in entries}
    if CHECKSUM in metadata:
        digest = hashlib.sha256(_labels(metadata))
        for name, tensor in tensors.items():
            digest.update(_title(name, tensor))
            digest.update(_bytes_of(tensor))
        if digest.hexdigest() != metadata[CHECKSUM]:
            raise StageFileError("the weights are damaged: they do not have the checksum that is written in them")
    return metadata, tensors


def _labels(metadata: Mapping[str, str]) -> bytes:
    return dump(sorted([key, value] for key, value in metadata.items() if key != CHECKSUM))


def _title(name: str, tensor: torch.Tensor) -> bytes:
    return dump([name, _NAMES[tensor.dtype], list(tensor.shape)])


def _read_header(file: BinaryIO, num_bytes: int) -> tuple[dict[str, str], list[_Entry]]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    num_data_bytes = num_bytes - _LENGTH_BYTES - length
    if num_bytes < _LENGTH_BYTES or num_data_bytes < 0 or length > _MAX_HEADER_BYTES:
        raise StageFileError(f"the weights are no safetensors file: no header of {length} bytes fits into {num_bytes}")
    data = bytearray(length)
    _fill(file, memoryview(data))
    header = parse(bytes(data), "the header of the weights")
    metadata = mapping(header.pop(_METADATA, {}), "the metadata of the weights")
    entries = sorted(
        (_entry(name, value) for name, value in header.items()), key=lambda entry: (entry.begin, entry.end)
    )
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise StageFileError(f"weight '{shown(entry.name)}' overlaps another one, or there is a gap in front of it")
        position = entry.end
    if position != num_data_bytes:
        raise StageFileError(f"the weights end at byte {position} of {num_data_bytes}: the file is torn or goes on")
    return {key: text(value, "metadata") for key, value in metadata.items()}, entries


def _entry(name: str, value: Any) -> _Entry:
    what = f"weight '{shown(string(name, 'the name of a weight'))}'"
    found = fields(value, what, ("dtype", "shape", "data_offsets"))
    dtype = one_of(string(found["dtype"], f"the dtype of {what}"), _DTYPES, "dtype")
    if len(array(found["shape"], f"the shape of {what}")) > _MAX_DIMS:
        raise StageFileError(f"{what} has more than {_MAX_DIMS} dimensions")
    shape = integers(found["shape"], f"the shape of {what}", _SIZES)
    offsets = array(found["data_offsets"], f"the place of {what}")
    if len(offsets) != 2:
        raise StageFileError(f"{what} has {len(offsets)} offsets instead of two")
    begin, end = (integer(offset, f"an offset of {what}", _SIZES) for offset in offsets)
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise StageFileError(f"{what} has {end - begin} bytes, which its shape and dtype do not need")
    return _Entry(name, dtype, shape, begin, end)


def _read_tensor(file: BinaryIO, entry: _Entry) -> torch.Tensor:
    if math.prod(max(size, 1) for size in entry.shape) not in _SIZES:
        raise StageFileError(f"weight '{shown(entry.name)}' is empty, and yet too large")
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    _fill(file, _bytes_of(tensor))
    if entry.dtype is torch.bool and tensor.view(torch.uint8).gt(1).any():
        raise StageFileError(f"weight '{shown(entry.name)}' has truth values that are neither true nor false")
    return tensor


def _fill(file: BinaryIO, view: memoryview) -> None:
    """Fill memory from where the file stands; the system hands out large files in pieces."""
    position = 0
    while position < len(view):
        count = file.readinto(view[position : position + _CHUNK_BYTES])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise StageFileError("the weights end too early: somebody has cut the file off")
        position += count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in main memory."""
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _refuse_big_endian() -> None:
    if sys.byteorder != "little":
        raise StageFileError("safetensors files hold numbers in little endian, which this machine does not")
