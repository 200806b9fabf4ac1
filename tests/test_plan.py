"""Choice of the engine: rules, plans, the memo, and the warning of a fallback."""

import warnings

import pytest
import torch

import fusedattn
from fusedattn import Direction, Engine, EngineRefusal, NVTE_QKV_Layout, runtime
from fusedattn.plan import make_plan
from fusedattn.rules import RULES, availability, refusals
from fusedattn.rules_cudnn import CUDNN_ROWS
from fusedattn.spec import AttentionSpec, TensorSpec
from fusedattn.target import TARGETS


def spec(dtype: torch.dtype = torch.float32, device: str = "cpu", **fields: object) -> AttentionSpec:
    q = TensorSpec((1, 2, 3, 8), (48, 24, 8, 1), dtype, torch.device(device))
    target = TARGETS["h100"] if device.startswith("cuda") else None
    return AttentionSpec.of(
        layout=NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD, operands=(q, q, q), **{"target": target, **fields}
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_auto_on_cpu_is_torch(dtype: torch.dtype) -> None:
    plan = make_plan(spec(dtype), Engine.auto)
    assert (plan.chosen(), plan.fallback_warning()) == (Engine.torch, None)
    assert set(plan.refused) == {"cudnn", "cuda"}


@pytest.mark.parametrize(
    ("engine", "problem", "names"),
    [
        (Engine.cudnn, spec(), ["device", "dtype"]),
        (Engine.cudnn, spec(torch.float16), ["device"]),
        (Engine.cudnn, spec(torch.float16, "cuda:0"), []),
        (Engine.cudnn, spec(torch.float16, target=TARGETS["h100"]), []),
        (Engine.cudnn, spec(torch.float8_e4m3fn, "cuda:0"), ["FP8", "dtype"]),
        (Engine.cuda, spec(), ["release", "device"]),
        (Engine.cuda, spec(torch.float16, "cuda:0"), ["release"]),
        (Engine.torch, spec(), []),
        (Engine.torch, spec(torch.float8_e4m3fn), ["FP8"]),
        (Engine.torch, spec(torch.float16, "cuda:0", dropout=True, capturing=True), ["capture"]),
        (Engine.torch, spec(torch.float16, "cuda:0", capturing=True), []),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_every_failed_rule_is_told(engine: Engine, problem: AttentionSpec, names: list[str]) -> None:
    assert [reason.partition(":")[0] for reason in refusals(engine, problem)] == names


def test_each_rule_refuses_something() -> None:
    """Rows of the cuDNN engine have a test of their own."""
    problems = [spec(torch.float8_e5m2), spec(), spec(torch.float16, "cuda:0", dropout=True, capturing=True)]
    silent = {
        (engine.word, rule.name)
        for engine, rules in RULES.items()
        for rule in rules
        if rule not in CUDNN_ROWS and all(rule.holds(problem) for problem in problems)
    }
    assert silent == set()


def test_a_named_engine_never_falls_back() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(EngineRefusal, match=r"(?s)engine='cudnn'.*device: needs tensors.*Engines that can: torch"):
        fusedattn.fused_attention(q, q, q, engine="cudnn")


@pytest.mark.parametrize("direction", Direction)
def test_auto_on_a_gpu_takes_cudnn_or_says_why_it_is_slow(direction: Direction) -> None:
    half = make_plan(spec(torch.float16, "cuda:0", direction=direction), Engine.auto)
    assert (half.chosen(), half.fallback_warning()) == (Engine.cudnn, None)
    assert half.reason == "auto: on cuda the cudnn engine is the first that takes the problem"
    plan = make_plan(spec(device="cuda:0", direction=direction), Engine.auto)
    assert plan.chosen() is Engine.torch
    assert plan.fallback_warning() == (
        f"fusedattn computes {direction.word} on cuda:0 with the torch engine, which is slower: "
        "dtype: Q, K and V must be float16 or bfloat16, got float32"
    )
    assert make_plan(spec(device="cuda:0"), Engine.torch).fallback_warning() is None


def test_fall_back_is_for_auto_and_for_problems_that_torch_takes() -> None:
    plan = make_plan(spec(torch.float16, "cuda:0"), Engine.auto)
    assert plan.fall_back(Engine.cudnn, "no plan")
    assert (plan.chosen(), plan.refused["cudnn"]) == (Engine.torch, ("build: no plan",))
    assert plan.reason == "auto: the cudnn engine could not build what it needs"
    assert (plan.fallback_warning() or "").endswith("which is slower: build: no plan")
    assert not plan.fall_back(Engine.torch, "nothing is left")
    named = make_plan(spec(torch.float16, "cuda:0"), Engine.cudnn)
    assert not named.fall_back(Engine.cudnn, "no plan")
    assert named.chosen() is Engine.cudnn
    captured = make_plan(spec(torch.float16, "cuda:0", dropout=True, capturing=True), Engine.auto)
    assert not captured.fall_back(Engine.cudnn, "no plan")
    assert captured.chosen() is Engine.cudnn


def test_the_warning_comes_once_until_caches_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedattn.plan.Plan.fallback_warning", lambda plan: "slower")
    q = torch.zeros(1, 2, 3, 4)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="slower"):
            fusedattn.fused_attention(q, q, q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fusedattn.fused_attention(q, q, q)
        fusedattn.clear_caches()


def test_plans_are_remembered_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    fusedattn.clear_caches()
    made = []
    monkeypatch.setattr(runtime, "make_plan", lambda *args: made.append(1) or make_plan(*args))
    q, bias = torch.randn(1, 4, 2, 4), torch.randn(1, 1, 4, 4)
    for scale in (0.5, 0.25, float("nan")):
        fusedattn.fused_attention(q, q, q, attn_scale=scale)
    assert len(made) == 1
    changes = [
        {"bias": bias},
        {"bias": bias, "attn_bias_type": "pre_scale"},
        {"attn_mask_type": "causal"},
        {"dropout": 0.5},
        {"deterministic": True},
        {"engine": "torch"},
        {"attn_scale": -0.5},
    ]
    for change in changes:
        fusedattn.fused_attention(q, q, q, **change)
    assert len(made) == 1 + len(changes)
    fusedattn.fused_attention(q.half(), q.half(), q.half())
    fusedattn.fused_attention(q.transpose(1, 2).contiguous().transpose(1, 2), q, q)
    assert len(made) == 3 + len(changes)


def test_directions_have_plans_of_their_own_but_with_dropout() -> None:
    fusedattn.clear_caches()
    q, bias = torch.randn(1, 4, 2, 4, requires_grad=True), torch.randn(1, 1, 4, 4, requires_grad=True)
    plans = {}
    for dropout in (0.0, 0.5):
        fusedattn.fused_attention(q, q, q, bias, dropout=dropout).sum().backward()
        plans[dropout] = [(plan.spec.direction, plan.spec.bias_gradient) for plan in runtime._PLANS.values()]
        fusedattn.clear_caches()
    assert plans[0.0] == [(Direction.forward, False), (Direction.backward, True)]
    # One engine and pattern: the forward's plan knows of the gradient. Backward names that engine.
    assert set(plans[0.5]) == {(Direction.forward, True)}


def test_the_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fusedattn.clear_caches()
    monkeypatch.setattr(runtime, "_PLANS_CAPACITY", 3)
    for rows in range(1, 9):
        q = torch.randn(1, rows, 1, 2)
        fusedattn.fused_attention(q, q, q)
        assert len(runtime._PLANS) <= 3


def test_availability_gives_a_reason_for_each_engine_that_is_not_here() -> None:
    found = availability()
    assert set(found) == {Engine.torch, Engine.cudnn, Engine.cuda}
    assert found[Engine.torch] is None
    assert found[Engine.cuda]
    assert (found[Engine.cudnn] is None) is torch.cuda.is_available()
