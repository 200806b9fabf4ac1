"""The cuDNN engine's rows: each alone, and all of them both ways against cuDNN's plans for GPUs that are not here."""

import importlib.metadata
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cudnn_grid
import pytest
import torch
from cudnn_grid import BASE, Features, disagreement, observe, problems, refusal

from fusedattn import rules_cudnn
from fusedattn.cache import clear_caches
from fusedattn.engines.cudnn_plan import compile_plan
from fusedattn.enums import Engine, NVTE_QKV_Layout
from fusedattn.errors import BuildError
from fusedattn.rule import Rule, RuleKind
from fusedattn.rules import RULES, refusals
from fusedattn.rules_cudnn import CUDNN_ROWS, library_version, package_fault
from fusedattn.spec import AttentionSpec, TensorSpec

DENSE = "bshd_bshd_bshd"
BIAS = {"bias": "1hqk", "dbias": True}
REFUSED, GUARDED = RuleKind.refused_by_library, RuleKind.guarded_by_us
# Of each row: a problem that it alone refuses, what it says `got`, and the changes by which the problem passes.
ROWS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "compute capability": ({"target": "turing"}, "sm_75", {"target": "a100"}),
    "dtype": ({"dtype": "fp32"}, "float32", {"dtype": "fp16"}),
    "head dimension": ({"head_dim": 36}, "D = 36", {"head_dim": 40}),
    "largest head dimension": ({"head_dim": 264}, "D = 264", {"head_dim": 256}),
    "head dimension of backward": (
        {"backward": True, "head_dim": 136, "target": "b200"},
        "D = 136 on sm_100",
        {"target": "h200"},
    ),
    "D = 256 with dropout or dBias": (
        {"backward": True, "head_dim": 256, "target": "b200", **BIAS, "layout": DENSE},
        "D = 256 on sm_100",
        {"head_dim": 128},
    ),
    "version for D = 256": ({"backward": True, "head_dim": 256, "target": "b200"}, "9.24", {"head_dim": 128}),
    "single pair": (
        {"backward": True, "layout": DENSE, "sizes": (1, 1)},
        "B = 2, H = 4, Sq = 1, Skv = 1",
        {"sizes": (1, 2)},
    ),
    "single row": (
        {"backward": True, "layout": DENSE, "sizes": (1, 9), "batch": 1, "heads": 1},
        "B = 1, H = 1, Sq = 1, Skv = 9",
        {"heads": 2},
    ),
    "bias of one key": (
        {"backward": True, "layout": DENSE, "sizes": (9, 1), "bias": "1hqk", "target": "a100"},
        "[1, 4, 9, 1] of bfloat16",
        {"target": "h100"},
    ),
    "wide dBias": ({"backward": True, **BIAS, "bias_dtype": "fp32"}, "[1, 4, 256, 256] of float32", {"dbias": False}),
    "dtype of dBias": (
        {"backward": True, **BIAS, "bias_dtype": "fp16"},
        "[1, 4, 256, 256] of float16",
        {"dtype": "fp16"},
    ),
    "dBias over queries": ({"backward": True, **BIAS, "bias": "1h1k"}, "[1, 4, 1, 256] of bfloat16", {"bias": "1hqk"}),
    "dBias of ragged sequences": ({"backward": True, **BIAS, "target": "l40s"}, "sm_89", {"layout": DENSE}),
    "dBias with dropout": ({"dropout": True, **BIAS, "target": "b200", "layout": DENSE}, "sm_100", {"dbias": False}),
    "deterministic": (
        {"backward": True, "deterministic": True, "dropout": True, "target": "b200"},
        "sm_100",
        {"dropout": False},
    ),
    "deterministic of ragged sequences": (
        {"backward": True, "deterministic": True, "target": "rtx5090"},
        "sm_120",
        {"target": "b200"},
    ),
    "sign of the scale": ({"negative_scale": True}, "a negative one", {"negative_scale": False}),
}
# Guarded rows whose problem has a plan all the same.
PLANNED = {"dtype", "largest head dimension", "dtype of dBias", "dBias over queries", "sign of the scale"}


