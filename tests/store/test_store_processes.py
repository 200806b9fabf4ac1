"""The disk cache under many threads and processes, some of which are killed: whole files or none."""

import os
import random
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blob_folders import HOUR_S, LIMIT_BYTES, blobs, used_ago
from processes import POSIX, ended_well, fork

from fusedattn.store import Store


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(20_000 + number)


def hammer(folder: Path, seed: int, limit_bytes: int = LIMIT_BYTES, steps: int = 60) -> None:
    """Loads and saves of the same few keys; raises where something else comes back than was saved, or a warning."""
    store, numbers = Store(folder, limit_bytes), random.Random(seed)
    for _ in range(steps):
        number = numbers.randrange(6)
        found = store.load(f"key {number}")
        assert found is None or found == content_of(number)
        if found is None or numbers.random() < 0.3:
            store.save(f"key {number}", content_of(number))


@pytest.mark.parametrize("limit_bytes", [LIMIT_BYTES, 70_000], ids=["roomy", "tight"])
def test_eight_threads_on_a_cold_store(folder: Path, limit_bytes: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: hammer(folder, seed, limit_bytes), range(8)))
    assert list(folder.glob("*.tmp")) == []
    assert sum(path.stat().st_size for path in blobs(folder)) <= limit_bytes


@POSIX
@pytest.mark.parametrize("limit_bytes", [LIMIT_BYTES, 70_000], ids=["roomy", "tight"])
def test_four_processes_on_a_cold_store(folder: Path, limit_bytes: int) -> None:
    assert ended_well([fork(lambda seed=seed: hammer(folder, seed, limit_bytes)) for seed in range(4)])  # type: ignore[misc]
    assert list(folder.glob("*.tmp")) == []
    assert sum(path.stat().st_size for path in blobs(folder)) <= limit_bytes
    hammer(folder, 4)


@POSIX
def test_a_process_that_raises_is_seen() -> None:
    assert not ended_well([fork(lambda: warnings.warn("told", RuntimeWarning, stacklevel=1))])


@POSIX
def test_processes_killed_at_any_moment_leave_no_bad_file(store: Store, folder: Path) -> None:
    numbers = random.Random(0)
    contents = {f"key {number}": numbers.randbytes(1_000_000) for number in range(3)}

    def write() -> None:
        while True:
            for key, content in contents.items():
                store.save(key, content)

    found = 0
    for _ in range(30):
        child = fork(write)
        time.sleep(numbers.uniform(0.001, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for key, content in contents.items():
            blob = store.load(key)
            assert blob is None or blob == content
            found += blob is not None
    assert found > 0
    for path in folder.glob("*.tmp"):
        used_ago(path, 2 * HOUR_S)
    store.save("key", b"blob")
    assert list(folder.glob("*.tmp")) == []


@POSIX
@pytest.mark.parametrize("step", ["fdopen", "replace"])
def test_a_process_killed_within_a_write(store: Store, folder: Path, step: str) -> None:
    store.save("key", b"old")

    def write() -> None:
        setattr(os, step, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        store.save("key", b"new" * 10_000)

    assert not ended_well([fork(write)])
    assert store.load("key") == b"old"
    (left,) = folder.glob("*.tmp")
    store.save("other", b"blob")
    assert left.exists()
    used_ago(left, 2 * HOUR_S)
    store.save("other", b"blob")
    assert not left.exists()
