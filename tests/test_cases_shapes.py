"""Shape and stride cases of public bug reports."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_grid import LAYOUTS, RAGGED, judge
from torch import Tensor

from fusedattn import (
    SpecError,
    fused_attention,
    fused_attention_kvpacked,
    fused_attention_qkvpacked,
    nvte_fused_attn_bwd_qkvpacked,
    nvte_fused_attn_fwd_qkvpacked,
)
from fusedattn.runs.oracle import Case, run_case


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def gradients(call: Callable[..., Tensor], dout: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of leaves, which may have any strides."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out = call(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


# S1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "bshd_bshd_bshd"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
def test_s1_heads_of_one_projection(mask_type: str, layout: str, dtype: torch.dtype) -> None:
    parent = torch.randn(6, 2, 6, 8).to(dtype)
    q, k, v = parent.split(2, dim=2)
    dout = torch.randn_like(q)

    def call(*tensors: Tensor) -> Tensor:
        return fused_attention(*tensors, qkv_layout=layout, attn_mask_type=mask_type)

    strided = gradients(call, dout, q, k, v)
    copies = gradients(call, dout, *(x.contiguous() for x in (q, k, v)))
    for got, want in zip(strided, copies, strict=True):
        assert torch.equal(got, want)
    # Through the split itself.
    parent.requires_grad_()
    call(*parent.split(2, dim=2)).backward(dout)
    assert torch.equal(parent.grad, torch.cat(copies[1:], 2))


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_s1_packed_equals_separate(dtype: torch.dtype, axis: int) -> None:
    """Whichever axis of the parent holds the matrices."""
    parent = torch.randn(7, 3, 2, 8).to(dtype)
    qkv, dout, offsets = (
        parent.movedim(1, axis).contiguous().movedim(axis, 1),
        torch.randn(7, 2, 8).to(dtype),
        cu(0, 3, 7),
    )
    q, k, v = parent.unbind(1)
    lengths = {"cu_seqlens_q": offsets, "attn_mask_type": "causal"}
    out, *separate = gradients(lambda *x: fused_attention(*x, qkv_layout="thd_thd_thd", **lengths), dout, q, k, v)
    got = gradients(lambda x: fused_attention_qkvpacked(x, cu_seqlens=offsets, attn_mask_type="causal"), dout, qkv)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], torch.stack(separate, 1))
    got = gradients(lambda q, kv: fused_attention_kvpacked(q, kv, **lengths), dout, q, qkv[:, 1:])
    assert torch.equal(got[0], out)
    assert torch.equal(got[2], torch.stack(separate[1:], 1))


# S3

VIEWS: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    "last dim stride 2": lambda s, dtype: torch.randn(2, s, 3, 16).to(dtype)[..., ::2],
    "transposed": lambda s, dtype: torch.randn(2, 3, s, 8).to(dtype).transpose(1, 2),
    "expanded heads": lambda s, dtype: torch.randn(2, s, 1, 8).to(dtype).expand(2, s, 3, 8),
    "expanded batch": lambda s, dtype: torch.randn(1, s, 3, 8).to(dtype).expand(2, s, 3, 8),
    "reversed axes": lambda s, dtype: torch.randn(8, 3, s, 2).to(dtype).permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [33, 65])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_s3_strides(view: Callable[[int, torch.dtype], Tensor], with_bias: bool, keys: int, dtype: torch.dtype) -> None:
    q, k, v, dout = (view(n, dtype) for n in (7, keys, keys, 7))
    leaves = [q, k, v, *([torch.randn(1, 1, 7, keys).expand(2, 3, 7, keys)] if with_bias else [])]
    before = [x.clone() for x in (*leaves, dout)]
    strided = gradients(fused_attention, dout, *leaves)
    copies = gradients(fused_attention, dout.contiguous(), *(x.contiguous() for x in leaves))
    for got, want, leaf in zip(strided, copies, [q, *leaves], strict=True):
        assert got.shape == leaf.shape
        ulp = 2**-7 * want.abs().clamp(min=2**-9) if dtype == torch.bfloat16 else torch.tensor(1e-6)
        assert ((got - want).abs() <= ulp).all()
    for x, copy in zip((*leaves, dout), before, strict=True):
        assert torch.equal(x, copy)


def test_s3_gradient_of_the_leaf_behind_a_view() -> None:
    base = torch.randn(2, 5, 1, 16, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    q = torch.randn(2, 5, 3, 8)
    k = base[..., ::2].expand(2, 5, 3, 8)
    fused_attention(q, k, k, bias.expand(2, 3, 5, 5)).sum().backward()
    want = gradients(
        lambda k, b: fused_attention(q, k, k, b), torch.ones_like(q), k.contiguous(), bias.expand(2, 3, 5, 5)
    )
    torch.testing.assert_close(base.grad[..., ::2], want[1].sum(2, keepdim=True))
    assert base.grad[..., 1::2].eq(0).all()
    torch.testing.assert_close(bias.grad, want[2].sum((0, 1, 2)))


# S6

DENSE = {"B=0": (0, 3, 4, 2, 8), "Sq=0": (2, 0, 4, 2, 8), "Skv=0": (2, 2, 0, 2, 8), "all 0": (0, 0, 0, 2, 8)}


def no_numbers(case: Case, dout: Tensor) -> None:
    """Zeros of the right shapes and dtypes throughout, lse -inf."""
    got = run_case(case, dout)
    wanted = dict(zip(list(got)[2:], [*case.operands, *([] if case.bias is None else [case.bias])], strict=True))
    for name, like in {"out": dout, **wanted}.items():
        assert got[name].shape == like.shape, name
        assert got[name].dtype == like.dtype, name
        assert got[name].eq(0).all(), name
    assert got["lse"].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sizes", DENSE.values(), ids=DENSE)
def test_s6_zero_sized(
    sizes: tuple[int, ...], dropout: float, with_bias: bool, mask_type: str, dtype: torch.dtype
) -> None:
    batch, rows, keys, heads, dim = sizes
    rng_state = torch.tensor([1, 2]) if dropout else None
    for layout, order in (("bshd", (0, 1, 2, 3)), ("sbhd", (1, 0, 2, 3)), ("bhsd", (0, 2, 1, 3))):
        q, k, v = (torch.randn(batch, s, heads, dim).to(dtype).permute(order) for s in (rows, keys, keys))
        bias = torch.randn(1, heads, rows, keys) if with_bias else None
        bias_type = "post_scale_bias" if with_bias else "no_bias"
        case = Case((q, k, v), "_".join([layout] * 3), bias, bias_type, mask_type, dropout=dropout, rng_state=rng_state)
        no_numbers(case, torch.ones_like(q))


@pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("layout", RAGGED)
def test_s6_no_sequence(layout: str, tokens: int, offsets: tuple[int, ...]) -> None:
    shapes = {"t3hd": [(tokens, 3, 2, 8)], "thd_t2hd": [(tokens, 2, 8), (tokens, 2, 2, 8)]}
    operands = tuple(torch.randn(shape) for shape in shapes.get(layout, [(tokens, 2, 8)] * 3))
    no_numbers(Case(operands, layout, cu_seqlens_q=cu(*offsets)), torch.ones(tokens, 2, 8))


def test_s6_nvte_of_nothing() -> None:
    qkv, offsets = torch.randn(0, 3, 2, 8), cu(0)
    words = (0, 1.0, 0.0, "t3hd", "no_bias", "padding")
    out, pack = nvte_fused_attn_fwd_qkvpacked(qkv, None, None, None, None, offsets, None, 0, True, *words[1:])
    assert out.shape == (0, 2, 8)
    assert pack["softmax_lse"].shape == (0, 2, 1)
    got = nvte_fused_attn_bwd_qkvpacked(qkv, out, out, None, None, pack, None, None, offsets, *words)
    assert got.dQKV.shape == qkv.shape


@pytest.mark.parametrize(("heads", "dim"), [(0, 8), (2, 0), (0, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_s6_no_head_or_no_dim(layout: str, heads: int, dim: int) -> None:
    """An empty result or an error, never a crash."""
    shapes: dict[str, list[Any]] = {"t3hd": [(4, 3)], "thd_t2hd": [(4,), (4, 2)], "thd_thd_thd": [(4,)] * 3}
    shapes |= {"bshd_bshd_bshd": [(2, 4)] * 3, "sbhd_sbhd_sbhd": [(4, 2)] * 3}
    operands = tuple(torch.ones(*shape, heads, dim) for shape in shapes.get(layout, []))
    operands = operands or (torch.ones(2, heads, 4, dim),) * 3
    case = Case(operands, layout, cu_seqlens_q=cu(0, 4) if layout in RAGGED else None, attn_scale=1.0)
    with contextlib.suppress(SpecError):
        assert 0 in run_case(case)["out"].shape


# S7


@pytest.mark.parametrize("rows", [1, 7, 63, 65, 129])
def test_s7_lengths_beside_tile_sizes(rows: int) -> None:
    for keys, layout in itertools.product([1, 7, 63, 64, 65, 100, 129], ["bshd_bshd_bshd", "thd_thd_thd"]):
        q, dout = torch.randn(2, 1, rows, 2, 16)
        k, v = torch.randn(2, 1, keys, 2, 16)
        case = Case((q, k, v), layout)
        if layout in RAGGED:
            dout, offsets = dout[0], {"cu_seqlens_q": cu(0, rows), "cu_seqlens_kv": cu(0, keys)}
            case = Case((q[0], k[0], v[0]), layout, **offsets)
        judge(case, dout)
