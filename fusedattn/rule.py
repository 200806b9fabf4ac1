"""``Rule``: one row of what an engine takes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from fusedattn.spec import AttentionSpec


class RuleKind(Enum):
    """Why a row refuses: the library behind the engine does, or we do not trust or offer it.

    Example:
        >>> RuleKind.guarded_by_us.value
        'guarded by us'
    """

    refused_by_library = "refused by the library"
    guarded_by_us = "guarded by us"


class Rule(NamedTuple):
    """One row: what must hold for the engine to take a problem.

    Attributes:
        name: What the row looks at.
        holds: Whether a problem passes.
        reason: What is required, as a sentence without subject; ``got`` is appended to it in a refusal.
        got: The problem's own value.
        kind: Who refuses.
    """

    name: str
    holds: Callable[[AttentionSpec], bool]
    reason: str
    got: Callable[[AttentionSpec], str]
    kind: RuleKind


CUDA_DEVICE = Rule(
    "device",
    lambda spec: spec.target is not None,
    "needs tensors on a CUDA device",
    lambda spec: str(spec.device),
    RuleKind.refused_by_library,
)
