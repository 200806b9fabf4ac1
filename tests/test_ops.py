"""The operators as torch sees them: schemas, fakes, strides, tracing."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedattn
from fusedattn import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout, SpecError

CU_SEQLENS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
T3HD, BSHD = NVTE_QKV_Layout.NVTE_T3HD.value, NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD.value
NO_BIAS, POST_SCALE = NVTE_Bias_Type.NVTE_NO_BIAS.value, NVTE_Bias_Type.NVTE_POST_SCALE_BIAS.value
CAUSAL = NVTE_Mask_Type.NVTE_CAUSAL_MASK.value


def calls() -> dict[str, tuple[object, ...]]:
    q = torch.randn(2, 5, 3, 4)
    rng_state = torch.tensor([1, 2])
    wide = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)[..., ::2]
    bias = torch.randn(1, 3, 1, 5).expand(2, 3, 1, 5)
    packed = ([torch.randn(11, 3, 2, 4)], None, CU_SEQLENS, None)
    return {
        "t3hd causal": (*packed, None, T3HD, NO_BIAS, CAUSAL, None, None, 0.5, 0.0, False, "auto", True),
        "t3hd dropout": (*packed, rng_state, T3HD, NO_BIAS, CAUSAL, 6, 6, 0.5, 0.5, True, "torch", True),
        "bshd strided, expanded bias": (
            [wide, q.bfloat16().transpose(0, 1).contiguous().transpose(0, 1), wide[..., :1].expand_as(wide)],
            bias, None, None, None, BSHD, POST_SCALE, CAUSAL, None, None, 0.5, 0.0, False, "auto", True,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_opcheck(name: str) -> None:
    call = calls()[name]
    torch.library.opcheck(torch.ops.fusedattn.fwd, call)
    out, lse = torch.ops.fusedattn.fwd(*call)
    need = [True] * len(call[0]) + [call[1] is not None]
    torch.library.opcheck(torch.ops.fusedattn.bwd, (torch.ones_like(out), torch.ones_like(lse), out, lse, need, *call))
    need[0] = False
    torch.library.opcheck(torch.ops.fusedattn.bwd, (torch.ones_like(out), None, out, lse, need, *call))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"])
@pytest.mark.parametrize("rows", [1, 33])
def test_fakes_describe_what_eager_returns(layout: str, rows: int, dtype: torch.dtype) -> None:
    shapes = {"bshd": (2, rows, 3, 4), "sbhd": (rows, 2, 3, 4), "bhsd": (2, 3, rows, 4)}
    q = torch.randn(shapes[layout[:4]], dtype=dtype)
    bias = torch.randn(1, 3, 1, rows)

    def attend(q: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out, lse = fusedattn.fused_attention(q, q, q, bias, qkv_layout=layout, return_lse=True)
        return out, lse

    real = attend(q, bias)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = attend(mode.from_tensor(q), mode.from_tensor(bias))
    meta = attend(q.to("meta"), bias.to("meta"))
    for seen in (fake, meta):
        for got, want in zip(seen, real, strict=True):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert {tensor.device.type for tensor in meta} == {"meta"}


def test_inference_mode_and_deepcopied_results() -> None:
    qkv = torch.randn(9, 3, 2, 4)
    plain = fusedattn.fused_attention_qkvpacked(qkv, cu_seqlens=CU_SEQLENS)
    with torch.inference_mode():
        assert torch.equal(fusedattn.fused_attention_qkvpacked(qkv, cu_seqlens=CU_SEQLENS), plain)


def test_errors_leave_the_operator_as_they_are() -> None:
    with pytest.raises(SpecError, match=r"argument 'qkv': expected shape \[T, 3, H, D\]"):
        torch.ops.fusedattn.fwd([torch.ones(2, 2)], *calls()["t3hd causal"][1:])


def test_a_workspace_query_of_fake_tensors() -> None:
    workspace = fusedattn.Workspace()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        qkv = mode.from_tensor(torch.randn(9, 3, 2, 4))
        out, pack = fusedattn.nvte_fused_attn_fwd_qkvpacked(
            qkv, None, None, None, None, CU_SEQLENS, None, 5, True, 0.5, 0.0, "t3hd", "no_bias", "padding", workspace
        )
    assert (out.shape, pack["softmax_lse"].shape) == ((9, 2, 4), (9, 2, 1))
    assert workspace.size_bytes is not None
    assert workspace.size_bytes >= 1
