"""Fabrics as a matrix of rates or a list of edges, in plain text, read and written.

Matrix: rows and columns in one order, separated by blanks, tabs, commas or semicolons; a first row and first column of names are optional,
`#` begins a comment; `0`, `-`, `.`, `X` and empty CSV cells are no link; a name that ends in `*` is a switch. Numbers are multiples of
`unit_Bps` (25 GB/s per NVLink, say); a row of one word of single digits is taken digit by digit (`02112000`).

    name   gpu0 gpu1 hub*
    gpu0   0    2    1
    gpu1   2    0    1
    hub*   1    1    0

Edges: one per line, `src dst rate [latency [kind]]`, rates as `25GB/s`, `1Gbit/s` or multiples of the unit; `src -> dst` is the same, `src <-> dst`
both ways. `device NAME [SERVER]` and `switch NAME [SERVER]` declare; what is not declared is a device.
"""

from __future__ import annotations

import re
from fractions import Fraction

from ...errors import FormatError, UsageError
from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ..limits import MAX_QUANTITY, MaxBytes
from ..quantity import parse_rate_Bps, parse_time_s
from .document import require_document

__all__ = ["edges_text", "matrix_text_of", "parse_edges", "parse_matrix"]

MAX_ACTORS = 4096  # rows of a matrix
MAX_EDGES = 1_048_576  # links, as in a fabric file
MAX_LINE_CHARACTERS = 262_144  # 64 for each entry of the longest row
NONE = ("", "0", "-", ".", "X", "x", "0.0")
_SPLIT = re.compile(r"[,;]|\s+")
_NAME = re.compile(r"[^\s,;\[\]#]{1,128}\Z")
_NUMBER = re.compile(r"\d{1,19}(?:\.\d{1,9})?\Z")


def _lines(text: str, where: str) -> list[tuple[int, str]]:
    if len(text) > MaxBytes.ADJACENCY:
        raise FormatError(f"larger than {MaxBytes.ADJACENCY} bytes", where=where)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_LINE_CHARACTERS:
            raise FormatError(f"is longer than {MAX_LINE_CHARACTERS} characters", where=f"{where}: line {number}")
        line = line.partition("#")[0].strip()
        if line:
            found.append((number, line))
    return found


def _rate(text: str, unit_Bps: int, where: str) -> int:
    """Whole bytes/s of a number of units, or of a quantity with its unit."""
    try:
        if _NUMBER.match(text):
            exact = Fraction(text) * unit_Bps
            if exact.denominator != 1:
                raise ValueError(f"{text} times {unit_Bps} B/s is not a whole number of bytes/s")
            value = exact.numerator
        else:
            value = parse_rate_Bps(text)
    except ValueError as error:
        raise FormatError(str(error), where=where, hint="a multiple of the unit, or a rate such as 25GB/s") from None
    if not 0 < value <= MAX_QUANTITY:
        raise FormatError(f"must be above 0 and at most {MAX_QUANTITY} bytes/s, got {value}", where=where)
    return value


def _name(text: str, where: str) -> str:
    if not _NAME.match(text) or not text.isprintable() or text.isdigit() or text.startswith("-"):
        raise FormatError(f"no name: {text[:32]!r}", where=where, hint="no blanks, commas or brackets, not a number")
    return text


