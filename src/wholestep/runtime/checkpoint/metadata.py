"""DCP's `.metadata`, read as data.

The file is a pickle, and a pickle is a program. Here it runs on an interpreter with few instructions, and every class
and function that it may name is a `Record` that remembers what it was called with and does nothing. From the records,
checked one by one, the description of the checkpoint is made. A file that names anything else, or uses any other
instruction, is refused before it has had an effect.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, cast

import torch

from wholestep._strict_json import shown
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.folder import is_file_name, read_regular

METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**28
_MAX_DEPTH = 64

_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    f"{_DCP}.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    # Where a checkpoint was first written; the module is another one since Python 3.13.
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
_INSTRUCTIONS = b"".join(
    [
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
        *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
    ]
)


@dataclass(frozen=True)
class Place:
    """Where the bytes of an entry are."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, as blocks that fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Steps = tuple[str | int, ...]
"""The keys, and positions in lists, that lead to a value in nested dicts and lists."""


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds: entries by key, and the path of each in the nested dicts it was made of."""

    entries: dict[str, StoredTensor | Place]
    paths: dict[str, Steps]


def read_stored(folder: Path) -> Stored:
    """What is in a folder that DCP wrote. Raises `CheckpointError` for anything else, and never runs what is in it."""
    try:
        root = _Interpreter(read_regular(folder / METADATA, _MAX_METADATA_BYTES)).load()
        return _Description(root, _file_sizes(folder)).stored()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"its {METADATA} cannot be read: {error}") from error
    except Exception as error:  # whatever bytes can make an interpreter trip over
        raise CheckpointError(
            f"its {METADATA} is damaged or hostile: {type(error).__name__}: {shown(str(error))}"
        ) from error


class Record:
    """What a program called a class or function with. Each program has classes of its own and can change no other."""

    kind: ClassVar[str]
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __new__(cls, *args: Any) -> Record:
        record = object.__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Interpreter(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """Python's own unpickler, in Python: unlike the one in C it can be left with the instructions that we need."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code]  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        for code in _INSTRUCTIONS
    }

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known: dict[tuple[str, str], Any] = {}

    def load_setitem(self) -> None:
        _refuse_odd_keys(self.stack[-2:-1])
        super().load_setitem()  # pyright: ignore[reportAttributeAccessIssue]

    def load_setitems(self) -> None:
        _refuse_odd_keys(self.stack[::2])
        super().load_setitems()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = load_setitem, load_setitems

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _ADMITTED.get(module, ()):
            raise CheckpointError(
                f"its {METADATA} wants to run '{shown(module)}.{shown(name)}', which has no place in a checkpoint: it "
                "is damaged or hostile, and nothing of it was run"
            )
        return self._known.setdefault((module, name), type(name, (Record,), {"kind": name}))

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(f"its {METADATA} refers to objects outside it")


def _refuse_odd_keys(keys: list[Any]) -> None:
    """A tuple of tuples of ... that share their parts takes for ever to hash."""
    if not all(type(key) is str or isinstance(key, Record) for key in keys):
        raise CheckpointError(f"its {METADATA} has a dict with other keys than names: it is damaged or hostile")


