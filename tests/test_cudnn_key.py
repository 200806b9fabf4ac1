"""Keys of cuDNN graphs: nothing that a graph is built from is missing, and nothing superfluous is there."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from cudnn_recorder import Recorder

import fusedattn
from fusedattn import runtime
from fusedattn.engines.cudnn_key import FIRST_RAGGED_UID, Role, SdpaKey, TensorKey
from fusedattn.enums import Direction
from fusedattn.target import TARGETS

CU = torch.tensor([0, 5, 16], dtype=torch.int32)
OTHER_CU = torch.tensor([0, 11, 16], dtype=torch.int32)
RNG = torch.tensor([1, 2])


def operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def run(call: dict[str, Any]) -> None:
    call = dict(call)
    function = fusedattn.fused_attention_qkvpacked if "qkv" in call else fusedattn.fused_attention
    operands = [call.pop(name) for name in ("qkv", "q", "k", "v") if name in call]
    out = function(*operands, engine="cudnn", **call)
    out.backward(torch.ones_like(out))


def keys(target: str = "h100", **call: Any) -> tuple[SdpaKey, ...]:
    """The keys of a forward and a backward."""
    recorder = Recorder()
    with runtime.pretend(TARGETS[target], recorder):
        run(call)
    return tuple(recorder.keys)


def dense(s_q: int = 16, s_kv: int = 16, dtype: torch.dtype = torch.bfloat16, **shape: int) -> dict[str, Any]:
    b, h, d = shape.get("b", 2), shape.get("h", 3), shape.get("d", 8)
    q, k = operand(b, s_q, h, d, dtype=dtype), operand(b, s_kv, h, d, dtype=dtype)
    return {"q": q, "k": k, "v": operand(*k.shape, dtype=dtype)}


def ragged(tokens: int = 16, **changes: Any) -> dict[str, Any]:
    return {"qkv": operand(tokens, 3, 3, 8), "cu_seqlens": CU, "max_seqlen": 11} | changes


BIAS, WIDE_BIAS = operand(1, 3, 16, 16), operand(1, 3, 16, 24).detach()
DENSE, RAGGED, DROPPED = dense(), ragged(), dense() | {"dropout": 0.25, "rng_state": RNG}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch": (DENSE, dense(b=3)),
    "heads": (DENSE, dense(h=4)),
    "head_dim": (DENSE, dense(d=16)),
    "s_q": (DENSE, dense(s_q=17)),
    "s_kv": (DENSE, dense(s_kv=17)),
    "dtype": (DENSE, dense(dtype=torch.float16)),
    "mask": (DENSE, DENSE | {"attn_mask_type": "causal"}),
    "lengths": (DENSE, DENSE | {"attn_mask_type": "padding", "cu_seqlens_q": CU}),
    "strides of q": (DENSE, DENSE | {"q": operand(2, 16, 2, 3, 8)[:, :, 0]}),
    "strides of k": (DENSE, DENSE | {"k": operand(2, 16, 2, 3, 8)[:, :, 0]}),
    "strides of v": (DENSE, DENSE | {"v": operand(2, 16, 2, 3, 8)[:, :, 0]}),
    "order of axes": (DENSE, DENSE | {"qkv_layout": "bhsd_bhsd_bhsd"}),
    "bias": (DENSE, DENSE | {"bias": BIAS}),
    "dtype of bias": (DENSE | {"bias": BIAS.detach()}, DENSE | {"bias": BIAS.detach().float()}),
    "broadcast of bias": (DENSE | {"bias": BIAS}, DENSE | {"bias": operand(1, 1, 16, 16)}),
    "strides of bias": (DENSE | {"bias": BIAS.detach()}, DENSE | {"bias": WIDE_BIAS[..., :16]}),
    "place of bias": (DENSE | {"bias": BIAS}, DENSE | {"bias": BIAS, "attn_bias_type": "pre_scale"}),
    "dropout": (DENSE, DROPPED),
    "probability": (DROPPED, DROPPED | {"dropout": 0.5}),
    "ragged batch": (RAGGED, ragged(cu_seqlens=torch.arange(0, 17, 2, dtype=torch.int32))),
    "ragged max_seqlen": (RAGGED, ragged(max_seqlen=300)),
    "bound of tokens": (RAGGED, ragged(tokens=32769)),
    "deterministic": (DENSE, DENSE | {"deterministic": True}),
    "target": (DENSE, DENSE | {"target": "b200"}),
}  # fmt: skip
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": (DENSE, DENSE | {"attn_scale": 0.3}),
    "scale of NaN": (DENSE, DENSE | {"attn_scale": float("nan")}),
    "rng_state": (DROPPED, DROPPED | {"rng_state": RNG + 5}),
    "values of lengths": (RAGGED, ragged(cu_seqlens=OTHER_CU)),
    "tokens": (RAGGED, ragged(tokens=900)),
    "max_seqlen in its bucket": (RAGGED, ragged(max_seqlen=200)),
    "batch in its bucket": (
        ragged(cu_seqlens=torch.arange(0, 16, 4, dtype=torch.int32)),
        ragged(cu_seqlens=torch.arange(0, 17, 4, dtype=torch.int32)),
    ),
    "tensors of another address": (DENSE, dense()),
    "strides of axes of size 1": (dense(b=1), dense(b=1) | {"q": operand(3, 16, 3, 8)[1:2]}),
    "values of the bias": (DENSE | {"bias": BIAS.detach()}, DENSE | {"bias": BIAS.detach() + 1}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_is_built_from_is_in_the_key(name: str) -> None:
    one, other = (keys(**call) for call in CHANGES[name])
    assert len(one) == len(other) == 2
    texts = [{key.text() for key in each} for each in (one, other)]
    # What concerns one direction alone leaves the other's key as it is; on Hopper backward always has lengths.
    same = 1 if name in ("deterministic", "lengths") else 0
    assert len(texts[0] & texts[1]) == len(set(one) & set(other)) == same


def test_memos_tell_calls_apart_as_fresh_ones_do() -> None:
    calls = [call for pair in CHANGES.values() for call in pair if "target" not in call]
    recorder = Recorder()
    with runtime.pretend(TARGETS["h100"], recorder):
        for call in (*calls, *reversed(calls)):
            run(call)
    fresh = [key for call in (*calls, *reversed(calls)) for key in keys(**call)]
    assert recorder.run_keys == fresh


@pytest.mark.parametrize("name", SAME)
def test_nothing_superfluous_is_in_the_key(name: str) -> None:
    one, other = (keys(**call) for call in SAME[name])
    assert one == other
    assert [key.text() for key in one] == [key.text() for key in other]


def test_dbias_is_declared_only_where_it_is_asked_for() -> None:
    with_it, without = (keys(**DENSE, bias=bias)[1] for bias in (BIAS, BIAS.detach()))
    assert (Role.DBIAS in with_it, Role.DBIAS in without) == (True, False)
    assert with_it.tensor(Role.DBIAS) == TensorKey((1, 3, 16, 16), (768, 256, 16, 1), "bfloat16")


def test_tensors_of_equal_offsets_share_them() -> None:
    forward, backward = keys(**RAGGED)
    # Q, K and V of one packed tensor; the output; the statistics.
    assert [offsets.token_stride for offsets in forward.ragged_uids] == [72, 72, 24, 3]
    assert [offsets.kv for offsets in forward.ragged_uids] == [False, True, False, False]
    assert list(forward.ragged_uids.values()) == [FIRST_RAGGED_UID + i for i in range(4)]
    assert forward.ragged_uids == backward.ragged_uids
    padded = keys(**ragged(), target="a100")[1]
    assert not padded.ragged_stats
    assert padded.tensor(Role.STATS).dim == (4, 3, 256, 1)


def test_the_text_is_json_and_speaks_of_the_fingerprint_alone() -> None:
    h100 = keys(**DENSE)[0]
    written = json.loads(h100.text())
    assert written["target"] == TARGETS["h100"].fingerprint
    assert written["tensors"]["Q"] == [[2, 3, 16, 8], [384, 8, 24, 1], "bfloat16"]
    assert {"direction", "ragged", "causal", "dropout", "version"} <= set(written)


def test_keys_survive_a_pickle_into_another_process(tmp_path: Any) -> None:
    key = keys(**DENSE)[0]
    path = tmp_path / "key"
    path.write_bytes(pickle.dumps(key))
    code = (
        "import pickle, sys; key = pickle.load(open(sys.argv[1], 'rb')); "
        "again = type(key)(*key.__reduce__()[1]); assert {again: 1}[key] == 1; print(key.text())"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, path], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == key.text()
    assert key.direction is Direction.forward
