"""Filling the auxiliary pack in a forward, and trusting it in a backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedattn import arguments
from fusedattn.bound import BoundCall
from fusedattn.enums import Engine
from fusedattn.errors import SpecError
from fusedattn.runtime import Request, Resolved
from fusedattn.tensor_pack import ForwardRecord, NVTETensorPack


def checked_pack(name: str, pack: object) -> NVTETensorPack:
    """A pack, or a ``SpecError`` that names the argument."""
    if not isinstance(pack, NVTETensorPack):
        raise SpecError(name, "an NVTETensorPack", f"{type(pack).__name__}")
    return pack


def bias_of_pack(pack: NVTETensorPack, has_bias: bool) -> Tensor | None:
    """The bias in a pack, whose entries are what a training forward leaves."""
    expected = ["softmax_lse", "rng_state", *(["Bias"] if has_bias else [])]
    if sorted(pack.names) != sorted(expected):
        hint = "Pass the pack of the forward, which ran with is_training=True and the same bias_type."
        raise SpecError("Aux_CTX_Tensors", f"entries {expected}", f"entries {list(pack.names)}", hint)
    if any(tensor.is_meta for tensor in pack):
        hint = "Run the forward, after workspace.allocate(device), before its backward."
        raise SpecError("Aux_CTX_Tensors", "the pack of a forward that ran", "one that a query filled", hint)
    if pack.bias_changed():
        hint = "Run the forward again, or give it a copy."
        raise SpecError("Aux_CTX_Tensors['Bias']", "the bias as forward saw it", "one changed in place since", hint)
    return pack["Bias"] if has_bias else None


def fill_pack(
    pack: NVTETensorPack, request: Request, lse: Tensor, is_training: bool, record: ForwardRecord | None
) -> None:
    """Put into a pack what a training forward leaves, or nothing after inference; meta tensors where lse is one."""
    if not is_training:
        pack.fill({})
        return
    if request.rng_state is None or request.dropout == 0.0:
        rng_state = torch.zeros(2, dtype=torch.int64, device=lse.device)
    else:
        rng_state = request.rng_state.to(lse.device, copy=True)
    tensors = {"softmax_lse": lse.unsqueeze(-1), "rng_state": rng_state}
    if request.bias is not None:
        tensors["Bias"] = request.bias.to("meta") if lse.is_meta else request.bias
    pack.fill(tensors, record)


def engine_of_pack(pack: NVTETensorPack, engine: object, dropout: object) -> object:
    """Under auto, with dropout, the forward's engine: patterns of different engines differ."""
    requested = Engine.parse(engine, "engine")
    if requested is Engine.auto and pack.record is not None and arguments.probability("dropout", dropout) > 0.0:
        return pack.record.engine
    return requested


def record_of(request: Request, resolved: Resolved) -> ForwardRecord:
    """What a forward notes of its problem."""
    problem: dict[str, object] = {
        "qkv_layout": request.layout.word,
        "bias_type": request.bias_type.word,
        "attn_mask_type": request.mask_type.word,
        "shapes of the operands": [tuple(tensor.shape) for tensor in request.operands],
        "dtype": request.operands[0].dtype,
        "cu_seqlens of q": resolved.lengths.q.offsets,
        "cu_seqlens of kv": resolved.lengths.kv.offsets,
        "max_seqlen of q": resolved.lengths.q.max_seqlen,
        "max_seqlen of kv": resolved.lengths.kv.max_seqlen,
        "attn_scale": _word(request.attn_scale),
        "dropout": request.dropout,
    }
    return ForwardRecord(problem, resolved.plan.chosen().word)


def _word(attn_scale: float) -> float | str:
    """NaN as a word, which equals itself."""
    return "nan" if math.isnan(attn_scale) else attn_scale


def check_record(pack: NVTETensorPack, request: Request, resolved: Resolved) -> None:
    """See that a backward's problem is the one that its pack's forward noted; raises ``SpecError``."""
    if pack.record is None:
        return
    for name, value in record_of(request, resolved).problem.items():
        noted = pack.record.problem[name]
        if noted != value:
            expected = f"the pack of a forward with {name} = {value}"
            raise SpecError("Aux_CTX_Tensors", expected, f"one whose forward had {name} = {noted}")


def bound_pack(
    bound: BoundCall, lse: Tensor, bias: Tensor | None, rng_state: Tensor | None, is_training: bool, attn_scale: float
) -> NVTETensorPack:
    """The pack of a bound forward, as ``fill_pack`` fills it."""
    if not is_training:
        return NVTETensorPack()
    acts = rng_state if bound.dropout else None
    copied = lse.new_zeros(2, dtype=torch.int64) if acts is None else acts.clone()
    tensors = {"softmax_lse": lse.unsqueeze(-1), "rng_state": copied}
    if bias is not None:
        tensors["Bias"] = bias
    record = bound.record
    if record is not None and attn_scale != bound.attn_scale:
        record = record._replace(problem=record.problem | {"attn_scale": _word(attn_scale)})
    return NVTETensorPack.of(tensors, record)
