"""Mapping bugs to plant into the cuDNN engine, which are in cudnn_bugs.txt, and the checks that must catch them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from cudnn_declared import Attention
from cudnn_hostile import Hostile, Options, run
from cudnn_interpreter import InterpretingExecutor
from cudnn_judge import judge

from fusedattn import runtime
from fusedattn.engines.cudnn_key import SdpaKey, TensorKey
from fusedattn.runs.oracle import expected
from fusedattn.target import TARGETS

SELF = Options("t3hd", q=(5, 7, 0, 5, 3), heads=2)
THD = Options(heads=2, scale=0.3)
# More keys than queries, so that buckets differ.
LONG = replace(THD, q=(5, 1, 3), kv=(300, 7, 4), views=8)
DENSE = Options("bshd_bshd_bshd", q=(5, 7), kv=(11, 4), heads=2, scale=0.3)
PADDED = replace(DENSE, mask="padding")
CAUSAL = replace(DENSE, q=(7, 7), kv=(9, 9), mask="causal")
BIAS = replace(DENSE, bias="hqk")
PRE_SCALE = replace(BIAS, bias_type="pre_scale_bias")
DEAD = replace(PADDED, bias="bhqk", dead=True)
DROPPED = replace(DENSE, dropout=0.3)
WIDE_TOKENS = replace(THD, q=(5, 7), kv=(3, 4), views=80000)
# More than 2**15 of them.
MANY_TOKENS = replace(THD, q=(1, 2), kv=(32766, 10), heads=1)
MANY_QUERIES = replace(THD, q=(32766, 10), kv=(1, 2), heads=1)
# Each differs from another in one thing alone.
NEIGHBOURS = (
    DENSE, replace(DENSE, q=(5, 7, 2), kv=(11, 4, 3)), replace(DENSE, max_q=8), replace(DENSE, max_kv=12), PADDED,
    replace(DENSE, mask="causal"), replace(DENSE, dtype=torch.float16), DROPPED, replace(DROPPED, dropout=0.6),
    replace(DENSE, views=8), replace(DENSE, views=24), BIAS, replace(BIAS, bias="qk"), replace(BIAS, wanted="qkv"),
    replace(BIAS, bias_dtype=torch.float32, wanted="qkv"), THD, replace(THD, mask="causal"),
    replace(THD, views=8), replace(THD, tail=270), replace(THD, kv=(265, 0, 3, 0, 0), tail=240),
)  # fmt: skip


def _too_large(attention: Attention) -> int:
    return 2**50 if attention.dim[0] * attention.dim[1] > 1 else 2**20


def _in_parts(o: Options) -> Callable[[], object]:
    return functools.partial(judge, o, workspace_bytes=_too_large)


def _sum_of_many_parts() -> None:
    """Alike, so that roundings of their sum add up, which the error budget allows: eager torch has them, too."""
    o = replace(BIAS, q=(2,) * 150, kv=(2,) * 150, heads=1)
    h = Hostile(o)
    for x in (*h.case.operands, h.dout):
        x.copy_(x[:1].clone().expand_as(x))
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor(workspace_bytes=_too_large)):
        got = run(h)["dbias"]
    want = expected(h.case, h.dout)["dbias"]
    assert (got - want).abs().max() <= 2 * torch.finfo(o.dtype).eps * want.abs().max()


def _first_offset_above_0() -> None:
    h = Hostile(replace(SELF, q=(5, 7), tail=0))
    h.case = replace(h.case, cu_seqlens_q=torch.tensor([3, 5, 12], dtype=torch.int32))
    with runtime.pretend(TARGETS["h100"], InterpretingExecutor()):
        got = run(h)
    assert not got["out"][:3].any()
    assert not got["dqkv"][:3].any()


CHECKS: dict[str, Callable[[], object]] = {
    "self attention": functools.partial(judge, SELF),
    "ragged": functools.partial(judge, THD),
    "ragged, padded statistics": functools.partial(judge, THD, target="a100"),
    "ragged, more keys": functools.partial(judge, LONG),
    "ragged, wide tokens": functools.partial(judge, WIDE_TOKENS),
    "ragged, many tokens": functools.partial(judge, MANY_TOKENS),
    "dense": functools.partial(judge, DENSE, target="a100"),
    "dense on Hopper": functools.partial(judge, DENSE),
    "dense, odd strides": functools.partial(judge, replace(DENSE, views=3)),
    "ragged, odd strides, by nvte": functools.partial(judge, replace(SELF, views=3), nvte=True),
    "padding": functools.partial(judge, PADDED),
    "causal": functools.partial(judge, CAUSAL),
    "causal, dead rows": functools.partial(judge, replace(CAUSAL, bias="hqk", dead=True, seed=5)),
    "bias": functools.partial(judge, BIAS),
    "pre-scale bias": functools.partial(judge, PRE_SCALE),
    "dead rows": functools.partial(judge, DEAD),
    "ragged, dead rows": functools.partial(judge, replace(THD, q=(7, 5), kv=(1, 9), bias="bhqk", dead=True)),
    "dropout": functools.partial(judge, DROPPED),
    "gradient of lse": functools.partial(judge, replace(PADDED, dlse=True)),
    "parts": _in_parts(BIAS),
    "sum of many parts": _sum_of_many_parts,
    "ragged parts": _in_parts(THD),
    "a first offset above 0": _first_offset_above_0,
    "scales": functools.partial(judge, DENSE, replace(DENSE, scale=0.7)),
    "many tokens after few": functools.partial(judge, replace(MANY_TOKENS, kv=(3, 10), max_kv=32766), MANY_TOKENS),
    "many queries after few": functools.partial(judge, replace(MANY_QUERIES, q=(3, 10), max_q=32766), MANY_QUERIES),
    "neighbours": functools.partial(judge, *NEIGHBOURS, *NEIGHBOURS[::-1], target="a100"),
}


class Edit(NamedTuple):
    """Of a module of ``fusedattn.engines``: text that must be there once, and what it becomes."""

    module: str
    old: str
    new: str


class Bug(NamedTuple):
    """A mutation, and the key of ``CHECKS`` that must fail."""

    name: str
    check: str
    edits: tuple[Edit, ...]


def _read_bug(block: str) -> Bug:
    heading, *parts = block.split("\n@ ")
    name, check = (line.partition(": ")[2] for line in heading.split("\n"))
    edits = []
    for part in parts:
        module, *lines = part.split("\n")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        edits.append(Edit(module, old, new))
    return Bug(name, check, tuple(edits))


_TABLE = Path(__file__).with_suffix(".txt").read_text()
BUGS = tuple(_read_bug(block) for block in _TABLE.strip().split("\n\n")[1:])

# Fields of keys, with the check that must fail where two keys may differ in one.
KEY_FIELDS = dict.fromkeys(("padding", "causal", "dropout", "dim", "stride", "dtype"), "neighbours") | {
    "max_total_q": "many queries after few",
    "max_total_kv": "many tokens after few",
}


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Run the mutated source, and give the functions of the real modules its code; constants likewise."""
    with pytest.MonkeyPatch.context() as patch:
        for edit in bug.edits:
            module = importlib.import_module(f"fusedattn.engines.{edit.module}")
            source = inspect.getsource(module)
            found = source.count(edit.old)
            if found != 1:
                raise ValueError(f"{bug.name}: {edit.old!r} is in {edit.module} {found} times, not once")
            mutated: dict[str, Any] = {"__name__": module.__name__}
            exec(compile(source.replace(edit.old, edit.new), str(module.__file__), "exec"), mutated)
            before, after = (dict(_functions(each, module.__name__)) for each in (vars(module), mutated))
            for path, function in before.items():
                patch.setattr(function, "__code__", after[path].__code__)
        yield


