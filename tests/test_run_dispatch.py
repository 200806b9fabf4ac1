"""dispatch: the calls that are timed are the public ones, in two parts that are theirs, and nothing is run."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor
from rich.console import Console
from typer.testing import CliRunner

from fusedattn import BuildError, bound, cli, runtime
from fusedattn.engines.cudnn_bound import BoundForward
from fusedattn.runs import dispatch, dispatch_calls, dispatch_executor, dispatch_rivals, report
from fusedattn.runs.config import DispatchProblem, DispatchRun
from fusedattn.runs.inputs import Inputs, build
from fusedattn.runs.needed import calls_of, record
from fusedattn.target import TARGETS

PACKED = {"layout": "t3hd", "mask": "padding", "lengths": [3, 5]}
KV_PACKED = {"layout": "thd_t2hd", "mask": "padding", "lengths_q": [3, 5], "lengths_kv": [4, 9]}
DENSE = {"layout": "bshd_bshd_bshd", "mask": "no_mask", "lengths": [5, 5]}
DIRECTIONS = ["forward", "backward", "forward_backward"]


def problem(**fields: Any) -> DispatchProblem:
    small = {"name": "a", "heads": 2, "head_dim": 8, "dtype": "float16", "inputs": {"random": "normal"}}
    return DispatchProblem.model_validate(small | PACKED | fields)


def run_of(*problems: DispatchProblem, **fields: Any) -> DispatchRun:
    return DispatchRun.model_validate(
        {"kind": "dispatch", "target": "h100", "problems": list(problems), "repeats": 3, "warmup": 1} | fields
    )


def inputs_of(**fields: Any) -> Inputs:
    return build(problem(**fields), Path())


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of cuDNN's, which takes a second to compile."""
    monkeypatch.setattr(dispatch, "frontend_rivals", lambda key, tensors: {"a frontend": lambda: None})


def rows_of(*problems: DispatchProblem, **fields: Any) -> list[dispatch.DispatchRow]:
    rows = dispatch.dispatch_rows(run_of(*problems, **fields), Path())
    return [row for row in rows if row.op != dispatch.RIVAL]


@pytest.mark.usefixtures("rivals")
class TestRows:
    @pytest.mark.parametrize(
        ("op", "fields"),
        [("nvte", PACKED), ("nvte", KV_PACKED), ("fused_attention", PACKED), ("fused_attention", KV_PACKED),
         ("fused_attention", DENSE)],
    )  # fmt: skip
    def test_of_each_direction(self, op: str, fields: dict[str, Any]) -> None:
        rows = rows_of(problem(**{"lengths": None} | fields, op=op, directions=DIRECTIONS))
        assert [(row.case, row.op, row.engine, row.direction) for row in rows] == [
            ("a", op, "cudnn", direction) for direction in DIRECTIONS
        ]
        for row in rows:
            assert (row.ok, row.note) == (True, "")
            assert row.total_us is not None
            assert row.total_spread_us is not None
            assert 0 < row.total_spread_us[0] <= row.total_us <= row.total_spread_us[1]
            assert row.time_ms == pytest.approx(row.total_us / 1e3)
            assert (row.preparation_us is None) == (row.hand_over_us is None) == (row.direction != "forward")
        forward, backward, both = rows
        assert forward.launches is not None
        assert backward.launches is not None
        assert both.launches == forward.launches + backward.launches

    def test_preparation_stays_as_small_as_it_is(self) -> None:
        forward, backward = rows_of(problem(op="nvte", directions=["forward", "backward"]))
        assert (forward.launches, backward.launches) == (16, 19)

    def test_dense_without_lengths_has_nothing_to_prepare(self) -> None:
        [row] = rows_of(problem(**DENSE))
        assert row.launches == 0
        assert row.other_operators is not None
        assert row.other_operators > 0

    @pytest.mark.parametrize("aim", [None, 1e-3, 1e6])
    def test_an_aim_is_told_and_never_a_failure(self, aim: float | None) -> None:
        forward, both = rows_of(problem(aim_us=aim, directions=["forward", "forward_backward"]))
        assert (forward.ok, forward.aim_us, forward.within_aim) == (True, aim, None if aim is None else aim > 1)
        assert (both.ok, both.aim_us, both.within_aim) == (True, None, None)
        text = text_of([forward])
        assert ("0.001: missed" in text, "1e+06: within" in text) == (aim == 1e-3, aim == 1e6)

    def test_a_sweep_is_its_cases(self) -> None:
        rows = rows_of(problem(dtype=None, sweep={"dtype": ["float16", "bfloat16"]}))
        assert [row.case for row in rows] == ["a: float16", "a: bfloat16"]

    @pytest.mark.parametrize("engine", ["auto", "cudnn"])
    @pytest.mark.parametrize(
        ("fields", "note"),
        [
            ({"dtype": "float32"}, "EngineRefusal: engine='cudnn' cannot compute this problem"),
            ({"head_dim": 7}, "EngineRefusal: engine='cudnn' cannot compute this problem"),
            ({"lengths": [0]}, "RuntimeError: its forward is not timed in two, since"),
        ],
    )
    def test_what_cudnn_does_not_take_is_a_row_and_the_others_go_on(
        self, fields: dict[str, Any], note: str, engine: str
    ) -> None:
        failed, good = rows_of(problem(**fields), problem(name="b"), engine=engine)
        assert (failed.ok, failed.total_us, good.ok) == (False, None, True)
        assert note in failed.note
        assert "FAILED" in text_of([failed])

    def test_runs_in_one_thread_and_leaves_no_trace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads: list[int] = []
        in_turn = dispatch.in_turn

        def noted(*args: Any) -> list[list[float]]:
            threads.append(torch.get_num_threads())
            return in_turn(*args)

        monkeypatch.setattr(dispatch, "in_turn", noted)
        torch.set_num_threads(2)
        try:
            rows = rows_of(problem())
            assert torch.get_num_threads() == 2
            assert report.document(run_of(problem()), rows)["machine"]["torch_threads"] == 1
        finally:
            torch.set_num_threads(1)
        assert threads == [1]
        assert not bound._CALLS


