"""The torch engine as a whole: what it writes, how it groups, how much memory it takes."""

import math

import pytest
import torch
from torch import Tensor

import fusedattn
from fusedattn.engines import torch_blocks, torch_call, torch_runs
from fusedattn.engines.torch_sequences import runs
from fusedattn.lengths import Lengths, Side


def lengths(*sizes: int) -> Lengths:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    side = Side(None, tuple(offsets), max(sizes), offsets[-1])
    return Lengths(len(sizes), side, side)


def test_neighbours_of_equal_length_are_one_run() -> None:
    found = [(run.batches, run.length_q) for run in runs(lengths(300, 300, 0, 500, 300))]
    assert found == [((0, 1), 300), ((3,), 500), ((4,), 300), ((2,), 0)]


def test_short_sequences_of_equal_length_are_one_run_wherever_they_lie() -> None:
    found = [(run.batches, run.length_q) for run in runs(lengths(3, 5, 3, 0, 3, 0))]
    assert found == [((0, 2, 4), 3), ((1,), 5), ((3, 5), 0)]


def test_equal_lengths_are_one_call_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = torch_runs.flash_forward
    monkeypatch.setattr(torch_runs, "flash_forward", lambda group: sizes.append(group.q.shape) or real(group))
    cu_seqlens = torch.tensor([0, 4, 8, 12, 17])
    fusedattn.fused_attention_qkvpacked(torch.randn(17, 3, 2, 4), cu_seqlens=cu_seqlens)
    assert sizes == [(3, 2, 4, 4), (1, 2, 5, 4)]


