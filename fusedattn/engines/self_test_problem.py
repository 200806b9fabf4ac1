"""The small problem that an engine must solve on a GPU before it is trusted there, and how it is put to an engine.

It has sequences without keys and without queries, lengths off every tile, rows that no sequence owns, and with a bias
pairs and a row that it rules out. NaN stands in the rows of Q and dO that are padding, and in all results beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.engines.base import AttentionEngine, Gradients, Problem
from fusedattn.enums import Direction, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.layouts import logical, unpack
from fusedattn.lengths import read_lengths
from fusedattn.spec import AttentionSpec, TensorSpec
from fusedattn.target import DeviceTarget

# Queries and keys of each sequence, and rows of ragged tensors that follow the last one.
_LENGTHS_Q, _LENGTHS_KV, _TAIL = (5, 131, 0, 3, 64), (0, 150, 7, 9, 64), 6
HEADS, HEAD_DIM, DROPOUT = 2, 64, 0.25
SCALE = HEAD_DIM**-0.5
_RNG_STATE = (1234, 5)
# In rows of K and V that are padding: what an engine may read there, it must multiply by 0.
_GARBAGE = 1000.0


class Family(NamedTuple):
    """Problems that one kernel or another may fail on, and the rest not.

    Attributes:
        direction: Forward, or backward after a forward.
        dtype: Of Q, K and V.
        ragged, causal, bias: Whether the problem has it.
        dbias: Whether the gradient of the bias is asked for.
        dropout, deterministic: Whether the problem has it.
    """

    direction: Direction
    dtype: torch.dtype
    ragged: bool
    causal: bool
    bias: bool
    dbias: bool
    dropout: bool
    deterministic: bool

    def text(self) -> str:
        """In words.

        Example:
            >>> Family(Direction.forward, torch.float16, True, False, True, False, False, False).text()
            'forward of float16 ragged bias'
        """
        words = [name for name in self._fields[2:] if getattr(self, name)]
        return " ".join([f"{self.direction.word} of {str(self.dtype).removeprefix('torch.')}", *words])


class Canned:
    """The problem of a family.

    Args:
        family: The family.
        target: The GPU.
        device: Where tensors are made.
    """

    def __init__(self, family: Family, target: DeviceTarget | None, device: torch.device) -> None:
        self.family = family
        full = not family.ragged and family.causal
        batch, self.max_q, self.max_kv = len(_LENGTHS_Q), max(_LENGTHS_Q), max(_LENGTHS_KV)
        self.lengths_q = (self.max_q,) * batch if full else _LENGTHS_Q
        self.lengths_kv = (self.max_kv,) * batch if full else _LENGTHS_KV
        self._generator = torch.Generator(device="cpu").manual_seed(0)
        q, dout = (self._rows(self.lengths_q, self.max_q, math.nan) for _ in range(2))
        k, v = (self._rows(self.lengths_kv, self.max_kv, _GARBAGE) for _ in range(2))
        stacked = (q, torch.stack([k, v], 1)) if family.ragged else (q, k, v)
        operands = tuple(x.to(device) for x in stacked)
        bias = self._bias().to(device) if family.bias else None
        cu_q, cu_kv = (None, None) if full else (_starts(x).to(device) for x in (self.lengths_q, self.lengths_kv))
        rng_state = torch.tensor(_RNG_STATE, dtype=torch.int64, device="cpu").to(device) if family.dropout else None
        tensors = {"bias": bias, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "rng_state": rng_state}
        self.spec = AttentionSpec.of(
            layout=NVTE_QKV_Layout.NVTE_THD_T2HD if family.ragged else NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD,
            operands=tuple(map(TensorSpec.of, operands)),
            bias_type=NVTE_Bias_Type.NVTE_POST_SCALE_BIAS if family.bias else NVTE_Bias_Type.NVTE_NO_BIAS,
            mask_type=self._mask_type(),
            **{name: None if x is None else TensorSpec.of(x) for name, x in tensors.items()},
            dropout=family.dropout,
            deterministic=family.deterministic,
            direction=family.direction,
            bias_gradient=family.dbias,
            target=target,
        )
        max_q, max_kv = (self.max_q, self.max_kv) if family.ragged else (None, None)
        lengths = read_lengths(self.spec, cu_q, cu_kv, max_q, max_kv, on_gpu=True)
        views = unpack(self.spec.format, operands)
        dropout = DROPOUT if family.dropout else 0.0
        self.problem = Problem(self.spec, lengths, *views, bias, SCALE, dropout, rng_state)
        self.dout = logical(self.spec.format.format, dout.to(device))

    def _mask_type(self) -> NVTE_Mask_Type:
        if self.family.causal:
            return NVTE_Mask_Type.NVTE_CAUSAL_MASK
        return NVTE_Mask_Type.NVTE_NO_MASK if self.family.ragged else NVTE_Mask_Type.NVTE_PADDING_MASK

    def _rows(self, lengths: tuple[int, ...], longest: int, outside: float) -> Tensor:
        """``[T, H, D]`` ragged or ``[B, S, H, D]`` dense, with a number in rows that no sequence owns."""
        shape = (sum(lengths) + _TAIL,) if self.family.ragged else (len(lengths), longest)
        x = torch.randn(*shape, HEADS, HEAD_DIM, generator=self._generator, dtype=torch.float32, device="cpu")
        if self.family.ragged:
            x[sum(lengths) :] = outside
        else:
            for b, n in enumerate(lengths):
                x[b, n:] = outside
        return x.to(self.family.dtype)

    def _bias(self) -> Tensor:
        shape = (1, HEADS, self.max_q, self.max_kv)
        bias = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        bias[torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu") < 1 / 16] = -math.inf
        bias[0, 0, 2] = -math.inf
        return bias.to(self.family.dtype)

    def sequences(self) -> Iterator[Sequence]:
        """The sequences in turn."""
        start_q = start_kv = 0
        for b, (length_q, length_kv) in enumerate(zip(self.lengths_q, self.lengths_kv, strict=True)):
            yield Sequence(b, start_q, length_q, start_kv, length_kv)
            start_q, start_kv = start_q + length_q, start_kv + length_kv


def _starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")


class Sequence(NamedTuple):
    """Where one sequence is."""

    number: int
    start_q: int
    length_q: int
    start_kv: int
    length_kv: int

    def queries(self, tensor: Tensor, ragged: bool) -> Tensor:
        """Its rows of Q, out, lse or their likes, a view with heads first."""
        return self._rows(tensor, ragged, self.start_q, self.length_q)

    def keys(self, tensor: Tensor, ragged: bool) -> Tensor:
        """Its rows of K, V or their likes, a view with heads first."""
        return self._rows(tensor, ragged, self.start_kv, self.length_kv)

    def _rows(self, tensor: Tensor, ragged: bool, start: int, length: int) -> Tensor:
        return tensor[start : start + length].transpose(0, 1) if ragged else tensor[self.number, :, :length]


def computed(canned: Canned, engine: AttentionEngine) -> dict[str, Tensor]:
    """What an engine makes of a canned problem.

    Args:
        canned: The problem.
        engine: The engine.

    Returns:
        On the CPU: "out" and "lse"; for a backward "dq", "dk", "dv", and "dbias" where it is asked for.

    Raises:
        Exception: Whatever the engine raises.
    """
    problem, family = canned.problem, canned.family
    out = torch.full_like(problem.q, math.nan)
    lse = _lse(problem.q)
    engine.forward(problem, out, lse)
    found = {"out": out, "lse": lse}
    if family.direction is Direction.backward:
        bias = torch.full_like(problem.bias, math.nan) if family.dbias and problem.bias is not None else None
        dq, dk, dv = (torch.full_like(x, math.nan) for x in (problem.q, problem.k, problem.v))
        gradients = Gradients(dq, dk, dv, bias)
        engine.backward(problem, canned.dout, None, out, lse, gradients)
        found |= {f"d{name}": x for name, x in gradients._asdict().items() if x is not None}
    return {name: x.cpu() for name, x in found.items()}


def kept(canned: Canned, engine: AttentionEngine) -> list[Tensor] | None:
    """Which probabilities the forward keeps, read off it: with V the identity, out is the dropped softmax.

    Args:
        canned: The problem.
        engine: The engine.

    Returns:
        For each sequence bool ``[H, queries, keys]``, False also where the mask rules a pair out; None without dropout.

    Raises:
        Exception: Whatever the engine raises.
    """
    problem, ragged = canned.problem, canned.family.ragged
    if not problem.dropout:
        return None
    found = [torch.zeros(HEADS, x.length_q, x.length_kv, dtype=torch.bool, device="cpu") for x in canned.sequences()]
    bias = None if problem.bias is None else torch.zeros_like(problem.bias)
    eye = torch.eye(HEAD_DIM, dtype=problem.v.dtype, device=problem.v.device)
    flat = problem._replace(q=torch.zeros_like(problem.q), k=torch.zeros_like(problem.k), bias=bias)
    for first in range(0, canned.max_kv, HEAD_DIM):
        v, out = torch.zeros_like(problem.v), torch.empty_like(problem.q)
        for sequence in canned.sequences():
            seen = sequence.keys(v, ragged)[:, first : first + HEAD_DIM]
            seen.copy_(eye[: seen.shape[1]].expand_as(seen))
        engine.forward(flat._replace(v=v), out, _lse(out))
        host = out.cpu()
        for keep, sequence in zip(found, canned.sequences(), strict=True):
            part = keep[..., first : first + HEAD_DIM]
            part.copy_(sequence.queries(host, ragged)[..., : part.shape[2]] > 0)
    return found


def _lse(like: Tensor) -> Tensor:
    return torch.full(like.shape[:-1], math.nan, dtype=torch.float32, device=like.device)
