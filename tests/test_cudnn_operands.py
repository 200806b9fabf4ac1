"""What cuDNN gets as it lies in memory, and what is copied first, and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor
from cudnn_recorder import Recorder

import fusedattn
from fusedattn import runtime
from fusedattn.engines.cudnn_key import Role
from fusedattn.target import TARGETS

BHSD = {"qkv_layout": "bhsd_bhsd_bhsd"}


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def misaligned(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return half(count + 1)[1:].view(shape)


Q = half(2, 7, 3, 8)
# For each call: how many copies its forward and its forward with backward make.
CALLS: dict[str, tuple[dict[str, Any], int, int]] = {
    "contiguous": ({"q": Q}, 0, 0),
    "of one packed tensor": ({"q": half(2, 7, 3, 3, 8)[:, :, 1]}, 0, 0),
    "transposed": ({"q": half(2, 3, 7, 8).transpose(1, 2)}, 0, 0),
    "expanded over the batch": ({"q": half(1, 7, 3, 8).expand(2, 7, 3, 8)}, 1, 2),
    "expanded over heads": ({"q": half(2, 7, 1, 8).expand(2, 7, 3, 8)}, 1, 2),
    "one head expanded to one": ({"q": half(2, 7, 1, 8).expand(2, 7, 1, 8), "k": half(2, 7, 1, 8)}, 0, 0),
    "D not innermost": ({"q": half(2, 7, 8, 3).transpose(2, 3)}, 1, 2),
    "odd strides": ({"q": half(2, 7, 3, 9)[..., :8]}, 1, 2),
    "strides of 16 bytes": ({"q": half(2, 7, 3, 16)[..., :8]}, 0, 0),
    "odd address": ({"q": misaligned(2, 7, 3, 8)}, 1, 2),
    "bias": ({"q": Q, "bias": half(2, 3, 7, 7)}, 0, 0),
    "bias of odd strides": ({"q": Q, "bias": half(2, 3, 7, 9)[..., :7]}, 0, 0),
    "float32 bias": ({"q": Q, "bias": torch.randn(2, 3, 7, 7)}, 0, 0),
    "bias at an odd address": ({"q": Q, "bias": misaligned(2, 3, 7, 7)}, 1, 2),
    "bfloat16 bias": ({"q": Q, "bias": torch.randn(2, 3, 7, 7).bfloat16()}, 1, 2),
    "float64 bias": ({"q": Q, "bias": torch.randn(2, 3, 7, 7).double()}, 1, 2),
    "bias expanded": ({"q": Q, "bias": half(1, 1, 7, 7).expand(2, 3, 7, 7)}, 1, 2),
    "bias with keys not innermost": ({"q": Q, "bias": half(2, 3, 7, 7).transpose(2, 3)}, 1, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_copies_are_made_only_where_cudnn_has_no_plan(name: str) -> None:
    call, forward, both = CALLS[name]
    q = call["q"]
    k = call.get("k", Q)
    bias = call.get("bias")
    wanted = fusedattn.fused_attention(q.double(), k.double(), k.double(), None if bias is None else bias.double())
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        got = fusedattn.fused_attention(q, k, k, bias, engine="cudnn")
        assert fusedattn.counters()["copies"] == forward
        torch.testing.assert_close(got.double(), wanted, atol=3e-3, rtol=1e-2)
        fusedattn.clear_caches()
        leaf = q.detach().requires_grad_()
        out = fusedattn.fused_attention(leaf, k, k, bias, engine="cudnn")
        out.backward(torch.ones(out.shape, dtype=out.dtype))
        assert fusedattn.counters()["copies"] == both


def test_gradients_of_an_expanded_sum_are_copied() -> None:
    q = half(2, 7, 3, 8).requires_grad_()
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        fusedattn.fused_attention(q, Q, Q, engine="cudnn").sum().backward()
        assert fusedattn.counters()["copies"] == 1


@pytest.mark.parametrize(("target", "copies"), [("a100", 0), ("h100", 0), ("b200", 0), ("rtx5090", 1)])
def test_consumer_blackwell_wants_a_contiguous_ragged_q_in_backward(target: str, copies: int) -> None:
    qkv = half(20, 3, 2, 8).requires_grad_()
    cu_seqlens = torch.tensor([0, 9, 20], dtype=torch.int32)
    with runtime.pretend(TARGETS[target], InterpretingExecutor()):
        out = fusedattn.fused_attention_qkvpacked(qkv, cu_seqlens=cu_seqlens, max_seqlen=11, engine="cudnn")
        assert fusedattn.counters()["copies"] == 0
        out.backward(torch.ones(out.shape, dtype=out.dtype))
        assert fusedattn.counters()["copies"] == copies


def test_a_gradient_of_the_bias_at_an_odd_address_is_written_back() -> None:
    qkv, cu_seqlens = half(20, 3, 2, 8), torch.tensor([0, 9, 18], dtype=torch.int32)
    words = (cu_seqlens, 9, 0.5, 0.0, "t3hd", "post_scale_bias", "padding")
    recorder = Recorder()
    with runtime.pretend(TARGETS["h100"], recorder):
        forward = (qkv, half(1, 2, 9, 9), None, None, None, cu_seqlens, None, 9, True, *words[2:])
        out, pack = fusedattn.nvte_fused_attn_fwd_qkvpacked(*forward, engine="cudnn")
        for dbias in (half(1, 2, 9, 9), misaligned(1, 2, 9, 9)):
            backward = (qkv, out, out, None, None, pack, None, dbias, *words)
            fusedattn.nvte_fused_attn_bwd_qkvpacked(*backward, engine="cudnn")
            written = recorder.runs[-1][1][Role.DBIAS]
            assert written.data_ptr() % 16 == 0
            assert (written.data_ptr() == dbias.data_ptr()) == (dbias.data_ptr() % 16 == 0)
            assert torch.equal(written.view(torch.int16), dbias.view(torch.int16))


def test_outputs_of_odd_strides_are_written_back() -> None:
    qkv = half(20, 3, 2, 8)
    cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32)
    wide = torch.full((20, 2, 9), 5.0).half()
    words = (None, cu_seqlens, None, 9, True, 0.5, 0.0, "t3hd", "no_bias", "padding")
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        plain, _ = fusedattn.nvte_fused_attn_fwd_qkvpacked(qkv, None, None, None, *words, engine="cudnn")
        out, pack = fusedattn.nvte_fused_attn_fwd_qkvpacked(qkv, None, None, wide[..., 1:], *words, engine="cudnn")
        assert fusedattn.counters()["copies"] == 1
        assert torch.equal(out, plain)
        assert (wide[..., 0] == 5).all()
        assert not out[18:].any()
        target = torch.full((20, 3, 2, 9), 5.0).half()
        words = (None, None, pack, target[..., :8], None, cu_seqlens, 9, 0.5, 0.0, "t3hd", "no_bias", "padding")
        fusedattn.nvte_fused_attn_bwd_qkvpacked(qkv, plain, plain, *words, engine="cudnn")
        assert (target[..., 8] == 5).all()
        assert not target[18:, ..., :8].any()
        assert target[:18, ..., :8].any()
