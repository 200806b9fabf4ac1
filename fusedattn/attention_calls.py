"""What ``fused_attention`` and its packed twins share: the whole way of a call, and the short way of a repeated one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedattn import arguments
from fusedattn.autograd import attend, attend_bound
from fusedattn.bound import bind, bound_call, signature_of
from fusedattn.calls import attention_request, layout_for
from fusedattn.runtime import resolve


def call_attention(
    packing: str,
    qkv_layout: object,
    operands: Mapping[str, Any],
    bias: Any,
    attn_bias_type: object,
    attn_mask_type: object,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    max_seqlen_q: object,
    max_seqlen_kv: object,
    attn_scale: Any,
    dropout: object,
    rng_state: Any,
    is_training: object,
    deterministic: object,
    return_lse: object,
    engine: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a call of one of the three functions, which say what its arguments mean.

    Args:
        packing: ``qkvpacked``, ``kvpacked`` or empty.
        qkv_layout: Of the packing.
        operands: Argument names to tensors, in the layout's order; the others as in ``fused_attention``.

    Returns:
        The output, and with ``return_lse`` the log-sum-exp.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    names = (packing, qkv_layout, attn_bias_type, attn_mask_type, max_seqlen_q, max_seqlen_kv, dropout, is_training,
             deterministic, return_lse, engine)  # fmt: skip
    signature = _signature(names, operands, bias, cu_seqlens_q, cu_seqlens_kv, rng_state, attn_scale)
    bound = None if signature is None else bound_call(signature)
    if bound is not None:
        scale = bound.attn_scale if attn_scale is None else attn_scale
        values = tuple(operands.values())
        rng_state = bound.rng_state(rng_state, values[0])
        out, lse = attend_bound(bound, scale, (bias, cu_seqlens_q, cu_seqlens_kv, rng_state), values)
        return (out, lse) if return_lse else out
    arguments.flag("return_lse", return_lse)
    request = attention_request(
        layout_for(packing, "qkv_layout", qkv_layout), operands, bias, attn_bias_type, attn_mask_type, cu_seqlens_q,
        cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, attn_scale, dropout, rng_state, is_training, deterministic, engine,
    )  # fmt: skip
    out, lse = attend(request)
    if signature is not None:
        bind(signature, request, resolve(request), out, lse)
    return (out, lse) if return_lse else out


def _signature(
    names: tuple[object, ...],
    operands: Mapping[str, Any],
    bias: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    rng_state: Any,
    attn_scale: object,
) -> tuple[object, ...] | None:
    values = tuple(operands.values())
    if attn_scale is not None and type(attn_scale) is not float:
        return None
    signature = signature_of(names, (*values, bias, cu_seqlens_q, cu_seqlens_kv, rng_state))
    device_type = "meta" if signature is None else values[0].device.type
    if signature is None or device_type == "meta" or torch.is_autocast_enabled(device_type):
        return None
    negative = attn_scale is not None and attn_scale < 0.0
    frozen = bias is not None and not bias.requires_grad
    return (*signature, attn_scale is None, negative, frozen, torch.are_deterministic_algorithms_enabled())
