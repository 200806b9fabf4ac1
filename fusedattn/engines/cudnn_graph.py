"""From an ``SdpaKey`` to the cuDNN graph that it describes; nothing is compiled here."""

from __future__ import annotations

from typing import Any

from fusedattn.engines.cudnn_key import Role, SdpaKey
from fusedattn.engines.cudnn_library import cudnn, device_properties
from fusedattn.errors import BuildError

# A by-value or device scalar.
_SCALAR = (1, 1, 1, 1)


def build(key: SdpaKey) -> Any:
    """Declare a graph.

    Args:
        key: What to declare.

    Returns:
        A ``cudnn.pygraph`` whose tensors have the uids of ``Role`` and of ``key.ragged_uids``. ATTN_SCALE is a float32
        passed by value; SEQ_LEN_Q and SEQ_LEN_KV are int32 ``[B, 1, 1, 1]``; SEED and OFFSET int64 ``[1, 1, 1, 1]``.

    Raises:
        BuildError: The library cannot be used, or planning the graph is known to end the process.

    Example:
        >>> from fusedattn.engines.cudnn_key import TensorKey
        >>> from fusedattn.enums import Direction
        >>> from fusedattn.target import TARGETS
        >>> q = TensorKey((2, 4, 64, 32), (8192, 32, 128, 1), "bfloat16")
        >>> stats = TensorKey((2, 4, 64, 1), (256, 64, 1, 1), "float32")
        >>> tensors = ((Role.Q, q), (Role.K, q), (Role.V, q), (Role.OUT, q), (Role.STATS, stats))
        >>> graph = build(SdpaKey(TARGETS["h100"], Direction.forward, tensors))
        >>> [node.node_type.name for node in graph.nodes]
        ['SDPA']
    """
    batch, heads, rows, _ = key.tensor(Role.Q).dim
    if key.backward and batch == heads == rows == 1:
        raise BuildError("a cuDNN backward graph of one sequence, one head and one query", "ends the process")
    return _Declaration(key).graph


class _Declaration:
    """The state of one ``build``."""

    def __init__(self, key: SdpaKey) -> None:
        module = cudnn()
        self._key = key
        self._types = {
            "bfloat16": module.data_type.BFLOAT16,
            "float16": module.data_type.HALF,
            "float32": module.data_type.FLOAT,
            "int32": module.data_type.INT32,
            "int64": module.data_type.INT64,
        }
        self.graph = module.pygraph(
            name=key.direction.word,
            io_data_type=self._types[key.tensor(Role.Q).dtype],
            intermediate_data_type=module.data_type.FLOAT,
            compute_data_type=module.data_type.FLOAT,
            sm_version=key.target.sm_version,
            device_property=device_properties(key.target),
        )
        batch = key.tensor(Role.Q).dim[0]
        self._offsets = {
            offsets: self._plain(f"ragged_{uid}", uid, (batch + 1, 1, 1, 1), "int64")
            for offsets, uid in key.ragged_uids.items()
        }
        (self._backward if key.backward else self._forward)()

    def _forward(self) -> None:
        out, stats = self.graph.sdpa(
            name="sdpa",
            q=self._input(Role.Q),
            k=self._input(Role.K),
            v=self._input(Role.V),
            generate_stats=True,
            **self._common(),
        )
        self._output(Role.OUT, out)
        self._output(Role.STATS, stats)

    def _backward(self) -> None:
        key = self._key
        options = self._common()
        if key.deterministic:
            options["use_deterministic_algorithm"] = True
        if Role.DBIAS in key:
            options["dBias"] = self._input(Role.DBIAS)
        outputs = self.graph.sdpa_backward(
            name="sdpa_backward",
            q=self._input(Role.Q),
            k=self._input(Role.K),
            v=self._input(Role.V),
            o=self._input(Role.OUT),
            dO=self._input(Role.DOUT),
            stats=self._input(Role.STATS),
            **options,
        )
        for role, tensor in zip((Role.DQ, Role.DK, Role.DV), outputs, strict=True):
            self._output(role, tensor)
        if Role.DBIAS in key:
            options["dBias"].set_output(True)

    def _common(self) -> dict[str, Any]:
        key = self._key
        batch = key.tensor(Role.Q).dim[0]
        scale = self._plain("attn_scale", Role.ATTN_SCALE, _SCALAR, "float32", is_pass_by_value=True)
        options: dict[str, Any] = {"attn_scale": scale}
        if key.padding:
            options["use_padding_mask"] = True
            options["seq_len_q"] = self._plain("seq_len_q", Role.SEQ_LEN_Q, (batch, 1, 1, 1), "int32")
            options["seq_len_kv"] = self._plain("seq_len_kv", Role.SEQ_LEN_KV, (batch, 1, 1, 1), "int32")
        if key.ragged:
            options |= {"max_total_seq_len_q": key.max_total_q, "max_total_seq_len_kv": key.max_total_kv}
        if key.causal:
            options["use_causal_mask"] = True
        if Role.BIAS in key:
            options["bias"] = self._input(Role.BIAS)
        if key.dropout:
            seed = self._plain("seed", Role.SEED, _SCALAR, "int64")
            offset = self._plain("offset", Role.OFFSET, _SCALAR, "int64")
            options["dropout"] = (key.dropout, seed, offset)
        return options

    def _plain(self, name: str, uid: int, dim: tuple[int, ...], dtype: str, **options: Any) -> Any:
        stride = [1] * len(dim)
        return self.graph.tensor(
            name=name, uid=int(uid), dim=list(dim), stride=stride, data_type=self._types[dtype], **options
        )

    def _input(self, role: Role) -> Any:
        tensor = self._key.tensor(role)
        offsets = self._key.ragged_of(role)
        return self.graph.tensor(
            name=role.name.lower(),
            uid=int(role),
            dim=list(tensor.dim),
            stride=list(tensor.stride),
            data_type=self._types[tensor.dtype],
            ragged_offset=None if offsets is None else self._offsets[offsets],
        )

    def _output(self, role: Role, made: Any) -> None:
        tensor = self._key.tensor(role)
        offsets = self._key.ragged_of(role)
        made.set_output(True).set_uid(int(role)).set_name(role.name.lower())
        made.set_dim(list(tensor.dim)).set_stride(list(tensor.stride)).set_data_type(self._types[tensor.dtype])
        if offsets is not None:
            made.set_ragged_offset(self._offsets[offsets])
