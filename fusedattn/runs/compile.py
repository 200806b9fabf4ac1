"""A bundle from a run: every plan that its cases need on some GPUs, found out, built, and described."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, Protocol

from fusedattn.bundle_format import SCHEMA, BundledPlan, Manifest
from fusedattn.bundle_write import plan_file
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.errors import BuildError, RunFileError, SpecError
from fusedattn.rules_cudnn import PACKAGE
from fusedattn.runs.config import AnyRun
from fusedattn.runs.needed import Outcome, calls_of, record, self_tests
from fusedattn.runs.plan_builder import Built, PlanBuilder
from fusedattn.target import TARGETS, DeviceTarget, parse_target


class Progress(Protocol):
    """Who shows how far the work is."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


class Unplanned(NamedTuple):
    """A call without a plan.

    Attributes:
        case, direction, target: Which call.
        failed: Whether that is a failure, and not what the rules say.
        reason: Why.
    """

    case: str
    direction: str
    target: str
    failed: bool
    reason: str


class Compiled(NamedTuple):
    """What became of a run.

    Attributes:
        manifest: Of the bundle; None where there is no plan to put into one.
        blobs: By file of the bundle.
        unplanned: What has no plan.
    """

    manifest: Manifest | None
    blobs: dict[str, bytes]
    unplanned: list[Unplanned]


def parse_targets(words: Sequence[str]) -> list[DeviceTarget]:
    """The GPUs that a command names.

    Args:
        words: Names, or paths of .json files.

    Returns:
        The GPUs.

    Raises:
        SpecError: There is none, or one is unknown.

    Example:
        >>> [target.name for target in parse_targets(["H100", "b200"])]
        ['h100', 'b200']
    """
    if not words:
        expected = f"one of {', '.join(TARGETS)}, or the path of a .json file; again for each further one"
        raise SpecError("target", expected, "none", "Pass --target.")
    return [parse_target(word) for word in words]


def require_engine(file: Path, run: AnyRun) -> None:
    """See that a run leaves its cases to the cuDNN engine; raises ``RunFileError`` where it names another."""
    if run.engine not in ("auto", "cudnn"):
        raise RunFileError(f"{file}: engine: expected auto or cudnn, got '{run.engine}', which has no plans to compile")


def compile_run(
    run: AnyRun, targets: Sequence[DeviceTarget], folder: Path, builder: PlanBuilder, progress: Progress
) -> Compiled:
    """Build the plans that a run needs.

    Args:
        run: The run.
        targets: The GPUs; of several with one fingerprint, whose plans are the same, the first is built for.
        folder: Where the paths of tensor files start.
        builder: Builds plans.
        progress: Called before the first plan and after each.

    Returns:
        The plans.

    Raises:
        RunFileError: What a tensor file holds does not fit.
    """
    distinct = list({target.fingerprint: target for target in reversed(targets)}.values())[::-1]
    plans: dict[SdpaKey, Built | BuildError] = {}
    outcomes: list[Outcome] = []
    pending = list(calls_of(run, distinct, folder))
    tested = False
    while pending:
        workspaces = {key: _workspace(found) for key, found in plans.items()}
        recorded = [record(call, workspaces) for call in pending]
        new = dict.fromkeys(key for outcome in recorded for key in outcome.keys if key not in plans)
        outcomes += [outcome for outcome in recorded if not any(key in new for key in outcome.keys)]
        pending = [outcome.call for outcome in recorded if any(key in new for key in outcome.keys)]
        total = len(plans) + len(new)
        progress(len(plans), total, "")
        for key, found in builder.build(new):
            plans[key] = found
            progress(len(plans), total, words(key))
        if not pending and not tested:
            pending = list(self_tests(key for outcome in outcomes for key in outcome.keys if _is_built(plans, key)))
            tested = True
    return _compiled(outcomes, plans, targets)


def _workspace(found: Built | BuildError) -> int | BuildError:
    return found if isinstance(found, BuildError) else found.plan.workspace_bytes


