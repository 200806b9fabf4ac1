"""The sequences of a run: where each lies in every tensor, which of its rows are read, and what is written."""

from __future__ import annotations

import torch
from cudnn_declared import Attention
from cudnn_memory import BindingFault, Declared, Memory, MemoryFault
from torch import Tensor

_ALIGNED = ("q", "k", "v", "o", "O", "dO", "dQ", "dK", "dV")
_KV_SIDE = ("k", "v", "dK", "dV")
_NAN = float("nan")


class Sequences:
    """The memory of one run, by port of the node and by sequence; blocks are ``[H, rows, D]``.

    Args:
        graph: What is declared.
        memory: What is bound.
        tile: Rows of a tile of K and V.
        unkind: Whether K and V are read past a length, and rows of dense tensors past it are written with NaN.

    Raises:
        BindingFault: Lengths or offsets are wrong.
        MemoryFault: An address is misaligned, or a dense tensor leaves its storage.
    """

    def __init__(self, graph: Attention, memory: Memory, tile: int, unkind: bool) -> None:
        self._graph, self._memory, self._tile, self._unkind = graph, memory, tile, unkind
        self._declared = {**graph.inputs, **graph.outputs}
        self._offsets: dict[str, list[int]] = {}
        for port, declared in self._declared.items():
            if port in _ALIGNED and memory.address(declared) % 16:
                raise MemoryFault(declared.label, 0, 16, "are at an address that is not a multiple of 16")
            if declared.ragged is None:
                memory.view(declared, 0, declared.dim, declared.stride)
            else:
                self._offsets[port] = self._checked_offsets(declared, declared.ragged)
        b, _, s_q, s_kv = graph.dim
        self.lengths = list(zip(self._side("seq_len_q", b, s_q), self._side("seq_len_kv", b, s_kv), strict=True))

    def _checked_offsets(self, declared: Declared, ragged: Declared) -> list[int]:
        offsets: list[int] = self._memory.values(ragged).tolist()
        if any(offset < 0 or offset % declared.stride[2] for offset in offsets):
            rule = f"not negative and multiples of a token's {declared.stride[2]} elements"
            raise BindingFault(f"{ragged.label} of {declared.label}: offsets must be {rule}: {offsets}")
        return offsets

    def _side(self, port: str, b: int, rows: int) -> list[int]:
        if not self._graph.padding:
            return [rows] * b
        lengths: list[int] = self._memory.values(self._declared[port]).tolist()
        if any(not 0 <= length <= rows for length in lengths):
            raise BindingFault(f"{self._declared[port].label}: lengths must be in [0, {rows}]: {lengths}")
        return lengths

    def _start(self, port: str, sequence: int, rows: int) -> int:
        declared = self._declared[port]
        if declared.ragged is None:
            return sequence * declared.stride[0]
        start = self._offsets[port][sequence]
        total = self._graph.max_total_kv if port in _KV_SIDE else self._graph.max_total_q
        if total is not None and start // declared.stride[2] + rows > total:
            raise BindingFault(f"{declared.label}: sequence {sequence} passes the {total} tokens that were declared")
        return start

    def read(self, port: str, sequence: int, rows: int) -> Tensor:
        """float32: the rows of a sequence."""
        declared = self._declared[port]
        size = (declared.dim[1], rows, declared.dim[3])
        return self._memory.read(declared, self._start(port, sequence, rows), size, declared.stride[1:]).float()

    def read_keys(self, port: str, sequence: int, length: int) -> Tensor:
        """float32: rows of K or V, those past the length included that share a tile with its last key."""
        live = self.read(port, sequence, length)
        if not self._unkind:
            return live
        declared = self._declared[port]
        start, stride = self._start(port, sequence, length), declared.stride[1:]
        heads, bound, width = declared.dim[1:]
        if declared.ragged is not None:
            bound = self._memory.rows_to_the_end(declared, start, (heads, bound, width), stride)
        rows = min(-(-length // self._tile) * self._tile, bound) - length
        past = self._memory.view(declared, start + length * stride[1], (heads, rows, width), stride)
        return torch.cat([live, past.float()], 1)

    def write(self, port: str, sequence: int, values: Tensor, fill: float = 0.0) -> None:
        """Store rows; what follows in a dense tensor is NaN, or ``fill`` where the run is kind."""
        if port not in self._graph.outputs:
            return
        declared = self._declared[port]
        start = self._start(port, sequence, values.shape[1])
        if declared.ragged is None:
            past = (0, 0, 0, declared.dim[2] - values.shape[1])
            values = torch.nn.functional.pad(values, past, value=_NAN if self._unkind else fill)
        self._memory.write(declared, start, values, declared.stride[1:])

    def read_bias(self, sequence: int, rows: slice, keys: int) -> Tensor:
        """float32 ``[1|H, 1|rows, keys]``."""
        bias = self._declared["bias"]
        first, count = (rows.start, rows.stop - rows.start) if bias.dim[2] > 1 else (0, 1)
        start = first * bias.stride[2] + (sequence * bias.stride[0] if bias.dim[0] > 1 else 0)
        return self._memory.read(bias, start, (bias.dim[1], count, keys), bias.stride[1:]).float()

    def write_dbias(self, values: Tensor) -> None:
        """Store all of the bias's gradient."""
        dbias = self._declared["dBias"]
        self._memory.write(dbias, 0, values, dbias.stride)
