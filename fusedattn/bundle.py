"""The bundle in use, named by ``load_bundle`` or ``FUSEDATTN_BUNDLE``: asked for a plan before the disk cache is."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from fusedattn.bundle_format import MANIFEST, Bundle
from fusedattn.cache import on_clear
from fusedattn.errors import BundleError, SpecError
from fusedattn.rules_cudnn import library_version
from fusedattn.settings import settings
from fusedattn.target import DeviceTarget


class _Loaded(NamedTuple):
    """What was loaded; no bundle where it was refused and rebuilding was asked for."""

    bundle: Bundle | None
    rebuild: bool


# At most one.
_LOADED: list[_Loaded] = []
_WARNED: set[str] = set()
on_clear(_LOADED.clear)
on_clear(_WARNED.clear)


def load_bundle(folder: str | os.PathLike[str], *, rebuild: bool = False) -> None:
    """Take cuDNN plans from a bundle that ``fusedattn compile`` wrote; what it holds is not built again.

    It takes the place of one that was loaded before, until ``clear_caches``. Plans that it does not hold come from the
    disk cache, or are built. The environment variable ``FUSEDATTN_BUNDLE`` names a bundle without a call.

    Args:
        folder: The bundle.
        rebuild: What to do about a bundle, or plan of it, that is damaged, or was made for another GPU or version of
            cuDNN. False: raise ``BundleError``, here or when the plan is needed. True: warn once, and do without.

    Returns:
        None.

    Raises:
        SpecError: ``folder`` is no path.
        BundleError: There is no bundle; or, unless ``rebuild``, its manifest is damaged or of another release, its
            plans are of another version of cuDNN, this machine has GPUs and none of those it was made for, or the
            driver does not support its version of CUDA.

    Example:
        >>> load_bundle("no")
        Traceback (most recent call last):
        fusedattn.errors.BundleError: bundle '...no': there is no such folder. `fusedattn compile` writes bundles.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise SpecError("folder", "the path of a bundle", type(folder).__name__)
    path = Path(os.path.abspath(os.path.expanduser(folder)))
    try:
        bundle = _opened(path)
    except BundleError as error:
        if not rebuild or not (path / MANIFEST).exists():
            raise
        _warn(error)
        bundle = None
    _LOADED[:] = [_Loaded(bundle, rebuild)]


def bundled_plan(key: str, fingerprint: str, cudnn: str) -> bytes | None:
    """The plan of a key out of the bundle in use.

    Args:
        key: Text of the key.
        fingerprint: Of the GPU.
        cudnn: Version of the library.

    Returns:
        The serialised plan, whole and for this GPU and version; None where no bundle is in use, it does not hold the
        plan, or it does but may not be used and rebuilding was asked for.

    Raises:
        BundleError: The bundle may not be used, and rebuilding was not asked for.

    Example:
        >>> bundled_plan("{}", "sm90-132sm-232448", "9.24.0") is None
        True
    """
    bundle, rebuild = _in_use()
    if bundle is None:
        return None
    try:
        bundle.require_cudnn(cudnn)
        bundle.require_gpu(fingerprint)
        return bundle.plan(key)
    except BundleError as error:
        if not rebuild:
            raise
        _warn(error)
        return None


def _in_use() -> _Loaded:
    for loaded in _LOADED[:1]:
        return loaded
    folder = settings().bundle
    found = _Loaded(None if folder is None else _opened(folder), rebuild=False)
    _LOADED[:] = _LOADED[:1] or [found]
    return found


def _opened(folder: Path) -> Bundle:
    """A bundle, checked as far as can be before a plan is asked for."""
    bundle = Bundle.open(folder)
    built, here = bundle.manifest.cudnn, library_version()
    if here != (0, 0) and tuple(map(int, built.split(".")[:2])) != here:
        bundle.require_cudnn(".".join(map(str, here)))
    if torch.cuda.is_available():
        bundle.require_driver(_driver_version())
        found = [DeviceTarget.current(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        if not bundle.fingerprints.intersection(target.fingerprint for target in found):
            bundle.require_gpu(found[0].fingerprint)
    return bundle


def _driver_version() -> int:
    """What the driver supports of CUDA, such as 13010; asked where there is a GPU."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _warn(error: BundleError) -> None:
    if error.folder not in _WARNED:
        _WARNED.add(error.folder)
        warnings.warn(f"{error} Plans that it cannot give are built.", RuntimeWarning, stacklevel=3)
