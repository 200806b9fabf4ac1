"""Bundles: written whole or not at all; what is read is what was written, or an error says what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedattn import BundleError, SpecError, clear_caches, counters, load_bundle
from fusedattn import bundle as bundle_module
from fusedattn.bundle import bundled_plan
from fusedattn.bundle_format import MANIFEST, PLANS, SCHEMA, Bundle, BundledPlan, Manifest
from fusedattn.bundle_write import plan_file, require_place, write_bundle
from fusedattn.engines import cudnn_executor
from fusedattn.engines.cudnn_executor import stored_plan
from fusedattn.engines.cudnn_key import Role, SdpaKey, TensorKey
from fusedattn.enums import Direction
from fusedattn.errors import BuildError
from fusedattn.store import Store
from fusedattn.target import TARGETS, DeviceTarget

H100 = TARGETS["h100"]
CUDNN = "9.24.0"


def sdpa_key(heads: int, target: DeviceTarget = H100) -> SdpaKey:
    q = TensorKey((2, heads, 64, 32), (64 * heads * 32, 32, heads * 32, 1), "bfloat16")
    stats = TensorKey((2, heads, 64, 1), (64 * heads, 64, 1, 1), "float32")
    roles = (Role.Q, Role.K, Role.V, Role.OUT)
    return SdpaKey(target, Direction.forward, (*((role, q) for role in roles), (Role.STATS, stats)))


BLOBS = {sdpa_key(heads): bytes(random.Random(heads).randbytes(400 + heads)) for heads in (1, 2, 3)}


def manifest_of(blobs: dict[SdpaKey, bytes] = BLOBS, **changes: Any) -> Manifest:
    plans = []
    for key, blob in blobs.items():
        digest, file = plan_file(blob)
        plans.append(
            BundledPlan(
                problem="a problem",
                cases=("case",),
                key=key.text(),
                direction="forward",
                target=key.target.name,
                fingerprint=key.target.fingerprint,
                kernels=("kernel",),
                workspace_bytes=4096,
                build_ms=1.5,
                sha256=digest,
                bytes=len(blob),
                file=file,
            )
        )
    values = {
        "schema_number": SCHEMA, "fusedattn": "0.1.0", "cudnn": CUDNN, "frontend": "1.32.0", "cuda_major": 13,
        "targets": (H100,), "plans": tuple(plans),
    }  # fmt: skip
    return Manifest(**(values | changes))


def write(folder: Path, replace: bool = False, **changes: Any) -> Path:
    write_bundle(folder, manifest_of(**changes), {plan_file(blob)[1]: blob for blob in BLOBS.values()}, replace)
    return folder


def file_of(folder: Path, heads: int) -> Path:
    return folder / plan_file(BLOBS[sdpa_key(heads)])[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "plans")


@pytest.fixture(autouse=True)
def no_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No bundle in use, no disk cache, a library of a known version, and nothing that could build."""

    def build(key: SdpaKey) -> Any:
        raise BuildError("a plan", "this test builds none")

    for name in ("FUSEDATTN_BUNDLE", "FUSEDATTN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FUSEDATTN_NO_DISK_CACHE", "1")
    monkeypatch.setattr(cudnn_executor, "cudnn_version", lambda: CUDNN)
    monkeypatch.setattr(cudnn_executor, "plan_name", lambda key: f"cudnn {CUDNN} {key.text()}")
    monkeypatch.setattr(cudnn_executor, "compile_plan", build)
    monkeypatch.setattr(bundle_module, "library_version", lambda: (9, 24))
    clear_caches()
    yield
    clear_caches()


def test_what_was_written_is_read(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.manifest == manifest_of()
    assert {key: bundle.plan(key.text()) for key in BLOBS} == BLOBS
    assert bundle.plan(sdpa_key(4).text()) is None
    assert sorted(path.name for path in folder.parent.iterdir()) == ["plans"]
    # For people, too.
    content = json.loads((folder / MANIFEST).read_text())
    assert content["targets"][0]["device_name"] == "NVIDIA H100 80GB HBM3"
    assert [plan["bytes"] for plan in content["plans"]] == [401, 402, 403]


def resigned(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as another program would, that knows how it is signed."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    del content["sha256"]
    from fusedattn.bundle_format import _digest

    (folder / MANIFEST).write_text(json.dumps({"sha256": _digest(content), **content}))


def rewrite(folder: Path, old: str, new: str) -> None:
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new))


