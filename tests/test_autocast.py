"""Autocast: q, k and v become its dtype, the bias stays, and each gradient has its leaf's dtype."""

import pytest
import torch
from torch import Tensor

from fusedattn import (
    fused_attention,
    fused_attention_kvpacked,
    fused_attention_qkvpacked,
    nvte_fused_attn_bwd_qkvpacked,
    nvte_fused_attn_fwd_qkvpacked,
)
from fusedattn.runs.oracle import Case, expected

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


def leaves(layout: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> list[Tensor]:
    shapes = {"t3hd": [(8, 3, 2, 8)], "thd_t2hd": [(8, 2, 8), (8, 2, 2, 8)]}.get(layout, [(2, 5, 2, 8)] * 3)
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in (*made, torch.randn(1, 2, 5, 5).to(bias_dtype))]


def call(layout: str, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    if layout == "t3hd":
        return fused_attention_qkvpacked(*tensors, cu_seqlens=CU, return_lse=True)
    if layout == "thd_t2hd":
        return fused_attention_kvpacked(*tensors, cu_seqlens_q=CU, return_lse=True)
    return fused_attention(*tensors, return_lse=True)


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize(
    ("enabled", "dtype", "bias_dtype"),
    [(True, FP32, FP32), (True, BF16, FP32), (False, BF16, FP32), (True, FP32, BF16)],
)
@pytest.mark.parametrize("layout", ["t3hd", "thd_t2hd", "bshd_bshd_bshd"])
def test_dtypes_and_values(
    layout: str, enabled: bool, dtype: torch.dtype, bias_dtype: torch.dtype, backward_inside: bool
) -> None:
    tensors = leaves(layout, dtype, bias_dtype)
    *operands, bias = tensors
    dout = torch.randn(2, 5, 2, 8) if layout == "bshd_bshd_bshd" else torch.randn(8, 2, 8)
    with torch.autocast("cpu", BF16, enabled=enabled):
        out, lse = call(layout, tensors)
        if backward_inside:
            out.backward(dout.to(out.dtype))
    if not backward_inside:
        out.backward(dout.to(out.dtype))
    assert (out.dtype, lse.dtype) == (BF16, FP32)
    assert [x.grad.dtype for x in tensors] == [dtype] * len(operands) + [bias_dtype]
    cu_seqlens = None if layout == "bshd_bshd_bshd" else CU
    case = Case(tuple(x.detach() for x in operands), layout, bias.detach(), "post_scale_bias", cu_seqlens_q=cu_seqlens)
    want = expected(case, dout)
    got = [out, lse, *(x.grad for x in tensors)]
    assert len(got) == len(want)
    for (name, right), value in zip(want.items(), got, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=2e-2, atol=2e-2 * right.abs().max().item(), msg=name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_inner_products_are_not_rounded_by_autocast(dropout: float) -> None:
    """Of bfloat16 operands, autocast changes no bit: scores, softmax and gradients stay float32 inside."""
    results = []
    words = {"dropout": dropout, "rng_state": torch.tensor([1, 2]), "return_lse": True}
    for enabled in (False, True):
        torch.manual_seed(1)
        tensors = leaves("bshd_bshd_bshd", BF16, FP32)
        with torch.autocast("cpu", BF16, enabled=enabled):
            out, lse = fused_attention(*tensors, **words)
            (out.float().sum() + lse.sum()).backward()
        results.append([out, lse, *(x.grad for x in tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_float64_and_float16_autocast() -> None:
    q = torch.randn(1, 4, 1, 8)
    with torch.autocast("cpu", torch.float16):
        assert fused_attention(q, q, q).dtype == torch.float16
        assert fused_attention(q.double(), q.double(), q.double()).dtype == FP64
        with torch.autocast("cpu", enabled=False):
            assert fused_attention(q, q, q).dtype == FP32


def test_mixed_operands_agree_after_the_conversion() -> None:
    q = torch.randn(1, 4, 1, 8)
    with torch.autocast("cpu", BF16):
        assert torch.equal(fused_attention(q, q.to(BF16), q.half().float()), fused_attention(q, q, q.half()))
    with pytest.raises(ValueError, match="argument 'k': expected the dtype of `q`, float32, got bfloat16"):
        fused_attention(q, q.to(BF16), q)


def test_nvte_functions_keep_the_dtypes_that_they_document() -> None:
    """O is like QKV and dQKV has QKV's dtype; a forward inside autocast serves a backward outside."""
    qkv, dout = torch.randn(8, 3, 2, 8), torch.randn(8, 2, 8)
    words = (5, 0.5, 0.0, "t3hd", "no_bias", "padding")

    def run(inside: bool, dqkv: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", BF16, enabled=inside):
            out, pack = nvte_fused_attn_fwd_qkvpacked(
                qkv, None, None, torch.empty(8, 2, 8), None, CU, None, words[0], True, *words[1:]
            )
        nvte_fused_attn_bwd_qkvpacked(qkv, out, dout, None, None, pack, dqkv, None, CU, *words)
        return out, dqkv

    for inside, outside in zip(run(True, torch.empty_like(qkv)), run(False, torch.empty_like(qkv)), strict=True):
        assert torch.equal(inside, outside)
