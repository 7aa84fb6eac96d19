"""Arguments of calls and descriptions of tensors as JSON.

    None, truth values, numbers, strings, lists     themselves
    inf, nan, complex numbers                       {"float": "inf"}, {"complex": [0.0, 1.0]}
    tuples                                          {"tuple": [...]}
    dtypes, devices, layouts, memory formats        {"dtype": "float32"}, {"device": "cuda:0"}, ...
    nodes                                           {"node": "mm_3"}
    tensors                                         {"tensor": 7}, a row of the table of tensors

A tensor's row has shape, strides, dtype, device, and where in which memory it lies: views of one tensor stay views of
one tensor.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep._strict_json import (
    array,
    fields,
    integer,
    integers,
    mapping,
    one_of,
    shown,
    string,
)
from wholestep.errors import StageFileError

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,2})?", re.ASCII)
_MAX_DEPTH = 16
_MAX_DIMS = 64  # torch's
_SIZES = range(2**62)


class ValueWriter:
    """Turns values into JSON and collects the tensors among them."""

    def __init__(self) -> None:
        self._tensors: list[dict[str, Any]] = []
        self._storage_bytes: list[int] = []
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}
        self._storages: dict[int, int] = {}

    def table(self) -> dict[str, Any]:
        """All tensors that were written so far."""
        return {"storages": self._storage_bytes, "rows": self._tensors}

    def write(self, value: Any, where: str) -> Any:
        """A value as JSON; raises `StageFileError`, which says where, for what has no place in a file."""
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int and -(2**63) <= value < 2**63:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, tuple):
            return {"tuple": [self.write(item, where) for item in value]}
        if isinstance(value, list):
            return [self.write(item, where) for item in value]
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._row(value, where)}
        return self._write_named(value, where)

    def _write_named(self, value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, complex):
            return {"complex": [self.write(value.real, where), self.write(value.imag, where)]}
        if isinstance(value, torch.device) and _DEVICE.fullmatch(str(value)):
            return {"device": str(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if value is torch.strided:
            return {"layout": "strided"}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).removeprefix("torch.")}
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise StageFileError(f"{where} depends on a size that varies: capture the step for one size")
        raise StageFileError(f"{where} holds a {type(value).__name__}, which has no place in a stage file")

    def _row(self, tensor: torch.Tensor, where: str) -> int:
        if id(tensor) in self._seen:
            return self._seen[id(tensor)][0]
        if tensor.layout is not torch.strided:
            raise StageFileError(f"{where} is a tensor of layout {tensor.layout}, which has no place in a stage file")
        key = _torch.storage_key(tensor)
        storage = self._storages.setdefault(key, len(self._storages))
        shape, strides = (
            [self.write(size, where) for size in sizes] for sizes in (tuple(tensor.shape), tensor.stride())
        )
        offset = self.write(tensor.storage_offset(), where)
        num_bytes = _end_bytes(shape, strides, offset, tensor.dtype)
        if storage == len(self._storage_bytes):
            self._storage_bytes.append(num_bytes)
        self._storage_bytes[storage] = max(self._storage_bytes[storage], num_bytes)
        self._seen[id(tensor)] = (len(self._tensors), tensor)  # kept alive: an id is one object's as long as it lives
        dtype, device = self.write(tensor.dtype, where)["dtype"], self.write(tensor.device, where)["device"]
        row = {"dtype": dtype, "device": device, "shape": shape, "strides": strides}
        self._tensors.append(row | {"storage": storage, "offset": offset})
        return len(self._tensors) - 1


class ValueReader:
    """Turns JSON into values, tensors into fakes of one mode.

    With a `device`, what was elsewhere than in main memory, or everything if there is no such, is put there.
    """

    def __init__(self, table: Any, mode: _torch.FakeTensorMode, device: torch.device | None) -> None:
        found = fields(table, "the table of tensors", ("storages", "rows"))
        rows = [mapping(row, "a tensor") for row in array(found["rows"], "the table of tensors")]
        sizes = integers(found["storages"], "the size of a tensor", _SIZES)
        self._storages: list[Any] = [
            torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage() for num_bytes in sizes
        ]
        self._mode = mode
        self._device = device
        self._is_elsewhere = any(row.get("device") != "cpu" for row in rows)
        self._tensors = [self._tensor(row) for row in rows]

    def device(self, text: Any) -> torch.device:
        """The device that a device of the file is here."""
        name = string(text, "a device")
        if _DEVICE.fullmatch(name) is None:
            raise StageFileError(f"'{shown(name)}' is no device that a stage can be on")
        found = torch.device(name)
        is_moved = (found.type != "cpu") == self._is_elsewhere
        return self._device if self._device is not None and is_moved else found

    def tensor(self, row: Any) -> torch.Tensor:
        """The fake tensor of a row of the table."""
        return self._tensors[integer(row, "the number of a tensor", range(len(self._tensors)))]

    def read(self, value: Any, nodes: dict[str, fx.Node] | None = None, depth: int = 0) -> Any:
        """The value that JSON stands for. Where there are `nodes` it may hold nodes, elsewhere tensors."""
        if depth > _MAX_DEPTH:
            raise StageFileError("an argument nests too deeply")
        if isinstance(value, list):
            return [self.read(item, nodes, depth + 1) for item in array(value, "an argument")]
        if isinstance(value, str):
            return string(value, "an argument")
        if type(value) is int:
            return integer(value, "an argument")
        if not isinstance(value, dict):
            return _finite(value)
        found = mapping(value, "an argument")
        if len(found) != 1:
            raise StageFileError(f"an argument is an object with one key, not {len(found)}")
        [(kind, inner)] = found.items()
        return self._read_named(kind, inner, nodes, depth)

    def _read_named(self, kind: str, inner: Any, nodes: dict[str, fx.Node] | None, depth: int) -> Any:
        if kind == "tuple":
            return tuple([self.read(item, nodes, depth + 1) for item in array(inner, "a tuple")])
        if kind == "node" and nodes is not None:
            return one_of(string(inner, "the name of a node"), nodes, "earlier node")
        if kind == "tensor" and nodes is None:
            return self.tensor(inner)
        if kind == "device":
            return self.device(inner)
        if kind == "complex":
            parts = [self.read(part, None, depth + 1) for part in array(inner, "a complex number")]
            if len(parts) != 2 or not all(type(part) is float for part in parts):
                raise StageFileError("a complex number has two parts, both of them floats")
            return complex(*parts)
        tables: dict[str, dict[str, Any]] = {
            "float": _FLOATS,
            "dtype": _DTYPES,
            "layout": _LAYOUTS,
            "memory_format": _MEMORY_FORMATS,
        }
        table = one_of(kind, tables, "kind of value")
        return one_of(string(inner, f"a {kind}"), table, kind)

    def _tensor(self, row: Any) -> torch.Tensor:
        found = fields(row, "a tensor", ("dtype", "device", "shape", "strides", "storage", "offset"))
        dtype = one_of(string(found["dtype"], "a dtype"), _DTYPES, "dtype")
        shape = integers(found["shape"], "the shape of a tensor", _SIZES)
        strides = integers(found["strides"], "the strides of a tensor", _SIZES)
        offset = integer(found["offset"], "the offset of a tensor", _SIZES)
        storage = integer(found["storage"], "the storage of a tensor", range(len(self._storages)))
        if len(shape) != len(strides) or len(shape) > _MAX_DIMS:
            raise StageFileError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
        device = self.device(found["device"])
        memory = self._storages[storage]
        is_possible = math.prod(max(size, 1) for size in shape) in _SIZES
        if not is_possible or _end_bytes(shape, strides, offset, dtype) > memory.nbytes():
            raise StageFileError(f"a tensor of {shown(shape)} does not fit into its storage")
        try:
            view = torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, shape, strides)
            return _torch.FakeTensor(self._mode, view, device)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise StageFileError(f"there are no tensors of {dtype} on {device}") from error


def _end_bytes(shape: Any, strides: Any, offset: int, dtype: torch.dtype) -> int:
    """Where the memory of a tensor ends, counted from where its storage begins."""
    if 0 in shape:
        return offset * dtype.itemsize
    return (offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * dtype.itemsize


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise StageFileError("a number is out of range")
    return value
