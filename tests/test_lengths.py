"""Lengths: where sequences lie, what is read of them where, and what a bias takes from max_seqlen."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import NVTE_Bias_Type, NVTE_QKV_Layout, SpecError, clear_caches
from fusedattn.lengths import Lengths, read_lengths
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected, run_case
from fusedattn.spec import AttentionSpec, TensorSpec

DENSE = ["bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"]
CU_Q, CU_KV = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 2, 6, 6], dtype=torch.int32)


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSEDATTN_VALIDATE", "1")
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


def ragged(device: str, bias: tuple[int, ...] | None = None) -> AttentionSpec:
    """8 rows of queries, 6 of keys, three sequences, as if on a device."""

    def on(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TensorSpec:
        made = TensorSpec.of(torch.empty(shape, dtype=dtype))
        return made._replace(device=torch.device(device))

    bias_type = NVTE_Bias_Type.NVTE_NO_BIAS if bias is None else NVTE_Bias_Type.NVTE_POST_SCALE_BIAS
    return AttentionSpec.of(
        layout=NVTE_QKV_Layout.NVTE_THD_T2HD,
        operands=(on((8, 1, 4)), on((6, 2, 1, 4))),
        bias=None if bias is None else on(bias),
        bias_type=bias_type,
        cu_seqlens_q=on((4,), torch.int32),
        cu_seqlens_kv=on((4,), torch.int32),
    )


def read(spec: AttentionSpec, max_q: int | None = None, max_kv: int | None = None, cu_q: Tensor = CU_Q) -> Lengths:
    return read_lengths(spec, cu_q, CU_KV, max_q, max_kv, on_gpu=spec.device.type != "cpu")


def test_on_cpu_values_are_read() -> None:
    lengths = read(ragged("cpu"))
    assert lengths.batch == 3
    assert (lengths.q.offsets, lengths.kv.offsets) == ((0, 3, 3, 8), (0, 2, 6, 6))
    assert (lengths.q.max_seqlen, lengths.kv.max_seqlen, lengths.q.rows, lengths.kv.rows) == (5, 4, 8, 6)
    given = read(ragged("cpu"), 7, 9)
    assert (given.q.max_seqlen, given.kv.max_seqlen) == (7, 9)


@pytest.mark.parametrize("cu_seqlens", [CU_Q.long(), CU_Q.repeat_interleave(2)[::2]], ids=["int64", "strided"])
def test_cu_seqlens_become_int32(cu_seqlens: Tensor) -> None:
    lengths = read(ragged("cpu"), cu_q=cu_seqlens)
    assert lengths.q.cu_seqlens is not None
    assert lengths.q.cu_seqlens.dtype == torch.int32
    assert torch.equal(lengths.q.cu_seqlens, CU_Q)


def test_on_another_device_values_are_not_read() -> None:
    bad = torch.tensor([5, 3, 3, 80], dtype=torch.int32)
    lengths = read(ragged("cuda"), 6, 4, cu_q=bad)
    assert lengths.q.offsets is None
    assert (lengths.q.max_seqlen, lengths.kv.max_seqlen) == (6, 4)


def test_where_tensors_count_as_on_a_gpu_their_device_does_not_matter() -> None:
    """What is taken for a GPU's, as `runtime.pretend` does with tensors on CPU, is not read either."""
    bad = torch.tensor([5, 3, 3, 80], dtype=torch.int32)
    lengths = read_lengths(ragged("cpu"), bad, CU_KV, 6, 4, on_gpu=True)
    assert (lengths.q.offsets, lengths.kv.offsets) == (None, None)
    with pytest.raises(SpecError, match="0 as its first entry, got 5"):
        read_lengths(ragged("cpu"), bad, CU_KV, 6, 4, on_gpu=False)


@pytest.mark.parametrize(
    ("bias", "max_q", "missing"),
    [(None, None, "max_seqlen_q"), (None, 5, "max_seqlen_kv"), ((1, 1, 1, 4), None, "max_seqlen_q")],
)
def test_on_another_device_a_missing_max_seqlen_is_asked_for(
    bias: tuple[int, ...] | None, max_q: int | None, missing: str
) -> None:
    with pytest.raises(SpecError, match=r"is on cuda and is not read, got None\. Pass the longest") as raised:
        read(ragged("cuda", bias), max_q)
    assert raised.value.argument == missing


def test_on_another_device_a_bias_stands_in_for_max_seqlen() -> None:
    lengths = read(ragged("cuda", (3, 1, 6, 9)))
    assert (lengths.q.max_seqlen, lengths.kv.max_seqlen) == (6, 9)
    with pytest.raises(SpecError, match="argument 'bias': expected shape"):
        read(ragged("cuda", (3, 1, 6, 9)), 6, 8)


