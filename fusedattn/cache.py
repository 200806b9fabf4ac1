"""``BuildCache`` remembers what is dear to build; ``clear_caches`` makes all that holds state forget it."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from fusedattn.settings import settings

_Clear = TypeVar("_Clear", bound=Callable[[], None])
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
_CLEARERS: list[Callable[[], None]] = [settings.cache_clear]
_NUMBERS = itertools.count()
# By number, so that they stand in the order in which they were made.
_CACHES: weakref.WeakValueDictionary[int, BuildCache[Any, Any]] = weakref.WeakValueDictionary()


def on_clear(clear: _Clear) -> _Clear:
    """Register a function that empties one cache; returns it, so it serves as a decorator.

    Args:
        clear: Called without arguments by ``clear_caches``.

    Returns:
        ``clear`` itself.

    Raises:
        Nothing.

    Example:
        >>> memo = {"key": 1}
        >>> _ = on_clear(memo.clear)
        >>> clear_caches()
        >>> memo
        {}
        >>> _CLEARERS.remove(memo.clear)
    """
    _CLEARERS.append(clear)
    return clear


def clear_caches() -> None:
    """Forget every memo, plan, setting and warned-once flag; ``FUSEDATTN_*`` variables are read again.

    Returns:
        None.

    Raises:
        Nothing.

    Example:
        >>> clear_caches()
    """
    for clear in _CLEARERS:
        clear()


class CacheInfo(NamedTuple):
    """Counts of one cache since it was made or cleared.

    Attributes:
        hits: Values that were given out without a build of the caller's own, those of another thread's build included.
        misses: Builds that were started.
        size: Values held.
        capacity: Most values held at a time.
        evictions: Values that were dropped to make room.

    Example:
        >>> CacheInfo(hits=3, misses=1, size=1, capacity=8, evictions=0).size
        1
    """

    hits: int
    misses: int
    size: int
    capacity: int
    evictions: int


class _Slot(Generic[_V]):
    """What a cache holds for a key: a value, or the build of one that is under way."""

    __slots__ = ("done", "error", "ready", "thread", "used", "value")
    value: _V

    def __init__(self) -> None:
        self.ready = False
        # Of a build: who runs it, whether it ended, and how where it failed.
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.error: Exception | None = None
        # The time of the last use, by the cache's clock.
        self.used = 0


class BuildCache(Generic[_K, _V]):
    """The values used last, by key; each is built once, however many threads ask for it.

    Args:
        name: What ``cache_info`` calls it.
        capacity: Most values held; above it the one unused for longest is dropped.

    Example:
        >>> squares = BuildCache[int, int]("squares", capacity=2)
        >>> [squares.get(n, lambda: n * n) for n in (3, 3, 4)]
        [9, 9, 16]
        >>> squares.info()
        CacheInfo(hits=1, misses=2, size=2, capacity=2, evictions=0)
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self._capacity = capacity
        self._slots: dict[_K, _Slot[_V]] = {}
        self._clock = itertools.count(1)
        self._hits = self._misses = self._evictions = 0
        # Reentrant, since under it keys are compared and garbage may be collected, which run code of others.
        self._lock = threading.RLock()
        _CACHES[next(_NUMBERS)] = self

    def get(self, key: _K, build: Callable[[], _V]) -> _V:
        """The value of a key: remembered, awaited from the thread that builds it, or built.

        Other keys are built in parallel. A build that fails is not remembered.

        Args:
            key: All that the value depends on.
            build: Makes the value. It may get other keys, but none whose build waits for this one.

        Returns:
            The value.

        Raises:
            RuntimeError: ``build`` asks for ``key`` itself.
            Exception: What ``build`` raised; a thread that waited for it gets a copy.

        Example:
            >>> BuildCache[str, int]("lengths", capacity=8).get("word", lambda: len("word"))
            4
        """
        slot = self._slots.get(key)
        if slot is None or not slot.ready:
            return self._miss(key, build)
        with self._lock:
            self._hits += 1
            slot.used = next(self._clock)
        return slot.value

    def info(self) -> CacheInfo:
        """The counts; raises nothing."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._ready()), self._capacity, self._evictions)

    def clear(self) -> None:
        """Forget values and counts; what is being built is not remembered when it is done. Raises nothing."""
        with self._lock:
            # Values may run code of their own as they go, which is not until the lock is free.
            forgotten, self._slots = self._slots, {}
            self._hits = self._misses = self._evictions = 0
        del forgotten

    def _miss(self, key: _K, build: Callable[[], _V]) -> _V:
        mine: _Slot[_V] = _Slot()
        built = False
        try:
            while (slot := self._claim(key, mine)) is not mine:
                if not slot.ready and slot.thread == mine.thread:
                    raise RuntimeError(f"cache {self.name!r}: the build of a key asks for that key itself, {key!r}")
                slot.done.wait()
                if slot.error is not None:
                    raise copy.copy(slot.error)
                # Neither value nor error: its thread was interrupted, so another has to build.
                if slot.ready:
                    with self._lock:
                        self._hits += 1
                    return slot.value
            mine.value = build()
            built = True
            return mine.value
        except Exception as error:
            mine.error = _twin(error)
            raise
        finally:
            dropped = self._settle(key, mine, built)
            mine.done.set()
            del dropped

    def _claim(self, key: _K, mine: _Slot[_V]) -> _Slot[_V]:
        """The slot of a key, which is ``mine`` where there was none."""
        with self._lock:
            slot = self._slots.setdefault(key, mine)
            if slot is mine:
                self._misses += 1
            return slot

    def _settle(self, key: _K, mine: _Slot[_V], built: bool) -> _Slot[_V] | None:
        """Keep a slot that has a value, remove one that has none; returns what had to go to make room."""
        with self._lock:
            # Not earlier, so that of the slots that are ready one at most is above the capacity.
            mine.ready = built
            # Not so for who waited, nor where the cache was cleared meanwhile.
            if self._slots.get(key) is not mine:
                return None
            if not built:
                return self._slots.pop(key)
            mine.used = next(self._clock)
            ready = self._ready()
            if len(ready) <= self._capacity:
                return None
            self._evictions += 1
            return self._slots.pop(min(ready, key=lambda other: ready[other].used))

    def _ready(self) -> dict[_K, _Slot[_V]]:
        return {key: slot for key, slot in list(self._slots.items()) if slot.ready}

    def _after_fork(self) -> None:
        """Forget the lock and the builds of threads that this process does not have."""
        self._lock = threading.RLock()
        self._slots = self._ready()


def _twin(error: Exception) -> Exception | None:
    """A copy for other threads, since each raise of one object adds to its traceback; None where there can be none."""
    try:
        return copy.copy(error)
    except Exception:
        return None


def cache_info() -> dict[str, CacheInfo]:
    """Counts of the caches that are in use.

    Returns:
        By name; of several that share a name, those of the latest.

    Raises:
        Nothing.

    Example:
        >>> squares = BuildCache[int, int]("squares", capacity=2)
        >>> cache_info()["squares"].size
        0
    """
    return {cache.name: cache.info() for cache in _caches()}


def _caches() -> list[BuildCache[Any, Any]]:
    return [cache for reference in _CACHES.valuerefs() if (cache := reference()) is not None]


@on_clear
def _clear_builds() -> None:
    for cache in _caches():
        cache.clear()


def _renew_caches() -> None:
    for cache in _caches():
        cache._after_fork()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_caches)
