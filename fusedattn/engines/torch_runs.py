"""Calls whose lengths can be seen: run by run, with torch's flash operators wherever they are right."""

from __future__ import annotations

from torch import Tensor

from fusedattn.engines.base import Gradients
from fusedattn.engines.torch_blocks import Group, backward_group, forward_group
from fusedattn.engines.torch_call import Call, bias_of_group, bias_of_step, steps
from fusedattn.engines.torch_flash import flash_backward, flash_forward
from fusedattn.engines.torch_math import INF, all_finite
from fusedattn.engines.torch_sequences import Run, fill_uncovered, rows_of, runs


def forward_runs(call: Call, out: Tensor, lse: Tensor) -> None:
    """Compute a call; see ``AttentionEngine.forward``."""
    lengths, ragged = call.problem.lengths, call.ragged
    fill_uncovered(out, lengths.q, ragged, 0.0)
    fill_uncovered(lse, lengths.q, ragged, -INF)
    for run in runs(lengths, ragged):
        if run.length_q == 0:
            continue
        run_out, run_lse = (rows_of(tensor, run, run.start_q, run.length_q, ragged) for tensor in (out, lse))
        if run.length_kv == 0:
            run_out.zero_()
            run_lse.fill_(-INF)
            continue
        for group, ns, hs in steps(_group(call, run)):
            _forward_step(group, run_out[ns, hs], run_lse[ns, hs])


def _group(call: Call, run: Run) -> Group:
    problem, ragged = call.problem, call.ragged
    q = rows_of(problem.q, run, run.start_q, run.length_q, ragged)
    k, v = (rows_of(tensor, run, run.start_kv, run.length_kv, ragged) for tensor in (problem.k, problem.v))
    return call.group(q, k, v, run.batch)


def _forward_step(group: Group, out: Tensor, lse: Tensor) -> None:
    result = flash_forward(group) if group.dropout == 0.0 else None
    if result is None:
        forward_group(group._replace(exact=not all_finite(group.q, group.k, group.v)), out, lse)
        return
    out.copy_(result[0])
    lse.copy_(result[1])


def backward_runs(
    call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
) -> None:
    """Differentiate a call; see ``AttentionEngine.backward``. ``gradients.bias`` is added to."""
    lengths, ragged = call.problem.lengths, call.ragged
    for gradient, side in ((gradients.q, lengths.q), (gradients.k, lengths.kv), (gradients.v, lengths.kv)):
        if gradient is not None:
            fill_uncovered(gradient, side, ragged, 0.0)
    for run in runs(lengths, ragged):
        of_q = [_rows(tensor, run, run.start_q, run.length_q, ragged) for tensor in (dout, dlse, out, lse, gradients.q)]
        of_kv = [_rows(tensor, run, run.start_kv, run.length_kv, ragged) for tensor in (gradients.k, gradients.v)]
        if run.length_q == 0 or run.length_kv == 0:
            for gradient in (of_q[4], *of_kv):
                if gradient is not None:
                    gradient.zero_()
            continue
        dbias = bias_of_group(gradients.bias, run.batch, run.size, run.length_q, run.length_kv)
        for group, ns, hs in steps(_group(call, run)):
            run_dout, run_dlse, run_out, run_lse, dq = (None if t is None else t[ns, hs] for t in of_q)
            dk, dv = (None if t is None else t[ns, hs] for t in of_kv)
            assert run_dout is not None
            assert run_out is not None
            assert run_lse is not None
            parts = Gradients(dq, dk, dv, bias_of_step(dbias, ns, hs))
            _backward_step(group, run_dout, run_dlse, run_out, run_lse, parts)


def _rows(tensor: Tensor | None, run: Run, start: int, length: int, ragged: bool) -> Tensor | None:
    return None if tensor is None else rows_of(tensor, run, start, length, ragged)


def _backward_step(
    group: Group, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
) -> None:
    plain = group.dropout == 0.0 and dlse is None and gradients.bias is None
    result = flash_backward(group, dout, out, lse) if plain else None
    if result is None:
        # A NaN of the bias or of the scale shows in lse.
        rows = (lse.masked_fill(lse == -INF, 0.0), *(() if dlse is None else (dlse,)))
        exact = not all_finite(group.q, group.k, group.v, dout, *rows)
        backward_group(group._replace(exact=exact), dout, dlse, lse, gradients)
        return
    for target, gradient in zip((gradients.q, gradients.k, gradients.v), result, strict=True):
        if target is not None:
            target.copy_(gradient)
