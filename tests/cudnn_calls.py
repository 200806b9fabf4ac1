"""Headline problems as the engine meets them, and the keys of the graphs that it would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cudnn_recorder import Recorder

import fusedattn
from fusedattn import runtime
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.enums import Direction
from fusedattn.target import TARGETS


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def dense(d: int = 64, s: int = 256, b: int = 2, h: int = 4, **options: Any) -> dict[str, Any]:
    return {"operands": [leaf(b, s, h, d) for _ in range(3)], "function": fusedattn.fused_attention, **options}


def views() -> dict[str, Any]:
    """Operands cut from wider tensors, so that no two have the same strides."""
    q, k, v = leaf(2, 256, 4, 64), leaf(2, 384, 6, 3, 64)[:, :, :4, 0], leaf(2, 384, 5, 64)[:, :, :4]
    return {"operands": [q, k, v], "function": fusedattn.fused_attention}


def packed(d: int = 64, h: int = 4, **options: Any) -> dict[str, Any]:
    cu_seqlens = torch.tensor([0, 100, 200, 420], dtype=torch.int32)
    return {
        "operands": [leaf(420, 3, h, d)],
        "function": fusedattn.fused_attention_qkvpacked,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": 220,
        **options,
    }


RNG = torch.tensor([1, 2])
HEADLINES: dict[str, Callable[[], dict[str, Any]]] = {
    "d64": dense,
    "views of wider tensors": views,
    "d128 causal": lambda: dense(d=128, attn_mask_type="causal"),
    "t3hd d128 causal": lambda: packed(d=128, attn_mask_type="causal"),
    "bias": lambda: dense(bias=leaf(1, 4, 256, 256)),
    "frozen float32 bias": lambda: dense(bias=torch.zeros(1, 4, 256, 256)),
    "t3hd dropout": lambda: packed(dropout=0.1, rng_state=RNG),
}


def keys_of(target: str, call: dict[str, Any]) -> dict[Direction, SdpaKey]:
    """The graphs of a forward and a backward."""
    call = dict(call)
    recorder = Recorder()
    with runtime.pretend(TARGETS[target], recorder):
        out = call.pop("function")(*call.pop("operands"), engine="cudnn", **call)
        out.backward(torch.ones_like(out))
    return {key.direction: key for key in recorder.run_keys}
