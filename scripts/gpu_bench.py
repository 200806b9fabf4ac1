"""Times of forward and of forward and backward on a GPU, next to torch's scaled_dot_product_attention."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedattn

TOKENS, HEADS = 16384, 16
WARMUP, REPEATS = 5, 30
# More than the last-level cache of any GPU.
FLUSH_BYTES = 256 << 20
RIVALS = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
Call = Callable[[], object]


class Shape(NamedTuple):
    """Sequences of one length, ``TOKENS`` in all."""

    length: int
    head_dim: int
    causal: bool

    @property
    def batch(self) -> int:
        return TOKENS // self.length

    def flops(self, backward: bool) -> float:
        """Of the products; the backward has five to the forward's two. A causal mask halves them."""
        forward = 4.0 * TOKENS * self.length * HEADS * self.head_dim * (0.5 if self.causal else 1.0)
        return forward * 3.5 if backward else forward


SHAPES = [
    Shape(length, head_dim, causal)
    for length in (2048, 512, 8192)
    for head_dim in (64, 128)
    for causal in (False, True)
]


def sides(shape: Shape, device: torch.device) -> Iterator[tuple[str, Call, Call]]:
    """Name, forward, and forward and backward of each that is timed; all of them start from tensors of their own."""
    data = torch.randn(3, shape.batch, shape.length, HEADS, shape.head_dim, dtype=torch.bfloat16, device=device)
    scale = shape.head_dim**-0.5
    mask = "causal" if shape.causal else "no_mask"

    def differentiated(forward: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> tuple[Call, Call]:
        dout = torch.randn_like(forward(*leaves))
        wanted = tuple(x.detach().requires_grad_() for x in leaves)
        return lambda: forward(*leaves), lambda: torch.autograd.grad(forward(*wanted), wanted, dout)

    q, k, v = data.unbind(0)
    yield (
        "fused_attention",
        *differentiated(
            lambda q, k, v: fusedattn.fused_attention(q, k, v, attn_mask_type=mask, attn_scale=scale, engine="cudnn"),
            (q, k, v),
        ),
    )
    yield "nvte_qkvpacked", *nvte(data, shape, mask, scale)
    views = tuple(x.transpose(1, 2) for x in (q, k, v))

    for name, backend in RIVALS.items():

        def rival(*tensors: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=shape.causal, scale=scale)

        try:
            yield name, *differentiated(rival, views)
        # A backend that this GPU or this torch does not have.
        except RuntimeError as error:
            print(f"gpu_check: {name}: {' '.join(str(error).split())[:200]}", file=sys.stderr)


def nvte(data: Tensor, shape: Shape, mask: str, scale: float) -> tuple[Call, Call]:
    qkv = data.flatten(1, 2).transpose(0, 1).contiguous()
    cu = torch.arange(0, TOKENS + 1, shape.length, dtype=torch.int32, device=data.device)
    words = (scale, 0.0, "t3hd", "no_bias", mask)

    def forward() -> Any:
        arguments = (qkv, None, None, None, None, cu, None, shape.length, True, *words)
        return fusedattn.nvte_fused_attn_fwd_qkvpacked(*arguments, engine="cudnn")

    dout = torch.randn_like(forward()[0])

    def both() -> object:
        out, pack = forward()
        arguments = (qkv, out, dout, None, None, pack, None, None, cu, shape.length, *words)
        return fusedattn.nvte_fused_attn_bwd_qkvpacked(*arguments, engine="cudnn")

    return forward, both


def times_ms(calls: list[Call], deadline: float, device: torch.device) -> list[list[float]]:
    """Time calls in turn by events of the GPU, with its cache flushed before each; fewer times near the deadline."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    found: list[list[float]] = [[] for _ in calls]
    for repeat in range(-WARMUP, REPEATS):
        if repeat >= 3 and time.monotonic() > deadline:
            break
        for call, its in zip(calls, found, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            call()
            end.record()
            end.synchronize()
            if repeat >= 0:
                its.append(begin.elapsed_time(end))
    return found


def rows(shape: Shape, direction: str, timed: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row for each side: its median, its spread, and our ratio to each rival (of single repeats, in the median)."""
    found = []
    for name, its in timed.items():
        median = statistics.median(its)
        row: dict[str, Any] = {
            "side": name,
            "direction": direction,
            "dtype": "bfloat16",
            "batch": shape.batch,
            "length": shape.length,
            "heads": HEADS,
            "head_dim": shape.head_dim,
            "causal": shape.causal,
            "repeats": len(its),
            "median_ms": median,
            "quartiles_ms": statistics.quantiles(its, n=4, method="inclusive")[::2]
            if len(its) > 1
            else [median, median],
            "tflops": shape.flops(direction != "forward") / median / 1e9,
        }
        if name not in RIVALS:
            row["ratio"] = {
                rival: statistics.median(a / b for a, b in zip(its, timed[rival], strict=True))
                for rival in RIVALS
                if rival in timed
            }
        found.append(row)
    return found


def bench(deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """Time all shapes, as long as there is time.

    Args:
        deadline: On the clock of ``time.monotonic``.

    Returns:
        Rows, and whether all shapes were timed.
    """
    found: list[dict[str, Any]] = []
    device = torch.device("cuda", 0)
    for shape in SHAPES:
        if time.monotonic() > deadline:
            return found, False
        named = list(sides(shape, device))
        for number, direction in enumerate(("forward", "forward_backward"), start=1):
            measured = times_ms([side[number] for side in named], deadline, device)
            found += rows(shape, direction, dict(zip((side[0] for side in named), measured, strict=True)))
    return found, time.monotonic() <= deadline
