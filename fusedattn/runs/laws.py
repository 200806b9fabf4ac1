"""What is wrong with a problem beyond the types of its fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic import ValidationError

from fusedattn.runs.config import (
    BenchProblem,
    DispatchProblem,
    FileInputs,
    Geometry,
    RandomInputs,
    TimeProblem,
    VerifyProblem,
)
from fusedattn.runs.fields import PACKED, RAGGED
from fusedattn.runs.sweeps import expand


class BrokenLaw(NamedTuple):
    """A law that a problem breaks."""

    path: str  # of the problem in the file, with the field that is at fault
    message: str


def broken_laws(problem: Geometry, path: str) -> Iterator[BrokenLaw]:
    """The laws that a problem breaks; of a sweep, those of the first bad case only."""
    sweep = problem.sweep
    both = (sweep.model_fields_set & problem.model_fields_set) if sweep is not None else set()
    for field in sorted(both):
        yield BrokenLaw(f"{path}.sweep.{field}", "given here and in the problem; keep one")
    for field in _without_a_bias(problem):
        yield BrokenLaw(f"{path}.{field}", "there is no bias; name a bias type")
    if both:
        return
    try:
        cases = expand(problem)
    except ValidationError as err:
        yield BrokenLaw(path, err.errors(include_url=False)[0]["msg"])
        return
    for case in cases:
        faults = list(_faults(case))
        of_case = f" (case '{case.name}')" if sweep is not None else ""
        yield from (BrokenLaw(f"{path}.{field}", f"{message}{of_case}") for field, message in faults)
        if faults:
            return


def _without_a_bias(problem: Geometry) -> Iterator[str]:
    if not isinstance(problem, VerifyProblem) or problem.bias != "none":
        return
    sweep = problem.sweep
    if sweep is not None and set(sweep.bias) - {"none"}:
        return
    for field in ("bias_shape", "bias_dtype"):
        if field in problem.model_fields_set:
            yield field
        if sweep is not None and field in sweep.model_fields_set:
            yield f"sweep.{field}"


def _faults(case: Geometry) -> Iterator[tuple[str, str]]:
    if case.layout is None:
        yield "layout", "missing; give it here or in the sweep"
        return
    if isinstance(case.inputs, FileInputs):
        yield from _faults_of_file(case, case.layout, case.inputs)
    else:
        yield from _faults_of_random(case, case.layout, case.inputs)
    if isinstance(case, (VerifyProblem, DispatchProblem)) and case.op == "nvte" and case.layout not in PACKED:
        yield "op", f"the nvte functions take the packed layouts {' and '.join(PACKED)}, got {case.layout}"
    if isinstance(case, VerifyProblem):
        yield from _faults_of_verify(case)
    if isinstance(case, BenchProblem):
        yield from _faults_of_bench(case)


def _faults_of_file(case: Geometry, layout: str, inputs: FileInputs) -> Iterator[tuple[str, str]]:
    for field in ("heads", "head_dim", "lengths", "lengths_q", "lengths_kv"):
        if getattr(case, field) is not None:
            yield field, "belongs to random inputs; a file brings its own"
    given = {name for name in ("qkv", "q", "kv", "k", "v") if getattr(inputs, name) is not None}
    choices: dict[str, tuple[set[str], ...]] = {
        "t3hd": ({"qkv"},),
        "thd_t2hd": ({"q", "kv"}, {"qkv"}),
        "thd_thd_thd": ({"q", "k", "v"}, {"q", "kv"}, {"qkv"}),
    }
    allowed = choices.get(layout, ({"q", "k", "v"},))
    if given not in allowed:
        wanted = " or ".join(" and ".join(sorted(c)) for c in allowed)
        yield ("inputs", f"layout {layout} needs the keys {wanted}, got {' and '.join(sorted(given)) or 'none'}")
    if inputs.cu_seqlens is None and (layout in RAGGED or case.mask == "padding"):
        yield "inputs.cu_seqlens", f"missing; layout {layout} with mask {case.mask} needs lengths"


def _faults_of_random(case: Geometry, layout: str, inputs: RandomInputs) -> Iterator[tuple[str, str]]:
    for field in ("heads", "head_dim"):
        if getattr(case, field) is None:
            yield field, "missing; random inputs need it"
    if (case.lengths is None) == (case.lengths_q is None and case.lengths_kv is None):
        yield "lengths", "give either lengths, or lengths_q and lengths_kv"
        return
    q, kv = case.lengths or case.lengths_q, case.lengths or case.lengths_kv
    if q is None or kv is None or len(q) != len(kv):
        yield "lengths_kv", f"lengths_q and lengths_kv go together, one of each a sequence; got {q} and {kv}"
        return
    if layout == "t3hd" and q != kv:
        yield "lengths_q", "layout t3hd packs queries and keys together, so their lengths are the same"
    for field, lengths in (("max_seqlen_q", q), ("max_seqlen_kv", kv)):
        if (getattr(case, field) or max(lengths)) < max(lengths):
            yield field, f"expected at least the longest, {max(lengths)}, got {getattr(case, field)}"
    if inputs.random == "nan_in_padding" and layout not in RAGGED and case.mask != "padding":
        yield ("mask", f"layout {layout} has padding under mask padding only, so there is none to fill with NaN")


def _faults_of_verify(case: VerifyProblem) -> Iterator[tuple[str, str]]:
    if case.op == "nvte" and case.through_lse:
        yield "through_lse", "the nvte functions take no gradient of the log-sum-exp"
    if case.op == "nvte" and not case.is_training and case.directions == ["backward"]:
        yield "directions", "after inference nvte has no backward"
    if isinstance(case.inputs, RandomInputs) and case.inputs.random == "all_masked_rows" and case.bias == "none":
        yield "bias", "all_masked_rows puts -inf into a bias; name a bias type"
    if isinstance(case.inputs, FileInputs):
        if case.bias != "none" and case.inputs.bias is None:
            yield "inputs.bias", f"missing; bias {case.bias} needs its key"
        if case.dropout > 0 and case.is_training and case.inputs.expect:
            yield "inputs.expect", "another program's dropout pattern is not ours; use dropout 0"
        if case.dtype is not None and case.inputs.expect:
            yield "inputs.expect", "was computed from the tensors as they are in the file; leave dtype out"
        for field in ("bias_shape", "bias_dtype"):
            if getattr(case, field) is not None:
                yield field, "belongs to random inputs; a file brings its own"


def _faults_of_bench(case: BenchProblem) -> Iterator[tuple[str, str]]:
    all_lengths = (case.lengths, case.lengths_q, case.lengths_kv)
    if case.rival == "sdpa" and any(len(set(lengths)) > 1 for lengths in all_lengths if lengths):
        yield "rival", "sdpa takes equal lengths; use sdpa_padded_mask"
    if case.rival == "sdpa" and case.mask == "padding" and case.layout not in RAGGED:
        yield "rival", "sdpa takes no padding mask; use sdpa_padded_mask"
    if isinstance(case, TimeProblem):
        for direction in case.limits.model_fields_set - set(case.directions):
            yield f"limits.{direction}", f"is not measured; directions are {', '.join(case.directions)}"


def duplicate_names(names: Iterable[str]) -> Iterator[BrokenLaw]:
    """A path for each name that came before."""
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        first = seen.setdefault(name, index)
        if first != index:
            yield BrokenLaw(f"problems[{index}].name", f"{name!r} is the name of problems[{first}] already")
