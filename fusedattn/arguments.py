"""Checks of arguments one by one: their types, and the values of plain numbers. Shapes and dtypes are ``spec``'s."""

from __future__ import annotations

import numbers
from typing import TypeVar

import torch
from torch import Tensor

from fusedattn.errors import SpecError

_T = TypeVar("_T", bound=object)


def _type(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def tensor(name: str, value: object) -> Tensor:
    """A dense tensor.

    Args:
        name: The argument.
        value: What came.

    Returns:
        ``value``.

    Raises:
        SpecError: It is no tensor, or sparse or nested.

    Example:
        >>> tensor("q", [1.0])
        Traceback (most recent call last):
        fusedattn.errors.SpecError: argument 'q': expected a torch.Tensor, got list [1.0].
    """
    if not isinstance(value, Tensor):
        raise SpecError(name, "a torch.Tensor", _type(value))
    if value.layout is not torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise SpecError(name, "a dense (strided) tensor", got, "Convert it to a dense tensor.")
    return value


def optional_tensor(name: str, value: object) -> Tensor | None:
    """A dense tensor or None; raises like ``tensor``."""
    return None if value is None else tensor(name, value)


def flag(name: str, value: object) -> bool:
    """A bool.

    Args:
        name: The argument.
        value: What came.

    Returns:
        ``value``.

    Raises:
        SpecError: It is no bool.
    """
    if not isinstance(value, bool):
        raise SpecError(name, "True or False", _type(value))
    return value


def number(name: str, value: object) -> float:
    """A real number; NaN and infinities are legal.

    Args:
        name: The argument.
        value: What came.

    Returns:
        ``value``, as a float outside tracing.

    Raises:
        SpecError: It is a bool, a string, a tensor or no number.

    Example:
        >>> number("attn_scale", 1)
        1.0
    """
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpecError(name, "a real number", _type(value))
    try:
        return float(value)
    except OverflowError:
        raise SpecError(name, "a number within float64", "one beyond it") from None


def probability(name: str, value: object) -> float:
    """A dropout probability, 0 <= p < 1.

    Args:
        name: The argument.
        value: What came.

    Returns:
        ``value`` as a float.

    Raises:
        SpecError: It is no number, NaN, or outside [0, 1).

    Example:
        >>> probability("dropout", 1.0)
        Traceback (most recent call last):
        fusedattn.errors.SpecError: argument 'dropout': expected a probability p with 0 <= p < 1, got 1.0.
    """
    expected = "a probability p with 0 <= p < 1"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpecError(name, expected, _type(value))
    if not 0 <= value < 1:  # type: ignore[operator]
        raise SpecError(name, expected, f"{value!r:.60}")
    return float(value)


def max_seqlen(name: str, value: object) -> int | None:
    """A sequence length of at least 0, or None.

    Args:
        name: The argument.
        value: What came.

    Returns:
        ``value``.

    Raises:
        SpecError: It is no integer, or negative.

    Example:
        >>> max_seqlen("max_seqlen_q", 2.0)
        Traceback (most recent call last):
        fusedattn.errors.SpecError: argument 'max_seqlen_q': expected an integer of at least 0 or None, got float 2.0.
    """
    if value is None or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    expected = "an integer of at least 0 or None"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise SpecError(name, expected, _type(value))
    if not 0 <= int(value) < 2**31:
        raise SpecError(name, f"{expected}, below 2**31", f"{int(value):d}"[:60])
    return int(value)
