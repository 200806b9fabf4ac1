"""Where the interpreter is as unkind as cuDNN, and what a kind one would do instead."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_handmade import Handmade, Problem

NAN, INF = math.nan, math.inf
LENS = {"lens_q": (5, 1, 3), "lens_kv": (2, 7, 4)}
PADDED = Problem(**LENS)
THD = Problem(layout="thd", **LENS)
TILES = Problem(b=1, h=1, s_q=140, s_kv=300, lens_q=(140,), lens_kv=(200,))


def ran(made: Handmade, backward: bool = True, **options: Any) -> Handmade:
    made.run(**options)
    if backward:
        made.run(backward=True, **options)
    return made


def poisoned(problem: Problem, name: str, row: int, **options: Any) -> Handmade:
    """A run after NaN was put into one row of K or V of the first sequence."""
    made = Handmade(problem)
    tensor = made.tensors[name]
    (tensor[0, :, row] if tensor.dim() == 4 else tensor[row]).fill_(NAN)
    return ran(made, **options)


def nans(made: Handmade, name: str, i: int = 0) -> set[bool]:
    return set(made.block(name, i).isnan().flatten().tolist())


# Keys past a length, and what a causal mask rules out.


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("problem", [PADDED, replace(PADDED, layout="bs3hd"), replace(PADDED, causal=True), THD])
def test_rows_past_a_length_are_multiplied_by_0(problem: Problem, name: str) -> None:
    made = poisoned(problem, name, problem.lens_kv[0])
    assert nans(made, "o") == {True}
    assert nans(made, "dQ") == {True}
    assert nans(poisoned(problem, name, problem.lens_kv[0], unkind=False), "o") == {False}


@pytest.mark.parametrize(("row", "read"), [(200, True), (255, True), (256, False), (299, False)])
@pytest.mark.parametrize("name", ["k", "v"])
def test_tiles_are_read_to_their_end(name: str, row: int, read: bool) -> None:
    made = poisoned(TILES, name, row)
    assert nans(made, "o") == nans(made, "dQ") == {read}


def test_tiles_of_ragged_tensors_are_read_to_the_end_of_the_storage() -> None:
    problem = Problem(b=2, h=1, layout="thd", lens_q=(1, 1), lens_kv=(2, 7))
    assert nans(poisoned(problem, "v", 8), "o", 0) == {True}
    for name in ("k", "v"):
        made = Handmade(problem)
        # The same rows, with one more before and behind them that no sequence has.
        longer = torch.full((11, 1, 8), NAN, dtype=problem.dtype)
        longer[1:10] = made.tensors[name]
        made.tensors[name] = longer[1:10]
        ran(made)
        for i in range(2):
            assert nans(made, "o", i) == nans(made, "dQ", i) == {True}


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_causal_mask_multiplies_its_tile_by_0(name: str) -> None:
    problem = Problem(b=1, h=1, s_q=200, s_kv=300, causal=True)
    assert poisoned(problem, name, 127, backward=False).block("o", 0).isnan()[0, :, 0].all()
    made = poisoned(problem, name, 128, backward=False).block("o", 0)[0, :, 0].isnan()
    assert made.tolist() == [False] * 128 + [True] * 72


def test_large_numbers_there_do_no_harm() -> None:
    made = ran(Handmade(PADDED))
    for i in range(3):
        assert nans(made, "o", i) | nans(made, "dQ", i) | nans(made, "dK", i) == {False}


# Rows without a key, without a partner, and past a length.


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize(
    ("options", "out", "stats"),
    [({}, NAN, NAN), ({"backend_version": 92500}, 0.0, -INF), ({"unkind": False}, 0.0, -INF)],
)
def test_rows_without_a_key(layout: str, options: dict[str, Any], out: float, stats: float) -> None:
    made = Handmade(Problem(layout=layout, lens_q=(5, 1, 3), lens_kv=(2, 0, 4)))
    ran(made, **options)
    for name, value in (("o", out), ("stats", stats), ("dQ", out)):
        got = made.block(name, 1)
        torch.testing.assert_close(got, torch.full_like(got, value), equal_nan=True)
        assert nans(made, name, 0) == {False}


def test_keys_without_a_query() -> None:
    for options, expected in (({}, {True}), ({"backend_version": 92500}, {False})):
        made = ran(Handmade(Problem(layout="thd", lens_q=(5, 0, 3), lens_kv=(2, 7, 4))), **options)
        assert nans(made, "dK", 1) == nans(made, "dV", 1) == expected


def test_a_row_whose_bias_is_minus_infinity_is_nan() -> None:
    made = Handmade(Problem(bias=(3, 1, 5, 7)))
    made.tensors["bias"][0, :, 2] = -INF
    made.tensors["bias"][0, :, 3, 1:] = -INF
    made.run(backend_version=92500)
    for name in ("o", "stats"):
        assert made.block(name, 0)[0, :, 0].isnan().tolist() == [False, False, True, False, False]


def test_bias_of_pairs_that_are_ruled_out_does_not_count() -> None:
    made = Handmade(replace(PADDED, bias=(3, 2, 5, 7), causal=True))
    live = torch.ones(5, 7).tril() > 0
    for i in range(3):
        made.tensors["bias"][i, :, :, made.lens_kv[i] :] = NAN
        made.tensors["bias"][i, :, ~live] = NAN
    ran(made)
    assert set().union(*(nans(made, name, i) for name in ("o", "dQ", "dK") for i in range(3))) == {False}
    assert not made.tensors["dBias"].isnan().any()


@pytest.mark.parametrize("name", ["o", "stats", "dQ", "dK", "dV"])
def test_rows_past_a_length_are_written_with_nan(name: str) -> None:
    for unkind in (True, False):
        made = ran(Handmade(PADDED), unkind=unkind)
        lens = made.lens_kv if name in ("dK", "dV") else made.lens_q
        for i, length in enumerate(lens):
            past = made.tensors[name][i, :, length:]
            assert past.isnan().all() if unkind else (past == (-INF if name == "stats" else 0)).all()
            assert nans(made, name, i) == {False}


@pytest.mark.parametrize("value", [-INF, NAN])
def test_bad_statistics_poison_a_backward(value: float) -> None:
    made = ran(Handmade(THD), backward=False)
    made.block("stats", 2)[0, 1] = value
    made.run(backward=True)
    assert not made.block("dQ", 2)[0, 1].isfinite().any()
    assert not made.block("dV", 2)[0].isfinite().any()
    assert made.block("dQ", 1).isfinite().all()
