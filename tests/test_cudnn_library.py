"""cuDNN missing, too old, twice there, or not loading: each is told, with what to do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import fusedattn
from fusedattn import BuildError, rules_cudnn
from fusedattn.engines import cudnn_library
from fusedattn.engines.cudnn_library import cudnn, cudnn_version, device_properties, loaded_copies
from fusedattn.target import TARGETS

LINE = "7f3c9a200000-7f3c9a300000 r-xp 00000000 08:01 42   {}\n"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a process that has not looked for cuDNN yet."""
    cudnn.cache_clear()
    rules_cudnn.package_fault.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cudnn.cache_clear()
    rules_cudnn.package_fault.cache_clear()


def version_of(**versions: str | None) -> object:
    def version(name: str) -> str:
        found = versions[name.replace("-", "_")]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (
            None,
            r"nvidia-cudnn-frontend is not installed\. Install it with: pip install --upgrade nvidia-cudnn-frontend",
        ),
        ("1.9.0", r"nvidia-cudnn-frontend is 1\.9\.0, older than 1\.32\. Install it with"),
    ],
)
def test_the_frontend_is_looked_at_first(fresh: pytest.MonkeyPatch, installed: str | None, message: str) -> None:
    fresh.setattr("importlib.metadata.version", version_of(nvidia_cudnn_frontend=installed))
    with pytest.raises(BuildError, match=message):
        cudnn()
    assert fusedattn.rules.availability()[fusedattn.Engine.cudnn] is not None


def test_an_old_library_is_refused(fresh: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(backend_version=lambda: 91800, backend_version_string=lambda: "9.18.0")
    fresh.setattr("importlib.import_module", lambda name: old)
    with pytest.raises(BuildError, match=r"cuDNN is 9\.18\.0, older than 9\.19\.0\. Install a newer nvidia-cudnn-cu13"):
        cudnn()


@pytest.mark.parametrize("error", [ImportError("no libcudnn"), OSError("no libcudnn"), RuntimeError("no libcudnn")])
def test_a_library_that_does_not_load(fresh: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> None:
        raise error

    fresh.setattr("importlib.import_module", fail)
    with pytest.raises(BuildError, match=r"the cuDNN library: no libcudnn\..*start a new process"):
        cudnn()


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        ([], []),
        (["/usr/lib/libc.so.6", "/opt/a/libcudart.so.13"], []),
        (["/opt/a/libcudnn.so.9", "/opt/a/libcudnn_graph.so.9", "/opt/a/libcudnn_ops.so.9.24.0"], ["/opt/a"]),
        (["/opt/a b/libcudnn.so.9", "/usr/lib/libcudnn_graph.so.9"], ["/opt/a b", "/usr/lib"]),
    ],
)
def test_copies_are_counted_by_folder(paths: list[str], folders: list[str]) -> None:
    assert loaded_copies("".join(map(LINE.format, paths))) == folders


def test_two_copies_are_refused(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(LINE.format("/opt/a/libcudnn.so.9") + LINE.format("/opt/b/libcudnn_graph.so.9"))
    fresh.setattr(cudnn_library, "_MAPS", maps)
    with pytest.raises(BuildError, match=r"two copies of cuDNN are loaded: /opt/a and /opt/b\. Uninstall one of them"):
        cudnn()


def test_this_installation_works() -> None:
    assert cudnn_version().split(".")[0] == "9"
    properties = device_properties(TARGETS["a100"])
    assert device_properties(TARGETS["a100"]) is properties
    fusedattn.clear_caches()
    assert device_properties(TARGETS["a100"]) is not properties


def test_a_description_that_cudnn_refuses(fresh: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> None:
        raise RuntimeError("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")

    fresh.setattr(cudnn(), "create_device_properties", refuse)
    fusedattn.clear_caches()
    with pytest.raises(
        BuildError, match=r"cuDNN's description of l40s: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.*new process"
    ):
        device_properties(TARGETS["l40s"])
