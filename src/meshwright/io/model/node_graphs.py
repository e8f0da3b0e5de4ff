"""Graphs to train on, in files: npz columns (ours, scipy's), OGB's folders, node-link JSON (networkx), lists of edges; and points in CSV.

| what | read as |
|---|---|
| `.npz` | `indptr`, `indices`, or `edge_index` [2, edges]; maybe `features` (`x`, `node_feat`), `labels` (`y`), `train` (`train_mask`) |
| `.npz` | scipy.sparse.save_npz of CSR, CSC or COO; `adj_*`, `attr_*`, `labels`, as the Amazon and Coauthor graphs are published (gnn-benchmark) |
| a folder | OGB's node property layout: `raw/edge.csv.gz`, `raw/num-node-list.csv.gz`, `node-feat`, `node-label`, `split/*/train` where there are; \
of its large graphs `raw/data.npz`, `raw/node-label.npz` |
| `.json`, `.json.gz` | networkx.node_link_data |
| anything else | text of METIS, DIMACS or Matrix Market, or lines `source target` (`edge_texts`) |

Nothing is unpickled. Sizes are read from headers first, so a file that would not fit is refused before memory is taken.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...errors import FormatError, Infeasible, MeshwrightError, UsageError
from ...graph.nodes import NodeGraph, graph_of_edges
from ..limits import MaxBytes
from ..own_limits import free_bytes
from ..strict_json import decode, read_document, refuse_ambiguous
from .edge_texts import edges_in

__all__ = ["NodeFile", "read_node_graph", "read_points", "require_room"]

MAX_WHOLE = 1 << 53  # up to which float64 has every whole number
MANY_NODES, MOST_NODES = 1 << 20, 64  # a file of text has at most so many nodes, and so many more for each of its edges: one number names no more
# Times that a graph's columns are held while it is read, made symmetric and divided by METIS (a drawn graph of 300,000 edges: 10.6).
COPIES = 12


@dataclass(frozen=True, eq=False)
class NodeFile:
    """A graph, and what else the file has of its nodes."""

    graph: NodeGraph
    features: NDArray[np.float32] | None = None
    labels: NDArray[np.int64] | None = None
    train: NDArray[np.bool_] | None = None


def require_room(size_bytes: int, where: str, *, copies: int = COPIES, hint: str = "") -> None:
    """Raises: Infeasible for columns that memory does not hold `copies` times."""
    free = free_bytes()
    if size_bytes * copies > free:
        raise Infeasible(
            f"its columns take {size_bytes} bytes, {copies} times that while it is divided; {free} are free", where=where,
            hint=hint or "use a machine with more memory, or a part of the graph",
            data={"needed_bytes": size_bytes * copies, "available_bytes": free},
        )  # fmt: skip


def read_node_graph(path: str | os.PathLike[str], *, directed: bool = True) -> NodeFile:
    """The graph in a file or folder, told by its name. `directed`: False adds the other direction of every edge.

    Raises: UsageError (no such file), FormatError, Infeasible (larger than memory).
    """
    where = Path(path).name or str(path)
    try:
        if Path(path).is_dir():
            found = _ogb(Path(path), where)
        elif where.endswith(".npz"):
            found = _npz(Path(path), where)
        elif where.endswith((".json", ".json.gz")):
            found = _node_link(Path(path), where)
        else:
            found = NodeFile(_edge_lines(Path(path), where))
    except UsageError as error:
        if error.message.startswith("cannot read"):
            raise
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None
    return found if directed else NodeFile(found.graph.symmetric, found.features, found.labels, found.train)


# ---- npz -----------------------------------------------------------------------------------------------------------
def _read(path: Path, where: str) -> dict[str, NDArray[Any]]:
    """The columns of an npz that are known."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MaxBytes.NODE_GRAPH:
                raise FormatError(f"larger than {MaxBytes.NODE_GRAPH} bytes", where=where)
            with zipfile.ZipFile(file) as archive:
                return _columns(archive, where)
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), hint="check the path") from error
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, KeyError, SyntaxError, RuntimeError, OverflowError, zlib.error) as error:
        raise FormatError(f"no npz of plain arrays: {str(error)[:160]}", where=where, hint="write it with numpy.savez, without objects") from None


