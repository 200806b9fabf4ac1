"""``explain``: which engine would compute a call, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedattn import arguments
from fusedattn.attention import fused_attention
from fusedattn.calls import attention_request, layout_for
from fusedattn.enums import Direction, Engine, NVTE_Mask_Type
from fusedattn.errors import public_border
from fusedattn.plan import Plan
from fusedattn.runtime import lengths_of, plan_of

_SIGNATURE = inspect.signature(fused_attention)


class Explanation(NamedTuple):
    """The answer of ``explain``.

    Attributes:
        engine: Word of the engine that would compute, or None where every engine that may is refused.
        reason: Why, in one line.
        refused: Engines that do not take the problem, to the rules that failed.
        notes: What results of this engine hold that those of another need not, one sentence each.
        backward: The same of the backward, which is asked for the gradient of the bias if that requires one; None in
            what is said of a backward.
    """

    engine: str | None
    reason: str
    refused: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]
    backward: Explanation | None


@public_border({})
def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Say which engine would compute a call of ``fused_attention``, without computing.

    Args:
        *args, **kwargs: What ``fused_attention`` takes.

    Returns:
        The engine, the reason, what every other engine refuses, and the same of the backward.

    Raises:
        SpecError: An argument is wrong, as in ``fused_attention``.
        TypeError: An argument that ``fused_attention`` does not have.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 2, 1, 4)
        >>> found = explain(q, q, q)
        >>> found.engine, found.backward.engine
        ('torch', 'torch')
        >>> explain(q, q, q, engine="cudnn").refused["cudnn"][0]
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
    bias_gradient = request.bias is not None and request.bias.requires_grad
    backward = _explanation(plan_of(request, Direction.backward, bias_gradient), None)
    return _explanation(plan, backward)


def _explanation(plan: Plan, backward: Explanation | None) -> Explanation:
    engine = None if plan.engine is None else plan.engine.word
    return Explanation(engine, plan.reason, plan.refused, tuple(_notes(plan)), backward)


def _notes(plan: Plan) -> Iterator[str]:
    spec = plan.spec
    masks = spec.format.ragged or spec.mask_type is not NVTE_Mask_Type.NVTE_NO_MASK or spec.bias is not None
    if plan.engine is Engine.cudnn and masks:
        yield (
            "K or V that are not finite past the end of a sequence, such as those of the next one in a thd layout, or "
            "at a key that mask or bias rule out, make rows NaN that read them in a tile of up to 128 keys, since "
            "cuDNN multiplies them by 0; in backward so do Q and dO under a causal mask."
        )
    if plan.engine is not None and spec.dropout:
        yield f"The dropout pattern is that of the {plan.engine.word} engine; others drop other probabilities."
