"""The disk cache uses no file or folder that another user may have written."""

import os
import stat
from pathlib import Path

import pytest
from blob_folders import NOBODY, only
from processes import POSIX

from fusedattn import store as module
from fusedattn.store import Store


@POSIX
@pytest.mark.parametrize(
    ("mode", "owner", "fault"),
    [
        (0o700, 7, None),
        (0o755, 7, None),
        (0o2750, 7, None),
        (0o720, 7, "others may write to it (its mode is 720, chmod go-w forbids it)"),
        (0o702, 7, "others may write to it (its mode is 702, chmod go-w forbids it)"),
        (0o1777, 7, "others may write to it (its mode is 1777, chmod go-w forbids it)"),
        (0o700, 8, "it belongs to user 8, not to 7"),
        (0o700, 0, "it belongs to user 0, not to 7"),
    ],
)
def test_who_may_have_written(monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, fault: str | None) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    assert module._access_fault(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))) == fault


@POSIX
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_used(store: Store, folder: Path, mode: int) -> None:
    store.save("key", b"blob")
    path = only(folder)
    path.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"{path} is not used: others may write to it"):
        assert store.load("key") is None
    assert not path.exists()
    store.save("key", b"blob")
    assert store.load("key") == b"blob"


@POSIX
def test_a_file_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path) -> None:
    store.save("key", b"blob")
    status = list(only(folder).stat())
    status[stat.ST_UID] += 1
    monkeypatch.setattr(os, "fstat", lambda number: os.stat_result(status))
    with pytest.warns(RuntimeWarning, match="is not used: it belongs to user"):
        assert store.load("key") is None


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(store: Store, folder: Path, mode: int) -> None:
    store.save("key", b"blob")
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"the disk cache in {folder} cannot be used: others may write to it"):
        assert store.load("key") is None
    store.save("other", b"blob")
    assert len(list(folder.iterdir())) == 1
    folder.chmod(0o700)
    assert store.load("key") == b"blob"


@POSIX
def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path) -> None:
    store.save("key", b"blob")
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY - 1)
    with pytest.warns(RuntimeWarning, match=f"it belongs to user {os.getuid()}, not to {NOBODY - 1}"):
        store.save("other", b"blob")
    assert store.load("key") is None
    assert len(list(folder.iterdir())) == 1
