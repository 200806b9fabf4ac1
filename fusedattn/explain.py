"""``explain``: which engine would compute a call, and why."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from fusedattn import arguments
from fusedattn.attention import fused_attention
from fusedattn.calls import attention_request, layout_for
from fusedattn.errors import public_border
from fusedattn.runtime import lengths_of, plan_of

_SIGNATURE = inspect.signature(fused_attention)


class Explanation(NamedTuple):
    """The answer of ``explain``.

    Attributes:
        engine: Word of the engine that would compute, or None where every engine that may is refused.
        reason: Why, in one line.
        refused: Engines that do not take the problem, to the rules that failed.
    """

    engine: str | None
    reason: str
    refused: dict[str, tuple[str, ...]]


@public_border({})
def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Say which engine would compute a call of ``fused_attention``, without computing.

    Args:
        *args, **kwargs: What ``fused_attention`` takes.

    Returns:
        The engine, the reason, and what every other engine refuses.

    Raises:
        SpecError: An argument is wrong, as in ``fused_attention``.
        TypeError: An argument that ``fused_attention`` does not have.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 2, 1, 4)
        >>> explain(q, q, q).engine
        'torch'
        >>> explain(q, q, q, engine="cudnn").refused["cudnn"][1]
        'device: needs tensors on a CUDA device, got cpu'
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    values = bound.arguments
    layout = layout_for("", "qkv_layout", values.pop("qkv_layout"))
    arguments.flag("return_lse", values.pop("return_lse"))
    operands = {name: values.pop(name) for name in ("q", "k", "v")}
    request = attention_request(layout, operands, **values, dry=True)
    plan = plan_of(request)
    lengths_of(request, plan)
    return Explanation(None if plan.engine is None else plan.engine.word, plan.reason, plan.refused)
