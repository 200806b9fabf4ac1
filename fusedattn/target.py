"""``DeviceTarget``: the GPU that plans and kernels are built for, named, read from a file, or found on this machine.

A plan runs where ``DeviceTarget.fingerprint`` is the same. Clocks, caches and memory sizes are told to cuDNN, which may
choose by them among plans that all run; they are no part of the fingerprint.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fusedattn.errors import BuildError, SpecError
from fusedattn.gpu_figures import GPUS, LIMITS

if TYPE_CHECKING:
    import torch

_INT32_MAX = 2**31 - 1
_Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
# 0 where the driver does not tell.
_Told = Annotated[int, Field(ge=0, le=_INT32_MAX)]

# What cuDNN asks for and every GPU from compute capability 8.0 on has alike, and what does not shape a plan.
_ALIKE = {
    "maxGridSize": [_INT32_MAX, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "maxThreadsPerBlock": 1024,
    "warpSize": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 48 * 1024,
    "reservedSharedMemoryPerBlock": 1024,
    "supportCoopLaunch": 1,
    "isTccDriver": 0,
    "pciDeviceId": 0,
    "cudaDeviceId": 0,
    "driverVer": 13000,
}


class DeviceTarget(BaseModel):
    """A GPU, as far as building for it needs.

    Attributes:
        name: Short name, such as ``h100``.
        device_name: The driver's name, such as ``NVIDIA H100 80GB HBM3``.
        compute_capability: Major and minor.
        multiprocessor_count: Streaming multiprocessors (SMs); those of the instance under MIG.
        shared_memory_per_block_optin_bytes: What a block can have at most, after opting in.
        max_threads_per_multiprocessor, max_blocks_per_multiprocessor: Resident at a time.
        memory_bytes: Of the whole GPU.
        l2_cache_bytes, sm_clock_khz, memory_clock_khz, memory_bus_bits: Clocks are the highest; 0 where not told.

    Raises:
        pydantic.ValidationError: A field is missing, unknown, of another type or out of range.

    Example:
        >>> TARGETS["h100"].fingerprint
        'sm90-132sm-232448'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=255)]
    device_name: Annotated[str, Field(min_length=1, max_length=255)]
    compute_capability: tuple[Annotated[int, Field(ge=1, le=99)], Annotated[int, Field(ge=0, le=9)]]
    multiprocessor_count: _Count
    shared_memory_per_block_optin_bytes: _Count
    max_threads_per_multiprocessor: _Count
    max_blocks_per_multiprocessor: _Count
    memory_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    l2_cache_bytes: _Told
    sm_clock_khz: _Told
    memory_clock_khz: _Told
    memory_bus_bits: _Told

    def __hash__(self) -> int:
        # Plans are looked up by target in every call; a hash over all fields would take longer than the rest of it.
        return hash(self.name)

    @property
    def sm_version(self) -> int:
        """The compute capability as one number, such as 90 or 120."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def fingerprint(self) -> str:
        """What a plan must match to run: compute capability, SM count, and shared memory per block in bytes."""
        return f"sm{self.sm_version}-{self.multiprocessor_count}sm-{self.shared_memory_per_block_optin_bytes}"

    def cudnn_properties(self) -> str:
        """The description as the JSON that ``cudnn.create_device_properties`` takes.

        Returns:
            One line of JSON.

        Raises:
            Nothing.

        Example:
            >>> json.loads(TARGETS["b200"].cudnn_properties())["deviceVer"]
            1000
        """
        own = {
            "deviceName": self.device_name,
            "deviceVer": 10 * self.sm_version,
            "multiProcessorCount": self.multiprocessor_count,
            "maxSharedMemoryPerBlockOptin": self.shared_memory_per_block_optin_bytes,
            "maxThreadsPerSM": self.max_threads_per_multiprocessor,
            "maxCtasPerSM": self.max_blocks_per_multiprocessor,
            "totalGlobalMem": self.memory_bytes,
            "l2CacheSize": self.l2_cache_bytes,
            "smClockRateKHz": self.sm_clock_khz,
            "memClockRateKHz": self.memory_clock_khz,
            "memoryBusWidth": self.memory_bus_bits,
        }
        return json.dumps(_ALIKE | own)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the description to a file, whole or not at all.

        Args:
            path: The file; replaced where it is there. Its name ends in ``.json``, by which ``parse_target`` knows it.

        Returns:
            Nothing.

        Raises:
            SpecError: Another ending, something there that is no file, or a place that cannot be written to.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     TARGETS["l4"].save(f"{folder}/node.json")
            ...     DeviceTarget.load(f"{folder}/node.json") == TARGETS["l4"]
            True
        """
        path = Path(path)
        if path.suffix != ".json" or (path.exists() and not path.is_file()):
            raise SpecError("path", "a file whose name ends in .json", repr(str(path)))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            try:
                temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            raise SpecError("path", "a file that can be written", f"{str(path)!r}: {_reason(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceTarget:
        """Read a description that ``save`` wrote.

        Args:
            path: The file.

        Returns:
            The target.

        Raises:
            SpecError: The file cannot be read, or holds something else.

        Example:
            >>> DeviceTarget.load("no.json")
            Traceback (most recent call last):
            fusedattn.errors.SpecError: argument 'path': expected a GPU's description, got 'no.json': No such file ...
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            reason = f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}"
        except (OSError, ValueError) as error:
            reason = _reason(error)
        hint = "`fusedattn targets --save FILE.json` writes one on a machine with the GPU."
        raise SpecError("path", "a GPU's description", f"{str(path)!r}: {reason}", hint)

    @classmethod
    def current(cls, device: torch.device | None = None) -> DeviceTarget:
        """Describe a GPU of this machine.

        Args:
            device: A CUDA device; None is torch's current one.

        Returns:
            The target; named as in ``TARGETS`` where it is one of those.

        Raises:
            SpecError: ``device`` is no CUDA device.
            BuildError: There is no GPU here.

        Example:
            >>> import torch
            >>> DeviceTarget.current(torch.device("cpu"))
            Traceback (most recent call last):
            fusedattn.errors.SpecError: argument 'device': expected a CUDA device, got cpu.
        """
        # Not before it is asked for: naming a target needs no torch.
        import torch

        if device is not None and device.type != "cuda":
            raise SpecError("device", "a CUDA device", str(device))
        if not torch.cuda.is_available():
            hint = "Do this on a machine with the GPU, or name one that `fusedattn targets` lists."
            raise BuildError("a description of this machine's GPU", "torch finds no CUDA device", hint)
        return _from_torch(torch.cuda.get_device_properties(device))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


TARGETS: dict[str, DeviceTarget] = {
    gpu.name: DeviceTarget(**gpu._asdict(), **LIMITS[gpu.compute_capability]._asdict()) for gpu in GPUS
}
_SPELLINGS = {_plain(name): target for name, target in TARGETS.items()}


def _from_torch(properties: Any) -> DeviceTarget:
    compute_capability = (properties.major, properties.minor)
    # torch does not tell how many blocks an SM holds; a GPU newer than the table is taken for the newest below it.
    known = max((entry for entry in LIMITS if entry <= compute_capability), default=min(LIMITS))
    found = DeviceTarget(
        name=re.sub(r"[^a-z0-9.]+", "-", properties.name.lower()).strip("-.") or "gpu",
        device_name=properties.name,
        compute_capability=compute_capability,
        multiprocessor_count=properties.multi_processor_count,
        shared_memory_per_block_optin_bytes=properties.shared_memory_per_block_optin,
        max_threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        max_blocks_per_multiprocessor=LIMITS[known].max_blocks_per_multiprocessor,
        memory_bytes=properties.total_memory,
        l2_cache_bytes=properties.L2_cache_size,
        sm_clock_khz=properties.clock_rate,
        memory_clock_khz=properties.memory_clock_rate,
        memory_bus_bits=properties.memory_bus_width,
    )
    for named in TARGETS.values():
        if (named.device_name, named.fingerprint) == (found.device_name, found.fingerprint):
            return found.model_copy(update={"name": named.name})
    return found


def parse_target(value: str | os.PathLike[str] | DeviceTarget) -> DeviceTarget:
    """Read a target from its name or its file.

    Args:
        value: A name of ``TARGETS`` in any spelling, the path of a file that ``DeviceTarget.save`` wrote (it ends in
            ``.json``), or a target.

    Returns:
        The target.

    Raises:
        SpecError: No such name, or a file that cannot be read or holds something else.

    Example:
        >>> parse_target("H100-PCIe").multiprocessor_count
        114
    """
    if isinstance(value, DeviceTarget):
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise SpecError("target", "a name or the path of a .json file", type(value).__name__)
    text = os.fspath(value)
    if text.endswith(".json"):
        try:
            return DeviceTarget.load(text)
        except SpecError as error:
            raise SpecError("target", error.expected, error.got, error.hint) from error
    found = _SPELLINGS.get(_plain(text))
    if found is None:
        near = difflib.get_close_matches(_plain(text), _SPELLINGS, n=1)
        hint = f"Did you mean {_SPELLINGS[near[0]].name!r}?" if near else "`fusedattn targets` lists them."
        raise SpecError("target", f"one of {', '.join(TARGETS)}, or the path of a .json file", repr(text), hint)
    return found
