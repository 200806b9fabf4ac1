"""Where torch's CPU flash operators are wrong: every wrong result is recognised, and right ones are used."""

import math

import pytest
import torch
from torch import Tensor

from fusedattn.engines import torch_flash
from fusedattn.engines.torch_blocks import Group, forward_group
from fusedattn.engines.torch_flash import flash_backward, flash_forward

NAN, INF = math.nan, math.inf


def group(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None, scale: float = 0.3) -> Group:
    return Group(
        q, k, v, bias, pre_scale=False, causal=causal, attn_scale=scale, dropout=0.0, pattern=None, batches=[0],
        lengths_q=None, lengths_kv=None, exact=True,
    )  # fmt: skip


def exact(g: Group) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(g.q), g.q.new_empty(g.q.shape[:3], dtype=torch.float32)
    forward_group(g, out, lse)
    return out, lse


def operands(rows: int, keys: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.randn(1, 1, n, dim, dtype=dtype) for name, n in (("q", rows), ("k", keys), ("v", keys))}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 4), (17, 33, 8), (70, 129, 16), (33, 1100, 4)], ids=str)
def test_what_it_returns_is_right(sizes: tuple[int, int, int], where: str, value: float, causal: bool) -> None:
    for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        tensors = operands(*sizes, dtype)
        tensors[where][0, 0, sizes[0] // 2, -1] = value
        g = group(**tensors, causal=causal)
        got = flash_forward(g)
        if got is None:
            continue
        out, lse = exact(g)
        assert torch.allclose(got[0].float(), out.float(), rtol=rounding, atol=rounding, equal_nan=True)
        assert torch.allclose(got[1], lse, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_operator_alone_is_wrong_on_these() -> None:
    # Were it right, the guard could go.
    tensors = operands(3, 3, 4, torch.float32)
    tensors["q"][0, 0, 1] = NAN
    out, lse = torch_flash._flash_forward(*tensors.values(), 0.0, False)
    assert out[0, 0, 1].tolist() == [0.0] * 4
    assert lse[0, 0, 1] == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"scale": NAN},
        {"bias": torch.full((1, 1, 3, 3), -INF)},
        {"bias": torch.tensor([[0.0] * 3, [-INF] * 3, [0.0] * 3]).view(1, 1, 3, 3)},
        {"bias": torch.full((1, 1, 1, 3), NAN)},
    ],
    ids=["NaN scale", "all rows -inf", "one row -inf", "NaN bias"],
)
def test_refuses_wrong_results(change: dict[str, object]) -> None:
    assert flash_forward(group(**operands(3, 3, 4, torch.float32), causal=False, **change)) is None


def test_takes_ordinary_problems() -> None:
    tensors = operands(5, 7, 4, torch.float32)
    assert flash_forward(group(**tensors, causal=True)) is not None
    # A first causal row may well have lse 0.
    assert flash_forward(group(tensors["q"] * 0, tensors["k"], tensors["v"], causal=True)) is not None


def test_backward_is_for_bfloat16() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        g = group(**operands(5, 7, 4, dtype), causal=False)
        forward = flash_forward(g)
        assert forward is not None
        out, lse = forward[0].to(dtype), forward[1]
        gradients = flash_backward(g, torch.ones_like(out), out, lse)
        assert (gradients is not None) == (dtype == torch.bfloat16)


def test_backward_refuses_nan() -> None:
    g = group(**operands(5, 5, 4, torch.bfloat16), causal=True)
    forward = flash_forward(g)
    assert forward is not None
    out, lse = forward[0].bfloat16(), forward[1]
    dout = torch.ones_like(out)
    dout[0, 0, 2, 0] = NAN
    assert flash_backward(g, dout, out, lse) is None
    lse[0, 0, 1] = NAN
    assert flash_backward(g, torch.ones_like(out), out, lse) is None
