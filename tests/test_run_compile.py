"""`fusedattn compile` and `inspect`: what a run needs is found out without cuDNN, built elsewhere, and all there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cudnn_recorder import Recorder
from typer.testing import CliRunner

from fusedattn import BuildError, EngineRefusal, cli, runtime
from fusedattn.bundle_format import MANIFEST, Bundle
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.cudnn_plan import CompiledPlan
from fusedattn.enums import Direction
from fusedattn.runs.compile import Compiled, compile_run
from fusedattn.runs.inputs import build
from fusedattn.runs.load import load_run
from fusedattn.runs.needed import SELF_TEST, calls_of, record
from fusedattn.runs.oracle import run_case, run_case_nvte
from fusedattn.runs.plan_builder import Built, PlanBuilder, plan_builder
from fusedattn.runs.sweeps import expand
from fusedattn.target import TARGETS

ROOT = Path(__file__).parent.parent
HEAD = "kind: verify\nproblems:\n"
PACKED = "{name: packed, layout: t3hd, mask: causal, dtype: bfloat16, heads: 4, head_dim: 64, lengths: [9, 30, 3, 8, 5]"
RANDOM = "inputs: {random: normal}"


def run_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def problem(text: str = PACKED, more: str = "") -> str:
    return f"  - {text}, {RANDOM}{more}}}\n"


def recorded(path: Path, *names: str) -> list[tuple[str, str, tuple[SdpaKey, ...]]]:
    calls = calls_of(load_run(path), [TARGETS[name] for name in names], path.parent)
    return [(call.case, call.direction.word, record(call, {}).keys) for call in calls]


SIZES = "dtype: bfloat16, heads: 4, head_dim: 64"
KINDS = {
    "packed": problem(),
    "packed nvte": problem(more=", op: nvte, sweep: {dropout: [0.0, 0.1]}"),
    "kv packed": problem(
        "{name: a, layout: thd_t2hd, mask: padding, dtype: float16, heads: 2, head_dim: 32, lengths_q: [3, 9],"
        " lengths_kv: [70, 300]",
        ", sweep: {op: [fused_attention, nvte], bias: [none, pre_scale]}",
    ),
    "dense": problem(
        f"{{name: a, mask: padding, {SIZES}, lengths_q: [7, 21], lengths_kv: [33, 5]",
        ", sweep: {layout: [bshd_bshd_bshd, sbhd_sbhd_sbhd, bhsd_bhsd_bhsd], bias: [none, post_scale],"
        " is_training: [true, false]}",
    ),
    "dropout": problem(
        f"{{name: a, layout: bshd_bshd_bshd, {SIZES}, lengths: [48, 48], dropout: 0.1",
        ", sweep: {bias: [none, post_scale], is_training: [true, false]}",
    ),
    "biases": problem(
        f"{{name: a, layout: bshd_bshd_bshd, {SIZES}, lengths: [48, 48], bias: post_scale",
        ", sweep: {bias_shape: [bhss, 1hss, b1ss, 11ss], bias_dtype: [bfloat16, float32], mask: [no_mask, causal]}",
    ),
    "views of a file": (
        "  - {name: a, layout: thd_t2hd, mask: padding, dtype: float16, sweep: {op: [fused_attention, nvte]},"
        " inputs: {file: FILE, qkv: layer0.qkv, cu_seqlens: cu_seqlens}}\n"
    ),
}


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "rtx5090"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_what_the_public_functions_ask_for(tmp_path: Path, kind: str, target: str) -> None:
    file = ROOT / "configs" / "data" / "minilm_packed_qkv.safetensors"
    path = run_file(tmp_path, HEAD + KINDS[kind].replace("FILE", str(file)))
    asked: dict[str, set[SdpaKey]] = {}
    for geometry in (case for each in load_run(path).problems for case in expand(each)):
        inputs = build(geometry, path.parent, "cudnn")
        function = run_case_nvte if geometry.op == "nvte" else run_case
        recorder = Recorder()
        with runtime.pretend(TARGETS[target], recorder):
            for dout in (None, inputs.dout):
                with contextlib.suppress(EngineRefusal):
                    function(inputs.case, dout, is_training=geometry.is_training)
        asked[geometry.name] = set(recorder.keys)
    found: dict[str, set[SdpaKey]] = {}
    for case, _, keys in recorded(path, target):
        found.setdefault(case, set()).update(keys)
    assert found == asked
    assert any(key.backward for keys in asked.values() for key in keys)


class FakeBuilder(PlanBuilder):
    """Builds nothing."""

    def __init__(self, workspace_bytes: Callable[[SdpaKey], int | None] = lambda key: 0) -> None:
        self.workspace_bytes = workspace_bytes
        self.asked: list[SdpaKey] = []

    def build(self, keys: Iterable[SdpaKey]) -> Iterator[tuple[SdpaKey, Built | BuildError]]:
        for key in keys:
            self.asked.append(key)
            size = self.workspace_bytes(key)
            if size is None:
                yield key, BuildError(f"a plan for {key.target.name}", "no engine takes the graph")
            else:
                blob = key.text().encode()
                yield key, Built(CompiledPlan(blob, size, ("kernel",), 1.0), "9.24.0", 13)


def compiled(path: Path, builder: FakeBuilder, *names: str) -> Compiled:
    targets = [TARGETS[name] for name in names]
    return compile_run(load_run(path), targets, path.parent, builder, lambda done, total, what: None)


def sizes(found: Compiled) -> set[tuple[str, str, str]]:
    """Direction, sequences and heads of the plans that are not for self-tests alone."""
    assert found.manifest is not None
    return {(plan.direction, *plan.problem.split()[1:3]) for plan in found.manifest.plans if plan.cases != (SELF_TEST,)}


def test_plans_are_split_as_calls_will_be(tmp_path: Path) -> None:
    """A call asks for the plan of the whole, finds it too large, and asks for parts: all of these must be there."""

    def too_large(key: SdpaKey) -> int:
        batch, heads, *_ = key.tensor(Role.Q).dim
        return 2**40 if key.backward and (batch > 1 or heads > 2) else 0

    builder = FakeBuilder(too_large)
    found = compiled(run_file(tmp_path, HEAD + problem()), builder, "h100")
    assert sizes(found) == {
        ("forward", "B=16", "H=4"), ("backward", "B=16", "H=4"), ("backward", "B=4", "H=4"), ("backward", "B=1", "H=4"),
        ("backward", "B=1", "H=2"),
    }  # fmt: skip
    # None is built twice.
    assert len(builder.asked) == len(set(builder.asked))


def test_guesses_that_are_not_needed_in_the_end_are_left_out(tmp_path: Path) -> None:
    """Parts of a guessed cut are built before it is known to be too large; the last of them no call will ask for."""

    def too_large(key: SdpaKey) -> int:
        return 2**40 if key.tensor(Role.Q).dim[0] > 1 else 0

    text = "{name: a, layout: bshd_bshd_bshd, dtype: bfloat16, heads: 4, head_dim: 64, lengths: [8, 8, 8, 8, 8, 8, 8]"
    builder = FakeBuilder(too_large)
    found = compiled(run_file(tmp_path, HEAD + problem(text, ", directions: [forward]")), builder, "h100")
    # Seven in one; four and three; two and a last one; then one each.
    assert {key.tensor(Role.Q).dim[0] for key in builder.asked if key.tensor(Role.Q).dim[1] == 4} == {7, 4, 3, 2, 1}
    assert sizes(found) == {("forward", f"B={batch}", "H=4") for batch in (7, 4, 2, 1)}
    assert {plan.file for plan in found.manifest.plans} == set(found.blobs) if found.manifest else False


def test_one_failure_leaves_the_others_and_is_told(tmp_path: Path) -> None:
    def wide_fails(key: SdpaKey) -> int | None:
        return None if key.tensor(Role.Q).dim[3] == 128 and key.backward else 0

    path = run_file(tmp_path, HEAD + problem(more=", sweep: {head_dim: [64, 128]}").replace(" head_dim: 64,", ""))
    found = compiled(path, FakeBuilder(wide_fails), "h100")
    assert [(call.case, call.direction, call.target, call.failed) for call in found.unplanned] == [
        ("packed: head_dim=128", "backward", "h100", True)
    ]
    assert "no engine takes the graph" in found.unplanned[0].reason
    assert found.manifest is not None
    plans = found.manifest.plans
    assert sum("D=128" in plan.problem for plan in plans) == 1
    assert sum(plan.cases == ("packed: head_dim=64",) for plan in plans) == 2


def test_what_the_rules_give_to_the_torch_engine_is_listed_and_no_failure(tmp_path: Path) -> None:
    path = run_file(tmp_path, HEAD + problem(more=", bias: post_scale") + problem(PACKED.replace("packed,", "b,")))
    found = compiled(path, FakeBuilder(), "a100", "h100")
    [call] = found.unplanned
    assert (call.case, call.direction, call.target, call.failed) == ("packed", "backward", "a100", False)
    assert call.reason.startswith("dBias of ragged sequences: ")


SELF_TESTED = {
    "ragged": KINDS["packed"],
    "ragged with dropout": problem(more=", dropout: 0.1"),
    "dense with dropout": problem(f"{{name: a, layout: bshd_bshd_bshd, {SIZES}, lengths: [48, 48], dropout: 0.1"),
    "dense with a bias": problem(f"{{name: a, layout: bshd_bshd_bshd, {SIZES}, lengths: [48, 48], bias: pre_scale"),
}


@pytest.mark.parametrize("kind", SELF_TESTED)
def test_the_self_tests_that_a_gpu_will_make_are_in_it(tmp_path: Path, kind: str) -> None:
    path = run_file(tmp_path, HEAD + SELF_TESTED[kind])
    found = compiled(path, FakeBuilder(), "h100")
    assert found.manifest is not None
    compiled_for_it = {plan.key for plan in found.manifest.plans if SELF_TEST in plan.cases}
    [problem] = load_run(path).problems
    inputs, recorder = build(problem, path.parent, "cudnn"), Recorder()
    # What nothing computed is not right, so the engine is found out, after it asked for plans.
    with runtime.pretend(TARGETS["h100"], recorder, self_test=True), pytest.raises(BuildError, match="self-test"):
        run_case(inputs.case, inputs.dout)
    assert recorder.keys
    assert {key.text() for key in recorder.keys} <= compiled_for_it
    assert {plan.direction for plan in found.manifest.plans if SELF_TEST in plan.cases} == {"forward", "backward"}


def test_gpus_of_one_fingerprint_share_their_plans(tmp_path: Path) -> None:
    found = compiled(run_file(tmp_path, HEAD + problem()), FakeBuilder(), "h100", "h200")
    assert found.manifest is not None
    assert {plan.target for plan in found.manifest.plans} == {"h100"}
    assert len({plan.key for plan in found.manifest.plans}) == len(found.manifest.plans)


@pytest.mark.parametrize(
    ("more", "directions"),
    [("", {"forward", "backward"}), (", directions: [forward]", {"forward"}), (", measure: peak_memory", {"forward"})],
)
def test_a_bench_is_compiled_as_far_as_it_goes(tmp_path: Path, more: str, directions: set[str]) -> None:
    text = problem(more=f", rival: sdpa_padded_mask{more}")
    found = recorded(run_file(tmp_path, f"kind: bench\nproblems:\n{text}"), "h100")
    assert {direction for _, direction, _ in found} == directions


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "argument 'target': expected one of a100, "),
        (["--target", "h10"], "got 'h10'. Did you mean 'h100'?"),
        (["--target", "no.json"], "argument 'target': expected a GPU's description, got 'no.json': No such file"),
    ],
)
def test_wrong_targets(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = invoke("compile", run_file(tmp_path, HEAD + problem()), *arguments, "--out", tmp_path / "plans")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "plans").exists()


def test_wrong_files_and_places(tmp_path: Path) -> None:
    good = run_file(tmp_path, HEAD + problem())
    torch_only = tmp_path / "torch.yaml"
    torch_only.write_text("engine: torch\n" + good.read_text())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for file, place, message in (
        (tmp_path / "no.yaml", "plans", "no.yaml: No such file or directory"),
        (torch_only, "plans", "torch.yaml: engine: expected auto or cudnn, got 'torch', which has no plans to compile"),
        (good, "full", "full': the folder is there and is no bundle. Name a folder that is not there."),
    ):
        result = invoke("compile", file, "--target", "h100", "--out", tmp_path / place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr


def test_a_run_without_plans_writes_nothing(tmp_path: Path) -> None:
    path = run_file(tmp_path, HEAD + problem(PACKED.replace("bfloat16", "float32")))
    result = invoke("compile", path, "--target", "h100", "--out", tmp_path / "plans")
    assert result.exit_code == 1, result.stderr
    assert "torch engine: dtype: Q, K and V must be float16 or bfloat16" in result.stdout
    assert "nothing is written" in result.stdout
    assert not (tmp_path / "plans").exists()


class Deadly:
    """A key that ends the process that it is sent to."""

    direction, target = Direction.backward, TARGETS["h100"]

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (3,)


MAIN = """
import sys
from fusedattn.cli import app
from fusedattn.engines.stub_driver import driver_kind
before = driver_kind()
app(sys.argv[1:], standalone_mode=False)
print("cudnn loaded:", "cudnn" in sys.modules, "driver:", driver_kind() == before)
"""
# A process that loads a bundle, and "runs" what a run file asks for, as far as can be without a GPU.
SECOND = """
import sys
from pathlib import Path
import fusedattn
from fusedattn.counters import COUNTERS
from fusedattn.engines.cudnn_executor import stored_plan
from fusedattn.engines.cudnn_plan import load_plan
from fusedattn.runs.load import load_run
from fusedattn.runs.needed import calls_of, self_tests
from fusedattn.target import TARGETS

