"""Outputs given in place: shapes and memory that are refused, and views of one buffer that are not."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedattn import (
    NVTETensorPack,
    SpecError,
    nvte_fused_attn_bwd_kvpacked,
    nvte_fused_attn_bwd_qkvpacked,
    nvte_fused_attn_fwd_kvpacked,
    nvte_fused_attn_fwd_qkvpacked,
)
from fusedattn.outputs import check_like, check_no_overlap

CU = torch.tensor([0, 3, 8], dtype=torch.int32)
CPU = torch.device("cpu")


def storage(count: int = 64) -> Tensor:
    return torch.zeros(count)


def numpy_pair() -> tuple[Tensor, Tensor]:
    array = np.zeros(16, dtype=np.float32)
    return torch.from_numpy(array[:8]), torch.from_numpy(array[4:12])


def numpy_apart() -> tuple[Tensor, Tensor]:
    array = np.zeros(16, dtype=np.float32)
    return torch.from_numpy(array[:8]), torch.from_numpy(array[8:])


x = storage()
m = storage().view(8, 8)
PAIRS: dict[str, tuple[bool, Tensor, Tensor]] = {
    "same": (True, x, x),
    "view": (True, x, x.view(8, 8)),
    "one-element": (True, x[:9], x[8:]),
    "neighbours": (False, x[:8], x[8:]),
    "interleaved": (False, x[::2], x[1::2]),
    "interleaved-3-and-2": (True, x[::3], x[::2]),
    "interleaved-columns": (False, m[:, :4], m[:, 4:]),
    "crossing": (True, m[3], m[:, 3]),
    "corner-apart": (False, m[:4, :4], m[4:, 4:]),
    "transposed": (True, m.t()[2:], m[:, 1:3]),
    "expanded": (True, x[:8], x[3].expand(5)),
    "expanded-apart": (False, x[:8], x[9].expand(5)),
    "other-dtype": (True, x[:8], x.view(torch.float64)[3:]),
    "other-dtype-apart": (False, x[:8], x.view(torch.float64)[4:]),
    "empty": (False, x[:0], x),
    "other-memory": (False, x, storage()),
    "scalar": (True, x[5], x[5:6]),
    "meta": (False, torch.empty(4, device="meta"), torch.empty(4, device="meta")),
    "numpy": (True, *numpy_pair()),
    "numpy-apart": (False, *numpy_apart()),
}


@pytest.mark.parametrize(("overlap", "a", "b"), PAIRS.values(), ids=PAIRS)
def test_overlap_is_a_shared_element(overlap: bool, a: Tensor, b: Tensor) -> None:
    for written, read in ((a, b), (b, a)):
        if any(stride == 0 for stride in written.stride()):
            continue
        for arguments in (({"O": written}, {"QKV": read}), ({"QKV": read, "O": written}, {})):
            if not overlap:
                if all(read.stride()):
                    check_no_overlap(*arguments)
                continue
            with pytest.raises(SpecError) as raised:
                check_no_overlap(*arguments)
            assert raised.value.expected in ("memory of its own", "one element of memory for each element")


def test_overlap_names_both_and_the_way_out() -> None:
    message = "argument 'O': expected memory of its own, got elements shared with `QKV`. Pass a new tensor, or None."
    with pytest.raises(SpecError) as raised:
        check_no_overlap({"O": x[4:]}, {"Bias": storage(), "QKV": x[:5]})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "tensor",
    [storage(4).expand(3, 4), storage(1).expand(2), x.as_strided((8, 8), (1, 1)), x.as_strided((4, 5), (3, 1))],
    ids=["expanded", "one", "diagonals", "steps"],
)
def test_written_tensor_has_memory_for_each_element(tensor: Tensor) -> None:
    with pytest.raises(SpecError, match=r"one element of memory for each element, got .* or None"):
        check_no_overlap({"O": tensor}, {})
    check_no_overlap({}, {"QKV": tensor})


@pytest.mark.parametrize("tensor", [x.as_strided((3, 4), (1, 3)), m.t(), m[::2, 1::3], x[:1].expand(1)], ids=str)
def test_any_other_strides_are_fine(tensor: Tensor) -> None:
    check_no_overlap({"O": tensor}, {"QKV": storage()})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 4), r"expected shape \[2, 3\], got shape \[2, 4\]\."),
        (torch.zeros(6), r"expected shape \[2, 3\], got shape \[6\]\."),
        (torch.zeros(2, 3, dtype=torch.half), "expected dtype float32, got float16."),
        (torch.zeros(2, 3, device="meta"), r"expected a tensor on cpu, got one on meta\. Move it with \.to\('cpu'\)"),
    ],
)
def test_like(tensor: Tensor, message: str) -> None:
    check_like("O", torch.zeros(3, 2).t(), (2, 3), torch.float32, CPU)
    with pytest.raises(SpecError, match=message):
        check_like("O", tensor, (2, 3), torch.float32, CPU)


# Through the nvte functions


def call(direction: str, packing: str, **changes: Any) -> Any:
    """Lengths 3 and 5, H = 2, D = 4, a bias; changes replace arguments, QKV and Q among them."""
    one = packing == "qkvpacked"
    words = {"attn_scale": 0.5, "dropout": 0.0, "qkv_layout": "t3hd" if one else "thd_t2hd"}
    words |= {"bias_type": "post_scale", "attn_mask_type": "causal"}
    lengths = {"cu_seqlens": CU, "max_seqlen": 5}
    if not one:
        lengths = {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    operands = {"QKV": torch.randn(8, 3, 2, 4)} if one else {"Q": torch.randn(8, 2, 4), "KV": torch.randn(8, 2, 2, 4)}
    inputs = {name: changes.pop(name, value) for name, value in (operands | lengths).items()}
    bias = changes.pop("Bias", torch.zeros(1, 2, 5, 5))
    forward: Any = nvte_fused_attn_fwd_qkvpacked if one else nvte_fused_attn_fwd_kvpacked
    first: dict[str, Any] = {"Bias": bias, "S": None, "Aux_Output_Tensors": None, "rng_state": None, "O": None}
    first |= {"is_training": True}
    if direction == "fwd":
        return forward(**inputs, **words, **first | changes)
    out, pack = forward(**inputs, **words, **first)
    backward: Any = nvte_fused_attn_bwd_qkvpacked if one else nvte_fused_attn_bwd_kvpacked
    if "pack" in changes:
        changes[changes.pop("pack")] = pack["softmax_lse"].expand(8, 2, 4)
    rest = {"O": out, "dO": torch.ones(8, 2, 4), "S": None, "dP": None, "Aux_CTX_Tensors": pack, "dBias": None}
    empty = {f"d{name}": None for name in operands}
    return backward(**inputs, **words, **rest | empty | changes)


big, bias = torch.zeros(8, 8, 2, 4), x[:50].view(1, 2, 5, 5)
SHARED: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "fwd-O-QKV": ("fwd", "qkvpacked", {"QKV": big[:, :3], "O": big[:, 2]}, "O", "QKV"),
    "fwd-O-Q": ("fwd", "kvpacked", {"Q": big[:, 0], "O": big[:, 0]}, "O", "Q"),
    "fwd-O-KV": ("fwd", "kvpacked", {"KV": big[:, :2], "O": big[:, 1]}, "O", "KV"),
    "fwd-O-Bias": ("fwd", "qkvpacked", {"Bias": bias, "O": x.view(8, 2, 4)}, "O", "Bias"),
    "bwd-dQKV-QKV": ("bwd", "qkvpacked", {"QKV": big[:, :3], "dQKV": big[:, 2:5]}, "dQKV", "QKV"),
    "bwd-dQKV-dO": ("bwd", "qkvpacked", {"dO": big[:, 3], "dQKV": big[:, 3:6]}, "dQKV", "dO"),
    "bwd-dBias-Bias": ("bwd", "qkvpacked", {"Bias": bias, "dBias": x[14:].view(1, 2, 5, 5)}, "dBias", "Bias"),
    "bwd-dQ-KV": ("bwd", "kvpacked", {"KV": big[:, :2], "dQ": big[:, 1]}, "dQ", "KV"),
    "bwd-dKV-dQ": ("bwd", "kvpacked", {"dKV": big[:, :2], "dQ": big[:, 1]}, "dKV", "dQ"),
}  # fmt: skip


@pytest.mark.parametrize(("direction", "packing", "changes", "argument", "other"), SHARED.values(), ids=SHARED)
def test_output_that_shares_memory(
    direction: str, packing: str, changes: dict[str, Any], argument: str, other: str
) -> None:
    before = {name: tensor.clone() for name, tensor in changes.items()}
    with pytest.raises(SpecError, match="expected memory of its own, got elements shared with") as raised:
        call(direction, packing, **changes)
    assert raised.value.argument == argument
    assert all(torch.equal(changes[name], tensor) for name, tensor in before.items())
    assert raised.value.got == f"elements shared with `{other}`"


def test_lengths_and_states_are_inputs_too() -> None:
    ints = torch.zeros(64, dtype=torch.int64)
    ints[:3] = CU
    out = ints.view(torch.float32)[:64].view(8, 2, 4)
    with pytest.raises(SpecError, match="shared with `cu_seqlens`"):
        call("fwd", "qkvpacked", cu_seqlens=ints[:3], O=out)
    assert ints[:3].tolist() == CU.tolist()


@pytest.mark.parametrize(
    "wrong", [{"dQKV": big[:, :2]}, {"dQKV": big[:, :3].double()}, {"dBias": torch.zeros(2, 2, 5, 5)}]
)
def test_gradient_of_wrong_shape_or_dtype(wrong: dict[str, Tensor]) -> None:
    with pytest.raises(SpecError, match=r"expected (shape|dtype) .*, got ") as raised:
        call("bwd", "qkvpacked", **wrong)
    assert raised.value.argument == next(iter(wrong))


def test_interleaved_views_of_one_buffer_are_fine() -> None:
    """O, Q and KV, and dQ and dKV, side by side in every token of one tensor."""
    buffer = torch.randn(8, 4, 2, 4)
    q, kv, out = buffer[:, 0], buffer[:, 1:3], buffer[:, 3]
    copies = {"Q": q.clone(), "KV": kv.clone()}
    want = call("fwd", "kvpacked", **copies)
    pack = NVTETensorPack()
    got = call("fwd", "kvpacked", Q=q, KV=kv, O=out, Aux_Output_Tensors=pack)
    assert got.O is out
    assert got.Aux_Output_Tensors is pack
    assert torch.equal(out, want.O)
    assert torch.equal(q, copies["Q"])
    gradients = torch.full((8, 3, 2, 4), 7.0)
    right = call("bwd", "kvpacked", **copies)
    left = call("bwd", "kvpacked", **copies, dQ=gradients[:, 1], dKV=gradients[:, ::2])
    assert torch.equal(gradients[:, 1], right.dQ)
    assert torch.equal(gradients[:, ::2], right.dKV)
    assert left.dQ.data_ptr() == gradients[:, 1].data_ptr()
