"""The disk cache: what is saved is loaded, damage is found, the size is bounded."""

import os
import random
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from blob_folders import HOUR_S, LIMIT_BYTES, blobs, only, used_ago
from processes import POSIX

from fusedattn.cache import clear_caches
from fusedattn.store import Store, default_store

KEYS = ["key", "", "ключ", "\ud800", "a\0b", '{"direction": "forward"}', "k" * 100_000]


@pytest.mark.parametrize("blob", [b"", b"\0", b"fusedattn blob 1\n", bytes(range(256)) * 1000], ids=len)
def test_what_is_saved_is_loaded(store: Store, folder: Path, blob: bytes) -> None:
    for number, key in enumerate(KEYS):
        assert store.load(key) is None
        store.save(key, blob + bytes([number]))
    for number, key in enumerate(KEYS):
        assert store.load(key) == Store(folder, LIMIT_BYTES).load(key) == blob + bytes([number])
    assert len(list(folder.iterdir())) == len(KEYS)


def test_a_blob_is_replaced(store: Store, folder: Path) -> None:
    store.save("key", b"first")
    store.save("key", b"second")
    assert store.load("key") == b"second"
    assert len(list(folder.iterdir())) == 1


def test_nothing_is_written_before_the_first_save(store: Store, folder: Path) -> None:
    assert store.load("key") is None
    assert not folder.exists()


@POSIX
def test_the_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Store(tmp_path / "a" / "b", LIMIT_BYTES).save("key", b"blob")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE(only(tmp_path / "a" / "b").stat().st_mode) == 0o600


def other_key(folder: Path) -> bytes:
    other = Store(folder / "other", LIMIT_BYTES)
    other.save("another key", b"blob" * 100)
    return only(folder / "other").read_bytes()


DAMAGE: list[tuple[str, Callable[[bytes, Path], bytes], str]] = [
    ("empty", lambda content, folder: b"", "does not start as a file of this cache does"),
    ("other magic", lambda content, folder: b"F" + content[1:], "does not start as a file of this cache does"),
    ("other layout", lambda content, folder: content.replace(b"blob 1", b"blob 2", 1), "does not start as a file"),
    ("magic only", lambda content, folder: content[:17], "it is damaged or cut short"),
    ("header only", lambda content, folder: content[:57], "it is damaged or cut short"),
    ("last byte gone", lambda content, folder: content[:-1], "it is damaged or cut short"),
    ("a byte more", lambda content, folder: content + b"\0", "it is damaged or cut short"),
    ("zeroed tail", lambda content, folder: content[:200] + bytes(len(content) - 200), "it is damaged or cut short"),
    ("another key's", lambda content, folder: other_key(folder), "it holds another key"),
]


@pytest.mark.parametrize(("damage", "reason"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_damage_is_a_miss_told_and_mended(
    store: Store, folder: Path, damage: Callable[[bytes, Path], bytes], reason: str
) -> None:
    store.save("key", b"blob" * 100)
    path = only(folder)
    path.write_bytes(damage(path.read_bytes(), folder))
    with pytest.warns(RuntimeWarning) as warned:
        assert store.load("key") is None
    (warning,) = warned
    assert f"{path} is not used: " in str(warning.message)
    assert reason in str(warning.message)
    assert str(warning.message).endswith("It counts as absent and will be made anew.")
    assert warning.filename == __file__
    assert not path.exists()
    store.save("key", b"new")
    assert store.load("key") == b"new"
    # A second damaged file is not told of: warnings are errors here.
    path.write_bytes(b"")
    assert store.load("key") is None
    clear_caches()
    path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="is not used"):
        store.load("key")


def test_any_altered_byte_is_found(store: Store, folder: Path) -> None:
    numbers = random.Random(0)
    store.save("key" * 20, numbers.randbytes(2000))
    path = only(folder)
    content = path.read_bytes()
    # Each byte of the header and of the key, and 200 places anywhere.
    for place in [*range(120), *(numbers.randrange(len(content)) for _ in range(200))]:
        altered = bytearray(content)
        altered[place] ^= 1 << numbers.randrange(8)
        path.write_bytes(altered)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert store.load("key" * 20) is None, place
        assert not path.exists()
    path.write_bytes(content)
    assert store.load("key" * 20) is not None


def test_cut_anywhere_is_found(store: Store, folder: Path) -> None:
    store.save("key", b"blob" * 20)
    path = only(folder)
    content = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert store.load("key") is None, length


def test_the_limit_removes_what_was_unused_for_longest(folder: Path) -> None:
    store = Store(folder, limit_bytes=4500)
    for number in range(4):
        store.save(f"key {number}", bytes(1000))
        used_ago(store._path(f"key {number}"), HOUR_S * (10 - number))
    assert len(blobs(folder)) == 4
    # Its use is the latest now.
    assert store.load("key 0") == bytes(1000)
    store.save("key 4", bytes(1000))
    assert [store.load(f"key {number}") is not None for number in range(5)] == [True, False, True, True, True]
    store.save("key 5", bytes(4000))
    assert [store.load(f"key {number}") is not None for number in range(6)] == [False] * 5 + [True]


def test_a_blob_above_the_limit_drives_nothing_out(folder: Path) -> None:
    store = Store(folder, limit_bytes=4500)
    store.save("key", bytes(1000))
    store.save("large", bytes(4500))
    assert store.load("large") is None
    assert store.load("key") == bytes(1000)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(("age_s", "renewed"), [(HOUR_S / 2, False), (2 * HOUR_S, True), (-2 * HOUR_S, True)])
def test_loads_renew_the_time_of_a_file_now_and_then(store: Store, folder: Path, age_s: float, renewed: bool) -> None:
    store.save("key", b"blob")
    used_ago(only(folder), age_s)
    before = only(folder).stat().st_mtime
    assert store.load("key") == b"blob"
    now = only(folder).stat().st_mtime
    assert (abs(now - time.time()) < 60) if renewed else (now == before)


def test_nothing_but_its_own_files_is_removed(folder: Path) -> None:
    store = Store(folder, limit_bytes=3000)
    store.save("key 0", bytes(1000))
    name = only(folder).name
    used_ago(only(folder), HOUR_S / 2)
    stays = ["photo.jpg", "x.blob", name.upper(), f"{name}.bak", f"{name}.new.tmp", "notes.tmp"]
    goes = [f"{name}.old.tmp"]
    for path in (folder / other for other in stays + goes):
        path.write_bytes(bytes(5000))
        if path.name != f"{name}.new.tmp":
            used_ago(path, 2 * HOUR_S)
    (folder / ("0" * 64 + ".blobs")).mkdir()
    store.save("key 1", bytes(1000))
    assert store.load("key 0") is not None
    store.save("key 2", bytes(1000))
    left = {path.name for path in folder.iterdir()}
    assert left >= set(stays)
    assert not left & set(goes)
    assert [store.load(f"key {number}") is not None for number in range(3)] == [False, True, True]


def test_the_default_store_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FUSEDATTN_CACHE_DIR", str(folder))
    monkeypatch.setenv("FUSEDATTN_CACHE_MB", "1")
    monkeypatch.delenv("FUSEDATTN_NO_DISK_CACHE", raising=False)
    clear_caches()
    store = default_store()
    assert store is not None
    assert default_store() is store
    store.save("key", b"blob")
    store.save("large", bytes(1 << 20))
    assert (store.load("key"), store.load("large")) == (b"blob", None)
    assert len(blobs(folder)) == 1
    monkeypatch.setenv("FUSEDATTN_NO_DISK_CACHE", "1")
    assert default_store() is store
    clear_caches()
    assert default_store() is None