def test_causality_and_padding_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = torch_blocks.masked_scores

    def counting(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        seen.append(q.shape[2] * k.shape[2])
        return real(q, k, *rest)

    monkeypatch.setattr(torch_blocks, "masked_scores", counting)
    qkv, cu_seqlens = torch.randn(600, 3, 1, 4), torch.tensor([0, 512])
    options = {"cu_seqlens": cu_seqlens, "max_seqlen": 2048, "dropout": 0.5, "rng_state": torch.tensor([1, 2])}
    fusedattn.fused_attention_qkvpacked(qkv, attn_mask_type="causal", **options)
    blocks = 512 // torch_blocks.CAUSAL_ROWS
    assert sum(seen) == torch_blocks.CAUSAL_ROWS**2 * blocks * (blocks + 1) // 2


@pytest.mark.parametrize("elements", [64 * 5, 2**10, 2**19], ids=str)
@pytest.mark.parametrize("steps", [16, 2**21], ids=str)
def test_results_do_not_depend_on_how_it_is_cut(steps: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = torch.randn(300, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 1, 200, 200, dtype=torch.float64, requires_grad=True)
    options = {"cu_seqlens": torch.tensor([0, 200, 300]), "dropout": 0.3, "rng_state": torch.tensor([7, 0])}

    def results() -> tuple[Tensor, ...]:
        out = fusedattn.fused_attention_qkvpacked(qkv, bias, attn_mask_type="causal", **options)
        assert isinstance(out, Tensor)
        plain = fusedattn.fused_attention_qkvpacked(qkv, bias.detach(), cu_seqlens=options["cu_seqlens"])
        assert isinstance(plain, Tensor)
        return out, *torch.autograd.grad(out.sin().sum(), (qkv, bias)), plain, *torch.autograd.grad(plain.sum(), qkv)

    want = results()
    monkeypatch.setattr(torch_blocks, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(torch_call, "STEP_ELEMENTS", steps)
    for got, whole in zip(results(), want, strict=True):
        assert torch.allclose(got, whole, rtol=1e-12, atol=1e-12)


def test_only_uncovered_rows_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **options: _nan_empty(self, *size, **options))
    qkv = torch.randn(12, 3, 2, 4)
    out, lse = fusedattn.fused_attention_qkvpacked(qkv, cu_seqlens=torch.tensor([0, 3, 3, 9]), return_lse=True)
    assert out.isfinite().all()
    assert not out[9:].any()
    assert lse[9:].eq(-math.inf).all()
    assert lse[:9].isfinite().all()


def _nan_empty(tensor: Tensor, *size: int, **options: torch.dtype) -> Tensor:
    return torch.full(*size, math.nan, dtype=options.get("dtype", tensor.dtype))


def test_unneeded_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    real = torch_blocks.live_matmul
    monkeypatch.setattr(torch_blocks, "live_matmul", lambda *args: counted.append(1) or real(*args))
    q, k, v = (torch.randn(1, 5, 2, 4, requires_grad=name == "v") for name in "qkv")
    bias = torch.randn(1, 2, 5, 5)
    out = fusedattn.fused_attention(q, k, v, bias)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert len(counted) == 1
    assert (q.grad, k.grad, bias.grad) == (None, None, None)


class TestOverflow:
    """Numbers that are finite, and overflow in a product where a bias of -inf rules the pair out."""

    BIAS = torch.tensor([0.0, 0.0, -math.inf]).expand(1, 1, 3, 3)

    @pytest.mark.parametrize("dropout", [0.0, 1e-6])
    def test_scores(self, dropout: float) -> None:
        q = torch.full((1, 3, 1, 4), 1e20)
        k = q.clone()
        k[:, :2] = 1e-20
        options = {"dropout": dropout, "rng_state": torch.tensor([0, 0]), "return_lse": True}
        out, lse = fusedattn.fused_attention(q, k, torch.ones_like(q), self.BIAS, **options)
        assert torch.allclose(out, torch.ones_like(q))
        assert torch.allclose(lse, torch.full((1, 1, 3), 2 + math.log(2)))

    @pytest.mark.parametrize("bias_gradient", [False, True])
    def test_gradients(self, bias_gradient: bool) -> None:
        q, k, v = (torch.randn(1, 3, 1, 4, requires_grad=True) for _ in range(3))
        large = v.detach().clone()
        large[:, 2] = 1e30
        bias = self.BIAS.clone().requires_grad_(bias_gradient)
        leaves = (q, k, bias) if bias_gradient else (q, k)
        dout = torch.full((1, 3, 1, 4), 1e10)
        got = torch.autograd.grad(fusedattn.fused_attention(q, k, large, bias), leaves, dout)
        want = torch.autograd.grad(fusedattn.fused_attention(q, k, v, bias), leaves, dout)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
            assert one.any()

    def test_nan_scale_leaves_a_row_without_keys_alone(self) -> None:
        q = torch.randn(1, 3, 1, 4, requires_grad=True)
        bias = torch.zeros(1, 1, 3, 3)
        bias[..., 2, :] = -math.inf
        out, lse = fusedattn.fused_attention(q, q, q, bias, attn_scale=math.nan, return_lse=True)
        assert not out[0, 2].any()
        assert lse[0, 0, 2] == -math.inf
        assert out[0, :2].isnan().all()

    @pytest.mark.parametrize("dropout", [0.0, 1e-6])
    def test_scale_comes_after_the_product(self, dropout: float) -> None:
        q, k, v = (torch.full((1, 1, 1, 1), x, requires_grad=True) for x in (1e30, 1e-30, 1.0))
        options = {"attn_scale": 1e10, "dropout": dropout, "rng_state": torch.tensor([0, 0])}
        out, lse = fusedattn.fused_attention(q, k, v, return_lse=True, **options)
        assert lse.item() == 1e10
        assert [x.item() for x in torch.autograd.grad(out.sum(), (q, k, v))] == [0.0, 0.0, pytest.approx(1.0)]


def test_a_bias_is_copied_only_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = torch_runs.flash_forward
    monkeypatch.setattr(torch_runs, "flash_forward", lambda group: sizes.append(group.bias.numel()) or real(group))
    cu_seqlens = torch.tensor([0, 3, 153, 156, 157, 160])
    fusedattn.fused_attention_qkvpacked(torch.randn(160, 3, 1, 4), torch.randn(5, 1, 150, 150), cu_seqlens=cu_seqlens)
    assert sorted(sizes) == [1, 3 * 9, 150**2]
