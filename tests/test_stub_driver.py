"""The stub driver: what its objects hold, how it is loaded, and that cuDNN builds with it and torch lives beside it."""

import ctypes
import functools
import os
import platform
import shutil
import struct
import subprocess
import sys
import zlib
from base64 import b64decode
from pathlib import Path
from typing import NamedTuple

import pytest

from fusedattn.engines import stub_driver
from fusedattn.engines.stub_driver import failure_hint
from fusedattn.rules_cudnn import library_version

PACKAGE = Path(stub_driver.__file__).parent.parent
SOURCE = PACKAGE / "engines" / "stub_driver.c"
OBJECTS = {machine: zlib.decompress(b64decode(text)) for machine, text in stub_driver._OBJECTS.items()}
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
MUST_SUCCEED = {"cuLibraryLoadData", "cuLibraryGetKernel"}


# What the objects hold.


class Elf(NamedTuple):
    """What a 64-bit little-endian shared object says of itself."""

    machine: int
    alignments: set[int]
    soname: str
    needed: list[str]
    defined: set[str]
    undefined: set[str]


def read_elf(data: bytes) -> Elf:
    assert data[:7] == b"\x7fELF\x02\x01\x01"
    (machine,) = struct.unpack_from("<H", data, 18)
    segments_at, sections_at = struct.unpack_from("<QQ", data, 32)
    segment_count, _, section_count = struct.unpack_from("<HHH", data, 56)
    segments = [struct.unpack_from("<IIQQQQQQ", data, segments_at + 56 * i) for i in range(segment_count)]
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + 64 * i) for i in range(section_count)]
    by_type = {section[1]: section for section in sections}
    symbols, dynamic = by_type[11], by_type[6]
    strings = sections[symbols[6]][4]

    def text(at: int) -> str:
        return data[strings + at : data.index(b"\0", strings + at)].decode()

    tags = [struct.unpack_from("<QQ", data, dynamic[4] + 16 * i) for i in range(dynamic[5] // 16)]
    named = {True: set(), False: set()}
    for i in range(1, symbols[5] // 24):
        name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, symbols[4] + 24 * i)
        if info >> 4 and name:
            named[section != 0].add(text(name))
    return Elf(
        machine,
        {segment[7] for segment in segments if segment[0] == 1},
        next(text(value) for tag, value in tags if tag == 14),
        [text(value) for tag, value in tags if tag == 1],
        named[True],
        named[False],
    )


@pytest.mark.parametrize("machine", OBJECTS)
def test_an_object_needs_nothing_and_bears_the_drivers_name(machine: str) -> None:
    elf = read_elf(OBJECTS[machine])
    assert elf.machine == ELF_MACHINES[machine]
    assert elf.soname == "libcuda.so.1"
    assert (elf.needed, elf.undefined) == ([], set())
    assert elf.defined > MUST_SUCCEED | {stub_driver._MARK}


def test_aarch64_loads_where_pages_are_large() -> None:
    assert read_elf(OBJECTS["aarch64"]).alignments == {65536}


def test_the_objects_are_those_of_the_source(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    [flags] = [line for line in SOURCE.read_text().split("\n\n") if line.strip().startswith("-shared")]
    made = tmp_path / "stub.so"
    subprocess.run([compiler, *flags.split(), "-Wall", "-Werror", "-o", made, SOURCE], check=True)
    elf = read_elf(made.read_bytes())
    assert elf.soname == "libcuda.so.1"
    assert (elf.needed, elf.undefined) == ([], set())
    for data in OBJECTS.values():
        assert read_elf(data).defined == elf.defined


@pytest.mark.skipif(platform.machine() not in OBJECTS or sys.platform != "linux", reason="no object for this machine")
def test_what_its_functions_answer(tmp_path: Path) -> None:
    path = tmp_path / "stub.so"
    path.write_bytes(OBJECTS[platform.machine()])
    library = ctypes.CDLL(str(path))
    for name in read_elf(path.read_bytes()).defined - {stub_driver._MARK}:
        handle = ctypes.c_void_p()
        answer = getattr(library, name)(ctypes.byref(handle))
        assert (answer, bool(handle)) == ((0, True) if name in MUST_SUCCEED else (100, False)), name


# How it is loaded. Each in a process of its own, since a process keeps its driver.

PRELUDE = f"""
import ctypes, os, pathlib, platform, sys, tempfile, threading, time, types
# The module alone, without torch, which takes a second.
sys.modules["fusedattn"] = package = types.ModuleType("fusedattn")
package.__path__ = [{str(PACKAGE)!r}]
from fusedattn.engines import stub_driver
from fusedattn.engines.stub_driver import driver_kind, ensure_driver
from fusedattn.errors import BuildError
def mapped():
    # One for each library, loaded under whatever name.
    with open("/proc/self/maps") as maps:
        lines = [line.rstrip().split(None, 5) for line in maps]
    found = dict(line[4:] for line in lines if "libcuda" in line[-1] or "stub_driver" in line[-1])
    return sorted(found.values())
def refused(*args):
    raise PermissionError(1, "Operation not permitted")
def message():
    try:
        return ensure_driver()
    except BuildError as error:
        return str(error)
"""


IN_MEMORY = "/memfd:fusedattn_stub_driver (deleted)"


def start(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    given = {"TMPDIR": str(folder), "PYTHONPATH": str(PACKAGE.parent)} | environment
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=folder, env=inherited | given, capture_output=True, text=True)


@functools.cache
def has_driver() -> bool:
    return start("import ctypes; ctypes.CDLL('libcuda.so.1')", PACKAGE).returncode == 0


def run(code: str, folder: Path, **environment: str) -> list[str]:
    if has_driver():
        pytest.skip("this machine has a driver")
    done = start(PRELUDE + code, folder, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_it_is_loaded_once_and_known(tmp_path: Path) -> None:
    lines = run(
        "print(driver_kind(), mapped()); print(ensure_driver(), driver_kind(), ensure_driver(), mapped())", tmp_path
    )
    assert lines == ["none []", f"stub stub stub ['{IN_MEMORY}']"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "without_memory",
    [
        "del os.memfd_create",
        "os.memfd_create = refused",
        # A kernel that has it, and a policy or a missing /proc that forbids loading from it.
        """
right = ctypes.CDLL
def limited(name, **mode):
    if name.startswith("/proc"):
        raise OSError("failed to map segment from shared object")
    return right(name, **mode)
ctypes.CDLL = limited""",
    ],
    ids=["no memfd_create", "memfd_create refused", "not executable"],
)
def test_a_file_serves_where_memory_does_not(without_memory: str, tmp_path: Path) -> None:
    code = "\nopen_files = len(os.listdir('/proc/self/fd'))\nprint(ensure_driver(), driver_kind())\n"
    code += "print(*mapped()); print(len(os.listdir('/proc/self/fd')) - open_files)"
    kinds, mapped, left_open = run(without_memory + code, tmp_path)
    assert kinds == "stub stub"
    assert mapped.startswith(f"{tmp_path}/fusedattn_stub_driver_")
    assert left_open == "0"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "os.memfd_create = refused; tempfile.tempdir = '/nowhere'",
            "[Errno 1] Operation not permitted; [Errno 2] No such file or directory: '/nowhere/fusedattn_*.so'. "
            "Set TMPDIR to a folder that may be written to and executed from.",
        ),
        (
            "platform.machine = lambda: 'riscv64'",
            "there is one for Linux on x86_64 and aarch64, and this is linux on riscv64. "
            "Build plans on another machine, or install the NVIDIA driver; engine='torch' needs neither.",
        ),
        (
            "sys.platform = 'darwin'; platform.machine = lambda: 'x86_64'",
            "there is one for Linux on x86_64 and aarch64, and this is darwin on x86_64. Build plans on another *",
        ),
        (
            "stub_driver._NAME = 'libcuda.so.2'",
            "it was loaded, but this C library does not find it as libcuda.so.2. Build plans on another machine*",
        ),
    ],
    ids=["nowhere to load from", "machine", "system", "not found by name"],
)
def test_why_it_cannot_be_loaded(code: str, message: str, tmp_path: Path) -> None:
    [line] = run(f"{code}\nprint(message())", tmp_path)
    start, _, end = message.partition("*")
    assert line.startswith(f"cannot have a stub of the CUDA driver: {start}")
    assert line.endswith(end)


def test_threads_load_one(tmp_path: Path) -> None:
    code = """
right, kinds = os.memfd_create, []
def slow(name):
    time.sleep(0.05)
    return right(name)
os.memfd_create = slow
def work():
    kinds.append(ensure_driver())
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(set(kinds), len(kinds), mapped())
"""
    assert run(code, tmp_path) == [f"{{'stub'}} 8 ['{IN_MEMORY}']"]


# A driver of another make.


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A library that calls itself libcuda.so.1 and is not the stub."""
    data = OBJECTS[platform.machine()]
    path = tmp_path / "drivers" / "libcuda.so.1"
    path.parent.mkdir()
    path.write_bytes(data.replace(stub_driver._MARK.encode(), stub_driver._MARK.encode().upper()))
    return path


LOOK = "print(driver_kind()); print(ensure_driver(), driver_kind()); print(*mapped())"


def test_a_driver_is_never_shadowed(driver: Path, tmp_path: Path) -> None:
    lines = run(LOOK, tmp_path, LD_LIBRARY_PATH=str(driver.parent))
    assert lines == ["none", "real real", str(driver)]


def test_a_driver_that_is_loaded_already_is_never_shadowed(driver: Path, tmp_path: Path) -> None:
    assert run(f"ctypes.CDLL({str(driver)!r})\n{LOOK}", tmp_path) == ["real", "real real", str(driver)]


def test_a_library_that_is_loaded_from_memory_later_is_another(driver: Path, tmp_path: Path) -> None:
    code = f"""
print(ensure_driver())
number = os.memfd_create("later")
os.write(number, pathlib.Path({str(driver)!r}).read_bytes())
print(hasattr(ctypes.CDLL(f"/proc/self/fd/{{number}}"), stub_driver._MARK))
"""
    assert run(code, tmp_path) == ["stub", "False"]


def test_a_file_that_is_no_library_is_no_driver(driver: Path, tmp_path: Path) -> None:
    driver.write_bytes(b"")
    assert run(LOOK, tmp_path, LD_LIBRARY_PATH=str(driver.parent)) == ["none", "stub stub", IN_MEMORY]


# cuDNN and torch beside it.

BUILD = """
from fusedattn.target import TARGETS
def build():
    import cudnn
    target, types = TARGETS["h100"], cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.BFLOAT16, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT,
        device_property=cudnn.create_device_properties(target.cudnn_properties()), sm_version=target.sm_version,
    )
    dim, stride = [2, 4, 128, 64], [32768, 64, 256, 1]
    q, k, v = (graph.tensor(name=name, dim=dim, stride=stride, data_type=types.BFLOAT16) for name in "qkv")
    out, _ = graph.sdpa(q=q, k=k, v=v, generate_stats=False, attn_scale=0.125)
    out.set_output(True).set_dim(dim).set_stride(stride)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return b"sm90_flash_fprop_wgmma" in bytes(graph.serialize())
