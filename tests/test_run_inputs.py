# ruff: noqa: E501
"""Tensors of runs: distributions that keep their names' promises, and tensor files that fit or say why not."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from fusedattn.errors import RunFileError
from fusedattn.runs.config import BenchRun, VerifyProblem
from fusedattn.runs.inputs import build
from fusedattn.runs.load import load_run

LAYOUTS = ("t3hd", "thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd")


def problem(layout="t3hd", random="normal", seed=0, **fields):
    fields = {"heads": 3, "head_dim": 5, "lengths": [7, 0, 2]} | fields
    return VerifyProblem(name="a", layout=layout, inputs={"random": random, "seed": seed}, **fields)


def tensors(inputs):
    case = inputs.case
    found = [*case.operands, inputs.dout, inputs.dlse, case.bias, case.rng_state, case.cu_seqlens_q, case.cu_seqlens_kv]
    return [x for x in found if x is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_seed_same_tensors(layout, tmp_path):
    options = {"bias": "post_scale", "dropout": 0.1, "through_lse": True, "mask": "padding"}
    one, two, other = (build(problem(layout, seed=seed, **options), tmp_path) for seed in (4, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(two), strict=True))
    assert not torch.equal(one.case.operands[0], other.case.operands[0])
    assert one.case.rng_state.tolist() == [4, 0]


def test_what_the_problem_says_reaches_the_case(tmp_path):
    fields = {
        "mask": "causal",
        "bias": "pre_scale",
        "dropout": 0.25,
        "attn_scale": -0.5,
        "max_seqlen_q": 9,
        "max_seqlen_kv": 8,
    }
    case = build(problem("thd_t2hd", seed=6, **fields), tmp_path, engine="torch").case
    assert (case.layout, case.mask_type, case.bias_type) == ("thd_t2hd", "causal", "pre_scale_bias")
    assert (case.dropout, case.attn_scale, case.engine) == (0.25, -0.5, "torch")
    assert (case.max_seqlen_q, case.max_seqlen_kv) == (9, 8)
    assert build(problem(), tmp_path).dlse is None


def test_dtypes_round_the_same_numbers(tmp_path):
    wide, narrow = (build(problem(dtype=dtype), tmp_path).case.operands[0] for dtype in ("float64", "bfloat16"))
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize(
    ("layout", "shapes", "out"),
    [
        ("t3hd", [(9, 3, 3, 5)], (9, 3, 5)),
        ("thd_t2hd", [(9, 3, 5), (9, 2, 3, 5)], (9, 3, 5)),
        ("thd_thd_thd", [(9, 3, 5)] * 3, (9, 3, 5)),
        ("bshd_bshd_bshd", [(3, 7, 3, 5)] * 3, (3, 7, 3, 5)),
        ("sbhd_sbhd_sbhd", [(7, 3, 3, 5)] * 3, (7, 3, 3, 5)),
        ("bhsd_bhsd_bhsd", [(3, 3, 7, 5)] * 3, (3, 3, 7, 5)),
    ],
)
def test_shapes(layout, shapes, out, tmp_path):
    inputs = build(problem(layout, through_lse=True, dtype="float16"), tmp_path)
    assert [tuple(x.shape) for x in inputs.case.operands] == shapes
    assert tuple(inputs.dout.shape) == out
    assert inputs.dout.dtype == torch.float16
    assert tuple(inputs.dlse.shape) == ((9, 3) if len(out) == 3 else (3, 3, 7))
    assert inputs.dlse.dtype == torch.float32


def test_unlike_lengths_and_max_seqlen(tmp_path):
    fields = {"lengths": None, "lengths_q": [4, 1], "lengths_kv": [2, 6], "max_seqlen_q": 11, "bias": "pre_scale"}
    inputs = build(problem("thd_t2hd", bias_shape="bhss", bias_dtype="float64", **fields), tmp_path)
    assert inputs.case.cu_seqlens_q.tolist() == [0, 4, 5]
    assert inputs.case.cu_seqlens_kv.tolist() == [0, 2, 8]
    assert tuple(inputs.case.bias.shape) == (2, 3, 11, 6)
    assert inputs.case.bias.dtype == torch.float64
    dense = build(problem("bshd_bshd_bshd", mask="padding", **fields), tmp_path)
    assert [tuple(x.shape) for x in dense.case.operands] == [(2, 11, 3, 5), (2, 6, 3, 5), (2, 6, 3, 5)]


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_dense_lengths_act_under_padding_only(mask, tmp_path):
    inputs = build(problem("bshd_bshd_bshd", mask=mask), tmp_path)
    assert inputs.case.cu_seqlens_q is None
    assert inputs.operands.lengths_q == [7, 7, 7]


@pytest.mark.parametrize("shape", ["bhss", "1hss", "b1ss", "11ss", "bh1s", "1h1s", "b11s", "111s"])
def test_bias_shapes(shape, tmp_path):
    sizes = dict(zip("bh", (3, 3), strict=True))
    expected = tuple(1 if axis == "1" else sizes.get(axis, 7) for axis in shape)
    assert tuple(build(problem(bias="pre_scale", bias_shape=shape), tmp_path).case.bias.shape) == expected


def test_uniform_keeps_its_bounds(tmp_path):
    x = build(problem(random="uniform", lengths=[500]), tmp_path).case.operands[0]
    assert -1 <= x.min() < -0.99
    assert 0.99 < x.max() <= 1


def test_large_logits_overflow_exp_but_not_float16(tmp_path):
    inputs = build(problem(random="large_logits", head_dim=128, lengths=[200], dtype="float16"), tmp_path)
    q, k, _ = inputs.case.operands[0].float().unbind(1)
    products = torch.einsum("qhd,khd->hqk", q, k)
    assert products.abs().max() < torch.finfo(torch.float16).max
    assert products.max() / math.sqrt(128) > math.log(torch.finfo(torch.float32).max)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_padding_is_there_and_nowhere_else(layout, tmp_path):
    inputs = build(problem(layout, random="nan_in_padding", mask="padding", through_lse=True), tmp_path)
    tokens = 9  # 7 + 0 + 2, of 12 with the tail, or of 3 sequences padded to 7
    for x in inputs.case.operands:
        assert (~x.isnan()).sum() == tokens * x.numel() // (12 if x.shape[0] == 12 else 21)
    assert inputs.dout.isnan().any()
    assert (~inputs.dlse.isnan()).sum() == tokens * 3
    if layout == "sbhd_sbhd_sbhd":
        assert inputs.dout[2:, 2].isnan().all()
        assert not inputs.dout[:2, 2].isnan().any()


def test_all_masked_rows(tmp_path):
    bias = build(problem(random="all_masked_rows", bias="pre_scale", bias_shape="bhss"), tmp_path).case.bias
    rows = (bias == -torch.inf).all(-1)
    assert rows.flatten()[::3].all()
    assert not rows.all()
    assert (bias == -torch.inf).any(-1).sum() > rows.sum()


@pytest.fixture
def from_file(tmp_path):
    """A run file over a tensor file; keys of inputs are given, and other lines of the problem."""
    contents = {
        "qkv": torch.randn(9, 3, 2, 4),
        "q": torch.randn(9, 2, 4),
        "kv": torch.randn(9, 2, 2, 4),
        "out": torch.randn(9, 2, 4),
        "lse": torch.randn(9, 2),
        "cu": torch.tensor([0, 4, 4, 9]),
        "cu_too_long": torch.tensor([0, 4, 10]),
        "cu_falling": torch.tensor([0, 5, 4]),
        "cu_from_one": torch.tensor([1, 9]),
        "bias": torch.randn(1, 2, 5, 5),
        "dense": torch.randn(3, 5, 2, 4),
        "cu_dense": torch.tensor([0, 5, 6, 9]),
        "integers": torch.zeros(9, 3, 2, 4, dtype=torch.int32),
    }
    save_file(contents, tmp_path / "x.safetensors")

    def from_file(keys: str, *lines: str):
        text = f"kind: verify\nproblems:\n  - name: a\n    inputs: {{file: x.safetensors, {keys}}}\n"
        (tmp_path / "run.yaml").write_text(text + "".join(f"    {line}\n" for line in lines))
        run = load_run(tmp_path / "run.yaml")
        return build(run.problems[0], tmp_path), contents

    return from_file


def test_packed_tensor_of_a_file(from_file):
    inputs, contents = from_file("qkv: qkv, cu_seqlens: cu, expect: {out: out, lse: lse}", "layout: t3hd")
    assert torch.equal(inputs.case.operands[0], contents["qkv"])
    assert inputs.case.cu_seqlens_q.tolist() == [0, 4, 4, 9]
    assert inputs.case.cu_seqlens_q.dtype == torch.int32
    assert inputs.case.max_seqlen_q == 5
    assert torch.equal(inputs.expect["out"], contents["out"])
    assert torch.equal(inputs.expect["lse"], contents["lse"])


@pytest.mark.parametrize(("layout", "count"), [("thd_t2hd", 2), ("thd_thd_thd", 3)])
def test_a_packed_tensor_gives_strided_views(from_file, layout, count):
    inputs, contents = from_file("qkv: qkv, cu_seqlens: cu", f"layout: {layout}")
    operands = inputs.case.operands
    assert len(operands) == count
    assert torch.equal(operands[0], contents["qkv"][:, 0])
    assert torch.equal(operands[-1].reshape(9, -1), contents["qkv"][:, count - 1 :].reshape(9, -1))
    assert len({x.untyped_storage().data_ptr() for x in operands}) == 1
    assert not operands[0].is_contiguous()


def test_other_forms_of_a_file(from_file):
    inputs, contents = from_file("q: q, kv: kv, cu_seqlens: cu, bias: bias", "layout: thd_thd_thd", "bias: pre_scale")
    assert torch.equal(inputs.case.operands[2], contents["kv"][:, 1])
    assert torch.equal(inputs.case.bias, contents["bias"])
    inputs, _ = from_file("qkv: qkv, cu_seqlens: cu", "layout: t3hd", "dtype: bfloat16")
    assert inputs.case.operands[0].dtype == inputs.dout.dtype == torch.bfloat16
    keys = "q: dense, k: dense, v: dense, cu_seqlens: cu_dense"
    inputs, _ = from_file(keys, "layout: bshd_bshd_bshd", "mask: padding")
    assert inputs.operands.lengths_q == [5, 1, 3]
    inputs, _ = from_file("q: dense, k: dense, v: dense", "layout: bshd_bshd_bshd")
    assert inputs.case.cu_seqlens_q is None
    assert inputs.operands.lengths_kv == [5, 5, 5]


REFUSED = {
    "no key": ("qkv: qvk, cu_seqlens: cu", "inputs.qkv: no tensor 'qvk' in x.safetensors, which has bias, cu, cu_dense, cu_falling, cu_from_one, cu_too_long, dense, integers, kv, lse, out, q, qkv; did you mean 'qkv'?"),
    "wrong rank": ("qkv: q, cu_seqlens: cu", "inputs.qkv: expected 'q' of x.safetensors to hold floats [T, 3, H, D], got float32 [9, 2, 4]"),
    "wrong axis": ("qkv: kv, cu_seqlens: cu", "inputs.qkv: expected 'kv' of x.safetensors to hold floats [T, 3, H, D], got float32 [9, 2, 2, 4]"),
    "integers": ("qkv: integers, cu_seqlens: cu", "to hold floats [T, 3, H, D], got int32 [9, 3, 2, 4]"),
    "floats as lengths": ("qkv: qkv, cu_seqlens: lse", "inputs.cu_seqlens: expected 'lse' of x.safetensors to hold integers [B+1], got float32 [9, 2]"),
    "lengths beyond": ("qkv: qkv, cu_seqlens: cu_too_long", "inputs.cu_seqlens: expected 'cu_too_long' to rise from 0 to at most 9, got [0, 4, 10]"),
    "falling lengths": ("qkv: qkv, cu_seqlens: cu_falling", "inputs.cu_seqlens: expected 'cu_falling' to rise from 0 to at most 9, got [0, 5, 4]"),
    "lengths from one": ("qkv: qkv, cu_seqlens: cu_from_one", "inputs.cu_seqlens: expected 'cu_from_one' to rise from 0"),
    "expected shape": ("qkv: qkv, cu_seqlens: cu, expect: {out: lse}", "inputs.expect.out: expected 'lse' of x.safetensors to hold floats [9, 2, 4], got float32 [9, 2]"),
    "missing cu_seqlens": ("qkv: qkv", "inputs.cu_seqlens: missing; layout t3hd with mask no_mask needs lengths"),
    "wrong keys": ("q: q, kv: kv, cu_seqlens: cu", "inputs: layout t3hd needs the keys qkv, got kv and q"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(from_file, keys, message):
    with pytest.raises(RunFileError) as caught:
        from_file(keys, "layout: t3hd")
    assert "run.yaml:4: problems[0]." in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("heads: 2", "problems[0].heads: belongs to random inputs; a file brings its own"),
        ("bias: pre_scale", "problems[0].inputs.bias: missing; bias pre_scale needs its key"),
        ("dropout: 0.1", "problems[0].inputs.expect: another program's dropout pattern is not ours; use dropout 0"),
        ("dtype: float16", "problems[0].inputs.expect: was computed from the tensors as they are in the file"),
    ],
)
def test_fields_that_a_file_excludes(from_file, line, message):
    with pytest.raises(RunFileError) as caught:
        from_file("qkv: qkv, cu_seqlens: cu, expect: {out: out}", "layout: t3hd", line)
    assert message in str(caught.value)


@pytest.mark.parametrize("contents", [None, b"", b"not a tensor file at all"])
def test_tensor_file_that_is_none(tmp_path, contents):
    if contents is not None:
        (tmp_path / "y.safetensors").write_bytes(contents)
    text = (
        "kind: verify\nproblems:\n  - {name: a, layout: t3hd, inputs: {file: y.safetensors, qkv: a, cu_seqlens: b}}\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(RunFileError, match=r"run\.yaml:3: problems\[0\]\.inputs\.file: y\.safetensors") as caught:
        load_run(tmp_path / "run.yaml")
    assert ("no such file" in str(caught.value).lower()) == (contents is None)


def test_paths_are_relative_to_the_run_file(from_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    from_file("qkv: qkv, cu_seqlens: cu", "layout: t3hd")


def test_bench_takes_a_file_too(from_file, tmp_path):
    inputs = {"file": "x.safetensors", "qkv": "qkv", "cu_seqlens": "cu"}
    run = BenchRun(kind="bench", problems=[{"name": "a", "layout": "t3hd", "inputs": inputs}])
    from_file("qkv: qkv, cu_seqlens: cu", "layout: t3hd")
    assert build(run.problems[0], tmp_path).operands.lengths_q == [4, 0, 5]