# ---- matrix ------------------------------------------------------------------------------------------------------------
def parse_matrix(text: str, *, unit_Bps: int = 10**9, name: str = "matrix", where: str = "matrix.txt") -> Fabric:
    """The fabric of a matrix. Raises: FormatError with line and column."""
    rows = [(number, _cells(line)) for number, line in _lines(text, where)]
    if not rows:
        raise FormatError("is empty", where=where, hint="a matrix has a row per device")
    names: list[str] | None = None
    line, first = rows[0]
    if len(rows) > 1 and not all(_is_entry(cell) for cell in first):  # a row of names, with or without a corner
        names = [c for c in first if c] if len([c for c in first if c]) == len(rows) - 1 else first[1:]
        rows = rows[1:]
    n = len(rows)
    if n > MAX_ACTORS:
        raise FormatError(f"{n} rows, at most {MAX_ACTORS}", where=where)
    if names is not None and len(names) != n:
        raise FormatError(f"{len(names)} names for {n} rows", where=f"{where}: line {line}")
    table: list[list[str]] = []
    for number, cells in rows:
        here = f"{where}: line {number}"
        if len(cells) == 1 and n > 1 and len(cells[0]) == n and cells[0].isascii() and cells[0].isdigit():
            cells = list(cells[0])
        label = cells[0] if len(cells) == n + 1 else None
        if label is not None:
            cells = cells[1:]
            if names is not None and label != names[len(table)]:
                raise FormatError(f"row {label[:32]!r} stands where column {names[len(table)][:32]!r} does", where=here, hint="one order for both")
        if len(cells) != n:
            raise FormatError(f"{len(cells)} cells for {n} rows", where=here, hint="a matrix is square")
        table.append(cells)
    if names is None:
        names = [cells[0] if len(cells) == n + 1 else f"d{i}" for i, (_, cells) in enumerate(rows)]
    return _from_table(names, table, [number for number, _ in rows], unit_Bps, name, where)


def _cells(line: str) -> list[str]:
    """Cells of a line: split at commas or semicolons where there are some (then a cell may be empty), else at blanks."""
    if "," in line or ";" in line:
        return [cell.strip() for cell in re.split(r"[,;]", line)]
    return line.split()


def _is_entry(cell: str) -> bool:
    return cell in NONE or bool(_NUMBER.match(cell)) or cell[:1].isdigit()


def _from_table(names: list[str], table: list[list[str]], numbers: list[int], unit_Bps: int, name: str, where: str) -> Fabric:
    plain = [_name(x.removesuffix("*"), where) for x in names]
    if len(set(plain)) < len(plain):
        twice = next(x for i, x in enumerate(plain) if x in plain[:i])
        raise FormatError(f"the name {twice!r} is used twice", where=where)
    devices = [x for x, given in zip(plain, names, strict=True) if not given.endswith("*")]
    switches = [x for x, given in zip(plain, names, strict=True) if given.endswith("*")]
    if not devices:
        raise FormatError("names switches only", where=where, hint="a name that ends in * is a switch")
    links = []
    for i, cells in enumerate(table):
        for j, cell in enumerate(cells):
            if cell in NONE:
                continue
            here = f"{where}: line {numbers[i]}: column {j + 1}"
            rate = _rate(cell, unit_Bps, here)
            if i == j:
                raise FormatError(f"{plain[i]!r} is joined to itself", where=here, hint="the diagonal is 0, - or X")
            links.append(Link(src=plain[i], dst=plain[j], rate_Bps=rate))
    source = Provenance(what="devices, links, rates", source=f"matrix {where}, 1 = {unit_Bps} B/s; latencies unknown, 0")
    nodes = tuple(Device(name=x) for x in devices), tuple(Switch(name=x) for x in switches)
    return Fabric(name=name, devices=nodes[0], switches=nodes[1], links=tuple(links), provenance=(source,))


def matrix_text_of(fabric: Fabric) -> str:
    """The fabric as a matrix of bytes/s with names. Parallel links are added up; latencies, kinds, servers and abilities are lost.

    Raises: UsageError for more than 4,096 actors.
    """
    if len(fabric.actor_names) > MAX_ACTORS:
        raise UsageError(f"{len(fabric.actor_names)} actors make too large a matrix", hint="export edges instead")
    total: dict[tuple[int, int], int] = {}
    for ends, link in zip(fabric.link_ends, fabric.links, strict=True):
        total[ends] = total.get(ends, 0) + link.rate_Bps
    names = [x if i < len(fabric.devices) else f"{x}*" for i, x in enumerate(fabric.actor_names)]
    rows = [["name", *names]] + [[a, *(str(total.get((i, j), 0)) for j in range(len(names)))] for i, a in enumerate(names)]
    return "# bytes/s; a name that ends in * is a switch\n" + "\n".join(" ".join(row) for row in rows) + "\n"


