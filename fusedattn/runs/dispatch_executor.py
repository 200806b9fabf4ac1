"""An executor for timing: it takes what is handed over to cuDNN as the real one does, and runs nothing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from torch import Tensor

from fusedattn.cache import BuildCache
from fusedattn.engines.cudnn_key import Role, SdpaKey

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
        self.uids = uids_of(key)
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


def uids_of(key: SdpaKey) -> tuple[int, ...]:
    """Uids of the tensors that a graph takes, ascending.

    Args:
        key: The graph.

    Returns:
        The uids.

    Raises:
        Nothing.

    Example:
        >>> from fusedattn.engines.cudnn_key import TensorKey
        >>> from fusedattn.enums import Direction
        >>> from fusedattn.target import TARGETS
        >>> q = TensorKey((2, 4, 64, 32), (8192, 32, 128, 1), "bfloat16")
        >>> uids_of(SdpaKey(TARGETS["h100"], Direction.forward, ((Role.Q, q), (Role.K, q)), padding=True))
        (1, 2, 7, 8, 11)
    """
    lengths = (Role.SEQ_LEN_Q, Role.SEQ_LEN_KV) if key.padding else ()
    seeds = (Role.SEED, Role.OFFSET) if key.dropout else ()
    roles = [role for role, _ in key.tensors]
    return tuple(sorted(map(int, (*roles, *lengths, *seeds, Role.ATTN_SCALE, *key.ragged_uids.values()))))
