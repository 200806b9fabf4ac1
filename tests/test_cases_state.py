"""Cases of public bug reports about what is remembered between calls, threads and processes."""

import copy
import io
import itertools
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedattn import EngineRefusal, NVTE_Mask_Type, NVTETensorPack, SpecError, clear_caches, fused_attention, runtime
from fusedattn import nvte_fused_attn_bwd_qkvpacked as bwd_qkvpacked
from fusedattn import nvte_fused_attn_fwd_qkvpacked as fwd_qkvpacked
from fusedattn.runs.oracle import Case, run_case

RNG_STATE = torch.tensor([3, 4])


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def case_of(
    rows: int = 7, keys: int = 7, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32, **changes: Any
) -> Case:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, s, heads, dim, generator=g).to(dtype) for s in (rows, keys, keys))
    fields: dict[str, Any] = {"attn_scale": 0.5, "bias_type": "post_scale_bias", "dropout": 0.3, "rng_state": RNG_STATE}
    bias = torch.randn(1, heads, rows, keys, generator=g)
    return Case((q, k, v), **{"layout": "bshd_bshd_bshd", "bias": bias} | fields | changes)


def with_strides(case: Case, permutation: tuple[int, ...]) -> Case:
    """The same numbers elsewhere in memory."""
    back = tuple(permutation.index(axis) for axis in range(4))
    operands = tuple(x.permute(permutation).contiguous().permute(back) for x in case.operands)
    return Case(**vars(case) | {"operands": operands})


def dout_of(case: Case) -> Tensor:
    return torch.randn(case.operands[0].shape, generator=torch.Generator().manual_seed(1)).to(case.operands[0].dtype)


# C1

