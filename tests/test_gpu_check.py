"""scripts/gpu_check, as far as it goes without a GPU: arguments, reports, the time budget, and the JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor
from torch.nn.attention import SDPBackend

from fusedattn import runtime
from fusedattn.target import TARGETS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_bench  # noqa: E402
import gpu_check  # noqa: E402

PASSED = {"passed": 3, "failed": 0, "skipped": 1, "failures": [], "skips": {}, "finished": True, "status": 0}
CPU = torch.device("cpu")


class TestArguments:
    def test_defaults(self) -> None:
        given = gpu_check.arguments([])
        assert (given.out, given.seconds, given.jobs) == (ROOT / "results" / "gpu_check.json", 570, 4)

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--seconds", "0"], "--seconds must be above 0"),
            (["--seconds", "nan"], "--seconds must be above 0"),
            (["--jobs", "0"], "--jobs at least 1"),
            (["--seconds", "soon"], "invalid float value"),
            ([str(ROOT)], "cannot be written"),
            (["nowhere/x.json"], "cannot be written"),
            (["a.json", "b.json"], "unrecognized arguments"),
        ],
    )
    def test_wrong_ones(self, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            gpu_check.main(argv)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == "gpu_check: torch finds no CUDA device, and nothing here works without one.\n"
    assert not list(tmp_path.iterdir())


REPORT = f"""<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_one" time="1"><properties>
<property name="measured.share" value="0.5"/><property name="measured.rows" value='{{"out": NaN}}'/>
<property name="other" value="x"/></properties></testcase>
<testcase classname="tests.gpu.test_a" name="test_two"><failure message="AssertionError: in {ROOT}/tests:
 1 &gt; 0">text</failure></testcase>
<testcase classname="tests.gpu.test_a" name="test_three"><error message="no"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_four"><skipped message="one GPU"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_five"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


class TestReport:
    def test_all_of_it_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "report.xml").write_text(REPORT)
        assert gpu_check.read_report(tmp_path / "report.xml") == {
            "passed": 1,
            "failed": 2,
            "skipped": 2,
            "failures": [
                {"test": "test_a::test_two", "message": "AssertionError: in .../tests: 1 > 0"},
                {"test": "test_a::test_three", "message": "no"},
            ],
            "skips": {"one GPU": 2},
            "measured": {"share": 0.5, "rows": {"out": "NaN"}},
        }

    @pytest.mark.parametrize("text", [None, "", REPORT[:200]])
    def test_one_that_is_missing_or_cut_off_has_nothing(self, text: str | None, tmp_path: Path) -> None:
        if text is not None:
            (tmp_path / "report.xml").write_text(text)
        found = gpu_check.read_report(tmp_path / "report.xml")
        assert (found["passed"], found["failed"], found["measured"]) == (0, 0, {})

    def test_long_messages_are_cut(self, tmp_path: Path) -> None:
        (tmp_path / "report.xml").write_text(REPORT.replace("AssertionError", "x" * 2000))
        assert len(gpu_check.read_report(tmp_path / "report.xml")["failures"][0]["message"]) == 600


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_runs_and_its_report_is_found(tmp_path: Path) -> None:
    found = gpu_check.run_tests(120.0, 1, tmp_path)
    assert found["finished"]
    assert found["status"] == 0
    assert found["skips"] == {"torch finds no CUDA device": found["skipped"]}
    assert found["skipped"] > 100
    assert found["passed"] == found["failed"] == 0