"""


@pytest.mark.parametrize(("first", "there"), [("import torch", True), ("", False)], ids=["torch first", "torch last"])
def test_cudnn_builds_a_plan_and_torch_sees_no_gpu(first: str, there: bool, tmp_path: Path) -> None:
    pytest.importorskip("cudnn")
    if not there and library_version() < (9, 24):
        pytest.skip("before 9.24 cuDNN compiles with the NVRTC that torch loads")
    code = f"""
{first}
{BUILD}
print("torch" in sys.modules, ensure_driver(), build(), driver_kind())
import torch
print(torch.cuda.is_available(), torch.cuda.device_count(), torch.zeros(2).sum().item())
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    print("no NVIDIA driver" in str(error))
"""
    assert run(code, tmp_path) == [f"{there} stub True stub", "False 0 0.0", "True"]


def test_cudnn_that_was_used_before_the_stub(tmp_path: Path) -> None:
    """Up to 9.24 cuDNN looks for the driver again, later ones go on failing; then the message says what to do."""
    pytest.importorskip("cudnn")
    code = f"""
import torch
{BUILD}
def told():
    try:
        return build()
    except Exception as error:
        return stub_driver.failure_hint(str(error)) or str(error)
print(repr(told()))
ensure_driver()
print(told())
"""
    before, after = run(code, tmp_path)
    assert before != "True"
    assert after == "True" or "start a new process" in after


@pytest.mark.parametrize(
    ("message", "known"),
    [
        ("detail::finalize(desc) failed with message: x, and code: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED", True),
        ("No valid engine configs for CUDNN_STATUS_NOT_SUPPORTED", False),
        ("", False),
    ],
)
def test_hint(message: str, known: bool) -> None:
    assert failure_hint(message) == (
        "Was cuDNN used in this process before fusedattn loaded a stub of the driver? Then it goes on failing: "
        "start a new process, and let fusedattn be the first to use cuDNN there."
        if known
        else ""
    )
