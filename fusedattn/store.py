"""The disk cache: blobs by key, one file each, safe under many processes and against damage.

A file is put in place whole, by renaming, and holds its key and a digest of all that follows; what is damaged or of
another origin is found out, removed and counts as absent. What is stored may be run on a GPU, so a folder or file is
not used that belongs to another user, or that others may write to. Trouble with the disk is told once, by a
``RuntimeWarning``; work goes on without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import tempfile
import time
import warnings
from pathlib import Path

from fusedattn.cache import on_clear
from fusedattn.settings import settings

# Raised with the layout of the file: magic, digest of all that follows it, bytes of the key, key, blob.
_MAGIC = b"fusedattn blob 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_HEADER_BYTES = len(_MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES

# Nothing else in the folder is ours to remove.
_BLOB_NAME = re.compile(r"[0-9a-f]{64}\.blob")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.blob\..*\.tmp")
# Older temporary files are those of processes that died. Loads renew the time of a file no more often than this.
_HOUR_S = 3600.0

# Which troubles were told.
_WARNED: dict[str, object] = {}
on_clear(_WARNED.clear)


class Store:
    """Blobs in a folder.

    Args:
        folder: Made by the first ``save``, for this user alone.
        limit_bytes: Above it the files unused for longest are removed; a larger blob is not kept.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder, "blobs"), limit_bytes=1 << 20)
        ...     store.save("key", b"blob")
        ...     store.load("key"), store.load("other key")
        (b'blob', None)
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def load(self, key: str) -> bytes | None:
        """The blob of a key.

        Args:
            key: The text that it was saved under.

        Returns:
            The blob; None where there is none that can be trusted.

        Raises:
            Nothing.
        """
        path = self._path(key)
        try:
            fault = _access_fault(os.stat(self._folder))
            if fault is not None:
                _warn_once("folder", self._trouble(fault))
                return None
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read()
        # The usual case: nobody saved it, or it was evicted.
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once("folder", self._trouble(str(error)))
            return None
        fault = _access_fault(status) or _content_fault(content, key)
        if fault is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            _warn_once("blob", f"{path} is not used: {fault}. It counts as absent and will be made anew.")
            return None
        if abs(_age_s(status)) > _HOUR_S:
            # Without the right to write, files age as if unused.
            with contextlib.suppress(OSError):
                os.utime(path)
        return content[_HEADER_BYTES + len(_encoded(key)) :]

    def save(self, key: str, blob: bytes) -> None:
        """Keep a blob, in place of an earlier one of its key.

        Args:
            key: Any text.
            blob: What ``load`` is to return.

        Returns:
            None.

        Raises:
            Nothing.
        """
        content = _content(key, blob)
        if len(content) > self._limit_bytes:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fault = _access_fault(os.stat(self._folder))
            if fault is None:
                _write(self._path(key), content)
                self._trim()
        except OSError as error:
            fault = str(error)
        if fault is not None:
            _warn_once("folder", self._trouble(fault))

    def _path(self, key: str) -> Path:
        # With the magic, so that releases of other layouts have files of their own.
        return self._folder / f"{hashlib.sha256(_MAGIC + _encoded(key)).hexdigest()}.blob"

    def _trim(self) -> None:
        """Remove what processes that died left behind, and what is above the limit."""
        blobs = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _BLOB_NAME.fullmatch(entry.name):
                        status = entry.stat(follow_symlinks=False)
                        blobs.append((status.st_mtime, entry.path, status.st_size))
                    elif _TEMPORARY_NAME.fullmatch(entry.name) and _age_s(entry.stat(follow_symlinks=False)) > _HOUR_S:
                        os.unlink(entry.path)
        excess = sum(size for _, _, size in blobs) - self._limit_bytes
        for _, path, size in sorted(blobs):
            if excess <= 0:
                break
            # Gone where another process trims as well.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            excess -= size

    def _trouble(self, fault: str) -> str:
        return (
            f"the disk cache in {self._folder} cannot be used: {fault}. What it would keep is made anew each time. "
            "Free or repair the folder, set FUSEDATTN_CACHE_DIR to another one, or set FUSEDATTN_NO_DISK_CACHE=1."
        )


@functools.cache
def default_store() -> Store | None:
    """The store that the environment asks for.

    Returns:
        The store in ``settings().cache_dir``; None where there is to be none.

    Raises:
        SpecError: A ``FUSEDATTN_*`` variable is wrong.

    Example:
        >>> default_store() is default_store()
        True
    """
    now = settings()
    return None if now.cache_dir is None else Store(now.cache_dir, now.cache_limit_bytes)


on_clear(default_store.cache_clear)


def _age_s(status: os.stat_result) -> float:
    return time.time() - status.st_mtime


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _content(key: str, blob: bytes) -> bytes:
    name = _encoded(key)
    rest = len(name).to_bytes(_LENGTH_BYTES, "little") + name + blob
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def _content_fault(content: bytes, key: str) -> str | None:
    """Why the content of a file is not that of a key's; None where it is."""
    if not content.startswith(_MAGIC):
        return "it does not start as a file of this cache does"
    digest, rest = content[len(_MAGIC) :][:_DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(rest).digest() != digest:
        return "it is damaged or cut short"
    name = _encoded(key)
    if not rest.startswith(len(name).to_bytes(_LENGTH_BYTES, "little") + name):
        return "it holds another key"
    return None


def _access_fault(status: os.stat_result) -> str | None:
    """Why others may have written to a file or folder; None where they cannot. Only POSIX tells."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (its mode is {stat.S_IMODE(status.st_mode):o}, chmod go-w forbids it)"
    return None


def _write(path: Path, content: bytes) -> None:
    """Put a file in place whole; nothing is left of a failure."""
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _warn_once(trouble: str, message: str) -> None:
    told = object()
    # One step, so that of several threads one warns.
    if _WARNED.setdefault(trouble, told) is told:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
