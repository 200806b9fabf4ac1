"""What the cuDNN engine takes, row by row.

A row that the library refuses is true both ways, of the oldest cuDNN that is supported and of the newest: what passes
all rows has a plan, and what such a row alone refuses has none. What a guarded row refuses may have a plan, on some
GPUs and versions, and is not trusted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util

import torch

from fusedattn.cache import on_clear
from fusedattn.enums import Direction
from fusedattn.rule import CUDA_DEVICE, Rule, RuleKind
from fusedattn.spec import AttentionSpec, dtype_word

PACKAGE = "nvidia-cudnn-frontend"
OLDEST_FRONTEND = (1, 32)
_LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
# Older ones have plans for it, or none, by layout and version.
_D256_ON_SM100 = (9, 25)
_WIDE = (torch.float32, torch.float64)
_REFUSED, _GUARDED = RuleKind.refused_by_library, RuleKind.guarded_by_us


@functools.cache
def package_fault() -> str | None:
    """Why the package that declares graphs cannot be used, or None; nothing is loaded to find out.

    Example:
        >>> package_fault() is None
        True
    """
    wanted = ".".join(map(str, OLDEST_FRONTEND))
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    if tuple(map(int, found.split(".")[:2])) < OLDEST_FRONTEND:
        return f"{PACKAGE} is {found}, older than {wanted}"
    return None if importlib.util.find_spec("cudnn") else f"{PACKAGE} has no module cudnn"


@functools.cache
def library_version() -> tuple[int, int]:
    """Version of the cuDNN wheel, the older of two, without loading it; (0, 0) where cuDNN did not come as a wheel.

    Example:
        >>> library_version() >= (9, 19)
        True
    """
    found = []
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            major, minor = importlib.metadata.version(library).split(".")[:2]
            found.append((int(major), int(minor)))
    return min(found, default=(0, 0))


on_clear(package_fault.cache_clear)
on_clear(library_version.cache_clear)


def trains(spec: AttentionSpec) -> bool:
    """Whether a backward plan is needed: in backward, and in a forward whose dropout pattern a backward must repeat."""
    return spec.direction is Direction.backward or spec.dropout


def _major(spec: AttentionSpec) -> int:
    """Of the compute capability; 0 without a GPU, which the row "device" refuses, and no other."""
    return 0 if spec.target is None else spec.target.compute_capability[0]


def _sm(spec: AttentionSpec) -> str:
    return "no GPU" if spec.target is None else f"sm_{spec.target.sm_version}"


def _dbias(spec: AttentionSpec) -> bool:
    return spec.bias is not None and spec.bias_gradient and trains(spec)


def _has_backward_of_head_dim(spec: AttentionSpec) -> bool:
    major, head_dim = _major(spec), spec.head_dim
    return head_dim <= (256 if major in (0, 9) else 128) or (major == 10 and head_dim == 256)


def _d256_on_sm100(spec: AttentionSpec) -> bool:
    return trains(spec) and _major(spec) == 10 and spec.head_dim == 256


def _head_dim(spec: AttentionSpec) -> str:
    return f"D = {spec.head_dim}"


def _head_dim_and_sm(spec: AttentionSpec) -> str:
    return f"D = {spec.head_dim} on {_sm(spec)}"


def _one_row(spec: AttentionSpec) -> bool:
    """Whether a backward graph may have one sequence, one head and one query; ragged ones have Sq = 1 by a bias."""
    if not trains(spec) or spec.batch != 1 or spec.heads != 1:
        return False
    if spec.format.ragged:
        return spec.bias is not None and spec.bias.shape[2] == 1
    return spec.rows_q == 1


def _sizes(spec: AttentionSpec) -> str:
    if spec.format.ragged:
        return f"B = {spec.batch}, H = {spec.heads}, a bias {_bias_words(spec)}"
    return f"B = {spec.batch}, H = {spec.heads}, Sq = {spec.rows_q}, Skv = {spec.rows_kv}"


def _bias_of_one_key(spec: AttentionSpec) -> bool:
    return trains(spec) and spec.bias is not None and spec.bias.shape[3] == 1


def _dbias_over_queries(spec: AttentionSpec) -> bool:
    one_query = spec.rows_q == 1 and not spec.format.ragged
    return _dbias(spec) and spec.bias is not None and spec.bias.shape[2] == 1 and not one_query


def _bias_words(spec: AttentionSpec) -> str:
    return "no bias" if spec.bias is None else f"{list(spec.bias.shape)} of {dtype_word(spec.bias.dtype)}"


CUDNN_ROWS = (
    Rule(
        "package",
        lambda spec: package_fault() is None,
        f"needs {PACKAGE} {'.'.join(map(str, OLDEST_FRONTEND))} or newer",
        lambda spec: package_fault() or "it",
        _REFUSED,
    ),
    CUDA_DEVICE,
    Rule(
        "compute capability",
        lambda spec: spec.target is None or _major(spec) >= 8,
        "needs a GPU of compute capability 8.0 or newer",
        _sm,
        _REFUSED,
    ),
    Rule(
        "dtype",
        lambda spec: spec.dtype in (torch.float16, torch.bfloat16),
        "Q, K and V must be float16 or bfloat16",
        lambda spec: dtype_word(spec.dtype),
        _GUARDED,
    ),
    Rule("head dimension", lambda spec: spec.head_dim % 8 == 0, "D must be a multiple of 8", _head_dim, _REFUSED),
    Rule("largest head dimension", lambda spec: spec.head_dim <= 256, "D must be at most 256", _head_dim, _GUARDED),
    Rule(
        "head dimension of backward",
        lambda spec: not trains(spec) or _has_backward_of_head_dim(spec),
        "a backward, and a forward with dropout, need D <= 128; on Hopper D <= 256, on data-center Blackwell also 256",
        _head_dim_and_sm,
        _REFUSED,
    ),
    Rule(
        "D = 256 with dropout or dBias",
        lambda spec: not _d256_on_sm100(spec) or not (spec.dropout or _dbias(spec)),
        "a backward of D = 256 on data-center Blackwell goes without dropout and without dBias",
        _head_dim_and_sm,
        _REFUSED,
    ),
    Rule(
        "version for D = 256",
        lambda spec: not _d256_on_sm100(spec) or library_version() >= _D256_ON_SM100,
        f"a backward of D = 256 on data-center Blackwell needs cuDNN {'.'.join(map(str, _D256_ON_SM100))} or newer",
        lambda spec: ".".join(map(str, library_version())),
        _GUARDED,
    ),
    Rule(
        "single pair",
        lambda spec: not (trains(spec) and not spec.format.ragged and spec.rows_q == spec.rows_kv == 1),
        "a backward, and a forward with dropout, need more than one query or key",
        _sizes,
        _REFUSED,
    ),
    Rule(
        "single row",
        lambda spec: not _one_row(spec),
        "planning a backward of one sequence, one head and one query ends the process with cuDNN 9.26 or newer",
        _sizes,
        _GUARDED,
    ),
    Rule(
        "bias of one key",
        lambda spec: not _bias_of_one_key(spec) or (_major(spec) in (0, 9) and not spec.format.ragged),
        "a backward with a bias of one key needs Hopper and a dense layout",
        _bias_words,
        _GUARDED,
    ),
    Rule(
        "wide dBias",
        lambda spec: not _dbias(spec) or spec.bias is None or spec.bias.dtype not in _WIDE,
        "the gradient of a bias must be float16 or bfloat16",
        _bias_words,
        _REFUSED,
    ),
    Rule(
        "dtype of dBias",
        lambda spec: not _dbias(spec) or spec.bias is None or spec.bias.dtype in (spec.dtype, *_WIDE),
        "the gradient of a 16-bit bias must have the dtype of Q",
        _bias_words,
        _GUARDED,
    ),
    Rule(
        "dBias over queries",
        lambda spec: not _dbias_over_queries(spec),
        "the gradient of a bias of one row for all queries is not trusted",
        _bias_words,
        _GUARDED,
    ),
    Rule(
        "dBias of ragged sequences",
        lambda spec: not (_dbias(spec) and spec.format.ragged) or _major(spec) in (0, 9),
        "the gradient of a bias in a thd layout needs Hopper",
        _sm,
        _REFUSED,
    ),
    Rule(
        "dBias with dropout",
        lambda spec: not (_dbias(spec) and spec.dropout) or _major(spec) != 10,
        "the gradient of a bias under dropout is not to be had on data-center Blackwell",
        _sm,
        _REFUSED,
    ),
    Rule(
        "deterministic",
        lambda spec: not (spec.deterministic and trains(spec) and (_dbias(spec) or spec.dropout)) or _major(spec) != 10,
        "a deterministic backward with dBias or dropout is not to be had on data-center Blackwell",
        _sm,
        _REFUSED,
    ),
    Rule(
        "deterministic of ragged sequences",
        lambda spec: not (spec.deterministic and trains(spec) and spec.format.ragged) or _major(spec) in (0, 9, 10),
        "a deterministic backward in a thd layout needs Hopper or data-center Blackwell",
        _sm,
        _REFUSED,
    ),
    Rule(
        "sign of the scale",
        lambda spec: not spec.negative_scale,
        "a negative attn_scale is not trusted",
        lambda spec: "a negative one",
        _GUARDED,
    ),
)
