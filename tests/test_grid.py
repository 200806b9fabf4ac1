"""Every combination of layout, bias, mask, dropout and dtype, at small prime sizes, within the error budget."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fusedattn.engines import torch_blocks, torch_call
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected, keep_mask, run_case, run_case_nvte

NAN, INF = math.nan, math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RAGGED = ["t3hd", "thd_t2hd", "thd_thd_thd"]
LAYOUTS = [*RAGGED, "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"]
# From b, s, h, d, and back.
ORDER = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
WORDS = list(
    itertools.product(
        ["no_bias", "pre_scale_bias", "post_scale_bias"], ["no_mask", "padding", "causal"], [0.0, 0.2]
    )
)  # fmt: skip
RNG_STATE = torch.tensor([3, 5])
HEADS, DIM, TAIL = 3, 5, 2


class Sizes(NamedTuple):
    """Lengths of each sequence; in dense layouts they act under the padding mask only."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    max_q: int
    max_kv: int


# Equal ones, neighbours and not, with more keys than queries; fewer keys; no query; no key.
SMALL = Sizes((5, 7, 0, 5, 5, 3), (11, 5, 3, 11, 11, 0), 7, 11)
TILED = Sizes((131, 3, 3), (197, 5, 5), 131, 197)


def cu(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def problem(
    layout: str, bias_type: str, mask_type: str, dropout: float, dtype: torch.dtype, seed: int, sizes: Sizes = SMALL
) -> tuple[Case, Tensor, Tensor]:
    """A case with its dout and dlse; NaN in every row that no sequence owns, and where the bias reaches past it.

    The seed also picks the bias's axes and dtype and, in ragged layouts, whether max_seqlen exceeds the longest.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = sizes._replace(kv=sizes.q, max_kv=sizes.max_q) if layout == "t3hd" else sizes
    ragged, batch = layout in RAGGED, len(sizes.q)
    full = not ragged and mask_type != "padding"
    lengths_q, lengths_kv = ((n,) * batch if full else x for n, x in ((sizes.max_q, sizes.q), (sizes.max_kv, sizes.kv)))

    def rows(lengths: tuple[int, ...], longest: int, *last: int) -> Tensor:
        """[T, HEADS, ...] or [B, S, HEADS, ...]."""
        shape = (sum(lengths) + TAIL,) if ragged else (batch, longest)
        x = torch.randn(*shape, HEADS, *last, generator=g, dtype=torch.float64).to(dtype)
        if ragged:
            x[sum(lengths) :] = NAN
        for b, n in enumerate(() if ragged else lengths):
            x[b, n:] = NAN
        return x

    q, dout, dlse = (rows(lengths_q, sizes.max_q, *last) for last in ((DIM,), (DIM,), ()))
    k, v = (rows(lengths_kv, sizes.max_kv, DIM) for _ in range(2))
    dlse = dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    operands: tuple[Tensor, ...] = (q, k, v)
    if layout == "t3hd":
        operands = (torch.stack([q, k, v], 1),)
    elif layout == "thd_t2hd":
        operands = (q, torch.stack([k, v], 1))
    elif not ragged:
        *operands, dout = (x.permute(ORDER[layout[:4]]).contiguous() for x in (q, k, v, dout))
        dlse = dlse.mT
    spare = seed % 2 if ragged else 0
    case = Case(
        tuple(operands), layout, None, bias_type, mask_type,
        None if full and seed % 2 else cu(lengths_q),
        None if layout == "t3hd" or (full and seed % 2) else cu(lengths_kv),
        sizes.max_q + spare if spare else None, sizes.max_kv + spare if spare else None,
        dropout=dropout, rng_state=RNG_STATE if dropout else None,
    )  # fmt: skip
    if bias_type == "no_bias":
        return case, dout, dlse
    bias = bias_of(sizes.max_q + spare, sizes.max_kv + spare, lengths_q, lengths_kv, seed, g)
    return Case(**vars(case) | {"bias": bias}), dout, dlse


def bias_of(
    rows: int, keys: int, lengths_q: tuple[int, ...], lengths_kv: tuple[int, ...], seed: int, g: torch.Generator
) -> Tensor:
    """Axes and dtype by seed; every third has dead pairs and a dead row; NaN past the lengths."""
    shape = tuple(n if seed >> bit & 1 else 1 for bit, n in enumerate((len(lengths_q), HEADS, rows)))
    bias = torch.randn(*shape, keys, generator=g, dtype=torch.float64)
    if seed % 3 == 0:
        bias[torch.rand(bias.shape, generator=g) < 1 / 8] = -INF
        bias[-1, -1, -1] = -INF
    each = zip(lengths_q, lengths_kv, strict=True) if shape[0] > 1 else [(max(lengths_q), max(lengths_kv))]
    for b, (length_q, length_kv) in enumerate(each):
        bias[b, ..., length_kv:] = NAN
        if shape[2] > 1:
            bias[b, :, length_q:] = NAN
    return bias.to(DTYPES[seed // 5 % 4])


def combinations(layout: str, dtype: torch.dtype) -> Iterator[tuple[int, tuple[str, str, float]]]:
    """WORDS with seeds, which differ between layouts and dtypes."""
    first = LAYOUTS.index(layout) * 17 + DTYPES.index(dtype) * 5
    return enumerate(WORDS, start=first)


def judge(
    case: Case, dout: Tensor, dlse: Tensor | None = None, run: Callable[..., dict[str, Tensor]] = run_case
) -> None:
    """Demand that a run is in budget; a failure names the combination."""
    seeds = (dout,) if dlse is None else (dout, dlse)
    keep = keep_mask(case)
    want, measured = (f(case, dout, dlse, keep) for f in (expected, eager))
    try:
        assert_within_budget(run(case, *seeds), want, measured, case.operands[0].dtype)
    except AssertionError as failure:
        bias = None if case.bias is None else (tuple(case.bias.shape), case.bias.dtype)
        words = f"{case.layout} {case.bias_type} {case.mask_type} dropout={case.dropout} bias={bias}"
        raise AssertionError(f"{words} dlse={dlse is not None}\n{failure}") from None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_differentiable_functions(layout: str, dtype: torch.dtype) -> None:
    for seed, words in combinations(layout, dtype):
        case, dout, dlse = problem(layout, *words, dtype, seed)
        judge(case, dout, dlse if seed // 2 % 2 else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", RAGGED[:2])
def test_nvte_functions(layout: str, dtype: torch.dtype) -> None:
    for seed, words in combinations(layout, dtype):
        case, dout, _ = problem(layout, *words, dtype, seed + 1)
        judge(case, dout, run=run_case_nvte)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_switches_dropout_off_and_nothing_else(layout: str) -> None:
    for dtype in DTYPES:
        for seed, words in combinations(layout, dtype):
            case, _, _ = problem(layout, *words, dtype, seed)
            got = run_case(case, is_training=False)
            want = run_case(Case(**vars(case) | {"dropout": 0.0}))
            assert all(torch.equal(got[x], want[x]) for x in want), words


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_cut_into_many_tiles(words: tuple[str, str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows of one head, and steps of one head."""
    monkeypatch.setattr(torch_blocks, "TILE_ELEMENTS", 1024)
    monkeypatch.setattr(torch_call, "STEP_ELEMENTS", 1024)
    for layout, seed in (("thd_t2hd", 0), ("bhsd_bhsd_bhsd", 7), ("thd_thd_thd", 4)):
        case, dout, dlse = problem(layout, *words, torch.float32, seed, TILED)
        judge(case, dout, dlse if seed else None)


def test_the_grid_covers_every_bias() -> None:
    """Each bias type meets each choice of axes, and each dtype each dtype of bias."""
    axes, dtypes = set(), set()
    for layout, dtype in itertools.product(LAYOUTS, DTYPES):
        for seed, words in combinations(layout, dtype):
            if words[0] != "no_bias":
                case, _, _ = problem(layout, *words, dtype, seed)
                axes.add((words[0], tuple(n == 1 for n in case.bias.shape)))
                dtypes.add((dtype, case.bias.dtype))
    assert len(axes) == 2 * 8
    assert len(dtypes) == 4 * 4
