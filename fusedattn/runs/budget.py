"""The error budget: a result against float64, allowed twice the error of eager torch and two roundings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Comparison(NamedTuple):
    """One quantity against its budget.

    Attributes:
        quantity: "out", "lse", "dqkv", ...
        error: The error where it is worst; inf where a tensor is missing, or shapes or places of NaN differ.
        budget: What is allowed there.
        ok: Whether the error keeps within the budget.
        note: Where the error is worst, or what differs.
    """

    quantity: str
    error: float
    budget: float
    ok: bool
    note: str


def compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], eager: Mapping[str, Tensor], dtype: torch.dtype
) -> list[Comparison]:
    """Each quantity against its budget; a quantity that one side lacks fails.

    The places of NaN, inf and -inf must be those of ``want``, rounded to the dtype that came. Elsewhere
    |got - want| may be 2 max|eager - want| + 2 eps max|want|, or for "lse" 1e-5 + 1e-6 |want|, each its own,
    and at least 2 max|eager - want|.

    Args:
        got: What an engine computed, by `run_case`.
        want: The same by `expected`, float64.
        eager: The same by `eager`. For float64 problems it computes in float32, so its errors and the
            tolerance of lse are scaled by eps(float64) / eps(float32), and the budget is doubled, since ``want``
            errs as much.
        dtype: The operands' dtype; its eps counts, or for "dbias" the bias's, if that is coarser.

    Returns:
        One comparison a quantity, in the order of ``want``.

    Raises:
        Nothing.

    Example:
        >>> one, two = torch.ones(2), torch.full((2,), 1.001)
        >>> [c] = compare({"out": two}, {"out": one.double()}, {"out": one}, torch.float32)
        >>> c.ok, f"{c.error:.3f}", f"{c.budget:.1e}", c.note
        (False, '0.001', '2.4e-07', 'worst at (0,)')
    """
    comparisons = []
    for name in dict.fromkeys([*want, *got]):
        lacking = [side for side, of in (("got", got), ("want", want), ("eager", eager)) if name not in of]
        if lacking:
            comparisons.append(Comparison(name, torch.inf, 0.0, False, f"missing in {', '.join(lacking)}"))
        else:
            comparisons.append(_compare(name, got[name].detach(), want[name].detach(), eager[name].detach(), dtype))
    return comparisons


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison that is nearest to its budget, or furthest beyond it.

    Args:
        comparisons: What `compare` returned, at least one.

    Returns:
        One of them; a failed one, if there is one.

    Raises:
        ValueError: There is none.

    Example:
        >>> near, far = (Comparison("out", error, 1.0, True, "") for error in (0.9, 0.1))
        >>> worst([far, near]) is near
        True
    """
    return max(comparisons, key=_severity)


def _severity(comparison: Comparison) -> tuple[bool, float]:
    ratio = comparison.error / comparison.budget if comparison.budget > 0 else comparison.error
    return not comparison.ok, math.inf if math.isnan(ratio) else ratio


def assert_within_budget(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], eager: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Demand that `compare`, with the same arguments, finds every quantity, and at least one, in budget.

    Raises:
        AssertionError: Naming the worst quantity, its place, error and budget, and the other failures.

    Example:
        >>> ones = {"out": torch.ones(2)}
        >>> assert_within_budget(ones, ones, ones, torch.float32)
        >>> assert_within_budget({"out": torch.zeros(2)}, ones, ones, torch.float32)
        Traceback (most recent call last):
        AssertionError: out: error 1.000e+00 over budget 2.384e-07, worst at (0,)
    """
    comparisons = compare(got, want, eager, dtype)
    failed = [c for c in comparisons if not c.ok]
    failed.sort(key=lambda c: c.error / c.budget if c.budget else torch.inf, reverse=True)
    lines = [f"{c.quantity}: error {c.error:.3e} over budget {c.budget:.3e}, {c.note}" for c in failed]
    if not comparisons:
        lines = ["nothing to compare"]
    if lines:
        raise AssertionError("\n".join(lines))


def _compare(name: str, got: Tensor, want: Tensor, eager: Tensor, dtype: torch.dtype) -> Comparison:
    if not got.shape == want.shape == eager.shape:
        shapes = f"got {tuple(got.shape)}, want {tuple(want.shape)}, eager {tuple(eager.shape)}"
        return Comparison(name, torch.inf, 0.0, False, f"shapes differ: {shapes}")
    rounded = want.to(got.dtype)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        differs = kind(got) != kind(rounded)
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            values = f"{int(differs.sum())} places differ, first {place}: got {got[place]}, want {want[place]}"
            return Comparison(name, torch.inf, 0.0, False, f"{kind.__name__}: {values}")

    precision = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    scaling = precision if dtype == torch.float64 else 1.0
    finite = rounded.isfinite()
    want = torch.where(finite, want.double(), 0)
    error = torch.where(finite, got.double() - want, 0).abs()
    # Eager torch overflows where an engine need not (fp16 scores): what it has left is its measure.
    eager_error = torch.where(finite & eager.isfinite(), eager.double() - want, 0).abs()
    if name == "lse":
        # Large logits are rounded by more than the law allows, by torch in float32 as well.
        law = scaling * (1e-5 + 1e-6 * want.abs())
        budget = law.clamp(min=2 * scaling * _max(eager_error))
    else:
        eps = max(torch.finfo(t).eps for t in (dtype, eager.dtype if name == "dbias" else dtype))
        budget = torch.full_like(want, 2 * scaling * _max(eager_error) + 2 * eps * _max(want.abs()))
    if dtype == torch.float64:
        # What it is compared with is float64 too, and errs as much.
        budget = 2 * budget
    if not error.numel():
        return Comparison(name, 0.0, 0.0, True, "empty")
    index = int((error - budget).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), error.shape))
    worst, allowed = float(error[place]), float(budget[place])
    return Comparison(name, worst, allowed, worst <= allowed, f"worst at {place}")


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
