"""The torch engine where it may not look at lengths, as on a GPU, run on CPU tensors."""

import itertools
import math

import pytest
import torch
from test_grid import DTYPES, LAYOUTS, RAGGED, TILED, WORDS, combinations, cu, judge, problem
from torch import Tensor

from fusedattn.devices import CPU_ENGINES
from fusedattn.engines import torch_blocks, torch_padded
from fusedattn.engines.base import Gradients, Problem
from fusedattn.engines.torch_tiled import TorchEngine
from fusedattn.enums import Engine, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.lengths import Lengths, Side
from fusedattn.runs.oracle import Case, keep_mask, run_case, run_case_nvte
from fusedattn.spec import AttentionSpec, TensorSpec

NAN, INF = math.nan, math.inf
LARGEST = 2**31 - 1


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """In the place of the engine that reads the lengths of CPU tensors."""
    blind = TorchEngine(reads_lengths=False)
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, blind)
    return blind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grid(layout: str, dtype: torch.dtype) -> None:
    for seed, words in combinations(layout, dtype):
        case, dout, dlse = problem(layout, *words, dtype, seed)
        judge(case, dout, dlse if seed // 2 % 2 else None)


@pytest.mark.parametrize("layout", RAGGED[:2])
def test_nvte_functions(layout: str) -> None:
    for seed, words in combinations(layout, torch.float32):
        case, dout, _ = problem(layout, *words, torch.float32, seed + 1)
        judge(case, dout, run=run_case_nvte)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_sequence_a_step(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_padded, "STEP_ELEMENTS", 1)
    for seed, words in combinations(layout, torch.float32):
        case, dout, dlse = problem(layout, *words, torch.float32, seed)
        judge(case, dout, dlse)


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_cut_into_many_tiles(words: tuple[str, str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_blocks, "TILE_ELEMENTS", 1024)
    for layout, seed in (("thd_t2hd", 0), ("bhsd_bhsd_bhsd", 7)):
        case, dout, dlse = problem(layout, *words, torch.float32, seed, TILED)
        judge(case, dout, dlse)


@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drops_what_the_other_path_drops(layout: str, mask_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = problem(layout, "no_bias", mask_type, 0.4, torch.float32, 0, TILED)
    here = keep_mask(case)
    monkeypatch.setitem(CPU_ENGINES, Engine.torch, TorchEngine(reads_lengths=True))
    assert torch.equal(here, keep_mask(case))
    assert here.any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_poison_at_keys_past_a_causal_end(with_bias: bool, poison: float) -> None:
    """Keys that lie within their sequence, but after its last query."""
    lengths_q, lengths_kv = (3, 0, 5), (7, 2, 6)
    q, dout = torch.randn(2, 8, 2, 5)
    k, v = torch.randn(2, 15, 2, 5)
    bias = torch.randn(1, 2, 1, 7) if with_bias else None
    cus = {"cu_seqlens_q": cu(lengths_q), "cu_seqlens_kv": cu(lengths_kv)}
    bias_type = "post_scale_bias" if with_bias else "no_bias"
    clean = run_case(Case((q, k, v), "thd_thd_thd", bias, bias_type, "causal", **cus), dout)
    for start, length_q, length_kv in zip((0, 7, 9), lengths_q, lengths_kv, strict=True):
        k[start + length_q : start + length_kv] = v[start + length_q : start + length_kv] = poison
    got = run_case(Case((q, k, v), "thd_thd_thd", bias, bias_type, "causal", **cus), dout)
    for name, want in clean.items():
        torch.testing.assert_close(got[name], want, msg=lambda m, name=name: f"{name}: {m}")


def test_an_infinite_gradient_of_lse_stays_at_live_keys() -> None:
    """Its row's gradient is infinite, as k is positive; 0 times infinity at a padded key would make it NaN."""
    q, k, v = torch.randn(8, 1, 4), torch.rand(8, 1, 4) + 0.5, torch.randn(8, 1, 4)
    dlse = torch.zeros(8, 1)
    dlse[1] = INF
    case = Case((q, k, v), "thd_thd_thd", cu_seqlens_q=cu((3, 5)))
    judge(case, torch.zeros_like(q), dlse)
    assert run_case(case, dlse=dlse)["dq"][1].eq(INF).all()


# Values that a GPU call cannot check


def guarded(*shape: int, value: float | None = None) -> tuple[Tensor, Tensor]:
    """A tensor (random, or of one value) amid NaN, and the buffer that holds both."""
    size, guard = math.prod(shape), 64
    buffer = torch.full((size + 2 * guard,), NAN)
    inside = buffer[guard : guard + size]
    inside.copy_(torch.randn(size) if value is None else torch.full((size,), value))
    return inside.view(shape), buffer


BAD_OFFSETS = {
    "beyond the end": (0, 5, 100),
    "all beyond": (50, 60, 70),
    "far beyond": (0, LARGEST, LARGEST),
    "decreasing": (0, 6, 2),
    "negative": (-4, 3, 7),
    "least and largest": (-LARGEST - 1, LARGEST, -LARGEST - 1),
    "not from 0": (3, 4, 7),
    "overlapping": (5, 7, 1),
}


@pytest.mark.parametrize("offsets", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
@pytest.mark.parametrize("layout", ["thd_thd_thd", "bshd_bshd_bshd"])
def test_bad_offsets_are_memory_safe(engine: TorchEngine, layout: str, offsets: tuple[int, ...]) -> None:
    good, bad = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)
    ragged = layout in RAGGED
    for mask_type in ("no_mask", "padding", "causal") if ragged else ("padding",):
        for max_seqlen, cus in itertools.product((7, 3, 0) if ragged else (7,), ((bad, good), (good, bad), (bad, bad))):
            for dropout in (0.0, 0.5):
                check_memory(engine, layout, cus, max_seqlen, mask_type, dropout)


def check_memory(
    engine: TorchEngine, layout: str, cus: tuple[Tensor, Tensor], max_seqlen: int, mask_type: str, dropout: float
) -> None:
    """Every element is written, with a finite number, and none outside; inputs are as before."""
    ragged = layout in RAGGED
    shape, format = ((7, 2, 3), (7, 2)) if ragged else ((2, 2, 7, 3), (2, 2, 7))
    inputs = [guarded(*shape) for _ in range(4)]
    (q, k, v, dout), before = (x for x, _ in inputs), [buffer.clone() for _, buffer in inputs]
    words = f"{mask_type}, cu_seqlens {[x.tolist() for x in cus]}, max_seqlen {max_seqlen}, dropout {dropout}"
    spec = AttentionSpec.of(
        layout=NVTE_QKV_Layout.parse(layout, "layout"),
        operands=tuple(TensorSpec.of(x if ragged else x.transpose(1, 2)) for x in (q, k, v)),
        mask_type=NVTE_Mask_Type.parse(mask_type, "mask_type"),
        cu_seqlens_q=TensorSpec.of(cus[0]),
        cu_seqlens_kv=TensorSpec.of(cus[1]),
        dropout=dropout > 0,
    )
    lengths = Lengths(2, *(Side(x, None, max_seqlen, 7) for x in cus))
    task = Problem(spec, lengths, q, k, v, None, 0.5, dropout, torch.tensor([1, 2]))

    written = {"out": guarded(*shape, value=NAN), "lse": guarded(*format, value=NAN)}
    written |= {x: guarded(*shape, value=NAN) for x in ("dq", "dk", "dv")}
    out, lse, dq, dk, dv = (x for x, _ in written.values())
    engine.forward(task, out, lse)
    engine.backward(task, dout, None, out, lse, Gradients(dq, dk, dv, None))
    for name, (tensor, buffer) in written.items():
        assert not tensor.isnan().any(), f"{name}: {words}"
        assert name == "lse" or tensor.isfinite().all(), f"{name}: {words}"
        assert int(buffer.isnan().sum()) == 2 * 64, f"{name}: {words}"
    assert out[lse == -INF].eq(0).all(), words
    for (_, buffer), original in zip(inputs, before, strict=True):
        assert torch.equal(buffer.nan_to_num(), original.nan_to_num()), words


def test_bad_offsets_with_a_bias_are_memory_safe(engine: TorchEngine) -> None:
    q, k, v, dout = torch.randn(4, 7, 2, 3)
    bias, bias_buffer = guarded(2, 2, 4, 4)
    dbias, dbias_buffer = guarded(2, 2, 4, 4, value=NAN)
    for offsets in BAD_OFFSETS.values():
        bad = torch.tensor(offsets, dtype=torch.int32)
        spec = AttentionSpec.of(
            layout=NVTE_QKV_Layout.parse("thd_thd_thd", "layout"),
            operands=tuple(TensorSpec.of(x) for x in (q, k, v)),
            cu_seqlens_q=TensorSpec.of(bad),
        )
        side = Side(bad, None, 4, 7)
        task = Problem(spec, Lengths(2, side, side), q, k, v, bias, 0.5, 0.0, None)
        out, lse = torch.full_like(q, NAN), torch.full((7, 2), NAN)
        engine.forward(task, out, lse)
        engine.backward(task, dout, None, out, lse, Gradients(None, None, None, dbias))
        assert out.isfinite().all()
        assert dbias.isfinite().all()
        assert int(bias_buffer.isnan().sum()) == int(dbias_buffer.isnan().sum()) == 2 * 64
