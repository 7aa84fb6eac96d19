"""A stage in a folder: `stage.json` has its programs, `weights.safetensors` its parameters, buffers and constants.

Weights are under their names in the model, tied ones once. `stage.json` carries a fingerprint of all that is in it, and
the weights carry the same, and a checksum of their own: files of different stages, or of which one was cut off or
changed, are refused. A file is complete
before it gets its name. A job that dies while it saves a stage over itself leaves the old weights or the new ones; over
another stage, the one or the other or what is refused.

Loading runs nothing that is in the files. What is loaded is an ordinary stage; to run it is to trust its operators with
one's numbers, as with any model.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from wholestep._strict_json import shown
from wholestep.errors import StageFileError, WholestepError
from wholestep.pipe.cut import Stage
from wholestep.pipe.files.safetensors import CHECKSUM, read_tensors, write_tensors
from wholestep.pipe.files.stage_json import (
    STAGE_NAME,
    Weight,
    inputs_of,
    stage_from_json,
    stage_to_json,
    weight_names,
)

_WEIGHTS_NAME = "weights.safetensors"
_MAX_STAGE_BYTES = 2**30


def save_stage(
    stage: Stage, tensors: Mapping[str, torch.Tensor], folder: str | Path, *, namespaces: Collection[str] = ()
) -> Path:
    """Write a stage to a folder, which is made if need be; returns the folder.

    `tensors` has at least what `weight_names` names; a whole `state_dict` will do. Operators of libraries beside torch
    are written only if their namespace is among `namespaces`. Raises `StageFileError`, and leaves what is there alone,
    for a stage that calls anything but operators or whose weights are missing or of another shape.
    """
    folder = Path(folder)
    weights = _gather(stage, tensors)
    text, mark = stage_to_json(stage, weights, namespaces)
    stage_from_json(text, namespaces=namespaces)  # what cannot be read again is better refused now
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / _WEIGHTS_NAME, lambda path: write_tensors(path, weights, {"format": "pt", "stage": mark}))
        _replace(folder / STAGE_NAME, lambda path: _write(path, text))
    except OSError as error:
        raise StageFileError(f"the stage cannot be written to {folder}: {error}") from error
    return folder


def load_stage(
    folder: str | Path, *, device: torch.device | str | None = None, namespaces: Collection[str] = ()
) -> tuple[Stage, dict[str, torch.Tensor]]:
    """Read a stage and its weights, by name, from a folder. Neither the model nor its code is needed.

    With a `device` the stage is made for that one instead of where it was captured. Operators of libraries beside torch
    are found only if their namespace is among `namespaces` and the library has been imported. Raises `StageFileError`
    (`GraphError` if a graph is not well formed) for anything that `save_stage` did not write; nothing in the files is
    run.
    """
    folder = Path(folder)
    try:
        _refuse_odd(folder)
        loaded = stage_from_json((folder / STAGE_NAME).read_bytes(), _device(device), namespaces)
        metadata, tensors = read_tensors(folder / _WEIGHTS_NAME)
    except OSError as error:
        raise StageFileError(f"there is no stage to be read in {folder}: {error}") from error
    except WholestepError as error:
        error.add_note(f"in {folder}")
        raise
    if CHECKSUM not in metadata:
        raise StageFileError(f"the weights in {folder} have no checksum: save the stage again")
    if metadata.get("stage") != loaded.fingerprint:
        raise StageFileError(f"the weights in {folder} belong to another stage than its {STAGE_NAME}")
    return loaded.stage, _placed(tensors, loaded.weights)


def _refuse_odd(folder: Path) -> None:
    """Refuse what would take long to read, or forever."""
    for name in (STAGE_NAME, _WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise StageFileError(f"there is no stage in {folder}: it has no file {name}")
    num_bytes = (folder / STAGE_NAME).stat().st_size
    if num_bytes > _MAX_STAGE_BYTES:
        raise StageFileError(f"{STAGE_NAME} has {num_bytes} bytes; at most {_MAX_STAGE_BYTES} are read")


def _device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError as error:
        raise StageFileError(f"there is no device '{device}'") from error


# Weights


def _gather(stage: Stage, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a stage by name; a tied one may go by any of its names in `tensors`."""
    inputs = inputs_of(stage)
    weights: dict[str, torch.Tensor] = {}
    for slot_id, name in weight_names(stage).items():
        slot, fake = inputs.get(slot_id, (None, None))
        known = [alias for alias in (name, *(slot.aliases if slot is not None else ())) if alias in tensors]
        if not known:
            raise StageFileError(f"the stage reads '{name}', which is not among the tensors that were given")
        tensor = tensors[known[0]]
        if fake is not None and (fake.shape, fake.dtype) != (tensor.shape, tensor.dtype):
            raise StageFileError(
                f"'{name}' is {tensor.dtype} of {list(tensor.shape)}, but the stage was made for {fake.dtype} of "
                f"{list(fake.shape)}"
            )
        weights[name] = tensor
    return weights


def _placed(tensors: dict[str, torch.Tensor], weights: Mapping[str, Weight]) -> dict[str, torch.Tensor]:
    """Weights as they were: memory layout and device."""
    if tensors.keys() != weights.keys():
        odd = sorted(tensors.keys() ^ weights.keys())[0]
        raise StageFileError(f"weight '{shown(odd)}' is in only one of {STAGE_NAME} and {_WEIGHTS_NAME}")
    for name, weight in weights.items():
        if (tensors[name].dtype, tuple(tensors[name].shape)) != (weight.dtype, weight.shape):
            raise StageFileError(f"weight '{shown(name)}' is of another shape or type than {STAGE_NAME} says")
    try:
        return {name: _laid_out(tensors[name], weight) for name, weight in weights.items()}
    except (RuntimeError, AssertionError) as error:  # torch has no such device
        raise StageFileError(f"the weights cannot be put where the stage was: {shown(str(error))}") from error


def _laid_out(tensor: torch.Tensor, weight: Weight) -> torch.Tensor:
    if tensor.stride() != weight.strides and tensor.numel() > 0:
        tensor = torch.empty_strided(weight.shape, weight.strides, dtype=weight.dtype).copy_(tensor)
    return tensor.to(weight.device)


# Folders


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name and give it its own when it is complete."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Renames reach the disk with their folder; not every system lets one open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
