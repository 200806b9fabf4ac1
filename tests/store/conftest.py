"""What every test of the disk cache starts from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from blob_folders import LIMIT_BYTES

from fusedattn.cache import clear_caches
from fusedattn.store import Store


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def store(folder: Path) -> Store:
    return Store(folder, LIMIT_BYTES)
