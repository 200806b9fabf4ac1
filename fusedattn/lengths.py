"""``Lengths``: where sequences lie and how long they are, read from cu_seqlens and checked where they can be seen."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn.enums import NVTE_Mask_Type
from fusedattn.errors import SpecError
from fusedattn.settings import settings
from fusedattn.spec import AttentionSpec, check_bias_shape


class Side(NamedTuple):
    """The sequences of Q, or those of K and V.

    Attributes:
        cu_seqlens: int32 ``[B + 1]`` on the problem's device, or None: every sequence fills its row of a dense tensor.
        offsets: The same as host integers, or None where the values were not read.
        max_seqlen: Sq or Skv of the problem, at least the longest sequence.
        rows: T in ragged layouts, S in dense ones.
    """

    cu_seqlens: Tensor | None
    offsets: tuple[int, ...] | None
    max_seqlen: int
    rows: int


class Lengths(NamedTuple):
    """Both sides of one call.

    Example:
        >>> import torch
        >>> from fusedattn.enums import NVTE_QKV_Layout
        >>> from fusedattn.spec import TensorSpec
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> spec = AttentionSpec.of(
        ...     layout=NVTE_QKV_Layout.NVTE_T3HD,
        ...     operands=(TensorSpec.of(torch.empty(5, 3, 1, 4)),),
        ...     cu_seqlens_q=TensorSpec.of(cu_seqlens),
        ... )
        >>> read_lengths(spec, cu_seqlens, None, None, None, on_gpu=False).q.max_seqlen
        3
    """

    batch: int
    q: Side
    kv: Side


def read_lengths(
    spec: AttentionSpec,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    on_gpu: bool,
) -> Lengths:
    """Read and check what the lengths of one call are.

    Args:
        spec: The problem.
        cu_seqlens_q, cu_seqlens_kv: int32 or int64 ``[B + 1]`` or None. None for kv means q's, where that fits.
        max_seqlen_q, max_seqlen_kv: At least the longest sequence, or None: the longest, where lengths can be seen.
        on_gpu: Whether the tensors are, so that reading them would wait for it.

    Returns:
        The lengths. Values are read on CPU, and on a GPU only under ``FUSEDATTN_VALIDATE=1``, for checks alone and not
        during a capture.

    Raises:
        SpecError: A needed cu_seqlens is missing; one does not start at 0, decreases or runs past its tensor; a length
            in a dense layout is shorter than s under a mask type other than padding; max_seqlen is below the longest
            or needed and missing; the bias does not fit.
    """
    ragged, padding = spec.format.ragged, spec.mask_type is NVTE_Mask_Type.NVTE_PADDING_MASK
    if not ragged and padding and cu_seqlens_q is None and cu_seqlens_kv is None:
        hint = "Pass int32 [B + 1] whose differences are the lengths, or the mask type 'no_mask'."
        raise SpecError("cu_seqlens_q", "a tensor, which a padding mask needs in a dense layout", "None", hint)
    if cu_seqlens_kv is None and cu_seqlens_q is not None:
        if not ragged and spec.rows_q != spec.rows_kv:
            expected = f"a tensor, since Sq = {spec.rows_q} differs from Skv = {spec.rows_kv}"
            raise SpecError("cu_seqlens_kv", expected, "None", "Pass the lengths of K and V.")
        cu_seqlens_kv = cu_seqlens_q
    # A capture allows no reading back.
    visible = not on_gpu or (settings().validate_values and not spec.capturing)
    q = _side(spec, "q", cu_seqlens_q, max_seqlen_q, spec.rows_q, visible, on_gpu)
    kv = _side(spec, "kv", cu_seqlens_kv, max_seqlen_kv, spec.rows_kv, visible, on_gpu)
    if ragged:
        check_bias_shape(spec, q.max_seqlen, kv.max_seqlen)
    return Lengths(spec.batch, q, kv)


def _side(
    spec: AttentionSpec,
    suffix: str,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    rows: int,
    visible: bool,
    on_gpu: bool,
) -> Side:
    offsets = None
    if cu_seqlens is not None:
        if visible:
            offsets = tuple(cu_seqlens.tolist())
            _check_offsets(spec, f"cu_seqlens_{suffix}", offsets, rows)
        cu_seqlens = cu_seqlens.to(torch.int32)
    longest = None if spec.format.ragged else rows
    if offsets is not None:
        longest = max((end - start for start, end in pairwise(offsets)), default=0)
    name = f"max_seqlen_{suffix}"
    if max_seqlen is not None and longest is not None and max_seqlen < longest:
        raise SpecError(
            name, f"at least the longest sequence, {longest}", str(max_seqlen), "Pass a larger number or None."
        )
    if on_gpu:
        # Checked, and then not used, so that a check changes no legal call.
        offsets = None
    if not spec.format.ragged:
        acts = spec.mask_type is NVTE_Mask_Type.NVTE_PADDING_MASK
        return Side(cu_seqlens, offsets, rows, rows) if acts else Side(None, None, rows, rows)
    if max_seqlen is None:
        max_seqlen = longest if offsets is not None else _bias_axis(spec, suffix)
    assert max_seqlen is not None
    return Side(cu_seqlens, offsets, max_seqlen, rows)


def _bias_axis(spec: AttentionSpec, suffix: str) -> int:
    """The bias's Sq or Skv, for want of lengths that can be seen."""
    axis = 1 if spec.bias is None else spec.bias.shape[2 if suffix == "q" else 3]
    if spec.bias is None or (suffix == "q" and axis == 1):
        expected = f"an integer, since `cu_seqlens_{suffix}` is on {spec.device} and is not read"
        raise SpecError(f"max_seqlen_{suffix}", expected, "None", "Pass the longest length, or any number above it.")
    return axis


def _check_offsets(spec: AttentionSpec, name: str, offsets: tuple[int, ...], rows: int) -> None:
    if offsets[0] != 0:
        raise SpecError(name, "0 as its first entry", str(offsets[0]))
    for index, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise SpecError(name, "entries that never decrease", f"{start} before {end} at index {index + 1}")
        if not spec.format.ragged and end - start > rows:
            expected = f"lengths of at most s = {rows} in a dense layout"
            raise SpecError(name, expected, f"length {end - start} of sequence {index}")
        if not spec.format.ragged and end - start < rows and spec.mask_type is not NVTE_Mask_Type.NVTE_PADDING_MASK:
            expected = f"lengths equal to s = {rows} under mask type {spec.mask_type.word} in a dense layout"
            hint = "Lengths act only under the mask type 'padding'."
            raise SpecError(name, expected, f"length {end - start} of sequence {index}", hint)
    if spec.format.ragged and offsets[-1] > rows:
        hint = "Its last entry is where the last sequence ends."
        raise SpecError(name, f"entries of at most T = {rows}, the rows of the tensor", str(offsets[-1]), hint)
