"""NCCL graph files (NCCL_GRAPH_DUMP_FILE): the rings, trees and stars that NCCL found, channel by channel.

    <graphs version="1"> <graph id="0" pattern="4" crossnic="0" nchannels="2" speedintra="20" speedinter="20" latencyinter="0"
      typeintra="NVL" typeinter="PIX" samechannels="1"> <channel> <net dev="0"/> <gpu dev="0"/> <gpu dev="1"/> <net dev="0"/> </channel> ...

`dev` numbers count within one server; older files say `rank` too. Facts: graph/search.cc of NVIDIA/nccl.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import FormatError
from ..limits import MaxBytes
from ..xml_reader import XmlLimits, XmlNode, parse_xml, read_xml

__all__ = ["NcclChannel", "NcclGraph", "graph_lines", "parse_nccl_graph", "read_nccl_graph"]

LIMITS = XmlLimits(max_bytes=MaxBytes.NCCL_XML, elements=200_000, depth=8, characters=256)
PATTERNS = {1: "balanced tree", 2: "split tree", 3: "tree", 4: "ring", 5: "NVLS", 6: "CollNet direct"}
NAMES = {0: "ring", 1: "tree", 2: "CollNet chain", 3: "NVLS", 4: "CollNet direct"}


@dataclass(frozen=True)
class NcclChannel:
    """`gpus` in order; `enters`, `leaves`: network devices before and after them, -1 = none."""

    gpus: tuple[int, ...]
    enters: int
    leaves: int


@dataclass(frozen=True)
class NcclGraph:
    id: int
    pattern: str
    speed_intra: float  # GB/s per channel
    speed_inter: float
    type_intra: str
    type_inter: str
    channels: tuple[NcclChannel, ...]


def read_nccl_graph(path: str | os.PathLike[str]) -> tuple[NcclGraph, ...]:
    """The graphs in a file. Raises: UsageError if it cannot be read; FormatError with file and line."""
    return _graphs(read_xml(path, limits=LIMITS), "standard input" if str(path) == "-" else Path(path).name)


def parse_nccl_graph(data: bytes, where: str = "graph.xml") -> tuple[NcclGraph, ...]:
    """The graphs in a document. Raises: FormatError."""
    return _graphs(parse_xml(data, where, limits=LIMITS), where)


def _wrong(where: str, node: XmlNode, message: str) -> FormatError:
    return FormatError(message, where=f"{where}: line {node.line}: <{node.name[:32]}>", hint="NCCL_GRAPH_DUMP_FILE writes one")


def _graphs(root: XmlNode, where: str) -> tuple[NcclGraph, ...]:
    if root.name != "graphs":
        raise _wrong(where, root, "must be a <graphs> document")
    found = tuple(_graph(node, where) for node in root.all("graph"))
    if not found:
        raise _wrong(where, root, "has no <graph>")
    return found


def _graph(node: XmlNode, where: str) -> NcclGraph:
    number, pattern = _integer(node, "id", where), _integer(node, "pattern", where)
    channels = tuple(_channel(child, where) for child in node.all("channel"))
    said = _integer(node, "nchannels", where, len(channels))
    if channels and said != len(channels):
        raise _wrong(where, node, f"nchannels is {said}, but {len(channels)} <channel> follow")
    speeds = [_speed(node, name, where) for name in ("speedintra", "speedinter")]
    return NcclGraph(
        number, NAMES.get(number, PATTERNS.get(pattern, f"pattern {pattern}")), speeds[0], speeds[1], node.attributes.get("typeintra", ""),
        node.attributes.get("typeinter", ""), channels,
    )  # fmt: skip


def _channel(node: XmlNode, where: str) -> NcclChannel:
    gpus: list[int] = []
    nets: list[tuple[int, int]] = []  # (GPUs before it, device)
    for child in node.children:
        if child.name == "gpu":
            gpus.append(_integer(child, "dev", where, None if "rank" not in child.attributes else _integer(child, "rank", where)))
        elif child.name == "net":
            nets.append((len(gpus), _integer(child, "dev", where)))
    if not gpus:
        raise _wrong(where, node, "has no <gpu>")
    if len(set(gpus)) < len(gpus):
        twice = next(g for i, g in enumerate(gpus) if g in gpus[:i])
        raise _wrong(where, node, f"GPU {twice} is there twice")
    enters = next((dev for before, dev in nets if before == 0), -1)
    leaves = next((dev for before, dev in nets if before == len(gpus)), -1)
    return NcclChannel(tuple(gpus), enters, leaves)


def _integer(node: XmlNode, name: str, where: str, default: int | None = None) -> int:
    text = node.attributes.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "", 16 if (text or "").lower().startswith("0x") else 10) if len(text or "") <= 18 else -1
    except ValueError:
        raise _wrong(where, node, f"{name}: must be a whole number, got {str(text)[:32]!r}") from None


def _speed(node: XmlNode, name: str, where: str) -> float:
    try:
        value = float(node.attributes.get(name, "0"))
    except ValueError:
        raise _wrong(where, node, f"{name}: must be a number, got {node.attributes[name][:32]!r}") from None
    if not 0 <= value < 1e9:
        raise _wrong(where, node, f"{name}: must be between 0 and 1e9 GB/s")
    return value


def graph_lines(graphs: tuple[NcclGraph, ...]) -> list[str]:
    """What the file says, for people."""
    lines = []
    for graph in graphs:
        speed = f"{graph.speed_intra:g} GB/s inside ({graph.type_intra or '?'}), {graph.speed_inter:g} between servers ({graph.type_inter or '?'})"
        lines.append(f"graph {graph.id}: {graph.pattern}, {len(graph.channels)} channels, each {speed}")
        for number, channel in enumerate(graph.channels):
            arrow = " -> ".join(f"GPU{g}" for g in channel.gpus)
            ends = [f"net {channel.enters} -> " if channel.enters >= 0 else "", f" -> net {channel.leaves}" if channel.leaves >= 0 else ""]
            back = f" -> GPU{channel.gpus[0]}" if graph.pattern == "ring" and channel.leaves < 0 and len(channel.gpus) > 1 else ""
            lines.append(f"  channel {number}: {ends[0]}{arrow}{back}{ends[1]}")
    return lines
