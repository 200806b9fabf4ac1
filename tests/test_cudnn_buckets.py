"""Sizes of ragged graphs: few plans serve all packings."""

import random

import pytest
import torch
from cudnn_recorder import Recorder

import fusedattn
from fusedattn import NVTE_QKV_Layout, runtime
from fusedattn.calls import attention_request
from fusedattn.engines.cudnn_buckets import batch_bucket, seqlen_buckets, tokens_bucket
from fusedattn.engines.cudnn_graph import build
from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.enums import Direction
from fusedattn.target import TARGETS


@pytest.mark.parametrize(("batch", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16), (17, 64), (65, 256)])
def test_batch(batch: int, bucket: int) -> None:
    assert batch_bucket(batch) == bucket


@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [
        ((1, 1), (256, 256)),
        ((256, 256), (256, 256)),
        ((257, 300), (512, 512)),
        ((8000, 8192), (8192, 8192)),
        ((1, 257), (128, 512)),
        ((257, 1), (512, 128)),
        ((129, 513), (512, 2048)),
        ((1000, 3000), (2048, 8192)),
        # Rounded to powers of 4 both become the same again.
        ((600, 1100), (2048, 2048)),
    ],
)
def test_lengths(lengths: tuple[int, int], buckets: tuple[int, int]) -> None:
    assert seqlen_buckets(*lengths) == buckets


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 32768), (32768, 32768), (32769, 65536), (200_000, 262_144)])
def test_tokens(tokens: int, bucket: int) -> None:
    assert tokens_bucket(tokens) == bucket


def packing(chance: random.Random) -> list[int]:
    """Up to 64 documents of up to 8k tokens, 32k in all."""
    most = chance.choice([128, 512, 1024, 2048, 4096, 8192])
    lengths = [chance.randint(1, most) for _ in range(chance.randint(1, 64))]
    while sum(lengths) > 32768:
        lengths.pop()
    return lengths


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def run_both_ways(layout: str, operands: dict[str, torch.Tensor], lengths: list[list[int]]) -> None:
    """A forward and a backward of a ragged problem, of which only shapes are looked at."""
    cu = [on_meta(len(each) + 1, dtype=torch.int32) for each in lengths]
    longest = [max(each) for each in lengths]
    word = NVTE_QKV_Layout.parse(layout, "qkv_layout")
    request = attention_request(
        word, operands, None, "no_bias", "causal", cu[0], cu[-1], longest[0], longest[-1], None, 0.0, None, True, None,
        "cudnn",
    )  # fmt: skip
    out, lse = runtime.forward(request)
    runtime.backward(request, out, None, out, lse, [torch.empty_like(x) for x in request.operands], None)


def counted(recorder: Recorder) -> dict[Direction, int]:
    return {direction: sum(key.direction is direction for key in recorder.keys) for direction in Direction}


def test_a_thousand_packings_need_few_plans() -> None:
    chance, recorder = random.Random(0), Recorder()
    with runtime.pretend(TARGETS["h100"], recorder):
        for _ in range(1000):
            lengths = packing(chance)
            run_both_ways("t3hd", {"qkv": on_meta(sum(lengths), 3, 2, 64)}, [lengths])
    assert len(recorder.runs) == 2000
    found = counted(recorder)
    assert 12 <= found[Direction.forward] <= 24
    assert 12 <= found[Direction.backward] <= 24
    # Never the tokens: the longest document decides.
    assert max(key.tensors[0][1].dim[2] for key in recorder.keys) == 8192


def test_separate_lengths_need_at_most_eighty() -> None:
    chance, recorder = random.Random(1), Recorder()
    with runtime.pretend(TARGETS["h100"], recorder):
        for _ in range(1000):
            sides = [packing(chance), packing(chance)]
            count = min(map(len, sides))
            sides = [side[:count] for side in sides]
            q, kv = on_meta(sum(sides[0]), 2, 64), on_meta(sum(sides[1]), 2, 2, 64)
            run_both_ways("thd_t2hd", {"q": q, "kv": kv}, sides)
    found = counted(recorder)
    assert 40 <= found[Direction.forward] <= 80
    assert 40 <= found[Direction.backward] <= 80


def test_a_ragged_graph_is_always_told_its_tokens() -> None:
    recorder = Recorder()
    q, kv = on_meta(40000, 2, 64), on_meta(9000, 2, 2, 64)
    with runtime.pretend(TARGETS["h100"], recorder):
        run_both_ways("thd_t2hd", {"q": q, "kv": kv}, [[300, 7], [40, 500]])
    assert [key.direction for key in recorder.run_keys] == [*Direction]
    for key in recorder.run_keys:
        (node,) = build(key).nodes
        assert (node.params["max_total_seq_len_q"], node.params["max_total_seq_len_kv"]) == (65536, 32768)


def test_the_number_of_groups_follows_from_shapes() -> None:
    """The tensors have no values that could be looked at."""

    def too_large(key: SdpaKey) -> int:
        return 2**40 if key.tensors[0][1].dim[0] > 4 else 0

    for documents, groups in ((64, 16), (61, 16), (4, 1)):
        recorder = Recorder(too_large)
        with runtime.pretend(TARGETS["h100"], recorder):
            run_both_ways("t3hd", {"qkv": on_meta(5000, 3, 2, 64)}, [[70] * documents])
        assert len(recorder.runs) == 2 * groups


def test_with_a_bias_lengths_stay_exact() -> None:
    recorder = Recorder()
    qkv, cu = torch.zeros(100, 3, 2, 64).bfloat16(), torch.tensor([0, 9, 50, 90], dtype=torch.int32)
    with runtime.pretend(TARGETS["h100"], recorder):
        for shape in ((1, 2, 41, 41), (3, 1, 41, 41)):
            fusedattn.fused_attention_qkvpacked(qkv, torch.zeros(shape), cu_seqlens=cu, max_seqlen=41)
    # Three sequences are four in a graph, unless the bias has an axis of them.
    assert [key.tensors[0][1].dim for key in recorder.run_keys] == [(4, 2, 41, 64), (3, 2, 41, 64)]