CHANGES: dict[str, Callable[[], Case]] = {
    "scale": lambda: case_of(attn_scale=0.25),
    "scale 0": lambda: case_of(attn_scale=0.0),
    "bias type": lambda: case_of(bias_type="pre_scale_bias"),
    "no bias": lambda: case_of(bias_type="no_bias", bias=None),
    "bias shape": lambda: case_of(bias=torch.linspace(0, 1, 7).view(1, 1, 1, 7)),
    "bias dtype": lambda: case_of(bias=torch.linspace(0, 1, 98).view(1, 2, 7, 7).double()),
    "mask type": lambda: case_of(mask_type="causal"),
    "dropout": lambda: case_of(dropout=0.6),
    "no dropout": lambda: case_of(dropout=0.0),
    "rng_state": lambda: case_of(rng_state=torch.tensor([3, 5])),
    "dtype": lambda: case_of(dtype=torch.float64),
    "layout": lambda: case_of(layout="sbhd_sbhd_sbhd", bias=torch.linspace(0, 1, 4).view(1, 1, 2, 2)),
    "strides": lambda: with_strides(case_of(), (3, 0, 1, 2)),
    "Sq": lambda: case_of(rows=5),
    "Skv": lambda: case_of(keys=9),
    "H": lambda: case_of(heads=3),
    "D": lambda: case_of(dim=16),
    "lengths": lambda: case_of(mask_type="padding", cu_seqlens_q=torch.tensor([0, 3, 10]).int()),
    "other lengths": lambda: case_of(mask_type="padding", cu_seqlens_q=torch.tensor([0, 7, 9]).int()),
    "engine": lambda: case_of(engine="torch"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_c1_one_thing_changes(change: Callable[[], Case]) -> None:
    changed, base = change(), case_of()
    fresh = run_case(changed, dout_of(changed))
    clear_caches()
    original = run_case(base, dout_of(base))
    for case, want in ((changed, fresh), (base, original), (changed, fresh)):
        got = run_case(case, dout_of(case))
        assert list(got) == list(want)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_c1_flags() -> None:
    """Training and determinism: a warm call of the other kind changes neither."""
    case, plain = case_of(), run_case(case_of(dropout=0.0))["out"]
    want = run_case(case)["out"]
    for _ in range(2):
        assert torch.equal(run_case(case, is_training=False)["out"], plain)
        assert torch.equal(run_case(case)["out"], want)
        for flag in (True, False):
            got = fused_attention(
                *case.operands, case.bias, attn_scale=0.5, dropout=0.3, rng_state=RNG_STATE, deterministic=flag
            )
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.int32,) * 2], ids=str)
def test_c1_a_warm_plan_excuses_nothing(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The same shapes and strides in dtypes that are refused."""
    x = torch.ones(1, 3, 2, 8)
    fused_attention(x, x, x)
    with pytest.raises(SpecError, match="dtype"):
        fused_attention(x.to(dtypes[0]), x.to(dtypes[1]), x.to(dtypes[1]))


def test_c1_lengths_make_no_new_plan() -> None:
    """Nor do scale, probability or the same call again.

    With dropout, backward asks for the engine that the forward took, and so for a plan of its own.
    """
    for lengths, scale, p in (([0, 3, 10], 0.5, 0.3), ([0, 7, 9], 0.25, 0.3), ([0, 0, 7], 2.0, 0.1)):
        case = case_of(
            mask_type="padding", cu_seqlens_q=torch.tensor(lengths).int(), attn_scale=scale, dropout=p
        )  # fmt: skip
        for _ in range(2):
            run_case(case, dout_of(case))
    assert len(runtime._PLANS) == 2


def test_c1_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_PLANS_CAPACITY", 3)
    wanted = [run_case(case_of(rows=n)) for n in range(1, 9)]
    assert len(runtime._PLANS) <= 3
    for n, want in enumerate(wanted, start=1):
        assert torch.equal(run_case(case_of(rows=n))["out"], want["out"])


# C3


def test_c3_threads() -> None:
    cases = [
        case_of(), case_of(rows=5), case_of(keys=9, mask_type="causal"), case_of(heads=3, dropout=0.0),
        case_of(dim=16, bias=None, bias_type="no_bias"), case_of(dtype=torch.bfloat16, bias_type="pre_scale_bias"),
    ]  # fmt: skip
    wanted = [run_case(case, dout_of(case)) for case in cases]
    clear_caches()
    start, wrong = threading.Barrier(8), []

    def work(first: int) -> None:
        try:
            start.wait()
            for index in itertools.islice(itertools.cycle(range(6)), first, first + 50):
                got = run_case(cases[index], dout_of(cases[index]))
                if not all(torch.equal(got[name], want) for name, want in wanted[index].items()):
                    wrong.append(f"case {index} differs")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# I2


def test_i2_a_named_engine_is_not_replaced() -> None:
    case = case_of()
    want = run_case(case)
    for engine in ("cudnn", "cuda"):
        for _ in range(3):
            with pytest.raises(EngineRefusal, match=f"{engine}(.|\n)*torch"):
                run_case(case_of(engine=engine))
    # A refusal leaves nothing behind.
    assert torch.equal(run_case(case)["out"], want["out"])


# I3


class Attention(nn.Module):
    """What a user's module looks like."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(1, 2, 1, 5))
        self.attend = fused_attention
        self.mask = NVTE_Mask_Type.NVTE_CAUSAL_MASK

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        return self.attend(q, k, v, self.bias, attn_mask_type=self.mask).flatten(-2)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


COPIES = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_i3_copies_of_a_warm_module(copied: Callable[[nn.Module], nn.Module]) -> None:
    module, x = Attention(), torch.randn(3, 5, 8)
    want = module(x)
    want.sum().backward()
    other = copied(module)
    assert torch.equal(other(x), want)
    assert other.mask is module.mask


@pytest.mark.parametrize("copied", [COPIES["pickle"], copy.deepcopy], ids=["pickle", "deepcopy"])
def test_i3_copies_of_a_pack(copied: Callable[[Any], Any]) -> None:
    qkv, offsets, bias = torch.randn(7, 3, 2, 8), torch.tensor([0, 3, 7]).int(), torch.randn(1, 2, 4, 4)
    words = (4, 0.3, 0.2, "t3hd", "post_scale_bias", "causal")
    out, pack = fwd_qkvpacked(qkv, bias, None, None, None, offsets, RNG_STATE, 4, True, *words[1:])
    other = copied(pack)
    assert isinstance(other, NVTETensorPack)
    want, got = (bwd_qkvpacked(qkv, out, out, None, None, x, None, None, offsets, *words) for x in (pack, other))
    assert torch.equal(got.dQKV, want.dQKV)
    assert torch.equal(got.dBias, want.dBias)


def in_another_process(module: nn.Module, x: Tensor) -> list[float]:
    return module(x).flatten().tolist()


def test_i3_through_a_spawned_process() -> None:
    module, x = Attention(), torch.randn(1, 5, 8)
    want = module(x)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        got = pool.submit(in_another_process, pickle.loads(pickle.dumps(module)).requires_grad_(False), x).result(60)
    torch.testing.assert_close(torch.tensor(got), want.detach().flatten())
