"""The words of a run file, and the base of its models, which says each error in one line."""

from __future__ import annotations

import difflib
import enum
import re
import reprlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import InitErrorDetails, PydanticCustomError

from fusedattn.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import SpecError
from fusedattn.target import TARGETS

_LayoutWord = Literal["t3hd", "thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"]
_BiasWord = Literal["none", "pre_scale", "post_scale"]
_MaskWord = Literal["no_mask", "padding", "causal"]

PACKED = ("t3hd", "thd_t2hd")
RAGGED = (*PACKED, "thd_thd_thd")

FormattedError = "run_file"
"""The pydantic error type of a message that needs no further wording."""


def _other_spellings(
    parse: type[NVTE_QKV_Layout] | type[NVTE_Bias_Type] | type[NVTE_Mask_Type], words: Any
) -> BeforeValidator:
    """What the functions take (an enum's name, any case) is taken too, and becomes the file's own word."""
    by_member: dict[enum.Enum, str] = {parse.parse(word, "word"): word for word in get_args(words)}

    def to_word(value: object) -> object:
        if not isinstance(value, str) or value in by_member.values():
            return value
        try:
            return by_member[parse.parse(value, "word")]
        except SpecError:
            return value  # the Literal words the error

    return BeforeValidator(to_word)


LayoutWord = Annotated[_LayoutWord, _other_spellings(NVTE_QKV_Layout, _LayoutWord)]
BiasWord = Annotated[_BiasWord, _other_spellings(NVTE_Bias_Type, _BiasWord)]
MaskWord = Annotated[_MaskWord, _other_spellings(NVTE_Mask_Type, _MaskWord)]
BiasShapeWord = Literal["bhss", "1hss", "b1ss", "11ss", "bh1s", "1h1s", "b11s", "111s"]
DtypeWord = Literal["float16", "bfloat16", "float32", "float64"]
EngineWord = Literal["auto", "cudnn", "cuda", "torch"]
OpWord = Literal["fused_attention", "nvte"]
Count = Annotated[int, Field(strict=True, ge=1)]
Length = Annotated[int, Field(strict=True, ge=0)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Flag = Annotated[bool, Field(strict=True)]
Rate = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def file_error(message: str) -> PydanticCustomError:
    """An error of a run file, worded as it will be printed."""
    return PydanticCustomError(FormattedError, "{message}", {"message": message})


def nearest(word: object, known: Iterable[str]) -> str:
    """The known word that resembles `word`, as a hint; an empty string where none does.

    >>> nearest("lenghts", ["layout", "lengths"])
    "; did you mean 'lengths'?"
    """
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _known_target(word: str) -> str:
    if word not in TARGETS:
        raise file_error(f"expected one of {', '.join(TARGETS)}, got {word!r}{nearest(word, TARGETS)}")
    return word


TargetWord = Annotated[str, AfterValidator(_known_target), Field(json_schema_extra={"enum": list(TARGETS)})]


class Strict(BaseModel):
    """A mapping of a run file: frozen, no unknown keys, each error worded with the nearest known word."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _word_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        try:
            return handler(data)
        except ValidationError as err:
            lines = [
                InitErrorDetails(type=_worded(e, cls.model_fields), loc=e["loc"], input=e["input"])
                for e in err.errors(include_url=False)
            ]
            raise ValidationError.from_exception_data(err.title, lines) from None


def _worded(error: Any, known_keys: Iterable[str]) -> PydanticCustomError:
    kind, got = error["type"], error["input"]
    if kind == FormattedError:
        return file_error(error["msg"])
    if kind == "extra_forbidden":
        known = list(known_keys)
        return file_error(f"unknown key{nearest(error['loc'][-1], known) or '; known are ' + ', '.join(known)}")
    if kind == "missing":
        return file_error("missing")
    if kind in ("model_type", "model_attributes_type"):
        return file_error(f"expected a mapping of {', '.join(known_keys)}, got {reprlib.repr(got)}")
    message = error["msg"].replace("Input should be", "expected").replace("List should", "expected to")
    hint = nearest(got, re.findall(r"'([^']*)'", message)) if kind == "literal_error" else ""
    return file_error(f"{message}, got {reprlib.repr(got)}{hint}")
