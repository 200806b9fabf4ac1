"""A `dispatch` run: host time from a public call to where cuDNN would take over, next to that of other calls.

CPU tensors are taken for a GPU's. There preparation is some kernels, which the host launches; here it computes them. So
forwards are timed whole, and in two: preparation by itself, and the call with its preparation done before. The sum of
these is less than the whole, since each finds warmer caches.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedattn import runtime
from fusedattn.runs.config import DispatchProblem, DispatchRun
from fusedattn.runs.dispatch_calls import apart, operators, public_call
from fusedattn.runs.dispatch_executor import HandOver
from fusedattn.runs.dispatch_rivals import frontend_rivals, torch_rivals
from fusedattn.runs.inputs import build
from fusedattn.runs.sweeps import expand
from fusedattn.target import TARGETS

RIVAL = "rival"
# Calls of one kind in a row, which find caches as warm as those of a program that makes them often.
_BLOCK = 25


@dataclass(frozen=True)
class DispatchRow:
    """One kind of call.

    Attributes:
        case: Name of the case, or what a rival is.
        op: Word of the op; "rival".
        engine: "cudnn"; empty of rivals.
        direction: "forward", "backward" or "forward_backward"; empty of rivals.
        ok: Whether it could be timed. An aim that is missed is no failure.
        time_ms: ``total_us`` in ms: what every kind of run calls it.
        total_us: Median time.
        total_spread_us: 10th and 90th percentile.
        preparation_us: Median time of preparation by itself; of forwards only.
        preparation_spread_us: As of the total.
        hand_over_us: Median time of the call with its preparation done before; of forwards only.
        hand_over_spread_us: As of the total.
        launches: Torch operators beside the graph that are launches on a GPU.
        other_operators: Views and allocations.
        aim_us: What ``hand_over_us`` should be at most; None where nothing is aimed at.
        within_aim: Whether it is.
        note: What went wrong; empty where nothing did.
    """

    case: str
    op: str
    engine: str
    direction: str
    ok: bool
    time_ms: float | None = None
    total_us: float | None = None
    total_spread_us: tuple[float, float] | None = None
    preparation_us: float | None = None
    preparation_spread_us: tuple[float, float] | None = None
    hand_over_us: float | None = None
    hand_over_spread_us: tuple[float, float] | None = None
    launches: int | None = None
    other_operators: int | None = None
    aim_us: float | None = None
    within_aim: bool | None = None
    note: str = ""


class _Timed(NamedTuple):
    """A row to be filled, and what is timed for it: the figures by name."""

    row: DispatchRow
    calls: dict[str, Callable[[], object]]


def dispatch_rows(run: DispatchRun, folder: Path) -> list[DispatchRow]:
    """Times all calls of a run, in turn.

    Args:
        run: The run.
        folder: Where the paths of tensor files start.

    Returns:
        A row for each direction of each case and for each rival. Exceptions become rows that failed.

    Raises:
        RunFileError: What a tensor file holds does not fit.
    """
    executor = HandOver()
    with _one_thread(), runtime.pretend(TARGETS[run.target], executor):
        timed = [
            _ours(case, direction, run, folder, f"problems[{i}]")
            for i, problem in enumerate(run.problems)
            for case in expand(problem)
            for direction in case.directions
        ]
        timed += _rivals(executor)
        times = iter(in_turn([call for one in timed for call in one.calls.values()], run.repeats, run.warmup))
        return [_filled(one.row, {name: next(times) for name in one.calls}) for one in timed]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ours(case: DispatchProblem, direction: str, run: DispatchRun, folder: Path, path: str) -> _Timed:
    inputs = build(case, folder, run.engine, path)
    row = DispatchRow(case.name, case.op, "cudnn", direction, ok=True)
    try:
        call = public_call(inputs, case.op, direction)
        counts = operators(inputs, case.op, direction)
        row = replace(row, launches=counts.launches, other_operators=counts.others)
        if direction != "forward":
            return _Timed(row, {"total": call})
        return _Timed(replace(row, aim_us=case.aim_us), {"total": call} | apart(inputs, case.op)._asdict())
    except Exception as err:  # the other cases go on
        return _Timed(replace(row, ok=False, note=f"{type(err).__name__}: {err}"), {})


def _rivals(executor: HandOver) -> list[_Timed]:
    calls = torch_rivals()
    note = ""
    try:
        if executor.first is not None:
            calls |= frontend_rivals(*executor.first)
    except Exception as err:  # without a cuDNN that can compile, the other rivals are there
        note = f"{type(err).__name__}: {err}"
    timed = [_Timed(DispatchRow(name, RIVAL, "", "", ok=True), {"total": call}) for name, call in calls.items()]
    failed = DispatchRow("cuDNN's frontend", RIVAL, "", "", ok=False, note=note)
    return [*timed, _Timed(failed, {})] if note else timed


def in_turn(calls: Sequence[Callable[[], object]], repeats: int, warmup: int) -> list[list[float]]:
    """Times calls a few of each at a time, so that what slows the machine down for a while slows all of them.

    Args:
        calls: What is timed.
        repeats: Timed calls of each.
        warmup: Untimed calls of each before.

    Returns:
        For each call its times in microseconds.

    Raises:
        Exception: What a call raised.

    Example:
        >>> [len(times) for times in in_turn([list, dict], repeats=30, warmup=1)]
        [30, 30]
    """
    times: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for call in calls:
            for _ in range(warmup):
                call()
        for done in range(0, repeats, _BLOCK):
            for call, found in zip(calls, times, strict=True):
                # Of a block the first finds cold caches.
                call()
                for _ in range(min(_BLOCK, repeats - done)):
                    start = time.perf_counter_ns()
                    call()
                    found.append((time.perf_counter_ns() - start) / 1e3)
    finally:
        gc.enable()
    return times


def _filled(row: DispatchRow, times: Mapping[str, list[float]]) -> DispatchRow:
    figures: dict[str, Any] = {}
    for name, its_times in times.items():
        figures[f"{name}_us"], figures[f"{name}_spread_us"] = _median(its_times)
    row = replace(row, **figures)
    if row.total_us is not None:
        row = replace(row, time_ms=round(row.total_us / 1e3, 6))
    if row.hand_over_us is not None and row.aim_us is not None:
        row = replace(row, within_aim=row.hand_over_us <= row.aim_us)
    return row


def _median(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, and the 10th and 90th percentile."""
    if len(times) < 2:
        return times[0], (times[0], times[0])
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return round(statistics.median(times), 3), (round(tenths[0], 3), round(tenths[-1], 3))
