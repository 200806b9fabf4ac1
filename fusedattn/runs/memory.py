"""Peak memory of a call beyond inputs and outputs, as the operating system sees it, in an own process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fusedattn.runs.config import MemoryProblem
from fusedattn.runs.inputs import build
from fusedattn.runs.sides import ours, rival

_STATUS = Path("/proc/self/status")
# glibc otherwise keeps what was freed before, and a later block that fits there adds nothing to the peak.
_FRESH_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_beyond(call: Callable[[], Tensor]) -> int:
    """Peak resident memory during a call, beyond what was resident before and beyond its result.

    Args:
        call: Returns its only output. Libraries that it loads count, so run it on something small before.

    Returns:
        Bytes; where the peak cannot be reset, an upper bound.

    Raises:
        OSError: this system does not tell the resident memory of a process (no /proc/self/status).
    """
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    before = _resident("VmRSS")
    out = call()
    return max(_resident("VmHWM") - before - out.untyped_storage().nbytes(), 0)


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


def measure_memory(problem: MemoryProblem, engine: str, folder: Path, who: str) -> int:
    """Peak memory of a forward beyond inputs and outputs.

    Args:
        problem: A problem without a sweep.
        engine: Word of the engine to be asked for.
        folder: Where the paths of tensor files start.
        who: "ours" or "rival".

    Returns:
        Bytes.

    Raises:
        RuntimeError: the process that measures failed; with the last line that it wrote.
    """
    task = {
        "problem": problem.model_dump(mode="json", exclude_unset=True),
        "engine": engine,
        "folder": str(folder),
        "who": who,
        "threads": torch.get_num_threads(),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fusedattn.runs.memory"],
        input=json.dumps(task),
        env=os.environ | _FRESH_BLOCKS,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"measuring memory failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return int(done.stdout.split()[-1])


def _main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    problem = MemoryProblem.model_validate(task["problem"])

    def forward(problem: MemoryProblem) -> Callable[[], Tensor]:
        inputs = build(problem, Path(task["folder"]), task["engine"])
        side = ours(inputs) if task["who"] == "ours" else rival(inputs, problem.rival)
        return side.run_forward

    short = {name: [min(n, 64) for n in lengths] for name in ("lengths", "lengths_q", "lengths_kv")
             if (lengths := getattr(problem, name)) is not None}  # fmt: skip
    if short:
        forward(problem.model_copy(update=short))()
    print(peak_beyond(forward(problem)))


if __name__ == "__main__":
    _main()
