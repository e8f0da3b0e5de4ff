"""Reading a cluster from whatever describes it: which format a file has, and the fabric of one file or several.

    import_fabric(["node.xml"], Join(copies=4, net="rails"))        four boxes like one NCCL topology file
    import_fabric(["topo.txt"], Assumed(nvlink=50 * 10**9))         `nvidia-smi topo -m`

Several files are several servers, joined by the network that the settings state. Every fabric says in its provenance which file and which
assumptions its numbers come from.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import FormatError, UsageError
from ...fabric.fabric import Fabric
from ..limits import MaxBytes
from ..nccl.fabric import Join, nccl_fabric
from ..nccl.topology import parse_nccl_topology
from ..text import UTF16, text_of
from .adjacency import parse_edges, parse_matrix
from .dcgm_topo import parse_dcgm_topo
from .document import require_document
from .nodes import nodes_fabric, parse_kubernetes_nodes, parse_slurm_nodes
from .nvidia_topo import parse_nvidia_topo
from .rocm_topo import LINK_TYPES, parse_rocm_topo
from .topo_matrix import Assumed, matrix_fabric

__all__ = ["FORMATS", "Source", "format_of", "import_fabric", "read_source"]

FORMATS = ("nccl", "nccl-graph", "nvidia-smi", "rocm-smi", "dcgm", "kubernetes", "slurm", "matrix", "edges")
_MATRICES = {"nvidia-smi": parse_nvidia_topo, "rocm-smi": parse_rocm_topo, "dcgm": parse_dcgm_topo}
_KNOWN = (
    "known: NCCL_TOPO_DUMP_FILE, `nvidia-smi topo -m`, `rocm-smi --showtopo`, `amd-smi topology`, `dcgmi topo --json`, `kubectl get nodes -o json`, "
    "`scontrol show node`, a matrix, edges; state another with --format"
)
MAX_FILES = 2048  # servers of one cluster, a file each
_KUBERNETES = re.compile(rb'"kind"\s*:\s*"(?:Node|List)"')
_SLURM = re.compile(rb'"nodes"\s*:\s*\[')
_OURS = re.compile(rb'^\s*\{?\s*"?schema"?\s*[:=]\s*"meshwright\.')


@dataclass(frozen=True)
class Source:
    """A file's contents; `where` names it in messages."""

    where: str
    data: bytes

    @property
    def text(self) -> str:
        """Raises: FormatError when it is no text."""
        return text_of(self.data, self.where)


def read_source(path: str) -> Source:
    """The contents of a file (`-`: standard input). Raises: UsageError if it cannot be read, FormatError if it is too large."""
    try:
        if path == "-":
            source = Source("standard input", sys.stdin.buffer.read(MaxBytes.CLUSTER_FILE + 1))
        else:
            with Path(path).open("rb") as file:
                source = Source(Path(path).name, file.read(MaxBytes.CLUSTER_FILE + 1))
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=path, hint="check the path") from error
    if len(source.data) > MaxBytes.CLUSTER_FILE:
        raise FormatError(f"larger than {MaxBytes.CLUSTER_FILE} bytes", where=source.where)
    return Source(source.where, source.text.encode()) if source.data[:2] in UTF16 else source


def format_of(source: Source) -> str:
    """The format, by content. Raises: FormatError when it is none of FORMATS."""
    head = source.data.lstrip(b"\xef\xbb\xbf \t\r\n")
    if head[:1] == b"<":
        return "nccl-graph" if b"<graphs" in head[:4096] else "nccl"
    if _OURS.search(head[:4096]):
        raise UsageError("is a document of meshwright already", where=source.where, hint="fabrics: `meshwright fabric show`, `fabric lint`")
    if head[:1] in (b"{", b"["):
        return "kubernetes" if _KUBERNETES.search(head) else "slurm" if _SLURM.search(head) else "dcgm"
    if b"NodeName=" in head[:4096]:
        return "slurm"
    text = source.text
    if LINK_TYPES.search(text):
        return "rocm-smi"
    if "GPU0" in text and any(word in text for word in ("CPU Affinity", "Legend:", "NV", "PIX", "PHB", "SYS", "NODE")):
        return "nvidia-smi"
    for line in text.splitlines():
        words = line.partition("#")[0].replace("->", " ").replace("<", " ").replace(",", " ").split()
        if words:
            edge = words[0] in ("device", "switch") or (len(words) in (3, 4, 5) and not words[0][:1].isdigit() and not words[1][:1].isdigit()
                                                        and words[2][:1].isdigit())  # fmt: skip
            return "edges" if edge else "matrix"
    raise FormatError("is empty", where=source.where, hint=_KNOWN)


def import_fabric(
    sources: Sequence[Source], *, form: str = "auto", name: str = "", join: Join | None = None, assumed: Assumed | None = None, unit_Bps: int = 10**9
) -> Fabric:
    """The fabric that these files describe. Raises: FormatError with file and line; UsageError for settings that do not fit."""
    made = _imported(sources, form, name, join, assumed, unit_Bps)
    return require_document(made, ", ".join(s.where for s in sources[:4]))


def _imported(sources: Sequence[Source], form: str, name: str, join: Join | None, assumed: Assumed | None, unit_Bps: int) -> Fabric:
    if not 1 <= len(sources) <= MAX_FILES:
        raise UsageError(f"{len(sources)} files", hint=f"between 1 and {MAX_FILES}")
    formats = {format_of(source) if form == "auto" else form for source in sources}
    if len(formats) > 1:
        raise UsageError(f"files of several formats: {', '.join(sorted(formats))}", hint="import them one after the other, or state --format")
    found = formats.pop()
    title = name or Path(sources[0].where).stem[:64] or "imported"
    if found == "nccl":
        return nccl_fabric([parse_nccl_topology(s.data, s.where) for s in sources], title, join)
    if found in _MATRICES:
        return matrix_fabric([_MATRICES[found](s.text, s.where) for s in sources], title, assumed)
    if found in ("kubernetes", "slurm"):
        parse_nodes = parse_kubernetes_nodes if found == "kubernetes" else parse_slurm_nodes
        nodes = [node for s in sources for node in parse_nodes(s.data, s.where)]
        return nodes_fabric(nodes, title, ", ".join(s.where for s in sources)[:1024], gpu=assumed.gpu if assumed else None)
    if found == "nccl-graph":
        raise UsageError("a graph file holds rings and trees, not a fabric", where=sources[0].where, hint="`meshwright fabric import` shows them")
    if found not in FORMATS:
        raise UsageError(f"no format {found!r}", where="--format", hint=f"auto, {', '.join(FORMATS)}")
    if len(sources) > 1:
        raise UsageError(f"one {found} file describes the whole fabric, got {len(sources)}", hint="import them one by one")
    reader = parse_matrix if found == "matrix" else parse_edges
    try:
        return reader(sources[0].text, unit_Bps=unit_Bps, name=title, where=sources[0].where)
    except FormatError as error:
        if form != "auto":
            raise
        kind = "matrix of link counts" if found == "matrix" else "list of edges"
        raise FormatError(f"no known kind of file; read as a {kind}: {error.message}", where=error.where, hint=_KNOWN) from None
