"""What every test starts from: one thread each, since xdist runs one worker a core, and a reason for every skip."""

import os

import pytest
import torch

torch.set_num_threads(1)
# Tests write to no user's cache, and processes that they start do not either.
os.environ.setdefault("FUSEDATTN_NO_DISK_CACHE", "1")


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers whatever ran before."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))
