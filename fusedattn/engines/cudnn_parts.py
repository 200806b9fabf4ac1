"""Running a call in one graph, or in parts where its workspace would be too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fusedattn.counters import COUNTERS
from fusedattn.engines.cudnn_call import Call, Part
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.errors import BuildError
from fusedattn.settings import settings

# Odd, so that seeds of parts differ; 2**64 over the golden ratio, so that they differ in many bits.
_SEED_STEP = 0x9E3779B97F4A7C15
_CAPACITY = 4096
# Sequences, and heads, of a graph; of more it is built, but its launch fails.
_MOST_IN_GRID = 65535


class Executable(Protocol):
    """A graph that can be run.

    Attributes:
        uids: Of the tensors that ``run`` takes, ascending; ATTN_SCALE among them, a float32 on the host.
        workspace_bytes: Scratch memory of one run.
    """

    @property
    def uids(self) -> tuple[int, ...]: ...

    @property
    def workspace_bytes(self) -> int: ...

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        """Run on the current stream; ``tensors`` in the order of ``uids``, of which only addresses count."""


class Executor(Protocol):
    """Who turns keys into executables, and remembers them."""

    def executable(self, key: SdpaKey) -> Executable:
        """The executable of a key; raises ``BuildError`` where there is none."""


class Cut(NamedTuple):
    """How a call is cut: sequences and heads of a part."""

    batch: int
    heads: int


class Launcher:
    """Finds what a call runs, by signature, and runs it.

    Args:
        executor: Who knows workspaces, and runs graphs.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._parts: dict[object, tuple[tuple[Part, SdpaKey], ...]] = {}

    def run(self, call: Call, pair: Callable[[], Sequence[Call]] | None, attn_scale: Tensor) -> None:
        """Run a call, in as few parts as the bound of the workspace allows.

        Args:
            call: The call; the gradient of its bias, if it has one, is of the bias's shape and the operands' dtype.
            pair: Makes the calls that must be cut alike, with dropout those of both directions, this one's or larger.
                None where this one alone counts.
            attn_scale: float32 on the host.

        Returns:
            None; the outputs are written. Gradients of a bias that parts share are summed in float32.

        Raises:
            BuildError: There is no plan, or one head of one sequence needs more than the bound.
        """
        signature = call.signature()
        parts = self._parts.get(signature)
        if parts is None:
            cut = find_cut([call] if pair is None else pair(), self.executor)
            if len(self._parts) >= _CAPACITY:
                self._parts.clear()
            parts = self._parts[signature] = tuple((part, call.key(part)) for part in call.parts(*cut))
        COUNTERS["executions"] += len(parts)
        total = call.tensors.get(Role.DBIAS)
        if len(parts) > 1:
            COUNTERS["groups"] += len(parts)
        # Parts write the rows of their own sequences; what they have in common is put in its place at the end.
        compact: dict[range, Tensor] = {}
        if len(parts) == 1 or total is None:
            for part, key in parts:
                self._run_part(call, part, key, attn_scale, compact)
            _deliver(call, compact)
            return
        # Parts overwrite what they share, and 16 bits are too few to add in.
        shared = call._replace(tensors={**call.tensors, Role.DBIAS: torch.empty_like(total)})
        sums = call._replace(tensors={Role.DBIAS: torch.zeros_like(total, dtype=torch.float32)})
        for part, key in parts:
            self._run_part(shared, part, key, attn_scale, compact)
            sums.slice(Role.DBIAS, part).add_(shared.slice(Role.DBIAS, part))
        total.copy_(sums.tensors[Role.DBIAS])
        _deliver(call, compact)

    def key_in_one_part(self, call: Call) -> SdpaKey | None:
        """The key of a call that ran before, if in one part; else None."""
        parts = self._parts.get(call.signature(), ())
        return parts[0][1] if len(parts) == 1 else None

    def _run_part(self, call: Call, part: Part, key: SdpaKey, attn_scale: Tensor, compact: dict[range, Tensor]) -> None:
        executable = self.executor.executable(key)
        found = call.bound(key, part)
        if call.compact_dq:
            if part.heads not in compact:
                compact[part.heads] = torch.empty_like(found[Role.DQ], device=call.problem.q.device)
            found[Role.DQ] = compact[part.heads]
        found[Role.ATTN_SCALE] = attn_scale
        if key.dropout:
            assert call.problem.rng_state is not None
            seed, offset = call.problem.rng_state.unbind()
            # Parts of one call drop by patterns of their own.
            found[Role.SEED] = seed + _seed_distance(part.number) if part.number else seed
            found[Role.OFFSET] = offset
        size = executable.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=call.problem.q.device) if size else None
        executable.run([found[uid] for uid in executable.uids], workspace)


def find_cut(calls: Sequence[Call], executor: Executor) -> Cut:
    """The largest parts that can be launched and with which the workspaces of all of some calls are within the bound.

    Args:
        calls: Calls of one problem, a forward before a backward.
        executor: Who knows workspaces.

    Returns:
        The cut; it depends on shapes alone.

    Raises:
        BuildError: One head of one sequence needs more than the bound, or there is no plan.
    """
    for cut in _cuts(calls[-1]):
        if max(cut) <= _MOST_IN_GRID and all(_fits(call, cut, executor) for call in calls):
            return cut
    limit = settings().workspace_limit_bytes >> 20
    hint = f"Raise FUSEDATTN_WORKSPACE_MB, which is {limit}, or pass engine='torch'."
    raise BuildError("a cuDNN plan", "one head of one sequence needs a larger workspace than allowed", hint)


def _cuts(call: Call) -> Iterator[Cut]:
    heads = call.problem.spec.heads
    batch, step = call.sizes.batch, 4 if call.sizes.bucketed else 2
    yield Cut(batch, heads)
    # A compact DQ is there for a workspace that has all tokens whatever the sequences.
    while call.compact_dq and heads > 1:
        heads = -(-heads // 2)
        yield Cut(batch, heads)
    while batch > 1:
        batch = -(-batch // step)
        yield Cut(batch, heads)
    while heads > 1:
        heads = -(-heads // 2)
        yield Cut(batch, heads)


def _fits(call: Call, cut: Cut, executor: Executor) -> bool:
    part = next(call.parts(*cut))
    limit = max(4 * call.part_bytes(part), settings().workspace_limit_bytes)
    return executor.executable(call.key(part)).workspace_bytes <= limit


def _deliver(call: Call, compact: dict[range, Tensor]) -> None:
    COUNTERS["copies"] += len(compact)
    for heads, written in compact.items():
        call.tensors[Role.DQ][:, heads.start : heads.stop].copy_(written)


def _seed_distance(number: int) -> int:
    """What to add to the seed of part 0, as int64."""
    distance = number * _SEED_STEP % 2**64
    return distance - 2**64 if distance >= 2**63 else distance
