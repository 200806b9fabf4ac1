"""Numerics cases of public bug reports: values found by hand, and NaN that must or must not show."""

import math
from dataclasses import replace

import pytest
import torch
from test_grid import judge
from torch import Tensor

from fusedattn import fused_attention, nvte_fused_attn_fwd_kvpacked
from fusedattn.devices import CPU_ENGINES
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine
from fusedattn.runs.oracle import Case, run_case

NAN, INF = math.nan, math.inf
LN2, LN3 = math.log(2), math.log(3)
POISON = [NAN, INF, -INF]
SPLIT = "bshd_bshd_bshd"


def column(*values: float, dim: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, S, 1, D]: one sequence, one head, each value in all of a row."""
    return torch.tensor(values, dtype=dtype).view(1, -1, 1, 1).repeat(1, 1, 1, dim)


def row(*values: float) -> Tensor:
    return torch.tensor(values).view(1, 1, 1, -1)


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, bias_type: str = "no_bias"
) -> dict[str, Tensor]:
    """With dout = 1."""
    return run_case(Case((q, k, v), SPLIT, bias, bias_type), torch.ones_like(q))


# N1: nothing shows of a key that is masked


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("name", ["k", "v"])
def test_n1_padding_of_length_1(name: str, value: float) -> None:
    x = torch.arange(8.0).view(1, 2, 1, 4)
    tensors = {"q": x, "k": x.clone(), "v": x.clone()}
    tensors[name][0, 1] = value
    case = Case(tuple(tensors.values()), SPLIT, None, "no_bias", "padding", cu(0, 2), cu(0, 1))
    got = run_case(case, torch.ones_like(x))
    assert torch.equal(got["out"], x[:, :1].expand_as(x))
    for gradient in ("dk", "dv"):
        assert got[gradient].isfinite().all()
        assert got[gradient][0, 1].eq(0).all()


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("name", ["k", "v"])
def test_n1_nvte_length_1(name: str, value: float) -> None:
    x = torch.arange(8.0).view(2, 1, 4)
    kv = torch.stack([x, x], 1)
    kv[1, "kv".index(name)] = value
    out, _ = nvte_fused_attn_fwd_kvpacked(
        x, kv, None, None, None, None, cu(0, 2), cu(0, 1), None, 2, 1, True, 0.5, 0.0, "thd_t2hd", "no_bias", "padding"
    )
    assert torch.equal(out, x[:1].expand_as(x))


@pytest.mark.parametrize("reads_lengths", [True, False], ids=["lengths read", "lengths unread"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse", "bias"])
def test_n1_a_number_that_is_not_masked_shows(
    name: str, value: float, dtype: torch.dtype, reads_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through its live pairs and through no others: rows 0-1 see keys 0-1, rows 2-3 see keys 2-4."""
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, TorchEngine(reads_lengths=reads_lengths))
    tensors = {x: torch.randn(1, 4, 2, 8).to(dtype) for x in ("q", "dout")}
    tensors |= {x: torch.randn(1, 5, 2, 8).to(dtype) for x in ("k", "v")}
    tensors["dlse"] = torch.randn(1, 2, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    tensors["bias"] = torch.full((1, 2, 4, 5), -INF)
    tensors["bias"][..., :2, :2] = tensors["bias"][..., 2:, 2:] = 0.5
    case = Case((tensors["q"], tensors["k"], tensors["v"]), SPLIT, tensors["bias"], "post_scale_bias")
    place = {"bias": (0, 1, 2, 3), "dlse": (0, 1, 2)}.get(name, (0, 2, 1, 3))
    tensors[name][place] = value
    judge(case, tensors["dout"], tensors["dlse"])
    judge(case, tensors["dout"])
    judge(replace(case, mask_type="causal"), tensors["dout"])
    plain = replace(case, bias=None, bias_type="no_bias")
    judge(plain, tensors["dout"])
    padded = replace(plain, mask_type="padding", cu_seqlens_q=cu(0, 3), cu_seqlens_kv=cu(0, 4))
    judge(padded, tensors["dout"])
    judge(padded, tensors["dout"], tensors["dlse"])
    judge(replace(plain, mask_type="causal"), tensors["dout"])


@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "causal"])
@pytest.mark.parametrize("scale", [NAN, 0.0, -1.5])
def test_n1_any_scale(scale: float, mask_type: str, bias_type: str) -> None:
    q, k, v, dout = torch.randn(4, 2, 7, 2, 8)
    bias = None if bias_type == "no_bias" else torch.randn(1, 2, 7, 7)
    cus = (cu(0, 7, 9), cu(0, 3, 10)) if mask_type == "padding" else (None, None)
    case = Case((q, k, v), SPLIT, bias, bias_type, mask_type, *cus, attn_scale=scale)
    judge(case, dout)
    judge(case, dout, torch.randn(2, 2, 7))
    assert run_case(case)["out"].isnan().any().item() == math.isnan(scale)


# N2


