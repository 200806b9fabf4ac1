"""The torch engine's dropout pattern: what it depends on, what it does not, and that it never changes."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusedattn.engines import torch_blocks, torch_call
from fusedattn.engines.dropout import TILE_KV, TILE_Q, DropoutPattern
from fusedattn.runs.oracle import Case, keep_mask, run_case

SEEDS = [(0, 0), (1, 2), (-1, -(2**63)), (2**63 - 1, -7)]


def pattern(seed: int = 1, offset: int = 2, p: float = 0.5) -> DropoutPattern:
    return DropoutPattern(torch.tensor([seed, offset]), p)


def whole(seed: int = 1, offset: int = 2, p: float = 0.5) -> Tensor:
    """[2, 3, 150, 300]: several tiles each way, the last ones cut."""
    return pattern(seed, offset, p).keep(range(2), range(3), range(150), 300)


def packed(bits: Tensor) -> str:
    """As hexadecimal digits, first bit highest."""
    return f"{int(''.join(str(int(x)) for x in bits.flatten()), 2):x}"


@pytest.mark.parametrize(
    ("state", "p", "first", "last"),
    [
        ((1, 2), 0.5, "8323f8c598c8c6f1", "64fb3980c657ab73"),
        ((-1, -(2**63)), 0.1, "7fe76ffff9d7ffff", "ef57edffff7ffbff"),
    ],
)
def test_golden_bits(state: tuple[int, int], p: float, first: str, last: str) -> None:
    """What a saved rng_state drops is part of a checkpoint: it stays."""
    keep = whole(*state, p)
    assert packed(keep[0, 0, 0, :64]) == first
    assert packed(keep[1, 2, 149, 236:]) == last


@pytest.mark.parametrize("rows", [range(150), range(64, 150), range(128, 131), range(64), range(64, 65)], ids=str)
def test_part_of_a_pattern(rows: range) -> None:
    want = whole()
    for batches, heads, keys in itertools.product(
        (range(2), range(1, 2)), (range(3), range(1, 3), range(2, 3)), (1, 255, 256, 257, 300)
    ):
        got = pattern().keep(batches, heads, rows, keys)
        b, h, r = (slice(x.start, x.stop) for x in (batches, heads, rows))
        assert torch.equal(got, want[b, h, r, :keys])


def test_order_of_the_questions_does_not_matter() -> None:
    one = pattern()
    backwards = [one.keep(range(b, b + 1), range(3), range(150), 300) for b in (1, 0)]
    assert torch.equal(torch.cat(backwards[::-1]), whole())
    assert torch.equal(one.keep(range(2), range(3), range(150), 300), whole())


def test_rows_start_at_a_tile() -> None:
    with pytest.raises(ValueError, match=f"multiple of {TILE_Q}, got 63"):
        pattern().keep(range(1), range(1), range(63, 64), 1)


def test_every_part_of_the_state_matters() -> None:
    seen = [whole(*state) for state in [*SEEDS, (0, 1), (1, 0), (2, 1)]]
    for one, other in itertools.combinations(seen, 2):
        assert 0.48 < (one == other).float().mean() < 0.52


def test_tiles_batches_and_heads_are_independent() -> None:
    keep = pattern().keep(range(2), range(2), range(2 * TILE_Q), 2 * TILE_KV)
    tiles = keep.view(4, 2, TILE_Q, 2, TILE_KV).transpose(2, 3).flatten(0, 2)
    for one, other in itertools.combinations(tiles, 2):
        assert 0.47 < (one == other).float().mean() < 0.53


@pytest.mark.parametrize("state", SEEDS)
@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_rate(p: float, state: tuple[int, int]) -> None:
    keep = whole(*state, p)
    dropped, n = int((~keep).sum()), keep.numel()
    assert abs(dropped - n * p) < 4.5 * math.sqrt(n * p * (1 - p))
    for axis in range(4):
        over = [x for x in range(4) if x != axis]
        rates = (~keep).double().mean(over)
        sigma = math.sqrt(p * (1 - p) * keep.shape[axis] / n)
        assert (rates - p).abs().max() < 5.5 * sigma


def test_extreme_probabilities() -> None:
    assert whole(p=1e-12).all()
    assert not whole(p=1 - 1e-12).any()


def test_a_larger_probability_drops_more_of_the_same() -> None:
    assert not (whole(p=0.5) & ~whole(p=0.2)).any()


# Through the functions


def case(mask_type: str, layout: str = "thd_thd_thd", **changes: object) -> Case:
    q, k, v = torch.randn(3, 330, 2, 8)
    offsets = torch.tensor([0, 130, 130, 330], dtype=torch.int32)
    fields = {"mask_type": mask_type, "cu_seqlens_q": offsets, "dropout": 0.4, "rng_state": torch.tensor([5, -9])}
    operands = {"t3hd": (torch.stack([q, k, v], 1),), "thd_t2hd": (q, torch.stack([k, v], 1))}
    return Case(operands.get(layout, (q, k, v)), layout, **fields | changes)


@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
def test_tiling_does_not_show(mask_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, dout = case(mask_type), torch.randn(330, 2, 8)
    keep, results = keep_mask(problem), run_case(problem, dout)
    for tile, step in ((64, 2**21), (2**14, 512), (2**19, 64)):
        monkeypatch.setattr(torch_blocks, "TILE_ELEMENTS", tile)
        monkeypatch.setattr(torch_call, "STEP_ELEMENTS", step)
        assert torch.equal(keep, keep_mask(problem))
        for name, got in run_case(problem, dout).items():
            torch.testing.assert_close(got, results[name], rtol=1e-4, atol=1e-5)


def test_the_pattern_is_that_of_positions() -> None:
    """Of (b, h, q, k), whatever the layout, mask or other lengths, and of nothing else."""
    keep = keep_mask(case("no_mask"))
    direct = DropoutPattern(torch.tensor([5, -9]), 0.4).keep(range(3), range(2), range(200), 200)
    assert torch.equal(keep[0, :, :130, :130], direct[0, :, :130, :130])
    assert torch.equal(keep[2], direct[2])
    for layout in ("t3hd", "thd_t2hd"):
        assert torch.equal(keep_mask(case("padding", layout)), keep)
    assert torch.equal(keep_mask(case("causal")), keep & torch.ones(200, 200).tril().bool())


def test_pattern_leaves_numbers_alone() -> None:
    """dtype, scale and values do not touch it."""
    problem = case("no_mask")
    keep = keep_mask(problem)
    for dtype in (torch.float16, torch.float64):
        other = case("no_mask")
        other = Case(**vars(other) | {"operands": tuple(x.to(dtype) for x in other.operands), "attn_scale": -3.0})
        assert torch.equal(keep_mask(other), keep)


def test_mean_over_patterns_is_the_softmax() -> None:
    """What is kept weighs 1 / (1 - p): the expectation of out is out without dropout."""
    q, k, v = torch.randn(3, 1, 3, 2, 8, dtype=torch.float64)
    want = run_case(Case((q, k, v), "bshd_bshd_bshd"))["out"]
    states = (torch.tensor([seed, 1]) for seed in range(800))
    outs = torch.stack(
        [run_case(Case((q, k, v), "bshd_bshd_bshd", dropout=0.3, rng_state=state))["out"] for state in states]
    )
    error = (outs.mean(0) - want).abs() / (outs.std(0) / math.sqrt(len(outs)) + 1e-12)
    assert error.max() < 4.5


def test_lse_knows_no_dropout() -> None:
    problem = case("causal")
    assert torch.allclose(
        run_case(problem)["lse"], run_case(Case(**vars(problem) | {"dropout": 0.0}))["lse"], atol=1e-5
    )