def _npz(path: Path, where: str) -> NodeFile:
    columns = _read(path, where)
    features, labels, train = (next((columns[n] for n in names if n in columns), None) for names in (_FEATURES, _LABELS, _TRAIN))
    graph = _graph_of(columns, where)
    if "attr_indptr" in columns:
        features = _dense(columns, graph.nodes, where)
    return NodeFile(
        graph, None if features is None else _floats(features, f"{where}: features"), None if labels is None else _whole(labels, f"{where}: labels"),
        None if train is None else np.asarray(train).astype(bool).reshape(-1),
    )  # fmt: skip


_FEATURES, _LABELS, _TRAIN = ("features", "x", "node_feat"), ("labels", "y", "node_label"), ("train", "train_mask")
_GNN_BENCHMARK = ("adj_indptr", "adj_indices", "attr_data", "attr_indices", "attr_indptr", "attr_shape")
_COUNTS = ("num_nodes", "num_nodes_list", "shape")  # the last one of sparse matrices


def _graph_of(columns: dict[str, NDArray[Any]], where: str) -> NodeGraph:
    """Compressed rows, or ends of edges."""
    for a, b in (("indptr", "indices"), ("adj_indptr", "adj_indices")):
        if a in columns and b in columns:
            graph = NodeGraph(_whole(columns[a], f"{where}: {a}"), _whole(columns[b], f"{where}: {b}"), where)
            transposed = columns.get("format", np.array(b"csr")).item() in ("csc", b"csc")
            return graph_of_edges(graph.rows, graph.indices, graph.nodes, name=where) if transposed else graph
    ends = columns.get("edge_index")
    if ends is None and "row" in columns and "col" in columns and columns["row"].shape == columns["col"].shape:
        ends = np.stack([columns["col"], columns["row"]])  # an entry of row i and column j is an edge from j to i
    if ends is None or ends.ndim != 2 or ends.shape[0] != 2:
        text = f"has {', '.join(sorted(columns)) or 'nothing'}, needs indptr and indices, or edge_index of two rows"
        raise FormatError(text, where=where, hint="give compressed rows, or the ends of edges")
    src, dst = (_whole(x, f"{where}: edge_index") for x in ends)
    said = next((int(_whole(columns[n], f"{where}: {n}")[:1].sum()) for n in _COUNTS if n in columns), None)
    return _of_ends(src, dst, said if said is not None else int(max(src.max(initial=-1), dst.max(initial=-1))) + 1, where)


def _dense(columns: dict[str, NDArray[Any]], nodes: int, where: str) -> NDArray[np.float32]:
    """Sparse rows of features, each with all its numbers."""
    try:
        indptr, indices, shape = (_whole(columns[f"attr_{n}"], f"{where}: attr_{n}") for n in ("indptr", "indices", "shape"))
        rows, width, values = int(shape[0]), int(shape[1]), columns["attr_data"].reshape(-1)
        require_room(4 * rows * width, f"{where}: attr")
        counts = np.diff(indptr)
        if rows != nodes or len(counts) != nodes or indptr[0] or (counts < 0).any() or not int(indptr[-1]) == len(values) == len(indices):
            raise ValueError
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < width:
            raise ValueError
    except (KeyError, IndexError, ValueError, TypeError):
        raise FormatError("attr_* are no sparse matrix with a row for each node", where=where, hint="as scipy.sparse.csr_matrix has them") from None
    found = np.zeros((rows, width), np.float32)
    found[np.repeat(np.arange(rows), counts), indices] = values
    return found


