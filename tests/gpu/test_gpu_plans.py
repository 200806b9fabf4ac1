"""Plans on a real GPU: the kernels that are chosen, and plans made without a driver, from disk and from a bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cudnn_calls import HEADLINES, keys_of
from cudnn_recorder import Recorder

from fusedattn import counters, fused_attention, fused_attention_qkvpacked, runtime
from fusedattn.cache import clear_caches
from fusedattn.engines import cudnn_graph
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_plan import compile_plan
from fusedattn.target import DeviceTarget

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_memory_of_plans")]
# Where the fast kernels are those of the GPU's own architecture.
ARCHITECTURES = {(8, 0): "sm80", (9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}


def keys(layout: str, head_dim: int, dropout: float = 0.0) -> tuple[SdpaKey, ...]:
    """What the engine asks for on this GPU, forward and backward."""
    recorder = Recorder()
    with runtime.pretend(DeviceTarget.current(), recorder):
        call(torch.device("cpu"), layout, head_dim, dropout)
    return tuple(recorder.keys)


def call(device: torch.device, layout: str = "t3hd", head_dim: int = 64, dropout: float = 0.0) -> list[torch.Tensor]:
    """Out and the gradients of one call by the cudnn engine, on the CPU."""
    shape = (384, 3, 4, head_dim) if layout == "t3hd" else (3, 2, 192, 4, head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16).requires_grad_()
    state = torch.tensor([1, 2], device=device)
    options = {"dropout": dropout, "rng_state": state, "attn_mask_type": "causal", "engine": "cudnn"}
    if layout == "t3hd":
        cu = torch.tensor([0, 100, 384], dtype=torch.int32, device=device)
        out = fused_attention_qkvpacked(x, cu_seqlens=cu, max_seqlen=284, **options)
    else:
        out = fused_attention(*x.unbind(0), qkv_layout=layout, **options)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return [out.detach().cpu(), gradient.cpu()]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", ["t3hd", "bshd_bshd_bshd"])
def test_the_fast_kernels_are_chosen(layout: str, head_dim: int, gpu: torch.device) -> None:
    word = ARCHITECTURES.get(torch.cuda.get_device_capability(gpu))
    if word is None:
        pytest.skip("no headline kernels are known of this architecture")
    for key in keys(layout, head_dim):
        names = compile_plan(key).kernels
        assert any(word in name for name in names), names


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["t3hd", "bshd_bshd_bshd"])
def test_a_plan_made_without_the_driver_is_the_drivers(
    layout: str, dropout: float, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in keys(layout, 64, dropout):
        described = compile_plan(key)
        with monkeypatch.context() as patched:
            # Then cuDNN asks the device itself.
            patched.setattr(cudnn_graph, "device_properties", lambda target: None)
            asked = compile_plan(key)
        assert described.kernels == asked.kernels
        assert described.workspace_bytes == asked.workspace_bytes


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "rtx5090"])
def test_plans_for_other_gpus_are_compiled_beside_a_real_driver(target: str, gpu: torch.device) -> None:
    for key in keys_of(target, HEADLINES["d64"]()).values():
        assert compile_plan(key).kernels


def test_plans_come_back_from_disk(gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FUSEDATTN_NO_DISK_CACHE", raising=False)
    monkeypatch.delenv("FUSEDATTN_BUNDLE", raising=False)
    clear_caches()
    built = call(gpu)
    assert counters()["plans_built"] >= 2
    clear_caches()
    loaded = call(gpu)
    assert counters()["plans_built"] == 0
    assert counters()["plans_loaded"] >= 2
    assert torch.equal(built[0], loaded[0])


RUN = """
kind: verify
engine: cudnn
out: {out}
problems:
  - {{name: packed, layout: t3hd, mask: causal, dtype: bfloat16, heads: 4, head_dim: 64, lengths: [100, 284],
     inputs: {{random: normal, seed: 0}}}}
"""
USE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from test_gpu_plans import call
from fusedattn import counters
call(torch.device("cuda", 0))
print(json.dumps(counters()))
"""


def test_a_bundle_serves_without_a_build(gpu: torch.device, tmp_path: Path) -> None:
    DeviceTarget.current(gpu).save(tmp_path / "node.json")
    (tmp_path / "run.yaml").write_text(RUN.format(out=tmp_path / "run.json"))
    bundle = tmp_path / "bundle"
    arguments = ["compile", tmp_path / "run.yaml", "--target", tmp_path / "node.json", "--out", bundle]
    command = [sys.executable, "-c", "from fusedattn.cli import main; main()", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=300)
    here = Path(__file__).parent
    # The self-test would want plans of its own.
    extra = {"FUSEDATTN_BUNDLE": str(bundle), "FUSEDATTN_NO_DISK_CACHE": "1", "FUSEDATTN_SELF_TEST": "0"}
    environment = (
        os.environ | extra | {"PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    )
    ran = subprocess.run(
        [sys.executable, "-c", USE, str(here)], check=True, env=environment, capture_output=True, text=True, timeout=300
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["plans_built"] == 0
    assert found["plans_loaded"] >= 2
