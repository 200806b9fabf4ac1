"""An engine that first checks itself: a family of problems is computed on a GPU only once a small one came out right.

What passed is kept in the disk cache, by GPU, driver, versions and source. What failed is not: each process finds it
anew, and from then on computes nothing with the engine. A check reads results back, which a capture does not allow.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from fusedattn.engines.base import AttentionEngine, BoundForward, Gradients, Problem
from fusedattn.engines.self_test_check import difference
from fusedattn.engines.self_test_problem import Canned, Family
from fusedattn.enums import Direction, NVTE_Mask_Type
from fusedattn.errors import BuildError, FusedAttnError
from fusedattn.spec import AttentionSpec
from fusedattn.store import default_store
from fusedattn.target import DeviceTarget

_REPORT = (
    "Please report this text with the name of the GPU and the version of its driver. Until it is mended, pass"
    " engine='torch'; FUSEDATTN_SELF_TEST=0 would use the engine unchecked."
)
_BEFORE_CAPTURE = "Call the function once before the capture, or set FUSEDATTN_SELF_TEST=0."
_PASSED = b"passed"


def family_of(problem: Problem, direction: Direction, dbias: bool = False) -> Family:
    """The family of a problem.

    Args:
        problem: The problem.
        direction: What is computed of it.
        dbias: Whether the gradient of the bias is or, under dropout, will be.

    Returns:
        The family.

    Raises:
        Nothing.
    """
    spec = problem.spec
    return Family(
        direction,
        spec.dtype,
        spec.format.ragged,
        spec.mask_type is NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        problem.bias is not None,
        dbias and direction is Direction.backward,
        problem.dropout > 0.0,
        # No forward depends on it.
        spec.deterministic and direction is Direction.backward,
    )


class SelfTestedEngine:
    """See the module; implements ``AttentionEngine``.

    A check that fails disables the engine as long as this object lives: every call that is not bound already raises
    ``BuildError``, which under ``auto`` leads to the torch engine. So does the first call of a family where it is made
    during a capture, but that disables nothing.

    Args:
        engine: The engine.
        name: Its name in messages.
        target: The GPU.
    """

    def __init__(self, engine: AttentionEngine, name: str, target: DeviceTarget) -> None:
        self._engine, self._name, self._target = engine, name, target
        self._passed: set[Family] = set()
        self._fault: str | None = None
        self._lock = threading.Lock()

    def workspace_bytes(self, spec: AttentionSpec) -> int:
        """That of the engine."""
        return self._engine.workspace_bytes(spec)

    def forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """Compute attention; see ``AttentionEngine.forward``; raises ``BuildError`` where the engine is not trusted."""
        # With dropout a backward cannot turn to another engine, whose pattern would be another: it is checked now.
        direction = Direction.backward if problem.dropout > 0.0 else Direction.forward
        self._require(problem, family_of(problem, direction, problem.spec.bias_gradient))
        self._engine.forward(problem, out, lse)

    def bind(self, problem: Problem, out: Tensor, lse: Tensor) -> BoundForward | None:
        """That of the engine, for what ``forward`` has computed: its family has passed, and stays so."""
        return self._engine.bind(problem, out, lse)

    def backward(
        self, problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        """Differentiate; see ``AttentionEngine.backward``; raises ``BuildError`` where the engine is not trusted."""
        self._require(problem, family_of(problem, Direction.backward, gradients.bias is not None))
        self._engine.backward(problem, dout, dlse, out, lse, gradients)

    def _require(self, problem: Problem, family: Family) -> None:
        if self._fault is None and family in self._passed:
            return
        with self._lock:
            if self._fault is None and family not in self._passed:
                if problem.spec.capturing:
                    why = f"its self-test ({family.text()}) reads results back, which a capture does not allow"
                    raise BuildError(self._what(problem), why, _BEFORE_CAPTURE)
                self._test(family, problem.q.device)
        if self._fault is not None:
            raise self._disabled(problem)

    def _what(self, problem: Problem) -> str:
        return f"the {self._name} engine on {problem.q.device}"

    def _disabled(self, problem: Problem) -> BuildError:
        return BuildError(self._what(problem), self._fault or "", _REPORT)

    def _test(self, family: Family, device: torch.device) -> None:
        """Check a family, or find that it was checked; a missing plan and a lack of memory are no verdicts."""
        name = verdict_name(family, self._name, self._target, device)
        store = None if name is None else default_store()
        if name is None or store is None or store.load(name) != _PASSED:
            try:
                found = difference(Canned(family, self._target, device), self._engine)
            except (FusedAttnError, torch.OutOfMemoryError):
                raise
            # Of any library and type: nothing that the engine computes can be trusted.
            except Exception as error:
                found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if found is not None:
                self._fault = f"its self-test failed ({family.text()}): {found}"
                return
            if name is not None and store is not None:
                store.save(name, _PASSED)
        self._passed.add(family)


def verdict_name(family: Family, engine: str, target: DeviceTarget, device: torch.device) -> str | None:
    """The text that the disk cache knows a verdict by.

    Args:
        family: What was checked.
        engine: Name of the engine.
        target: The GPU.
        device: Where its tensors are; not on a GPU where one is only pretended.

    Returns:
        All that a verdict may depend on; None where the driver does not tell its version.

    Raises:
        Nothing.
    """
    driver = driver_version()
    if driver is None:
        return None
    found = {
        "engine": engine,
        "family": family.text(),
        "on": device.type,
        "device": target.device_name,
        "target": target.fingerprint,
        "driver": driver,
        "torch": torch.__version__,
        "versions": {
            name: _version(name) for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend")
        },
        "source": source_hash(),
    }
    return f"self-test {json.dumps(found, sort_keys=True)}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The kernel driver's own line about its version, or None where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return None


@functools.cache
def source_hash() -> str:
    """A digest of the sources of all engines."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
