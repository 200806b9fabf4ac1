"""fusedattn: TransformerEngine's fused attention API for torch, on any device, without a compiler."""

from fusedattn.attention import fused_attention, fused_attention_kvpacked, fused_attention_qkvpacked
from fusedattn.bundle import load_bundle
from fusedattn.cache import CacheInfo, cache_info, clear_caches
from fusedattn.counters import counters
from fusedattn.enums import Direction, Engine, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Layout
from fusedattn.errors import BuildError, BundleError, EngineRefusal, FusedAttnError, RunFileError, SpecError
from fusedattn.explain import Explanation, explain
from fusedattn.nvte import (
    nvte_fused_attn_bwd_kvpacked,
    nvte_fused_attn_bwd_qkvpacked,
    nvte_fused_attn_fwd_kvpacked,
    nvte_fused_attn_fwd_qkvpacked,
)
from fusedattn.tensor_pack import SKIP, NVTETensorPack, Workspace

__all__ = [
    "SKIP",
    "BuildError",
    "BundleError",
    "CacheInfo",
    "Direction",
    "Engine",
    "EngineRefusal",
    "Explanation",
    "FusedAttnError",
    "NVTETensorPack",
    "NVTE_Bias_Type",
    "NVTE_Mask_Type",
    "NVTE_QKV_Layout",
    "RunFileError",
    "SpecError",
    "Workspace",
    "cache_info",
    "clear_caches",
    "counters",
    "explain",
    "fused_attention",
    "fused_attention_kvpacked",
    "fused_attention_qkvpacked",
    "load_bundle",
    "nvte_fused_attn_bwd_kvpacked",
    "nvte_fused_attn_bwd_qkvpacked",
    "nvte_fused_attn_fwd_kvpacked",
    "nvte_fused_attn_fwd_qkvpacked",
]

__version__ = "0.1.0"
