"""``explain``: the engine, the reason and what others refuse, without computing; and the rules behind it."""

from typing import Any

import pytest
import torch
from cudnn_recorder import Recorder

from fusedattn import (
    Direction,
    Engine,
    EngineRefusal,
    Explanation,
    NVTE_QKV_Layout,
    SpecError,
    explain,
    fused_attention,
    rules,
)
from fusedattn.plan import make_plan
from fusedattn.rules import RULES, RuleKind, availability, refusals
from fusedattn.runtime import pretend
from fusedattn.spec import AttentionSpec, TensorSpec
from fusedattn.target import TARGETS

RELEASE = "release: this release has no CUDA kernel for fused attention, got engine 'cuda'"
DEVICE = "device: needs tensors on a CUDA device, got cpu"
DTYPE = "dtype: Q, K and V must be float16 or bfloat16, got {}"
HEAD_DIM = "head dimension: D must be a multiple of 8, got D = 4"
FP8 = "FP8: FP8 is not offered yet, got {}"
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ["auto", "torch", Engine.torch, "Torch"])
def test_torch_computes(engine: Engine | str, dtype: torch.dtype) -> None:
    q = torch.randn(2, 5, 3, 4).to(dtype)
    got = explain(q, q, q, engine=engine)
    assert isinstance(got, Explanation)
    assert got.engine == "torch"
    named = "the caller named torch"
    assert got.reason == (
        "auto: on cpu the torch engine is the first that takes the problem" if engine == "auto" else named
    )
    refused = [DEVICE] if dtype in DTYPES[:2] else [DEVICE, DTYPE.format(str(dtype)[6:])]
    assert got.refused == {"cudnn": (*refused, HEAD_DIM), "cuda": (RELEASE, DEVICE)}
    assert got.notes == ()
    assert got.backward == got._replace(backward=None)


@pytest.mark.parametrize("engine", ["cudnn", "cuda"])
def test_named_engine_that_cannot_is_told_and_not_raised(engine: str) -> None:
    q = torch.randn(2, 5, 3, 4)
    got = explain(q, q, q, engine=engine)
    assert (got.engine, got.reason) == (None, f"the caller named {engine}, which does not take the problem")
    with pytest.raises(EngineRefusal) as raised:
        fused_attention(q, q, q, engine=engine)
    assert raised.value.refused == {engine: got.refused[engine]}
    assert raised.value.able == ("torch",)


def test_float8_has_no_engine() -> None:
    q = torch.randn(2, 5, 3, 4).to(torch.float8_e4m3fn)
    got = explain(q, q, q)
    assert (got.engine, got.reason) == (None, "auto: no engine takes the problem")
    assert got.refused["torch"] == (FP8.format("float8_e4m3fn"),)
    assert all(FP8.format("float8_e4m3fn") in reasons for reasons in got.refused.values())
    mixed = explain(*[torch.randn(2, 5, 3, 4)] * 3, torch.zeros(1, 1, 5, 5).to(torch.float8_e5m2))
    assert mixed.refused["torch"] == (FP8.format("float32, float8_e5m2"),)


