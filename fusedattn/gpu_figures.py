"""Figures of GPUs that plans are built for without having them: one row a GPU, one row a compute capability."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """What the SMs of a compute capability hold at a time; fields are those of ``DeviceTarget``.

    Example:
        >>> LIMITS[9, 0].shared_memory_per_block_optin_bytes
        232448
    """

    max_threads_per_multiprocessor: int
    max_blocks_per_multiprocessor: int
    shared_memory_per_block_optin_bytes: int


class Figures(NamedTuple):
    """A GPU, as its maker publishes it and the CUDA runtime reports it; fields are those of ``DeviceTarget``.

    Example:
        >>> [gpu.name for gpu in GPUS if gpu.compute_capability == (12, 0)]
        ['rtx5090', 'rtxpro6000']
    """

    name: str
    device_name: str
    compute_capability: tuple[int, int]
    multiprocessor_count: int
    memory_bytes: int
    l2_cache_bytes: int
    sm_clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int


_KIB, _MIB = 1024, 1024**2

# CUDA programming guide, "Technical Specifications per Compute Capability".
LIMITS = {
    (7, 5): Limits(1024, 16, 64 * _KIB),
    (8, 0): Limits(2048, 32, 163 * _KIB),
    (8, 6): Limits(1536, 16, 99 * _KIB),
    (8, 7): Limits(1536, 16, 163 * _KIB),
    (8, 9): Limits(1536, 24, 99 * _KIB),
    (9, 0): Limits(2048, 32, 227 * _KIB),
    (10, 0): Limits(2048, 32, 227 * _KIB),
    (10, 3): Limits(2048, 32, 227 * _KIB),
    (11, 0): Limits(1536, 24, 227 * _KIB),
    (12, 0): Limits(1536, 24, 99 * _KIB),
    (12, 1): Limits(1536, 24, 99 * _KIB),
}

_RTX_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
GPUS = (
    Figures("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 81158 * _MIB, 40 * _MIB, 1_410_000, 1_593_000, 5120),
    Figures("a100_40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40370 * _MIB, 40 * _MIB, 1_410_000, 1_215_000, 5120),
    Figures("l4", "NVIDIA L4", (8, 9), 58, 22518 * _MIB, 48 * _MIB, 2_040_000, 6_251_000, 192),
    Figures("l40s", "NVIDIA L40S", (8, 9), 142, 45373 * _MIB, 96 * _MIB, 2_520_000, 9_001_000, 384),
    Figures("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 24081 * _MIB, 72 * _MIB, 2_520_000, 10_501_000, 384),
    Figures("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 81090 * _MIB, 50 * _MIB, 1_980_000, 2_619_000, 5120),
    Figures("h100_pcie", "NVIDIA H100 PCIe", (9, 0), 114, 81008 * _MIB, 50 * _MIB, 1_755_000, 1_593_000, 5120),
    Figures("h200", "NVIDIA H200", (9, 0), 132, 143156 * _MIB, 60 * _MIB, 1_980_000, 3_201_000, 6144),
    Figures("b200", "NVIDIA B200", (10, 0), 148, 182642 * _MIB, 129536 * _KIB, 1_965_000, 3_996_000, 7680),
    Figures("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32109 * _MIB, 96 * _MIB, 2_407_000, 14_001_000, 512),
    Figures("rtxpro6000", _RTX_PRO_6000, (12, 0), 188, 97250 * _MIB, 128 * _MIB, 2_617_000, 14_001_000, 512),
)