def _columns(archive: zipfile.ZipFile, where: str) -> dict[str, NDArray[Any]]:
    wanted = {"indptr", "indices", "format", "edge_index", "row", "col", *_COUNTS, *_FEATURES, *_LABELS, *_TRAIN, *_GNN_BENCHMARK}
    found, total = dict[str, NDArray[Any]](), 0
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        if name not in wanted:
            continue
        with archive.open(entry) as file:
            version = npy.read_magic(file)
            shape, _, kind = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
            size = int(np.prod(shape, dtype=object)) * kind.itemsize if shape else kind.itemsize
            if kind.hasobject or size > MaxBytes.NODE_GRAPH or size > entry.file_size:
                raise FormatError(f"{size} bytes of {kind}", where=f"{where}: {name}", hint="plain numbers, as many as the header says")
            require_room(total := total + size, f"{where}: {name}")
        with archive.open(entry) as file:
            found[name] = npy.read_array(file, allow_pickle=False)
    return found


def _whole(column: NDArray[Any], where: str) -> NDArray[np.int64]:
    whole = column.dtype.kind == "f" and not (np.abs(column) > MAX_WHOLE).any() and (np.nan_to_num(column, nan=-1) % 1 == 0).all()
    if column.dtype.kind not in "iub" and not whole:
        raise FormatError(f"{column.dtype}, must be whole numbers", where=where)
    if column.dtype.kind == "f":  # OGB and PyTorch Geometric mark what has no label by NaN
        column = np.nan_to_num(column, nan=-1)
    return np.ascontiguousarray(column.reshape(-1).astype(np.int64))


def _floats(column: NDArray[Any], where: str) -> NDArray[np.float32]:
    if column.ndim != 2 or column.dtype.kind not in "iufb":
        raise FormatError(f"{column.dtype} of shape {column.shape}, must be one row of numbers for each node", where=where)
    with np.errstate(over="ignore"):  # to infinity, which is refused with the number of the node
        return np.ascontiguousarray(column.astype(np.float32))


