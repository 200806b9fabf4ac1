"""A forward whose choices are made: of each further call of its signature only preparation and one run are left."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.counters import COUNTERS
from fusedattn.engines.base import Problem
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.cudnn_lengths import DeviceLengths, device_lengths, ragged_offsets, rows_without_key
from fusedattn.engines.cudnn_operands import host_scalar
from fusedattn.engines.cudnn_parts import Executor


class Prepared(NamedTuple):
    """What a run needs besides the caller's tensors.

    Attributes:
        lengths: See ``device_lengths``.
        offsets: Ragged offsets, in the order of the key's.
        dead: See ``rows_without_key``.
    """

    lengths: DeviceLengths | None
    offsets: list[Tensor]
    dead: Tensor | None


class BoundForward:
    """See the module.

    Args:
        batch: Sequences of the graph.
        key: The graph of a forward in one part, of tensors that need no copies and no bias but one as cuDNN takes it.
        executor: Who runs it.
    """

    def __init__(self, batch: int, key: SdpaKey, executor: Executor) -> None:
        self._key, self._executor, self._batch = key, executor, batch
        uids = executor.executable(key).uids
        self._size = len(uids)
        slot = {uid: index for index, uid in enumerate(uids)}
        self._q, self._k, self._v = slot[Role.Q], slot[Role.K], slot[Role.V]
        self._stats, self._scale = slot[Role.STATS], slot[Role.ATTN_SCALE]
        # These have a slot only in some graphs.
        self._bias, self._seed, self._offset = (slot.get(role, 0) for role in (Role.BIAS, Role.SEED, Role.OFFSET))
        self._seq_len_q, self._seq_len_kv = slot.get(Role.SEQ_LEN_Q, 0), slot.get(Role.SEQ_LEN_KV, 0)
        self._offsets = tuple(key.ragged_uids)
        self._ragged = tuple(slot[uid] for uid in key.ragged_uids.values())

    def __call__(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """Compute; see ``AttentionEngine.forward``."""
        prepared = self.prepare(problem)
        self.launch(problem, prepared, out, lse)
        self.clean(prepared, out, lse)

    def prepare(self, problem: Problem) -> Prepared:
        """Put the lengths where the graph looks for them; on a GPU every operator in here is a launch."""
        lengths = device_lengths(problem, self._batch)
        offsets = [] if lengths is None else ragged_offsets(lengths, self._offsets)
        return Prepared(lengths, offsets, rows_without_key(problem, problem.bias, lengths))

    def launch(self, problem: Problem, prepared: Prepared, out: Tensor, lse: Tensor) -> None:
        """Hand the tensors over to the executor."""
        tensors: list[Tensor] = [out] * self._size
        tensors[self._q], tensors[self._k], tensors[self._v] = problem.q, problem.k, problem.v
        tensors[self._stats], tensors[self._scale] = lse, host_scalar(problem.attn_scale)
        if problem.bias is not None:
            tensors[self._bias] = problem.bias
        if prepared.lengths is not None:
            tensors[self._seq_len_q] = prepared.lengths.q.seq_len
            tensors[self._seq_len_kv] = prepared.lengths.kv.seq_len
            for slot, offsets in zip(self._ragged, prepared.offsets, strict=True):
                tensors[slot] = offsets
        if problem.dropout:
            assert problem.rng_state is not None
            tensors[self._seed], tensors[self._offset] = problem.rng_state.unbind()
        executable = self._executor.executable(self._key)
        size = executable.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
        executable.run(tensors, workspace)
        COUNTERS["executions"] += 1

    def clean(self, prepared: Prepared, out: Tensor, lse: Tensor) -> None:
        """Write the rows that cuDNN does not, or not as they should be."""
        if prepared.dead is not None:
            lse.masked_fill_(prepared.dead, -torch.inf)
            out.masked_fill_(prepared.dead[..., None], 0.0)
