"""``BuildCache`` under threads: one build a key, failures, clearing while a build runs, and forks."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import POSIX, ended_well, fork

from fusedattn.cache import BuildCache, CacheInfo
from fusedattn.errors import BuildError

WAIT_S = 20.0


def never() -> int:
    raise AssertionError("built")


class Gate:
    """A build that says when it starts and ends when it is let; counts its runs."""

    def __init__(self, ending: Callable[[], int] = lambda: 7) -> None:
        self.started, self.open, self.runs, self.ending = threading.Event(), threading.Event(), 0, ending

    def __call__(self) -> int:
        self.runs += 1
        self.started.set()
        assert self.open.wait(WAIT_S)
        return self.ending()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Threads:
    """Threads that run a function, and what it returned or raised in each."""

    def __init__(self, count: int, function: Callable[[int], object]) -> None:
        self.results: list[object] = [None] * count
        self.entered = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i, function), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, function: Callable[[int], object]) -> None:
        with self._lock:
            self.entered += 1
        try:
            self.results[index] = function(index)
        except BaseException as error:
            self.results[index] = error

    def join(self) -> list[object]:
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads)
        return self.results


def waiting(cache: BuildCache[str, int], count: int) -> Threads:
    """Threads that ask for "k", and would build 99 themselves; they have had the time to reach the wait."""
    threads = Threads(count, lambda _: cache.get("k", lambda: 99))
    until(lambda: threads.entered == count)
    time.sleep(0.05)
    return threads


@pytest.fixture
def rapid_switching() -> Iterator[None]:
    """Threads take turns so often that they meet within every few lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_value_counts_as_used_when_its_build_ends() -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 2)
    gate = Gate()
    builder = Threads(1, lambda _: cache.get("k", gate))
    assert gate.started.wait(WAIT_S)
    cache.get("early", lambda: 1)
    gate.open.set()
    builder.join()
    cache.get("late", lambda: 2)
    assert cache.get("k", never) == 7


def test_builds_that_end_together_leave_no_more_than_the_capacity() -> None:
    cache: BuildCache[int, int] = BuildCache("cache", 1)
    cache.get(9, lambda: 1)
    gates = [Gate() for _ in range(4)]
    builders = Threads(4, lambda index: cache.get(index, gates[index]))
    for gate in gates:
        assert gate.started.wait(WAIT_S)
    with cache._lock:
        for gate in gates:
            gate.open.set()
        time.sleep(0.05)
    assert builders.join() == [7] * 4
    assert cache.info() == CacheInfo(hits=0, misses=5, size=1, capacity=1, evictions=4)


def test_running_builds_do_not_count_and_are_not_dropped() -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 1)
    gate = Gate()
    builder = Threads(1, lambda _: cache.get("k", gate))
    assert gate.started.wait(WAIT_S)
    for number, key in enumerate("abc"):
        cache.get(key, lambda number=number: number)  # type: ignore[misc]
    assert cache.info() == CacheInfo(hits=0, misses=4, size=1, capacity=1, evictions=2)
    gate.open.set()
    assert builder.join() == [7]
    assert cache.get("k", never) == 7
    assert cache.info() == CacheInfo(hits=1, misses=4, size=1, capacity=1, evictions=3)


def test_eight_threads_build_once() -> None:
    cache: BuildCache[str, object] = BuildCache("cache", 4)
    built: list[int] = []

    def build() -> object:
        built.append(1)
        time.sleep(0.05)
        return object()

    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda _: cache.get("k", build), range(8)))
    assert len(built) == 1
    assert len(set(map(id, values))) == 1
    assert cache.info() == CacheInfo(hits=7, misses=1, size=1, capacity=4, evictions=0)


def test_other_keys_are_built_in_parallel() -> None:
    cache: BuildCache[int, int] = BuildCache("cache", 4)
    both = threading.Barrier(2)

    def build() -> int:
        both.wait(WAIT_S)
        return 1

    assert Threads(2, lambda index: cache.get(index, build)).join() == [1, 1]


def test_eight_threads_in_a_small_cache_get_the_right_values(rapid_switching: None) -> None:
    cache: BuildCache[int, int] = BuildCache("cache", 3)

    def use(index: int) -> int:
        wrong = 0
        for step in range(1000):
            key = (step * 7 + index * step) % 8
            wrong += cache.get(key, lambda: key * key) != key * key  # noqa: B023
            if index == 0 and step % 300 == 299:
                cache.clear()
        return wrong

    assert Threads(8, use).join() == [0] * 8
    assert cache.info().size == 3


