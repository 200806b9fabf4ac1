"""What a loaded plan is given when it runs: addresses by uid, the current stream, the handle and the device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedattn.engines import cudnn_executor
from fusedattn.engines.cudnn_executor import PlanExecutable


class FakeGpus:
    """Two devices, a driver's current one, and a cuDNN that notes what it is asked for."""

    def __init__(self) -> None:
        self.current, self.streams, self.runs, self.handles = 0, {0: 10, 1: 11}, [], []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def create_handle(self) -> Any:
        self.handles.append(SimpleNamespace(backend_handle=100 + len(self.handles), device=self.current, stream=None))
        return self.handles[-1]

    def set_stream(self, handle: Any, stream: int) -> None:
        assert handle.device == self.current
        handle.stream = stream

    def execute(self, address: int, count: int, workspace: int, backend_handle: int, index: int) -> None:
        addresses = list((ctypes.c_void_p * count).from_address(address))
        handle = self.handles[backend_handle - 100]
        self.runs.append((self.current, handle.device, handle.stream, addresses, workspace, index))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(torch.cuda, "device", gpus.device)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=gpus.streams[device.index])
    )
    monkeypatch.setattr(cudnn_executor, "cudnn", lambda: gpus)
    monkeypatch.setattr(cudnn_executor, "_LOCAL", threading.local())
    return gpus


def plan(gpus: FakeGpus, device: int) -> PlanExecutable:
    graph = SimpleNamespace(
        _variant_pack_uids=lambda: [1, 3, 7],
        get_workspace_size=lambda: 64,
        _lowered_graph=SimpleNamespace(_execute_with_raw_ptrs=gpus.execute),
    )
    return PlanExecutable(torch.device("cuda", device), graph)


def test_addresses_stream_and_workspace(gpus: FakeGpus) -> None:
    found = plan(gpus, 0)
    assert (found.uids, found.workspace_bytes) == ((1, 3, 7), 64)
    tensors, workspace = [torch.zeros(2) for _ in range(3)], torch.zeros(64)
    found.run(tensors, workspace)
    gpus.streams[0] = 12
    found.run(tensors[::-1], None)
    addresses = [x.data_ptr() for x in tensors]
    assert gpus.runs == [(0, 0, 10, addresses, workspace.data_ptr(), -1), (0, 0, 12, addresses[::-1], 0, -1)]


def test_another_device_than_the_current_one(gpus: FakeGpus) -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    plan(gpus, 1).run(tensors, None)
    assert [run[:3] for run in gpus.runs] == [(1, 1, 11)]
    assert gpus.current == 0


def test_a_handle_a_thread_and_device(gpus: FakeGpus) -> None:
    found, tensors = plan(gpus, 0), [torch.zeros(2) for _ in range(3)]
    for _ in range(2):
        found.run(tensors, None)
    thread = threading.Thread(target=found.run, args=(tensors, None))
    thread.start()
    thread.join()
    plan(gpus, 1).run(tensors, None)
    assert [handle.device for handle in gpus.handles] == [0, 0, 1]
