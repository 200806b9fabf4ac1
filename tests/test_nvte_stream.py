"""The ``stream`` argument of the nvte functions: what it may be, and that all of a call is on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_nvte import CU_KV, CU_Q, PACKINGS, Call
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn import SpecError, nvte_calls


class Watch(TorchDispatchMode):
    """Notes for every operator whether it ran on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.found = False, []

    @contextmanager
    def on(self, *args: Any) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((self.inside, str(function)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packing", PACKINGS)
def test_all_that_a_call_computes_is_on_its_stream(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing rng_state and converting lengths too, for which the rest would not wait on another."""
    watch = Watch()
    monkeypatch.setattr(nvte_calls, "_on", watch.on)
    lengths = {"cu_seqlens_q": CU_Q.long(), "cu_seqlens_kv": CU_KV.long()}
    if packing == "qkvpacked":
        lengths = {"cu_seqlens": lengths["cu_seqlens_q"]}
    call = Call(packing, dropout=0.5)
    with watch:
        out, pack = call.forward(stream=object(), **lengths)
        call.backward(out, pack, stream=object(), **lengths)
    names = [name for _, name in watch.found]
    assert all(inside for inside, _ in watch.found), watch.found
    assert any("random" in name or "randint" in name for name in names)
    assert any("_to_copy" in name for name in names)


def test_a_stream_must_be_one_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device = torch.device("cuda", 1)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("on", stream))
    stream, wrong = Stream(), r"argument 'stream': expected a torch.cuda.Stream or None, got int. Wrap the address"
    q: Any = SimpleNamespace(device=torch.device("cuda", 1))
    on: Any = nvte_calls._on
    assert on(stream, {"Q": q}) == ("on", stream)
    with pytest.raises(SpecError, match=wrong):
        on(5, {"Q": q})
    q.device = torch.device("cuda", 0)
    with pytest.raises(SpecError, match="expected a stream of cuda:0, where the tensors are, got one of cuda:1"):
        on(stream, {"Q": q})


@pytest.mark.parametrize("stream", [object(), 5])
def test_on_cpu_it_is_ignored(stream: object) -> None:
    call = Call("qkvpacked")
    assert torch.equal(call.forward(stream=stream).O, call.forward().O)
    with pytest.raises(SpecError, match="argument 'QKV'"):
        call.forward(QKV=None, stream=stream)
