"""What ``fusedattn`` exports: everything public, with the signatures of the C API, and exceptions that travel."""

import copy
import importlib
import inspect
import pickle
import types

import pytest

import fusedattn
from fusedattn import BuildError, BundleError, EngineRefusal, FusedAttnError, RunFileError, SpecError

# Names and order as in TransformerEngine 0.9's fused_attn.h.
SIGNATURES = {
    "nvte_fused_attn_fwd_qkvpacked": "QKV Bias S O Aux_Output_Tensors cu_seqlens rng_state max_seqlen "
    "is_training attn_scale dropout qkv_layout bias_type attn_mask_type workspace stream",
    "nvte_fused_attn_bwd_qkvpacked": "QKV O dO S dP Aux_CTX_Tensors dQKV dBias cu_seqlens max_seqlen attn_scale "
    "dropout qkv_layout bias_type attn_mask_type workspace stream",
    "nvte_fused_attn_fwd_kvpacked": "Q KV Bias S O Aux_Output_Tensors cu_seqlens_q cu_seqlens_kv rng_state "
    "max_seqlen_q max_seqlen_kv is_training attn_scale dropout qkv_layout bias_type attn_mask_type workspace stream",
    "nvte_fused_attn_bwd_kvpacked": "Q KV O dO S dP Aux_CTX_Tensors dQ dKV dBias cu_seqlens_q cu_seqlens_kv "
    "max_seqlen_q max_seqlen_kv attn_scale dropout qkv_layout bias_type attn_mask_type workspace stream",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_the_c_api(name: str) -> None:
    parameters = inspect.signature(getattr(fusedattn, name)).parameters
    keyword_only = [x for x, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert " ".join(x for x in parameters if x not in keyword_only) == SIGNATURES[name]
    assert keyword_only == (["engine"] if "_fwd_" in name else ["engine", "deterministic"])
    defaults = {x: p.default for x, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {"workspace": None, "stream": None, "engine": "auto"} | dict.fromkeys(keyword_only[1:])


def test_signature_of_fused_attention() -> None:
    parameters = inspect.signature(fusedattn.fused_attention).parameters
    assert {x: p.default for x, p in list(parameters.items())[3:]} == {
        "bias": None, "qkv_layout": "bshd_bshd_bshd", "attn_bias_type": None, "attn_mask_type": "no_mask",
        "cu_seqlens_q": None, "cu_seqlens_kv": None, "max_seqlen_q": None, "max_seqlen_kv": None, "attn_scale": None,
        "dropout": 0.0, "rng_state": None, "is_training": True, "deterministic": None, "return_lse": False,
        "engine": "auto",
    }  # fmt: skip
    positional = [x for x, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k", "v", "bias"]
    for name, first, layout in (("qkvpacked", ["qkv"], "t3hd"), ("kvpacked", ["q", "kv"], "thd_t2hd")):
        packed = inspect.signature(getattr(fusedattn, f"fused_attention_{name}")).parameters
        assert list(packed)[: len(first) + 1] == [*first, "bias"]
        assert packed["qkv_layout"].default == layout
        shared = [x for x in packed if x in parameters and x not in ("q", "qkv_layout")]
        assert {x: packed[x].default for x in shared} == {x: parameters[x].default for x in shared}


def test_all_is_what_there_is() -> None:
    assert len(set(fusedattn.__all__)) == len(fusedattn.__all__)
    public = {x for x in vars(fusedattn) if not x.startswith("_")}
    modules = {x for x in public if isinstance(getattr(fusedattn, x), types.ModuleType)}
    assert public - modules == set(fusedattn.__all__)
    assert {"SKIP", "NVTETensorPack", "Workspace", "explain", "clear_caches"} <= set(fusedattn.__all__)
    starred: dict[str, object] = {}
    exec("from fusedattn import *", starred)
    assert set(fusedattn.__all__) <= set(starred)


def test_the_module_explain_hides_no_function() -> None:
    assert importlib.import_module("fusedattn.explain").explain is fusedattn.explain
    assert callable(fusedattn.explain)


FUNCTIONS = [x for x in fusedattn.__all__ if inspect.isfunction(getattr(fusedattn, x))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_every_section_and_argument(name: str) -> None:
    function = getattr(fusedattn, name)
    text = inspect.getdoc(function) or ""
    for section in ("Raises:", "Example:", "Returns:"):
        assert f"\n{section}\n" in text
    if name != "explain":
        assert all(parameter in text for parameter in inspect.signature(function).parameters)
    assert function.__module__.startswith("fusedattn.")


ERRORS = [
    SpecError("q", "rank 4", "rank 3", "Add an axis.", "fused_attention"),
    SpecError("q", "rank 4", "rank 3"),
    EngineRefusal("cudnn", {"cudnn": ("dtype: no", "device: no")}, ("torch",)),
    EngineRefusal("auto", {"cudnn": ("no",), "torch": ("no",)}, ()),
    BuildError("a plan", "there is none", "Try another."),
    BundleError("plans", "it is damaged", "Write it again."),
    RunFileError("problems.0: wrong"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{len(str(error))}")
@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_errors_travel(error: FusedAttnError, travel: object) -> None:
    assert callable(travel)
    other = travel(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_bases_of_errors() -> None:
    assert all(issubclass(kind, FusedAttnError) for kind in (SpecError, EngineRefusal, RunFileError))
    assert issubclass(SpecError, ValueError)
    assert issubclass(RunFileError, ValueError)
    assert issubclass(EngineRefusal, NotImplementedError)
    assert not issubclass(EngineRefusal, ValueError)


def test_error_inside_leaves_without_its_inner_traceback() -> None:
    with pytest.raises(SpecError, match=r"^fused_attention: argument 'q': ") as raised:
        fusedattn.fused_attention(None, None, None)  # type: ignore[arg-type]
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None
