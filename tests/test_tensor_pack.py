"""The auxiliary pack from forward to backward, and the two-call workspace protocol."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_nvte import PACKINGS, Call, same
from torch import Tensor

from fusedattn import SKIP, NVTETensorPack, SpecError, Workspace
from fusedattn.engines.torch_tiled import TorchEngine

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def problem(packing: str = "qkvpacked", dtype: torch.dtype = torch.float32) -> Call:
    words = {"dropout": 0.3, "bias_type": "post_scale_bias", "attn_mask_type": "padding"}
    return Call(packing, dtype, rng_state=torch.tensor([7, 8]), **words)


# The container


def test_container() -> None:
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(10)}
    pack = NVTETensorPack(**tensors)
    assert NVTETensorPack.capacity == len(pack) == 10
    assert pack.names == tuple(tensors)
    assert list(pack) == list(tensors.values())
    assert "t3" in pack
    assert "t10" not in pack
    assert all(pack[i] is pack[f"t{i}"] is pack[i - 10] is tensors[f"t{i}"] for i in range(10))
    with pytest.raises(KeyError, match="softmax_lse"):
        pack["softmax_lse"]
    with pytest.raises(IndexError):
        pack[10]
    assert repr(NVTETensorPack(rng_state=torch.zeros(2).long())) == "NVTETensorPack(rng_state: (2,) torch.int64 cpu)"
    assert (len(NVTETensorPack()), NVTETensorPack().names, repr(SKIP)) == (0, (), "fusedattn.SKIP")


def test_container_refuses_more_than_it_holds_and_what_is_no_tensor() -> None:
    with pytest.raises(SpecError, match="argument 'NVTETensorPack': expected at most 10 tensors, got 11"):
        NVTETensorPack(**{f"t{i}": torch.zeros(1) for i in range(11)})
    for value in ([1.0], None, 1.0):
        with pytest.raises(SpecError, match=r"argument 'softmax_lse': expected a torch\.Tensor, got "):
            NVTETensorPack(softmax_lse=value)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_contents_after_training(packing: str, dtype: torch.dtype, bias: bool) -> None:
    call = problem(packing, dtype)
    _, pack = call.forward(**{} if bias else {"Bias": None, "bias_type": "no_bias"})
    assert pack.names == (("softmax_lse", "rng_state", "Bias") if bias else ("softmax_lse", "rng_state"))
    assert pack[0].shape == (9, 2, 1)
    assert pack[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(pack["rng_state"], call.extra["rng_state"])
    assert pack["rng_state"].data_ptr() != call.extra["rng_state"].data_ptr()
    assert not bias or pack["Bias"] is call.extra["Bias"]
    _, pack = call.forward(dropout=0.0)
    assert (pack["rng_state"].tolist(), pack["rng_state"].dtype) == ([0, 0], torch.int64)


# From forward to backward


def parts(pack: NVTETensorPack, *names: str, **more: Tensor) -> NVTETensorPack:
    return NVTETensorPack(**{name: pack[name] for name in names} | more)


ALL = ("softmax_lse", "rng_state", "Bias")
BAD_PACKS: dict[str, tuple[Callable[[NVTETensorPack], NVTETensorPack], str, str]] = {
    "empty": (lambda pack: NVTETensorPack(), "", r"got entries \[\]\. Pass the pack of the forward"),
    "no-lse": (lambda pack: parts(pack, *ALL[1:]), "", r"expected entries \['softmax_lse', "),
    "no-rng": (lambda pack: parts(pack, *ALL[::2]), "", r"got entries \['softmax_lse', 'Bias'\]"),
    "no-bias": (lambda pack: parts(pack, *ALL[:2]), "", "is_training=True and the same bias_type"),
    "more": (lambda pack: parts(pack, *ALL, Max=pack[0]), "", "'Max'"),
    "lse-shape": (lambda p: parts(p, *ALL, softmax_lse=p[0][..., 0]), "['softmax_lse']", r"shape \[9, 2, 1\], got"),
    "lse-dtype": (lambda p: parts(p, *ALL, softmax_lse=p[0].double()), "['softmax_lse']", "dtype float32, got float64"),
    "rng-shape": (lambda p: parts(p, *ALL, rng_state=torch.zeros(3).long()), "['rng_state']", r"shape \[2\]"),
    "rng-dtype": (lambda p: parts(p, *ALL, rng_state=torch.zeros(2)), "['rng_state']", "dtype int64, got float32"),
    "bias-shape": (lambda p: parts(p, *ALL, Bias=p[2][..., 1:]), "['Bias']", r"got shape \[1, 2, 5, 4\]"),
    "bias-dtype": (lambda p: parts(p, *ALL, Bias=p[2].int()), "['Bias']", "a floating dtype, got int32"),
    "query": (lambda p: parts(p, *ALL, rng_state=p[1].to("meta")), "", r"query filled\. Run the forward, after work"),
}


@pytest.mark.parametrize(("spoil", "argument", "message"), BAD_PACKS.values(), ids=BAD_PACKS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_pack_that_no_forward_left(
    packing: str, spoil: Callable[[NVTETensorPack], NVTETensorPack], argument: str, message: str
) -> None:
    call = problem(packing)
    out, pack = call.forward()
    given = torch.full_like(next(iter(call.operands.values())), 7.0)
    with pytest.raises(SpecError, match=message) as raised:
        call.backward(out, spoil(pack), **{call.gradients[0]: given})
    assert raised.value.argument == f"Aux_CTX_Tensors{argument}"
    assert given.eq(7).all()


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "bias_type": ({"bias_type": "pre_scale_bias"}, "bias_type = pre_scale_bias, got one whose .* = post_scale_bias"),
    "attn_mask_type": ({"attn_mask_type": "causal"}, "attn_mask_type = causal, got one whose .* = padding"),
    "attn_scale": ({"attn_scale": 0.5}, r"attn_scale = 0\.5, got one whose forward had attn_scale = 0\.4"),
    "nan": ({"attn_scale": torch.nan}, "attn_scale = nan"),
    "dropout": ({"dropout": 0.2}, r"dropout = 0\.2, got one whose forward had dropout = 0\.3"),
    "no-dropout": ({"dropout": 0.0}, r"dropout = 0\.0"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 3, 4, 8])}, r"\(0, 3, 4, 8\), got one .*\(0, 3, 3, 8\)"),
    "cu_seqlens_q": ({"cu_seqlens_q": torch.tensor([0, 3, 4, 8])}, r"\(0, 3, 4, 8\), got one .*\(0, 3, 3, 8\)"),
    "cu_seqlens_kv": ({"cu_seqlens_kv": torch.tensor([0, 3, 4, 8])}, r"\(0, 3, 4, 8\), got one .*\(0, 4, 6, 11\)"),
    "max_seqlen": ({"max_seqlen": 6}, r"= 6, got one whose forward had max_seqlen.* = 5"),
    "max_seqlen_q": ({"max_seqlen_q": 6}, r"= 6, got one whose forward had max_seqlen.* = 5"),
    "max_seqlen_kv": ({"max_seqlen_kv": 6}, r"= 6, got one whose forward had max_seqlen.* = 5"),
    "shape": ({"KV": torch.randn(13, 2, 2, 8)}, r"\(13, 2, 2, 8\)\], got one .*\(12, 2, 2, 8\)\]"),
}  # fmt: skip


def takes(packing: str, changes: dict[str, Any]) -> bool:
    call = problem(packing)
    return changes.keys() <= call.operands.keys() | call.lengths.keys() | call.words.keys()


OTHER_CASES = [(packing, name) for name, row in OTHER.items() for packing in PACKINGS if takes(packing, row[0])]


@pytest.mark.parametrize(("packing", "field"), OTHER_CASES)
def test_pack_of_another_problem(packing: str, field: str) -> None:
    call, (changes, message) = problem(packing), OTHER[field]
    call.extra["Bias"] = call.extra["Bias"][:, :, :1, :]  # so that max_seqlen_q may change
    if changes.keys() & {"max_seqlen", "max_seqlen_kv"}:
        call.extra["Bias"], call.words["bias_type"] = None, "no_bias"
    out, pack = call.forward()
    with pytest.raises(SpecError, match=message) as raised:
        call.backward(out, pack, **changes)
    assert raised.value.argument == "Aux_CTX_Tensors"
    assert "the pack of a forward with" in raised.value.expected
    call.backward(out, pack)


def test_pack_of_another_dtype_or_layout() -> None:
    call, wide = problem(), problem(dtype=torch.float64)
    (out, _), (_, pack) = call.forward(), wide.forward()
    with pytest.raises(SpecError, match="expected dtype float32, got float64"):
        call.backward(out, pack)
    half = problem(dtype=torch.float16)
    with pytest.raises(SpecError, match=r"dtype = torch\.float32, got one whose .* = torch\.float16"):
        call.backward(out, half.forward().Aux_Output_Tensors)
    with pytest.raises(SpecError, match="qkv_layout = t3hd, got one whose forward had qkv_layout = thd_t2hd"):
        call.backward(out, problem("kvpacked").forward().Aux_Output_Tensors)


@pytest.mark.parametrize("shallow", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_bias_changed_in_place(packing: str, shallow: bool) -> None:
    call = problem(packing)
    out, pack = call.forward()
    pack = copy.copy(pack) if shallow else pack
    call.backward(out, pack)
    call.extra["Bias"][0, 0, 0, 0] += 1
    with pytest.raises(SpecError, match="expected the bias as forward saw it, got one changed in place") as raised:
        call.backward(out, pack)
    assert raised.value.argument == "Aux_CTX_Tensors['Bias']"
    assert raised.value.hint == "Run the forward again, or give it a copy."


TRAVELS: dict[str, Callable[[NVTETensorPack], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda pack: pickle.loads(pickle.dumps(pack)),
    "rebuilt": lambda pack: NVTETensorPack(**{name: pack[name].clone() for name in pack.names}),
    "reordered": lambda pack: NVTETensorPack(**{name: pack[name] for name in reversed(pack.names)}),
}


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_packs_travel(packing: str, travel: Callable[[NVTETensorPack], Any]) -> None:
    call = problem(packing)
    out, pack = call.forward()
    other = travel(pack)
    assert sorted(other.names) == sorted(pack.names)
    assert same([other[name] for name in pack.names], pack)
    assert same(call.backward(out, other), call.backward(out, pack))
    if other.record is not None:
        with pytest.raises(SpecError, match="the pack of a forward with attn_scale"):
            call.backward(out, other, attn_scale=1.0)


def test_full_pack_is_no_place_for_another_forward() -> None:
    call = problem()
    _, pack = call.forward()
    before = list(pack)
    with pytest.raises(SpecError, match="expected an empty pack or one that a query filled, got NVTETensorPack") as e:
        call.forward(Aux_Output_Tensors=pack)
    assert (e.value.argument, e.value.hint) == ("Aux_Output_Tensors", "Pass NVTETensorPack() or None.")
    assert all(a is b for a, b in zip(pack, before, strict=True))


# The workspace


def meta_of(result: Any) -> list[tuple[Any, ...]]:
    """Shapes and dtypes, pack included."""
    flat = [x for value in result for x in (value if isinstance(value, NVTETensorPack) else [value])]
    return [None if x is None else (tuple(x.shape), x.dtype) for x in flat]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_two_calls(packing: str, dtype: torch.dtype, in_place: bool) -> None:
    call = problem(packing, dtype)
    call.extra["rng_state"] = None
    out, pack = call.forward()
    outputs: dict[str, Any] = {"O": torch.full_like(out, 7)} if in_place else {}
    workspace, aux, state = Workspace(), NVTETensorPack(), torch.get_rng_state()
    assert workspace.size_bytes is None
    query = call.forward(workspace=workspace, Aux_Output_Tensors=aux, **outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert workspace.size_bytes >= 1
    assert query._fields == ("O", "Aux_Output_Tensors")
    assert query.Aux_Output_Tensors is aux
    assert query.O.is_meta
    assert all(x.is_meta for x in aux)
    assert not in_place or outputs["O"].eq(7).all()
    workspace.allocate("cpu")
    result = call.forward(workspace=workspace, Aux_Output_Tensors=aux, **outputs)
    assert meta_of(query._replace(Aux_Output_Tensors=pack)) == meta_of(result) == meta_of((out, pack))
    assert aux.names == pack.names
    backward = call.backward(out, pack)
    again, kept = Workspace(), {"dBias": torch.full_like(call.extra["Bias"], 7)} if in_place else {"dBias": SKIP}
    asked = call.backward(out, pack, workspace=again, **kept)
    assert again.size_bytes >= 1
    assert type(asked) is type(backward)
    assert meta_of(asked) == [*meta_of(backward)[:-1], meta_of(backward)[-1] if in_place else None]
    assert all(x is None or x.is_meta for x in asked)
    assert not in_place or kept["dBias"].eq(7).all()
    again.allocate(torch.device("cpu"))
    assert same(call.backward(out, pack, workspace=again), backward)


def test_query_checks_and_fills_the_pack_like_a_call() -> None:
    call, workspace = problem(), Workspace()
    assert len(call.forward(workspace=Workspace(), is_training=False).Aux_Output_Tensors) == 0
    for wrong in ({"attn_scale": "x"}, {"O": torch.zeros(9, 2, 5)}, {"cu_seqlens": torch.tensor([0, 3, 10])}):
        with pytest.raises(SpecError, match=f"argument '{next(iter(wrong))}'"):
            call.forward(workspace=workspace, **wrong)
        assert workspace.size_bytes is None


def sized(size: int, device: str | None = "cpu") -> Workspace:
    workspace = Workspace()
    workspace.size_bytes = size
    if device:
        workspace.allocate(device)
    return workspace


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sized(64, None), r"expected an allocated workspace, got .*Call workspace\.allocate\('cpu'\) between"),
        (lambda: sized(64, "meta"), r"expected memory on cpu, got memory on meta\. Call .*allocate\('cpu'\)"),
        (lambda: sized(63), r"expected at least 64 bytes, got 63 bytes\. Query again with a new Workspace\(\)"),
        (lambda: 64, "expected a Workspace or None, got int"),
        (lambda: torch.empty(64), "expected a Workspace or None, got Tensor"),
    ],
    ids=["unallocated", "device", "small", "int", "tensor"],
)
def test_workspace_that_does_not_serve(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], message: str) -> None:
    monkeypatch.setattr(TorchEngine, "workspace_bytes", lambda self, spec: 64)
    call = problem()
    out, pack = call.forward()
    given = torch.full_like(out, 7)
    for run in (lambda w: call.forward(O=given, workspace=w), lambda w: call.backward(out, pack, workspace=w)):
        with pytest.raises(SpecError, match=message) as raised:
            run(make())
        assert raised.value.argument == "workspace"
    assert given.eq(7).all()
    query = Workspace()
    call.forward(workspace=query)
    assert query.size_bytes == 64
    query.allocate("cpu")
    assert torch.equal(call.forward(O=given, workspace=query).O, out)


def test_allocate_needs_a_query() -> None:
    with pytest.raises(SpecError, match=r"a workspace whose size a query filled in, got a new one\. Call the function"):
        Workspace().allocate("cpu")


@pytest.mark.parametrize("device", ["nonsense", 1.5, "cuda:99"])
def test_allocate_on_no_device(device: Any) -> None:
    workspace = Workspace()
    workspace.size_bytes = 1
    with pytest.raises(SpecError, match=r"argument 'device': expected a device that torch has, got"):
        workspace.allocate(device)
