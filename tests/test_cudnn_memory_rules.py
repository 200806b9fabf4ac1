"""What the cuDNN engine reads and writes: lengths that lie, rows that a tile over-reads, memory that is not its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_hostile import LAYOUTS, NAN, RAGGED, Hostile, Options, run, run_nvte
from cudnn_interpreter import InterpretingExecutor
from torch import Tensor

import fusedattn
from fusedattn import runtime
from fusedattn.runs.oracle import Case
from fusedattn.target import TARGETS

KINDS = ("a100", "h100", "b200", "rtx5090")
ROWS = 12
# Of 12 rows: before them, decreasing, past their end, and as far as 32 bits go.
BAD = (-(2**31), -5, -1, 0, 3, 7, 11, ROWS, ROWS + 1, 40, 2**31 - 1)
CALM = Options(q=(5, 7), kv=(5, 7), tail=0, heads=2)


def with_lengths(h: Hostile, *lengths: list[int], **changes: Any) -> Hostile:
    """The same tensors, and lengths that they were not made for."""
    of_q, of_kv = (torch.tensor(each, dtype=torch.int32) for each in lengths)
    of_kv = None if h.case.layout == "t3hd" else of_kv
    h.case = Case(**{**vars(h.case), "cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv, **changes})
    return h


def bad_lengths(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    of_q, of_kv = ([draw.choice(BAD) for _ in range(5)] for _ in range(2))
    return of_q, of_kv


def on(target: str, h: Hostile, nvte: bool = False) -> dict[str, Tensor]:
    with runtime.pretend(TARGETS[target], InterpretingExecutor()):
        return run_nvte(h) if nvte else run(h)


def calm(layout: str, **changes: Any) -> Hostile:
    """A problem of 12 rows, all of finite numbers."""
    if layout in RAGGED:
        o = replace(CALM, layout=layout, q=(ROWS,) * 1 + (0,) * 3, kv=(ROWS,) * 1 + (0,) * 3, **changes)
    else:
        o = replace(CALM, layout=layout, mask="padding", q=(ROWS,) * 4, kv=(ROWS,) * 4, **changes)
    return Hostile(o)


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, equal_nan=False)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("layout", RAGGED)
def test_bad_ragged_lengths_are_clamped(layout: str, target: str) -> None:
    """As if they were what is left of them: in [0, T] and never decreasing. The interpreter sees every access."""
    for seed in range(6):
        mask, dropout = ("causal", 0.0) if seed % 2 else ("no_mask", 0.3)
        options = {"mask": mask, "dropout": dropout, "seed": seed}
        lengths = bad_lengths(seed)
        clamped = [[*itertools.accumulate((min(max(n, 0), ROWS) for n in each), max)] for each in lengths]
        got, want = (on(target, with_lengths(calm(layout, **options), *each)) for each in (lengths, clamped))
        equal(got, want)
        if layout != "thd_thd_thd":
            # The buffers of the nvte functions lie among canaries.
            equal(on(target, with_lengths(calm(layout, **options), *lengths), nvte=True), want)
        # What flows through lse is the torch engine's, which makes other sense of offsets that decrease.
        through_lse = on(target, with_lengths(calm(layout, **options, dlse=True), *lengths))
        assert all(x.isfinite().all() for name, x in through_lse.items() if name != "lse")


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS[3:])
def test_bad_dense_lengths_are_clamped(layout: str, target: str) -> None:
    """To [0, S]; differences of numbers of 32 bits wrap around."""
    for seed in range(6):
        lengths = bad_lengths(seed)
        options = {"dropout": 0.3 if seed % 2 else 0.0, "dlse": seed % 3 == 0, "seed": seed}
        clamped = [
            [*itertools.accumulate((min(max(wrapped(b - a), 0), ROWS) for a, b in itertools.pairwise(each)), initial=0)]
            for each in lengths
        ]
        got, want = (on(target, with_lengths(calm(layout, **options), *each)) for each in (lengths, clamped))
        equal(got, want)


def wrapped(difference: int) -> int:
    return (difference + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("bias", ["", "bhqk"])
def test_sequences_longer_than_max_seqlen_are_cut(target: str, bias: str) -> None:
    """What the cut leaves of them is computed; the rows behind are in no sequence."""
    longest = 5
    for layout in RAGGED:
        o = replace(CALM, layout=layout, q=(longest,) * 2, kv=(longest,) * 2, tail=2, bias=bias, wanted="qkv")
        cut = with_lengths(Hostile(o), [0, 5, 10], [0, 5, 10])
        long = with_lengths(Hostile(o), [0, 5, 12], [0, 5, 12])
        equal(on(target, long), on(target, cut))


# What is over-read.


def poisoned(o: Options, name: str, row: int) -> Hostile:
    """NaN in one row of the first sequence of K or V."""
    h = Hostile(o)
    tensor = h.case.operands["qkv".index(name)]
    tensor[(row,) if o.ragged else (0, row)] = NAN
    return h


TILE = 128
SPLIT = Options("thd_thd_thd", q=(2, 3), kv=(4, 130), heads=1, tail=200)
PADDED = Options("bshd_bshd_bshd", q=(2, 3), kv=(4, 130), max_kv=200, heads=1, mask="padding")
CAUSAL = Options("bshd_bshd_bshd", q=(200,), kv=(300,), heads=1, mask="causal")


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(("o", "row"), [(SPLIT, 5), (SPLIT, 127), (PADDED, 4), (PADDED, 127)], ids=str)
def test_the_documented_exception_past_a_length(o: Options, row: int, name: str) -> None:
    """What is not finite in a row of K or V past a sequence's last, in the same tile, makes its results NaN."""
    h = poisoned(o, name, row)
    got = on("h100", h)
    first = got["out"][:2] if o.ragged else got["out"][0, :2]
    assert first.isnan().any()
    if not o.ragged:
        assert got["out"][1, :3].isfinite().all()
    noted(h.case)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(("o", "row"), [(SPLIT, 4 + 130 + 150), (PADDED, 128), (PADDED, 199)], ids=str)
