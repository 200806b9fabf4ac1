"""``AttentionSpec``: one fused attention problem without its numbers; every law of shape, dtype and device lives here.

Values of tensors (lengths, probabilities) are checked elsewhere: ``lengths`` and ``arguments``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from torch import Tensor

from fusedattn.enums import Direction, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import SpecError
from fusedattn.layouts import LAYOUTS, Layout
from fusedattn.target import DeviceTarget

_AXES = {"thd": "THD", "bshd": "BSHD", "sbhd": "SBHD", "bhsd": "BHSD"}
_NUMBER_OF = {2: "K and V", 3: "Q, K and V"}


class TensorSpec(NamedTuple):
    """Shape, strides in elements, dtype and device of a tensor.

    Example:
        >>> TensorSpec.of(torch.empty(2, 3)).stride
        (3, 1)
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Read a tensor's description."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def dtype_word(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``.

    Example:
        >>> dtype_word(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


class AttentionSpec(BaseModel):
    """A problem of ``fused_attention``, validated.

    Attributes:
        layout, bias_type, mask_type: The enums.
        operands: ``(qkv,)``, ``(q, kv)`` or ``(q, k, v)`` as the layout has them.
        bias: ``[1|B, 1|H, 1|Sq, Skv]`` of any floating dtype, or None.
        cu_seqlens_q, cu_seqlens_kv: ``[B + 1]`` int32 or int64, or None.
        rng_state: ``[2]`` int64, or None.
        dropout: Whether the dropout probability is above 0.
        deterministic: Whether results must be the same in every run.
        direction: Whether the problem is a forward or a backward.
        bias_gradient: Whether backward is, or with dropout will be, asked for the gradient of the bias.
        negative_scale: Whether the factor of the scores is below 0.
        target: The GPU that the tensors are on; None on CPU.
        capturing: Whether a CUDA graph is being captured.

    Raises:
        SpecError: Through ``AttentionSpec.of``; the first law that is broken.

    Example:
        >>> q = TensorSpec.of(torch.empty(2, 5, 3, 4))
        >>> spec = AttentionSpec.of(layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, operands=(q, q, q))
        >>> spec.batch, spec.heads, spec.head_dim, spec.rows_q
        (2, 3, 4, 5)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    layout: NVTE_QKV_Layout
    operands: tuple[TensorSpec, ...]
    bias_type: NVTE_Bias_Type = NVTE_Bias_Type.NVTE_NO_BIAS
    mask_type: NVTE_Mask_Type = NVTE_Mask_Type.NVTE_NO_MASK
    bias: TensorSpec | None = None
    cu_seqlens_q: TensorSpec | None = None
    cu_seqlens_kv: TensorSpec | None = None
    rng_state: TensorSpec | None = None
    dropout: bool = False
    deterministic: bool = False
    direction: Direction = Direction.forward
    bias_gradient: bool = False
    negative_scale: bool = False
    target: DeviceTarget | None = None
    capturing: bool = False

    @classmethod
    def of(cls, **fields: object) -> AttentionSpec:
        """Build a spec, with pydantic's wrapping taken off the error.

        Args:
            **fields: The attributes above.

        Returns:
            The spec.

        Raises:
            SpecError: The first law that is broken.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            if isinstance(cause, SpecError):
                raise cause from None
            raise

    @property
    def format(self) -> Layout:
        """The layout's description."""
        return LAYOUTS[self.layout]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of Q, K, V and of the output."""
        return self.operands[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.operands[0].device

    @property
    def heads(self) -> int:
        """H."""
        return self.operands[0].shape[-3 if self.format.format == "bhsd" else -2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.operands[0].shape[-1]

    @property
    def batch(self) -> int:
        """B."""
        if self.format.ragged:
            assert self.cu_seqlens_q is not None
            return self.cu_seqlens_q.shape[0] - 1
        return self.operands[0].shape[_AXES[self.format.format].index("B")]

    @property
    def rows_q(self) -> int:
        """T of Q in ragged layouts, Sq in dense ones."""
        return self.operands[0].shape[self._row_axis]

    @property
    def rows_kv(self) -> int:
        """T of K and V in ragged layouts, Skv in dense ones."""
        return self.operands[-1].shape[self._row_axis]

    @property
    def _row_axis(self) -> int:
        return 0 if self.format.ragged else _AXES[self.format.format].index("S")

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        self._check_operands()
        self._check_agreement()
        self._check_cu_seqlens()
        self._check_bias()
        self._check_rng_state()
        return self

    def _check_operands(self) -> None:
        layout = self.format
        for name, spec, count in zip(layout.operands, self.operands, layout.packed, strict=True):
            axes = list(_AXES[layout.format])
            if count > 1:
                axes.insert(1, str(count))
            expected = f"shape [{', '.join(axes)}] in layout {self.layout.word}"
            if len(spec.shape) != len(axes):
                raise SpecError(name, expected, f"shape {list(spec.shape)} of rank {len(spec.shape)}")
            if count > 1 and spec.shape[1] != count:
                hint = f"Stack {_NUMBER_OF[count]} along axis 1."
                raise SpecError(name, expected, f"shape {list(spec.shape)} with axis 1 of size {spec.shape[1]}", hint)
            if not spec.dtype.is_floating_point:
                hint = "Convert it to float16, bfloat16, float32 or float64."
                raise SpecError(name, "a floating dtype", dtype_word(spec.dtype), hint)
            if spec.shape[-1] == 0:
                raise SpecError(name, "a head dimension D of at least 1", f"shape {list(spec.shape)}")

    def _check_agreement(self) -> None:
        layout, first = self.format, self.operands[0]
        row = self._row_axis
        for name, spec in zip(layout.operands[1:], self.operands[1:], strict=True):
            lead = layout.operands[0]
            if spec.dtype != first.dtype:
                expected = f"the dtype of `{lead}`, {dtype_word(first.dtype)}"
                raise SpecError(name, expected, dtype_word(spec.dtype), "Convert one of them.")
            _check_device(name, spec, first, lead)
            unpacked = spec.shape[:1] + spec.shape[2:] if name == "kv" else spec.shape
            if unpacked[:row] + unpacked[row + 1 :] != first.shape[:row] + first.shape[row + 1 :]:
                expected = f"the sizes of `{lead}` {list(first.shape)} in every axis but that of the rows"
                hint = "Heads and head dimensions of Q, K and V must be equal."
                raise SpecError(name, expected, f"shape {list(spec.shape)}", hint)
        if len(self.operands) == 3 and self.operands[1].shape != self.operands[2].shape:
            k, v = self.operands[1:]
            raise SpecError("v", f"the shape of `k`, {list(k.shape)}", f"shape {list(v.shape)}")

    def _check_cu_seqlens(self) -> None:
        if self.format.ragged and self.cu_seqlens_q is None:
            hint = "Pass int32 [B + 1], starting at 0: where each sequence starts and the last one ends."
            raise SpecError("cu_seqlens_q", f"a tensor, which layout {self.layout.word} needs", "None", hint)
        for name, spec in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_kv", self.cu_seqlens_kv)):
            if spec is None:
                continue
            if spec.dtype not in (torch.int32, torch.int64):
                raise SpecError(name, "dtype int32", dtype_word(spec.dtype), "Convert it with .to(torch.int32).")
            if len(spec.shape) != 1 or spec.shape[0] < 1:
                raise SpecError(name, "shape [B + 1]", f"shape {list(spec.shape)}")
            _check_device(name, spec, self.operands[0], self.format.operands[0])
            if spec.shape[0] != self.batch + 1:
                expected = f"length B + 1 = {self.batch + 1}"
                hint = "" if self.format.ragged else "Several documents in one row need a thd layout."
                raise SpecError(name, expected, f"length {spec.shape[0]}", hint)

    def _check_bias(self) -> None:
        if self.bias_type is NVTE_Bias_Type.NVTE_NO_BIAS:
            if self.bias is not None:
                hint = "Name the type 'post_scale_bias' or 'pre_scale_bias', or leave the bias out."
                raise SpecError("bias", "None, since the bias type is no_bias", f"shape {list(self.bias.shape)}", hint)
            return
        if self.bias is None:
            expected = f"a tensor, since the bias type is {self.bias_type.word}"
            raise SpecError("bias", expected, "None", "Pass [1|B, 1|H, 1|Sq, Skv], or name the type 'no_bias'.")
        if not self.bias.dtype.is_floating_point:
            raise SpecError("bias", "a floating dtype", dtype_word(self.bias.dtype))
        _check_device("bias", self.bias, self.operands[0], self.format.operands[0])
        if len(self.bias.shape) != 4:
            raise SpecError("bias", "shape [1|B, 1|H, 1|Sq, Skv]", f"shape {list(self.bias.shape)}")
        if not self.format.ragged:
            check_bias_shape(self, self.rows_q, self.rows_kv)

    def _check_rng_state(self) -> None:
        if self.rng_state is None:
            return
        if self.rng_state.dtype != torch.int64:
            raise SpecError("rng_state", "dtype int64", dtype_word(self.rng_state.dtype))
        if self.rng_state.shape != (2,):
            raise SpecError("rng_state", "shape [2]: seed and offset", f"shape {list(self.rng_state.shape)}")
        _check_device("rng_state", self.rng_state, self.operands[0], self.format.operands[0])


def check_bias_shape(spec: AttentionSpec, max_seqlen_q: int, max_seqlen_kv: int) -> None:
    """Check a bias against the problem's axes, which ragged layouts only know once the lengths are.

    Args:
        spec: The problem.
        max_seqlen_q, max_seqlen_kv: Sq and Skv of the bias.

    Raises:
        SpecError: The bias is not ``[1|B, 1|H, 1|Sq, Skv]``.
    """
    if spec.bias is None:
        return
    allowed = ({1, spec.batch}, {1, spec.heads}, {1, max_seqlen_q}, {max_seqlen_kv})
    if any(size not in sizes for size, sizes in zip(spec.bias.shape, allowed, strict=True)):
        axes = f"[1|{spec.batch}, 1|{spec.heads}, 1|{max_seqlen_q}, {max_seqlen_kv}]"
        hint = ""
        if spec.format.ragged:
            hint = "In thd its last axes are the max_seqlen arguments, by default the longest sequences."
        raise SpecError("bias", f"shape [1|B, 1|H, 1|Sq, Skv] = {axes}", f"shape {list(spec.bias.shape)}", hint)


def _check_device(name: str, spec: TensorSpec, first: TensorSpec, lead: str) -> None:
    if spec.device != first.device:
        expected = f"the device of `{lead}`, {first.device}"
        raise SpecError(name, expected, str(spec.device), f"Move it with .to('{first.device}').")
