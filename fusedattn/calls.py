"""From the arguments of the differentiable functions to a ``Request``: words parsed, defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fusedattn import arguments
from fusedattn.enums import Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import SpecError
from fusedattn.layouts import LAYOUTS
from fusedattn.runtime import Request, plan_of


def layout_for(packing: str, argument: str, value: object, prefix: str = "fused_attention") -> NVTE_QKV_Layout:
    """Parse a layout for a function that takes only those of one packing.

    Args:
        packing: ``qkvpacked``, ``kvpacked``, or empty for separate tensors.
        argument: The layout argument's name.
        value: What came.
        prefix: What the names of the function and of its packed twins begin with.

    Returns:
        The layout.

    Raises:
        SpecError: No layout, or one that belongs to another function, which the message names.

    Example:
        >>> layout_for("kvpacked", "qkv_layout", "t3hd")
        Traceback (most recent call last):
        fusedattn.errors.SpecError: argument 'qkv_layout': expected 'thd_t2hd', got 't3hd'. \
Call fused_attention_qkvpacked for it.
    """
    layout = NVTE_QKV_Layout.parse(value, argument)
    right = LAYOUTS[layout].packing
    if right != packing:
        words = ", ".join(f"'{member.word}'" for member, known in LAYOUTS.items() if known.packing == packing)
        hint = f"Call {f'{prefix}_{right}' if right else 'fused_attention'} for it."
        raise SpecError(argument, f"one of {words}" if "," in words else words, f"'{layout.word}'", hint)
    return layout


def fresh_rng_state(device: torch.device) -> Tensor:
    """A new ``rng_state`` from torch's generator of the device: int64 ``[2]``, seed and offset."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def attention_request(
    layout: NVTE_QKV_Layout,
    operands: Mapping[str, object],
    bias: object,
    attn_bias_type: object,
    attn_mask_type: object,
    cu_seqlens_q: object,
    cu_seqlens_kv: object,
    max_seqlen_q: object,
    max_seqlen_kv: object,
    attn_scale: object,
    dropout: object,
    rng_state: object,
    is_training: object,
    deterministic: object,
    engine: object,
    *,
    differentiable: bool = True,
    dry: bool = False,
) -> Request:
    """Parse the arguments of ``fused_attention`` or of a packed twin; see there for their meaning.

    Args:
        layout: The parsed layout.
        operands: Argument names to tensors, in the layout's order; the others as in ``fused_attention``.
        differentiable: Whether autograd sees the call: autocast, where it is on, converts the operands, and a bias
            that requires no gradient will not be asked for one.
        dry: Whether nothing will be computed: no random numbers are drawn, and no engine need take the problem.

    Returns:
        The request.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: No engine that may compute it takes it.
    """
    tensors = tuple(arguments.tensor(name, value) for name, value in operands.items())
    bias_tensor = arguments.optional_tensor("bias", bias)
    if attn_bias_type is None:
        attn_bias_type = "no_bias" if bias_tensor is None else "post_scale_bias"
    p = arguments.probability("dropout", dropout)
    p = p if arguments.flag("is_training", is_training) else 0.0
    state = arguments.optional_tensor("rng_state", rng_state)
    if p > 0.0 and state is None and not dry:
        state = fresh_rng_state(tensors[0].device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    head_dim = tensors[0].shape[-1] if tensors[0].dim() else 0
    default_scale = float(head_dim) ** -0.5 if head_dim else 1.0
    request = Request(
        layout=layout,
        operands=tuple(_autocast(tensor) for tensor in tensors) if differentiable else tensors,
        bias=bias_tensor,
        bias_type=NVTE_Bias_Type.parse(attn_bias_type, "attn_bias_type"),
        mask_type=NVTE_Mask_Type.parse(attn_mask_type, "attn_mask_type"),
        cu_seqlens_q=arguments.optional_tensor("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_kv=arguments.optional_tensor("cu_seqlens_kv", cu_seqlens_kv),
        rng_state=state,
        max_seqlen_q=arguments.max_seqlen("max_seqlen_q", max_seqlen_q),
        max_seqlen_kv=arguments.max_seqlen("max_seqlen_kv", max_seqlen_kv),
        attn_scale=default_scale if attn_scale is None else arguments.number("attn_scale", attn_scale),
        dropout=p,
        deterministic=arguments.flag("deterministic", deterministic),
        engine=Engine.parse(engine, "engine"),
        bias_gradient=bias_tensor is not None and not (differentiable and _is_frozen(bias_tensor)),
    )
    # Before dispatch: a bias or cu_seqlens on another device could send the call to another device's kernel.
    if not dry and not tracing(request):
        plan_of(request).chosen()
    return request


def tracing(request: Request) -> bool:
    """Whether a program is being traced, so that nothing may depend on, or remember, the tensors at hand."""
    return torch.compiler.is_compiling() or any(
        isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in request.operands
    )


def _is_frozen(tensor: Tensor) -> bool:
    """Whether no gradient of a tensor can be asked for; what torch.func wraps does not say."""
    return not tensor.requires_grad and not torch._C._are_functorch_transforms_active()


def _autocast(tensor: Tensor) -> Tensor:
    device_type = tensor.device.type
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32) or device_type == "meta":
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else tensor
