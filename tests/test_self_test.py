"""Engines check themselves on a GPU first: what is right passes, each planted fault is named and disables."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cudnn_interpreter import InterpretingExecutor
from torch import Tensor

from fusedattn import fused_attention, runtime
from fusedattn.cache import clear_caches
from fusedattn.engines import self_test, self_test_check
from fusedattn.engines.base import Gradients, Problem
from fusedattn.engines.cudnn import CudnnEngine
from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.self_test import SelfTestedEngine
from fusedattn.engines.self_test_check import difference
from fusedattn.engines.self_test_check import expected as expected_of
from fusedattn.engines.self_test_problem import Canned, Family, computed, kept
from fusedattn.enums import Direction
from fusedattn.errors import BuildError
from fusedattn.runs.case import Case
from fusedattn.runs.oracle import expected
from fusedattn.target import TARGETS

CPU = torch.device("cpu")
H100 = TARGETS["h100"]
PLAIN = Family(Direction.backward, torch.bfloat16, *[False] * 6)
RAGGED = PLAIN._replace(ragged=True)
CAUSAL = PLAIN._replace(causal=True)
BIASED = PLAIN._replace(bias=True, dbias=True)
DROPPED = PLAIN._replace(dropout=True)


@pytest.fixture(autouse=True)
def no_disk_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSEDATTN_NO_DISK_CACHE", "1")
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


def families() -> Iterator[Family]:
    for dtype, *flags in itertools.product((torch.float16, torch.bfloat16), *[(False, True)] * 5):
        ragged, causal, bias, dbias, dropout = flags
        if bias or not dbias:
            yield Family(Direction.backward, dtype, ragged, causal, bias, dbias, dropout, False)


def call(dropout: float = 0.0, engine: str = "cudnn", backward: bool = True, rows: int = 4) -> Tensor:
    q, k, v = (torch.ones(1, rows, 2, 8, dtype=torch.bfloat16, requires_grad=backward) for _ in range(3))
    out = fused_attention(q, k, v, dropout=dropout, rng_state=torch.tensor([1, 2]) if dropout else None, engine=engine)
    if backward:
        out.sum().backward()
    return out.detach()


class TestProblem:
    @pytest.mark.parametrize("target", ["a100", "h100", "b200", "rtx5090"])
    def test_an_engine_that_is_right_passes(self, target: str) -> None:
        engine = CudnnEngine(TARGETS[target], InterpretingExecutor())
        assert {
            family: difference(Canned(family, TARGETS[target], CPU), engine) for family in families()
        } == dict.fromkeys(families())

    @pytest.mark.parametrize("family", list(families()), ids=Family.text)
    def test_what_is_right_is_what_the_reference_says(self, family: Family) -> None:
        canned = Canned(family, None, CPU)
        keep = None
        if family.dropout:
            g = torch.Generator().manual_seed(0)
            keep = [torch.rand(2, s.length_q, s.length_kv, generator=g) > 0.25 for s in canned.sequences()]
        padded = None if keep is None else torch.zeros(5, 2, canned.max_q, canned.max_kv, dtype=torch.bool)
        for b, part in enumerate(keep or ()):
            padded[b, :, : part.shape[1], : part.shape[2]] = part
        problem = canned.problem
        case = Case(
            (problem.q, problem.k, problem.v),
            "thd_thd_thd" if family.ragged else "bhsd_bhsd_bhsd",
            problem.bias,
            problem.spec.bias_type.word,
            problem.spec.mask_type.word,
            problem.lengths.q.cu_seqlens,
            problem.lengths.kv.cu_seqlens,
            canned.max_q if family.ragged else None,
            canned.max_kv if family.ragged else None,
            attn_scale=problem.attn_scale,
            dropout=problem.dropout,
        )
        want = expected(case, canned.dout, keep=padded)
        got = expected_of(canned, keep)
        assert got.keys() == want.keys()
        for name, truth in want.items():
            torch.testing.assert_close(got[name], truth, rtol=1e-9, atol=1e-12)

    def test_it_holds_what_is_hard(self) -> None:
        for family in (PLAIN, RAGGED):
            canned = Canned(family, None, CPU)
            lengths = list(zip(canned.lengths_q, canned.lengths_kv, strict=True))
            assert any(q and not kv for q, kv in lengths)
            assert any(kv and not q for q, kv in lengths)
            assert max(canned.lengths_q) > 128 < max(canned.lengths_kv)
            outside = expected_of(canned, None)["lse"] == -torch.inf
            for tensor in (canned.problem.q, canned.dout):
                assert tensor[outside].isnan().any()
            assert canned.problem.k.max() == canned.problem.v.max() == 1000.0
        biased = Canned(BIASED, None, CPU)
        assert biased.problem.bias is not None
        assert (biased.problem.bias[0, 0, 2] == -torch.inf).all()
        assert 0.05 < (biased.problem.bias == -torch.inf).float().mean() < 0.08
        assert (expected_of(biased, None)["lse"][1, 0, 2]) == -torch.inf

    def test_the_pattern_is_read_off_the_forward(self) -> None:
        for family in (DROPPED, DROPPED._replace(ragged=True), DROPPED._replace(causal=True, bias=True)):
            canned = Canned(family, H100, CPU)
            engine = CudnnEngine(H100, InterpretingExecutor())
            keep = kept(canned, engine)
            got, want = computed(canned, engine)["out"], expected_of(canned, keep)["out"]
            assert (got.double() - want).abs().max() < 0.03
            flipped = [~part for part in keep]
            assert (got.double() - expected_of(canned, flipped)["out"]).abs().max() > 0.3


Tensors = dict[int, Tensor]


class Broken:
    """An interpreter with one thing wrong with it.

    Args:
        before: Makes of what a graph is given what it gets.
        after: Spoils what it has written.
        **changes: Attributes of another key, whose graph is run instead.
    """

    def __init__(
        self, before: Callable[..., Tensors] | None = None, after: Callable[..., Any] | None = None, **changes: Any
    ):
        self.inner, self.before, self.after, self.changes = InterpretingExecutor(), before, after, changes

    def executable(self, key: SdpaKey) -> BrokenExecutable:
        return BrokenExecutable(self, key, self.inner.executable(dataclasses.replace(key, **self.changes)))


class BrokenExecutable:
    def __init__(self, broken: Broken, key: SdpaKey, inner: Any) -> None:
        self.broken, self.key, self.inner = broken, key, inner
        self.uids, self.workspace_bytes = inner.uids, inner.workspace_bytes

    def run(self, tensors: Sequence[Tensor], workspace: Tensor | None) -> None:
        bound = dict(zip(self.uids, tensors, strict=True))
        given = bound if self.broken.before is None else bound | self.broken.before(self.key, bound)
        self.inner.run([given[uid] for uid in self.uids], workspace)
        if self.broken.after is not None:
            self.broken.after(self.key, bound)


def swap(one: Role, other: Role, direction: Direction | None = None) -> Callable[..., Tensors]:
    def swapped(key: SdpaKey, bound: Tensors) -> Tensors:
        return {one: bound[other], other: bound[one]} if direction in (None, key.direction) else {}

    return swapped


def change(role: Role, how: Callable[[Tensor], Tensor], direction: Direction | None = None) -> Callable[..., Tensors]:
    """Another tensor in the place of an input."""
    return lambda key, bound: {role: how(bound[role])} if direction in (None, key.direction) else {}


def spoil(role: Role, how: Callable[[Tensor], Any], direction: Direction = Direction.backward) -> Callable[..., Any]:
    """Something else in an output."""
    return lambda key, bound: how(bound[role]) if direction is key.direction else None


def raises(key: SdpaKey, bound: Tensors) -> Tensors:
    raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")


WRONG_SCALE = change(Role.ATTN_SCALE, lambda scale: scale * 1.5)
NAN_IN_DV = spoil(Role.DV, lambda dv: dv[..., :1].fill_(torch.nan))
FAULTS = {
    "swapped K and V": (RAGGED, Broken(swap(Role.K, Role.V)), "out: error"),
    "wrong scale": (PLAIN, Broken(WRONG_SCALE), "out: error"),
    "wrong scale, causal": (CAUSAL, Broken(WRONG_SCALE), "lse: error"),
    "wrong scale in backward": (
        PLAIN,
        Broken(change(Role.ATTN_SCALE, lambda x: x * 1.1, Direction.backward)),
        r"\): dq: error",
    ),
    "another seed in backward": (
        DROPPED,
        Broken(change(Role.SEED, lambda seed: seed + 1, Direction.backward)),
        r"\): dq: error",
    ),
    "seed and offset swapped in backward": (
        DROPPED,
        Broken(swap(Role.SEED, Role.OFFSET, Direction.backward)),
        r"\): dq: error",
    ),
    "probability inverted": (DROPPED, Broken(dropout=0.75), r"dropout: 0\.25\d of .* kept, expected 0\.750"),
    "nearly no dropout": (DROPPED, Broken(dropout=0.01), r"dropout: 0\.99"),
    "one key too few": (RAGGED, Broken(change(Role.SEQ_LEN_KV, lambda n: (n - 1).clamp_min(0))), "out: error"),
    "no causal mask": (RAGGED._replace(causal=True), Broken(causal=False), "lse: error"),
    "no bias": (BIASED, Broken(change(Role.BIAS, torch.zeros_like)), "lse: error"),
    "half of dBias": (
        BIASED,
        Broken(after=spoil(Role.DBIAS, lambda x: x.mul_(0.5))),
        r"\): dbias: error [^;]*\. Please",
    ),
    "statistics in base 2": (
        PLAIN,
        Broken(after=spoil(Role.STATS, lambda lse: lse.mul_(1.4427), Direction.forward)),
        r"\): lse: error",
    ),
    "nothing written": (
        PLAIN,
        Broken(after=spoil(Role.OUT, lambda out: out.fill_(torch.nan), Direction.forward)),
        "out: error inf",
    ),
    "NaN in dV": (PLAIN, Broken(after=NAN_IN_DV), r"\): dv: error inf over [^;]*\. Please"),
    "NaN in dQ": (RAGGED, Broken(after=spoil(Role.DQ, lambda dq: dq[5:6].fill_(torch.nan))), r"\): dq: error inf"),
    "an exception": (PLAIN, Broken(raises), "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED. Please"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    family, executor, message = FAULTS[fault]
    engine = SelfTestedEngine(CudnnEngine(H100, executor), "cuDNN", H100)
    with pytest.raises(BuildError, match=message) as error:
        backward(engine, Canned(family, H100, CPU))
    start = f"cannot have the cuDNN engine on cpu: its self-test failed ({family.text()}): "
    assert str(error.value).startswith(start)
    assert "Please report this text with the name of the GPU" in str(error.value)


def forward(engine: Any, canned: Canned) -> None:
    out = torch.empty_like(canned.problem.q)
    engine.forward(canned.problem, out, out.new_empty(out.shape[:-1], dtype=torch.float32))


def backward(engine: Any, canned: Canned) -> None:
    problem = canned.problem
    out, bias = torch.zeros_like(problem.q), torch.empty_like(problem.bias) if canned.family.dbias else None
    gradients = Gradients(*(torch.empty_like(x) for x in (problem.q, problem.k, problem.v)), bias)
    engine.backward(problem, canned.dout, None, out, out.new_zeros(out.shape[:-1], dtype=torch.float32), gradients)


FAMILIES = {
    "forward": (PLAIN._replace(direction=Direction.forward), {}),
    "backward": (PLAIN, {}),
    "deterministic backward": (PLAIN._replace(deterministic=True), {}),
    "dBias": (BIASED, {}),
    "bias alone": (BIASED._replace(dbias=False), {}),
    "ragged causal dropout": (DROPPED._replace(ragged=True, causal=True, dtype=torch.float16), {}),
    "deterministic forward": (
        PLAIN._replace(direction=Direction.forward, deterministic=True),
        {"deterministic": False},
    ),
    "forward, bias to be differentiated": (BIASED._replace(direction=Direction.forward), {"dbias": False}),
    "forward, dropout": (DROPPED._replace(direction=Direction.forward), {"direction": Direction.backward}),
    "forward, bias to be differentiated, dropout": (
        BIASED._replace(direction=Direction.forward, dropout=True, deterministic=True),
        {"direction": Direction.backward},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_problem_belongs_to_its_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = FAMILIES[name]
    tested: list[Family] = []
    monkeypatch.setattr(self_test, "difference", lambda canned, engine: tested.append(canned.family))
    engine = SelfTestedEngine(CudnnEngine(H100, InterpretingExecutor()), "cuDNN", H100)
    (forward if family.direction is Direction.forward else backward)(engine, Canned(family, H100, CPU))
    assert tested == [family._replace(**changes)]


class BadTail:
    """An engine that leaves something behind: where the first sequence, which has no key, has its first row."""

    def __init__(self, name: str) -> None:
        self.inner, self.name = CudnnEngine(H100, InterpretingExecutor()), name

    def forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        self.inner.forward(problem, out, lse)
        if self.name == "out":
            out[-1] = 1.0
        if self.name == "lse":
            lse[-1] = 0.0

    def backward(
        self, problem: Problem, dout: Tensor, dlse: None, out: Tensor, lse: Tensor, gradients: Gradients
    ) -> None:
        self.inner.backward(problem, dout, dlse, out, lse, gradients)
        if self.name == "dq":
            gradients.q[0] = 1.0
        if self.name == "dk":
            gradients.k[-1] = torch.nan


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk"])
def test_a_tail_that_is_not_zero_is_named(name: str) -> None:
    found = difference(Canned(RAGGED, H100, CPU), BadTail(name))
    assert found is not None
    assert found.startswith(f"{name}: error")


@contextmanager
def on_a_gpu(executor: Any) -> Iterator[None]:
    with runtime.pretend(H100, executor, self_test=True):
        yield


class TestEngine:
    def test_it_runs_once_a_family(self) -> None:
        executor = InterpretingExecutor()
        with on_a_gpu(executor):
            call()
            first = executor.executions.total()
            call()
            assert executor.executions.total() == first + 2
            call(rows=5)
            assert executor.executions.total() == first + 4
            call(dropout=0.5)
            assert executor.executions.total() > first + 6

    def test_under_pretend_not_unless_asked_for(self) -> None:
        executor = InterpretingExecutor()
        with runtime.pretend(H100, executor):
            call()
        assert executor.executions.total() == 2

    def test_a_named_engine_raises_every_time_and_is_disabled_whole(self) -> None:
        with on_a_gpu(Broken(WRONG_SCALE)):
            for dropout in (0.0, 0.0, 0.5):
                with pytest.raises(
                    BuildError, match=r"the cuDNN engine on cpu: its self-test failed \(forward of bfl"
                ) as e:
                    call(dropout)
            assert "dropout" not in str(e.value).partition("Please")[0]

    def test_auto_computes_with_torch_and_warns_of_one_thing(self) -> None:
        with on_a_gpu(Broken(WRONG_SCALE)), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [call(engine="auto", rows=rows) for rows in (4, 4, 5, 6)]
        assert all(torch.equal(out, torch.ones_like(out)) for out in found)
        texts = [str(warning.message) for warning in caught]
        assert all(warning.category is RuntimeWarning for warning in caught)
        reasons = {text.partition("slower: ")[2] for text in texts}
        assert len(reasons) == 1
        [reason] = reasons
        assert "self-test failed (forward of bfloat16" in reason
        assert "out: error" in reason
        assert "Please report this text" in reason

    def test_a_fault_that_only_a_backward_has(self) -> None:
        with on_a_gpu(Broken(after=NAN_IN_DV)):
            call(backward=False)
            with pytest.raises(BuildError, match="dv: error inf"):
                call()
            # What is bound already goes on.
            call(backward=False)
            with pytest.raises(BuildError, match="dv: error inf"):
                call(backward=False, rows=5)

    def test_with_dropout_the_forward_checks_the_backward(self) -> None:
        with on_a_gpu(Broken(after=NAN_IN_DV)), pytest.raises(BuildError, match=r"\(backward of bf.* dv: error inf"):
            call(dropout=0.5, backward=False)

    def test_it_binds_what_the_engine_binds(self) -> None:
        engine = SelfTestedEngine(CudnnEngine(H100, InterpretingExecutor()), "cuDNN", H100)
        problem = Canned(RAGGED, H100, CPU).problem
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:-1])
        engine.forward(problem, out, lse)
        bound = engine.bind(problem, out, lse)
        assert bound is not None
        again = torch.empty_like(out)
        bound(problem, again, lse)
        assert torch.equal(again, out)

    def test_threads_wait_for_one_test(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tests: list[Family] = []

        def slow(canned: Canned, engine: object) -> None:
            tests.append(canned.family)
            time.sleep(0.2)

        monkeypatch.setattr(self_test, "difference", slow)
        found: list[Tensor] = []
        with on_a_gpu(InterpretingExecutor()):
            threads = [threading.Thread(target=lambda: found.append(call(backward=False))) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(found) == 8
        assert len(tests) == 1

    def test_not_during_a_capture(self) -> None:
        engine = SelfTestedEngine(CudnnEngine(H100, InterpretingExecutor()), "cuDNN", H100)
        canned = Canned(PLAIN, H100, CPU)
        free = canned.problem
        canned.problem = free._replace(spec=free.spec.model_copy(update={"capturing": True}))
        message = (
            r"its self-test \(forward of bfloat16\) reads results back, which a capture.*Call the function once before"
        )
        with pytest.raises(BuildError, match=message):
            forward(engine, canned)
        forward(engine, Canned(PLAIN, H100, CPU))
        forward(engine, canned)

    @pytest.mark.parametrize("error", [BuildError("a plan", "there is none"), torch.OutOfMemoryError("no memory")])
    def test_what_is_no_verdict(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(canned: Canned, engine: object) -> None:
            raise error

        with on_a_gpu(InterpretingExecutor()):
            with monkeypatch.context() as patched:
                patched.setattr(self_test, "difference", fail)
                with pytest.raises(type(error), match=str(error)):
                    call()
            call()

    def test_it_leaves_torchs_generator_alone_and_works_in_inference_mode(self) -> None:
        state = torch.get_rng_state()
        with on_a_gpu(InterpretingExecutor()), torch.inference_mode():
            call(backward=False)
        assert torch.equal(torch.get_rng_state(), state)

    def test_it_does_not_follow_default_dtype_and_device(self) -> None:
        engine = CudnnEngine(H100, InterpretingExecutor())
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                canned = Canned(DROPPED._replace(bias=True, dbias=True), H100, CPU)
                expected_of(canned, None)
            assert difference(canned, engine) is None
        finally:
            torch.set_default_dtype(torch.float32)


class Kept(dict[str, bytes]):
    """A store."""

    def load(self, key: str) -> bytes | None:
        return self.get(key)

    def save(self, key: str, blob: bytes) -> None:
        self[key] = blob


class TestVerdicts:
    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Kept:
        store = Kept()
        monkeypatch.setattr("fusedattn.engines.self_test.default_store", lambda: store)
        monkeypatch.setattr(self_test, "driver_version", lambda: "NVRM version: 580.65.06")
        return store

    def test_what_passed_is_kept(self, store: Kept) -> None:
        counts = []
        for _ in range(2):
            executor = InterpretingExecutor()
            with on_a_gpu(executor):
                call()
            counts.append(executor.executions.total())
        assert counts[0] > counts[1] == 2
        assert list(store.values()) == [b"passed"] * 2

    def test_what_failed_is_not(self, store: Kept) -> None:
        with on_a_gpu(Broken(WRONG_SCALE)), pytest.raises(BuildError, match="self-test"):
            call()
        assert not store

    def test_other_bytes_are_no_verdict(self, store: Kept) -> None:
        store[self_test.verdict_name(PLAIN._replace(direction=Direction.forward), "cuDNN", H100, CPU)] = b"failed"
        executor = InterpretingExecutor()
        with on_a_gpu(executor):
            call(backward=False)
        assert executor.executions.total() == 2

    def test_nothing_is_kept_without_a_store_or_a_drivers_version(
        self, store: Kept, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self_test, "driver_version", lambda: None)
        with on_a_gpu(InterpretingExecutor()):
            call()
        assert not store
        monkeypatch.setattr("fusedattn.engines.self_test.default_store", lambda: None)
        with on_a_gpu(InterpretingExecutor()):
            call()

    @pytest.mark.parametrize(
        "change", ["family", "engine", "target", "device", "driver_version", "source_hash", "_version", "torch"]
    )
    def test_a_verdict_is_of_all_that_it_may_depend_on(self, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self_test, "driver_version", lambda: "580")
        arguments = {"family": PLAIN, "engine": "cuDNN", "target": H100, "device": CPU}
        name = self_test.verdict_name(**arguments)
        assert name == self_test.verdict_name(**arguments)
        others = {"family": RAGGED, "engine": "cuda", "target": TARGETS["h200"], "device": torch.device("cuda", 1)}
        if change in others:
            arguments[change] = others[change]
        elif change == "torch":
            monkeypatch.setattr(torch, "__version__", "2.99")
        else:
            monkeypatch.setattr(self_test, change, lambda *args: "another")
        assert self_test.verdict_name(**arguments) != name

    def test_the_digest_is_of_every_engine_source(self) -> None:
        assert self_test.source_hash() == self_test.source_hash()
        assert len(self_test.source_hash()) == 64

    def test_without_a_driver_there_is_no_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def read_text(self: object) -> str:
            raise FileNotFoundError

        monkeypatch.setattr(self_test.Path, "read_text", read_text)
        assert self_test.driver_version() is None

    def test_the_drivers_line_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self_test.Path, "read_text", lambda self: "NVRM version: 580.65.06\nGCC version: 13\n")
        assert self_test.driver_version() == "NVRM version: 580.65.06"


def test_an_implausible_pattern_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test_check, "DROPOUT", 0.5)
    canned = Canned(DROPPED, H100, CPU)
    canned.problem = canned.problem._replace(dropout=0.25)
    found = difference(canned, CudnnEngine(H100, InterpretingExecutor()))
    assert found is not None
    assert found.startswith("dropout: 0.7")
