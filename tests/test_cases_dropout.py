"""Dropout cases of public bug reports."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedattn import SpecError, fused_attention, nvte_fused_attn_fwd_qkvpacked

RNG_STATE = torch.tensor([11, 13])
OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


def qkv_of(rows: int = 5) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, rows, 2, 8, requires_grad=True) for _ in range(3))


# D1


@pytest.mark.parametrize("rng_state", [None, RNG_STATE], ids=["no state", "state"])
def test_d1_evaluation_drops_nothing(rng_state: Tensor | None) -> None:
    q, k, v = qkv_of()
    want = fused_attention(q, k, v)
    before = torch.get_rng_state()
    for _ in range(2):
        assert torch.equal(fused_attention(q, k, v, dropout=0.5, is_training=False, rng_state=rng_state), want)
    assert torch.equal(torch.get_rng_state(), before)


def test_d1_nvte_inference_leaves_no_state() -> None:
    qkv = torch.randn(8, 3, 2, 8)
    words = ("t3hd", "no_bias", "padding")
    before = torch.get_rng_state()
    eval_, plain = (
        nvte_fused_attn_fwd_qkvpacked(qkv, None, None, None, None, OFFSETS, None, 5, training, 0.3, p, *words)
        for training, p in ((False, 0.5), (True, 0.0))
    )
    assert torch.equal(eval_.O, plain.O)
    assert len(eval_.Aux_Output_Tensors) == 0
    assert plain.Aux_Output_Tensors["rng_state"].tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), before)


# D2


@pytest.mark.parametrize("through_checkpoint", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_d2_forward_and_backward_drop_the_same(with_bias: bool, through_checkpoint: bool) -> None:
    """With V the identity, out is the dropped softmax itself."""
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    k = torch.randn(1, 8, 2, 8, requires_grad=True)
    v = torch.eye(8).view(1, 8, 1, 8).repeat(1, 1, 2, 1).requires_grad_()
    bias = torch.randn(1, 2, 1, 8, requires_grad=True) if with_bias else None
    leaves = (q, k, v, *(() if bias is None else (bias,)))
    g = torch.randn(1, 6, 2, 8)

    def attend(*tensors: Tensor) -> Tensor:
        return fused_attention(*tensors, dropout=0.3)

    torch.manual_seed(3)
    out = checkpoint(attend, *leaves, use_reentrant=False) if through_checkpoint else attend(*leaves)
    got = torch.autograd.grad(out, leaves, g)
    dropped = out.detach()
    torch.testing.assert_close(got[2], torch.einsum("bqhk,bqhd->bkhd", dropped, g), rtol=0, atol=1e-5)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    scores = torch.einsum("bqhd,bkhd->bqhk", *wide[:2]) * 8**-0.5
    if bias is not None:
        scores = scores + wide[3].permute(0, 2, 1, 3)
    kept = scores.softmax(-1) * (dropped != 0) / 0.7
    assert 0 < (dropped == 0).sum() < dropped.numel()
    torch.testing.assert_close(dropped.double(), kept.detach(), rtol=0, atol=1e-6)
    want = torch.autograd.grad(torch.einsum("bqhk,bkhd->bqhd", kept, wide[2]), wide, g.double())
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5)


# D3


def test_d3_each_call_draws_and_reseeding_draws_again() -> None:
    q, k, v = qkv_of(16)
    torch.manual_seed(0)
    first, second = (fused_attention(q, k, v, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    for want in (first, second):
        assert torch.equal(fused_attention(q, k, v, dropout=0.5), want)


def test_d3_no_dropout_draws_nothing() -> None:
    leaves = qkv_of()
    before = torch.get_rng_state()
    for _ in range(2):
        fused_attention(*leaves).sum().backward()
        fused_attention(*leaves, dropout=0.5, rng_state=RNG_STATE).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_d3_an_explicit_state_repeats_and_is_not_written() -> None:
    q, k, v = qkv_of()
    state = RNG_STATE.clone()
    first, second = (fused_attention(q, k, v, dropout=0.5, rng_state=state) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, RNG_STATE)


def test_d3_nvte_notes_the_state_it_drew() -> None:
    qkv = torch.randn(8, 3, 2, 8)
    words = (5, True, 0.3, 0.5, "t3hd", "no_bias", "padding")

    def call(state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, pack = nvte_fused_attn_fwd_qkvpacked(qkv, None, None, None, None, OFFSETS, state, *words)
        return out, pack["rng_state"]

    (first, drawn), (second, other) = call(None), call(None)
    assert not torch.equal(drawn, other)
    assert not torch.equal(first, second)
    again, noted = call(drawn)
    assert torch.equal(again, first)
    assert torch.equal(noted, drawn)
    assert noted.data_ptr() != drawn.data_ptr()


# D6


@pytest.mark.parametrize(
    "p", [-1, -1e-9, 1.5, math.nan, 1.0, 1, math.inf, "0.1", True, None, torch.tensor(0.1)], ids=str
)
@pytest.mark.parametrize("is_training", [True, False])
def test_d6_no_probability(p: object, is_training: bool) -> None:
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(SpecError, match=r"argument 'dropout': expected a probability p with 0 <= p < 1, got "):
        fused_attention(x, x, x, dropout=p, is_training=is_training)
    with pytest.raises(SpecError, match="argument 'dropout': "):
        nvte_fused_attn_fwd_qkvpacked(
            torch.zeros(8, 3, 1, 8), None, None, None, None, OFFSETS, None, 5, is_training, 1.0, p, "t3hd", "no_bias",
            "padding",
        )  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0, 1e-9, 0.999999])
def test_d6_probabilities(p: float) -> None:
    out = fused_attention(*qkv_of(), dropout=p, rng_state=RNG_STATE)
    assert out.isfinite().all()
