"""The rows of the cuDNN engine against cuDNN: problems by their features, the graphs that the engine asks for, and
whether cuDNN has plans for them. `python cudnn_grid.py COUNT SEED COMPILED` prints where they disagree."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from cudnn_recorder import Recorder

from fusedattn import runtime
from fusedattn.calls import attention_request
from fusedattn.engines.cudnn_graph import build
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.cudnn_library import cudnn, cudnn_version
from fusedattn.engines.cudnn_plan import compile_plan
from fusedattn.enums import Engine, NVTE_QKV_Layout
from fusedattn.errors import BuildError
from fusedattn.layouts import LAYOUTS
from fusedattn.rule import Rule, RuleKind
from fusedattn.rules import RULES
from fusedattn.rules_cudnn import CUDNN_ROWS
from fusedattn.runtime import Request, pretend
from fusedattn.spec import AttentionSpec
from fusedattn.target import TARGETS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Features(NamedTuple):
    """One problem. `bias` names the axes that it does not broadcast: "" for no bias, else "1k", "bhqk", ..."""

    target: str = "h100"
    backward: bool = False
    layout: str = "t3hd"
    mask: str = "no_mask"
    bias: str = ""
    bias_type: str = "post_scale_bias"
    bias_dtype: str = "bf16"
    dbias: bool = False
    bias_gap: int = 0
    dropout: bool = False
    deterministic: bool = False
    head_dim: int = 64
    sizes: tuple[int, int] = (256, 256)
    batch: int = 2
    heads: int = 4
    dtype: str = "bf16"
    views: bool = False
    negative_scale: bool = False

    def text(self) -> str:
        changed = [f"{x}={getattr(self, x)}" for x in self._fields[2:] if getattr(self, x) != getattr(BASE, x)]
        return " ".join([self.target, "backward" if self.backward else "forward", *changed])


BASE = Features()
TURING = TARGETS["a100"].model_copy(update={"name": "turing", "compute_capability": (7, 5)})
# Values stand as often as they are to come.
VALUES: dict[str, list[Any]] = {
    "target": ["a100", "l40s", "h100", "h200", "b200", "rtx5090", "rtxpro6000"],
    "backward": [False, True],
    "layout": ["t3hd", "thd_t2hd", "thd_thd_thd", "bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"],
    "mask": ["no_mask", "padding", "causal"],
    "bias": ["", "", "11qk", "1hqk", "b1qk", "bhqk", "111k", "b11k", "1h1k", "bh1k"],
    "bias_type": ["post_scale_bias", "pre_scale_bias"],
    "bias_dtype": ["bf16", "bf16", "fp16", "fp32", "fp64"],
    "dbias": [False, True],
    "bias_gap": [0, 0, 1, 8],
    "dropout": [False, False, True],
    "deterministic": [False, False, True],
    "head_dim": [64, 64, 128, 8, 16, 32, 40, 72, 96, 104, 136, 160, 192, 248, 256, 256, 264, 36, 12, 1],
    "sizes": [(256, 256), (256, 256), (128, 512), (197, 397), (1, 300), (300, 1), (1, 1), (2, 2), (513, 64), (7, 5)],
    "batch": [2, 1, 3],
    "heads": [4, 1, 3],
    "dtype": ["bf16", "fp16", "fp64"],
    "views": [False, True],
}


def problems(count: int, seed: int) -> Iterator[Features]:
    """Different problems, half of them a few changes away from a plain one; the same for the same seed."""
    draw, seen = random.Random(seed), set()
    while len(seen) < count:
        drawn = {name: draw.choice(values) for name, values in VALUES.items()}
        if draw.random() < 0.6:
            kept = {"target", "backward", "layout", *draw.sample(list(VALUES), draw.choice([1, 2, 3, 4]))}
            drawn = {name: drawn[name] for name in drawn if name in kept}
        if not drawn.get("bias"):
            drawn = {name: value for name, value in drawn.items() if not name.startswith(("bias", "dbias"))}
        problem = BASE._replace(**drawn)
        if problem not in seen:
            seen.add(problem)
            yield problem


def _request(f: Features) -> Request:
    """A call of a problem; its tensors are on meta, so that nothing is computed."""
    sq, skv = f.sizes if f.layout != "t3hd" else (f.sizes[0], f.sizes[0])
    ragged = f.layout[0] == "t"
    lengths: dict[str, Any] = {}
    for side, size in {"q": sq, "kv": skv}.items():
        given = (ragged or f.mask == "padding") and not (f.layout == "t3hd" and side == "kv")
        lengths[f"cu_seqlens_{side}"] = _empty(f.batch + 1, dtype=torch.int32) if given else None
        lengths[f"max_seqlen_{side}"] = size if ragged else None
    bias = None
    if f.bias:
        sizes = {"b": f.batch, "h": f.heads, "q": sq, "k": skv, "1": 1}
        shape = [sizes[axis] for axis in f.bias[:3]]
        bias = _empty(*shape, skv + f.bias_gap, dtype=DTYPES[f.bias_dtype])[..., :skv].requires_grad_(f.dbias)
    layout = NVTE_QKV_Layout.parse(f.layout, "layout")
    return attention_request(
        layout,
        dict(zip(LAYOUTS[layout].operands, _operands(f, sq, skv), strict=True)),
        bias,
        f.bias_type if f.bias else "no_bias",
        f.mask,
        **lengths,
        attn_scale=-0.125 if f.negative_scale else None,
        dropout=0.1 if f.dropout else 0.0,
        rng_state=_empty(2, dtype=torch.int64),
        is_training=True,
        deterministic=f.deterministic,
        engine="cudnn",
    )


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _operands(f: Features, sq: int, skv: int) -> list[torch.Tensor]:
    """The operands; with `views` separate ones are cut from packed ones, and packed ones from wider heads."""
    dtype, ragged = DTYPES[f.dtype], f.layout[0] == "t"
    packs = {"t3hd": [3], "thd_t2hd": [1, 2]}.get(f.layout, [1, 1, 1])
    made = []
    for number, pack in enumerate(packs):
        sizes = {"b": f.batch, "s": skv if number else sq, "h": f.heads, "d": f.head_dim}
        axes = f.layout.partition("_")[0]
        shape = [f.batch * sizes["s"], f.heads, f.head_dim] if ragged else [sizes[axis] for axis in axes]
        if pack > 1:
            shape.insert(1, pack)
        extra = 8 if f.views and pack > 1 else 0
        full = [*shape[:-1], shape[-1] + extra]
        if f.views and pack == 1:
            made.append(_empty(full[0], 3, *full[1:], dtype=dtype)[:, number])
        else:
            made.append(_empty(*full, dtype=dtype)[..., : shape[-1]])
    return made


class Observed(NamedTuple):
    """What became of a problem: its spec, the rows that refuse it, and the graphs that the engine asks for else."""

    spec: AttentionSpec
    refusing: list[Rule]
    keys: list[SdpaKey]


def observe(problem: Features) -> Observed:
    """Send a problem through the runtime and the engine with the rows out of the way."""
    specs: list[AttentionSpec] = []
    spy = Rule("spy", lambda spec: specs.append(spec) is None, "", str, RuleKind.guarded_by_us)
    rows, recorder = RULES[Engine.cudnn], Recorder()
    RULES[Engine.cudnn] = (spy,)
    try:
        with pretend(TARGETS.get(problem.target, TURING), recorder):
            _run(problem, recorder)
    finally:
        RULES[Engine.cudnn] = rows
    assert recorder.keys
    refusing = [row for row in CUDNN_ROWS if not row.holds(specs[-1])]
    return Observed(specs[-1], refusing, [_as_asked(key, problem) for key in recorder.keys])


def _run(f: Features, recorder: Recorder) -> None:
    request = _request(f)
    out, lse = runtime.forward(request)
    if not f.backward:
        return
    recorder.keys.clear()
    dbias = torch.empty_like(request.bias) if f.dbias and request.bias is not None else None
    gradients = [torch.empty_like(operand) for operand in request.operands]
    runtime.backward(request, torch.empty_like(out), None, out, lse, gradients, dbias)


def _as_asked(key: SdpaKey, problem: Features) -> SdpaKey:
    """A key whose dBias has the dtype that the caller wants, where the engine would ask for 16 bits and convert."""
    wanted = {"bf16": "bfloat16", "fp16": "float16"}.get(problem.bias_dtype, "float32")
    tensors = [(role, x._replace(dtype=wanted) if role is Role.DBIAS else x) for role, x in key.tensors]
    return dataclasses.replace(key, tensors=tuple(tensors))


@functools.cache
def refusal(key: SdpaKey) -> str | None:
    """Why cuDNN has no plan for a key; None where it has one. Nothing is compiled."""
    modes = cudnn().heur_mode
    try:
        graph = build(key)
        graph.validate()
        graph.build_operation_graph()
        graph.deselect_engines(["sdpa_fwd", "sdpa_bwd"])
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
    # cuDNN's own type and several built-in ones, by stage; a dtype that graphs do not know is a KeyError.
    except Exception as error:
        return " ".join(str(error).split())[:200]
    return None


def disagreement(problem: Features) -> str | None:
    """What is wrong of the rows for one problem; None where they and cuDNN agree."""
    _, refusing, keys = observe(problem)
    reasons = [reason for reason in map(refusal, keys) if reason]
    if not refusing and reasons:
        return f"no row refuses it, cuDNN does: {problem.text()}: {reasons[0]}"
    if len(refusing) == 1 and refusing[0].kind is RuleKind.refused_by_library and not reasons:
        return f"row {refusing[0].name!r} refuses it, cuDNN does not: {problem.text()}"
    return None


def compiled_wrongly(problem: Features) -> str | None:
    """What is wrong where no row refuses a problem and a graph of it does not compile; None else."""
    _, refusing, keys = observe(problem)
    try:
        for key in keys if not refusing else ():
            compile_plan(key)
    except BuildError as error:
        return f"no row refuses it, cuDNN does not compile it: {problem.text()}: {error}"
    return None


def main(count: int, seed: int, compiled: int) -> int:
    """Print what disagrees, of `count` problems planned and of some of them compiled; 1 where anything does."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.perf_counter()
    drawn = list(problems(count, seed))
    found = [text for text in (*map(disagreement, drawn), *map(compiled_wrongly, drawn[:compiled])) if text]
    said = f"{count} problems, {compiled} compiled, {time.perf_counter() - start:.0f} s, {len(found)} disagreements"
    print(f"cuDNN {cudnn_version()}: {said}", *found, sep="\n  ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), seed=int(sys.argv[2]), compiled=int(sys.argv[3])))
