"""Constants of NCCL's tuner, as data. All figures are NCCL's own, from its source; bandwidths in GB/s, latencies in microseconds.

Source: NVIDIA/nccl 2.30, src/graph/tuning.cc (tables of the default tuner constants, tree correction, NVLS efficiency) and src/graph/search.cc
(speeds tried per channel); per-lane NVLink figures from src/graph/topo.h. They are facts about that program, not measurements of ours.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "ALGORITHMS", "ARCHITECTURES", "BASE_LATENCY", "HARDWARE_LATENCY", "LEAST_SM", "LL128_RING", "LL128_TREE", "LL_LIMIT", "MAX_CHANNELS",
    "NVLINK_SHARE", "NVLS_CHANNELS", "NVLS_EFFICIENCY", "NVLS_TREE_LIMIT", "PROTOCOLS", "SOURCE", "SPEEDS_INTER", "SPEEDS_INTRA",
    "TREE_CORRECTION", "TREE_LIMIT", "Architecture",
]  # fmt: skip

SOURCE = "NVIDIA/nccl 2.30, src/graph/tuning.cc, search.cc, topo.h"
Architecture = Literal["volta", "ampere", "hopper", "blackwell"]
ARCHITECTURES: tuple[Architecture, ...] = ("volta", "ampere", "hopper", "blackwell")
LEAST_SM = (70, 80, 90, 100)  # ten times the compute capability from which each is spoken of
ALGORITHMS = ("tree", "ring", "nvls", "nvlstree", "pat")
PROTOCOLS = ("LL", "LL128", "Simple")
Row = tuple[float, float, float]

# base[algorithm] and hardware[kind of link][algorithm]: LL, LL128, Simple
BASE_LATENCY: dict[str, Row] = {
    "tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0.0, 0.0, 0.0), "nvlstree": (0.0, 0.0, 0.0), "pat": (8.0, 8.0, 8.0),
}  # fmt: skip
HARDWARE_LATENCY: dict[str, dict[str, Row]] = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25.0), "nvlstree": (0, 0, 25.0), "pat": (0, 0, 4.0)},
    "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0, 0, 0), "nvlstree": (0, 0, 0), "pat": (0, 0, 4.0)},
    "net": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls": (0, 0, 18.0), "nvlstree": (0, 0, 20.9), "pat": (0, 0, 14.0)},
}

# by architecture: 1 node, 2 nodes, more. LL: on several nodes the processor decides, row "volta" = Intel and others, row "ampere" = AMD.
LL_LIMIT: dict[str, Row] = {
    "volta": (39.0, 39.0, 20.4), "ampere": (87.7, 22.5, 19.0), "hopper": (141.0, 45.0, 35.0), "blackwell": (282.0, 90.0, 70.0),
}  # fmt: skip
LL128_RING: dict[str, Row] = {"volta": (20.0,) * 3, "ampere": (20.0,) * 3, "hopper": (36.7,) * 3, "blackwell": (40.0,) * 3}
LL128_TREE: dict[str, Row] = {"volta": (20.0,) * 3, "ampere": (20.0,) * 3, "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0)}
TREE_LIMIT: dict[str, Row] = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
NVLS_TREE_LIMIT: dict[str, Row] = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0),
}  # fmt: skip
NVLS_EFFICIENCY: dict[str, float] = {"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74}
NVLS_CHANNELS: dict[str, int] = {"volta": 0, "ampere": 0, "hopper": 16, "blackwell": 32}

# factor on a tree's bandwidth for 64 B << k
TREE_CORRECTION: dict[str, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}

# Graph search: speeds per channel that are tried, and what NCCL counts a link's lane as against its nominal 25 (Blackwell: 50) GB/s.
_OLD_INTRA = (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
_OLD_INTER = (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12)
_SM90_INTER = (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12)
SPEEDS_INTRA: dict[str, tuple[float, ...]] = {
    "volta": _OLD_INTRA, "ampere": _OLD_INTRA, "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}  # fmt: skip
SPEEDS_INTER: dict[str, tuple[float, ...]] = {
    "volta": _OLD_INTER, "ampere": _OLD_INTER, "hopper": _SM90_INTER,
    "blackwell": (96.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12),
}  # fmt: skip
NVLINK_SHARE: dict[str, float] = {"volta": 20.0 / 25, "ampere": 20.0 / 25, "hopper": 20.6 / 25, "blackwell": 40.1 / 50}
MAX_CHANNELS = 32  # of one graph
