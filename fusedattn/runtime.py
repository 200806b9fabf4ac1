"""From a call's raw arguments to a plan (a memo), and from the plan to results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.cache import on_clear
from fusedattn.devices import engine_on, is_capturing, pretend, target_of
from fusedattn.engines.base import AttentionEngine, Gradients, Problem
from fusedattn.enums import Direction, Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import BuildError
from fusedattn.layouts import LAYOUTS, logical, unpack
from fusedattn.lengths import Lengths, read_lengths
from fusedattn.plan import Plan, make_plan
from fusedattn.spec import AttentionSpec, TensorSpec

__all__ = ["Request", "Resolved", "backward", "forward", "lengths_of", "plan_of", "pretend", "resolve"]

_PLANS: dict[object, Plan] = {}
_PLANS_CAPACITY = 4096
_WARNED: set[str] = set()
on_clear(_PLANS.clear)
on_clear(_WARNED.clear)


class Request(NamedTuple):
    """One call, its arguments parsed but their shapes unchecked.

    Attributes:
        layout, bias_type, mask_type, engine: The enums.
        operands: The tensors of the layout.
        bias, cu_seqlens_q, cu_seqlens_kv, rng_state: Tensors or None.
        max_seqlen_q, max_seqlen_kv: Integers or None.
        attn_scale: Factor of the scores.
        dropout: Probability in effect: 0 outside training.
        deterministic: Whether results must be the same in every run.
        bias_gradient: Whether a backward may ask for the gradient of the bias.
    """

    layout: NVTE_QKV_Layout
    operands: tuple[Tensor, ...]
    bias: Tensor | None
    bias_type: NVTE_Bias_Type
    mask_type: NVTE_Mask_Type
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    rng_state: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    attn_scale: float
    dropout: float
    deterministic: bool
    engine: Engine
    bias_gradient: bool


class Resolved(NamedTuple):
    """A request that was checked: its plan and its lengths."""

    plan: Plan
    lengths: Lengths


def plan_of(request: Request, direction: Direction = Direction.forward, bias_gradient: bool = False) -> Plan:
    """The plan of a request, remembered by its signature; values of tensors are not looked at.

    With dropout both directions have one plan, so that they drop alike.

    Args:
        request: The call.
        direction: Which half of it.
        bias_gradient: Whether a backward is asked for the gradient of the bias.

    Returns:
        The plan, which may have no engine.

    Raises:
        SpecError: A law of shape, dtype or device is broken.
    """
    capturing = is_capturing(request.operands[0].device)
    tensors = (*request.operands, request.bias, request.cu_seqlens_q, request.cu_seqlens_kv, request.rng_state)
    dropout, negative_scale = request.dropout > 0.0, request.attn_scale < 0.0
    if dropout:
        direction, bias_gradient = Direction.forward, request.bias_gradient
    signature = (
        request.layout, request.bias_type, request.mask_type, dropout, request.deterministic, request.engine,
        direction, bias_gradient, negative_scale, capturing,
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors],
    )  # fmt: skip
    plan = _PLANS.get(signature)
    if plan is None:
        described = [None if t is None else TensorSpec.of(t) for t in tensors]
        count = len(request.operands)
        spec = AttentionSpec.of(
            layout=request.layout,
            operands=tuple(described[:count]),
            bias_type=request.bias_type,
            mask_type=request.mask_type,
            bias=described[count],
            cu_seqlens_q=described[count + 1],
            cu_seqlens_kv=described[count + 2],
            rng_state=described[count + 3],
            dropout=dropout,
            deterministic=request.deterministic,
            direction=direction,
            bias_gradient=bias_gradient,
            negative_scale=negative_scale,
            target=target_of(request.operands[0].device),
            capturing=capturing,
        )
        plan = make_plan(spec, request.engine)
        if len(_PLANS) >= _PLANS_CAPACITY:
            _PLANS.clear()
        _PLANS[signature] = plan
    return plan


def lengths_of(request: Request, plan: Plan) -> Lengths:
    """The lengths of a planned request; raises like ``read_lengths``."""
    cu_seqlens, max_seqlens = (
        (request.cu_seqlens_q, request.cu_seqlens_kv),
        (request.max_seqlen_q, request.max_seqlen_kv),
    )
    return read_lengths(plan.spec, *cu_seqlens, *max_seqlens, on_gpu=plan.spec.target is not None)


def resolve(request: Request, direction: Direction = Direction.forward, bias_gradient: bool = False) -> Resolved:
    """Check a request whole, lengths included, and see that an engine takes it.

    Args:
        request, direction, bias_gradient: As in ``plan_of``.

    Returns:
        Its plan and lengths.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    plan = plan_of(request, direction, bias_gradient)
    plan.chosen()
    lengths = lengths_of(request, plan)
    _warn(plan)
    return Resolved(plan, lengths)