def _functions(names: dict[str, Any], module: str) -> Iterator[tuple[str, FunctionType]]:
    """All functions and methods that a module defines."""
    for name, value in names.items():
        found = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
        # Those of dataclasses and named tuples are made from their fields.
        if isinstance(found, FunctionType) and found.__module__ == module and found.__code__.co_filename[0] != "<":
            yield name, found
        elif isinstance(value, type) and value.__module__ == module:
            yield from ((f"{name}.{path}", each) for path, each in _functions(dict(vars(value)), module))


@contextlib.contextmanager
def key_without(field: str) -> Iterator[None]:
    """Let two keys be one that differ in a field of ``SdpaKey``, or of the tensors in it, alone."""

    def seen(key: SdpaKey) -> tuple[object, ...]:
        tensors = [
            (role, *(x for x, part in zip(t, TensorKey._fields, strict=True) if part != field))
            for role, t in key.tensors
        ]
        names = (
            "target",
            "direction",
            "ragged",
            "ragged_stats",
            "padding",
            "causal",
            "dropout",
            "max_total_q",
            "max_total_kv",
        )
        return (tuple(tensors), *(getattr(key, name) for name in names if name != field))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SdpaKey, "__eq__", lambda key, other: seen(key) == seen(other))
        patch.setattr(SdpaKey, "__hash__", lambda key: hash(seen(key)))
        yield
