"""What the interpreter refuses of workspaces, bindings and addresses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_handmade import UIDS, Handmade, Problem, address
from cudnn_interpreter import Interpreter
from cudnn_memory import BindingFault, InterpreterFault, MemoryFault
from torch import Tensor

LENS = {"lens_q": (5, 1, 3), "lens_kv": (2, 7, 4)}
PADDED, THD = Problem(**LENS), Problem(layout="thd", **LENS)


def forwarded(problem: Problem) -> Handmade:
    made = Handmade(problem)
    made.run()
    return made


def test_the_workspace_is_filled_with_garbage() -> None:
    made = forwarded(THD)
    interpreter = Interpreter(made.graph(backward=True), workspace_bytes=48)
    bound = {uid: address(made.tensors[name]) for name, uid in UIDS.items() if uid in interpreter.uids}
    workspace = torch.zeros(64, dtype=torch.uint8)
    interpreter.run(bound, workspace[:48])
    assert workspace.tolist() == [255] * 48 + [0] * 16


def test_workspaces_are_needed_by_backwards_most_with_a_bias() -> None:
    plain, bias = (Handmade(replace(PADDED, bias=shape)) for shape in (None, (1, 2, 5, 7)))
    needed = [Interpreter(each).workspace_bytes for each in (plain.graph(), plain.graph(True), bias.graph(True))]
    assert needed == [0, 4 * 15 * 2 * 10, 4 * 15 * 2 * 10 + 2 * 3 * 2 * 64 * 128]
    assert Interpreter(plain.graph(), workspace_bytes=lambda attention: attention.dim[0]).workspace_bytes == 3


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        (None, "workspace: expected 48 bytes, got None"),
        (torch.empty(47, dtype=torch.uint8), r"workspace \(uid -1\): bytes \[0, 48\) leave its storage, which has 47"),
        (torch.empty(64, dtype=torch.uint8)[8:], "bytes .* are not aligned to 16 bytes"),
    ],
)
def test_workspaces_that_do_not_do(workspace: Tensor | None, message: str) -> None:
    made = Handmade(PADDED)
    interpreter = Interpreter(made.graph(), workspace_bytes=48)
    bound = {uid: address(made.tensors[name]) for name, uid in UIDS.items() if uid in interpreter.uids}
    with pytest.raises(InterpreterFault, match=message):
        interpreter.run(bound, workspace)


# What is bound.


def rebound(name: str, tensor: Callable[[Handmade], Tensor]) -> Callable[[Handmade], None]:
    def change(made: Handmade) -> None:
        made.tensors[name] = tensor(made)

    return change


def shifted(name: str, elements: int) -> Callable[[Handmade], None]:
    """The same numbers at an address that many elements further on."""

    def change(made: Handmade) -> None:
        old = made.tensors[name]
        arena = torch.empty(old.numel() + elements, dtype=old.dtype)
        made.tensors[name] = arena[elements:].as_strided(old.shape, old.stride(), elements)

    return change


def values(name: str, *numbers: int) -> Callable[[Handmade], None]:
    return rebound(name, lambda made: torch.tensor(numbers, dtype=made.tensors[name].dtype))


def output_before_input(made: Handmade) -> None:
    """The last sequence's queries lie where the first one's output goes."""
    arena = torch.zeros(20, 2, 8, dtype=made.problem.dtype)
    made.tensors["q"], made.tensors["o"] = arena[:9], arena[6:]


BINDINGS = {
    "a dense tensor that is too small": (PADDED, rebound("k", lambda made: made.tensors["k"][:, :1, :4].clone()),
        MemoryFault, r"k \(uid 2\): bytes \[0, 672\) leave its storage, which has 192"),
    "an output that is too small": (PADDED, rebound("stats", lambda made: torch.empty(29)),
        MemoryFault, r"stats \(uid 5\): bytes \[0, 120\) leave its storage, which has 116"),
    "a bias that is too small": (replace(PADDED, bias=(1, 2, 5, 7)), rebound("bias", lambda made: torch.empty(69)),
        MemoryFault, r"bias \(uid 6\): bytes \[0, 280\)"),
    "lengths that are too few": (PADDED, values("len_q", 1, 2), MemoryFault, r"len_q \(uid 7\): bytes \[0, 12\)"),
    "offsets that are too few": (THD, values("from_q", 0, 80, 96), MemoryFault, r"from_q \(uid 21\): bytes \[0, 32\)"),
    "a ragged tensor that is too small": (THD, rebound("k", lambda made: made.tensors["k"][:12].clone()),
        MemoryFault, r"k \(uid 2\): bytes \[288, 416\) leave its storage, which has 384"),
    "an address that is not a multiple of 16": (PADDED, shifted("q", 4), MemoryFault, r"q \(uid 1\).*multiple of 16"),
    "an output's address": (PADDED, shifted("o", 4), MemoryFault, r"o \(uid 4\).*multiple of 16"),
    "an address that is not one of the dtype": (PADDED,
        rebound("stats", lambda made: torch.empty(200, dtype=torch.uint8)[2:]),
        MemoryFault, "are not aligned to torch.float32"),
    "an output that is an input": (PADDED, rebound("o", lambda made: made.tensors["q"]),
        MemoryFault, r"o \(uid 4\).* are written after some of them were read as an input in the same run"),
    "an input that is an output": (THD, output_before_input,
        MemoryFault, r"q \(uid 1\): bytes .* are read after some of them were written in the same run"),
    "two outputs in one place": (PADDED, rebound("stats", lambda made: made.tensors["o"]),
        MemoryFault, "are written after some of them were written"),
    "a length above the declared": (PADDED, values("len_kv", 2, 8, 4), BindingFault,
        r"len_kv \(uid 8\): lengths must be in \[0, 7\]: \[2, 8, 4\]"),
    "a negative length": (PADDED, values("len_q", 2, -1, 4), BindingFault,
        r"lengths must be in \[0, 5\]: \[2, -1, 4\]"),
    "offsets in tokens": (THD, values("from_q", 0, 5, 6, 9), BindingFault,
        r"from_q \(uid 21\) of q \(uid 1\): offsets must be .* a token's 16 elements: \[0, 5, 6, 9\]"),
    "negative offsets": (THD, values("from_kv", -16, 32, 144, 208), BindingFault, "offsets must be not negative"),
    "sequences that overlap": (THD, values("from_o", 0, 64, 96, 144), MemoryFault,
        r"o \(uid 4\): bytes \[128, 160\) are written after some of them were written"),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "change", "fault", "message"), BINDINGS.values(), ids=BINDINGS.keys())
def test_bindings(problem: Problem, change: Callable[[Handmade], None], fault: Any, message: str) -> None:
    made = Handmade(problem)
    graph = made.graph()
    change(made)
    with pytest.raises(fault, match=message):
        made.run(graph=graph)


BACKWARD_BINDINGS = {
    "a gradient over what it is the gradient of": (PADDED, rebound("dK", lambda made: made.tensors["k"]), MemoryFault,
        r"dK \(uid 14\): bytes .* after some of them were read as an input"),
    "gradients in one place": (PADDED, rebound("dV", lambda made: made.tensors["dK"]), MemoryFault,
        r"dV \(uid 15\): bytes .* after some of them were written"),
    "a gradient's address": (PADDED, shifted("dQ", 4), MemoryFault, r"dQ \(uid 13\).*multiple of 16"),
    "the output's address": (PADDED, shifted("dO", 4), MemoryFault, r"dO \(uid 12\).*multiple of 16"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "change", "fault", "message"), BACKWARD_BINDINGS.values(), ids=BACKWARD_BINDINGS.keys()
)
def test_bindings_of_backwards(problem: Problem, change: Callable[[Handmade], None], fault: Any, message: str) -> None:
    made = forwarded(problem)
    graph = made.graph(backward=True)
    change(made)
    with pytest.raises(fault, match=message):
        made.run(graph=graph)


@pytest.mark.parametrize(
    ("side", "total", "message"),
    [
        ("q", 8, r"q \(uid 1\): sequence 2 passes the 8 tokens that were declared"),
        ("kv", 12, r"k \(uid 2\): sequence 2 passes the 12 tokens that were declared"),
    ],
)
def test_totals_hold_all_tokens(side: str, total: int, message: str) -> None:
    made = forwarded(THD)
    graph = made.graph(backward=True)
    graph.nodes[0].params[f"max_total_seq_len_{side}"] = total
    with pytest.raises(BindingFault, match=message):
        made.run(graph=graph)
    graph.nodes[0].params[f"max_total_seq_len_{side}"] = total + 1
    made.run(graph=graph)


def test_tensors_are_exactly_those_of_the_graph() -> None:
    made = Handmade(PADDED)
    interpreter = Interpreter(made.graph())
    assert interpreter.uids == (1, 2, 3, 4, 5, 7, 8, 11)
    bound = {uid: address(made.tensors[name]) for name, uid in UIDS.items() if uid in interpreter.uids}
    with pytest.raises(BindingFault, match=r"missing \[8\], extra \[9\]"):
        interpreter.run({(uid if uid != 8 else 9): tensor for uid, tensor in bound.items()}, None)
    with pytest.raises(BindingFault, match=r"missing \[\], extra \[9\]"):
        interpreter.run({**bound, 9: bound[8]}, None)
    with pytest.raises(BindingFault, match=r"missing \[8\], extra \[\]"):
        interpreter.run({uid: tensor for uid, tensor in bound.items() if uid != 8}, None)
    with pytest.raises(BindingFault, match="uid 3: expected a tensor in CPU memory, got one on meta"):
        interpreter.run({**bound, 3: torch.empty(1, device="meta")}, None)


def test_inputs_may_be_broadcast_by_strides() -> None:
    made = Handmade(Problem(bias=(3, 2, 5, 7)))
    made.run(graph=made.graph(k=(0, 0, 8, 1), v=(56, 0, 8, 1), bias=(0, 0, 0, 1)))
    assert not made.tensors["o"].isnan().any()


def test_uids_of_a_ragged_graph_include_offsets() -> None:
    assert Interpreter(Handmade(replace(THD, ragged_stats=True)).graph()).uids == (
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        11,
        21,
        22,
        23,
        24,
    )
