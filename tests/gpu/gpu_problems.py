"""Problems of the grid on a device, judged against the float64 reference on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from unittest import mock

import test_grid
import torch
from torch import Tensor

from fusedattn.runs import oracle
from fusedattn.runs.oracle import Case, assert_within_budget, eager, expected, keep_mask, run_case

Run = Callable[..., dict[str, Tensor]]
# The fixture of that name.
Measured = Callable[[str, object], None]
# In rows that no sequence owns: cuDNN multiplies some of them by 0.
_PADDING = 3.0


def grid_problem(
    layout: str, words: tuple[str, str, float], dtype: torch.dtype, seed: int, sizes: test_grid.Sizes, head_dim: int
) -> tuple[Case, Tensor, Tensor]:
    """A problem of the grid with its dout and dlse, all finite but for a bias of minus infinity."""
    with mock.patch.object(test_grid, "DIM", head_dim):
        case, dout, dlse = test_grid.problem(layout, *words, dtype, seed, sizes)
    operands = tuple(map(finite, case.operands))
    bias = None if case.bias is None else finite(case.bias)
    return dataclasses.replace(case, operands=operands, bias=bias), finite(dout), finite(dlse)


def finite(x: Tensor) -> Tensor:
    return x.nan_to_num(_PADDING, math.inf, -math.inf)


def on(case: Case, device: torch.device) -> Case:
    """A case whose tensors are on a device; what the CPU needs lengths for is given."""
    longest = case.longest() if case.qkv_format == "thd" else (case.max_seqlen_q, case.max_seqlen_kv)
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(case)
        if isinstance(value := getattr(case, field.name), Tensor)
    }
    operands = tuple(x.to(device) for x in case.operands)
    return dataclasses.replace(case, **moved, operands=operands, max_seqlen_q=longest[0], max_seqlen_kv=longest[1])


def kept(case: Case, head_dim: int) -> Tensor | None:
    """What ``keep_mask`` reads off, by graphs of the same sizes and inputs as those of the case.

    Args:
        case: On the device.
        head_dim: D.

    Returns:
        On the CPU.
    """
    bias = case.bias

    def with_a_bias(probe: Case) -> dict[str, Tensor]:
        if bias is None:
            return run_case(probe)
        # With a dout, so that the engine is that of a call whose bias will be differentiated.
        probe = dataclasses.replace(probe, bias=torch.zeros_like(bias), bias_type=case.bias_type)
        out = run_case(probe)["out"]
        return run_case(probe, torch.zeros_like(out))

    with mock.patch.object(oracle, "run_case", with_a_bias):
        keep = keep_mask(case, head_dim)
    return None if keep is None else keep.cpu()


def judge(case: Case, dout: Tensor, dlse: Tensor | None, device: torch.device, run: Run = run_case) -> None:
    """Demand that a run on a device is in budget."""
    there = on(case, device)
    keep = kept(there, case.operands[0].shape[-1])
    seeds = tuple(x for x in (dout, dlse) if x is not None)
    got = {name: x.cpu() for name, x in run(there, *(x.to(device) for x in seeds)).items()}
    want, measure = (f(case, dout, dlse, keep) for f in (expected, eager))
    assert_within_budget(got, want, measure, case.operands[0].dtype)


def close(got: Tensor, want: Tensor, relative: float = 0.02) -> bool:
    """Whether two results of one problem agree but for the order of sums."""
    scale = float(want.abs().max())
    return bool(got.isfinite().all()) and float((got.double() - want.double()).abs().max()) <= relative * scale
