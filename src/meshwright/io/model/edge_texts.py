"""Graphs as text in the forms of partitioners and solvers: METIS' `.graph`, DIMACS (`p edge`, `p sp`), Matrix Market; and plain lines of two nodes.

| text | nodes from | read as |
|---|---|---|
| a name that ends in `.graph` | 1 | METIS: `nodes edges [format [weights]]`, then a line of neighbours for each node; `%` begins a comment |
| begins with `c` or `p` | 1 | DIMACS: `p edge NODES EDGES` with lines `e u v`, which hold both ways, or `p sp NODES ARCS` with lines `a u v weight` |
| begins with `%%MatrixMarket` | 1 | a square coordinate matrix: an entry is an edge, both ways where it is said to be symmetric |
| anything else | 0 | lines `source target`; `#` begins a comment (SNAP) |

Weights, and what else stands on a line, are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError

__all__ = ["EdgeText", "edges_in"]

Table = Callable[[bytes, tuple[int, ...]], NDArray[np.int64]]  # whole numbers of these columns
METIS_WEIGHTS = 3  # digits of its format: sizes of nodes, weights of nodes, weights of edges


@dataclass(frozen=True, eq=False)
class EdgeText:
    """Ends of edges, from node 0 on; `nodes`: 0, the file does not say; `both_ways`: each stands for the other direction too."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nodes: int = 0
    both_ways: bool = False


def edges_in(data: bytes, where: str, table: Table) -> EdgeText:
    """Raises: FormatError."""
    start = data.lstrip()[:16]
    if where.endswith((".graph", ".graph.gz")):
        return _metis([line for line in data.splitlines() if not line.lstrip().startswith(b"%")], where)
    if start.startswith(b"%%MatrixMarket"):
        return _matrix_market(data, where, table)
    if start[:1] in (b"c", b"p"):
        return _dimacs(data.splitlines(), where, table)
    src, dst = table(data, (0, 1)).reshape(-1, 2).T
    return EdgeText(src, dst)


def _counts(fields: list[bytes], where: str, form: str) -> list[int]:
    if len(fields) < 2 or not all(f.isdigit() and len(f) <= 15 for f in fields):
        raise FormatError(f"{b' '.join(fields)[:64].decode('ascii', 'replace')!r} are no counts of nodes and edges", where=where, hint=form)
    return [int(f) for f in fields]


def _from_one(ends: NDArray[np.int64], nodes: int, stated: int, where: str, both_ways: bool) -> EdgeText:
    if len(ends) != stated:
        raise FormatError(f"states {stated} edges and has {len(ends)}", where=where, hint="the file is cut off, or of another form")
    if (odd := ends[(ends < 1) | (ends > nodes)]).size:
        raise FormatError(f"an edge to node {int(odd[0])} of {nodes}", where=where, hint="nodes are counted from 1")
    src, dst = ends.reshape(-1, 2).T - 1
    return EdgeText(src, dst, nodes, both_ways)


def _dimacs(lines: list[bytes], where: str, table: Table) -> EdgeText:
    form = "DIMACS: a line `p edge NODES EDGES` or `p sp NODES ARCS`, then lines `e u v` or `a u v weight`"
    said = [line.split() for line in lines if line.startswith(b"p")]
    if len(said) != 1 or len(said[0]) < 4:
        raise FormatError("has no line, or several, that state its size", where=where, hint=form)
    nodes, stated = _counts(said[0][2:4], where, form)  # behind them collections write the number of colours
    kind = b"a " if said[0][1] == b"sp" else b"e "
    ends = table(b"\n".join(line[2:] for line in lines if line.startswith(kind)), (0, 1))
    twice = kind == b"e " and len(ends) == 2 * stated  # the graphs of books (anna, david) state edges and list both ways
    return _from_one(ends, nodes, 2 * stated if twice else stated, where, kind == b"e ")


def _matrix_market(data: bytes, where: str, table: Table) -> EdgeText:
    form = "Matrix Market: `%%MatrixMarket matrix coordinate FIELD SYMMETRY`, then rows, columns and entries, then a line for each entry"
    head, *lines = data.lstrip().splitlines()
    words = head.decode("ascii", "replace").lower().split()
    rest = [line for line in lines if line.strip() and not line.startswith(b"%")]
    if words[1:3] != ["matrix", "coordinate"] or len(words) != 5 or not rest:
        raise FormatError("is no matrix of coordinates", where=where, hint=form)
    counts = _counts(rest[0].split(), where, form)
    if len(counts) != 3 or counts[0] != counts[1]:
        raise FormatError(f"is a matrix of {' x '.join(map(str, counts[:2]))}, a graph has as many rows as columns", where=where, hint=form)
    return _from_one(table(b"\n".join(rest[1:]), (0, 1)), counts[0], counts[2], where, words[4] != "general")


def _metis(lines: list[bytes], where: str) -> EdgeText:
    form = "METIS: `nodes edges [format [weights of a node]]`, then for each node a line of its neighbours, from 1"
    while lines and not lines[0].strip():
        lines = lines[1:]
    nodes, stated, *more = _counts(lines[0].split() if lines else [], where, form)
    digits = f"{more[0]:0{METIS_WEIGHTS}d}" if more else "0" * METIS_WEIGHTS
    skip = (digits[0] == "1") + (digits[1] == "1") * (more[1] if len(more) > 1 else 1)
    rows = lines[1:]
    while len(rows) > nodes and not rows[-1].strip():
        rows.pop()
    if len(rows) != nodes or set(digits) - set("01") or len(digits) != METIS_WEIGHTS:
        raise FormatError(f"states {nodes} nodes and has {len(rows)} lines for them", where=where, hint=form)
    try:
        found = [np.array(row.split()[skip :: 1 + (digits[2] == "1")], np.int64) for row in rows]
    except (ValueError, OverflowError):
        raise FormatError("not a table of numbers", where=where, hint=form) from None
    src = np.repeat(np.arange(1, nodes + 1), [len(row) for row in found])
    return _from_one(np.stack([src, np.concatenate([*found, np.empty(0, np.int64)])], 1), nodes, 2 * stated, where, False)
