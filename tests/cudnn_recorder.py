"""An executor that runs nothing: it notes the keys that it is asked for, and the tensors of each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fusedattn.engines.cudnn_key import SdpaKey


@dataclass
class Recorder:
    """Implements ``Executor``.

    Attributes:
        workspace_bytes: What a graph is said to need.
        keys: Every key that was asked for, in the order of the first time.
        runs: The key and the tensors by uid of every run.
    """

    workspace_bytes: Callable[[SdpaKey], int] = lambda key: 0
    keys: dict[SdpaKey, None] = field(default_factory=dict)
    runs: list[tuple[SdpaKey, dict[int, Tensor]]] = field(default_factory=list)

    def executable(self, key: SdpaKey) -> Recorded:
        self.keys[key] = None
        return Recorded(key, self.workspace_bytes(key), self.runs)

    @property
    def run_keys(self) -> list[SdpaKey]:
        return [key for key, _ in self.runs]


@dataclass
class Recorded:
    """Implements ``Executable``."""

    key: SdpaKey
    workspace_bytes: int
    runs: list[tuple[SdpaKey, dict[int, Tensor]]]

    @property
    def uids(self) -> tuple[int, ...]:
        return self.key.uids

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        assert (workspace is None) == (self.workspace_bytes == 0)
        self.runs.append((self.key, dict(zip(self.uids, tensors, strict=True))))
