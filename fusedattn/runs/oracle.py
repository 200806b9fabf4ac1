"""The judge of the engines: one problem by an engine, by the float64 reference and by eager torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedattn.enums import NVTE_Bias_Type, NVTE_Mask_Type
from fusedattn.reference import reference_attention
from fusedattn.runs.budget import Comparison, assert_within_budget, compare
from fusedattn.runs.case import TO_BHSD, Case
from fusedattn.runs.public_calls import attend, attend_nvte

__all__ = [
    "Case",
    "Comparison",
    "assert_within_budget",
    "compare",
    "eager",
    "expected",
    "keep_mask",
    "run_case",
    "run_case_nvte",
]

_GRADIENTS = {"t3hd": ("dqkv",), "thd_t2hd": ("dq", "dkv")}


def run_case(
    case: Case, dout: Tensor | None = None, dlse: Tensor | None = None, is_training: bool = True
) -> dict[str, Tensor]:
    """What the public function of the case's layout computes.

    Args:
        case: The problem.
        dout: Gradient of out, or None.
        dlse: Gradient of lse, or None. Where both are None, no gradient is computed.
        is_training: False switches dropout off.

    Returns:
        "out" and "lse"; with gradients, "dqkv" | "dq", "dkv" | "dq", "dk", "dv", and "dbias" with a bias.

    Raises:
        FusedAttnError: What the function refuses.

    Example:
        >>> case = Case((torch.ones(3, 3, 1, 2),), "t3hd", cu_seqlens_q=torch.tensor([0, 1, 3]))
        >>> [*run_case(case, dout=torch.ones(3, 1, 2))]
        ['out', 'lse', 'dqkv']
    """
    backward = dout is not None or dlse is not None
    operands = [x.detach().requires_grad_(backward) for x in case.operands]
    bias = None if case.bias is None else case.bias.detach().requires_grad_(backward)
    out, lse = attend(case, operands, bias, is_training)
    return _with_gradients(case, out, lse, [*operands, bias], dout, dlse)


def run_case_nvte(case: Case, dout: Tensor | None = None, is_training: bool = True) -> dict[str, Tensor]:
    """What the four nvte functions compute; t3hd and thd_t2hd only.

    Args:
        case: The problem.
        dout: Gradient of out; None computes no gradient.
        is_training: False switches dropout off and leaves the pack empty, so that there is no lse.

    Returns:
        The keys of `run_case`; "lse" is the pack's, without its trailing 1.

    Raises:
        FusedAttnError: What the functions refuse.

    Example:
        >>> case = Case((torch.ones(3, 3, 1, 2),), "t3hd", cu_seqlens_q=torch.tensor([0, 1, 3]))
        >>> run_case_nvte(case)["out"].flatten()
        tensor([1., 1., 1., 1., 1., 1.])
    """
    out, pack, gradients = attend_nvte(case, dout, is_training)
    names = (*_GRADIENTS[case.layout_word], "dbias")
    found = {name: gradient for name, gradient in zip(names, gradients, strict=False) if gradient is not None}
    lse = {"lse": pack["softmax_lse"].squeeze(-1)} if "softmax_lse" in pack else {}
    return {"out": out, **lse, **found}


def keep_mask(case: Case, head_dim: int | None = None) -> Tensor | None:
    """Which probabilities the engine keeps, read off it: with V the identity, out is the dropped softmax.

    Args:
        case: The problem; its lengths, mask, dropout, rng_state and engine count.
        head_dim: D of the calls that read the pattern, of which each sees that many keys; None: one call sees all.

    Returns:
        bool ``[B, H, max_seqlen_q, max_seqlen_kv]``, False also where the mask rules a pair out; None where
        dropout is 0.

    Raises:
        ValueError: No rng_state, without which no two calls drop the same.

    Example:
        >>> case = Case((torch.ones(3, 3, 1, 2),), "t3hd", cu_seqlens_q=torch.tensor([0, 1, 3]))
        >>> keep_mask(case) is None
        True
        >>> keep = keep_mask(replace(case, dropout=0.1, rng_state=torch.tensor([1, 2])))
        >>> keep.shape, keep.dtype
        (torch.Size([2, 1, 2, 2]), torch.bool)
        >>> torch.equal(keep, keep_mask(replace(case, dropout=0.1, rng_state=torch.tensor([1, 2])), head_dim=1))
        True
    """
    if not case.dropout:
        return None
    if case.rng_state is None:
        raise ValueError("argument 'rng_state': expected int64 [2] where dropout > 0, got None")
    max_kv = max(case.longest()[1], 1)
    width = max_kv if head_dim is None else head_dim
    parts = [_keep_of_keys(case, range(first, first + width)) for first in range(0, max_kv, width)]
    return torch.cat(parts, -1)[..., : case.longest()[1]]


def _keep_of_keys(case: Case, keys: range) -> Tensor:
    """A part of ``keep_mask``: the keys whose positions are in a range."""
    max_q, width = case.longest()[0], len(keys)
    operands = tuple(x.new_zeros(*x.shape[:-1], width) for x in case.operands)
    v = operands[-1] if len(operands) == 3 else operands[-1][:, -1]
    eye = torch.eye(width, dtype=v.dtype, device=v.device)
    # A bias of zeros, since the pattern may be another where there is none.
    bias = None if case.bias is None else torch.zeros_like(case.bias)
    probe = replace(case, operands=operands, bias=bias, attn_scale=1.0)
    if case.qkv_format != "thd":
        order = TO_BHSD[case.qkv_format]
        v = v.permute(order)
        seen = v[:, :, keys.start : keys.stop]
        seen[:] = eye[: seen.shape[2]]
        return run_case(probe)["out"].permute(order) > 0
    spans_q, spans_kv = case.spans
    for start, stop in spans_kv:
        seen = v[start + keys.start : min(start + keys.stop, stop)]
        seen[:] = eye[: len(seen), None]
    out = run_case(probe)["out"]
    keep = out.new_zeros(len(spans_q), out.shape[1], max_q, width, dtype=torch.bool)
    for b, (start, stop) in enumerate(spans_q):
        keep[b, :, : stop - start] = out[start:stop].transpose(0, 1) > 0
    return keep


def expected(
    case: Case, dout: Tensor | None = None, dlse: Tensor | None = None, keep: Tensor | None = None
) -> dict[str, Tensor]:
    """What is right, in float64: the reference, differentiated by autograd.

    Args:
        case: The problem; its engine does not count.
        dout: As in `run_case`.
        dlse: As in `run_case`.
        keep: The mask of `keep_mask`, where dropout > 0.

    Returns:
        The keys of `run_case`.

    Raises:
        ValueError: What the reference refuses.

    Example:
        >>> v = torch.tensor([4.0, 0.0]).view(1, 2, 1, 1)
        >>> expected(Case((v, 0 * v, v), "bshd_bshd_bshd"), dout=torch.ones_like(v))["dv"].flatten()
        tensor([1., 1.], dtype=torch.float64)
    """
    wide = replace(
        case, operands=tuple(x.double() for x in case.operands), bias=None if case.bias is None else case.bias.double()
    )
    return _by_reference(wide, dout, dlse, keep, torch.float64, torch.float64)


def eager(
    case: Case, dout: Tensor | None = None, dlse: Tensor | None = None, keep: Tensor | None = None
) -> dict[str, Tensor]:
    """The same as ordinary torch computes it: products in the operands' dtype, softmax in float32.

    A float64 problem is computed in float32 throughout, for a measure of how its errors grow; so is lse always, since
    engines must not round scores to a half precision.

    Args:
        case: As in `expected`.
        dout: As in `run_case`.
        dlse: As in `run_case`.
        keep: As in `expected`.

    Returns:
        The keys of `run_case`; out and gradients in the dtypes of what they belong to.

    Raises:
        ValueError: What the reference refuses.

    Example:
        >>> v = torch.tensor([3.0, 1.0]).view(1, 2, 1, 1)
        >>> eager(Case((0 * v, 0 * v, v), "bshd_bshd_bshd"))["out"].flatten()
        tensor([2., 2.])
    """
    dtype = case.operands[0].dtype
    matmul_dtype = torch.float32 if dtype == torch.float64 else dtype
    results = _by_reference(case, dout, dlse, keep, matmul_dtype, torch.float32)
    if dtype in (torch.float16, torch.bfloat16):
        wide = replace(case, operands=tuple(x.float() for x in case.operands))
        results["lse"] = _by_reference(wide, None, None, keep, torch.float32, torch.float32)["lse"]
    return results | {"out": results["out"].to(dtype)}


def _by_reference(
    case: Case,
    dout: Tensor | None,
    dlse: Tensor | None,
    keep: Tensor | None,
    matmul_dtype: torch.dtype,
    softmax_dtype: torch.dtype,
) -> dict[str, Tensor]:
    backward = dout is not None or dlse is not None
    leaves = [x.detach().requires_grad_(backward) for x in case.operands]
    bias = None if case.bias is None else case.bias.detach().requires_grad_(backward)
    q, k, v = leaves if len(leaves) == 3 else (*leaves[:-1], *leaves[-1].unbind(1))

    def attend(pairwise: bool) -> tuple[Tensor, Tensor]:
        return reference_attention(
            *(q, k, v, bias),
            qkv_format=case.qkv_format,
            bias_type=NVTE_Bias_Type.parse(case.bias_type, "bias_type").word,
            mask_type=NVTE_Mask_Type.parse(case.mask_type, "mask_type").word,
            cu_seqlens_q=case.cu_seqlens_q,
            cu_seqlens_kv=case.cu_seqlens_kv,
            attn_scale=case.scale,
            dropout=case.dropout,
            keep=keep,
            matmul_dtype=matmul_dtype,
            softmax_dtype=softmax_dtype,
            pairwise=pairwise,
        )

    out, lse = attend(pairwise=False)
    if dout is not None:
        rows = {"bshd": lse.transpose(-1, -2), "sbhd": lse.movedim(-1, 0)}.get(case.qkv_format, lse)
        # A live row's NaN would pass through its dead pairs: 0 * NaN in the plain product's backward.
        if not dout[rows != -torch.inf].isfinite().all():
            out, lse = attend(pairwise=True)
    # Gradients exist, and are 0, where no sequence has a row.
    nothing = sum(x[:0].sum() for x in leaves)
    return _with_gradients(case, out + nothing, lse + nothing, [*leaves, bias], dout, dlse)


def _with_gradients(
    case: Case, out: Tensor, lse: Tensor, leaves: Sequence[Tensor | None], dout: Tensor | None, dlse: Tensor | None
) -> dict[str, Tensor]:
    results = {"out": out.detach(), "lse": lse.detach()}
    seeds = [(y, g.to(y.dtype)) for y, g in ((out, dout), (lse, dlse)) if g is not None]
    if seeds:
        names = (*_GRADIENTS.get(case.layout_word, ("dq", "dk", "dv")), "dbias")
        wanted = {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
        outputs, given = zip(*seeds, strict=True)
        gradients = torch.autograd.grad(outputs, list(wanted.values()), given, materialize_grads=True)
        results |= dict(zip(wanted, gradients, strict=True))
    return results
