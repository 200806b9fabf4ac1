"""The meaning of attention in plain torch: dense, one sequence at a time, differentiated by autograd.

Tests and ``verify`` runs judge the engines by it; no engine uses it, and it shares no code with them.
"""

import torch
from torch import Tensor

_INF = float("inf")
# Each order also leads back from bshd.
_TO_BSHD = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
_WORDS = {
    "qkv_format": ("thd", *_TO_BSHD),
    "bias_type": ("no_bias", "pre_scale_bias", "post_scale_bias"),
    "mask_type": ("no_mask", "padding", "causal"),
}


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    qkv_format: str,
    bias_type: str = "no_bias",
    mask_type: str = "no_mask",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    attn_scale: float,
    dropout: float = 0.0,
    keep: Tensor | None = None,
    matmul_dtype: torch.dtype = torch.float64,
    softmax_dtype: torch.dtype = torch.float64,
    pairwise: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * (Q K^T + bias)) V under pre_scale_bias, else softmax(scale * Q K^T + bias) V, and lse.

    A pair of a query and a key is dead where the mask rules it out, or where its bias (times scale, if the
    bias is scaled) is -inf: what Q, K, V or the gradient of out hold there never reaches a result through it.
    A row with no live score above -inf gives out 0, lse -inf and zero gradients, whatever gradient it gets.

    Args:
        q: Queries ``[T, H, D]`` (thd), ``[B, S, H, D]`` (bshd), ``[S, B, H, D]`` (sbhd) or ``[B, H, S, D]``
            (bhsd), of any float dtype.
        k: Keys in the same format, with lengths of their own.
        v: Values, like k.
        bias: None or ``[1 | B, 1 | H, 1 | Sq, Skv]``, any float dtype, by positions within a sequence.
        qkv_format: "thd", "bshd", "sbhd" or "bhsd".
        bias_type: "no_bias", "pre_scale_bias" or "post_scale_bias".
        mask_type: "no_mask", "padding", or "causal": query i sees keys 0 to i of its sequence.
        cu_seqlens_q: Integers ``[B + 1]``. They locate the sequences of thd; in a dense format they give
            lengths, under "padding" only, and None means full ones.
        cu_seqlens_kv: The same for k and v; None means those of q.
        attn_scale: Any float; NaN gives NaN.
        dropout: The probability of dropping; what is kept is divided by 1 - dropout.
        keep: bool ``[B, H, >= Sq, >= Skv]`` by positions within a sequence; needed where dropout > 0.
        matmul_dtype: In which operands are multiplied; the dtype of out.
        softmax_dtype: In which scale, bias, softmax and dropout are computed; the dtype of lse.
        pairwise: Isolate dead pairs within the products too, which takes ``[H, Sq, Skv, D]`` elements a
            sequence. Done anyway where q, k or v are not finite; ask for it where the gradient of out is not.

    Returns:
        out, shaped like q, and lse, ``[T, H]`` (thd) or ``[B, H, Sq]``; 0 and -inf in rows past the lengths.

    Raises:
        ValueError: An unknown word; a cu_seqlens_q, bias or keep that is missing, or a bias that is unwanted;
            lengths beyond a dense tensor.

    Example:
        >>> v = torch.tensor([4.0, 0.0]).view(1, 2, 1, 1)
        >>> out, lse = reference_attention(0 * v, 0 * v, v, qkv_format="bshd", attn_scale=1.0)
        >>> out.flatten(), lse.exp().flatten()
        (tensor([2., 2.], dtype=torch.float64), tensor([2., 2.], dtype=torch.float64))
    """
    for (argument, words), word in zip(_WORDS.items(), (qkv_format, bias_type, mask_type), strict=True):
        if word not in words:
            raise ValueError(f"argument {argument!r}: expected one of {', '.join(words)}, got {word!r}")
    if (bias is None) != (bias_type == "no_bias"):
        raise ValueError(f"argument 'bias': expected one for {bias_type!r} and none else, got {type(bias)}")
    if dropout and keep is None:
        raise ValueError("argument 'keep': expected bool [B, H, Sq, Skv] where dropout > 0, got None")

    batch, rows_q, rows_kv = 0, None, None
    if qkv_format != "thd":
        q, k, v = (x.permute(_TO_BSHD[qkv_format]) for x in (q, k, v))
        batch, rows_q, rows_kv = q.shape[0], q.shape[1], k.shape[1]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if mask_type != "padding":
            cu_seqlens_q = cu_seqlens_kv = None
    spans_q = _spans(cu_seqlens_q, batch, rows_q)
    spans_kv = _spans(cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv, batch, rows_kv)

    out = torch.zeros(q.shape, dtype=matmul_dtype, device=q.device)
    lse = torch.full(q.shape[:2], -_INF, dtype=softmax_dtype, device=q.device)
    for b, ((start_q, len_q), (start_kv, len_kv)) in enumerate(zip(spans_q, spans_kv, strict=True)):
        if not (len_q and len_kv):
            continue
        at_q, at_kv = slice(start_q, start_q + len_q), slice(start_kv, start_kv + len_kv)
        live = torch.ones(1, len_q, len_kv, dtype=torch.bool, device=q.device)
        bias_b = keep_b = None
        if bias is not None:
            bias_b = bias[b % len(bias), :, :len_q, :len_kv].to(softmax_dtype)
        if keep is not None and dropout:
            keep_b = keep[b, :, :len_q, :len_kv].to(softmax_dtype) / (1 - dropout)
        out_b, lse_b = _attend(
            *(x.transpose(0, 1).to(matmul_dtype) for x in (q[at_q], k[at_kv], v[at_kv])),
            bias=bias_b,
            live=live.tril() if mask_type == "causal" else live,
            scale=attn_scale,
            pre_scale=bias_type == "pre_scale_bias",
            weight=keep_b,
            softmax_dtype=softmax_dtype,
            pairwise=pairwise,
        )
        out[at_q], lse[at_q] = out_b.transpose(0, 1), lse_b.transpose(0, 1)

    if rows_q is None:
        return out, lse
    out, lse = out.view(batch, rows_q, *out.shape[1:]), lse.view(batch, rows_q, lse.shape[1])
    return out.permute(_TO_BSHD[qkv_format]), lse.transpose(1, 2)


def _spans(cu_seqlens: Tensor | None, batch: int, rows: int | None) -> list[tuple[int, int]]:
    """First row and length of each sequence; dense ones start `rows` apart, whatever their lengths."""
    if rows is None:
        if cu_seqlens is None:
            raise ValueError("argument 'cu_seqlens_q': expected integers [B + 1] for thd, got None")
        return list(zip(cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist(), strict=True))
    lengths = [rows] * batch if cu_seqlens is None else cu_seqlens.diff().tolist()
    if len(lengths) != batch or max(lengths, default=0) > rows:
        raise ValueError(f"argument 'cu_seqlens': expected {batch} lengths up to {rows}, got {lengths}")
    return [(b * rows, length) for b, length in enumerate(lengths)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    live: Tensor,
    scale: float,
    pre_scale: bool,
    weight: Tensor | None,
    softmax_dtype: torch.dtype,
    pairwise: bool,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [H, Sq, D], k and v [H, Skv, D], the rest broadcastable to [H, Sq, Skv]."""
    pairwise = pairwise or not all(bool(x.isfinite().all()) for x in (q, k, v))
    if bias is not None:
        live = live & ((scale * bias if pre_scale else bias) != -_INF)

    def scores(live: Tensor) -> Tensor:
        # Dead pairs are cut off before the arithmetic and after it, so that a 0 * NaN between the two,
        # in either direction, stays there.
        product = (q[:, :, None] * _where(live, k)).sum(-1) if pairwise else q @ k.mT
        product = torch.where(live, product.to(softmax_dtype), 0)
        added = 0 if bias is None else torch.where(live, bias, 0)
        return torch.where(live, scale * (product + added) if pre_scale else scale * product + added, -_INF)

    with torch.no_grad():
        empty = (scores(live) == -_INF).all(-1, keepdim=True)
    live = live & ~empty
    s = scores(live)
    p = torch.where(live, s.softmax(-1), 0)
    p = (p if weight is None else p * weight).to(q.dtype)
    out = (p[..., None] * _where(live, v)).sum(-2) if pairwise else p @ v
    return torch.where(empty, 0, out), s.logsumexp(-1)


def _where(live: Tensor, rows: Tensor) -> Tensor:
    """Rows [H, Skv, D] as each query sees them, [H, Sq, Skv, D]: 0 at its dead keys."""
    return torch.where(live[..., None], rows[:, None], 0)
