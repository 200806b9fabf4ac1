"""The format of bundles: plans compiled ahead of time, in a folder, with a manifest that says what they are.

``manifest.json`` holds a digest of itself, and one of every blob beside it, ``plans/<sha256>.plan``. What is read is
checked each time, before it is used; what does not match is never given out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fusedattn.errors import BundleError
from fusedattn.target import DeviceTarget

MANIFEST = "manifest.json"
PLANS = "plans"
# Raised when a manifest comes to mean something else.
SCHEMA = 1

_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0)]
_REWRITE = "Write it again with `fusedattn compile`."


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BundledPlan(_Record):
    """One plan of a bundle.

    Attributes:
        problem: What it computes, in words.
        cases: Names of the cases that need it; ``self-test`` is the check of an engine at its first use.
        key: Text of its key, which says all that it was built from.
        direction: What it computes.
        target, fingerprint: Of the GPU that it was built for.
        kernels: Names of its kernels.
        workspace_bytes: Scratch memory of one run.
        build_ms: How long it took to build.
        sha256, bytes: Of its blob.
        file: Of its blob, in the bundle.
    """

    problem: str
    cases: tuple[str, ...]
    key: str
    direction: Literal["forward", "backward"]
    target: str
    fingerprint: str
    kernels: tuple[str, ...]
    workspace_bytes: _Count
    build_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    sha256: _Sha256
    bytes: _Count
    file: Annotated[str, Field(pattern=r"^plans/[0-9a-f]{64}\.plan$")]


class Manifest(_Record):
    """What a bundle says of itself.

    Attributes:
        schema_number: ``SCHEMA``.
        fusedattn, cudnn, frontend: Versions that the plans were built with.
        cuda_major: Major version of CUDA that their code is for, which the driver must support.
        targets: The GPUs that they are for.
        plans: The plans.
    """

    schema_number: int
    fusedattn: str
    cudnn: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    frontend: str
    cuda_major: Annotated[int, Field(ge=1)]
    targets: tuple[DeviceTarget, ...]
    plans: tuple[BundledPlan, ...]

    def text(self) -> str:
        """The content of the file ``manifest.json``: JSON, its own digest included."""
        content = self.model_dump(mode="json")
        return json.dumps({"sha256": _digest(content), **content}, indent=1) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Bundle:
    """A bundle that was opened; its manifest is right, its blobs are checked as they are read.

    Args:
        folder: Where it is.
        manifest: What it holds.

    Attributes:
        fingerprints: Of the GPUs that it holds plans for.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._plans = {plan.key: plan for plan in manifest.plans}
        self.fingerprints = frozenset(target.fingerprint for target in manifest.targets)

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """Read and check the manifest of a bundle.

        Args:
            folder: Where it is.

        Returns:
            The bundle.

        Raises:
            BundleError: There is none, it is damaged, or another release wrote it.

        Example:
            >>> Bundle.open(Path("no"))
            Traceback (most recent call last):
            fusedattn.errors.BundleError: bundle 'no': there is no such folder...
        """
        path = str(folder)
        try:
            content = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError as error:
            there = folder.is_dir()
            why = f"it has no {MANIFEST}" if there else "there is no such folder"
            raise BundleError(path, why, "`fusedattn compile` writes bundles.") from error
        except OSError as error:
            raise BundleError(path, f"{MANIFEST} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise BundleError(path, f"{MANIFEST} is damaged: {error}", _REWRITE) from error
        if not isinstance(content, dict):
            raise BundleError(path, f"{MANIFEST} is damaged: it holds no mapping", _REWRITE)
        found = content.pop("sha256", None)
        if content.get("schema_number") != SCHEMA:
            got = content.get("schema_number")
            raise BundleError(path, f"its schema_number is {got!r}, and this release reads {SCHEMA}", _REWRITE)
        if found != _digest(content):
            raise BundleError(path, f"{MANIFEST} is damaged: it does not match its own sha256", _REWRITE)
        try:
            return cls(folder, Manifest.model_validate_json(json.dumps(content)))
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise BundleError(path, f"{MANIFEST} is wrong: {where}: {fault['msg']}", _REWRITE) from error

    def require_cudnn(self, version: str) -> None:
        """See that plans may be used with a version of the library; raises ``BundleError`` where they may not."""
        if version != self.manifest.cudnn:
            why = f"its plans are of cuDNN {self.manifest.cudnn}, and this is {version}"
            raise BundleError(str(self.folder), why, f"Install that version, or compile again with cuDNN {version}.")

    def require_driver(self, version: int) -> None:
        """See that a driver, such as 13010, supports the plans' CUDA; raises ``BundleError`` where it does not."""
        major = self.manifest.cuda_major
        if version // 1000 < major:
            why = f"its plans are for CUDA {major}, and this driver supports {version // 1000}.{version % 1000 // 10}"
            raise BundleError(str(self.folder), why, "Install a newer driver.")

    def require_gpu(self, fingerprint: str) -> None:
        """See that there are plans for a GPU; raises ``BundleError`` where there are not."""
        if fingerprint not in self.fingerprints:
            known = ", ".join(f"{target.name} ({target.fingerprint})" for target in self.manifest.targets)
            hint = "`fusedattn targets --save gpu.json` describes a GPU for `fusedattn compile --target gpu.json`."
            raise BundleError(str(self.folder), f"its plans are for {known}, and this GPU is {fingerprint}", hint)

    def plan(self, key: str) -> bytes | None:
        """The blob of a key.

        Args:
            key: Text of the key.

        Returns:
            The serialised plan, which is the one that was written; None where the bundle has none for the key.

        Raises:
            BundleError: The blob is missing or damaged.
        """
        known = self._plans.get(key)
        return None if known is None else self.blob(known)

    def blob(self, plan: BundledPlan) -> bytes:
        """The blob of a plan; raises ``BundleError`` where it is missing or damaged."""
        try:
            blob = (self.folder / plan.file).read_bytes()
        except OSError as error:
            why = f"{plan.file} cannot be read: {error.strerror or error}"
            raise BundleError(str(self.folder), why, _REWRITE) from error
        if hashlib.sha256(blob).hexdigest() != plan.sha256:
            why = f"{plan.file} is damaged: {len(blob)} bytes that do not match the sha256 in {MANIFEST}"
            raise BundleError(str(self.folder), why, _REWRITE)
        return blob
