"""Graphs declared by hand with ``cudnn.pygraph``, their memory, and what they should compute, in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import cudnn
import torch
from cudnn_interpreter import Interpreter
from torch import Tensor

UIDS = {
    "q": 1, "k": 2, "v": 3, "o": 4, "stats": 5, "bias": 6, "len_q": 7, "len_kv": 8, "seed": 9, "offset": 10,
    "scale": 11, "dO": 12, "dQ": 13, "dK": 14, "dV": 15, "dBias": 16, "from_q": 21, "from_kv": 22, "from_o": 23,
    "from_stats": 24,
}  # fmt: skip
KV_SIDE = ("k", "v", "dK", "dV")
DTYPES = {
    torch.bfloat16: cudnn.data_type.BFLOAT16,
    torch.float16: cudnn.data_type.HALF,
    torch.float32: cudnn.data_type.FLOAT,
    torch.int32: cudnn.data_type.INT32,
    torch.int64: cudnn.data_type.INT64,
}
# Of rows of K and V that may be read but not be seen: large, and finite.
LARGE = 1e4
UNTOUCHED = 7.0


def address(tensor: Tensor) -> Tensor:
    """A tensor of one byte at the same address of the same storage: nothing else of it is to be used."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (1,), (1,))


@dataclass(frozen=True)
class Problem:
    """What to declare; ``gap`` is the rows between ragged sequences, ``lens_*`` None where all are full."""

    b: int = 3
    h: int = 2
    s_q: int = 5
    s_kv: int = 7
    d: int = 8
    layout: str = "bshd"
    dtype: torch.dtype = torch.bfloat16
    lens_q: tuple[int, ...] | None = None
    lens_kv: tuple[int, ...] | None = None
    ragged_stats: bool = False
    gap: int = 0
    causal: bool = False
    bottom_right: bool = False
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    scale: float = 0.4
    scale_by_value: bool = True
    offsets_dtype: torch.dtype = torch.int64
    graph_options: dict[str, Any] = field(default_factory=dict)
    node_options: dict[str, Any] = field(default_factory=dict)

    @property
    def ragged(self) -> bool:
        return self.layout.startswith("t")


