"""Targets: their figures, what cuDNN is told, files, this machine's own GPU, and the command that lists them."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from fusedattn import cli
from fusedattn.engines.stub_driver import ensure_driver
from fusedattn.errors import BuildError, SpecError
from fusedattn.target import TARGETS, DeviceTarget, parse_target

H100 = TARGETS["h100"]
# CUDA cores and GB/s as published; cores of an SM by compute capability.
PUBLISHED = {
    "a100": (6912, 2039),
    "a100_40gb": (6912, 1555),
    "l4": (7424, 300),
    "l40s": (18176, 864),
    "rtx4090": (16384, 1008),
    "h100": (16896, 3350),
    "h100_pcie": (14592, 2039),
    "h200": (16896, 4800),
    "b200": (18944, 7700),
    "rtx5090": (21760, 1792),
    "rtxpro6000": (24064, 1792),
}


@pytest.mark.parametrize("name", TARGETS)
def test_figures_give_the_published_cores_and_bandwidth(name: str) -> None:
    target = TARGETS[name]
    cores, gigabytes_per_s = PUBLISHED[name]
    assert target.multiprocessor_count * (64 if target.compute_capability == (8, 0) else 128) == cores
    # Twice a clock.
    found = 2 * target.memory_clock_khz * 1000 * target.memory_bus_bits / 8 / 1e9
    assert found == pytest.approx(gigabytes_per_s, rel=0.03)
    assert target.name == name


@pytest.mark.parametrize(
    ("name", "threads", "blocks", "shared"),
    [
        ("a100", 2048, 32, 166912),
        ("l40s", 1536, 24, 101376),
        ("h100", 2048, 32, 232448),
        ("b200", 2048, 32, 232448),
        ("rtx5090", 1536, 24, 101376),
    ],
)
def test_limits_of_a_compute_capability(name: str, threads: int, blocks: int, shared: int) -> None:
    target = TARGETS[name]
    assert target.max_threads_per_multiprocessor == threads
    assert target.max_blocks_per_multiprocessor == blocks
    assert target.shared_memory_per_block_optin_bytes == shared


@pytest.mark.parametrize(("name", "sm"), [("a100", 80), ("l40s", 89), ("h100", 90), ("b200", 100), ("rtx5090", 120)])
def test_sm_version(name: str, sm: int) -> None:
    assert TARGETS[name].sm_version == sm
    assert json.loads(TARGETS[name].cudnn_properties())["deviceVer"] == 10 * sm


def test_what_cudnn_is_told() -> None:
    assert json.loads(H100.cudnn_properties()) == {
        "maxGridSize": [2147483647, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "multiProcessorCount": 132,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": 232448,
        "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": 32,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": 2048,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": 85029027840,
        "smClockRateKHz": 1980000,
        "memClockRateKHz": 2619000,
        "memoryBusWidth": 5120,
        "l2CacheSize": 52428800,
        "cudaDeviceId": 0,
        "deviceVer": 900,
        "driverVer": 13000,
        "deviceName": "NVIDIA H100 80GB HBM3",
    }


@pytest.mark.parametrize("name", TARGETS)
def test_cudnn_takes_it_and_gives_it_back(name: str) -> None:
    ensure_driver()
    cudnn = pytest.importorskip("cudnn")
    told = TARGETS[name].cudnn_properties()
    found = json.loads(cudnn.create_device_properties(told).serialize())
    assert found.items() >= {key: value for key, value in json.loads(told).items() if type(value) is not list}.items()


OTHER = {
    "name": "other",
    "device_name": "another name",
    "compute_capability": (9, 1),
    "multiprocessor_count": 131,
    "shared_memory_per_block_optin_bytes": 101376,
    "max_threads_per_multiprocessor": 1024,
    "max_blocks_per_multiprocessor": 16,
    "memory_bytes": 1,
    "l2_cache_bytes": 0,
    "sm_clock_khz": 0,
    "memory_clock_khz": 0,
    "memory_bus_bits": 0,
}
MATCHED = {"compute_capability", "multiprocessor_count", "shared_memory_per_block_optin_bytes"}


@pytest.mark.parametrize("field", DeviceTarget.model_fields)
def test_what_a_plan_must_match(field: str) -> None:
    other = DeviceTarget(**H100.model_dump() | {field: OTHER[field]})
    assert other != H100
    assert (other.fingerprint != H100.fingerprint) == (field in MATCHED)
    assert other.cudnn_properties() != H100.cudnn_properties() or field == "name"


def test_fingerprint_is_short_text() -> None:
    assert H100.fingerprint == "sm90-132sm-232448" == TARGETS["h200"].fingerprint
    assert len({target.fingerprint for target in TARGETS.values()}) == len(TARGETS) - 2


def test_equal_targets_hash_alike() -> None:
    copy = DeviceTarget(**H100.model_dump())
    assert copy == H100
    assert {copy: 1}[H100] == 1


@pytest.mark.parametrize("field", ["multiprocessor_count", "memory_bytes", "name"])
def test_a_target_does_not_change(field: str) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(H100, field, 1)


# Files.


@pytest.mark.parametrize("name", TARGETS)
def test_save_then_load(name: str, tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text("what was there before")
    TARGETS[name].save(path)
    assert DeviceTarget.load(path) == parse_target(path) == parse_target(str(path)) == TARGETS[name]
    assert list(tmp_path.iterdir()) == [path]
    assert set(json.loads(path.read_text())) == set(DeviceTarget.model_fields)


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.json"
    path.write_text("what was there before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(SpecError, match=r"expected a file that can be written, got .*: No space left on device"):
        H100.save(path)
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["", "node", "node.txt", "folder.json", "pipe.json", "no/where.json", "a\0.json"])
def test_places_that_cannot_be_saved_to(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(
        SpecError, match=r"^argument 'path': expected a file (whose name ends in .json|that can be written)"
    ):
        H100.save(place)
    assert {path.name for path in tmp_path.iterdir()} == {"folder.json", "pipe.json"}
    assert (tmp_path / "pipe.json").is_fifo()


def changed(**fields: object) -> str:
    return json.dumps({key: value for key, value in (H100.model_dump() | fields).items() if value is not None})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file: Invalid JSON"),
        ("{", "the file: Invalid JSON"),
        ("[]", "the file: Input should be an object"),
        ("[" * 100_000, "the file: Invalid JSON"),
        ("\xff", "the file: Invalid JSON"),
        (changed(multiprocessor_count=None), "multiprocessor_count: Field required"),
        (changed(cores=1), "cores: Extra inputs are not permitted"),
        (changed(multiprocessor_count=True), "multiprocessor_count: Input should be a valid integer"),
        (changed(multiprocessor_count="132"), "multiprocessor_count: Input should be a valid integer"),
        (changed(multiprocessor_count=132.0), "multiprocessor_count: Input should be a valid integer"),
        (changed(multiprocessor_count=0), "multiprocessor_count: Input should be greater than or equal to 1"),
        (changed(l2_cache_bytes=2**31), "l2_cache_bytes: Input should be less than or equal to 2147483647"),
        (changed(memory_bytes=10**30), "memory_bytes: Input should be less than or equal to 9223372036854775807"),
        (changed(sm_clock_khz=-1), "sm_clock_khz: Input should be greater than or equal to 0"),
        (changed(sm_clock_khz=float("nan")), "sm_clock_khz: Input should be a valid integer"),
        (changed(compute_capability=[9]), "compute_capability.1: Field required"),
        (changed(compute_capability=[9, 10]), "compute_capability.1: Input should be less than or equal to 9"),
        (changed(name="H 100"), "name: String should match pattern"),
        (changed(device_name=""), "device_name: String should have at least 1 character"),
    ],
)
def test_files_that_hold_something_else(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SpecError) as caught:
        parse_target(path)
    message = str(caught.value)
    assert message.startswith(f"argument 'target': expected a GPU's description, got {str(path)!r}: {fault}"), message
    assert message.endswith("`fusedattn targets --save FILE.json` writes one on a machine with the GPU.")


@pytest.mark.parametrize(
    ("path", "fault"), [("no.json", "No such file"), (".json", "Is a directory"), ("\0.json", "null")]
)
def test_files_that_cannot_be_read(path: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".json").mkdir()
    with pytest.raises(SpecError, match=f"argument 'path': expected a GPU's description, got .*{fault}"):
        DeviceTarget.load(path)


# Names.


@pytest.mark.parametrize(
    ("text", "name"),
    [("h100", "h100"), ("H100-PCIe", "h100_pcie"), (" RTX 5090", "rtx5090"), ("A100 40GB", "a100_40gb")],
)
def test_spellings(text: str, name: str) -> None:
    assert parse_target(text) is TARGETS[name]
    assert parse_target(TARGETS[name]) is TARGETS[name]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("h1000", r"expected one of a100, .*, or the path of a .json file, got 'h1000'\. Did you mean 'h100'\?"),
        ("h100_pci", r"got 'h100_pci'\. Did you mean 'h100_pcie'\?"),
        ("rtx-pro-600", r"got 'rtx-pro-600'\. Did you mean 'rtxpro6000'\?"),
        ("", r"got ''\. `fusedattn targets` lists them\."),
        ("node.yaml", r"got 'node.yaml'\. `fusedattn targets` lists them\."),
        (90, r"expected a name or the path of a .json file, got int\."),
        (None, r"expected a name or the path of a .json file, got NoneType\."),
    ],
)
def test_names_that_are_none(value: object, message: str) -> None:
    with pytest.raises(SpecError, match=rf"^argument 'target': .*{message}$"):
        parse_target(value)  # type: ignore[arg-type]


# This machine's own.

PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "shared_memory_per_block_optin": 232448,
    "max_threads_per_multi_processor": 2048,
    "total_memory": 85_000_000_000,
    "L2_cache_size": 52428800,
    "clock_rate": 1_980_000,
    "memory_clock_rate": 2_619_000,
    "memory_bus_width": 5120,
}


def has_gpu(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    found = SimpleNamespace(**PROPERTIES | properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_torch_tells_what_is_asked_of_it() -> None:
    kind = getattr(torch._C, "_CudaDeviceProperties", None)
    if kind is None or torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert set(dir(kind)) >= set(PROPERTIES)


def test_a_named_gpu_is_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch)
    expected = H100.model_copy(update={"memory_bytes": 85_000_000_000})
    assert DeviceTarget.current() == DeviceTarget.current(torch.device("cuda", 0)) == expected


def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch)
    asked: list[object] = []
    right = torch.cuda.get_device_properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: (asked.append(device), right(device))[1])
    DeviceTarget.current()
    DeviceTarget.current(torch.device("cuda", 1))
    assert asked == [None, torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("properties", "fields"),
    [
        (
            {"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "multi_processor_count": 60},
            {"name": "nvidia-h100-80gb-hbm3-mig-3g.40gb", "fingerprint": "sm90-60sm-232448"},
        ),
        # The same name with fewer SMs is another GPU to plans.
        ({"multi_processor_count": 16}, {"name": "nvidia-h100-80gb-hbm3", "fingerprint": "sm90-16sm-232448"}),
        ({"name": "[?]", "clock_rate": 0, "memory_bus_width": 0}, {"name": "gpu", "sm_clock_khz": 0}),
        ({"major": 12, "max_threads_per_multi_processor": 1536}, {"max_blocks_per_multiprocessor": 24}),
        ({"major": 8, "minor": 6, "L2_cache_size": 0}, {"max_blocks_per_multiprocessor": 16, "l2_cache_bytes": 0}),
        ({"major": 10, "minor": 7}, {"max_blocks_per_multiprocessor": 32, "sm_version": 107}),
        ({"major": 6, "minor": 1}, {"max_blocks_per_multiprocessor": 16, "sm_version": 61}),
    ],
)
def test_other_gpus(properties: dict[str, object], fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, **properties)
    found = DeviceTarget.current()
    assert {name: getattr(found, name) for name in fields} == fields


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BuildError) as caught:
        DeviceTarget.current()
    assert str(caught.value) == (
        "cannot have a description of this machine's GPU: torch finds no CUDA device. "
        "Do this on a machine with the GPU, or name one that `fusedattn targets` lists."
    )
    with pytest.raises(SpecError, match="argument 'device': expected a CUDA device, got cpu"):
        DeviceTarget.current(torch.device("cpu"))


@pytest.mark.gpu
def test_a_real_gpu_is_what_cudnn_says_too(tmp_path: Path) -> None:
    cudnn = pytest.importorskip("cudnn")
    target = DeviceTarget.current(torch.device("cuda", 0))
    said = json.loads(cudnn.create_device_properties(0).serialize())
    shapes_plans = {"deviceVer", "multiProcessorCount", "warpSize", "regsPerBlock", "maxRegistersPerSM", "maxCtasPerSM"}
    shapes_plans |= {"maxSharedMemoryPerBlock", "maxSharedMemoryPerBlockOptin", "reservedSharedMemoryPerBlock"}
    shapes_plans |= {"maxThreadsPerBlock", "maxThreadsPerSM", "maxGridSize", "maxBlockSize"}
    told = json.loads(target.cudnn_properties())
    assert {key: told[key] for key in shapes_plans} == {key: said[key] for key in shapes_plans}
    target.save(tmp_path / "node.json")
    assert parse_target(tmp_path / "node.json") == target


# The command.


def test_the_command_lists_them() -> None:
    result = CliRunner().invoke(cli.app, ["targets"])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == list(TARGETS)
    assert ["b200", "NVIDIA B200", "10.0", "148", "227 KiB", "178 GiB"] in rows


def test_the_command_saves_this_machines_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, multi_processor_count=16)
    path = tmp_path / "node.json"
    result = CliRunner().invoke(cli.app, ["targets", "--save", str(path)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"nvidia-h100-80gb-hbm3 (sm90-16sm-232448) is written to {path}.\n"
    assert parse_target(path).multiprocessor_count == 16


@pytest.mark.parametrize(
    ("gpu", "place", "fault"),
    [
        (False, "node.json", "torch finds no CUDA device. Do this on a machine with the GPU"),
        (True, "no/where.json", "expected a file that can be written"),
        (True, "node", "expected a file whose name ends in .json"),
    ],
)
def test_the_command_gives_2(
    gpu: bool, place: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    result = CliRunner().invoke(cli.app, ["targets", "--save", str(tmp_path / place)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert fault in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
