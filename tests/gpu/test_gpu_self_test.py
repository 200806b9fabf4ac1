"""The self-test on a real GPU: every family that an engine takes passes."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusedattn.devices import engine_on, target_of
from fusedattn.engines.self_test_check import difference
from fusedattn.engines.self_test_problem import Canned, Family
from fusedattn.enums import Direction, Engine
from fusedattn.rules import refusals

pytestmark = pytest.mark.gpu
BF16 = [
    Family(Direction.backward, torch.bfloat16, ragged, causal, bias, bias, dropout, False)
    for ragged, causal, bias, dropout in itertools.product((False, True), repeat=4)
]
FAMILIES = [
    *BF16,
    *(
        family._replace(dtype=torch.float16)
        for family in BF16
        if family.causal and not (family.bias and family.dropout)
    ),
    *(family._replace(deterministic=True) for family in BF16 if family.ragged and not (family.bias or family.dropout)),
]


@pytest.mark.parametrize("family", FAMILIES, ids=Family.text)
def test_a_family_passes(family: Family, device: torch.device) -> None:
    canned = Canned(family, target_of(device), device)
    refused = refusals(Engine.cudnn, canned.spec)
    if refused:
        pytest.skip("; ".join(refused))
    engine = engine_on(device, Engine.cudnn)
    assert difference(canned, getattr(engine, "_engine", engine)) is None
