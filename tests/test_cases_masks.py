"""Mask cases of public bug reports, where lengths are read and where they are not, and poison at dead pairs."""

import math
from dataclasses import replace

import pytest
import torch
from test_grid import judge
from torch import Tensor

from fusedattn.devices import CPU_ENGINES
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine
from fusedattn.runs.oracle import Case, run_case

NAN, INF = math.nan, math.inf
SPLIT = "bshd_bshd_bshd"


@pytest.fixture(params=[True, False], ids=["lengths read", "lengths unread"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, TorchEngine(reads_lengths=request.param))


def column(*values: float) -> Tensor:
    """[1, S, 1, 1]: one sequence, one head, D = 1."""
    return torch.tensor(values).view(1, -1, 1, 1)


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def equal(got: Tensor, *values: float) -> None:
    torch.testing.assert_close(got.flatten(), torch.tensor(values, dtype=got.dtype), rtol=1e-6, atol=1e-6)


# M1


def test_m1_bias_of_minus_infinity() -> None:
    v = column(1.0, 3.0)
    bias = torch.tensor([[0.0, 0.0], [-INF, -INF], [0.0, 0.0]]).view(1, 1, 3, 2)
    q = column(0.0, 0.0, 0.0)
    got = run_case(Case((q, v * 0, v), SPLIT, bias, "post_scale_bias"), torch.ones_like(q), torch.ones(1, 1, 3))
    equal(got["out"], 2.0, 0.0, 2.0)
    equal(got["lse"], math.log(2), -INF, math.log(2))
    equal(got["dv"], 1.0, 1.0)
    equal(got["dbias"], 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    assert all(x.isfinite().all() for name, x in got.items() if name != "lse")


@pytest.mark.parametrize("value", [1.0, NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_m1_a_dead_row_gives_nothing_back(bias_type: str, dtype: torch.dtype, value: float) -> None:
    """Not even where its query and its gradients are poison."""
    q, dout = torch.randn(2, 1, 3, 1, 4).to(dtype)
    k, v = torch.randn(2, 1, 5, 1, 4).to(dtype)
    dlse, bias = torch.randn(1, 1, 3), torch.randn(1, 1, 3, 5)
    bias[0, 0, 1] = -INF
    alive = [0, 2]
    lone = Case((q[:, alive], k, v), SPLIT, bias[:, :, alive], bias_type)
    want = run_case(lone, dout[:, alive], dlse[..., alive])
    q[:, 1], dout[:, 1], dlse[..., 1] = value, value, value
    got = run_case(Case((q, k, v), SPLIT, bias, bias_type), dout, dlse)
    assert got["out"][:, 1].eq(0).all()
    assert got["lse"][..., 1].eq(-INF).all()
    assert got["dq"][:, 1].eq(0).all()
    assert got["dbias"][:, :, 1].eq(0).all()
    for name, rows in (("out", (slice(None), alive)), ("dq", (slice(None), alive)), ("dk", ()), ("dv", ())):
        torch.testing.assert_close(got[name][rows], want[name])


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_m1_the_scaled_bias_decides(bias_type: str, scale: float) -> None:
    """A pre-scale bias of -inf is +inf under a negative scale, NaN under 0."""
    q, k, v, dout = torch.randn(4, 1, 3, 1, 4)
    bias = torch.randn(1, 1, 3, 3)
    bias[0, 0, 1] = bias[0, 0, 2, 0] = -INF
    judge(Case((q, k, v), SPLIT, bias, bias_type, attn_scale=scale), dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "causal"])
def test_m1_a_query_of_infinity_may_be_a_dead_row(mask_type: str, dtype: torch.dtype) -> None:
    """Its scores are all -inf; the other rows' gradients know nothing of it."""
    q, k, v, dout = torch.randn(4, 2, 6, 2, 8).to(dtype)
    q[0, 3, 0, 0], k[0, :, 0, 0] = INF, -1.0
    offsets = (cu(0, 5, 11), cu(0, 4, 10)) if mask_type == "padding" else (None, None)
    case = Case((q, k, v), SPLIT, None, "no_bias", mask_type, *offsets)
    judge(case, dout)
    judge(case, dout, torch.randn(2, 2, 6))
    got = run_case(case, dout)
    assert got["lse"][0, 0, 3] == -INF
    assert got["out"][0, 3, 0].eq(0).all()
    assert all(got[name].isfinite().all() for name in ("dq", "dk", "dv"))


# M3


@pytest.mark.parametrize(
    ("rows", "keys", "want"),
    [
        (2, 5, (0.0, 0.5)),
        (5, 2, (0.0, 0.5, 0.5, 0.5, 0.5)),
        (3, 3, (0.0, 0.5, 1.0)),
        (1, 3, (0.0,)),
        (3, 1, (0.0,) * 3),
    ],
)
def test_m3_causal_is_top_left(rows: int, keys: int, want: tuple[float, ...]) -> None:
    q, v = torch.zeros(1, rows, 1, 1), torch.arange(float(keys)).view(1, keys, 1, 1)
    equal(run_case(Case((q, 0 * v, v), SPLIT, mask_type="causal"))["out"], *want)
    ragged = Case((q[0], 0 * v[0], v[0]), "thd_thd_thd", None, "no_bias", "causal", cu(0, rows), cu(0, keys))
    equal(run_case(ragged)["out"], *want)


# N1, M1: what lies at a dead place reaches nothing


def sequences(lengths: tuple[int, ...], longest: int, ragged: bool) -> list[tuple[int | slice, ...]]:
    """Where the rows past each length lie in [B, S, ...], or past the last in [T, ...]."""
    if ragged:
        return [(slice(sum(lengths), None),)]
    return [(b, slice(n, longest)) for b, n in enumerate(lengths)]


def dead_places(mask_type: str, ragged: bool) -> dict[str, list[tuple[int | slice, ...]]]:
    """Of q (and out), of k and v, and of bias, for the lengths of `dead_problem`."""
    if mask_type == "causal":
        # Keys past the last query; pairs above the diagonal.
        late = [(slice(3, 7),), (slice(9, 12),)] if ragged else [(slice(None), slice(3, 7))]
        return {"q": [], "kv": late, "bias": [(..., i, slice(i + 1, None)) for i in range(3)]}
    pairs = (
        [(..., slice(None), slice(6, None)), (..., slice(3, None), slice(None))] if ragged else [(..., slice(6, None))]
    )
    return {"q": sequences((3, 2), 3, ragged), "kv": sequences((4, 6), 7, ragged), "bias": pairs}


def dead_problem(mask_type: str, ragged: bool, dtype: torch.dtype, bias_type: str) -> tuple[Case, Tensor, Tensor]:
    """Dense: S 3 and 7. Lengths are 3, 2 and 4, 6, or under a causal mask 3, 2 and 7, 5 (ragged) or full."""
    causal = mask_type == "causal"
    lengths_kv = (7, 5) if causal else (4, 6)
    shape_q = (5 if causal else 6, 2, 8) if ragged else (2, 3, 2, 8)
    shape_kv = (12, 2, 8) if ragged else (2, 7, 2, 8)
    q, dout = torch.randn(2, *shape_q).to(dtype)
    k, v = torch.randn(2, *shape_kv).to(dtype)
    dlse = torch.randn(shape_q[:-1]) if ragged else torch.randn(2, 2, 3)
    full = causal and not ragged
    case = Case(
        (q, k, v), "thd_thd_thd" if ragged else SPLIT, torch.randn(1, 2, 3, 7), bias_type, mask_type,
        None if full else cu(0, 3, 5), None if full else cu(0, lengths_kv[0], sum(lengths_kv)),
        max_seqlen_q=3, max_seqlen_kv=7,
    )  # fmt: skip
    return (replace(case, bias=None) if bias_type == "no_bias" else case), dout, dlse


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias_type", ["no_bias", "post_scale_bias"])
@pytest.mark.parametrize("ragged", [False, True], ids=["bshd", "thd"])
@pytest.mark.parametrize("mask_type", ["padding", "causal"])
def test_n1_poison_at_dead_places(
    mask_type: str, ragged: bool, bias_type: str, dtype: torch.dtype, value: float
) -> None:
    places = dead_places(mask_type, ragged)
    for through_lse in (False, True):
        case, dout, dlse = dead_problem(mask_type, ragged, dtype, bias_type)
        clean = run_case(case, dout, dlse if through_lse else None)
        q, k, v = case.operands
        rows = dlse if ragged else dlse.mT
        for x, name in ((q, "q"), (dout, "q"), (rows, "q"), (k, "kv"), (v, "kv"), (case.bias, "bias")):
            for place in places[name] if x is not None else ():
                x[place] = value
        inputs = [x for x in (q, k, v, dout, dlse, case.bias) if x is not None]
        before = [x.clone() for x in inputs]
        judge(case, dout, dlse if through_lse else None)
        got = run_case(case, dout, dlse if through_lse else None)
        for name, want in clean.items():
            assert (got[name] - want).abs().nan_to_num().max() < (0.1 if dtype == torch.bfloat16 else 1e-5), name
        for name, kind in (("out", "q"), ("dq", "q"), ("dk", "kv"), ("dv", "kv"), ("dbias", "bias")):
            for place in places[kind] if name in got else ():
                assert got[name][place].eq(0).all(), name
        for x, copy in zip(inputs, before, strict=True):
            assert torch.equal(x.nan_to_num(), copy.nan_to_num()), "an input was written"
