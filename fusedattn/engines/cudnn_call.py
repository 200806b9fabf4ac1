"""One direction of one call as graphs see it: tensors by role, lengths, and parts that are graphs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.cache import on_clear
from fusedattn.engines.base import Problem
from fusedattn.engines.cudnn_buckets import batch_bucket, seqlen_buckets, tokens_bucket
from fusedattn.engines.cudnn_key import Role, SdpaKey, TensorKey
from fusedattn.engines.cudnn_lengths import DeviceLengths, DeviceSide, ragged_offsets
from fusedattn.engines.cudnn_operands import dense_key, ragged_key
from fusedattn.enums import Direction, NVTE_Mask_Type
from fusedattn.spec import dtype_word
from fusedattn.target import DeviceTarget

# One object for each key, since to look an equal one up takes longer: all their fields are compared.
_KEYS: dict[SdpaKey, SdpaKey] = {}
_KEYS_CAPACITY = 4096
on_clear(_KEYS.clear)

_KV_SIDE = frozenset({Role.K, Role.V, Role.DK, Role.DV})
# Their first axis is T in ragged calls.
_ROWS_FIRST = frozenset(Role) - {Role.BIAS, Role.DBIAS}


def _tokens_floor(tokens: int) -> int:
    """The largest power of 2 that is not above T."""
    return 1 << tokens.bit_length() - 1


class Part(NamedTuple):
    """Some of the sequences and heads of a call.

    Attributes:
        batches, heads: Which.
        batch: Sequences of the graph, at least those of ``batches``.
        number: Of the part, from 0.
    """

    batches: range
    heads: range
    batch: int
    number: int


class Sizes(NamedTuple):
    """Sizes that the graphs of a call are declared with.

    Attributes:
        batch: Sequences.
        max_seqlen_q, max_seqlen_kv: Sq and Skv.
        bucketed: Whether ``batch`` is a bucket, so that parts of it are, too.
    """

    batch: int
    max_seqlen_q: int
    max_seqlen_kv: int
    bucketed: bool

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """Those of a problem, by the rule of ``cudnn_buckets``."""
        batch, q, kv = problem.lengths.batch, problem.lengths.q.max_seqlen, problem.lengths.kv.max_seqlen
        if not problem.spec.format.ragged or (problem.bias is not None and problem.bias.shape[0] > 1):
            return cls(batch, q, kv, False)
        return cls(batch_bucket(batch), *((q, kv) if problem.bias is not None else seqlen_buckets(q, kv)), True)


class Call(NamedTuple):
    """One direction of a call.

    Attributes:
        problem: What is computed.
        target: Where.
        direction: Forward or backward.
        sizes: Sizes of its graphs.
        tensors: By role, whole, as logical views; STATS is lse's shape, or ``[b, H, s]`` where ragged calls want it so.
        lengths: None where every sequence is full and no padding mask is wanted.
        compact_dq: Whether a part writes its DQ into a tensor of its own heads without gaps.
    """

    problem: Problem
    target: DeviceTarget
    direction: Direction
    sizes: Sizes
    tensors: dict[Role, Tensor]
    lengths: DeviceLengths | None
    compact_dq: bool = False

    def key(self, part: Part) -> SdpaKey:
        """The key of the graph of a part."""
        spec = self.problem.spec
        ragged, backward = spec.format.ragged, self.direction is Direction.backward
        ragged_stats = ragged and self.tensors[Role.STATS].dim() == 2
        key = SdpaKey(
            self.target,
            self.direction,
            tuple((role, self._declared(role, self.slice(role, part), part)) for role in sorted(self.tensors)),
            ragged=ragged,
            ragged_stats=ragged_stats,
            padding=self.lengths is not None,
            causal=spec.mask_type is NVTE_Mask_Type.NVTE_CAUSAL_MASK,
            dropout=self.problem.dropout,
            deterministic=backward and spec.deterministic,
            max_total_q=tokens_bucket(spec.rows_q) if ragged else 0,
            max_total_kv=tokens_bucket(spec.rows_kv) if ragged else 0,
        )
        if len(_KEYS) >= _KEYS_CAPACITY:
            _KEYS.clear()
        return _KEYS.setdefault(key, key)

    def slice(self, role: Role, part: Part) -> Tensor:
        """What a part sees of a tensor; of a compact DQ a stand-in without memory."""
        tensor = self.tensors[role]
        batches, heads = slice(part.batches.start, part.batches.stop), slice(part.heads.start, part.heads.stop)
        if role in (Role.BIAS, Role.DBIAS):
            tensor = tensor[batches] if tensor.shape[0] > 1 else tensor
            return tensor[:, heads] if tensor.shape[1] > 1 else tensor
        if not self.problem.spec.format.ragged:
            return tensor[batches, heads]
        if role is Role.STATS and tensor.dim() == 3:
            return tensor[part.batches.start : part.batches.start + part.batch, heads]
        if role is Role.DQ and self.compact_dq:
            return torch.empty(tensor.shape[0], len(part.heads), tensor.shape[2], dtype=tensor.dtype, device="meta")
        return tensor[:, heads]

    def _declared(self, role: Role, tensor: Tensor, part: Part) -> TensorKey:
        if role in (Role.BIAS, Role.DBIAS):
            return dense_key(tensor)
        ragged = self.problem.spec.format.ragged
        if role is Role.STATS and not (ragged and tensor.dim() == 2):
            batch, heads, rows = tensor.shape
            return TensorKey((batch, heads, rows, 1), (heads * rows, rows, 1, 1), dtype_word(tensor.dtype))
        if not ragged:
            return dense_key(tensor)
        rows = self.sizes.max_seqlen_kv if role in _KV_SIDE else self.sizes.max_seqlen_q
        return ragged_key(tensor if tensor.dim() == 3 else tensor[:, :, None], part.batch, rows)

    def signature(self) -> tuple[object, ...]:
        """What keys and cuts follow from: as the keys of all parts, but cheap. Of T only the powers of 2 around it."""
        spec = self.problem.spec
        rows: tuple[int, ...] = ()
        if spec.format.ragged:
            rows = tuple(bound for t in (spec.rows_q, spec.rows_kv) for bound in (tokens_bucket(t), _tokens_floor(t)))
        axis = 1 if spec.format.ragged else 0
        return (
            self.direction, self.sizes, self.problem.lengths.batch, self.lengths is None, self.problem.dropout,
            self.compact_dq,
            spec.mask_type, spec.deterministic, spec.bias_gradient, spec.dtype, rows,
            *[
                (role, t.shape[axis if role in _ROWS_FIRST else 0 :], t.stride(), t.dtype)
                for role, t in self.tensors.items()
            ],
        )  # fmt: skip

    def part_bytes(self, part: Part) -> int:
        """Bytes of a part's tensors, which its workspace is measured by; of T the power of 2 that is not above it."""
        problem = self.problem
        total = 0
        for role in self.tensors:
            tensor = self.slice(role, part)
            whole = tensor.numel() * tensor.element_size()
            if problem.spec.format.ragged and role in _ROWS_FIRST and not (role is Role.STATS and tensor.dim() == 3):
                side = problem.lengths.kv if role in _KV_SIDE else problem.lengths.q
                whole = whole // side.rows * min(_tokens_floor(side.rows), len(part.batches) * side.max_seqlen)
            total += whole
        return total

    def parts(self, batch: int, heads: int) -> Iterator[Part]:
        """The call in parts of ``batch`` sequences and ``heads`` heads; the last ones may be smaller."""
        number = 0
        for start in range(0, self.problem.lengths.batch, batch):
            batches = range(start, min(start + batch, self.problem.lengths.batch))
            for first in range(0, self.problem.spec.heads, heads):
                chosen = range(first, min(first + heads, self.problem.spec.heads))
                yield Part(batches, chosen, batch if self.sizes.bucketed else len(batches), number)
                number += 1

    def seq_len(self, side: DeviceSide, part: Part) -> Tensor:
        """int32 ``[part.batch]``: lengths of a part's sequences."""
        return side.seq_len[part.batches.start : part.batches.start + part.batch]

    def bound(self, key: SdpaKey, part: Part) -> dict[int, Tensor]:
        """The tensors of a part's graph by uid, but for the scale."""
        found: dict[int, Tensor] = {role: self.slice(role, part) for role in self.tensors}
        if self.lengths is not None:
            found[Role.SEQ_LEN_Q] = self.seq_len(self.lengths.q, part)
            found[Role.SEQ_LEN_KV] = self.seq_len(self.lengths.kv, part)
        if key.ragged:
            assert self.lengths is not None
            uids = key.ragged_uids
            start = part.batches.start
            for uid, offsets in zip(uids.values(), ragged_offsets(self.lengths, tuple(uids)), strict=True):
                found[uid] = offsets[start : start + part.batch + 1]
        return found


def finite(stats: Tensor, dead: Tensor) -> Tensor:
    """A copy of the log-sum-exp with 0 for rows that have none, since exp(-inf - -inf) is NaN."""
    return stats.masked_fill(dead, 0.0)


def padded_stats(stats: Tensor, starts: Tensor, rows: int) -> Tensor:
    """``[T, H]`` ragged to ``[b, H, rows]``; rows past a length hold those of other sequences, which are not read."""
    index = starts[:-1, None] + torch.arange(rows, device=stats.device)
    return stats[index.clamp_max(stats.shape[0] - 1)].transpose(1, 2).contiguous()
