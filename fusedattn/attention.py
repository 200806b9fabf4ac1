"""``fused_attention`` and its packed twins: fused attention as differentiable functions."""

from __future__ import annotations

from torch import Tensor

from fusedattn.attention_calls import call_attention
from fusedattn.enums import Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import public_border


@public_border({})
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    qkv_layout: NVTE_QKV_Layout | str = "bshd_bshd_bshd",
    attn_bias_type: NVTE_Bias_Type | str | None = None,
    attn_mask_type: NVTE_Mask_Type | str = "no_mask",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    rng_state: Tensor | None = None,
    is_training: bool = True,
    deterministic: bool | None = None,
    return_lse: bool = False,
    engine: Engine | str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, ``dropout(softmax(mask(attn_scale * (q k^T) + bias))) v``, differentiable.

    Args:
        q: Queries, float16, bfloat16, float32 or float64, in the format of ``qkv_layout``; any strides, such as a view
            of a packed tensor: ``bshd`` ``[B, Sq, H, D]``, ``sbhd`` ``[Sq, B, H, D]``, ``bhsd`` ``[B, H, Sq, D]``,
            ``thd`` ``[T, H, D]`` with sequences behind each other.
        k, v: Keys and values in the same format, dtype and device; Skv (Tkv) rows.
        bias: ``[1|B, 1|H, 1|Sq, Skv]`` of any floating dtype, or None; axes are positions within a sequence. In thd,
            Sq and Skv are ``max_seqlen_q`` and ``max_seqlen_kv``. Differentiable; broadcast axes stay unexpanded.
        qkv_layout: ``bshd_bshd_bshd``, ``sbhd_sbhd_sbhd``, ``bhsd_bhsd_bhsd`` or ``thd_thd_thd``
            (NVTE_NOT_INTERLEAVED).
        attn_bias_type: ``no_bias``, ``pre_scale_bias`` (``attn_scale * (q k^T + bias)``) or ``post_scale_bias``; None
            means ``post_scale_bias`` where there is a bias, else ``no_bias``.
        attn_mask_type: ``no_mask``, ``padding`` (dense layouts: only rows within the lengths attend and are attended
            to) or ``causal`` (query i sees keys 0 to i of its sequence: top-left).
        cu_seqlens_q: int32 ``[B + 1]`` (int64 is converted) from 0: where sequences start; required in thd. In dense
            layouts its differences are lengths; None there: every sequence is full. A dense layout under ``padding``
            needs this or ``cu_seqlens_kv``.
        cu_seqlens_kv: The same for k and v; None: the same as q's, in dense layouts only where Sq = Skv.
        max_seqlen_q, max_seqlen_kv: At least the longest sequence; None: the longest, where cu_seqlens can be seen (on
            CPU), else the bias's axis.
        attn_scale: Factor of the scores; None: ``D ** -0.5``. 0, negative and NaN are legal.
        dropout: Probability of dropping a softmax weight, 0 <= p < 1; survivors are scaled by 1 / (1 - p).
        rng_state: int64 ``[2]`` (seed, offset), which the dropped weights are a function of; None: drawn from torch's
            generator of the device where p > 0. Patterns of different engines differ.
        is_training: False switches dropout off, and nothing else.
        deterministic: None follows ``torch.use_deterministic_algorithms``.
        return_lse: Also return the log-sum-exp.
        engine: ``auto``, or the engine that must compute: ``torch``, ``cudnn``, ``cuda``.

    Returns:
        The output in q's shape and dtype, and with ``return_lse`` the natural-log log-sum-exp of the scaled, biased,
        masked scores: float32 (float64 for float64 inputs), ``[B, H, Sq]`` dense or ``[T, H]`` in thd,
        differentiable. A row with nothing to attend to, a padded row and a row past ``cu_seqlens[-1]`` are 0 with
        lse -inf, and all of their gradients are 0. Scores, softmax and reductions are float32 (float64 for float64).

    Raises:
        SpecError: An argument is wrong; the message names it.
        EngineRefusal: No engine that may compute the problem takes it.

    Mirrors TransformerEngine's ``nvte_fused_attn_fwd`` and ``_bwd`` with separate Q, K and V. Under CPU or CUDA
    autocast, q, k and v other than float64 are converted to the autocast dtype, as torch's own attention does.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 2, 1, 4)
        >>> v = torch.tensor([4.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
        >>> bias = torch.tensor([3.0, 1.0]).log().view(1, 1, 1, 2)
        >>> round(fused_attention(q, q, v, bias)[0, 0, 0, 0].item(), 4)
        3.0
    """
    return call_attention(
        "", qkv_layout, {"q": q, "k": k, "v": v}, bias, attn_bias_type, attn_mask_type, cu_seqlens_q, cu_seqlens_kv,
        max_seqlen_q, max_seqlen_kv, attn_scale, dropout, rng_state, is_training, deterministic, return_lse, engine,
    )  # fmt: skip


@public_border({"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen", "max_seqlen_kv": "max_seqlen"})
def fused_attention_qkvpacked(
    qkv: Tensor,
    bias: Tensor | None = None,
    *,
    qkv_layout: NVTE_QKV_Layout | str = "t3hd",
    attn_bias_type: NVTE_Bias_Type | str | None = None,
    attn_mask_type: NVTE_Mask_Type | str = "no_mask",
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    rng_state: Tensor | None = None,
    is_training: bool = True,
    deterministic: bool | None = None,
    return_lse: bool = False,
    engine: Engine | str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``fused_attention`` of one packed tensor; its gradient is one packed tensor too.

    Args:
        qkv: ``[T, 3, H, D]``: Q, K and V of every token; dtypes as in ``fused_attention``.
        bias: ``[1|B, 1|H, 1|S, S]`` with S = ``max_seqlen``, or None.
        qkv_layout: ``t3hd`` (NVTE_QKV_INTERLEAVED).
        cu_seqlens: int32 ``[B + 1]``: where sequences start; required.
        max_seqlen: At least the longest sequence; None as in ``fused_attention``.
        attn_bias_type, attn_mask_type, attn_scale, dropout, rng_state, is_training, deterministic, return_lse, engine:
            As in ``fused_attention``.

    Returns:
        ``[T, H, D]`` in qkv's dtype, and with ``return_lse`` the log-sum-exp ``[T, H]``; accumulation as in
        ``fused_attention``.

    Raises:
        SpecError: An argument is wrong; the message names it.
        EngineRefusal: No engine that may compute the problem takes it.

    Mirrors ``nvte_fused_attn_fwd_qkvpacked`` and ``_bwd_qkvpacked`` of TransformerEngine.

    Example:
        >>> import torch
        >>> qkv = torch.zeros(5, 3, 1, 2)
        >>> qkv[:, 2, 0, 0] = torch.arange(5.0)
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> fused_attention_qkvpacked(qkv, cu_seqlens=cu_seqlens)[:, 0, 0].tolist()
        [0.5, 0.5, 3.0, 3.0, 3.0]
    """
    return call_attention(
        "qkvpacked", qkv_layout, {"qkv": qkv}, bias, attn_bias_type, attn_mask_type, cu_seqlens, None, max_seqlen,
        max_seqlen, attn_scale, dropout, rng_state, is_training, deterministic, return_lse, engine,
    )  # fmt: skip


@public_border({})
def fused_attention_kvpacked(
    q: Tensor,
    kv: Tensor,
    bias: Tensor | None = None,
    *,
    qkv_layout: NVTE_QKV_Layout | str = "thd_t2hd",
    attn_bias_type: NVTE_Bias_Type | str | None = None,
    attn_mask_type: NVTE_Mask_Type | str = "no_mask",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    rng_state: Tensor | None = None,
    is_training: bool = True,
    deterministic: bool | None = None,
    return_lse: bool = False,
    engine: Engine | str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``fused_attention`` of queries and one packed tensor of keys and values; its gradient is packed too.

    Args:
        q: ``[Tq, H, D]``; dtypes as in ``fused_attention``.
        kv: ``[Tkv, 2, H, D]`` in q's dtype: K and V of every token.
        bias: ``[1|B, 1|H, 1|Sq, Skv]`` with Sq and Skv = ``max_seqlen_q`` and ``max_seqlen_kv``, or None.
        qkv_layout: ``thd_t2hd`` (NVTE_KV_INTERLEAVED).
        cu_seqlens_q: int32 ``[B + 1]``: where sequences of q start; required.
        cu_seqlens_kv: The same for kv; None: the same as q's.
        max_seqlen_q, max_seqlen_kv: At least the longest sequence; None as in ``fused_attention``.
        attn_bias_type, attn_mask_type, attn_scale, dropout, rng_state, is_training, deterministic, return_lse, engine:
            As in ``fused_attention``.

    Returns:
        ``[Tq, H, D]`` in q's dtype, and with ``return_lse`` the log-sum-exp ``[Tq, H]``; accumulation as in
        ``fused_attention``.

    Raises:
        SpecError: An argument is wrong; the message names it.
        EngineRefusal: No engine that may compute the problem takes it.

    Mirrors ``nvte_fused_attn_fwd_kvpacked`` and ``_bwd_kvpacked`` of TransformerEngine.

    Example:
        >>> import torch
        >>> q, kv = torch.zeros(2, 1, 1), torch.arange(8.0).view(8, 1, 1, 1).expand(8, 2, 1, 1)
        >>> cu_seqlens_q, cu_seqlens_kv = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 3, 3, 8])
        >>> fused_attention_kvpacked(q, kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv).flatten().tolist()
        [1.0, 5.0]
    """
    return call_attention(
        "kvpacked", qkv_layout, {"q": q, "kv": kv}, bias, attn_bias_type, attn_mask_type, cu_seqlens_q, cu_seqlens_kv,
        max_seqlen_q, max_seqlen_kv, attn_scale, dropout, rng_state, is_training, deterministic, return_lse, engine,
    )  # fmt: skip
