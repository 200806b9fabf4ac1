"""Named random distributions, hostile ones included; the same numbers for the same seed on any machine."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.runs.config import Distribution, Geometry, RandomInputs, VerifyProblem
from fusedattn.runs.fields import RAGGED
from fusedattn.runs.operands import Operands, to_layout, unowned_rows

_TAIL_ROWS = 3
_LARGE = 16.0  # scores of some hundreds, while the products of head_dim 128 still fit float16


def draw(shape: tuple[int, ...], generator: torch.Generator, distribution: Distribution = "normal") -> Tensor:
    """Numbers of [-1, 1) under uniform, else of N(0, 1).

    Args:
        shape: Any shape.
        generator: Advanced by what is drawn.
        distribution: A named distribution.

    Returns:
        float64, so that every dtype rounds the same numbers.
    """
    if distribution == "uniform":
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_operands(problem: Geometry, inputs: RandomInputs, generator: torch.Generator) -> Operands:
    """Draws q, k, v of a problem.

    Args:
        problem: Gives layout, dtype, heads, head_dim and lengths.
        inputs: Gives the distribution. nan_in_padding fills every row that no sequence owns with NaN, and
            appends such rows to the ragged layouts.
        generator: Advanced by what is drawn.

    Returns:
        The operands. In the dense layouts every sequence is as long as its axis, but under the padding mask.
    """
    layout, dtype = str(problem.layout), getattr(torch, problem.dtype or "float32")
    ragged = layout in RAGGED
    lengths_q = list(problem.lengths or problem.lengths_q or [])
    lengths_kv = list(problem.lengths or problem.lengths_kv or [])
    max_q = problem.max_seqlen_q or max(lengths_q)
    max_kv = problem.max_seqlen_kv or max(lengths_kv)
    if not ragged and problem.mask != "padding":
        lengths_q, lengths_kv = [max_q] * len(lengths_q), [max_kv] * len(lengths_kv)

    def rows(lengths: list[int], longest: int, scale: float) -> Tensor:
        tail = _TAIL_ROWS if inputs.random == "nan_in_padding" else 0
        tokens = (sum(lengths) + tail,) if ragged else (len(lengths), longest)
        x = scale * draw((*tokens, problem.heads or 1, problem.head_dim or 1), generator, inputs.random)
        if inputs.random == "nan_in_padding":
            x[unowned_rows(lengths, tuple(x.shape), ragged)] = torch.nan
        return to_layout(x.to(dtype), layout)

    large = _LARGE if inputs.random == "large_logits" else 1.0
    q, k, v = rows(lengths_q, max_q, large), rows(lengths_kv, max_kv, large), rows(lengths_kv, max_kv, 1.0)
    tensors: tuple[Tensor, ...] = (q, k, v)
    if layout == "t3hd":
        tensors = (torch.stack((q, k, v), dim=1),)
    elif layout == "thd_t2hd":
        tensors = (q, torch.stack((k, v), dim=1))
    return Operands(layout, tensors, lengths_q, lengths_kv, max_q, max_kv)


def random_bias(
    problem: VerifyProblem, operands: Operands, heads: int, distribution: Distribution, generator: torch.Generator
) -> Tensor:
    """Draws a bias.

    Args:
        problem: Gives bias_shape and bias_dtype.
        operands: Give the number of sequences, Sq and Skv.
        heads: H.
        distribution: all_masked_rows: every third row, and one number in eight, is -inf.
        generator: Advanced by what is drawn.

    Returns:
        `[1|B, 1|H, 1|Sq, Skv]` of bias_dtype, or of the operands' dtype.
    """
    full = (len(operands.lengths_q), heads, operands.max_q, operands.max_kv)
    axes = problem.bias_shape or "1hss"
    shape = tuple(1 if axis == "1" else size for axis, size in zip(axes, full, strict=True))
    bias = draw(shape, generator, distribution)
    if distribution == "all_masked_rows":
        bias[torch.rand(shape, generator=generator) < 1 / 8] = -torch.inf
        bias.flatten(0, 2)[::3] = -torch.inf
    return bias.to(getattr(torch, problem.bias_dtype) if problem.bias_dtype else operands.dtype)
