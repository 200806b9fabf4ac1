"""From a key to a compiled plan as bytes; needs the target's description, not the GPU."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

from fusedattn.engines.cudnn_graph import build
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_library import cudnn, cudnn_version, device_properties
from fusedattn.engines.stub_driver import failure_hint
from fusedattn.errors import BuildError
from fusedattn.target import DeviceTarget

# Names that cuDNN's frontend gives engines written in Python, which compile at first use and are not proved here.
_PYTHON_ENGINES = ["sdpa_fwd", "sdpa_bwd"]
_KERNEL = re.compile(rb'"kernelName":"([^"]+)"')
_KERNEL_PREFIX = "cudnn_generated_fort_native_"


class CompiledPlan(NamedTuple):
    """What a key was compiled to.

    Attributes:
        blob: The serialised plan; cubins are in it.
        workspace_bytes: Scratch memory of one run.
        kernels: Names of its kernels, which tell architecture and tiles.
        build_ms: How long it took.
    """

    blob: bytes
    workspace_bytes: int
    kernels: tuple[str, ...]
    build_ms: float


def compile_plan(key: SdpaKey) -> CompiledPlan:
    """Let cuDNN plan and compile the graph of a key.

    Args:
        key: The graph.

    Returns:
        The plan.

    Raises:
        BuildError: cuDNN has no plan for it, or the library cannot be used; the message holds cuDNN's own reason.
    """
    start = time.perf_counter()
    module = cudnn()
    graph = build(key)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.deselect_engines(_PYTHON_ENGINES)
        graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        blob = bytes(graph.serialize(as_bytes=True))
        workspace_bytes = int(graph.get_workspace_size())
    # Refusals come as a type of cuDNN's own and as several built-in ones, by stage.
    except Exception as error:
        hint = failure_hint(str(error)) or "Pass engine='torch', or see fusedattn.explain for what would work."
        raise BuildError(
            f"a cuDNN {key.direction.word} plan for {key.target.name}", _first_line(error), hint
        ) from error
    build_ms = (time.perf_counter() - start) * 1e3
    return CompiledPlan(blob, workspace_bytes, kernel_names(blob), build_ms)


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else f"{text[:600]}..."


def kernel_names(blob: bytes) -> tuple[str, ...]:
    """Names of the kernels in a serialised plan, without the prefix that all of them have.

    Example:
        >>> kernel_names(b'..."kernelName":"cudnn_generated_fort_native_sdpa_sm90"...')
        ('sdpa_sm90',)
    """
    return tuple(match.decode().removeprefix(_KERNEL_PREFIX) for match in _KERNEL.findall(blob))


def plan_name(key: SdpaKey) -> str:
    """The text that the disk cache knows a plan by: its key, and the versions of cuDNN and of what wrote it."""
    return f"cudnn {cudnn_version()} frontend {cudnn().__version__} {key.text()}"


def load_plan(target: DeviceTarget, blob: bytes, device: int | None = None) -> Any:
    """A graph from a serialised plan; no GPU is used for it.

    Args:
        target: The GPU that it was compiled for.
        blob: The plan.
        device: Index of the CUDA device that will run it; None: the graph is to be looked at.

    Returns:
        A ``cudnn.pygraph``.

    Raises:
        BuildError: cuDNN does not take the bytes, or they are for another GPU.
    """
    module = cudnn()
    try:
        # Not with a handle: that captures a trial run into a CUDA graph, with memory of its own. Other threads' use of
        # the default stream fails meanwhile, and where memory is short the handle is left on a stream that captures.
        properties = device_properties(target) if device is None else module.create_device_properties(device)
        graph = module.pygraph(device_property=properties)
        graph.deserialize(blob)
    except Exception as error:
        hint = "Clear the cache or write the bundle again."
        raise BuildError(f"a stored cuDNN plan for {target.name}", _first_line(error), hint) from error
    return graph
