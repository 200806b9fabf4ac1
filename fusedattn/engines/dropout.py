"""The torch engine's dropout pattern: numpy's Philox, one stream for each batch, head and pattern tile.

Whether the pair (q, k) of head h in sequence b is kept depends on rng_state, p and (b, h, q, k) alone, so forward and
backward agree however the scores are cut into compute tiles, and any part of the pattern can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# One stream covers TILE_Q x TILE_KV decisions, row by row, two 32-bit decisions a Philox output.
TILE_Q, TILE_KV = 64, 256


class DropoutPattern:
    """Keep masks of one call.

    Args:
        rng_state: int64 ``[2]``, seed and offset; read once, on the host.
        dropout: Probability that a pair is dropped, 0 < p < 1, exact to 2**-32.

    Example:
        >>> pattern = DropoutPattern(torch.tensor([1, 2]), 0.5)
        >>> whole = pattern.keep(range(1), range(2), range(0, 130), 300)
        >>> torch.equal(whole[:, 1:, 64:], pattern.keep(range(1), range(1, 2), range(64, 130), 300))
        True
    """

    def __init__(self, rng_state: Tensor, dropout: float) -> None:
        seed, offset = (word % 2**64 for word in rng_state.tolist())
        self._philox = np.random.Philox(key=np.array([seed, offset], dtype=np.uint64))
        self._state = self._philox.state
        self._threshold = np.uint32(min(round(dropout * 2**32), 2**32 - 1))
        self._device = rng_state.device

    def keep(self, batches: Sequence[int], heads: range, rows: range, keys: int) -> Tensor:
        """The keep mask of a block.

        Args:
            batches: Sequences.
            heads: Heads.
            rows: Query positions within the sequence; starts at a multiple of ``TILE_Q``.
            keys: Number of key positions, from 0.

        Returns:
            bool ``[batches, heads, rows, keys]`` on the device of rng_state; True is kept.

        Raises:
            ValueError: ``rows`` does not start at a multiple of ``TILE_Q``.
        """
        if rows.start % TILE_Q:
            raise ValueError(f"rows must start at a multiple of {TILE_Q}, got {rows.start}")
        mask = np.empty((len(batches), len(heads), len(rows), keys), dtype=np.bool_)
        for i, b in enumerate(batches):
            for j, h in enumerate(heads):
                self._fill(mask[i, j], b, h, rows.start)
        return torch.from_numpy(mask).to(self._device)

    def _fill(self, mask: NDArray[np.bool_], b: int, h: int, first_row: int) -> None:
        rows, keys = mask.shape
        for row in range(0, rows, TILE_Q):
            count = min(TILE_Q, rows - row)
            for key in range(0, keys, TILE_KV):
                tile = (first_row + row) // TILE_Q << 32 | key // TILE_KV
                words = self._stream(b, h, tile, count * TILE_KV // 2).view(np.uint32).reshape(count, TILE_KV)
                width = min(TILE_KV, keys - key)
                np.greater_equal(words[:, :width], self._threshold, out=mask[row : row + count, key : key + width])

    def _stream(self, b: int, h: int, tile: int, count: int) -> NDArray[np.uint64]:
        self._state["state"]["counter"] = np.array([0, tile, h, b], dtype=np.uint64)
        self._state["buffer_pos"] = 4
        self._philox.state = self._state
        words: NDArray[np.uint64] = self._philox.random_raw(count)
        return words
