# ruff: noqa: E501
"""Run files: what is read, what is refused and in which words, and the JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from fusedattn.enums import Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import RunFileError
from fusedattn.runs import config, fields
from fusedattn.runs.load import load_run
from fusedattn.runs.sweeps import expand

CONFIGS = Path(__file__).parent.parent / "configs"
PROBLEM = """\
kind: verify
problems:
  - name: a
    layout: t3hd
    heads: 2
    head_dim: 8
    lengths: [3, 5]
    inputs: {random: normal}
"""


@pytest.fixture
def load(tmp_path):
    """Writes a text to run.yaml and loads it."""

    def load(text: str):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return load_run(file)

    return load


def with_line(line: str) -> str:
    return PROBLEM + f"    {line}\n"


def without(field: str) -> str:
    return "".join(line for line in PROBLEM.splitlines(keepends=True) if field not in line)


@pytest.mark.parametrize("name", ["quickstart", "verify_cpu", "bench_cpu", "bench_dispatch"])
def test_configs_load(name):
    run = load_run(CONFIGS / f"{name}.yaml")
    assert run.out == f"results/{name}.json"


REFUSED = {
    "empty": ("", "run.yaml: empty; a run file says at least kind and problems"),
    "comment only": ("# nothing\n", "run.yaml: empty;"),
    "not a mapping": ("[1, 2]\n", "run.yaml: expected a mapping with kind and problems, got [1, 2]"),
    "syntax": ("kind: verify\nproblems: [\n", "run.yaml:3: not YAML: "),
    "tab": ("kind: verify\n\tproblems: 1\n", "run.yaml:2: not YAML: found character '\\t'"),
    "unsafe tag": ("kind: !!python/object:os.system {}\n", "run.yaml:1: not YAML: could not determine a constructor"),
    "two documents": ("kind: verify\n---\nkind: bench\n", "run.yaml:2: not YAML: but found another document"),
    "control character": ("kind: \x01\n", "run.yaml: not YAML: unacceptable character #x0001"),
    "own alias": ("kind: &a [*a]\n", "run.yaml:1: not YAML: an alias inside its own anchor"),
    "no kind": ("problems: []\n", "run.yaml: kind: expected verify or bench or dispatch, which is missing"),
    "wrong kind": ("kind: benhc\n", "run.yaml:1: kind: expected verify or bench or dispatch, got 'benhc'; did you mean 'bench'?"),
    "kind is no text": ("kind: [verify]\n", "run.yaml:1: kind: expected verify or bench or dispatch, got ['verify']"),
    "no problems": ("kind: verify\n", "run.yaml: problems: missing"),
    "problems empty": ("kind: verify\nproblems: []\n", "run.yaml:2: problems: expected to have at least 1 item"),
    "a problem is no mapping": ("kind: verify\nproblems: [3]\n", "run.yaml:2: problems[0]: expected a mapping of name, "),
    "twice": (PROBLEM + "kind: bench\n", "run.yaml:1: kind: this key is there twice, in lines 1 and 9"),
    "twice, nested": (with_line("heads: 3"), "problems[0].heads: this key is there twice, in lines 5 and 9"),
    "unknown at the top": (PROBLEM + "engin: auto\n", "run.yaml:9: engin: unknown key; did you mean 'engine'?"),
    "unknown in a problem": (with_line("maks: causal"), "run.yaml:9: problems[0].maks: unknown key; did you mean 'mask'?"),
    "unknown in inputs": (PROBLEM.replace("normal", "normal, sed: 1"), "problems[0].inputs.sed: unknown key; did you mean 'seed'?"),
    "unknown in a sweep": (with_line("sweep: {biass: [none]}"), "problems[0].sweep.biass: unknown key; did you mean 'bias'?"),
    "unknown like nothing": (PROBLEM + "xyzzy: 1\n", "xyzzy: unknown key; known are engine, out, kind, problems"),
    "wrong word": (with_line("mask: paddin"), "problems[0].mask: expected 'no_mask', 'padding' or 'causal', got 'paddin'; did you mean 'padding'?"),
    "wrong word in a sweep": (with_line("sweep: {bias: [none, pre]}"), "problems[0].sweep.bias[1]: expected 'none', 'pre_scale' or 'post_scale', got 'pre'"),
    "empty sweep": (with_line("sweep: {bias: []}"), "problems[0].sweep.bias: expected to have at least 1 item"),
    "bool as a number": (PROBLEM.replace("heads: 2", "heads: true"), "problems[0].heads: expected a valid integer, got True"),
    "negative length": (PROBLEM.replace("[3, 5]", "[3, -5]"), "problems[0].lengths[1]: expected greater than or equal to 0, got -5"),
    "dropout of 1": (with_line("dropout: 1.0"), "problems[0].dropout: expected less than 1, got 1.0"),
    "dropout NaN": (with_line("dropout: .nan"), "problems[0].dropout: expected a finite number, got nan"),
    "no inputs": (without("inputs"), "problems[0].inputs: missing"),
    "inputs of neither kind": (PROBLEM.replace("random", "randm"), "problems[0].inputs: expected a mapping with `file` (of tensors) or `random`"),
    "no layout": (without("layout"), "problems[0].layout: missing; give it here or in the sweep"),
    "no heads": (without("heads"), "problems[0].heads: missing; random inputs need it"),
    "no lengths": (without("lengths"), "problems[0].lengths: give either lengths, or lengths_q and lengths_kv"),
    "both lengths": (with_line("lengths_q: [3, 5]"), "problems[0].lengths: give either lengths, or"),
    "one of the lengths": (PROBLEM.replace("lengths:", "lengths_q:"), "problems[0].lengths_kv: lengths_q and lengths_kv go together"),
    "unlike lengths packed": (PROBLEM.replace("lengths: [3, 5]", "lengths_q: [3, 5]\n    lengths_kv: [3, 4]"), "problems[0].lengths_q: layout t3hd packs queries and keys together"),
    "max_seqlen too small": (with_line("max_seqlen_q: 4"), "problems[0].max_seqlen_q: expected at least the longest, 5, got 4"),
    "here and swept": (with_line("sweep: {heads: [1]}"), "run.yaml:9: problems[0].sweep.heads: given here and in the problem; keep one"),
    "nvte unpacked": (with_line("op: nvte").replace("t3hd", "thd_thd_thd"), "problems[0].op: the nvte functions take the packed layouts t3hd and thd_t2hd, got thd_thd_thd"),
    "nvte through lse": (with_line("op: nvte\n    through_lse: true"), "problems[0].through_lse: the nvte functions take no gradient of the log-sum-exp"),
    "nvte backward of inference": (with_line("op: nvte\n    is_training: false\n    directions: [backward]"), "problems[0].directions: after inference nvte has no backward"),
    "masked rows need a bias": (PROBLEM.replace("normal", "all_masked_rows"), "problems[0].bias: all_masked_rows puts -inf into a bias; name a bias type"),
    "no padding for NaN": (PROBLEM.replace("normal", "nan_in_padding").replace("t3hd", "bshd_bshd_bshd"), "problems[0].mask: layout bshd_bshd_bshd has padding under mask padding only"),
    "bias_shape without bias": (with_line("bias_shape: 11ss"), "problems[0].bias_shape: there is no bias; name a bias type"),
    "swept bias_dtype without bias": (with_line("sweep: {bias_dtype: [float16]}"), "problems[0].sweep.bias_dtype: there is no bias; name a bias type"),
    "bad case of a sweep": (with_line("op: nvte").replace("layout: t3hd", "sweep: {layout: [t3hd, thd_thd_thd]}"), "problems[0].op: the nvte functions take the packed layouts t3hd and thd_t2hd, got thd_thd_thd (case 'a: thd_thd_thd')"),
    "same name": (PROBLEM + "".join(PROBLEM.splitlines(keepends=True)[2:]), "run.yaml:9: problems[1].name: 'a' is the name of problems[0] already"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(load, text, message):
    with pytest.raises(RunFileError) as caught:
        load(text)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_all_faults_are_told_by_line(load):
    text = PROBLEM.replace("heads: 2", "heds: 2").replace("layout: t3hd", "layout: t3h") + "outt: x\n"
    with pytest.raises(RunFileError) as caught:
        load(text)
    lines = [line.partition("run.yaml:")[2] for line in str(caught.value).splitlines()]
    assert [line.split(": ")[:2] for line in lines] == [
        ["4", "problems[0].layout"],
        ["5", "problems[0].heds"],
        ["9", "outt"],
    ]


def test_missing_file(tmp_path):
    with pytest.raises(RunFileError, match=r"no\.yaml: No such file or directory$"):
        load_run(tmp_path / "no.yaml")
    with pytest.raises(RunFileError, match=r"Is a directory$"):
        load_run(tmp_path)


def test_not_text(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunFileError, match=r"a\.yaml: not UTF-8 text"):
        load_run(tmp_path / "a.yaml")


BENCH = """\
kind: bench
problems:
  - name: a
    layout: t3hd
    heads: 2
    head_dim: 8
    lengths: [4, 4]
    inputs: {random: normal}
