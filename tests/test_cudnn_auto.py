"""What cuDNN refuses goes to the torch engine: by direction without dropout, and whole with it, with one warning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_hostile import Hostile, Options, run
from cudnn_interpreter import InterpretingExecutor
from cudnn_judge import pattern
from torch import Tensor

import fusedattn
from fusedattn import BuildError, runtime
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.enums import Direction
from fusedattn.runs.oracle import assert_within_budget, eager, expected, keep_mask
from fusedattn.runs.public_calls import attend
from fusedattn.target import TARGETS

DENSE = Options("bshd_bshd_bshd", q=(5, 7), kv=(11, 4), heads=2, engine="auto")
# Its dBias has 32 bits, which cuDNN does not give.
WIDE = replace(DENSE, bias="hqk", bias_dtype=torch.float32)
THD = Options(engine="auto")


class Refusing(InterpretingExecutor):
    """Has no plan for a direction."""

    def __init__(self, direction: Direction) -> None:
        super().__init__()
        self._direction = direction

    def executable(self, key: SdpaKey) -> Any:
        if key.direction is self._direction:
            raise BuildError("a plan", "the test wants none")
        return super().executable(key)


def ran(executor: InterpretingExecutor) -> list[str]:
    return sorted(key.direction.word for key, count in executor.executions.items() for _ in range(count))


def in_budget(h: Hostile, got: dict[str, Tensor], keep: Tensor | None = None) -> None:
    want, measured = (f(h.case, h.dout, h.dlse, keep) for f in (expected, eager))
    assert_within_budget(got, {name: x for name, x in want.items() if name in got}, measured, h.options.dtype)


REFUSED: dict[str, tuple[Options, str]] = {
    "dBias of 32 bits": (WIDE, "wide dBias"),
    "dBias over queries": (replace(DENSE, bias="hk"), "dBias over queries"),
    "dBias of ragged sequences": (replace(THD, bias="hqk"), "dBias of ragged sequences"),
    "a wide head": (replace(DENSE, head_dim=136), "head dimension of backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_direction_has_its_engine_without_dropout(name: str) -> None:
    o, row = REFUSED[name]
    h, executor = Hostile(o), InterpretingExecutor()
    with runtime.pretend(TARGETS["b200"], executor):
        with pytest.warns(RuntimeWarning, match=f"computes backward on cpu with the torch engine.*{row}") as warned:
            got = run(h)
        assert len(warned) == 1
        assert ran(executor) == ["forward"]
        in_budget(h, got)
        # Said once, and from then on known.
        run(h)
    assert ran(executor) == ["forward", "forward"]


@pytest.mark.parametrize("name", REFUSED)
def test_both_directions_have_one_engine_with_dropout(name: str) -> None:
    o, row = REFUSED[name]
    h, executor = Hostile(replace(o, dropout=0.3)), InterpretingExecutor()
    with runtime.pretend(TARGETS["b200"], executor):
        with pytest.warns(RuntimeWarning, match=f"computes forward on cpu with the torch engine.*{row}") as warned:
            got = run(h)
        assert len(warned) == 1
        keep = keep_mask(replace_engine(h, "torch"))
    assert ran(executor) == []
    in_budget(h, got, keep)


def replace_engine(h: Hostile, engine: str) -> Any:
    return type(h.case)(**{**vars(h.case), "engine": engine})


def test_a_frozen_bias_leaves_cudnn_both_directions() -> None:
    for o, _ in list(REFUSED.values())[:3]:
        h, executor = Hostile(replace(o, dropout=0.3, wanted="qkv")), InterpretingExecutor()
        with runtime.pretend(TARGETS["b200"], executor):
            got = run(h)
        assert ran(executor) == ["backward", "forward"]
        in_budget(h, got, pattern(h, executor))


@pytest.mark.parametrize(("bias_gradient", "engine"), [(False, "cudnn"), (True, "torch")])
def test_autograd_carries_the_engine_past_clear_caches(bias_gradient: bool, engine: str) -> None:
    h, executor = Hostile(replace(WIDE, dropout=0.3)), InterpretingExecutor()
    with runtime.pretend(TARGETS["h100"], executor), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        operands = [x.detach().requires_grad_() for x in h.case.operands]
        assert h.case.bias is not None
        bias = h.case.bias.detach().requires_grad_(bias_gradient)
        out, lse = attend(h.case, operands, bias)
        keep = pattern(h, executor) if engine == "cudnn" else keep_mask(replace_engine(h, "torch"))
        fusedattn.clear_caches()
        gradients = torch.autograd.grad(out, operands, h.dout)
        assert ran(executor) == (["backward", "forward"] if engine == "cudnn" else [])
    in_budget(
        h, dict(zip(("dq", "dk", "dv"), gradients, strict=True)) | {"out": out.detach(), "lse": lse.detach()}, keep
    )


@pytest.mark.parametrize("target", ["h100", "a100"])
def test_the_pack_carries_the_engine_past_clear_caches(target: str) -> None:
    """On a100 a ragged dBias is refused, for which an nvte forward with dropout answers."""
    o = replace(THD, layout="t3hd", bias="hqk", dropout=0.3)
    h, executor = Hostile(o), InterpretingExecutor()
    case, cudnn = h.case, target == "h100"
    (qkv,) = case.operands
    words = (case.scale, case.dropout, case.layout, case.bias_type, case.mask_type)
    lengths = (case.cu_seqlens_q, case.max_seqlen_q)
    with runtime.pretend(TARGETS[target], executor), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        out, pack = fusedattn.nvte_fused_attn_fwd_qkvpacked(
            qkv, case.bias, None, None, None, lengths[0], case.rng_state, lengths[1], True, *words
        )
        fusedattn.clear_caches()
        back = fusedattn.nvte_fused_attn_bwd_qkvpacked(qkv, out, h.dout, None, None, pack, None, None, *lengths, *words)
        keep = pattern(h, executor) if cudnn else keep_mask(replace_engine(h, "torch"))
    assert ran(executor) == (["backward", "forward"] if cudnn else [])
    got = {"out": out, "lse": pack["softmax_lse"].squeeze(-1), "dqkv": back.dQKV, "dbias": back.dBias}
    in_budget(h, {name: x for name, x in got.items() if x is not None}, keep)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_cannot_be_built_goes_to_the_torch_engine(dropout: float, direction: Direction) -> None:
    h, executor = Hostile(replace(DENSE, dropout=dropout)), Refusing(direction)
    with runtime.pretend(TARGETS["h100"], executor):
        with pytest.warns(RuntimeWarning, match="which is slower: build: .*the test wants none"):
            got = run(h)
        keep = keep_mask(replace_engine(h, "torch")) if dropout else None
        alone = {Direction.forward: ["backward"], Direction.backward: ["forward"]}[direction]
        assert ran(executor) == ([] if dropout else alone)
    in_budget(h, got, keep)


def test_a_named_engine_never_falls_back() -> None:
    with runtime.pretend(TARGETS["b200"], InterpretingExecutor()):
        for o, row in REFUSED.values():
            with pytest.raises(fusedattn.EngineRefusal, match=row):
                run(Hostile(replace(o, engine="cudnn")))
    with runtime.pretend(TARGETS["b200"], Refusing(Direction.backward)), pytest.raises(BuildError, match="wants none"):
        run(Hostile(replace(DENSE, engine="cudnn")))