# ---- text ----------------------------------------------------------------------------------------------------------
def _table(
    data: bytes, where: str, *, separator: str | None, kind: type[Any] = np.int64, columns: tuple[int, ...] | None = None, hint: str = ""
) -> NDArray[Any]:
    """[lines, columns]. Raises: FormatError."""
    if not data.strip():
        return np.empty((0, 0), kind)
    require_room(len(data) * 4, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file that is all comments
            return np.loadtxt(io.BytesIO(data), dtype=kind, delimiter=separator, comments="#", usecols=columns, ndmin=2, encoding="utf-8")
    except (ValueError, OverflowError, UnicodeDecodeError) as error:
        raise FormatError(f"not a table of numbers: {str(error)[:160]}", where=where, hint=hint) from None


def _edge_lines(path: Path, where: str) -> NodeGraph:
    hint = "lines `source target`: two whole numbers from 0 with space between them; `#` begins a comment"
    data = read_document(path, limit=MaxBytes.NODE_TEXT)
    found = edges_in(data, where, lambda text, columns: _table(text, where, separator=None, columns=columns, hint=hint))
    if not len(found.src):
        raise FormatError("no line holds two nodes", where=where, hint=hint)
    nodes = found.nodes or int(max(found.src.max(), found.dst.max())) + 1
    return _of_ends(found.src, found.dst, nodes, where, directed=not found.both_ways)


def _of_ends(src: NDArray[Any], dst: NDArray[Any], nodes: int, where: str, *, directed: bool = True) -> NodeGraph:
    if nodes > MANY_NODES + MOST_NODES * len(src):
        raise FormatError(f"{nodes} nodes", where=where, hint="number nodes from 0 without gaps")
    require_room(8 * (nodes + len(src)), where)
    return graph_of_edges(src, dst, nodes, directed=directed, name=where)


def read_points(path: str | os.PathLike[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(points, labels) of a CSV without a header whose last column is the class, as scikit-learn ships its digits. Raises: UsageError,
    FormatError."""
    where = Path(path).name or str(path)
    rows = _table(read_document(path, limit=MaxBytes.POINTS_CSV), where, separator=",", kind=np.float64)
    if not len(rows) or rows.shape[1] < 2 or not np.isfinite(rows).all() or np.abs(rows).max() > 1e30:
        raise FormatError("needs lines of at least one finite number and a class", where=where)
    return rows[:, :-1].astype(np.float32), _whole(rows[:, -1], f"{where}: last column")


# ---- OGB -----------------------------------------------------------------------------------------------------------
def _ogb(folder: Path, where: str) -> NodeFile:
    def table(name: str, kind: type[Any] = np.int64) -> NDArray[Any] | None:
        for end in (".csv.gz", ".csv"):
            if (path := folder / f"{name}{end}").exists():
                return _table(read_document(path, limit=MaxBytes.NODE_TEXT), f"{where}/{name}{end}", separator=",", kind=kind)
        return None

    if (folder / "raw/data.npz").exists():  # its large graphs
        whole = _npz(folder / "raw/data.npz", f"{where}/raw/data.npz")
        apart = folder / "raw/node-label.npz"
        labels, graph, features, train = whole.labels, whole.graph, whole.features, whole.train
        if apart.exists() and (found := _read(apart, f"{where}/raw/node-label.npz").get("node_label")) is not None:
            labels = _whole(found, f"{where}/raw/node-label.npz")
    else:
        edges, count = table("raw/edge"), table("raw/num-node-list")
        if edges is None or count is None or count.shape != (1, 1) or (len(edges) and edges.shape[1] != 2):
            need = "needs raw/edge.csv.gz with two columns and raw/num-node-list.csv.gz of one graph, or raw/data.npz"
            raise FormatError(need, where=where, hint="OGB's node property layout")
        ends = edges if len(edges) else np.empty((0, 2), np.int64)
        graph, features, train = _of_ends(ends[:, 0], ends[:, 1], int(count[0, 0]), where), table("raw/node-feat", np.float32), None
        said = table("raw/node-label", np.float64)
        labels = None if said is None else _whole(said[:, 0], f"{where}/node-label")
    nodes = graph.nodes
    for split in sorted(folder.glob("split/*/train.csv*")):
        chosen = _table(read_document(split, limit=MaxBytes.NODE_TEXT), f"{where}/{split.name}", separator=",").reshape(-1)
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < nodes:
            raise FormatError(f"names a node that is none of {nodes}", where=f"{where}/{split.name}")
        train = np.zeros(nodes, bool)
        train[chosen] = True
        break
    return NodeFile(graph, features, labels, train)


# ---- networkx ------------------------------------------------------------------------------------------------------
def _name(value: Any) -> Any:
    """A node's name as networkx reads it: lattices name nodes by tuples, which JSON writes as lists."""
    return tuple(_name(x) for x in value) if isinstance(value, list) else value


def _node_link(path: Path, where: str) -> NodeFile:
    data = read_document(path, limit=MaxBytes.DOCUMENT)
    document = decode(data, msgspec.json.Decoder(dict[str, Any]), where)
    refuse_ambiguous(data, where)
    try:
        number = {_name(node["id"]): i for i, node in enumerate(document["nodes"])}
        edges = document["links"] if "links" in document else document["edges"]
        ends = np.array([(number[_name(e["source"])], number[_name(e["target"])]) for e in edges], np.int64).reshape(-1, 2)
        directed = bool(document.get("directed", False))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FormatError(f"lacks or mangles {str(error)[:80]}", where=where, hint="write it with networkx.node_link_data") from None
    if not number:
        raise FormatError("has no nodes", where=where)
    if not directed:
        ends = np.concatenate([ends, ends[ends[:, 0] != ends[:, 1]][:, ::-1]])
    try:
        return NodeFile(_of_ends(ends[:, 0], ends[:, 1], len(number), where))
    except MeshwrightError as error:
        raise FormatError(error.message, where=where, hint=error.hint) from None
