"""The sizes that ragged graphs are built for, so that few plans serve all packings.

A graph of ``b`` sequences padded to ``s`` serves fewer and shorter ones: sequences past the batch have length 0, and
rows past a length are not computed. The rule:

- ``b`` is the batch rounded up to a power of 4.
- ``s`` is ``max_seqlen`` rounded up to a power of 2, at least 256, where both sides round to the same; else each side
  is rounded up to a power of 4 times 128 (128, 512, 2048, ...). It is never the number of tokens.
- The bound of the tokens is a power of 2, at least 32,768.
- With a bias ``s`` is exact, since cuDNN wants the bias's own axes; so is ``b`` where the bias has one.
"""

from __future__ import annotations

_LEAST_SEQLEN = 256
_LEAST_TOKENS = 32768


def _round_up(value: int, least: int, factor: int) -> int:
    """The smallest ``least * factor ** n`` that is not below a value."""
    rounded = least
    while rounded < value:
        rounded *= factor
    return rounded


def batch_bucket(batch: int) -> int:
    """Sequences of the graph that serves a batch.

    Args:
        batch: Sequences, at least 1.

    Returns:
        A power of 4.

    Raises:
        Nothing.

    Example:
        >>> [batch_bucket(b) for b in (1, 2, 5, 64)]
        [1, 4, 16, 64]
    """
    return _round_up(batch, 1, 4)


def seqlen_buckets(max_seqlen_q: int, max_seqlen_kv: int) -> tuple[int, int]:
    """Padded lengths of the graph that serves sequences up to these lengths.

    Args:
        max_seqlen_q, max_seqlen_kv: At least 1.

    Returns:
        Sq and Skv of the graph.

    Raises:
        Nothing.

    Example:
        >>> seqlen_buckets(300, 300), seqlen_buckets(1, 300), seqlen_buckets(2000, 900)
        ((512, 512), (128, 512), (2048, 2048))
    """
    q, kv = (_round_up(length, _LEAST_SEQLEN, 2) for length in (max_seqlen_q, max_seqlen_kv))
    if q == kv:
        return q, kv
    q, kv = (_round_up(length, _LEAST_SEQLEN // 2, 4) for length in (max_seqlen_q, max_seqlen_kv))
    return q, kv


def tokens_bucket(tokens: int) -> int:
    """The bound of the tokens that a graph is given.

    Args:
        tokens: T.

    Returns:
        A power of 2, at least 32,768.

    Raises:
        Nothing.

    Example:
        >>> tokens_bucket(7), tokens_bucket(40000)
        (32768, 65536)
    """
    return _round_up(tokens, _LEAST_TOKENS, 2)
