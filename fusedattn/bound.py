"""Calls that came before: what was parsed, checked and chosen then is found by their raw arguments.

Only what engines can bind is here; every other call takes the whole way each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedattn.cache import on_clear
from fusedattn.calls import fresh_rng_state
from fusedattn.devices import engine_on, is_gpu
from fusedattn.engines.base import BoundForward, Problem
from fusedattn.enums import Engine
from fusedattn.layouts import logical, unpack
from fusedattn.lengths import Lengths, Side
from fusedattn.ops import Scalars
from fusedattn.runtime import Request, Resolved, lse_dtype, lse_shape, out_shape, problem_of
from fusedattn.settings import settings
from fusedattn.tensor_pack import ForwardRecord

_CALLS: dict[object, BoundCall] = {}
_CAPACITY = 4096
on_clear(_CALLS.clear)
_PLAIN = (Tensor, Parameter)
_STRIDED = torch.strided


class BoundCall:
    """A forward of one signature.

    Args:
        request: A call of it that was computed.
        resolved: What was resolved of it.
        forward: What the engine bound.
        record: What the call noted in its pack, if it has one.
    """

    def __init__(
        self, request: Request, resolved: Resolved, forward: BoundForward, record: ForwardRecord | None
    ) -> None:
        plan, lengths = resolved
        self.attn_scale, self.dropout = request.attn_scale, request.dropout
        self.scalars, self.record = Scalars.of(request), record
        if request.dropout:
            # Patterns of different engines differ: backward takes the forward's.
            self.scalars = self.scalars._replace(engine=plan.chosen().value)
        self._spec, self._layout, self._forward = plan.spec, plan.spec.format, forward
        self._out_shape = out_shape(request.layout, request.operands)
        self._lse_shape = lse_shape(request.layout, request.operands)
        self._lse_dtype = lse_dtype(request.operands[0].dtype)
        self._same = request.cu_seqlens_kv is None
        self._same_side = self._same and lengths.kv[2:] == lengths.q[2:]
        # Without tensors, which would live as long as this.
        self._lengths_act = tuple(side.cu_seqlens is not None for side in lengths[1:])
        self._lengths = Lengths(lengths.batch, *(side._replace(cu_seqlens=None) for side in lengths[1:]))

    def rng_state(self, given: Tensor | None, first: Tensor) -> Tensor | None:
        """The caller's ``rng_state``, or a new one where dropout wants one and none came; ``first`` is an operand."""
        return fresh_rng_state(first.device) if self.dropout and given is None else given

    def compute(
        self, operands: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...], attn_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute, as ``runtime.forward``.

        Args:
            operands: Those of the layout.
            tensors: bias, cu_seqlens_q, cu_seqlens_kv, rng_state.
            attn_scale: Factor of the scores.

        Returns:
            The output and the log-sum-exp.

        Raises:
            BuildError: A plan that was evicted could not be built again.
        """
        bias, cu_seqlens_q, cu_seqlens_kv, rng_state = tensors
        first = operands[0]
        # Torch reads numbers faster than tuples.
        out = first.new_empty(*self._out_shape)
        lse = first.new_empty(*self._lse_shape, dtype=self._lse_dtype)
        q, k, v = unpack(self._layout, operands)
        lengths = self._with(cu_seqlens_q, cu_seqlens_kv)
        problem = Problem(self._spec, lengths, q, k, v, bias, attn_scale, self.dropout, rng_state)
        self._forward(problem, logical(self._layout.format, out), lse)
        return out, lse

    def _with(self, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None) -> Lengths:
        batch, q, kv = self._lengths
        acts_q, acts_kv = self._lengths_act
        if cu_seqlens_q is not None and acts_q:
            if cu_seqlens_q.dtype != torch.int32:
                cu_seqlens_q = cu_seqlens_q.to(torch.int32)
            q = Side(cu_seqlens_q, None, q.max_seqlen, q.rows)
            if self._same_side:
                return Lengths(batch, q, q)
        if acts_kv:
            cu_seqlens_kv = q.cu_seqlens if self._same else cu_seqlens_kv
            assert cu_seqlens_kv is not None
            kv = Side(cu_seqlens_kv.to(torch.int32), None, kv.max_seqlen, kv.rows)
        return Lengths(batch, q, kv)


def signature_of(words: tuple[object, ...], tensors: Sequence[Any]) -> tuple[object, ...] | None:
    """What bound calls are known by.

    Args:
        words: All of a call's arguments that are no tensors, but for the scale its type and sign.
        tensors: All that are, or None in their places; the first one there is.

    Returns:
        What to look up, or None where there is nothing to bind: on CPU, where tensors are not plain ones, or where
        something looks on, such as a tracer, a transform or a mode.

    Raises:
        Nothing.

    Example:
        >>> signature_of(("t3hd",), (torch.empty(2, 3), None)) is None
        True
    """
    if torch.compiler.is_compiling() or not isinstance(tensors[0], Tensor) or not is_gpu(tensors[0].device):
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    # 1, 1.0 and True are equal, and not all of them are taken.
    found: list[object] = [*words, *map(type, words)]
    for tensor in tensors:
        if tensor is None:
            found.append(None)
        elif type(tensor) in _PLAIN and tensor.layout is _STRIDED:
            found += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15)
        else:
            return None
    return tuple(found)


def bound_call(signature: object) -> BoundCall | None:
    """The call of a signature, if it was bound."""
    try:
        return _CALLS.get(signature)
    except TypeError:
        # An argument that cannot be hashed is one that the whole way refuses.
        return None


def bind(
    signature: object,
    request: Request,
    resolved: Resolved,
    out: Tensor,
    lse: Tensor,
    record: ForwardRecord | None = None,
) -> None:
    """Remember a call that was computed, where its engine can bind it.

    Args:
        signature: What ``signature_of`` said.
        request, resolved, out, lse: The call.
        record: What it noted in its pack.

    Returns:
        None.

    Raises:
        Nothing.
    """
    engine = resolved.plan.chosen()
    if engine is Engine.torch or settings().validate_values:
        return
    problem = problem_of(request, resolved.plan, resolved.lengths)
    view = logical(resolved.plan.spec.format.format, out)
    forward = engine_on(resolved.plan.spec.device, engine).bind(problem, view, lse)
    if forward is None:
        return
    if len(_CALLS) >= _CAPACITY:
        _CALLS.clear()
    _CALLS[signature] = BoundCall(request, resolved, forward, record)
