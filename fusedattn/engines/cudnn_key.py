"""``SdpaKey``: all that a cuDNN graph is built from, and nothing else.

Not in it: the factor of the scores, addresses, lengths and the number of tokens, which are run-time values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import NamedTuple

from fusedattn.enums import Direction
from fusedattn.target import DeviceTarget

# Raised when the same key comes to mean another graph, so that plans stored by older releases are not used.
KEY_VERSION = 1


class Role(IntEnum):
    """What a tensor of a graph is for; the value is its uid there. Uids of ragged offsets follow.

    Example:
        >>> max(Role) < FIRST_RAGGED_UID
        True
    """

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5
    BIAS = 6
    SEQ_LEN_Q = 7
    SEQ_LEN_KV = 8
    SEED = 9
    OFFSET = 10
    ATTN_SCALE = 11
    DOUT = 12
    DQ = 13
    DK = 14
    DV = 15
    DBIAS = 16


FIRST_RAGGED_UID = 32
_KV_SIDE = frozenset({Role.K, Role.V, Role.DK, Role.DV})
_NOT_RAGGED = frozenset({Role.BIAS, Role.DBIAS})


class TensorKey(NamedTuple):
    """One declared tensor.

    Attributes:
        dim: ``(B, H, S, D)``, of the statistics ``(B, H, S, 1)``; S is a padded length where the tensor is ragged.
        stride: In elements; the first of a ragged tensor has no meaning, since offsets locate its sequences.
        dtype: torch's word, such as ``bfloat16``.
    """

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class RaggedOffsets(NamedTuple):
    """Where the sequences of some tensors start: cu_seqlens of a side times the elements of a token.

    Attributes:
        kv: Whether the side is that of K and V.
        token_stride: Elements from a token to the next.
    """

    kv: bool
    token_stride: int


@dataclass(frozen=True)
class SdpaKey:
    """A graph: forward or backward attention of declared tensors, for one target.

    Attributes:
        target: The GPU that it is for.
        direction: Forward or backward.
        tensors: The declared tensors: Q, K, V, OUT and STATS always; BIAS where there is one; in backward DOUT, DQ, DK,
            DV, and DBIAS where it is asked for.
        ragged: Whether Q, K, V and what is shaped like them are ragged, which needs ``padding``.
        ragged_stats: Whether the statistics are, too.
        padding: Whether lengths act.
        causal: Whether the mask is causal, top-left.
        dropout: Probability.
        deterministic: Whether backward must be.
        max_total_q, max_total_kv: What the tokens of a ragged problem do not pass, else 0.

    Example:
        >>> from fusedattn.target import TARGETS
        >>> q = TensorKey((2, 4, 64, 32), (8192, 32, 128, 1), "bfloat16")
        >>> stats = TensorKey((2, 4, 64, 1), (256, 64, 1, 1), "float32")
        >>> tensors = ((Role.Q, q), (Role.K, q), (Role.V, q), (Role.OUT, q), (Role.STATS, stats))
        >>> key = SdpaKey(TARGETS["h100"], Direction.forward, tensors)
        >>> key.tensor(Role.Q).dim, Role.BIAS in key
        ((2, 4, 64, 32), False)
    """

    target: DeviceTarget
    direction: Direction
    tensors: tuple[tuple[Role, TensorKey], ...]
    ragged: bool = False
    ragged_stats: bool = False
    padding: bool = False
    causal: bool = False
    dropout: float = 0.0
    deterministic: bool = False
    max_total_q: int = 0
    max_total_kv: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Looked up at every call, and long to hash.
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in _FIELDS)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[SdpaKey], tuple[object, ...]]:
        # Hashes of words differ between processes.
        return type(self), tuple(getattr(self, name) for name in _FIELDS)

    def __contains__(self, role: Role) -> bool:
        return any(role is declared for declared, _ in self.tensors)

    def tensor(self, role: Role) -> TensorKey:
        """The declared tensor of a role; raises ``KeyError`` where there is none."""
        return dict(self.tensors)[role]

    @property
    def backward(self) -> bool:
        """Whether the graph is of a backward."""
        return self.direction is Direction.backward

    def ragged_of(self, role: Role) -> RaggedOffsets | None:
        """The offsets that locate the sequences of a tensor, or None where it is not ragged."""
        if not self.ragged or role in _NOT_RAGGED or (role is Role.STATS and not self.ragged_stats):
            return None
        return RaggedOffsets(role in _KV_SIDE, self.tensor(role).stride[2])

    @property
    def ragged_uids(self) -> dict[RaggedOffsets, int]:
        """Uids of the ragged offset tensors, int64 ``[B + 1, 1, 1, 1]``; tensors of equal offsets share one."""
        needed = dict.fromkeys(self.ragged_of(role) for role, _ in self.tensors)
        return {offsets: FIRST_RAGGED_UID + i for i, offsets in enumerate(o for o in needed if o is not None)}

    @property
    def uids(self) -> tuple[int, ...]:
        """Uids of the tensors that the graph takes, ascending; ATTN_SCALE among them.

        Example:
            >>> from fusedattn.target import TARGETS
            >>> q = TensorKey((2, 4, 64, 32), (8192, 32, 128, 1), "bfloat16")
            >>> SdpaKey(TARGETS["h100"], Direction.forward, ((Role.Q, q), (Role.K, q)), padding=True).uids
            (1, 2, 7, 8, 11)
        """
        lengths = (Role.SEQ_LEN_Q, Role.SEQ_LEN_KV) if self.padding else ()
        seeds = (Role.SEED, Role.OFFSET) if self.dropout else ()
        roles = [role for role, _ in self.tensors]
        return tuple(sorted(map(int, (*roles, *lengths, *seeds, Role.ATTN_SCALE, *self.ragged_uids.values()))))

    def text(self) -> str:
        """The key as one line of JSON, for stores and manifests; of the target only its fingerprint."""
        written = {
            "version": KEY_VERSION,
            "target": self.target.fingerprint,
            "direction": self.direction.word,
            "tensors": {role.name: list(key) for role, key in self.tensors},
            **{name: getattr(self, name) for name in _FIELDS[3:]},
        }
        return json.dumps(written, sort_keys=True)


_FIELDS = tuple(each.name for each in fields(SdpaKey) if each.init)
