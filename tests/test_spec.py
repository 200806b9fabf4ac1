"""The spec: what it derives from shapes, that it is frozen, and what is no part of it."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fusedattn import Direction, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout, SpecError, clear_caches
from fusedattn.layouts import LAYOUTS, unpack
from fusedattn.runs.oracle import Case, run_case
from fusedattn.runtime import _PLANS
from fusedattn.spec import AttentionSpec, TensorSpec, check_bias_shape, dtype_word
from fusedattn.target import TARGETS

# B = 2, H = 3, D = 11; Sq = 5 and Skv = 7, or 13 and 17 tokens.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "t3hd": [(13, 3, 3, 11)],
    "thd_t2hd": [(13, 3, 11), (17, 2, 3, 11)],
    "thd_thd_thd": [(13, 3, 11), (17, 3, 11), (17, 3, 11)],
    "bshd_bshd_bshd": [(2, 5, 3, 11), (2, 7, 3, 11), (2, 7, 3, 11)],
    "sbhd_sbhd_sbhd": [(5, 2, 3, 11), (7, 2, 3, 11), (7, 2, 3, 11)],
    "bhsd_bhsd_bhsd": [(2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 11)],
}
CU_SEQLENS = TensorSpec.of(torch.zeros(3, dtype=torch.int32))


def fields(layout: str, **changes: Any) -> dict[str, Any]:
    ragged = layout[0] == "t"
    made: dict[str, Any] = {
        "layout": NVTE_QKV_Layout.parse(layout, "layout"),
        "operands": tuple(TensorSpec.of(torch.empty(shape)) for shape in SHAPES[layout]),
        "cu_seqlens_q": CU_SEQLENS if ragged else None,
    }
    return made | changes


@pytest.mark.parametrize("layout", SHAPES)
def test_sizes(layout: str) -> None:
    spec = AttentionSpec.of(**fields(layout))
    rows_kv = 13 if layout == "t3hd" else 17 if layout[0] == "t" else 7
    assert (spec.batch, spec.heads, spec.head_dim) == (2, 3, 11)
    assert (spec.rows_q, spec.rows_kv) == (13 if layout[0] == "t" else 5, rows_kv)
    assert (spec.dtype, spec.device) == (torch.float32, torch.device("cpu"))
    assert spec.format is LAYOUTS[spec.layout]
    assert spec.format.ragged is (layout[0] == "t")


@pytest.mark.parametrize("layout", SHAPES)
def test_spec_is_frozen_hashable_and_closed(layout: str) -> None:
    spec = AttentionSpec.of(**fields(layout))
    assert spec == AttentionSpec.of(**fields(layout))
    assert hash(spec) == hash(AttentionSpec.of(**fields(layout)))
    assert spec != AttentionSpec.of(**fields(layout, deterministic=True))
    with pytest.raises(ValidationError, match="frozen"):
        spec.dropout = True  # type: ignore[misc]
    with pytest.raises(ValidationError, match="attn_scale"):
        AttentionSpec.of(**fields(layout), attn_scale=1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"direction": Direction.backward},
        {"bias_gradient": True},
        {"negative_scale": True},
        {"capturing": True},
        {"dropout": True},
        {"target": TARGETS["h100"]},
        {"target": TARGETS["b200"]},
    ],
    ids=str,
)
def test_what_engines_choose_by_is_part_of_it(change: dict[str, Any]) -> None:
    plain, changed = AttentionSpec.of(**fields("t3hd")), AttentionSpec.of(**fields("t3hd", **change))
    (name,) = change
    assert getattr(changed, name) == change[name] != getattr(plain, name)
    assert changed != plain
    assert (plain.direction, plain.target) == (Direction.forward, None)


@pytest.mark.parametrize("layout", SHAPES)
def test_strides_and_dtypes_are_part_of_it(layout: str) -> None:
    shapes = SHAPES[layout]
    plain = AttentionSpec.of(**fields(layout))
    strided = tuple(TensorSpec.of(torch.empty(*shape, 2)[..., 0]) for shape in shapes)
    half = tuple(TensorSpec.of(torch.empty(shape, dtype=torch.half)) for shape in shapes)
    assert len({plain, *(AttentionSpec.of(**fields(layout, operands=x)) for x in (strided, half))}) == 3


@pytest.mark.parametrize("layout", SHAPES)
def test_unpack_gives_views_in_one_order_of_axes(layout: str) -> None:
    tensors = tuple(torch.randn(shape) for shape in SHAPES[layout])
    q, k, v = unpack(LAYOUTS[NVTE_QKV_Layout.parse(layout, "layout")], tensors)
    rows = (13, 13 if layout == "t3hd" else 17) if layout[0] == "t" else (5, 7)
    for part, count in ((q, rows[0]), (k, rows[1]), (v, rows[1])):
        assert tuple(part.shape) == ((count, 3, 11) if layout[0] == "t" else (2, 3, count, 11))
    storages = {x.untyped_storage().data_ptr() for x in tensors}
    assert {x.untyped_storage().data_ptr() for x in (q, k, v)} == storages
    if layout == "t3hd":
        assert all(torch.equal(part, tensors[0][:, i]) for i, part in enumerate((q, k, v)))
    if layout == "thd_t2hd":
        assert all(torch.equal(part, tensors[1][:, i]) for i, part in enumerate((k, v)))


@pytest.mark.parametrize(
    ("layout", "changes", "argument", "message"),
    [
        ("t3hd", {"cu_seqlens_q": None}, "cu_seqlens_q", "a tensor, which layout t3hd needs, got None"),
        ("thd_thd_thd", {"cu_seqlens_kv": TensorSpec.of(torch.zeros(4).int())}, "cu_seqlens_kv", "B \\+ 1 = 3"),
        ("bshd_bshd_bshd", {"cu_seqlens_q": TensorSpec.of(torch.zeros(4).int())}, "cu_seqlens_q", "need a thd layout"),
        ("t3hd", {"cu_seqlens_q": TensorSpec.of(torch.zeros(3))}, "cu_seqlens_q", "dtype int32, got float32"),
        ("t3hd", {"rng_state": TensorSpec.of(torch.zeros(2))}, "rng_state", "dtype int64, got float32"),
        ("t3hd", {"bias": CU_SEQLENS}, "bias", "None, since the bias type is no_bias"),
    ],
)
def test_broken_law(layout: str, changes: dict[str, Any], argument: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        AttentionSpec.of(**fields(layout, **changes))
    assert raised.value.argument == argument


def test_separate_k_and_v_have_one_shape() -> None:
    q, k, v = (TensorSpec.of(torch.empty(shape)) for shape in ((13, 3, 11), (17, 3, 11), (16, 3, 11)))
    with pytest.raises(
        SpecError, match=r"argument 'v': expected the shape of `k`, \[17, 3, 11\], got shape \[16, 3, 11\]"
    ):
        AttentionSpec.of(**fields("thd_thd_thd", operands=(q, k, v)))


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 3])
@pytest.mark.parametrize("sq", [1, 5])
@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "thd_t2hd"])
def test_bias_may_broadcast_all_axes_but_the_last(layout: str, b: int, h: int, sq: int) -> None:
    def spec(*shape: int) -> AttentionSpec:
        bias = TensorSpec.of(torch.empty(shape))
        return AttentionSpec.of(**fields(layout, bias=bias, bias_type=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS))

    check_bias_shape(spec(b, h, sq, 7), 5, 7)
    for wrong in ((b, h, sq, 1), (b + 2, h, sq, 7), (b, h + 1, sq, 7), (b, h, sq + 1, 7)):
        with pytest.raises(SpecError, match=r"shape \[1\|B, 1\|H, 1\|Sq, Skv\] = \[1\|2, 1\|3, 1\|5, 7\]"):
            check_bias_shape(spec(*wrong), 5, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=dtype_word)
def test_bias_of_any_float_dtype_fits(dtype: torch.dtype) -> None:
    bias = TensorSpec.of(torch.empty(1, 1, 5, 7, dtype=dtype))
    spec = AttentionSpec.of(**fields("bhsd_bhsd_bhsd", bias=bias, bias_type=NVTE_Bias_Type.NVTE_POST_SCALE_BIAS))
    assert spec.bias == bias


def test_enums_default_to_none() -> None:
    spec = AttentionSpec.of(**fields("t3hd"))
    assert spec.bias_type is NVTE_Bias_Type.NVTE_NO_BIAS
    assert spec.mask_type is NVTE_Mask_Type.NVTE_NO_MASK


@pytest.mark.parametrize("layout", SHAPES)
def test_numbers_are_no_part_of_the_plan(layout: str) -> None:
    """One plan for every scale of a sign, length and probability; a NaN scale is legal and gives NaN."""
    operands = tuple(torch.randn(shape) for shape in SHAPES[layout])
    lengths = {"cu_seqlens_q": torch.tensor([0, 5, 13]), "cu_seqlens_kv": torch.tensor([0, 7, 17])}
    if layout == "t3hd":
        lengths.pop("cu_seqlens_kv")
    case = {"operands": operands, "layout": layout} | (lengths if layout[0] == "t" else {})
    clear_caches()
    scaled = {scale: run_case(Case(**case, attn_scale=scale)) for scale in (0.5, 0.0, 3e4, float("nan"))}
    assert len(_PLANS) == 1
    assert len({value["out"].sum().item() for value in scaled.values()}) == 4
    assert all(value["out"].isfinite().all() for scale, value in scaled.items() if scale == scale)
    nan = list(scaled.values())[-1]
    assert nan["out"].isnan().all()
    assert nan["lse"].isnan().all()
    if layout[0] == "t":
        run_case(Case(**case | {"cu_seqlens_q": torch.tensor([0, 4, 13])}))
        assert len(_PLANS) == 1
    assert run_case(Case(**case, attn_scale=-1.0))["out"].isfinite().all()
    run_case(Case(**case, attn_scale=-0.5))
    assert sorted(plan.spec.negative_scale for plan in _PLANS.values()) == [False, True]
