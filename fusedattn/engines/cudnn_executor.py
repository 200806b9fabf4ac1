"""Plans on a GPU: found in a bundle, on disk, or compiled; loaded once a device; run on the caller's stream."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedattn.bundle import bundled_plan
from fusedattn.cache import BuildCache
from fusedattn.counters import COUNTERS
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_library import cudnn, cudnn_version
from fusedattn.engines.cudnn_plan import compile_plan, load_plan, plan_name
from fusedattn.errors import BuildError
from fusedattn.store import default_store

# Loaded plans of one device. A plan holds some 100 KB on the host and its code on the device.
_CAPACITY = 256
_LOCAL = threading.local()
# Handles of threads that ended, for others to take: to destroy one would wait for the GPU and break captures.
_IDLE: dict[torch.device, list[Any]] = {}
# Plans that CUDA graphs run, which may outlive all caches: before 9.27 cuDNN unloads a plan's kernels with it.
_CAPTURED: set[PlanExecutable] = set()
atexit.register(_CAPTURED.clear)
_BEFORE_CAPTURE = "Call the function once before the capture."


def stored_plan(key: SdpaKey) -> bytes:
    """The serialised plan of a key: from the bundle or the disk cache, else compiled and put there.

    Args:
        key: The graph.

    Returns:
        The plan.

    Raises:
        BuildError: There is none.
        BundleError: The bundle in use is damaged, or was made for other GPUs or another version of cuDNN.
    """
    blob = bundled_plan(key.text(), key.target.fingerprint, cudnn_version())
    if blob is not None:
        COUNTERS["plans_loaded"] += 1
        return blob
    store = default_store()
    name = plan_name(key)
    blob = None if store is None else store.load(name)
    if blob is not None:
        COUNTERS["plans_loaded"] += 1
        return blob
    blob = compile_plan(key).blob
    COUNTERS["plans_built"] += 1
    if store is not None:
        store.save(name, blob)
    return blob


class PlanExecutor:
    """See the module; implements ``Executor``.

    Args:
        device: A CUDA device with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache: BuildCache[SdpaKey, PlanExecutable] = BuildCache(f"cudnn plans on {device}", _CAPACITY)

    def executable(self, key: SdpaKey) -> PlanExecutable:
        """The loaded plan of a key; raises ``BuildError`` where there is none, or during a capture none yet."""
        return self._cache.get(key, lambda: self._load(key))

    def _load(self, key: SdpaKey) -> PlanExecutable:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                why = "it is not loaded yet, and loading it would break the capture in progress"
                raise BuildError(f"a cuDNN {key.direction.word} plan on {self._device}", why, _BEFORE_CAPTURE)
            return PlanExecutable(self._device, load_plan(key.target, stored_plan(key), self._device.index))


class PlanExecutable:
    """A loaded plan; implements ``Executable``."""

    def __init__(self, device: torch.device, graph: Any) -> None:
        self._device = device
        self._graph = graph
        self._lock = threading.Lock()
        uids = graph._variant_pack_uids()
        self.uids: tuple[int, ...] = tuple(uids)
        self.workspace_bytes = int(graph.get_workspace_size())
        self._addresses = (ctypes.c_void_p * len(self.uids))()

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        """Run on torch's current stream of the device; see ``Executable.run``."""
        if torch.cuda.current_device() == self._device.index:
            self._run(tensors, workspace)
            return
        # cuDNN wants its handle's device to be the current one.
        with torch.cuda.device(self._device):
            self._run(tensors, workspace)

    def _run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            _CAPTURED.add(self)
        handle = _handle(self._device, capturing)
        cudnn().set_stream(handle, stream)
        address = 0 if workspace is None else workspace.data_ptr()
        # The graph and the addresses are one for all threads.
        with self._lock:
            for index, tensor in enumerate(tensors):
                self._addresses[index] = tensor.data_ptr()
            # What the public execute() ends in, without its looking at every tensor anew.
            self._graph._lowered_graph._execute_with_raw_ptrs(
                ctypes.addressof(self._addresses), len(self.uids), address, handle.backend_handle, -1
            )


class _Handles:
    """cuDNN's handles of one thread, by device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, Any] = {}
        # Modules may be gone before the last thread is.
        self._idle = _IDLE

    def __del__(self) -> None:
        for device, handle in self.of.items():
            self._idle.setdefault(device, []).append(handle)


def _handle(device: torch.device, capturing: bool) -> Any:
    """cuDNN's handle of a device, the current one, in this thread; raises ``BuildError`` where a capture forbids it."""
    handles: _Handles | None = getattr(_LOCAL, "handles", None)
    if handles is None:
        handles = _LOCAL.handles = _Handles()
    found = handles.of.get(device)
    if found is None:
        try:
            # One step, so that of several threads one gets it.
            found = _IDLE[device].pop()
        except (KeyError, IndexError):
            if capturing:
                why = "this thread has none yet, and making one would break the capture in progress"
                raise BuildError(f"a cuDNN handle on {device}", why, _BEFORE_CAPTURE) from None
            found = cudnn().create_handle()
        handles.of[device] = found
    return found
