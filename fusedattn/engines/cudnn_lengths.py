"""Lengths and offsets on the device, from cu_seqlens that are never read back; bad ones are clamped, not believed.

Every torch operator here is a launch of its own on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.engines.base import Problem
from fusedattn.engines.cudnn_key import RaggedOffsets
from fusedattn.enums import NVTE_Mask_Type
from fusedattn.lengths import Side


class DeviceSide(NamedTuple):
    """The sequences of one side, for a graph of ``b`` of them.

    Attributes:
        seq_len: int32 ``[b]``, at most the side's ``max_seqlen``; 0 past the batch.
        starts: int64 ``[b + 1]`` within ``[0, T]``, never decreasing; None in dense layouts.
    """

    seq_len: Tensor
    starts: Tensor | None


class DeviceLengths(NamedTuple):
    """Both sides; the same object twice where K and V have Q's sequences."""

    q: DeviceSide
    kv: DeviceSide


def device_lengths(problem: Problem, batch: int) -> DeviceLengths | None:
    """The lengths of a call.

    Args:
        problem: The call.
        batch: Sequences of the graph, at least the problem's own.

    Returns:
        The lengths, or None where every sequence of a dense layout is full.

    Raises:
        Nothing.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 9, 5], dtype=torch.int32)
        >>> _side(Side(cu_seqlens, None, 3, 6), 3, 4, True, cu_seqlens.device)
        DeviceSide(seq_len=tensor([2, 3, 0, 0], dtype=torch.int32), starts=tensor([0, 2, 6, 6, 6]))
    """
    lengths = problem.lengths
    if has_full_sequences(problem):
        return None
    ragged = problem.spec.format.ragged
    device = problem.q.device
    q = _side(lengths.q, lengths.batch, batch, ragged, device)
    same = lengths.kv is lengths.q or (
        lengths.kv.cu_seqlens is lengths.q.cu_seqlens and lengths.kv[2:] == lengths.q[2:]
    )
    return DeviceLengths(q, q if same else _side(lengths.kv, lengths.batch, batch, ragged, device))


def has_full_sequences(problem: Problem) -> bool:
    """Whether every sequence fills its row of a dense layout."""
    return problem.lengths.q.cu_seqlens is None and problem.lengths.kv.cu_seqlens is None


def full_side(batch: int, rows: int, device: torch.device) -> DeviceSide:
    """A dense side whose sequences are all full."""
    return DeviceSide(torch.full((batch,), rows, dtype=torch.int32, device=device), None)


def _side(side: Side, batch: int, padded: int, ragged: bool, device: torch.device) -> DeviceSide:
    if side.cu_seqlens is None:
        return full_side(batch, side.rows, device)
    cu_seqlens = side.cu_seqlens
    if not ragged:
        return DeviceSide(cu_seqlens.diff().clamp_(0, side.max_seqlen), None)
    starts = cu_seqlens.to(torch.int64).clamp(0, side.rows).cummax(0).values
    if padded > batch:
        starts = torch.cat([starts, starts[-1:].expand(padded - batch)])
    # The type changes on the way out, since a conversion would be a launch more.
    seq_len = torch.sub(starts[1:], starts[:-1], out=starts.new_empty(starts.shape[0] - 1, dtype=torch.int32))
    return DeviceSide(seq_len.clamp_max_(side.max_seqlen), starts)


def ragged_offsets(lengths: DeviceLengths, needed: tuple[RaggedOffsets, ...]) -> list[Tensor]:
    """Offsets in elements: int64 ``[b + 1]`` for each that is needed; the same tensor for those that are equal."""
    found: dict[tuple[bool, int], Tensor] = {}
    same = lengths.kv is lengths.q
    keys = [(offsets.kv and not same, offsets.token_stride) for offsets in needed]
    for kv, stride in keys:
        if (kv, stride) not in found:
            starts = (lengths.kv if kv else lengths.q).starts
            assert starts is not None
            found[kv, stride] = starts * stride
    return [found[key] for key in keys]


