"""What a cuDNN graph of one attention node declares, read from cudnn-frontend's objects; what is unknown is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cudnn_memory import Declared, GraphFault

_DTYPES = {
    "BFLOAT16": torch.bfloat16,
    "HALF": torch.float16,
    "FLOAT": torch.float32,
    "INT32": torch.int32,
    "INT64": torch.int64,
}
_OPTIONAL_INPUTS = {"attn_scale", "bias", "seq_len_q", "seq_len_kv", "dropout_1", "dropout_2"}
_PARAMS = {
    "attn_scale", "use_padding_mask", "use_causal_mask", "use_causal_mask_bottom_right", "diagonal_alignment",
    "diagonal_band_right_bound",
    "max_total_seq_len_q", "max_total_seq_len_kv", "_dropout_n", "dropout_0",
}  # fmt: skip
_ALIGNED = ("q", "k", "v", "O", "o", "dO", "dQ", "dK", "dV")
_SCALARS = ("attn_scale", "dropout_1", "dropout_2")


@dataclass(frozen=True)
class _Kind:
    inputs: frozenset[str]
    outputs: frozenset[str]
    optional_outputs: frozenset[str]
    params: frozenset[str]


_KINDS = {
    "SDPA": _Kind(
        frozenset({"q", "k", "v"}), frozenset({"O"}), frozenset({"Stats"}), frozenset({"generate_stats"} | _PARAMS)
    ),
    "SDPA_BWD": _Kind(
        frozenset({"q", "k", "v", "o", "dO", "stats"}),
        frozenset({"dQ", "dK", "dV"}),
        frozenset({"dBias"}),
        frozenset({"use_deterministic_algorithm"} | _PARAMS),
    ),
}


@dataclass(frozen=True)
class Attention:
    """The one node of a graph.

    Attributes:
        backward: Whether it is of the backward.
        inputs, outputs: By port of the node; virtual outputs are left out.
        tensors: All that must be bound, ragged offsets included, by ascending uid.
        dim: ``(b, h, s_q, s_kv)``.
        causal, padding: Its masks.
        bottom_right: Whether the causal mask is anchored at the last row and key, not at the first.
        dropout: Probability to drop; 0 without.
        attn_scale: The factor where it is part of the graph; None where a tensor holds it.
        max_total_q, max_total_kv: Tokens that a ragged side does not pass, or None.
    """

    backward: bool
    inputs: Mapping[str, Declared]
    outputs: Mapping[str, Declared]
    tensors: Mapping[int, Declared]
    dim: tuple[int, int, int, int]
    causal: bool
    bottom_right: bool
    padding: bool
    dropout: float
    attn_scale: float | None
    max_total_q: int | None
    max_total_kv: int | None


def read_graph(graph: Any, backend_version: int) -> Attention:
    """Read and check a graph.

    Args:
        graph: A ``cudnn.pygraph`` of one SDPA node; it needs no plan.
        backend_version: The cuDNN whose rules hold, as ``cudnn.backend_version()`` says it.

    Returns:
        What it declares.

    Raises:
        GraphFault: It breaks a rule, is known to go wrong on a GPU, or has a part that is not known here.
    """
    if len(graph.nodes) != 1 or graph.nodes[0].node_type.name not in _KINDS:
        raise GraphFault("the graph", f"has other nodes than one SDPA: {[n.node_type.name for n in graph.nodes]}")
    (node,) = graph.nodes
    kind = _KINDS[node.node_type.name]
    _known_parts(graph, node, kind)
    declared = _Tensors(graph.context.io_data_type)
    inputs = {port: declared.of(port, tensor) for port, tensor in node.inputs.items()}
    outputs = {port: declared.of(port, tensor) for port, tensor in node.outputs.items() if not tensor.is_virtual}
    params = node.params
    attention = Attention(
        backward=node.node_type.name == "SDPA_BWD",
        inputs=inputs,
        outputs=outputs,
        tensors=dict(sorted(declared.by_uid.items())),
        dim=(*inputs["q"].dim[:3], inputs["k"].dim[2]),  # type: ignore[arg-type]
        causal=_causal(params),
        bottom_right=bool(params.get("use_causal_mask_bottom_right")),
        padding=bool(params.get("use_padding_mask")),
        dropout=_dropout(node),
        attn_scale=None if "attn_scale" in inputs else params.get("attn_scale", 1.0),
        max_total_q=params.get("max_total_seq_len_q"),
        max_total_kv=params.get("max_total_seq_len_kv"),
    )
    _check_shapes(attention)
    _check_strides(attention, backend_version)
    _check_lengths(attention)
    _check_traps(attention, graph)
    for name, tensor in graph.tensors.items():
        if tensor.uid not in declared.by_uid and not tensor.is_virtual:
            raise GraphFault(f"tensor {name!r}", "is declared, but the node does not use it")
    return attention


class _Tensors:
    """The frontend's tensors as ``Declared``, one for each uid."""

    def __init__(self, io_data_type: Any) -> None:
        self._io = io_data_type
        self.by_uid: dict[int, Declared] = {}

    def of(self, port: str, tensor: Any) -> Declared:
        if tensor.uid not in self.by_uid:
            ragged = None if tensor.ragged_offset is None else self.of("ragged_offset", tensor.ragged_offset)
            if tensor.ragged_offset_multiplier != 1:
                raise GraphFault(f"tensor {tensor.name!r}", "has a ragged offset multiplier, which is not known here")
            if tensor.is_pass_by_value != (port == "attn_scale"):
                raise GraphFault(f"tensor {tensor.name!r}", f"of port {port} is passed by value, or should be")
            word = "FLOAT" if port == "Stats" and tensor.data_type is None else self._word(tensor)
            if word not in _DTYPES:
                raise GraphFault(f"tensor {tensor.name!r}", f"has a dtype that is not known here: {word}")
            self.by_uid[tensor.uid] = Declared(
                tensor.name, tensor.uid, tuple(tensor.dim), tuple(tensor.stride), _DTYPES[word], ragged
            )
        return self.by_uid[tensor.uid]

    def _word(self, tensor: Any) -> str:
        # What declares no dtype has the graph's, whatever will be bound.
        data_type = tensor.get_data_type() or self._io
        return str(data_type.name)