CALLS: dict[str, dict[str, Any]] = {
    "bias": {"bias": torch.zeros(1, 3, 5, 5), "attn_bias_type": "pre_scale"},
    "padding": {"attn_mask_type": "padding", "cu_seqlens_q": CU},
    "dropout": {"dropout": 0.1, "rng_state": torch.tensor([1, 2]), "is_training": True},
    "scale": {"attn_scale": float("nan"), "deterministic": True, "return_lse": True},
    "ragged": {"qkv_layout": "NVTE_NOT_INTERLEAVED", "cu_seqlens_q": CU, "max_seqlen_q": 6, "max_seqlen_kv": 7},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_takes_what_fused_attention_takes(call: dict[str, Any]) -> None:
    shape = (8, 3, 4) if "qkv_layout" in call else (2, 5, 3, 4)
    q, k, v = (torch.randn(shape) for _ in range(3))
    assert explain(q, k, v, **call).engine == "torch"
    fused_attention(q, k, v, **call)
    bias = call.get("bias")
    if bias is not None:
        assert explain(q, k, v, bias).engine == "torch"


@pytest.mark.parametrize("wrong", [{"max_seqlen_q": 4}, {"dropout": 2}, {"cu_seqlens_q": CU + 1}, {"attn_scale": "x"}])
def test_wrong_argument_is_an_error_here_too(wrong: dict[str, Any]) -> None:
    q = torch.randn(2, 5, 3, 4)
    with pytest.raises(SpecError, match=rf"^explain: argument '{next(iter(wrong))}': ") as raised:
        explain(q, q, q, **wrong)
    with pytest.raises(SpecError) as other:
        fused_attention(q, q, q, **wrong)
    assert str(other.value) == str(raised.value).replace("explain", "fused_attention")


def test_unknown_and_missing_arguments() -> None:
    q = torch.randn(2, 5, 3, 4)
    with pytest.raises(TypeError, match="'atn_scale'"):
        explain(q, q, q, atn_scale=1.0)
    with pytest.raises(TypeError, match="'v'"):
        explain(q, q)


def test_computes_nothing_and_draws_no_random_numbers() -> None:
    q = torch.randn(1, 4, 1, 8)
    before = torch.get_rng_state()
    assert explain(q, q, q, dropout=0.5).engine == "torch"
    assert torch.equal(torch.get_rng_state(), before)


# On a GPU: what the backward needs, and what to know of results

SHAPE = (2, 16, 2, 64)
BIAS = torch.zeros(1, 2, 16, 16)
NOT_FINITE = (
    "K or V that are not finite past the end of a sequence, such as those of the next one in a thd layout, or at a "
    "key that mask or bias rule out, make rows NaN that read them in a tile of up to 128 keys, since cuDNN multiplies "
    "them by 0; in backward so do Q and dO under a causal mask."
)
PATTERN = "The dropout pattern is that of the {} engine; others drop other probabilities."
WIDE = "wide dBias: the gradient of a bias must be float16 or bfloat16, got [1, 2, 16, 16] of float32"


def on_gpu(dtype: torch.dtype = torch.bfloat16, **call: Any) -> Explanation:
    q = torch.zeros(SHAPE, dtype=dtype)
    with pretend(TARGETS["h100"], Recorder()):
        return explain(q, q, q, **call)


def test_backward_asks_for_the_gradient_of_a_bias_that_requires_one() -> None:
    frozen = on_gpu(bias=BIAS)
    assert (frozen.engine, frozen.backward.engine) == ("cudnn", "cudnn")
    learned = on_gpu(bias=BIAS.clone().requires_grad_())
    assert (learned.engine, learned.backward.engine) == ("cudnn", "torch")
    assert learned.backward.refused["cudnn"] == (WIDE,)
    assert "cudnn" not in learned.refused
    assert learned.backward.reason == "auto: on cpu the torch engine is the first that takes the problem"
    assert learned.backward.backward is None


def test_with_dropout_both_directions_have_one_engine() -> None:
    learned = on_gpu(bias=BIAS.clone().requires_grad_(), dropout=0.5)
    assert (learned.engine, learned.backward.engine) == ("torch", "torch")
    assert learned.refused["cudnn"] == learned.backward.refused["cudnn"] == (WIDE,)
    assert learned.notes == learned.backward.notes == (PATTERN.format("torch"),)
    assert on_gpu(bias=BIAS, dropout=0.5).backward.engine == "cudnn"


LENGTHS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "notes"),
    [
        ({}, ()),
        ({"attn_mask_type": "causal"}, (NOT_FINITE,)),
        ({"attn_mask_type": "padding", "cu_seqlens_q": LENGTHS}, (NOT_FINITE,)),
        ({"bias": BIAS}, (NOT_FINITE,)),
        ({"dropout": 0.5}, (PATTERN.format("cudnn"),)),
        ({"dropout": 0.5, "attn_mask_type": "causal"}, (NOT_FINITE, PATTERN.format("cudnn"))),
        ({"dropout": 0.5, "is_training": False}, ()),
        ({"attn_mask_type": "causal", "engine": "torch"}, ()),
        ({"attn_mask_type": "causal", "dtype": torch.float32}, ()),
        ({"attn_mask_type": "causal", "dtype": torch.float32, "engine": "cudnn", "dropout": 0.5}, ()),
    ],
)
def test_notes(call: dict[str, Any], notes: tuple[str, ...]) -> None:
    found = on_gpu(**call)
    assert found.notes == found.backward.notes == notes


