"""`meshwright lab show [NAME]`: what a lab is and what has gone over its links; without a name, which labs there are."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .frame import Result

if TYPE_CHECKING:
    from ..lab.lab import Lab
    from ..lab.links import LinkCount

__all__ = ["HELP", "arguments", "counters_text", "lab_document", "lab_text", "run"]

HELP = "Show a lab: devices, links with rate, bucket, measured goodput and bytes sent. Without NAME, list the labs."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the lab")


def run(args: argparse.Namespace) -> Result:
    from ..lab.lab import Lab

    if args.name is None:
        return _list()
    lab = Lab.open(args.name)
    try:
        counts = lab.counters()
        return Result(lab_document(lab, counts), lab_text(lab, counts))
    finally:
        lab.close()


def _list() -> Result:
    from ..errors import FormatError, UnknownName
    from ..lab.state import known_labs, read_state

    rows: list[dict[str, Any]] = []
    for folder in known_labs():
        try:
            state = read_state(folder)
        except (UnknownName, FormatError) as error:
            rows.append({"name": folder.name, "alive": False, "fabric": "", "devices": 0, "note": error.message})
            continue
        rows.append({"name": state.name, "alive": state.alive, "fabric": state.fabric, "devices": len(state.devices), "note": ""})
    lines = [f"{r['name']:<24} {'up' if r['alive'] else 'dead':<5} {r['devices']:>4} devices  {r['fabric']} {r['note']}".rstrip() for r in rows]
    if any(not r["alive"] for r in rows):
        lines.append("`meshwright lab gc` removes dead ones")
    return Result({"schema": "meshwright.lab-list", "version": 1, "labs": rows}, "\n".join(lines) or "no lab; see `meshwright lab up --help`")


def lab_document(lab: Lab, counts: dict[str, LinkCount] | None = None) -> dict[str, Any]:
    """The lab's state as `--json` prints it, with counters per link where they are given."""
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(lab.state)
    document |= {"schema": "meshwright.lab-show", "alive": lab.state.alive, "folder": str(lab.folder), "fabric_file": str(lab.folder / "fabric.toml")}
    for index, entry in enumerate(document["links"]):
        entry["name"] = lab.link_name(index)
        if counts is not None:
            entry["sent"] = vars(counts[entry["name"]])
    return document


def lab_text(lab: Lab, counts: dict[str, LinkCount] | None = None) -> str:
    state = lab.state
    lines = [
        f"lab {state.name}: {state.fabric}, {len(state.devices)} devices, {state.style}, MTU {state.mtu}"
        + (", in a user namespace" if state.user_namespace else ""),
        f"fabric for planning: {lab.folder / 'fabric.toml'}",
        f"devices compute {_pacing(state.pacing)}",
        f"look inside: nsenter --target {state.holder} --mount --net --pid ip netns list",
    ]
    lines += [f"note: {note}" for note in state.notes]
    if not state.verified:
        lines.append("WARNING: the links were not measured (--no-verify): times taken here prove nothing")
    head = f"{'link':<40} {'rate':>12} {'bucket':>10} {'goodput':>12} {'of ceiling':>10} {'round trip':>11}"
    lines += ["", head + ("" if counts is None else f" {'sent':>10}")]
    for index, link in enumerate(state.links):
        name = lab.link_name(index)
        measured = f"{'-':>12} {'-':>10} {'-':>11}"
        if link.ceiling_Bps:
            measured = f"{_mbit(link.goodput_Bps):>12} {link.goodput_Bps / link.ceiling_Bps:>10.1%} {link.round_trip_s * 1e6:>8.0f} us"
        sent = "" if counts is None else f" {_bytes(counts[name].bytes):>10}"
        extra = "  CUT" if link.cut else ""
        lines.append(f"{name:<40} {_mbit(link.rate_Bps):>12} {_bytes(link.burst_bytes):>10} {measured}{sent}{extra}")
    return "\n".join(lines)


def counters_text(counts: dict[str, LinkCount]) -> str:
    """Bytes per link, links that carried nothing left out."""
    lines = [f"{'link':<40} {'bytes':>14} {'on the wire':>14} {'packets':>9} {'dropped':>8}"]
    lines += [f"{name:<40} {c.bytes:>14} {c.wire_bytes:>14} {c.packets:>9} {c.drops:>8}" for name, c in counts.items() if c.packets or c.drops]
    return "\n".join(lines)


def _pacing(mode: str) -> str:
    return {
        "none": "at the machine's speed",
        "quota": "under CPU quotas, as the fabric declares",
        "paced": "paced: programs that honour MESHWRIGHT_CPU_SHARE stretch their compute",
    }[mode]


def _mbit(rate_Bps: int) -> str:
    return f"{rate_Bps * 8 / 1e6:.4g} Mbit/s"


def _bytes(size: int) -> str:
    from ..io.quantity import show_size

    return show_size(size)
