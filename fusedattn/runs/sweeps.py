"""From a problem to its cases: every combination of its sweep, with a readable name."""

from __future__ import annotations

import itertools
from typing import TypeVar

from fusedattn.runs.config import Geometry

P = TypeVar("P", bound=Geometry)


def expand(problem: P) -> list[P]:
    """The cases of a problem: itself, or every combination of its sweep, named `name: value, field=value`.

    Args:
        problem: A problem, with or without a sweep.

    Returns:
        Problems without a sweep.

    Raises:
        pydantic.ValidationError: a combination that no problem may have.
    """
    sweep = problem.sweep
    if sweep is None:
        return [problem]
    axes = {f: getattr(sweep, f) for f in type(sweep).model_fields if f in sweep.model_fields_set}
    fixed = {f: getattr(problem, f) for f in problem.model_fields_set - {"sweep"}}
    cases = []
    for values in itertools.product(*axes.values()):
        swept = dict(zip(axes, values, strict=True))
        name = ", ".join(_said(field, value) for field, value in swept.items())
        cases.append(type(problem).model_validate(fixed | swept | {"name": f"{problem.name}: {name}"}))
    return cases


def _said(field: str, value: object) -> str:
    if field == "is_training":
        return "training" if value else "inference"
    if field in ("layout", "mask", "dtype", "op"):
        return str(value)
    return f"{field}={value}".replace(" ", "")
