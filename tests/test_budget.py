"""The budget judged: known errors on both sides of it, and each fault detected."""

import math

import pytest
import torch

from fusedattn.runs.budget import assert_within_budget, compare

NAN, INF = math.nan, math.inf
EPS16, EPS32, EPS64 = (torch.finfo(t).eps for t in (torch.float16, torch.float32, torch.float64))


def within(
    got: list[float],
    want: list[float],
    eager: list[float] | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "out",
) -> tuple[bool, float, float, str]:
    sides = (torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64))
    measured = sides[1].to(dtype) if eager is None else torch.tensor(eager, dtype=dtype)
    [comparison] = compare({name: sides[0].to(dtype)}, {name: sides[1]}, {name: measured}, dtype)
    assert comparison.quantity == name
    return comparison.ok, comparison.error, comparison.budget, comparison.note


def test_budget_is_twice_eager_and_two_roundings() -> None:
    budget = 2 * 0.25 + 2 * EPS16 * 4
    want, eager = [1.0, -4.0], [1.25, -4.0]
    assert within([1.0, -4.0 + budget], want, eager, torch.float16) == (True, budget, budget, "worst at (1,)")
    over = budget + 4 * EPS16
    assert within([1.0, -4.0 + over], want, eager, torch.float16) == (False, over, budget, "worst at (1,)")


def test_exact_eager_leaves_two_roundings() -> None:
    assert within([1 + 2 * EPS32], [1.0])[0]
    assert not within([1 + 3 * EPS32], [1.0])[0]
    assert within([0.0], [0.0]) == (True, 0.0, 0.0, "worst at (0,)")
    assert not within([1e-30], [0.0])[0]


def test_float64_scales_the_error_of_float32() -> None:
    def check(error: float) -> bool:
        sides = ({"out": torch.tensor([x], dtype=torch.float64)} for x in (1 + error, 1.0, 1 + 1e-3))
        return compare(*sides, torch.float64)[0].ok

    # Twice the rule: what it is compared with is float64 too.
    budget = 2 * (2e-3 * EPS64 / EPS32 + 2 * EPS64)
    assert check(0.99 * budget)
    assert not check(1.01 * budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lse_has_a_tolerance_of_its_own_at_each_element(dtype: torch.dtype) -> None:
    unit = 1.0 if dtype == torch.float32 else 2 * EPS64 / EPS32
    for factor, ok in ((0.9, True), (1.1, False)):
        small, large = [factor * 1e-5 * unit, 1000.0], [0.0, 1000 + factor * 1.01e-3 * unit]
        assert within(small, [0.0, 1000.0], dtype=dtype, name="lse")[0] is ok
        assert within(large, [0.0, 1000.0], dtype=dtype, name="lse")[0] is ok
    assert within([0.0, 1001.0], [0.0, 1000.0], dtype=dtype, name="lse")[1:] == (
        1.0,
        unit * (1e-5 + 1e-3),
        "worst at (1,)",
    )
    # A small error over its budget counts beside a larger one within its own.
    mixed = within([2e-5 * unit, 1000 + 5e-4 * unit], [0.0, 1000.0], dtype=dtype, name="lse")
    assert (mixed[0], mixed[3]) == (False, "worst at (0,)")
    # And twice what torch in float32 errs, where that is more.
    assert within([1.9e-4 * unit], [0.0], [1e-4], dtype, "lse")[0]
    assert not within([2.1e-4 * unit], [0.0], [1e-4], dtype, "lse")[0]


@pytest.mark.parametrize("overflown", [INF, NAN])
def test_eager_is_measured_where_it_is_finite(overflown: float) -> None:
    want, eager = [1.0, 2.0], [overflown, 2.0 + 2**-8]
    budget = 2 * 2**-8 + 4 * EPS16
    assert within([1.0, 2.0], want, eager, torch.float16) == (True, 0.0, budget, "worst at (0,)")
    assert not within([1.0 + 2 * budget, 2.0], want, eager, torch.float16)[0]


def test_dbias_counts_the_coarser_dtype() -> None:
    def check(bias_dtype: torch.dtype, dtype: torch.dtype, name: str = "dbias") -> float:
        one = torch.ones(1, dtype=bias_dtype)
        return compare({name: one}, {name: one.double()}, {name: one}, dtype)[0].budget

    assert check(torch.float32, torch.float16) == 2 * EPS16
    assert check(torch.float16, torch.float32) == 2 * EPS16
    assert check(torch.float16, torch.float32, "dq") == 2 * EPS32


# Faults


@pytest.mark.parametrize("got", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("want", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_places_of_nan_and_inf(name: str, got: float, want: float) -> None:
    same = got == want or (math.isnan(got) and math.isnan(want))
    ok, error, _, note = within([1.0, got], [1.0, want], name=name)
    assert ok is same
    assert (error == 0) is same
    assert same or "1 places differ, first (1,): got " in note


def test_errors_beside_what_is_not_finite_count() -> None:
    assert within([INF, NAN, 1.0], [INF, NAN, 1.0])[0]
    assert not within([INF, NAN, 1.1], [INF, NAN, 1.0])[0]


def test_overflow_in_the_dtype_that_came_is_no_fault() -> None:
    assert within([INF, 1.0], [70000.0, 1.0], [INF, 1.0], torch.float16)[0]
    assert not within([-INF, 1.0], [70000.0, 1.0], [INF, 1.0], torch.float16)[0]
    assert not within([INF, 1.0], [70000.0, 1.0], [INF, 1.0], torch.float32)[0]


def test_missing_and_misshapen_quantities() -> None:
    one = torch.ones(1)
    full = {"out": one, "dq": one}
    for i, side in enumerate(("got", "want", "eager")):
        sides = [dict(full), dict(full), dict(full)]
        del sides[i]["dq"]
        assert [(c.quantity, c.ok, c.note) for c in compare(*sides, torch.float32)] == [
            ("out", True, "worst at (0,)"),
            ("dq", False, f"missing in {side}"),
        ]
    [found] = compare({"out": torch.ones(2, 1)}, {"out": one}, {"out": one}, torch.float32)
    assert not found.ok
    assert found.note == "shapes differ: got (2, 1), want (1,), eager (1,)"
    [found] = compare({"out": torch.ones(0)}, {"out": torch.ones(0)}, {"out": torch.ones(0)}, torch.float32)
    assert found.ok


def test_assertion_names_the_worst() -> None:
    one = {"out": torch.ones(2), "dq": torch.ones(2, 2), "dk": torch.ones(1)}
    assert_within_budget(one, one, one, torch.float32)
    got = {"out": torch.tensor([1.0, 1.5]), "dq": torch.tensor([[1.0, 1.0], [3.0, 1.0]]), "dk": torch.ones(1)}
    with pytest.raises(AssertionError) as raised:
        assert_within_budget(got, one, one, torch.float32)
    assert str(raised.value).splitlines() == [
        "dq: error 2.000e+00 over budget 2.384e-07, worst at (1, 0)",
        "out: error 5.000e-01 over budget 2.384e-07, worst at (1,)",
    ]
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_within_budget({}, {}, {}, torch.float32)
