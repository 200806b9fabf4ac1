"""Words of the API: every usual spelling is read, and what is none is refused with the nearest one."""

import enum

import numpy as np
import pytest

from fusedattn import Direction, Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout, SpecError
from fusedattn.enums import _Named

ENUMS: list[type[_Named]] = [NVTE_QKV_Layout, NVTE_Bias_Type, NVTE_Mask_Type, Engine, Direction]

SPELLINGS = {
    NVTE_QKV_Layout.NVTE_T3HD: "NVTE_QKV_INTERLEAVED qkv_interleaved NVTE_T3HD t3hd T3HD Qkv-Interleaved",
    NVTE_QKV_Layout.NVTE_THD_T2HD: "NVTE_KV_INTERLEAVED kv_interleaved NVTE_THD_T2HD thd_t2hd THD_T2HD thd-t2hd",
    NVTE_QKV_Layout.NVTE_THD_THD_THD: "NVTE_NOT_INTERLEAVED not_interleaved NVTE_THD_THD_THD thd_thd_thd",
    NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD: "NVTE_BSHD_BSHD_BSHD nvte_bshd_bshd_bshd bshd_bshd_bshd BSHD_BSHD_BSHD",
    NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD: "NVTE_SBHD_SBHD_SBHD sbhd_sbhd_sbhd",
    NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD: "NVTE_BHSD_BHSD_BHSD bhsd_bhsd_bhsd",
    NVTE_Bias_Type.NVTE_NO_BIAS: "NVTE_NO_BIAS no_bias NO_BIAS none no-bias",
    NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS: "NVTE_PRE_SCALE_BIAS pre_scale_bias pre_scale Pre-Scale-Bias",
    NVTE_Bias_Type.NVTE_POST_SCALE_BIAS: "NVTE_POST_SCALE_BIAS post_scale_bias post_scale POST_SCALE",
    NVTE_Mask_Type.NVTE_NO_MASK: "NVTE_NO_MASK no_mask none No_Mask",
    NVTE_Mask_Type.NVTE_PADDING_MASK: "NVTE_PADDING_MASK padding_mask padding PADDING",
    NVTE_Mask_Type.NVTE_CAUSAL_MASK: "NVTE_CAUSAL_MASK causal_mask causal Causal",
    Engine.auto: "auto AUTO",
    Engine.cudnn: "cudnn cuDNN",
    Engine.cuda: "cuda CUDA",
    Engine.torch: "torch Torch",
    Direction.forward: "forward FORWARD",
    Direction.backward: "backward Backward",
}


@pytest.mark.parametrize(("member", "word"), [(m, w) for m, words in SPELLINGS.items() for w in words.split()], ids=str)
def test_spelling(member: _Named, word: str) -> None:
    for spelled in (word, f" {word} ", word.replace("_", " ")):
        assert type(member).parse(spelled, "x") is member


def test_each_member_is_read_and_its_word_comes_back() -> None:
    assert set(SPELLINGS) == {member for kind in ENUMS for member in kind}
    for member in SPELLINGS:
        assert type(member).parse(member, "x") is member
        assert type(member).parse(member.word, "x") is member
    words = {kind.__name__: [member.word for member in kind] for kind in ENUMS}
    assert words == {
        "NVTE_QKV_Layout": [
            "sbhd_sbhd_sbhd", "bshd_bshd_bshd", "t3hd", "thd_t2hd", "thd_thd_thd", "bhsd_bhsd_bhsd",
        ],
        "NVTE_Bias_Type": ["no_bias", "pre_scale_bias", "post_scale_bias"],
        "NVTE_Mask_Type": ["no_mask", "padding", "causal"],
        "Engine": ["auto", "cudnn", "cuda", "torch"],
        "Direction": ["forward", "backward"],
    }  # fmt: skip


def test_names_of_the_first_release_are_aliases() -> None:
    assert NVTE_QKV_Layout.NVTE_QKV_INTERLEAVED is NVTE_QKV_Layout.NVTE_T3HD
    assert NVTE_QKV_Layout.NVTE_KV_INTERLEAVED is NVTE_QKV_Layout.NVTE_THD_T2HD
    assert NVTE_QKV_Layout.NVTE_NOT_INTERLEAVED is NVTE_QKV_Layout.NVTE_THD_THD_THD


@pytest.mark.parametrize(
    ("kind", "word", "near"),
    [
        (NVTE_QKV_Layout, "t3h", "t3hd"),
        (NVTE_QKV_Layout, "qkv_interleave", "t3hd"),
        (NVTE_QKV_Layout, "bshd_bshd", "bshd_bshd_bshd"),
        (NVTE_Bias_Type, "prescale_bias", "pre_scale_bias"),
        (NVTE_Bias_Type, "NVTE_POST_SCALE", "post_scale_bias"),
        (NVTE_Mask_Type, "padded", "padding"),
        (NVTE_Mask_Type, "casual", "causal"),
        (NVTE_Mask_Type, "nomask", "no_mask"),
        (Engine, "pytorch", "torch"),
        (Engine, "cudann", "cudnn"),
        (Direction, "backwards", "backward"),
    ],
)
def test_unknown_word_lists_the_valid_ones_and_suggests_the_nearest(kind: type[_Named], word: str, near: str) -> None:
    with pytest.raises(SpecError) as raised:
        kind.parse(word, "x")
    error = raised.value
    assert (error.argument, error.got, error.hint) == ("x", repr(word), f"Did you mean '{near}'?")
    assert kind.__name__ in error.expected
    assert ", ".join(repr(member.word) for member in kind) in error.expected


@pytest.mark.parametrize("word", ["", "   ", "xyzzy", "0", "softmax"])
@pytest.mark.parametrize("kind", ENUMS)
def test_word_far_from_all_is_refused_without_a_suggestion(kind: type[_Named], word: str) -> None:
    with pytest.raises(SpecError) as raised:
        kind.parse(word, "x")
    assert (raised.value.got, raised.value.hint) == (repr(word), "")


class Other(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("value", [0, 1, 10, -1, 2.0, True, Other.ONE, np.int64(1), np.float32(1)], ids=repr)
@pytest.mark.parametrize("kind", ENUMS)
def test_number_is_refused_with_the_reason(kind: type[_Named], value: object) -> None:
    with pytest.raises(SpecError, match=r"got the number .* numbers changed meaning between releases") as raised:
        kind.parse(value, "x")
    assert repr(value) in raised.value.got


@pytest.mark.parametrize("value", [None, ["causal"], b"causal", object, NVTE_Bias_Type.NVTE_NO_BIAS], ids=str)
def test_other_type_is_refused_with_its_name(value: object) -> None:
    with pytest.raises(SpecError) as raised:
        NVTE_Mask_Type.parse(value, "x")
    assert raised.value.got == f"{value!r} of type {type(value).__name__}"
    assert "'causal'" in raised.value.expected


def test_member_of_another_enum_is_no_member() -> None:
    for kind, value in ((NVTE_QKV_Layout, NVTE_Mask_Type.NVTE_NO_MASK), (NVTE_Mask_Type, Engine.auto)):
        with pytest.raises(SpecError):
            kind.parse(value, "x")
