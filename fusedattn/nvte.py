"""The four ``nvte_fused_attn_*`` functions of TransformerEngine's C API, argument for argument.

Each mirrors the function of its name in TransformerEngine 0.9; autograd does not differentiate them, but
``fused_attention_qkvpacked`` and ``fused_attention_kvpacked``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.enums import Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import public_border
from fusedattn.nvte_calls import (
    BackwardKVPacked,
    BackwardQKVPacked,
    Forward,
    Lengths,
    Output,
    Words,
    run_backward,
    run_forward,
)
from fusedattn.tensor_pack import NVTETensorPack, Workspace

_FORWARD = {"bias": "Bias"}
_BACKWARD = {name: f"Aux_CTX_Tensors['{entry}']" for name, entry in (("bias", "Bias"), ("rng_state", "rng_state"))}
_QKVPACKED = {"qkv": "QKV", "cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen", "max_seqlen_kv": "max_seqlen"}
_KVPACKED = {"q": "Q", "kv": "KV"}


@public_border(_QKVPACKED | _FORWARD)
def nvte_fused_attn_fwd_qkvpacked(
    QKV: Tensor,
    Bias: Tensor | None,
    S: Tensor | None,
    O: Tensor | None,  # noqa: E741
    Aux_Output_Tensors: NVTETensorPack | None,
    cu_seqlens: Tensor,
    rng_state: Tensor | None,
    max_seqlen: int | None,
    is_training: bool,
    attn_scale: float,
    dropout: float,
    qkv_layout: NVTE_QKV_Layout | str,
    bias_type: NVTE_Bias_Type | str,
    attn_mask_type: NVTE_Mask_Type | str,
    workspace: Workspace | None = None,
    stream: torch.cuda.Stream | None = None,
    *,
    engine: Engine | str = "auto",
) -> Forward:
    """Compute attention of one packed tensor.

    Args:
        QKV: ``[T, 3, H, D]``, float16, bfloat16, float32 or float64; any strides.
        Bias: ``[1|B, 1|H, 1|S, S]`` with S = ``max_seqlen``, any floating dtype; None without a bias.
        S: FP8 scale container of the C API: None or any tensor; untouched for other types.
        O: ``[T, H, D]`` like QKV, written in place; None: allocated.
        Aux_Output_Tensors: An empty pack or one that a query filled, filled in place; None: made.
        cu_seqlens: int32 ``[B + 1]`` from 0 (int64 is converted): where sequences start and the last one ends.
        rng_state: int64 ``[2]``, seed and offset; None: drawn from torch's generator where dropout acts.
        max_seqlen: At least the longest sequence; None: the longest.
        is_training: Whether dropout acts and the pack is filled.
        attn_scale: Factor of the scores.
        dropout: Probability of dropping a softmax weight, 0 <= p < 1.
        qkv_layout: ``t3hd`` (NVTE_QKV_INTERLEAVED).
        bias_type: ``no_bias``, ``pre_scale_bias`` or ``post_scale_bias``.
        attn_mask_type: ``no_mask``, ``padding`` or ``causal``, within each sequence.
        workspace: A new ``Workspace`` asks for its size and computes nothing, returning tensors on device meta; an
            allocated one is used; None does both at once.
        stream: CUDA stream to run on, default torch's current one; ignored on CPU.
        engine: ``auto`` or the engine that must compute.

    Returns:
        ``(O, Aux_Output_Tensors)``. In training the pack holds ``softmax_lse`` (``[T, H, 1]`` natural log, float32, or
        float64 for float64 inputs; -inf in rows with no key and rows past the end), ``rng_state`` (a copy; zeros where
        dropout is 0) and, with a bias, ``Bias`` (the caller's tensor itself). Accumulation: as softmax_lse's dtype.

    Raises:
        SpecError: An argument is wrong; the message names it.
        EngineRefusal: No engine that may compute the problem takes it.

    Example:
        >>> QKV, cu_seqlens = torch.zeros(5, 3, 1, 2), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> O, pack = nvte_fused_attn_fwd_qkvpacked(
        ...     QKV, None, None, None, None, cu_seqlens, None, 3, True, 1.0, 0.0, "t3hd", "no_bias", "padding"
        ... )
        >>> pack.names, pack["softmax_lse"].exp().flatten().round().tolist()
        (('softmax_lse', 'rng_state'), [2.0, 2.0, 3.0, 3.0, 3.0])
    """
    words = Words("qkvpacked", qkv_layout, bias_type, attn_mask_type, engine, attn_scale, dropout)
    lengths = Lengths(cu_seqlens, None, max_seqlen, max_seqlen)
    result = run_forward(
        words, {"qkv": QKV}, Bias, lengths, rng_state, is_training, S, O, Aux_Output_Tensors, workspace, stream
    )
    return Forward(*result)


@public_border(_QKVPACKED | _BACKWARD)
def nvte_fused_attn_bwd_qkvpacked(
    QKV: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    S: Tensor | None,
    dP: Tensor | None,
    Aux_CTX_Tensors: NVTETensorPack,
    dQKV: Output,
    dBias: Output,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    attn_scale: float,
    dropout: float,
    qkv_layout: NVTE_QKV_Layout | str,
    bias_type: NVTE_Bias_Type | str,
    attn_mask_type: NVTE_Mask_Type | str,
    workspace: Workspace | None = None,
    stream: torch.cuda.Stream | None = None,
    *,
    engine: Engine | str = "auto",
    deterministic: bool | None = None,
) -> BackwardQKVPacked:
    """Differentiate attention of one packed tensor.

    Args:
        QKV, cu_seqlens, max_seqlen, attn_scale, dropout, qkv_layout, bias_type, attn_mask_type: As in the forward.
        O: The forward's output.
        dO: Its gradient, ``[T, H, D]`` in QKV's dtype; any strides.
        S, dP: FP8 scale containers of the C API: None or any tensor; untouched for other types.
        Aux_CTX_Tensors: The forward's pack: read, never written; the bias is taken from it. May serve twice.
        dQKV: QKV's shape and dtype, written in place; None: allocated; ``fusedattn.SKIP``: not computed.
        dBias: The bias's shape and dtype, likewise.
        workspace, stream, engine: As in the forward; with dropout the forward's engine computes under ``auto``.
        deterministic: None follows ``torch.use_deterministic_algorithms``.

    Returns:
        ``(dQKV, dBias)``; None for what was skipped, and for dBias without a bias. Rows past the end are 0. Sums are
        float32 (float64 for float64 inputs).

    Raises:
        SpecError: An argument is wrong: an entry of the pack is missing, the pack comes from another problem, or its
            bias was changed in place since the forward.
        EngineRefusal: No engine that may compute the problem takes it.

    Example:
        >>> QKV, cu_seqlens = torch.zeros(2, 3, 1, 1), torch.tensor([0, 2], dtype=torch.int32)
        >>> call = (2, 1.0, 0.0, "t3hd", "no_bias", "padding")
        >>> O, pack = nvte_fused_attn_fwd_qkvpacked(QKV, None, None, None, None, cu_seqlens, None, 2, True, *call[1:])
        >>> dQKV = nvte_fused_attn_bwd_qkvpacked(QKV, O, O + 1, None, None, pack, None, None, cu_seqlens, *call).dQKV
        >>> dQKV[:, 2].flatten().tolist()
        [1.0, 1.0]
    """
    words = Words("qkvpacked", qkv_layout, bias_type, attn_mask_type, engine, attn_scale, dropout)
    lengths = Lengths(cu_seqlens, None, max_seqlen, max_seqlen)
    result = run_backward(
        words, {"qkv": QKV}, lengths, O, dO, S, dP, Aux_CTX_Tensors, {"dQKV": dQKV}, dBias, workspace, stream,
        deterministic,
    )  # fmt: skip
    return BackwardQKVPacked(*result)


@public_border(_KVPACKED | _FORWARD)
def nvte_fused_attn_fwd_kvpacked(
    Q: Tensor,
    KV: Tensor,
    Bias: Tensor | None,
    S: Tensor | None,
    O: Tensor | None,  # noqa: E741
    Aux_Output_Tensors: NVTETensorPack | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    is_training: bool,
    attn_scale: float,
    dropout: float,
    qkv_layout: NVTE_QKV_Layout | str,
    bias_type: NVTE_Bias_Type | str,
    attn_mask_type: NVTE_Mask_Type | str,
    workspace: Workspace | None = None,
    stream: torch.cuda.Stream | None = None,
    *,
    engine: Engine | str = "auto",
) -> Forward:
    """Compute attention of queries and packed keys and values.

    Args:
        Q: ``[Tq, H, D]``; dtypes as in ``nvte_fused_attn_fwd_qkvpacked``.
        KV: ``[Tkv, 2, H, D]`` in Q's dtype.
        Bias: ``[1|B, 1|H, 1|Sq, Skv]`` with Sq and Skv = ``max_seqlen_q`` and ``max_seqlen_kv``; None without a bias.
        O: ``[Tq, H, D]`` like Q, written in place; None: allocated.
        cu_seqlens_q, cu_seqlens_kv: int32 ``[B + 1]`` from 0; None for kv: the same as q's.
        max_seqlen_q, max_seqlen_kv: At least the longest sequence; None: the longest.
        qkv_layout: ``thd_t2hd`` (NVTE_KV_INTERLEAVED).
        S, Aux_Output_Tensors, rng_state, is_training, attn_scale, dropout, bias_type, attn_mask_type, workspace,
            stream, engine: As in ``nvte_fused_attn_fwd_qkvpacked``.

    Returns:
        ``(O, Aux_Output_Tensors)`` as ``nvte_fused_attn_fwd_qkvpacked`` does; ``softmax_lse`` is ``[Tq, H, 1]``.

    Raises:
        SpecError: An argument is wrong; the message names it.
        EngineRefusal: No engine that may compute the problem takes it.

    Example:
        >>> Q, KV, cu_seqlens = torch.zeros(2, 1, 1), torch.ones(3, 2, 1, 1), torch.tensor([0, 2])
        >>> nvte_fused_attn_fwd_kvpacked(
        ...     Q,
        ...     KV,
        ...     None,
        ...     None,
        ...     None,
        ...     None,
        ...     cu_seqlens,
        ...     torch.tensor([0, 3]),
        ...     None,
        ...     2,
        ...     3,
        ...     False,
        ...     1.0,
        ...     0.0,
        ...     "thd_t2hd",
        ...     "no_bias",
        ...     "no_mask",
        ... ).O.flatten().tolist()
        [1.0, 1.0]
    """
    words = Words("kvpacked", qkv_layout, bias_type, attn_mask_type, engine, attn_scale, dropout)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    operands = {"q": Q, "kv": KV}
    result = run_forward(
        words, operands, Bias, lengths, rng_state, is_training, S, O, Aux_Output_Tensors, workspace, stream
    )
    return Forward(*result)


@public_border(_KVPACKED | _BACKWARD)
def nvte_fused_attn_bwd_kvpacked(
    Q: Tensor,
    KV: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    S: Tensor | None,
    dP: Tensor | None,
    Aux_CTX_Tensors: NVTETensorPack,
    dQ: Output,
    dKV: Output,
    dBias: Output,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    attn_scale: float,
    dropout: float,
    qkv_layout: NVTE_QKV_Layout | str,
    bias_type: NVTE_Bias_Type | str,
    attn_mask_type: NVTE_Mask_Type | str,
    workspace: Workspace | None = None,
    stream: torch.cuda.Stream | None = None,
    *,
    engine: Engine | str = "auto",
    deterministic: bool | None = None,
) -> BackwardKVPacked:
    """Differentiate attention of queries and packed keys and values.

    Args:
        Q, KV, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, attn_scale, dropout, qkv_layout, bias_type,
            attn_mask_type: As in the forward.
        O: The forward's output.
        dO: Its gradient, ``[Tq, H, D]`` in Q's dtype; any strides.
        S, dP, Aux_CTX_Tensors, workspace, stream, engine, deterministic: As in ``nvte_fused_attn_bwd_qkvpacked``.
        dQ, dKV, dBias: The shapes and dtypes of Q, KV and the bias, written in place; None: allocated;
            ``fusedattn.SKIP``: not computed.

    Returns:
        ``(dQ, dKV, dBias)``; None for what was skipped, and for dBias without a bias. Rows past the end are 0. Sums
        are float32 (float64 for float64 inputs).

    Raises:
        SpecError: As ``nvte_fused_attn_bwd_qkvpacked``.
        EngineRefusal: No engine that may compute the problem takes it.

    Example:
        >>> Q, KV, cu_seqlens = torch.zeros(2, 1, 1), torch.ones(2, 2, 1, 1), torch.tensor([0, 2])
        >>> call = (cu_seqlens, cu_seqlens, 2, 2, 1.0, 0.0, "thd_t2hd", "no_bias", "no_mask")
        >>> O, pack = nvte_fused_attn_fwd_kvpacked(
        ...     Q, KV, None, None, None, None, cu_seqlens, cu_seqlens, None, 2, 2, True, *call[4:]
        ... )
        >>> dKV = nvte_fused_attn_bwd_kvpacked(Q, KV, O, O, None, None, pack, None, None, None, *call).dKV
        >>> dKV[:, 1].flatten().tolist()
        [1.0, 1.0]
    """
    words = Words("kvpacked", qkv_layout, bias_type, attn_mask_type, engine, attn_scale, dropout)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    result = run_backward(
        words, {"q": Q, "kv": KV}, lengths, O, dO, S, dP, Aux_CTX_Tensors, {"dQ": dQ, "dKV": dKV}, dBias, workspace,
        stream, deterministic,
    )  # fmt: skip
    return BackwardKVPacked(*result)
