"""Environment variables: read once, checked, and read again after ``clear_caches``."""

from collections.abc import Iterator

import pytest
import torch

from fusedattn import SpecError, clear_caches, fused_attention
from fusedattn.cache import _CLEARERS, on_clear
from fusedattn.settings import Settings, settings


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FUSEDATTN_VALIDATE", raising=False)
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


@pytest.mark.parametrize(("value", "validate"), [(None, False), ("0", False), ("1", True)])
def test_validate(monkeypatch: pytest.MonkeyPatch, value: str | None, validate: bool) -> None:
    if value is not None:
        monkeypatch.setenv("FUSEDATTN_VALIDATE", value)
    assert settings() == Settings(validate_values=validate)


def test_values_hold_until_caches_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings().validate_values
    monkeypatch.setenv("FUSEDATTN_VALIDATE", "1")
    assert not settings().validate_values
    clear_caches()
    assert settings().validate_values


@pytest.mark.parametrize("value", ["", "2", "yes", "true", "01", " 1"])
def test_unknown_word_is_an_error_each_time(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FUSEDATTN_VALIDATE", value)
    for _ in range(2):
        with pytest.raises(SpecError) as raised:
            settings()
        assert (raised.value.argument, raised.value.expected, raised.value.got) == (
            "FUSEDATTN_VALIDATE",
            "0 or 1",
            repr(value),
        )
        assert "Set or unset the environment variable" in raised.value.hint


def test_nothing_on_cpu_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cu_seqlens = torch.randn(2, 5, 1, 4), torch.tensor([0, 3, 8])
    want = fused_attention(q, q, q, attn_mask_type="padding", cu_seqlens_q=cu_seqlens)
    for value in ("1", "0", "wrong"):
        monkeypatch.setenv("FUSEDATTN_VALIDATE", value)
        clear_caches()
        assert torch.equal(fused_attention(q, q, q, attn_mask_type="padding", cu_seqlens_q=cu_seqlens), want)
        with pytest.raises(SpecError, match="entries that never decrease"):
            fused_attention(q, q, q, attn_mask_type="padding", cu_seqlens_q=torch.tensor([0, 3, 2]))


def test_each_registered_cache_is_cleared() -> None:
    memo = {"key": 1}
    try:
        assert on_clear(memo.clear) == memo.clear
        clear_caches()
        assert memo == {}
    finally:
        _CLEARERS.remove(memo.clear)


def test_plans_are_forgotten_and_made_again() -> None:
    from fusedattn.runtime import _PLANS

    q = torch.randn(1, 2, 1, 4)
    want = fused_attention(q, q, q)
    assert len(_PLANS) == 1
    fused_attention(q, q, q, attn_scale=3.0)
    assert len(_PLANS) == 1
    clear_caches()
    assert len(_PLANS) == 0
    assert torch.equal(fused_attention(q, q, q), want)
