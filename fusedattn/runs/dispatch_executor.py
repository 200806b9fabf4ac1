"""An executor for timing: it takes what is handed over to cuDNN as the real one does, and runs nothing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from torch import Tensor

from fusedattn.cache import BuildCache
from fusedattn.engines.cudnn_key import SdpaKey

# A plan wants some, which is an allocation a call; how much does not matter.
_WORKSPACE_BYTES = 16384


class HandOver:
    """Implements ``Executor``.

    What the real one does besides needs a GPU and is not in the figures: to look for the current stream, and to give it
    to cuDNN where it changed.

    Attributes:
        first: The first graph that was run, with its tensors by uid; None before.
    """

    def __init__(self) -> None:
        self.first: tuple[SdpaKey, dict[int, Tensor]] | None = None
        self._cache: BuildCache[SdpaKey, HandedOver] = BuildCache("dispatch", 256)

    def executable(self, key: SdpaKey) -> HandedOver:
        """What stands for the plan of a key."""
        return self._cache.get(key, lambda: HandedOver(key, self))


class HandedOver:
    """Implements ``Executable``; see ``PlanExecutable``."""

    workspace_bytes = _WORKSPACE_BYTES

    def __init__(self, key: SdpaKey, executor: HandOver) -> None:
        self._key, self._executor = key, executor
        self.uids = key.uids
        self._lock = threading.Lock()
        self._addresses = (ctypes.c_void_p * len(self.uids))()

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        """Note every address, and go no further."""
        address = 0 if workspace is None else workspace.data_ptr()
        with self._lock:
            for index, tensor in enumerate(tensors):
                self._addresses[index] = tensor.data_ptr()
            _take(ctypes.addressof(self._addresses), len(self.uids), address)
        if self._executor.first is None:
            self._executor.first = self._key, dict(zip(self.uids, tensors, strict=True))


def _take(addresses: int, count: int, workspace: int) -> None:
    """Stand for the call into cuDNN."""
