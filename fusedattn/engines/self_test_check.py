"""What is right for the small problem of a self-test, and whether an engine computes it.

What is right is computed on the CPU in float64, so that no precision mode of the GPU has a part in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedattn.engines.base import AttentionEngine
from fusedattn.engines.self_test_problem import DROPOUT, HEADS, SCALE, Canned, computed, kept


def expected(canned: Canned, keep: list[Tensor] | None) -> dict[str, Tensor]:
    """What is right.

    Args:
        canned: The problem.
        keep: What ``kept`` found.

    Returns:
        On the CPU, in float64, for both directions: what ``computed`` names, and "dbias" wherever there is a bias.

    Raises:
        Nothing.
    """
    problem, ragged = canned.problem, canned.family.ragged
    q, k, v, dout = (x.cpu().double() for x in (problem.q, problem.k, problem.v, canned.dout))
    bias = None if problem.bias is None else problem.bias.cpu().double()
    want = {"out": torch.zeros_like(q), "lse": torch.full(q.shape[:-1], -math.inf, dtype=torch.float64, device="cpu")}
    want |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    if bias is not None:
        want["dbias"] = torch.zeros_like(bias)
    for sequence in canned.sequences():
        rows, keys = sequence.length_q, sequence.length_kv
        if not (rows and keys):
            continue
        q_, dout_ = sequence.queries(q, ragged), sequence.queries(dout, ragged)
        k_, v_ = sequence.keys(k, ragged), sequence.keys(v, ragged)
        scores = SCALE * q_ @ k_.mT + (0.0 if bias is None else bias[0, :, :rows, :keys])
        if canned.family.causal:
            later = torch.ones(rows, keys, dtype=torch.bool, device="cpu").triu(1)
            scores = scores.masked_fill(later, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        factor = 1.0 if keep is None else keep[sequence.number].double() / (1.0 - DROPOUT)
        dweights = dout_ @ v_.mT * factor
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        sequence.queries(want["out"], ragged).copy_(weights * factor @ v_)
        sequence.queries(want["lse"], ragged).copy_(lse)
        sequence.queries(want["dq"], ragged).copy_(SCALE * dscores @ k_)
        sequence.keys(want["dk"], ragged).copy_(SCALE * dscores.mT @ q_)
        sequence.keys(want["dv"], ragged).copy_((weights * factor).mT @ dout_)
        if bias is not None:
            want["dbias"][0, :, :rows, :keys] += dscores
    return want


def difference(canned: Canned, engine: AttentionEngine) -> str | None:
    """Let an engine solve a canned problem, and compare.

    Args:
        canned: The problem.
        engine: The engine.

    Returns:
        None where all is right, else what differs: quantities, errors and tolerances, or how much dropout drops.

    Raises:
        Exception: Whatever the engine raises.
    """
    keep = kept(canned, engine)
    implausible = None if keep is None else _implausible(canned, keep)
    if implausible is not None:
        return implausible
    got, want = computed(canned, engine), expected(canned, keep)
    # Rounded results of sums of rounded terms; several times what is seen of an engine that is right.
    eps = 8 * torch.finfo(canned.family.dtype).eps
    faults = []
    for name, result in got.items():
        truth = want[name]
        tolerance = 1e-3 if name == "lse" else eps * float(truth.abs().max())
        same = result.double() == truth
        error = float(torch.where(same, 0.0, (result.double() - truth).abs()).nan_to_num(math.inf).max())
        if not error <= tolerance:
            faults.append(f"{name}: error {error:.1e} over {tolerance:.1e}")
    return "; ".join(faults) or None


def _implausible(canned: Canned, keep: list[Tensor]) -> str | None:
    live = 0
    for sequence in canned.sequences():
        rows, keys = sequence.length_q, sequence.length_kv
        live += HEADS * (sum(min(row + 1, keys) for row in range(rows)) if canned.family.causal else rows * keys)
    share = sum(int(x.sum()) for x in keep) / live
    # Ten standard deviations, at least.
    if abs(share - (1.0 - DROPOUT)) > 0.03:
        return f"dropout: {share:.3f} of the probabilities kept, expected {1.0 - DROPOUT:.3f}"
    return None
