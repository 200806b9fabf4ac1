from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusedattn import cli
from fusedattn.runs import oracle

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
RUN = """\
kind: verify
out: results/deep/x.json
problems:
  - name: small
    layout: t3hd
    heads: 2
    head_dim: 8
    lengths: [5, 3]
    inputs: {random: normal}
    sweep: {mask: [padding, causal]}
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Writes a run file into a folder, and calls the command from another one."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def invoke(text: str):
        (tmp_path / "configs" / "x.yaml").write_text(text)
        return CliRunner().invoke(cli.app, ["run", "../configs/x.yaml"])

    return invoke


def test_a_good_run(invoke, tmp_path):
    result = invoke(RUN)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "small: padding" in result.stdout
    assert "4 of 4 comparisons ok, 0 failed. Written to results/deep/x.json" in result.stdout
    document = json.loads((tmp_path / "work/results/deep/x.json").read_text())
    assert [(row["case"], row["direction"], row["ok"]) for row in document["rows"]] == [
        ("small: padding", "forward", True),
        ("small: padding", "backward", True),
        ("small: causal", "forward", True),
        ("small: causal", "backward", True),
    ]
    assert {"case", "op", "engine", "direction", "ok", "error", "budget", "time_ms"} <= set(document["rows"][0])


def test_a_failed_case_gives_1_and_the_others_go_on(invoke, tmp_path, monkeypatch):
    right = oracle.run_case

    def causal_fails(case, *args, **kwargs):
        if case.mask_type == "padding":
            raise RuntimeError("out of luck")
        return right(case, *args, **kwargs)

    monkeypatch.setattr(oracle, "run_case", causal_fails)
    result = invoke(RUN)
    assert result.exit_code == 1
    assert "FAILED: RuntimeError: out of luck" in result.stdout
    assert "2 of 4 comparisons ok, 2 failed" in result.stdout
    rows = json.loads((tmp_path / "work/results/deep/x.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [False, False, True, True]


def test_a_wrong_file_gives_2_and_one_line_a_fault(invoke, tmp_path):
    result = invoke(RUN.replace("mask:", "maks:").replace("heads: 2", "heads: two"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "../configs/x.yaml:6: problems[0].heads: expected a valid integer, got 'two'",
        "../configs/x.yaml:10: problems[0].sweep.maks: unknown key; did you mean 'mask'?",
    ]
    assert list((tmp_path / "work").iterdir()) == []


def test_quickstart_is_green(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["run", str(QUICKSTART)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results/quickstart.json").read_text())["rows"]
    assert sum(row["against"] == "file" for row in rows) >= 4
    assert str(QUICKSTART.parent) not in (tmp_path / "results/quickstart.json").read_text()


def test_a_missing_file_gives_2(tmp_path):
    result = CliRunner().invoke(cli.app, ["run", str(tmp_path / "no.yaml")])
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path}/no.yaml: No such file or directory\n"


@pytest.mark.parametrize("place", ["occupied/x.json", "folder"])
def test_an_impossible_out_gives_2_before_the_work(invoke, tmp_path, place, monkeypatch):
    monkeypatch.setattr(oracle, "run_case", lambda *a, **k: pytest.fail("worked in vain"))
    (tmp_path / "work/occupied").write_text("a file")
    (tmp_path / "work/folder").mkdir()
    result = invoke(RUN.replace("results/deep/x.json", place))
    assert result.exit_code == 2
    assert "../configs/x.yaml: out: " in result.stderr


def test_out_has_a_default(invoke, tmp_path):
    assert invoke(RUN.replace("out: results/deep/x.json\n", "")).exit_code == 0
    assert (tmp_path / "work/results/x.json").exists()


BENCH = """\
kind: bench
repeats: 3
problems:
  - name: small
    layout: t3hd
    heads: 2
    head_dim: 8
    lengths: [8, 8]
    inputs: {random: normal}
    directions: [forward]
    limits: {forward: LIMIT}
"""


@pytest.mark.parametrize(("limit", "status"), [("1.0e+6", 0), ("1.0e-6", 1)])
def test_a_bench(invoke, tmp_path, limit, status):
    result = invoke(BENCH.replace("LIMIT", limit))
    assert result.exit_code == status, result.output
    [row] = json.loads((tmp_path / "work/results/x.json").read_text())["rows"]
    assert row["ratio"] == pytest.approx(row["ours_ms"] / row["rival_ms"])
    assert (row["rival"], row["ok"]) == ("sdpa", status == 0)


def test_schema():
    result = CliRunner().invoke(cli.app, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["discriminator"]["mapping"].keys() == {"verify", "bench", "dispatch"}


def test_engines():
    result = CliRunner().invoke(cli.app, ["engines"])
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["torch"] == "works here"
    assert lines["cudnn"].startswith("does not work here: ")
    assert set(lines) == {"torch", "cudnn", "cuda"}


def test_help_without_arguments():
    result = CliRunner().invoke(cli.app, [])
    assert all(word in result.output for word in ("run", "schema", "engines"))


def test_no_traceback_and_no_progress_bar_in_a_pipe(tmp_path):
    (tmp_path / "x.yaml").write_text(RUN)
    command = [sys.executable, "-c", "from fusedattn.cli import main; main()", "run"]
    done = subprocess.run([*command, "x.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([*command, "y.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "y.yaml: No such file or directory\n"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_progress_bar_on_a_terminal(tmp_path):
    (tmp_path / "x.yaml").write_text(RUN)
    main_end, other_end = os.openpty()
    command = [sys.executable, "-c", "from fusedattn.cli import main; main()", "run", "x.yaml"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=other_end, env=environment) as done:
        os.close(other_end)
        shown = b""
        while True:
            try:
                piece = os.read(main_end, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(main_end)
    assert done.returncode == 0
    assert b"small: padding" in shown
    assert b"/2" in shown
