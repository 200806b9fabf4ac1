"""The README: its examples run, its tables are those that the code gives."""

import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def tables() -> ModuleType:
    loader = SourceFileLoader("readme_tables", str(ROOT / "scripts" / "readme_tables.py"))
    spec = importlib.util.spec_from_loader("readme_tables", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "needs tensors on a CUDA device" in capsys.readouterr().out


def test_tables_are_up_to_date(tables: ModuleType) -> None:
    assert tables.updated(README) == README, "run scripts/readme_tables.py"
    assert tables.updated(README.replace("| yes |", "| no |")) == README


@pytest.mark.parametrize("command", ["quickstart", "test", "check", "check_cudnn_versions", "readme_tables.py"])
def test_scripts_that_it_names_exist(command: str) -> None:
    assert f"scripts/{command}" in README
    assert (ROOT / "scripts" / command).is_file()


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_is_named(config: str) -> None:
    assert f"configs/{config}" in README


def test_every_environment_variable_is_named() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "fusedattn").rglob("*.py"))
    assert set(re.findall(r"FUSEDATTN_[A-Z_]*[A-Z]", sources)) <= set(re.findall(r"FUSEDATTN_[A-Z_]*[A-Z]", README))
