"""The sequences of a problem whose lengths can be seen, as runs of equal lengths, and where their rows lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.lengths import Lengths, Side

# Sequences up to this long run together wherever they lie: copying their rows costs less than a call for each.
SHORT_ROWS = 128


class Run(NamedTuple):
    """Sequences of equal lengths.

    Attributes:
        batches: Their indices, in order.
        length_q, length_kv: Rows of each.
    """

    batches: tuple[int, ...]
    length_q: int
    length_kv: int


def runs(lengths: Lengths) -> Iterator[Run]:
    """Cut a batch, whose lengths can be seen, into runs: neighbours, and short sequences from anywhere.

    Args:
        lengths: The lengths.

    Returns:
        The runs; empty sequences are among them.

    Raises:
        Nothing.

    Example:
        >>> side = Side(None, (0, 3, 6, 8, 11), 3, 11)
        >>> [(run.batches, run.length_q) for run in runs(Lengths(4, side, side))]
        [((0, 1, 3), 3), ((2,), 2)]
    """
    sizes = list(zip(_lengths(lengths.q, lengths.batch), _lengths(lengths.kv, lengths.batch), strict=True))
    short: dict[tuple[int, int], list[int]] = {}
    for size, members in groupby(range(lengths.batch), key=sizes.__getitem__):
        if max(size) <= SHORT_ROWS:
            short.setdefault(size, []).extend(members)
        else:
            yield Run(tuple(members), *size)
    for size, batches in short.items():
        yield Run(tuple(batches), *size)


def _lengths(side: Side, batch: int) -> list[int]:
    if side.offsets is None:
        return [side.rows] * batch
    return [end - start for start, end in pairwise(side.offsets)]


def batch_index(batches: Sequence[int]) -> slice | list[int]:
    """An index of the batch axis: a slice, so a view, where the sequences are neighbours.

    Example:
        >>> batch_index((2, 3)), batch_index((0, 3))
        (slice(2, 4, None), [0, 3])
    """
    first, last = batches[0], batches[-1]
    return slice(first, last + 1) if last - first + 1 == len(batches) else list(batches)


class RunRows:
    """Where the rows of a run lie on one side, of Q or of K and V.

    Args:
        batches: The sequences, in order.
        length: Rows of each.
        side: The side's lengths.
        ragged: Whether tensors are ``[T, H, ...]``; else ``[B, H, S, ...]``.

    Example:
        >>> side = Side(None, (0, 3, 5, 8), 3, 8)
        >>> RunRows((0, 2), 3, side, True).read(torch.arange(8).view(8, 1)).tolist()
        [[[0, 1, 2]], [[5, 6, 7]]]
    """

    def __init__(self, batches: Sequence[int], length: int, side: Side, ragged: bool) -> None:
        self._shape, self._ragged = (len(batches), length), ragged
        self._batches = batch_index(batches)
        if ragged:
            assert side.offsets is not None
            self._start = side.offsets[batches[0]]
            if isinstance(self._batches, list):
                starts = torch.tensor([side.offsets[batch] for batch in batches])
                self._index = starts[:, None] + torch.arange(length)

    @property
    def is_view(self) -> bool:
        """Whether the rows are views, since the sequences are neighbours."""
        return isinstance(self._batches, slice)

    def read(self, tensor: Tensor) -> Tensor:
        """The rows ``[n, H, length, ...]``: a view, or a copy where the sequences are no neighbours."""
        size, length = self._shape
        if not self._ragged:
            return tensor[self._batches, :, :length]
        if not self.is_view:
            return tensor[self._index].transpose(1, 2)
        part = tensor[self._start : self._start + size * length]
        return part.view(size, length, *tensor.shape[1:]).transpose(1, 2)

    def room(self, tensor: Tensor) -> Tensor:
        """What to write the rows into, like ``read`` gives them but without their values; ``write`` brings it home."""
        if self.is_view:
            return self.read(tensor)
        size, length = self._shape
        return tensor.new_empty((size, tensor.shape[1], length, *tensor.shape[2 if self._ragged else 3 :]))

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Bring rows, which ``room`` gave, to where they belong in ``tensor``."""
        if self.is_view:
            return
        if self._ragged:
            tensor[self._index] = rows.transpose(1, 2)
        else:
            tensor[self._batches, :, : self._shape[1]] = rows

    def fill(self, tensor: Tensor, value: float) -> None:
        """Fill the rows."""
        rows = self.room(tensor)
        rows.fill_(value)
        self.write(tensor, rows)


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
