"""Every combination of layout, bias, mask and dropout in float16 or bfloat16, on a GPU, within the error budget."""

from __future__ import annotations

import pytest
import torch
from gpu_problems import grid_problem, judge, on
from test_grid import LAYOUTS, RAGGED, SMALL, TILED, WORDS, Sizes

from fusedattn.runs.oracle import run_case_nvte
from fusedattn.runs.public_calls import engine_of

pytestmark = [
    pytest.mark.gpu,
    # Where cuDNN has no plan, the torch engine computes: both are judged.
    pytest.mark.filterwarnings("ignore:fusedattn computes:RuntimeWarning"),
]
DTYPES = [torch.float16, torch.bfloat16]
LONG = Sizes((1000, 37, 523), (1000, 37, 523), 1000, 1000)


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_differentiable_functions(layout: str, words: tuple[str, str, float], device: torch.device) -> None:
    seed = LAYOUTS.index(layout) * 17 + WORDS.index(words)
    sizes = SMALL if seed % 3 == 0 else TILED
    case, dout, dlse = grid_problem(layout, words, DTYPES[seed % 2], seed, sizes, head_dim=64)
    judge(case, dout, dlse if seed % 5 == 0 else None, device)


@pytest.mark.parametrize("words", WORDS[::3], ids=str)
@pytest.mark.parametrize("layout", RAGGED[:2])
def test_nvte_functions(layout: str, words: tuple[str, str, float], device: torch.device) -> None:
    seed = RAGGED.index(layout) + WORDS.index(words)
    case, dout, _ = grid_problem(layout, words, DTYPES[seed % 2], seed, TILED, head_dim=64)
    judge(case, dout, None, device, run_case_nvte)


@pytest.mark.parametrize("head_dim", [8, 32, 40, 72, 128])
def test_head_dimensions(head_dim: int, device: torch.device) -> None:
    words = ("no_bias", "causal", 0.0)
    case, dout, _ = grid_problem("thd_t2hd", words, torch.bfloat16, 1, TILED, head_dim)
    judge(case, dout, None, device)


@pytest.mark.parametrize("layout", ["t3hd", "bshd_bshd_bshd"])
def test_many_tiles(layout: str, device: torch.device) -> None:
    words = ("no_bias", "causal" if layout == "t3hd" else "padding", 0.1)
    case, dout, _ = grid_problem(layout, words, torch.bfloat16, 1, LONG, head_dim=128)
    judge(case, dout, None, device)


@pytest.mark.parametrize(
    "words", [("no_bias", "causal", 0.0), ("no_bias", "padding", 0.2), ("post_scale_bias", "padding", 0.0)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cudnn_is_what_computes(layout: str, words: tuple[str, str, float], device: torch.device) -> None:
    case, _, _ = grid_problem(layout, words, torch.bfloat16, 1, TILED, head_dim=64)
    assert engine_of(on(case, device)) == "cudnn"
