"""Which GPU tensors are on, and which engines work there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fusedattn.cache import clear_caches, on_clear
from fusedattn.engines.base import AttentionEngine
from fusedattn.engines.cudnn import CudnnEngine
from fusedattn.engines.cudnn_parts import Executor
from fusedattn.engines.self_test import SelfTestedEngine
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine
from fusedattn.settings import settings
from fusedattn.target import DeviceTarget


class _Machine(NamedTuple):
    target: DeviceTarget | None
    engines: dict[Engine, AttentionEngine]


CPU_ENGINES: dict[Engine, AttentionEngine] = {Engine.torch: TorchEngine()}
_CPU = _Machine(None, CPU_ENGINES)
_GPUS: dict[torch.device, _Machine] = {}
_LOCK = threading.Lock()
on_clear(_GPUS.clear)
# What CPU tensors are taken for, innermost last.
_PRETENDED: list[_Machine] = []


def _machine(device: torch.device) -> _Machine:
    if device.type != "cuda":
        return _PRETENDED[-1] if _PRETENDED else _CPU
    found = _GPUS.get(device)
    if found is not None:
        return found
    # Not before there is a GPU: no cuDNN is asked for on a CPU.
    from fusedattn.engines.cudnn_executor import PlanExecutor

    # One machine, and so one cache of plans, however many threads come first.
    with _LOCK:
        found = _GPUS.get(device)
        if found is None:
            target = DeviceTarget.current(device)
            executor = PlanExecutor(torch.device("cuda", device.index or 0))
            found = _GPUS[device] = _Machine(target, _gpu_engines(target, executor, settings().self_test))
    return found


def _gpu_engines(target: DeviceTarget, executor: Executor, self_test: bool) -> dict[Engine, AttentionEngine]:
    cudnn: AttentionEngine = CudnnEngine(target, executor)
    if self_test:
        cudnn = SelfTestedEngine(cudnn, "cuDNN", target)
    return {Engine.cudnn: cudnn, Engine.torch: TorchEngine(reads_lengths=False)}


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, or taken for one.

    Example:
        >>> is_gpu(torch.device("cpu")), is_gpu(torch.device("cuda:0"))
        (False, True)
    """
    return device.type == "cuda" or bool(_PRETENDED)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device, which need not be the current device, is being captured.

    Example:
        >>> is_capturing(torch.device("cpu"))
        False
    """
    if device.type != "cuda":
        return False
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def target_of(device: torch.device) -> DeviceTarget | None:
    """The GPU of a device; None where it is none.

    Example:
        >>> target_of(torch.device("cpu")) is None
        True
    """
    return _machine(device).target


def engine_on(device: torch.device, engine: Engine) -> AttentionEngine:
    """An engine of a device; raises ``KeyError`` where it has none of that name."""
    return _machine(device).engines[engine]


@contextmanager
def pretend(target: DeviceTarget, executor: Executor, *, self_test: bool = False) -> Iterator[None]:
    """Take CPU tensors for those of a GPU, for tests and benchmarks.

    Args:
        target: The GPU. Lengths are not read, and engines are chosen, as there.
        executor: Runs the graphs of the cuDNN engine in its stead.
        self_test: Whether engines check themselves first, as on a GPU.

    Returns:
        A context manager, which may be nested; caches are cleared on its way in and out.

    Raises:
        Nothing.
    """
    _PRETENDED.append(_Machine(target, _gpu_engines(target, executor, self_test)))
    clear_caches()
    try:
        yield
    finally:
        _PRETENDED.pop()
        clear_caches()