# ---- edges -------------------------------------------------------------------------------------------------------------
def parse_edges(text: str, *, unit_Bps: int = 10**9, name: str = "edges", where: str = "edges.txt") -> Fabric:
    """The fabric of a list of edges. Raises: FormatError with the line."""
    devices: dict[str, Device] = {}
    switches: dict[str, Switch] = {}
    links: list[Link] = []
    for number, line in _lines(text, where):
        here = f"{where}: line {number}"
        words = [w for w in _SPLIT.split(line) if w]
        if words[0] in ("device", "switch") and len(words) in (2, 3) and not _looks_like_edge(words):
            actor, group = _name(words[1], here), words[2] if len(words) == 3 else ""
            if actor in devices or actor in switches:
                raise FormatError(f"{actor!r} is declared twice, or used before it is declared", where=here)
            if words[0] == "device":
                devices[actor] = Device(name=actor, group=group)
            else:
                switches[actor] = Switch(name=actor, group=group)
            continue
        both = "<->" in words[1:2]
        words = [w for i, w in enumerate(words) if not (i == 1 and w in ("->", "<->"))]
        if not 3 <= len(words) <= 5:
            raise FormatError(f"{len(words)} words", where=here, hint="src dst rate [latency [kind]], device NAME or switch NAME")
        link = _edge(words, unit_Bps, here)
        for actor in (link.src, link.dst):
            if actor not in switches:
                devices.setdefault(actor, Device(name=actor))
        twin = Link(src=link.dst, dst=link.src, rate_Bps=link.rate_Bps, latency_s=link.latency_s, kind=link.kind)
        links += [link, twin] if both else [link]
        if len(links) > MAX_EDGES or len(devices) > 4 * MAX_ACTORS or len(switches) > 16 * MAX_ACTORS:
            raise FormatError("too many edges, devices or switches", where=here)
    if not devices:
        raise FormatError("names no device", where=where, hint="src dst rate per line")
    source = Provenance(what="devices, links, rates", source=f"edges {where}, 1 = {unit_Bps} B/s; latencies 0 where not given")
    made = Fabric(name=name, devices=tuple(devices.values()), switches=tuple(switches.values()), links=tuple(links), provenance=(source,))
    return require_document(made, where)


def _looks_like_edge(words: list[str]) -> bool:
    return len(words) == 3 and words[2][:1].isdigit()


def _edge(words: list[str], unit_Bps: int, where: str) -> Link:
    src, dst = _name(words[0], where), _name(words[1], where)
    if src == dst:
        raise FormatError(f"{src!r} is joined to itself", where=where)
    try:
        latency = parse_time_s(words[3]) if len(words) > 3 else 0.0
    except ValueError as error:
        raise FormatError(str(error), where=where, hint="a latency such as 0.7us") from None
    if latency > 3600:
        raise FormatError(f"a latency of {latency:g} s", where=where, hint="at most 3600 s")
    kind = words[4] if len(words) > 4 else "NET"
    if len(kind) > 16 or not kind.isprintable():
        raise FormatError(f"kind {kind[:32]!r} is longer than 16 characters", where=where)
    return Link(src=src, dst=dst, rate_Bps=_rate(words[2], unit_Bps, where), latency_s=latency, kind=kind)


def edges_text(fabric: Fabric) -> str:
    """The fabric as edges that read back with equal actors, servers, rates, latencies and kinds; other facts are lost."""
    lines = ["# src dst bytes/s latency kind"]
    lines += [f"device {d.name} {d.group}".rstrip() for d in fabric.devices] + [f"switch {s.name} {s.group}".rstrip() for s in fabric.switches]
    lines += [f"{x.src} {x.dst} {x.rate_Bps}B/s {_seconds(x.latency_s)}s {x.kind or 'NET'}" for x in fabric.links]
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> str:
    """The shortest decimal that reads back equal, without an exponent beyond two digits."""
    text = repr(value)
    return text if re.fullmatch(r"\d{1,19}(\.\d{1,19})?(e[+-]?\d{1,2})?", text) else f"{value:.17f}"
