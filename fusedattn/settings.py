"""Environment variables ``FUSEDATTN_*``, read at first use and validated.

``FUSEDATTN_VALIDATE`` (0 or 1, default 0): also check cu_seqlens that live on a GPU, at the price of a read-back.
``FUSEDATTN_WORKSPACE_MB`` (MiB, default 512): scratch memory that a plan may want whatever the size of its tensors.
``FUSEDATTN_CACHE_DIR`` (default ``$XDG_CACHE_HOME/fusedattn`` or ``~/.cache/fusedattn``): folder of the disk cache.
``FUSEDATTN_CACHE_MB`` (MiB, default 512): size of the disk cache.
``FUSEDATTN_NO_DISK_CACHE`` (0 or 1, default 0): neither read nor write the disk cache.
``FUSEDATTN_BUNDLE`` (default none): folder of the bundle to take plans from.
``FUSEDATTN_SELF_TEST`` (0 or 1, default 1): engines of a GPU check themselves at first use.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

from fusedattn.errors import SpecError


class Settings(NamedTuple):
    """The values in force.

    Attributes:
        validate_values: Whether values on a GPU are read back and checked.
        workspace_limit_bytes: Scratch memory that a plan may want whatever the size of its tensors.
        cache_dir: Folder of the disk cache, absolute; None: there is no disk cache.
        cache_limit_bytes: Size of the disk cache.
        bundle: Folder of the bundle, absolute; None: there is none.
        self_test: Whether engines of a GPU check themselves at first use.

    Example:
        >>> settings().workspace_limit_bytes >> 20
        512
    """

    validate_values: bool
    workspace_limit_bytes: int
    cache_dir: Path | None
    cache_limit_bytes: int
    bundle: Path | None
    self_test: bool


@functools.cache
def settings() -> Settings:
    """Read the environment, once until ``clear_caches``.

    Returns:
        The values in force. Without a variable for it and without a home there is no disk cache.

    Raises:
        SpecError: A variable holds a word that it does not know.

    Example:
        >>> settings().validate_values
        False
    """
    return Settings(
        validate_values=_flag("FUSEDATTN_VALIDATE"),
        workspace_limit_bytes=_mebibytes("FUSEDATTN_WORKSPACE_MB", 512),
        cache_dir=None if _flag("FUSEDATTN_NO_DISK_CACHE") else _folder("FUSEDATTN_CACHE_DIR") or _user_cache(),
        cache_limit_bytes=_mebibytes("FUSEDATTN_CACHE_MB", 512),
        bundle=_folder("FUSEDATTN_BUNDLE"),
        self_test=_flag("FUSEDATTN_SELF_TEST", default="1"),
    )


def _flag(name: str, default: str = "0") -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise _wrong(name, "0 or 1", value)
    return value == "1"


def _mebibytes(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not re.fullmatch("[1-9][0-9]{0,8}", value):
        raise _wrong(name, "a whole number of MiB from 1 to 999999999", value)
    return int(value) << 20


def _folder(name: str) -> Path | None:
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.strip():
        raise _wrong(name, "the path of a folder", value)
    # Absolute, so that a later change of the working directory moves nothing.
    return Path(os.path.abspath(os.path.expanduser(value)))


def _user_cache() -> Path | None:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The standard has relative paths ignored.
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".cache")
    # A user without a home keeps the tilde.
    return Path(home, "fusedattn") if os.path.isabs(home) else None


def _wrong(name: str, expected: str, value: str) -> SpecError:
    return SpecError(name, expected, repr(value), "Set or unset the environment variable.")
