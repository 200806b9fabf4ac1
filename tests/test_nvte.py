"""The four nvte functions: outputs in place and allocated, skipped gradients, and what a call leaves alone."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedattn
from fusedattn import SKIP, Engine, NVTE_Mask_Type, NVTE_QKV_Layout, NVTETensorPack
from fusedattn.nvte_calls import BackwardKVPacked, BackwardQKVPacked, Forward
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected, run_case, run_case_nvte

PACKINGS = ["qkvpacked", "kvpacked"]
# Lengths 3, 0 and 5 of queries, 4, 2 and 5 of keys; one row past the end of each.
CU_Q, CU_KV = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 4, 6, 11], dtype=torch.int32)


class Call:
    """A legal problem with a bias; forward and backward take changes of any argument."""

    def __init__(self, packing: str, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.packing, one = packing, packing == "qkvpacked"
        self.operands = {"QKV": torch.randn(9, 3, 2, 8)} if one else {"Q": torch.randn(9, 2, 8)}
        self.operands |= {} if one else {"KV": torch.randn(12, 2, 2, 8)}
        self.operands = {name: x.to(dtype) for name, x in self.operands.items()}
        self.lengths: dict[str, Any] = {"cu_seqlens": CU_Q, "max_seqlen": 5}
        if not one:
            self.lengths = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV, "max_seqlen_q": 5, "max_seqlen_kv": 5}
        self.words: dict[str, Any] = {"attn_scale": 0.4, "dropout": 0.0, "qkv_layout": "t3hd" if one else "thd_t2hd"}
        self.words |= {"bias_type": "pre_scale_bias", "attn_mask_type": "causal"}
        self.extra: dict[str, Any] = {"Bias": torch.randn(1, 2, 5, 5), "S": None, "rng_state": None}
        self.extra |= {"is_training": True}
        for group in (self.operands, self.lengths, self.words, self.extra):
            group.update({name: changes.pop(name) for name in list(changes) if name in group})
        assert not changes
        self.dout = torch.randn(9, 2, 8).to(dtype)
        self.gradients = [f"d{name}" for name in self.operands] + ["dBias"]

    def forward(self, **changes: Any) -> Forward:
        outputs = {"O": None, "Aux_Output_Tensors": None}
        function: Any = getattr(fusedattn, f"nvte_fused_attn_fwd_{self.packing}")
        return function(**self.operands | self.lengths | self.words | self.extra | outputs | changes)

    def backward(self, out: Tensor, pack: NVTETensorPack, **changes: Any) -> Any:
        rest = {"O": out, "dO": self.dout, "S": None, "dP": None, "Aux_CTX_Tensors": pack}
        function: Any = getattr(fusedattn, f"nvte_fused_attn_bwd_{self.packing}")
        return function(**self.operands | self.lengths | self.words | rest | dict.fromkeys(self.gradients) | changes)

    def both(self, **changes: Any) -> list[Tensor]:
        out, pack = self.forward(**changes)
        return [out, pack[0], *self.backward(out, pack, **changes)]


def strided(like: Tensor) -> Tensor:
    """A view with gaps in every axis, full of NaN."""
    return torch.full([2 * size for size in like.shape], torch.nan, dtype=like.dtype)[(slice(1, None, 2),) * like.dim()]


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_within_budget_and_equal_to_the_differentiable_function(
    packing: str, bias_type: str, dtype: torch.dtype
) -> None:
    call = Call(packing, dtype)
    cu_kv = None if packing == "qkvpacked" else CU_KV
    bias = None if bias_type == "no_bias" else call.extra["Bias"]
    tensors, layout = tuple(call.operands.values()), call.words["qkv_layout"]
    case = Case(tensors, layout, bias, bias_type, "causal", CU_Q, cu_kv, 5, 5, attn_scale=0.4)
    got = run_case_nvte(case, call.dout)
    assert_within_budget(got, expected(case, call.dout), eager(case, call.dout), dtype)
    other = run_case(case, call.dout)
    assert list(other) == list(got)
    assert same(got.values(), other.values())


@pytest.mark.parametrize("packing", PACKINGS)
def test_named_tuples(packing: str) -> None:
    call = Call(packing)
    forward = call.forward()
    assert type(forward) is Forward
    assert forward._fields == ("O", "Aux_Output_Tensors")
    gradients = call.backward(*forward)
    assert type(gradients) is (BackwardQKVPacked if packing == "qkvpacked" else BackwardKVPacked)
    assert gradients._fields == (("dQKV", "dBias") if packing == "qkvpacked" else ("dQ", "dKV", "dBias"))
    for name, value in zip(gradients._fields, gradients, strict=True):
        like = call.operands.get(name[1:], call.extra["Bias"])
        assert (value.shape, value.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("packing", PACKINGS)
def test_outputs_in_place_even_strided(packing: str, dropout: float, dtype: torch.dtype) -> None:
    call = Call(packing, dtype, dropout=dropout, rng_state=torch.tensor([1, 2]))
    out, pack = call.forward()
    gradients = call.backward(out, pack)
    for make in (strided, lambda x: torch.full_like(x, torch.nan)):
        o, aux = make(out), NVTETensorPack()
        result = call.forward(O=o, Aux_Output_Tensors=aux)
        assert result.O is o
        assert result.Aux_Output_Tensors is aux
        assert torch.equal(o, out)
        assert same(aux, pack)
        given = {name: make(x) for name, x in zip(call.gradients, gradients, strict=True)}
        written = call.backward(o, aux, **given)
        assert all(a is b for a, b in zip(written, given.values(), strict=True))
        assert same(written, gradients)


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_lies_between_the_elements_of_a_strided_output_stays(packing: str) -> None:
    call = Call(packing)
    whole = torch.full((9, 5, 2, 8), 7.0)
    call.forward(O=whole[:, 2])
    assert whole[:, [0, 1, 3, 4]].eq(7).all()
    assert not whole[:, 2].eq(7).any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_gradient_can_be_skipped(packing: str) -> None:
    call = Call(packing)
    out, pack = call.forward()
    want = call.backward(out, pack)
    for choice in itertools.product([True, False], repeat=len(call.gradients)):
        skipped = {name: SKIP for name, skip in zip(call.gradients, choice, strict=True) if skip}
        got = call.backward(out, pack, **skipped)
        for value, right, skip in zip(got, want, choice, strict=True):
            assert value is None if skip else torch.equal(value, right)


@pytest.mark.parametrize("empty", [None, SKIP], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_without_a_bias_its_gradient_is_none(packing: str, empty: Any) -> None:
    call = Call(packing, Bias=None, bias_type="no_bias")
    out, pack = call.forward()
    assert call.backward(out, pack, dBias=empty).dBias is None


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_past_the_end(packing: str) -> None:
    call = Call(packing)
    for x in call.operands.values():
        x[-1] = torch.nan
    call.dout[-1] = torch.nan
    out, pack = call.forward(O=torch.full((9, 2, 8), torch.nan))
    gradients = call.backward(out, pack)
    assert out[8].eq(0).all()
    assert pack["softmax_lse"][8].eq(-torch.inf).all()
    assert pack["softmax_lse"][:8].isfinite().all()
    assert all(x[-1].eq(0).all() for x in gradients[:-1])
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("packing", PACKINGS)
def test_backward_twice_is_equal_and_writes_no_input(packing: str) -> None:
    call = Call(packing, dropout=0.3, rng_state=torch.tensor([1, 2]))
    out, pack = call.forward()
    inputs = [*call.operands.values(), CU_Q, CU_KV, call.extra["Bias"], call.extra["rng_state"], out, call.dout, *pack]
    before = [x.clone() for x in inputs]
    first, names = call.backward(out, pack), pack.names
    assert same(first, call.backward(out, pack, deterministic=True))
    assert same(inputs, before)
    assert pack.names == names


@pytest.mark.parametrize("scale", [torch.ones(1), torch.arange(3), torch.ones(2).to(torch.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_fp8_scale_containers_are_untouched(packing: str, scale: Tensor) -> None:
    call = Call(packing)
    want, before = call.both(), scale.clone()
    out, pack = call.forward(S=scale)
    assert same([out, pack[0], *call.backward(out, pack, S=scale, dP=scale)], want)
    assert torch.equal(scale.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("packing", PACKINGS)
def test_inference_has_no_dropout_and_an_empty_pack(packing: str) -> None:
    call = Call(packing)
    want = call.forward().O
    for changes in ({}, {"dropout": 0.5}, {"Aux_Output_Tensors": NVTETensorPack()}):
        state = torch.get_rng_state()
        out, pack = call.forward(is_training=False, **changes)
        assert torch.equal(out, want)
        assert (len(pack), pack.names) == (0, ())
        assert torch.equal(torch.get_rng_state(), state)
        assert pack is changes.get("Aux_Output_Tensors", pack)


@pytest.mark.parametrize("packing", PACKINGS)
def test_dropout_follows_rng_state(packing: str) -> None:
    call = Call(packing, dropout=0.5, rng_state=torch.tensor([3, 4]))
    first = call.both()
    assert same(first, call.both())
    torch.manual_seed(5)
    call.extra["rng_state"] = None
    drawn = call.both()
    assert not torch.equal(drawn[0], first[0])
    assert torch.equal(drawn[1], first[1])
    assert not torch.equal(drawn[0], call.both()[0])
    torch.manual_seed(5)
    assert same(drawn, call.both())


SAME_CALLS: dict[str, dict[str, Any]] = {
    "int64": {"cu_seqlens_q": CU_Q.long(), "cu_seqlens_kv": CU_KV.long()},
    "strided": {"cu_seqlens_q": CU_Q.repeat_interleave(2)[::2], "cu_seqlens_kv": CU_KV.repeat_interleave(3)[::3]},
    "stream": {"stream": object()},
    "engine": {"engine": "torch"},
    "engine-member": {"engine": Engine.torch},
    "engine-case": {"engine": "AUTO"},
    "mask-member": {"attn_mask_type": NVTE_Mask_Type.NVTE_CAUSAL_MASK},
    "mask-name": {"attn_mask_type": "NVTE_CAUSAL_MASK"},
    "bias-name": {"bias_type": "Pre_Scale"},
    "longest": {"max_seqlen_q": None, "max_seqlen_kv": None},
}


@pytest.mark.parametrize("changes", SAME_CALLS.values(), ids=SAME_CALLS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_ways_to_say_the_same(packing: str, changes: dict[str, Any]) -> None:
    call = Call(packing)
    if packing == "qkvpacked":
        changes = {name.removesuffix("_q"): x for name, x in changes.items() if not name.endswith("_kv")}
    assert same(call.both(**changes), call.both())


@pytest.mark.parametrize("packing", PACKINGS)
def test_spellings_of_the_layout(packing: str) -> None:
    call = Call(packing)
    want, one = call.both(), packing == "qkvpacked"
    name = "NVTE_QKV_INTERLEAVED" if one else "NVTE_KV_INTERLEAVED"
    for layout in (NVTE_QKV_Layout[name], name, name.lower(), name[5:].lower(), "T3HD" if one else "THD_T2HD"):
        assert same(call.both(qkv_layout=layout), want)


def test_lengths_of_q_serve_keys_too() -> None:
    call = Call("kvpacked", cu_seqlens_kv=CU_Q)
    assert same(call.both(cu_seqlens_kv=None), call.both())


@pytest.mark.parametrize("packing", PACKINGS)
def test_max_seqlen_above_the_longest_pads_the_bias(packing: str) -> None:
    call, longer = Call(packing), {"max_seqlen": 8, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    want = call.both()
    longer = {name: value for name, value in longer.items() if name in call.lengths}
    call.extra["Bias"] = torch.nn.functional.pad(call.extra["Bias"], (0, 3, 0, 3), value=torch.nan)
    *got, dbias = call.both(**longer)
    assert same(got, want[:-1])
    assert torch.equal(dbias[..., :5, :5], want[-1])
    assert dbias[..., 5:, :].eq(0).all()
    assert dbias[..., 5:].eq(0).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_nan_scale_is_legal_and_gives_nan(packing: str) -> None:
    call = Call(packing, attn_scale=torch.nan)
    out, lse, *gradients = call.both()
    assert out[:8].isnan().all()
    assert lse[:8].isnan().all()
    assert all(x.isnan().any() for x in gradients)
    assert out[8].eq(0).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_autograd_sees_nothing(packing: str) -> None:
    call = Call(packing)
    want = call.both()
    for x in (*call.operands.values(), call.extra["Bias"], call.dout):
        x.requires_grad_()
    got = call.both()
    assert same(got, want)
    assert not any(x.requires_grad for x in got)
    assert not any(x.requires_grad for x in call.both(O=torch.zeros(9, 2, 8))[1:])


@pytest.mark.parametrize("packing", PACKINGS)
def test_strided_inputs(packing: str) -> None:
    call = Call(packing)
    want = call.both()
    for group in (call.operands, call.extra):
        for name, x in group.items():
            if isinstance(x, Tensor):
                group[name] = strided(x).copy_(x)
    call.dout = strided(call.dout).copy_(call.dout)
    for got, right in zip(call.both(), want, strict=True):
        torch.testing.assert_close(got, right)
