"""torch's CPU flash-attention operators, used where they are right, and recognised where they are not.

They are wrong, without an error, where a query row or the scale is NaN (out 0, lse 0), where K or V hold NaN or an
infinity at a key that causality rules out (0 times NaN), and where a bias row is -inf throughout (lse 0); they end the
process where an axis is empty, and use memory that is not theirs where D is not the innermost axis. The last two are
kept from them; the others leave a trace in the result: a number that is not finite, or an lse of
exactly 0 over a row of zeros. So the results are looked at, which costs a sum over them, and what is suspicious is
reported for recomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.engines.torch_blocks import Group
from fusedattn.engines.torch_math import INF, accumulation_dtype, all_finite, effective_bias

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _mask_of(group: Group) -> Tensor | None:
    if group.bias is None:
        return None
    return effective_bias(group.bias, group.pre_scale, group.attn_scale, accumulation_dtype(group.q.dtype))


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, with D innermost: without a word the operators read or write other elements where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def flash_forward(group: Group) -> tuple[Tensor, Tensor] | None:
    """Compute a group on CPU without dropout.

    Args:
        group: The sequences; no dropout, no padding, no empty axis.

    Returns:
        ``out`` ``[n, H, Sq, D]`` and ``lse`` ``[n, H, Sq]``, or None: the operator may be wrong on these numbers.

    Raises:
        Nothing.

    Example:
        >>> x = torch.zeros(1, 1, 2, 1)
        >>> group = Group(x, x, x, None, False, False, 1.0, 0.0, None, [0], None, None, False)
        >>> round(flash_forward(group)[1][0, 0, 0].item(), 4)
        0.6931
        >>> flash_forward(group._replace(q=x * float("nan"))) is None
        True
    """
    # In half precisions the operator's exponential is a fast one, too coarse for lse; float32 is no slower.
    dtype = accumulation_dtype(group.q.dtype)
    q, k, v = (_rows(tensor.to(dtype)) for tensor in (group.q, group.k, group.v))
    out, lse = _flash_forward(q, k, v, 0.0, group.causal, attn_mask=_mask_of(group), scale=group.attn_scale)
    if not all_finite(out, lse):
        return None
    silent = lse == 0
    if bool(silent.any()) and bool((out[silent] == 0).all(-1).any()):
        return None
    return out, lse


def flash_backward(group: Group, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Differentiate a group on CPU without dropout, bias gradient or lse gradient.

    Args:
        group: As for ``flash_forward``.
        dout, out: ``[n, H, Sq, D]`` in the dtype of q.
        lse: ``[n, H, Sq]``.

    Returns:
        Gradients of q, k and v, or None: the operator may be wrong on these numbers, or errs too much in this dtype.
        It takes the weights from exp(score - lse), whose error grows with lse; bfloat16 hides that, float32 does not,
        and in float16 it is several times slower than ``torch_blocks``.

    Raises:
        Nothing.
    """
    # With a finite lse a row of -inf scores gets the weights exp(-inf) = 0 that it should have.
    finite_lse = lse.masked_fill(lse == -INF, 0.0)
    if group.q.dtype != torch.bfloat16 or not all_finite(finite_lse):
        return None
    rows = (_rows(tensor) for tensor in (dout, group.q, group.k, group.v, out))
    dq, dk, dv = _flash_backward(
        *rows, finite_lse, 0.0, group.causal, attn_mask=_mask_of(group), scale=group.attn_scale
    )
    return (dq, dk, dv) if all_finite(dq, dk, dv) else None
