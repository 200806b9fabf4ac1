"""The enums of the fused attention API; each parses its members' names in any usual spelling.

Values are TransformerEngine 2.x's where it has the member. A bare integer is refused as an argument: in
TransformerEngine 0.9 the mask value 0 meant PADDING, and today it means NO_MASK.
"""

from __future__ import annotations

import difflib
import numbers
from enum import Enum
from typing import TypeVar, cast

from fusedattn.errors import SpecError

_Member = TypeVar("_Member", bound="_Named")


class _Named(Enum):
    """An enum whose members are found by name: ``parse`` reads one, ``word`` is its canonical short name."""

    # Members are unique; Enum's own hash is a Python function, and plans are looked up by members.
    __hash__ = object.__hash__

    @property
    def word(self) -> str:
        """The member's canonical short name, in lower case."""
        name = self.name.removeprefix("NVTE_").lower()
        return name if name == "no_mask" else name.removesuffix("_mask")

    @classmethod
    def parse(cls: type[_Member], value: object, argument: str) -> _Member:
        """Read a member, its name, or a short name in any case.

        Args:
            value: A member of this enum or a string.
            argument: The argument's name, for the error.

        Returns:
            The member.

        Raises:
            SpecError: An integer, another type, or a word that names no member.

        Example:
            >>> NVTE_QKV_Layout.parse("nvte_qkv_interleaved", "qkv_layout").word
            't3hd'
        """
        if isinstance(value, cls):
            return value
        member = _SPELLINGS[cls].get(_key(value)) if isinstance(value, str) else None
        if member is None:
            raise _refusal(cls, value, argument)
        return cast(_Member, member)


# Every spelling in lower case, aliases included, to its member; built once, since compiled programs look words up too.
_SPELLINGS: dict[type[_Named], dict[str, _Named]] = {}


def _register(cls: type[_Member]) -> type[_Member]:
    found = _SPELLINGS.setdefault(cls, {})
    for name, member in cls.__members__.items():
        full = name.lower()
        short = full.removeprefix("nvte_")
        stem = short.removesuffix("_mask").removesuffix("_bias")
        for spelling in (full, short, "none" if stem == "no" else stem):
            found[spelling] = member
    return cls


def _key(word: str) -> str:
    return word.strip().lower().replace("-", "_").replace(" ", "_")


def _refusal(cls: type[_Named], value: object, argument: str) -> SpecError:
    words = ", ".join(f"'{member.word}'" for member in cls)
    expected = f"a member of {cls.__name__} or one of {words}"
    if isinstance(value, numbers.Number):
        hint = "Pass the name: the numbers changed meaning between releases of TransformerEngine."
        return SpecError(argument, expected, f"the number {value!r}", hint)
    if not isinstance(value, str):
        return SpecError(argument, expected, f"{value!r} of type {type(value).__name__}")
    spellings = _SPELLINGS[cls]
    near = difflib.get_close_matches(_key(value), spellings, n=1, cutoff=0.5)
    return SpecError(argument, expected, repr(value), f"Did you mean '{spellings[near[0]].word}'?" if near else "")


@_register
class NVTE_QKV_Layout(_Named):
    """How Q, K and V lie in memory: tensors separated by ``_``, outermost axis first, ``t`` for ragged tokens.

    Example:
        >>> NVTE_QKV_Layout.NVTE_QKV_INTERLEAVED is NVTE_QKV_Layout.NVTE_T3HD
        True
    """

    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_THD_T2HD = 12
    NVTE_THD_THD_THD = 14
    NVTE_BHSD_BHSD_BHSD = 25
    NVTE_QKV_INTERLEAVED = 10
    NVTE_KV_INTERLEAVED = 12
    NVTE_NOT_INTERLEAVED = 14


@_register
class NVTE_Bias_Type(_Named):
    """Where the bias is added: nowhere, ``softmax(scale * (P + bias))``, or ``softmax(scale * P + bias)``.

    Example:
        >>> NVTE_Bias_Type.parse("post_scale", "bias_type").word
        'post_scale_bias'
    """

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2


@_register
class NVTE_Mask_Type(_Named):
    """Which keys of its own sequence a query sees: all, those within the lengths, or those not after it (top-left).

    Example:
        >>> NVTE_Mask_Type.NVTE_PADDING_MASK.word
        'padding'
    """

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2


@_register
class Engine(str, _Named):
    """Who computes: ``auto`` chooses; an engine named by the caller never falls back.

    Example:
        >>> [engine.word for engine in Engine], Engine.torch == "torch"
        (['auto', 'cudnn', 'cuda', 'torch'], True)
    """

    auto = "auto"
    cudnn = "cudnn"
    cuda = "cuda"
    torch = "torch"


@_register
class Direction(str, _Named):
    """Forward or backward.

    Example:
        >>> Direction.parse("Forward", "direction") is Direction.forward
        True
    """

    forward = "forward"
    backward = "backward"
