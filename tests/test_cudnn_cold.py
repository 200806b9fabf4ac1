"""Plans under many threads and processes that all start cold: each is built once, or taken from who built it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cudnn_calls import dense, keys_of

from fusedattn import BuildError, cache_info, counters
from fusedattn.cache import clear_caches
from fusedattn.engines import cudnn_executor
from fusedattn.engines.cudnn_executor import PlanExecutor, stored_plan
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_plan import CompiledPlan, load_plan

THREADS, PROCESSES = 8, 4


def keys() -> list[SdpaKey]:
    """A forward and a backward."""
    return list(keys_of("h100", dense()).values())


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What a load asks of torch's devices is answered, and plans are loaded to be looked at."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cudnn_executor, "load_plan", lambda target, blob, device: load_plan(target, blob))
    clear_caches()
    yield monkeypatch
    clear_caches()


def in_threads(work: Any) -> list[Any]:
    """What as many threads find, which all start at once."""
    start = threading.Barrier(THREADS)

    def each(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(each, range(THREADS)))


@pytest.mark.usefixtures("no_gpu_needed")
def test_threads_build_a_plan_once_a_device() -> None:
    both, executors = keys(), [PlanExecutor(torch.device("cuda", i)) for i in range(2)]
    clear_caches()
    found = in_threads(lambda number: [executors[number % 2].executable(key) for key in both[:: 1 - 2 * (number // 4)]])
    assert len({plan for plans in found for plan in plans}) == 4
    # No disk cache: each device asks for itself.
    assert counters()["plans_built"] == 4
    for device in range(2):
        info = cache_info()[f"cudnn plans on cuda:{device}"]
        assert (info.misses, info.hits, info.size, info.evictions) == (2, 6, 2, 0)


def test_a_device_has_one_bounded_cache(no_gpu_needed: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace(_variant_pack_uids=lambda: [1], get_workspace_size=lambda: 0)
    no_gpu_needed.setattr(cudnn_executor, "stored_plan", lambda key: b"")
    no_gpu_needed.setattr(cudnn_executor, "load_plan", lambda *args: graph)
    (target,) = {key.target for key in keys()}
    executor = PlanExecutor(torch.device("cuda", 3))
    capacity = cache_info()["cudnn plans on cuda:3"].capacity
    key = keys()[0]
    several = [SdpaKey(target, key.direction, key.tensors, max_total_q=i) for i in range(capacity + 5)]
    plans = [executor.executable(each) for each in several]
    info = cache_info()["cudnn plans on cuda:3"]
    assert (info.size, info.evictions, info.misses) == (capacity, 5, capacity + 5)
    assert executor.executable(several[-1]) is plans[-1]
    assert executor.executable(several[0]) is not plans[0]


def test_a_build_that_fails_fails_for_all_and_is_tried_again(no_gpu_needed: pytest.MonkeyPatch) -> None:
    key, executor, built = keys()[0], PlanExecutor(torch.device("cuda", 0)), []

    def fail_first(key: SdpaKey) -> CompiledPlan:
        built.append(key)
        if len(built) == 1:
            raise BuildError("a plan", "there is none today")
        return CompiledPlan(b"plan", 0, ("kernel",), 1.0)

    graph = SimpleNamespace(_variant_pack_uids=lambda: [1], get_workspace_size=lambda: 0)
    no_gpu_needed.setattr(cudnn_executor, "compile_plan", fail_first)
    no_gpu_needed.setattr(cudnn_executor, "load_plan", lambda *args: graph)
    with pytest.raises(BuildError, match="there is none today"):
        executor.executable(key)
    assert len(set(in_threads(lambda number: executor.executable(key)))) == 1
    assert len(built) == 2
    assert counters()["plans_built"] == 1


PROCESS = """
import hashlib, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
from fusedattn import counters
from fusedattn.engines.cudnn_executor import stored_plan
from fusedattn.engines.cudnn_library import cudnn
from fusedattn.engines.cudnn_plan import load_plan
from test_cudnn_cold import keys
both = keys()
cudnn()
print("ready", flush=True)
sys.stdin.readline()
for key in both[::int(sys.argv[1])]:
    blob = stored_plan(key)
    load_plan(key.target, blob)
    print(hashlib.sha256(blob).hexdigest())
found = counters()
print(found["plans_built"], found["plans_loaded"])
"""


def start(folder: Path, order: int) -> subprocess.Popen[str]:
    environment = os.environ | {"FUSEDATTN_CACHE_DIR": str(folder), "FUSEDATTN_NO_DISK_CACHE": "0"}
    environment.pop("FUSEDATTN_BUNDLE", None)
    command = [sys.executable, "-c", PROCESS, str(order)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[list[str], tuple[int, int]]:
    """Digests of plans, and how many were built and loaded."""
    out, errors = process.communicate("\n", timeout=120)
    assert process.returncode == 0, errors
    *digests, counted = out.splitlines()
    built, loaded = map(int, counted.split())
    return digests, (built, loaded)


def test_processes_on_a_cold_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plans"
    running = [start(folder, 1 - 2 * (i % 2)) for i in range(PROCESSES)]
    # All have loaded their libraries before one may begin.
    assert [process.stdout and process.stdout.readline() for process in running] == ["ready\n"] * PROCESSES
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [finish(process) for process in running]
    assert all(len(digests) == built + loaded == 2 for digests, (built, loaded) in found)
    assert sum(built for _, (built, _) in found) >= 2
    assert len(list(folder.glob("*.blob"))) == 2
    assert list(folder.glob("*.tmp")) == []
    # Whoever comes later builds nothing; and what was kept is what one of them built.
    monkeypatch.setenv("FUSEDATTN_CACHE_DIR", str(folder))
    monkeypatch.setenv("FUSEDATTN_NO_DISK_CACHE", "0")
    clear_caches()
    kept = {hashlib.sha256(stored_plan(key)).hexdigest() for key in keys()}
    assert (counters()["plans_built"], counters()["plans_loaded"], len(kept)) == (0, 2, 2)
    clear_caches()
    assert kept <= {digest for digests, _ in found for digest in digests}
