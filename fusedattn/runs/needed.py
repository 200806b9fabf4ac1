"""Which cuDNN plans the cases of a run need: calls are made on tensors without memory, and what they ask for noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedattn import runtime
from fusedattn.calls import attention_request
from fusedattn.engines.cudnn import CudnnEngine
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.cudnn_operands import without_memory
from fusedattn.engines.self_test_problem import Canned, Family, computed, kept
from fusedattn.enums import Direction, Engine, NVTE_QKV_Layout
from fusedattn.errors import BuildError, EngineRefusal
from fusedattn.layouts import LAYOUTS
from fusedattn.runs.case import Case
from fusedattn.runs.config import AnyRun, Geometry, RandomInputs, VerifyProblem
from fusedattn.runs.inputs import build
from fusedattn.runs.sweeps import expand
from fusedattn.target import DeviceTarget

SELF_TEST = "self-test"


@dataclass(frozen=True)
class Call:
    """One direction of a case on one GPU.

    Attributes:
        case: Name of the case.
        direction: Forward or backward.
        target: The GPU.
        make: Makes the call with an executor that notes what it is asked for.
    """

    case: str
    direction: Direction
    target: DeviceTarget
    make: Callable[[Recorder], None]


@dataclass(frozen=True)
class Outcome:
    """What a call asked for.

    Attributes:
        call: The call.
        keys: The graphs.
        refused: Why the cuDNN engine does not take it, by its rules; empty where it does.
        fault: Why it does take it and has no plan; empty where that is not so.
    """

    call: Call
    keys: tuple[SdpaKey, ...]
    refused: tuple[str, ...] = ()
    fault: str = ""


class _Sized:
    """Implements ``Executable``: takes no tensors."""

    uids: tuple[int, ...] = ()

    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        """Do nothing."""


class Recorder:
    """Implements ``Executor``: notes the keys that it is asked for.

    Args:
        workspaces: Scratch memory of each plan that is known, in bytes, or why there is none. Others are taken to need
            none, so that what follows from a larger one is asked for once it is known.
    """

    def __init__(self, workspaces: Mapping[SdpaKey, int | BuildError]) -> None:
        self._workspaces = workspaces
        self.keys: dict[SdpaKey, None] = {}

    def executable(self, key: SdpaKey) -> _Sized:
        """Note a key; raises ``BuildError`` where there is known to be no plan."""
        self.keys[key] = None
        found = self._workspaces.get(key, 0)
        if isinstance(found, BuildError):
            raise found
        return _Sized(found)


def record(call: Call, workspaces: Mapping[SdpaKey, int | BuildError]) -> Outcome:
    """Make a call.

    Args:
        call: The call.
        workspaces: As in ``Recorder``.

    Returns:
        What it asked for; final once all of its keys are in ``workspaces``.

    Raises:
        SpecError: An argument is wrong.
    """
    recorder = Recorder(workspaces)
    refused: tuple[str, ...] = ()
    fault = ""
    try:
        call.make(recorder)
    except EngineRefusal as error:
        refused = error.refused[error.engine]
    except BuildError as error:
        fault = str(error)
    return Outcome(call, tuple(recorder.keys), refused, fault)


def calls_of(run: AnyRun, targets: Iterable[DeviceTarget], folder: Path) -> Iterator[Call]:
    """The calls that the cases of a run consist of.

    Args:
        run: The run.
        targets: The GPUs.
        folder: Where the paths of tensor files start.

    Yields:
        Each direction of each case on each GPU.

    Raises:
        RunFileError: What a tensor file holds does not fit.
    """
    targets = tuple(targets)
    for i, problem in enumerate(run.problems):
        for geometry in expand(problem):
            case = _without_memory(geometry, folder, f"problems[{i}]")
            for direction in _directions(geometry):
                for target in targets:
                    yield Call(geometry.name, direction, target, _maker(geometry, case, direction, target))


def _directions(geometry: Geometry) -> tuple[Direction, ...]:
    # Memory is measured of forwards, without a word about it.
    words = getattr(geometry, "directions", ())
    if isinstance(geometry, VerifyProblem) and geometry.op == "nvte" and not geometry.is_training:
        words = ("forward",)  # inference leaves nothing to go back with
    # A backward comes after a forward, of the same plan.
    return tuple(d for d in Direction if d is Direction.forward or any("backward" in word for word in words))


def _without_memory(geometry: Geometry, folder: Path, path: str) -> Case:
    """The case with tensors on the meta device, of the same strides; what they would hold plays no part."""
    if isinstance(geometry.inputs, RandomInputs):
        geometry = geometry.model_copy(update={"inputs": RandomInputs(random="normal")})
        with torch.device("meta"):
            return build(geometry, folder, path=path).case
    case = build(geometry, folder, path=path).case
    changes: dict[str, Any] = {name: without_memory(x) for name, x in vars(case).items() if isinstance(x, Tensor)}
    return replace(case, operands=tuple(map(without_memory, case.operands)), **changes)


def _maker(geometry: Geometry, case: Case, direction: Direction, target: DeviceTarget) -> Callable[[Recorder], None]:
    training = not isinstance(geometry, VerifyProblem) or geometry.is_training
    nvte = getattr(geometry, "op", "") == "nvte"

    def make(recorder: Recorder) -> None:
        with runtime.pretend(target, recorder):
            compute(request_of(case, direction, training, nvte), direction)

    return make


def request_of(case: Case, direction: Direction, training: bool, nvte: bool) -> runtime.Request:
    """What a public function makes of a case, for the cuDNN engine or none.

    Args:
        case: The problem.
        direction: Forward, or the backward after it.
        training: As the call has it.
        nvte: Whether the call is of the nvte functions.

    Returns:
        The request.

    Raises:
        SpecError: An argument is wrong.
        EngineRefusal: The cuDNN engine does not take it.
    """
    layout = NVTE_QKV_Layout.parse(case.layout, "layout")
    backward = direction is Direction.backward
    bias = None if case.bias is None else case.bias.detach().requires_grad_(backward)
    max_seqlen_kv = case.max_seqlen_q if case.layout == "t3hd" else case.max_seqlen_kv
    return attention_request(
        layout,
        dict(zip(LAYOUTS[layout].operands, case.operands, strict=True)),
        bias,
        case.bias_type,
        case.mask_type,
        case.cu_seqlens_q,
        case.cu_seqlens_kv,
        case.max_seqlen_q,
        max_seqlen_kv,
        case.attn_scale,
        case.dropout,
        case.rng_state,
        training,
        None if backward or not nvte else False,
        Engine.cudnn,
        differentiable=not nvte,
    )


def compute(request: runtime.Request, direction: Direction) -> None:
    """Have the engine compute one direction of a request; raises like ``runtime.forward`` and ``backward``."""
    if direction is Direction.forward:
        runtime.forward(request)
        return
    first, bias = request.operands[0], request.bias
    out = first.new_empty(runtime.out_shape(request.layout, request.operands))
    shape, dtype = runtime.lse_shape(request.layout, request.operands), runtime.lse_dtype(first.dtype)
    gradients = [x.new_empty(x.shape) for x in request.operands]
    dbias = None if bias is None else torch.empty_like(bias)
    runtime.backward(request, torch.empty_like(out), None, out, first.new_empty(shape, dtype=dtype), gradients, dbias)


def self_tests(keys: Iterable[SdpaKey]) -> Iterator[Call]:
    """The checks that the cuDNN engine makes on a GPU before it is trusted with some graphs.

    Args:
        keys: The graphs.

    Yields:
        A call for each check, once.

    Raises:
        Nothing.
    """
    found = dict.fromkeys((key.target, _family(key)) for key in keys)
    for target, family in found:
        yield Call(SELF_TEST, family.direction, target, _tester(family, target))


def _tester(family: Family, target: DeviceTarget) -> Callable[[Recorder], None]:
    def make(recorder: Recorder) -> None:
        canned, engine = Canned(family, target, torch.device("cpu")), CudnnEngine(target, recorder)
        kept(canned, engine)
        computed(canned, engine)

    return make


def _family(key: SdpaKey) -> Family:
    dtype = getattr(torch, key.tensor(Role.Q).dtype)
    features = (key.ragged, key.causal, Role.BIAS in key, Role.DBIAS in key, key.dropout > 0.0, key.deterministic)
    return Family(key.direction, dtype, *features)