def _warn(plan: Plan) -> None:
    warning = plan.fallback_warning()
    if warning is not None and warning not in _WARNED:
        _WARNED.add(warning)
        warnings.warn(warning, RuntimeWarning, stacklevel=4)


def _compute(plan: Plan, compute: Callable[[AttentionEngine], None]) -> None:
    """Compute with the plan's engine; under ``auto``, where that cannot build what it needs, with the torch engine."""
    device = plan.spec.device
    engine = plan.chosen()
    try:
        compute(engine_on(device, engine))
    except BuildError as error:
        if plan.spec.capturing:
            # What is missing may be there at the next capture.
            plan = replace(plan, refused=dict(plan.refused))
        if not plan.fall_back(engine, str(error)):
            raise
        _warn(plan)
        compute(engine_on(device, plan.chosen()))


def out_shape(layout: NVTE_QKV_Layout, operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Shape of the output: q's own, packed or not.

    Example:
        >>> out_shape(NVTE_QKV_Layout.NVTE_T3HD, [torch.empty(5, 3, 2, 4)])
        (5, 2, 4)
    """
    shape = tuple(operands[0].shape)
    return shape[:1] + shape[2:] if layout is NVTE_QKV_Layout.NVTE_T3HD else shape


def lse_shape(layout: NVTE_QKV_Layout, operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Shape of the log-sum-exp: ``[T, H]`` ragged, ``[B, H, Sq]`` dense.

    Example:
        >>> lse_shape(NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, [torch.empty(7, 2, 3, 4)])
        (2, 3, 7)
    """
    shape = out_shape(layout, operands)
    format = LAYOUTS[layout].format
    if format == "thd":
        return shape[:2]
    return tuple(shape[format.index(axis)] for axis in "bhs")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp: float64 for float64 inputs, else float32.

    Example:
        >>> lse_dtype(torch.float16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(request: Request, out: Tensor | None = None, resolved: Resolved | None = None) -> tuple[Tensor, Tensor]:
    """Check and compute.

    Args:
        request: The call.
        out: The output's shape, dtype and device, written; None: allocated.
        resolved: What ``resolve`` said of the request; None: it is asked.

    Returns:
        The output, and the log-sum-exp shaped as ``lse_shape`` says.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    plan, lengths = resolve(request) if resolved is None else resolved
    first = request.operands[0]
    if out is None:
        out = first.new_empty(out_shape(request.layout, request.operands))
    lse = first.new_empty(lse_shape(request.layout, request.operands), dtype=lse_dtype(first.dtype))
    with torch.no_grad(), _without_autocast(first.device.type):
        view, problem = logical(plan.spec.format.format, out), problem_of(request, plan, lengths)
        _compute(plan, lambda engine: engine.forward(problem, view, lse))
    return out, lse


def backward(
    request: Request,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    gradients: Sequence[Tensor | None],
    bias_gradient: Tensor | None,
    resolved: Resolved | None = None,
) -> None:
    """Check and differentiate.

    Args:
        request: The forward's call.
        dout: Gradient of the output, shaped like it.
        dlse: Gradient of the log-sum-exp or None.
        out, lse: What the forward returned.
        gradients: For each operand a tensor of its shape, written, or None: not asked for.
        bias_gradient: The bias's shape, written, or None.
        resolved: What ``resolve`` said of the request; None: it is asked.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    if resolved is None:
        resolved = resolve(request, Direction.backward, bias_gradient is not None)
    plan, lengths = resolved
    layout = plan.spec.format
    with torch.no_grad(), _without_autocast(dout.device.type):
        parts: list[Tensor | None] = []
        for gradient, count in zip(gradients, layout.packed, strict=True):
            split = [None] * count if gradient is None else [gradient] if count == 1 else gradient.unbind(1)
            parts += [None if part is None else logical(layout.format, part) for part in split]
        views = Gradients(parts[0], parts[1], parts[2], bias_gradient)
        dout_view, out_view = logical(layout.format, dout), logical(layout.format, out)
        problem = problem_of(request, plan, lengths)
        _compute(plan, lambda engine: engine.backward(problem, dout_view, dlse, out_view, lse, views))


def workspace_bytes(plan: Plan) -> int:
    """Scratch memory that the chosen engine wants from the caller, in bytes; raises ``EngineRefusal``."""
    return engine_on(plan.spec.device, plan.chosen()).workspace_bytes(plan.spec)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast would run the float32 products of an engine in a lower precision."""
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def problem_of(request: Request, plan: Plan, lengths: Lengths) -> Problem:
    """What an engine gets of a call."""
    q, k, v = unpack(plan.spec.format, request.operands)
    return Problem(plan.spec, lengths, q, k, v, request.bias, request.attn_scale, request.dropout, request.rng_state)