def _known_parts(graph: Any, node: Any, kind: _Kind) -> None:
    label = f"node {node.name!r}"
    for what, missing, unknown in (
        ("input", kind.inputs - set(node.inputs), set(node.inputs) - kind.inputs - _OPTIONAL_INPUTS),
        ("output", kind.outputs - set(node.outputs), set(node.outputs) - kind.outputs - kind.optional_outputs),
        ("parameter", set(), set(node.params) - kind.params),
    ):
        if missing:
            raise GraphFault(label, f"has no {what} {sorted(missing)}")
        if unknown:
            raise GraphFault(label, f"has an unknown {what}: {sorted(unknown)}")
    context = graph.context
    for name in ("intermediate_data_type", "compute_data_type"):
        if getattr(context, name).name != "FLOAT":
            raise GraphFault("the graph", f"computes in {getattr(context, name).name}: {name} must be FLOAT")
    if node.compute_data_type.name != "FLOAT":
        raise GraphFault(label, f"computes in {node.compute_data_type.name}, not in FLOAT")


def _causal(params: Mapping[str, Any]) -> bool:
    alignment, bound = params.get("diagonal_alignment"), params.get("diagonal_band_right_bound")
    if alignment is not None and alignment.name != "TOP_LEFT":
        raise GraphFault("the mask", f"is aligned {alignment.name}, which is not known here")
    if bound not in (None, 0):
        raise GraphFault("the mask", f"has a right bound of {bound}, which is not known here")
    return bool(params.get("use_causal_mask") or params.get("use_causal_mask_bottom_right")) or bound == 0


def _dropout(node: Any) -> float:
    count, probability = node.params.get("_dropout_n", 0), node.params.get("dropout_0", 0.0)
    seeds = {"dropout_1", "dropout_2"} & set(node.inputs)
    if count not in (0, 3) or len(seeds) != (2 if count else 0) or not isinstance(probability, float):
        raise GraphFault("dropout", "must be a probability, a seed and an offset")
    if not 0.0 <= probability < 1.0:
        raise GraphFault("dropout", f"has a probability of {probability}")
    return probability


