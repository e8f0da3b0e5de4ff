"""Tables of presets, devices and sources for pages, from `fabric.machines`.

A page holds `<!-- presets: machines|devices|sources -->`, the table, `<!-- end of presets -->`; `rewritten` puts the table of today there.
"""

from __future__ import annotations

import re

from ..fabric.machines import GPUS, MACHINES, SOURCES, Machine
from ..io.quantity import show_rate, show_size

__all__ = ["rewritten"]

_PART = re.compile(r"(<!-- presets: (\w+) -->\n).*?(<!-- end of presets -->)", re.DOTALL)


def rewritten(page: str) -> str:
    """The page with its tables as they are today."""
    tables = {"machines": _machines, "devices": _devices, "sources": _sources}
    return _PART.sub(lambda found: found[1] + tables[found[2]]() + found[3], page)


def _table(*rows: list[str]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _machines() -> str:
    names = {m.name: "".join(f", `{a}`" for a in m.aliases) for m in MACHINES.values()}
    rows = [[f"`{m.name}`{names[m.name]}", _inside(m), _outside(m), ", ".join(m.sources), m.assumed] for m in MACHINES.values()]
    return _table(["name, provider's names", "inside", "to other machines", "sources", "assumed"], *rows)


def _inside(m: Machine) -> str:
    if m.shape == "single":
        return m.device
    how = {
        "nvswitch": "on NVSwitch, {} each", "mesh": "every pair linked, {}", "torus": f"in a torus {'x'.join(map(str, m.torus))}, {{}} a link",
        "slice": f"a slice, {m.axes}-D, {{}} a link; rings on {m.wrap}", "pcie": "on PCIe, {} each",
    }[m.shape]  # fmt: skip
    count = "n" if m.shape == "slice" else str(m.devices)
    return f"{count} {m.device} {how.format(show_rate(m.link_Bps or m.pcie_Bps))}" + (f" ({m.took['link']})" if "link" in m.took else "")


def _outside(m: Machine) -> str:
    ports = f"{show_rate(m.nic_Bps)} per host of {m.per_host} chips" if m.shape == "slice" else f"{m.nics} x {show_rate(m.nic_Bps)}"
    return f"{ports} ({m.took['nic']})"


def _devices() -> str:
    rows = []
    for name, gpu in GPUS.items():
        flops = ", ".join(f"{dtype} {rate / 10**12:g}" for dtype, rate in gpu.flops.items())
        rows.append([f"`{name}`", show_size(gpu.memory_bytes), show_rate(gpu.bandwidth_Bps), flops, gpu.source, gpu.derived])
    return _table(["device", "memory", "memory bandwidth", "dense TFLOP/s", "source", "derived"], *rows)


def _sources() -> str:
    return _table(["key", "document", "date", "read"], *([key, f"[{s.title}]({s.url})", s.date, s.read] for key, s in SOURCES.items()))
