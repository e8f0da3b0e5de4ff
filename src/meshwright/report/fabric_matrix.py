"""A fabric as text: a summary, and a matrix of connections in the style of `nvidia-smi topo -m`.

A cell says over what kind of link the route from the row's device to the column's device goes: the farthest-reaching kind on
it (a network link outweighs PCIe, PCIe outweighs NVLink), and of equal ones the slowest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import Disconnected
from ..fabric.fabric import Device, Fabric
from ..io.quantity import show_rate, show_size, show_time

__all__ = ["cells", "labels", "matrix_text", "rates", "summary_text"]

_REACH = ("LO", "NV", "XGMI", "PIX", "PXB", "PHB", "NODE", "SYS", "NET")
_LEGEND = {
    "LO": "loopback of one machine",
    "NV": "NV# = a bundle of # NVLinks (through NVSwitch where there is one)",
    "XGMI": "XGMI# = a bundle of # xGMI links",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, not the host bridge",
    "PHB": "a PCIe host bridge",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
    "NET": "the network between servers",
}


def labels(fabric: Fabric) -> list[str]:
    """Short column heads in device order: GPU0, GPU1, CPU2, ..."""
    return [f"{d.kind.upper()}{i}" for i, d in enumerate(fabric.devices)]


def _reach(kind: str) -> int:
    name = kind.rstrip("0123456789")
    return _REACH.index(name) if name in _REACH else len(_REACH)


def cells(fabric: Fabric, shown: int) -> list[list[str]]:
    """Kinds of routes among the first `shown` devices: `X` to itself, `-` for no route, `*` behind a route through another device."""
    return [[_cell(fabric, a, b) for b in range(shown)] for a in range(shown)]


def _cell(fabric: Fabric, src: int, dst: int) -> str:
    if src == dst:
        return "X"
    try:
        route = fabric.route(src, dst)
    except Disconnected:
        return "-"
    links = [fabric.links[x] for x in route]
    farthest = max(links, key=lambda x: (_reach(x.kind), -x.rate_Bps))
    relayed = any(fabric.link_ends[x][0] < len(fabric.devices) for x in route[1:])
    return farthest.kind + ("*" if relayed else "")


def rates(fabric: Fabric, shown: int) -> list[list[int | None]]:
    """Narrowest rate in bytes/s of every route among the first `shown` devices; None to itself and where there is no route."""

    def narrowest(src: int, dst: int) -> int | None:
        try:
            return min((fabric.links[x].rate_Bps for x in fabric.route(src, dst)), default=None)
        except Disconnected:
            return None

    return [[narrowest(a, b) for b in range(shown)] for a in range(shown)]


def matrix_text(fabric: Fabric, shown: int, *, with_rates: bool = False) -> str:
    """The matrix, columns aligned, with the servers, the legend and the devices' names."""
    heads = labels(fabric)[:shown]
    if with_rates:
        body = [["X" if a == b else "-" if r is None else show_rate(r).removesuffix("B/s").replace(" ", "") for b, r in enumerate(row)]
                for a, row in enumerate(rates(fabric, shown))]  # fmt: skip
    else:
        body = cells(fabric, shown)
    grouped = any(d.group and not d.name.startswith(f"{d.group}/") for d in fabric.devices)  # else the name says it already
    rows = [["", *heads, "Device", *(["Server"] if grouped else [])]]
    for head, row, device in zip(heads, body, fabric.devices, strict=False):
        rows.append([head, *row, device.name, *([device.group or "-"] if grouped else [])])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if shown < len(fabric.devices):
        lines.append(f"... {len(fabric.devices) - shown} more devices; --limit {len(fabric.devices)} shows all")
    return "\n".join([*lines, "", *_legend(body, with_rates)])


def _legend(body: Sequence[Sequence[str]], with_rates: bool) -> list[str]:
    if with_rates:
        return ["Legend: narrowest rate of the route in bytes/s, per direction; row sends, column receives; X itself, - no route"]
    seen = {text.rstrip("*").rstrip("0123456789") for row in body for text in row}
    lines = ["Legend (row sends, column receives):", "  X     itself"]
    lines += [f"  {kind:<4}  {_LEGEND[kind]}" for kind in _REACH if kind in seen]
    if "-" in seen:
        lines.append("  -     no route")
    if any(text.endswith("*") for row in body for text in row):
        lines.append("  *     through another device")
    return lines


# ---- summary -----------------------------------------------------------------------------------------------------------
def summary_text(fabric: Fabric) -> str:
    """What the fabric consists of, whether it is connected, and where its numbers come from."""
    lines = [f"fabric {fabric.name}", ""]
    sizes = Counter(len(members) for name, members in fabric.groups.items() if name)
    servers = ", ".join(f"{count} x {size}" for size, count in sorted(sizes.items(), reverse=True))
    lines.append(f"devices   {len(fabric.devices)}" + (f" in {sum(sizes.values())} servers ({servers})" if servers else ""))
    kinds: dict[str, int] = {}
    for device in fabric.devices:
        text = _device_text(device)
        kinds[text] = kinds.get(text, 0) + 1
    lines += [f"  {count:>6} x {text}" for text, count in kinds.items()]
    if fabric.switches:
        able = Counter(" and ".join(x for x, on in (("multicast", s.multicast), ("aggregate", s.aggregate)) if on) for s in fabric.switches)
        abilities = "".join(f"; {count} with {what}" for what, count in sorted(able.items()) if what)
        lines.append(f"switches  {len(fabric.switches)}{abilities}")
    lines.append(f"links     {len(fabric.links)}, each one direction")
    classes = Counter((x.kind, x.rate_Bps, x.latency_s) for x in fabric.links)
    for (kind, rate, latency), count in sorted(classes.items(), key=lambda item: (_reach(item[0][0]), -item[0][1], item[0])):
        lines.append(f"  {count:>6} x {kind:<6} {show_rate(rate):>10}  {show_time(latency)}")
    try:
        fabric.require_connected()
        lines.append("connected yes")
    except Disconnected as error:
        lines.append(f"connected NO: {error.message}")
    if fabric.provenance:
        lines += ["", "where the numbers come from:", *(f"  {note.what}: {note.source}" for note in fabric.provenance)]
    return "\n".join(lines)


def _device_text(device: Device) -> str:
    facts = [device.kind]
    if device.memory_bytes:
        speed = f" at {show_rate(device.memory_bandwidth_Bps)}" if device.memory_bandwidth_Bps else ""
        facts.append(f"memory {show_size(device.memory_bytes)}{speed}")
    facts += [f"{dtype} {_flops(rate)}" for dtype, rate in device.flops.items()]
    if device.cpu_share:
        facts.append(f"{device.cpu_share:g} of a core")
    return ", ".join(facts)


def _flops(rate: int) -> str:
    return show_rate(rate).removesuffix("B/s") + "FLOP/s"
