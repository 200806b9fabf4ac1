"""Environment variables ``FUSEDATTN_*``, read at first use and validated.

``FUSEDATTN_VALIDATE`` (0 or 1, default 0): also check cu_seqlens that live on a GPU, at the price of a read-back.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from fusedattn.errors import SpecError


class Settings(NamedTuple):
    """The values in force.

    Example:
        >>> Settings(validate_values=True).validate_values
        True
    """

    validate_values: bool


@functools.cache
def settings() -> Settings:
    """Read the environment, once until ``clear_caches``.

    Returns:
        The values in force.

    Raises:
        SpecError: A variable holds a word that it does not know.

    Example:
        >>> settings().validate_values
        False
    """
    value = os.environ.get("FUSEDATTN_VALIDATE", "0")
    if value not in ("0", "1"):
        raise SpecError("FUSEDATTN_VALIDATE", "0 or 1", repr(value), "Set or unset the environment variable.")
    return Settings(validate_values=value == "1")
