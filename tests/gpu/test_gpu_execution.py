"""Graph captures, streams, threads, devices and a lack of memory, on a real GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from gpu_problems import close
from torch import Tensor

from fusedattn import fused_attention, fused_attention_qkvpacked, nvte_fused_attn_fwd_qkvpacked
from fusedattn.cache import clear_caches
from fusedattn.errors import BuildError

pytestmark = pytest.mark.gpu
TOKENS, LONGEST, HEADS, DIM = 700, 400, 4, 64
# About 50 ms on any GPU: what runs on another stream is long done by then.
PAUSE_CYCLES = 100_000_000


def packed(seed: int, device: torch.device) -> Tensor:
    x = torch.randn(TOKENS, 3, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16)


def starts(device: torch.device, *lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def both(qkv: Tensor, cu: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Out, and the gradient for a dout of ones; with dropout where there is a state."""
    dropout = 0.0 if state is None else 0.25
    leaf = qkv if qkv.requires_grad else qkv.detach().requires_grad_()
    options = {"attn_mask_type": "causal", "dropout": dropout, "rng_state": state, "engine": "cudnn"}
    out = fused_attention_qkvpacked(leaf, cu_seqlens=cu, max_seqlen=LONGEST, **options)
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    return out.detach(), gradient


@pytest.mark.parametrize("dropout", [False, True])
def test_a_captured_graph_sees_new_data_and_new_lengths(dropout: bool, gpu: torch.device) -> None:
    qkv, cu = packed(0, gpu).requires_grad_(), starts(gpu, 300, 0, 400)
    state = torch.tensor([1, 2], device=gpu) if dropout else None
    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        for _ in range(3):
            both(qkv, cu, state)
    torch.cuda.current_stream(gpu).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradient = both(qkv, cu, state)
    for seed, lengths in ((1, (300, 0, 400)), (2, (1, 399, 200)), (3, (0, 0, 77))):
        with torch.no_grad():
            qkv.copy_(packed(seed, gpu))
        cu.copy_(starts(gpu, *lengths))
        if state is not None:
            state.add_(1)
        graph.replay()
        torch.cuda.synchronize(gpu)
        want_out, want_gradient = both(packed(seed, gpu), cu, state)
        assert close(out, want_out), (seed, "out")
        assert close(gradient, want_gradient), (seed, "gradient")
        assert not out[sum(lengths) :].any()
        assert not gradient[sum(lengths) :].any()


