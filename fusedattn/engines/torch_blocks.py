"""A group of equally long sequences, computed block by block in plain torch: every feature, any device.

The blocks bound memory: no score tile is larger than ``TILE_ELEMENTS``, or 64 rows of one head where those are more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.engines.base import Gradients
from fusedattn.engines.dropout import TILE_Q, DropoutPattern
from fusedattn.engines.torch_math import (
    INF,
    accumulation_dtype,
    effective_bias,
    live_matmul,
    masked_scores,
    softmax_gradient,
    softmax_rows,
)

TILE_ELEMENTS = 2**19
# Under a causal mask shorter blocks skip more of what lies above the diagonal.
CAUSAL_ROWS = 2 * TILE_Q


class Group(NamedTuple):
    """Sequences of equal lengths.

    Attributes:
        q: ``[n, H, Sq, D]``; any strides, Sq at least 1.
        k, v: ``[n, H, Skv, D]``; any strides, Skv at least 1.
        bias: ``[1|n, 1|H, 1|Sq, Skv]`` or None.
        pre_scale: Whether the bias is added before scaling.
        causal: Whether query i sees keys 0 to i only.
        attn_scale: Factor of the scores.
        dropout: Probability.
        pattern: The keep masks, where dropout is above 0.
        batches: Indices of the sequences, which the pattern depends on.
        lengths_q, lengths_kv: Integer ``[n]`` on the device, or None: rows from there on are padding, and hold zeros.
        exact: Whether numbers that are not finite may lie at dead pairs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    pre_scale: bool
    causal: bool
    attn_scale: float
    dropout: float
    pattern: DropoutPattern | None
    batches: Sequence[int]
    lengths_q: Tensor | None
    lengths_kv: Tensor | None
    exact: bool


class _Block(NamedTuple):
    """Slices of one tile: sequences, heads, query rows, and the number of keys that those rows may see."""

    n: slice
    h: slice
    rows: slice
    keys: int


