"""What the four nvte functions share: the workspace protocol, outputs in place, and the auxiliary pack."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusedattn import arguments
from fusedattn.autograd import attend
from fusedattn.bound import bind, bound_call, signature_of
from fusedattn.calls import attention_request, layout_for, tracing
from fusedattn.enums import Direction, NVTE_Bias_Type
from fusedattn.errors import SpecError
from fusedattn.nvte_pack import (
    bias_of_pack,
    bound_pack,
    check_record,
    checked_pack,
    engine_of_pack,
    fill_pack,
    record_of,
)
from fusedattn.ops import differentiate
from fusedattn.outputs import check_like, check_no_overlap
from fusedattn.plan import Plan
from fusedattn.runtime import (
    Request,
    backward,
    forward,
    lse_dtype,
    lse_shape,
    out_shape,
    plan_of,
    resolve,
    workspace_bytes,
)
from fusedattn.tensor_pack import SKIP, NVTETensorPack, Skip, Workspace

Output: TypeAlias = Tensor | Skip | None


class Forward(NamedTuple):
    """Result of a forward: ``O``, and the pack, which is empty after inference."""

    O: Tensor  # noqa: E741
    Aux_Output_Tensors: NVTETensorPack


class BackwardQKVPacked(NamedTuple):
    """Result of ``nvte_fused_attn_bwd_qkvpacked``; None for what was skipped, and for dBias without a bias."""

    dQKV: Tensor | None
    dBias: Tensor | None


class BackwardKVPacked(NamedTuple):
    """Result of ``nvte_fused_attn_bwd_kvpacked``; None for what was skipped, and for dBias without a bias."""

    dQ: Tensor | None
    dKV: Tensor | None
    dBias: Tensor | None


class Words(NamedTuple):
    """The scalar arguments of one call, as they came."""

    packing: Literal["qkvpacked", "kvpacked"]
    qkv_layout: object
    bias_type: object
    attn_mask_type: object
    engine: object
    attn_scale: object
    dropout: object


class Lengths(NamedTuple):
    """The length arguments of one call, as they came."""

    cu_seqlens_q: object
    cu_seqlens_kv: object
    max_seqlen_q: object
    max_seqlen_kv: object


def _request(
    direction: str, words: Words, operands: Mapping[str, object], bias: object, lengths: Lengths, rng_state: object,
    is_training: object, deterministic: object, dry: bool = False,
) -> Request:  # fmt: skip
    layout = layout_for(words.packing, "qkv_layout", words.qkv_layout, prefix=f"nvte_fused_attn_{direction}")
    bias_type = NVTE_Bias_Type.parse(words.bias_type, "bias_type")
    arguments.number("attn_scale", words.attn_scale)
    return attention_request(
        layout, operands, bias, bias_type, words.attn_mask_type, *lengths, words.attn_scale, words.dropout, rng_state,
        is_training, deterministic, words.engine, differentiable=False, dry=dry,
    )  # fmt: skip


def run_forward(
    words: Words,
    operands: Mapping[str, Tensor],
    bias: Tensor | None,
    lengths: Lengths,
    rng_state: Tensor | None,
    is_training: bool,
    s_scale: Tensor | None,
    out: Tensor | None,
    pack: NVTETensorPack | None,
    workspace: Workspace | None,
    stream: torch.cuda.Stream | None,
) -> tuple[Tensor, NVTETensorPack]:
    """Run or query a forward; arguments as in ``nvte_fused_attn_fwd_*``."""
    if stream is not None:
        # Whole, since checking may already make tensors that the computation reads.
        with _on(stream, operands):
            return run_forward(
                words, operands, bias, lengths, rng_state, is_training, s_scale, out, pack, workspace, None
            )
    plain = s_scale is None and out is None and pack is None and workspace is None
    signature = _signature(words, operands, bias, lengths, rng_state, is_training) if plain else None
    bound = None if signature is None else bound_call(signature)
    if bound is not None:
        attn_scale: Any = words.attn_scale
        cu_seqlens: Any = lengths[:2]
        values = tuple(operands.values())
        rng_state = bound.rng_state(rng_state, values[0])
        result, lse = bound.compute(values, (bias, *cu_seqlens, rng_state), attn_scale)
        return result, bound_pack(bound, lse, bias, rng_state, is_training, attn_scale)
    arguments.optional_tensor("S", s_scale)
    pack = checked_pack("Aux_Output_Tensors", NVTETensorPack() if pack is None else pack)
    if not pack.is_query():
        hint = "Pass NVTETensorPack() or None."
        raise SpecError("Aux_Output_Tensors", "an empty pack or one that a query filled", f"{pack!r}", hint)
    query = _is_query(workspace)
    request = _request("fwd", words, operands, bias, lengths, rng_state, is_training, False, dry=query)
    shape, first = out_shape(request.layout, request.operands), request.operands[0]
    if arguments.optional_tensor("O", out) is not None:
        assert out is not None
        check_like("O", out, shape, first.dtype, first.device)
    if query:
        assert workspace is not None
        if not tracing(request):
            resolve(request)
        workspace.size_bytes = max(1, workspace_bytes(plan_of(request)))
        lse = torch.empty(lse_shape(request.layout, request.operands), dtype=lse_dtype(first.dtype), device="meta")
        fill_pack(pack, request, lse, is_training, None)
        return torch.empty(shape, dtype=first.dtype, device="meta"), pack
    if tracing(request):
        result, lse = attend(request)
        out = result if out is None else out.copy_(result)
        fill_pack(pack, request, lse, is_training, None)
        return out, pack
    resolved = resolve(request)
    _check_workspace(workspace, resolved.plan)
    if out is not None:
        check_no_overlap({"O": out}, _inputs(operands, request))
    out, lse = forward(request, out, resolved)
    record = record_of(request, resolved)
    fill_pack(pack, request, lse, is_training, record)
    if signature is not None:
        bind(signature, request, resolved, out, lse, record)
    return out, pack


def _signature(
    words: Words, operands: Mapping[str, Tensor], bias: Tensor | None, lengths: Lengths, rng_state: Tensor | None,
    is_training: bool,
) -> tuple[object, ...] | None:  # fmt: skip
    attn_scale = words.attn_scale
    if type(attn_scale) is not float:
        return None
    cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = lengths
    names = (*words[:5], words.dropout, is_training, attn_scale < 0.0, max_seqlen_q, max_seqlen_kv)
    return signature_of(names, (*operands.values(), bias, cu_seqlens_q, cu_seqlens_kv, rng_state))


def run_backward(
    words: Words,
    operands: Mapping[str, Tensor],
    lengths: Lengths,
    out: Tensor,
    dout: Tensor,
    s_scale: Tensor | None,
    dp_scale: Tensor | None,
    pack: NVTETensorPack,
    outputs: Mapping[str, Output],
    dbias: Output,
    workspace: Workspace | None,
    stream: torch.cuda.Stream | None,
    deterministic: bool | None,
) -> tuple[Tensor | None, ...]:
    """Run or query a backward; arguments as in ``nvte_fused_attn_bwd_*``."""
    if stream is not None:
        with _on(stream, operands):
            return run_backward(
                words, operands, lengths, out, dout, s_scale, dp_scale, pack, outputs, dbias, workspace, None,
                deterministic,
            )  # fmt: skip
    for name, value in (("S", s_scale), ("dP", dp_scale)):
        arguments.optional_tensor(name, value)
    pack = checked_pack("Aux_CTX_Tensors", pack)
    words = words._replace(engine=engine_of_pack(pack, words.engine, words.dropout))
    bias_type = NVTE_Bias_Type.parse(words.bias_type, "bias_type")
    bias = bias_of_pack(pack, bias_type is not NVTE_Bias_Type.NVTE_NO_BIAS)
    request = _request("bwd", words, operands, bias, lengths, pack["rng_state"], True, deterministic)
    first, shape = request.operands[0], out_shape(request.layout, request.operands)
    for name, tensor in (("O", out), ("dO", dout)):
        check_like(name, arguments.tensor(name, tensor), shape, first.dtype, first.device)
    lse_size = (*lse_shape(request.layout, request.operands), 1)
    check_like("Aux_CTX_Tensors['softmax_lse']", pack["softmax_lse"], lse_size, lse_dtype(first.dtype), first.device)
    like: dict[str, Tensor | None] = {**dict(zip(outputs, request.operands, strict=True)), "dBias": bias}
    written = {name: _checked_output(name, value, like[name]) for name, value in [*outputs.items(), ("dBias", dbias)]}
    query = _is_query(workspace)
    if tracing(request) and not query:
        return _traced_backward(request, dout, out, pack["softmax_lse"][..., 0], written, like)
    wants_dbias = bias is not None and dbias is not SKIP
    if tracing(request):
        plan, resolved = plan_of(request, Direction.backward, wants_dbias), None
    else:
        resolved = resolve(request, Direction.backward, wants_dbias)
        plan = resolved.plan
        check_record(pack, request, resolved)
    if query:
        assert workspace is not None
        workspace.size_bytes = max(1, workspace_bytes(plan))
        return tuple(_allocated(value, like[name], "meta") for name, value in written.items())
    _check_workspace(workspace, plan)
    inputs = _inputs(operands, request) | {"O": out, "dO": dout, "softmax_lse": pack["softmax_lse"]}
    check_no_overlap({name: value for name, value in written.items() if isinstance(value, Tensor)}, inputs)
    *gradients, bias_gradient = (_allocated(value, like[name]) for name, value in written.items())
    backward(request, dout, None, out, pack["softmax_lse"][..., 0], gradients, bias_gradient, resolved)
    return (*gradients, bias_gradient)


def _checked_output(name: str, value: Output, like: Tensor | None) -> Output:
    if value is None or value is SKIP:
        return value
    if like is None:
        raise SpecError(
            name, "None, since there is no bias", f"a tensor of shape {list(arguments.tensor(name, value).shape)}"
        )
    tensor = arguments.tensor(name, value)
    check_like(name, tensor, like.shape, like.dtype, like.device)
    return tensor


def _allocated(value: Output, like: Tensor | None, device: str | None = None) -> Tensor | None:
    """The tensor to write: the caller's, a new one where None came, and None for what is skipped or absent."""
    if value is SKIP or like is None:
        return None
    if isinstance(value, Tensor) and device is None:
        return value
    return torch.empty_like(like, device=device)


