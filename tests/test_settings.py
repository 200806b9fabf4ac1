"""Environment variables: read once, checked, and read again after ``clear_caches``."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusedattn import SpecError, clear_caches, fused_attention
from fusedattn.settings import Settings, settings

HOME = Path("/home/someone")
DEFAULTS = Settings(
    validate_values=False,
    workspace_limit_bytes=512 << 20,
    cache_dir=HOME / ".cache" / "fusedattn",
    cache_limit_bytes=512 << 20,
    bundle=None,
    self_test=True,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*os.environ]:
        if name.startswith("FUSEDATTN_") or name == "XDG_CACHE_HOME":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(HOME))
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


def test_defaults() -> None:
    assert settings() == DEFAULTS


@pytest.mark.parametrize(
    ("environment", "field", "value"),
    [
        ({"FUSEDATTN_VALIDATE": "0"}, "validate_values", False),
        ({"FUSEDATTN_VALIDATE": "1"}, "validate_values", True),
        ({"FUSEDATTN_SELF_TEST": "1"}, "self_test", True),
        ({"FUSEDATTN_SELF_TEST": "0"}, "self_test", False),
        ({"FUSEDATTN_WORKSPACE_MB": "1"}, "workspace_limit_bytes", 1048576),
        ({"FUSEDATTN_WORKSPACE_MB": "999999999"}, "workspace_limit_bytes", 999999999 << 20),
        ({"FUSEDATTN_CACHE_MB": "3"}, "cache_limit_bytes", 3145728),
        ({"FUSEDATTN_CACHE_DIR": "/a/b"}, "cache_dir", Path("/a/b")),
        ({"FUSEDATTN_CACHE_DIR": "~/x"}, "cache_dir", HOME / "x"),
        ({"FUSEDATTN_CACHE_DIR": "a/../b"}, "cache_dir", Path.cwd() / "b"),
        ({"FUSEDATTN_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/c"}, "cache_dir", Path("/a")),
        ({"XDG_CACHE_HOME": "/c"}, "cache_dir", Path("/c/fusedattn")),
        ({"XDG_CACHE_HOME": "c"}, "cache_dir", DEFAULTS.cache_dir),
        ({"XDG_CACHE_HOME": ""}, "cache_dir", DEFAULTS.cache_dir),
        ({"FUSEDATTN_NO_DISK_CACHE": "0"}, "cache_dir", DEFAULTS.cache_dir),
        ({"FUSEDATTN_NO_DISK_CACHE": "1"}, "cache_dir", None),
        ({"FUSEDATTN_NO_DISK_CACHE": "1", "FUSEDATTN_CACHE_DIR": "/a"}, "cache_dir", None),
        ({"FUSEDATTN_BUNDLE": "/b"}, "bundle", Path("/b")),
        ({"FUSEDATTN_BUNDLE": "b"}, "bundle", Path.cwd() / "b"),
    ],
)
def test_variables(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], field: str, value: object) -> None:
    for name, word in environment.items():
        monkeypatch.setenv(name, word)
    assert settings() == DEFAULTS._replace(**{field: value})


def test_without_a_home_there_is_no_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert settings().cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    clear_caches()
    assert settings().cache_dir == Path("/c/fusedattn")


def test_values_hold_until_caches_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings().validate_values
    monkeypatch.setenv("FUSEDATTN_VALIDATE", "1")
    assert not settings().validate_values
    clear_caches()
    assert settings().validate_values


MEBIBYTES = "a whole number of MiB from 1 to 999999999"
WRONG = (
    [(name, "0 or 1", word) for name in ("VALIDATE", "SELF_TEST", "NO_DISK_CACHE") for word in ("", "2", "yes", " 1")]
    + [("VALIDATE", "0 or 1", word) for word in ("true", "01")]
    + [("WORKSPACE_MB", MEBIBYTES, word) for word in ("", "0", "-1", "1.5", "1e3", "0x10", "1_0", " 1", "01", "1\n")]
    + [("WORKSPACE_MB", MEBIBYTES, word) for word in ("1000000000", "9" * 5000, "1\u0663", "512MB", "none")]
    + [("CACHE_MB", MEBIBYTES, word) for word in ("", "0", "much")]
    + [(name, "the path of a folder", word) for name in ("CACHE_DIR", "BUNDLE") for word in ("", " ")]
)


@pytest.mark.parametrize(("name", "expected", "word"), WRONG, ids=lambda text: text[:12])
def test_unknown_word_is_an_error_each_time(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: str, word: str
) -> None:
    monkeypatch.setenv(f"FUSEDATTN_{name}", word)
    for _ in range(2):
        with pytest.raises(SpecError) as raised:
            settings()
        error = raised.value
        assert (error.argument, error.expected, error.got) == (f"FUSEDATTN_{name}", expected, repr(word))
        assert "Set or unset the environment variable" in error.hint


def test_nothing_on_cpu_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cu_seqlens = torch.randn(2, 5, 1, 4), torch.tensor([0, 3, 8])
    want = fused_attention(q, q, q, attn_mask_type="padding", cu_seqlens_q=cu_seqlens)
    for value in ("1", "0", "wrong"):
        monkeypatch.setenv("FUSEDATTN_VALIDATE", value)
        clear_caches()
        assert torch.equal(fused_attention(q, q, q, attn_mask_type="padding", cu_seqlens_q=cu_seqlens), want)
        with pytest.raises(SpecError, match="entries that never decrease"):
            fused_attention(q, q, q, attn_mask_type="padding", cu_seqlens_q=torch.tensor([0, 3, 2]))


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
