"""The models of a run file: a `VerifyRun` compares with the reference, a `BenchRun` with torch's SDPA.

A `DispatchRun` times what the host does before a GPU has anything to do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, TypeAdapter

from fusedattn.runs.fields import (
    BiasShapeWord,
    BiasWord,
    Count,
    DtypeWord,
    EngineWord,
    Flag,
    LayoutWord,
    Length,
    MaskWord,
    OpWord,
    Rate,
    Seed,
    Strict,
    TargetWord,
)

Lengths: TypeAlias = list[Length]
Distribution = Literal["normal", "uniform", "large_logits", "nan_in_padding", "all_masked_rows"]


class FileInputs(Strict):
    """Tensors of a safetensors file, each named by its key there."""

    file: str
    """The safetensors file; a path relative to the run file."""
    qkv: str | None = None
    """Key of the packed [T, 3, H, D] tensor. Layouts thd_t2hd and thd_thd_thd take strided views of it."""
    kv: str | None = None
    """Key of the packed [T, 2, H, D] tensor of keys and values."""
    q: str | None = None
    """Key of the queries, in the problem's layout."""
    k: str | None = None
    """Key of the keys, in the problem's layout."""
    v: str | None = None
    """Key of the values, in the problem's layout."""
    bias: str | None = None
    """Key of the bias, [1|B, 1|H, 1|Sq, Skv]."""
    cu_seqlens: str | None = None
    """Key of the cumulative lengths, int [B+1], of queries and keys alike."""
    cu_seqlens_kv: str | None = None
    """Key of the cumulative lengths of the keys, where they differ from those of the queries."""
    expect: dict[Literal["out", "lse"], str] = Field(default={})
    """Results to be met, by key: what another program computed from these inputs."""
    seed: Seed = 0
    """Seed of the output gradient."""


class RandomInputs(Strict):
    """Made-up tensors, the same for the same seed."""

    random: Distribution
    """normal: N(0, 1). uniform: [-1, 1). large_logits: scores of some hundreds, where exp overflows.
    nan_in_padding: NaN in every row that no sequence owns, three rows of tail in the ragged layouts.
    all_masked_rows: a bias with whole rows of -inf, and single ones."""
    seed: Seed = 0
    """Seed of all tensors, and of dropout."""


def _kind_of_inputs(value: Any) -> str | None:
    if isinstance(value, (FileInputs, RandomInputs)):
        return "<file>" if isinstance(value, FileInputs) else "<random>"
    keys = value if isinstance(value, dict) else {}
    return "<file>" if "file" in keys else "<random>" if "random" in keys else None


Inputs: TypeAlias = Annotated[
    Annotated[FileInputs, Tag("<file>")] | Annotated[RandomInputs, Tag("<random>")],
    Discriminator(
        _kind_of_inputs,
        custom_error_type="run_file",
        custom_error_message="expected a mapping with `file` (of tensors) or `random` (a distribution)",
    ),
]


class GeometrySweep(Strict):
    """Values to be tried for each field: every combination becomes a case of its own."""

    layout: list[LayoutWord] = Field(default=[], min_length=1)
    mask: list[MaskWord] = Field(default=[], min_length=1)
    dtype: list[DtypeWord] = Field(default=[], min_length=1)
    heads: list[Count] = Field(default=[], min_length=1)
    head_dim: list[Count] = Field(default=[], min_length=1)
    lengths: list[Lengths] = Field(default=[], min_length=1)
    lengths_q: list[Lengths] = Field(default=[], min_length=1)
    lengths_kv: list[Lengths] = Field(default=[], min_length=1)
    attn_scale: list[float | None] = Field(default=[], min_length=1)


class VerifySweep(GeometrySweep):
    """Values to be tried for each field: every combination becomes a case of its own."""

    op: list[OpWord] = Field(default=[], min_length=1)
    bias: list[BiasWord] = Field(default=[], min_length=1)
    bias_shape: list[BiasShapeWord] = Field(default=[], min_length=1)
    bias_dtype: list[DtypeWord | None] = Field(default=[], min_length=1)
    dropout: list[Rate] = Field(default=[], min_length=1)
    is_training: list[Flag] = Field(default=[], min_length=1)
    through_lse: list[Flag] = Field(default=[], min_length=1)


