"""Gradients against differences, in float64: torch.autograd.gradcheck."""

import itertools
from typing import Any

import pytest
import torch
from test_grid import LAYOUTS, RAGGED, RNG_STATE, cu
from torch import Tensor

from fusedattn import fused_attention, fused_attention_kvpacked, fused_attention_qkvpacked
from fusedattn.devices import CPU_ENGINES
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine

HEADS, DIM = 2, 3
ORDER = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
BIASES = ["no_bias", "pre_scale_bias", "post_scale_bias"]
MASKS = ["no_mask", "padding", "causal"]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check(
    layout: str,
    bias_type: str,
    mask_type: str,
    bias_shape: tuple[int, ...] | None = None,
    fast: bool = True,
    **more: Any,
) -> None:
    """Whole, or fast along random directions.

    Lengths 3, 0, 2 and 4, 1, 1 (t3hd: the same), with a row past the end; full in dense layouts without padding.
    """
    offsets_q, offsets_kv = cu((3, 0, 2)), cu((3, 0, 2) if layout == "t3hd" else (4, 1, 1))
    max_kv = 3 if layout == "t3hd" else 4
    kwargs: dict[str, Any] = {
        "qkv_layout": layout, "attn_bias_type": bias_type, "attn_mask_type": mask_type, "return_lse": True
    } | more  # fmt: skip
    if layout == "t3hd":
        function, operands = fused_attention_qkvpacked, [random(6, 3, HEADS, DIM)]
        kwargs |= {"cu_seqlens": offsets_q}
    else:
        function = fused_attention_kvpacked if layout == "thd_t2hd" else fused_attention
        if layout in RAGGED or mask_type == "padding":
            kwargs |= {"cu_seqlens_q": offsets_q, "cu_seqlens_kv": offsets_kv}
        operands = [random(6, HEADS, DIM), random(7, 2, HEADS, DIM)]
        if layout == "thd_thd_thd":
            operands = [operands[0], random(7, HEADS, DIM), random(7, HEADS, DIM)]
        elif layout not in RAGGED:
            operands = [random(3, s, HEADS, DIM).permute(ORDER[layout[:4]]).contiguous() for s in (3, 4, 4)]
    if bias_type != "no_bias":
        operands.append(random(*(bias_shape or (3, HEADS, 3)), max_kv))

    def results(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(*tensors, **kwargs)
        # Rows without a key have lse -inf, of which no difference can be taken.
        return out, torch.where(lse.isinf(), 0, lse)

    assert torch.autograd.gradcheck(results, [x.requires_grad_() for x in operands], fast_mode=fast)


@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("bias_type", BIASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, bias_type: str, mask_type: str) -> None:
    check(layout, bias_type, mask_type, fast=layout not in ("thd_t2hd", "bhsd_bhsd_bhsd"))


@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("bias_type", BIASES)
@pytest.mark.parametrize("layout", ["t3hd", "thd_t2hd", "bhsd_bhsd_bhsd"])
def test_dropout(layout: str, bias_type: str, mask_type: str) -> None:
    check(layout, bias_type, mask_type, dropout=0.4, rng_state=RNG_STATE)


@pytest.mark.parametrize("axes", list(itertools.product([1, 3], [1, HEADS], [1, 3])), ids=str)
@pytest.mark.parametrize("bias_type", BIASES[1:])
def test_broadcast_bias(bias_type: str, axes: tuple[int, ...]) -> None:
    check("thd_t2hd", bias_type, "padding", axes)
    check("bshd_bshd_bshd", bias_type, "causal", axes, dropout=0.4, rng_state=RNG_STATE)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 2.0])
@pytest.mark.parametrize("bias_type", BIASES)
def test_scale(bias_type: str, scale: float) -> None:
    check("thd_t2hd", bias_type, "causal", fast=False, attn_scale=scale)


@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("bias_type", BIASES)
@pytest.mark.parametrize("layout", ["t3hd", "thd_t2hd", "bshd_bshd_bshd"])
def test_where_lengths_are_not_read(
    layout: str, bias_type: str, mask_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, TorchEngine(reads_lengths=False))
    check(layout, bias_type, mask_type)
    check(layout, bias_type, mask_type, dropout=0.4, rng_state=RNG_STATE)


def test_strided_leaves() -> None:
    base = random(2, HEADS, DIM, 4).requires_grad_()
    bias = random(4).requires_grad_()

    def results(base: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        x = base.mT
        return fused_attention(
            x, x, x[:, :1].expand_as(x), bias.expand(1, HEADS, 4, 4), qkv_layout="bhsd_bhsd_bhsd", return_lse=True
        )

    assert torch.autograd.gradcheck(results, (base, bias))


def test_differentiated_only_once() -> None:
    """A second derivative is refused, not taken for zero."""
    q = random(1, 3, 1, 2).requires_grad_()
    [dq] = torch.autograd.grad(fused_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()
