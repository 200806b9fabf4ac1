"""Problems that a wrong cuDNN graph does not survive, and their runs through the public functions on the interpreter.

NaN stands in all that may not be read, large finite numbers in the rows of K and V that a tile over-reads, and NaN in
all memory that an engine allocates. Around outputs lie canaries.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedattn
from fusedattn import SKIP
from fusedattn.runs.oracle import Case, expected
from fusedattn.runs.public_calls import attend

NAN, INF = math.nan, math.inf
LARGE, CANARY = 1e4, 7.0
RAGGED = ("t3hd", "thd_t2hd", "thd_thd_thd")
LAYOUTS = (*RAGGED, "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd")
GRADIENTS = {"t3hd": ("dqkv",), "thd_t2hd": ("dq", "dkv")}
# From b, s, h, d, and back.
_ORDER = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
_RNG_STATE = torch.tensor([3, 5])


@dataclass(frozen=True)
class Options:
    """What a problem is made from.

    Attributes:
        q, kv: Lengths of sequences, which in dense layouts act under the padding mask only; t3hd has those of q alone.
        max_q, max_kv: max_seqlen, Sq and Skv; None: the longest.
        bias: The axes of "bhq" that it does not broadcast, and "k"; empty: no bias.
        bias_dtype: None: that of Q.
        dead: Whether some pairs and the last row of the bias are minus infinity; of rows without a key ``dout`` and
            ``dlse`` are NaN.
        tail: Rows of ragged tensors past the last sequence.
        views: Elements between rows, where operands are cut out of larger tensors; cuDNN wants multiples of 8.
        cu_given: Whether dense problems without padding come with cu_seqlens all the same.
        wanted: Which gradients are asked for: letters of "qkvb".
    """

    layout: str = "thd_t2hd"
    q: tuple[int, ...] = (5, 7, 0, 5, 3)
    kv: tuple[int, ...] = (11, 5, 3, 11, 0)
    max_q: int | None = None
    max_kv: int | None = None
    heads: int = 3
    head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16
    mask: str = "no_mask"
    bias: str = ""
    bias_type: str = "post_scale_bias"
    bias_dtype: torch.dtype | None = None
    dead: bool = False
    dropout: float = 0.0
    scale: float | None = None
    dlse: bool = False
    tail: int = 2
    views: int = 0
    cu_dtype: torch.dtype = torch.int32
    cu_given: bool = False
    wanted: str = "qkvb"
    engine: str = "cudnn"
    seed: int = 0

    @property
    def ragged(self) -> bool:
        return self.layout in RAGGED


class Hostile:
    """A problem: ``case``, and the gradients ``dout`` and ``dlse`` of its results; the same for the same options."""

    def __init__(self, o: Options) -> None:
        self.options, self._random = o, torch.Generator().manual_seed(o.seed)
        kv = o.q if o.layout == "t3hd" else o.kv
        self._max_q = max((*o.q, 1)) if o.max_q is None else o.max_q
        self._max_kv = max((*kv, 1)) if o.max_kv is None else o.max_kv
        if o.layout == "t3hd":
            self._max_kv = self._max_q
        full = not o.ragged and o.mask != "padding"
        self._q, self._kv = ((self._max_q,) * len(o.q), (self._max_kv,) * len(o.q)) if full else (o.q, kv)
        q, dout = (self._rows(self._q, self._max_q, NAN, o.head_dim) for _ in range(2))
        k, v = (self._rows(self._kv, self._max_kv, LARGE, o.head_dim) for _ in range(2))
        dlse = self._rows(self._q, self._max_q, NAN).float()
        operands = [q, k, v]
        if not o.ragged:
            *operands, dout = (x.permute(_ORDER[o.layout[:4]]).contiguous() for x in (q, k, v, dout))
            dlse = dlse.mT
        elif o.layout != "thd_thd_thd":
            operands = [torch.stack([q, k, v], 1)] if o.layout == "t3hd" else [q, torch.stack([k, v], 1)]
        self.dout, self.dlse = dout, dlse if o.dlse else None
        given = o.cu_given or not full
        self.case = Case(
            tuple(self._views(operands) if o.views else operands),
            o.layout,
            self._bias() if o.bias else None,
            o.bias_type if o.bias else "no_bias",
            o.mask,
            cu_seqlens(self._q, o.cu_dtype) if given else None,
            cu_seqlens(self._kv, o.cu_dtype) if given and o.layout != "t3hd" else None,
            self._max_q if o.ragged else None,
            self._max_kv if o.ragged else None,
            o.scale,
            o.dropout,
            _RNG_STATE if o.dropout else None,
            o.engine,
        )
        if o.dead:
            blind = expected(replace(self.case, dropout=0.0))["lse"] == -INF
            rows = {"bshd": blind.mT, "sbhd": blind.movedim(-1, 0)}.get(self.case.qkv_format, blind)
            self.dout = self.dout.masked_fill(rows[..., None], NAN)
            self.dlse = None if self.dlse is None else self.dlse.masked_fill(blind, NAN)

    def _rows(self, lengths: tuple[int, ...], longest: int, outside: float, *last: int) -> Tensor:
        """[T, H, ...] or [B, S, H, ...]."""
        o = self.options
        shape = (sum(lengths) + o.tail,) if o.ragged else (len(lengths), longest)
        x = torch.randn(*shape, o.heads, *last, generator=self._random).to(o.dtype)
        if o.ragged:
            x[sum(lengths) :] = outside
        for b, n in enumerate(() if o.ragged else lengths):
            x[b, n:] = outside
        return x

    def _views(self, operands: list[Tensor]) -> Iterator[Tensor]:
        """The same numbers in larger buffers of NaN; of large numbers where tiles reach."""
        nothing, all_ = slice(0), slice(None)
        packed: dict[str, list[Any]] = {"t3hd": [(all_, slice(1, None))], "thd_t2hd": [nothing, all_]}
        for x, reach in zip(operands, packed.get(self.options.layout, [nothing, all_, all_]), strict=True):
            *outer, heads, width = x.shape
            base = torch.full((outer[0] + 2, *outer[1:], heads + 1, width + self.options.views), NAN, dtype=x.dtype)
            base[reach][..., :heads, :width] = LARGE
            yield base[1:-1, ..., :heads, :width].copy_(x)

    def _bias(self) -> Tensor:
        """NaN past the lengths."""
        o = self.options
        shape = [n if axis in o.bias else 1 for axis, n in zip("bhq", (len(o.q), o.heads, self._max_q), strict=True)]
        bias = torch.randn(*shape, self._max_kv, generator=self._random)
        if o.dead:
            bias[torch.rand(bias.shape, generator=self._random) < 1 / 8] = -INF
            bias[-1, -1, -1] = -INF
        each = [*zip(self._q, self._kv, strict=True)]
        if shape[0] == 1:
            each = [(max((0, *self._q)), max((0, *self._kv)))]
        for b, (length_q, length_kv) in enumerate(each):
            bias[b, ..., length_kv:] = NAN
            if shape[2] > 1:
                bias[b, :, length_q:] = NAN
        return bias.to(o.bias_dtype or o.dtype)


hostile = functools.lru_cache(maxsize=64)(Hostile)


def cu_seqlens(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates uninitialised with NaN."""

    def poison(allocate: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = allocate(*args, **kwargs)
            return made if made.is_meta else made.fill_(NAN if made.is_floating_point() else 99)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poison(getattr(owner, name)))
        yield


