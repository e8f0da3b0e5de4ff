"""A fabric as a JSON document (inside plans, and as FILE.json) and back. The TOML form is the same document.

The reader takes documents from strangers: sizes are capped before anything is built, every field is checked, unknown
fields are refused. Exact round trip: `fabric_from_document(fabric_document(f)) == f`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ...fabric.presets import MAX_DEVICES
from ..fields import MAX_NAME_CHARACTERS, Table
from ..limits import MAX_QUANTITY
from ..quantity import parse_flops, parse_rate_Bps, parse_size_bytes, parse_time_s

__all__ = ["DTYPES", "MAX_DEVICES", "MAX_LINKS", "SCHEMA", "VERSION", "fabric_document", "fabric_from_document", "require_document"]

SCHEMA = "meshwright.fabric"
VERSION = 1
MAX_SWITCHES = 65_536  # four for each device
MAX_LINKS = 1_048_576  # 64 for each device
MAX_RATES = 1024  # kinds of tasks of one device
MAX_WATTS = 1e9
SPEEDS = ("compute", "memory")  # kinds of work of which cores slow each other down unlike
MIN_SPEED = 1e-4  # of a core beside others: less is a mistake
MAX_SM = 999  # of compute capabilities, times ten
MAX_LATENCY_S = 3600.0  # an hour: more is a mistake of the unit
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8", "int4")

_RANGE = re.compile(r"(.*)\[(\d{1,9})-(\d{1,9})\]\Z")
_NUMBERS = re.compile(r"\d+(-\d+)?\Z")


# ---- writing -----------------------------------------------------------------------------------------------------------
def fabric_document(fabric: Fabric) -> dict[str, Any]:
    """The fabric as JSON-able data; fields at their default are left out."""
    document: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, "name": fabric.name, "devices": [_device_entry(d) for d in fabric.devices]}
    if fabric.switches:
        document["switches"] = [_without(vars(s), _SWITCH_DEFAULTS) for s in fabric.switches]
    if fabric.links:
        document["links"] = [_without(vars(x), _LINK_DEFAULTS) for x in fabric.links]
    if fabric.provenance:
        document["provenance"] = [{"what": p.what, "source": p.source} for p in fabric.provenance]
    return document


_DEVICE_DEFAULTS = vars(Device(name="x")) | {"name": None}
_SWITCH_DEFAULTS = vars(Switch(name="x")) | {"name": None}
_LINK_DEFAULTS = vars(Link(src="x", dst="y", rate_Bps=1)) | {"src": None, "dst": None, "rate_Bps": None}


def _without(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in defaults and value != defaults[name]}


def _device_entry(device: Device) -> dict[str, Any]:
    entry = _without(vars(device), _DEVICE_DEFAULTS)
    if "flops" in entry:
        entry["flops"] = dict(device.flops)
    if "runs" in entry:
        entry["runs"] = dict(device.runs)
    if "cpu_speeds" in entry:
        entry["cpu_speeds"] = {kind: list(speeds) for kind, speeds in device.cpu_speeds.items()}
    return entry


# ---- reading -----------------------------------------------------------------------------------------------------------
def fabric_from_document(document: Any, *, where: str = "fabric") -> Fabric:
    """Build a fabric from a document; `where` (the file's name) begins every message.

    Raises: FormatError naming the field.
    """
    top = Table(document, where)
    schema = top.text("schema")
    if schema != SCHEMA:
        raise top.error("schema", f"must be {SCHEMA!r}, got {schema!r}")
    version = top.integer("version", least=1, most=2**31)
    if version != VERSION:
        raise top.error("version", f"must be {VERSION}, got {version}", hint="this file needs a newer meshwright")
    name = top.text("name")
    if not name:
        raise top.error("name", "is empty")
    devices: list[Device] = []
    switches: list[Switch] = []
    taken: dict[str, str] = {}
    for entry in top.tables("devices", most=MAX_DEVICES):
        devices += _devices(entry, taken, MAX_DEVICES - len(devices))
    if not devices:
        raise top.error("devices", "there must be at least one device")
    for entry in top.tables("switches", most=MAX_SWITCHES):
        switches.append(_switch(entry, taken))
    links: list[Link] = []
    read: dict[Any, dict[str, Any]] = {}
    for entry in top.tables("links", most=MAX_LINKS):
        links += _links(entry, taken, MAX_LINKS - len(links), read)
    provenance = tuple(_provenance(entry) for entry in top.tables("provenance", most=4096))
    top.done()
    return Fabric(name=name, devices=tuple(devices), switches=tuple(switches), links=tuple(links), provenance=provenance)


def require_document(fabric: Fabric, where: str) -> Fabric:
    """The fabric, if what is written of it can be read again: other tools' files hold names and figures of which ours hold none.

    Raises: FormatError naming the field.
    """
    fabric_from_document(fabric_document(fabric), where=where)
    return fabric


def _name(entry: Table, taken: dict[str, str], field: str, name: str) -> str:
    if not name or any(c.isspace() or c in ",[]" for c in name) or name.startswith("-") or _NUMBERS.match(name):
        raise entry.error(field, f"must not be empty, contain blanks, commas or brackets, start with '-' or be a number or range, got {name!r}")
    if name in taken:
        raise entry.error(field, f"{name!r} is taken by {taken[name]}")
    taken[name] = entry.path
    return name


def _devices(entry: Table, taken: dict[str, str], room: int) -> list[Device]:
    name = entry.text("name")
    array = entry.has("count")
    count = entry.integer("count", 1, least=1, most=MAX_DEVICES)
    if count > room:
        raise entry.error("count", f"a fabric has at most {MAX_DEVICES} devices")
    kind = entry.text("kind", "gpu")
    if kind not in ("gpu", "cpu"):
        raise entry.error("kind", f"must be 'gpu' or 'cpu', got {kind!r}")

    def whole(field: str, value: Any) -> int:
        return entry.checked_integer(field, value, least=0, most=MAX_QUANTITY)

    group = entry.text("group", "")
    memory = entry.quantity("memory_bytes", "memory", parse_size_bytes, whole, 0)
    bandwidth = entry.quantity("memory_bandwidth_Bps", "memory_bandwidth", parse_rate_Bps, whole, 0)
    flops, runs = _rates(entry, "flops"), _rates(entry, "runs")
    share = entry.number("cpu_share", 0.0, most=1.0)
    period = entry.number("cpu_period_s", 0.0, most=1.0)
    overrun = entry.number("cpu_overrun_s", 0.0, most=1.0)
    stretch = entry.number("cpu_stretch", 1.0, most=MAX_DEVICES)
    if stretch < 1:
        raise entry.error("cpu_stretch", f"must be at least 1, got {stretch:g}: no device takes less than its processor time")
    cores = entry.number("cpu_cores", 0.0, most=MAX_DEVICES)
    speeds = _speeds(entry, cores)
    sm, watts = entry.integer("sm", 0, least=0, most=MAX_SM), entry.number("watts", 0.0, most=MAX_WATTS)
    entry.done()
    names = [f"{name}{i}" for i in range(count)] if array else [name]
    return [
        Device(
            name=_name(entry, taken, "name", x),
            kind=kind,
            group=group,
            memory_bytes=memory,
            memory_bandwidth_Bps=bandwidth,
            flops=dict(flops),
            cpu_share=share,
            cpu_period_s=period,
            cpu_overrun_s=overrun,
            cpu_stretch=stretch,
            cpu_cores=cores,
            cpu_speeds=dict(speeds),
            sm=sm,
            runs=dict(runs),
            watts=watts,
        )
        for x in names
    ]


def _speeds(entry: Table, cores: float) -> dict[str, tuple[float, ...]]:
    present = entry.has("cpu_speeds")
    given = entry.take("cpu_speeds")
    if not present:
        return {}
    if not cores:
        raise entry.error("cpu_speeds", "are of the cores of a machine", hint="say how many it has in `cpu_cores`")
    table, found = Table(given, entry.where, f"{entry.path}.cpu_speeds"), dict[str, tuple[float, ...]]()
    for kind in SPEEDS:
        values = table.take(kind) if table.has(kind) else [1.0]
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_DEVICES:
            raise table.error(kind, f"must be a list of 1 to {MAX_DEVICES:,} speeds", hint="of 1, 2, ... busy cores, by that of one alone")
        speeds = [Table({f"{kind}[{i}]": x}, entry.where, table.path).number(f"{kind}[{i}]", most=1.0) for i, x in enumerate(values)]
        if speeds[0] != 1.0 or min(speeds) < MIN_SPEED:
            raise table.error(kind, f"must begin with 1, the speed of one alone, and none may be below {MIN_SPEED:g}")
        found |= {kind: tuple(speeds)} if kind in given else {}
    table.done()
    return found


def _rates(entry: Table, field: str) -> dict[str, int]:
    """`flops`, by dtype, or `runs`, by any word."""
    present = entry.has(field)
    given = entry.take(field)
    if not present:
        return {}
    table = Table(given, entry.where, f"{entry.path}.{field}")
    found: dict[str, int] = {}
    for kind in given:
        short = kind if len(kind) <= 32 else kind[:32] + "..."
        if field == "flops" and kind not in DTYPES:
            raise table.error(short, "unknown dtype", hint=f"one of: {', '.join(DTYPES)}; rates of other kinds of tasks stand in `runs`")
        if not kind or len(kind) > MAX_NAME_CHARACTERS or len(given) > MAX_RATES:
            raise table.error(short, f"a kind of task has 1 to {MAX_NAME_CHARACTERS} characters, a device at most {MAX_RATES} of them")
        value = table.take(kind)
        if isinstance(value, str):
            try:
                value = parse_flops(value)
            except ValueError as error:
                raise table.error(kind, str(error)) from None
        found[kind] = table.checked_integer(kind, value, least=1, most=MAX_QUANTITY)
    return found


def _switch(entry: Table, taken: dict[str, str]) -> Switch:
    def whole(field: str, value: Any) -> int:
        return entry.checked_integer(field, value, least=0, most=MAX_QUANTITY)

    name = _name(entry, taken, "name", entry.text("name"))
    switch = Switch(
        name=name, group=entry.text("group", ""), multicast=entry.flag("multicast"), aggregate=entry.flag("aggregate"),
        aggregate_bytes=entry.quantity("aggregate_bytes", "aggregate_memory", parse_size_bytes, whole, 0),
    )  # fmt: skip
    if switch.aggregate_bytes and not switch.aggregate:
        raise entry.error("aggregate_bytes", "is the memory of a switch with aggregate = true")
    entry.done()
    return switch


def _links(entry: Table, taken: dict[str, str], room: int, read: dict[Any, dict[str, Any]]) -> list[Link]:
    """`read`: facts by how they were written; most links of a fabric say the same but their ends."""
    sources, targets = _ends(entry, "src", taken), _ends(entry, "dst", taken)
    said = entry.rest()
    facts = read.get(said)
    if facts is None:
        facts = _link_facts(entry)
        if said is not None:
            read[said] = facts
    both_ways: bool = facts["both_ways"]
    if len(sources) > 1 and len(targets) > 1 and len(sources) != len(targets):
        raise entry.error("dst", f"names {len(targets)} actors, src names {len(sources)}: must be equal, or one of them 1")
    count = max(len(sources), len(targets))
    if count * (1 + both_ways) > room:
        raise entry.error("", f"a fabric has at most {MAX_LINKS} links")
    links: list[Link] = []
    for src, dst in zip(sources * (count // len(sources)), targets * (count // len(targets)), strict=True):
        if src == dst:
            raise entry.error("dst", f"a link must join two different actors, got {src!r} twice")
        for a, b in ((src, dst), (dst, src))[: 1 + both_ways]:
            links.append(Link(src=a, dst=b, **facts["link"]))
    return links


def _link_facts(entry: Table) -> dict[str, Any]:
    """What a link says besides its ends."""

    def rate(field: str, value: Any) -> int:
        return entry.checked_integer(field, value, least=1, most=MAX_QUANTITY)

    def whole(field: str, value: Any) -> int:
        return entry.checked_integer(field, value, least=0, most=MAX_QUANTITY)

    def latency(field: str, value: Any) -> float:
        return Table({field: value}, entry.where, entry.path).number(field, most=MAX_LATENCY_S)

    link = {
        "rate_Bps": entry.quantity("rate_Bps", "rate", parse_rate_Bps, rate),
        "latency_s": entry.quantity("latency_s", "latency", parse_time_s, latency, 0.0),
        "library_latency_s": entry.quantity("library_latency_s", "library_latency", parse_time_s, latency, 0.0),
        "burst_bytes": entry.quantity("burst_bytes", "burst", parse_size_bytes, whole, 0),
        "kind": entry.text("kind", "NET", limit=16),
        "joules_per_byte": entry.number("joules_per_byte", 0.0, most=1.0),
    }
    both_ways = entry.flag("both_ways")
    entry.done()
    return {"link": link, "both_ways": both_ways}


def _ends(entry: Table, field: str, taken: dict[str, str]) -> list[str]:
    """One actor's name, or `name[0-3]` for name0 ... name3."""
    name = entry.text(field)
    names = [name]
    if name not in taken and (match := _RANGE.match(name)):  # names have no brackets
        first, last = int(match[2]), int(match[3])
        if not first <= last < first + MAX_SWITCHES:
            raise entry.error(field, f"is not a range of at most {MAX_SWITCHES} names: {name!r}")
        names = [f"{match[1]}{i}" for i in range(first, last + 1)]
    for one in names:
        if one not in taken:
            from difflib import get_close_matches

            close = get_close_matches(one, list(taken)[:4096], n=1)
            raise entry.error(field, f"no device or switch is called {one!r}", hint=f"did you mean {close[0]!r}?" if close else "")
    return names


def _provenance(entry: Table) -> Provenance:
    found = Provenance(what=entry.text("what", limit=1024), source=entry.text("source", limit=4096))
    entry.done()
    return found
