"""Real plans for GPUs that are not here: the kernels that cuDNN chose, and what was baked into them."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_baked import Baked, baked_tensors
from cudnn_calls import HEADLINES, keys_of, packed
from cudnn_recorder import Recorded, Recorder

from fusedattn import BuildError, runtime
from fusedattn.engines import cudnn_library, cudnn_plan
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.cudnn_plan import compile_plan, kernel_names, load_plan, plan_name
from fusedattn.enums import Direction
from fusedattn.rules_cudnn import library_version
from fusedattn.target import TARGETS

# What a user of the GPU paid for; rtx5090 gets kernels of its own from newer libraries, in some problems.
FORWARD = {
    "a100": ("sm80_flash_fprop_wmma",),
    "l40s": ("sm80_flash_fprop_wmma",),
    "h100": ("sm90_flash_fprop_wgmma",),
    "h200": ("sm90_flash_fprop_wgmma",),
    "b200": ("sm100_flash_fprop",),
    "rtx5090": ("sm80_flash_fprop_wmma", "sm120_flash_fprop"),
    "rtxpro6000": ("sm80_flash_fprop_wmma", "sm120_flash_fprop"),
}
BACKWARD = {
    "a100": ("sm80_flash_bprop_wmma",),
    "l40s": ("sm80_flash_bprop_wmma",),
    "h100": ("sm90_flash_bprop_wgmma",),
    "h200": ("sm90_flash_bprop_wgmma",),
    "b200": ("sm100_flash_bprop",),
    "rtx5090": ("sm80_flash_bprop_wmma", "sm120_flash_bprop"),
    "rtxpro6000": ("sm80_flash_bprop_wmma", "sm120_flash_bprop"),
}
# There is no other kernel that differentiates a bias there.
EXCEPTIONS = {("b200", "bias", Direction.backward): ("sm80_flash_bprop_wmma",)}


def backend_data(blob: bytes) -> dict[str, Any]:
    """What the backend writes into a serialised plan, as JSON."""
    found, _ = json.JSONDecoder().raw_decode(blob[blob.index(b'{"cudnnVersion"') :].decode("latin1"))
    return found


@pytest.mark.parametrize("name", HEADLINES)
@pytest.mark.parametrize("target", FORWARD)
def test_the_fast_kernel_is_chosen_and_gets_what_was_declared(target: str, name: str) -> None:
    for direction, key in keys_of(target, HEADLINES[name]()).items():
        plan = compile_plan(key)
        wanted = (FORWARD if direction is Direction.forward else BACKWARD)[target]
        wanted = EXCEPTIONS.get((target, name, direction), wanted)
        assert any(word in kernel for word in wanted for kernel in plan.kernels), plan.kernels
        check_baked(key, plan.blob)
        assert plan.build_ms > 0
        assert plan.workspace_bytes <= 512 << 20
        loaded = load_plan(key.target, plan.blob)
        assert loaded.get_workspace_size() == plan.workspace_bytes


def check_baked(key: SdpaKey, blob: bytes) -> None:
    """Dims, strides and uids in the plan are those of the key."""
    data = backend_data(blob)
    real = {tensor["name"]: tensor for tensor in data["operationGraph"]["tensors"] if not tensor["isVirtual"]}
    for role, tensor in key.tensors:
        if role is Role.BIAS and not key.backward:
            # The operation that adds it is written otherwise.
            continue
        dim, stride = list(tensor.dim), list(tensor.stride)
        # Backward graphs have K and V transposed.
        order = (0, 1, 3, 2)
        transposed = [dim[i] for i in order], [stride[i] for i in order]
        found = real[str(int(role))]
        assert (found["dim"], found["stride"]) in ((dim, stride), transposed)
        offsets = key.ragged_of(role)
        wanted = [] if offsets is None else [str(key.ragged_uids[offsets])]
        assert [each["name"] for each in found.get("isRagged", [])] == wanted
    kernels = data["engine"]["payload"]["kernels"]
    check_parameters(key, kernels)
    bound = {offset.get("uid") for kernel in kernels for offset in kernel["kernelParams"]["offsets"]}
    assert uids_of_kernels(key) <= bound
    assert data["GPUProfile"]["multiProcessorCount"] == key.target.multiprocessor_count
    if not key.backward:
        raw = base64.b64decode(kernels[0]["kernelParams"]["rawData"])
        b, h, s_q, d = key.tensor(Role.Q).dim
        assert struct.unpack_from("<8i", raw) == (b, h, h, h, s_q, key.tensor(Role.K).dim[2], d, d)


def check_parameters(key: SdpaKey, kernels: list[dict[str, Any]]) -> None:
    """What kernels are given along with addresses is what was declared, of Q, K and V always."""
    found = [each for kernel in kernels for each in baked_tensors(kernel, itemsize=2)]
    for role, tensor in key.tensors:
        if role is Role.BIAS and library_version() < (9, 24):
            # Before, a broadcast batch was baked as B of stride 0, and float32 in steps of 2 bytes.
            continue
        declared = Baked(tensor.dim, tensor.stride)
        # Kernels have K, and backward V, transposed.
        swapped = Baked(*((*each[:2], each[3], each[2]) for each in declared))
        for _, baked in [each for each in found if each[0] == role]:
            assert any(alike(baked, each) for each in (declared, swapped)), (role, baked, declared)
    assert {int(role) for role in (Role.Q, Role.K, Role.V)} <= {uid for uid, _ in found}


def alike(baked: Baked, declared: Baked) -> bool:
    """Apart from what no kernel looks at: strides of axes of size 1."""
    steps = zip(baked.dim, baked.stride, declared.stride, strict=True)
    return baked.dim == declared.dim and all(size == 1 or one == other for size, one, other in steps)


@pytest.mark.parametrize("target", ["a100", "h100", "b200"])
def test_other_parameters_are_seen(target: str) -> None:
    """By the check above: a wrong size, a wrong stride, and those of another operand."""
    for key in keys_of(target, HEADLINES["views of wider tensors"]()).values():
        kernels = backend_data(compile_plan(key).blob)["engine"]["payload"]["kernels"]
        check_parameters(key, kernels)
        (at, (role, tensor)), (_, (_, other)) = ((i, key.tensors[i]) for i in (1, 2))
        longer = (*tensor.dim[:2], tensor.dim[2] + 1, tensor.dim[3])
        strided = (*tensor.stride[:2], tensor.stride[2] + 8, 1)
        for wrong in (tensor._replace(dim=longer), tensor._replace(stride=strided), other):
            tensors = (*key.tensors[:at], (role, wrong), *key.tensors[at + 1 :])
            with pytest.raises(AssertionError):
                check_parameters(replace(key, tensors=tensors), kernels)


def uids_of_kernels(key: SdpaKey) -> set[int]:
    """What the kernels in a plan must be given; backward has others for the output, dQ and dBias, not in it."""
    roles = {role for role, _ in key.tensors} | {Role.ATTN_SCALE}
    roles -= {Role.OUT, Role.DQ, Role.DBIAS} if key.backward else set()
    roles |= {Role.SEQ_LEN_Q, Role.SEQ_LEN_KV} if key.padding else set()
    roles |= {Role.SEED, Role.OFFSET} if key.dropout else set()
    return {int(role) for role in roles}


class Planned:
    """An executor that compiles what it is asked for, and runs nothing."""

    def __init__(self) -> None:
        self.recorder = Recorder(lambda key: compile_plan(key).workspace_bytes)

    def executable(self, key: SdpaKey) -> Recorded:
        return self.recorder.executable(key)


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_wide_models_of_few_tokens_keep_within_the_bound(target: str) -> None:
    planned = Planned()
    call = packed(d=128, h=32)
    with runtime.pretend(TARGETS[target], planned):
        out = call.pop("function")(*call.pop("operands"), engine="cudnn", **call)
        out.backward(torch.ones_like(out))
    workspaces = [compile_plan(key).workspace_bytes for key in set(planned.recorder.run_keys)]
    assert max(workspaces) <= 512 << 20
    assert max(workspaces) > 128 << 20


def test_a_refusal_holds_the_reason_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    key = keys_of("h100", HEADLINES["d64"]())[Direction.forward]
    odd = [(role, tensor._replace(dim=(*tensor.dim[:3], 36))) for role, tensor in key.tensors[:4]]
    refused = SdpaKey(TARGETS["h100"], Direction.forward, (*odd, *key.tensors[4:]))
    with pytest.raises(BuildError, match=r"cuDNN forward plan for h100.*multiple of 8.*engine='torch'"):
        compile_plan(refused)


def test_a_part_of_cudnn_that_does_not_load_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def validate(self) -> None:
            raise RuntimeError("finalize failed, and code: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")

    monkeypatch.setattr(cudnn_plan, "build", lambda key: Failing())
    key = keys_of("h100", HEADLINES["d64"]())[Direction.forward]
    with pytest.raises(BuildError, match=r"forward plan for h100: finalize failed.*: start a new process, and let"):
        compile_plan(key)


def test_a_graph_that_would_end_the_process_is_not_planned() -> None:
    key = keys_of("h100", HEADLINES["d64"]())[Direction.backward]
    tensors = tuple((role, tensor._replace(dim=(1, 1, 1, tensor.dim[3]))) for role, tensor in key.tensors)
    with pytest.raises(BuildError, match="ends the process"):
        compile_plan(SdpaKey(TARGETS["h100"], Direction.backward, tensors, padding=True))


def test_python_engines_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = cudnn_plan.build
    monkeypatch.setattr(cudnn_plan, "build", lambda key: built.append(build(key)) or built[-1])
    compile_plan(keys_of("h100", HEADLINES["d64"]())[Direction.forward])
    assert built[0].selected_engine is None
    assert built[0]._barred_names == {"sdpa_fwd", "sdpa_bwd"}


@pytest.mark.parametrize("blob", [b"", b"not a plan", b"\0" * 1000])
def test_bytes_that_are_no_plan(blob: bytes) -> None:
    with pytest.raises(BuildError, match="a stored cuDNN plan for a100"):
        load_plan(TARGETS["a100"], blob)


def test_a_plan_for_another_gpu() -> None:
    blob = compile_plan(keys_of("h100", HEADLINES["d64"]())[Direction.forward]).blob
    with pytest.raises(BuildError, match="a stored cuDNN plan for b200"):
        load_plan(TARGETS["b200"], blob)


def test_a_plan_is_loaded_by_what_the_device_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    key = keys_of("h100", HEADLINES["d64"]())[Direction.forward]
    blob, module, asked = compile_plan(key).blob, cudnn_library.cudnn(), []
    properties = cudnn_library.device_properties(key.target)
    monkeypatch.setattr(module, "create_device_properties", lambda device: asked.append(device) or properties)
    loaded = load_plan(TARGETS["a100"], blob, 3)
    assert asked == [3]
    # What ``PlanExecutable`` runs.
    assert loaded._lowered_graph._execute_with_raw_ptrs
    assert set(Role) >= {Role(uid) for uid in loaded._variant_pack_uids()} >= {Role.Q, Role.STATS, Role.ATTN_SCALE}


def test_kernel_names_of_nothing() -> None:
    assert kernel_names(b"") == ()


def test_the_name_has_the_versions() -> None:
    key = keys_of("h100", HEADLINES["d64"]())[Direction.forward]
    assert plan_name(key).startswith("cudnn 9.")
    assert f" frontend {importlib.metadata.version('nvidia-cudnn-frontend')} " in plan_name(key)
    assert plan_name(key).endswith(key.text())