class Geometry(Strict):
    """Name, shape and inputs of a problem."""

    name: str = Field(min_length=1)
    """Names the problem in the table and in the JSON."""
    layout: LayoutWord | None = None
    """How q, k, v lie in memory. The call is the form that belongs to it."""
    mask: MaskWord = "no_mask"
    """Which keys a query attends to within its sequence; causal is top-left."""
    dtype: DtypeWord | None = None
    """Data type of q, k, v. Default: the file's own, float32 for random inputs."""
    heads: Count | None = None
    """Number of heads H (random inputs)."""
    head_dim: Count | None = None
    """Head dimension D (random inputs)."""
    lengths: Lengths | None = Field(default=None, min_length=1)
    """Length of each sequence, of queries and keys alike (random inputs). In the dense layouts lengths act
    under the padding mask; under another mask every sequence is as long as the longest."""
    lengths_q: Lengths | None = Field(default=None, min_length=1)
    """Lengths of the queries, where they differ from those of the keys."""
    lengths_kv: Lengths | None = Field(default=None, min_length=1)
    """Lengths of the keys, where they differ from those of the queries."""
    max_seqlen_q: Count | None = None
    """The Sq of the bias and, in the dense layouts, of q. Default: the longest."""
    max_seqlen_kv: Count | None = None
    """The Skv of the bias and, in the dense layouts, of k and v. Default: the longest."""
    attn_scale: float | None = None
    """Softmax scale. Default: 1/sqrt(D)."""
    inputs: Inputs
    """Where the tensors come from: a safetensors file, or a named random distribution."""
    sweep: GeometrySweep | None = None
    """Every combination of these values becomes a case."""


class VerifyProblem(Geometry):
    """A problem, or with a sweep many, whose results are compared with the float64 reference."""

    op: OpWord = "fused_attention"
    """fused_attention: the differentiable functions. nvte: the four nvte_fused_attn functions."""
    bias: BiasWord = "none"
    """pre_scale: softmax(scale * (Q K^T + bias)); post_scale: softmax(scale * Q K^T + bias)."""
    bias_shape: BiasShapeWord | None = None
    """Axes batch, head, Sq, Skv of a random bias; 1 is broadcast. Default: 1hss."""
    bias_dtype: DtypeWord | None = None
    """Data type of the bias. Default: that of q."""
    dropout: Rate = 0.0
    """Dropout probability, 0 <= p < 1."""
    is_training: Flag = True
    """False switches dropout off and, with nvte, leaves nothing for a backward."""
    through_lse: Flag = False
    """Whether the gradient also comes back through the log-sum-exp (fused_attention)."""
    directions: list[Literal["forward", "backward"]] = Field(default=["forward", "backward"], min_length=1)
    """What is compared: the results, the gradients, or both."""
    sweep: VerifySweep | None = None
    """Every combination of these values becomes a case."""


class BenchProblem(Geometry):
    """What all bench problems have: a rival, which gets views of the same tensors."""

    rival: Literal["sdpa", "sdpa_padded_mask"] = "sdpa"
    """sdpa: torch's scaled_dot_product_attention, equal lengths. sdpa_padded_mask: the same on the padded
    batch with its boolean mask."""


class RatioLimits(Strict):
    """The largest allowed ratio of our median time to the rival's."""

    forward: float | None = Field(default=None, gt=0)
    """Of the forward alone, without a graph."""
    forward_backward: float | None = Field(default=None, gt=0)
    """Of a forward and its backward together."""


class TimeProblem(BenchProblem):
    """Time against the rival's, repeats interleaved."""

    measure: Literal["time"] = "time"
    """time: median times. peak_memory: memory beyond inputs and outputs."""
    directions: list[Literal["forward", "forward_backward"]] = Field(
        default=["forward", "forward_backward"], min_length=1
    )
    """What is timed."""
    limits: RatioLimits = RatioLimits()
    """Ratios that must be kept; without one a ratio is only shown."""


