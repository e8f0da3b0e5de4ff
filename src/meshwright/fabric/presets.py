"""Fabrics with names: `laptop:4`, `two-islands`, `dgx-h100:16`, `mi250:2?net=rails`, `torus:4?dims=3`, ...

Every number carries its provenance. Growing a preset never changes what is inside a box. Machines that can be bought or rented are a table,
`machines.toml`, built by `fabric.machine_shapes`; a few odd servers are in `fabric.preset_boxes`, everything else in `fabric.preset_nets`, networks
between servers in `fabric.preset_parts`. Names are parsed by `meshwright.io.fabric.name`.
"""

from __future__ import annotations

from . import preset_nets as nets
from .machine_shapes import machine_presets
from .machines import SOURCES
from .preset_boxes import dgx1_p100, dgx1_v100, dgx2, h100_a100, mi250, ndv2
from .preset_nets import usable_cores
from .preset_parts import MEMORY as _MEMORY
from .preset_parts import NETWORK as _NETWORK
from .preset_parts import OVERSUBSCRIPTION, Chosen, Option, Preset

__all__ = ["ALIASES", "MAX_DEVICES", "PRESETS", "Chosen", "Option", "Preset", "usable_cores"]

MAX_DEVICES = 16_384  # of one fabric, in files as in presets

# ---- the table ---------------------------------------------------------------------------------------------------------
_NVLINK = Option("rate", "NVLink rate: of one GPU to NVSwitch, or of one link")
_SKETCH = Option("flag", "1 = the published communication sketch: separate sending and receiving GPUs")
_FLOPS = Option("flops", "fp32 operations/s of one core")
_LINK = Option("rate", "rate of one device's link")
_NICS = Option("choice", "a port per die, or one NIC per two dies", ("gcd", "pair"))
_TRUNK = Option("rate", "rate of the trunk")
_TEXTBOOK: dict[str, Option] = {"link": _LINK, "memory": _MEMORY, "flops": _FLOPS}
_DIMS = Option("choice", "dimensions", ("2", "3"))

_PAPERS = "the topologies of msccl-tools, TACCL, TE-CCL and ForestColl"



def _papers(device: str) -> tuple[str, ...]:
    return (_PAPERS, str(SOURCES[device]))


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset("laptop", "CPU processes on this machine, joined by loopback", "devices", 2, 1,
               {"cores": Option("count", "cores to share (default: this machine's)"), "memory": _MEMORY, "flops": _FLOPS, "link": _LINK},
               nets.laptop),
        Preset("two-islands", "two islands of n CPU devices at 1 Gbit/s, a 200 Mbit/s trunk between them", "devices per island", 2, 2,
               {"link": _LINK, "trunk": _TRUNK, "memory": _MEMORY, "flops": _FLOPS}, nets.two_islands),
        Preset("dgx1-p100", "DGX-1: 8 P100, direct NVLinks, 4 InfiniBand ports", "boxes", 1, 8, _NETWORK | {"nvlink": _NVLINK}, dgx1_p100,
               sources=_papers("p100")),
        Preset("dgx1-v100", "DGX-1: 8 V100, direct NVLinks, 4 InfiniBand ports", "boxes", 1, 8, _NETWORK | {"nvlink": _NVLINK}, dgx1_v100,
               sources=_papers("v100")),
        Preset("ndv2", "Azure NDv2: 8 V100, direct NVLinks, 1 InfiniBand port", "boxes", 1, 8,
               _NETWORK | {"sketch": _SKETCH, "nvlink": _NVLINK}, ndv2, sources=_papers("v100"),
               aliases=("Standard_ND40rs_v2",)),
        Preset("dgx2", "DGX-2: 16 V100 on NVSwitch, 8 InfiniBand ports", "boxes", 1, 16, _NETWORK | {"sketch": _SKETCH, "nvlink": _NVLINK}, dgx2,
               sources=_papers("v100")),
        *machine_presets(),
        Preset("h100-a100", "n H100 boxes and n A100 boxes on one network", "pairs of boxes", 1, 16, _NETWORK, h100_a100,
               sources=tuple(str(SOURCES[s]) for s in ("h100", "a100"))),
        Preset("mi250", "8 MI250 (16 dies), xGMI mesh, one network port per die", "boxes", 1, 16,
               _NETWORK | {"nics": _NICS, "xgmi": Option("rate", "rate of one xGMI link")}, mi250, sources=_papers("mi250")),
        Preset("line", "n devices in a row", "devices", 4, 1, _TEXTBOOK, nets.line),
        Preset("ring", "n devices in a circle", "devices", 4, 1, _TEXTBOOK, nets.ring),
        Preset("star", "n devices around a switch", "devices", 4, 1, _TEXTBOOK, nets.star),
        Preset("star-gpu", "n devices, one of them in the middle", "devices", 4, 1, _TEXTBOOK, nets.star_gpu),
        Preset("fat-tree", "n leaf switches under a spine", "leaves", 2, 0,
               _TEXTBOOK | {"leaf": Option("count", "devices per leaf (default 4)"), "oversubscription": OVERSUBSCRIPTION},
               nets.fat_tree, nets.devices_of_fat_tree),
        Preset("dragonfly", "n groups of 4 routers and 8 devices, one link between any two groups", "groups", 4, 8,
               _TEXTBOOK | {"trunk": Option("rate", "rate between groups")}, nets.dragonfly, nets.devices_of_dragonfly),
        Preset("mesh", "a grid of side n", "devices per side", 3, 0, _TEXTBOOK | {"dims": _DIMS}, nets.mesh, nets.devices_of_grid),
        Preset("torus", "a grid of side n with closed rows", "devices per side", 3, 0, _TEXTBOOK | {"dims": _DIMS}, nets.torus, nets.devices_of_grid),
        Preset("hypercube", "2^n devices, neighbours differ in one bit of their number", "dimensions", 3, 0,
               _TEXTBOOK, nets.hypercube, nets.devices_of_hypercube),
        Preset("lan", "n wired devices and n on Wi-Fi", "devices of each kind", 2, 2,
               _TEXTBOOK | {"trunk": Option("rate", "rate of the Wi-Fi")}, nets.lan),
        Preset("wan", "n sites of two devices", "sites", 3, 2, _TEXTBOOK | {"trunk": Option("rate", "rate between sites")}, nets.wan),
    )
}  # fmt: skip

ALIASES: dict[str, str] = {alias.casefold(): p.name for p in PRESETS.values() for alias in p.aliases}  # a `*` stands for a size
