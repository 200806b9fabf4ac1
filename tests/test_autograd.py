"""Autograd, torch.func and torch.compile: right, or refused in words, never zero in silence."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusedattn

CU_SEQLENS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
SECOND = "second derivatives are not implemented"
FORWARD = "forward-mode derivatives are not implemented"


def packed(qkv: Tensor, **options: object) -> Tensor:
    out = fusedattn.fused_attention_qkvpacked(qkv, cu_seqlens=CU_SEQLENS, attn_mask_type="causal", **options)
    assert isinstance(out, Tensor)
    return out


def loss(qkv: Tensor) -> Tensor:
    return (packed(qkv, max_seqlen=5) ** 2).sum()


@pytest.fixture
def qkv() -> Tensor:
    return torch.randn(11, 3, 2, 4, dtype=torch.float64, requires_grad=True)


def gradient(qkv: Tensor) -> Tensor:
    return torch.autograd.grad(loss(qkv), qkv)[0]


def test_func_grad_and_vmap(qkv: Tensor) -> None:
    x = qkv.detach()
    assert torch.equal(torch.func.grad(loss)(x), gradient(qkv))
    batch = torch.stack([x, 2 * x])
    want = torch.stack([packed(sample) for sample in batch])
    assert torch.equal(torch.func.vmap(packed)(batch), want)
    assert torch.equal(torch.func.vmap(packed, in_dims=1)(batch.transpose(0, 1)), want)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(batch)[0], gradient(qkv))


def test_func_jacobian_matches_autograd(qkv: Tensor) -> None:
    x = qkv.detach()[:4, :, :1, :2].contiguous()

    def one(qkv: Tensor) -> Tensor:
        out = fusedattn.fused_attention_qkvpacked(qkv, cu_seqlens=torch.tensor([0, 4]), return_lse=True)
        return out[0].sum() + out[1].sum()

    want = torch.autograd.functional.jacobian(one, x)
    assert torch.allclose(torch.func.jacrev(one)(x), want, rtol=1e-12)


def test_second_derivatives_are_refused(qkv: Tensor) -> None:
    (first,) = torch.autograd.grad(loss(qkv), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(qkv.detach())


def test_forward_mode_is_refused(qkv: Tensor) -> None:
    x = qkv.detach()
    with pytest.raises(NotImplementedError, match=FORWARD):
        torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD):
        loss(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_redraws_the_same_dropout(qkv: Tensor, reentrant: bool) -> None:
    def block(qkv: Tensor) -> Tensor:
        return torch.sigmoid(packed(qkv, dropout=0.5)) * 2

    torch.manual_seed(3)
    (want,) = torch.autograd.grad(block(qkv).sum(), qkv)
    torch.manual_seed(3)
    checkpoint(block, qkv, use_reentrant=reentrant).sum().backward()
    assert torch.equal(qkv.grad, want)


def test_changed_output_is_noticed(qkv: Tensor) -> None:
    out = packed(qkv)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class TestCompile:
    """``torch.compile``; the graph-capturing backend shows what any other would get."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    def test_no_graph_break_and_no_recompilation(self, qkv: Tensor) -> None:
        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(loss, fullgraph=True, backend=graphs)
        for factor in (1.0, 2.0, 3.0):
            x = (factor * qkv).detach().requires_grad_()
            assert torch.allclose(torch.autograd.grad(compiled(x), x)[0], gradient(x), rtol=1e-12)
        assert graphs.frame_count == 1

    def test_two_lengths_with_dynamic_shapes(self) -> None:
        def block(q: Tensor, bias: Tensor) -> Tensor:
            return fusedattn.fused_attention(q, q, q, bias, attn_mask_type="causal", dropout=0.0) * 2

        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=graphs)
        for rows in (5, 9, 12):
            q, bias = torch.randn(2, rows, 3, 4), torch.randn(1, 3, rows, rows)
            assert torch.equal(compiled(q, bias), block(q, bias))
        assert graphs.frame_count == 1

    def test_dropout(self, qkv: Tensor) -> None:
        compiled = torch.compile(lambda x: packed(x, dropout=0.5), fullgraph=True, backend="aot_eager")
        first, second = compiled(qkv), compiled(qkv)
        assert not torch.equal(first, second)
        first.sum().backward()
        assert qkv.grad is not None

    def test_nvte(self, qkv: Tensor) -> None:
        def both(qkv: Tensor, dO: Tensor) -> tuple[Tensor, Tensor | None]:
            call = (5, 0.5, 0.0, "t3hd", "no_bias", "padding")
            O, pack = fusedattn.nvte_fused_attn_fwd_qkvpacked(  # noqa: E741
                qkv, None, None, None, None, CU_SEQLENS, None, 5, True, *call[1:]
            )
            back = fusedattn.nvte_fused_attn_bwd_qkvpacked
            return O, back(qkv, O, dO, None, None, pack, None, None, CU_SEQLENS, *call).dQKV

        x, dO = qkv.detach(), torch.randn(11, 2, 4, dtype=torch.float64)
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(x, dO), both(x, dO), strict=True):
            assert torch.equal(got, want)

    def test_func_transforms_inside_are_refused_or_right(self, qkv: Tensor) -> None:
        x = qkv.detach()
        assert torch.equal(torch.compile(torch.func.grad(loss), backend="aot_eager")(x), gradient(qkv))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(x)

    def test_bad_input_is_an_error_too(self, qkv: Tensor) -> None:
        def call(x: Tensor, cu_seqlens: Tensor) -> Tensor:
            return fusedattn.fused_attention_qkvpacked(x, cu_seqlens=cu_seqlens)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        with pytest.raises(fusedattn.SpecError, match="cu_seqlens"):
            compiled(qkv, torch.tensor([0, 99]))
