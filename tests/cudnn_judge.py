"""The judge of the cuDNN engine: hostile problems on the interpreter, against float64 within the error budget."""

from __future__ import annotations

from typing import Any

import torch
from cudnn_hostile import Hostile, Options, hostile, run, run_nvte
from cudnn_interpreter import InterpretingExecutor, uniform
from torch import Tensor

from fusedattn import runtime
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.runs.oracle import assert_within_budget, eager, expected
from fusedattn.target import TARGETS


def offers_dbias(o: Options, target: str) -> bool:
    """Whether the engine differentiates the bias of a problem."""
    return (
        "q" in o.bias
        and (o.bias_dtype or o.dtype) == o.dtype
        and (not o.ragged or target == "h100")
        and not (o.dropout and target == "b200")
    )


def pattern(h: Hostile, executor: InterpretingExecutor) -> Tensor | None:
    """What the graphs that ran keep for the caller's probability, seed and offset: bool [B, H, Sq, Skv]."""
    case = h.case
    if not case.dropout:
        return None
    dims = {_dims(key) for key in executor.executions}
    assert len(dims) == 1, f"both directions must have graphs of the same dims, so that they drop alike: {dims}"
    (dim,) = dims
    assert case.rng_state is not None
    seed, offset = case.rng_state.tolist()
    sizes = (len(h.options.q), h.options.heads, *case.longest())
    place = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)]
    return uniform(seed, offset, dim, place) >= case.dropout


def _dims(key: SdpaKey) -> tuple[int, int, int, int]:
    b, h, s_q, _ = key.tensor(Role.Q).dim
    return b, h, s_q, key.tensor(Role.K).dim[2]


def judge(
    *problems: Options | Hostile, target: str = "h100", nvte: bool = False, **options: Any
) -> InterpretingExecutor:
    """Demand that results are within budget.

    Args:
        *problems: Run one after the other with the same caches, the forward of each twice, since a call that
            came before goes another way.
        target: Name of the GPU.
        nvte: Whether by the nvte functions.
        **options: Of ``InterpretingExecutor``.

    Returns:
        The executor, which knows what the last problem ran.

    Raises:
        AssertionError: A result is out of budget, or memory was written that may not be.
        InterpreterFault: A graph, or what was bound to it, is wrong.
    """
    executor = InterpretingExecutor(**options)
    with runtime.pretend(TARGETS[target], executor):
        for problem in problems:
            h = hostile(problem) if isinstance(problem, Options) else problem
            o = h.options
            executor.executions.clear()
            compute = run_nvte if nvte else run
            got, again = compute(h), compute(h, backward=False)
            keep = pattern(h, executor)
            want, measured = (f(h.case, h.dout, h.dlse, keep) for f in (expected, eager))
            asked = {
                name for name in want if name in ("out", "lse") or set(name[1:].replace("bias", "b")) & {*o.wanted}
            }
            # What was bound goes another way.
            for name, value in again.items():
                torch.testing.assert_close(value, got[name], rtol=0, atol=0, equal_nan=True)
            try:
                assert_within_budget(got, {n: x for n, x in want.items() if n in asked}, measured, o.dtype)
            except AssertionError as failure:
                raise AssertionError(f"{o} on {target} {options}\n{failure}") from None
    return executor
