"""What is refused of a declared graph, and that the executor reads the graphs of ``cudnn_graph.build``."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cudnn
import pytest
import torch
from cudnn_declared import read_graph
from cudnn_handmade import Handmade, Problem
from cudnn_interpreter import Interpreter, InterpretingExecutor
from cudnn_memory import BindingFault, GraphFault

LENS = {"lens_q": (5, 1, 3), "lens_kv": (2, 7, 4)}
DENSE, PADDED, THD = Problem(), Problem(**LENS), Problem(layout="thd", **LENS)
BIAS = replace(DENSE, bias=(1, 2, 5, 7))
FLOAT = cudnn.data_type.FLOAT
Change = Callable[[Any, Any], object]


def attribute(port: str, **fields: Any) -> Change:
    """Set attributes of the tensor of a port."""

    def change(graph: Any, node: Any) -> None:
        tensor = {**node.inputs, **node.outputs}[port]
        for name, value in fields.items():
            setattr(tensor, name, value)

    return change


def options(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, node_options=changes)


def nothing(graph: Any, node: Any) -> None:
    pass


def extra_tensor(graph: Any, node: Any) -> Any:
    return graph.tensor(name="more", dim=[1] * 4, stride=[1] * 4, data_type=FLOAT)


def without_mask(graph: Any, node: Any) -> None:
    del node.inputs["seq_len_q"], node.inputs["seq_len_kv"], node.params["use_padding_mask"]


def ragged_bias(graph: Any, node: Any) -> None:
    node.inputs["bias"].ragged_offset = node.inputs["q"].ragged_offset


def long(port: str) -> Change:
    """Ragged tensors of so many tokens that int32 does not hold the offsets."""

    def change(graph: Any, node: Any) -> None:
        node.outputs["Stats"].set_output(False)
        for name in ("q", "O") if port == "q" else ("k", "v"):
            tensor = {**node.inputs, **node.outputs}[name]
            tensor.dim[2] = 1 << 26

    return change


REFUSED = {
    "no node": (DENSE, False, lambda graph, node: graph._nodes.clear(), "the graph has other nodes than one SDPA: []"),
    "another node": (DENSE, False, lambda graph, node: graph.relu(node.inputs["q"]), "has other nodes than one SDPA"),
    "an unknown input": (DENSE, False, lambda graph, node: node.inputs.update(sink_token=node.inputs["q"]),
        "node 'node' has an unknown input: ['sink_token']"),
    "an unknown output": (DENSE, False, lambda graph, node: node.outputs.update(score_max=node.outputs["Stats"]),
        "has an unknown output: ['score_max']"),
    "an unknown parameter": (options(DENSE, sliding_window_length=3), False, nothing,
        "has an unknown parameter: ['sliding_window_length']"),
    "an unknown mask": (options(DENSE, use_alibi_mask=True), False, nothing, "unknown parameter"),
    "a parameter of the other direction": (options(DENSE, generate_stats=True), True, nothing, "unknown parameter"),
    "a missing input": (DENSE, True, lambda graph, node: node.inputs.pop("dO"), "has no input ['dO']"),
    "a missing output": (DENSE, False, lambda graph, node: node.outputs.pop("O"), "has no output ['O']"),
    "a tensor of no use": (DENSE, False, extra_tensor, "tensor 'more' is declared, but the node does not use it"),
    "16-bit intermediates": (replace(DENSE, graph_options={"intermediate_data_type": cudnn.data_type.BFLOAT16}), False,
        nothing, "the graph computes in BFLOAT16: intermediate_data_type must be FLOAT"),
    "16-bit arithmetic": (replace(DENSE, graph_options={"compute_data_type": cudnn.data_type.HALF}), False, nothing,
        "the graph computes in HALF: compute_data_type must be FLOAT"),
    "a node of 16-bit arithmetic": (options(DENSE, compute_data_type=cudnn.data_type.HALF), False, nothing,
        "node 'node' computes in HALF"),
    "a bottom-right mask": (options(DENSE, diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT), False, nothing,
        "the mask is aligned BOTTOM_RIGHT"),
    "a right bound": (options(DENSE, diagonal_band_right_bound=2), False, nothing, "the mask has a right bound of 2"),
    "a multiplier": (THD, False, attribute("q", ragged_offset_multiplier=2), "'q' has a ragged offset multiplier"),
    "Q by value": (DENSE, False, attribute("q", is_pass_by_value=True), "tensor 'q' of port q is passed by value"),
    "a scale on the device": (DENSE, False, attribute("attn_scale", is_pass_by_value=False),
        "tensor 'scale' of port attn_scale is passed by value, or should be"),
    "a scale that is no float": (DENSE, False, attribute("attn_scale", data_type=cudnn.data_type.HALF),
        "scale (uid 11) must be one torch.float32"),
    "an 8-bit type": (DENSE, False, attribute("q", data_type=cudnn.data_type.FP8_E4M3), "not known here: FP8_E4M3"),
    "float32": (DENSE, False, attribute("q", data_type=FLOAT), "q (uid 1) is torch.float32: only 16-bit"),
    "K of another dtype": (DENSE, False, attribute("k", data_type=cudnn.data_type.HALF),
        "k (uid 2) has dtype torch.float16"),
    "16-bit statistics": (DENSE, False, attribute("Stats", data_type=cudnn.data_type.BFLOAT16),
        "has dtype torch.bfloat16"),
    "float lengths": (PADDED, False, attribute("seq_len_q", data_type=FLOAT), "len_q (uid 7) has dtype torch.float32"),
    "a mask of drops": (replace(DENSE, dropout=0.5), False, lambda graph, node: node.params.update(_dropout_n=2),
        "dropout must be a probability, a seed and an offset"),
    "a drop of all": (replace(DENSE, dropout=1.0), False, nothing, "dropout has a probability of 1.0"),
    "a float seed": (replace(DENSE, dropout=0.5), False, attribute("dropout_1", data_type=FLOAT),
        "seed (uid 9) must be one torch.int64"),
    "fewer heads of K": (DENSE, False, attribute("k", dim=[3, 1, 7, 8]),
        "k (uid 2) has dim (3, 1, 7, 8), expected (3, 2, 7, 8)"),
    "an output of other rows": (DENSE, False, attribute("O", dim=[3, 2, 7, 8]), "o (uid 4) has dim"),
    "a gradient of other rows": (DENSE, True, attribute("dK", dim=[3, 2, 5, 8]), "dK (uid 14) has dim"),
    "padded statistics of other rows": (DENSE, True, attribute("stats", dim=[3, 2, 8, 1]), "stats (uid 5) has dim"),
    "fewer lengths": (PADDED, False, attribute("seq_len_kv", dim=[2, 1, 1, 1]), "len_kv (uid 8) has dim"),
    "a smaller bias": (BIAS, False, attribute("bias", dim=[1, 2, 5, 6]),
        "bias (uid 6) has dim (1, 2, 5, 6), which does not"),
    "a bias of no keys": (BIAS, False, attribute("bias", dim=[1, 2, 5, 1]), "does not broadcast to (3, 2, 5, 7)"),
    "a bias of two sequences": (BIAS, False, attribute("bias", dim=[2, 2, 5, 7]), "does not broadcast"),
    "a transposed bias": (BIAS, False, attribute("bias", stride=[70, 35, 1, 5]),
        "has a last stride of 5, which must be 1"),
    "a bias of the other 16-bit type": (BIAS, False, attribute("bias", data_type=cudnn.data_type.HALF),
        "has dtype torch.float16"),
    "a float32 dBias": (BIAS, True, attribute("dBias", data_type=FLOAT), "dBias (uid 16) has dtype torch.float32"),
    "a dBias of another shape": (BIAS, True, attribute("dBias", dim=[3, 2, 5, 7]), "is not of the bias's shape"),
    "a dBias without a bias": (BIAS, True, lambda graph, node: node.inputs.pop("bias"),
        "dBias (uid 16) is not of the bias's shape"),
    "strided features": (DENSE, False, attribute("q", stride=[160, 8, 16, 2]), "q (uid 1) has a last stride of 2"),
    "misaligned rows": (DENSE, False, attribute("k", stride=[112, 8, 12, 1]),
        "k (uid 2) has strides (112, 8, 12, 1) that"),
    "misaligned heads": (DENSE, True, attribute("dV", stride=[112, 12, 24, 1]), "dV (uid 15) has strides"),
    "a negative stride": (DENSE, False, attribute("v", stride=[112, 8, -16, 1]), "v (uid 3) has dim"),
    "an output over itself": (DENSE, False, attribute("O", stride=[80, 0, 16, 1]),
        "o (uid 4) is written, but its strides"),
    "heads over heads": (DENSE, True, attribute("dQ", stride=[80, 8, 8, 1]), "dQ (uid 13) is written, but its strides"),
    "strided statistics": (DENSE, True, attribute("stats", stride=[10, 1, 2, 1]), "ignores before cuDNN 9.26"),
    "ragged without a mask": (THD, False, without_mask, "is ragged without a padding mask"),
    "one side's lengths": (PADDED, False, lambda graph, node: node.inputs.pop("seq_len_q"),
        "needs seq_len_q and seq_len_kv"),
    "lengths without a mask": (PADDED, False, lambda graph, node: node.params.pop("use_padding_mask"),
        "the padding mask needs"),
    "a ragged bias": (replace(THD, bias=(3, 2, 5, 7)), False, ragged_bias, "is ragged, which a bias"),
    "fewer offsets": (THD, False, lambda graph, node: setattr(node.inputs["k"].ragged_offset, "dim", [3, 1, 1, 1]),
        "from_kv (uid 22) must be (4, 1, 1, 1) of int32 or int64"),
    "offsets of queries that int32 cannot hold": (replace(THD, offsets_dtype=torch.int32), False, long("q"),
        "from_q (uid 21) is torch.int32: 201326592 tokens of 16 overflow it"),
    "offsets of keys that int32 cannot hold": (replace(THD, offsets_dtype=torch.int32), False, long("k"),
        "from_kv (uid 22) is"),
    "a total that int32 cannot hold": (replace(options(THD, max_total_seq_len_kv=1 << 27), offsets_dtype=torch.int32),
        True, nothing, "from_kv (uid 22) is torch.int32: 134217728 tokens of 16 overflow it"),
    "a ragged backward without totals": (options(THD, max_total_seq_len_kv=None), True,
        lambda graph, node: node.params.pop("max_total_seq_len_q"),
        "needs max_total_seq_len_q and max_total_seq_len_kv"),
    "what ends the process": (Problem(b=1, h=1, s_q=1), True, nothing, "would end the process"),
    "what ends the process, padded": (Problem(b=1, h=1, s_q=1, lens_q=(1,)), True, nothing, "would end the process"),
    "Hopper without a mask": (replace(DENSE, graph_options={"sm_version": 90}), True, nothing, "needs a padding mask"),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "backward", "change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(problem: Problem, backward: bool, change: Change, message: str) -> None:
    graph = Handmade(problem).graph(backward)
    if change is not nothing:
        change(graph, graph.nodes[0])
    with pytest.raises(GraphFault) as caught:
        read_graph(graph, 92400)
    assert message in str(caught.value)


TAKEN = {
    "a bound instead of a flag": (options(DENSE, diagonal_band_right_bound=0), False, nothing, 92400),
    "an alignment that says nothing new": (options(DENSE, diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT), False,
        nothing, 92400),
    "strided statistics of a forward": (DENSE, False, attribute("Stats", stride=[10, 1, 2, 1]), 92400),
    "strided statistics of a newer backward": (DENSE, True, attribute("stats", stride=[10, 1, 2, 1]), 92600),
    "K of one sequence for all": (DENSE, False, attribute("k", stride=[0, 8, 16, 1]), 92400),
    "strides of axes of one": (Problem(b=1, h=1), False, attribute("q", stride=[3, 5, 8, 1]), 92400),
    "one ragged query": (Problem(b=1, h=1, s_q=1, layout="thd"), True, nothing, 92400),
    "Hopper with a mask": (replace(PADDED, graph_options={"sm_version": 90}), True, nothing, 92400),
    "Hopper forward": (replace(DENSE, graph_options={"sm_version": 90}), False, nothing, 92400),
    "another GPU without a mask": (replace(DENSE, graph_options={"sm_version": 100}), True, nothing, 92400),
    "determinism": (options(DENSE, use_deterministic_algorithm=True), True, nothing, 92400),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "backward", "change", "version"), TAKEN.values(), ids=TAKEN.keys())
def test_what_is_taken(problem: Problem, backward: bool, change: Change, version: int) -> None:
    graph = Handmade(problem).graph(backward)
    change(graph, graph.nodes[0])
    assert read_graph(graph, version).backward is backward


def test_what_is_read() -> None:
    graph = Handmade(replace(THD, causal=True, dropout=0.25, scale_by_value=False)).graph(backward=True)
    read = read_graph(graph, 92400)
    assert (read.dim, read.causal, read.padding, read.dropout) == ((3, 2, 5, 7), True, True, 0.25)
    assert (read.attn_scale, read.max_total_q, read.max_total_kv) == (0.4, 64, 64)
    assert read_graph(Handmade(options(DENSE, diagonal_band_right_bound=0)).graph(), 92400).causal
    assert not read_graph(Handmade(DENSE).graph(), 92400).causal
    corner = read_graph(Handmade(replace(DENSE, causal=True, bottom_right=True)).graph(), 92400)
    assert (corner.causal, corner.bottom_right, read.bottom_right) == (True, True, False)


def test_statistics_that_declare_no_dtype_are_float32() -> None:
    graph = Handmade(DENSE).graph()
    for tensor in graph.nodes[0].outputs.values():
        tensor.data_type = None
    read = read_graph(graph, 92400).outputs
    assert (read["O"].dtype, read["Stats"].dtype) == (torch.bfloat16, torch.float32)


def test_a_virtual_output_is_not_bound() -> None:
    graph = Handmade(DENSE).graph()
    graph.nodes[0].outputs["Stats"].set_output(False)
    assert Interpreter(graph).uids == (1, 2, 3, 4, 11)


def test_the_executor_declares_a_key_once_and_counts_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made, built = Handmade(DENSE), []
    module = SimpleNamespace(build=lambda key: built.append(key) or made.graph())
    monkeypatch.setitem(sys.modules, "fusedattn.engines.cudnn_graph", module)
    executor: Any = InterpretingExecutor(workspace_bytes=0)
    executable = executor.executable("key")
    names = ("q", "k", "v", "o", "stats", "scale")
    for _ in range(2):
        executor.executable("key").run([made.tensors[name] for name in names], None)
    assert (executable.uids, executable.workspace_bytes) == ((1, 2, 3, 4, 5, 11), 0)
    assert (built, dict(executor.executions)) == (["key"], {"key": 2})
    with pytest.raises(BindingFault, match="expected 6 tensors, got 5"):
        executable.run([made.tensors[name] for name in names[:5]], None)