def _dense(layout: str, b: int, h: int, s: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """Three [b, h, s, d], in one arena where the layout is packed."""
    if layout == "bs3hd":
        return list(torch.empty(b, s, 3, h, d, dtype=dtype).permute(2, 0, 3, 1, 4))
    if layout == "bsh3d":
        return list(torch.empty(b, s, h, 3, d, dtype=dtype).permute(3, 0, 2, 1, 4))
    sizes = dict(zip("bhsd", (b, h, s, d), strict=True))
    shape = [sizes[axis] for axis in layout]
    return [torch.empty(shape, dtype=dtype).permute([layout.index(axis) for axis in "bhsd"]) for _ in range(3)]


class Handmade:
    """A problem with its memory: ``tensors`` by name, logical [b, h, s, d] where dense, [T, h, d] where ragged."""

    def __init__(self, problem: Problem) -> None:
        self.problem = p = problem
        self.lens_q, self.lens_kv = p.lens_q or (p.s_q,) * p.b, p.lens_kv or (p.s_kv,) * p.b
        self.starts_q, self.starts_kv = (
            list(itertools.accumulate((n + p.gap for n in lens), initial=0)) for lens in (self.lens_q, self.lens_kv)
        )
        self.tensors: dict[str, Tensor] = {}
        for names in (("q", "k", "v"), ("dQ", "dK", "dV")):
            self.tensors |= zip(names, self._triple(), strict=True)
        self.tensors |= {name: self._triple()[0] for name in ("o", "dO")}
        for name, tensor in self.tensors.items():
            tensor.fill_(LARGE if name in ("k", "v") else math.nan if name in ("q", "dO") else UNTOUCHED)
        rows = (self.starts_q[-1], p.h, 1) if p.ragged_stats else (p.b, p.h, p.s_q, 1)
        self.tensors["stats"] = torch.full(rows, UNTOUCHED)
        for name, i in itertools.product(("q", "k", "v", "dO"), range(p.b)):
            self.block(name, i).copy_(torch.randn(self.block(name, i).shape))
        if p.bias is not None:
            self.tensors["bias"] = torch.randn(p.bias).to(p.bias_dtype)
            self.tensors["dBias"] = torch.full(p.bias, UNTOUCHED, dtype=p.dtype)
        self.tensors["scale"] = torch.tensor([p.scale])
        self.tensors["seed"], self.tensors["offset"] = torch.tensor([5]), torch.tensor([-3])
        self.tensors["len_q"], self.tensors["len_kv"] = (
            torch.tensor(lens, dtype=torch.int32) for lens in (self.lens_q, self.lens_kv)
        )
        for name, of in (("from_q", "q"), ("from_kv", "k"), ("from_o", "o"), ("from_stats", "stats")):
            starts = torch.tensor(self.starts_kv if of == "k" else self.starts_q)
            self.tensors[name] = (starts * self.tensors[of].stride(0)).to(p.offsets_dtype)

    def _triple(self) -> list[Tensor]:
        p = self.problem
        rows_q, rows_kv = self.starts_q[-1], self.starts_kv[-1]
        if p.layout == "t3hd":
            return list(torch.empty(rows_q, 3, p.h, p.d, dtype=p.dtype).unbind(1))
        if p.ragged:
            return [torch.empty(rows, p.h, p.d, dtype=p.dtype) for rows in (rows_q, rows_kv, rows_kv)]
        q, kv = (_dense(p.layout, p.b, p.h, s, p.d, p.dtype) for s in (p.s_q, p.s_kv))
        # Packed tensors are one arena where lengths agree, as they must there.
        return q if p.s_q == p.s_kv else [q[0], *kv[1:]]

    def block(self, name: str, i: int) -> Tensor:
        """[h, rows, d]: a view of the rows of a sequence."""
        tensor, kv = self.tensors[name], name in KV_SIDE
        n, start = (self.lens_kv if kv else self.lens_q)[i], (self.starts_kv if kv else self.starts_q)[i]
        return tensor[i, :, :n] if tensor.dim() == 4 else tensor[start : start + n].transpose(0, 1)

    def graph(self, backward: bool = False, **strides: tuple[int, ...]) -> Any:
        """Declare the graph; ``strides`` replaces those of tensors by name."""
        p = self.problem
        options = {"intermediate_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
        graph = cudnn.pygraph(**({"io_data_type": DTYPES[p.dtype]} | options | p.graph_options))
        offsets: dict[str, Any] = {}

        def scalars(name: str, n: int, dtype: torch.dtype, **more: Any) -> Any:
            kind = DTYPES[dtype]
            return graph.tensor(name=name, uid=UIDS[name], dim=[n, 1, 1, 1], stride=[1] * 4, data_type=kind, **more)

        def declared(name: str) -> dict[str, Any]:
            tensor = self.tensors[name]
            dim, stride = tuple(tensor.shape), tensor.stride()
            if tensor.dim() == 3:
                rows = p.s_kv if name in KV_SIDE else p.s_q
                dim, stride = (p.b, p.h, rows, dim[2]), (rows * stride[0], stride[1], stride[0], 1)
            return {"dim": list(dim), "stride": list(strides.get(name, stride)), "data_type": DTYPES[tensor.dtype]}

        def ragged(name: str) -> Any:
            if self.tensors[name].dim() == 4:
                return None
            by = {"k": "from_kv", "v": "from_kv", "dK": "from_kv", "dV": "from_kv", "q": "from_q", "dQ": "from_q"}
            of = by.get(name, "from_stats" if name == "stats" else "from_o")
            if of not in offsets:
                offsets[of] = scalars(of, p.b + 1, p.offsets_dtype)
            return offsets[of]

        def given(name: str) -> Any:
            return graph.tensor(name=name, uid=UIDS[name], ragged_offset=ragged(name), **declared(name))

        def made(tensor: Any, name: str) -> None:
            fields = declared(name)
            tensor.set_output(True).set_uid(UIDS[name]).set_name(name).set_data_type(fields["data_type"])
            tensor.set_dim(fields["dim"]).set_stride(fields["stride"])
            if ragged(name) is not None:
                tensor.set_ragged_offset(ragged(name))

        more: dict[str, Any] = {"attn_scale": p.scale}
        if p.scale_by_value:
            more["attn_scale"] = scalars("scale", 1, torch.float32, is_pass_by_value=True)
        if p.lens_q is not None or p.lens_kv is not None or p.ragged:
            lens = {f"seq_{name}": scalars(name, p.b, torch.int32) for name in ("len_q", "len_kv")}
            more |= {"use_padding_mask": True, **lens}
        if p.causal:
            more["use_causal_mask_bottom_right" if p.bottom_right else "use_causal_mask"] = True
        if p.bias is not None:
            more["bias"] = given("bias")
        if p.dropout:
            more["dropout"] = (p.dropout, scalars("seed", 1, torch.int64), scalars("offset", 1, torch.int64))
        if backward and p.ragged:
            more |= {"max_total_seq_len_q": 64, "max_total_seq_len_kv": 64}
        if backward and p.bias is not None:
            more["dBias"] = given("dBias").set_output(True)
        more |= p.node_options
        inputs = {name: given(name) for name in ("q", "k", "v")}
        if backward:
            inputs |= {name: given(name) for name in ("o", "dO", "stats")}
            results = dict(zip(("dQ", "dK", "dV"), graph.sdpa_backward(name="node", **inputs, **more), strict=True))
        else:
            results = dict(
                zip(("o", "stats"), graph.sdpa(name="node", generate_stats=True, **inputs, **more), strict=True)
            )
        for name, tensor in results.items():
            made(tensor, name)
        return graph

    def run(self, backward: bool = False, graph: Any = None, **options: Any) -> None:
        """Interpret a graph, the problem's own where none is given, on the addresses of ``tensors``."""
        interpreter = Interpreter(self.graph(backward) if graph is None else graph, **options)
        names = {uid: name for name, uid in UIDS.items()}
        bound = {uid: address(self.tensors[names[uid]]) for uid in interpreter.uids}
        interpreter.run(bound, torch.empty(interpreter.workspace_bytes, dtype=torch.uint8))

    def expected(self, keep: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Results by name and sequence, in float64, by autograd; ``keep`` bool [b, h, s_q, s_kv]."""
        p = self.problem
        found: dict[str, list[Tensor]] = {name: [] for name in ("o", "stats", "dQ", "dK", "dV")}
        bias = self.tensors["bias"].double().requires_grad_() if p.bias is not None else None
        total = torch.zeros(())
        for i in range(p.b):
            q, k, v = leaves = [self.block(name, i).double().requires_grad_() for name in ("q", "k", "v")]
            scores = torch.einsum("hqd,hkd->hqk", q, k) * p.scale
            if bias is not None:
                scores = scores + bias.expand(p.b, p.h, p.s_q, p.s_kv)[i, :, : q.shape[1], : k.shape[1]]
            if p.causal:
                diagonal = k.shape[1] - q.shape[1] if p.bottom_right else 0
                future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(diagonal + 1)
                scores = scores.masked_fill(future, -math.inf)
            weights = scores.softmax(-1)
            if keep is not None:
                weights = weights * keep[i, :, : q.shape[1], : k.shape[1]] / (1 - p.dropout)
            out = torch.einsum("hqk,hkd->hqd", weights, v)
            loss = (out * self.block("dO", i).double()).sum()
            total = total + loss
            gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
            results = (out, scores.logsumexp(-1, keepdim=True), *gradients)
            for name, value in zip(found, results, strict=True):
                found[name].append(value.detach())
        if bias is not None:
            found["dBias"] = [torch.autograd.grad(total, bias)[0]]
        return found
