"""Calls whose lengths live on a device and are not read back: sequences padded to max_seqlen, under masks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedattn.engines.base import Gradients
from fusedattn.engines.torch_blocks import Group, backward_group, forward_group
from fusedattn.engines.torch_call import STEP_ELEMENTS, Call, bias_of_group
from fusedattn.engines.torch_math import INF
from fusedattn.lengths import Side


class PaddedSide:
    """Q's or K's and V's rows of a batch whose lengths are not read back: padded, with zeros where nothing lies.

    Args:
        side: The lengths, on the device.
        ragged: Whether tensors are ``[T, H, ...]``; else ``[B, H, S, ...]``.
        batch: B.
        device: Where the tensors are.

    Offsets clamp to ``[0, T]`` and lengths to ``[0, max_seqlen]``, so that bad values read and write no foreign memory.
    """

    def __init__(self, side: Side, ragged: bool, batch: int, device: torch.device) -> None:
        self._side, self._ragged = side, ragged
        self.lengths: Tensor | None = None
        if side.cu_seqlens is not None:
            offsets = side.cu_seqlens.to(torch.int64)
            self._starts = offsets[:-1].clamp(0, side.rows)
            lengths = (offsets[1:] - offsets[:-1]).clamp(0, side.max_seqlen)
            self.lengths = torch.minimum(lengths, side.rows - self._starts) if ragged else lengths
        self._positions = torch.arange(side.max_seqlen, device=device)
        if ragged and batch:
            self._locate_tokens(torch.arange(side.rows, device=device), batch)

    def _locate_tokens(self, tokens: Tensor, batch: int) -> None:
        assert self.lengths is not None
        ends = (self._starts + self.lengths).cummax(0).values
        self._batch_of = torch.searchsorted(ends, tokens, right=True).clamp(max=batch - 1)
        position = tokens - self._starts[self._batch_of]
        self._owned = (position >= 0) & (position < self.lengths[self._batch_of])
        self._position_of = position.clamp(0, max(self._side.max_seqlen - 1, 0))

    def gather(self, tensor: Tensor, first: int, count: int, padding: float = 0.0) -> Tensor:
        """Rows of the sequences ``first`` to ``first + count``: ``[count, H, max_seqlen, ...]``, and padding."""
        if not self._ragged:
            part = tensor[first : first + count]
        else:
            index = self._starts[first : first + count, None] + self._positions
            part = tensor[index.clamp(max=max(self._side.rows - 1, 0))].transpose(1, 2)
        if self.lengths is None:
            return part
        inside = self._positions < self.lengths[first : first + count, None]
        return part.masked_fill(~inside.view(count, 1, -1, *[1] * (part.dim() - 3)), padding)

    def scatter(self, padded: Tensor, target: Tensor, first: int, padding: float) -> None:
        """Write the rows of ``padded`` (as ``gather`` gives them) to where they belong; ``padding`` where no row is."""
        count = padded.shape[0]
        if not self._ragged:
            if self.lengths is not None:
                inside = self._positions < self.lengths[first : first + count, None]
                padded = padded.masked_fill(~inside.view(count, 1, -1, *[1] * (padded.dim() - 3)), padding)
            target[first : first + count] = padded
            return
        mine = self._owned & (self._batch_of >= first) & (self._batch_of < first + count)
        rows = padded.transpose(1, 2)[(self._batch_of - first).clamp(0, count - 1), self._position_of]
        shape = (-1, *[1] * (target.dim() - 1))
        if first == 0:
            target.fill_(padding)
        target.copy_(torch.where(mine.view(shape), rows.to(target.dtype), target))


class _Padded:
    """The padded steps of a call whose lengths are not read."""

    def __init__(self, call: Call) -> None:
        problem, self._call = call.problem, call
        ragged, batch, device = call.ragged, problem.lengths.batch, problem.q.device
        self.q = PaddedSide(problem.lengths.q, ragged, batch, device)
        self.kv = PaddedSide(problem.lengths.kv, ragged, batch, device)
        # Padded rows hold zeros; only a causal mask or a bias of -inf can rule out a key that is really there.
        self._exact = call.causal or problem.bias is not None

    def empty(self) -> bool:
        """Whether no pair of a query and a key exists."""
        problem = self._call.problem
        sides = (problem.lengths.q, problem.lengths.kv)
        return problem.lengths.batch == 0 or any(0 in (side.rows, side.max_seqlen) for side in sides)

    def groups(self) -> Iterator[tuple[Group, int, int]]:
        """Groups with their first sequence and their number of sequences."""
        problem, lengths = self._call.problem, self._call.problem.lengths
        heads, head_dim = problem.q.shape[1], problem.q.shape[-1]
        per_row = max(1, heads) * head_dim
        step = max(1, STEP_ELEMENTS // (per_row * max(lengths.q.max_seqlen, lengths.kv.max_seqlen)))
        for first in range(0, lengths.batch, step):
            count = min(step, lengths.batch - first)
            q = self.q.gather(problem.q, first, count)
            k, v = (self.kv.gather(tensor, first, count) for tensor in (problem.k, problem.v))
            group = self._call.group(q, k, v, range(first, first + count))._replace(
                lengths_q=_part(self.q.lengths, first, count),
                lengths_kv=_part(self.kv.lengths, first, count),
                exact=self._exact,
            )
            yield group, first, count


def _part(lengths: Tensor | None, first: int, count: int) -> Tensor | None:
    return None if lengths is None else lengths[first : first + count]


def forward_padded(call: Call, out: Tensor, lse: Tensor) -> None:
    """Compute a call; see ``AttentionEngine.forward``."""
    padded = _Padded(call)
    if padded.empty():
        out.zero_()
        lse.fill_(-INF)
        return
    for group, first, _ in padded.groups():
        group_out, group_lse = torch.empty_like(group.q), lse.new_empty(group.q.shape[:3])
        forward_group(group, group_out, group_lse)
        padded.q.scatter(group_out, out, first, 0.0)
        padded.q.scatter(group_lse, lse, first, -INF)


def backward_padded(
    call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
) -> None:
    """Differentiate a call; see ``AttentionEngine.backward``. ``gradients.bias`` is added to."""
    padded = _Padded(call)
    if padded.empty():
        for gradient in gradients[:3]:
            if gradient is not None:
                gradient.zero_()
        return
    sides = (padded.q, padded.kv, padded.kv)
    for group, first, count in padded.groups():
        parts = [
            None if target is None else torch.zeros_like(operand)
            for target, operand in zip(gradients[:3], (group.q, group.k, group.v), strict=True)
        ]
        bias = bias_of_group(gradients.bias, group.batches, group.q.shape[2], group.k.shape[2])
        dout_part, lse_part = padded.q.gather(dout, first, count), padded.q.gather(lse, first, count, -INF)
        dlse_part = None if dlse is None else padded.q.gather(dlse, first, count)
        backward_group(group, dout_part, dlse_part, lse_part, Gradients(parts[0], parts[1], parts[2], bias))
        for side, part, target in zip(sides, parts, gradients[:3], strict=True):
            if target is not None and part is not None:
                side.scatter(part, target, first, 0.0)