def test_ragged_sequences_have_ends() -> None:
    q = torch.zeros(12, 2, 64, dtype=torch.float16)
    with pretend(TARGETS["a100"], Recorder()):
        found = explain(q, q, q, qkv_layout="thd_thd_thd", cu_seqlens_q=LENGTHS, max_seqlen_q=8, max_seqlen_kv=8)
    assert (found.engine, found.notes) == ("cudnn", (NOT_FINITE,))


def test_nothing_is_built() -> None:
    recorder = Recorder()
    with pretend(TARGETS["h100"], recorder):
        q = torch.zeros(SHAPE, dtype=torch.float16)
        assert explain(q, q, q).engine == "cudnn"
    assert not recorder.keys


# The rules


def spec(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> AttentionSpec:
    q = TensorSpec.of(torch.empty(1, 2, 3, 8, dtype=dtype))._replace(device=torch.device(device))
    target = TARGETS["h100"] if device == "cuda" else None
    return AttentionSpec.of(layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, operands=(q, q, q), target=target, **changes)


def test_capture_with_dropout_is_refused() -> None:
    reason = "capture: dropout reads rng_state on the host, which a CUDA graph capture does not allow, "
    assert refusals(Engine.torch, spec("cuda", dropout=True, capturing=True)) == (f"{reason}got a capture in progress",)
    assert refusals(Engine.torch, spec("cuda", dropout=True)) == ()
    assert refusals(Engine.torch, spec("cuda", capturing=True)) == ()
    with pytest.raises(EngineRefusal, match="capture: dropout reads rng_state"):
        make_plan(spec("cuda", dropout=True, capturing=True), Engine.auto).chosen()
    half = spec("cuda", torch.float16, dropout=True, capturing=True)
    assert make_plan(half, Engine.auto).chosen() is Engine.cudnn


@pytest.mark.parametrize("direction", Direction)
def test_gpu_user_hears_why_no_fast_engine_computes(direction: Direction) -> None:
    problem = spec("cuda", direction=direction)
    warning = make_plan(problem, Engine.auto).fallback_warning()
    head = f"fusedattn computes {direction.word} on cuda with the torch engine, which is slower: "
    assert warning == head + DTYPE.format("float32")
    assert make_plan(problem, Engine.torch).fallback_warning() is None
    assert make_plan(spec("cuda", torch.float16, direction=direction), Engine.auto).fallback_warning() is None
    assert make_plan(spec("cpu"), Engine.auto).fallback_warning() is None


@pytest.mark.parametrize("engine", [engine for engine in Engine if engine is not Engine.auto])
def test_rows_are_complete(engine: Engine) -> None:
    names = [rule.name for rule in RULES[engine]]
    assert names
    assert len(set(names)) == len(names)
    for rule in RULES[engine]:
        assert isinstance(rule.kind, RuleKind)
        assert rule.reason
        assert rule.got(spec())
    failed = [rule for rule in RULES[engine] if not rule.holds(spec(dtype=torch.float8_e5m2))]
    assert refusals(engine, spec(dtype=torch.float8_e5m2)) == tuple(
        f"{rule.name}: {rule.reason}, got {rule.got(spec(dtype=torch.float8_e5m2))}" for rule in failed
    )


def test_availability_tells_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = availability()
    assert list(found) == [Engine.torch, Engine.cudnn, Engine.cuda]
    assert found[Engine.torch] is None
    assert found[Engine.cudnn] == "torch finds no CUDA device"
    assert (found[Engine.cuda] or "").startswith("this release has no CUDA kernel for fused attention; ")
    monkeypatch.setattr(rules, "package_fault", lambda: "nvidia-cudnn-frontend is not installed")
    assert availability()[Engine.cudnn] == "nvidia-cudnn-frontend is not installed; torch finds no CUDA device"
    monkeypatch.setattr(rules, "package_fault", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert availability()[Engine.cudnn] is None
