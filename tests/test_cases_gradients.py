"""Gradient cases of public bug reports."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedattn import SKIP, fused_attention, nvte_fused_attn_bwd_qkvpacked, nvte_fused_attn_fwd_qkvpacked
from fusedattn.devices import CPU_ENGINES
from fusedattn.engines.base import Gradients, Problem
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected


class Recorder(TorchEngine):
    """Notes which gradients are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[bool, ...]] = []

    def backward(
        self, problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        self.asked.append(tuple(x is not None for x in gradients))
        super().backward(problem, dout, dlse, out, lse, gradients)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    engine = Recorder()
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, engine)
    return engine


def column(*values: float) -> Tensor:
    """[1, S, 1, 1]: one sequence, one head, D = 1."""
    return torch.tensor(values).view(1, -1, 1, 1)


def qkv_of(rows: int = 5) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, rows, 2, 8, requires_grad=True) for _ in range(3))


def grads(out: Tensor, leaves: tuple[Tensor, ...], dout: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)


# G2


@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_g2_a_frozen_bias_costs_nothing(recorder: Recorder, bias_type: str) -> None:
    leaves, bias = qkv_of(), torch.randn(1, 1, 5, 5)
    frozen = grads(fused_attention(*leaves, bias, attn_bias_type=bias_type), leaves)
    assert recorder.asked == [(True, True, True, False)]
    learned = bias.clone().requires_grad_()
    both = grads(fused_attention(*leaves, learned, attn_bias_type=bias_type), (*leaves, learned))
    assert recorder.asked[1:] == [(True, True, True, True)]
    torch.testing.assert_close(frozen, both[:3])
    assert bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_g2_frozen_biases_of_any_size(bias_type: str, mask_type: str, dtype: torch.dtype) -> None:
    """Small, far from 0 on either side, with dead pairs and a dead row."""
    q, k, v, dout = torch.randn(4, 2, 7, 2, 8).to(dtype)
    for shift, dead in ((0.0, False), (-500.0, False), (500.0, False), (0.0, True), (-500.0, True)):
        bias = torch.randn(2, 1, 7, 7) + shift
        if dead:
            bias[0, 0, 3], bias[:, :, ::2, 2] = -torch.inf, -torch.inf
        case = Case((q, k, v), "bshd_bshd_bshd", bias, bias_type, mask_type)
        want, measured = (f(case, dout) for f in (expected, eager))
        leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
        out = fused_attention(*leaves, bias, attn_bias_type=bias_type, attn_mask_type=mask_type)
        got = dict(zip(("dq", "dk", "dv"), grads(out, leaves, dout), strict=True))
        assert_within_budget(got, *({x: side[x] for x in got} for side in (want, measured)), dtype)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_g2_only_what_is_asked_for(recorder: Recorder, name: str) -> None:
    tensors = {**dict(zip("qkv", (x.detach() for x in qkv_of()), strict=True)), "bias": torch.randn(1, 2, 1, 5)}
    for x in tensors.values():
        x.requires_grad_()
    want = dict(zip(tensors, grads(fused_attention(*tensors.values()), tuple(tensors.values())), strict=True))
    alone = {x: y if x == name else y.detach() for x, y in tensors.items()}
    [got] = grads(fused_attention(*alone.values()), (alone[name],))
    torch.testing.assert_close(got, want[name])
    assert recorder.asked[1:] == [tuple(x == name for x in tensors)]


def test_g2_nvte_skips(recorder: Recorder) -> None:
    qkv, dout, bias = torch.randn(7, 3, 2, 8), torch.randn(7, 2, 8), torch.randn(1, 2, 7, 7)
    offsets = torch.tensor([0, 7], dtype=torch.int32)
    words = (7, 0.3, 0.0, "t3hd", "post_scale_bias", "padding")
    out, pack = nvte_fused_attn_fwd_qkvpacked(qkv, bias, None, None, None, offsets, None, 7, True, *words[1:])
    results = [
        nvte_fused_attn_bwd_qkvpacked(qkv, out, dout, None, None, pack, *skips, offsets, *words)
        for skips in ((None, None), (SKIP, None), (None, SKIP))
    ]
    assert recorder.asked == [(True,) * 4, (False, False, False, True), (True, True, True, False)]
    assert results[1].dQKV is None
    assert results[2].dBias is None
    torch.testing.assert_close(results[1].dBias, results[0].dBias)
    torch.testing.assert_close(results[2].dQKV, results[0].dQKV)


# G3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "want"), [(2, [0.25, -0.25] * 2), (1, [0.5, -0.5])], ids=["per batch", "summed"])
def test_g3_bias_gradient_of_a_batch(batch: int, want: list[float], dtype: torch.dtype) -> None:
    v = column(1.0, 0.0).expand(2, 2, 1, 1).to(dtype)
    q, bias = torch.zeros(2, 1, 1, 1, dtype=dtype), torch.zeros(batch, 1, 1, 2, requires_grad=True)
    fused_attention(q, 0 * v, v, bias).sum().backward()
    torch.testing.assert_close(bias.grad.flatten(), torch.tensor(want))


