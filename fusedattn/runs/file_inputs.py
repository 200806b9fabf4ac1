"""Operands, bias and expected results out of a safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fusedattn.errors import RunFileError
from fusedattn.runs.config import FileInputs, Geometry
from fusedattn.runs.fields import RAGGED, nearest
from fusedattn.runs.operands import Operands


class TensorFile:
    """The tensors that a problem names; each fault is a RunFileError that starts with its path and `: `."""

    def __init__(self, inputs: FileInputs, folder: Path, path: str) -> None:
        """Reads the tensors.

        Args:
            inputs: Names the file and its keys.
            folder: Where `inputs.file` starts.
            path: Of the problem in the run file.

        Raises:
            RunFileError: the file is missing or is no safetensors file.
        """
        self.inputs, self.path = inputs, path
        try:
            with safe_open(folder / inputs.file, framework="pt") as file:
                self._tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except OSError as err:
            self._fail("file", f"{inputs.file}: {err.strerror or 'no such file'}")
        except SafetensorError as err:
            self._fail("file", f"{inputs.file} is not a safetensors file: {err}")

    def _fail(self, field: str, message: str) -> NoReturn:
        raise RunFileError(f"{self.path}.inputs.{field}: {message}") from None

    def tensor(self, field: str, key: str, shape: Sequence[int | str], integer: bool = False) -> Tensor:
        """The tensor under a key.

        Args:
            field: Where the run file names the key.
            key: Key in the tensor file.
            shape: What each axis must be; a string stands for any size and names it.
            integer: Whether it must hold integers; else floats.

        Returns:
            The tensor.

        Raises:
            RunFileError: no such key, or another shape or kind of number.
        """
        if key not in self._tensors:
            known = ", ".join(sorted(self._tensors))
            self._fail(
                field, f"no tensor {key!r} in {self.inputs.file}, which has {known}{nearest(key, self._tensors)}"
            )
        x = self._tensors[key]
        fits = x.dim() == len(shape) and all(
            isinstance(want, str) or want == got for want, got in zip(shape, x.shape, strict=True)
        )
        if not fits or x.is_floating_point() == integer or x.is_complex():
            wanted = f"{'integers' if integer else 'floats'} [{', '.join(map(str, shape))}]"
            got = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            self._fail(field, f"expected {key!r} of {self.inputs.file} to hold {wanted}, got {got}")
        return x

    def operands(self, problem: Geometry) -> Operands:
        """q, k, v in the problem's layout and dtype; parts of a packed tensor are strided views of it.

        Raises:
            RunFileError: a key is missing, or tensors do not fit each other or the lengths.
        """
        layout = str(problem.layout)
        ragged = layout in RAGGED
        one = ("T", "H", "D") if ragged else tuple(layout[:4].upper())
        given: dict[str, Tensor] = {}
        packing: dict[str, tuple[Any, ...]] = {"qkv": ("T", 3, "H", "D"), "kv": ("T", 2, "H", "D")}
        for field in ("qkv", "q", "kv", "k", "v"):
            key = getattr(self.inputs, field)
            if key is not None:
                x = self.tensor(field, key, packing.get(field, one))
                given[field] = x.to(getattr(torch, problem.dtype)) if problem.dtype else x
        if "qkv" in given and layout == "thd_t2hd":
            qkv = given["qkv"]
            tensors: tuple[Tensor, ...] = (qkv[:, 0], qkv[:, 1:])
        elif layout == "thd_thd_thd":
            tensors = tuple(part for x in given.values() for part in (x.unbind(1) if x.dim() == 4 else (x,)))
        else:
            tensors = tuple(given.values())
        rows_q = tensors[0].shape[layout.index("s") if not ragged else 0]
        rows_kv = tensors[-1].shape[layout.index("s") if not ragged else 0]
        batch = None if ragged else tensors[0].shape[layout.index("b")]
        lengths_q = self._lengths("cu_seqlens", self.inputs.cu_seqlens, rows_q, batch)
        kv_key = self.inputs.cu_seqlens_kv
        lengths_kv = lengths_q if kv_key is None else self._lengths("cu_seqlens_kv", kv_key, rows_kv, batch)
        if kv_key is None and self.inputs.cu_seqlens is None:
            lengths_kv = [rows_kv] * len(lengths_q)
        max_q = problem.max_seqlen_q or (max(lengths_q, default=0) if ragged else rows_q)
        max_kv = problem.max_seqlen_kv or (max(lengths_kv, default=0) if ragged else rows_kv)
        return Operands(layout, tensors, lengths_q, lengths_kv, max_q, max_kv)

    def _lengths(self, field: str, key: str | None, rows: int, batch: int | None) -> list[int]:
        if key is None:
            return [rows] * (batch or 0)
        cu_seqlens = self.tensor(field, key, ("B+1",) if batch is None else (batch + 1,), integer=True)
        lengths: list[int] = cu_seqlens.diff().tolist()
        total = rows if batch is None else max([rows, *lengths]) * batch
        if not len(cu_seqlens) or cu_seqlens[0] != 0 or min(lengths, default=0) < 0 or cu_seqlens[-1] > total:
            self._fail(field, f"expected {key!r} to rise from 0 to at most {total}, got {cu_seqlens.tolist()}")
        return lengths

    def bias(self, operands: Operands) -> Tensor:
        """The bias, of its own dtype.

        Raises:
            RunFileError: its key is missing, or it is no rank-4 float tensor.
        """
        return self.tensor("bias", str(self.inputs.bias), ("1|B", "1|H", "1|Sq", operands.max_kv))

    def expect(self, operands: Operands) -> dict[str, Tensor]:
        """The results to be met, by name.

        Raises:
            RunFileError: a key is missing, or its shape is not that of the result.
        """
        tokens = operands.token_shape
        lse = tokens[:-1] if operands.ragged else (tokens[0], tokens[2], tokens[1])
        shapes = {"out": tuple(operands.out_shape), "lse": lse}
        return {name: self.tensor(f"expect.{name}", key, shapes[name]) for name, key in self.inputs.expect.items()}