def text_of(rows: list[dispatch.DispatchRow]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.dispatch_table(rows, "t"))
    return captured.get()


@pytest.fixture
def pretended() -> Iterator[InterpretingExecutor]:
    executor = InterpretingExecutor()
    with runtime.pretend(TARGETS["h100"], executor):
        yield executor


@pytest.mark.parametrize("op", ["nvte", "fused_attention"])
class TestCalls:
    def test_the_parts_of_a_forward_are_what_the_whole_does(
        self, op: str, pretended: InterpretingExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        for name in ("prepare", "launch", "clean"):
            monkeypatch.setattr(BoundForward, name, spied(name, getattr(BoundForward, name), done))
        inputs = inputs_of()
        whole = dispatch_calls.public_call(inputs, op, "forward")
        whole()
        preparation, hand_over = dispatch_calls.apart(inputs, op)
        for call, parts in (
            (whole, ["prepare", "launch", "clean"]),
            (preparation, ["prepare", "clean"]),
            (hand_over, ["launch"]),
            (whole, ["prepare", "launch", "clean"]),
        ):
            done.clear()
            call()
            assert done == parts

    def test_results_are_those_of_the_functions(self, op: str, pretended: InterpretingExecutor) -> None:
        inputs = inputs_of()
        found: dict[str, Any] = {name: dispatch_calls.public_call(inputs, op, name)() for name in DIRECTIONS}
        assert found["forward"][0].requires_grad == (op == "fused_attention")
        alone, after = found["backward"][0], found["forward_backward"][0]
        assert alone.shape == inputs.case.operands[0].shape
        assert torch.equal(alone, after)
        repeated = dispatch_calls.public_call(inputs, op, "backward")
        repeated()
        assert torch.equal(repeated()[0], alone)  # type: ignore[index]


def spied(name: str, function: Any, done: list[str]) -> Any:
    def spy(*args: Any) -> Any:
        done.append(name)
        return function(*args)

    return spy


def test_launches_are_counted_and_views_and_allocations_apart() -> None:
    with dispatch_calls._Counting() as mode:
        x = torch.empty(4, 6)
        y = x.t()[:2].unsqueeze(0).detach()
        torch.empty_like(y), x.new_empty(3)
        assert (mode.launches, mode.others) == (0, 7)
        y.fill_(1.0), x + 1, x.clone(), torch.zeros(2)
    assert (mode.launches, mode.others) == (4, 7)


def test_the_executor_notes_addresses_and_runs_nothing() -> None:
    executor = dispatch_executor.HandOver()
    inputs = inputs_of()
    with runtime.pretend(TARGETS["h100"], executor):
        for _ in range(2):
            dispatch_calls.public_call(inputs, "nvte", "forward")()
        assert executor.first is not None
        key, tensors = executor.first
        executable = executor.executable(key)
        assert executable is executor.executable(key)
        assert tuple(tensors) == executable.uids == InterpretingExecutor().executable(key).uids
        executable.run(list(tensors.values()), torch.empty(1))
    addresses = ctypes.cast(executable._addresses, ctypes.POINTER(ctypes.c_void_p))
    assert [addresses[i] for i in range(len(tensors))] == [x.data_ptr() for x in tensors.values()]


def test_calls_are_made_in_turn_after_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BLOCK", 2)
    said: list[str] = []
    times = dispatch.in_turn([lambda: said.append("a"), lambda: said.append("b")], repeats=3, warmup=1)
    assert said == ["a", "b", *"aaa", *"bbb", *"aa", *"bb"]
    assert [len(found) for found in times] == [3, 3]


def test_percentiles() -> None:
    assert dispatch._median([float(i) for i in range(11)]) == (5.0, (1.0, 9.0))
    assert dispatch._median([7.0]) == (7.0, (7.0, 7.0))


def test_torch_rivals_do_what_they_say() -> None:
    attention, nothing = dispatch_rivals.torch_rivals().values()
    out: Any = attention()
    assert out.shape == (1, 4, 16, 64)
    assert nothing() is not None
    assert dispatch_rivals._empty_operator() is dispatch_rivals._empty_operator()


@pytest.fixture
def handed_over() -> tuple[Any, dict[int, torch.Tensor]]:
    executor = dispatch_executor.HandOver()
    inputs = inputs_of(head_dim=64, dtype="bfloat16")
    with runtime.pretend(TARGETS["h100"], executor):
        dispatch_calls.public_call(inputs, "nvte", "forward")()
    assert executor.first is not None
    return executor.first


def test_the_frontend_reads_every_tensor_and_runs_nothing(
    handed_over: tuple[Any, dict[int, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, tensors = handed_over
    taken: list[list[int | None]] = []

    def take(self: object, address: int, count: int, *rest: object) -> None:
        taken.append(list((ctypes.c_void_p * count).from_address(address)))

    monkeypatch.setattr(dispatch_rivals._Deaf, "_execute_with_raw_ptrs", take)
    mapping, *refused = dispatch_rivals.frontend_rivals(key, tensors).values()
    mapping()
    assert taken == [[tensors[uid].data_ptr() for uid in sorted(tensors)]]
    refusals: list[BaseException] = []
    monkeypatch.setattr("contextlib.suppress", lambda kind: Caught(refusals))
    for call in refused:
        call()
    assert len(taken) == 1
    assert len(refusals) == len(refused) == 2
    # "handle is NULL", before 9.24 "handle == __null".
    assert all("null" in str(error).lower() for error in refusals)


class Caught:
    def __init__(self, errors: list[BaseException]) -> None:
        self.errors = errors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException, traceback: object) -> bool:
        self.errors.append(error)
        return True


def test_without_a_plan_the_other_rivals_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise BuildError("a cuDNN plan", "out of luck", "Try again.")

    monkeypatch.setattr(dispatch, "frontend_rivals", fail)
    rows = dispatch.dispatch_rows(run_of(problem()), Path())
    assert [row.ok for row in rows] == [True, True, True, False]
    assert "BuildError" in rows[-1].note
    assert "out of luck" in rows[-1].note


FILE = """\
kind: dispatch
target: h100
repeats: 2
warmup: 1
problems:
  - name: small
    op: nvte
    layout: t3hd
    mask: padding
    dtype: float16
    heads: 2
    head_dim: 8
    lengths: [3, 5]
    inputs: {random: normal}
    aim_us: 1
"""


@pytest.mark.usefixtures("rivals")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(FILE)
    result = CliRunner().invoke(cli.app, ["run", "x.yaml"])
    assert result.exit_code == 0, result.output
    assert "4 of 4 comparisons ok" in result.stdout
    assert "1: missed" in result.stdout
    written = json.loads(Path("results/x.json").read_text())
    assert written["versions"]["cudnn_frontend"]
    first = written["rows"][0]
    assert (first["case"], first["aim_us"], first["within_aim"]) == ("small", 1.0, False)
    assert str(tmp_path) not in json.dumps(written)


REFUSED = {
    "another GPU": ("target: h100", "target: h10", "target: expected one of a100, "),
    "a GPU near it": ("target: h100", "target: h10", "got 'h10'; did you mean 'h100'?"),
    "no GPU": ("target: h100\n", "", "target: missing"),
    "nvte unpacked": ("t3hd", "bshd_bshd_bshd", "op: the nvte functions take the packed layouts t3hd and thd_t2hd"),
    "an aim of nothing": ("aim_us: 1", "aim_us: 0", "problems[0].aim_us: expected greater than 0, got 0"),
    "torch's engine": ("kind: dispatch", "kind: dispatch\nengine: torch", "engine: expected 'auto' or 'cudnn'"),
    "another direction": ("aim_us: 1", "directions: [sideways]", "problems[0].directions[0]: expected 'forward', "),
    "a limit": ("aim_us: 1", "limits: {forward: 1}", "problems[0].limits: unknown key"),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_file_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(FILE.replace(old, new))
    result = CliRunner().invoke(cli.app, ["run", str(path)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_its_plans_can_be_compiled() -> None:
    """The graphs that `compile` finds are those that the calls ask for."""
    run = run_of(problem(op="nvte", directions=DIRECTIONS), problem(name="b", directions=["forward_backward"], **DENSE))
    needed = {key for call in calls_of(run, [TARGETS["h100"]], Path()) for key in record(call, {}).keys}
    executor = InterpretingExecutor()
    with runtime.pretend(TARGETS["h100"], executor):
        for case in run.problems:
            dispatch_calls.public_call(build(case, Path()), case.op, "forward_backward")()
    assert needed == set(executor.executions)