def test_a_failure_reaches_who_waits_and_is_not_remembered() -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 4)

    def fail() -> int:
        raise BuildError("a plan", "no reason", "Try again.")

    gate = Gate(fail)
    builder = Threads(1, lambda _: cache.get("k", gate))
    assert gate.started.wait(WAIT_S)
    waiters = waiting(cache, 4)
    gate.open.set()
    errors = builder.join() + waiters.join()
    assert all(isinstance(error, BuildError) and error.hint == "Try again." for error in errors)
    assert len(set(map(id, errors))) == 5
    # The waiters' tracebacks are their own: each leads from its get to the raise in the cache.
    for error in errors[1:]:
        assert isinstance(error, BuildError)
        assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-2:] == ["get", "_miss"]
    assert gate.runs == 1
    assert cache.info() == CacheInfo(hits=0, misses=1, size=0, capacity=4, evictions=0)
    assert cache.get("k", lambda: 5) == 5


class Uncopyable(Exception):
    """copy.copy cannot make another."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.mark.parametrize(
    "error", [Uncopyable("a", "b"), KeyboardInterrupt(), SystemExit(1)], ids=["uncopyable", "interrupt", "exit"]
)
def test_who_waited_for_an_interrupted_build_builds(error: BaseException) -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 4)

    def stop() -> int:
        raise error

    gate = Gate(stop)
    builder = Threads(1, lambda _: cache.get("k", gate))
    assert gate.started.wait(WAIT_S)
    waiters = waiting(cache, 4)
    gate.open.set()
    assert builder.join() == [error]
    assert waiters.join() == [99] * 4
    assert cache.info() == CacheInfo(hits=3, misses=2, size=1, capacity=4, evictions=0)


class Slow:
    """A key whose comparison asks the cache, as a finaliser may at any time."""

    def __init__(self, cache: BuildCache[object, int]) -> None:
        self.cache = cache

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        self.cache.get("inner", lambda: 0)
        return self is other


def test_keys_may_use_the_cache() -> None:
    cache: BuildCache[object, int] = BuildCache("cache", 4)
    assert Threads(1, lambda _: [cache.get(Slow(cache), lambda: 5) for _ in range(3)]).join() == [[5, 5, 5]]


def test_a_value_that_uses_the_cache_as_it_goes() -> None:
    cache: BuildCache[int, object] = BuildCache("cache", 1)
    seen: list[bool] = []

    class Parting:
        def __del__(self) -> None:
            # Another thread, since the lock lets its own pass.
            seen.append(Threads(1, lambda _: cache.info().capacity).join() == [1])

    cache.get(0, Parting)
    cache.get(1, object)
    assert seen == [True]
    cache.clear()
    cache.get(0, Parting)
    cache.clear()
    assert seen == [True, True]


@pytest.mark.parametrize("meanwhile", [False, True], ids=["quiet", "built again"])
def test_what_was_being_built_when_the_cache_was_cleared_is_not_remembered(meanwhile: bool) -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 4)
    gate = Gate()
    builder = Threads(1, lambda _: cache.get("k", gate))
    assert gate.started.wait(WAIT_S)
    waiter = waiting(cache, 1)
    cache.clear()
    # Who asks after the clear does not wait for the old build.
    if meanwhile:
        assert cache.get("k", lambda: 8) == 8
    gate.open.set()
    assert builder.join() == waiter.join() == [7]
    assert cache.get("k", lambda: 9) == (8 if meanwhile else 9)


@POSIX
def test_a_fork_while_another_thread_builds_and_holds_the_lock() -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 4)
    cache.get("ready", lambda: 1)
    gate = Gate()
    builder = Threads(1, lambda _: cache.get("k", gate))
    assert gate.started.wait(WAIT_S)
    held, release = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        with cache._lock:
            held.set()
            release.wait(WAIT_S)

    holder = Threads(1, hold)
    assert held.wait(WAIT_S)

    def use() -> None:
        # Ends the child where it would wait for ever.
        signal.alarm(int(WAIT_S))
        assert (cache.get("ready", never), cache.get("k", lambda: 8), cache.info().size) == (1, 8, 2)

    assert ended_well([fork(use)])
    release.set()
    gate.open.set()
    holder.join()
    assert builder.join() == [7]
