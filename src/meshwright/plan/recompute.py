"""Recomputation in a training layout: what of a segment may be computed again, and the layout with a choice of it written in.

A region is the part of one repeated layer that lies in one segment. What backward asks for of it is kept, or made again from what is kept by running
chosen calls of the region once more. Values that cross a segment's border are always kept, and so is what another region reads: hence a region
needs nothing of another one, and no collective runs again (all of them lie between segments). Without repeated layers the regions are the
model's top-level modules.
Under sequence parallelism a value that a segment gathers is kept as each rank's part of it and gathered again before backward, whether autograd asks
for it or a call that runs again: that gather is a step of the program anyway.
Cite: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023.
Deviation: full recomputation of a layer split over tensor-parallel ranks keeps the values between its segments, where the paper gathers them again.
Cost: O(nodes) per layout.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from ..graph.graph import OpGraph, OpNode, Work
from ..graph.liveness import kept_storages, replay_workspace
from ..graph.storages import CallStorages, repeated_modules, works_in_place
from .plan import Recompute, Segment, TrainingLayout
from .shards import sequence_values
from .vocabulary import base_node, expand_losses, sums_of

__all__ = ["LayoutRegions", "Region", "Remade", "layer_of", "made_again_bytes", "saved_storages", "with_forward_again"]

# They change buffers that they do not name; rounds of ring attention hand more back than gradients.
_NEVER = ("batch_norm", "instance_norm", "opaque", "region", "ring_block", "ring_end")


def saved_storages(
    graph: OpGraph, nodes: Sequence[OpNode], border: Container[int], counted: set[int], largest: int = 1, total: int = 1,
    apart: Container[str] | None = None,
) -> dict[int, int]:  # fmt: skip
    """Storage -> bytes on one rank of what autograd keeps for these nodes, beyond border values and what was `counted` before.

    What the nodes make themselves (or those named in `apart`) is shared, `largest` of `total` parts at most; what they got is whole. Adds to
    `counted`.
    """
    names = {n.name for n in nodes} if apart is None else apart
    found: dict[int, int] = {}
    for n in nodes:
        for s in n.saved:
            if s not in counted and s not in border:
                counted.add(s)
                found[s] = _share(graph, s, names, largest, total)
    return found


def made_again_bytes(graph: OpGraph, layout: TrainingLayout) -> dict[str, int]:
    """Per segment the bytes on one rank of what its calls make again that backward asks for: where backward is split, `I` leaves it to `W`."""
    expanded, along = expand_losses(graph, layout.losses), sequence_values(layout)
    node = {n.name: n for n in expanded.nodes}
    owned: dict[str, list[int]] = {}
    for i, x in enumerate(expanded.storages):
        owned.setdefault(x.owner, []).append(i)
    found = {}
    for s in layout.segments:
        made = {s.nodes[start + k] for r in s.recompute for start in r.starts for k in {*r.needed} & {*r.again}}
        apart = _apart(s, node, along)
        found[s.key] = sum(_share(expanded, i, apart, *_parts(s, layout.tensor)) for n in made for i in owned.get(n, ()))
    return found


def _parts(s: Segment, tensor: int) -> tuple[int, int]:
    """(largest share, all shares) of a rank in the segment."""
    shares = s.shares or ((1,) * tensor if s.split else (1,))
    return max(shares), sum(shares)


def _apart(s: Segment, node: Mapping[str, OpNode], along: Container[str]) -> frozenset[str]:
    """Calls of which a rank has its share: all of them; of a part of the sequence, those that follow from values that are split along it."""
    if not s.sequence:
        return frozenset(s.nodes)
    known = {v for v in s.reads if v in along}
    for name in s.nodes:
        if any(v in known for v in node[name].inputs):
            known.add(name)
    return frozenset(known & {*s.nodes})


def _share(graph: OpGraph, storage: int, names: Container[str], largest: int, total: int) -> int:
    entry = graph.storages[storage]
    return entry.size_bytes * largest // total if entry.owner in names else entry.size_bytes


@dataclass(frozen=True)
class Remade:
    """One call of a region: the storages it reads and makes; `may`: it may run again."""

    node: OpNode
    reads: frozenset[int]
    makes: frozenset[int]
    may: bool


@dataclass(frozen=True)
class Region:
    """Part of a layer in a segment. `needed`: storages made in it that some backward asks for. `size`: bytes on one rank of every storage
    that keeping would add (0: kept anyway, or no activation)."""

    segment: str
    layer: str
    start: int
    calls: tuple[Remade, ...]
    needed: frozenset[int]
    size: Mapping[int, int]


class LayoutRegions:
    """Everything that may be recomputed in `layout`, which recomputes nothing yet; `apply` writes a choice into it.

    `graph`: captured, at the layout's micro-batch size.
    """

    def __init__(self, graph: OpGraph, layout: TrainingLayout) -> None:
        self.captured, self.layout = graph, layout
        self.graph = expand_losses(graph, layout.losses)
        self.node = {n.name: n for n in self.graph.nodes}
        calls = CallStorages(self.graph)
        self.storage, self.makes, self.reads = calls.of, calls.makes, calls.reads
        self.kept_by = kept_storages(graph)
        self.makers: dict[int, list[str]] = {}
        for n in self.graph.nodes:
            for x in self.makes(n):
                self.makers.setdefault(x, []).append(n.name)
        # Another micro-batch's forward pass may have changed them by the time of this one's backward pass.
        self.changed = frozenset(x for x in self.makers if self._constant(x))
        self.layer_of = layer_of(self.graph)
        self.along = sequence_values(layout)
        self.value = {v.name: v for v in layout.values}
        self.by_key = {s.key: s for s in layout.segments}
        self.apart = {s.key: _apart(s, self.node, self.along) for s in layout.segments}
        self.border: dict[str, set[int]] = {}
        self.saved: dict[str, dict[int, int]] = {}
        self.held: dict[str, set[int]] = {}  # border storages that live to the segment's backward anyway
        for stage in layout.stages:
            counted: set[int] = set()
            held: set[int] = set()
            for key in stage.segments:
                s = self.segment(key)
                self.border[key] = {self.storage[v] for v in (*s.reads, *s.writes) if v in self.storage}
                nodes = [self.node[n] for n in s.nodes]
                self.saved[key] = saved_storages(self.graph, nodes, self.border[key], counted, *_parts(s, layout.tensor), self.apart[key])
                held |= {x for n in s.nodes for x in self.kept_by.get(n, ())}
                self.held[key] = held & self.border[key]
        self.regions = tuple(r for s in layout.segments for r in self._regions_of(s))

    def segment(self, key: str) -> Segment:
        return self.by_key[key]

    def work(self, node: OpNode, segment: str) -> Work:
        """Forward work of one call on the rank with the largest share of the segment."""
        largest, total = _parts(self.segment(segment), self.layout.tensor) if node.name in self.apart[segment] else (1, 1)
        return node.forward.share(largest, total)

    # ---- regions -----------------------------------------------------------------------------------------------
    def _regions_of(self, s: Segment) -> list[Region]:
        places: dict[str, list[int]] = {}
        for i, name in enumerate(s.nodes):
            layer = self.layer_of.get(base_node(name))
            if layer is not None:
                places.setdefault(layer, []).append(i)
        return [r for layer, at in places.items() if (r := self._region(s, layer, at)) is not None]

    def _region(self, s: Segment, layer: str, at: Sequence[int]) -> Region | None:
        names = {s.nodes[i] for i in at}
        border = self.border[s.key]
        asked: set[int] = set()  # by backward, anywhere in the segment
        fixed = set(border)  # storages that must not be made again
        for name in s.nodes:
            kept = self.kept_by.get(name, set())
            asked |= kept
            if name not in names:
                # Whose backward is in another place would need this region there; so would another region's calls, if they run again.
                elsewhere = base_node(name) in self.layer_of
                fixed |= {x for x in self.reads(self.node[name]) if elsewhere or x in kept}
        calls = []
        for i in at:
            n = self.node[s.nodes[i]]
            makes, reads = self.makes(n), self.reads(n)
            if not makes:
                continue
            several = any(len(self.makers.get(x, ())) > 1 for x in makes | reads)
            changed = (makes | reads) & self.changed or any(self.graph.storages[x].owner in n.inputs for x in self.changed)
            may = not (several or changed or makes & fixed or works_in_place(n) or any(x in n.target for x in _NEVER))
            calls.append(Remade(n, reads - makes, makes, may))
        made = {x for c in calls if c.may for x in c.makes}
        if not made & asked:
            return None
        size = {x: _share(self.graph, x, self.apart[s.key], *_parts(s, self.layout.tensor)) for c in calls if c.may for x in c.makes | c.reads}
        for x in size:
            if x not in made and (x in self.held[s.key] if x in border else x in asked or self._constant(x)):
                size[x] = 0
        return Region(s.key, layer, at[0], tuple(calls), frozenset(made & asked), size)

    def _constant(self, storage: int) -> bool:
        return self.graph.storages[storage].owner.startswith(("param:", "buffer:"))

    # ---- a choice ----------------------------------------------------------------------------------------------
    def apply(self, again: Mapping[tuple[str, str], Collection[str]]) -> TrainingLayout:
        """The layout in which these calls, by (segment, layer), run again."""
        chosen: dict[str, list[tuple[Region, list[str]]]] = {}
        for r in self.regions:
            names = again.get((r.segment, r.layer), ())
            if names:
                chosen.setdefault(r.segment, []).append((r, self._with_views(r, names)))
        segments = tuple(self._applied(s, chosen.get(s.key, [])) if s.key in chosen else s for s in self.layout.segments)
        made = msgspec.structs.replace(self.layout, segments=segments)
        if not made.split_backward:
            return made
        left = made_again_bytes(self.captured, made)
        return msgspec.structs.replace(
            made, segments=tuple(msgspec.structs.replace(s, left_bytes=s.left_bytes + left[s.key]) for s in made.segments)
        )

    def _with_views(self, r: Region, names: Collection[str]) -> list[str]:
        """The calls and the views through which they read what is made again, or what crosses the border, in execution order."""
        s = self.segment(r.segment)
        inside, border = set(s.nodes), self.border[r.segment]
        made = {x for n in names for x in self.makes(self.node[n])}
        found, stack = set(names), list(names)
        while stack:
            for v in self.node[stack.pop()].inputs:
                if v in found or v not in inside or v in s.writes:
                    continue
                if not self.makes(self.node[v]) and self.storage[v] in made | border:
                    found.add(v)
                    stack.append(v)
        return [n for n in s.nodes if n in found]

    def _applied(self, s: Segment, chosen: Sequence[tuple[Region, list[str]]]) -> Segment:
        border, parts = self.border[s.key], _parts(s, self.layout.tensor)
        made = {x for _, names in chosen for n in names for x in self.makes(self.node[n])}
        read = {x for _, names in chosen for n in names for x in self.reads(self.node[n])}
        before = self.saved[s.key]
        extra = {x for x in read - made - border if x not in before and not self._constant(x) and not self._counted_elsewhere(s, x)}
        saved = s.saved_bytes - sum(size for x, size in before.items() if x in made)
        saved += sum(_share(self.graph, x, self.apart[s.key], *parts) for x in extra)
        largest, total = parts
        workspace = replay_workspace(self.captured, self._captured_names(s), [names for _, names in chosen])
        parted = self.along & {*s.gathers, *s.sum_writes}  # into and out of all parts' form, as `build` counts it
        copied = max((self.value[v].size_bytes for v in parted), default=0)
        return msgspec.structs.replace(
            s, saved_bytes=saved, forward_workspace_bytes=max(workspace[0] * largest // total, copied),
            backward_workspace_bytes=max(workspace[1] * largest // total, copied),
            recompute=self._records(s, chosen), again=sum((self.work(self.node[n], s.key) for _, names in chosen for n in names), Work()),
        )  # fmt: skip

    def _counted_elsewhere(self, s: Segment, storage: int) -> bool:
        return any(storage in self.saved[key] for key in self.layout.stages[s.stage].segments if key != s.key)

    def _captured_names(self, s: Segment) -> list[str]:
        in_parts = {x.node for x in self.layout.losses}
        own = [n for n in s.nodes if "/" not in n and n not in in_parts]
        return own + [base_node(n) for n in s.nodes if n in {sums_of(x) for x in in_parts}]

    def _records(self, s: Segment, chosen: Sequence[tuple[Region, list[str]]]) -> tuple[Recompute, ...]:
        """One record per pattern of positions, whatever the number of layers that have it."""
        position = {n: i for i, n in enumerate(s.nodes)}
        starts: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]], list[int]] = {}
        for r, names in chosen:
            again, made = set(names), {x for n in names for x in self.makes(self.node[n])}
            asked = {x for n in s.nodes for x in self.kept_by.get(n, ())} - self.border[s.key]
            needed = [c.node.name for c in r.calls if c.makes & asked]
            kept = {n for n in needed if n not in again}
            reads: list[str] = []
            for n in names:
                for v in self.node[n].inputs:
                    if v in s.reads or v in s.writes:
                        reads.append(v)
                    elif v in position and v not in again and self.storage.get(v, -1) not in made:
                        kept.add(v)
            pattern = (
                tuple(position[n] - r.start for n in names), tuple(position[n] - r.start for n in needed),
                tuple(sorted(position[n] - r.start for n in kept)), tuple(dict.fromkeys(reads)),
            )  # fmt: skip
            starts.setdefault(pattern, []).append(r.start)
        return tuple(Recompute(starts=tuple(at), again=a, needed=n, kept=k, reads=v) for (a, n, k, v), at in starts.items())


def layer_of(graph: OpGraph) -> dict[str, str]:
    """Node -> the repeated layer, or the top-level module, in which it ran; nodes outside are left out."""
    repeated = [(name, members) for name, members in repeated_modules(graph).items() if len(members) > 1]
    if repeated:
        return {n.name: f"{name}.{k}" for name, members in repeated for k, nodes in members.items() for n in nodes}
    return {n.name: n.module.partition(".")[0] for n in graph.nodes if n.module and n.module != "loss"}


def with_forward_again(graph: OpGraph, layout: TrainingLayout) -> TrainingLayout:
    """The layout whose repeated layers run forward again before their backward (`forward_again`), as far as their calls give the same twice.

    `graph`: of its micro-batches; segments of `layout` are of one layer or of none.
    """
    node, layer = {n.name: n for n in expand_losses(graph, layout.losses).nodes}, layer_of(graph)
    exchanges = layout.exchanges or ()
    if layout.batch_sums or any(x.again is True or x.copies is not msgspec.UNSET for x in exchanges):
        return layout
    by_key, groups = {s.key: s for s in layout.segments}, list[tuple[str, ...]]()
    for stage in layout.stages:
        for mine, run in groupby(stage.segments, lambda key: layer.get(base_node(by_key[key].nodes[0]), "")):
            keys = tuple(run)
            calls = [node[n] for key in keys for n in by_key[key].nodes]
            if mine and not any(n.mutates_buffers or any(x in n.target for x in _NEVER[:4]) for n in calls):
                groups.append(keys)
    return msgspec.structs.replace(layout, forward_again=tuple(groups)) if groups else layout
