"""A `verify` run: every case is computed, and compared with the float64 reference within the error budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fusedattn.runs import oracle
from fusedattn.runs.budget import compare, worst
from fusedattn.runs.config import VerifyProblem, VerifyRun
from fusedattn.runs.inputs import Inputs, build
from fusedattn.runs.public_calls import engine_of
from fusedattn.runs.sweeps import expand

_STATISTICS = ("out", "lse")
_EXPECT_BUDGETS = 2.0
"""Another program's result and ours may each be a budget away from the reference, so two from each other."""


@dataclass(frozen=True)
class VerifyRow:
    """One comparison: a case, a direction, and what it was compared with.

    Attributes:
        case: Name of the case.
        op: Word of the op.
        engine: Word of the engine that computed, or of the one asked for where none did.
        direction: "forward" (out and lse) or "backward" (gradients).
        against: "reference", or "file" for a result that the tensor file expects.
        ok: Whether every quantity is within its budget.
        error: Error of the quantity that is nearest to its budget, or furthest beyond it; or None.
        budget: Budget of that quantity.
        time_ms: Wall time of the call; a backward includes its forward.
        quantity: Which quantity that is: "out", "dq", ...
        note: What went wrong; empty where nothing did.
    """

    case: str
    op: str
    engine: str
    direction: str
    against: str
    ok: bool
    error: float | None
    budget: float | None
    time_ms: float | None
    quantity: str = ""
    note: str = ""


def verify_cases(run: VerifyRun) -> list[tuple[str, VerifyProblem]]:
    """The cases of a run, each with the path of its problem in the run file."""
    return [(f"problems[{i}]", case) for i, problem in enumerate(run.problems) for case in expand(problem)]


def verify_case(case: VerifyProblem, engine: str, folder: Path, path: str = "problem") -> Iterator[VerifyRow]:
    """Computes a case in its directions.

    Args:
        case: A problem without a sweep.
        engine: Word of the engine to be asked for.
        folder: Where the paths of tensor files start.
        path: Of the problem in the run file.

    Yields:
        A row for each direction, and one for each result that the tensor file expects. An exception becomes a
        row that failed.

    Raises:
        RunFileError: what the tensor file holds does not fit.
    """
    inputs = build(case, folder, engine, path)
    for direction in case.directions:
        if direction == "backward" and case.op == "nvte" and not case.is_training:
            continue  # inference leaves nothing to go back with
        try:
            yield from _direction(case, inputs, direction)
        except Exception as err:  # the other cases go on
            note = f"{type(err).__name__}: {err}"
            yield VerifyRow(case.name, case.op, engine, direction, "reference", False, None, None, None, note=note)


def _direction(problem: VerifyProblem, inputs: Inputs, direction: str) -> Iterator[VerifyRow]:
    case, training = inputs.case, problem.is_training
    dout, dlse = (inputs.dout, inputs.dlse) if direction == "backward" else (None, None)
    engine = engine_of(case, training)
    start = time.perf_counter()
    if problem.op == "fused_attention":
        got = oracle.run_case(case, dout, dlse, is_training=training)
    else:
        got = oracle.run_case_nvte(case, dout, is_training=training)
    time_ms = (time.perf_counter() - start) * 1e3

    meant = case if training else dataclasses.replace(case, dropout=0.0, rng_state=None)
    on_cpu = meant.operands[0].device.type == "cpu"
    keep = oracle.keep_mask(meant, None if on_cpu else meant.operands[0].shape[-1]) if meant.dropout else None
    want = oracle.expected(meant, dout, dlse, keep)
    eager = oracle.eager(meant, dout, dlse, keep)
    if problem.op == "nvte" and not training:
        want = {name: x for name, x in want.items() if name != "lse"}  # the pack is empty
    got, want, eager = (_of_direction(results, direction) for results in (got, want, eager))
    comparisons = compare(got, want, eager, case.operands[0].dtype)
    row = VerifyRow(problem.name, problem.op, engine, direction, "reference", True, None, None, time_ms)
    furthest = worst(comparisons)
    note = "; ".join(f"{c.quantity}: {c.note}" for c in comparisons if not c.ok and c.note)
    yield dataclasses.replace(
        row,
        ok=all(c.ok for c in comparisons),
        error=furthest.error,
        budget=furthest.budget,
        quantity=furthest.quantity,
        note=note,
    )
    if direction == "forward":
        budgets = {c.quantity: c.budget for c in comparisons}
        for name, theirs in inputs.expect.items():
            yield _against_file(dataclasses.replace(row, against="file", quantity=name), got, theirs, budgets)


def _of_direction(results: Mapping[str, Tensor], direction: str) -> dict[str, Tensor]:
    return {name: x for name, x in results.items() if (name in _STATISTICS) == (direction == "forward")}


def _against_file(row: VerifyRow, got: Mapping[str, Tensor], theirs: Tensor, budgets: Mapping[str, float]) -> VerifyRow:
    if row.quantity not in got:
        return dataclasses.replace(row, ok=False, note=f"{row.quantity} is not among the results")
    difference = (got[row.quantity].double() - theirs.double()).abs()
    difference[got[row.quantity] == theirs] = 0  # equal infinities
    error = float(difference.max()) if difference.numel() else 0.0
    budget = _EXPECT_BUDGETS * budgets[row.quantity]
    return dataclasses.replace(row, ok=error <= budget, error=error, budget=budget)