def rows_outside(side: DeviceSide, other: DeviceSide, rows: int) -> Tensor:
    """The rows of a side that are in no sequence, or in one that has no row of the other side.

    Args:
        side, other: The side, and the one that it attends to or that attends to it.
        rows: T ragged, S dense.

    Returns:
        bool, ``[B, S]`` dense or ``[T]`` ragged.

    Raises:
        Nothing.

    Example:
        >>> lens = torch.tensor([2, 1], dtype=torch.int32)
        >>> rows_outside(DeviceSide(lens, None), DeviceSide(lens - 1, None), 3).tolist()
        [[False, False, True], [True, True, True]]
        >>> side = DeviceSide(lens, torch.tensor([1, 4, 5]))
        >>> rows_outside(side, side, 6).tolist()
        [True, False, False, True, False, True]
    """
    live = side.seq_len if other is side else side.seq_len * (other.seq_len > 0)
    index = torch.arange(rows, device=live.device)
    if side.starts is None:
        return index >= live[:, None]
    starts = side.starts[:-1]
    # As many sequences have ended by then as have begun; neither starts nor ends ever decrease.
    begun, ended = (torch.searchsorted(offsets, index, right=True) for offsets in (starts, starts + live))
    return begun == ended


def rows_without_key(problem: Problem, bias: Tensor | None, lengths: DeviceLengths | None) -> Tensor | None:
    """The query rows that are outside sequences, have no key, or see only keys whose bias is -inf.

    Args:
        problem: The call.
        bias: What ``effective_bias`` made, or None.
        lengths: What ``device_lengths`` made, or None.

    Returns:
        bool that broadcasts to lse, ``[B, H, S]`` dense or ``[T, H]`` ragged; None where there can be no such row.

    Raises:
        Nothing.
    """
    rows = problem.lengths.q.rows
    ragged = problem.spec.format.ragged
    outside = None if lengths is None else rows_outside(lengths.q, lengths.kv, rows).unsqueeze(1)
    if bias is None:
        return outside
    first = _first_live_key(bias)
    if ragged:
        assert lengths is not None
        assert lengths.q.starts is not None
        # Rows outside sequences take any place that exists; they are dead already.
        index = torch.arange(rows, device=bias.device)
        sequence = torch.searchsorted(lengths.q.starts[1:-1], index, right=True)
        position = index - lengths.q.starts[sequence]
        limit = _keys_in_sight(problem, lengths.kv.seq_len[sequence].long(), position)
        sequence, position = sequence.clamp_max(bias.shape[0] - 1), position.clamp(0, bias.shape[2] - 1)
        blind = first[sequence, :, position] >= limit[:, None]
    else:
        position = torch.arange(rows, device=bias.device)[None]
        if lengths is None:
            limit = torch.full((1, 1), problem.lengths.kv.max_seqlen, device=bias.device)
        else:
            limit = lengths.kv.seq_len[:, None].long()
        blind = first >= _keys_in_sight(problem, limit, position)[:, None, :]
    return blind if outside is None else blind | outside


def _first_live_key(bias: Tensor) -> Tensor:
    """int64 ``[1|B, 1|H, 1|Sq]``: the first key whose bias is not -inf; Skv where there is none."""
    live = bias != -torch.inf
    return torch.where(live.any(-1), live.to(torch.uint8).argmax(-1), bias.shape[-1])


def _keys_in_sight(problem: Problem, limit: Tensor, position: Tensor) -> Tensor:
    """How many keys from 0 a row sees through lengths and mask.

    Args:
        problem: Has the mask.
        limit: int64: how many its sequence has.
        position: int64: the row's place in its sequence.

    Returns:
        int64 that broadcasts like the two.
    """
    if problem.spec.mask_type is NVTE_Mask_Type.NVTE_CAUSAL_MASK:
        return torch.minimum(limit, position + 1)
    return limit