BAD_MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "there is no such folder. `fusedattn compile` writes bundles."),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "it has no manifest.json. `fusedattn compile` writes bundles."),
    "a folder for a manifest": (
        lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir()),
        "manifest.json cannot be read: Is a directory.",
    ),
    "empty": (lambda f: (f / MANIFEST).write_text(""), "manifest.json is damaged: Expecting value"),
    "truncated": (
        lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:-20]),
        "manifest.json is damaged: ",
    ),
    "not text": (lambda f: (f / MANIFEST).write_bytes(b"\xff" * 9), "manifest.json is damaged: 'utf-8' codec"),
    "nested too deeply": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "manifest.json is damaged: "),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), "manifest.json is damaged: it holds no mapping"),
    "another program's": (
        lambda f: (f / MANIFEST).write_text("{}"),
        "its schema_number is None, and this release reads 1. Write it again with `fusedattn compile`.",
    ),
    "a later schema": (
        lambda f: rewrite(f, '"schema_number": 1', '"schema_number": 2'),
        "its schema_number is 2, and this release reads 1",
    ),
    "another key": (
        lambda f: rewrite(f, "[2, 1, 64, 32]", "[2, 1, 96, 32]"),
        "manifest.json is damaged: it does not match its own sha256",
    ),
    "unsigned": (lambda f: rewrite(f, '"sha256": "', '"sha256": "0'), "manifest.json is damaged"),
    "an unknown field": (
        lambda f: resigned(f, lambda content: content.update(more=1)),
        "manifest.json is wrong: more: Extra inputs are not permitted",
    ),
    "a path that leads out": (
        lambda f: resigned(f, lambda content: content["plans"][0].update(file="plans/../../secret")),
        "manifest.json is wrong: plans.0.file: String should match pattern",
    ),
    "no version": (
        lambda f: resigned(f, lambda content: content.update(cudnn="new")),
        "manifest.json is wrong: cudnn: String should match pattern",
    ),
}


