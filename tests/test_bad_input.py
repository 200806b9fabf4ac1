"""Bad input: each function names the argument as its own signature does, says what is right, and writes nothing."""

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import fusedattn
from fusedattn import EngineRefusal, FusedAttnError, NVTETensorPack, SpecError

NAN = math.nan
TYPE, SIZES, BEYOND = "a torch.Tensor", "in every axis but that of the rows", "entries of at most T = 8"
BIAS, BIAS_SIZES = "[1|B, 1|H, 1|Sq, Skv]", "= [1|2, 1|2, 1|5, 5]"
INTEGER, NUMBER, PROBABILITY = "an integer of at least 0 or None", "a real number", "0 <= p < 1"
PACKED_NAMES = {"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"}
NVTE_NAMES = {"bias": "Bias", "attn_bias_type": "bias_type", "q": "Q", "kv": "KV", "qkv": "QKV"}
# Test name: function, operands, inside names to names in the signature.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "dense": ("fused_attention", ("q", "k", "v"), {}),
    "thd": ("fused_attention", ("q", "k", "v"), {}),
    "qkvpacked": ("fused_attention_qkvpacked", ("qkv",), PACKED_NAMES),
    "kvpacked": ("fused_attention_kvpacked", ("q", "kv"), {}),
    "explain": ("explain", ("q", "k", "v"), {}),
    "nvte_fwd_qkvpacked": ("nvte_fused_attn_fwd_qkvpacked", ("qkv",), PACKED_NAMES | NVTE_NAMES),
    "nvte_bwd_qkvpacked": ("nvte_fused_attn_bwd_qkvpacked", ("qkv",), PACKED_NAMES | NVTE_NAMES),
    "nvte_fwd_kvpacked": ("nvte_fused_attn_fwd_kvpacked", ("q", "kv"), NVTE_NAMES),
    "nvte_bwd_kvpacked": ("nvte_fused_attn_bwd_kvpacked", ("q", "kv"), NVTE_NAMES),
}
RAGGED = tuple(name for name in FUNCTIONS if name != "dense")
BACKWARD = tuple(name for name in FUNCTIONS if "bwd" in name)
FORWARD = tuple(name for name in FUNCTIONS if "bwd" not in name)
SEVERAL = tuple(name for name in FUNCTIONS if "qkvpacked" not in name)


def own(name: str, role: str) -> str:
    """A role's name in the function's signature; "first" and "last" are operands."""
    _, operands, names = FUNCTIONS[name]
    role = {"first": operands[0], "last": operands[-1]}.get(role, role)
    return names.get(role, role)


def parameters(name: str) -> set[str]:
    function = getattr(fusedattn, "fused_attention" if name == "explain" else FUNCTIONS[name][0])
    return set(inspect.signature(function).parameters)


def good(name: str) -> dict[str, Any]:
    """A legal call of lengths 3 and 5, H = 2, D = 4; outputs are given in place, full of 7."""
    function, operands, _ = FUNCTIONS[name]
    shapes = {"qkv": (8, 3, 2, 4), "kv": (8, 2, 2, 4)}
    values: dict[str, Any] = {x: torch.randn(shapes.get(x, (8, 2, 4))) for x in operands}
    values |= {f"cu_seqlens_{x}": torch.tensor([0, 3, 8], dtype=torch.int32) for x in ("q", "kv")[: len(operands)]}
    values |= {f"max_seqlen_{x}": 5 for x in ("q", "kv")[: len(operands)]}
    if name == "dense":
        values |= {x: torch.randn(2, 5, 2, 4) for x in operands} | {"attn_mask_type": "padding"}
    if name in ("thd", "explain"):
        values["qkv_layout"] = "thd_thd_thd"
    if "nvte" in function:
        layout = "t3hd" if "qkv" in operands else "thd_t2hd"
        values |= {"attn_scale": 0.5, "dropout": 0.0, "qkv_layout": layout}
        values |= {"attn_mask_type": "no_mask", "attn_bias_type": "no_bias"}
    call = {own(name, role): value for role, value in values.items()}
    if "nvte" not in function:
        return call
    forward = {"Bias": None, "S": None, "Aux_Output_Tensors": None, "rng_state": None, "is_training": True}
    if name not in BACKWARD:
        return call | forward | {"O": torch.full((8, 2, 4), 7.0), "Aux_Output_Tensors": NVTETensorPack()}
    out, pack = getattr(fusedattn, function.replace("bwd", "fwd"))(**call, **forward, O=None)
    filled = {f"d{own(name, x)}": torch.full_like(values[x], 7.0) for x in operands}
    call |= {"O": out, "dO": torch.randn(8, 2, 4), "S": None, "dP": None, "Aux_CTX_Tensors": pack, "dBias": None}
    return call | filled