def _traced_backward(
    request: Request, dout: Tensor, out: Tensor, lse: Tensor, written: Mapping[str, Output], like: Mapping[str, Any]
) -> tuple[Tensor | None, ...]:
    need = [value is not SKIP and like[name] is not None for name, value in written.items()]
    results = differentiate(request, dout, None, out, lse, need)
    return tuple(
        None if not needed else value.copy_(result) if isinstance(value, Tensor) else result
        for value, needed, result in zip(written.values(), need, results, strict=True)
    )


def _inputs(operands: Mapping[str, Tensor], request: Request) -> dict[str, Tensor]:
    """The tensors that a call reads, by the names of arguments."""
    lengths = {"cu_seqlens_q": request.cu_seqlens_q, "cu_seqlens_kv": request.cu_seqlens_kv}
    read = {**operands, "Bias": request.bias, **lengths, "rng_state": request.rng_state}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def _is_query(workspace: object) -> bool:
    if workspace is not None and not isinstance(workspace, Workspace):
        raise SpecError("workspace", "a Workspace or None", type(workspace).__name__)
    return workspace is not None and workspace.is_query()


def _check_workspace(workspace: Workspace | None, plan: Plan) -> None:
    if workspace is not None:
        workspace.check(workspace_bytes(plan), plan.spec.device)


def _on(stream: object, operands: Mapping[str, object]) -> AbstractContextManager[object]:
    device = getattr(next(iter(operands.values())), "device", None)
    # What is no tensor is refused inside.
    if not isinstance(device, torch.device) or device.type != "cuda":
        return nullcontext()
    if not isinstance(stream, torch.cuda.Stream):
        hint = "Wrap the address of another library's in torch.cuda.ExternalStream."
        raise SpecError("stream", "a torch.cuda.Stream or None", type(stream).__name__, hint)
    if stream.device != device:
        raise SpecError("stream", f"a stream of {device}, where the tensors are", f"one of {stream.device}")
    return torch.cuda.stream(stream)
