"""What a call is put next to: calls of torch's that do little or nothing, and how cuDNN's frontend takes tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fusedattn.engines.cudnn_key import SdpaKey
from fusedattn.engines.cudnn_library import cudnn
from fusedattn.engines.cudnn_plan import compile_plan, load_plan


def torch_rivals() -> dict[str, Callable[[], object]]:
    """Calls of torch's own, by what they are.

    Returns:
        ``scaled_dot_product_attention`` of float32 ``[1, 4, 16, 64]``, and an operator of ``torch.library`` that gives
        out a tensor that is there already.

    Raises:
        Nothing.
    """
    q = torch.randn(1, 4, 16, 64)
    attention, nothing = torch.nn.functional.scaled_dot_product_attention, _empty_operator()
    return {
        "scaled_dot_product_attention of 16 tokens": lambda: attention(q, q, q),
        "an empty operator of torch.library": lambda: nothing(q),
    }


@functools.cache
def _empty_operator() -> Callable[[Tensor], Tensor]:
    # torch.library is not annotated.
    library: Any = cast(Any, torch.library.Library)("fusedattn_dispatch", "DEF")
    library.define("nothing(Tensor x) -> Tensor")
    there = torch.empty(1)
    library.impl("nothing", lambda x: there, "CompositeExplicitAutograd")
    operator: Any = torch.ops.fusedattn_dispatch.nothing

    def nothing(x: Tensor) -> Tensor:
        # The operator is there as long as its library is.
        assert library is not None
        found: Tensor = operator(x)
        return found

    return nothing


class _Deaf:
    """A frontend's C++ graph, of which nothing is run."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def _execute_with_raw_ptrs(self, *arguments: object) -> None:
        """What ``execute`` ends in, once it has read every tensor."""


def frontend_rivals(key: SdpaKey, tensors: Mapping[int, Tensor]) -> dict[str, Callable[[], object]]:
    """The ways in which cuDNN's frontend takes a graph's tensors, by what they are.

    Args:
        key: The graph, which is compiled.
        tensors: By uid.

    Returns:
        ``execute`` of a mapping, up to its call into C++; and as it is to where cuDNN refuses to run without a handle,
        of a mapping and of a tuple. The latter is read in C++, so that its reading can be had in no other way; the
        exception is the same in both.

    Raises:
        BuildError: There is no plan, or no cuDNN.
    """
    blob = compile_plan(key).blob
    graph, deaf = load_plan(key.target, blob), load_plan(key.target, blob)
    # The frontend has no public way to stop where the work of the host ends.
    deaf._lowered_graph = _Deaf(deaf._lowered_graph)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8)
    uids, values, by_uid = tuple(tensors), tuple(tensors.values()), dict(tensors)
    handle = cudnn().Handle(None)

    def mapping_refused() -> None:
        with contextlib.suppress(RuntimeError):
            graph.execute(by_uid, workspace, handle)

    def tuple_refused() -> None:
        with contextlib.suppress(RuntimeError):
            graph.execute(values, workspace, handle, tensor_uids=uids)

    return {
        "cuDNN's frontend: execute(dict), up to C++": lambda: deaf.execute(by_uid, workspace, handle),
        "cuDNN's frontend: execute(dict), up to cuDNN's refusal": mapping_refused,
        "cuDNN's frontend: execute(tuple), up to cuDNN's refusal": tuple_refused,
    }