@pytest.mark.usefixtures("no_memory_of_plans")
def test_a_first_call_during_a_capture_says_what_to_do(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDATTN_NO_DISK_CACHE", "1")
    monkeypatch.delenv("FUSEDATTN_SELF_TEST", raising=False)
    clear_caches()
    qkv, cu, other = packed(0, gpu), starts(gpu, 300, 400), torch.zeros(1, device=gpu)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        # A capture of nothing warns.
        other.add_(1)
        with pytest.raises(BuildError, match="Call the function once before the capture"):
            fused_attention_qkvpacked(qkv, cu_seqlens=cu, max_seqlen=LONGEST, engine="cudnn")
    assert both(qkv, cu)[0].isfinite().all()


def test_a_new_shape_during_a_capture_says_what_to_do(gpu: torch.device) -> None:
    """And the capture goes on."""
    qkv, cu, other = packed(0, gpu), starts(gpu, 300, 400), torch.zeros(1, device=gpu)
    options = {"cu_seqlens": cu, "attn_mask_type": "causal", "engine": "cudnn"}
    fused_attention_qkvpacked(qkv, max_seqlen=LONGEST, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BuildError, match="Call the function once before the capture"):
            fused_attention_qkvpacked(qkv, max_seqlen=20 * LONGEST, **options)
        other.add_(1)
    graph.replay()
    assert other.item() == 1


def test_a_captured_graph_outlives_its_plan(gpu: torch.device) -> None:
    qkv, cu = packed(0, gpu), starts(gpu, 300, 400)
    options = {"cu_seqlens": cu, "max_seqlen": LONGEST, "engine": "cudnn"}
    want = fused_attention_qkvpacked(qkv, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_attention_qkvpacked(qkv, **options)
    clear_caches()
    gc.collect()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize(gpu)
    assert close(out, want)


def test_more_sequences_than_a_grid_can_have(gpu: torch.device) -> None:
    x = torch.randn(70000, 4, 1, DIM, generator=torch.Generator().manual_seed(0)).to(gpu, torch.bfloat16)
    out = fused_attention(x, x, x, engine="cudnn")
    for part in (slice(0, 9), slice(65530, 65539), slice(-9, None)):
        assert close(out[part], fused_attention(x[part], x[part], x[part], engine="cudnn"))


def test_the_current_stream_is_used(gpu: torch.device) -> None:
    cu = starts(gpu, 300, 400)
    want = both(packed(1, gpu), cu)
    new = packed(1, gpu)
    qkv = torch.zeros_like(new)
    stream = torch.cuda.Stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES)
        qkv.copy_(new)
        got = both(qkv, cu)
    stream.synchronize()
    assert all(map(close, got, want))


def test_the_stream_argument_is_used(gpu: torch.device) -> None:
    cu, new = starts(gpu, 300, 400), packed(1, gpu)
    scalars = (LONGEST, False, 0.125, 0.0, "t3hd", "no_bias", "causal", None)

    def forward(qkv: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
        arguments = (qkv, None, None, None, None, cu, None, *scalars, stream)
        return nvte_fused_attn_fwd_qkvpacked(*arguments, engine="cudnn")[0]

    want = forward(new, None)
    qkv = torch.zeros_like(new)
    stream = torch.cuda.Stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES)
        qkv.copy_(new)
    got = forward(qkv, stream)
    stream.synchronize()
    assert close(got, want)


@pytest.mark.usefixtures("no_memory_of_plans")
def test_eight_threads(gpu: torch.device) -> None:
    """Cold: they wait for one build and one self-test."""
    lengths = [(100 + 10 * i, 300 - 10 * i) for i in range(8)]
    found: dict[int, bool] = {}

    def work(i: int) -> None:
        stream = torch.cuda.Stream(gpu)
        with torch.cuda.stream(stream):
            qkv, cu = packed(i, gpu), starts(gpu, *lengths[i])
            results = [both(qkv, cu) for _ in range(20)]
            stream.synchronize()
        found[i] = all(close(got, want) for each in results for got, want in zip(each, results[0], strict=True))
        kept[i] = results[0]

    kept: dict[int, tuple[Tensor, Tensor]] = {}
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(8), True)
    for i in range(8):
        assert all(map(close, kept[i], both(packed(i, gpu), starts(gpu, *lengths[i]))))


def test_two_devices(gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    other = torch.device("cuda", 1)
    want = both(packed(0, gpu), starts(gpu, 300, 400))
    with torch.cuda.device(gpu):
        got = both(packed(0, other), starts(other, 300, 400))
    assert all(x.device == other for x in got)
    assert all(close(x.cpu(), y.cpu()) for x, y in zip(got, want, strict=True))


@pytest.fixture
def little_memory(gpu: torch.device) -> Iterator[None]:
    """32 MiB beyond what is in use now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(gpu) + (32 << 20)) / total, gpu)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, gpu)


@pytest.fixture
def large_problem(gpu: torch.device) -> tuple[Tensor, Tensor]:
    """Out of a call whose backward wants some 256 MiB for dS, and the bias to differentiate for."""
    q = torch.randn(16, 1024, 8, DIM, dtype=torch.bfloat16, device=gpu)
    bias = torch.zeros(1, 8, 1024, 1024, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    out = fused_attention(q, q, q, bias, engine="cudnn")
    # Plans are built, and the self-test is done.
    torch.autograd.grad(out, bias, torch.ones_like(out), retain_graph=True)
    return out, bias


@pytest.mark.usefixtures("large_problem", "little_memory")
def test_a_lack_of_memory_for_the_workspace_is_torchs_error(
    large_problem: tuple[Tensor, Tensor], gpu: torch.device
) -> None:
    out, bias = large_problem
    with pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(out, bias, torch.ones_like(out), retain_graph=True)
    torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    (gradient,) = torch.autograd.grad(out, bias, torch.ones_like(out))
    assert gradient.isfinite().all()
