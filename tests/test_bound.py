"""Repeated calls take a short way, with the results of the long one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor

import fusedattn
import fusedattn.attention_calls
import fusedattn.nvte_calls
from fusedattn import bound, runtime
from fusedattn.engines import cudnn_call
from fusedattn.target import TARGETS

CU = torch.tensor([0, 5, 9, 16], dtype=torch.int32)
RNG = torch.tensor([3, 4])


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def nvte(qkv: torch.Tensor, cu_seqlens: torch.Tensor = CU, scale: Any = 0.5, p: float = 0.0, **more: Any) -> Any:
    words = (None, None, None, cu_seqlens, more.pop("rng_state", None), 8, more.pop("is_training", True), scale, p)
    return fusedattn.nvte_fused_attn_fwd_qkvpacked(qkv, more.pop("bias", None), *words, "t3hd", *_types(more), **more)


def _types(more: dict[str, Any]) -> tuple[str, str]:
    return more.pop("bias_type", "no_bias"), more.pop("mask", "padding")


QKV, Q, K, BIAS = half(18, 3, 2, 8), half(2, 7, 3, 8), half(2, 9, 3, 8), half(1, 3, 7, 9)


def fused_attention_thd(qkv: torch.Tensor, **more: Any) -> Any:
    q, k, v = qkv.unbind(1)
    more |= {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding", "cu_seqlens_q": CU, "return_lse": True}
    return fusedattn.fused_attention(q, k, v, **more)


def fused_dropout(q: torch.Tensor) -> Any:
    return fusedattn.fused_attention(q, K, K, dropout=0.25, return_lse=True)


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    out, other = result
    return [out, other] if isinstance(other, torch.Tensor) else [out, *other]


FUNCTIONS: dict[str, Callable[[int], Any]] = {
    "nvte": lambda i: nvte(QKV + i),
    "nvte causal": lambda i: nvte(QKV + i, mask="causal"),
    "nvte other lengths": lambda i: nvte(QKV, cu_seqlens=CU - torch.tensor([0, i, i, i], dtype=torch.int32)),
    "nvte int64 lengths": lambda i: nvte(QKV + i, cu_seqlens=CU.long()),
    "nvte other scale": lambda i: nvte(QKV, scale=0.5 + i),
    "nvte NaN scale": lambda i: nvte(QKV, scale=float("nan")),
    "nvte dropout": lambda i: nvte(QKV + i, p=0.25, rng_state=RNG + i),
    "nvte rng_state without dropout": lambda i: nvte(QKV + i, rng_state=RNG + i),
    "nvte dropout of a state that is drawn": lambda i: nvte(QKV + i, p=0.25),
    "dense dropout of a state that is drawn": lambda i: fused_dropout(Q + i),
    "nvte inference": lambda i: nvte(QKV + i, is_training=False),
    "nvte bias": lambda i: nvte(QKV, bias=half(1, 2, 8, 8), bias_type="post_scale_bias"),
    "dense": lambda i: fusedattn.fused_attention(Q + i, K, K, attn_scale=0.25 + i, return_lse=True),
    "dense default scale": lambda i: fusedattn.fused_attention(Q + i, K, K, return_lse=True),
    "dense bias": lambda i: fusedattn.fused_attention(Q + i, K, K, BIAS + i, return_lse=True),
    "dense lengths": lambda i: fusedattn.fused_attention(
        Q, Q, Q, attn_mask_type="padding", cu_seqlens_q=torch.tensor([0, 5, 5 + i]), return_lse=True
    ),
    "lengths of keys": lambda i: fusedattn.fused_attention(
        Q, K, K, attn_mask_type="padding", cu_seqlens_kv=torch.tensor([0, 5, 5 + i]), cu_seqlens_q=CU[[0, 2, 3]],
        return_lse=True,
    ),
    # A length is above the maximum of the keys, and is clamped to it.
    "another maximum of keys": lambda i: fused_attention_thd(QKV + i, max_seqlen_q=8, max_seqlen_kv=6),
    "sbhd": lambda i: fusedattn.fused_attention(
        Q.transpose(0, 1) + i, *[K.transpose(0, 1)] * 2, qkv_layout="sbhd_sbhd_sbhd", return_lse=True
    ),
    "kvpacked": lambda i: fusedattn.fused_attention_kvpacked(
        half(16, 2, 8), half(17, 2, 2, 8), cu_seqlens_q=CU, cu_seqlens_kv=CU + 0, max_seqlen_q=8, max_seqlen_kv=8
    ),
}  # fmt: skip


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bound.BoundCall]:
    """The calls that took the short way."""
    calls: list[bound.BoundCall] = []
    compute = bound.BoundCall.compute
    monkeypatch.setattr(bound.BoundCall, "compute", lambda call, *args: calls.append(call) or compute(call, *args))
    return calls


def results(name: str) -> list[list[torch.Tensor]]:
    with runtime.pretend(TARGETS["a100"], InterpretingExecutor()):
        return [tensors_of(FUNCTIONS[name](i)) for i in range(3)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_short_way_gives_what_the_long_one_does(
    name: str, computed: list[bound.BoundCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    short = results(name)
    assert len(computed) == 2
    monkeypatch.setattr(bound, "bind", lambda *args: None)
    for module in (fusedattn.attention_calls, fusedattn.nvte_calls):
        monkeypatch.setattr(module, "bind", lambda *args: None)
    torch.manual_seed(0)
    long = results(name)
    assert len(computed) == 2
    for ours, theirs in zip(short, long, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
            assert torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients(p: float, with_bias: bool, computed: list[bound.BoundCall]) -> None:
    found = []
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        for _ in range(2):
            q, k, bias = Q.clone().requires_grad_(), K.clone().requires_grad_(), BIAS.clone().requires_grad_()
            out = fusedattn.fused_attention(
                q, k, k, bias if with_bias else None, dropout=p, rng_state=RNG if p else None
            )
            out.square().sum().backward()
            found.append([out, q.grad, k.grad, *([bias.grad] if with_bias else [])])
            if len(found) == 1:
                assert computed == []
    assert len(computed) == 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_nvte_backward_takes_the_pack_of_a_bound_forward(computed: list[bound.BoundCall]) -> None:
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        found = []
        for scale in (0.5, 0.5, 0.25):
            out, pack = nvte(QKV, scale=scale)
            words = (None, None, pack, None, None, CU, 8, scale, 0.0, "t3hd", "no_bias", "padding")
            found.append(fusedattn.nvte_fused_attn_bwd_qkvpacked(QKV, out, out, *words).dQKV)
            wrong = (*words[:7], 2 * scale, *words[8:])
            with pytest.raises(fusedattn.SpecError, match=rf"attn_scale = {2 * scale}.*had attn_scale = {scale}"):
                fusedattn.nvte_fused_attn_bwd_qkvpacked(QKV, out, out, *wrong)
        assert len(computed) == 2
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])


def test_a_backward_has_the_scale_of_its_own_forward(computed: list[bound.BoundCall]) -> None:
    def gradient(scale: float) -> torch.Tensor:
        q = Q.clone().requires_grad_()
        fusedattn.fused_attention(q, K, K, attn_scale=scale).square().sum().backward()
        assert q.grad is not None
        return q.grad

    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        first, second, again = (gradient(scale) for scale in (0.5, 2.0, 0.5))
        assert len(computed) == 2
        fusedattn.clear_caches()
        assert torch.equal(gradient(2.0), second)
        assert len(computed) == 2
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_bias_that_is_changed_after_a_bound_forward_is_noticed(computed: list[bound.BoundCall]) -> None:
    bias = half(1, 2, 8, 8)
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        for _ in range(2):
            _, pack = nvte(QKV, bias=bias, bias_type="post_scale_bias")
    assert len(computed) == 1
    assert not pack.bias_changed()
    bias.add_(1)
    assert pack.bias_changed()


def test_a_bound_call_has_the_very_key_that_the_executor_knows() -> None:
    """Equal ones are found, too, but after a comparison of all their fields."""
    executor = InterpretingExecutor()
    with runtime.pretend(TARGETS["h100"], executor):
        nvte(QKV)
        [call] = bound._CALLS.values()
        assert any(key is call._forward._key for key in executor._found)  # type: ignore[attr-defined]


def test_remembered_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_call, "_KEYS_CAPACITY", 2)
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        for rows in range(3, 8):
            q = half(1, rows, 1, 8)
            fusedattn.fused_attention(q, q, q)
            assert 0 < len(cudnn_call._KEYS) <= 2
    assert not cudnn_call._KEYS


NOT_BOUND: dict[str, Callable[[], Any]] = {
    "another dtype": lambda: nvte(QKV.bfloat16()),
    "other strides": lambda: nvte(half(18, 3, 2, 16)[..., :8]),
    "another address": lambda: nvte(half(18 * 48 + 1)[1:].view(18, 3, 2, 8)),
    "another mask": lambda: nvte(QKV, mask="causal"),
    "another probability": lambda: nvte(QKV, p=0.5, rng_state=RNG),
    "a scale that is an integer": lambda: nvte(QKV, scale=1),
}


def test_what_is_not_the_same_call_takes_the_long_way(computed: list[bound.BoundCall]) -> None:
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        nvte(QKV)
        for name, call in NOT_BOUND.items():
            call()
            assert computed == [], name
        nvte(QKV)
        assert len(computed) == 1


def test_a_default_scale_is_not_the_last_one(computed: list[bound.BoundCall]) -> None:
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        found = [fusedattn.fused_attention(Q, K, K, attn_scale=scale) for scale in (None, 1.0, None, 8**-0.5, None)]
    assert len(computed) == 3
    assert [torch.equal(out, found[0]) for out in found] == [True, False, True, True, True]


def test_a_bound_call_excuses_nothing(computed: list[bound.BoundCall]) -> None:
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        fusedattn.fused_attention(Q, K, K, dropout=0.0)
        for wrong in ({"dropout": False}, {"is_training": 1}, {"return_lse": 0}, {"max_seqlen_q": 7.0}):
            with pytest.raises(fusedattn.SpecError):
                fusedattn.fused_attention(Q, K, K, **{"dropout": 0.0, **wrong})
        with pytest.raises(fusedattn.SpecError):
            fusedattn.fused_attention(Q, K, K, dropout=[0.0])
    assert computed == []


def test_nothing_is_bound_where_values_are_checked(
    monkeypatch: pytest.MonkeyPatch, computed: list[bound.BoundCall]
) -> None:
    monkeypatch.setenv("FUSEDATTN_VALIDATE", "1")
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        nvte(QKV)
        with pytest.raises(fusedattn.SpecError, match="cu_seqlens"):
            nvte(QKV, cu_seqlens=CU.flip(0))
        nvte(QKV)
    assert computed == []


def test_nothing_is_bound_on_cpu_or_under_autocast(computed: list[bound.BoundCall]) -> None:
    for _ in range(2):
        fusedattn.fused_attention(Q, K, K)
    assert not bound._CALLS
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert fusedattn.fused_attention(Q, K, K).dtype == torch.bfloat16
    assert computed == []


def tensors_held_by(root: object) -> list[torch.Tensor]:
    """Tensors that an object keeps alive, but for those of the executor and of modules."""
    found, seen, left = [], set(), [root]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, InterpretingExecutor)):
            continue
        seen.add(id(thing))
        found += [thing] if isinstance(thing, torch.Tensor) else []
        left += gc.get_referents(thing)
    return found


def test_bound_calls_hold_no_tensors_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "_CAPACITY", 2)
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        for rows in range(3, 8):
            q = half(1, rows, 1, 8)
            fusedattn.fused_attention(q, q, q)
            assert 0 < len(bound._CALLS) <= 2
        fusedattn.clear_caches()
        nvte(QKV)
        nvte(QKV, bias=half(1, 2, 8, 8), bias_type="post_scale_bias")
        assert len(bound._CALLS) == 2
        assert tensors_held_by(bound._CALLS) == []
        assert tensors_held_by([QKV]) != []
    assert not bound._CALLS
