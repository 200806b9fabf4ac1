"""Counts of what a user may want to see, or to avoid: copies, plans built and loaded, executions."""

from __future__ import annotations

from collections import Counter

from fusedattn.cache import on_clear

COUNTERS: Counter[str] = Counter()
on_clear(COUNTERS.clear)

_NAMES = ("copies", "plans_built", "plans_loaded", "executions", "groups")


def counters() -> dict[str, int]:
    """What happened since the process started or ``clear_caches`` was called.

    Returns:
        ``copies``: operands, outputs or biases that the cuDNN engine had to copy, since cuDNN has no plan for their
        strides, addresses or dtypes. ``plans_built`` and ``plans_loaded``: cuDNN plans that were compiled, and that
        came from a bundle or the disk cache. ``executions``: cuDNN graphs that were run. ``groups``: those of them that
        were one of several parts of a call, whose plan in one piece would have wanted too large a workspace.

    Raises:
        Nothing.

    Example:
        >>> sorted(counters())
        ['copies', 'executions', 'groups', 'plans_built', 'plans_loaded']
    """
    return {name: COUNTERS[name] for name in _NAMES}
