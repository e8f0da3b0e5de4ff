"""TACCL's JSON files: communication sketches, and topology profiles as fabrics.

Both come from outside: they are capped in size, numbers and lists; unknown fields and wrong types are refused with the field's path.
Format: the public examples of microsoft/taccl (sketch/*.json, topo/*.json) and its INPUT_GUIDE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ...sketch import CONNECTIONS, MAX_CHUNKUP, MAX_GPUS, MAX_NODES, Sketch
from ..fields import Table, shown
from ..limits import MaxBytes
from ..strict_json import decode, read_document, refuse_ambiguous

__all__ = ["profile_fabric", "read_profile", "read_sketch", "sketch_from_json"]

MAX_GPUS_PER_BOX = 64  # of a custom profile
_BETA_1_LINK = (  # beta class of each pair in an NDv2 box: 1 = two NVLinks, 2 = one (matrix rows of the public profile)
    "01221000", "10210200", "22010010", "21100002", "10000122", "02001021", "00102201", "00022110",
)  # fmt: skip


def read_sketch(path: str | os.PathLike[str]) -> Sketch:
    """The sketch in a file. Raises: UsageError if it cannot be read; FormatError, naming the field, if it is no sketch."""
    return sketch_from_json(read_document(path, limit=MaxBytes.TACCL_SKETCH), Path(path).name)


def sketch_from_json(data: bytes, where: str = "sketch") -> Sketch:
    """As `read_sketch`, from bytes; `where` names the document in messages."""
    top = _table(data, where)
    nnodes = top.integer("nnodes", 1, least=1, most=MAX_NODES)
    found: dict[str, Any] = {"nnodes": nnodes} | _intranode(top) | _internode(top, nnodes)
    if top.has("multinode_sketch"):
        _multinode(_sub(top, "multinode_sketch"))
    found["symmetry"] = tuple(_pair(top, f"symmetry_offsets[{i}]", x) for i, x in enumerate(_list(top, "symmetry_offsets", [])))
    if top.has("hyperparameters"):
        hyper = _sub(top, "hyperparameters")
        found["chunkup"] = hyper.integer("input_chunkup", 1, least=1, most=MAX_CHUNKUP)
        found["heuristic"] = hyper.integer("heuristic", 0, most=1000)
        hyper.done()
    top.done()
    try:
        return Sketch(**found)
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where.removeprefix('sketch.')}", hint=error.hint) from None


def _table(data: bytes, where: str) -> Table:
    value = decode(data, msgspec.json.Decoder(), where)
    refuse_ambiguous(data, where)
    return Table(value, where)


def _sub(table: Table, field: str) -> Table:
    return Table(table.take(field), table.where, f"{table.path}.{field}" if table.path else field)


def _list(table: Table, field: str, default: list[Any] | None = None) -> list[Any]:
    if not table.has(field) and default is not None:
        table.take(field)
        return default
    value = table.take(field)
    if not isinstance(value, list) or len(value) > MAX_GPUS:
        raise table.error(field, f"must be a list of at most {MAX_GPUS} entries, got {shown(value)}")
    return value


def _numbers(table: Table, field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_GPUS:
        raise table.error(field, f"must be a list of GPU numbers, got {shown(value)}")
    return tuple(table.checked_integer(f"{field}[{i}]", x, least=0, most=MAX_GPUS - 1) for i, x in enumerate(value))


def _pair(table: Table, field: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise table.error(field, f"must be [offset, group], got {shown(value)}")
    offset, group = (table.checked_integer(f"{field}[{i}]", x, least=1, most=MAX_GPUS * MAX_NODES) for i, x in enumerate(value))
    return offset, group


def _map(table: Table, field: str, value: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """{"sender": [GPUs]} as pairs in order of the sender's number."""
    if not isinstance(value, dict) or len(value) > MAX_GPUS:
        raise table.error(field, f'must be {{"sender": [GPUs]}}, got {shown(value)}')
    found = {}
    for key, gpus in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 4 and str(int(key)) == key):
            raise table.error(field, f"its keys must be GPU numbers, got {shown(key)}")
        found[int(key)] = _numbers(table, f"{field}.{key}", gpus)
    return tuple(sorted(found.items()))


