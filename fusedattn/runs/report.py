"""What a run leaves behind: a table to read, and one JSON of config, versions, machine class and rows."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.table import Table
from rich.text import Text

from fusedattn.errors import RunFileError
from fusedattn.rules_cudnn import PACKAGE
from fusedattn.runs.bench import BenchRow
from fusedattn.runs.config import AnyRun, DispatchRun
from fusedattn.runs.dispatch import DispatchRow
from fusedattn.runs.verify import VerifyRow

LONG = 80
"""More rows than this are shown a problem at a time; what failed is always shown row by row."""


def verify_table(rows: Sequence[VerifyRow], title: str) -> Table:
    """Case, engine, error, budget and time of each comparison.

    Args:
        rows: The comparisons, those of one problem together.
        title: Heads the table.

    Returns:
        A table; where there are more than `LONG` rows, one line for the good ones of a problem and direction,
        with the row that came nearest to its budget, and the sum of the times.
    """
    table = _table(title, "case", "engine", "direction", "against", right=("error", "budget", "time ms"), last="ok")
    groups: dict[object, list[VerifyRow]] = {}
    for i, row in enumerate(rows):
        summed = len(rows) > LONG and row.ok
        key = (row.case.partition(":")[0], row.op, row.engine, row.direction, row.against) if summed else i
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        worst = max(group, key=lambda row: (row.error or 0) / (row.budget or 1))
        case = worst.case if len(group) == 1 else f"{worst.case.partition(':')[0]}: {len(group)} cases"
        time_ms = math.fsum(row.time_ms or 0 for row in group)
        numbers = (_number(worst.error), _number(worst.budget), f"{time_ms:.1f}")
        _add(table, (case, worst.engine, worst.direction, worst.against, *numbers), worst.ok, _why(worst))
    return table


def _why(row: VerifyRow) -> str:
    return row.note or f"{row.quantity} is out of its budget"


def bench_table(rows: Sequence[BenchRow], title: str) -> Table:
    """Case, engine, both sides' figures, their ratio with its quartiles, and the limit.

    Args:
        rows: The figures.
        title: Heads the table.

    Returns:
        A table.
    """
    right = ("ours", "theirs", "ratio", "quartiles", "limit")
    table = _table(title, "case", "engine", "direction", "rival", right=right, last="ok")
    for row in rows:
        if row.ours_mib is not None:
            figures = [f"{row.ours_mib:.1f} MiB", f"{row.rival_mib:.1f} MiB"]
            limit = "" if row.limit is None else f"{row.limit:.1f} MiB"
        else:
            figures = ["" if x is None else f"{x:.2f} ms" for x in (row.ours_ms, row.rival_ms)]
            limit = "" if row.limit is None else f"{row.limit:.2f}"
        spread = "" if row.ratio_spread is None else "{:.2f}-{:.2f}".format(*row.ratio_spread)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        note = row.note or "over the limit"
        _add(table, (row.case, row.engine, row.direction, row.rival, *figures, ratio, spread, limit), row.ok, note)
    return table


def dispatch_table(rows: Sequence[DispatchRow], title: str) -> Table:
    """Call, its time, that of its two parts, the aim, and the operators beside the graph.

    Args:
        rows: The figures.
        title: Heads the table.

    Returns:
        A table. An aim that is missed is told, and no failure.
    """
    right = ("µs", "10-90%", "preparation", "the rest", "aim", "launches")
    table = _table(title, "case", "op", "direction", right=right, last="ok")
    for row in rows:
        spread = "" if row.total_spread_us is None else "{:.1f}-{:.1f}".format(*row.total_spread_us)
        figures = ["" if x is None else f"{x:.1f}" for x in (row.total_us, row.preparation_us, row.hand_over_us)]
        aim = "" if row.within_aim is None else f"{row.aim_us:g}: {'within' if row.within_aim else 'missed'}"
        launches = "" if row.launches is None else str(row.launches)
        cells = (row.case, row.op, row.direction, figures[0], spread, *figures[1:], aim, launches)
        _add(table, cells, row.ok, row.note)
    return table


def _table(title: str, *left: str, right: Sequence[str], last: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def _add(table: Table, cells: Sequence[str], ok: bool, note: str) -> None:
    # Text: names and messages may hold square brackets, which rich would read as markup.
    style = "green" if ok else "red"
    table.add_row(*map(Text, cells), Text("ok" if ok else f"FAILED: {note}", style=style))


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.2e}"


def document(run: AnyRun, rows: Sequence[VerifyRow] | Sequence[BenchRow] | Sequence[DispatchRow]) -> dict[str, Any]:
    """The JSON of a run: `config`, `versions`, `machine` and `rows`; no host name and no other path."""
    return {
        "config": run.model_dump(mode="python", exclude_unset=True),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "fusedattn": _version("fusedattn"),
            "cudnn_frontend": _version(PACKAGE),
        },
        "machine": {
            "system": platform.system(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "torch_threads": 1 if isinstance(run, DispatchRun) else torch.get_num_threads(),
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def prepare_out(file: Path, run: AnyRun) -> Path:
    """Makes the folders of the run's JSON, so that a place that cannot be is told before the work.

    Args:
        file: The run file, for the message.
        run: Gives `out`.

    Returns:
        The path to write to, relative to the working directory.

    Raises:
        RunFileError: the folders cannot be made, or the path is a folder.
    """
    out = Path(run.out or f"results/{file.stem}.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise RunFileError(f"{file}: out: cannot make the folder {out.parent}: {err.strerror}") from None
    if out.is_dir():
        raise RunFileError(f"{file}: out: {out} is a folder; name a file in it")
    return out


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all.

    Args:
        path: Where to; replaced if it is there.
        content: Numbers that JSON does not have become the strings "nan", "inf" and "-inf".

    Raises:
        OSError: the place cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(_plain(content), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