class MemoryLimits(Strict):
    """Allowed peak memory beyond inputs and outputs: the larger of the two."""

    mib: float = Field(gt=0)
    """Allowed MiB."""
    times_rival: float = Field(default=0.0, ge=0)
    """Allowed multiple of what the rival takes."""


class MemoryProblem(BenchProblem):
    """Peak memory of a forward beyond its inputs and outputs, in a process of its own."""

    measure: Literal["peak_memory"]
    """time: median times. peak_memory: memory beyond inputs and outputs."""
    limits: MemoryLimits | None = None
    """What must be kept; without it the figure is only shown."""


def _measure(value: Any) -> str:
    measure = value.get("measure", "time") if isinstance(value, dict) else getattr(value, "measure", "time")
    return "<peak_memory>" if measure == "peak_memory" else "<time>"


class DispatchProblem(Geometry):
    """A problem whose calls are made as on a GPU, up to what would be handed over to cuDNN."""

    op: OpWord = "fused_attention"
    """fused_attention: the differentiable functions. nvte: the four nvte_fused_attn functions."""
    directions: list[Literal["forward", "backward", "forward_backward"]] = Field(default=["forward"], min_length=1)
    """What is timed. Operands of fused_attention want gradients."""
    aim_us: float | None = Field(default=None, gt=0)
    """What a forward should take, preparation apart, in microseconds. It is shown next to the figure, no more."""


class Run(Strict):
    """What all runs have."""

    engine: EngineWord = "auto"
    """auto chooses; another word names the only engine that may be used."""
    out: str | None = None
    """The JSON of results, relative to the working directory. Default: results/<stem of the file>.json."""


class VerifyRun(Run):
    """Compares results and gradients with a float64 reference, within the error budget."""

    kind: Literal["verify"]
    """verify: compare with the reference. bench: time against torch's SDPA. dispatch: host time of a call."""
    problems: list[VerifyProblem] = Field(min_length=1)
    """What is compared."""


class BenchRun(Run):
    """Times against torch's scaled_dot_product_attention, after a check that both agree."""

    kind: Literal["bench"]
    """verify: compare with the reference. bench: time against torch's SDPA. dispatch: host time of a call."""
    repeats: Count = 21
    """Timed calls of each side."""
    warmup: Length = 3
    """Untimed calls of each side before."""
    problems: list[
        Annotated[
            Annotated[TimeProblem, Tag("<time>")] | Annotated[MemoryProblem, Tag("<peak_memory>")],
            Discriminator(_measure),
        ]
    ] = Field(min_length=1)
    """What is measured."""


class DispatchRun(Run):
    """Times calls on CPU tensors that are taken for a GPU's, with one thread, next to what others take."""

    kind: Literal["dispatch"]
    """verify: compare with the reference. bench: time against torch's SDPA. dispatch: host time of a call."""
    engine: Literal["auto", "cudnn"] = "auto"
    """Which word the calls have; cudnn is what computes under both."""
    target: TargetWord
    """The GPU that tensors are taken to be on, as `fusedattn targets` lists it."""
    repeats: Count = 2000
    """Timed calls of each kind."""
    warmup: Length = 200
    """Untimed calls of each kind before."""
    problems: list[DispatchProblem] = Field(min_length=1)
    """What is called."""


AnyRun: TypeAlias = VerifyRun | BenchRun | DispatchRun
RUNS: dict[str, type[AnyRun]] = {"verify": VerifyRun, "bench": BenchRun, "dispatch": DispatchRun}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a run file, from which an editor completes it.

    >>> sorted(json_schema()["discriminator"]["mapping"])
    ['bench', 'dispatch', 'verify']
    """
    adapter: TypeAdapter[AnyRun] = TypeAdapter(Annotated[AnyRun, Field(discriminator="kind")])
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fusedattn run"}
    return schema | adapter.json_schema()
