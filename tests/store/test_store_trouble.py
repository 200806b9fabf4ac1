"""The disk cache on a disk that is full, broken or not its own: trouble is told once, and work goes on."""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from blob_folders import HOUR_S, LIMIT_BYTES, NOBODY, blobs, only, used_ago
from processes import POSIX, ended_well, fork

from fusedattn import store as module
from fusedattn.cache import clear_caches
from fusedattn.store import Store


def failing(code: int) -> Callable[..., object]:
    def fail(*args: object, **kwargs: object) -> object:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["mkdir", "mkstemp", "write", "replace", "scandir"])
def test_a_full_or_broken_disk_is_told_once(
    monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path, step: str, code: int
) -> None:
    class Full:
        def __init__(self, number: int, mode: str) -> None:
            self.file = open(number, mode)  # noqa: SIM115

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            failing(code)()

    store.save("old", b"blob")
    owner, replacement = {
        "mkdir": (Path, failing(code)),
        "mkstemp": (module.tempfile, failing(code)),
        "write": (os, Full),
        "replace": (os, failing(code)),
        "scandir": (os, failing(code)),
    }[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, "fdopen" if step == "write" else step, replacement)
        with pytest.warns(RuntimeWarning) as warned:
            store.save("key", b"blob" * 1000)
        store.save("key", b"blob" * 1000)
        assert store.load("old") == b"blob"
    (warning,) = warned
    text = str(warning.message)
    assert text.startswith(f"the disk cache in {folder} cannot be used: [Errno {code}] {os.strerror(code)}")
    assert text.endswith("set FUSEDATTN_CACHE_DIR to another one, or set FUSEDATTN_NO_DISK_CACHE=1.")
    assert warning.filename == __file__
    assert list(folder.glob("*.tmp")) == []
    assert store.load("key") == (b"blob" * 1000 if step == "scandir" else None)
    store.save("key", b"again")
    assert store.load("key") == b"again"


@POSIX
def test_a_write_that_the_system_cuts_short(store: Store, folder: Path) -> None:
    def write() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store.save("small", b"blob")
        with pytest.warns(RuntimeWarning, match="cannot be used: .*File too large"):
            store.save("large", bytes(1_000_000))
        store.save("large", bytes(1_000_000))
        assert (store.load("large"), store.load("small")) == (None, b"blob")

    assert ended_well([fork(write)])
    assert len(list(folder.iterdir())) == 1


def test_an_interrupt_leaves_no_file(monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save("key", b"blob")
    assert list(folder.iterdir()) == []


@contextmanager
def without_privileges(folder: Path) -> Iterator[None]:
    """As a user whom permissions bind; the folder is made that user's."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A temporary folder that any user may pass through, unlike pytest's."""
    with module.tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@POSIX
def test_a_read_only_folder_serves_what_it_holds(reachable: Path) -> None:
    folder = reachable / "blobs"
    store = Store(folder, LIMIT_BYTES)
    store.save("key", b"blob")
    used_ago(only(folder), 5 * HOUR_S)
    folder.chmod(0o500)
    with without_privileges(folder):
        assert store.load("key") == b"blob"
        assert store.load("other") is None
        with pytest.warns(RuntimeWarning, match="cannot be used: .*Permission denied") as warned:
            store.save("other", b"blob")
        assert len(warned) == 1
        store.save("other", b"blob")
        assert store.load("key") == b"blob"
    folder.chmod(0o700)


def test_a_file_whose_time_cannot_be_renewed_is_used(
    monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path
) -> None:
    store.save("key", b"blob")
    used_ago(only(folder), 5 * HOUR_S)
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    assert store.load("key") == b"blob"


@POSIX
def test_a_damaged_file_in_a_read_only_folder_is_not_used(reachable: Path) -> None:
    folder = reachable / "blobs"
    store = Store(folder, LIMIT_BYTES)
    store.save("key", b"blob")
    only(folder).write_bytes(b"")
    folder.chmod(0o500)
    with without_privileges(folder):
        with pytest.warns(RuntimeWarning, match="is not used"):
            assert store.load("key") is None
        assert store.load("key") is None
    folder.chmod(0o700)
    assert len(blobs(folder)) == 1


@POSIX
@pytest.mark.parametrize("closed", ["folder", "file", "parent"])
def test_what_may_not_be_read_is_told_once(reachable: Path, closed: str) -> None:
    parent = reachable / "parent"
    folder = parent / "blobs"
    store = Store(folder, LIMIT_BYTES)
    store.save("key", b"blob")
    {"folder": folder, "file": only(folder), "parent": parent}[closed].chmod(0o000)
    with without_privileges(parent):
        with pytest.warns(RuntimeWarning, match="cannot be used: .*Permission denied") as warned:
            assert store.load("key") is None
        assert len(warned) == 1
        assert store.load("key") is None
        if closed != "file":
            store.save("key", b"blob")
    parent.chmod(0o700)
    folder.chmod(0o700)


@pytest.mark.parametrize("place", ["a file", "below a file", "long name", "long path", "dangling link", "null"])
def test_a_folder_that_cannot_be_is_told_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    folder = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "blobs",
        "long name": tmp_path / ("x" * 300),
        "long path": tmp_path / "/".join(["x" * 100] * 60),
        "dangling link": tmp_path / "link",
        "null": Path(os.devnull),
    }[place]
    store = Store(folder, LIMIT_BYTES)
    with pytest.warns(RuntimeWarning, match="cannot be used") as warned:
        store.save("key", b"blob")
    assert len(warned) == 1
    assert store.load("key") is None
    clear_caches()
    if place != "dangling link":
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            assert store.load("key") is None
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_folder_in_the_place_of_a_file_is_told_once(store: Store, folder: Path) -> None:
    store.save("key", b"blob")
    path = only(folder)
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot be used") as warned:
        assert store.load("key") is None
    assert len(warned) == 1
    store.save("key", b"blob")
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_a_folder_removed_meanwhile_is_made_again(store: Store, folder: Path) -> None:
    store.save("key", b"blob")
    only(folder).unlink()
    folder.rmdir()
    assert store.load("key") is None
    store.save("key", b"blob")
    assert store.load("key") == b"blob"


def test_a_folder_removed_while_saving_is_told(monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path) -> None:
    real = os.replace

    def removed(source: str, target: Path) -> None:
        Path(source).unlink()
        folder.rmdir()
        real(source, target)

    monkeypatch.setattr(os, "replace", removed)
    with pytest.warns(RuntimeWarning, match="cannot be used: .*No such file"):
        store.save("key", b"blob")


def test_a_file_evicted_while_trimming_is_no_trouble(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    store = Store(folder, limit_bytes=2500)
    store.save("key 0", bytes(1000))
    store.save("key 1", bytes(1000))
    real = os.unlink

    def twice(path: str) -> None:
        real(path)
        real(path)

    monkeypatch.setattr(os, "unlink", twice)
    store.save("key 2", bytes(1000))
    assert len(blobs(folder)) == 2


def test_threads_are_told_of_trouble_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file", LIMIT_BYTES)
    with pytest.warns(RuntimeWarning) as warned, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.load("key"), range(100)))
    assert len(warned) == 1
