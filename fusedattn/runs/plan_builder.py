"""cuDNN plans built in processes of their own: several at a time, and without cuDNN in this one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_library import cudnn_version
from fusedattn.engines.cudnn_plan import CompiledPlan, compile_plan
from fusedattn.errors import BuildError

# Not forked: a child would inherit torch's threads.
_SPAWN = multiprocessing.get_context("spawn")


class Built(NamedTuple):
    """A plan, and what it was built with.

    Attributes:
        plan: The plan.
        cudnn: Version of the library.
        cuda_major: Major version of the CUDA that the library is for.
    """

    plan: CompiledPlan
    cudnn: str
    cuda_major: int


def build_here(key: SdpaKey) -> Built | BuildError:
    """Build a plan in this process; the error is returned, so that it can be sent to another."""
    try:
        plan = compile_plan(key)
    except BuildError as error:
        return error
    # The library is loaded by now, and found by its name.
    cuda: int = ctypes.CDLL("libcudnn.so.9").cudnnGetCudartVersion()
    return Built(plan, cudnn_version(), cuda // 1000)


class _Worker:
    """A process that builds one plan after another; it ends when this one does, however that comes about."""

    def __init__(self) -> None:
        self._connection, other = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def build(self, key: SdpaKey) -> Built | BuildError:
        """Build a plan; raises ``EOFError`` or ``OSError`` where the process ended over it."""
        self._connection.send(key)
        found: Built | BuildError = self._connection.recv()
        return found

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    # An interrupt from the terminal is the business of the process that asks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            connection.send(build_here(connection.recv()))
    except (EOFError, BrokenPipeError):
        return


class PlanBuilder:
    """Builds plans in other processes; made by ``plan_builder``.

    Args:
        jobs: How many processes at most.
    """

    def __init__(self, jobs: int) -> None:
        self._threads = ThreadPoolExecutor(jobs)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()

    def build(self, keys: Iterable[SdpaKey]) -> Iterator[tuple[SdpaKey, Built | BuildError]]:
        """Build plans.

        Args:
            keys: What to build.

        Yields:
            Each key with its plan, or with the reason why there is none, as they come.

        Raises:
            OSError: No process can be started.
        """
        futures = {self._threads.submit(self._build, key): key for key in keys}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _build(self, key: SdpaKey) -> Built | BuildError:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker()
            self._workers.add(worker)
        try:
            found = worker.build(key)
        except (EOFError, OSError):
            self._workers.discard(worker)
            worker.end()
            what = f"a cuDNN {key.direction.word} plan for {key.target.name}"
            return BuildError(what, "the process that built it came to an end", "Pass engine='torch' for this problem.")
        self._idle.put(worker)
        return found

    def close(self) -> None:
        """End the processes; plans that are still to be built are not."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self._workers):
            worker.end()
        self._threads.shutdown(wait=True)


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def plan_builder(jobs: int) -> Iterator[PlanBuilder]:
    """A ``PlanBuilder`` whose processes end with the context."""
    builder = PlanBuilder(jobs)
    try:
        yield builder
    finally:
        builder.close()
