"""Score tiles in plain torch: the arithmetic of one block of query rows against its keys, forward and backward.

A *dead* pair is one that a mask rules out, or whose effective bias is -inf. Whatever Q, K, V or dO hold there reaches
no result: where all numbers are finite its weight 0 sees to that, and where not, ``live_matmul`` does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INF = float("inf")


def all_finite(*tensors: Tensor) -> bool:
    """Whether no tensor holds a NaN or an infinity; a finite sum proves it, and an overflowing one only costs time.

    Args:
        tensors: Floating tensors on one device.

    Returns:
        True where that is certain.

    Raises:
        Nothing.

    Example:
        >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, INF]))
        (True, False)
    """
    return all(bool(tensor.sum(dtype=accumulation_dtype(tensor.dtype)).isfinite()) for tensor in tensors)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, softmax and every reduction: float64 for float64 inputs, else float32.

    Example:
        >>> accumulation_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def effective_bias(bias: Tensor, pre_scale: bool, attn_scale: float, dtype: torch.dtype) -> Tensor:
    """The term that the bias adds to the scaled scores, in the accumulation dtype."""
    return bias.to(dtype) * attn_scale if pre_scale else bias.to(dtype)


def masked_scores(q: Tensor, k: Tensor, attn_scale: float, bias: Tensor | None, live: Tensor | None) -> Tensor:
    """``attn_scale * q k^T + bias``, -inf at dead pairs.

    Args:
        q: ``[n, h, R, D]`` in the accumulation dtype.
        k: ``[n, h, K, D]`` in the accumulation dtype.
        attn_scale: Factor of the scores.
        bias: Effective bias, broadcastable to ``[n, h, R, K]``, or None.
        live: bool, broadcastable to ``[n, h, R, K]``, or None: every pair is live.

    Returns:
        ``[n, h, R, K]`` in the accumulation dtype.

    Raises:
        Nothing.
    """
    if math.isfinite(attn_scale) and attn_scale != 0.0:
        # The product takes a factor at no cost; BLAS skips products with 0, NaN ones included.
        rows, keys = q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2)
        product = torch.baddbmm(q.new_empty(1, 1, 1), rows, keys, beta=0, alpha=attn_scale)
        scores = product.view(*q.shape[:3], k.shape[2])
    else:
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(attn_scale)
    if bias is not None:
        scores.add_(bias)
    return scores if live is None else scores.masked_fill_(~live, -INF)


def softmax_rows(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised softmax of rows that may have nothing to attend to; overwrites ``scores``.

    Args:
        scores: ``[..., R, K]``, K at least 1; -inf is no weight.

    Returns:
        Weights ``exp(score - max)`` (0 in rows of -inf alone), their sums (1 in those rows), and the natural-log
        log-sum-exp (-inf in those rows), the latter two ``[..., R]``.

    Raises:
        Nothing.

    Example:
        >>> weights, sums, lse = softmax_rows(torch.tensor([[0.0, 0.0], [-INF, -INF]]))
        >>> weights.tolist(), sums.tolist(), lse[1].item()
        ([[1.0, 1.0], [0.0, 0.0]], [2.0, 1.0], -inf)
    """
    peak = scores.amax(-1)
    base = peak.masked_fill(peak == -INF, 0.0)
    weights = scores.sub_(base[..., None]).exp_()
    sums = weights.sum(-1)
    lse = torch.where(peak == INF, peak, base + sums.log())
    return weights, sums.masked_fill(peak == -INF, 1.0), lse


def softmax_gradient(
    weights: Tensor, dweights: Tensor, dlse: Tensor | None, live: Tensor | None, exact: bool
) -> Tensor:
    """``weights * (dweights - sum(weights * dweights) + dlse)``; may overwrite ``dweights``.

    Args:
        weights: ``[..., R, K]``, the softmax, 0 at dead pairs.
        dweights: Its gradient, anything at dead pairs.
        dlse: ``[..., R, 1]``, gradient of the log-sum-exp, or None: zero.
        live: bool, broadcastable to ``weights``, or None: every pair is live.
        exact: Whether weights or gradients may be NaN or infinite, and dead pairs need care.

    Returns:
        Gradient of the scores ``[..., R, K]``, 0 at dead pairs.

    Raises:
        Nothing.
    """
    if live is not None:
        dweights.masked_fill_(~live, 0.0)
    dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
    if dlse is not None:
        dscores.addcmul_(weights, dlse)
    careful = exact or dlse is not None
    return dscores.masked_fill_(~live, 0.0) if careful and live is not None else dscores


def live_matmul(weights: Tensor, values: Tensor, live: Tensor | None) -> Tensor:
    """``weights @ values`` in which dead pairs take no part, not even as 0 times NaN.

    Args:
        weights: ``[..., R, K]``, 0 at dead pairs.
        values: ``[..., K, D]``.
        live: bool, broadcastable to ``weights``, or None: a plain product is right.

    Returns:
        ``[..., R, D]``; infinities and NaNs of live pairs appear as in exact arithmetic.

    Raises:
        Nothing.

    Example:
        >>> weights, values = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0], [float("nan")]])
        >>> live_matmul(weights, values, torch.tensor([[True, False]])).item()
        2.0
    """
    if live is None:
        return torch.matmul(weights, values)
    dtype = weights.dtype
    product = torch.matmul(weights, values.nan_to_num(0.0, 0.0, 0.0))
    up, down = (values == INF).to(dtype), (values == -INF).to(dtype)
    positive, negative = (weights > 0).to(dtype), (weights < 0).to(dtype)
    zero = (live & (weights == 0)).to(dtype)
    to_inf = (positive @ up + negative @ down) > 0
    to_minus_inf = (positive @ down + negative @ up) > 0
    to_nan = (zero @ (up + down) + live.to(dtype).expand_as(weights) @ values.isnan().to(dtype)) > 0
    product = torch.where(to_inf, product + INF, product)
    product = torch.where(to_minus_inf, product - INF, product)
    return product.masked_fill(to_nan, float("nan"))
