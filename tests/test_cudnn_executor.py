"""What a loaded plan is given when it runs: addresses by uid, the current stream, the handle and the device.

And what is refused, or kept, while a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedattn import BuildError
from fusedattn.engines import cudnn_executor
from fusedattn.engines.cudnn_executor import PlanExecutable, PlanExecutor
from fusedattn.enums import Direction


class FakeGpus:
    """Two devices, a driver's current one, and a cuDNN that notes what it is asked for."""

    def __init__(self) -> None:
        self.current, self.streams, self.runs, self.handles = 0, {0: 10, 1: 11}, [], []
        # The device whose current stream captures.
        self.capturing: int | None = None

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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpus.capturing == gpus.current)
    monkeypatch.setattr(cudnn_executor, "cudnn", lambda: gpus)
    monkeypatch.setattr(cudnn_executor, "_LOCAL", threading.local())
    monkeypatch.setattr(cudnn_executor, "_IDLE", {})
    monkeypatch.setattr(cudnn_executor, "_CAPTURED", set())
    return gpus


def graph(gpus: FakeGpus) -> Any:
    return SimpleNamespace(
        _variant_pack_uids=lambda: [1, 3, 7],
        get_workspace_size=lambda: 64,
        _lowered_graph=SimpleNamespace(_execute_with_raw_ptrs=gpus.execute),
    )


def plan(gpus: FakeGpus, device: int) -> PlanExecutable:
    return PlanExecutable(torch.device("cuda", device), graph(gpus))


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
    in_a_thread(found, tensors)
    plan(gpus, 1).run(tensors, None)
    assert [handle.device for handle in gpus.handles] == [0, 0, 1]


def in_a_thread(found: PlanExecutable, tensors: list[torch.Tensor]) -> None:
    thread = threading.Thread(target=found.run, args=(tensors, None))
    thread.start()
    thread.join()


def test_the_handles_of_threads_that_ended_are_used_again(gpus: FakeGpus) -> None:
    one, other, tensors = plan(gpus, 0), plan(gpus, 1), [torch.zeros(2) for _ in range(3)]
    for found in (one, one, other, one, other):
        in_a_thread(found, tensors)
    assert [handle.device for handle in gpus.handles] == [0, 1]
    one.run(tensors, None)
    in_a_thread(one, tensors)
    # Two threads that live at a time have two.
    assert [handle.device for handle in gpus.handles] == [0, 1, 0]


def test_no_handle_is_made_during_a_capture(gpus: FakeGpus) -> None:
    found, tensors = plan(gpus, 1), [torch.zeros(2) for _ in range(3)]
    gpus.capturing = 1
    with pytest.raises(BuildError, match=r"a cuDNN handle on cuda:1.*Call the function once before the capture"):
        found.run(tensors, None)
    assert not gpus.handles
    gpus.capturing = None
    found.run(tensors, None)
    gpus.capturing = 1
    found.run(tensors, None)
    assert len(gpus.runs) == 2


def test_a_plan_that_was_captured_outlives_all_caches(gpus: FakeGpus) -> None:
    eager, captured, tensors = plan(gpus, 0), plan(gpus, 0), [torch.zeros(2) for _ in range(3)]
    for found in (eager, captured):
        found.run(tensors, None)
    gpus.capturing = 0
    for _ in range(2):
        captured.run(tensors, None)
    assert {captured} == cudnn_executor._CAPTURED


def test_a_plan_is_loaded_for_the_device_that_runs_it_but_not_during_a_capture(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[object, ...]] = []
    key = mock.Mock(target="target", direction=Direction.forward)
    executor = PlanExecutor(torch.device("cuda", 1))
    monkeypatch.setattr(cudnn_executor, "stored_plan", lambda key: b"plan")
    monkeypatch.setattr(cudnn_executor, "load_plan", lambda *args: loaded.append((gpus.current, *args)) or graph(gpus))
    gpus.capturing = 1
    with pytest.raises(BuildError, match=r"a cuDNN forward plan on cuda:1.*Call the function once before the capture"):
        executor.executable(key)
    assert not loaded
    gpus.capturing = None
    found = executor.executable(key)
    gpus.capturing = 1
    assert executor.executable(key) is found
    assert loaded == [(1, "target", b"plan", 1)]
    # It takes none to load one: a trial run with it would capture.
    assert not gpus.handles
