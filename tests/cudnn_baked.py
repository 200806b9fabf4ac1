"""Dims and strides as they stand in the kernel parameters of a compiled plan, which nothing checks on a GPU."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# In bytes, of a tensor's descriptor: rank and dims are its first numbers, strides follow at a fixed place.
_STRIDES_AT = 104
# A tile descriptor counts strides in these units, and does not name the innermost one, which is 1.
_TMA_UNIT_BYTES = 16


class Baked(NamedTuple):
    """What a kernel takes a tensor to be; strides of axes of size 1 have no meaning."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]


def baked_tensors(kernel: Mapping[str, Any], itemsize: int) -> Iterator[tuple[int, Baked]]:
    """Read the parameters of one kernel.

    Args:
        kernel: Of a plan's ``engine.payload.kernels``.
        itemsize: Bytes of an element of tensors that are read by tiles.

    Yields:
        The uid, and dims and strides of each tensor that has a descriptor, as ``(b, h, s, d)``; tensors of which the
        kernel is given an address alone are left out.

    Raises:
        Nothing.
    """
    parameters = kernel["kernelParams"]
    raw, offsets = base64.b64decode(parameters["rawData"]), parameters["offsets"]
    for offset, following in zip(offsets, [*offsets[1:], {}], strict=True):
        place, uid = offset["value"], offset.get("uid")
        if offset.get("update_as") == "tma_desc":
            words = struct.unpack_from("<16i", raw, place)
            s, h, b = (words[i] * _TMA_UNIT_BYTES // itemsize for i in (3, 4, 5))
            dims = tuple(words[i] + 1 for i in (11, 10, 9, 8))
            yield uid, Baked(dims, (b, h, s, 1))
        elif offset.get("update_as") == "pointer" and following == {"value": place + 8}:
            rank, *dims = struct.unpack_from("<5q", raw, place + 8)
            if rank == 4:
                yield uid, Baked(tuple(dims), struct.unpack_from("<4q", raw, place + 8 + _STRIDES_AT))
