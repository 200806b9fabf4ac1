"""What holds state registers here how to forget it; ``clear_caches`` makes all of it forget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fusedattn.settings import settings

_Clear = TypeVar("_Clear", bound=Callable[[], None])
_CLEARERS: list[Callable[[], None]] = [settings.cache_clear]


def on_clear(clear: _Clear) -> _Clear:
    """Register a function that empties one cache; returns it, so it serves as a decorator.

    Args:
        clear: Called without arguments by ``clear_caches``.

    Returns:
        ``clear`` itself.

    Raises:
        Nothing.

    Example:
        >>> memo = {"key": 1}
        >>> _ = on_clear(memo.clear)
        >>> clear_caches()
        >>> memo
        {}
        >>> _CLEARERS.remove(memo.clear)
    """
    _CLEARERS.append(clear)
    return clear


def clear_caches() -> None:
    """Forget every memo, plan, setting and warned-once flag; ``FUSEDATTN_*`` variables are read again.

    Returns:
        None.

    Raises:
        Nothing.

    Example:
        >>> clear_caches()
    """
    for clear in _CLEARERS:
        clear()
