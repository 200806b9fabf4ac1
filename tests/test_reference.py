"""The reference against values found by hand, against pure Python, and against poison in dead pairs."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusedattn.reference import reference_attention

NAN, INF = math.nan, math.inf
LN2, LN3 = math.log(2), math.log(3)


def column(*values: float) -> Tensor:
    """float64 [1, S, 1, 1]: one sequence, one head, D = 1, format bshd."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


def row(*values: float) -> Tensor:
    """float64 bias [1, 1, 1, Skv]."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def bshd(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **kwargs: object) -> tuple[Tensor, Tensor]:
    kwargs = {"attn_scale": 1.0, "bias_type": "no_bias" if bias is None else "post_scale_bias"} | kwargs
    return reference_attention(q, k, v, bias, qkv_format="bshd", **kwargs)  # type: ignore[arg-type]


def thd(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **kwargs: object) -> tuple[Tensor, Tensor]:
    """Like bshd, of [1, T, 1, 1] operands made ragged."""
    kwargs = {"attn_scale": 1.0, "bias_type": "no_bias" if bias is None else "post_scale_bias"} | kwargs
    return reference_attention(q[0], k[0], v[0], bias, qkv_format="thd", **kwargs)  # type: ignore[arg-type]


def equal(got: Tensor, *values: float) -> None:
    torch.testing.assert_close(
        got.detach().flatten(), torch.tensor(values, dtype=got.dtype), rtol=1e-14, atol=1e-15, equal_nan=True
    )


# Numerics


def test_masked_key_is_never_seen() -> None:  # N1
    x = torch.arange(8.0).view(1, 2, 1, 4)
    for poison in ("k", "v"):
        for value in (NAN, INF, -INF):
            q, k, v = (x.clone() for _ in range(3))
            {"k": k, "v": v}[poison][0, 1] = value
            for kwargs in (
                {"mask_type": "padding", "cu_seqlens_q": cu(0, 2), "cu_seqlens_kv": cu(0, 1)},
                {"bias": row(0, -INF)},
            ):
                leaves = tuple(y.clone().requires_grad_() for y in (q, k, v))
                out, _ = bshd(*leaves, **kwargs)
                equal(out, *(0.0, 1.0, 2.0, 3.0) * 2)
                dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
                assert dq.isfinite().all()
                assert dk[0, 1].eq(0).all()
                assert dv[0, 1].eq(0).all()


def test_float16_scores_beyond_its_range() -> None:  # N2
    q = torch.full((1, 1, 1, 64), 64.0, dtype=torch.float16, requires_grad=True)
    k = torch.tensor([64.0, 63.0], dtype=torch.float16).view(1, 2, 1, 1).expand(1, 2, 1, 64).requires_grad_()
    v = torch.tensor([1.0, 5.0], dtype=torch.float16).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    out, lse = bshd(q, k, v, attn_scale=0.125)
    equal(out, *[1.0] * 64)
    equal(lse, 32768.0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k)))
    overflown, _ = bshd(q, k, v, attn_scale=0.125, matmul_dtype=torch.float16, softmax_dtype=torch.float32)
    assert overflown.isnan().all()


def test_eager_dtypes() -> None:
    q, bias = torch.randn(1, 3, 1, 4, dtype=torch.bfloat16), torch.randn(1, 1, 1, 3)
    out, lse = bshd(q, q, q, bias, matmul_dtype=torch.bfloat16, softmax_dtype=torch.float32)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_bias_is_natural() -> None:  # N5
    bias = row(LN3, 0).requires_grad_()
    out, lse = bshd(column(0), column(0, 0), column(4, 0), bias)
    equal(out, 3.0)
    equal(lse, math.log(4))
    equal(torch.autograd.grad(out.sum(), bias)[0], 0.75, -0.75)


@pytest.mark.parametrize(
    ("bias_type", "factor", "out_is", "dbias_is"),
    [
        ("post_scale_bias", 1, 3.0, 0.75),
        ("pre_scale_bias", 1, 4 * math.sqrt(3) / (1 + math.sqrt(3)), None),
        ("pre_scale_bias", 2, 3.0, 0.375),
    ],
)
def test_where_scale_acts(bias_type: str, factor: float, out_is: float, dbias_is: float | None) -> None:  # N6
    bias = (factor * row(LN3, 0)).requires_grad_()
    q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 2, 1, 4), column(4, 0).expand(1, 2, 1, 4)
    out, _ = bshd(q, k, v, bias, attn_scale=0.5, bias_type=bias_type)
    equal(out, *[out_is] * 4)
    if dbias_is is not None:
        equal(torch.autograd.grad(out[..., 0].sum(), bias)[0], dbias_is, -dbias_is)


def test_lse_is_full() -> None:  # N7
    k, v = column(0, LN2, 2 * LN2), column(7, 0, 0)
    out, lse = bshd(column(1), k, v)
    equal(out, 1.0)
    equal(lse, math.log(7))
    parts = [bshd(column(1), k[:, at], v[:, at]) for at in (slice(0, 1), slice(1, 3))]
    equal(sum(o.view(()) * (part - lse).exp() for o, part in parts), 1.0)
    equal(bshd(column(0), column(0, 0, 0, 0), column(1, 2, 3, 4))[1], math.log(4))


def test_scale_of_any_value() -> None:
    q, k, v = column(1), column(LN3, 0), column(4, 0)
    equal(bshd(q, k, v, attn_scale=-1.0)[0], 1.0)
    equal(bshd(q, k, v, attn_scale=0.0)[0], 2.0)
    for result in bshd(q, k, v, attn_scale=NAN):
        equal(result, NAN)


@pytest.mark.parametrize(
    ("q", "k", "v", "bias", "scale", "out_is", "lse_is"),
    [
        (1, (INF, 0), (4, 0), (0, 0), 1.0, NAN, INF),
        (1, (-INF, LN2), (4, 1), (0, 0), 1.0, 1, LN2),
        (1, (-INF, LN2), (NAN, 1), (0, 0), 1.0, NAN, LN2),
        (0, (0, 0), (4, 1), (INF, 0), 1.0, NAN, INF),
        (0, (0, 0), (4, 1), (NAN, 0), 1.0, NAN, NAN),
        (0, (0, 0), (NAN, 1), (INF, 0), -1.0, 1, 0),  # scaled, the bias is -inf: a dead pair
        (0, (0, 0), (4, 1), (-INF, 0), -1.0, NAN, INF),
    ],
)
def test_infinite_scores(
    q: float,
    k: tuple[float, ...],
    v: tuple[float, ...],
    bias: tuple[float, ...],
    scale: float,
    out_is: float,
    lse_is: float,
) -> None:
    out, lse = bshd(column(q), column(*k), column(*v), row(*bias), attn_scale=scale, bias_type="pre_scale_bias")
    equal(out, out_is)
    equal(lse, lse_is)


# Masks and lengths


@pytest.mark.parametrize("q_there", [0.0, NAN])
@pytest.mark.parametrize("seed_there", [0.0, NAN, INF])
def test_rows_without_a_key(q_there: float, seed_there: float) -> None:  # M1
    bias = torch.tensor([[0.0, 0], [-INF, -INF], [0, -INF]], dtype=torch.float64).view(1, 1, 3, 2)
    leaves = tuple(x.requires_grad_() for x in (column(0, q_there, 0), column(0, 0), column(1, 3), bias))
    out, lse = bshd(*leaves)
    equal(out, 2, 0, 1)
    equal(lse, LN2, -INF, 0)
    seeds = column(1, seed_there, 1), torch.tensor([[[0.0, seed_there, 0.0]]], dtype=torch.float64)
    dq, dk, dv, dbias = torch.autograd.grad((out, lse), leaves, seeds)
    equal(dq, 0, 0, 0)
    equal(dk, 0, 0)
    equal(dv, 1.5, 0.5)
    equal(dbias, -0.5, 0.5, 0, 0, 0, 0)


def test_row_with_no_score_above_minus_inf() -> None:
    leaves = tuple(x.requires_grad_() for x in (column(1, 0.5), column(-INF, -INF), column(NAN, 2)))
    out, lse = bshd(*leaves)
    equal(out, 0, 0)
    equal(lse, -INF, -INF)
    for grad in torch.autograd.grad((out, lse), leaves, (torch.full_like(out, NAN), torch.full_like(lse, NAN))):
        equal(grad, 0, 0)


def test_causal_is_top_left() -> None:  # M3
    out, lse = bshd(column(0, 0), column(*[0] * 5), column(0, 1, 2, 3, 4), mask_type="causal")
    equal(out, 0, 0.5)
    equal(lse, 0, LN2)
    tall, _ = bshd(column(0, 0, 0), column(0, 0), column(2, 4), mask_type="causal")
    equal(tall, 2, 3, 3)


def test_causal_within_each_sequence() -> None:
    v = column(1, 3, 10, 20, 60)
    out, _ = thd(0 * v, 0 * v, v, mask_type="causal", cu_seqlens_q=cu(0, 2, 5))
    equal(out, 1, 2, 10, 15, 30)


@pytest.mark.parametrize("mask_type", ["no_mask", "padding"])
def test_sequences_are_isolated(mask_type: str) -> None:  # L1
    v = column(*range(10))
    out, lse = thd(0 * v, 0 * v, v, mask_type=mask_type, cu_seqlens_q=cu(0, 3, 7, 10))
    equal(out, *[1] * 3, *[4.5] * 4, *[8] * 3)
    equal(lse.exp(), *[3] * 3, *[4] * 4, *[3] * 3)


def test_empty_sequence() -> None:  # L3
    v = column(*range(8))
    out, lse = thd(column(0, 0), 0 * v, v, cu_seqlens_q=cu(0, 1, 1, 2), cu_seqlens_kv=cu(0, 3, 3, 8))
    assert (out.shape, lse.shape) == ((2, 1, 1), (2, 1))
    equal(out, 1, 5)


def test_tail_of_ragged_tensors() -> None:  # L5
    torch.manual_seed(0)
    clean = [torch.randn(1, 10, 1, 3, dtype=torch.float64) for _ in range(3)]
    results = []
    for tail in (0.0, NAN):
        leaves = tuple(torch.cat([x[:, :8], x[:, 8:] * 0 + tail], 1).requires_grad_() for x in clean)
        out, lse = thd(*leaves, cu_seqlens_q=cu(0, 3, 8))
        results.append([out, lse, *(g[0] for g in torch.autograd.grad(out.sum() + lse[:8].sum(), leaves))])
    for without, poisoned in zip(*results, strict=True):
        assert torch.equal(without, poisoned)
        assert poisoned[8:].isneginf().all() if poisoned.dim() == 2 else poisoned[8:].eq(0).all()


@pytest.mark.parametrize("cu_q", [cu(0, 4, 8), cu(0, 0, 4), None])
def test_dense_lengths(cu_q: Tensor | None) -> None:  # L7
    torch.manual_seed(0)
    leaves = tuple(torch.randn(2, 4, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse = bshd(*leaves, mask_type="padding", cu_seqlens_q=cu_q, cu_seqlens_kv=cu(0, 0, 4))
    alone, lse_alone = bshd(*(x[1:] for x in leaves))
    got, want = (torch.autograd.grad(x.sum(), leaves) for x in (out, alone))
    for x, y in ((out, alone), *((g, w[1:]) for g, w in zip(got, want, strict=True))):
        assert x[0].eq(0).all()
        assert torch.equal(x[1:], y)
    assert lse[0].isneginf().all()
    assert torch.equal(lse[1:], lse_alone)
    assert torch.equal(bshd(*leaves, cu_seqlens_q=cu(0, 1, 2))[0], bshd(*leaves)[0])


def test_query_rows_past_their_length() -> None:
    v = column(1, 3, NAN)
    out, lse = bshd(0 * column(1, 1, 1), 0 * v, v, mask_type="padding", cu_seqlens_q=cu(0, 2))
    equal(out, 2, 2, 0)
    equal(lse, LN2, LN2, -INF)


@pytest.mark.parametrize("cu_seqlens", [cu(0), cu(0, 0), cu(0, 0, 0)])
def test_nothing_at_all(cu_seqlens: Tensor) -> None:  # S6
    v = column(1, 2)
    out, lse = thd(v, v, v, cu_seqlens_q=cu_seqlens)
    equal(out, 0, 0)
    equal(lse, -INF, -INF)
    for q_shape, kv_shape in itertools.product([(0, 2, 1, 1), (2, 2, 0, 1), (2, 2, 1, 0), (2, 0, 1, 1)], repeat=2):
        if q_shape[0] == kv_shape[0] and q_shape[2:] == kv_shape[2:]:
            q, k = torch.zeros(q_shape), torch.zeros(kv_shape)
            assert bshd(q, k, k)[0].shape == q_shape
    equal(bshd(column(1, 1), column(), column())[1], -INF, -INF)


# Gradients


@pytest.mark.parametrize(("batch", "dbias_is"), [(2, [0.25, -0.25] * 2), (1, [0.5, -0.5])])
def test_bias_gradient_over_batch(batch: int, dbias_is: list[float]) -> None:  # G3
    bias = torch.zeros(batch, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    v = column(1, 0).expand(2, 2, 1, 1)
    out, _ = bshd(torch.zeros(2, 1, 1, 1), 0 * v, v, bias)
    equal(torch.autograd.grad(out.sum(), bias)[0], *dbias_is)


def test_gradient_through_lse() -> None:  # G5
    leaves = tuple(x.requires_grad_() for x in (column(0), column(2, 0), row(0, 0)))
    _, lse = bshd(leaves[0], leaves[1], column(1, 1), leaves[2])
    dq, dk, dbias = torch.autograd.grad(lse.sum(), leaves)
    equal(dq, 1)
    equal(dk, 0, 0)
    equal(dbias, 0.5, 0.5)


def test_dropout() -> None:
    v = column(4, 0, 2, 8).requires_grad_()
    keep = torch.tensor([[[[True, False, True, False, True]]]])  # wider than the problem
    out, lse = bshd(column(0), 0 * v.detach(), v, dropout=0.5, keep=keep)
    equal(out, 3)
    equal(lse, math.log(4))
    equal(torch.autograd.grad(out.sum(), v)[0], 0.5, 0, 0.5, 0)
    out, _ = bshd(column(0), 0 * v.detach(), v, dropout=0.3, keep=keep)
    equal(out, 1.5 / 0.7)  # in float64, not float32