@pytest.mark.usefixtures("validate")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 3, 3, 8], "0 as its first entry, got 1"),
        ([0, 3, 2, 8], "never decrease, got 3 before 2 at index 2"),
        ([0, 3, 3, 9], "at most T = 8, the rows of the tensor, got 9"),
        ([0, 8, 8, 8], "at least the longest sequence, 8, got 6"),
    ],
)
def test_validate_checks_values_on_other_devices(values: list[int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(ragged("cuda"), 6, 4, cu_q=torch.tensor(values))


@pytest.mark.usefixtures("validate")
def test_validate_changes_no_legal_call() -> None:
    """Values are read for checks alone: what max_seqlen is does not depend on the environment."""
    lengths = read(ragged("cuda", (3, 1, 6, 9)))
    assert (lengths.q.max_seqlen, lengths.kv.max_seqlen) == (6, 9)


@pytest.mark.usefixtures("validate")
def test_validate_reads_nothing_during_a_capture() -> None:
    spec, backwards = ragged("cuda"), torch.tensor([0, 8, 3, 1])
    with pytest.raises(SpecError, match="never decrease"):
        read(spec, 6, 4, cu_q=backwards)
    assert read(spec.model_copy(update={"capturing": True}), 6, 4, cu_q=backwards).q.max_seqlen == 6


# Through the public functions


def problem(layout: str, s_q: int = 5, s_kv: int = 7, **changes: Any) -> Case:
    order = {"sbhd_sbhd_sbhd": (1, 0, 2, 3), "bhsd_bhsd_bhsd": (0, 2, 1, 3)}.get(layout, (0, 1, 2, 3))
    operands = tuple(torch.randn(2, s, 3, 8).permute(order) for s in (s_q, s_kv, s_kv))
    return Case(operands, layout, **changes)


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


DENSE_ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("no-lengths", {"mask_type": "padding"}, "cu_seqlens_q", "a tensor, which a padding mask needs in a dense layout"),
    ("kv-missing", {"cu_seqlens_q": cumulative(5, 5)}, "cu_seqlens_kv", "since Sq = 5 differs from Skv = 7, got None"),
    ("short", {"cu_seqlens_q": cumulative(5, 3), "cu_seqlens_kv": cumulative(7, 7)}, "cu_seqlens_q", "no_mask in a"),
    ("causal-short", {"mask_type": "causal", "cu_seqlens_kv": cumulative(6, 7)}, "cu_seqlens_kv", "type causal in a"),
    ("long", {"mask_type": "padding", "cu_seqlens_kv": cumulative(8, 7)}, "cu_seqlens_kv", "at most s = 7 in a dense"),
    ("max-q", {"max_seqlen_q": 4}, "max_seqlen_q", "at least the longest sequence, 5, got 4"),
    ("max-kv", {"mask_type": "padding", "cu_seqlens_kv": cumulative(1, 6), "max_seqlen_kv": 5}, "max_seqlen_kv", "6"),
]


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize(
    ("changes", "argument", "message"), [row[1:] for row in DENSE_ERRORS], ids=[row[0] for row in DENSE_ERRORS]
)
def test_lengths_that_a_dense_layout_refuses(layout: str, changes: dict[str, Any], argument: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        run_case(problem(layout, **changes))
    assert raised.value.argument == argument


@pytest.mark.parametrize("layout", DENSE)
def test_lengths_act_under_padding_alone(layout: str) -> None:
    full = {"cu_seqlens_q": cumulative(5, 5), "cu_seqlens_kv": cumulative(7, 7)}
    torch.manual_seed(0)
    want = run_case(problem(layout))
    for changes in (full, full | {"mask_type": "padding"}, {"max_seqlen_q": 50, "max_seqlen_kv": 70}):
        torch.manual_seed(0)
        got = run_case(problem(layout, **changes))
        assert all(torch.equal(got[x], want[x]) for x in want)


PADDED = [
    {"cu_seqlens_q": cumulative(5, 2), "cu_seqlens_kv": cumulative(0, 7)},
    {"cu_seqlens_kv": cumulative(3, 7), "max_seqlen_kv": 7},
    {"s_q": 7, "cu_seqlens_q": cumulative(3, 7)},
]


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("changes", PADDED, ids=["both", "kv-alone", "q-serves-kv"])
def test_padded_lengths_against_the_reference(layout: str, changes: dict[str, Any]) -> None:
    case = problem(layout, mask_type="padding", **changes)
    dout = torch.randn(case.operands[0].shape)
    sides = [side(case, dout) for side in (run_case, expected, eager)]
    assert_within_budget(*sides, torch.float32)


@pytest.mark.parametrize("slack", [0, 4])
@pytest.mark.parametrize("layout", ["t3hd", "thd_t2hd", "thd_thd_thd"])
def test_bias_axes_are_max_seqlen_which_may_exceed_the_longest(layout: str, slack: int) -> None:
    shapes = {"t3hd": [(9, 3, 3, 8)], "thd_t2hd": [(9, 3, 8), (7, 2, 3, 8)]}.get(layout, [(9, 3, 8), *[(7, 3, 8)] * 2])
    one = layout == "t3hd"
    sizes = {"max_seqlen_q": 5 + slack, "max_seqlen_kv": (5 if one else 4) + slack}
    lengths = {"cu_seqlens_q": CU_Q} | ({} if one else {"cu_seqlens_kv": CU_KV})
    bias = torch.randn(3, 1, sizes["max_seqlen_q"], sizes["max_seqlen_kv"])
    common: dict[str, Any] = {"bias": bias, "bias_type": "post_scale_bias", "mask_type": "causal"} | lengths
    case = Case(tuple(torch.randn(shape) for shape in shapes), layout, **common, **sizes)
    dout = torch.randn(9, 3, 8)
    got = run_case(case, dout)
    assert_within_budget(got, expected(case, dout), eager(case, dout), torch.float32)
    assert got["dbias"][..., 5:, :].eq(0).all()
    assert got["lse"][8:].eq(-torch.inf).all()
    if slack:
        with pytest.raises(SpecError, match=r"argument 'bias': .* by default the longest sequences"):
            run_case(Case(case.operands, layout, **common))
