"""Wheel and sdist, built offline: what they hold, and that they work outside of the checkout."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import fusedattn
assert fusedattn.__file__.startswith(sys.argv[1]), fusedattn.__file__
from fusedattn.cli import main
sys.argv = ["fusedattn", "run", sys.argv[2]]
main()
"""
FILE = """
kind: verify
out: results/one.json
problems:
  - {name: one, layout: t3hd, heads: 2, head_dim: 4, lengths: [3, 0, 5], inputs: {random: normal, seed: 0}}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_wheel_holds_the_package_alone(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fusedattn"}
    assert {"fusedattn/py.typed", "fusedattn/engines/torch_tiled.py", "fusedattn/runs/verify.py"} <= set(names)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fusedattn").rglob("*.py")}
    assert modules <= set(names)


def test_sdist_holds_what_tests_need(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "scripts/test", "configs/quickstart.yaml"} <= names
    assert {"configs/data/minilm_packed_qkv.safetensors", "tests/conftest.py", ".ci/run"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_works_outside_of_the_checkout(kind: str, built: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    if kind == "wheel":
        [wheel] = built.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(site)
    else:
        [sdist] = built.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path / "source", filter="data")
        [site] = (tmp_path / "source").iterdir()
    (tmp_path / "one.yaml").write_text(FILE)
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", RUN, str(site), "one.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "one.json").is_file()
