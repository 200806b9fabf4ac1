"""The GPU tests are right in themselves: those that need no GPU but an executor run against the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = {
    "what is measured": ("tests/gpu/test_gpu_measured.py", ""),
    "the self-test": ("tests/gpu/test_gpu_self_test.py", "bfloat16"),
    "the grid": ("tests/gpu/test_gpu_grid.py", "thd_t2hd and (computes or head_dimensions or (nvte and pre_scale))"),
}


@pytest.mark.parametrize("chosen", CHOSEN)
def test_they_pass_against_the_interpreter(chosen: str) -> None:
    path, words = CHOSEN[chosen]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_interpreted", "-n", "0", path, "-k", words]
    ran = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "skipped" not in ran.stdout.splitlines()[-1]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "tests"), "FUSEDATTN_NO_DISK_CACHE": "1"}
