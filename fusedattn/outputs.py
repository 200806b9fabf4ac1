"""Checks of tensors that a caller passes to be written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusedattn.errors import SpecError
from fusedattn.spec import dtype_word


def check_like(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """See that a tensor has the right shape, dtype and device.

    Args:
        name: The argument.
        tensor: What came.
        shape, dtype, device: What is right.

    Raises:
        SpecError: One of them differs.

    Example:
        >>> check_like("O", torch.empty(2, 3), (2, 4), torch.float32, torch.device("cpu"))
        Traceback (most recent call last):
        fusedattn.errors.SpecError: argument 'O': expected shape [2, 4], got shape [2, 3].
    """
    if tuple(tensor.shape) != tuple(shape):
        raise SpecError(name, f"shape {list(shape)}", f"shape {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise SpecError(name, f"dtype {dtype_word(dtype)}", dtype_word(tensor.dtype))
    if tensor.device != device:
        raise SpecError(name, f"a tensor on {device}", f"one on {tensor.device}", f"Move it with .to('{device}').")


def check_no_overlap(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """See that no written tensor shares an element with itself, with another, or with one that is read.

    Args:
        written: Argument names to tensors that will be written.
        read: Argument names to tensors that will be read.

    Raises:
        SpecError: Two of them overlap.

    Example:
        >>> x = torch.zeros(4)
        >>> check_no_overlap({"O": x[::2]}, {"QKV": x[1::2]})
        >>> check_no_overlap({"O": x[1:]}, {"QKV": x[:2]})
        Traceback (most recent call last):
        fusedattn.errors.SpecError: argument 'O': expected memory of its own, got elements shared with `QKV`. \
Pass a new tensor, or None.
    """
    done: dict[str, Tensor] = {}
    for name, tensor in written.items():
        for other_name, other in {**read, **done}.items():
            if _overlap(tensor, other):
                got = f"elements shared with `{other_name}`"
                raise SpecError(name, "memory of its own", got, "Pass a new tensor, or None.")
        if _overlaps_itself(tensor):
            got = f"strides {tensor.stride()} of shape {list(tensor.shape)}"
            raise SpecError(name, "one element of memory for each element", got, "Pass a new tensor, or None.")
        done[name] = tensor


def _overlaps_itself(tensor: Tensor) -> bool:
    extent = 1
    axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.numel() == 0:
        return False
    for stride, size in axes:
        if size > 1 and stride < extent:
            marks = torch.zeros(_extent(tensor), dtype=torch.bool)
            marks.as_strided(tensor.shape, tensor.stride()).fill_(True)
            return int(marks.sum()) < tensor.numel()
        extent += (size - 1) * stride
    return False


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device or a.is_meta:
        return False
    a_range, b_range = (range(x.data_ptr(), x.data_ptr() + _extent(x) * x.element_size()) for x in (a, b))
    if a_range.stop <= b_range.start or b_range.stop <= a_range.start:
        return False
    # The ranges meet, as those of two views of one packed tensor do: mark the units that one of them touches.
    first = min(a_range.start, b_range.start)
    unit = math.gcd(a.element_size(), b.element_size(), a_range.start - first, b_range.start - first)
    touched = torch.zeros((max(a_range.stop, b_range.stop) - first) // unit, dtype=torch.bool)
    _units_of(a, touched, a_range.start - first, unit).fill_(True)
    return bool(_units_of(b, touched, b_range.start - first, unit).any())


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last, both included."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _units_of(tensor: Tensor, marks: Tensor, offset_bytes: int, unit: int) -> Tensor:
    size = tensor.element_size() // unit
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return marks.as_strided((*tensor.shape, size), strides, offset_bytes // unit)