@pytest.mark.parametrize("code", ["time.sleep(60)", "signal.signal(2, signal.SIG_IGN); time.sleep(60)"])
def test_what_takes_too_long_is_stopped(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_SECONDS", 0.5)
    command = [sys.executable, "-c", f"import signal, time; {code}"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    start = time.monotonic()
    assert not gpu_check.wait(process, 0.5)
    assert process.returncode
    assert time.monotonic() - start < 10


class TestDocument:
    @pytest.fixture
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """A GPU, and what its tests and benchmarks are to bring."""
        brings: dict[str, Any] = {"tests": PASSED, "rows": [{"side": "fused_attention"}], "timed": True}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu_check, "machine", lambda: {"gpu": "NVIDIA H100 80GB HBM3"})
        monkeypatch.setattr(gpu_check, "run_tests", lambda *args: {**brings["tests"], "measured": {"x": 1}})
        monkeypatch.setattr(gpu_bench, "bench", lambda deadline: (brings["rows"], brings["timed"]))
        return brings

    @pytest.mark.parametrize(
        ("tests", "timed", "status", "complete"),
        [
            ({}, True, 0, True),
            ({}, False, 0, False),
            ({"failed": 1, "status": 1}, True, 1, True),
            ({"finished": False, "status": 2}, True, 1, False),
            ({"status": 3}, True, 1, True),
            ({"passed": 0}, True, 1, True),
        ],
    )
    def test_status_and_completeness(
        self, fake: dict[str, Any], tests: dict[str, Any], timed: bool, status: int, complete: bool, tmp_path: Path
    ) -> None:
        fake |= {"tests": PASSED | tests, "timed": timed}
        assert gpu_check.main([str(tmp_path / "x.json")]) == status
        assert json.loads((tmp_path / "x.json").read_text())["complete"] is complete

    def test_what_is_in_it(self, fake: dict[str, Any], tmp_path: Path) -> None:
        gpu_check.main([str(tmp_path / "x.json"), "--seconds", "60"])
        text = (tmp_path / "x.json").read_text()
        found = json.loads(text)
        assert list(found) == [
            "schema", "complete", "commit", "machine", "versions", "measured", "tests", "benchmarks", "seconds"
        ]  # fmt: skip
        assert found["schema"] == 1
        assert found["measured"] == {"x": 1}
        assert set(found["versions"]) == set(gpu_check.PACKAGES)
        assert found["versions"]["torch"]
        assert len(found["commit"]["id"] or "x" * 40) == 40
        assert str(ROOT) not in text
        assert str(Path.home()) not in text
        assert [path.name for path in tmp_path.iterdir()] == ["x.json"]

    def test_tests_are_written_before_the_benchmarks(
        self, fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(deadline: float) -> None:
            raise RuntimeError("a kernel")

        monkeypatch.setattr(gpu_bench, "bench", fail)
        with pytest.raises(RuntimeError, match="a kernel"):
            gpu_check.main([str(tmp_path / "x.json")])
        found = json.loads((tmp_path / "x.json").read_text())
        assert found["tests"]["passed"] == 3
        assert not found["complete"]

    def test_tests_get_their_share_of_the_time(
        self, fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[float] = []

        def run_tests(seconds: float, jobs: int, folder: Path) -> dict[str, Any]:
            asked.append(seconds)
            return {**PASSED, "measured": {}}

        monkeypatch.setattr(gpu_check, "run_tests", run_tests)
        gpu_check.main([str(tmp_path / "x.json"), "--seconds", "100"])
        assert asked == [75.0]


class Event:
    """A CUDA event."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class TestBench:
    SHAPE = gpu_bench.Shape(64, 16, True)

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"TOKENS": 128, "HEADS": 2, "FLUSH_BYTES": 1, "REPEATS": 4, "WARMUP": 1}.items():
            monkeypatch.setattr(gpu_bench, name, value)
        monkeypatch.setattr(gpu_bench, "RIVALS", {"sdpa_math": SDPBackend.MATH})
        monkeypatch.setattr(torch.cuda, "Event", Event)

    @pytest.mark.parametrize("causal", [False, True])
    def test_all_sides_compute_the_same(self, causal: bool) -> None:
        with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
            found = {
                name: (run(), both()) for name, run, both in gpu_bench.sides(self.SHAPE._replace(causal=causal), CPU)
            }
        assert list(found) == ["fused_attention", "nvte_qkvpacked", "sdpa_math"]
        ours, packed, theirs = (found[name][0] for name in found)
        assert torch.allclose(ours.transpose(1, 2), theirs, atol=0.03)
        assert torch.allclose(packed[0].view(ours.shape), ours, atol=0.03)
        gradients = [[x.shape for x in found[name][1]] for name in ("fused_attention", "sdpa_math")]
        assert gradients == [[(2, 64, 2, 16)] * 3, [(2, 2, 64, 16)] * 3]
        assert found["nvte_qkvpacked"][1].dQKV.shape == (128, 3, 2, 16)

    def test_a_backend_that_is_not_there_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(
            gpu_bench, "RIVALS", {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_math": SDPBackend.MATH}
        )
        with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
            names = [name for name, *_ in gpu_bench.sides(self.SHAPE, CPU)]
        assert names == ["fused_attention", "nvte_qkvpacked", "sdpa_math"]
        assert "gpu_check: sdpa_cudnn: " in capsys.readouterr().err

    def test_times_are_taken_in_turn(self) -> None:
        order: list[str] = []
        calls = [lambda name=name: order.append(name) for name in "ab"]
        found = gpu_bench.times_ms(calls, time.monotonic() + 60, CPU)
        assert order == ["a", "b"] * 5
        assert [len(its) for its in found] == [4, 4]

    def test_near_the_deadline_they_are_few(self) -> None:
        found = gpu_bench.times_ms([lambda: None], time.monotonic() - 1, CPU)
        assert [len(its) for its in found] == [3]

    def test_rows(self) -> None:
        timed = {"fused_attention": [1.0, 2.0, 3.0], "sdpa_math": [2.0, 2.0, 2.0]}
        ours, theirs = gpu_bench.rows(self.SHAPE, "forward", timed)
        assert ours["median_ms"] == 2.0
        assert ours["quartiles_ms"] == [1.5, 2.5]
        assert ours["ratio"] == {"sdpa_math": 1.0}
        assert "ratio" not in theirs
        assert ours["tflops"] == pytest.approx(4 * 128 * 64 * 2 * 16 / 2 / 2e-3 / 1e12)
        assert json.dumps(ours)
        (backward,) = gpu_bench.rows(self.SHAPE, "forward_backward", {"fused_attention": [2.0]})
        assert backward["tflops"] == pytest.approx(3.5 * ours["tflops"])
        assert backward["ratio"] == {}

    def test_the_deadline_ends_it(self) -> None:
        assert gpu_bench.bench(time.monotonic() - 1) == ([], False)

    def test_headline_shapes(self) -> None:
        assert {(shape.head_dim, shape.causal) for shape in gpu_bench.SHAPES} == {
            (d, c) for d in (64, 128) for c in (False, True)
        }
        assert all(16384 % shape.length == 0 for shape in gpu_bench.SHAPES)


@pytest.mark.gpu
def test_the_machine_is_described() -> None:
    found = gpu_check.machine()
    assert found["gpu"].startswith("NVIDIA")
    assert json.dumps(found, allow_nan=False)
