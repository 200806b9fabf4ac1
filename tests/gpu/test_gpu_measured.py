"""What is assumed of cuDNN and was not seen: measured and noted here; nothing is demanded of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gpu_problems import Measured, kept
from torch import Tensor

from fusedattn import nvte_fused_attn_fwd_qkvpacked, rules
from fusedattn.engines import cudnn
from fusedattn.enums import Engine
from fusedattn.runs.oracle import Case, eager, expected, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_memory_of_plans")]
LENGTHS, ROWS, HEADS, DIM = (70, 0, 131), 140, 2, 64


def rows(device: torch.device, *last: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(*last, generator=g).to(device, torch.bfloat16)


def starts(device: torch.device, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def dense(device: torch.device, lengths: tuple[int, ...] = LENGTHS) -> Case:
    """``[B, S, H, D]``, padded."""
    q, k, v = rows(device, 3, len(lengths), ROWS, HEADS, DIM).unbind(0)
    cu = starts(device, lengths)
    return Case((q, k, v), "bshd_bshd_bshd", mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu, engine="cudnn")


def ragged(device: torch.device, lengths: tuple[int, ...] = LENGTHS, tail: int = 9) -> Case:
    """``[T, H, D]`` with rows past the last sequence."""
    q, k, v = rows(device, 3, sum(lengths) + tail, HEADS, DIM).unbind(0)
    cu, longest = starts(device, lengths), max(lengths)
    sizes = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return Case((q, k, v), "thd_thd_thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, **sizes, engine="cudnn")


def outside(case: Case) -> Tensor:
    """bool: the rows that no sequence owns."""
    if case.qkv_format == "thd":
        return torch.arange(case.operands[0].shape[0]) >= sum(LENGTHS)
    return torch.arange(ROWS) >= torch.tensor(LENGTHS)[:, None]


def live(case: Case, results: dict[str, Tensor]) -> dict[str, str]:
    """For each result, what is in the rows of sequences."""
    return {name: kind(results[name].cpu()[~outside(case)]) for name in ("out", "dq", "dk", "dv")}


def kind(x: Tensor) -> str:
    if x.isnan().any():
        return "nan"
    return "inf" if x.isinf().any() else "finite"


@pytest.mark.parametrize("format", ["dense", "ragged"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_nan_in_rows_that_no_sequence_owns(name: str, format: str, device: torch.device, measured: Measured) -> None:
    case = (dense if format == "dense" else ragged)(device)
    mask = outside(case).to(device)
    dout = rows(device, *case.operands[0].shape)
    poisoned = dict(zip(("q", "k", "v", "dout"), (*case.operands, dout), strict=True))
    poisoned[name] = poisoned[name].masked_fill(mask[..., None, None], math.nan)
    *operands, dout = poisoned.values()
    found = live(case, run_case(replace(case, operands=tuple(operands)), dout))
    measured(f"NaN in padding of {name}, {format}", found)


@pytest.mark.parametrize("format", ["dense", "ragged"])
def test_rows_as_cudnn_leaves_them(
    format: str, device: torch.device, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "rows_without_key", lambda *args: None)
    lengths_kv = (70, 5, 0)
    case = (dense if format == "dense" else ragged)(device, (70, 0, 60))
    case = replace(case, cu_seqlens_kv=starts(device, lengths_kv))
    found = run_case(case)
    out, lse = found["out"].cpu(), found["lse"].cpu()
    no_key = (out[2, :60], lse[2, :, :60]) if format == "dense" else (out[70:130], lse[70:130])
    measured(f"out of rows without a key, {format}", {"out": _value(no_key[0]), "lse": _value(no_key[1])})
    if format == "dense":
        measured("out of rows past a length, dense", {"out": _value(out[0, 70:]), "lse": _value(lse[0, :, 70:])})


def test_rows_past_the_last_sequence_as_cudnn_leaves_them(
    device: torch.device, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "rows_without_key", lambda *args: None)
    qkv = rows(device, 140, 3, HEADS, DIM)
    out = torch.full((140, HEADS, DIM), 7.0, dtype=qkv.dtype, device=device)
    cu = starts(device, (60, 71))
    scalars = (71, True, 0.125, 0.0, "t3hd", "no_bias", "padding")
    nvte_fused_attn_fwd_qkvpacked(qkv, None, None, out, None, cu, None, *scalars, engine="cudnn")
    measured("out past the last sequence, ragged", "untouched" if bool((out[131:] == 7.0).all()) else _value(out[131:]))


def _value(x: Tensor) -> str:
    for value in (0.0, -math.inf, math.inf):
        if bool((x == value).all()):
            return str(value)
    if bool(x.isnan().all()):
        return "nan"
    return f"mixed, {kind(x)}"


def test_a_negative_scale(device: torch.device, measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = tuple(row for row in rules.RULES[Engine.cudnn] if row.name != "sign of the scale")
    assert len(guarded) == len(rules.RULES[Engine.cudnn]) - 1
    monkeypatch.setitem(rules.RULES, Engine.cudnn, guarded)
    case = replace(ragged(device), attn_scale=-0.125)
    dout = rows(device, *case.operands[0].shape)
    measured("relative errors of attn_scale -0.125, and eager's", errors(case, dout))


@pytest.mark.parametrize("format", ["dense", "ragged"])
def test_a_scale_of_zero(format: str, device: torch.device, measured: Measured) -> None:
    """A kernel that scales scores after it has masked them multiplies minus infinity by it."""
    case = replace((dense if format == "dense" else ragged)(device), attn_scale=0.0)
    found = live(case, run_case(case, rows(device, *case.operands[0].shape)))
    measured(f"results of attn_scale 0, {format}", found)


def test_tiles_of_keys_that_the_bias_rules_out(device: torch.device, measured: Measured) -> None:
    """All keys of the first tile, or of the last, but not of the row."""
    q, k, v, dout = rows(device, 4, 2, 256, HEADS, DIM).unbind(0)
    bias = torch.zeros(1, HEADS, 256, 256, dtype=q.dtype, device=device)
    bias[:, :, :100, :128] = -math.inf
    bias[:, :, 100:200, 128:] = -math.inf
    case = Case((q, k, v), "bshd_bshd_bshd", bias, "post_scale_bias", engine="cudnn")
    measured("relative errors with tiles that the bias rules out, and eager's", errors(case, dout))


def errors(case: Case, dout: Tensor) -> dict[str, tuple[float, float]]:
    """For each result the largest error over the largest value, and that of eager torch."""
    got = {name: x.cpu() for name, x in run_case(case, dout).items()}
    there = replace(
        case,
        operands=tuple(x.cpu() for x in case.operands),
        bias=None if case.bias is None else case.bias.cpu(),
        cu_seqlens_q=None if case.cu_seqlens_q is None else case.cu_seqlens_q.cpu(),
        cu_seqlens_kv=None if case.cu_seqlens_kv is None else case.cu_seqlens_kv.cpu(),
    )
    want, other = expected(there, dout.cpu()), eager(there, dout.cpu())
    return {name: (_error(got[name], truth), _error(other[name], truth)) for name, truth in want.items()}


def _error(got: Tensor, truth: Tensor) -> float:
    finite = truth.isfinite()
    error = torch.where(finite, (got.double() - truth).abs(), 0.0).nan_to_num(math.inf).max()
    # JSON has no infinity.
    return min(float(error) / float(truth[finite].abs().max()), 1e30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_error_of_dbias(dtype: torch.dtype, device: torch.device, measured: Measured) -> None:
    q, k, v, dout = rows(device, 4, 8, 128, HEADS, DIM).to(dtype).unbind(0)
    bias = rows(device, 1, HEADS, 128, 128).to(dtype)
    case = Case((q, k, v), "bshd_bshd_bshd", bias, "post_scale_bias", engine="cudnn")
    measured(f"relative errors with dBias over 8 sequences, {dtype}, and eager's", errors(case, dout))


def test_what_the_pattern_of_dropout_depends_on(device: torch.device, measured: Measured) -> None:
    state = torch.tensor([3, 5], device=device)
    case = replace(ragged(device, (100, 60), tail=0), dropout=0.5, rng_state=state)
    base = kept(case, DIM)
    assert base is not None

    def same(other: Tensor | None) -> bool:
        assert other is not None
        return torch.equal(other[:2, :, :100, :100], base[:, :, :100, :100])

    longer = replace(case, max_seqlen_q=300, max_seqlen_kv=300)
    more = replace(case, cu_seqlens_q=_with_empty(case.cu_seqlens_q), cu_seqlens_kv=_with_empty(case.cu_seqlens_kv))
    biased = replace(case, bias=rows(device, 1, HEADS, 100, 100), bias_type="post_scale_bias")
    found = {
        "head dimension": not same(kept(case, 128)),
        "bucket of the length": not same(kept(longer, DIM)),
        "bucket of the batch": not same(kept(more, DIM)),
        "bias": not same(kept(biased, DIM)),
        "nothing": not same(kept(case, DIM)),
    }
    measured("what the pattern of dropout depends on", found)
    measured("share of probabilities kept at p = 0.5", float(base[0, :, :100, :100].float().mean()))


def _with_empty(cu_seqlens: Tensor | None) -> Tensor:
    assert cu_seqlens is not None
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(3)])
