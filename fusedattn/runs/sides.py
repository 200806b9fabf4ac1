"""The two sides of a bench: our call, and torch's own attention on views of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusedattn.runs.inputs import Inputs
from fusedattn.runs.operands import from_layout
from fusedattn.runs.public_calls import attend

_HEADS_FIRST = (0, 2, 1, 3)  # [B, S, H, D] to [B, H, S, D], and back


@dataclass(frozen=True)
class Side:
    """One side of a bench.

    Attributes:
        name: "ours", or the rival's word.
        leaves: What gradients are taken of: the operands, or the rival's padded batch of them.
        dout: Gradient of what `forward` returns.
        forward: From the leaves to out.
        out_tokens: From out to `[T, H, D]`, the rows that a sequence owns.
        leaf_tokens: The same for the gradient of a leaf, whose number is given.
    """

    name: str
    leaves: tuple[Tensor, ...]
    dout: Tensor
    forward: Callable[[tuple[Tensor, ...]], Tensor]
    out_tokens: Callable[[Tensor], Tensor]
    leaf_tokens: Callable[[Tensor, int], Tensor]

    def run_forward(self) -> Tensor:
        """out, without a graph for a backward."""
        with torch.no_grad():
            return self.forward(self.leaves)

    def run_forward_backward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """out and the gradient of each leaf."""
        leaves = tuple(x.detach().requires_grad_() for x in self.leaves)
        out = self.forward(leaves)
        return out, torch.autograd.grad(out, leaves, self.dout)

    def results(self, backward: bool) -> dict[str, Tensor]:
        """Results in a form that is the same for both sides: "out" and, of a backward, "d0", "d1", ..."""
        if not backward:
            return {"out": self.out_tokens(self.run_forward())}
        out, gradients = self.run_forward_backward()
        found = {f"d{i}": self.leaf_tokens(g, i) for i, g in enumerate(gradients)}
        return {"out": self.out_tokens(out.detach()), **found}


def owned_rows(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Rows of a padded batch that a sequence owns: bool `[B, Sq]` for queries and `[B, Skv]` for keys."""
    q, kv = inputs.operands.lengths_q, inputs.operands.lengths_kv
    sizes = (inputs.operands.max_q, inputs.operands.max_kv)
    of_q, of_kv = (torch.arange(s) < torch.tensor(n)[:, None] for s, n in zip(sizes, (q, kv), strict=True))
    return of_q, of_kv


def ours(inputs: Inputs) -> Side:
    """Our call on a case's operands."""
    case = inputs.case
    rows = owned_rows(inputs)

    def tokens(x: Tensor, i: int) -> Tensor:
        owned = rows[i > 0]
        return x[: int(owned.sum())] if inputs.operands.ragged else from_layout(x, case.layout)[owned]

    return Side(
        name="ours",
        leaves=case.operands,
        dout=inputs.dout,
        forward=lambda leaves: attend(case, leaves, case.bias)[0],
        out_tokens=lambda x: tokens(x, 0),
        leaf_tokens=tokens,
    )


def rival(inputs: Inputs, word: str, dtype: torch.dtype | None = None) -> Side:
    """torch's scaled_dot_product_attention on a case's operands.

    Args:
        inputs: The case; without bias and dropout.
        word: "sdpa": views of the operands, equal lengths. "sdpa_padded_mask": a padded batch of them with
            its boolean mask; to pad them is no part of `forward`.
        dtype: Cast to, for a result to judge by; None keeps that of the operands.

    Returns:
        The rival's side; its out is `[B, Sq, H, D]`.

    Raises:
        ValueError: "sdpa" and unequal lengths.
    """
    case = inputs.case
    for lengths in (inputs.operands.lengths_q, inputs.operands.lengths_kv):
        if word == "sdpa" and len(set(lengths)) > 1:
            raise ValueError(f"rival sdpa: expected equal lengths, got {lengths}; use sdpa_padded_mask")
    rows = owned_rows(inputs)
    padded = word == "sdpa_padded_mask"
    causal = case.mask_type == "causal"
    mask: Tensor | None = rows[1][:, None, None, :] if padded else None
    if mask is not None and causal:
        mask = mask & torch.ones(rows[0].shape[1], rows[1].shape[1], dtype=torch.bool).tril()

    def batch(leaf: Tensor, i: int) -> Tensor:
        if not inputs.operands.ragged:
            return from_layout(leaf, case.layout)
        return leaf if padded else leaf.view(*rows[i > 0].shape, *leaf.shape[1:])

    def leaf(operand: Tensor, i: int) -> Tensor:
        x = operand if dtype is None else operand.to(dtype)
        if not (padded and inputs.operands.ragged):
            return x
        owned = rows[i > 0]
        full = x.new_zeros(*owned.shape, *x.shape[1:])
        full[owned] = x[: int(owned.sum())]
        return full

    def forward(leaves: tuple[Tensor, ...]) -> Tensor:
        parts: list[Tensor] = []
        for i, x in enumerate(leaves):
            one = batch(x, i)
            parts += one.unbind(2) if one.dim() == 5 else [one]
        q, k, v = (x.permute(_HEADS_FIRST) for x in parts)
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal and not padded, scale=case.attn_scale)
        return out.permute(_HEADS_FIRST)

    return Side(
        name=word,
        leaves=tuple(leaf(x, i) for i, x in enumerate(case.operands)),
        dout=batch(leaf(inputs.dout, 0), 0) * rows[0][:, :, None, None],
        forward=forward,
        out_tokens=lambda x: x[rows[0]],
        leaf_tokens=lambda x, i: batch(x, i)[rows[i > 0]],
    )
