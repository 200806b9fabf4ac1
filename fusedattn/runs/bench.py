"""A `bench` run: right first, then median times or peak memory, each against a rival in the same run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusedattn.runs.budget import compare, worst
from fusedattn.runs.config import BenchRun, MemoryProblem, TimeProblem
from fusedattn.runs.inputs import Inputs, build
from fusedattn.runs.memory import measure_memory
from fusedattn.runs.public_calls import engine_of
from fusedattn.runs.sides import Side, ours, rival
from fusedattn.runs.sweeps import expand

_MIB = 2**20
_OP = "fused_attention"


@dataclass(frozen=True)
class BenchRow:
    """One figure.

    Attributes:
        case: Name of the case.
        op: Word of the op.
        engine: Word of our engine.
        direction: "forward" or "forward_backward".
        rival: The rival's word.
        ok: Whether our results are right and the limit is kept.
        error: Error of the quantity that is nearest to its budget, or furthest beyond it, before anything was timed.
        budget: Budget of that quantity.
        time_ms: Our median time, as ``ours_ms``: what every kind of run calls it.
        ours_ms: Our median time; None where nothing was timed.
        rival_ms: The rival's median time.
        ratio: Ours over the rival's; of memory, where memory is measured.
        ratio_spread: Lower and upper quartile of the ratios of single repeats.
        limit: Largest allowed ratio, or allowed MiB; None where none is asked for.
        ours_mib: Our peak memory beyond inputs and outputs.
        rival_mib: The rival's.
        note: What went wrong; empty where nothing did.
    """

    case: str
    op: str
    engine: str
    direction: str
    rival: str
    ok: bool
    error: float | None = None
    budget: float | None = None
    time_ms: float | None = None
    ours_ms: float | None = None
    rival_ms: float | None = None
    ratio: float | None = None
    ratio_spread: tuple[float, float] | None = None
    limit: float | None = None
    ours_mib: float | None = None
    rival_mib: float | None = None
    note: str = ""


def bench_cases(run: BenchRun) -> list[tuple[str, TimeProblem | MemoryProblem]]:
    """The cases of a run, each with the path of its problem in the run file."""
    cases: list[tuple[str, TimeProblem | MemoryProblem]] = []
    for i, problem in enumerate(run.problems):
        cases += [(f"problems[{i}]", case) for case in expand(problem)]
    return cases


def bench_case(
    case: TimeProblem | MemoryProblem, run: BenchRun, folder: Path, path: str = "problem"
) -> Iterator[BenchRow]:
    """Measures a case.

    Args:
        case: A problem without a sweep.
        run: Gives engine, repeats and warmup.
        folder: Where the paths of tensor files start.
        path: Of the problem in the run file.

    Yields:
        A row for each direction. Wrong results and exceptions become rows that failed.

    Raises:
        RunFileError: what the tensor file holds does not fit.
    """
    inputs = build(case, folder, run.engine, path)
    directions = list(case.directions) if isinstance(case, TimeProblem) else ["forward"]
    try:
        engine = engine_of(inputs.case)
        checked = _checked_row(case, inputs, backward="forward_backward" in directions)
        for direction in directions:
            row = replace(checked, engine=engine, direction=direction)
            if not row.ok:
                yield row
            elif isinstance(case, MemoryProblem):
                yield _memory_row(row, case, run, folder)
            else:
                yield _time_row(row, case, run, inputs)
    except Exception as err:  # the other cases go on
        note = f"{type(err).__name__}: {err}"
        yield BenchRow(case.name, _OP, run.engine, ", ".join(directions), case.rival, ok=False, note=note)


def _checked_row(case: TimeProblem | MemoryProblem, inputs: Inputs, backward: bool) -> BenchRow:
    """Our results judged by the rival in float64, with the rival's own error as the budget; nothing timed yet."""
    dtype, word = inputs.operands.dtype, case.rival
    coarse = torch.float32 if dtype == torch.float64 else dtype  # as `compare` has it
    sides = (ours(inputs), rival(inputs, word, dtype=torch.float64), rival(inputs, word, dtype=coarse))
    got, truth, eager = (side.results(backward) for side in sides)
    comparisons = compare(got, truth, eager, dtype)
    note = "; ".join(
        f"{c.quantity}: error {c.error:.3g} over the budget {c.budget:.3g} {c.note}".rstrip()
        for c in comparisons
        if not c.ok
    )
    furthest = worst(comparisons)
    return BenchRow(case.name, _OP, "", "", word, ok=not note, error=furthest.error, budget=furthest.budget, note=note)


def _time_row(row: BenchRow, case: TimeProblem, run: BenchRun, inputs: Inputs) -> BenchRow:
    sides = (ours(inputs), rival(inputs, case.rival))
    times = interleaved([_call(side, row.direction) for side in sides], run.repeats, run.warmup)
    ours_s, rival_s = (statistics.median(t) for t in times)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    limit: float | None = getattr(case.limits, row.direction)
    ratio = ours_s / rival_s
    return replace(
        row,
        ok=limit is None or ratio <= limit,
        time_ms=ours_s * 1e3,
        ours_ms=ours_s * 1e3,
        rival_ms=rival_s * 1e3,
        ratio=ratio,
        ratio_spread=_quartiles(ratios),
        limit=limit,
    )


def _call(side: Side, direction: str) -> Callable[[], object]:
    return side.run_forward if direction == "forward" else side.run_forward_backward


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def interleaved(calls: list[Callable[[], object]], repeats: int, warmup: int) -> list[list[float]]:
    """Times calls in turn, so that what slows the machine down for a while slows all of them.

    Args:
        calls: What is timed.
        repeats: Timed calls of each.
        warmup: Untimed calls of each before.

    Returns:
        For each call its times in seconds.
    """
    times: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for repeat in range(-warmup, repeats):
            for call, its_times in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                elapsed = time.perf_counter() - start
                if repeat >= 0:
                    its_times.append(elapsed)
    finally:
        gc.enable()
    return times


def _memory_row(row: BenchRow, case: MemoryProblem, run: BenchRun, folder: Path) -> BenchRow:
    ours_mib, rival_mib = (measure_memory(case, run.engine, folder, who) / _MIB for who in ("ours", "rival"))
    limit = None if case.limits is None else max(case.limits.mib, case.limits.times_rival * rival_mib)
    return replace(
        row,
        ok=limit is None or ours_mib <= limit,
        ratio=ours_mib / rival_mib if rival_mib > 0 else None,
        limit=limit,
        ours_mib=ours_mib,
        rival_mib=rival_mib,
    )
