"""From a YAML file to its checked run; a fault is one line `file:line: path: message` of a RunFileError."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fusedattn.errors import RunFileError
from fusedattn.runs.config import RUNS, AnyRun, FileInputs, Geometry
from fusedattn.runs.document import Document
from fusedattn.runs.fields import nearest
from fusedattn.runs.inputs import build
from fusedattn.runs.laws import broken_laws, duplicate_names
from fusedattn.runs.sweeps import expand


def load_run(file: Path) -> AnyRun:
    """Reads a run file.

    Args:
        file: The YAML file.

    Returns:
        The run. Its tensor files are there and fit.

    Raises:
        RunFileError: the file cannot be read, is no YAML, holds a key twice, is no run, or names tensors that
            are not there or do not fit; one line a fault.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else f"not UTF-8 text ({err.reason})"
        raise RunFileError(f"{file}: {reason}") from None
    document = Document(file, text)
    data = document.data
    if data is None:
        raise RunFileError(f"{file}: empty; a run file says at least kind and problems")
    if not isinstance(data, dict):
        raise RunFileError(f"{file}: expected a mapping with kind and problems, got {reprlib.repr(data)}")
    kind = data.get("kind")
    model = RUNS.get(str(kind))
    if model is None:
        got = f"got {kind!r}{nearest(kind, RUNS)}" if "kind" in data else "which is missing"
        raise document.error([("kind", f"expected {' or '.join(RUNS)}, {got}")])
    try:
        run = model.model_validate(data)
    except ValidationError as err:
        raise document.error([(_path(e["loc"]), e["msg"]) for e in err.errors(include_url=False)]) from None
    problems: Sequence[Any] = run.problems
    broken = [law for i, problem in enumerate(problems) for law in broken_laws(problem, f"problems[{i}]")]
    document.refuse([*duplicate_names(p.name for p in problems), *broken])
    document.refuse(_faults_of_tensors(problems, file.parent))
    return run


def _faults_of_tensors(problems: Sequence[Geometry], folder: Path) -> Iterator[tuple[str, str]]:
    for i, problem in enumerate(problems):
        for case in expand(problem):
            if isinstance(case.inputs, FileInputs):
                try:
                    build(case, folder, path=f"problems[{i}]")
                except RunFileError as err:
                    path, _, message = str(err).partition(": ")
                    yield path, message
                    break  # the other cases of the problem mostly say the same


def _path(loc: Sequence[int | str]) -> str:
    """`("problems", 0, "inputs", "<file>", "qkv")` as `problems[0].inputs.qkv`: union tags are no keys."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith("<") or part == "[key]"):
            path += f".{part}" if path else part
    return path