@pytest.fixture
def fresh() -> Any:
    clear_caches()
    yield
    clear_caches()


def planned(problem: Features) -> list[str]:
    """What cuDNN objects to in the graphs of a problem."""
    return [reason for reason in map(refusal, observe(problem).keys) if reason]


@pytest.mark.parametrize("name", ROWS)
def test_row_says_no(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_cudnn, "library_version", lambda: (9, 24 if name == "version for D = 256" else 25))
    changes, got, _ = ROWS[name]
    problem = BASE._replace(**changes)
    spec, refusing, _ = observe(problem)
    assert [row.name for row in refusing] == [name]
    assert refusals(Engine.cudnn, spec) == (f"{name}: {refusing[0].reason}, got {got}",)
    if refusing[0].kind is REFUSED:
        assert planned(problem)
    if name in PLANNED:
        assert planned(problem) == []


@pytest.mark.parametrize("name", ROWS)
def test_neighbour_of_a_refused_problem_passes_and_has_a_plan(name: str) -> None:
    changes, _, passing = ROWS[name]
    problem = BASE._replace(**changes | passing)
    assert observe(problem).refusing == []
    assert planned(problem) == []


ONE_ROW = {"layout": DENSE, "sizes": (1, 9), "batch": 1, "heads": 1}
# Borders that the table above does not show: what passes and has a plan.
PASSING: list[dict[str, Any]] = [
    ONE_ROW,
    {"layout": DENSE, "sizes": (1, 1)},
    {"backward": True, "layout": DENSE, "sizes": (1, 9), **BIAS, "bias": "1h1k"},
    {"backward": True, "sizes": (1, 9)},
    {"backward": True, "layout": DENSE, "sizes": (9, 1), "target": "a100"},
    {"dbias": True, "bias": "1h1k", "bias_dtype": "fp32", "target": "b200"},
    {"deterministic": True, "head_dim": 256, "target": "rtx5090"},
    {"backward": True, "deterministic": True, "layout": DENSE, "dropout": True, "target": "l40s"},
    {"backward": True, "layout": "thd_t2hd", "bias": "bhqk", "bias_gap": 8, "views": True, "target": "rtxpro6000"},
]
GUARDED_TOO = [
    ({"backward": True, "layout": DENSE, **BIAS, "bias": "1h1k"}, "dBias over queries"),
    ({"backward": True, "layout": "thd_t2hd", "sizes": (9, 1), "bias": "1hqk"}, "bias of one key"),
    ({"dropout": True, **ONE_ROW}, "single row"),
    ({"dtype": "fp64"}, "dtype"),
]


@pytest.mark.parametrize("changes", PASSING, ids=lambda changes: BASE._replace(**changes).text())
def test_border_passes(changes: dict[str, Any]) -> None:
    problem = BASE._replace(**changes)
    assert observe(problem).refusing == []
    assert planned(problem) == []


@pytest.mark.parametrize(("changes", "name"), GUARDED_TOO)
def test_border_is_guarded(changes: dict[str, Any], name: str) -> None:
    assert [row.name for row in observe(BASE._replace(**changes)).refusing] == [name]


def test_every_row_is_in_the_table() -> None:
    assert [row.name for row in CUDNN_ROWS] == ["package", "device", *ROWS]
    assert {row.name for row in CUDNN_ROWS} < {row.name for row in RULES[Engine.cudnn]}


CHUNKS = 6


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_rows_and_cudnn_agree(chunk: int) -> None:
    assert [text for text in map(disagreement, problems(200, seed=chunk)) if text] == []


def test_the_grid_is_wide() -> None:
    """Many problems pass, and most rows are alone in refusing several."""
    logs = [[row.name for row in observe(problem).refusing] for problem in problems(400, seed=0)]
    assert logs.count([]) > 100
    alone = {names[0] for names in logs if len(names) == 1}
    assert alone >= set(ROWS) - {"compute capability", "sign of the scale", "version for D = 256", "deterministic"} - {
        "D = 256 with dropout or dBias",
        "dBias with dropout",
        "single row",
        "bias of one key",
    }


