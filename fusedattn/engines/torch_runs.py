"""Calls whose lengths can be seen: run by run, with torch's flash operators wherever they are right."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from fusedattn.engines.base import Gradients
from fusedattn.engines.torch_blocks import Group, backward_group, forward_group
from fusedattn.engines.torch_call import Call, bias_of_group, bias_of_step, steps
from fusedattn.engines.torch_flash import flash_backward, flash_forward
from fusedattn.engines.torch_math import INF, all_finite
from fusedattn.engines.torch_sequences import Run, RunRows, batch_index, fill_uncovered, runs


def _runs(call: Call) -> Iterator[tuple[Run, RunRows, RunRows]]:
    lengths = call.problem.lengths
    for run in runs(lengths):
        rows_q = RunRows(run.batches, run.length_q, lengths.q, call.ragged)
        yield run, rows_q, RunRows(run.batches, run.length_kv, lengths.kv, call.ragged)


def _group(call: Call, run: Run, rows_q: RunRows, rows_kv: RunRows) -> Group:
    problem = call.problem
    return call.group(rows_q.read(problem.q), rows_kv.read(problem.k), rows_kv.read(problem.v), run.batches)


def forward_runs(call: Call, out: Tensor, lse: Tensor) -> None:
    """Compute a call; see ``AttentionEngine.forward``."""
    side, ragged = call.problem.lengths.q, call.ragged
    fill_uncovered(out, side, ragged, 0.0)
    fill_uncovered(lse, side, ragged, -INF)
    for run, rows_q, rows_kv in _runs(call):
        if run.length_q == 0:
            continue
        if run.length_kv == 0:
            rows_q.fill(out, 0.0)
            rows_q.fill(lse, -INF)
            continue
        run_out, run_lse = rows_q.room(out), rows_q.room(lse)
        for group, ns, hs in steps(_group(call, run, rows_q, rows_kv)):
            _forward_step(group, run_out[ns, hs], run_lse[ns, hs])
        rows_q.write(out, run_out)
        rows_q.write(lse, run_lse)


def _forward_step(group: Group, out: Tensor, lse: Tensor) -> None:
    result = flash_forward(group) if group.dropout == 0.0 else None
    if result is not None:
        out.copy_(result[0])
        lse.copy_(result[1])
        return
    exact = not (all_finite(group.q, group.k, group.v) and math.isfinite(group.attn_scale))
    forward_group(group._replace(exact=exact), out, lse)
    if not exact and group.bias is not None and not all_finite(out, _live_lse(lse)):
        # A score may have overflown where the bias is -inf.
        forward_group(group._replace(exact=True), out, lse)


def _live_lse(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -INF, 0.0)


def backward_runs(
    call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
) -> None:
    """Differentiate a call; see ``AttentionEngine.backward``. ``gradients.bias`` is added to."""
    lengths, ragged = call.problem.lengths, call.ragged
    for gradient, side in ((gradients.q, lengths.q), (gradients.k, lengths.kv), (gradients.v, lengths.kv)):
        if gradient is not None:
            fill_uncovered(gradient, side, ragged, 0.0)
    for run, rows_q, rows_kv in _runs(call):
        rows = ((rows_q, gradients.q), (rows_kv, gradients.k), (rows_kv, gradients.v))
        asked = [(where, gradient) for where, gradient in rows if gradient is not None]
        if run.length_q == 0 or run.length_kv == 0:
            for where, gradient in asked:
                where.fill(gradient, 0.0)
            continue
        dq, dk, dv = (None if gradient is None else where.room(gradient) for where, gradient in rows)
        dbias = bias_of_group(gradients.bias, run.batches, run.length_q, run.length_kv)
        run_dlse = None if dlse is None else rows_q.read(dlse)
        run_dout, run_out, run_lse = (rows_q.read(tensor) for tensor in (dout, out, lse))
        for group, ns, hs in steps(_group(call, run, rows_q, rows_kv)):
            parts = Gradients(_step(dq, ns, hs), _step(dk, ns, hs), _step(dv, ns, hs), bias_of_step(dbias, ns, hs))
            given = run_dout[ns, hs], _step(run_dlse, ns, hs), run_out[ns, hs], run_lse[ns, hs]
            _backward_step(group, *given, parts)
        for (where, gradient), part in zip(rows, (dq, dk, dv), strict=True):
            if gradient is not None and part is not None:
                where.write(gradient, part)
        _write_bias(gradients.bias, dbias, run)


def _step(part: Tensor | None, ns: slice, hs: slice) -> Tensor | None:
    return None if part is None else part[ns, hs]


def _write_bias(target: Tensor | None, part: Tensor | None, run: Run) -> None:
    """Bring the sums of a run home where its sequences are no neighbours, so that ``part`` is a copy."""
    index = batch_index(run.batches)
    if target is not None and part is not None and target.shape[0] != 1 and isinstance(index, list):
        target[index, :, : part.shape[2], : part.shape[3]] = part


def _backward_step(
    group: Group, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
) -> None:
    plain = group.dropout == 0.0 and dlse is None and gradients.bias is None
    result = flash_backward(group, dout, out, lse) if plain else None
    if result is None:
        _backward_blocks(group, dout, dlse, lse, gradients)
        return
    for target, gradient in zip((gradients.q, gradients.k, gradients.v), result, strict=True):
        if target is not None:
            target.copy_(gradient)


def _backward_blocks(group: Group, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: Gradients) -> None:
    # A NaN of the bias or of the scale shows in lse, or leaves it -inf.
    given = (group.q, group.k, group.v, dout, _live_lse(lse), *(() if dlse is None else (dlse,)))
    exact = not (all_finite(*given) and math.isfinite(group.attn_scale))
    if exact or group.bias is None:
        backward_group(group._replace(exact=exact), dout, dlse, lse, gradients)
        return
    before = None if gradients.bias is None else gradients.bias.clone()
    backward_group(group, dout, dlse, lse, gradients)
    if all_finite(*(gradient for gradient in gradients if gradient is not None)):
        return
    # A product may have overflown where the bias is -inf.
    if gradients.bias is not None and before is not None:
        gradients.bias.copy_(before)
    backward_group(group._replace(exact=True), dout, dlse, lse, gradients)
