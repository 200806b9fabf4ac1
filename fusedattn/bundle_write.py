"""Writing bundles: whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from fusedattn.bundle_format import MANIFEST, PLANS, Manifest
from fusedattn.errors import BundleError


def plan_file(blob: bytes) -> tuple[str, str]:
    """The digest of a blob, and where it lies in a bundle.

    Example:
        >>> plan_file(b"")[1][:22]
        'plans/e3b0c44298fc1c14'
    """
    digest = hashlib.sha256(blob).hexdigest()
    return digest, f"{PLANS}/{digest}.plan"


def require_place(folder: Path, replace: bool) -> None:
    """See that a bundle can be written, before the work.

    Args:
        folder: Where to.
        replace: Whether a bundle that is there may be replaced. Nothing else ever is, but an empty folder.

    Returns:
        None.

    Raises:
        BundleError: Something is there, or the folder above cannot be written to.

    Example:
        >>> require_place(Path("/"), replace=True)
        Traceback (most recent call last):
        fusedattn.errors.BundleError: bundle '/': the folder is there and is no bundle. Name a folder that is not there.
    """
    path = str(folder)
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        if not (folder / MANIFEST).is_file() or folder.is_symlink():
            kind = "the folder is there and is no bundle" if folder.is_dir() else "there is a file of that name"
            raise BundleError(path, kind, "Name a folder that is not there.")
        if not replace:
            raise BundleError(path, "there is a bundle already", "Pass --force to replace it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(path, f"the folder above cannot be made: {error.strerror or error}") from error
    if not os.access(folder.parent, os.W_OK):
        raise BundleError(path, "the folder above cannot be written to")


def write_bundle(folder: Path, manifest: Manifest, blobs: Mapping[str, bytes], replace: bool) -> None:
    """Write a bundle beside its place, and put it there by renaming.

    Args:
        folder: Where to.
        manifest: What it holds.
        blobs: By the ``file`` of the manifest's plans.
        replace: As in ``require_place``.

    Returns:
        None.

    Raises:
        BundleError: Something is there, or it cannot be written; then nothing is left of it.
    """
    require_place(folder, replace)
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        made.mkdir()
        (made / PLANS).mkdir()
        for name, blob in blobs.items():
            _write(made / name, blob)
        _write(made / MANIFEST, manifest.text().encode())
        _rename(made, folder)
    except OSError as error:
        raise BundleError(str(folder), f"it cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _rename(made: Path, folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        os.rename(made, folder)
        return
    old = made.with_suffix(".old")
    os.rename(folder, old)
    try:
        os.rename(made, folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
