"""How autograd, ``torch.func`` and ``torch.compile`` differentiate the operators.

Second derivatives and forward-mode derivatives are refused, never taken for zero.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from fusedattn.ops import Scalars, chosen_engine
from fusedattn.runtime import Request


def attend(request: Request) -> tuple[Tensor, Tensor]:
    """Call the forward operator, differentiably where a gradient may be asked for.

    Args:
        request: The call, parsed; checked inside.

    Returns:
        The output and the log-sum-exp.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    tensors = (request.bias, request.cu_seqlens_q, request.cu_seqlens_kv, request.rng_state)
    scalars = Scalars.of(request)
    differentiable = (*request.operands, *(() if request.bias is None else (request.bias,)))
    transformed = _transformed()
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable)
    if transformed or wanted:
        function = _TransformedAttend if transformed else _Attend
        out, lse = function.apply(scalars, *tensors, *request.operands)
        return out, lse
    out, lse = torch.ops.fusedattn.fwd(list(request.operands), *tensors, *scalars)
    return out, lse


class Computes(Protocol):
    """A forward that is bound: parsed, checked and planned."""

    scalars: Scalars

    def compute(
        self, operands: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...], attn_scale: float
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp; ``tensors`` as in ``attend_bound``."""


def attend_bound(
    bound: Computes, attn_scale: float, tensors: tuple[Tensor | None, ...], operands: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """``attend`` for a bound call; in eager mode only, where nothing looks on.

    Args:
        bound: The call.
        attn_scale: Factor of the scores.
        tensors: bias, cu_seqlens_q, cu_seqlens_kv, rng_state.
        operands: As in ``attend``.

    Returns:
        The output and the log-sum-exp.

    Raises:
        BuildError: A plan that was evicted could not be built again.
    """
    differentiable = (*operands, tensors[0])
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in differentiable):
        return bound.compute(operands, tensors, attn_scale)
    out, lse = _AttendBound.apply(bound, attn_scale, *tensors, *operands)
    return out, lse


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work."""
    if torch._C._are_functorch_transforms_active():
        if torch.compiler.is_compiling():
            # A graph break makes it right; traced, its derivatives would be zero without a word.
            raise NotImplementedError("fusedattn: torch.func inside torch.compile is not traced; compile without it.")
        return True
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def _forward(scalars: Scalars, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.fusedattn.fwd(list(tensors[4:]), *tensors[:4], *scalars)
    return out, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scalars: Scalars = inputs[0]
    if scalars.dropout > 0.0 and not torch.compiler.is_compiling():
        # Patterns of different engines differ: backward takes the forward's, whatever becomes of the caches.
        scalars = scalars._replace(engine=chosen_engine(scalars, inputs[1:]))
    ctx.scalars = scalars
    ctx.save_for_backward(*inputs[1:], *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, needs: tuple[bool, ...]) -> Any:
    """The gradients of scalars (None), bias, cu_seqlens_q, cu_seqlens_kv, rng_state (None) and the operands."""
    *inputs, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (1 + len(inputs))
    need = (*needs[5:], inputs[0] is not None and needs[1])
    dout = torch.zeros_like(out) if dout is None else dout
    function = _differentiate if torch.compiler.is_compiling() else _Differentiate.apply
    results = function(ctx.scalars, need, dout, dlse, out, lse, *inputs)
    gradients = [result if needed else None for result, needed in zip(results, need, strict=True)]
    return None, gradients[-1], None, None, None, *gradients[:-1]


def _differentiate(
    scalars: Scalars, need: tuple[bool, ...], dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    operands, tensors = list(inputs[4:]), inputs[:4]
    return tuple(torch.ops.fusedattn.bwd(dout, dlse, out, lse, list(need), operands, *tensors, *scalars))


class _Attend(torch.autograd.Function):
    """For eager mode and torch.compile; inputs: scalars, bias, cu_seqlens_q, cu_seqlens_kv, rng_state, operands."""

    @staticmethod
    def forward(ctx: Any, scalars: Scalars, *tensors: Any) -> tuple[Tensor, Tensor]:
        output = _forward(scalars, tensors)
        _save(ctx, (scalars, *tensors), output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        return _backward(ctx, dout, dlse, ctx.needs_input_grad)


class _AttendBound(torch.autograd.Function):
    """``_Attend`` for bound calls; inputs: the call, attn_scale, then tensors as there."""

    @staticmethod
    def forward(ctx: Any, bound: Computes, attn_scale: float, *tensors: Any) -> tuple[Tensor, Tensor]:
        output = bound.compute(tensors[4:], tensors[:4], attn_scale)
        scalars = bound.scalars
        ctx.scalars = scalars if attn_scale == scalars.attn_scale else scalars._replace(attn_scale=attn_scale)
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        return None, *_backward(ctx, dout, dlse, ctx.needs_input_grad[1:])


class _Transformed:
    """What torch.func asks of a Function; torch.compile traces none that has it."""

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Any) -> Any:
        raise NotImplementedError("fusedattn: forward-mode derivatives are not implemented; use reverse mode.")

    @classmethod
    def vmap(cls: Any, info: Any, in_dims: Any, *args: Any) -> Any:
        """A loop: the sequences of different samples may lie anywhere, so there is no axis to fold the batch into."""
        results = []
        for index in range(info.batch_size):
            sample = [x.select(dim, index) if isinstance(dim, int) else x for x, dim in zip(args, in_dims, strict=True)]
            results.append(cls.apply(*sample))
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)


class _TransformedAttend(_Transformed, torch.autograd.Function):
    """``_Attend`` for torch.func."""

    @staticmethod
    def forward(scalars: Scalars, *tensors: Any) -> tuple[Tensor, Tensor]:
        return _forward(scalars, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        return _backward(ctx, dout, dlse, ctx.needs_input_grad)


class _Differentiate(_Transformed, torch.autograd.Function):
    """The backward as a Function of its own, so that a derivative of it is refused and never taken for zero."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _differentiate(*args)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        raise NotImplementedError("fusedattn: second derivatives are not implemented.")
