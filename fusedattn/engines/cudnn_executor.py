"""Plans on a GPU: found in a bundle, on disk, or compiled; loaded once a device; run on the caller's stream."""

from __future__ import annotations

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
from fusedattn.store import default_store

# Loaded plans of one device. A plan holds some 100 KB on the host and its code on the device.
_CAPACITY = 256
_LOCAL = threading.local()


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
        """The loaded plan of a key; raises ``BuildError`` where there is none."""
        return self._cache.get(key, lambda: self._load(key))

    def _load(self, key: SdpaKey) -> PlanExecutable:
        blob = stored_plan(key)
        with torch.cuda.device(self._device):
            graph = load_plan(key.target, blob, _handle(self._device))
        return PlanExecutable(self._device, graph)


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
        handle = _handle(self._device)
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


def _handle(device: torch.device) -> Any:
    """cuDNN's handle of a device in this thread."""
    handles: dict[torch.device, Any] = _LOCAL.__dict__.setdefault("handles", {})
    found = handles.get(device)
    if found is None:
        with torch.cuda.device(device):
            found = handles[device] = cudnn().create_handle()
    return found
