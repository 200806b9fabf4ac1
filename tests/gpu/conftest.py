"""Devices of the GPU tests, and how they note what they measure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor
from gpu_problems import Measured

from fusedattn import runtime
from fusedattn.cache import clear_caches
from fusedattn.target import TARGETS


@pytest.fixture
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU; the CPU in its place where a plugin has taken the marks to skip away (see test_gpu_tests)."""
    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        yield torch.device("cpu")


@pytest.fixture
def no_memory_of_plans() -> Iterator[None]:
    """Nothing that this process knows is used, and nothing that the test has changed is remembered."""
    clear_caches()
    yield
    clear_caches()


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Notes a finding, which is no verdict, for scripts/gpu_check to collect."""
    return lambda name, value: record_property(f"measured.{name}", json.dumps(value))
