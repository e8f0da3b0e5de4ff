"""What lies between tensor-parallel regions, split along the sequence over the tensor-parallel ranks.

Cite: see CITE.
Left open by the paper: it names LayerNorm and dropout of a transformer. Our answer: found on the captured graph. The results of row-parallel linears
and of tables split by rows are where a split can begin: their all-reduce becomes a reduce-scatter over positions. From there positions are
carried through the operators that keep them apart (`sequence_rules`); where they meet, the value is gathered and a note says so. Parameters
used on the way see a part of the positions on every rank: their gradients are partial sums, added up once per step.
Deviations: sequences that do not divide are shared unevenly, in messages padded to the largest part; values gathered for a region are gathered
again for its backward pass whatever reads them, not only at linear layers.
Invariant: a parameter's gradient is whole for all that use it or partial for all; where the graph would mix both, its users stay whole.
Cost: O(nodes) per round, one round per layer of demotions (few).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...cite import Cite
from ...graph.graph import OpGraph, OpNode
from ...plan.plan import PartialGradient
from .cut import Unit
from .sequence_rules import VIEWS, Along, carried
from .sharding import short_name
from .split import Refused, Split, made_from
from .tensor_shares import TensorOptions, choose_shares

__all__ = ["CITE", "SequenceSplit", "split_sequence"]

CITE = Cite(
    key="korthikanti2022reducing",
    title="Reducing Activation Recomputation in Large Transformer Models",
    year=2022,
    venue="MLSys '23, arXiv:2205.05198",
)
DROPOUTS = ("dropout", "native_dropout")  # whose bits a rank can draw for its positions
Kind = Literal["split", "beside", "any", "whole"]


@dataclass
class SequenceSplit:
    """`values`: those split along the sequence. `kinds` of nodes outside regions: "split"; "beside": whole, read by split ones alone (its
    gradient is partial); "any": whole and without gradient; "whole". `shares` by extent; `params`: those with partial gradients."""

    values: dict[str, Along] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    params: tuple[str, ...] = ()
    trained: set[str] = field(default_factory=set)  # nodes whose results carry gradients
    notes: tuple[str, ...] = ()

    def kind(self, unit: Unit) -> tuple[Kind, int]:
        """(kind, extent or 0) of a unit outside regions."""
        name = unit.nodes[0].name
        found = self.values.get(name)
        return self.kinds.get(name, "whole"), found.extent if found is not None else 0

    def partial(self, parts: int) -> list[PartialGradient]:
        return [PartialGradient(param=p, groups=(tuple(range(parts)),)) for p in self.params]


def split_sequence(graph: OpGraph, units: list[Unit], parts: int, options: TensorOptions, sharded: Sequence[str]) -> SequenceSplit:
    """How `units` (with regions contiguous; "beside" ones are moved to their readers, in place) divide. No `values`: not at all, see the notes.

    `sharded`: parameters that the regions split.
    """
    return _Search(graph, units, parts, options, set(sharded)).run()


class _Search:
    def __init__(self, graph: OpGraph, units: list[Unit], parts: int, options: TensorOptions, sharded: set[str]) -> None:
        self.graph, self.units, self.parts, self.options, self.sharded = graph, units, parts, options, sharded
        self.node: dict[str, OpNode] = {n.name: n for n in graph.nodes}
        self.shapes: dict[str, tuple[int, ...]] = {n.name: n.outputs[0].shape for n in graph.nodes if n.outputs}
        self.shapes |= {f"param:{p.name}": p.shape for p in graph.parameters} | {f"buffer:{p.name}": p.shape for p in graph.buffers}
        self.shapes |= {f"input:{i}": x.shape for i, x in enumerate(graph.inputs)}
        self.readers: dict[str, list[str]] = {}
        for n in graph.nodes:
            for v in dict.fromkeys(n.inputs):
                self.readers.setdefault(v, []).append(n.name)
        self.region_of = {n.name: u.region for u in units if u.region is not None for n in u.nodes}
        self.bias = {z: f"param:{b}" for u in units if u.region is not None for z, b in u.region.row_bias}
        self.trainable = {f"param:{p.name}" for p in graph.parameters if p.trainable}
        self.trained = made_from(graph, self.trainable)
        self.blocked: set[str] = set()
        self.values: dict[str, Along] = {}
        self.kinds: dict[str, Kind] = {}
        self.shares: dict[int, tuple[int, ...] | None] = {}
        self.refused: dict[str, str] = {}
        self.mixed: dict[str, str] = {}  # nodes that stay whole for a parameter's sake

    def run(self) -> SequenceSplit:
        while True:
            self.values, self.kinds, self.refused = {}, {}, {}
            self._carry()
            self._classify()
            if not self.values:
                why = next(iter((*self.refused.values(), *self.mixed.values())), "no operator between two regions keeps its positions apart")
                return SequenceSplit(notes=(f"nothing is split along the sequence: {why}",))
            wrong = self._unread() or self._late_gathers() or self._mixed_params() or self._torn()
            if not wrong:
                break
            self.blocked |= wrong
        self._move()
        shares = {a.extent: self.shares[a.extent] or () for a in self.values.values()}
        params = tuple(p.removeprefix("param:") for p in sorted(self._users()[0]) if p in self.trainable)
        return SequenceSplit(self.values, self.kinds, shares, params, self.trained, tuple(self._notes()))

    # ---- states ------------------------------------------------------------------------------------------------
    def _carry(self) -> None:
        known: dict[str, Along | None] = {}
        for u in self.units:
            if u.region is not None:
                found = {z: a for z in u.region.rows if (a := self._seed(u, z)) is not None}
                self.values |= found
                known |= found
                continue
            for n in u.nodes:
                state = self._state(n, known)
                if state is not None:
                    known[n.name] = self.values[n.name] = state
                elif n is u.nodes[0]:
                    break  # what is picked from a whole result is whole

    def _seed(self, u: Unit, z: str) -> Along | None:
        assert u.region is not None
        if u.region.losses or "/" in z or z in self.blocked:
            return None
        shape, batch = self.shapes[z], self.graph.batch_size
        if len(shape) >= 3:
            dim = 1 if shape[0] == batch else 0 if shape[1] == batch else -1
            found = Along(Split(dim), shape[dim]) if dim >= 0 else None
        else:
            flat = len(shape) == 2 and shape[0] > batch and shape[0] % batch == 0
            found = Along(Split(0, batch), shape[0] // batch) if flat else None
        if found is None:
            self.refused.setdefault("no sequence", f"{z}: its shape {list(shape)} has no dimension beside samples and features")
            return None
        if found.extent not in self.shares:
            whole = found.extent >= self.parts
            self.shares[found.extent] = choose_shares(found.extent, (), self.parts, self.options) if whole else None
        if self.shares[found.extent] is None:
            self.refused.setdefault("too short", f"{z}: {found.extent} positions are too few for {self.parts} ranks")
            return None
        return found

    def _state(self, n: OpNode, known: Mapping[str, Along | None]) -> Along | None:
        if n.name in self.blocked or n.name in self.graph.outputs or "/" in n.name or not n.outputs:
            return None
        try:
            found = carried(n, known, self.shapes)
            if found is not None and n.random and short_name(n.target) not in DROPOUTS:
                raise Refused(f"{n.name}: {n.target} draws random numbers for the whole value")
            if found is not None:
                self._require_shares(n, found)
        except Refused as why:
            self.refused[n.name] = str(why)
            return None
        return found

    def _require_shares(self, n: OpNode, found: Along) -> None:
        size, total = self.shapes[n.name][found.split.dim], sum(self.shares[found.extent] or ()) or self.parts
        if found.split.groups or found.split.mixed or size % found.split.blocks or size // found.split.blocks % total:
            raise Refused(f"{n.name}: dimension {found.split.dim} of size {size} does not divide as {found.extent} positions do")

    def _classify(self) -> None:
        for u in reversed(self.units):
            if u.region is not None:
                continue
            first = u.nodes[0]
            kind: Kind = "whole"
            if first.name in self.values:
                kind = "split"
            elif any(v in self.values for n in u.nodes for v in n.inputs):
                kind = "whole"
            elif not any(n.name in self.trained for n in u.nodes):
                kind = "any"
            elif first.name not in self.blocked and self._is_beside(u):
                kind = "beside"
            self.kinds |= {n.name: kind for n in u.nodes}

    def _is_beside(self, u: Unit) -> bool:
        """Made of parameters and of what has no gradient, and read by split units alone: readers come later and have their kinds."""
        mine = {n.name for n in u.nodes}
        made = all(v in mine or v not in self.trained or self._light(v) for n in u.nodes for v in n.inputs if v in self.node)
        readers = [r for n in u.nodes for r in self.readers.get(n.name, ()) if r not in mine]
        return made and bool(readers) and not mine & set(self.graph.outputs) and all(self.kinds.get(r) in ("split", "beside") for r in readers)

    def _light(self, value: str) -> bool:
        """Another such value: checked when its own turn comes."""
        n = self.node[value]
        return value not in self.region_of and value not in self.blocked and value not in self.values and all(
            v not in self.node or v not in self.trained or self._light(v) for v in n.inputs
        )  # fmt: skip

    # ---- what must not be --------------------------------------------------------------------------------------
    def _unread(self) -> set[str]:
        """Sums that no split operator reads: an all-reduce is as good."""
        return {z for z in self.values if z in self.region_of and not any(self.kinds.get(r) == "split" for r in self.readers.get(z, ()))}

    def _late_gathers(self) -> set[str]:
        """What only whole operators read, where gathering what it is made of is no dearer: heads that make logits, and views."""
        found = set()
        for name in self.values:
            readers = self.readers.get(name, [])
            if name in self.region_of or any(self.kinds.get(r) != "whole" for r in readers):
                continue
            n = self.node[name]
            before = sum(self._count(v) for v in dict.fromkeys(n.inputs) if v in self.values)
            if not readers or before < self._count(name) or (short_name(n.target) in VIEWS and before == self._count(name)):
                found.add(name)
        return found

    def _count(self, value: str) -> int:
        total = 1
        for d in self.shapes[value]:
            total *= d
        return total

    def _users(self) -> tuple[dict[str, set[str]], set[str]]:
        """(parameter -> the split or beside nodes that use it, parameters that whole operators use)."""
        partly: dict[str, set[str]] = {}
        whole: set[str] = set()
        for n in self.graph.nodes:
            used = {v for v in n.inputs if v.startswith("param:")}
            used |= {self.bias[v] for v in n.inputs if v in self.bias}
            if n.name in self.region_of:
                used = {v for v in used if v.removeprefix("param:") not in self.sharded}
                used -= {b for z, b in self.bias.items() if z == n.name}
            for v in used:
                if self.kinds.get(n.name) in ("split", "beside"):
                    partly.setdefault(v, set()).add(n.name)
                else:
                    whole.add(v)
        return partly, whole

    def _mixed_params(self) -> set[str]:
        partly, whole = self._users()
        found = set[str]()
        for p, users in partly.items():
            if p in whole or p.removeprefix("param:") in self.sharded:
                found |= users
                self.mixed |= {u: f"{u}: its {p.removeprefix('param:')} is used elsewhere by operators that stay whole" for u in users}
        return found

    def _torn(self) -> set[str]:
        """Nodes beside split ones whose readers do not lie in one run of units."""
        place = {n.name: i for i, u in enumerate(self.units) for n in u.nodes}
        borders = [i for i, u in enumerate(self.units) if u.region is not None or self.kinds[u.nodes[0].name] == "whole"]
        found = set()
        for u in self.units:
            if u.region is None and self.kinds[u.nodes[0].name] == "beside":
                at = [place[r] for n in u.nodes for r in self._final_readers(n.name)]
                extents = {self.values[r].extent for n in u.nodes for r in self._final_readers(n.name)}
                if len(extents) > 1 or any(min(at) < b < max(at) for b in borders):
                    found.add(u.nodes[0].name)
        return found

    def _final_readers(self, name: str) -> list[str]:
        found = []
        for r in self.readers.get(name, ()):
            found += [r] if self.kinds[r] == "split" else self._final_readers(r)
        return found

    def _move(self) -> None:
        """Units beside split ones go right before the first of them."""
        moving = [u for u in self.units if u.region is None and self.kinds[u.nodes[0].name] == "beside"]
        for u in reversed(moving):
            self.units.remove(u)
            mine = {r for n in u.nodes for r in self.readers.get(n.name, ())} - {n.name for n in u.nodes}
            at = min(i for i, x in enumerate(self.units) if any(n.name in mine for n in x.nodes))
            self.units.insert(at, u)

    def _notes(self) -> list[str]:
        """What was gathered, by operator: the first place and how many more."""
        by_kind: dict[str, list[str]] = {}
        for name, why in (*self.mixed.items(), *self.refused.items()):
            target = self.node[name].target if name in self.node else name
            by_kind.setdefault(target, []).append(why)
        notes = []
        for target, whys in by_kind.items():
            more = f"; {len(whys) - 1} more like it" if len(whys) > 1 else ""
            what = "its operands are gathered" if target.startswith("aten") else "kept whole"
            notes.append(f"not split along the sequence, {what}: {whys[0]}{more}")
        return notes
