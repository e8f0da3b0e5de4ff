"""The output of `dcgmi topo --gpuid N --json`: one document per GPU, in one file after each other or in a list.

    {"header": ["Topology Information", "GPU ID: 0"],
     "body": {"CPU Core Affinity": {"value": "0 - 19"},
              "To GPU 1": {"value": "Connected via a CPU-level link", "overflow": ["Connected via two NVLINKs (Links: 0, 1)"]}}}

(Forms as in dcgmi/Topo.cpp of NVIDIA/DCGM.) A group's document (`-g`) states only the worst path and is refused. GPUs of one core affinity
are taken to share a NUMA node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ...errors import FormatError
from ..limits import MaxBytes
from .topo_matrix import MAX_ENTRIES, TopoMatrix

__all__ = ["parse_dcgm_topo"]

_GPU = re.compile(r"GPU ID: (\d{1,4})\Z")
_TO = re.compile(r"To GPU (\d{1,4})\Z")
_NVLINKS = re.compile(r"Connected via ([a-z]+) NVLINKs?\b")
_WORDS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
    "seventeen", "eighteen",
)  # fmt: skip
_PCI = {
    "Connected via an on-board PCIe switch": "PIX", "Connected via a single PCIe switch": "PIX", "Connected via multiple PCIe switches": "PXB",
    "Connected via a PCIe host bridge": "PHB", "Connected via a CPU-level link": "SYS", "Unknown": "",
}  # fmt: skip


def parse_dcgm_topo(text: str, where: str = "topo.json") -> TopoMatrix:
    """The matrix that the documents state together. Raises: FormatError naming document and field."""
    rows: dict[int, tuple[str, dict[int, str]]] = {}
    for number, document in enumerate(_documents(text, where)):
        gpu, affinity, cells = _row(document, f"{where}: document {number}")
        if gpu in rows:
            raise FormatError(f"GPU {gpu} is there twice", where=f"{where}: document {number}")
        rows[gpu] = (affinity, cells)
    gpus = sorted(set(rows) | {other for _, cells in rows.values() for other in cells})
    if not rows or len(gpus) > MAX_ENTRIES:
        raise FormatError(f"{len(gpus)} GPUs", where=where, hint=f"between 1 and {MAX_ENTRIES}, from `dcgmi topo --gpuid N --json` for each")
    number_of = {gpu: i for i, gpu in enumerate(gpus)}
    said = {(number_of[a], number_of[b]): cell for a, (_, row) in rows.items() for b, cell in row.items() if cell}
    pairs = {(b, a): cell for (a, b), cell in said.items()} | said  # a GPU without a document of its own is known from the others
    for a in range(len(gpus)):
        for b in range(a + 1, len(gpus)):
            if (a, b) not in pairs and gpus[a] not in rows and gpus[b] not in rows:
                raise FormatError(
                    f"no document says how GPU {gpus[a]} and GPU {gpus[b]} are connected",
                    where=where, hint=f"add `dcgmi topo --gpuid {gpus[a]} --json`",
                )  # fmt: skip
    numa = {number_of[gpu]: affinity for gpu, (affinity, _) in rows.items() if affinity}
    return TopoMatrix(where, tuple(f"GPU{gpu}" for gpu in gpus), pairs, numa)


def _documents(text: str, where: str) -> Iterator[Any]:
    if len(text) > MaxBytes.DCGM:
        raise FormatError(f"larger than {MaxBytes.DCGM} bytes", where=where)
    decoder, at, count = json.JSONDecoder(), 0, 0
    while (at := _skip(text, at)) < len(text):
        try:
            document, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise FormatError(f"not JSON: {why}", where=where, hint="the output of `dcgmi topo --gpuid N --json`") from None
        for one in document if isinstance(document, list) else [document]:
            count += 1
            if count > MAX_ENTRIES:
                raise FormatError(f"more than {MAX_ENTRIES} documents", where=where)
            yield one


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _row(document: Any, where: str) -> tuple[int, str, dict[int, str]]:
    header = document.get("header") if isinstance(document, dict) else None
    body = document.get("body") if isinstance(document, dict) else None
    if not isinstance(header, list) or not isinstance(body, dict):
        raise FormatError("must have a list `header` and a table `body`", where=where, hint="the output of `dcgmi topo --gpuid N --json`")
    found = next((match for line in header if isinstance(line, str) and (match := _GPU.match(line))), None)
    if found is None:
        raise FormatError("header: no `GPU ID: N`", where=where, hint="a group's document states no pairs; use --gpuid for each GPU")
    affinity, cells = "", {}
    for name, entry in body.items():
        value, overflow = (entry.get("value"), entry.get("overflow", [])) if isinstance(entry, dict) else (None, [])
        if not isinstance(value, str) or not isinstance(overflow, list) or not all(isinstance(x, str) for x in overflow):
            raise FormatError("must be a table of texts `value` and `overflow`", where=f"{where}: body.{name[:40]}")
        target = _TO.match(name)
        if name == "CPU Core Affinity":
            affinity = " ".join([value, *overflow])[:1024]
        elif target:
            cells[int(target[1])] = _cell(value, overflow, f"{where}: body.{name}")
    if int(found[1]) in cells:
        raise FormatError(f"GPU {found[1]} is joined to itself", where=where)
    return int(found[1]), affinity, cells


def _cell(value: str, overflow: list[str], where: str) -> str:
    if value.strip() not in _PCI:
        raise FormatError(f"unknown path {value[:64]!r}", where=where, hint="Connected via ... PCIe switch, host bridge or CPU-level link")
    for line in overflow:
        match = _NVLINKS.match(line.strip())
        if match is None or match[1] not in _WORDS:
            raise FormatError(f"unknown path {line[:64]!r}", where=where, hint="Connected via <number> NVLINKs (Links: ...)")
        return f"NV{_WORDS.index(match[1]) + 1}"
    return _PCI[value.strip()]
