"""Which device is asked, where several are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fusedattn.devices import is_capturing


@pytest.mark.parametrize(("asked", "captures"), [(0, False), (1, True)])
@pytest.mark.parametrize("current", [0, 1])
def test_the_stream_of_the_tensors_device_is_asked(
    asked: int, captures: bool, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second device captures."""
    now = [current]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before, now[0] = now[0], chosen.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0] == 1)
    assert is_capturing(torch.device("cuda", asked)) is captures
    assert now == [current]


def test_a_cpu_captures_nothing() -> None:
    assert not is_capturing(torch.device("cpu"))