def _is_built(plans: Mapping[SdpaKey, Built | BuildError], key: SdpaKey) -> bool:
    return isinstance(plans[key], Built)


def _compiled(
    outcomes: Iterable[Outcome], plans: Mapping[SdpaKey, Built | BuildError], targets: Sequence[DeviceTarget]
) -> Compiled:
    cases: dict[SdpaKey, dict[str, None]] = {}
    unplanned = []
    for outcome in outcomes:
        call = outcome.call
        for key in outcome.keys:
            cases.setdefault(key, {})[call.case] = None
        if outcome.refused or outcome.fault:
            reason = outcome.fault or "; ".join(outcome.refused)
            words = (call.case, call.direction.word, call.target.name)
            unplanned.append(Unplanned(*words, bool(outcome.fault), reason))
    built = {key: found for key in cases if isinstance(found := plans[key], Built)}
    if not built:
        return Compiled(None, {}, unplanned)
    some = next(iter(built.values()))
    entries = [_entry(key, found, tuple(cases[key])) for key, found in built.items()]
    manifest = Manifest(
        schema_number=SCHEMA,
        fusedattn=_version("fusedattn"),
        cudnn=some.cudnn,
        frontend=_version(PACKAGE),
        cuda_major=some.cuda_major,
        targets=tuple(targets),
        plans=tuple(entries),
    )
    blobs = {entry.file: found.plan.blob for entry, found in zip(entries, built.values(), strict=True)}
    return Compiled(manifest, blobs, unplanned)


def _entry(key: SdpaKey, built: Built, cases: tuple[str, ...]) -> BundledPlan:
    plan = built.plan
    digest, file = plan_file(plan.blob)
    return BundledPlan(
        problem=words(key),
        cases=cases,
        key=key.text(),
        direction="backward" if key.backward else "forward",
        target=key.target.name,
        fingerprint=key.target.fingerprint,
        kernels=plan.kernels,
        workspace_bytes=plan.workspace_bytes,
        build_ms=round(plan.build_ms, 1),
        sha256=digest,
        bytes=len(plan.blob),
        file=file,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def words(key: SdpaKey) -> str:
    """What a graph computes, in words.

    Args:
        key: The graph.

    Returns:
        Dtype, sizes and features; sizes of a ragged one are those of its bucket.

    Raises:
        Nothing.

    Example:
        >>> from fusedattn.engines.cudnn_key import TensorKey
        >>> from fusedattn.enums import Direction
        >>> from fusedattn.target import TARGETS
        >>> q = TensorKey((2, 4, 64, 32), (8192, 32, 128, 1), "bfloat16")
        >>> tensors = tuple((role, q) for role in (Role.Q, Role.K, Role.V, Role.OUT))
        >>> words(SdpaKey(TARGETS["h100"], Direction.forward, tensors, padding=True, dropout=0.1))
        'bfloat16 B=2 H=4 Sq=64 Skv=64 D=32 padding dropout=0.1'
    """
    q, kv = key.tensor(Role.Q), key.tensor(Role.K)
    batch, heads, rows, width = q.dim
    found = [q.dtype, f"B={batch}", f"H={heads}", f"Sq={rows}", f"Skv={kv.dim[2]}", f"D={width}"]
    if key.ragged:
        found += ["ragged", f"T<={key.max_total_q}"]
        found += [f"Tkv<={key.max_total_kv}"] if key.max_total_kv != key.max_total_q else []
    elif key.padding:
        found.append("padding")
    found += ["causal"] if key.causal else []
    if Role.BIAS in key:
        bias = key.tensor(Role.BIAS)
        found.append(f"bias={bias.dtype}[{','.join(map(str, bias.dim))}]")
    found += ["dBias"] if Role.DBIAS in key else []
    found += [f"dropout={key.dropout:g}"] if key.dropout else []
    found += ["deterministic"] if key.deterministic else []
    return " ".join(found)