STOOD_BEHIND = [row for row in CUDNN_ROWS if row.kind is REFUSED and row.name in ROWS]


@pytest.mark.parametrize("row", STOOD_BEHIND, ids=lambda row: row.name)
@pytest.mark.parametrize("holds", [True, False], ids=["dropped", "refusing all"])
def test_a_wrong_row_is_seen(row: Rule, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_cudnn, "library_version", lambda: (9, 25))
    changes, _, passing = ROWS[row.name]
    problem = BASE._replace(**changes | ({} if holds else passing))
    assert disagreement(problem) is None
    wrong = tuple(other._replace(holds=lambda spec: holds) if other is row else other for other in CUDNN_ROWS)
    monkeypatch.setattr(cudnn_grid, "CUDNN_ROWS", wrong)
    assert ("no row refuses it" if holds else f"row {row.name!r}") in (disagreement(problem) or "")


def test_the_grid_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cudnn_grid.main(20, seed=3, compiled=1) == 0
    assert re.fullmatch(
        r"cuDNN 9\.\d+\.\d+: 20 problems, 1 compiled, \d+ s, 0 disagreements\n", capsys.readouterr().out
    )
    monkeypatch.setattr(cudnn_grid, "CUDNN_ROWS", ())
    assert cudnn_grid.main(20, seed=3, compiled=0) == 1
    assert "\n  no row refuses it, cuDNN does: " in capsys.readouterr().out


COMPILED: list[dict[str, Any]] = [
    {"target": "a100", "head_dim": 256, "mask": "causal"},
    {"target": "a100", "backward": True, "head_dim": 128, **BIAS, "layout": DENSE, "sizes": (197, 397)},
    {"target": "h100", "backward": True, "head_dim": 256, "deterministic": True},
    {"target": "h100", "backward": True, "head_dim": 8, **BIAS, "mask": "causal"},
    {"target": "b200", "bias": "bh1k", "bias_dtype": "fp32", "bias_gap": 1, "layout": "thd_t2hd", "sizes": (1, 300)},
    {"target": "b200", "backward": True, "head_dim": 128, "views": True},
    {"target": "rtx5090", "backward": True, "head_dim": 128, "layout": "thd_thd_thd", "views": True, "dtype": "fp16"},
    {"target": "l40s", "dropout": True, "bias": "b1qk", "layout": "bhsd_bhsd_bhsd", "mask": "padding"},
]


@pytest.mark.parametrize("changes", COMPILED, ids=lambda changes: BASE._replace(**changes).text())
def test_what_passes_compiles(changes: dict[str, Any]) -> None:
    problem = BASE._replace(**changes)
    spec, refusing, keys = observe(problem)
    assert refusing == []
    assert refusals(Engine.cudnn, spec) == ()
    for key in keys:
        assert compile_plan(key).kernels


def test_float32_builds_as_16_bit_arithmetic_in_forward_alone() -> None:
    (forward,) = observe(BASE._replace(dtype="fp32")).keys
    assert "f16" in compile_plan(forward).kernels[0]
    assert planned(BASE._replace(dtype="fp32", backward=True))


def test_a_negative_scale_changes_no_graph() -> None:
    assert observe(BASE._replace(negative_scale=True)).keys == observe(BASE).keys


def test_a_large_head_dimension_builds_in_forward() -> None:
    (key,) = observe(BASE._replace(head_dim=512, target="a100")).keys
    assert compile_plan(key).kernels


def test_a_backward_with_a_bias_of_one_key_has_a_plan_on_some_gpus() -> None:
    one_key = BASE._replace(backward=True, layout=DENSE, sizes=(9, 1), bias="1hqk", target="b200")
    assert [row.name for row in observe(one_key).refusing] == ["bias of one key"]
    assert planned(one_key) == []
    assert planned(one_key._replace(dbias=True))


CRASH = """
from cudnn_grid import BASE, observe
from fusedattn.engines import cudnn_graph, cudnn_library
changes = {"backward": True, "layout": "bshd_bshd_bshd", "sizes": (1, 9), "batch": 1, "heads": 1, "target": "a100"}
(key,) = observe(BASE._replace(**changes)).keys
graph = cudnn_graph._Declaration(key).graph
graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn_library.cudnn().heur_mode.A])
print("alive")
"""


