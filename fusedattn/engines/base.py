"""What the runtime hands to an engine, and what an engine must offer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from fusedattn.lengths import Lengths
from fusedattn.spec import AttentionSpec


class Problem(NamedTuple):
    """One checked call: views of the operands, the lengths and the numbers.

    Attributes:
        spec: Layout, types, shapes.
        lengths: Where sequences lie.
        q, k, v: Logical views, ``[B, H, S, D]`` dense or ``[T, H, D]`` ragged; any strides.
        bias: ``[1|B, 1|H, 1|Sq, Skv]`` or None.
        attn_scale: Factor of the scores; any float, NaN included.
        dropout: Probability, 0 outside training.
        rng_state: int64 ``[2]``, seed and offset; needed where dropout is above 0.
    """

    spec: AttentionSpec
    lengths: Lengths
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    attn_scale: float
    dropout: float
    rng_state: Tensor | None


class Gradients(NamedTuple):
    """Where backward writes; None for what is not asked for.

    Attributes:
        q, k, v: Logical views like those of the operands.
        bias: The bias's shape, any floating dtype.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


class BoundForward(Protocol):
    """A forward whose choices are made."""

    def __call__(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """Compute; see ``AttentionEngine.forward``."""


class AttentionEngine(Protocol):
    """An engine: writes into tensors that the caller allocated, uninitialised, and covers every row of them."""

    def workspace_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of scratch memory that the caller must provide; 0 where the engine brings its own."""

    def forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        """Write ``out`` (a view like ``q``) and ``lse`` (``[B, H, S]`` or ``[T, H]``, natural log)."""

    def bind(self, problem: Problem, out: Tensor, lse: Tensor) -> BoundForward | None:
        """What ``forward`` comes to for further calls of one signature; None where there is nothing to be gained."""

    def backward(
        self, problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        """Write the gradients that are asked for; ``dout``, ``dlse``, ``out`` and ``lse`` are views as in forward."""
