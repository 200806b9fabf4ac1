"""One call of the torch engine: what all of its groups share, and how a group is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fusedattn.engines.base import Problem
from fusedattn.engines.dropout import DropoutPattern
from fusedattn.engines.torch_blocks import Group
from fusedattn.engines.torch_sequences import batch_index
from fusedattn.enums import NVTE_Bias_Type, NVTE_Mask_Type

# Elements of one operand in a step: bounds what a step copies and what the flash operators allocate for it.
STEP_ELEMENTS = 2**21


class Call:
    """A problem with its mask, bias and dropout decoded once.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ragged = problem.spec.format.ragged
        self.causal = problem.spec.mask_type is NVTE_Mask_Type.NVTE_CAUSAL_MASK
        self._pre_scale = problem.spec.bias_type is NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS
        self._pattern = None
        if problem.dropout > 0.0:
            assert problem.rng_state is not None
            self._pattern = DropoutPattern(problem.rng_state, problem.dropout)

    def group(self, q: Tensor, k: Tensor, v: Tensor, batches: Sequence[int]) -> Group:
        """Sequences, whose operands ``[n, H, S, D]`` are given, as a group without padding."""
        problem = self.problem
        bias = bias_of_group(problem.bias, batches, q.shape[2], k.shape[2])
        return Group(
            q=q,
            k=k,
            v=v,
            bias=bias,
            pre_scale=self._pre_scale,
            causal=self.causal,
            attn_scale=problem.attn_scale,
            dropout=problem.dropout,
            pattern=self._pattern,
            batches=batches,
            lengths_q=None,
            lengths_kv=None,
            exact=False,
        )


def bias_of_group(bias: Tensor | None, batches: Sequence[int], rows: int, keys: int) -> Tensor | None:
    """The part of a bias, or of its gradient, that sequences touch: a copy where each has its own and they are no
    neighbours, else a view."""
    if bias is None:
        return None
    part = bias[:, :, : rows if bias.shape[2] != 1 else 1, :keys]
    return part if bias.shape[0] == 1 else part[batch_index(batches)]


def bias_of_step(bias: Tensor | None, sequences: slice, heads: slice) -> Tensor | None:
    """The part of a group's bias, or of its gradient, that a step touches."""
    if bias is None:
        return None
    return bias[sequences if bias.shape[0] != 1 else slice(None), heads if bias.shape[1] != 1 else slice(None)]


def steps(group: Group) -> Iterator[tuple[Group, slice, slice]]:
    """Cut a group along sequences and heads so that a step's part of each tensor stays within ``STEP_ELEMENTS``.

    Args:
        group: The group.

    Returns:
        Groups with their slices of the sequences and heads. With dropout only sequences are cut: the pattern counts
        heads from 0, and ``torch_blocks`` bounds memory by itself.

    Raises:
        Nothing.
    """
    n, h, rows, head_dim = group.q.shape
    per_head = max(rows, group.k.shape[2]) * head_dim
    if group.bias is not None and group.bias.shape[1] != 1:
        # A step's part of the bias is converted as a whole.
        per_head = max(per_head, group.bias.shape[2] * group.bias.shape[3])
    h_step = h if group.dropout > 0.0 else max(1, min(h, STEP_ELEMENTS // per_head))
    n_step = max(1, STEP_ELEMENTS // (per_head * max(h, 1)))
    for i in range(0, n, n_step):
        for j in range(0, h, max(h_step, 1)):
            ns, hs = slice(i, min(n, i + n_step)), slice(j, min(h, j + h_step))
            q, k, v = (tensor[ns, hs] for tensor in (group.q, group.k, group.v))
            bias = bias_of_step(group.bias, ns, hs)
            yield group._replace(q=q, k=k, v=v, bias=bias, batches=group.batches[ns]), ns, hs
