"""Calls that `oracle` does not make: which engine computes a case, nvte inference, a forward to be timed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedattn import nvte
from fusedattn.attention import fused_attention, fused_attention_kvpacked, fused_attention_qkvpacked
from fusedattn.explain import explain
from fusedattn.runs.case import Case

_SEPARATE = {"t3hd": "thd_thd_thd", "thd_t2hd": "thd_thd_thd"}


def separate(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a case, views of its operands."""
    parts: list[Tensor] = []
    for x in case.operands:
        parts += x.unbind(1) if case.layout in _SEPARATE and x.dim() == 4 else [x]
    q, k, v = parts
    return q, k, v


def engine_of(case: Case, is_training: bool = True) -> str:
    """Which engine computes a case.

    Args:
        case: The problem.
        is_training: As the call has it.

    Returns:
        Word of the engine.

    Raises:
        FusedAttnError: what the function refuses.
    """
    one = case.layout == "t3hd"  # whose case has the lengths of q only
    explanation = explain(
        *separate(case),
        case.bias,
        qkv_layout=_SEPARATE.get(case.layout, case.layout),
        attn_bias_type=case.bias_type,
        attn_mask_type=case.mask_type,
        cu_seqlens_q=case.cu_seqlens_q,
        cu_seqlens_kv=case.cu_seqlens_kv,
        max_seqlen_q=case.max_seqlen_q,
        max_seqlen_kv=case.max_seqlen_q if one else case.max_seqlen_kv,
        attn_scale=case.attn_scale,
        dropout=case.dropout,
        rng_state=case.rng_state,
        is_training=is_training,
        engine=case.engine,
    )
    return explanation.engine or case.engine


def attend(case: Case, operands: tuple[Tensor, ...]) -> Tensor:
    """out by the differentiable function that belongs to the case's layout.

    Args:
        case: All arguments but the operands; without dropout.
        operands: Tensors such as `case.operands`; they may require gradients.

    Returns:
        out, in the format of the layout's q.

    Raises:
        FusedAttnError: what the function refuses.
    """
    common: dict[str, Any] = {
        "qkv_layout": case.layout,
        "attn_bias_type": case.bias_type,
        "attn_mask_type": case.mask_type,
        "attn_scale": case.attn_scale,
        "engine": case.engine,
    }
    function: Any = fused_attention
    lengths: dict[str, Any] = {
        "cu_seqlens_q": case.cu_seqlens_q,
        "cu_seqlens_kv": case.cu_seqlens_kv,
        "max_seqlen_q": case.max_seqlen_q,
        "max_seqlen_kv": case.max_seqlen_kv,
    }
    if case.layout == "t3hd":
        function = fused_attention_qkvpacked
        lengths = {"cu_seqlens": case.cu_seqlens_q, "max_seqlen": case.max_seqlen_q}
    elif case.layout == "thd_t2hd":
        function = fused_attention_kvpacked
    out: Tensor = function(*operands, case.bias, **lengths, **common)
    return out


def nvte_inference(case: Case) -> dict[str, Tensor]:
    """out by the nvte forward with is_training=False.

    Args:
        case: A problem in layout t3hd or thd_t2hd.

    Returns:
        "out", and what the pack holds, by name: nothing, where the function keeps its word.

    Raises:
        FusedAttnError: what the function refuses.
    """
    one = case.layout == "t3hd"
    max_q, max_kv = case.longest()
    cu_kv = case.cu_seqlens_q if case.cu_seqlens_kv is None else case.cu_seqlens_kv
    lengths = (case.cu_seqlens_q,) if one else (case.cu_seqlens_q, cu_kv)
    sizes = (max_q,) if one else (max_q, max_kv)
    words = (case.scale, case.dropout, case.layout, case.bias_type, case.mask_type)
    forward: Any = nvte.nvte_fused_attn_fwd_qkvpacked if one else nvte.nvte_fused_attn_fwd_kvpacked
    arguments = (*case.operands, case.bias, None, None, None, *lengths, case.rng_state, *sizes, False, *words)
    out, pack = forward(*arguments, engine=case.engine)
    return {"out": out} | {name: pack[name] for name in pack.names}
