"""Every planted mapping bug of the cuDNN engine is caught, and no check fails without one."""

from __future__ import annotations

import pytest
from cudnn_bugs import BUGS, CHECKS, KEY_FIELDS, Bug, key_without, planted
from cudnn_memory import InterpreterFault


@pytest.mark.parametrize("check", CHECKS)
def test_checks_pass_without_a_bug(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, InterpreterFault)):
        CHECKS[bug.check]()


@pytest.mark.parametrize(("field", "check"), KEY_FIELDS.items())
def test_field_left_out_of_the_key_is_caught(field: str, check: str) -> None:
    with key_without(field), pytest.raises((AssertionError, InterpreterFault)):
        CHECKS[check]()


def test_planting_leaves_nothing_behind() -> None:
    for bug in BUGS[:3]:
        with planted(bug):
            pass
        CHECKS[bug.check]()


def test_names_of_bugs_differ_and_every_check_has_one() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {*KEY_FIELDS.values()}.union(bug.check for bug in BUGS) == {*CHECKS}
