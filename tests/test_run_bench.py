# ruff: noqa: E501
"""bench: right before fast, interleaved, and memory that is what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from fusedattn.runs import bench, oracle, report, sides
from fusedattn.runs.config import BenchRun, MemoryProblem, TimeProblem
from fusedattn.runs.inputs import build
from fusedattn.runs.memory import _FRESH_BLOCKS

MIB = 2**20


def text_of(table) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def bench_problem(**fields):
    small = {"name": "a", "layout": "t3hd", "heads": 2, "head_dim": 8, "lengths": [8, 8]}
    return TimeProblem.model_validate(small | {"inputs": {"random": "normal"}} | fields)


def bench_run(**fields):
    return BenchRun(**{"kind": "bench", "problems": [bench_problem()], "repeats": 3, "warmup": 1} | fields)


def test_a_bench_row(tmp_path):
    rows = list(bench.bench_case(bench_problem(), bench_run(), tmp_path))
    assert [row.direction for row in rows] == ["forward", "forward_backward"]
    for row in rows:
        assert (row.ok, row.op, row.engine, row.rival, row.note) == (True, "fused_attention", "torch", "sdpa", "")
        assert row.error <= row.budget
        assert row.time_ms == row.ours_ms
        assert row.ratio == pytest.approx(row.ours_ms / row.rival_ms)
        assert row.ratio_spread[0] <= row.ratio_spread[1]
        assert row.limit is None


@pytest.mark.parametrize("limit", [1e-6, 1e6])
def test_a_limit_is_kept_or_not(limit, tmp_path):
    case = bench_problem(limits={"forward": limit})
    forward, backward = bench.bench_case(case, bench_run(), tmp_path)
    assert (forward.ok, forward.limit) == (limit > 1, limit)
    assert (backward.ok, backward.limit) == (True, None)
    assert ("FAILED: over the limit" in text_of(report.bench_table([forward], "t"))) == (limit < 1)


GEOMETRY = [
    ("sdpa", {"lengths": [8, 8], "mask": mask, "layout": layout})
    for mask in ("no_mask", "causal")
    for layout in ("t3hd", "thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd")
] + [
    ("sdpa_padded_mask", {"lengths": None, "lengths_q": [7, 3], "lengths_kv": [4, 9], "mask": "padding", "layout": layout})
    for layout in ("thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd")
] + [("sdpa_padded_mask", {"lengths": [7, 3], "mask": mask}) for mask in ("padding", "causal")]  # fmt: skip


@pytest.mark.parametrize(
    ("rival", "fields"), GEOMETRY, ids=lambda x: x if isinstance(x, str) else x.get("layout", "t3hd")
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_rival_computes_the_same(rival, fields, dtype, tmp_path):
    """Judged by the reference: the rival is no judge before it is judged."""
    case = bench_problem(rival=rival, dtype=dtype, **fields)
    inputs = build(case, tmp_path)
    theirs = sides.rival(inputs, rival, dtype=torch.float64).results(backward=True)
    want = oracle.expected(inputs.case, inputs.dout)
    ours = sides.ours(inputs)
    names = [name for name in want if name.startswith("d")]
    torch.testing.assert_close(theirs["out"], ours.out_tokens(want["out"]))
    for i, name in enumerate(names):
        torch.testing.assert_close(theirs[f"d{i}"], ours.leaf_tokens(want[name], i))
    row = bench._checked_row(case, inputs, backward=True)
    assert (row.ok, row.note) == (True, "")
    assert row.error <= row.budget


def test_the_rival_gets_views_of_the_same_memory(tmp_path):
    inputs = build(bench_problem(), tmp_path)
    ours, theirs = sides.ours(inputs), sides.rival(inputs, "sdpa")
    assert [x.data_ptr() for x in ours.leaves] == [x.data_ptr() for x in theirs.leaves]
    _, [gradient] = theirs.run_forward_backward()
    assert gradient.shape == inputs.case.operands[0].shape


@pytest.mark.parametrize("what", ["out", "gradient"])
def test_wrong_results_are_not_timed(what, tmp_path, monkeypatch):
    right = sides.attend

    def wrong(case, operands, bias):
        out, lse = right(case, operands, bias)
        if what == "gradient" and out.requires_grad:
            out.register_hook(lambda g: 1.01 * g)
        return (1.01 * out if what == "out" else out), lse

    monkeypatch.setattr(sides, "attend", wrong)
    rows = list(bench.bench_case(bench_problem(), bench_run(), tmp_path))
    assert [row.ok for row in rows] == [False, False]
    assert all(row.ours_ms is None and "over the budget" in row.note for row in rows)


def test_an_exception_in_a_bench_is_a_row(tmp_path):
    [row] = bench.bench_case(bench_problem(), bench_run(engine="cudnn"), tmp_path)
    assert (row.ok, row.engine, row.direction) == (False, "cudnn", "forward, forward_backward")
    assert "EngineRefusal" in row.note


def test_unequal_lengths_of_a_file_are_told(tmp_path):
    tensors = {"qkv": torch.randn(8, 3, 2, 8), "cu": torch.tensor([0, 5, 8])}
    save_file(tensors, tmp_path / "x.safetensors")
    inputs = {"file": "x.safetensors", "qkv": "qkv", "cu_seqlens": "cu"}
    case = TimeProblem(name="a", layout="t3hd", inputs=inputs)
    [row] = bench.bench_case(case, bench_run(), tmp_path)
    assert "expected equal lengths, got [5, 3]; use sdpa_padded_mask" in row.note


def test_repeats_are_interleaved_after_the_warmup():
    said: list[str] = []
    times = bench.interleaved([lambda: said.append("a"), lambda: said.append("b")], repeats=3, warmup=2)
    assert said == ["a", "b"] * 5
    assert [len(t) for t in times] == [3, 3]


def test_peak_memory_is_right_on_a_known_allocation():
    """100 MiB in pieces that glibc would rather keep, gone at the end; the result of 30 does not count."""
    program = """
        import torch
        from fusedattn.runs.memory import peak_beyond
        MIB = 2**20
        old_peak = torch.ones(300 * MIB // 4)
        del old_peak
        def call():
            out = torch.ones(30 * MIB // 4)
            pieces = [torch.ones(MIB // 4) for _ in range(100)]
            return out
        torch.ones(1)
        print(peak_beyond(call), peak_beyond(call), peak_beyond(lambda: torch.ones(30 * MIB // 4)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | _FRESH_BLOCKS,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, nothing = (int(word) / MIB for word in done.stdout.split())
    assert first == pytest.approx(100, abs=3)
    assert second == pytest.approx(100, abs=3)
    assert nothing < 2


def memory_problem(**fields):
    small = {"name": "a", "measure": "peak_memory", "layout": "t3hd", "heads": 2, "head_dim": 64, "lengths": [2048]}
    return MemoryProblem.model_validate(small | {"inputs": {"random": "normal"}} | fields)


def test_memory_of_a_problem(tmp_path):
    """Both sides in processes of their own; the limit is the larger of the two that are given."""
    limits = {"mib": 0.001, "times_rival": 1e6}
    [row] = bench.bench_case(memory_problem(limits=limits), bench_run(), tmp_path)
    assert row.ok, row.note
    assert 0 <= row.rival_mib < 32, "the scores alone are 32 MiB"
    assert row.limit == max(0.001, 1e6 * row.rival_mib)
    [row] = bench.bench_case(memory_problem(limits={"mib": 0.001}), bench_run(), tmp_path)
    assert not row.ok
    assert "MiB" in text_of(report.bench_table([row], "t"))


def test_memory_rows_hold_each_side_and_their_ratio(tmp_path, monkeypatch):
    asked = {"ours": 12 * MIB, "rival": 3 * MIB}
    monkeypatch.setattr(bench, "measure_memory", lambda case, engine, folder, who: asked[who])
    for limits, limit in (
        ({"mib": 5, "times_rival": 2}, 6),
        ({"mib": 11, "times_rival": 2}, 11),
        ({"mib": 1, "times_rival": 4}, 12),
    ):
        [row] = bench.bench_case(memory_problem(limits=limits), bench_run(), tmp_path)
        assert (row.ours_mib, row.rival_mib, row.ratio, row.limit, row.ok) == (12, 3, 4, limit, limit == 12)


def test_a_failed_memory_process_is_told(tmp_path, monkeypatch):
    checked = bench._checked_row
    monkeypatch.setattr(
        bench, "_checked_row", lambda case, inputs, backward: checked(case, build(case, tmp_path), backward)
    )
    monkeypatch.setattr(bench, "engine_of", lambda case: "cudnn")
    [row] = bench.bench_case(memory_problem(), bench_run(engine="cudnn"), tmp_path)
    assert not row.ok
    assert "measuring memory failed" in row.note
