"""A problem with its tensors, as an engine and the reference both take it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from fusedattn.enums import NVTE_QKV_Layout

TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Case:
    """One problem; words as `fused_attention` takes them.

    Attributes:
        operands: The tensors of the layout: (qkv,), (q, kv) or (q, k, v).
        layout: "t3hd", "thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd" or "bhsd_bhsd_bhsd".
        bias: None or ``[1 | B, 1 | H, 1 | Sq, Skv]``.
        cu_seqlens_kv: None means cu_seqlens_q's.
        max_seqlen_q: None means the longest.
        attn_scale: None means D**-0.5.
        rng_state: int64 ``[2]``; needed where dropout > 0, so that each call drops the same.

    Example:
        >>> import torch
        >>> case = Case((torch.zeros(5, 3, 2, 4),), "t3hd", cu_seqlens_q=torch.tensor([0, 2, 5]))
        >>> case.qkv_format, case.scale, case.longest()
        ('thd', 0.5, (3, 3))
    """

    operands: tuple[Tensor, ...]
    layout: str
    bias: Tensor | None = None
    bias_type: str = "no_bias"
    mask_type: str = "no_mask"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_scale: float | None = None
    dropout: float = 0.0
    rng_state: Tensor | None = None
    engine: str = "auto"

    @property
    def layout_word(self) -> str:
        """The layout's canonical name."""
        return NVTE_QKV_Layout.parse(self.layout, "layout").word

    @property
    def qkv_format(self) -> str:
        """One of "thd", "bshd", "sbhd" and "bhsd"."""
        return "thd" if self.layout_word == "t3hd" else self.layout_word.split("_")[0]

    @property
    def scale(self) -> float:
        """attn_scale, or its default."""
        return self.operands[0].shape[-1] ** -0.5 if self.attn_scale is None else self.attn_scale

    @property
    def spans(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """First row and end of each ragged sequence, of queries and of keys."""
        if self.cu_seqlens_q is None:
            raise ValueError("argument 'cu_seqlens_q': expected int32 [B + 1] in a ragged layout, got None")
        cu_kv = self.cu_seqlens_q if self.cu_seqlens_kv is None else self.cu_seqlens_kv
        return list(pairwise(self.cu_seqlens_q.tolist())), list(pairwise(cu_kv.tolist()))

    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_kv; where one is None, what lengths or shapes say."""
        if self.qkv_format == "thd":
            found = [max((stop - start for start, stop in spans), default=0) for spans in self.spans]
        else:
            found = [x.permute(TO_BHSD[self.qkv_format]).shape[2] for x in self.operands[:2]]
        asked = self.max_seqlen_q, self.max_seqlen_kv
        q, kv = (n if m is None else m for n, m in zip(found, asked, strict=True))
        return q, kv