def refused(name: str, changes: dict[str, Any]) -> FusedAttnError:
    """The error of a changed call, after which nothing is written."""
    call = good(name)
    kept = [x for x in (*call.values(), *call.get("Aux_CTX_Tensors", ())) if torch.is_tensor(x)]
    before = [x.clone() for x in kept]
    for role, value in changes.items():
        argument = own(name, role)
        call[argument] = value(call.get(argument)) if callable(value) else value
    with pytest.raises(FusedAttnError) as raised:
        getattr(fusedattn, FUNCTIONS[name][0])(**call)
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))
    assert not isinstance(call.get("Aux_Output_Tensors"), NVTETensorPack) or not call["Aux_Output_Tensors"].names
    return raised.value


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_call_that_rows_change_is_legal(name: str) -> None:
    call = good(name)
    getattr(fusedattn, FUNCTIONS[name][0])(**call)
    assert set(call) <= parameters(name)


Row = tuple[str, str, Any, str, str, str]
ROWS: list[Row] = [  # id, role, new value or function of the old one, parts of expected, got and hint
    ("list", "first", lambda x: x.tolist(), TYPE, "list [[", ""),
    ("None", "first", None, TYPE, "None", ""),
    ("string", "first", "qkv", TYPE, "str 'qkv'", ""),
    ("numpy", "last", lambda x: np.zeros(x.shape), TYPE, "ndarray ", ""),
    ("sparse", "last", lambda x: x.to_sparse(), "a dense (strided) tensor", "layout torch.sparse_coo", "dense"),
    ("nested", "first", lambda x: torch.nested.as_nested_tensor([x[0], x[1]]), "dense", "", ""),
    ("rank", "first", lambda x: x[0], "H, D] in layout ", " of rank ", ""),
    ("int", "first", lambda x: x.int(), "a floating dtype", "int32", "Convert it to float16, bfloat16, float32 or"),
    ("bool", "first", lambda x: x.bool(), "a floating dtype", "bool", "Convert it to"),
    ("complex", "first", lambda x: x + 0j, "a floating dtype", "complex64", "Convert it to"),
    ("D-0", "first", lambda x: x[..., :0], "a head dimension D of at least 1", "0]", ""),
    ("list", "cu_seqlens_q", [0, 3, 8], TYPE, "list [0, 3, 8]", ""),
    ("float", "cu_seqlens_q", lambda x: x.float(), "dtype int32", "float32", "Convert it with .to(torch.int32)"),
    ("rank-0", "cu_seqlens_q", torch.tensor(8), "shape [B + 1]", "shape []", ""),
    ("rank-2", "cu_seqlens_q", lambda x: x[None], "shape [B + 1]", "shape [1, 3]", ""),
    ("empty", "cu_seqlens_q", lambda x: x[:0], "shape [B + 1]", "shape [0]", ""),
    ("meta", "cu_seqlens_q", lambda x: x.to("meta"), "the device of ", "meta", "Move it with .to('cpu')"),
    ("start", "cu_seqlens_q", lambda x: x + 1, "0 as its first entry", "1", ""),
    ("decreasing", "cu_seqlens_q", torch.tensor([0, 3, 2]), "never decrease", "3 before 2 at index 2", ""),
    ("negative-later", "cu_seqlens_q", torch.tensor([0, -1, 8]), "never decrease", "0 before -1 at index 1", ""),
    ("float", "max_seqlen_q", 5.0, INTEGER, "float 5.0", ""),
    ("bool", "max_seqlen_q", True, INTEGER, "bool True", ""),
    ("tensor", "max_seqlen_q", torch.tensor(5), INTEGER, "Tensor tensor(5)", ""),
    ("negative", "max_seqlen_q", -1, INTEGER, "-1", ""),
    ("below", "max_seqlen_q", 4, "at least the longest sequence, 5", "4", "larger number or None"),
    ("beyond-int64", "max_seqlen_q", 2**63, "", str(2**63), ""),
    ("string", "attn_scale", "0.5", NUMBER, "str '0.5'", ""),
    ("bool", "attn_scale", True, NUMBER, "bool True", ""),
    ("tensor", "attn_scale", torch.tensor(0.5), NUMBER, "Tensor tensor(0.5", ""),
    ("beyond-float", "attn_scale", 10**400, "", "", ""),
    ("one", "dropout", 1.0, PROBABILITY, "1.0", ""),
    ("negative", "dropout", -0.1, PROBABILITY, "-0.1", ""),
    ("nan", "dropout", NAN, PROBABILITY, "nan", ""),
    ("string", "dropout", "0.1", PROBABILITY, "str '0.1'", ""),
    ("bool", "dropout", False, PROBABILITY, "bool False", ""),
    ("None", "dropout", None, PROBABILITY, "None", ""),
    ("beyond-float", "dropout", 10**400, PROBABILITY, "", ""),
    ("list", "rng_state", [1, 2], TYPE, "list [1, 2]", ""),
    ("dtype", "rng_state", torch.tensor([1, 2], dtype=torch.int32), "dtype int64", "int32", ""),
    ("size", "rng_state", torch.tensor([1, 2, 3]), "shape [2]: seed and offset", "shape [3]", ""),
    ("meta", "rng_state", torch.ones(2, dtype=torch.int64, device="meta"), "the device of ", "meta", "Move it"),
    ("int", "is_training", 1, "True or False", "int 1", ""),
    ("string", "deterministic", "yes", "True or False", "str 'yes'", ""),
    ("int", "return_lse", 1, "True or False", "int 1", ""),
    ("list", "bias", [1.0], TYPE, "list [1.0]", ""),
    ("missing", "bias", None, "a tensor, since the bias type is post_scale_bias", "None", f"Pass {BIAS}, or name the"),
    ("unwanted", "bias", torch.zeros(1, 1, 5, 5), "None, since the bias type is no_bias", "shape [", "leave the bias"),
    ("rank", "bias", torch.zeros(5, 5), f"shape {BIAS}", "shape [5, 5]", ""),
    ("B", "bias", torch.zeros(3, 1, 5, 5), BIAS_SIZES, "shape [3, 1, 5, 5]", ""),
    ("H", "bias", torch.zeros(1, 3, 5, 5), BIAS_SIZES, "shape [1, 3, 5, 5]", ""),
    ("Sq", "bias", torch.zeros(1, 1, 4, 5), BIAS_SIZES, "shape [1, 1, 4, 5]", ""),
    ("Skv", "bias", torch.zeros(1, 1, 5, 1), BIAS_SIZES, "shape [1, 1, 5, 1]", ""),
    ("int", "bias", torch.zeros(1, 1, 5, 5).int(), "a floating dtype", "int32", ""),
    ("meta", "bias", torch.zeros(1, 1, 5, 5, device="meta"), "the device of ", "meta", "Move it with .to('cpu')"),
    ("unwanted", "dBias", torch.zeros(1, 1, 5, 5), "None, since there is no bias", "shape [1, 1, 5, 5]", ""),
    ("typo", "qkv_layout", "t3h", "'t3hd', 'thd_t2hd'", "'t3h'", "Did you mean 't3hd'?"),
    ("int", "qkv_layout", 10, "a member of NVTE_QKV_Layout or one of", "the number 10", "numbers changed meaning"),
    ("None", "qkv_layout", None, "a member of NVTE_QKV_Layout or one of", "None of type NoneType", ""),
    ("typo", "attn_bias_type", "post_scal", "'pre_scale_bias'", "'post_scal'", "Did you mean 'post_scale_bias'?"),
    ("int", "attn_bias_type", 0, "a member of NVTE_Bias_Type or one of", "the number 0", "numbers changed meaning"),
    ("typo", "attn_mask_type", "casual", "'no_mask', 'padding', 'causal'", "'casual'", "Did you mean 'causal'?"),
    ("int", "attn_mask_type", 1, "a member of NVTE_Mask_Type or one of", "the number 1", "numbers changed meaning"),
    (
        "bool",
        "attn_mask_type",
        True,
        "a member of NVTE_Mask_Type or one of",
        "the number True",
        "numbers changed meaning",
    ),
    ("typo", "engine", "cudn", "'auto', 'cudnn', 'cuda', 'torch'", "'cudn'", "Did you mean 'cudnn'?"),
    ("None", "engine", None, "Engine or one of", "None of type NoneType", ""),
    ("list", "S", [1.0], TYPE, "list [1.0]", ""),
    ("list", "dP", [1.0], TYPE, "list [1.0]", ""),
    ("None", "dO", None, TYPE, "None", ""),
    ("shape", "dO", lambda x: x[:7], "shape [8, 2, 4]", "shape [7, 2, 4]", ""),
    ("dtype", "dO", lambda x: x.double(), "dtype float32", "float64", ""),
    ("shape", "O", lambda x: x[..., :3], "shape [8, 2, 4]", "shape [8, 2, 3]", ""),
    ("dtype", "O", lambda x: x.half(), "dtype float32", "float16", ""),
    ("meta", "O", lambda x: x.to("meta"), "a tensor on cpu", "one on meta", "Move it with .to('cpu')"),
    ("string", "O", "out", TYPE, "str 'out'", ""),
    ("type", "Aux_Output_Tensors", {"softmax_lse": 1}, "an NVTETensorPack", "dict", ""),
    ("type", "Aux_CTX_Tensors", None, "an NVTETensorPack", "NoneType", ""),
]
TENSOR_ROWS = {  # what is wrong of one role only in some functions
    RAGGED: [
        ("None", "cu_seqlens_q", None, "a tensor, which layout ", "None", "int32 [B + 1], starting at 0"),
        ("beyond", "cu_seqlens_q", torch.tensor([0, 3, 9]), BEYOND, "9", "where the last sequence ends"),
        ("beyond-int32", "cu_seqlens_q", torch.tensor([0, 3, 2**32]), BEYOND, str(2**32), ""),
    ],
    ("kvpacked", "nvte_fwd_kvpacked", "nvte_bwd_kvpacked"): [
        ("packing", "last", lambda x: x.repeat(1, 2, 1, 1), "[T, 2, H, D]", "axis 1 of size 4", "Stack K and V along"),
    ],
    ("qkvpacked", "nvte_fwd_qkvpacked", "nvte_bwd_qkvpacked"): [
        ("packing", "first", lambda x: x[:, :2], "[T, 3, H, D]", "axis 1 of size 2", "Stack Q, K and V along axis 1"),
    ],
    SEVERAL: [
        ("dtype", "last", lambda x: x.half(), "the dtype of ", "float16", "Convert one of them"),
        ("float8", "last", lambda x: x.to(torch.float8_e4m3fn), "the dtype of ", "float8_e4m3fn", "Convert one"),
        ("meta", "last", lambda x: x.to("meta"), "the device of ", "meta", "Move it with .to('cpu')"),
        ("D", "last", lambda x: x[..., :3], SIZES, "3]", "must be equal"),
        ("H", "last", lambda x: x[..., :1, :], SIZES, "1, 4]", "must be equal"),
    ],
    SEVERAL[1:]: [
        ("length", "cu_seqlens_kv", lambda x: torch.tensor([0, 8]), "length B + 1 = 3", "length 2", ""),
        ("beyond", "cu_seqlens_kv", torch.tensor([0, 3, 20]), BEYOND, "20", "where the last sequence ends"),
        ("below", "max_seqlen_kv", 4, "at least the longest sequence, 5", "4", "larger number or None"),
    ],
    ("dense", "thd"): [("rows", "v", lambda x: x[:, :1], "", "shape [", "")],
    ("dense",): [
        ("length", "cu_seqlens_q", torch.tensor([0, 3, 5, 8]), "length B + 1 = 3", "length 4", "need a thd layout"),
        ("longer", "cu_seqlens_q", torch.tensor([0, 6, 8]), "at most s = 5 in a dense", "length 6 of sequence 0", ""),
    ],
}  # fmt: skip
CASES = [(name, *row) for row in ROWS for name in FUNCTIONS if own(name, row[1]) in parameters(name)]
CASES += [(name, *row) for names, rows in TENSOR_ROWS.items() for row in rows for name in names]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "kind", "role", "value", "expected", "got", "hint"),
    [pytest.param(*case, id=f"{case[0]}-{case[2]}-{case[1]}") for case in CASES],
)
def test_bad_argument(name: str, kind: str, role: str, value: Any, expected: str, got: str, hint: str) -> None:
    typed = {"attn_bias_type": "no_bias" if kind == "unwanted" else "post_scale_bias"} if role == "bias" else {}
    error = refused(name, {role: value} | typed)
    assert isinstance(error, SpecError)
    assert isinstance(error, ValueError)
    assert (error.function, error.argument) == (FUNCTIONS[name][0], own(name, role))
    for part, whole in ((expected, error.expected), (got, error.got), (hint, error.hint)):
        assert part in whole
    head = f"{error.function}: argument '{error.argument}': expected {error.expected}, got {error.got}."
    assert str(error) == f"{head} {error.hint}".rstrip()


