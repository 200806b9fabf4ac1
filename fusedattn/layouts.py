"""Layouts to logical views and back: which tensors a layout has, and where Q, K, V lie in them.

Logical views are ``[B, H, S, D]`` for dense formats and ``[T, H, D]`` for the ragged one; they share memory with the
tensors they are made from, so a result written into the view of a gradient lands in the packed buffer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fusedattn.enums import NVTE_QKV_Layout


class Layout(NamedTuple):
    """One layout.

    Attributes:
        format: ``thd``, ``bshd``, ``sbhd`` or ``bhsd``, the same for Q, K and V.
        operands: Names of the tensors a caller passes.
        packed: For each operand, the number of matrices along its packing axis 1 (1: there is no such axis).
        packing: Suffix of the functions that take this layout; empty for separate tensors.
    """

    format: str
    operands: tuple[str, ...]
    packed: tuple[int, ...]
    packing: str

    @property
    def ragged(self) -> bool:
        """Whether sequences lie behind each other on a token axis."""
        return self.format == "thd"


_SEPARATE = (("q", "k", "v"), (1, 1, 1), "")
LAYOUTS: dict[NVTE_QKV_Layout, Layout] = {
    NVTE_QKV_Layout.NVTE_T3HD: Layout("thd", ("qkv",), (3,), "qkvpacked"),
    NVTE_QKV_Layout.NVTE_THD_T2HD: Layout("thd", ("q", "kv"), (1, 2), "kvpacked"),
    NVTE_QKV_Layout.NVTE_THD_THD_THD: Layout("thd", *_SEPARATE),
    NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD: Layout("bshd", *_SEPARATE),
    NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD: Layout("sbhd", *_SEPARATE),
    NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD: Layout("bhsd", *_SEPARATE),
}


# None: as it is.
_PERMUTATIONS = {"thd": None, "sbhd": (1, 2, 0, 3), "bhsd": None}


def logical(format: str, tensor: Tensor) -> Tensor:
    """View a tensor of one format as ``[B, H, S, D]``, or ``[T, H, D]`` where the format is ``thd``.

    Args:
        format: ``thd``, ``bshd``, ``sbhd`` or ``bhsd``.
        tensor: ``[T, H, D]`` or rank 4 in that order of axes; any dtype and strides.

    Returns:
        A view of ``tensor``, or itself.

    Raises:
        KeyError: An unknown format.

    Example:
        >>> import torch
        >>> logical("sbhd", torch.empty(5, 2, 3, 4)).shape
        torch.Size([2, 3, 5, 4])
    """
    if format == "bshd":
        # Faster than permute, which counts where a call is all that the host does.
        return tensor.transpose(1, 2)
    permutation = _PERMUTATIONS[format]
    return tensor if permutation is None else tensor.permute(permutation)


def unpack(layout: Layout, operands: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Logical views of Q, K and V in a layout's operands.

    Args:
        layout: The layout.
        operands: One tensor for each of ``layout.operands``, packed ones ``[T, 3 | 2, H, D]``.

    Returns:
        Q, K and V: ``[T, H, D]`` in ragged layouts, ``[B, H, S, D]`` in dense ones.

    Raises:
        Nothing; shapes are checked by ``spec``.

    Example:
        >>> import torch
        >>> qkv = torch.arange(6).view(1, 3, 1, 2)
        >>> unpack(LAYOUTS[NVTE_QKV_Layout.NVTE_T3HD], (qkv,))[1].tolist()
        [[[2, 3]]]
    """
    if layout.packed == (3,):
        q, k, v = operands[0].unbind(1)
        return q, k, v
    if layout.packed == (1, 2):
        k, v = operands[1].unbind(1)
        return operands[0], k, v
    q, k, v = operands
    format = layout.format
    return logical(format, q), logical(format, k), logical(format, v)
