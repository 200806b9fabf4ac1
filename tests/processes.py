"""Child processes for tests, forked since a fresh one would take seconds to import torch."""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest

POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="of POSIX systems")


def fork(function: Callable[[], object]) -> int:
    """Run a function in a child process, which ends well where it raises nothing; returns its number."""
    with warnings.catch_warnings():
        # From Python 3.12 on, of forks while other threads run; the children use none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            function()
            status = 0
        os._exit(status)
    return child


def ended_well(children: list[int]) -> bool:
    return [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