@pytest.mark.parametrize("fault", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused(folder: Path, fault: str) -> None:
    damage, message = BAD_MANIFESTS[fault]
    damage(folder)
    with pytest.raises(BundleError) as caught:
        load_bundle(folder)
    assert str(caught.value).startswith(f"bundle '{folder}': {message}")


BAD_BLOBS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: file_of(f, 1).unlink(), "cannot be read: No such file or directory"),
    "truncated": (lambda f: os.truncate(file_of(f, 1), 400), "is damaged: 400 bytes that do not match the sha256"),
    "longer": (lambda f: file_of(f, 1).write_bytes(BLOBS[sdpa_key(1)] + b"x"), "is damaged: 402 bytes that do not"),
    "swapped": (lambda f: shutil.copy(file_of(f, 2), file_of(f, 1)), "is damaged: 402 bytes that do not match"),
    "empty": (lambda f: file_of(f, 1).write_bytes(b""), "is damaged: 0 bytes that do not match the sha256"),
    "a folder": (lambda f: (file_of(f, 1).unlink(), file_of(f, 1).mkdir()), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("fault", BAD_BLOBS)
def test_a_bad_blob_is_refused_when_it_is_needed(folder: Path, fault: str) -> None:
    load_bundle(folder)
    damage, message = BAD_BLOBS[fault]
    damage(folder)
    with pytest.raises(BundleError) as caught:
        stored_plan(sdpa_key(1))
    assert str(caught.value).startswith(f"bundle '{folder}': {PLANS}/")
    assert message in str(caught.value)
    assert str(caught.value).endswith("Write it again with `fusedattn compile`.")
    # The others are whole.
    assert stored_plan(sdpa_key(3)) == BLOBS[sdpa_key(3)]


@pytest.mark.parametrize("part", ["manifest", "blobs"])
def test_one_byte_altered_is_found_or_changes_nothing(folder: Path, part: str) -> None:
    numbers = random.Random(part)
    paths = [folder / MANIFEST] if part == "manifest" else sorted((folder / PLANS).iterdir())
    found = 0
    for _ in range(200):
        path = numbers.choice(paths)
        whole = path.read_bytes()
        place = numbers.randrange(len(whole))
        altered = bytearray(whole)
        altered[place] ^= numbers.randrange(1, 256)
        path.write_bytes(altered)
        try:
            bundle = Bundle.open(folder)
            given = {key: bundle.plan(key.text()) for key in BLOBS}
            strangers = {plan.key for plan in bundle.manifest.plans} - {key.text() for key in BLOBS}
        except BundleError:
            found += 1
        else:
            assert (given, strangers) == (BLOBS, set()), (path.name, place)
        path.write_bytes(whole)
    # All but white space of the manifest.
    assert found == 200 if part == "blobs" else found > 150


def test_plans_come_from_the_bundle_before_the_disk_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = sdpa_key(1), sdpa_key(9)
    monkeypatch.setenv("FUSEDATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEDATTN_NO_DISK_CACHE", "0")
    store = Store(tmp_path / "cache", 1 << 20)
    for each in (key, other):
        store.save(cudnn_executor.plan_name(each), b"of the disk cache")
    clear_caches()
    assert stored_plan(key) == b"of the disk cache"
    load_bundle(folder)
    assert stored_plan(key) == BLOBS[key]
    assert stored_plan(other) == b"of the disk cache"
    assert (counters()["plans_loaded"], counters()["plans_built"]) == (3, 0)
    with pytest.raises(BuildError, match="this test builds none"):
        stored_plan(sdpa_key(8))


def test_the_environment_names_a_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDATTN_BUNDLE", str(folder))
    clear_caches()
    assert stored_plan(sdpa_key(2)) == BLOBS[sdpa_key(2)]
    monkeypatch.setenv("FUSEDATTN_BUNDLE", str(folder / "no"))
    clear_caches()
    for _ in range(2):
        with pytest.raises(BundleError, match="there is no such folder"):
            stored_plan(sdpa_key(2))
    # A call goes before it.
    load_bundle(folder)
    assert stored_plan(sdpa_key(2)) == BLOBS[sdpa_key(2)]


def test_a_bundle_loaded_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bundle_module.settings

    def slow() -> Any:
        load_bundle(folder)
        return read()

    monkeypatch.setattr(bundle_module, "settings", slow)
    bundled_plan(sdpa_key(1).text(), H100.fingerprint, CUDNN)
    assert stored_plan(sdpa_key(1)) == BLOBS[sdpa_key(1)]


def test_clear_caches_forgets_the_bundle(folder: Path) -> None:
    load_bundle(folder)
    clear_caches()
    assert bundled_plan(sdpa_key(1).text(), H100.fingerprint, CUDNN) is None


def test_a_failed_load_leaves_the_bundle_in_use(folder: Path) -> None:
    load_bundle(folder)
    with pytest.raises(BundleError):
        load_bundle(folder / "no")
    assert stored_plan(sdpa_key(1)) == BLOBS[sdpa_key(1)]


def test_a_path_relative_to_a_folder_that_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    load_bundle("plans")
    monkeypatch.chdir("/")
    assert stored_plan(sdpa_key(1)) == BLOBS[sdpa_key(1)]


def test_no_path_is_refused() -> None:
    with pytest.raises(SpecError, match="argument 'folder': expected the path of a bundle, got int"):
        load_bundle(3)  # type: ignore[arg-type]


def test_another_version_of_cudnn_is_refused_at_load_and_at_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_bundle(folder)
    monkeypatch.setattr(cudnn_executor, "cudnn_version", lambda: "9.24.1")
    text = (
        "its plans are of cuDNN 9.24.0, and this is 9.24.1. Install that version, or compile again with cuDNN 9.24.1."
    )
    with pytest.raises(BundleError) as caught:
        stored_plan(sdpa_key(1))
    assert str(caught.value) == f"bundle '{folder}': {text}"
    # Also where it does not hold the plan: nothing of it can be right.
    with pytest.raises(BundleError):
        stored_plan(sdpa_key(9))
    monkeypatch.setattr(bundle_module, "library_version", lambda: (9, 28))
    with pytest.raises(BundleError, match=r"its plans are of cuDNN 9\.24\.0, and this is 9\.28"):
        load_bundle(folder)
    # Not installed as a wheel: it is seen when a plan is needed.
    monkeypatch.setattr(bundle_module, "library_version", lambda: (0, 0))
    load_bundle(folder)


def test_another_gpu_is_refused(folder: Path) -> None:
    load_bundle(folder)
    text = (
        "its plans are for h100 (sm90-132sm-232448), and this GPU is sm100-148sm-232448. "
        "`fusedattn targets --save gpu.json` describes a GPU for `fusedattn compile --target gpu.json`."
    )
    with pytest.raises(BundleError) as caught:
        stored_plan(sdpa_key(1, TARGETS["b200"]))
    assert str(caught.value) == f"bundle '{folder}': {text}"
    # Its name does not matter, but what its plans run on does.
    assert stored_plan(sdpa_key(1, H100.model_copy(update={"name": "node7"}))) == BLOBS[sdpa_key(1)]
    for change in ({"multiprocessor_count": 114}, {"shared_memory_per_block_optin_bytes": 101376}):
        with pytest.raises(BundleError, match="this GPU is"):
            stored_plan(sdpa_key(1, H100.model_copy(update=change)))


def on_gpus(monkeypatch: pytest.MonkeyPatch, *targets: DeviceTarget, driver: int = 13010) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(targets))
    monkeypatch.setattr(DeviceTarget, "current", lambda device: targets[device.index])
    monkeypatch.setattr(bundle_module, "_driver_version", lambda: driver)