@pytest.mark.parametrize("causal", [False, True])
def test_n2_scores_beyond_fp16(causal: bool) -> None:
    q = column(64.0, 64.0, dim=64, dtype=torch.float16)
    k = column(64.0, 63.0, dim=64, dtype=torch.float16)
    v = column(1.0, 5.0, dim=64, dtype=torch.float16)
    got = run_case(Case((q, k, v), SPLIT, mask_type="causal" if causal else "no_mask"), torch.ones_like(q))
    assert torch.equal(got["out"], torch.ones_like(q))
    assert all(x.isfinite().all() for x in got.values())
    torch.testing.assert_close(got["lse"], torch.full((1, 1, 2), 32768.0))


# N5, N6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_n5_bias_counts_in_base_e(dtype: torch.dtype) -> None:
    zero, v = column(0.0, dtype=dtype), column(4.0, 0.0, dtype=dtype)
    got = attend(zero, 0 * v, v, row(LN3, 0.0), "post_scale_bias")
    tolerance = {"rtol": 0, "atol": 2e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5}
    torch.testing.assert_close(got["out"], column(3.0, dtype=dtype), **tolerance)
    torch.testing.assert_close(got["dbias"], row(0.75, -0.75), **tolerance)


@pytest.mark.parametrize("mask", ["no_mask", "full padding", "causal over all keys"])
@pytest.mark.parametrize(
    ("bias_type", "factor", "out", "dbias"),
    [
        ("post_scale_bias", 1, 3.0, (0.75, -0.75)),
        ("pre_scale_bias", 1, 4 * 3**0.5 / (1 + 3**0.5), None),
        ("pre_scale_bias", 2, 3.0, (0.375, -0.375)),
    ],
    ids=["post b", "pre b", "pre 2b"],
)
def test_n6_where_the_scale_goes(
    bias_type: str, factor: int, out: float, dbias: tuple[float, ...] | None, mask: str
) -> None:
    rows = 2 if mask.startswith("causal") else 1
    v, bias = column(4.0, 0.0, dim=4), factor * row(LN3, 0.0)
    case = Case((0 * column(*[1.0] * rows, dim=4), 0 * v, v), SPLIT, bias, bias_type)
    if mask == "full padding":
        case = replace(case, mask_type="padding", cu_seqlens_q=cu(0, 1), cu_seqlens_kv=cu(0, 2))
    elif rows == 2:
        case = replace(case, mask_type="causal")
    dout = torch.zeros(1, rows, 1, 4)
    dout[:, -1, :, 0] = 1
    got = run_case(case, dout)
    torch.testing.assert_close(got["out"][0, -1, 0], torch.full((4,), out))
    if dbias is not None:
        torch.testing.assert_close(got["dbias"], row(*dbias))


# N7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_n7_lse_is_the_full_one_and_merges(dtype: torch.dtype) -> None:
    q, k, v = (column(*x, dtype=dtype) for x in ((1.0,), (0.0, LN2, 2 * LN2), (7.0, 0.0, 0.0)))
    out, lse = fused_attention(q, k, v, return_lse=True)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (1, 1, 1)
    exact = torch.tensor([0.0, LN2, 2 * LN2]).to(dtype).double().logsumexp(0).item()
    assert lse.item() == pytest.approx(exact, abs=1e-6)
    assert out.item() == pytest.approx(1.0, abs=2e-2 if dtype == torch.bfloat16 else 2e-3)
    first, second = (fused_attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(1), slice(1, None)))
    merged = sum((x * (y - lse).exp()).item() for x, y in (first, second))
    assert merged == pytest.approx(out.item(), abs=2e-2 if dtype == torch.bfloat16 else 2e-3)


def test_n7_softmax_statistics() -> None:
    x = torch.zeros(1, 1, 1)
    kv = torch.zeros(4, 2, 1, 1)
    _, pack = nvte_fused_attn_fwd_kvpacked(
        x, kv, None, None, None, None, cu(0, 1), cu(0, 4), None, 1, 4, True, 1.0, 0.0, "thd_t2hd", "no_bias", "no_mask"
    )
    assert pack["softmax_lse"].shape == (1, 1, 1)
    assert pack["softmax_lse"].item() == pytest.approx(math.log(4), abs=1e-6)
    # After scale and bias.
    got = run_case(
        Case((column(1.0), column(1.0, 1.0), column(0.0, 0.0)), SPLIT, row(LN3, 0.0), "post_scale_bias", attn_scale=2.0)
    )
    assert got["lse"].item() == pytest.approx(2 + math.log(4), abs=1e-6)


# N9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_n9_bias_of_another_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    x = torch.randn(2, 16, 2, 8).to(dtype)
    case = Case((x, x, x), SPLIT, torch.randn(1, 2, 16, 16).to(bias_dtype), "post_scale_bias")
    got = run_case(case, torch.ones_like(x))
    assert got["dbias"].dtype == bias_dtype
    assert got["dbias"].shape == (1, 2, 16, 16)
    assert got["dbias"].isfinite().all()
    judge(case, torch.ones_like(x))
