"""The text of `nvidia-smi topo -m`: a matrix for people, read token by token, because pasted tables lose their columns.

Taken as they come: terminal codes in the header, marks of a quotation, tabs or blanks, cells glued together (`NODENODE`), rows of NICs without
the affinity columns, older words (SOC for SYS), other text before and after. Demanded: as many cells as the header names, known words, an X on the
diagonal. The NIC legend gives NICs their names; the NUMA column tells which GPUs share a node where NVLinks hide it.
"""

from __future__ import annotations

import re

from ...errors import FormatError
from .topo_matrix import MAX_ENTRIES, TopoMatrix

__all__ = ["parse_nvidia_topo"]

MAX_LINES = 20_000  # of one output
MAX_LINE_CHARACTERS = 65_536  # of one row
_NOISE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^(?:> ?)+", re.MULTILINE)  # terminal codes, marks of a quotation
_LABEL = re.compile(r"(GPU|NIC|mlx\d?_)(\d{1,4})\Z")
_CELL = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC")
_CELLS = re.compile(rf"(?:{_CELL.pattern})+\Z")
_LEGEND = re.compile(r"\s*(NIC\d{1,4})\s*:\s*(\S{1,128})\s*\Z")
_OLD = {"SOC": "SYS"}


def parse_nvidia_topo(text: str, where: str = "topo.txt") -> TopoMatrix:
    """The matrix in the text. Raises: FormatError with file and line."""
    lines = _NOISE.sub("", text).splitlines()
    if len(lines) > MAX_LINES:
        raise FormatError(f"has more than {MAX_LINES} lines", where=where)
    start, names, extra = _header(lines, where)
    number = {name: i for i, name in enumerate(names)}
    cells: dict[tuple[int, int], str] = {}
    numa: dict[int, str] = {}
    seen: set[str] = set()
    for at, line in enumerate(lines[start + 1 :], start=start + 2):
        tokens = line.split()
        if not tokens or tokens[0] not in number:
            continue
        row = tokens[0]
        here = f"{where}: line {at}"
        if row in seen:
            raise FormatError(f"a second row {row}", where=here, hint="paste one table at a time")
        seen.add(row)
        found, rest = _cells(tokens[1:], len(names), here)
        for column, cell in enumerate(found):
            i = number[row]
            if (cell == "X") != (column == i):
                raise FormatError(f"row {row}, column {names[column]}: {cell!r}", where=here, hint="X stands on the diagonal and only there")
            if cell != "X":
                cells[i, column] = cell
        if "NUMA" in extra and row.startswith("GPU") and len(rest) >= 2 and rest[1] != "N/A":
            numa[number[row]] = rest[1]
    missing = [name for name in names if name not in seen]
    if missing:
        raise FormatError(f"no row for {', '.join(missing[:8])}", where=where, hint="the table is cut short")
    nics = {match[1]: match[2] for line in lines if (match := _LEGEND.match(line)) and match[1] in number}
    return TopoMatrix(where, tuple(names), cells, numa, nics)


def _header(lines: list[str], where: str) -> tuple[int, list[str], list[str]]:
    """(line number from 0, labels of rows and columns, words after them)."""
    for at, line in enumerate(lines):
        if len(line) > MAX_LINE_CHARACTERS:
            raise FormatError(f"is longer than {MAX_LINE_CHARACTERS} characters", where=f"{where}: line {at + 1}")
        tokens = line.split()
        if tokens and _LABEL.match(tokens[0]) and tokens[0].startswith("GPU") and (len(tokens) == 1 or not _CELLS.match(tokens[1])):
            count = next((i for i, token in enumerate(tokens) if not _LABEL.match(token)), len(tokens))
            names = tokens[:count]
            if len(set(names)) < count or count > MAX_ENTRIES:
                raise FormatError(f"the header names {count} columns, {len(set(names))} of them different", where=f"{where}: line {at + 1}")
            return at, names, tokens[count:]
    raise FormatError("no header such as `GPU0 GPU1 ... CPU Affinity`", where=where, hint="the output of `nvidia-smi topo -m`")


def _cells(tokens: list[str], count: int, where: str) -> tuple[list[str], list[str]]:
    """The first `count` cells of a row, glued ones cut, and the tokens after them."""
    found: list[str] = []
    for at, token in enumerate(tokens):
        if len(found) == count:
            return found, tokens[at:]
        if not _CELLS.match(token):
            hint = "X, NV#, PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo -m` prints"
            raise FormatError(f"{len(found)} of {count} cells, then {token[:32]!r}", where=where, hint=hint)
        found += [_OLD.get(cell, cell) for cell in _CELL.findall(token)]
    if len(found) != count:
        raise FormatError(f"{len(found)} cells for {count} columns", where=where, hint="the row is cut short or two cells ran together")
    return found, []
