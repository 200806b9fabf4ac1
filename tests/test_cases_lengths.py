"""Length cases of public bug reports, where lengths are read and where they are not, and lengths that are wrong."""

import math

import pytest
import torch
from test_grid import judge
from torch import Tensor

from fusedattn import SpecError, fused_attention, fused_attention_qkvpacked, nvte_fused_attn_fwd_qkvpacked
from fusedattn.devices import CPU_ENGINES
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine
from fusedattn.runs.oracle import Case, run_case, run_case_nvte

NAN, INF = math.nan, math.inf


@pytest.fixture(params=[True, False], ids=["lengths read", "lengths unread"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, TorchEngine(reads_lengths=request.param))


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def rows(*values: float) -> Tensor:
    """[T, 1, 1]."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def equal(got: Tensor, *values: float) -> None:
    torch.testing.assert_close(got.flatten(), torch.tensor(values, dtype=got.dtype), rtol=1e-6, atol=1e-6)


# L1


@pytest.mark.parametrize("mask_type", ["no_mask", "padding"])
def test_l1_documents_are_isolated(mask_type: str) -> None:
    v = rows(*range(10))
    zero = 0 * v
    case = Case((zero, zero, v), "thd_thd_thd", mask_type=mask_type, cu_seqlens_q=cu(0, 3, 7, 10))
    equal(run_case(case)["out"], 1, 1, 1, 4.5, 4.5, 4.5, 4.5, 8, 8, 8)


@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "causal"])
@pytest.mark.parametrize("layout", ["t3hd", "thd_thd_thd"])
def test_l1_equals_separate_calls(layout: str, mask_type: str) -> None:
    qkv, dout = torch.randn(10, 3, 2, 8), torch.randn(10, 2, 8)
    operands = (qkv,) if layout == "t3hd" else qkv.unbind(1)
    together = run_case(Case(tuple(operands), layout, mask_type=mask_type, cu_seqlens_q=cu(0, 3, 7, 10)), dout)
    for start, stop in ((0, 3), (3, 7), (7, 10)):
        part = Case(
            tuple(x[start:stop] for x in operands), layout, mask_type=mask_type, cu_seqlens_q=cu(0, stop - start)
        )
        for name, want in run_case(part, dout[start:stop]).items():
            torch.testing.assert_close(together[name][start:stop], want)


def test_l1_is_no_dense_layout() -> None:
    x = torch.zeros(1, 10, 1, 1)
    with pytest.raises(SpecError, match="argument 'cu_seqlens_q': "):
        fused_attention(x, x, x, attn_mask_type="padding", cu_seqlens_q=cu(0, 3, 7, 10))


# L2


def test_l2_gaps_in_bshd() -> None:
    v = torch.tensor([[1.0, 2.0, 3.0, NAN], [10.0, 20.0, NAN, NAN]]).view(2, 4, 1, 1)
    zero, lengths = torch.zeros(2, 4, 1, 1), cu(0, 3, 5)
    got = run_case(Case((zero, zero, v), "bshd_bshd_bshd", None, "no_bias", "padding", lengths), torch.ones_like(v))
    equal(got["out"], 2, 2, 2, 0, 15, 15, 0, 0)
    equal(got["lse"], *[math.log(3)] * 3, -INF, *[math.log(2)] * 2, -INF, -INF)
    equal(got["dv"], 1, 1, 1, 0, 1, 1, 0, 0)
    for name in ("dq", "dk"):
        assert got[name].isfinite().all()
        assert got[name][0, 3:].eq(0).all()
        assert got[name][1, 2:].eq(0).all()


# L3


@pytest.mark.parametrize("mask_type", ["no_mask", "padding"])
@pytest.mark.parametrize("heads", [1, 3])
def test_l3_one_query_beside_none(heads: int, mask_type: str) -> None:
    v = rows(*range(8)).expand(8, heads, 4)
    q = torch.zeros(2, heads, 4)
    lengths = {"cu_seqlens_q": cu(0, 1, 1, 2), "cu_seqlens_kv": cu(0, 3, 3, 8), "max_seqlen_q": 1, "max_seqlen_kv": 5}
    got = run_case(Case((q, 0 * v, v), "thd_thd_thd", mask_type=mask_type, **lengths))["out"]
    assert got.shape == (2, heads, 4)
    torch.testing.assert_close(got, rows(1.0, 5.0).expand(2, heads, 4))


# L5


@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["t3hd", "thd_t2hd", "thd_thd_thd"])
def test_l5_tail(layout: str, dtype: torch.dtype, mask_type: str) -> None:
    qkv, offsets = torch.randn(10, 3, 2, 8).to(dtype), cu(0, 3, 8)
    qkv[8:] = NAN

    def run(tokens: int) -> dict[str, Tensor]:
        # What is freed comes back from the allocator, with NaN in it.
        freed = [torch.full((n, m, 2, 8), NAN, dtype=dtype) for n in (8, 10) for m in (1, 2, 3)]
        freed += [torch.full((n, 2), NAN) for n in (8, 10)]
        del freed
        x = qkv[:tokens]
        operands = {"t3hd": (x,), "thd_t2hd": (x[:, 0], x[:, 1:])}.get(layout, x.unbind(1))
        case = Case(tuple(operands), layout, mask_type=mask_type, cu_seqlens_q=offsets)
        results = run_case(case, torch.ones(tokens, 2, 8, dtype=dtype))
        if len(operands) < 3:
            results |= {f"nvte {x}": y for x, y in run_case_nvte(case, torch.ones(tokens, 2, 8, dtype=dtype)).items()}
        return results

    first, second, absent = run(10), run(10), run(8)
    for name, want in absent.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name][:8], want)
        assert first[name][8:].eq(-INF if name.endswith("lse") else 0).all(), name


def test_l5_only_the_tail_is_cleared_in_an_output_in_place() -> None:
    qkv, out = torch.randn(10, 3, 2, 8), torch.full((12, 2, 8), NAN)
    words = (5, False, 1.0, 0.0, "t3hd", "no_bias", "padding")
    result = nvte_fused_attn_fwd_qkvpacked(qkv, None, None, out[1:11], None, cu(0, 3, 8), None, *words)
    assert result.O.data_ptr() == out[1:].data_ptr()
    assert out[[0, 11]].isnan().all()
    assert out[9:11].eq(0).all()
    assert out[1:9].isfinite().all()


# L7


@pytest.mark.parametrize("lengths_q", [(4, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_l7_a_sequence_without_keys(dtype: torch.dtype, bias_type: str, lengths_q: tuple[int, int]) -> None:
    q, k, v, dout = torch.randn(4, 2, 4, 2, 8).to(dtype)
    k[0] = v[0] = NAN
    bias = None if bias_type == "no_bias" else torch.randn(1, 1, 4, 4)
    offsets = cu(0, lengths_q[0], sum(lengths_q)), cu(0, 0, 4)
    case = Case((q, k, v), "bshd_bshd_bshd", bias, bias_type, "padding", *offsets)
    judge(case, dout)
    got = run_case(case, dout)
    lone = run_case(Case((q[1:], k[1:], v[1:]), "bshd_bshd_bshd", bias, bias_type), dout[1:])
    for name in ("out", "dq", "dk", "dv"):
        assert got[name][0].eq(0).all(), name
        torch.testing.assert_close(got[name][1:], lone[name], rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert got["lse"][0].eq(-INF).all()


# Spare room


@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "causal"])
def test_max_seqlen_beyond_the_longest_changes_nothing(mask_type: str, bias_type: str) -> None:
    qkv, dout, bias = torch.randn(8, 3, 2, 8), torch.randn(8, 2, 8), torch.randn(2, 2, 5, 5)
    room = torch.full((2, 2, 9, 9), NAN)
    room[..., :5, :5] = bias
    tight, wide = (
        run_case(
            Case(
                (qkv,), "t3hd", b if bias_type != "no_bias" else None, bias_type, mask_type, cu(0, 3, 8), max_seqlen_q=n
            ),
            dout,
        )
        for n, b in ((5, bias), (9, room))
    )
    for name, want in tight.items():
        if name == "dbias":
            assert wide[name][..., 5:].eq(0).all()
            assert wide[name][:, :, 5:].eq(0).all()
        torch.testing.assert_close(wide[name][..., :5, :5] if name == "dbias" else wide[name], want)


def test_int64_offsets_are_converted() -> None:
    qkv = torch.randn(8, 3, 2, 8)
    offsets = torch.tensor([0, 99, 3, 99, 8], dtype=torch.int64)[::2]
    want = fused_attention_qkvpacked(qkv, cu_seqlens=cu(0, 3, 8))
    assert torch.equal(fused_attention_qkvpacked(qkv, cu_seqlens=offsets), want)
    assert torch.equal(fused_attention_qkvpacked(qkv, cu_seqlens=offsets.contiguous().int()[:]), want)


# E2


@pytest.mark.parametrize("rows_kv", [1, 2, 10])
def test_e2_lengths_beyond_the_tensor(rows_kv: int) -> None:
    q, k = torch.zeros(4, 1, 8), torch.zeros(rows_kv, 1, 8)
    with pytest.raises(SpecError, match=rf"argument 'cu_seqlens_kv': .*{rows_kv}.*20"):
        fused_attention(q, k, k, qkv_layout="thd_thd_thd", cu_seqlens_q=cu(0, 4), cu_seqlens_kv=cu(0, 20))
    with pytest.raises(SpecError, match=r"argument 'cu_seqlens_q': .*4.*5"):
        fused_attention(q, k, k, qkv_layout="thd_thd_thd", cu_seqlens_q=cu(0, 5), cu_seqlens_kv=cu(0, rows_kv))


@pytest.mark.parametrize("side", ["q", "kv"])
def test_e2_max_seqlen_below_the_longest(side: str) -> None:
    x = torch.zeros(6, 1, 8)
    with pytest.raises(SpecError, match=rf"argument 'max_seqlen_{side}': .*4.*3"):
        fused_attention(x, x, x, qkv_layout="thd_thd_thd", cu_seqlens_q=cu(0, 4, 6), **{f"max_seqlen_{side}": 3})
