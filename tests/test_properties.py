"""Random shapes, lengths, strides and biases against the reference, and what must not matter to the result."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grid import DTYPES, LAYOUTS, ORDER, RAGGED, cu
from torch import Tensor

from fusedattn.devices import CPU_ENGINES
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine
from fusedattn.runs.oracle import Case, compare, eager, expected, keep_mask, run_case

STRIDES = ["plain", "last dim stride 2", "last dim outermost", "expanded", "inside a larger one"]
relaxed = settings(deadline=None, derandomize=True, max_examples=60)
thorough = settings(relaxed, max_examples=300)


def restride(x: Tensor, kind: str, heads: int = -2) -> Tensor:
    """The same numbers in other places; an expanded one repeats its first head, or row of a bias."""
    if kind == "last dim stride 2":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if kind == "last dim outermost":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if kind == "expanded":
        return x.narrow(heads, 0, min(1, x.shape[heads])).expand_as(x)
    if kind == "inside a larger one":
        larger = x.new_full([n + 2 for n in x.shape], torch.nan)
        inside = larger[tuple(slice(1, n + 1) for n in x.shape)]
        return inside.copy_(x)
    return x


@st.composite
def problems(draw: st.DrawFn, layouts: list[str] = LAYOUTS) -> tuple[Case, Tensor, Tensor | None]:
    """Any case, its dout and its dlse or none."""
    layout = draw(st.sampled_from(layouts))
    ragged, same = layout in RAGGED, layout == "t3hd"
    mask_type = draw(st.sampled_from(["no_mask", "padding", "causal"]))
    lengths_q = draw(st.lists(st.integers(0, 9), max_size=4))
    batch = len(lengths_q)
    lengths_kv = lengths_q if same else draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    room = draw(st.integers(0, 2))
    max_q, max_kv = max(lengths_q, default=0) + room, max(lengths_kv, default=0) + room
    full = not ragged and mask_type != "padding"
    if full:
        lengths_q, lengths_kv = [max_q] * batch, [max_kv] * batch
    dtype = draw(st.sampled_from(DTYPES))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tail = draw(st.integers(0, 2))

    def rows(lengths: list[int], longest: int, *middle: int) -> Tensor:
        shape = (sum(lengths) + tail, *middle) if ragged else (batch, longest)
        x = torch.randn(*shape, heads, dim, generator=g, dtype=torch.float64).to(dtype)
        x = x if ragged else x.permute(ORDER[layout[:4]]).contiguous()
        return restride(x, draw(st.sampled_from(STRIDES)), 1 if layout[:4] == "bhsd" else -2)

    counts = {"t3hd": [(3,)], "thd_t2hd": [(), (2,)]}.get(layout, [(), (), ()])
    sides = [(lengths_q, max_q), *[(lengths_kv, max_kv)] * 2]
    operands = tuple(rows(*side, *middle) for side, middle in zip(sides, counts, strict=False))
    dout = rows(lengths_q, max_q)
    bias_type = draw(st.sampled_from(["no_bias", "pre_scale_bias", "post_scale_bias"]))
    bias = None
    if bias_type != "no_bias":
        axes = (draw(st.sampled_from([1, n])) for n in (batch, heads, max_q))
        bias = torch.randn(*axes, max_kv, generator=g).to(draw(st.sampled_from(DTYPES)))
        bias = restride(bias, draw(st.sampled_from(STRIDES)))
    dropout = draw(st.sampled_from([0.0, 0.3]))
    case = Case(
        operands, layout, bias, bias_type, mask_type, None if full else cu(tuple(lengths_q)),
        None if full or same else cu(tuple(lengths_kv)),
        max_q if ragged else None, max_kv if ragged else None,
        draw(st.sampled_from([None, -0.6, 0.9])),
        dropout, torch.tensor([7, 9]) if dropout else None,
    )  # fmt: skip
    if not draw(st.booleans()):
        return case, dout, None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse_shape = run_case(case)["lse"].shape
    return case, dout, torch.randn(lse_shape, generator=g, dtype=torch.float64).to(wide)


def close(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert list(got) == list(want)
    for name in want:
        tolerance = 64 * torch.finfo(torch.float32 if name == "lse" and dtype != torch.float64 else dtype).eps
        torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


def agrees(case: Case, dout: Tensor, dlse: Tensor | None) -> None:
    """In budget, and inputs not written to."""
    inputs = [x for x in (*case.operands, case.bias, dout, dlse) if x is not None]
    before = [x.clone() for x in inputs]
    got = run_case(case, dout, dlse)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was written"
    keep = keep_mask(case)
    for c in compare(got, *(f(case, dout, dlse, keep) for f in (expected, eager)), case.operands[0].dtype):
        # On a handful of numbers eager torch may err by much less than it usually does.
        assert c.ok or c.error <= 3 * c.budget, c


@thorough
@given(problems())
def test_agrees_with_the_reference(problem: tuple[Case, Tensor, Tensor | None]) -> None:
    agrees(*problem)


@thorough
@given(problems())
def test_agrees_where_lengths_are_not_read(problem: tuple[Case, Tensor, Tensor | None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CPU_ENGINES, Engine.torch, TorchEngine(reads_lengths=False))
        agrees(*problem)


def unpacked(case: Case, results: dict[str, Tensor]) -> tuple[Case, dict[str, Tensor]]:
    """The same problem with separate q, k, v, and its results so."""
    names = {"t3hd": "dq dk dv", "thd_t2hd": "dq dkv"}[case.layout].split()
    parts = {"out": results["out"], "lse": results["lse"]}
    if case.layout == "t3hd":
        parts |= dict(zip(names, results["dqkv"].unbind(1), strict=True))
        operands = case.operands[0].unbind(1)
    else:
        parts |= {"dq": results["dq"]} | dict(zip(("dk", "dv"), results["dkv"].unbind(1), strict=True))
        operands = (case.operands[0], *case.operands[1].unbind(1))
    parts |= {x: results[x] for x in results if x == "dbias"}
    return replace(case, operands=tuple(operands), layout="thd_thd_thd"), parts


@relaxed
@given(problems(RAGGED[:2]))
def test_packed_equals_separate(problem: tuple[Case, Tensor, Tensor | None]) -> None:
    case, *seeds = problem
    separate, parts = unpacked(case, run_case(case, *seeds))
    for name, got in run_case(separate, *seeds).items():
        assert torch.equal(got, parts[name]), name


@relaxed
@given(problems(["thd_thd_thd"]))
def test_a_batch_equals_its_sequences_alone(problem: tuple[Case, Tensor, Tensor | None]) -> None:
    case, dout, dlse = problem
    case = replace(case, dropout=0.0, rng_state=None)
    q, k, v = case.operands
    together = run_case(case, dout, dlse)
    dbias = None if case.bias is None else torch.zeros_like(case.bias, dtype=torch.float64)
    for b, ((start, stop), (first, last)) in enumerate(zip(*case.spans, strict=True)):
        part = {"cu_seqlens_q": cu((stop - start,)), "cu_seqlens_kv": cu((last - first,))}
        at = slice(b, b + 1) if case.bias is not None and case.bias.shape[0] > 1 else slice(None)
        alone = run_case(
            replace(
                case, operands=(q[start:stop], k[first:last], v[first:last]), **part,
                bias=None if case.bias is None else case.bias[at],
            ),
            dout[start:stop],
            None if dlse is None else dlse[start:stop],
        )  # fmt: skip
        if dbias is not None:
            dbias[at] += alone.pop("dbias")
        spans = {"dk": slice(first, last), "dv": slice(first, last)}
        mine = {name: together[name][spans.get(name, slice(start, stop))] for name in alone}
        close(mine, alone, q.dtype)
    if dbias is not None and case.bias.dtype in (torch.float32, torch.float64) and q.dtype in DTYPES[2:]:
        torch.testing.assert_close(together["dbias"].double(), dbias, rtol=1e-4, atol=1e-4)


@relaxed
@given(problems(["bhsd_bhsd_bhsd", "thd_thd_thd"]), st.data())
def test_permuting_heads_commutes(problem: tuple[Case, Tensor, Tensor | None], data: st.DataObject) -> None:
    case, dout, dlse = problem
    case = replace(case, dropout=0.0, rng_state=None)
    order = data.draw(st.permutations(range(dout.shape[1])))

    def permuted(x: Tensor | None) -> Any:
        return None if x is None else x[:, order] if x.shape[1] == len(order) else x

    other = replace(case, operands=tuple(map(permuted, case.operands)), bias=permuted(case.bias))
    want = {name: permuted(x) for name, x in run_case(case, dout, dlse).items()}
    close(run_case(other, permuted(dout), permuted(dlse)), want, dout.dtype)


@relaxed
@given(problems(LAYOUTS[3:4]))
def test_dense_layouts_agree_bit_for_bit(problem: tuple[Case, Tensor, Tensor | None]) -> None:
    """The order of axes in memory, or of strides, does not choose other arithmetic."""
    case, dout, dlse = problem
    base = run_case(case, dout, dlse)
    for layout in LAYOUTS[4:]:
        order = ORDER[layout[:4]]
        operands = tuple(x.permute(order) for x in case.operands)
        got = run_case(replace(case, operands=operands, layout=layout), dout.permute(order), dlse)
        for name, want in base.items():
            moved = want if name in ("lse", "dbias") else want.permute(order)
            assert torch.equal(got[name], moved), f"{layout} {name}"


@relaxed
@given(problems(["thd_thd_thd"]), st.integers(1, 3))
def test_scaling_v_scales_out(problem: tuple[Case, Tensor, Tensor | None], power: int) -> None:
    """By a power of 2, exactly; lse and dv do not notice."""
    case, dout, _ = problem
    q, k, v = case.operands
    base, scaled = (run_case(replace(case, operands=(q, k, x)), dout) for x in (v, v * 2**power))
    close({"out": scaled["out"]}, {"out": base["out"] * 2**power}, q.dtype)
    for name in ("lse", "dv"):
        close({name: scaled[name]}, {name: base[name]}, q.dtype)


def test_strides_are_what_they_say() -> None:
    x = torch.randn(2, 3, 4, 5)
    for kind, other in itertools.product(STRIDES, STRIDES):
        if "expanded" not in (kind, other):
            assert torch.equal(restride(x, kind), restride(x, other))
    assert len({restride(x, kind).stride() for kind in STRIDES}) == 5