def test_a_single_row_ends_the_process_that_plans_it() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], cwd=Path(__file__).parent, capture_output=True, text=True)
    expected = (-signal.SIGSEGV, "") if library_version() >= (9, 26) else (0, "alive\n")
    assert (done.returncode, done.stdout) == expected, done.stderr
    (key,) = observe(BASE._replace(**ROWS["single row"][0])).keys
    with pytest.raises(BuildError, match="one sequence, one head and one query: ends the process"):
        compile_plan(key)


def test_ragged_sequences_are_a_single_row_where_a_bias_says_so() -> None:
    """Without a bias their graphs are declared longer."""
    ragged = BASE._replace(backward=True, layout="thd_thd_thd", sizes=(1, 9), batch=1, heads=1)
    spec, (row,), (key,) = observe(ragged._replace(bias="111k"))
    assert (row.name, row.got(spec)) == ("single row", "B = 1, H = 1, a bias [1, 1, 1, 9] of bfloat16")
    with pytest.raises(BuildError, match="one sequence, one head and one query: ends the process"):
        compile_plan(key)
    for change in ({"bias": ""}, {"bias": "11qk", "sizes": (2, 9)}, {"bias": "111k", "batch": 2}, {"backward": False}):
        assert observe(ragged._replace(**change)).refusing == []


# What the rows ask of the installation


def on_cpu() -> AttentionSpec:
    q = TensorSpec.of(torch.empty(1, 2, 3, 8, dtype=torch.bfloat16))
    return AttentionSpec.of(layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, operands=(q, q, q))


def test_without_a_gpu_only_the_device_is_refused() -> None:
    assert refusals(Engine.cudnn, on_cpu()) == ("device: needs tensors on a CUDA device, got cpu",)


class Versions:
    """Stands in for the installed packages."""

    def __init__(self, **packages: str) -> None:
        self.packages = {name.replace("_", "-"): version for name, version in packages.items()}

    def __call__(self, name: str) -> str:
        if name not in self.packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.packages[name]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("packages", "fault"),
    [
        ({}, "nvidia-cudnn-frontend is not installed"),
        ({"nvidia_cudnn_frontend": "1.31.9"}, "nvidia-cudnn-frontend is 1.31.9, older than 1.32"),
        ({"nvidia_cudnn_frontend": "1.32.0"}, None),
        ({"nvidia_cudnn_frontend": "2.0.0"}, None),
    ],
)
def test_package(packages: dict[str, str], fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", Versions(**packages))
    assert package_fault() == fault
    said = () if fault is None else (f"package: needs nvidia-cudnn-frontend 1.32 or newer, got {fault}",)
    assert refusals(Engine.cudnn, on_cpu())[:-1] == said


@pytest.mark.usefixtures("fresh")
def test_package_without_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert package_fault() == "nvidia-cudnn-frontend has no module cudnn"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("packages", "version"),
    [
        ({}, (0, 0)),
        ({"nvidia_cudnn_cu13": "9.25.1.4"}, (9, 25)),
        ({"nvidia_cudnn_cu13": "9.25.1.4", "nvidia_cudnn_cu12": "9.3.0.1"}, (9, 3)),
    ],
)
def test_library_version(packages: dict[str, str], version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", Versions(**packages))
    assert library_version() == version
    spec = observe(BASE._replace(backward=True, head_dim=256, target="b200")).spec
    by_version = [row.name for row in CUDNN_ROWS if row.kind is GUARDED and not row.holds(spec)]
    assert by_version == ([] if version >= (9, 25) else ["version for D = 256"])


def test_rows_load_no_library() -> None:
    code = (
        "import sys, torch; from fusedattn.rules_cudnn import CUDNN_ROWS; from test_rules_cudnn import on_cpu;"
        "[row.holds(on_cpu()) for row in CUDNN_ROWS]; assert 'cudnn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
