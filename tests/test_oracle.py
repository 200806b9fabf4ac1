"""What stands on either side of a comparison, and the engine held against it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedattn.reference import reference_attention
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected, keep_mask, run_case, run_case_nvte

LAYOUTS = ["t3hd", "thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"]
ORDER = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def sample(layout: str, dtype: torch.dtype = torch.float32, **changes: object) -> tuple[Case, Tensor, Tensor]:
    """A case of lengths 3 and 5, H = 2, D = 8, its dout and its dlse."""
    g = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    if layout[0] == "t":
        q, k, v, dout = (torch.randn(8, 2, 8, generator=g).to(dtype) for _ in range(4))
        operands = {"t3hd": (torch.stack([q, k, v], 1),), "thd_t2hd": (q, torch.stack([k, v], 1))}.get(
            layout, (q, k, v)
        )
        dlse = torch.randn(8, 2, generator=g)
    else:
        full = (torch.randn(2, 5, 2, 8, generator=g).to(dtype) for _ in range(4))
        *operands, dout = (x.permute(ORDER[layout[:4]]) for x in full)
        dlse = torch.randn(2, 2, 5, generator=g)
    bias = torch.randn(1, 2, 5, 5, generator=g)
    case = Case(tuple(operands), layout, bias, "post_scale_bias", "padding", cu_seqlens)
    return replace(case, **changes), dout, dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expected_is_the_reference(layout: str) -> None:
    case, dout, dlse = sample(layout)
    want = expected(case, dout, dlse)
    q, k, v = case.operands if len(case.operands) == 3 else (*case.operands[:-1], *case.operands[-1].unbind(1))
    leaves = [x.double().requires_grad_() for x in (q, k, v, case.bias)]
    out, lse = reference_attention(
        *leaves,
        qkv_format="thd" if layout[0] == "t" else layout[:4],
        bias_type="post_scale_bias",
        mask_type="padding",
        cu_seqlens_q=case.cu_seqlens_q,
        attn_scale=8**-0.5,
    )
    dq, dk, dv, dbias = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()))
    packed = {
        "t3hd": {"dqkv": torch.stack([dq, dk, dv], 1)},
        "thd_t2hd": {"dq": dq, "dkv": torch.stack([dk, dv], 1)},
    }.get(layout, {"dq": dq, "dk": dk, "dv": dv})
    same = {"out": out.detach(), "lse": lse.detach(), **packed, "dbias": dbias}
    assert list(want) == list(same)
    for name in same:
        torch.testing.assert_close(want[name], same[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_eager_errs_by_its_dtype(dtype: torch.dtype) -> None:
    case, dout, dlse = sample("thd_t2hd", dtype)
    want, got = expected(case, dout, dlse), eager(case, dout, dlse)
    assert {x: y.dtype for x, y in got.items()} == {
        "out": dtype, "lse": torch.float32, "dq": dtype, "dkv": dtype, "dbias": torch.float32
    }  # fmt: skip
    eps = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    for name in ("out", "dq", "dkv"):
        assert eps / 50 < (got[name].double() - want[name]).abs().max() < 20 * eps


def test_eager_computes_float64_in_float32() -> None:
    # The samples are the same numbers.
    double, single = (eager(*sample("t3hd", dtype)) for dtype in (torch.float64, torch.float32))
    for name, value in double.items():
        assert torch.equal(value, single[name].to(value.dtype)), name


def test_gradients_of_one_result() -> None:
    case, dout, dlse = sample("t3hd")
    both, one, two = expected(case, dout, dlse), expected(case, dout), expected(case, dlse=dlse)
    assert list(expected(case)) == ["out", "lse"]
    torch.testing.assert_close(both["dqkv"], one["dqkv"] + two["dqkv"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_dout_reaches_live_keys_only(layout: str) -> None:
    def first(x: Tensor) -> Tensor:
        """[S, H, D] of the first sequence."""
        return x.permute(ORDER[layout[:4]])[0] if layout[:4] in ORDER else x

    case, dout, dlse = sample(layout)
    case.bias[..., 0, 2:] = -math.inf
    clean = expected(case, dout, dlse)
    first(dout)[0] = math.nan
    got = expected(case, dout, dlse)
    before, after = (x["dv"] if "dv" in x else list(x.values())[-2][:, -1] for x in (clean, got))
    assert first(after)[:2].isnan().all()
    torch.testing.assert_close(first(after)[2:], first(before)[2:])


@pytest.mark.parametrize("layout", LAYOUTS[3:])
def test_nan_in_dout_past_the_lengths_changes_nothing(layout: str) -> None:
    case, dout, dlse = sample(layout)
    clean = expected(case, dout, dlse)
    dout.permute(ORDER[layout[:4]])[0, 3:] = math.nan
    dlse[0, :, 3:] = math.nan
    for name, got in expected(case, dout, dlse).items():
        assert torch.equal(got, clean[name]), name


def test_nothing_has_gradients_of_zero() -> None:
    case, dout, dlse = sample("thd_thd_thd", cu_seqlens_q=torch.tensor([0, 0, 0]), max_seqlen_q=5, max_seqlen_kv=5)
    want = expected(case, dout, dlse)
    assert all(want[name].eq(0).all() for name in ("out", "dq", "dk", "dv", "dbias"))
    assert want["dbias"].shape == (1, 2, 5, 5)


# The engine against them


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_is_within_budget(layout: str, dtype: torch.dtype) -> None:
    rng = torch.tensor([3, 5])
    for changes in ({}, {"dropout": 0.3, "rng_state": rng}, {"bias": None, "bias_type": "no_bias", "engine": "torch"}):
        case, dout, dlse = sample(layout, dtype, **changes)
        keep = keep_mask(case)
        sides = [f(case, dout, dlse, keep) for f in (expected, eager)]
        assert_within_budget(run_case(case, dout, dlse), *sides, dtype)
        scaled = run_case(replace(case, attn_scale=1.1 * case.scale), dout, dlse)
        with pytest.raises(AssertionError, match="over budget"):
            assert_within_budget(scaled, *sides, dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_nvte_is_within_budget(layout: str, dropout: float) -> None:
    case, dout, _ = sample(layout, dropout=dropout, rng_state=torch.tensor([3, 5]) if dropout else None)
    keep = keep_mask(case)
    sides = [f(case, dout, None, keep) for f in (expected, eager)]
    assert_within_budget(run_case_nvte(case, dout), *sides, torch.float32)
    with pytest.raises(AssertionError, match="over budget"):
        assert_within_budget(run_case_nvte(case, 1.1 * dout), *sides, torch.float32)
    assert list(run_case_nvte(case)) == ["out", "lse"]


@pytest.mark.parametrize("mask_type", ["padding", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keep_mask_is_the_pattern_of_the_call(layout: str, mask_type: str) -> None:
    """Lengths over several tiles, and a head dim that is not the probe's."""
    g = torch.Generator().manual_seed(0)
    ragged = layout[0] == "t"
    lengths = (150, 260) if ragged or mask_type == "padding" else (260, 260)
    shape = {"t3hd": (410, 3, 2, 16), "bshd": (2, 260, 2, 16), "sbhd": (260, 2, 2, 16), "bhsd": (2, 2, 260, 16)}
    q = torch.randn(shape.get(layout[:4], (410, 2, 16)), generator=g)
    operands = {"t3hd": (q,), "thd_t2hd": (q, torch.stack([q, q.flip(0)], 1))}.get(layout, (q, q.flip(1), q.flip(0)))
    case = Case(
        operands,
        layout,
        mask_type=mask_type,
        cu_seqlens_q=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32),
        dropout=0.3,
        rng_state=torch.tensor([3, 5]),
    )
    keep = keep_mask(case)
    assert keep is not None
    assert keep.shape == (2, 2, 260, 260)
    for b, n in enumerate(lengths):
        live = torch.ones(n, n).tril().bool() if mask_type == "causal" else torch.ones(n, n).bool()
        assert not keep[b, :, n:].any()
        assert not keep[b, :, :, n:].any()
        assert not keep[b, :, :n, :n][:, ~live].any()
        assert 0.69 < keep[b, :, :n, :n][:, live].float().mean() < 0.71
    got = run_case(case)
    assert_within_budget(got, expected(case, keep=keep), eager(case, keep=keep), torch.float32)
    other = keep_mask(replace(case, rng_state=torch.tensor([3, 6])))
    with pytest.raises(AssertionError, match="over budget"):
        assert_within_budget(got, expected(case, keep=other), eager(case, keep=other), torch.float32)


def test_keep_mask_needs_a_state() -> None:
    case, _, _ = sample("t3hd")
    assert keep_mask(case) is None
    with pytest.raises(ValueError, match="argument 'rng_state': expected int64"):
        keep_mask(replace(case, dropout=0.3))