LAYOUT_ROWS = [
    ("dense", "qkv_interleaved", "fused_attention_qkvpacked"),
    ("dense", "thd_t2hd", "fused_attention_kvpacked"),
    ("qkvpacked", "thd_t2hd", "fused_attention_kvpacked"),
    ("qkvpacked", "bshd_bshd_bshd", "fused_attention"),
    ("kvpacked", "t3hd", "fused_attention_qkvpacked"),
    ("kvpacked", "NVTE_NOT_INTERLEAVED", "fused_attention"),
    ("explain", "t3hd", "fused_attention_qkvpacked"),
    ("nvte_fwd_qkvpacked", "kv_interleaved", "nvte_fused_attn_fwd_kvpacked"),
    ("nvte_bwd_qkvpacked", "kv_interleaved", "nvte_fused_attn_bwd_kvpacked"),
    ("nvte_fwd_kvpacked", "qkv_interleaved", "nvte_fused_attn_fwd_qkvpacked"),
    ("nvte_bwd_kvpacked", "qkv_interleaved", "nvte_fused_attn_bwd_qkvpacked"),
    ("nvte_fwd_qkvpacked", "thd_thd_thd", "fused_attention"),
    ("nvte_bwd_kvpacked", "sbhd_sbhd_sbhd", "fused_attention"),
]


