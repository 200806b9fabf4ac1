"""``NVTETensorPack``, ``Workspace`` and ``SKIP``: what the nvte functions pass beside plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fusedattn import arguments
from fusedattn.errors import SpecError


class Skip(Enum):
    """The type of ``SKIP``."""

    SKIP = "SKIP"

    def __repr__(self) -> str:
        return "fusedattn.SKIP"


SKIP: Final = Skip.SKIP
"""Passed for a gradient: do not compute it."""


class ForwardRecord(NamedTuple):
    """What a forward notes in its pack, so that a backward of another problem is noticed.

    Attributes:
        problem: Words and numbers of the problem, by the name of the argument.
        engine: Word of the engine that computed.
    """

    problem: dict[str, object]
    engine: str


class NVTETensorPack:
    """The auxiliary tensors that forward leaves for backward, in order: ``softmax_lse``, ``rng_state``, ``Bias``.

    Args:
        **tensors: Names to tensors, to rebuild a pack from tensors that were saved elsewhere; none for an empty pack.

    Raises:
        SpecError: More than ``capacity`` tensors, or something that is no tensor.

    Mirrors ``NVTETensorPack`` of TransformerEngine.

    Example:
        >>> pack = NVTETensorPack(softmax_lse=torch.zeros(5, 2, 1))
        >>> len(pack), pack.names, pack[0] is pack["softmax_lse"]
        (1, ('softmax_lse',), True)
    """

    capacity: Final = 10

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._bias_version: int | None = None
        self.record: ForwardRecord | None = None
        self.fill(tensors)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], record: ForwardRecord | None) -> NVTETensorPack:
        """A pack of what forward made itself, which needs no checks; arguments as in ``fill``."""
        pack = cls.__new__(cls)
        pack._tensors, pack.record = tensors, record
        pack._bias_version = _version(tensors.get("Bias"))
        return pack

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(self._tensors)

    def fill(self, tensors: dict[str, Tensor], record: ForwardRecord | None = None) -> None:
        """Replace the contents; forward calls this.

        Args:
            tensors: Names to tensors, in order.
            record: What forward notes.

        Raises:
            SpecError: More than ``capacity`` tensors, or something that is no tensor.
        """
        if len(tensors) > self.capacity:
            raise SpecError("NVTETensorPack", f"at most {self.capacity} tensors", str(len(tensors)))
        self._tensors = {name: arguments.tensor(name, tensor) for name, tensor in tensors.items()}
        self._bias_version = _version(self._tensors.get("Bias"))
        self.record = record

    def bias_changed(self) -> bool:
        """Whether ``Bias`` was written to since it came into the pack, as far as torch's version counter tells."""
        return self._bias_version is not None and self._bias_version != _version(self._tensors.get("Bias"))

    def is_query(self) -> bool:
        """Whether the pack holds the shapes that a query filled in, and no data yet."""
        return all(tensor.is_meta for tensor in self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors.values())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, key: int | str) -> Tensor:
        return self._tensors[key] if isinstance(key, str) else tuple(self._tensors.values())[key]

    def __copy__(self) -> NVTETensorPack:
        copied = NVTETensorPack()
        copied.__dict__.update(self.__dict__, _tensors=dict(self._tensors))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # The Bias of a deep copy, or of a pickled one, has a version counter of its own.
        return self.__dict__ | {"_bias_version": None}

    def __repr__(self) -> str:
        parts = (f"{name}: {tuple(t.shape)} {t.dtype} {t.device}" for name, t in self._tensors.items())
        return f"NVTETensorPack({', '.join(parts)})"


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


class Workspace:
    """Scratch memory of the two-call protocol: the first call with a new one computes nothing and says how much.

    Mirrors the workspace tensor of TransformerEngine's C API.

    Example:
        >>> workspace = Workspace()
        >>> workspace.size_bytes is None
        True
    """

    def __init__(self) -> None:
        self.size_bytes: int | None = None
        self.buffer: Tensor | None = None

    def allocate(self, device: torch.device | str) -> None:
        """Allocate the memory that the query asked for.

        Args:
            device: The device of the problem's tensors.

        Raises:
            SpecError: No query came before, or torch has no such device.
        """
        if self.size_bytes is None:
            hint = "Call the function once with this workspace first."
            raise SpecError("workspace", "a workspace whose size a query filled in", "a new one", hint)
        try:
            self.buffer = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise SpecError("device", "a device that torch has", repr(device), str(error).partition("\n")[0]) from None

    def is_query(self) -> bool:
        """Whether a call with this workspace only asks for its size."""
        return self.size_bytes is None

    def check(self, size_bytes: int, device: torch.device) -> None:
        """See that the memory serves a problem.

        Args:
            size_bytes: What the problem needs.
            device: Where its tensors are.

        Raises:
            SpecError: Not allocated, too small, or on another device.
        """
        if self.buffer is None:
            hint = f"Call workspace.allocate('{device}') between the two calls."
            raise SpecError("workspace", "an allocated workspace", "one that is not allocated", hint)
        if self.buffer.device != device:
            hint = f"Call workspace.allocate('{device}')."
            raise SpecError("workspace", f"memory on {device}", f"memory on {self.buffer.device}", hint)
        if self.buffer.numel() < size_bytes:
            hint = "Query again with a new Workspace() for this problem."
            raise SpecError("workspace", f"at least {size_bytes} bytes", f"{self.buffer.numel()} bytes", hint)
