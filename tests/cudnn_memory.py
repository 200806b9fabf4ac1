"""Memory as a running graph sees it: addresses that were bound, and what was declared of them.

Of a bound torch tensor only its address and the bounds of its storage count; dims, strides and dtypes are the graph's.
Every byte is marked as it is read or written, so that reads of results and second writes are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_READ, _WRITTEN = 1, 2


class InterpreterFault(RuntimeError):
    """Something that a GPU would not survive, or would answer with wrong numbers.

    Example:
        >>> issubclass(MemoryFault, InterpreterFault)
        True
    """


class GraphFault(InterpreterFault):
    """A declared graph that cuDNN refuses, that is known to go wrong, or that the interpreter does not know.

    Example:
        >>> str(GraphFault("node 'sdpa'", "has an unknown port 'sink'"))
        "node 'sdpa' has an unknown port 'sink'"
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")


class BindingFault(InterpreterFault):
    """A tensor is missing, not asked for, or holds values that the graph does not stand.

    Example:
        >>> issubclass(BindingFault, InterpreterFault)
        True
    """


class MemoryFault(InterpreterFault):
    """An access outside a storage, to a wrong address, or to bytes that something else uses.

    Example:
        >>> str(MemoryFault("q (uid 1)", 8, 24, "passes the end of a storage of 16 bytes"))
        'q (uid 1): bytes [8, 24) passes the end of a storage of 16 bytes'
    """

    def __init__(self, name: str, first_byte: int, end_byte: int, why: str) -> None:
        super().__init__(f"{name}: bytes [{first_byte}, {end_byte}) {why}")


@dataclass(frozen=True)
class Declared:
    """One tensor of a graph.

    Attributes:
        name, uid: The graph's.
        dim, stride: Of equal rank, in elements.
        dtype: torch's word for what the graph declares.
        ragged: The tensor that holds where its sequences start, in elements; None where the first axis does.
    """

    name: str
    uid: int
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    ragged: Declared | None = None

    @property
    def label(self) -> str:
        """Name and uid, for messages."""
        return f"{self.name} (uid {self.uid})"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class _Bound:
    storage: torch.UntypedStorage
    start_byte: int


class Memory:
    """The tensors of one run.

    Args:
        tensors: The torch tensors by uid.

    Raises:
        BindingFault: One is not in CPU memory.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._bound = {uid: self._bind(f"uid {uid}", tensor) for uid, tensor in tensors.items()}
        self._marks: dict[int, Tensor] = {}

    @staticmethod
    def _bind(label: str, tensor: Tensor) -> _Bound:
        if tensor.device.type != "cpu":
            raise BindingFault(f"{label}: expected a tensor in CPU memory, got one on {tensor.device}")
        storage = tensor.untyped_storage()
        return _Bound(storage, tensor.data_ptr() - storage.data_ptr() if storage.nbytes() else 0)

    def address(self, declared: Declared) -> int:
        """The bound address."""
        bound = self._bound[declared.uid]
        return bound.storage.data_ptr() + bound.start_byte

    def view(self, declared: Declared, start: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Elements from ``start`` on, without marking them.

        Args:
            declared: Whose address and dtype.
            start: Elements past the address.
            size, stride: In elements.

        Returns:
            A view of the memory itself.

        Raises:
            MemoryFault: It leaves the storage, or is not aligned to its dtype.
        """
        if 0 in size:
            return torch.empty(size, dtype=declared.dtype)
        bound = self._bound[declared.uid]
        first = bound.start_byte + start * declared.itemsize
        end = first + (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * declared.itemsize
        available = bound.storage.nbytes()
        if end > available:
            raise MemoryFault(declared.label, first, end, f"leave its storage, which has {available}")
        if (bound.storage.data_ptr() + first) % declared.itemsize or first % declared.itemsize:
            raise MemoryFault(declared.label, first, end, f"are not aligned to {declared.dtype}")
        return torch.empty(0, dtype=declared.dtype).set_(bound.storage, first // declared.itemsize, size, stride)

    def read(self, declared: Declared, start: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """A view of elements, which may not have been written in this run; see ``view``."""
        view = self.view(declared, start, size, stride)
        self._mark(declared, view, _READ)
        return view

    def values(self, declared: Declared) -> Tensor:
        """All that is declared, flat."""
        return self.read(declared, 0, declared.dim, declared.stride).flatten()

    def write(self, declared: Declared, start: int, values: Tensor, stride: tuple[int, ...]) -> None:
        """Round values to the declared dtype and store them, once in a run and not where anything was read."""
        view = self.view(declared, start, tuple(values.shape), stride)
        self._mark(declared, view, _WRITTEN)
        view.copy_(values)

    def rows_to_the_end(self, declared: Declared, start: int, size: tuple[int, ...], stride: tuple[int, ...]) -> int:
        """How many rows (the second axis) from ``start`` on lie in the storage whole, for all of the other axes."""
        bound = self._bound[declared.uid]
        elements = (bound.storage.nbytes() - bound.start_byte) // declared.itemsize - start
        inner = 1 + (size[0] - 1) * stride[0] + (size[2] - 1) * stride[2]
        return 0 if elements < inner else (elements - inner) // stride[1] + 1

    def scribble(self, workspace: Tensor | None, needed_bytes: int) -> None:
        """Fill the workspace with garbage, and mark it as written.

        Args:
            workspace: Any tensor; None where nothing is needed.
            needed_bytes: How many bytes from its address on.

        Returns:
            None.

        Raises:
            BindingFault: There is no workspace.
            MemoryFault: It is too small, not aligned to 16 bytes, or overlaps what was read or written.
        """
        if not needed_bytes:
            return
        if workspace is None:
            raise BindingFault(f"workspace: expected {needed_bytes} bytes, got None")
        uid = -1
        self._bound[uid] = self._bind("workspace", workspace)
        declared = Declared("workspace", uid, (needed_bytes,), (1,), torch.uint8)
        self.write(declared, 0, torch.full(declared.dim, 0xFF, dtype=torch.uint8), declared.stride)
        if self.address(declared) % 16:
            raise MemoryFault("workspace", 0, needed_bytes, "are not aligned to 16 bytes")

    def _mark(self, declared: Declared, view: Tensor, how: int) -> None:
        if not view.numel():
            return
        storage = view.untyped_storage()
        marks = self._marks.get(storage.data_ptr())
        if marks is None:
            marks = self._marks[storage.data_ptr()] = torch.zeros(storage.nbytes(), dtype=torch.uint8)
        width = declared.itemsize
        stride = [step * width for step in view.stride()]
        bytes_ = marks.as_strided([*view.shape, width], [*stride, 1], view.storage_offset() * width)
        worst = int(bytes_.max())
        if worst == _WRITTEN or (how == _WRITTEN and worst):
            first = int(view.storage_offset()) * width
            end = first + 1 + sum((n - 1) * step for n, step in zip(bytes_.shape, bytes_.stride(), strict=True))
            verb = "written" if how == _WRITTEN else "read"
            other = "written" if worst == _WRITTEN else "read as an input"
            raise MemoryFault(declared.label, first, end, f"are {verb} after some of them were {other} in the same run")
        bytes_.fill_(how)
