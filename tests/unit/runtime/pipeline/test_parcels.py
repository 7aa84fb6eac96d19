"""Tensors that were bytes on the way are what they were: values, dtype and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wholestep.runtime.pipeline.parcels import Form, Parcel

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def bits(tensor: Tensor) -> list[int]:
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return plain.copy_(tensor.reshape(-1)).view(torch.uint8).tolist()


def delivered(values: dict[str, Tensor], forms: dict[str, Form] | None = None) -> dict[str, Tensor]:
    parcel = Parcel(forms or {name: Form.of(value) for name, value in values.items()}, CPU)
    data = parcel.pack(values)
    arriving = parcel.empty()
    assert data.is_contiguous()
    assert arriving.is_contiguous()
    assert data.nbytes == parcel.num_bytes == arriving.nbytes
    arriving.reshape(-1).view(torch.uint8).copy_(data.reshape(-1).view(torch.uint8))
    return dict(parcel.unpack(arriving))


def assert_same(found: Tensor, wanted: Tensor, stride: tuple[int, ...] | None = None) -> None:
    assert found.dtype is wanted.dtype
    assert found.shape == wanted.shape
    assert found.stride() == (wanted.stride() if stride is None else stride)
    assert bits(found) == bits(wanted)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, with dimensions cut, skipped over, permuted and repeated."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 2
    tensor = (
        numbers.to(dtype) if dtype is torch.bool else (numbers + torch.arange(numbers.numel()).view(shape)).to(dtype)
    )
    for dim, size in enumerate(shape):
        step = draw(st.integers(1, 2))
        tensor = tensor[(*[slice(None)] * dim, slice(draw(st.integers(0, size)), None, step))]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    return tensor


@given(st.lists(tensors(), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_whatever_is_sent_arrives(several: list[Tensor]) -> None:
    values = {f"v{index}": tensor for index, tensor in enumerate(several)}
    found = delivered(values)
    assert list(found) == list(values)
    for name, tensor in values.items():
        assert_same(found[name], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6).unfold(0, 3, 1),
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.randn(1, dtype=torch.complex64).conj().imag,
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.randn(5, requires_grad=True),
    ],
    ids=["channels last", "windows", "conjugated", "negated", "scalar", "empty", "parameter"],
)
def test_a_special_one_arrives(tensor: Tensor) -> None:
    found = delivered({"x": tensor})["x"]
    assert_same(found, tensor)
    assert not found.requires_grad


@pytest.mark.parametrize("form", [torch.empty(3, 4).t(), torch.empty(8, 3)[::2], torch.empty(1, 3).expand(4, 3)])
def test_strides_are_those_that_the_reader_expects(form: Tensor) -> None:
    value = torch.randn(1, 3).expand(4, 3) if form.stride(0) == 0 else torch.randn(4, 3)
    other = value.clone(memory_format=torch.contiguous_format)
    assert_same(delivered({"x": other}, {"x": Form.of(form)})["x"], value, form.stride())


def test_memory_without_gaps_is_sent_as_it_lies() -> None:
    value = torch.randn(3, 4).t()
    assert Parcel({"x": Form.of(value)}, CPU).pack({"x": value}).data_ptr() == value.data_ptr()


def test_what_is_repeated_travels_once() -> None:
    assert Parcel({"x": Form.of(torch.zeros(()).expand(1000, 1000))}, CPU).num_bytes == 4


def test_there_is_always_something_to_send() -> None:
    assert Parcel({"x": Form.of(torch.empty(0, 3))}, CPU).num_bytes == 1


def test_a_contiguous_form() -> None:
    assert Form.contiguous(torch.empty(3, 4).t()) == Form.of(torch.empty(4, 3))


@pytest.mark.parametrize("value", [3, torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_something_else_than_was_announced_is_not_sent(value: Any) -> None:
    with pytest.raises(AssertionError, match=r"^x "):
        Parcel({"x": Form.of(torch.zeros(2))}, CPU).pack({"x": value})