class _Description:
    """Turns records into a description, with everything checked that reading relies on."""

    def __init__(self, root: Any, file_sizes: dict[str, int]) -> None:
        self._root = _fields(root, "Metadata")
        self._file_sizes = file_sizes

    def stored(self) -> Stored:
        places = self._places()
        found = _dict(self._root.get("state_dict_metadata"), "entries")
        entries = {_text(key): self._entry(_text(key), value, places) for key, value in found.items()}
        paths = _dict(self._root.get("planner_data") or {}, "paths")
        return Stored(entries, {key: _path(paths.get(key, (key,))) for key in entries})

    def _places(self) -> dict[tuple[str, tuple[int, ...] | None], Place]:
        found = _dict(self._root.get("storage_data"), "places")
        places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for key, value in found.items():
            index = _fields(key, "MetadataIndex")
            offset = index.get("offset")
            places[_text(index.get("fqn")), None if offset is None else _sizes(offset)] = self._place(value)
        _refuse_overlap(places.values())
        return places

    def _place(self, value: Any) -> Place:
        info = _fields(value, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise CheckpointError("its entries are encoded in a way that is not known here")
        name, offset, num_bytes = _text(info.get("relative_path")), _size(info.get("offset")), _size(info.get("length"))
        if not is_file_name(name):
            raise CheckpointError(f"its entries are in '{shown(name)}', which is no file of a checkpoint")
        if offset + num_bytes > self._file_sizes.get(name, -1):
            raise CheckpointError(f"{shown(name)} is missing or shorter than its entries")
        return Place(name, offset, num_bytes)

    def _entry(
        self, key: str, value: Any, places: dict[tuple[str, tuple[int, ...] | None], Place]
    ) -> StoredTensor | Place:
        if isinstance(value, Record) and value.kind == "BytesStorageMetadata":
            return places[key, None]
        tensor = _fields(value, "TensorStorageMetadata")
        dtype, shape = _dtype(tensor.get("properties")), _sizes(tensor.get("size"))
        chunks: list[Chunk] = []
        for one in _list(tensor.get("chunks")):
            block = _fields(one, "ChunkStorageMetadata")
            offsets, sizes = _sizes(block.get("offsets")), _sizes(block.get("sizes"))
            chunks.append(Chunk(offsets, sizes, places[key, offsets]))
        _refuse_odd_chunks(key, dtype, shape, chunks)
        return StoredTensor(dtype, shape, tuple(chunks))


def _refuse_overlap(places: Iterable[Place]) -> None:
    """Each entry has bytes of its own."""
    end: dict[str, int] = {}
    for place in sorted(places, key=lambda place: (place.file, place.offset, place.num_bytes)):
        if place.offset < end.get(place.file, 0) and place.num_bytes:
            raise CheckpointError(f"two of its entries overlap in {shown(place.file)}")
        end[place.file] = max(end.get(place.file, 0), place.offset + place.num_bytes)


def _refuse_odd_chunks(key: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Blocks lie within the tensor and have its volume together, and their bytes are there."""
    for chunk in chunks:
        is_within = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= limit for offset, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not is_within or math.prod(chunk.sizes) * dtype.itemsize > chunk.place.num_bytes:
            raise CheckpointError(f"the blocks of {shown(key)} do not fit it")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise CheckpointError(f"the blocks of {shown(key)} do not fill it")


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != kind:
        raise CheckpointError(f"its {METADATA} has something else where {kind} should be")
    return _dict(value.state, kind)


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise CheckpointError(f"its {METADATA} has no {what}")
    return cast("dict[Any, Any]", value)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CheckpointError(f"its {METADATA} has no list where one should be")
    return cast("list[Any]", value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"its {METADATA} has no text where a name should be")
    return value


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _size(value: Any) -> int:
    if not _is_size(value):
        raise CheckpointError(f"its {METADATA} has no number where one should be")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """A `torch.Size`, which was called with a tuple."""
    content = value.args[0] if isinstance(value, Record) and value.kind == "Size" and value.args else None
    if type(content) not in (tuple, list):
        raise CheckpointError(f"its {METADATA} has no shape where one should be")
    return tuple(_size(item) for item in cast("tuple[Any, ...]", content))


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) and properties.kind == "TensorProperties" else None
    dtype = cast("tuple[Any, ...]", state)[0] if type(state) is tuple and state else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"its {METADATA} has no dtype where one should be")
    return dtype


def _path(value: Any) -> Steps:
    steps = cast("tuple[Any, ...]", value)
    is_path = type(value) is tuple and 0 < len(steps) <= _MAX_DEPTH
    if not is_path or not all(isinstance(step, str) or _is_size(step) for step in steps):
        raise CheckpointError(f"its {METADATA} has no path where one should be")
    return steps
