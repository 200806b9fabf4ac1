"""``BuildCache``: values are built once, bounded, counted and forgotten."""

import gc
import weakref
from contextlib import suppress

import pytest

from fusedattn.cache import _CLEARERS, BuildCache, CacheInfo, cache_info, clear_caches, on_clear


def never() -> int:
    raise AssertionError("built")


def test_a_value_is_built_once() -> None:
    cache: BuildCache[str, object] = BuildCache("cache", 4)
    value = cache.get("k", object)
    assert cache.get("k", object) is value
    assert cache.get("other", object) is not value
    assert cache.info() == CacheInfo(hits=1, misses=2, size=2, capacity=4, evictions=0)


def test_none_and_equal_keys_are_values_and_keys_like_others() -> None:
    cache: BuildCache[object, object] = BuildCache("cache", 4)
    assert cache.get(None, lambda: None) is None
    assert cache.get(None, never) is None
    assert cache.get((1, "a"), lambda: 5) == cache.get((1, "".join("a")), never) == 5


@pytest.mark.parametrize(
    ("asked", "kept"),
    [("abc", "abc"), ("abcd", "bcd"), ("abcad", "acd"), ("abcabd", "abd"), ("abcdefg", "efg"), ("aabbccad", "acd")],
)
def test_the_value_unused_for_longest_goes(asked: str, kept: str) -> None:
    cache: BuildCache[str, str] = BuildCache("cache", 3)
    for key in asked:
        assert cache.get(key, lambda key=key: key) == key  # type: ignore[misc]
    info = cache.info()
    assert (info.size, info.evictions) == (3, info.misses - 3)
    for key in kept:
        assert cache.get(key, lambda: "built") == key
    assert cache.get("z", lambda: "built") == "built"


def test_a_failure_keeps_nothing_alive() -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 4)

    class Large:
        pass

    def fail(large: Large) -> int:
        raise ValueError("no")

    large = Large()
    watched = weakref.ref(large)
    gc.disable()
    try:
        with suppress(ValueError):
            cache.get("k", lambda large=large: fail(large))  # type: ignore[misc]
        del large
        assert watched() is None
    finally:
        gc.enable()


def test_a_build_that_asks_for_itself_is_told() -> None:
    cache: BuildCache[str, int] = BuildCache("plans", 4)
    with pytest.raises(RuntimeError, match=r"^cache 'plans': the build of a key asks for that key itself, 'k'$"):
        cache.get("k", lambda: cache.get("k", lambda: 1))
    assert cache.info().size == 0
    assert cache.get("k", lambda: cache.get("other", lambda: 1) + 1) == 2


def test_clear_resets_the_counts() -> None:
    cache: BuildCache[str, int] = BuildCache("cache", 1)
    for key in "aab":
        cache.get(key, lambda: 1)
    assert cache.info() == CacheInfo(hits=1, misses=2, size=1, capacity=1, evictions=1)
    cache.clear()
    assert cache.info() == CacheInfo(hits=0, misses=0, size=0, capacity=1, evictions=0)


def test_cache_info_names_the_caches_in_use() -> None:
    first: BuildCache[str, int] = BuildCache("test cache", 4)
    first.get("k", lambda: 1)
    assert cache_info()["test cache"].size == 1
    second: BuildCache[str, int] = BuildCache("test cache", 5)
    assert cache_info()["test cache"] == second.info()
    clear_caches()
    assert first.info().size == 0
    del first, second
    gc.collect()
    assert "test cache" not in cache_info()


def test_each_registered_cache_is_cleared() -> None:
    memo = {"key": 1}
    try:
        assert on_clear(memo.clear) == memo.clear
        clear_caches()
        assert memo == {}
    finally:
        _CLEARERS.remove(memo.clear)
