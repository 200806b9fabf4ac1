"""Everything that needs a GPU: the GPU tests, what they measure, then benchmarks; one JSON tells all.

The exit status is 0 where all tests passed, 1 where one failed or none ran, 2 where there is no GPU or an argument is
wrong. What the time did not suffice for is missing in the JSON, whose "complete" is then false.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_bench
import torch

from fusedattn.engines.self_test import driver_version

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT, DEFAULT_SECONDS = ROOT / "results" / "gpu_check.json", 570
SCHEMA = 1
PACKAGES = ("fusedattn", "torch", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "numpy")
# Of the time, what tests may take; benchmarks get what is left.
SHARE_OF_TESTS = 0.75
# A process that is told to stop has this long to.
GRACE_SECONDS = 10
MESSAGE_CHARACTERS = 600


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_OUT, help="JSON to write (results/gpu_check.json)")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="time for all of it (%(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="processes that run tests (%(default)s)")
    found = parser.parse_args(argv)
    if found.out == DEFAULT_OUT:
        DEFAULT_OUT.parent.mkdir(exist_ok=True)
    if not found.seconds > 0 or found.jobs < 1:
        parser.error("--seconds must be above 0, --jobs at least 1")
    if found.out.is_dir() or not found.out.parent.is_dir():
        parser.error(f"{found.out} cannot be written: it, or no folder that holds it, is a folder")
    return found


def machine() -> dict[str, Any]:
    """What the figures depend on; no name of the host and no path."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch_cudnn": torch.backends.cudnn.version(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit() -> dict[str, Any]:
    """The commit of the sources, and whether they differ from it; None where git does not tell."""

    def git(*words: str) -> str | None:
        try:
            ran = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"id": git("rev-parse", "HEAD"), "changed": None if status is None else bool(status)}


def run_tests(seconds: float, jobs: int, folder: Path) -> dict[str, Any]:
    """Run the tests of marker gpu, and read what they left.

    Args:
        seconds: How long they may take.
        jobs: In how many processes.
        folder: For what they leave.

    Returns:
        What ``read_report`` makes of it, and whether they came to their end.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-n", str(jobs), f"--junitxml={report}"]
    # Plans are built once for all processes, and for this run alone.
    environment = os.environ | {"FUSEDATTN_CACHE_DIR": str(folder / "plans")}
    for name in ("FUSEDATTN_NO_DISK_CACHE", "FUSEDATTN_BUNDLE", "FUSEDATTN_SELF_TEST", "FUSEDATTN_VALIDATE"):
        environment.pop(name, None)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True)
    finished = wait(process, seconds)
    return {**read_report(report), "finished": finished, "status": process.returncode}


def wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process, and stop it when the time is up: whether it ended by itself."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        # As by Ctrl-C, upon which pytest still writes its report.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # With the processes that it started; it leads a group of its own.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return False
    return True


def read_report(report: Path) -> dict[str, Any]:
    """Results of tests, and what they measured, out of a JUnit file.

    Args:
        report: The file; it may be missing or cut off.

    Returns:
        "passed", "failed" and "skipped" with their numbers, "failures" and "skips" with their texts, "measured".
    """
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "skips": {}, "measured": {}}
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return found
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        faults = [*case.iter("failure"), *case.iter("error")]
        skip = case.find("skipped")
        if faults:
            found["failed"] += 1
            text = " ".join((faults[0].get("message") or "").split())
            found["failures"].append({"test": name, "message": without_paths(text)[:MESSAGE_CHARACTERS]})
        elif skip is not None:
            found["skipped"] += 1
            reason = without_paths(skip.get("message") or "")
            found["skips"][reason] = found["skips"].get(reason, 0) + 1
        else:
            found["passed"] += 1
        for entry in case.iter("property"):
            what = entry.get("name") or ""
            if what.startswith("measured."):
                # NaN and infinity are no JSON to others.
                value = json.loads(entry.get("value") or "null", parse_constant=str)
                found["measured"][what.removeprefix("measured.")] = value
    return found


def without_paths(text: str) -> str:
    for folder in (str(ROOT), sys.prefix, tempfile.gettempdir(), str(Path.home())):
        if len(folder) > 1:
            text = text.replace(folder, "...")
    return text


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main(argv: list[str] | None = None) -> int:
    start = time.monotonic()
    given = arguments(argv)
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device, and nothing here works without one.", file=sys.stderr)
        return 2
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "complete": False,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory() as folder:
        tests = run_tests(given.seconds * SHARE_OF_TESTS, given.jobs, Path(folder))
    document["measured"] = tests.pop("measured")
    document["tests"] = tests
    # What is there already is not lost, whatever becomes of the benchmarks.
    write(given.out, document | {"seconds": time.monotonic() - start})
    rows, finished = gpu_bench.bench(start + given.seconds)
    document["benchmarks"] = rows
    document["complete"] = finished and tests["finished"]
    write(given.out, document | {"seconds": time.monotonic() - start})
    summary = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped, {len(rows)} figures"
    print(f"gpu_check: {summary}: {given.out}", file=sys.stderr)
    return 0 if tests["status"] == 0 and tests["finished"] and tests["passed"] and not tests["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
