"""What a `dispatch` run times of a case: the public call, and of it what is done to the lengths on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn.devices import engine_on
from fusedattn.engines.base import Problem
from fusedattn.engines.cudnn_bound import BoundForward, Prepared
from fusedattn.enums import Direction, Engine
from fusedattn.runs.inputs import Inputs
from fusedattn.runs.needed import compute, request_of
from fusedattn.runs.public_calls import attend_call, nvte_backward_call, nvte_forward_call

# These launch nothing.
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def public_call(inputs: Inputs, op: str, direction: str) -> Callable[[], object]:
    """A call of the functions of an op.

    Args:
        inputs: The case, and the gradient of out.
        op: "fused_attention" or "nvte".
        direction: "forward", "backward", or "forward_backward": one after the other. The backward alone is that of one
            forward again and again.

    Returns:
        The call, of operands that require gradients where autograd is what asks for them.

    Raises:
        FusedAttnError: What the functions refuse.
    """
    case, dout = inputs.case, inputs.dout
    if op == "nvte":
        forward, backward = nvte_forward_call(case), nvte_backward_call(case)
        if direction == "forward":
            return forward
        out, pack = forward()
        if direction == "backward":
            return lambda: backward(out, dout, pack)

        def both() -> object:
            out, pack = forward()
            return backward(out, dout, pack)

        return both
    leaves = tuple(x.detach().requires_grad_() for x in case.operands)
    attend = attend_call(case, leaves, None)
    if direction == "forward":
        return attend
    if direction == "backward":
        graph = attend()[0]
        return lambda: torch.autograd.grad(graph, leaves, dout, retain_graph=True)
    return lambda: torch.autograd.grad(attend()[0], leaves, dout)


class Apart(NamedTuple):
    """A forward in two.

    Attributes:
        preparation: What it does on the device beside the graph, by itself.
        hand_over: The call of ``public_call`` without that, which was done before.
    """

    preparation: Callable[[], None]
    hand_over: Callable[[], object]


def apart(inputs: Inputs, op: str) -> Apart:
    """Take the preparation out of a forward.

    Args:
        inputs, op: As in ``public_call``.

    Returns:
        Both, each as in a call that was made before.

    Raises:
        FusedAttnError: What the functions refuse.
        RuntimeError: The cuDNN engine does not take the case, or has to copy its operands or to cut it.
    """
    # By the name of its engine it is another call than that of the whole, so that both are remembered.
    engine = "cudnn" if inputs.case.engine == "auto" else "auto"
    hand_over = public_call(replace(inputs, case=replace(inputs.case, engine=engine)), op, "forward")
    cudnn: Any = engine_on(inputs.case.operands[0].device, Engine.cudnn)
    bind, found = cudnn.bind, []

    def bind_prepared(problem: Problem, out: Tensor, lse: Tensor) -> _PreparedForward | None:
        bound = bind(problem, out, lse)
        if bound is None:
            return None
        # Autograd looks on from outside of what engines do.
        written = out.detach(), lse.detach()
        found.append(lambda: bound.clean(bound.prepare(problem), *written))
        return _PreparedForward(bound, bound.prepare(problem))

    cudnn.bind = bind_prepared
    try:
        hand_over()
    finally:
        del cudnn.bind
    if not found:
        raise RuntimeError("its forward is not timed in two, since it runs in groups or copies its operands")
    return Apart(found[0], hand_over)


class _PreparedForward:
    """A bound forward of one problem, which is prepared for good and not cleaned up after."""

    def __init__(self, bound: BoundForward, prepared: Prepared) -> None:
        self._bound, self._prepared = bound, prepared

    def __call__(self, problem: Problem, out: Tensor, lse: Tensor) -> None:
        self._bound.launch(problem, self._prepared, out, lse)


class Operators(NamedTuple):
    """How many torch operators an engine calls beside the graph.

    Attributes:
        launches: Those that are launches on a GPU.
        others: Views and allocations.
    """

    launches: int
    others: int


def operators(inputs: Inputs, op: str, direction: str) -> Operators:
    """Count them.

    Args:
        inputs, op, direction: As in ``public_call``.

    Returns:
        The counts, as torch dispatches on the CPU; some operators are several launches.

    Raises:
        EngineRefusal: The cuDNN engine does not take the case.
    """
    with _Counting() as mode:
        for each in Direction:
            if each.word in direction.split("_"):
                compute(request_of(inputs.case, each, True, op == "nvte"), each)
    return Operators(mode.launches, mode.others)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launched = not func.is_view and func._schema.name.removeprefix("aten::") not in _ALLOCATIONS
        self.launches += launched
        self.others += not launched
        return func(*args, **(kwargs or {}))