@pytest.mark.parametrize(("name", "layout", "right"), LAYOUT_ROWS)
def test_layout_of_another_function_names_that_function(name: str, layout: str, right: str) -> None:
    error = refused(name, {"qkv_layout": layout})
    assert isinstance(error, SpecError)
    assert (error.argument, error.hint) == ("qkv_layout", f"Call {right} for it.")
    accepted = {"dense": "'bhsd_bhsd_bhsd'", "explain": "'thd_thd_thd'"}.get(name, "'t3hd'")
    assert (accepted if "qkv" in name or name in ("dense", "explain") else "'thd_t2hd'") in error.expected


CUDNN = (
    "device: needs tensors on a CUDA device, got cpu",
    "dtype: Q, K and V must be float16 or bfloat16, got float32",
    "head dimension: D must be a multiple of 8, got D = 4",
)
CUDA = (
    "release: this release has no CUDA kernel for fused attention, got engine 'cuda'",
    "device: needs tensors on a CUDA device, got cpu",
)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "explain"])
def test_engine_that_cannot_tells_each_failed_rule_and_who_can(name: str) -> None:
    error = refused(name, {"engine": "cudnn"})
    assert isinstance(error, EngineRefusal)
    assert isinstance(error, NotImplementedError)
    assert (error.engine, error.refused, error.able) == ("cudnn", {"cudnn": CUDNN}, ("torch",))
    lines = ["engine='cudnn' cannot compute this problem:", *(f"  cudnn: {reason}" for reason in CUDNN)]
    assert str(error).splitlines() == [*lines, "Engines that can: torch. Pass engine='auto' to let fusedattn choose."]
    error = refused(name, {"engine": "CUDA"})
    assert isinstance(error, EngineRefusal)
    assert error.refused == {"cuda": CUDA}


