"""verify: what it compares, how a fault shows; and what a run leaves behind."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from fusedattn.runs import budget, oracle, report, verify
from fusedattn.runs.config import VerifyProblem, VerifyRun
from fusedattn.runs.inputs import build


def problem(**fields):
    small = {"name": "a", "layout": "t3hd", "heads": 2, "head_dim": 8, "lengths": [5, 0, 3]}
    return VerifyProblem.model_validate(small | {"inputs": {"random": "normal"}} | fields)


def rows_of(tmp_path, engine="auto", **fields):
    return list(verify.verify_case(problem(**fields), engine, tmp_path))


def text_of(table) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.parametrize("op", ["fused_attention", "nvte"])
@pytest.mark.parametrize("training", [True, False])
def test_a_case_is_compared_in_its_directions(op, training, tmp_path):
    rows = rows_of(tmp_path, op=op, bias="pre_scale", dropout=0.1, is_training=training, mask="causal")
    assert [row.direction for row in rows] == (
        ["forward"] if op == "nvte" and not training else ["forward", "backward"]
    )
    for row in rows:
        assert (row.ok, row.note, row.engine, row.op, row.against) == (True, "", "torch", op, "reference")
        assert row.error <= row.budget
        assert row.time_ms > 0


def test_directions_are_those_asked_for(tmp_path):
    assert [row.direction for row in rows_of(tmp_path, directions=["backward"])] == ["backward"]


@pytest.mark.parametrize(
    ("quantity", "failed"),
    [("out", ["forward"]), ("lse", ["forward"]), ("dqkv", ["backward"]), ("dbias", ["backward"])],
)
def test_a_wrong_quantity_fails_its_direction(quantity, failed, tmp_path, monkeypatch):
    right = oracle.run_case

    def wrong(*args, **kwargs):
        results = right(*args, **kwargs)
        if quantity in results:
            results[quantity].flatten()[0] += 0.01
        return results

    monkeypatch.setattr(oracle, "run_case", wrong)
    rows = rows_of(tmp_path, bias="post_scale")
    assert [row.direction for row in rows if not row.ok] == failed
    [row] = [row for row in rows if not row.ok]
    assert row.quantity == quantity
    assert row.error == pytest.approx(0.01, rel=0.01)
    assert row.error > row.budget
    assert row.note.startswith(f"{quantity}: worst at (0,")


@pytest.mark.parametrize("quantity", ["lse", "dbias"])
def test_a_missing_quantity_fails(quantity, tmp_path, monkeypatch):
    right = oracle.run_case
    monkeypatch.setattr(
        oracle, "run_case", lambda *a, **k: {name: x for name, x in right(*a, **k).items() if name != quantity}
    )
    rows = rows_of(tmp_path, bias="post_scale")
    assert sum(not row.ok for row in rows) == 1
    assert "missing" in next(row.note for row in rows if not row.ok)


@pytest.mark.parametrize("training", [True, False])
def test_inference_drops_nothing_and_training_does(training, tmp_path, monkeypatch):
    """Were the dropout of the other mode computed, the row would fail."""
    right = oracle.run_case
    monkeypatch.setattr(oracle, "run_case", lambda *a, is_training, **k: right(*a, is_training=not is_training, **k))
    rows = rows_of(tmp_path, lengths=[40], dropout=0.5, is_training=training)
    assert not any(row.ok for row in rows)


@pytest.mark.parametrize("through_lse", [True, False])
def test_the_gradient_comes_through_lse_where_asked(through_lse, tmp_path, monkeypatch):
    right = oracle.run_case
    seen = []

    def spy(case, dout, dlse, **kwargs):
        seen.append((dout is not None, dlse is not None))
        return right(case, dout, dlse, **kwargs)

    monkeypatch.setattr(oracle, "run_case", spy)
    assert all(row.ok for row in rows_of(tmp_path, through_lse=through_lse))
    assert seen == [(False, False), (True, through_lse)]


def test_an_exception_is_a_row_and_the_other_direction_goes_on(tmp_path, monkeypatch):
    right = oracle.run_case

    def forward_only(case, dout=None, *args, **kwargs):
        if dout is not None:
            raise RuntimeError("no [backward] here")
        return right(case, dout, *args, **kwargs)

    monkeypatch.setattr(oracle, "run_case", forward_only)
    forward, backward = rows_of(tmp_path)
    assert forward.ok
    assert (backward.ok, backward.error, backward.note) == (False, None, "RuntimeError: no [backward] here")
    assert "FAILED: RuntimeError: no [backward] here" in text_of(report.verify_table([forward, backward], "t"))


def test_a_refusal_shows_its_reasons(tmp_path):
    forward, _ = rows_of(tmp_path, engine="cudnn")
    assert (forward.ok, forward.engine) == (False, "cudnn")
    assert forward.note.startswith("EngineRefusal: ")
    assert "needs tensors on a CUDA device" in forward.note


def with_file(tmp_path, error: float, key: str = "out"):
    """A case whose tensor file expects what the reference says, plus an error in one place."""
    qkv = torch.randn(8, 3, 2, 8, generator=torch.Generator().manual_seed(3))
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
    expected = oracle.expected(oracle.Case((qkv,), "t3hd", cu_seqlens_q=cu_seqlens))[key].float()
    expected.flatten()[7] += error
    save_file({"qkv": qkv, "cu": cu_seqlens, "theirs": expected}, tmp_path / "x.safetensors")
    inputs = {"file": "x.safetensors", "qkv": "qkv", "cu_seqlens": "cu", "expect": {key: "theirs"}}
    return VerifyProblem(name="a", layout="t3hd", inputs=inputs)


@pytest.mark.parametrize("key", ["out", "lse"])
def test_the_files_own_result_is_compared(key, tmp_path):
    rows = list(verify.verify_case(with_file(tmp_path, 0.0, key), "auto", tmp_path))
    assert [(row.direction, row.against) for row in rows] == [
        ("forward", "reference"),
        ("forward", "file"),
        ("backward", "reference"),
    ]
    assert all(row.ok for row in rows)
    rows = list(verify.verify_case(with_file(tmp_path, 1e-4, key), "auto", tmp_path))
    assert [row.ok for row in rows] == [True, False, True]
    assert rows[1].quantity == key
    assert rows[1].error == pytest.approx(1e-4, rel=0.05)


def test_the_budget_of_a_files_result_is_twice_the_references(tmp_path):
    rows = list(verify.verify_case(with_file(tmp_path, 0.0), "auto", tmp_path))
    inputs = build(with_file(tmp_path, 0.0), tmp_path)
    got, want, eager = (f(inputs.case) for f in (oracle.run_case, oracle.expected, oracle.eager))
    [out, _] = budget.compare(got, want, eager, torch.float32)
    assert rows[1].budget == pytest.approx(2 * out.budget)


def test_a_nan_in_the_files_result_fails(tmp_path):
    assert not list(verify.verify_case(with_file(tmp_path, torch.nan), "auto", tmp_path))[1].ok


def test_cases_carry_the_paths_of_their_problems():
    sweep = {"dtype": ["float32", "float64"]}
    run = VerifyRun(kind="verify", problems=[problem(), problem(name="b", sweep=sweep)])
    assert [(path, case.name) for path, case in verify.verify_cases(run)] == [
        ("problems[0]", "a"),
        ("problems[1]", "b: float32"),
        ("problems[1]", "b: float64"),
    ]


ROW = verify.VerifyRow("a: x", "nvte", "torch", "forward", "reference", True, 1e-7, 2e-7, 1.5, "out")


def test_a_long_table_sums_up_what_is_good_and_shows_what_failed():
    good = [dataclasses.replace(ROW, case=f"a: {i}") for i in range(report.LONG)]
    bad = dataclasses.replace(ROW, case="a: the bad one", ok=False, error=float("nan"))
    text = text_of(report.verify_table([*good, bad], "t"))
    assert f"a: {report.LONG} cases" in text
    assert "a: 7" not in text
    assert "a: the bad one" in text
    assert "FAILED: out is out of its budget" in text
    assert "a: 7 " in text_of(report.verify_table(good[:9], "t"))


def test_the_json_document(tmp_path):
    run = VerifyRun(kind="verify", problems=[problem(attn_scale=float("nan"))], out="results/x.json")
    path = tmp_path / "x.json"
    path.write_text("old")
    report.write_json(path, report.document(run, [dataclasses.replace(ROW, error=float("inf"))]))
    document = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(document) == {"config", "versions", "machine", "rows"}
    assert document["config"]["problems"][0]["attn_scale"] == "nan"
    assert document["versions"]["torch"] == torch.__version__
    assert set(document["versions"]) == {"python", "torch", "numpy", "fusedattn", "cudnn_frontend"}
    assert set(document["machine"]) == {"system", "processor", "cores", "torch_threads"}
    assert document["rows"][0] | {"error": "inf", "ok": True, "case": "a: x", "time_ms": 1.5} == document["rows"][0]
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_json_that_fails_leaves_the_old_one(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        report.write_json(path, {"rows": [object()]})
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_the_config_in_the_json_is_a_config(tmp_path):
    run = VerifyRun(kind="verify", problems=[problem(sweep={"mask": ["causal"]})])
    assert VerifyRun.model_validate(report.document(run, [])["config"]) == run