class Loads:
    uids = ()
    def __init__(self): self.seen = {}
    def executable(self, key):
        if key not in self.seen:
            if len(sys.argv) == 4:  # else FUSEDATTN_BUNDLE names it
                fusedattn.load_bundle(folder)
            before = COUNTERS["plans_loaded"]
            graph = load_plan(key.target, stored_plan(key))
            assert COUNTERS["plans_loaded"] == before + 1 and not COUNTERS["plans_built"]
            self.seen[key] = int(graph.get_workspace_size())
        self.workspace_bytes = self.seen[key]
        return self
    def run(self, tensors, workspace): pass

folder, file = Path(sys.argv[1]), Path(sys.argv[2])
loads = Loads()
for call in calls_of(load_run(file), [TARGETS["h100"]], file.parent):
    call.make(loads)
for call in self_tests(tuple(loads.seen)):
    call.make(loads)
print(len(loads.seen), sum(loads.seen.values()), fusedattn.counters()["plans_built"])
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle that the command wrote, and the run file."""
    folder = tmp_path_factory.mktemp("real")
    file = run_file(folder, HEAD + problem())
    command = ["compile", file.name, "--target", "h100", "--out", "plans", "--jobs", "1"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Written to plans" in done.stdout
    assert done.stdout.endswith("cudnn loaded: False driver: True\n")
    return folder / "plans", file


@pytest.mark.parametrize("how", ["load_bundle", "environment"])
def test_a_second_process_builds_nothing(real: tuple[Path, Path], how: str) -> None:
    folder, file = real
    named = ["it"] if how == "load_bundle" else []
    environment = os.environ | {"FUSEDATTN_NO_DISK_CACHE": "1"} | ({} if named else {"FUSEDATTN_BUNDLE": str(folder)})
    command = [sys.executable, "-c", SECOND, str(folder), str(file), *named]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plans = Bundle.open(folder).manifest.plans
    assert done.stdout.split() == [str(len(plans)), str(sum(plan.workspace_bytes for plan in plans)), "0"]


def test_inspect(real: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = real
    result = invoke("inspect", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "h100 (sm90-132sm-232448)" in result.stdout
    assert "sdpa_sm90_flash_fprop_wgmma" in result.stdout
    assert "4 plans for h100" in result.stdout
    manifest = json.loads((folder / MANIFEST).read_text())
    assert [plan["direction"] for plan in manifest["plans"]] == ["forward", "backward"] * 2
    assert all(plan["kernels"] and plan["build_ms"] > 0 and plan["cases"] for plan in manifest["plans"])
    plan = folder / manifest["plans"][0]["file"]
    whole = plan.read_bytes()
    plan.write_bytes(whole[:-1])
    result = invoke("inspect", folder)
    plan.write_bytes(whole)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is damaged" in result.stderr
    result = invoke("inspect", tmp_path / "no")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no such folder" in result.stderr


def test_a_process_that_dies_takes_only_its_own_plan_along(tmp_path: Path) -> None:
    keys = [keys[0] for *_, keys in recorded(run_file(tmp_path, HEAD + problem()), "h100")]
    with plan_builder(1) as builder:
        found = dict(builder.build([Deadly(), keys[0]]))  # type: ignore[list-item]
    deadly = next(value for key, value in found.items() if isinstance(key, Deadly))
    assert isinstance(deadly, BuildError)
    assert str(deadly).startswith(
        "cannot have a cuDNN backward plan for h100: the process that built it came to an end"
    )
    built = found[keys[0]]
    assert isinstance(built, Built)
    assert built.plan.kernels[0].startswith("sdpa_sm90")
    assert torch.version.cuda is None or built.cuda_major == int(torch.version.cuda.partition(".")[0])
