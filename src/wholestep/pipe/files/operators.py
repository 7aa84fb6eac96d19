"""What a graph in a file may call: operators by their exact name in torch's registry, and a few functions of ours.

Names are looked up, never evaluated. Only operators of known namespaces are found, and such that compute: nothing that
reads or writes files, and nothing that exists in TorchScript only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep._strict_json import shown
from wholestep.errors import StageFileError
from wholestep.graph import rng_state

_NAMESPACES = frozenset({"aten", "prims", "wholestep"})
_NAME = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.((?!__)[A-Za-z_]\w*)", re.ASCII)
# Maps a file of anybody's choice into memory, and makes it if there is none.
_NEVER = frozenset({"from_file"})

_OWN: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "wholestep.mkldnn_rnn_layer_in_training": _torch.mkldnn_rnn_layer_in_training,
    "wholestep.rng_state": rng_state,
}
_OWN_NAMES = {function: name for name, function in _OWN.items()}

_NUMBERS = (bool, int, float, complex)
_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor, *_NUMBERS),  # a number stands for a tensor without dimensions
    "number": _NUMBERS,
    "complex": _NUMBERS,
    "float": (bool, int, float),
    "int": (bool, int, torch.dtype, torch.layout, torch.memory_format),  # how schemas call the latter three
    "bool": (bool,),
    "str": (str,),
    "Device": (torch.device,),
}


def operator_name(target: Any, namespaces: Collection[str], where: str) -> str:
    """The name that `find_operator` finds a target by; raises `StageFileError` for what has no place in a file."""
    if target in _OWN_NAMES:
        return _OWN_NAMES[target]
    if not _torch.is_op_overload(target):
        raise StageFileError(
            f"{where} calls {_shown_target(target)}, which is Python code and no operator: a stage file holds no code"
        )
    find_operator(str(target), namespaces)
    return str(target)


def find_operator(name: str, namespaces: Collection[str]) -> Any:
    """An operator or a function of ours by name; `namespaces` are allowed beside torch's own."""
    if name in _OWN:
        return _OWN[name]
    match = _NAME.fullmatch(name)
    if match is None:
        raise StageFileError(f"'{shown(name)}' is no operator")
    namespace, packet, overload = match.groups()
    if namespace not in _NAMESPACES and namespace not in namespaces:
        raise StageFileError(
            f"'{shown(name)}' is an operator of neither torch nor Wholestep: if you trust it, allow it with "
            f"namespaces=['{shown(namespace)}']"
        )
    full_name = f"{namespace}::{packet}" + ("" if overload == "default" else f".{overload}")
    if packet in _NEVER or not _torch.is_registered(full_name):
        raise StageFileError(
            f"there is no operator '{shown(name)}' that may be in a stage file; import the library that registers it, "
            f"if it has one"
        )
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def check_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise `StageFileError` unless a call fits the operator's schema. Numbers and shapes are left to the operator."""
    if target is operator.getitem:
        is_right = len(args) == 2 and isinstance(args[0], fx.Node) and type(args[1]) is int and not kwargs
    elif target is rng_state:
        is_right = len(args) == 1 and not kwargs
    else:
        is_layer = target is _torch.mkldnn_rnn_layer_in_training
        is_right = _fits_schema(torch.ops.aten.mkldnn_rnn_layer.default if is_layer else target, args, kwargs)
    if not is_right:
        raise StageFileError(f"{where} gives '{target}' arguments that it does not take")


def _fits_schema(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    arguments = _torch.schema(target).arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        return False
    given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys() or not kwargs.keys() <= {argument.name for argument in arguments}:
        return False
    given |= kwargs
    return all(
        _fits(str(argument.type), given[argument.name]) if argument.name in given else argument.has_default_value()
        for argument in arguments
    )


def _fits(kind: str, value: Any) -> bool:
    """Whether a value is of a schema's type, such as `Optional[List[int]]`; a node is what its fake value is."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if kind.startswith("Optional["):
        return value is None or _fits(kind.removeprefix("Optional[")[:-1], value)
    if kind.startswith("List["):
        inner = kind.removeprefix("List[")[:-1]
        items = value if isinstance(value, (list, tuple)) else [value]  # one number may stand for a list of them
        return all(_fits(inner, item) for item in items) and (items is value or inner in ("int", "float", "bool"))
    return isinstance(value, _KINDS.get(kind, ()))


def _shown_target(target: Any) -> str:
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", None) or type(target).__name__
    return f"'{module}.{name}'"
