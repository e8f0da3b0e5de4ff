"""A model whose embedding tables are one pack, placed as a table plan says: `EmbeddingBag`s, torchrec's collections of them, and `Embedding`s of one
id.

Cite: as `decide.tables.neuroshard`. Left open there: the layers around the tables. Our answer: the model stays the owner's, its tables become slices
of one parameter (`kernels.bags`), and the captured graph looks up all of them at once, so a plan spreads the pack as it spreads experts.
Deviations: none in values. Invariant: outputs and gradients are those of the owner's modules, but for the order of sums over row shards.
Cost: a copy of every table; O(calls of the graph) for bringing lookups together.
"""

from __future__ import annotations

import gzip
import operator
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from meshwright.errors import CaptureError, FormatError, UnknownName, Unsupported, UsageError
from meshwright.graph.embeddings import Shard, Tables
from meshwright.kernels.bags import bag_ids, pooled, table_bag, table_lookups
from meshwright.plan.packing import Packing, packing_of

__all__ = ["NAME", "PlacedTables", "place_tables", "read_placed", "split_name", "together", "unlike", "whole_tables"]

NAME = "placed_tables"  # of the module that holds the pack
MAX_BYTES = 256 << 20  # of a table plan
_ENDS = (".json", ".json.gz")


def split_name(name: str) -> tuple[str, str]:
    """(model function, table plan) of `FILE.py:function@PLAN.json`; the second is empty for a name without a plan."""
    function, at, plan = name.rpartition("@")
    return (function, plan) if at and plan.endswith(_ENDS) and ":" in function else (name, "")


class _Job(msgspec.Struct):
    tables: Tables
    shards: list[Shard]


class _Document(msgspec.Struct):
    kind: str
    job: msgspec.Raw
    placement: list[str]


def read_placed(path: str) -> tuple[Tables, list[Shard], list[str]]:
    """Tables, shards and devices of a table plan's file. Raises: UnknownName, FormatError."""
    file = Path(path)
    if not file.is_file():
        raise UnknownName(f"there is no table plan {path!r}", where=path, hint="make it with `meshwright tables plan --out`, or train plan --tables")
    try:
        with (gzip.open if path.endswith(".gz") else open)(file, "rb") as stream:
            text = stream.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise FormatError(f"is longer than {MAX_BYTES} bytes", where=path)
        document = msgspec.json.decode(text, type=_Document)
        if document.kind != "tables":
            raise FormatError(f"is a plan of kind {document.kind!r}", where=path, hint="make one with `meshwright tables plan`")
        job = msgspec.json.decode(document.job, type=_Job)
    except (msgspec.DecodeError, RecursionError, ValueError, zlib.error, UsageError, OSError, EOFError) as error:
        raise FormatError(f"is no table plan: {error}", where=path, hint="make it with `meshwright tables plan --out`") from None
    return job.tables, job.shards, document.placement


def _packing(tables: Tables, shards: Sequence[Shard], devices: Sequence[str]) -> Packing:
    """Raises: FormatError where shards do not tile their tables."""
    numbers = [len(devices), len(tables.tables)]
    for t in tables.tables:
        numbers += [t.dim, int(t.mode == "mean"), t.most]
    part_of, area = {name: i for i, name in enumerate(devices)}, Counter[str]()
    for s in shards:
        table = tables.tables[tables.number_of[s.table]] if s.table in tables.number_of else None
        known = table is not None and 0 <= s.rows[0] < s.rows[1] <= table.rows and 0 <= s.columns[0] < s.columns[1] <= table.dim
        if not known or s.device not in part_of:
            raise FormatError(f"has a shard of table {s.table} on {s.device} that is not there", where="job.shards", hint="make the plan again")
        area[s.table] += s.elements
        numbers += [part_of[s.device], tables.number_of[s.table], *s.rows, *s.columns]
    if any(area[t.name] != t.rows * t.dim for t in tables.tables):
        raise FormatError("its shards do not tile their tables", where="job.shards", hint="make the plan again")
    return packing_of(numbers)


