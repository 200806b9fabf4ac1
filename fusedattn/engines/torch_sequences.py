"""The sequences of a problem whose lengths can be seen, as runs of equal lengths that are views."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

from fusedattn.lengths import Lengths, Side


class Run(NamedTuple):
    """Neighbouring sequences of equal lengths.

    Attributes:
        batch: Index of the first.
        size: How many.
        start_q, start_kv: Row of the first one in ragged tensors; 0 in dense ones.
        length_q, length_kv: Rows of each.
    """

    batch: int
    size: int
    start_q: int
    start_kv: int
    length_q: int
    length_kv: int


def runs(lengths: Lengths, ragged: bool) -> Iterator[Run]:
    """Cut a batch, whose lengths can be seen, into runs.

    Args:
        lengths: The lengths.
        ragged: Whether sequences lie behind each other.

    Returns:
        The runs in order; empty sequences are among them.

    Raises:
        Nothing.

    Example:
        >>> side = Side(None, (0, 3, 6, 8), 3, 8)
        >>> [(run.size, run.length_q) for run in runs(Lengths(3, side, side), True)]
        [(2, 3), (1, 2)]
    """
    sizes = zip(_lengths(lengths.q, lengths.batch), _lengths(lengths.kv, lengths.batch), strict=True)
    batch = 0
    for (length_q, length_kv), members in groupby(sizes):
        count = sum(1 for _ in members)
        start_q, start_kv = (_start(side, batch) if ragged else 0 for side in (lengths.q, lengths.kv))
        yield Run(batch, count, start_q, start_kv, length_q, length_kv)
        batch += count


def _lengths(side: Side, batch: int) -> list[int]:
    if side.offsets is None:
        return [side.rows] * batch
    return [end - start for start, end in pairwise(side.offsets)]


def _start(side: Side, batch: int) -> int:
    assert side.offsets is not None
    return side.offsets[batch]


def rows_of(tensor: Tensor, run: Run, start: int, length: int, ragged: bool) -> Tensor:
    """The rows of a run.

    Args:
        tensor: ``[T, H, ...]`` ragged or ``[B, H, S, ...]`` dense.
        run: The sequences.
        start, length: The run's own for the side (q or kv) of ``tensor``.
        ragged: Which of the two.

    Returns:
        View ``[run.size, H, length, ...]``.

    Raises:
        Nothing.

    Example:
        >>> import torch
        >>> rows_of(torch.arange(8).view(8, 1), Run(0, 2, 0, 0, 3, 3), 0, 3, True).tolist()
        [[[0, 1, 2]], [[3, 4, 5]]]
    """
    if not ragged:
        return tensor[run.batch : run.batch + run.size, :, :length]
    part = tensor[start : start + run.size * length]
    return part.view(run.size, length, *tensor.shape[1:]).transpose(1, 2)


def fill_uncovered(tensor: Tensor, side: Side, ragged: bool, value: float) -> None:
    """Fill the rows that no sequence owns, and only those.

    Args:
        tensor: ``[T, H, ...]`` ragged or ``[B, H, S, ...]`` dense; written.
        side: Whose lengths, which can be seen.
        ragged: Which of the two.
        value: What to fill with.

    Returns:
        None.

    Raises:
        Nothing.
    """
    if side.offsets is None:
        return
    if ragged:
        tensor[side.offsets[-1] :] = value
        return
    for index, length in enumerate(_lengths(side, tensor.shape[0])):
        if length < side.rows:
            tensor[index, :, length:] = value
