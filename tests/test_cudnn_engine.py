"""The cuDNN engine on the interpreter: all layouts, biases, masks and dropout, on every kind of GPU, within budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cudnn_hostile import LAYOUTS, NAN, RAGGED, Hostile, Options, hostile, run
from cudnn_interpreter import InterpretingExecutor
from cudnn_judge import judge, offers_dbias

from fusedattn import runtime
from fusedattn.engines.cudnn_key import Role
from fusedattn.runs.oracle import assert_within_budget, eager, expected
from fusedattn.target import TARGETS

# Ragged and padded statistics, a padding mask always, a copy of Q: what differs between kinds of GPU.
KINDS = ("a100", "h100", "b200", "rtx5090")
DTYPES = (torch.float16, torch.bfloat16)
WORDS = [*itertools.product(["", "post_scale_bias", "pre_scale_bias"], ["no_mask", "padding", "causal"], [0.0, 0.2])]
BIASES = ("k", "qk", "hk", "hqk", "bk", "bqk", "bhk", "bhqk")


def grid(layout: str, dtype: torch.dtype, target: str) -> Iterator[tuple[Options, int]]:
    """Problems with the version of cuDNN; what is not in WORDS differs by the number."""
    first = 7 * LAYOUTS.index(layout) + 5 * DTYPES.index(dtype) + KINDS.index(target)
    other = DTYPES[1 - DTYPES.index(dtype)]
    for n, (bias_type, mask, dropout) in enumerate(WORDS, start=first):
        o = Options(
            layout=layout,
            dtype=dtype,
            max_q=None if n % 2 else 9,
            max_kv=None if n // 2 % 2 else 13,
            mask=mask,
            bias=BIASES[n % 8] if bias_type else "",
            bias_type=bias_type or "post_scale_bias",
            bias_dtype=(dtype, dtype, dtype, torch.float32, other, torch.float64)[n // 2 % 6],
            dead=n % 3 == 0,
            dropout=dropout,
            scale=0.3 if n % 5 == 0 else None,
            dlse=n % 4 == 0,
            tail=n % 3,
            views=(0, 8, 0, 3, 0, 24)[n % 6],
            cu_dtype=torch.int64 if n % 7 == 0 else torch.int32,
            cu_given=n % 2 == 0,
            seed=n,
        )
        yield (o if offers_dbias(o, target) else replace(o, wanted="qkv")), 92400 + 100 * (n // 3 % 3)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_differentiable_functions(layout: str, dtype: torch.dtype, target: str) -> None:
    for o, version in grid(layout, dtype, target):
        judge(o, target=target, backend_version=version)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", RAGGED[:2])
def test_nvte_functions(layout: str, dtype: torch.dtype, target: str) -> None:
    for o, version in grid(layout, dtype, target):
        # With dropout a forward there already answers for the gradient of its bias.
        if o.bias and o.dropout and "b" not in o.wanted:
            o = replace(o, bias="")
        judge(replace(o, dlse=False, seed=o.seed + 100), target=target, nvte=True, backend_version=version)


def test_the_grid_covers_every_bias() -> None:
    """Each bias type meets each choice of axes, each dtype each dtype of bias, and dBias is asked for of each kind."""
    problems = [
        (o, target) for layout, dtype, target in itertools.product(LAYOUTS, DTYPES, KINDS)
        for o, _ in grid(layout, dtype, target) if o.bias
    ]  # fmt: skip
    assert len({(o.bias_type, o.bias) for o, _ in problems}) == 2 * 8
    assert len({(o.dtype, o.bias_dtype) for o, _ in problems}) == 2 * 4
    asked = {(target, o.ragged, o.bias_type, o.bias) for o, target in problems if "b" in o.wanted}
    assert {target for target, *_ in asked} == {*KINDS}
    assert {ragged for _, ragged, *_ in asked} == {True, False}


DENSE = Options("bshd_bshd_bshd", q=(5, 7), kv=(11, 4), heads=2)
THD = Options()
SELF = Options("t3hd")
SIZES: dict[str, Options] = {
    "one sequence": Options(q=(7,), kv=(5,)),
    "one sequence of one tensor": Options("t3hd", q=(7,)),
    "one head": replace(THD, heads=1),
    "one dense sequence and one head": replace(DENSE, q=(7,), kv=(9,), heads=1),
    "one query": replace(DENSE, q=(1, 1), kv=(9, 4)),
    "one query, one key": Options(q=(1, 1), kv=(1, 1)),
    "no query anywhere": Options(q=(0, 0), kv=(3, 2)),
    "no key anywhere": Options(q=(3, 2), kv=(0, 0), tail=3),
    "no dense key of any sequence": replace(DENSE, mask="padding", q=(5, 7), kv=(0, 0), max_kv=4),
    "no sequence": Options(q=(), kv=(), tail=3),
    "no sequence and no row": Options("t3hd", q=(), tail=0),
    "no row": Options(q=(0, 0), kv=(0, 0), tail=0),
    "no row of q": Options(q=(0, 0), kv=(3, 2), tail=0),
    "no row of kv": Options(q=(3, 2), kv=(0, 0), tail=0),
    "no dense sequence": replace(DENSE, q=(), kv=(), max_q=5, max_kv=9),
    "no dense query": replace(DENSE, max_q=0, q=(0, 0)),
    "no dense key": replace(DENSE, max_kv=0, kv=(0, 0)),
    "no head": replace(DENSE, heads=0),
    "no ragged head": replace(THD, heads=0),
    "a long tail": replace(SELF, tail=300),
    "just a tile": Options("t3hd", q=(128, 1, 127), heads=1),
    "past a tile": Options("t3hd", q=(129, 130, 3), heads=1, mask="causal"),
    "tiles of keys": Options(q=(3, 129), kv=(257, 130), heads=1),
    "tiles, causal, fewer keys": Options(q=(140, 200), kv=(130, 3), heads=1, mask="causal"),
    "dense tiles": Options("bhsd_bhsd_bhsd", q=(131, 5), kv=(197, 130), heads=1, mask="padding"),
    "dense tiles, causal": Options("sbhd_sbhd_sbhd", q=(131, 131), kv=(259, 259), heads=1, mask="causal"),
    "wide heads": replace(THD, head_dim=128),
    "many sequences": Options("t3hd", q=(1, 2, 0, 3) * 5, heads=1),
    "max_seqlen far larger": replace(THD, max_q=600, max_kv=5000),
    "max_seqlen larger with a bias": replace(THD, max_q=40, max_kv=50, bias="bhqk", wanted="qkv"),
    "scale 0": replace(THD, scale=0.0),
    "scale NaN": replace(THD, scale=NAN),
    "scale NaN of a dense problem": replace(DENSE, scale=NAN, mask="padding"),
    "scale beyond 16 bits": replace(DENSE, scale=1e30),
    "scale 0 of a pre-scale bias": replace(DENSE, scale=0.0, bias="hqk", bias_type="pre_scale_bias"),
    "scale 0 of a dead pre-scale bias": replace(DENSE, scale=0.0, bias="hqk", bias_type="pre_scale_bias", dead=True),
    "large scale of a pre-scale bias": replace(DENSE, scale=7.0, bias="hqk", bias_type="pre_scale_bias"),
    "dead rows": replace(DENSE, bias="bhqk", dead=True, dlse=True),
    "dead rows, causal": replace(DENSE, q=(7, 7), bias="bhqk", dead=True, mask="causal"),
    "dead rows, padding": replace(DENSE, q=(5, 7), bias="hqk", dead=True, mask="padding", dlse=True),
    "dead rows of ragged sequences": replace(THD, bias="bqk", dead=True, wanted="qkv", mask="causal", dlse=True),
    "dead for all queries": replace(DENSE, bias="k", dead=True, wanted="qkv"),
    "dropout": replace(SELF, dropout=0.5),
    "dropout of nearly all": replace(THD, dropout=0.9),
    "wide cu_seqlens": replace(THD, cu_dtype=torch.int64),
}


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_values_at_the_borders(name: str, target: str) -> None:
    judge(SIZES[name], target=target)


@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "bias"])
@pytest.mark.parametrize("mask", ["no_mask", "padding"])
@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "thd_thd_thd"])
def test_what_is_not_a_number_stays_where_it_belongs(layout: str, mask: str, where: str) -> None:
    """Under a causal mask it does not: where 0 is multiplied by it in a tile, NaN comes of it."""
    h = Hostile(replace(DENSE, layout=layout, mask=mask, bias="hqk"))
    assert h.case.bias is not None
    tensors = dict(zip("qkv", h.case.operands, strict=True)) | {"dout": h.dout, "bias": h.case.bias}
    place = (0, 1, 2, 3) if where == "bias" else (0, 2, 1, 3) if layout == "bshd_bshd_bshd" else (2, 1, 3)
    tensors[where][place] = NAN
    judge(h)


@pytest.mark.parametrize("bias_type", ["post_scale_bias", "pre_scale_bias"])
@pytest.mark.parametrize("bias", ["qk", "hqk", "bqk", "bhqk"])
def test_gradient_of_a_bias_of_every_shape(bias: str, bias_type: str) -> None:
    for mask in ("no_mask", "padding", "causal"):
        o = replace(DENSE, q=(5, 7, 3), kv=(11, 4, 8), bias=bias, bias_type=bias_type, mask=mask, dead=True, scale=0.3)
        for target in KINDS:
            judge(o, target=target)
        ragged = replace(o, layout="thd_t2hd")
        judge(ragged)
        judge(ragged, nvte=True)


@pytest.mark.parametrize("bias", ["k", "hk", "bk", "bhk"])
def test_gradient_of_a_bias_of_one_row_where_there_is_one_query(bias: str) -> None:
    for target in KINDS:
        judge(replace(DENSE, q=(1, 1, 1), kv=(11, 4, 8), bias=bias), target=target)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "b", "kb", "qv", ""])
@pytest.mark.parametrize("target", KINDS)
def test_only_the_gradients_that_are_asked_for(wanted: str, target: str) -> None:
    for o in (
        replace(DENSE, bias="hqk", mask="padding", wanted=wanted),
        replace(DENSE, bias="hqk", wanted=wanted, dropout=0.0 if target == "b200" else 0.2),
    ):
        executor = judge(o, target=target)
        backward = [key for key in executor.executions if key.backward]
        assert len(backward) == (1 if wanted else 0)
        assert all((Role.DBIAS in key) == ("b" in wanted) for key in backward)


PARTS = {
    "ragged": replace(THD, views=8, dlse=True),
    "self": replace(SELF, mask="causal", q=(5, 7, 0, 130, 3), heads=2),
    "dense": replace(DENSE, q=(5, 7, 3), kv=(11, 4, 0), mask="padding", bias="hqk", dead=True),
    "dense bias of sequences": replace(DENSE, q=(5, 7, 3), kv=(11, 4, 8), bias="bqk", dead=True),
    "ragged bias of sequences": replace(THD, bias="bhqk", wanted="qkv", dead=True),
}


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("name", PARTS)
def test_parts_are_as_safe_as_the_whole(name: str, target: str) -> None:
    executor = judge(PARTS[name], target=target, workspace_bytes=lambda a: 2**50 if a.dim[0] * a.dim[1] > 1 else 2**20)
    assert {key.tensor(Role.Q).dim[:2] for key in executor.executions} == {(1, 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_switches_dropout_off_and_nothing_else(layout: str) -> None:
    for target in KINDS:
        o = Options(layout, mask="padding", dropout=0.3, wanted="")
        executor = InterpretingExecutor()
        with runtime.pretend(TARGETS[target], executor):
            got = run(hostile(o), is_training=False)
        assert [key.dropout for key in executor.executions] == [0.0]
        without = hostile(replace(o, dropout=0.0))
        want, measured = (f(without.case) for f in (expected, eager))
        assert_within_budget(got, want, measured, o.dtype)