@pytest.mark.parametrize("engine", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "explain"])
def test_float8_is_not_offered_yet(name: str, dtype: torch.dtype, engine: str) -> None:
    bias = {"bias": torch.zeros(1, 1, 5, 5).to(dtype), "attn_bias_type": "pre_scale_bias"}
    operands: dict[str, Any] = dict.fromkeys(FUNCTIONS[name][1], lambda x: x.to(dtype))
    for changes in (operands, bias) if name in FORWARD else (operands,):
        error = refused(name, changes | {"engine": engine})
        assert isinstance(error, EngineRefusal)
        assert error.able == ()
        assert "FP8: FP8 is not offered yet, got " in error.refused["torch"][0]
        assert set(error.refused) == ({"torch"} if engine == "torch" else {"cudnn", "cuda", "torch"})
        assert str(error).endswith("No engine of this installation can.")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_text_speaks_of_an_argument_that_the_function_lacks(name: str) -> None:
    foreign = {"q", "k", "kv", "qkv", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_kv"} - parameters(name)
    rows: list[dict[str, Any]] = [{"cu_seqlens_q": lambda x: x.to("meta")}]
    rows += [{"last": lambda x: x.half()}] if name in SEVERAL else []
    rows += [{"bias": torch.zeros(1, 1, 4, 5), "attn_bias_type": "pre_scale_bias"}] if name in FORWARD else []
    for changes in rows:
        assert not foreign & set(re.findall(r"\w+", str(refused(name, changes))))