"""
REFUSED_BENCH = {
    "unlike lengths": (BENCH.replace("[4, 4]", "[4, 5]"), "problems[0].rival: sdpa takes equal lengths; use sdpa_padded_mask"),
    "dense padding": (BENCH.replace("t3hd", "bshd_bshd_bshd\n    mask: padding"), "problems[0].rival: sdpa takes no padding mask"),
    "unmeasured limit": (BENCH + "    directions: [forward]\n    limits: {forward_backward: 1}\n", "run.yaml:10: problems[0].limits.forward_backward: is not measured; directions are forward"),
    "wrong measure": (BENCH + "    measure: tiem\n", "problems[0].measure: expected 'time', got 'tiem'; did you mean 'time'?"),
    "limit of another measure": (BENCH + "    measure: peak_memory\n    limits: {forward: 1}\n", "problems[0].limits.forward: unknown key"),
    "no verify fields": (BENCH + "    dropout: 0.1\n", "problems[0].dropout: unknown key"),
    "limit of zero": (BENCH + "    limits: {forward: 0}\n", "problems[0].limits.forward: expected greater than 0, got 0"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED_BENCH.values(), ids=REFUSED_BENCH)
def test_refused_bench(load, text, message):
    load(BENCH)
    with pytest.raises(RunFileError) as caught:
        load(text)
    assert message in str(caught.value)


def test_sweep_is_the_product_in_readable_names(load):
    sweep = "sweep: {bias: [none, pre_scale], dropout: [0.0, 0.1], is_training: [true, false]}"
    cases = expand(load(with_line(sweep)).problems[0])
    assert [case.name for case in cases[:3]] == [
        "a: bias=none, dropout=0.0, training",
        "a: bias=none, dropout=0.0, inference",
        "a: bias=none, dropout=0.1, training",
    ]
    assert {(c.bias, c.dropout, c.is_training) for c in cases} == {
        (bias, p, training) for bias in ("none", "pre_scale") for p in (0.0, 0.1) for training in (True, False)
    }
    assert all(case.sweep is None and case.lengths == [3, 5] for case in cases)
    assert len({case.name for case in cases}) == len(cases)


def test_sweep_of_lengths(load):
    cases = expand(load(without("lengths") + "    sweep: {lengths: [[1], [2, 3]]}\n").problems[0])
    assert [(case.name, case.lengths) for case in cases] == [("a: lengths=[1]", [1]), ("a: lengths=[2,3]", [2, 3])]


def test_anchors_and_merge_keys(load):
    text = "kind: verify\nproblems:\n  - &a {name: a, layout: t3hd, heads: 2, head_dim: 8, lengths: [3], inputs: {random: normal}}\n"
    run = load(text + "  - {<<: *a, name: b, heads: 5}\n")
    assert [(p.name, p.heads, p.head_dim) for p in run.problems] == [("a", 2, 8), ("b", 5, 8)]


def test_words_take_the_functions_spellings(load):
    text = PROBLEM.replace("t3hd", "NVTE_QKV_INTERLEAVED") + "    mask: Causal_Mask\n    bias: post_scale_bias\n"
    problem = load(text).problems[0]
    assert (problem.layout, problem.mask, problem.bias) == ("t3hd", "causal", "post_scale")


@pytest.mark.parametrize(
    ("words", "enum"),
    [
        (fields._LayoutWord, NVTE_QKV_Layout),
        (fields._BiasWord, NVTE_Bias_Type),
        (fields._MaskWord, NVTE_Mask_Type),
        (fields.EngineWord, Engine),
    ],
)
def test_words_are_the_enums(words, enum):
    members = [enum.parse(word, "word") for word in get_args(words)]
    assert sorted(members, key=str) == sorted(enum, key=str)


def definitions():
    return config.json_schema()["$defs"]


def test_schema_lists_the_words():
    properties = definitions()["VerifyProblem"]["properties"]
    assert properties["mask"]["enum"] == ["no_mask", "padding", "causal"]
    assert properties["bias"]["enum"] == ["none", "pre_scale", "post_scale"]
    assert "thd_t2hd" in properties["layout"]["anyOf"][0]["enum"]
    assert definitions()["RandomInputs"]["properties"]["random"]["enum"] == list(get_args(config.Distribution))
    assert config.json_schema()["discriminator"]["propertyName"] == "kind"


def test_schema_describes_each_field_and_forbids_others():
    for name, definition in definitions().items():
        assert definition["additionalProperties"] is False, name
        if not name.endswith("Sweep"):
            undescribed = {f for f, p in definition["properties"].items() if "description" not in p}
            assert not undescribed, name


def test_schema_is_json():
    assert json.loads(json.dumps(config.json_schema())) == config.json_schema()


def test_sweeps_have_the_problems_fields():
    """What is swept has the type of the field, so a sweep can hold what the problem can."""
    for problem, sweep in ((config.Geometry, config.GeometrySweep), (config.VerifyProblem, config.VerifySweep)):
        assert set(sweep.model_fields) <= set(problem.model_fields)
