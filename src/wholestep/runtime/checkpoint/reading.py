"""The entries of a checkpoint, read into fresh memory of the host."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from wholestep._strict_json import shown
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.metadata import Chunk, Place, Steps, Stored, StoredTensor, read_stored
from wholestep.runtime.checkpoint.pickles import refuse_endless

_MAX_VALUE_BYTES = 2**28


class Archive:
    """A folder that DCP wrote, with ours or by hand. Raises only `CheckpointError`; nothing in it is run.

    Tensors and other values are read by torch's loader for weights, which knows tensors, numbers, text and containers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: Stored = read_stored(folder)

    @property
    def names(self) -> list[str]:
        """The names on top: `model`, `optimizer`, ..."""
        return list(dict.fromkeys(str(path[0]) for path in self._stored.paths.values()))

    def read(self, prefixes: Collection[Steps]) -> dict[str, Any]:
        """Everything below these paths, nested as it was saved."""
        wanted = {
            key: path
            for key, path in self._stored.paths.items()
            if any(path[: len(prefix)] == prefix for prefix in prefixes)
        }
        return nested((path, self._read(key, self._stored.entries[key])) for key, path in wanted.items())

    def _read(self, key: str, entry: StoredTensor | Place) -> Any:
        try:
            return self._tensor(entry) if isinstance(entry, StoredTensor) else self._value(entry)
        except (CheckpointError, RecursionError):
            raise
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"its entry {shown(key)} is more than tensors, numbers, text and containers: it is damaged or hostile, "
                "and nothing of it was run"
            ) from error
        except Exception as error:  # whatever bytes can make a parser trip over
            raise CheckpointError(
                f"its entry {shown(key)} is damaged or hostile: {type(error).__name__}: {shown(str(error))}"
            ) from error

    def _tensor(self, entry: StoredTensor) -> torch.Tensor:
        if len(entry.chunks) == 1:
            return self._chunk(entry.chunks[0], entry.dtype)
        whole = torch.zeros(entry.shape, dtype=entry.dtype)
        is_filled = torch.zeros(entry.shape, dtype=torch.bool)
        for chunk in entry.chunks:
            place = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if is_filled[place].any():
                raise CheckpointError("the blocks of one of its tensors overlap")
            is_filled[place] = True
            whole[place] = self._chunk(chunk, entry.dtype)
        return whole

    def _chunk(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        value = _loaded(self._bytes(chunk.place))
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or tuple(value.shape) != chunk.sizes:
            raise CheckpointError("one of its tensors is not of the shape or dtype it should have")
        return value.detach()

    def _value(self, place: Place) -> Any:
        if place.num_bytes > _MAX_VALUE_BYTES:
            raise CheckpointError("one of its values is too large")
        return _loaded(self._bytes(place))

    def _bytes(self, place: Place) -> bytes:
        with (self.folder / place.file).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.num_bytes)


def _loaded(data: bytes) -> Any:
    """What `torch.save` wrote, if it is as large in memory as it is here: archives may be packed to be much larger."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        is_packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if is_packed or sum(member.file_size for member in members) > len(data):
            raise CheckpointError("one of its entries is packed, which those of a checkpoint never are")
        for member in members:
            if member.filename.endswith(".pkl"):
                refuse_endless(archive.read(member))
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    _refuse_odd_tensors(value)
    return value


def _refuse_odd_tensors(value: Any) -> None:
    """Tensors have memory of their own for each element: one that is expanded can be of any size."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
        if not is_plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError("one of its tensors has no memory of its own for each element")
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            _refuse_odd_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            _refuse_odd_tensors(item)


def nested(items: Iterable[tuple[Steps, Any]]) -> dict[str, Any]:
    """Dicts, and lists where steps are numbers, with these values at these paths."""
    root: dict[Any, Any] = {}
    for path, value in items:
        place = root
        for step in path[:-1]:
            place = place.setdefault(step, _Branch())
            if not isinstance(place, _Branch):
                raise CheckpointError(f"it has a value and others below it at {shown('.'.join(map(str, path)))}")
        if path[-1] in place:
            raise CheckpointError(f"it has {shown('.'.join(map(str, path)))} twice")
        place[path[-1]] = value
    return {key: _grown(value) for key, value in root.items()}


class _Branch(dict[Any, Any]):
    """A dict that is part of the nesting, and no value that happens to be a dict."""


def _grown(value: Any) -> Any:
    if not isinstance(value, _Branch):
        return value
    numbers = [key for key in value if isinstance(key, int)]
    if not numbers:
        return {key: _grown(item) for key, item in value.items()}
    if set(value) != set(range(len(value))):
        raise CheckpointError("it has a list with gaps")
    return [_grown(value[index]) for index in range(len(value))]
