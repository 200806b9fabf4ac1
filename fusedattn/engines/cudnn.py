"""The cuDNN engine: float16 and bfloat16 problems as cached operation graphs, without reading lengths back."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.engines.base import Gradients, Problem
from fusedattn.engines.cudnn_bound import BoundForward
from fusedattn.engines.cudnn_buckets import tokens_bucket
from fusedattn.engines.cudnn_call import Call, Sizes, finite, padded_stats
from fusedattn.engines.cudnn_key import Role
from fusedattn.engines.cudnn_lengths import (
    DeviceLengths,
    device_lengths,
    full_side,
    has_full_sequences,
    rows_outside,
    rows_without_key,
)
from fusedattn.engines.cudnn_operands import (
    ALIGNMENT_BYTES,
    contiguous,
    effective_bias,
    fits,
    has_effective_bias,
    host_scalar,
    readable,
    without_memory,
    writable,
    write_back,
)
from fusedattn.engines.cudnn_parts import Executor, Launcher
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Direction, NVTE_Bias_Type
from fusedattn.settings import settings
from fusedattn.spec import AttentionSpec
from fusedattn.target import DeviceTarget

_QKV = (Role.Q, Role.K, Role.V)
# Backward graphs of these read ragged statistics; the others want them padded.
_RAGGED_STATS_MAJORS = (9, 10)
# Ragged backward graphs of this one want a Q, and a bias, without gaps.
_GAPLESS_MAJOR = 12


class CudnnEngine:
    """See the module; implements ``AttentionEngine``.

    Args:
        target: The GPU that problems are on.
        executor: Who runs its graphs.
    """

    def __init__(self, target: DeviceTarget, executor: Executor) -> None:
        self._target = target
        self._launcher = Launcher(executor)

    def workspace_bytes(self, spec: AttentionSpec) -> int:
        """0: scratch memory comes from torch's allocator."""
        return 0

    def forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """Compute attention; see ``AttentionEngine.forward``."""
        if _is_empty(problem):
            out.zero_()
            lse.fill_(-torch.inf)
            return
        sizes = Sizes.of(problem)
        bias = effective_bias(problem)
        lengths = device_lengths(problem, sizes.batch)
        written, stats = writable(out), lse.contiguous()
        call = self._forward_call(problem, sizes, _operands(problem), bias, lengths, written, stats)
        pair = (lambda: (call, self._backward_twin(call))) if problem.dropout else None
        self._launcher.run(call, pair, host_scalar(problem.attn_scale))
        dead = rows_without_key(problem, bias, lengths)
        if dead is not None:
            stats.masked_fill_(dead, -torch.inf)
            written.masked_fill_(dead[..., None], 0.0)
        write_back(out, written)
        write_back(lse, stats)

    def bind(self, problem: Problem, out: Tensor, lse: Tensor) -> BoundForward | None:
        """What ``forward`` comes to for calls like this one, which was computed before; None where it is not plain.

        Args:
            problem, out, lse: As in ``forward``.

        Returns:
            Does the same for other values and addresses, if operands lie as much on 16-byte boundaries as these.

        Raises:
            Nothing.
        """
        plain = all(map(fits, (problem.q, problem.k, problem.v, out))) and lse.is_contiguous()
        if _is_empty(problem) or not plain or not has_effective_bias(problem):
            return None
        sizes = Sizes.of(problem)
        lengths = device_lengths(problem, sizes.batch)
        call = self._forward_call(problem, sizes, _operands(problem), problem.bias, lengths, out, lse)
        key = self._launcher.key_in_one_part(call)
        return None if key is None else BoundForward(call.sizes.batch, key, self._launcher.executor)

    def backward(
        self, problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        """Differentiate; see ``AttentionEngine.backward``."""
        if _is_empty(problem):
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
            return
        sizes = Sizes.of(problem)
        bias = effective_bias(problem)
        lengths = device_lengths(problem, sizes.batch) or self._full(problem)
        written = self._gradient_buffers(problem, gradients)
        # Minus infinity stands in exactly the rows that had nothing to attend to.
        dead = lse == -torch.inf
        if bias is not None:
            # Times a row's zero weights, what is not finite here would be NaN.
            dout = dout.masked_fill(dead[..., None], 0.0)
        stats = finite(lse, dead).contiguous()
        if self._pads_stats(problem):
            assert lengths is not None
            assert lengths.q.starts is not None
            stats = padded_stats(stats, lengths.q.starts, sizes.max_seqlen_q)
        call = self._backward_call(problem, sizes, _operands(problem), bias, lengths, out, dout, stats, written)
        pair = (lambda: self._pair_of(call)) if problem.dropout else None
        self._launcher.run(call, pair, host_scalar(problem.attn_scale))
        self._clean(problem, dead, lengths, written)
        _deliver(problem, written, gradients)
        if dlse is not None:
            _add_lse_gradients(problem, dlse, out, lse, gradients)

    def _forward_call(
        self,
        problem: Problem,
        sizes: Sizes,
        operands: dict[Role, Tensor],
        bias: Tensor | None,
        lengths: DeviceLengths | None,
        out: Tensor,
        stats: Tensor,
    ) -> Call:
        tensors = {**operands, Role.OUT: out, Role.STATS: stats} | ({} if bias is None else {Role.BIAS: bias})
        return Call(problem, self._target, Direction.forward, sizes, tensors, lengths)

    def _backward_call(
        self,
        problem: Problem,
        sizes: Sizes,
        operands: dict[Role, Tensor],
        bias: Tensor | None,
        lengths: DeviceLengths | None,
        out: Tensor,
        dout: Tensor,
        stats: Tensor,
        gradients: dict[Role, Tensor],
    ) -> Call:
        if problem.spec.format.ragged and self._target.compute_capability[0] == _GAPLESS_MAJOR:
            operands = operands | {Role.Q: contiguous(operands[Role.Q])}
            bias = None if bias is None else contiguous(bias)
        tensors = {**operands, Role.OUT: readable(out), Role.DOUT: readable(dout), Role.STATS: stats, **gradients}
        if bias is not None:
            tensors[Role.BIAS] = bias
        compact = self._wants_compact_dq(problem, gradients[Role.DQ])
        return Call(problem, self._target, Direction.backward, sizes, tensors, lengths, compact)

    def _wants_compact_dq(self, problem: Problem, dq: Tensor) -> bool:
        """Whether the workspace would pass its bound for the gaps in DQ, or for its heads.

        Kernels that read ragged statistics add DQ up in float32, over as many tokens as there may be, strides included.
        """
        if not problem.spec.format.ragged or self._pads_stats(problem):
            return False
        summed_bytes = 4 * tokens_bucket(problem.spec.rows_q) * dq.stride(0)
        return summed_bytes > settings().workspace_limit_bytes

    def _backward_twin(self, forward: Call) -> Call:
        """The backward that a forward may be followed by, as far as its plan goes; its tensors are of no use."""
        problem, tensors = forward.problem, _without_memory(forward)
        gradients = {role: tensors[of] for role, of in zip((Role.DQ, Role.DK, Role.DV), _QKV, strict=True)}
        bias = tensors.get(Role.BIAS)
        if bias is not None and problem.spec.bias_gradient:
            gradients[Role.DBIAS] = torch.empty_like(bias, dtype=problem.q.dtype, device="meta")
        lengths = forward.lengths or self._full(problem)
        operands, out, stats = {role: tensors[role] for role in _QKV}, tensors[Role.OUT], tensors[Role.STATS]
        if self._pads_stats(problem):
            stats = stats.new_empty(forward.sizes.batch, stats.shape[1], forward.sizes.max_seqlen_q)
        return self._backward_call(problem, forward.sizes, operands, bias, lengths, out, out, stats, gradients)

    def _pair_of(self, backward: Call) -> tuple[Call, Call]:
        """A backward's forward, and the backward that it was cut with, which may be asked for more than this one."""
        forward = self._forward_twin(backward)
        return forward, self._backward_twin(forward)

    def _forward_twin(self, backward: Call) -> Call:
        problem, tensors = backward.problem, _without_memory(backward)
        ragged = problem.spec.format.ragged
        lengths = None if has_full_sequences(problem) else backward.lengths
        stats = tensors[Role.STATS]
        if ragged and stats.dim() == 3:
            stats = torch.empty(problem.q.shape[:2], dtype=stats.dtype, device="meta")
        operands = {role: tensors[role] for role in _QKV}
        bias, out = tensors.get(Role.BIAS), tensors[Role.OUT]
        return self._forward_call(problem, backward.sizes, operands, bias, lengths, out, stats)

    def _pads_stats(self, problem: Problem) -> bool:
        return problem.spec.format.ragged and self._target.compute_capability[0] not in _RAGGED_STATS_MAJORS

    def _full(self, problem: Problem) -> DeviceLengths | None:
        """Full lengths where a backward wants a padding mask without need.

        On Hopper, kernels without one return NaN for some Skv and very negative log-sum-exps.
        """
        if self._target.compute_capability[0] != 9:
            return None
        q, kv, device = problem.lengths.q, problem.lengths.kv, problem.q.device
        batch = problem.lengths.batch
        return DeviceLengths(full_side(batch, q.max_seqlen, device), full_side(batch, kv.max_seqlen, device))

    def _gradient_buffers(self, problem: Problem, gradients: Gradients) -> dict[Role, Tensor]:
        """What cuDNN writes: the gradients themselves where it can, else tensors in their places."""
        found: dict[Role, Tensor] = {}
        wanted = zip((Role.DQ, Role.DK, Role.DV), gradients[:3], (problem.q, problem.k, problem.v), strict=True)
        for role, gradient, like in wanted:
            found[role] = like.new_empty(like.shape) if gradient is None else writable(gradient)
        if gradients.bias is not None:
            target = gradients.bias
            aligned = target.data_ptr() % ALIGNMENT_BYTES == 0
            direct = target.dtype == problem.q.dtype and target.stride(3) == 1 and 0 not in target.stride() and aligned
            found[Role.DBIAS] = target if direct else problem.q.new_empty(target.shape)
        return found

    def _clean(
        self, problem: Problem, dead: Tensor, lengths: DeviceLengths | None, written: dict[Role, Tensor]
    ) -> None:
        """Zero the gradients of rows outside sequences."""
        sides = problem.lengths.q, problem.lengths.kv
        padded = any(side.cu_seqlens is not None for side in sides)
        if padded or problem.bias is not None:
            written[Role.DQ].masked_fill_(dead[..., None], 0.0)
        if not padded:
            return
        assert lengths is not None
        outside = rows_outside(lengths.kv, lengths.q, problem.lengths.kv.rows)
        mask = outside[:, None, None] if problem.spec.format.ragged else outside[:, None, :, None]
        for role in (Role.DK, Role.DV):
            written[role].masked_fill_(mask, 0.0)


def _without_memory(call: Call) -> dict[Role, Tensor]:
    return {role: without_memory(tensor) for role, tensor in call.tensors.items()}


def _is_empty(problem: Problem) -> bool:
    lengths = problem.lengths
    sides = (problem.q.numel(), problem.k.numel(), lengths.batch, lengths.q.max_seqlen, lengths.kv.max_seqlen)
    return 0 in sides


def _operands(problem: Problem) -> dict[Role, Tensor]:
    return {role: readable(tensor) for role, tensor in zip(_QKV, (problem.q, problem.k, problem.v), strict=True)}


def _deliver(problem: Problem, written: dict[Role, Tensor], gradients: Gradients) -> None:
    for role, gradient in zip((Role.DQ, Role.DK, Role.DV), gradients[:3], strict=True):
        if gradient is not None:
            write_back(gradient, written[role])
    if gradients.bias is None:
        return
    dbias = written[Role.DBIAS]
    if problem.spec.bias_type is NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        torch.mul(dbias, problem.attn_scale, out=gradients.bias)
    else:
        write_back(gradients.bias, dbias)


def _add_lse_gradients(problem: Problem, dlse: Tensor, out: Tensor, lse: Tensor, gradients: Gradients) -> None:
    """Add what flows back through the log-sum-exp, which cuDNN does not differentiate and dropout does not touch."""
    more = Gradients(*(None if gradient is None else torch.empty_like(gradient) for gradient in gradients))
    without = problem._replace(dropout=0.0)
    TorchEngine(reads_lengths=False).backward(without, torch.zeros_like(out), dlse, out, lse, more)
    for gradient, extra in zip(gradients, more, strict=True):
        if gradient is not None and extra is not None:
            gradient.add_(extra)
