"""Calls whose workspace would be too large run in parts, which changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor
from cudnn_recorder import Recorder

import fusedattn
from fusedattn import BuildError, runtime
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.enums import Direction
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected, keep_mask, run_case
from fusedattn.target import TARGETS

CU = torch.tensor([0, 5, 5, 16, 21, 30], dtype=torch.int32)
RNG = torch.tensor([1, 2])


class Bounded:
    """Interprets, but says that a graph needs what a test wants it to."""

    def __init__(self, workspace_bytes: Callable[[SdpaKey], int]) -> None:
        self.recorder = Recorder(workspace_bytes)

    def executable(self, key: SdpaKey) -> Any:
        self.recorder.executable(key)
        needed = self.recorder.workspace_bytes(key)
        return InterpretingExecutor(workspace_bytes=needed).executable(key)


def batch_of(key: SdpaKey) -> int:
    return key.tensor(Role.Q).dim[0]


def heads_of(key: SdpaKey) -> int:
    return key.tensor(Role.Q).dim[1]


def too_large_above(batch: int, heads: int = 100) -> Callable[[SdpaKey], int]:
    return lambda key: 2**40 if batch_of(key) > batch or heads_of(key) > heads else 2**20


def ragged(**changes: Any) -> Case:
    qkv = torch.randn(33, 3, 4, 8).bfloat16()
    return Case((qkv,), "t3hd", cu_seqlens_q=CU, max_seqlen_q=11, max_seqlen_kv=11, **changes)


def dense(**changes: Any) -> Case:
    q, k, v = (torch.randn(5, s, 4, 8).half() for s in (7, 9, 9))
    return Case((q, k, v), "bshd_bshd_bshd", **changes)


BIASES = {"1h": (1, 4), "b1": (5, 1), "11": (1, 1), "bh": (5, 4)}
CASES: dict[str, Callable[[], Case]] = {
    "ragged": ragged,
    "ragged causal": lambda: ragged(mask_type="causal"),
    "ragged dropout": lambda: ragged(dropout=0.25, rng_state=RNG),
    "dense": dense,
    "dense dropout": lambda: dense(dropout=0.25, rng_state=RNG),
} | {
    f"{name} bias {word}": lambda make=make, shape=shape, size=size: make(
        bias=torch.randn(*shape, *size).to(torch.half if make is dense else torch.bfloat16), bias_type="post_scale_bias"
    )
    for word, shape in BIASES.items()
    for name, make, size in (("ragged", ragged, (11, 11)), ("dense", dense, (7, 9)))
}


@pytest.mark.parametrize("limit", [(2, 100), (1, 100), (1, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_parts_change_no_result(name: str, limit: tuple[int, int]) -> None:
    case = CASES[name]()
    bounded = Bounded(too_large_above(*limit))
    with runtime.pretend(TARGETS["h100"], bounded):
        keep = keep_mask(case, head_dim=8)
        out = run_case(case)["out"]
        dout = torch.randn(out.shape).to(out.dtype)
        fusedattn.clear_caches()
        got = run_case(case, dout)
        counted = fusedattn.counters()
    assert_within_budget(got, expected(case, dout, keep=keep), eager(case, dout, keep=keep), case.operands[0].dtype)
    assert counted["groups"] == counted["executions"] >= 4


def test_parts_with_dropout_drop_by_patterns_of_their_own() -> None:
    q = torch.zeros(4, 64, 2, 64).half()
    case = Case((q, q, q), "bshd_bshd_bshd", dropout=0.5, rng_state=RNG)
    with runtime.pretend(TARGETS["h100"], Bounded(too_large_above(1, 1))):
        keep = keep_mask(case, head_dim=64)
    assert keep is not None
    patterns = {tuple(pattern.flatten().tolist()) for pattern in keep.flatten(0, 1)}
    assert len(patterns) == 8


def run_recorded(workspace_bytes: Callable[[SdpaKey], int], rows: int = 16, **call: Any) -> Recorder:
    recorder = Recorder(workspace_bytes)
    q = torch.zeros(5, rows, 4, 8, dtype=torch.half, requires_grad=True)
    with runtime.pretend(TARGETS["h100"], recorder):
        out = fusedattn.fused_attention(q, q, q, engine="cudnn", **call)
        out.backward(torch.ones_like(out))
    return recorder


def test_both_directions_are_cut_alike_with_dropout_alone() -> None:
    def backward_is_large(key: SdpaKey) -> int:
        return 2**40 if key.direction is Direction.backward and batch_of(key) > 2 else 0

    plain = run_recorded(backward_is_large)
    assert [batch_of(key) for key in plain.run_keys] == [5, 2, 2, 1]
    dropped = run_recorded(backward_is_large, dropout=0.5, rng_state=RNG)
    assert [batch_of(key) for key in dropped.run_keys] == [2, 2, 1] * 2


def sums_dq_over_all_tokens(key: SdpaKey) -> int:
    """As on Hopper and data-center Blackwell: float32, gaps between tokens included."""
    return 4 * key.max_total_q * key.tensor(Role.DQ).stride[2] if key.backward and key.ragged else 0


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize(("limit_mb", "parts"), [("16", 1), ("4", 1), ("3", 2), ("1", 4)])
def test_gaps_and_heads_of_a_ragged_dq_keep_within_the_bound(
    limit_mb: str, parts: int, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDATTN_WORKSPACE_MB", limit_mb)
    case = ragged(dropout=p, rng_state=RNG if p else None)
    bounded = Bounded(sums_dq_over_all_tokens)
    with runtime.pretend(TARGETS["h100"], bounded):
        keep = keep_mask(case, head_dim=8)
        dout = torch.randn(33, 4, 8).bfloat16()
        fusedattn.clear_caches()
        got = run_case(case, dout)
        counted = fusedattn.counters()
    assert_within_budget(got, expected(case, dout, keep=keep), eager(case, dout, keep=keep), torch.bfloat16)
    assert counted["executions"] == (2 * parts if p else 1 + parts)
    assert counted["copies"] == (0 if limit_mb == "16" else parts)


def test_a_backward_asked_for_less_is_cut_as_its_forward() -> None:
    def dbias_is_large(key: SdpaKey) -> int:
        return 2**40 if Role.DBIAS in key and batch_of(key) > 1 else 0

    recorder = Recorder(dbias_is_large)
    qkv, bias = torch.zeros(30, 3, 4, 8).bfloat16(), torch.zeros(1, 4, 11, 11).bfloat16()
    words = (0.5, 0.25, "t3hd", "post_scale_bias", "padding")
    with runtime.pretend(TARGETS["h100"], recorder):
        out, pack = fusedattn.nvte_fused_attn_fwd_qkvpacked(
            qkv, bias, None, None, None, CU, RNG, 11, True, *words, engine="cudnn"
        )
        fusedattn.nvte_fused_attn_bwd_qkvpacked(
            qkv, out, out, None, None, pack, None, fusedattn.SKIP, CU, 11, *words, engine="cudnn"
        )
    assert [key.direction for key in recorder.run_keys] == [Direction.forward] * 5 + [Direction.backward] * 5
    assert not any(Role.DBIAS in key for key in recorder.run_keys)


def test_a_frozen_bias_and_one_that_is_not_are_told_apart() -> None:
    def dbias_is_large(key: SdpaKey) -> int:
        return 2**40 if Role.DBIAS in key and batch_of(key) > 1 else 0

    recorder = Recorder(dbias_is_large)
    q, bias = torch.zeros(5, 16, 4, 8, dtype=torch.half, requires_grad=True), torch.zeros(1, 4, 16, 16).half()
    with runtime.pretend(TARGETS["h100"], recorder):
        for frozen, parts in ((True, 1), (False, 5), (True, 1), (False, 5)):
            recorder.runs.clear()
            leaf = bias.clone().requires_grad_(not frozen)
            out = fusedattn.fused_attention(q, q, q, leaf, dropout=0.5, rng_state=RNG, engine="cudnn")
            out.backward(torch.ones_like(out))
            assert len(recorder.runs) == 2 * parts


@pytest.mark.parametrize("rows", [16, 256])
def test_the_bound_is_four_times_the_tensors_or_the_setting(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Q, K, V and the output of 16-bit numbers, and the statistics.
    tensors = 4 * 5 * rows * 4 * 8 * 2 + 5 * rows * 4 * 4
    assert (4 * tensors > 2**20) == (rows == 256)
    bound = max(4 * tensors, 2**20)
    monkeypatch.setenv("FUSEDATTN_WORKSPACE_MB", "1")
    for needed, parts in ((bound, 1), (bound + 1, 5)):

        def forward_needs(key: SdpaKey, needed: int = needed) -> int:
            return needed if key.direction is Direction.forward and batch_of(key) > 1 else 0

        recorder = run_recorded(forward_needs, rows)
        assert sum(key.direction is Direction.forward for key in recorder.run_keys) == parts


class Breaking(Bounded):
    """Has no plan for a last part of one sequence, which is asked for after the others ran."""

    def __init__(self, direction: Direction) -> None:
        super().__init__(too_large_above(2))
        self.direction, self.broke = direction, 0

    def executable(self, key: SdpaKey) -> Any:
        if batch_of(key) == 1 and key.direction is self.direction:
            self.broke += 1
            raise BuildError("a plan", "the test wants none")
        return super().executable(key)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["dense", "dense bias 1h"])
def test_a_build_that_fails_after_other_parts_ran_leaves_nothing_of_them(name: str, direction: Direction) -> None:
    case, breaking = CASES[name](), Breaking(direction)
    dout = torch.randn(case.operands[0].shape).half()
    with runtime.pretend(TARGETS["h100"], breaking):
        with pytest.warns(RuntimeWarning, match="torch engine, which is slower: build: .*the test wants none"):
            got = run_case(case, dout)
        # From then on known.
        run_case(case, dout)
    assert breaking.broke == 1
    assert_within_budget(got, expected(case, dout), eager(case, dout), torch.half)


def test_what_no_part_can_do_falls_to_the_torch_engine() -> None:
    too_large = r"one head of one sequence needs a larger workspace.*FUSEDATTN_WORKSPACE_MB, which is 512"
    with pytest.raises(BuildError, match=too_large):
        run_recorded(lambda key: 2**40)
    recorder = Recorder(lambda key: 2**40)
    q = torch.randn(2, 4, 2, 8).half()
    with runtime.pretend(TARGETS["h100"], recorder):
        with pytest.warns(RuntimeWarning, match="torch engine, which is slower: build: cannot have a cuDNN plan"):
            out = fusedattn.fused_attention(q, q, q)
        assert fusedattn.explain(q, q, q).reason == "auto: the cudnn engine could not build what it needs"
    torch.testing.assert_close(out, fusedattn.fused_attention(q, q, q))
    assert recorder.runs == []


@pytest.mark.parametrize(
    ("layout", "shape", "parts"),
    [
        ("bshd_bshd_bshd", (65535, 1, 2, 8), [(65535, 2)]),
        ("bshd_bshd_bshd", (65536, 1, 2, 8), [(32768, 2)] * 2),
        ("bshd_bshd_bshd", (1, 1, 65536, 8), [(1, 32768)] * 2),
        ("t3hd", (16384, 3, 2, 8), [(16384, 2)]),
        # The bucket of the batch is 65536.
        ("t3hd", (20000, 3, 2, 8), [(16384, 2)] * 2),
    ],
    ids=str,
)
def test_no_graph_has_more_sequences_or_heads_than_can_be_launched(
    layout: str, shape: tuple[int, ...], parts: list[tuple[int, int]]
) -> None:
    x, recorder = torch.zeros(shape, dtype=torch.half), Recorder()
    options: dict[str, Any] = {"engine": "cudnn", "qkv_layout": layout}
    with runtime.pretend(TARGETS["h100"], recorder):
        if layout == "t3hd":
            options |= {"cu_seqlens": torch.arange(len(x) + 1, dtype=torch.int32), "max_seqlen": 1}
            fusedattn.fused_attention_qkvpacked(x, **options)
        else:
            fusedattn.fused_attention(x, x, x, **options)
    assert [(batch_of(key), heads_of(key)) for key in recorder.run_keys] == parts
    assert set(recorder.keys) == set(recorder.run_keys)
