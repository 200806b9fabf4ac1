"""A case as a call of the public functions: the differentiable ones, the nvte ones, and `explain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fusedattn import nvte
from fusedattn.attention import fused_attention, fused_attention_kvpacked, fused_attention_qkvpacked
from fusedattn.explain import explain
from fusedattn.runs.case import Case
from fusedattn.tensor_pack import NVTETensorPack

_SEPARATE = {"t3hd": "thd_thd_thd", "thd_t2hd": "thd_thd_thd"}


def attend(
    case: Case, operands: Sequence[Tensor], bias: Tensor | None, is_training: bool = True
) -> tuple[Tensor, Tensor]:
    """out and lse by the differentiable function that belongs to the case's layout.

    Args:
        case: All arguments but the tensors that may require gradients.
        operands: Tensors such as `case.operands`.
        bias: A tensor such as `case.bias`.
        is_training: False switches dropout off.

    Returns:
        out, in the format of the layout's q, and lse.

    Raises:
        FusedAttnError: What the function refuses.
    """
    return attend_call(case, operands, bias, is_training)()


def attend_call(
    case: Case, operands: Sequence[Tensor], bias: Tensor | None, is_training: bool = True
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The call that `attend` makes, which can be made again."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    lengths: dict[str, Any] = {name: getattr(case, name) for name in names}
    function: Any = fused_attention
    if case.layout_word == "t3hd":
        lengths = {"cu_seqlens": case.cu_seqlens_q, "max_seqlen": case.max_seqlen_q}
        function = fused_attention_qkvpacked
    elif case.layout_word == "thd_t2hd":
        function = fused_attention_kvpacked
    return partial(
        function,
        *operands,
        bias,
        **lengths,
        qkv_layout=case.layout,
        attn_bias_type=case.bias_type,
        attn_mask_type=case.mask_type,
        attn_scale=case.attn_scale,
        dropout=case.dropout,
        rng_state=case.rng_state,
        is_training=is_training,
        return_lse=True,
        engine=case.engine,
    )


def attend_nvte(
    case: Case, dout: Tensor | None, is_training: bool = True
) -> tuple[Tensor, NVTETensorPack, tuple[Tensor | None, ...]]:
    """The forward of the nvte functions, and the backward where there is something to go back with.

    Args:
        case: A problem in layout t3hd or thd_t2hd.
        dout: Gradient of out; None computes no gradient.
        is_training: False switches dropout off and leaves the pack empty.

    Returns:
        out, the pack, and the gradients of the operands and of the bias; none without ``dout``.

    Raises:
        FusedAttnError: What the functions refuse.
    """
    out, pack = nvte_forward_call(case, is_training)()
    return out, pack, () if dout is None else tuple(nvte_backward_call(case)(out, dout, pack))


def nvte_forward_call(case: Case, is_training: bool = True) -> Callable[[], tuple[Tensor, NVTETensorPack]]:
    """The forward that `attend_nvte` makes, which can be made again."""
    function: Any = nvte.nvte_fused_attn_fwd_qkvpacked if _is_one(case) else nvte.nvte_fused_attn_fwd_kvpacked
    lengths, sizes, words = _nvte_arguments(case)
    arguments = (*case.operands, case.bias, None, None, None, *lengths, case.rng_state, *sizes, is_training, *words)
    return partial(function, *arguments, engine=case.engine)


def nvte_backward_call(case: Case) -> Callable[[Tensor, Tensor, NVTETensorPack], tuple[Tensor | None, ...]]:
    """The backward that `attend_nvte` makes, which takes out, its gradient and the pack."""
    function: Any = nvte.nvte_fused_attn_bwd_qkvpacked if _is_one(case) else nvte.nvte_fused_attn_bwd_kvpacked
    lengths, sizes, words = _nvte_arguments(case)
    rest = (*(None for _ in case.operands), None, *lengths, *sizes, *words)

    def backward(out: Tensor, dout: Tensor, pack: NVTETensorPack) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = function(
            *case.operands, out, dout, None, None, pack, *rest, engine=case.engine
        )
        return gradients

    return backward


def _is_one(case: Case) -> bool:
    return case.layout_word == "t3hd"


def _nvte_arguments(case: Case) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...]]:
    """Lengths, longest sequences and words."""
    cu_kv = case.cu_seqlens_q if case.cu_seqlens_kv is None else case.cu_seqlens_kv
    words = (case.scale, case.dropout, case.layout, case.bias_type, case.mask_type)
    if _is_one(case):
        return (case.cu_seqlens_q,), case.longest()[:1], words
    return (case.cu_seqlens_q, cu_kv), case.longest(), words


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