def _intranode(top: Table) -> dict[str, Any]:
    if not top.has("intranode_sketch"):
        top.take("intranode_sketch")
        return {}
    table = _sub(top, "intranode_sketch")
    strategy = table.text("strategy")
    switches = tuple(_numbers(table, f"switches[{i}]", x) for i, x in enumerate(_list(table, "switches", [])))
    edges = _list(table, "switch_hyperedge_strategy", [])
    for i, edge in enumerate(edges):
        if not isinstance(edge, str):
            raise table.error(f"switch_hyperedge_strategy[{i}]", f"must be a text, got {shown(edge)}")
    table.done()
    return {"intranode": strategy, "switches": switches, "hyperedges": tuple(edges)}


def _internode(top: Table, nnodes: int) -> dict[str, Any]:
    if not top.has("internode_sketch"):
        top.take("internode_sketch")
        if nnodes > 1:
            raise top.error("internode_sketch", f"is missing, but nnodes is {nnodes}", hint="say which GPUs send and receive between boxes")
        return {}
    table = _sub(top, "internode_sketch")
    if (strategy := table.text("strategy")) != "relay":
        raise table.error("strategy", f"must be 'relay', got {shown(strategy)}")
    if not table.has("internode_conn"):
        raise table.error("internode_conn", "is missing", hint=f'{{"sender": [receivers]}}, {" or ".join(CONNECTIONS)}')
    given = table.take("internode_conn")
    connections = given if isinstance(given, str) and given in CONNECTIONS else _map(table, "internode_conn", given)
    senders = _map(table, "gpus_to_sender_rev_map", table.take("gpus_to_sender_rev_map")) if table.has("gpus_to_sender_rev_map") else ()
    ordering = table.flag("enforce_ordering", False)
    table.done()
    return {"connections": connections, "senders": senders, "enforce_ordering": ordering}


def _multinode(table: Table) -> None:
    """Only the form that says nothing beyond `nnodes` is understood; others are refused rather than ignored."""
    strategy = table.take("strategy")
    if strategy not in ("round-robin", ["round-robin"]):
        raise table.error("strategy", f"only 'round-robin' is supported, got {shown(strategy)}")
    for field in ("nnodes", "group_size"):
        if table.has(field):
            table.take(field)
    table.done()


# ---- topology profiles ---------------------------------------------------------------------------------------------------
def read_profile(path: str | os.PathLike[str], *, boxes: int, kind: str = "custom", chunk_bytes: int = 10**6) -> Fabric:
    """The fabric that a topology profile stands for; see `profile_fabric`."""
    return profile_fabric(read_document(path, limit=MaxBytes.TACCL_SKETCH), Path(path).name, boxes=boxes, kind=kind, chunk_bytes=chunk_bytes)


