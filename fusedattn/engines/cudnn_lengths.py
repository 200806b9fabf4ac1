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
        starts: int32 ``[b + 1]`` within ``[0, T]``, never decreasing; None in dense layouts.
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
        >>> _side(Side(cu_seqlens, None, 4, 6), 3, 4, True, cu_seqlens.device)
        DeviceSide(seq_len=tensor([2, 4, 0, 0], dtype=torch.int32), starts=tensor([0, 2, 6, 6, 6], dtype=torch.int32))
    """
    lengths = problem.lengths
    if has_full_sequences(problem):
        return None
    ragged = problem.spec.format.ragged
    device = problem.q.device
    q = _side(lengths.q, lengths.batch, batch, ragged, device)
    same = lengths.kv.cu_seqlens is lengths.q.cu_seqlens and lengths.kv[2:] == lengths.q[2:]
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
    if ragged:
        cu_seqlens = cu_seqlens.clamp(0, side.rows).cummax(0).values
        if padded > batch:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(padded - batch)])
    return DeviceSide(cu_seqlens.diff().clamp_(0, side.max_seqlen), cu_seqlens if ragged else None)


def ragged_offsets(lengths: DeviceLengths, needed: tuple[RaggedOffsets, ...]) -> list[Tensor]:
    """Offsets in elements: int64 ``[b + 1]`` for each that is needed."""
    found: list[Tensor] = []
    for offsets in needed:
        starts = (lengths.kv if offsets.kv else lengths.q).starts
        assert starts is not None
        found.append(starts.to(torch.int64) * offsets.token_stride)
    return found


class Rows(NamedTuple):
    """Where the rows of one side belong.

    Attributes:
        outside: bool, ``[B, S]`` dense or ``[T]`` ragged: in no sequence, or in one that has no row of the other side.
        sequence, position: int64 like ``outside``: the row's sequence (b where it has none), and its place in it; None
            in dense layouts, where both are axes.
    """

    outside: Tensor
    sequence: Tensor | None
    position: Tensor | None


def rows_of(side: DeviceSide, other: DeviceSide, rows: int) -> Rows:
    """Place the rows of a side.

    Args:
        side, other: The side, and the one that it attends to or that attends to it.
        rows: T ragged, S dense.

    Returns:
        See ``Rows``.

    Raises:
        Nothing.

    Example:
        >>> lens = torch.tensor([2, 1], dtype=torch.int32)
        >>> rows_of(DeviceSide(lens, None), DeviceSide(lens - 1, None), 3).outside.tolist()
        [[False, False, True], [True, True, True]]
    """
    live = side.seq_len if other is side else side.seq_len * (other.seq_len > 0)
    index = torch.arange(rows, device=live.device)
    if side.starts is None:
        return Rows(index >= live[:, None], None, None)
    sequence = torch.searchsorted(side.starts[1:], index, right=True)
    position = index - side.starts[sequence]
    # Rows past the last sequence have the number of sequences for theirs.
    live = torch.nn.functional.pad(live, (0, 1))
    # Rows before the first offset, where that is not 0 as it should be, are in no sequence either.
    return Rows((position < 0) | (position >= live[sequence]), sequence, position)


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
    rows = None if lengths is None else rows_of(lengths.q, lengths.kv, problem.lengths.q.rows)
    ragged = problem.spec.format.ragged
    outside = None if rows is None else rows.outside[:, None] if ragged else rows.outside[:, None, :]
    if bias is None:
        return outside
    first = _first_live_key(bias)
    limit = _keys_in_sight(problem, lengths, rows)
    if ragged:
        assert rows is not None
        assert rows.sequence is not None
        assert rows.position is not None
        # Rows outside sequences take any place that exists; they are dead already.
        sequence = rows.sequence.clamp_max(bias.shape[0] - 1)
        position = rows.position.clamp(0, bias.shape[2] - 1)
        blind = first[sequence, :, position] >= limit[:, None]
    else:
        blind = first >= limit[:, None, :]
    return blind if outside is None else blind | outside


def _first_live_key(bias: Tensor) -> Tensor:
    """int64 ``[1|B, 1|H, 1|Sq]``: the first key whose bias is not -inf; Skv where there is none."""
    live = bias != -torch.inf
    return torch.where(live.any(-1), live.to(torch.uint8).argmax(-1), bias.shape[-1])


def _keys_in_sight(problem: Problem, lengths: DeviceLengths | None, rows: Rows | None) -> Tensor:
    """int64, ``[1|B, 1|Sq]`` dense or ``[T]`` ragged: how many keys from 0 a row sees through lengths and mask."""
    device = problem.q.device
    if rows is not None and rows.sequence is not None:
        assert lengths is not None
        assert rows.position is not None
        limit = torch.nn.functional.pad(lengths.kv.seq_len, (0, 1))[rows.sequence].long()
        position = rows.position
    else:
        if lengths is None:
            limit = torch.full((1, 1), problem.lengths.kv.max_seqlen, device=device)
        else:
            limit = lengths.kv.seq_len[:, None].long()
        position = torch.arange(problem.lengths.q.rows, device=device)[None]
    if problem.spec.mask_type is NVTE_Mask_Type.NVTE_CAUSAL_MASK:
        return torch.minimum(limit, position + 1)
    return limit