class PlacedTables(nn.Module):  # type: ignore[misc]
    """`pack` [parts, slots]: all tables, as `packing` says. `names`: of the tables, the paths of the modules whose weights they are."""

    def __init__(self, packing: Packing, names: Sequence[str], weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.packing, self.names = packing, tuple(names)
        pack = weights[0].new_zeros(packing.parts, packing.slots)
        for p in packing.places:
            part = weights[p.table].detach()[p.rows[0] : p.rows[1], p.columns[0] : p.columns[1]]
            pack[p.part, p.slot : p.slot + p.elements].view(p.height, p.width).copy_(part)
        self.pack = nn.Parameter(pack)

    def tables(self, pack: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The tables whole, by the names of their weights; `pack`: another than the module's own, as its gradient."""
        values, found = self.pack.detach() if pack is None else pack, dict[str, torch.Tensor]()
        for p in self.packing.places:
            name = f"{self.names[p.table]}.weight"
            rows = max(q.rows[1] for q in self.packing.places if q.table == p.table)
            whole = found.setdefault(name, values.new_zeros(rows, self.packing.dims[p.table]))
            shard = values[p.part, p.slot : p.slot + p.elements].view(p.height, p.width)
            whole[p.rows[0] : p.rows[1], p.columns[0] : p.columns[1]] = shard
        return found


class _Bag(nn.Module):  # type: ignore[misc]
    """In the place of an `EmbeddingBag` or an `Embedding`."""

    def __init__(self, of: PlacedTables, table: int, module: nn.Module, most: int) -> None:
        super().__init__()
        self._of, self.table, self.most = (of,), table, most  # a tuple: the pack is registered once
        self.rows = int(module.weight.shape[0])
        self.padding = -1 if module.padding_idx is None else int(module.padding_idx)
        self.bag, self.last = isinstance(module, nn.EmbeddingBag), bool(getattr(module, "include_last_offset", False))

    def forward(self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        name = self._of[0].names[self.table]
        if per_sample_weights is not None or (input.dim() == 2) != (self.bag and offsets is None):
            what = "weights of lookups" if per_sample_weights is not None else f"ids of shape {tuple(input.shape)}"
            raise UsageError(f"placed table {name} got {what}", where=name, hint="bags of ids without weights; leave this table out of the plan")
        if offsets is not None:
            bags = len(offsets) - self.last
            return self.pooled(bag_ids(input, offsets, 0, bags, self.most, self.rows, self.padding, name))
        return self.pooled(table_lookups(input if self.bag else input[:, None], self.rows, self.padding, name))

    def pooled(self, ids: torch.Tensor) -> torch.Tensor:
        of = self._of[0]
        if torch.compiler.is_compiling():
            return table_bag(ids, of.pack, of.packing.numbers(), self.table)
        return pooled(ids, of.pack, of.packing, self.table)


class _Collection(nn.Module):  # type: ignore[misc]
    """In the place of torchrec's `EmbeddingBagCollection`: the same `KeyedTensor`."""

    def __init__(self, bags: Sequence[_Bag], features: Sequence[str], keys: Sequence[str], widths: Sequence[int]) -> None:
        super().__init__()
        self.bags, self.features, self.keys, self.widths = nn.ModuleList(bags), tuple(features), tuple(keys), tuple(widths)

    def forward(self, features: Any) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedTensor  # type: ignore[import-not-found]

        samples, order = features.stride(), features.keys()
        offsets = torch.nn.functional.pad(features.lengths().to(torch.int64).cumsum(0), (1, 0))
        found = []
        for bag, feature in zip(self.bags, self.features, strict=True):
            first, name = order.index(feature) * samples, bag._of[0].names[bag.table]
            ids = bag_ids(features.values().to(torch.int64), offsets, first, samples, bag.most, bag.rows, bag.padding, name)
            found.append(bag.pooled(ids))
        return KeyedTensor(keys=list(self.keys), length_per_key=list(self.widths), values=torch.cat(found, 1))


def unlike(module: nn.Module) -> str:
    """Why a table cannot be placed, in words; "" for one that can."""
    if getattr(module, "mode", "sum") not in ("sum", "mean"):
        return f"takes the {module.mode} of its rows, and parts of a table add up: mode sum or mean"
    if module.max_norm is not None or module.scale_grad_by_freq:
        what = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
        return f"has {what}, which wants to know of all ids of a batch: leave {what} out"
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        return "is an Embedding with padding_idx, whose row is given: use an EmbeddingBag of one id"
    return "" if module.weight.requires_grad else "does not train, and the pack does"


def place_tables(model: nn.Module, tables: Tables, shards: Sequence[Shard], devices: Sequence[str]) -> PlacedTables:
    """Puts the tables of `model`, in place, into one pack. Raises: UsageError naming the table that is not there, or cannot be placed."""
    modules, shared = dict(model.named_modules()), Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for t in tables.tables:
        module = modules.get(t.name)
        if not isinstance(module, (nn.EmbeddingBag, nn.Embedding)) or tuple(module.weight.shape) != (t.rows, t.dim):
            raise UsageError(f"the model has no table {t.name} of {t.rows} x {t.dim}", where=t.name, hint="tables plan --model MODEL")
        if why := unlike(module) or ("shares its weight with another module" if shared[id(module.weight)] > 1 else ""):
            raise UsageError(f"table {t.name} {why}", where=t.name, hint="leave it out of the table plan: it then stays with the other layers")
    packing = _packing(tables, shards, devices)
    names = [t.name for t in tables.tables]
    placed = PlacedTables(packing, names, [modules[n].weight for n in names])
    bags = {t.name: _Bag(placed, i, modules[t.name], t.most) for i, t in enumerate(tables.tables)}
    collections = {n: m for n, m in modules.items() if hasattr(m, "embedding_bag_configs") and hasattr(m, "embedding_bags")}
    for path, bag in bags.items():
        if not any(path.startswith(f"{c}.") or not c for c in collections):
            _put(model, path, bag)
    for path, collection in collections.items():
        _put(model, path, _collection(path, collection, bags))
    setattr(model, NAME, placed)
    return placed


def _collection(path: str, collection: nn.Module, bags: dict[str, _Bag]) -> nn.Module:
    configs = collection.embedding_bag_configs()
    names = [f"{path}.embedding_bags.{c.name}".lstrip(".") for c in configs]
    features = [f for c in configs for f in c.feature_names]
    why = "weights its lookups" if collection.is_weighted() else "has a table of several features" if len(features) > len(configs) else ""
    why = why or ("is placed in part" if not set(names) <= set(bags) else "" if path else "is the whole model")
    if why:
        raise UsageError(f"collection {path} {why}", where=path, hint="one unweighted feature for each table, all tables placed, or none")
    keys = getattr(collection, "_embedding_names", features)
    return _Collection([bags[n] for n in names], features, keys, [int(c.embedding_dim) for c in configs])


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def whole_tables(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state of a model with placed tables under the names that the owner's model has. Raises: UsageError for a model without them."""
    placed = getattr(model, NAME, None)
    if not isinstance(placed, PlacedTables):
        raise UsageError("has no placed tables", where="model", hint="meshwright.nn.tables.place_tables(model, PLAN)")
    pack = f"{NAME}.pack"
    return {n: x for n, x in state.items() if n != pack} | placed.tables(state[pack])


# ---- captured graphs ---------------------------------------------------------------------------------------------
def together(graph: fx.Graph) -> bool:
    """Rewrites lookups of single tables into one of all; whether there were any.

    Raises: Unsupported where a table is looked up twice or never, or by ids that depend on another table's rows."""
    ops = torch.ops.meshwright
    bags = [n for n in graph.nodes if n.target is ops.table_bag.default]
    if not bags:
        return False
    by_table = {n.args[3]: n for n in bags}
    packing = packing_of(bags[0].args[2])
    if len(by_table) != len(bags) or len(bags) != len(packing.dims):
        what = "is looked up twice" if len(by_table) != len(bags) else "is never looked up"
        count = Counter(n.args[3] for n in bags)
        table = next(t for t in range(len(packing.dims)) if count[t] != 1)
        raise Unsupported(f"placed table number {table} {what} in one pass", where=NAME, hint="leave it out of the table plan")
    ordered = [by_table[t] for t in range(len(bags))]
    _moved_up(graph, bags, [n.args[0] for n in bags])
    ids, pack = [n.args[0] for n in ordered], ordered[0].args[1]
    numbers = packing.numbers()
    numbers[4 : 2 + 3 * len(bags) : 3] = [int(x.meta["val"].shape[1]) for x in ids]
    with graph.inserting_before(bags[0]):
        sent = _called(graph, bags[0], ops.table_ids.default, (ids, numbers))
        rows = _called(graph, bags[0], ops.table_rows.default, (sent, pack, numbers))
        sums = _called(graph, bags[0], ops.table_sums.default, (rows, sent, numbers))
        parts = _called(graph, bags[0], torch.ops.aten.split_with_sizes.default, (sums, list(packing.dims), 1))
        for t, bag in enumerate(ordered):
            bag.replace_all_uses_with(_called(graph, bag, operator.getitem, (parts, t)))
    for bag in bags:
        graph.erase_node(bag)
    graph.lint()
    return True


def _moved_up(graph: fx.Graph, bags: Sequence[fx.Node], ids: Sequence[fx.Node]) -> None:
    """All that ids are made of, before the first lookup."""
    needed, todo = set[fx.Node](), list(ids)
    while todo:
        n = todo.pop()
        if n not in needed:
            needed.add(n)
            todo += n.all_input_nodes
    if needed & set(bags):
        raise Unsupported("ids of a table depend on another table's rows", where=NAME, hint="leave one of them out of the table plan")
    behind = False
    for n in list(graph.nodes):
        behind |= n is bags[0]
        if behind and n in needed:
            bags[0].prepend(n)


def _called(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = next((x.fake_mode for x in tree_leaves(values) if hasattr(x, "fake_mode")), None)
    if mode is None:
        raise CaptureError("was traced without shapes", where=NAME)
    with mode, torch.no_grad():
        node.meta = {**like.meta, "val": target(*values)}
    return node
