"""What the interpreter computes, against float64, on graphs declared by hand; and how its memory is looked at."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cudnn_handmade import UNTOUCHED, Handmade, Problem
from cudnn_interpreter import uniform
from torch import Tensor

FORWARD, BACKWARD = ("o", "stats"), ("dQ", "dK", "dV", "dBias")
LENS = {"lens_q": (5, 1, 3), "lens_kv": (2, 7, 4)}
SELF = {"s_kv": 5, "lens_q": (5, 1, 3), "lens_kv": (5, 1, 3)}
PADDED = Problem(**LENS)

PROBLEMS = {
    "bshd": Problem(),
    "bhsd": Problem(layout="bhsd"),
    "sbhd": Problem(layout="sbhd"),
    "fp16": Problem(dtype=torch.float16),
    "packed [b, s, 3, h, d]": Problem(layout="bs3hd", s_kv=5),
    "packed [b, s, h, 3, d]": Problem(layout="bsh3d", s_kv=5),
    "packed kv": Problem(layout="bs3hd"),
    "one sequence and one head": Problem(b=1, h=1),
    "scale in the graph": Problem(scale_by_value=False),
    "scale 0": Problem(scale=0.0),
    "negative scale": Problem(scale=-0.4),
    "causal": Problem(causal=True),
    "causal, fewer keys": Problem(s_q=9, s_kv=4, causal=True),
    "causal of several tiles": Problem(b=1, h=1, s_q=300, s_kv=270, causal=True),
    "bottom right": Problem(causal=True, bottom_right=True),
    "bottom right, padding": Problem(causal=True, bottom_right=True, lens_q=(5, 1, 3), lens_kv=(6, 7, 4)),
    "bottom right of several tiles": Problem(b=1, h=1, s_q=150, s_kv=300, causal=True, bottom_right=True),
    "several tiles": Problem(b=1, h=1, s_q=257, s_kv=129),
    "padding": PADDED,
    "padding, sbhd": replace(PADDED, layout="sbhd"),
    "padding and causal": replace(PADDED, causal=True),
    "padding, several tiles": Problem(b=2, h=1, s_q=150, s_kv=300, lens_q=(130, 150), lens_kv=(1, 200), causal=True),
    "thd": Problem(layout="thd", **LENS),
    "thd, int32 offsets": Problem(layout="thd", offsets_dtype=torch.int32, **LENS),
    "thd, gaps": Problem(layout="thd", gap=2, **LENS),
    "thd, ragged statistics": Problem(layout="thd", ragged_stats=True, gap=1, **LENS),
    "thd, causal": Problem(layout="thd", causal=True, **LENS),
    "thd, padded past the lengths": Problem(layout="thd", **{**LENS, "s_q": 256, "s_kv": 256}),
    "t3hd": Problem(layout="t3hd", **SELF),
    "t3hd, causal, ragged statistics": Problem(layout="t3hd", causal=True, ragged_stats=True, gap=1, **SELF),
    "bias 1h": Problem(bias=(1, 2, 5, 7)),
    "bias bh": Problem(bias=(3, 2, 5, 7)),
    "bias b1": Problem(bias=(3, 1, 5, 7)),
    "bias 11": Problem(bias=(1, 1, 5, 7)),
    "bias of keys": Problem(bias=(1, 2, 1, 7)),
    "bias of keys and sequences": Problem(bias=(3, 1, 1, 7)),
    "bias bf16": Problem(bias=(1, 2, 5, 7), bias_dtype=torch.bfloat16),
    "bias fp16": Problem(bias=(1, 2, 5, 7), bias_dtype=torch.float16, dtype=torch.float16),
    "bias, causal": Problem(bias=(1, 2, 5, 7), causal=True),
    "bias 1h, padding": replace(PADDED, bias=(1, 2, 5, 7)),
    "bias bh, padding, causal": replace(PADDED, bias=(3, 2, 5, 7), causal=True),
    "bias 1h, thd": Problem(layout="thd", bias=(1, 2, 5, 7), **LENS),
    "bias, several tiles": Problem(b=2, h=1, s_q=140, s_kv=130, bias=(1, 1, 140, 130), causal=True),
    "dropout": Problem(s_kv=8, dropout=0.3),
    "dropout, thd": Problem(layout="thd", dropout=0.3, **{**LENS, "s_kv": 8}),
    "dropout, bias, causal": Problem(s_kv=8, dropout=0.5, bias=(1, 2, 5, 8), causal=True),
    "dropout, several tiles": Problem(b=1, s_q=140, s_kv=64, d=64, dropout=0.2),
}  # fmt: skip


def read_back(problem: Problem) -> Tensor:
    """bool [b, h, s_q, s_kv]: what a forward keeps, seen through V = 1 on the diagonal and equal weights."""
    seen = Handmade(problem)
    for i in range(problem.b):
        seen.block("q", i).zero_()
        n = seen.lens_kv[i]
        seen.block("v", i).copy_(torch.eye(n, problem.d))
    seen.run()
    keep = torch.ones(problem.b, problem.h, problem.s_q, problem.s_kv, dtype=torch.bool)
    for i in range(problem.b):
        n = seen.lens_kv[i]
        keep[i, :, : seen.lens_q[i], :n] = seen.block("o", i)[..., :n] > 0
    return keep


def close(name: str, got: Tensor, want: Tensor) -> None:
    """Within some roundings to 16 bits, or of float32 for the statistics."""
    if name == "stats":
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)
        return
    eps = torch.finfo(got.dtype).eps
    assert (got.double() - want).abs().max() <= 4 * eps * max(float(want.abs().max()), 0.1), name


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_agrees_with_float64(problem: Problem) -> None:
    made = Handmade(problem)
    want = made.expected(read_back(replace(problem, causal=False, bias=None)) if problem.dropout else None)
    made.run()
    made.run(backward=True)
    for name, blocks in want.items():
        for i, block in enumerate(blocks):
            close(name, made.tensors[name] if name == "dBias" else made.block(name, i), block)


@pytest.mark.parametrize("name", ["o", "dQ", "dK", "dV", "stats"])
def test_ragged_rows_between_sequences_are_left_alone(name: str) -> None:
    made = Handmade(Problem(layout="thd", ragged_stats=True, gap=2, **LENS))
    made.run()
    made.run(backward=True)
    for i in range(made.problem.b):
        made.block(name, i).fill_(UNTOUCHED)
    assert (made.tensors[name] == UNTOUCHED).all()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_inputs_are_left_alone(layout: str) -> None:
    made = Handmade(Problem(layout=layout, bias=(1, 2, 5, 7), **LENS))
    made.run()
    before = {name: tensor.clone() for name, tensor in made.tensors.items()}
    made.run(backward=True)
    for name in set(before) - set(BACKWARD):
        torch.testing.assert_close(made.tensors[name], before[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_dbias_is_written_not_added() -> None:
    made = Handmade(Problem(bias=(1, 2, 5, 7)))
    made.run()
    made.run(backward=True)
    first = made.tensors["dBias"].clone()
    made.run(backward=True)
    assert torch.equal(made.tensors["dBias"], first)


def test_dbias_of_pairs_outside_is_zero() -> None:
    made = Handmade(replace(PADDED, bias=(3, 2, 5, 7), causal=True))
    made.run()
    made.run(backward=True)
    live = torch.zeros(3, 2, 5, 7, dtype=torch.bool)
    for i in range(3):
        live[i, :, : made.lens_q[i], : made.lens_kv[i]] = (
            torch.ones(5, 7)[: made.lens_q[i], : made.lens_kv[i]].tril() > 0
        )
    assert (made.tensors["dBias"][~live] == 0).all()
    assert (made.tensors["dBias"][live] != 0).any()


def test_probabilities_and_their_gradients_have_16_bits() -> None:
    """Weights of 1/3 are 0.33398 in bfloat16, which moves these sums to the next number."""
    made = Handmade(Problem(b=5, h=4, s_q=5, s_kv=3, bias=(1, 1, 1, 3)))
    for name, value in (("q", 0.0), ("v", 1.0), ("bias", 0.0), ("dO", 1 / 8)):
        made.tensors[name].fill_(value)
    made.tensors["v"][:, :, 2] = 1 + 2**-7
    made.run()
    assert (made.tensors["o"] == 1 + 2**-7).all()
    made.tensors["v"].fill_(1.0)
    made.tensors["o"].zero_()
    made.run(backward=True)
    # 100 rows of one third: 33.25 were it not for the rounding.
    assert made.tensors["dBias"].flatten().tolist() == [33.5] * 3


def test_a_bias_that_declares_no_dtype_is_read_as_the_graphs() -> None:
    made = Handmade(Problem(bias=(1, 2, 5, 7)))
    made.run()
    graph = made.graph()
    graph.nodes[0].inputs["bias"].data_type = None
    before = made.tensors["o"].clone()
    made.run(graph=graph)
    assert not torch.equal(made.tensors["o"], before)


def test_dims_strides_and_offsets_are_the_graphs() -> None:
    """K declared with V's strides, where they differ, reads other numbers."""
    made = Handmade(Problem(layout="bhsd"))
    made.run()
    before = made.tensors["o"].clone()
    made.run(graph=made.graph(k=(112, 8, 16, 1)))
    assert not torch.equal(made.tensors["o"], before)


