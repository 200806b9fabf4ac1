"""Tensors as cuDNN takes them: views where it has plans for their strides, else copies, which are counted."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusedattn.counters import COUNTERS
from fusedattn.engines.base import Problem
from fusedattn.engines.cudnn_key import TensorKey
from fusedattn.enums import NVTE_Bias_Type
from fusedattn.spec import dtype_word

# Of addresses, and of the strides of every axis but the last.
ALIGNMENT_BYTES = 16


def fits(tensor: Tensor) -> bool:
    """Whether cuDNN takes a tensor of Q, K, V or their likes as it lies in memory.

    Args:
        tensor: Rank 3 or 4 with D last.

    Returns:
        Whether D is contiguous, and the address and all other strides are multiples of 16 bytes and not 0.

    Raises:
        Nothing.

    Example:
        >>> x = torch.empty(2, 3, 4, 8, dtype=torch.float16)
        >>> fits(x), fits(x.transpose(2, 3)), fits(x[:, :1].expand(2, 3, 4, 8))
        (True, False, False)
    """
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        return False
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    itemsize = tensor.element_size()
    aligned = all(size == 1 or (stride and stride * itemsize % ALIGNMENT_BYTES == 0) for size, stride in outer)
    return aligned and (last[1] == 1 or last[0] == 1)


def readable(tensor: Tensor) -> Tensor:
    """A tensor that ``fits``, or a counted copy of it that does."""
    return tensor if fits(tensor) else _copy(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """A tensor without gaps, or a counted copy of it that is."""
    return tensor if tensor.is_contiguous() else _copy(tensor)


def writable(tensor: Tensor) -> Tensor:
    """A tensor that ``fits``, or a counted new one in its place, to be copied back with ``write_back``."""
    if fits(tensor):
        return tensor
    COUNTERS["copies"] += 1
    return tensor.new_empty(tensor.shape)


def write_back(target: Tensor, written: Tensor) -> None:
    """Copy what ``writable`` made into the tensor it stands for."""
    if written is not target:
        target.copy_(written)


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor on the meta device of the same shape, strides and dtype: all that a key knows of one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _copy(tensor: Tensor) -> Tensor:
    # What has no memory stands for a call that is not made.
    COUNTERS["copies"] += not tensor.is_meta
    return tensor.clone(memory_format=torch.contiguous_format)


def effective_bias(problem: Problem) -> Tensor | None:
    """The bias as cuDNN adds it to the scaled scores: post-scale, of a dtype and where in memory it takes one.

    Args:
        problem: The call.

    Returns:
        The bias itself where that is so already; a pre-scale bias times the scale in float32; None without one.

    Raises:
        Nothing.
    """
    bias = problem.bias
    if bias is None or has_effective_bias(problem):
        return bias
    if problem.spec.bias_type is NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        return bias.to(torch.float32, memory_format=torch.contiguous_format) * problem.attn_scale
    COUNTERS["copies"] += 1
    dtype = bias.dtype if bias.dtype == problem.q.dtype else torch.float32
    return bias.to(dtype, copy=True, memory_format=torch.contiguous_format)


def has_effective_bias(problem: Problem) -> bool:
    """Whether the bias, if there is one, is as cuDNN adds it already."""
    bias = problem.bias
    if bias is None:
        return True
    if problem.spec.bias_type is NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        return False
    sizes = list(zip(bias.shape, bias.stride(), strict=True))
    broadcast = any(size > 1 and stride == 0 for size, stride in sizes)
    innermost = sizes[-1][0] == 1 or sizes[-1][1] == 1
    aligned = bias.data_ptr() % ALIGNMENT_BYTES == 0
    return bias.dtype in (torch.float32, problem.q.dtype) and innermost and aligned and not broadcast


@functools.lru_cache(maxsize=256)
def host_scalar(value: float) -> Tensor:
    """float32 ``[1]`` on the host, kept so that it outlives the calls that read it."""
    return torch.tensor([value], dtype=torch.float32, device="cpu")


def dense_key(tensor: Tensor) -> TensorKey:
    """How a tensor of rank 4 is declared.

    Strides of axes of size 1 mean nothing and are made one and the same, so that they make no two keys of one problem.

    Example:
        >>> dense_key(torch.empty(2, 1, 4, 8).as_strided((2, 1, 4, 8), (32, 999, 8, 1))).stride
        (32, 64, 8, 1)
    """
    shape = tuple(tensor.shape)
    spans = [size * stride for size, stride in zip(shape, tensor.stride(), strict=True) if size > 1]
    span = max(spans, default=1)
    stride = tuple(span if size == 1 else step for size, step in zip(shape, tensor.stride(), strict=True))
    return TensorKey(shape, (*stride[:-1], 1), dtype_word(tensor.dtype))


def ragged_key(tensor: Tensor, batch: int, rows: int) -> TensorKey:
    """How a ragged ``[T, H, D]`` is declared: as ``batch`` sequences of ``rows`` tokens.

    Example:
        >>> ragged_key(torch.empty(5, 3, 2, 4)[:, 1], 4, 256)
        TensorKey(dim=(4, 2, 256, 4), stride=(6144, 4, 24, 1), dtype='float32')
    """
    _, heads, width = tensor.shape
    token, head, _ = tensor.stride()
    if tensor.shape[0] == 1:
        token = heads * width
    if heads == 1:
        head = width
    return TensorKey((batch, heads, rows, width), (rows * token, head, token, 1), dtype_word(tensor.dtype))