def test_g3_many_terms_are_summed_in_float32() -> None:
    """1,024 equal terms of 2**-8: one by one they would stall in bfloat16 at 1."""
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 8, 1).to(torch.bfloat16)
    q, bias = torch.zeros(1, 128, 8, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    bias.requires_grad_()
    (fused_attention(q, 0 * v, v, bias).sum() * 2**-6).backward()
    assert bias.grad.flatten().tolist() == [4.0, -4.0]


def test_g3_sequences_of_many_lengths_are_summed_in_float32() -> None:
    """Rows 1 to 32 of 0.25 each: sums that bfloat16 would round on the way, and not at the end."""
    offsets_q, offsets_kv = (
        torch.cat([torch.zeros(1), x.cumsum(0)]).int() for x in (torch.arange(1, 33), torch.full((32,), 2))
    )
    v = torch.tensor([1.0, 0.0]).repeat(32).view(64, 1, 1).to(torch.bfloat16)
    q, bias = torch.zeros(528, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    bias.requires_grad_()
    lengths = {"cu_seqlens_q": offsets_q, "cu_seqlens_kv": offsets_kv}
    fused_attention(q, 0 * v, v, bias, qkv_layout="thd_thd_thd", **lengths).sum().backward()
    assert bias.grad.flatten().tolist() == [132.0, -132.0]


# G5


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_g5_loss_on_lse(with_bias: bool) -> None:
    q, k, v = (x.requires_grad_() for x in (column(0.0), column(2.0, 0.0), column(1.0, 1.0)))
    bias = torch.zeros(1, 1, 1, 2, requires_grad=True) if with_bias else None
    _, lse = fused_attention(q, k, v, bias, attn_scale=1.0, return_lse=True)
    lse.sum().backward()
    for x, want in ((q, [1.0]), (k, [0.0, 0.0]), (v, [0.0, 0.0]), (bias, [0.5, 0.5])):
        if x is not None:
            torch.testing.assert_close(x.grad.flatten(), torch.tensor(want))


def test_g5_lse_alone_equals_logsumexp() -> None:
    leaves = qkv_of()
    _, lse = fused_attention(*leaves, return_lse=True, dropout=0.5)
    got = grads(lse, leaves[:2])
    scores = torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) * 8**-0.5
    torch.testing.assert_close(got, grads(scores.logsumexp(-1), leaves[:2]))


# G7


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_g7_checkpoint(dropout: float, reentrant: bool) -> None:
    leaves, gate = qkv_of(), torch.randn(2, 5, 2, 8, requires_grad=True)

    def block(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return fused_attention(q, k, v, dropout=dropout) * gate.sigmoid()

    torch.manual_seed(7)
    want = grads(block(*leaves, gate).square(), (*leaves, gate))
    torch.manual_seed(7)
    for x in (*leaves, gate):
        x.grad = None
    checkpoint(block, *leaves, gate, use_reentrant=reentrant).square().sum().backward()
    for x, gradient in zip((*leaves, gate), want, strict=True):
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("grad", ["bias", "no bias"])
def test_g7_output_changed_in_place(grad: str) -> None:
    leaves = qkv_of()
    bias = torch.randn(1, 1, 5, 5, requires_grad=True) if grad == "bias" else None
    leaves += () if bias is None else (bias,)
    want = grads(2 * fused_attention(*leaves), leaves)
    out = fused_attention(*leaves)
    out = out.mul_(2)
    try:
        got = grads(out, leaves)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    else:
        torch.testing.assert_close(got, want)


def test_g7_twice_with_retained_graph() -> None:
    leaves = qkv_of()
    out = fused_attention(*leaves, torch.zeros(1, 1, 1, 5), dropout=0.3)
    first, second = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# G8

DOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
    "d outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "last dim stride 2": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "all strides 0": lambda x: torch.ones(()).to(x).expand_as(x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
@pytest.mark.parametrize("make", DOUTS.values(), ids=DOUTS)
def test_g8_strides_of_the_output_gradient(
    make: Callable[[Tensor], Tensor], mask_type: str, dtype: torch.dtype
) -> None:
    leaves = tuple(x.detach().to(dtype).requires_grad_() for x in qkv_of(7))
    out = fused_attention(*leaves, attn_mask_type=mask_type)
    dout = make(torch.randn_like(out))
    before = dout.clone()
    strided, dense = (torch.autograd.grad(out, leaves, x, retain_graph=True) for x in (dout, dout.contiguous()))
    torch.testing.assert_close(strided, dense, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(dout, before)


def test_g8_through_sum_and_transpose_of_the_output() -> None:
    leaves = qkv_of(7)
    got = torch.autograd.grad(fused_attention(*leaves).transpose(1, 2).reshape(2, -1).sum(), leaves)
    torch.testing.assert_close(got, grads(fused_attention(*leaves), leaves))


def test_g8_no_gradient_of_one_result() -> None:
    """lse or out unused: its gradient is none, not NaN."""
    leaves = qkv_of()
    out, lse = fused_attention(*leaves, return_lse=True)
    both = torch.autograd.grad(out.sum() + 0 * lse.sum(), leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaves, retain_graph=True), both)
    *of_lse, dv = torch.autograd.grad(lse.sum(), leaves)
    assert dv.eq(0).all()
    assert all(x.ne(0).any() for x in of_lse)
