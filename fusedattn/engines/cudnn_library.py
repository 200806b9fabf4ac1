"""The cuDNN library and its frontend: found, fit, and loaded beside a driver or its stub."""

from __future__ import annotations

import atexit
import functools
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from fusedattn.cache import clear_caches, on_clear
from fusedattn.engines.stub_driver import ensure_driver, failure_hint
from fusedattn.errors import BuildError
from fusedattn.rules_cudnn import PACKAGE, package_fault
from fusedattn.target import DeviceTarget

# What the plans of this release were proved with at least; torch 2.11 brings it.
OLDEST = (9, 19, 0)


_MAPS = Path("/proc/self/maps")
_CUDNN = re.compile(r"(/\S.*)/libcudnn[^/\n]*\.so")


@functools.cache
def cudnn() -> ModuleType:
    """The module ``cudnn``, once it is known to work.

    Returns:
        The module.

    Raises:
        BuildError: The frontend is missing or too old, or so is the library, or it does not load, or there are two.

    Example:
        >>> cudnn().backend_version() >= 91900
        True
    """
    fault = package_fault()
    if fault is not None:
        raise BuildError("the cuDNN engine", fault, f"Install it with: pip install --upgrade {PACKAGE}")
    ensure_driver()
    try:
        module = importlib.import_module("cudnn")
        version = module.backend_version()
    except (ImportError, OSError, RuntimeError) as error:
        hint = "Install the wheel nvidia-cudnn-cu13 and start a new process, since a failed load stays failed."
        raise BuildError("the cuDNN library", str(error), hint) from error
    if version < _number(OLDEST):
        oldest = ".".join(map(str, OLDEST))
        hint = "Install a newer nvidia-cudnn-cu13 and start a new process."
        raise BuildError("the cuDNN engine", f"cuDNN is {module.backend_version_string()}, older than {oldest}", hint)
    copies = loaded_copies(_MAPS.read_text() if _MAPS.exists() else "")
    if len(copies) > 1:
        hint = "Uninstall one of them, or take its folder out of LD_LIBRARY_PATH, and start a new process."
        raise BuildError("the cuDNN engine", f"two copies of cuDNN are loaded: {' and '.join(copies)}", hint)
    # What of cuDNN's is alive at the end of the process is reported as a leak.
    atexit.register(clear_caches)
    return module


def loaded_copies(maps: str) -> list[str]:
    """Folders from which a process has loaded cuDNN.

    Args:
        maps: What Linux says of its memory, ``/proc/self/maps``.

    Returns:
        The folders; more than one of them makes plans of one library run by another.

    Raises:
        Nothing.

    Example:
        >>> loaded_copies("7f00-7f01 r-xp 00000000 08:01 42 /opt/cudnn/lib/libcudnn_graph.so.9")
        ['/opt/cudnn/lib']
    """
    return sorted(set(_CUDNN.findall(maps)))


def _number(version: tuple[int, int, int]) -> int:
    return version[0] * 10000 + version[1] * 100 + version[2]


def cudnn_version() -> str:
    """Version of the library, such as ``9.24.0``; raises like ``cudnn``.

    Example:
        >>> cudnn_version().count(".")
        2
    """
    version: str = cudnn().backend_version_string()
    return version


@functools.lru_cache(maxsize=64)
def device_properties(target: DeviceTarget) -> Any:
    """cuDNN's description of a target.

    Args:
        target: The GPU.

    Returns:
        What ``cudnn.pygraph`` takes as ``device_property``.

    Raises:
        BuildError: The library cannot be used, or refuses the description.

    Example:
        >>> from fusedattn.target import TARGETS
        >>> device_properties(TARGETS["h100"]) is device_properties(TARGETS["h100"])
        True
    """
    try:
        return cudnn().create_device_properties(target.cudnn_properties())
    except RuntimeError as error:
        raise BuildError(f"cuDNN's description of {target.name}", str(error), failure_hint(str(error))) from error


on_clear(device_properties.cache_clear)