def _check_shapes(attention: Attention) -> None:
    both = {**attention.inputs, **attention.outputs}
    b, h, s_q, s_kv = attention.dim
    q, v = both["q"], both["v"]
    width, width_v = q.dim[-1], v.dim[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise GraphFault(q.label, f"is {q.dtype}: only 16-bit types are known here")
    wanted = {
        "q": (b, h, s_q, width), "k": (b, h, s_kv, width), "v": (b, h, s_kv, width_v),
        "o": (b, h, s_q, width_v), "stats": (b, h, s_q, 1), "seq_len": (b, 1, 1, 1),
    }  # fmt: skip
    like = {
        "dQ": "q", "dK": "k", "dV": "v", "O": "o", "dO": "o", "Stats": "stats",
        "seq_len_q": "seq_len", "seq_len_kv": "seq_len",
    }  # fmt: skip
    dtypes = {"stats": (torch.float32,), "seq_len": (torch.int32, torch.int64)}
    for port, tensor in both.items():
        if port in ("bias", "dBias") or port in _SCALARS:
            continue
        shape = like.get(port, port)
        if tensor.dim != wanted[shape]:
            raise GraphFault(tensor.label, f"has dim {tensor.dim}, expected {wanted[shape]}")
        if tensor.dtype not in dtypes.get(shape, (q.dtype,)):
            raise GraphFault(tensor.label, f"has dtype {tensor.dtype}")
    for port in _SCALARS:
        dtype = torch.float32 if port == "attn_scale" else torch.int64
        if port in both and (both[port].dim, both[port].dtype) != ((1, 1, 1, 1), dtype):
            raise GraphFault(both[port].label, f"must be one {dtype}")
    for port, allowed in (("bias", (q.dtype, torch.float32)), ("dBias", (q.dtype,))):
        if port not in both:
            continue
        tensor = both[port]
        if tensor.dtype not in allowed:
            raise GraphFault(tensor.label, f"has dtype {tensor.dtype}, expected one of {allowed}")
        pairs = zip(tensor.dim, (b, h, s_q, s_kv), strict=True)
        if tensor.dim[3] != s_kv or any(n not in (1, full) for n, full in pairs):
            raise GraphFault(tensor.label, f"has dim {tensor.dim}, which does not broadcast to {attention.dim}")
        if "bias" not in both or tensor.dim != both["bias"].dim:
            raise GraphFault(tensor.label, "is not of the bias's shape")


def _check_strides(attention: Attention, backend_version: int) -> None:
    both = {**attention.inputs, **attention.outputs}
    for port, tensor in both.items():
        axes = [axis for axis in range(len(tensor.dim)) if tensor.dim[axis] > 1 and not (tensor.ragged and axis == 0)]
        if any(n < 1 for n in tensor.dim) or any(step < 0 for step in tensor.stride):
            raise GraphFault(tensor.label, f"has dim {tensor.dim} and stride {tensor.stride}")
        if tensor.dim[-1] > 1 and tensor.stride[-1] != 1:
            raise GraphFault(tensor.label, f"has a last stride of {tensor.stride[-1]}, which must be 1")
        if port in _ALIGNED and any(tensor.stride[axis] * tensor.itemsize % 16 for axis in axes if axis != 3):
            raise GraphFault(tensor.label, f"has strides {tensor.stride} that are not multiples of 16 bytes")
        if port in attention.outputs:
            span = 1
            for step, n in sorted((tensor.stride[axis], tensor.dim[axis]) for axis in axes):
                if step < span:
                    raise GraphFault(tensor.label, f"is written, but its strides {tensor.stride} overlap")
                span += (n - 1) * step
    stats = attention.inputs.get("stats")
    # Kernels before 9.26 take them for packed, whatever is declared.
    if stats is not None and stats.ragged is None and backend_version < 92600:
        _, h, s_q, _ = attention.dim
        for n, step, packed in zip(stats.dim, stats.stride, (h * s_q, s_q, 1, 1), strict=True):
            if n > 1 and step != packed:
                raise GraphFault(stats.label, f"has strides {stats.stride}, which a backward ignores before cuDNN 9.26")


def _check_lengths(attention: Attention) -> None:
    has = {"seq_len_q", "seq_len_kv"} & set(attention.inputs)
    if len(has) != (2 if attention.padding else 0):
        raise GraphFault("the padding mask", "needs seq_len_q and seq_len_kv, and they need it")
    b, _, s_q, s_kv = attention.dim
    for port, tensor in {**attention.inputs, **attention.outputs}.items():
        if tensor.ragged is None:
            continue
        if not attention.padding:
            raise GraphFault(tensor.label, "is ragged without a padding mask")
        if port in ("bias", "dBias"):
            raise GraphFault(tensor.label, "is ragged, which a bias is not")
        offsets = tensor.ragged
        if offsets.dim != (b + 1, 1, 1, 1) or offsets.dtype not in (torch.int32, torch.int64):
            raise GraphFault(offsets.label, f"must be {(b + 1, 1, 1, 1)} of int32 or int64")
        kv = port in ("k", "v", "dK", "dV")
        total = (attention.max_total_kv if kv else attention.max_total_q) or b * (s_kv if kv else s_q)
        if total * tensor.stride[2] > torch.iinfo(offsets.dtype).max:
            raise GraphFault(offsets.label, f"is {offsets.dtype}: {total} tokens of {tensor.stride[2]} overflow it")
        if attention.backward and not (attention.max_total_q and attention.max_total_kv):
            raise GraphFault("a ragged backward", "needs max_total_seq_len_q and max_total_seq_len_kv")


def _check_traps(attention: Attention, graph: Any) -> None:
    if not attention.backward:
        return
    ragged = any(tensor.ragged for tensor in attention.inputs.values())
    if attention.dim[:3] == (1, 1, 1) and not ragged:
        raise GraphFault("a backward of one sequence, one head and one query", "would end the process")
    # No getter; planning passes these on.
    if graph._cpp_graph_kwargs.get("sm_version") == 90 and not attention.padding:
        raise GraphFault("a backward on Hopper", "needs a padding mask, or some rows become NaN")
