"""The tensors of a case: operands from a file or a distribution, and all that goes with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fusedattn.enums import NVTE_Bias_Type
from fusedattn.runs.case import Case
from fusedattn.runs.config import Distribution, FileInputs, Geometry, VerifyProblem
from fusedattn.runs.file_inputs import TensorFile
from fusedattn.runs.operands import Operands, cumulative, to_layout
from fusedattn.runs.random_inputs import draw, random_bias, random_operands


@dataclass(frozen=True)
class Inputs:
    """What a case is computed from, on the CPU.

    Attributes:
        case: The problem as the functions take it.
        operands: Its tensors, with the lengths as numbers.
        dout: Gradient of out, of its shape and dtype.
        dlse: Gradient of lse, `[T, H]` or `[B, H, Sq]`, float32 (float64 for float64 operands); or None.
        expect: Results that another program computed, by name: "out", "lse".
    """

    case: Case
    operands: Operands
    dout: Tensor
    dlse: Tensor | None = None
    expect: dict[str, Tensor] = field(default_factory=dict)


def build(problem: Geometry, folder: Path, engine: str = "auto", path: str = "problem") -> Inputs:
    """Makes the tensors of a problem without a sweep, the same ones each time.

    Args:
        problem: A problem that keeps the laws of `laws.py`.
        folder: Where the paths of tensor files start.
        engine: Word of the engine to be asked for.
        path: Of the problem in the run file, for messages.

    Returns:
        The inputs.

    Raises:
        RunFileError: the tensor file is missing or is none, lacks a key, or holds a tensor that does not fit.
    """
    generator = torch.Generator().manual_seed(problem.inputs.seed)
    expect: dict[str, Tensor] = {}
    bias: Tensor | None = None
    options = problem if isinstance(problem, VerifyProblem) else None
    with_bias = options is not None and options.bias != "none"
    distribution: Distribution = "normal"
    if isinstance(problem.inputs, FileInputs):
        file = TensorFile(problem.inputs, folder, path)
        operands = file.operands(problem)
        expect = file.expect(operands)
        bias = file.bias(operands) if with_bias else None
    else:
        distribution = problem.inputs.random
        operands = random_operands(problem, problem.inputs, generator)
    heads = operands.token_shape[-2]
    if options is not None and with_bias and bias is None:
        bias = random_bias(options, operands, heads, distribution, generator)

    dout = draw(operands.token_shape, generator)
    dlse = draw(operands.token_shape[:-1], generator)
    if distribution == "nan_in_padding":
        dout[operands.unowned()] = dlse[operands.unowned()] = torch.nan
    by_lengths = operands.ragged or problem.mask == "padding"
    packed = operands.layout == "t3hd"
    case = Case(
        operands=operands.tensors,
        layout=operands.layout,
        bias=bias,
        bias_type=NVTE_Bias_Type.parse("none" if options is None else options.bias, "bias").word,
        mask_type=problem.mask,
        cu_seqlens_q=cumulative(operands.lengths_q) if by_lengths else None,
        cu_seqlens_kv=cumulative(operands.lengths_kv) if by_lengths and not packed else None,
        max_seqlen_q=operands.max_q if by_lengths else None,
        max_seqlen_kv=operands.max_kv if by_lengths and not packed else None,
        attn_scale=problem.attn_scale,
        dropout=0.0 if options is None else options.dropout,
        rng_state=torch.tensor([problem.inputs.seed, 0]) if options is not None and options.dropout else None,
        engine=engine,
    )
    statistics = torch.float64 if operands.dtype == torch.float64 else torch.float32
    through_lse = options is not None and options.through_lse
    return Inputs(
        case=case,
        operands=operands,
        dout=to_layout(dout, operands.layout).to(operands.dtype),
        dlse=(dlse if operands.ragged else dlse.transpose(1, 2)).to(statistics) if through_lse else None,
        expect=expect,
    )