def _blocks(group: Group) -> Iterator[_Block]:
    n, h, rows, _ = group.q.shape
    keys = group.k.shape[2]
    row_step = min(rows, CAUSAL_ROWS) if group.causal else rows
    if row_step * keys > TILE_ELEMENTS:
        row_step = min(row_step, max(TILE_Q, TILE_ELEMENTS // keys // TILE_Q * TILE_Q))
    h_step = min(h, max(1, TILE_ELEMENTS // (row_step * keys)))
    n_step = max(1, TILE_ELEMENTS // (row_step * keys * h)) if h_step == h else 1
    for i in range(0, n, n_step):
        for j in range(0, h, h_step):
            for row in range(0, rows, row_step):
                end = min(rows, row + row_step)
                seen = min(keys, end) if group.causal else keys
                yield _Block(slice(i, min(n, i + n_step)), slice(j, min(h, j + h_step)), slice(row, end), seen)


def _bias_of(group: Group, block: _Block, dtype: torch.dtype) -> Tensor | None:
    if group.bias is None:
        return None
    part = group.bias[bias_index(group.bias, block.n, block.h, block.rows, block.keys)]
    return effective_bias(part, group.pre_scale, group.attn_scale, dtype)


def bias_index(bias: Tensor, n: slice, h: slice, rows: slice, keys: int) -> tuple[slice, slice, slice, slice]:
    """The part of a bias, or of its gradient, that a block touches; axes of size 1 are kept whole.

    Example:
        >>> torch.zeros(1, 4, 1, 9)[bias_index(torch.zeros(1, 4, 1, 9), slice(3, 5), slice(1, 3), slice(0, 7), 5)].shape
        torch.Size([1, 2, 1, 5])
    """
    parts = [slice(None) if size == 1 else part for size, part in zip(bias.shape, (n, h, rows), strict=False)]
    return parts[0], parts[1], parts[2], slice(0, keys)


def _live_of(group: Group, block: _Block, bias: Tensor | None) -> Tensor | None:
    """Which pairs of the block are live; None where all are and no number needs care."""
    causal = group.causal and block.keys > block.rows.start + 1
    if not (causal or group.exact or group.lengths_q is not None or group.lengths_kv is not None):
        return None
    device = group.q.device
    rows = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None]
    keys = torch.arange(block.keys, device=device)
    live = torch.ones_like(keys, dtype=torch.bool) if group.exact else None
    if causal:
        live = keys <= rows
    for lengths, positions in ((group.lengths_q, rows), (group.lengths_kv, keys)):
        if lengths is not None:
            inside = positions < lengths[block.n].view(-1, 1, 1, 1)
            live = inside if live is None else live & inside
    if group.exact and bias is not None:
        finite = bias != -INF
        live = finite if live is None else live & finite
    return live


def _scores(group: Group, block: _Block, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    bias = _bias_of(group, block, q.dtype)
    live = _live_of(group, block, bias)
    return masked_scores(q, k[:, :, : block.keys], group.attn_scale, bias, live), live


def _keep(group: Group, block: _Block) -> Tensor:
    assert group.pattern is not None
    return group.pattern.keep(
        group.batches[block.n], range(block.h.start, block.h.stop), range(block.rows.start, block.rows.stop), block.keys
    )


def _drop(weights: Tensor, keep: Tensor, dropout: float) -> Tensor:
    return weights.mul(keep).mul_(1.0 / (1.0 - dropout))


class _Operand:
    """Part of a tensor in the accumulation dtype, converted once for all row blocks that use it."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self._tensor, self._dtype = tensor, dtype
        self._key: tuple[slice, slice] | None = None
        self._part = tensor

    def part(self, block: _Block) -> Tensor:
        if self._key != (block.n, block.h):
            self._key, self._part = ((block.n, block.h), self._tensor[block.n, block.h].to(self._dtype).contiguous())
        return self._part


def forward_group(group: Group, out: Tensor, lse: Tensor) -> None:
    """Compute one group.

    Args:
        group: The sequences.
        out: ``[n, H, Sq, D]``, written; any strides and floating dtype.
        lse: ``[n, H, Sq]``, written.

    Returns:
        None.

    Raises:
        Nothing.
    """
    dtype = accumulation_dtype(group.q.dtype)
    k, v = _Operand(group.k, dtype), _Operand(group.v, dtype)
    for block in _blocks(group):
        q = group.q[block.n, block.h, block.rows].to(dtype)
        scores, live = _scores(group, block, q, k.part(block))
        weights, sums, row_lse = softmax_rows(scores)
        if group.exact and live is not None:
            live = live & (row_lse != -INF)[..., None]
            weights = weights.masked_fill_(~live, 0.0)
        if group.dropout > 0.0:
            weights = _drop(weights, _keep(group, block), group.dropout)
        rows = live_matmul(weights, v.part(block)[:, :, : block.keys], live if group.exact else None)
        out[block.n, block.h, block.rows] = rows.div_(sums[..., None])
        lse[block.n, block.h, block.rows] = row_lse


def backward_group(group: Group, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: Gradients) -> None:
    """Differentiate one group.

    The softmax is computed anew and its gradient summed from the weights, as eager torch does: exp(score - lse) and
    sum(dout * out) instead would err with the size of lse.

    Args:
        group: The sequences.
        dout: ``[n, H, Sq, D]``, gradient of the output.
        dlse: ``[n, H, Sq]``, gradient of the log-sum-exp, or None: zero.
        lse: ``[n, H, Sq]`` as the forward wrote it; only -inf matters, the mark of a row with nothing to attend to.
        gradients: ``q``, ``k``, ``v`` shaped like the group's, written; ``bias`` shaped like the group's bias in the
            accumulation dtype, added to.

    Returns:
        None.

    Raises:
        Nothing.
    """
    dtype = accumulation_dtype(group.q.dtype)
    k, v = _Operand(group.k, dtype), _Operand(group.v, dtype)
    dk, dv = (None if part is None else _Accumulator(part, dtype) for part in (gradients.k, gradients.v))
    for block in _blocks(group):
        where = block.n, block.h, block.rows
        dead = _dead_rows(lse[where])
        q, drow = _without(dead, group.q[where].to(dtype)), _without(dead, dout[where].to(dtype))
        scores, live = _scores(group, block, q, k.part(block))
        weights = _without(dead, torch.softmax(scores, -1))
        if group.exact:
            assert live is not None
            live = (live if dead is None else live & ~dead).expand_as(weights)
            weights = weights.masked_fill_(~live, 0.0)
        exact_live = live if group.exact else None
        transposed = None if exact_live is None else exact_live.transpose(-1, -2)
        keep = _keep(group, block) if group.dropout > 0.0 else None
        dropped = weights if keep is None else _drop(weights, keep, group.dropout)
        if dv is not None:
            dv.add(block, live_matmul(dropped.transpose(-1, -2), drow, transposed))
        if dk is None and gradients.q is None and gradients.bias is None:
            continue
        dweights = torch.matmul(drow, v.part(block)[:, :, : block.keys].transpose(-1, -2))
        if keep is not None:
            dweights = _drop(dweights, keep, group.dropout)
        drow_lse = None if dlse is None else _without(dead, dlse[where][..., None])
        dscores = softmax_gradient(weights, dweights, drow_lse, live, group.exact)
        # Scaled before the products where the scale may be NaN, else after them, which is cheaper.
        scaled, factor = dscores, group.attn_scale
        if exact_live is not None:
            scaled, factor = (dscores * group.attn_scale).masked_fill_(~exact_live, 0.0), 1.0
        if gradients.bias is not None:
            _add_bias_gradient(gradients.bias, block, scaled * factor if group.pre_scale else dscores)
        if gradients.q is not None:
            gradients.q[where] = live_matmul(scaled, k.part(block)[:, :, : block.keys], exact_live).mul_(factor)
        if dk is not None:
            dk.add(block, live_matmul(scaled.transpose(-1, -2), q, transposed).mul_(factor))
    for accumulator in (dk, dv):
        if accumulator is not None:
            accumulator.flush()


def _dead_rows(lse: Tensor) -> Tensor | None:
    """Which rows have nothing to attend to, ``[..., R, 1]``; None where it can be seen that none is so."""
    dead = (lse == -INF)[..., None]
    return None if dead.device.type == "cpu" and not bool(dead.any()) else dead


def _without(dead: Tensor | None, rows: Tensor) -> Tensor:
    """Rows with zeros where they are dead: those give nothing back, whatever their output gradient holds."""
    return rows if dead is None else rows.masked_fill(dead, 0.0)


class _Accumulator:
    """Sums the row blocks of a key-side gradient in the accumulation dtype, then writes each part once."""

    def __init__(self, target: Tensor, dtype: torch.dtype) -> None:
        self._target, self._dtype = target, dtype
        self._key: tuple[slice, slice] | None = None
        self._sum = target

    def add(self, block: _Block, rows: Tensor) -> None:
        if self._key != (block.n, block.h):
            self.flush()
            self._key, part = (block.n, block.h), self._target[block.n, block.h]
            if rows.shape == part.shape:
                self._sum = rows
                return
            self._sum = torch.zeros_like(part, dtype=self._dtype)
        self._sum[:, :, : block.keys] += rows

    def flush(self) -> None:
        if self._key is not None:
            self._target[self._key] = self._sum


def _add_bias_gradient(target: Tensor, block: _Block, dscores: Tensor) -> None:
    part = target[bias_index(target, block.n, block.h, block.rows, block.keys)]
    summed = [axis for axis in range(3) if part.shape[axis] != dscores.shape[axis]]
    part.add_(dscores.sum(summed, keepdim=True) if summed else dscores)