def test_on_a_machine_with_gpus_load_bundle_looks_at_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, TARGETS["a100"], TARGETS["h200"])
    load_bundle(folder)  # an H200 has the fingerprint of an H100
    on_gpus(monkeypatch, TARGETS["a100"], TARGETS["b200"])
    with pytest.raises(BundleError, match="this GPU is sm80-"):
        load_bundle(folder)


@pytest.mark.parametrize(("driver", "fits"), [(13000, True), (14020, True), (12080, False)])
def test_the_driver_must_support_the_major_version_of_cuda(
    folder: Path, monkeypatch: pytest.MonkeyPatch, driver: int, fits: bool
) -> None:
    on_gpus(monkeypatch, H100, driver=driver)
    text = r"its plans are for CUDA 13, and this driver supports 12\.8\. Install a newer driver\."
    with contextlib.nullcontext() if fits else pytest.raises(BundleError, match=text):
        load_bundle(folder)


DAMAGE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "manifest": lambda folder, patch: rewrite(folder, "a problem", "no problem"),
    "version": lambda folder, patch: patch.setattr(cudnn_executor, "cudnn_version", lambda: "9.25.0"),
    "version of the wheel": lambda folder, patch: patch.setattr(bundle_module, "library_version", lambda: (9, 25)),
    "blob": lambda folder, patch: file_of(folder, 1).write_bytes(b"damaged"),
    "gpu": lambda folder, patch: on_gpus(patch, TARGETS["b200"]),
    "driver": lambda folder, patch: on_gpus(patch, H100, driver=12080),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_rebuild_warns_once_and_does_without(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    built = dataclasses.make_dataclass("Built", ["blob"])(b"built")
    monkeypatch.setattr(cudnn_executor, "compile_plan", lambda key: built)
    DAMAGE[what](folder, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_bundle(folder, rebuild=True)
        assert stored_plan(sdpa_key(1)) == stored_plan(sdpa_key(1)) == b"built"
    [warning] = caught
    assert warning.category is RuntimeWarning
    assert str(warning.message).startswith(f"bundle '{folder}': ")
    assert str(warning.message).endswith("Plans that it cannot give are built.")
    assert counters()["plans_built"] == 2


def test_rebuild_does_not_make_up_for_a_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no such folder"):
        load_bundle(tmp_path / "no", rebuild=True)


def test_an_empty_folder_is_taken_and_a_missing_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "deep" / "down"):
        assert set(Bundle.open(write(place)).fingerprints) == {H100.fingerprint}


def test_a_bundle_is_replaced_only_when_asked(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"there is a bundle already\. Pass --force to replace it\."):
        write(folder)
    (folder / PLANS / "old").write_text("gone with it")
    write(folder, replace=True, fusedattn="0.2.0")
    assert Bundle.open(folder).manifest.fusedattn == "0.2.0"
    assert len(list((folder / PLANS).iterdir())) == 3
    assert [path.name for path in folder.parent.iterdir()] == ["plans"]


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, replace: bool) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(write(tmp_path / "plans"))
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, why in {"home": "the folder is there and is no bundle", "file": "there is a file of that name",
                      "link": "the folder is there and is no bundle", "dangling": "there is a file of that name",
                      "file/plans": "the folder above cannot be made: "}.items():  # fmt: skip
        with pytest.raises(BundleError, match=why):
            require_place(tmp_path / name, replace)
        with pytest.raises(BundleError, match=why):
            write(tmp_path / name, replace)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_write_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, there: bool
) -> None:
    if there:
        write(tmp_path / "plans")
    calls = iter(range(100))

    def fsync(number: int) -> None:
        if next(calls) == 2:
            raise error

    monkeypatch.setattr(os, "fsync", fsync)
    text = "it cannot be written: No space left on device"
    expected = pytest.raises(BundleError, match=text) if isinstance(error, OSError) else pytest.raises(type(error))
    with expected:
        write(tmp_path / "plans", replace=True, fusedattn="0.2.0")
    assert [path.name for path in tmp_path.iterdir()] == ["plans"] * there
    if there:
        assert Bundle.open(tmp_path / "plans").manifest == manifest_of()


def test_an_old_bundle_comes_back_where_the_new_one_does_not_get_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(BundleError, match="it cannot be written: Input/output error"):
        write(folder, replace=True)
    assert Bundle.open(folder).manifest == manifest_of()
    assert [path.name for path in folder.parent.iterdir()] == ["plans"]


def test_a_place_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BundleError, match="the folder above cannot be written to"):
        require_place(tmp_path / "plans", replace=False)


def test_the_error_travels() -> None:
    error = BundleError("plans", "it is damaged", "Write it again.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "bundle 'plans': it is damaged. Write it again."
