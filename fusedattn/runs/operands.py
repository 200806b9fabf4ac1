"""Operands of a problem together with the lengths that describe them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fusedattn.runs.fields import RAGGED


@dataclass(frozen=True)
class Operands:
    """q, k, v as a layout packs them.

    Attributes:
        layout: Word of the layout.
        tensors: `(qkv,)`, `(q, kv)` or `(q, k, v)`.
        lengths_q: Length of each sequence of queries.
        lengths_kv: The same of keys.
        max_q: Sq of a bias; the axis of q in the dense layouts.
        max_kv: Skv of a bias; the axis of k and v in the dense layouts.
    """

    layout: str
    tensors: tuple[Tensor, ...]
    lengths_q: list[int]
    lengths_kv: list[int]
    max_q: int
    max_kv: int

    @property
    def ragged(self) -> bool:
        """Whether tokens of all sequences lie behind each other on one axis."""
        return self.layout in RAGGED

    @property
    def dtype(self) -> torch.dtype:
        """Data type of q, k, v."""
        return self.tensors[0].dtype

    @property
    def out_shape(self) -> torch.Size:
        """Shape of out: that of q, in its layout."""
        q = self.tensors[0]
        return q[:, 0].shape if self.layout == "t3hd" else q.shape

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of out without layout: `[T, H, D]`, or `[B, S, H, D]` in the dense layouts."""
        return tuple(from_layout(torch.empty(self.out_shape, device="meta"), self.layout).shape)

    def unowned(self) -> Tensor:
        """Rows of queries that no sequence owns: bool `[T]`, or `[B, Sq]` in the dense layouts."""
        return unowned_rows(self.lengths_q, self.token_shape, self.ragged)


def to_layout(x: Tensor, layout: str) -> Tensor:
    """`[T, H, ...]` or `[B, S, H, ...]` in the order of a layout's axes, contiguous.

    >>> to_layout(torch.empty(2, 5, 3, 4), "sbhd_sbhd_sbhd").shape
    torch.Size([5, 2, 3, 4])
    """
    axes = {"sbhd_sbhd_sbhd": (0, 1), "bhsd_bhsd_bhsd": (1, 2)}.get(layout)
    return x.contiguous() if axes is None else x.transpose(*axes).contiguous()


def from_layout(x: Tensor, layout: str) -> Tensor:
    """The view of a layout's tensor as `[T, H, ...]` or `[B, S, H, ...]`.

    >>> from_layout(torch.empty(5, 2, 3, 4), "sbhd_sbhd_sbhd").shape
    torch.Size([2, 5, 3, 4])
    """
    axes = {"sbhd_sbhd_sbhd": (0, 1), "bhsd_bhsd_bhsd": (1, 2)}.get(layout)
    return x if axes is None else x.transpose(*axes)


def unowned_rows(lengths: list[int], shape: tuple[int, ...], ragged: bool) -> Tensor:
    """Rows that no sequence owns: a tail of `[T, ...]`, or what lies past each length in `[B, S, ...]`.

    >>> unowned_rows([1, 2], (2, 3), ragged=False).int().tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    if ragged:
        return torch.arange(shape[0]) >= sum(lengths)
    return torch.arange(shape[1]) >= torch.tensor(lengths)[:, None]


def cumulative(lengths: list[int]) -> Tensor:
    """Cumulative lengths, int32 `[B + 1]`.

    >>> cumulative([3, 0, 2]).tolist()
    [0, 3, 3, 5]
    """
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