def pattern(**changes: object) -> Tensor:
    made = Handmade(replace(Problem(b=2, h=2, s_q=64, s_kv=64, d=64, dropout=0.25), **changes))
    return read_back(made.problem)


def test_dropout_drops_what_is_asked() -> None:
    keep = pattern()
    assert abs(float(keep.double().mean()) - 0.75) < 0.01
    # No two heads, queries or keys alike.
    for axis in range(4):
        assert not torch.equal(keep.narrow(axis, 0, 1), keep.narrow(axis, 1, 1))


def test_dropout_differs_between_graphs_of_other_dims() -> None:
    keep = pattern()
    assert not torch.equal(keep[:1], pattern(b=1))
    assert not torch.equal(keep[:, :1], pattern(h=1))
    assert not torch.equal(keep[:, :, :32], pattern(s_q=32))
    assert not torch.equal(keep[..., :32], pattern(s_kv=32))
    assert torch.equal(keep, pattern())


def test_dropout_takes_seed_and_offset_for_two_things() -> None:
    place = [torch.arange(64)] * 4
    numbers = [uniform(seed, offset, (1, 1, 1, 1), place) for seed, offset in ((1, 2), (2, 1), (1, 3), (3, 2), (1, 2))]
    assert [torch.equal(numbers[0], other) for other in numbers[1:]] == [False, False, False, True]


def test_dropout_reads_seed_and_offset_from_memory() -> None:
    made = Handmade(Problem(dropout=0.5))
    outs = []
    for seed, offset in ((5, -3), (6, -3), (5, -2), (5, -3)):
        made.tensors["seed"][0], made.tensors["offset"][0] = seed, offset
        made.run()
        outs.append(made.tensors["o"].clone())
    assert [torch.equal(outs[0], other) for other in outs[1:]] == [False, False, True]


def test_it_shares_no_code_with_what_it_judges() -> None:
    """But for the key that a run is counted by, and the graph that the executor lets the engine declare."""
    files = [
        Path(__file__).with_name(f"cudnn_{name}.py") for name in ("memory", "declared", "sequences", "interpreter")
    ]
    found = {line.strip() for file in files for line in file.read_text().splitlines() if "import" in line}
    assert {line for line in found if "fusedattn" in line} == {
        "from fusedattn.engines.cudnn_key import SdpaKey",
        "from fusedattn.engines.cudnn_graph import build",
    }