def test_no_exception_past_the_tile(o: Options, row: int, name: str) -> None:
    if o.ragged:
        # Row 134 + 122 is the end of the second sequence's second tile; what follows is read by nobody.
        assert row > 4 + 2 * TILE
    h = poisoned(o, name, row)
    for target in KINDS:
        got = on(target, h)
        assert all(got[x].isfinite().all() for x in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("name", ["k", "v"])
def test_the_documented_exception_under_a_causal_mask(name: str) -> None:
    """A key that no row may see makes those rows NaN that share its tile, and no others."""
    got = on("h100", poisoned(replace(CAUSAL, wanted=""), name, 140))["out"][0, :, 0]
    assert got[:TILE].isfinite().all()
    assert got[TILE:140].isnan().any()
    noted(poisoned(CAUSAL, name, 140).case)


def test_the_torch_engine_has_no_exception() -> None:
    for o, row in ((SPLIT, 5), (PADDED, 4), (CAUSAL, 250)):
        h = poisoned(replace(o, engine="torch"), "v", row)
        got = on("h100", h)
        live = got["out"][:2] if o.ragged else got["out"][0, :2]
        assert live.isfinite().all()
        assert not explained(h.case).notes


def explained(case: Case) -> fusedattn.Explanation:
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "attn_scale", "engine")
        call = {name: getattr(case, name) for name in names}
        return fusedattn.explain(
            *case.operands, qkv_layout=case.layout, attn_mask_type=case.mask_type, bias=case.bias, **call
        )


def noted(case: Case) -> None:
    (note,) = explained(case).notes
    assert "not finite past the end" in note
    assert "128" in note


def test_a_problem_without_such_keys_has_no_note() -> None:
    assert not explained(Hostile(Options("bshd_bshd_bshd", q=(2, 2), kv=(3, 3))).case).notes
