"""What each engine can compute, as tables of rows.

The same rows choose the engine, write the refusal, skip the test and print the README's capability table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch

from fusedattn.enums import Engine
from fusedattn.spec import AttentionSpec, dtype_word


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


_NOT_HERE = "this release computes fused attention with the torch engine only"


def _dtypes(spec: AttentionSpec) -> list[torch.dtype]:
    return [spec.dtype] + ([] if spec.bias is None else [spec.bias.dtype])


def _dtype_words(spec: AttentionSpec) -> str:
    return ", ".join(dict.fromkeys(map(dtype_word, _dtypes(spec))))


def _no_float8(spec: AttentionSpec) -> bool:
    return not any(dtype.itemsize == 1 for dtype in _dtypes(spec))


_FP8 = Rule("FP8", _no_float8, "FP8 is not offered yet", _dtype_words, RuleKind.guarded_by_us)
_CUDA_DEVICE = Rule(
    "device",
    lambda spec: spec.device.type == "cuda",
    "needs tensors on a CUDA device",
    lambda spec: str(spec.device),
    RuleKind.refused_by_library,
)

RULES: dict[Engine, tuple[Rule, ...]] = {
    Engine.cudnn: (
        Rule("release", lambda spec: False, _NOT_HERE, lambda spec: "engine 'cudnn'", RuleKind.guarded_by_us),
        _FP8,
        _CUDA_DEVICE,
        Rule(
            "dtype",
            lambda spec: spec.dtype in (torch.float16, torch.bfloat16),
            "Q, K and V must be float16 or bfloat16",
            lambda spec: dtype_word(spec.dtype),
            RuleKind.refused_by_library,
        ),
    ),
    Engine.cuda: (
        Rule("release", lambda spec: False, _NOT_HERE, lambda spec: "engine 'cuda'", RuleKind.guarded_by_us),
        _FP8,
        _CUDA_DEVICE,
    ),
    Engine.torch: (
        _FP8,
        Rule(
            "capture",
            lambda spec: not (spec.dropout and spec.capturing),
            "dropout reads rng_state on the host, which a CUDA graph capture does not allow",
            lambda spec: "a capture in progress",
            RuleKind.guarded_by_us,
        ),
    ),
}


def refusals(engine: Engine, spec: AttentionSpec) -> tuple[str, ...]:
    """The reasons for which an engine does not take a problem.

    Args:
        engine: Any member but ``auto``.
        spec: The problem.

    Returns:
        One text for each rule that fails; empty where the engine can.

    Raises:
        KeyError: ``auto``.

    Example:
        >>> from fusedattn.enums import NVTE_QKV_Layout
        >>> from fusedattn.spec import TensorSpec
        >>> q = TensorSpec.of(torch.empty(1, 2, 3, 4))
        >>> spec = AttentionSpec.of(layout=NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD, operands=(q, q, q))
        >>> refusals(Engine.torch, spec)
        ()
        >>> refusals(Engine.cudnn, spec)[2]
        'dtype: Q, K and V must be float16 or bfloat16, got float32'
    """
    failed = (rule for rule in RULES[engine] if not rule.holds(spec))
    return tuple(f"{rule.name}: {rule.reason}, got {rule.got(spec)}" for rule in failed)


def availability() -> dict[Engine, str | None]:
    """Which engines this release and this machine have.

    Returns:
        For each engine but ``auto``: None where it works here, else why it does not.

    Raises:
        Nothing.

    Example:
        >>> availability()[Engine.torch] is None
        True
    """
    found: dict[Engine, str | None] = {Engine.torch: None}
    for engine, module in ((Engine.cudnn, "cudnn"), (Engine.cuda, "cuda.core")):
        reasons = [_NOT_HERE]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            reasons.append(f"the package '{module}' is not installed")
        if not torch.cuda.is_available():
            reasons.append("torch finds no CUDA device")
        found[engine] = "; ".join(reasons)
    return found
