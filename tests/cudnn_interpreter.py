"""Stands in for cuDNN's executor: evaluates declared graphs on the CPU, on raw memory, as unkindly as cuDNN does.

What it is unkind about:

- K and V are read to the end of the tile that holds a sequence's last key, and of the tile that holds a causal mask's
  diagonal; what is ruled out there is multiplied by 0, so that what is not finite becomes NaN.
- A row without a key has NaN in O, Stats and dQ before cuDNN 9.25; likewise dK and dV of a sequence without a query.
- A row whose live scores are all minus infinity is NaN.
- Rows past a length in dense tensors are written with NaN. In ragged tensors they are not written.
- The workspace is full of garbage.

The pattern of dropout is a hash of seed, offset, the graph's dims and the place of a score.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from cudnn_declared import Attention, read_graph
from cudnn_memory import BindingFault, Memory
from cudnn_sequences import Sequences
from torch import Tensor

if TYPE_CHECKING:
    from fusedattn.engines.cudnn_key import SdpaKey


def uniform(seed: int, offset: int, dim: tuple[int, int, int, int], place: Sequence[Tensor]) -> Tensor:
    """The numbers that decide dropout: a score is kept where its number is not below the probability to drop.

    Args:
        seed, offset: Of the generator.
        dim: ``(b, h, s_q, s_kv)`` of the graph; another graph has another pattern.
        place: int64 tensors that broadcast: sequence, head, query and key.

    Returns:
        float64 in [0, 1), broadcast.

    Raises:
        Nothing.

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> same = uniform(1, 2, (3, 4, 5, 6), [zero] * 4), uniform(1, 2, (3, 4, 5, 6), [zero] * 4)
        >>> torch.equal(*same), torch.equal(same[0], uniform(2, 1, (3, 4, 5, 6), [zero] * 4))
        (True, False)
    """
    # The finaliser of splitmix64, on numbers that wrap around as int64.
    state = torch.zeros(1, dtype=torch.int64)
    values: tuple[int | Tensor, ...] = (seed, offset, *dim, *place)
    for value in values:
        state = (state ^ value) * -7046029254386353131
        state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        state = state ^ ((state >> 31) & 0x1FFFFFFFF)
    return (state & 0xFFFFFFFF).double() / 2.0**32


def estimated_workspace_bytes(attention: Attention) -> int:
    """About what cuDNN asks for: nothing forward; dQ in float32, and dS in 16 bits where a bias is differentiated."""
    if not attention.backward:
        return 0
    b, h, s_q, s_kv = attention.dim
    rows = min(b * s_q, attention.max_total_q or b * s_q)
    scratch = 4 * rows * h * (attention.inputs["q"].dim[3] + 2)
    return scratch + (2 * b * h * -(-s_q // 64) * 64 * -(-s_kv // 128) * 128 if "dBias" in attention.outputs else 0)


class Interpreter:
    """One graph.

    Args:
        graph: A ``cudnn.pygraph``, declared but not built.
        backend_version: cuDNN whose behaviour is shown, as ``cudnn.backend_version()`` says it.
        tile: Rows of a tile of Q, K and V.
        workspace_bytes: What a run needs, or how to tell it from the graph.
        unkind: Whether to be as the module says; else nothing is read past a length, and rows past it and rows
            without a key are 0 (their statistics minus infinity).

    Raises:
        GraphFault: See ``read_graph``.
    """

    def __init__(
        self,
        graph: Any,
        *,
        backend_version: int = 92400,
        tile: int = 128,
        workspace_bytes: int | Callable[[Attention], int] = estimated_workspace_bytes,
        unkind: bool = True,
    ) -> None:
        self.attention = read_graph(graph, backend_version)
        self.workspace_bytes = workspace_bytes if isinstance(workspace_bytes, int) else workspace_bytes(self.attention)
        self.uids = tuple(self.attention.tensors)
        self.tile = tile
        self.unkind = unkind
        # What cuDNN leaves in rows that have nothing on the other side.
        self.nan_without_key = unkind and backend_version < 92500

    def run(self, tensors: Mapping[int, Tensor], workspace: Tensor | None) -> None:
        """Run the graph.

        Args:
            tensors: CPU tensors by uid; their addresses and the bounds of their storages count, nothing else.
            workspace: At least ``workspace_bytes`` bytes from its address on; None where that is 0.

        Returns:
            None; the memory of the outputs is written.

        Raises:
            BindingFault: A tensor is missing or not asked for, or lengths or offsets are wrong.
            MemoryFault: An access is out of bounds or misaligned, or bytes are written that something else uses.
        """
        missing, extra = set(self.uids) - set(tensors), set(tensors) - set(self.uids)
        if missing or extra:
            raise BindingFault(
                f"expected tensors of uids {self.uids}; missing {sorted(missing)}, extra {sorted(extra)}"
            )
        with torch.no_grad():
            memory = Memory(tensors)
            memory.scribble(workspace, self.workspace_bytes)
            _Run(self, memory).run()


class _Run:
    """The arithmetic of one run: inputs and results in 16 bits, everything between in float32."""

    def __init__(self, interpreter: Interpreter, memory: Memory) -> None:
        self.options, self.graph = interpreter, interpreter.attention
        self.rows = Sequences(self.graph, memory, interpreter.tile, interpreter.unkind)
        inputs = self.graph.inputs
        self.type = inputs["q"].dtype
        scale = self.graph.attn_scale
        self.scale = float(memory.values(inputs["attn_scale"])) if scale is None else scale
        self.seeds = [int(memory.values(inputs[port])) for port in ("dropout_1", "dropout_2") if port in inputs]
        self.dbias = torch.zeros(inputs["bias"].dim) if "dBias" in self.graph.outputs else None

    def run(self) -> None:
        compute = self._backward if self.graph.backward else self._forward
        for sequence, (len_q, len_kv) in enumerate(self.rows.lengths):
            compute(sequence, len_q, len_kv)
        if self.dbias is not None:
            self.rows.write_dbias(self.dbias)

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(self.type).float()

    def _keys(self, sequence: int, length: int) -> list[Tensor]:
        """K and V of equal rows: what ends its storage sooner is followed by zeros."""
        both = [self.rows.read_keys(port, sequence, length) for port in ("k", "v")]
        rows = max(each.shape[1] for each in both)
        return [torch.nn.functional.pad(each, (0, 0, 0, rows - each.shape[1])) for each in both]

    def _without_partner(self, port: str, sequence: int, rows: int, fill: float = 0.0) -> None:
        if port in self.graph.outputs:
            _, heads, _, width = self.graph.outputs[port].dim
            value = math.nan if self.options.nan_without_key else fill
            self.rows.write(port, sequence, torch.full((heads, rows, width), value), fill)

    def _diagonal(self, sequence: int) -> int:
        """The last key that the first query sees under the causal mask."""
        len_q, len_kv = self.rows.lengths[sequence]
        return len_kv - len_q if self.graph.bottom_right else 0

    def _tiles(self, sequence: int, rows: int, keys: int) -> Iterator[tuple[slice, int]]:
        """Query rows of a tile, and the end of the keys that they see any of."""
        tile, diagonal = self.options.tile, self._diagonal(sequence)
        for first in range(0, rows, tile):
            end = min(keys, max(first + tile + diagonal, 1)) if self.graph.causal else keys
            yield slice(first, min(first + tile, rows)), end

    def _scores(self, sequence: int, tile: slice, q: Tensor, k: Tensor, length: int) -> Tensor:
        query, key = torch.arange(tile.start, tile.stop)[:, None], torch.arange(k.shape[1])
        live = key < length
        if self.graph.causal:
            live = live & (key <= query + self._diagonal(sequence))
        added = torch.zeros(1, 1, 1)
        if "bias" in self.graph.inputs:
            added = self.rows.read_bias(sequence, tile, min(length, k.shape[1]))
            added = torch.nn.functional.pad(added, (0, k.shape[1] - added.shape[-1]))
        # Minus infinity is added, not put in place: NaN stays NaN.
        return q @ k.mT * self.scale + torch.where(live, added, -math.inf)

    def _kept(self, sequence: int, tile: slice, keys: int) -> Tensor | float:
        """The factor of probabilities: 0 where dropped, else 1 / (1 - p); ``[H, rows, keys]``."""
        p = self.graph.dropout
        if not p:
            return 1.0
        heads = torch.arange(self.graph.dim[1])[:, None, None]
        queries = torch.arange(tile.start, tile.stop)[:, None]
        place = (torch.tensor(sequence), heads, queries, torch.arange(keys))
        seed, offset = self.seeds
        return (uniform(seed, offset, self.graph.dim, place) >= p).float() / (1 - p)

    def _forward(self, sequence: int, len_q: int, len_kv: int) -> None:
        if not len_kv:
            self._without_partner("O", sequence, len_q)
            self._without_partner("Stats", sequence, len_q, -math.inf)
            return
        q = self.rows.read("q", sequence, len_q)
        k, v = self._keys(sequence, len_kv)
        outs, stats = [q.new_empty(q.shape[0], 0, v.shape[2])], [q.new_empty(q.shape[0], 0, 1)]
        for tile, end in self._tiles(sequence, len_q, k.shape[1]):
            scores = self._scores(sequence, tile, q[:, tile], k[:, :end], len_kv)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            probabilities = self._rounded(weights / total * self._kept(sequence, tile, end))
            outs.append(probabilities @ v[:, :end])
            stats.append(top + total.log())
        self.rows.write("O", sequence, torch.cat(outs, 1))
        self.rows.write("Stats", sequence, torch.cat(stats, 1), -math.inf)

    def _backward(self, sequence: int, len_q: int, len_kv: int) -> None:
        if not (len_q and len_kv):
            self._without_partner("dQ", sequence, len_q)
            self._without_partner("dK", sequence, len_kv)
            self._without_partner("dV", sequence, len_kv)
            return
        q, out, dout, stats = (self.rows.read(port, sequence, len_q) for port in ("q", "o", "dO", "stats"))
        k, v = self._keys(sequence, len_kv)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dout * out).sum(-1, keepdim=True)
        for tile, end in self._tiles(sequence, len_q, k.shape[1]):
            weights = (self._scores(sequence, tile, q[:, tile], k[:, :end], len_kv) - stats[:, tile]).exp()
            kept = self._kept(sequence, tile, end)
            dscores = self._rounded(weights * (dout[:, tile] @ v[:, :end].mT * kept - delta[:, tile]))
            dv[:, :end] += self._rounded(weights * kept).mT @ dout[:, tile]
            dq[:, tile] = dscores @ k[:, :end] * self.scale
            dk[:, :end] += dscores.mT @ q[:, tile] * self.scale
            self._add_dbias(sequence, tile, dscores[..., :len_kv])
        self.rows.write("dQ", sequence, dq)
        self.rows.write("dK", sequence, dk[:, :len_kv])
        self.rows.write("dV", sequence, dv[:, :len_kv])

    def _add_dbias(self, sequence: int, tile: slice, dscores: Tensor) -> None:
        if self.dbias is None:
            return
        total = self.dbias[sequence if self.dbias.shape[0] > 1 else 0]
        target = total[:, tile if total.shape[1] > 1 else slice(0, 1), : dscores.shape[-1]]
        target += dscores.sum_to_size(target.shape)


class InterpretingExecutable:
    """A declared graph as ``fusedattn.runtime`` runs it."""

    def __init__(self, key: SdpaKey, interpreter: Interpreter, executions: Counter[SdpaKey]) -> None:
        self._key, self._interpreter, self._executions = key, interpreter, executions
        self.uids, self.workspace_bytes = interpreter.uids, interpreter.workspace_bytes

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        """See ``Interpreter.run``; tensors in the order of ``uids``."""
        if len(tensors) != len(self.uids):
            raise BindingFault(f"expected {len(self.uids)} tensors, got {len(tensors)}")
        self._interpreter.run(dict(zip(self.uids, tensors, strict=True)), workspace)
        self._executions[self._key] += 1


class InterpretingExecutor:
    """The executor of the cudnn engine; takes ``Interpreter``'s options.

    Attributes:
        executions: How often the graph of each key ran.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._found: dict[SdpaKey, InterpretingExecutable] = {}
        self.executions: Counter[SdpaKey] = Counter()

    def executable(self, key: SdpaKey) -> InterpretingExecutable:
        """Declare the graph of a key and read it; raises ``GraphFault`` as ``Interpreter`` does."""
        from fusedattn.engines.cudnn_graph import build

        if key not in self._found:
            self._found[key] = InterpretingExecutable(key, Interpreter(build(key), **self._options), self.executions)
        return self._found[key]
