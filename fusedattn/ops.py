"""The operators ``fusedattn::fwd`` and ``fusedattn::bwd``: schemas, fakes and calls.

They are functional and pure in ``rng_state``; all checks run inside them, so that traced programs have them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedattn.enums import Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.runtime import Request, backward, forward, lse_dtype, lse_shape, out_shape, plan_of

# torch.library is not annotated.
_LIBRARY: Any = cast(Any, torch.library.Library)("fusedattn", "DEF")
_CALL = (
    "Tensor[] operands, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? rng_state, "
    "int layout, int bias_type, int mask_type, SymInt? max_seqlen_q, SymInt? max_seqlen_kv, "
    "float attn_scale, float dropout, bool deterministic, str engine, bool bias_gradient"
)
_LIBRARY.define(f"fwd({_CALL}) -> (Tensor, Tensor)")
_LIBRARY.define(f"bwd(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] need, {_CALL}) -> Tensor[]")


class Scalars(NamedTuple):
    """The arguments of the operators that are no tensors, in the schema's order and types."""

    layout: int
    bias_type: int
    mask_type: int
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    attn_scale: float
    dropout: float
    deterministic: bool
    engine: str
    bias_gradient: bool

    @classmethod
    def of(cls, request: Request) -> Scalars:
        """Those of a request."""
        return cls(
            request.layout.value,
            request.bias_type.value,
            request.mask_type.value,
            request.max_seqlen_q,
            request.max_seqlen_kv,
            request.attn_scale,
            request.dropout,
            request.deterministic,
            request.engine.value,
            request.bias_gradient,
        )


def request_of(
    operands: list[Tensor],
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    rng_state: Tensor | None,
    *scalars: Any,
) -> Request:
    """The request that the arguments of the forward operator stand for."""
    given = Scalars(*scalars)
    return Request(
        layout=NVTE_QKV_Layout(given.layout),
        operands=tuple(operands),
        bias=bias,
        bias_type=NVTE_Bias_Type(given.bias_type),
        mask_type=NVTE_Mask_Type(given.mask_type),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        rng_state=rng_state,
        max_seqlen_q=given.max_seqlen_q,
        max_seqlen_kv=given.max_seqlen_kv,
        attn_scale=given.attn_scale,
        dropout=given.dropout,
        deterministic=given.deterministic,
        engine=Engine(given.engine),
        bias_gradient=given.bias_gradient,
    )


def chosen_engine(scalars: Scalars, tensors: Sequence[Any]) -> str:
    """The engine that a forward took, by the word: its request is planned already, so this is a lookup.

    Args:
        scalars: Of the forward.
        tensors: bias, cu_seqlens_q, cu_seqlens_kv, rng_state, then the operands.

    Returns:
        The engine's word.

    Raises:
        EngineRefusal: None took it.
    """
    return plan_of(request_of(list(tensors[4:]), *tensors[:4], *scalars)).chosen().value


def _fwd(*args: Any) -> tuple[Tensor, Tensor]:
    return forward(request_of(*args))


def _bwd(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, need: list[bool], operands: list[Tensor],
    bias: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    results = _empty_gradients(need, operands, bias)
    targets = [result if needed else None for result, needed in zip(results, need, strict=True)]
    backward(request_of(operands, bias, *rest), dout, dlse, out, lse, targets[:-1], targets[-1])
    return results


def _fwd_fake(operands: list[Tensor], *args: Any) -> tuple[Tensor, Tensor]:
    first, layout = operands[0], NVTE_QKV_Layout(args[4])
    lse = first.new_empty(lse_shape(layout, operands), dtype=lse_dtype(first.dtype))
    return first.new_empty(out_shape(layout, operands)), lse


def _bwd_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, need: list[bool], operands: list[Tensor],
    bias: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    return _empty_gradients(need, operands, bias)


def _empty_gradients(need: list[bool], operands: list[Tensor], bias: Tensor | None) -> list[Tensor]:
    """One tensor for each operand and one for the bias; without elements where none is asked for."""
    made = [x.new_empty(x.shape) if n else x.new_empty(0) for x, n in zip(operands, need[:-1], strict=True)]
    return [*made, torch.empty_like(bias) if bias is not None and need[-1] else operands[0].new_empty(0)]


_LIBRARY.impl("fwd", _fwd, "CompositeExplicitAutograd")
_LIBRARY.impl("bwd", _bwd, "CompositeExplicitAutograd")
torch.library.register_fake("fusedattn::fwd", _fwd_fake, lib=_LIBRARY)
torch.library.register_fake("fusedattn::bwd", _bwd_fake, lib=_LIBRARY)


def differentiate(
    request: Request, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, need: list[bool]
) -> list[Tensor]:
    """Call the backward operator.

    Args:
        request: The forward's call.
        dout, dlse, out, lse: As in ``runtime.backward``.
        need: For each operand, then for the bias, whether its gradient is asked for.

    Returns:
        A gradient for each operand and one for the bias; without elements where none is asked for.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    tensors = (request.bias, request.cu_seqlens_q, request.cu_seqlens_kv, request.rng_state)
    gradients: list[Tensor] = torch.ops.fusedattn.bwd(
        dout, dlse, out, lse, need, list(request.operands), *tensors, *Scalars.of(request)
    )
    return gradients
