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

_ALWAYS = (Role.Q, Role.K, Role.V, Role.OUT, Role.STATS)


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
        self._offsets = tuple(key.ragged_uids)
        lengths = (Role.SEQ_LEN_Q, Role.SEQ_LEN_KV) if key.padding else ()
        seeds = (Role.SEED, Role.OFFSET) if key.dropout else ()
        bias = (Role.BIAS,) if Role.BIAS in key else ()
        # The order in which ``launch`` lists the tensors.
        listed = (*_ALWAYS, *bias, *lengths, *seeds, Role.ATTN_SCALE, *key.ragged_uids.values())
        assert tuple(executor.executable(key).uids) == listed

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
        _, _, q, k, v, bias, attn_scale, dropout, rng_state = problem
        tensors = [q, k, v, out, lse]
        if bias is not None:
            tensors.append(bias)
        if prepared.lengths is not None:
            tensors += (prepared.lengths.q.seq_len, prepared.lengths.kv.seq_len)
        if dropout:
            assert rng_state is not None
            tensors += rng_state.unbind()
        tensors.append(host_scalar(attn_scale))
        tensors += prepared.offsets
        executable = self._executor.executable(self._key)
        size = executable.workspace_bytes
        workspace = out.new_empty(size, dtype=torch.uint8) if size else None
        executable.run(tensors, workspace)
        COUNTERS["executions"] += 1

    def clean(self, prepared: Prepared, out: Tensor, lse: Tensor) -> None:
        """Write the rows that cuDNN does not, or not as they should be."""
        if prepared.dead is not None:
            lse.masked_fill_(prepared.dead, -torch.inf)
            out.masked_fill_(prepared.dead[..., None], 0.0)
