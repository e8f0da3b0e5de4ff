"""The text of `rocm-smi --showtopo` or `amd-smi topology`: tables of weights and of link types, GPU by GPU.

    ====== Weight between two GPUs ======          WEIGHT TABLE:
           GPU0         GPU1                                    0000:05:00.0 0000:26:00.0
    GPU0   0            15                         0000:05:00.0 0            15
    GPU1   15           0                          0000:26:00.0 15           0

Pairs of type XGMI at the weight of one hop (15, as the driver counts) have a link; at more, data passes other GPUs. Pairs of type PCIE meet in the
PCIe tree: below one NUMA node where the text says so, else between sockets. Neither text says how wide a link is; `--nvlink` gives its rate.
"""

from __future__ import annotations

import re

from ...errors import FormatError
from .topo_matrix import MAX_ENTRIES, TopoMatrix

__all__ = ["LINK_TYPES", "parse_rocm_topo"]

LINK_TYPES = re.compile(r"^[= \t]*+link type", re.IGNORECASE | re.MULTILINE)
MAX_LINES = 20_000  # of one output
ONE_HOP = 15  # the driver's weight of one XGMI hop
_WEIGHTS = re.compile(r"^[= \t]*+weight", re.IGNORECASE | re.MULTILINE)
_NUMA = re.compile(r"^GPU\[(\d{1,4})\]\s*:.*Numa Node:\s*(\d{1,4})\s*$", re.MULTILINE)
_SELF = ("0", "SELF", "X")


def parse_rocm_topo(text: str, where: str = "topo.txt") -> TopoMatrix:
    """The matrix in the text. Raises: FormatError with file and line."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise FormatError(f"has more than {MAX_LINES} lines", where=where)
    names, kinds = _table(lines, LINK_TYPES, where)
    others, weights = _table(lines, _WEIGHTS, where) if any(map(_WEIGHTS.match, lines)) else (names, {})
    if others != names:
        raise FormatError("the tables of weights and of link types name unlike GPUs", where=where, hint="paste the whole output once more")
    numa = {int(gpu): node for gpu, node in _NUMA.findall(text) if int(gpu) < len(names)}
    cells = {}
    for (a, b), kind in kinds.items():
        weight = weights.get((a, b), str(ONE_HOP))
        if kind not in ("XGMI", "PCIE") or not (weight.isascii() and weight.isdigit()):
            said = f"{names[a]} - {names[b]}: type {kind[:32]!r}, weight {weight[:32]!r}"
            raise FormatError(said, where=where, hint="XGMI or PCIE, and a whole number")
        if kind == "XGMI" and int(weight) <= ONE_HOP:
            cells[a, b] = "NV1"
        elif kind == "PCIE":
            cells[a, b] = "NODE" if a in numa and numa[a] == numa.get(b) else "SYS"
    return TopoMatrix(where, tuple(f"GPU{i}" for i in range(len(names))), cells, numa, link="XGMI")


def _table(lines: list[str], title: re.Pattern[str], where: str) -> tuple[list[str], dict[tuple[int, int], str]]:
    """(names of rows and columns, cells) of the table below a title, without the diagonal."""
    start = next((at for at, line in enumerate(lines) if title.match(line)), len(lines))
    rows = [(at, line.split()) for at, line in enumerate(lines[start + 1 :], start=start + 2) if line.strip()]
    names = rows[0][1] if rows else []
    if not 1 <= len(names) <= MAX_ENTRIES or len(set(names)) < len(names):
        hint = "`rocm-smi --showtopo` or `amd-smi topology`"
        raise FormatError(f"{len(names)} columns, {len(set(names))} of them different", where=where, hint=hint)
    if [row[0] for _, row in rows[1 : len(names) + 1]] != names:
        raise FormatError(f"no row for each of {len(names)} columns", where=where, hint="the table is cut short")
    cells: dict[tuple[int, int], str] = {}
    for a, (at, row) in enumerate(rows[1 : len(names) + 1]):
        if len(row) != len(names) + 1 or row[a + 1].upper() not in _SELF:
            raise FormatError(f"row {row[0][:32]}: not {len(names)} cells with 0 on the diagonal", where=f"{where}: line {at}")
        cells |= {(a, b): cell.upper() for b, cell in enumerate(row[1:]) if b != a}
    return names, cells
