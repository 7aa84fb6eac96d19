"""What NumPy's functions may be called after the graph has run, and what is known of their results before.

A function is tried out on samples: arrays of the same form with other content. Of those named here the form of the
result depends on the forms of what they are given, and on nothing else; of the others (`np.unique`) it is found in this
call's values, and whoever asks for it has it looked at again at each call.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_OF_FORMS_TEXT = """
    all allclose any amax amin argmax argmin argpartition argsort around array array2string array_equal array_split
    asanyarray asarray ascontiguousarray asfortranarray astype atleast_1d atleast_2d atleast_3d average block bool_
    broadcast_arrays broadcast_to choose clip column_stack concatenate conj conjugate convolve copy corrcoef correlate
    count_nonzero cov cross cummax cumprod cumsum diag diagonal diff digitize divmod dot dsplit dstack ediff1d einsum
    expand_dims fix flatten flip fliplr flipud full_like gradient histogram hsplit hstack i0 in1d inner interp isclose
    isin item kron lexsort max matmul mean median min moveaxis nan_to_num nanargmax nanargmin nanmax nanmean nanmedian
    nanmin nanpercentile nanprod nanquantile nanstd nansum nanvar norm ones_like outer pad partition percentile prod ptp
    quantile ravel real imag repeat reshape roll rollaxis rot90 round searchsorted sinc sort split squeeze stack std sum
    swapaxes take take_along_axis tensordot tile tolist trace transpose trapezoid tri tril triu unwrap var vdot view
    vsplit vstack where zeros_like det inv slogdet matrix_power multi_dot solve
"""
_OF_FORMS = frozenset(_OF_FORMS_TEXT.split())
"""Functions and methods whose result has a form that the forms of arguments decide."""
_OF_VALUES_TEXT = """
    argwhere bincount compress delete extract flatnonzero insert intersect1d nonzero setdiff1d setxor1d trim_zeros
    union1d unique unique_counts unique_inverse unique_values eig eigh eigvals eigvalsh svd qr cholesky lstsq pinv
    matrix_rank histogram2d histogramdd histogram_bin_edges polyfit polyval tobytes unravel_index
    ravel_multi_index indices cond
"""
_OF_VALUES = frozenset(_OF_VALUES_TEXT.split())
_IN_PLACE = frozenset(["sort", "partition", "fill", "put", "itemset"])
"""Methods that write to their array."""
_TOTAL = frozenset(["sum", "mean", "std", "var", "all", "any", "copy", "ravel", "flatten", "tolist"])
"""What goes well whatever is in an array that it goes well with once."""


def name_of_numpys(function: Any) -> str | None:
    """The name of a function of NumPy that computes and does nothing else; None for others."""
    if isinstance(function, np.ufunc):
        return "" if not function.__name__.endswith("(vectorized)") else None
    owner = getattr(function, "__self__", None)
    if isinstance(owner, np.ufunc):
        return "" if function.__name__ in ("reduce", "accumulate", "outer", "reduceat") else None
    if isinstance(function, type):
        return "" if issubclass(function, np.generic) and not issubclass(function, np.void) else None
    if not is_numpys(function):
        return None
    name = str(getattr(function, "__name__", ""))
    return name if name in _OF_FORMS or name in _OF_VALUES else None


def is_numpys(function: Any) -> bool:
    """Whether a function is one of NumPy's, but for draws and for methods."""
    if isinstance(function, np.ufunc) or (isinstance(function, type) and issubclass(function, np.generic)):
        return True
    module = str(getattr(function, "__module__", None) or "")
    is_one = isinstance(function, (types.FunctionType, types.BuiltinFunctionType)) or callable(function)
    return is_one and module.split(".")[0] == "numpy" and not module.startswith("numpy.random")


def is_of_forms(name: str) -> bool:
    """Whether the form of the result depends on forms alone."""
    return name == "" or name in _OF_FORMS


def is_known(name: str) -> bool:
    """Whether a method only computes."""
    return (name in _OF_FORMS or name in _OF_VALUES) and name not in _IN_PLACE


def is_in_place(name: str) -> bool:
    return name in _IN_PLACE


def never_raises(name: str) -> bool:
    """Whether a function or method goes well with all arrays of a form, if it does with one."""
    return name == "" or name in _TOTAL


def samples_of(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """Arrays that lie as a tensor does: of ones, and of numbers that are all others."""
    made: list[Any] = []
    for filling in (1, None):
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        if filling is None and tensor.numel():
            flat = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())  # pyright: ignore[reportArgumentType]
            flat.copy_(torch.arange(flat.numel()) % 3 - (0.5 if dtype.is_floating_point else 0))
        else:
            tensor.fill_(1)
        made.append(tensor.numpy())
    return made


def tried(call: Callable[[int], Any], num_samples: int) -> list[Any]:
    """What a call gives for samples; those for which it raises are left out."""
    found: list[Any] = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for index in range(num_samples):
            with contextlib.suppress(Exception):
                found.append(call(index))
    return found


def form_of(value: Any) -> Any:
    """What is asked of a value besides its content: types, shapes, lengths of tuples and lists, keys of dicts."""
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype, value.shape
    if type(value) in (list, tuple) or hasattr(value, "_fields"):
        return type(value), *map(form_of, value)
    if type(value) is dict:
        return dict, *((key, form_of(item)) for key, item in value.items())
    return type(value)


def arrays_in(value: Any) -> Iterator[Any]:
    """The arrays among the parts of a value; what stands in for one says that it is one."""
    if issubclass(type(value), np.ndarray):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(arrays_in, value))
