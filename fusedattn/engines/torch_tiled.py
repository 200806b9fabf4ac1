"""The torch engine: every problem on any device, in tiles, never the whole score matrix of a batch.

On CPU the sequences are cut into runs of equal lengths, so padding costs nothing, and torch's flash operators compute
them wherever they are right; ``torch_blocks`` does the rest: dropout, gradients of bias and lse, numbers that are not
finite. On other devices no length is read back: sequences are padded to max_seqlen under masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.engines.base import Gradients, Problem
from fusedattn.engines.torch_call import Call
from fusedattn.engines.torch_math import accumulation_dtype
from fusedattn.engines.torch_padded import backward_padded, forward_padded
from fusedattn.engines.torch_runs import backward_runs, forward_runs
from fusedattn.spec import AttentionSpec


class TorchEngine:
    """See the module; implements ``AttentionEngine``.

    Args:
        reads_lengths: Whether lengths may be looked at; None: on CPU tensors only.

    Example:
        >>> TorchEngine()._reads_lengths is None
        True
    """

    def __init__(self, reads_lengths: bool | None = None) -> None:
        self._reads_lengths = reads_lengths

    def workspace_bytes(self, spec: AttentionSpec) -> int:
        """0: scratch memory comes from torch's allocator."""
        return 0

    def forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """Compute attention; see ``AttentionEngine.forward``."""
        forward = forward_runs if self._reads(problem) else forward_padded
        forward(Call(problem), out, lse)

    def bind(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """None: there is no choice to be remembered."""

    def backward(
        self, problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        """Differentiate; see ``AttentionEngine.backward``."""
        dbias = _bias_sum(gradients.bias, problem)
        backward = backward_runs if self._reads(problem) else backward_padded
        backward(Call(problem), dout, dlse, out, lse, gradients._replace(bias=dbias))
        if gradients.bias is not None and dbias is not None and dbias is not gradients.bias:
            gradients.bias.copy_(dbias)

    def _reads(self, problem: Problem) -> bool:
        return problem.q.device.type == "cpu" if self._reads_lengths is None else self._reads_lengths


def _bias_sum(target: Tensor | None, problem: Problem) -> Tensor | None:
    """Where the bias gradient is summed: the target itself, or a copy in the accumulation dtype."""
    if target is None:
        return None
    dtype = accumulation_dtype(problem.q.dtype)
    return target.zero_() if target.dtype == dtype else torch.zeros_like(target, dtype=dtype)