def profile_fabric(data: bytes, where: str = "profile", *, boxes: int, kind: str = "custom", chunk_bytes: int = 10**6) -> Fabric:
    """`boxes` boxes with the profile's links; betas are microseconds per chunk of `chunk_bytes`, so rate = chunk_bytes / beta.

    Args: `kind`: "ndv2" or "dgx2", whose link matrices are known and whose profile lists betas by class; "hub", any number of GPUs on one switch
        (the public tool's HubAndSpoke); "custom", whose profile holds the matrices `links`, `betas` and `invbws` (row = destination,
        column = source).
    The box's NICs are shared evenly: GPU g uses NIC g · nics / gpus. A profile scaled by 10 or 100 (the public small-size files) gives
    times scaled alike. Raises: FormatError naming the field; UsageError for a kind or number of boxes that does not exist.
    """
    if kind not in ("ndv2", "dgx2", "hub", "custom"):
        raise UsageError(f"no profile kind {kind!r}", hint="ndv2, dgx2, hub or custom")
    if not 1 <= boxes <= MAX_NODES or chunk_bytes < 1:
        raise UsageError(f"needs 1..{MAX_NODES} boxes and a chunk of at least a byte, got {boxes} and {chunk_bytes}")
    top = _table(data, where)
    name = top.text("name", "profile")
    gpus = top.integer("gpus_per_node", least=1, most=MAX_GPUS_PER_BOX)
    nics = top.integer("nics_per_node", 1, least=1, most=gpus)
    alpha_s = top.number("alpha", most=1e9) * 1e-6
    rates = _rates(top, kind, gpus, chunk_bytes)
    remote_alpha_s = top.number("remote_alpha", 0.0, most=1e9) * 1e-6
    remote_beta = top.number("remote_beta", 0.0, most=1e12)
    if top.has("remote_invbw"):
        top.number("remote_invbw", most=1e12)
    if boxes > 1 and not remote_beta:
        raise top.error("remote_beta", f"is missing or 0, but {boxes} boxes are asked for")
    top.done()
    devices, switches, links = [], [], []
    remote_Bps = _rate(top, "remote_beta", remote_beta, chunk_bytes) if boxes > 1 else 0
    for box in range(boxes):
        names = [f"box{box}/gpu{g}" for g in range(gpus)]
        devices += [Device(name=n, group=f"box{box}") for n in names]
        if kind in ("dgx2", "hub"):
            switch = f"box{box}/nvswitch"
            switches.append(Switch(name=switch, group=f"box{box}"))
            for n in names:
                links += [Link(src=n, dst=switch, rate_Bps=rates[0][1], latency_s=alpha_s), Link(src=switch, dst=n, rate_Bps=rates[0][1])]
        else:
            links += [
                Link(src=names[a], dst=names[b], rate_Bps=rates[b][a], latency_s=alpha_s) for a in range(gpus) for b in range(gpus) if rates[b][a]
            ]
        if boxes > 1:
            ports = [f"box{box}/nic{i}" for i in range(nics)]
            switches += [Switch(name=p, group=f"box{box}") for p in ports]
            for g, n in enumerate(names):
                port = ports[g * nics // gpus]
                links += [Link(src=n, dst=port, rate_Bps=remote_Bps), Link(src=port, dst=n, rate_Bps=remote_Bps)]
            for p in ports:
                links += [Link(src=p, dst="net", rate_Bps=remote_Bps, latency_s=remote_alpha_s), Link(src="net", dst=p, rate_Bps=remote_Bps)]
    if boxes > 1:
        switches.append(Switch(name="net"))
    note = Provenance(what="rates and latencies", source=f"TACCL topology profile {name}, chunks of {chunk_bytes} bytes")
    return Fabric(name=f"{name}:{boxes}", devices=tuple(devices), switches=tuple(switches), links=tuple(links), provenance=(note,))


def _rate(table: Table, field: str, beta_us: float, chunk_bytes: int) -> int:
    rate = round(chunk_bytes / beta_us * 1e6) if beta_us else 0
    if rate < 1:
        raise table.error(field, f"gives a rate below 1 byte/s: {beta_us} us for {chunk_bytes} bytes")
    return rate


def _rates(top: Table, kind: str, gpus: int, chunk_bytes: int) -> list[list[int]]:
    """rate[dst][src] in bytes/s, 0 = no link."""
    if kind == "custom":
        links, betas = _matrix(top, "links", gpus), _matrix(top, "betas", gpus)
        if top.has("invbws"):
            _matrix(top, "invbws", gpus)
        return [[_rate(top, f"betas[{b}][{a}]", betas[b][a], chunk_bytes) if links[b][a] and a != b else 0 for a in range(gpus)] for b in range(gpus)]
    wanted, size = {"ndv2": (2, 8), "dgx2": (1, 16), "hub": (1, gpus)}[kind]
    if kind == "hub" and gpus < 2:
        raise top.error("gpus_per_node", f"must be at least 2 for hub, got {gpus}")
    if gpus != size:
        raise top.error("gpus_per_node", f"must be {size} for {kind}, got {gpus}")
    listed = _list(top, "node_betas_list")
    if len(listed) != wanted:
        raise top.error("node_betas_list", f"must have {wanted} entries for {kind}, got {len(listed)}")
    speeds = [_rate(top, f"node_betas_list[{i}]", _real(top, f"node_betas_list[{i}]", x), chunk_bytes) for i, x in enumerate(listed)]
    if top.has("node_invbws_list"):
        _list(top, "node_invbws_list")
    if kind in ("dgx2", "hub"):
        return [[speeds[0] if a != b else 0 for a in range(size)] for b in range(size)]
    return [[speeds[int(c) - 1] if (c := _BETA_1_LINK[b][a]) != "0" else 0 for a in range(size)] for b in range(size)]


def _real(table: Table, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
        raise table.error(field, f"must be a number between 0 and 1e12, got {shown(value)}")
    return float(value)


def _matrix(top: Table, field: str, size: int) -> Sequence[Sequence[float]]:
    rows = _list(top, field)
    if len(rows) != size:
        raise top.error(field, f"must have {size} rows, got {len(rows)}")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != size:
            raise top.error(f"{field}[{i}]", f"must be a list of {size} numbers, got {shown(row)}")
    return [[_real(top, f"{field}[{i}][{j}]", x) for j, x in enumerate(row)] for i, row in enumerate(rows)]
