"""What each engine can compute, as tables of rows.

The same rows choose the engine, write the refusal, skip the test and print the README's capability table.
"""

from __future__ import annotations

import importlib.util

import torch

from fusedattn.enums import Engine
from fusedattn.rule import CUDA_DEVICE, Rule, RuleKind
from fusedattn.rules_cudnn import CUDNN_ROWS, package_fault
from fusedattn.spec import AttentionSpec, dtype_word

_NOT_HERE = "this release has no CUDA kernel for fused attention"


def _dtypes(spec: AttentionSpec) -> list[torch.dtype]:
    return [spec.dtype] + ([] if spec.bias is None else [spec.bias.dtype])


def _dtype_words(spec: AttentionSpec) -> str:
    return ", ".join(dict.fromkeys(map(dtype_word, _dtypes(spec))))


def _no_float8(spec: AttentionSpec) -> bool:
    return not any(dtype.itemsize == 1 for dtype in _dtypes(spec))


_FP8 = Rule("FP8", _no_float8, "FP8 is not offered yet", _dtype_words, RuleKind.guarded_by_us)

RULES: dict[Engine, tuple[Rule, ...]] = {
    Engine.cudnn: (_FP8, *CUDNN_ROWS),
    Engine.cuda: (
        Rule("release", lambda spec: False, _NOT_HERE, lambda spec: "engine 'cuda'", RuleKind.guarded_by_us),
        _FP8,
        CUDA_DEVICE,
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
        >>> refusals(Engine.cudnn, spec)[1]
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
    no_gpu = [] if torch.cuda.is_available() else ["torch finds no CUDA device"]
    fault = package_fault()
    missing = importlib.util.find_spec("cuda") is None
    reasons = {
        Engine.torch: [],
        Engine.cudnn: ([] if fault is None else [fault]) + no_gpu,
        Engine.cuda: [_NOT_HERE, *(["the package 'cuda.core' is not installed"] if missing else []), *no_gpu],
    }
    return {engine: "; ".join(texts) or None for engine, texts in reasons.items()}