def run(h: Hostile, *, is_training: bool = True, backward: bool = True) -> dict[str, Tensor]:
    """By the differentiable function of the layout: results by ``run_case``'s names, of gradients those asked for."""
    case, wanted = h.case, h.options.wanted
    with poisoned_memory():
        names = (*GRADIENTS.get(case.layout, ("dq", "dk", "dv")), "dbias")
        inputs = [*case.operands, *([] if case.bias is None else [case.bias])]
        # Of a packed tensor the gradient is one.
        leaves = {
            name: x.detach().requires_grad_(bool(set(name[1:].replace("bias", "b")) & set(wanted)))
            for name, x in zip(names, inputs, strict=False)
        }
        out, lse = attend(case, [x for n, x in leaves.items() if n != "dbias"], leaves.get("dbias"), is_training)
        results = {"out": out.detach(), "lse": lse.detach()}
        asked = {name: x for name, x in leaves.items() if x.requires_grad}
        if asked and backward:
            seeds = [(out, h.dout)] if h.dlse is None else [(out, h.dout), (lse, h.dlse)]
            outputs, given = zip(*seeds, strict=True)
            results |= zip(asked, torch.autograd.grad(outputs, [*asked.values()], given), strict=True)
    return results


def run_nvte(h: Hostile, *, backward: bool = True) -> dict[str, Tensor]:
    """By the nvte functions, into buffers among canaries; the tail of ``O`` is NaN for backward."""
    case, wanted = h.case, h.options.wanted
    one, buffers = case.layout == "t3hd", Buffers(h.options.views or 8)
    lengths = (case.cu_seqlens_q,) if one else (case.cu_seqlens_q, case.cu_seqlens_kv)
    sizes = (case.max_seqlen_q,) if one else (case.max_seqlen_q, case.max_seqlen_kv)
    words = (case.scale, case.dropout, case.layout, case.bias_type, case.mask_type)
    fwd, bwd = (
        getattr(fusedattn, f"nvte_fused_attn_{way}_{'qkvpacked' if one else 'kvpacked'}") for way in ("fwd", "bwd")
    )
    with poisoned_memory():
        out, pack = fwd(
            *(*case.operands, case.bias, None, buffers.like(h.dout), None, *lengths, case.rng_state, *sizes),
            *(True, *words),
            engine=case.engine,
        )
        results = {"out": out.clone(), "lse": pack["softmax_lse"].squeeze(-1).clone()}
        if not backward:
            return results
        out = out.clone()
        out[len(out) - h.options.tail :] = NAN
        targets = {name: buffers.like(x) for name, x in zip(GRADIENTS[case.layout], case.operands, strict=True)}
        bias_gradient = None if case.bias is None else buffers.like(case.bias) if "b" in wanted else SKIP
        bwd(
            *(*case.operands, out, h.dout, None, None, pack, *targets.values(), bias_gradient, *lengths, *sizes),
            *words,
            engine=case.engine,
        )
    buffers.check()
    return results | targets | ({"dbias": bias_gradient} if isinstance(bias_gradient, Tensor) else {})


class Buffers:
    """Outputs to write, filled with NaN, with canaries around them and ``gap`` elements between rows."""

    def __init__(self, gap: int) -> None:
        self._gap = gap
        self._made: list[tuple[Tensor, Tensor]] = []

    def like(self, x: Tensor) -> Tensor:
        *outer, rows, width = x.shape
        base = torch.full((outer[0] + 2, *outer[1:], rows + 1, width + self._gap), CANARY, dtype=x.dtype)
        view = base[1:-1, ..., :rows, :width].fill_(NAN)
        self._made.append((base, view))
        return view

    def check(self) -> None:
        """Raise ``AssertionError`` where a canary was written."""
        for base, view in self._made:
            around = base.clone()
            around.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(CANARY)
            assert (around == CANARY).all(), "something was written around an output"
