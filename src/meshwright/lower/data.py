"""What one rank holds of weights, gradients and optimizer state, and the collectives over its data replicas, as steps of a training program.

Parameters lie in groups: the buckets of the layout, and one group for each parameter that several stages share. A group is one flat buffer, padded
to whole chunks; its name is what follows `gradients` in the name of its gradient buffer (`@0`, `@1+0.1`, `:tokens.weight`), and each of n
replicas owns an n-th of it (`plan.shards.sharing`); of experts that neighbours divide (`@1%`), n are the replicas with the same. With
`whole_parameters` padding stands between parameters, so that each lies in one part. By `TrainingLayout.zero_level`:

  0  `weights` and `gradients<group>` whole; gradients are all-reduced.
  1  `weights<group>` and `gradients<group>` whole, state of the own part; gradients are reduce-scattered, the optimizer updates the own part, and
     weights are all-gathered at the end of the step.
  2  as 1, but what stays of gradients is `gradshard<group>`, the own part. Whole gradients `gradfull:<micro-batch><group>` exist from the first
     backward that adds to them to their reduce-scatter, which follows every micro-batch. Where gradients are folds, replicas take micro-batches in
     turn, so that each sum over replicas is a node of the tree; `folds<group>` holds the own part of nodes that wait for their other half.
  3  as 2, and what stays of weights is `shard<group>`. Whole weights `gathered:<number><group>` exist from their all-gather to the last of the
     compute steps in a row that use them; those of a segment that runs forward again from then to its backward.

Copies of a stage (Chimera) each hold what their data replicas divide: at level 0 one sum goes over replicas and copies, at the others copies sum
what their replicas were given of it, at levels 2 and 3 once, after backward. Copies finish stages in different orders, and call in one that all
of them know: by the step, counted on each, after which the last of them has the group's gradients.

With `overlap` a group's sum starts when the last backward that adds to it is done; at levels 2 and 3 the next group is computed meanwhile, and at
level 3 groups after it are gathered, as many as fit into a few times the largest (`MAX_WHOLE`): that is on its way while the one before
it is computed, however many small ones lie between. Without `overlap` sums come after backward (levels 0, 1) or stop it (2, 3).

Sources: Rajbhandari et al., "ZeRO" (SC '20) for the levels; Zhao et al., "PyTorch FSDP" (VLDB 2023) for flat padded groups and bounded prefetch.
Deviation: at level 2 every micro-batch's gradients are reduce-scattered, so the memory saved is there with gradient accumulation too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

from ..errors import Unsupported
from ..plan.experts import of_experts
from ..plan.shards import in_parts, sharing
from ..plan.sizes import master_ratio, message_ratio, padded_size, state_bytes, summed_over
from ..program.builder import LaneBuilder, StepRef
from .compressed import CompressedSums
from .groups import ADDING, Group, Residency, last_steps, must_be_summed, must_end
from .norm import lower_norm
from .replicas import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, call_replicas, replica_chunks
from .sequence import per_chunk
from .step import Position, RankLanes, StepLowering

__all__ = ["DataParallel"]

# Temporaries of Adam in units of the parameter that it updates: the root of the second moment, and that over its correction.
UPDATE_BUFFERS = 2

Range = tuple[int, int, int]


@dataclass
class DataParallel:
    """Of one rank. `enter` and `leave` surround each of its compute steps, in order; `finish` makes the end of the step."""

    low: StepLowering
    r: RankLanes
    order: Sequence[Position]
    groups: dict[str, Group] = field(default_factory=dict)
    refs: list[StepRef] = field(default_factory=list)  # of the compute steps so far
    closed: list[StepRef] = field(default_factory=list)  # sums whose whole gradients are dead after them
    summed: list[Group] = field(default_factory=list)  # of these groups
    common: list[Group] = field(default_factory=list)  # groups whose sums over copies are still to come, in the order of all copies
    final: dict[str, StepRef] = field(default_factory=dict)  # by group, the step after which that sum may come
    full: dict[tuple[str, int], int] = field(default_factory=dict)  # (group, micro-batch) -> its whole gradients that are being made
    residencies: list[Residency] = field(default_factory=list)
    current: list[Residency] = field(default_factory=list)
    next: int = 0  # number of the residency that starts next
    gather_lane: LaneBuilder | None = None
    compressed: CompressedSums = field(init=False)

    def __post_init__(self) -> None:
        low, r = self.low, self.r
        of, self.level = {buffer: [r.sizes[p] for p in params] for buffer, params in r.gradients.items()}, low.layout.zero_level
        sizes = {buffer: padded_size(low.layout, buffer, x) if low.layout.whole_parameters else sum(x) for buffer, x in of.items()}
        self.by_parts = bool(self.level and low.layout.step_end.folded)  # tensor ranks add up parts: a tree over replicas comes first
        for buffer, params in r.gradients.items():
            name = buffer.removeprefix("gradients")
            if self.level and not name:
                raise Unsupported(f"parameter {params[0]!r} is in no bucket", hint="the layout's buckets must hold every parameter of one stage")
            using = frozenset(k for k in r.stage.segments if any(p in low.segment[k].params for p in params))
            alone = ":" in name or of_experts(name) or not low.layout.buckets
            planned = sizes[buffer] if alone else low.largest_bucket(r)
            self.groups[name] = Group(name, params, sizes[buffer], planned, using, ratio=message_ratio(low.layout))
        self.used: dict[str, list[Group]] = {}  # by segment
        for g in self.groups.values():
            for k in g.segments:
                self.used.setdefault(k, []).append(g)
        self.closing: dict[int, list[Group]] = {}
        p, d, _ = low.layout.coordinates(r.number)
        for g in self.groups.values():
            key = p, low.layout.microbatches_of(d), g.segments, self.level > 1  # replicas are mostly alike
            if key not in low.last_of:
                low.last_of[key] = last_steps(g, low.positions(p, d), each=self.level > 1)
            for i in low.last_of[key]:
                self.closing.setdefault(i, []).append(g)
        mates = [low.positions(q, d) for q in low.layout.mates(p)]
        if len(mates) > 1 and self.level < 2 and low.layout.overlap:
            self.common = sorted(self.groups.values(), key=lambda g: max((i for order in mates for i in last_steps(g, order)), default=-1))
        self.compressed = CompressedSums.of(low, r, self._data(), self._label("dp"))
        if self.level == 3:
            self.gather_lane = low.b.lane(r.number)
            self._residencies()

    def _residencies(self) -> None:
        open_of: dict[str, Residency] = {}
        backward = {(at.segment, at.microbatch): i for i, at in enumerate(self.order) if at.phase in ("B", "I")}
        for i, at in enumerate(self.order):
            end = backward[at.segment, at.microbatch] if at.phase == "R" else i  # what runs forward again soon runs backward
            for g in self.used.get(at.segment, ()):
                found = open_of.get(g.name)
                if found is not None and found.end >= i - 1:
                    found.end = max(found.end, end)
                else:
                    open_of[g.name] = Residency(g, i, end)
                    self.residencies.append(open_of[g.name])

    # ---- buffers -----------------------------------------------------------------------------------------------
    def buffers(self) -> None:
        r, b = self.r, self.low.b
        for g in self.groups.values():
            self._cut(g)
        whole = sum(r.sizes[p] for p in {*r.stage.params} - {p for g in self.groups.values() if self.level for p in g.params})
        r.buffers["weights"] = b.buffer(r.number, chunks=1, chunk_bytes=whole, role="weight", persistent=True, name="weights")
        for g in self.groups.values():
            gradients = f"gradients{g.name}" if self.level < 2 else f"gradshard{g.name}"
            chunks = g.chunks if self.level < 2 else g.part[1]
            r.buffers[gradients] = b.buffer(r.number, chunks=chunks, chunk_bytes=g.gradient_bytes, role="gradient", persistent=True, name=gradients)
            if waiting := self._folds():
                fold = (g.part[1], g.gradient_bytes) if self.level > 1 else (1, g.size_bytes * g.ratio)
                name = f"folds{g.name}"
                r.buffers[name] = b.buffer(
                    r.number, chunks=waiting * fold[0], chunk_bytes=fold[1], role="scratch", persistent=True, name=name,
                )  # fmt: skip
            if self.level:
                weights, chunks = (f"weights{g.name}", g.chunks) if self.level < 3 else (f"shard{g.name}", g.part[1])
                r.buffers[weights] = b.buffer(r.number, chunks=chunks, chunk_bytes=g.chunk_bytes, role="weight", persistent=True, name=weights)
            if self.level == 1 and (self._tied(g) or self._copied() or (self.by_parts and summed_over(g.name))):  # what others add up later
                first, count = g.part
                name = f"gradshard{g.name}"
                r.buffers[name] = b.buffer(
                    r.number, chunks=count, chunk_bytes=g.gradient_bytes, role="gradient", persistent=True, name=name,
                    alias_of=r.buffers[gradients], alias_offset_bytes=first * g.gradient_bytes,
                )  # fmt: skip
        self.compressed.buffers()
        trained = sum(g.part[1] * g.chunk_bytes if self.level else g.size_bytes for g in self.groups.values())
        state = state_bytes(self.low.layout, trained, trained if self.level > 1 else sum(g.size_bytes for g in self.groups.values()))
        r.buffers["state"] = b.buffer(r.number, chunks=1, chunk_bytes=state, role="state", persistent=True, name="state")

    def _folds(self) -> int:
        """Sums of micro-batches that wait for their other half, at most, where gradients are folds over micro-batches."""
        lay = self.low.layout
        return (lay.microbatches_of(self._replica()) - 1).bit_length() if lay.step_end.folded else 0

    def _cut(self, g: Group) -> None:
        """Chunks that every collective of the group can use, and that the replicas' parts are whole numbers of."""
        plan, (me, n), size = self.low.plan_all_reduce, sharing(self.low.layout, self._replica(), g.name), g.message_bytes
        tied, holders, replicas = self._tied(g), self._holders(g), (self._replica(),) if self.low.folded else range(self.low.layout.data)
        groups = [x for p, _, _ in holders for d in replicas if (x := self._tensor(g, p, d)) is not None]
        cut = n if self.by_parts else 1
        counts = [1, *(cut * plan("tensor", x, -(-size // cut)).chunks for x in dict.fromkeys(groups))]
        for data in dict.fromkeys(self._replicas(p, d, t, g.name) for p, d, t in holders):  # who shares a parameter cuts it alike
            if self.level and len(data) > 1:
                counts += [n, replica_chunks(self.low, "weights", data, g.planned_bytes, ALL_GATHER)]
                counts += [replica_chunks(self.low, "gradient", data, size, REDUCE_SCATTER)] if g.name not in self.compressed.groups else []
            elif len(data) > 1 and g.name not in self.compressed.groups:
                counts.append(replica_chunks(self.low, "gradient", data, size))
        for copies in dict.fromkeys(self._copies(*x) for x in holders):
            if len(copies) > 1:
                counts.append(n * plan("gradient", copies, -(-size // n)).chunks)
        if tied is not None:
            counts.append(n * plan("tied", tied, -(-size // n)).chunks if self.level else plan("tied", tied, size).chunks)
        # one cut for all: a range of chunks of one collective must be a range of chunks of every other
        g.chunks = lcm(*counts)
        g.chunk_bytes = per_chunk(g.size_bytes, g.chunks, self.low.element_bytes)
        own = g.chunks // n if self.level else g.chunks
        g.part = (me * own, own) if self.level else (0, own)

    def _replica(self) -> int:
        return self.low.layout.coordinates(self.r.number)[1]

    def _data(self, group: str = "") -> tuple[int, ...]:
        return self._replicas(*self.low.layout.coordinates(self.r.number), group)

    def _replicas(self, pipeline: int, data: int, tensor: int, group: str) -> tuple[int, ...]:
        """Who sums a group's gradients: data replicas (of experts, those with the same) in order of parts; where none is divided, of all copies."""
        lay = self.low.layout
        replicas = range(data % lay.expert, lay.data, lay.expert) if of_experts(group) else in_parts(lay) if self.level and group else range(lay.data)
        return tuple(lay.rank(p, i, tensor) for p in ((pipeline,) if self.level else lay.mates(pipeline)) for i in replicas)

    def _copies(self, pipeline: int, data: int, tensor: int) -> tuple[int, ...]:
        """Who adds up what replicas were given: the ranks with the same part of every copy."""
        lay = self.low.layout
        return tuple(lay.rank(q, data, tensor) for q in (lay.mates(pipeline) if self.level else (pipeline,)))

    def _copied(self) -> bool:
        return len(self._copies(*self.low.layout.coordinates(self.r.number))) > 1

    def _holders(self, g: Group) -> list[tuple[int, int, int]]:
        """Coordinates of this rank, of those with other stages that share the group's parameter, of their copies, of tensor ranks that sum it:
        replicas of those are other devices, for which another collective may be planned."""
        lay, summed = self.low.layout, [int(i) for i in summed_over(g.name)]
        places = [lay.coordinates(r) for r in self._tied(g) or (self.r.number,)]
        return [(q, d, x) for p, d, t in places for q in lay.mates(p) for x in summed or (t,)]

    def _tied(self, g: Group) -> tuple[int, ...] | None:
        """Ranks of the stages that share the group's parameter."""
        lay = self.low.layout
        p, d, t = lay.coordinates(self.r.number)
        _, shared, param = g.name.partition(":")
        if not shared:
            return None
        member = lay.mates(p).index(p)  # sums over copies come first: one copy of each family adds up
        return tuple(lay.rank(family[member], d, t) for family in lay.families() if param in lay.held(family[0]).params)

    def _tensor(self, g: Group, pipeline: int, data: int) -> tuple[int, ...] | None:
        """Ranks over which the group's gradients are partial sums."""
        indices = summed_over(g.name)
        return tuple(self.low.layout.rank(pipeline, data, int(i)) for i in indices) if indices else None

    # ---- around the compute steps ------------------------------------------------------------------------------
    def enter(self) -> tuple[list[Range], list[Range], list[StepRef]]:
        """Of the next compute step: ranges of weights that it reads, of gradients that it writes, and what it waits for."""
        i = len(self.refs)
        at, r = self.order[i], self.r
        reads, writes, waits = [self.low.whole(r, "weights")], list[Range](), list[StepRef]()
        used = self.used.get(at.segment, [])
        if self.level in (1, 2):
            reads += [self.low.whole(r, f"weights{g.name}") for g in used]
        if self.level == 3:
            reads += [(x.buffer, 0, x.group.chunks) for x in self.current if at.segment in x.group.segments]
            while self.next < len(self.residencies) and self.residencies[self.next].start == i:
                x = self.residencies[self.next]
                waits.append(self._gather(self.next, x))
                reads.append((x.buffer, 0, x.group.chunks))
                self.current.append(x)
                self.next += 1
        if at.phase in ADDING:
            for g in used:
                waits += self._open(g, at.microbatch) if self.level > 1 else []
                writes.append(self.low.whole(r, f"gradients{g.name}") if self.level < 2 else (self.full[g.name, at.microbatch], 0, g.chunks))
        if self.level > 1 and not self.low.layout.overlap and self.closed:
            waits.append(self.closed[-1])
        return reads, writes, waits

    def leave(self, ref: StepRef) -> None:
        """The step entered last is `ref`."""
        i, b = len(self.refs), self.low.b
        self.refs.append(ref)
        for x in self.current:
            if x.end == i:
                b.dies_after(x.buffer, ref)
        self.current = [x for x in self.current if x.end > i]
        if self.level > 1 or self.low.layout.overlap:
            for g in self.closing.get(i, ()):
                self._sum(g, ref, self.order[i].microbatch)

    def _gather(self, k: int, x: Residency) -> StepRef:
        """Weights of a group from all replicas' parts."""
        r, g, lane, b = self.r, x.group, self.gather_lane, self.low.b
        assert lane is not None
        x.buffer = b.buffer(r.number, chunks=g.chunks, chunk_bytes=g.chunk_bytes, role="scratch", name=f"gathered:{k}{g.name}")
        free = must_end(k, self.residencies, self.groups.values()) if self.low.layout.overlap else x.start - 1
        lane.copy((r.buffers[f"shard{g.name}"], 0), (x.buffer, g.part[0]), g.part[1], after=[self.refs[free]] if free >= 0 else [])
        if len(replicas := self._data(g.name)) == 1:  # experts that nobody else has
            return lane.last
        return call_replicas(self.low, r, lane, "weights", self._label("dpw", g.name), replicas, x.buffer, g.planned_bytes, ALL_GATHER)

    def _open(self, g: Group, microbatch: int) -> list[StepRef]:
        """Make room for a group's whole gradients; gives what must be over before."""
        if (g.name, microbatch) in self.full:
            return []
        name = f"gradfull:{microbatch}{g.name}"
        self.full[g.name, microbatch] = self.low.b.buffer(self.r.number, chunks=g.chunks, chunk_bytes=g.gradient_bytes, role="gradient", name=name)
        overlap, opened = self.low.layout.overlap, [self.groups[x] for x, _ in self.full]
        last = must_be_summed(opened, self.summed, self.groups.values()) if overlap else -1
        return [self.closed[last]] if last >= 0 else []

    def _label(self, kind: str, group: str = "") -> str:
        p, d, t = self.low.layout.coordinates(self.r.number)
        of = f"{kind}:{p if self.level else self.low.layout.mates(p)[0]}.{t}"
        return f"{of}e{d % self.low.layout.expert}" if of_experts(group) else of

    def _sum(self, g: Group, after: StepRef, microbatch: int = -1) -> None:
        """`_reduce`, and the sums over copies whose turn it is."""
        if self.level or not self.common:
            self._reduce(g, after, microbatch)
        if not self.common:
            return
        self.final[g.name] = self.r.sync.last if self.level else after
        # sums over copies run in one order on all of them, else two ranks would wait for each other's calls
        while self.common and self.common[0].name in self.final:
            g = self.common.pop(0)
            (self._add_copies if self.level else self._reduce)(g, self.final[g.name])

    def _add_copies(self, g: Group, after: StepRef) -> None:
        """Sum over the copies what this rank was given of the group's gradients."""
        low, r = self.low, self.r
        p, d, t = low.layout.coordinates(r.number)
        copies = self._copies(p, d, t)
        part, size = r.buffers[f"gradshard{g.name}"], -(-g.message_bytes // sharing(low.layout, d, g.name)[1])
        r.sync.call(low.call("gradient", f"copies:{low.layout.mates(p)[0]}.{d}.{t}", copies, r.number, part, size), after=[after])

    def _reduce(self, g: Group, after: StepRef, microbatch: int = -1) -> None:
        """Sum the group's gradients (whole ones of one micro-batch, at levels 2 and 3) over the replicas, after step `after`."""
        low, r = self.low, self.r
        buffer = self.full.pop((g.name, microbatch)) if self.level > 1 else r.buffers[f"gradients{g.name}"]
        folded = low.layout.step_end.folded  # then a tree over micro-batches first: its leaves are alike at any number of replicas
        if not folded:
            self._over_tensor(g, buffer, after)
        self._over_replicas(g, buffer, after)
        if folded and self.level < 2:
            self._over_tensor(g, buffer, after)
        if self.level > 1:
            # Where no sum comes between (experts that nobody else has, say), the copy itself waits for the gradient.
            alone = (folded or not summed_over(g.name)) and g.name not in self.compressed.groups and len(self._data(g.name)) == 1
            kept = self._keep(g, (buffer, g.part[0]), microbatch, [after] if alone else [])
            low.b.dies_after(buffer, kept)
            self.closed.append(kept)
            self.summed.append(g)
            if folded and microbatch == low.layout.microbatches - 1:
                self._over_tensor(g, buffer, kept)

    def _keep(self, g: Group, summed: tuple[int, int], microbatch: int, waits: list[StepRef]) -> StepRef:
        """Add what the rank was given of a micro-batch's gradients to what it keeps of them.

        Where they are a fold, this is what `run.train.folds` does with whole gradients, and says there.
        """
        sync, buffers, count, level = self.r.sync, self.r.buffers, g.part[1], 0
        final = microbatch == self.low.layout.microbatches - 1
        while self.low.layout.in_turn and (microbatch >> level & 1 or (final and microbatch >> level)):
            if microbatch >> level & 1:
                sync.copy((buffers[f"folds{g.name}"], level * count), summed, count, add=True, after=waits)
                waits = []
            level += 1
        if self.low.layout.in_turn and not final:
            return sync.copy(summed, (buffers[f"folds{g.name}"], level * count), count, after=waits)
        return sync.copy(summed, (buffers[f"gradshard{g.name}"], 0), count, add=True, after=waits)

    def _over_tensor(self, g: Group, buffer: int, after: StepRef) -> None:
        p, d, _ = self.low.layout.coordinates(self.r.number)
        if (tensor := self._tensor(g, p, d)) is not None:
            label, size = f"tp:{p}.{d}:{'.'.join(summed_over(g.name))}", g.message_bytes
            if self.by_parts:
                buffer, size = self.r.buffers[f"gradshard{g.name}"], -(-size // sharing(self.low.layout, d, g.name)[1])
            self.r.sync.call(self.low.call("tensor", label, tensor, self.r.number, buffer, size), after=[after])

    def _over_replicas(self, g: Group, buffer: int, after: StepRef) -> None:
        if g.name in self.compressed.groups:
            self.compressed.send(g.name, after)
        elif len(replicas := self._data(g.name)) > 1:
            how = ("gradient", self._label("dp", g.name), replicas, buffer, g.message_bytes, REDUCE_SCATTER if self.level else ALL_REDUCE)
            call_replicas(self.low, self.r, self.r.sync, *how, after=[after])

    # ---- end of the step ---------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Sums that have not started yet, shared parameters, the optimizer, and whole weights again."""
        low, r, lay, last = self.low, self.r, self.low.layout, self.refs[-1]
        if self.level < 2 and not lay.overlap:
            for g in self.groups.values():
                self._reduce(g, last)
        for g in self.common:  # to one of them no micro-batch of this rank has added, and the others come behind it
            (self._add_copies if self.level else self._reduce)(g, self.final.get(g.name, last))
        if self._copied() and (self.level > 1 or not lay.overlap):
            for g in self.groups.values():
                self._add_copies(g, r.sync.last)
        for g in sorted(self.groups.values(), key=lambda g: g.name.partition(":")[2]):  # one order for all stages
            if (tied := self._tied(g)) is not None:
                p, d, t = lay.coordinates(r.number)
                copy = f"{lay.mates(p).index(p)}." if len(lay.mates(p)) > 1 else ""
                size = -(-g.message_bytes // lay.data) if self.level else g.message_bytes
                buffer = r.buffers[f"{'gradshard' if self.level else 'gradients'}{g.name}"]
                r.sync.call(low.call("tied", f"tied:{g.name.partition(':')[2]}:{copy}{d}.{t}", tied, r.number, buffer, size), after=[last])
        if not self.groups:  # nothing here is trained
            return
        self.compressed.receive()
        waits = [r.sync.last] if len(r.sync) else []
        gradients = [n for n in r.buffers if n.startswith("gradients") or (n.startswith("gradshard") and self.level > 1)]
        reads = [low.whole(r, n) for n in (*gradients, "state", "weights")]
        updated = [low.whole(r, "weights")] if not self.level else []
        for g in self.groups.values() if self.level else ():
            updated.append((r.buffers[f"weights{g.name}"], *g.part) if self.level < 3 else low.whole(r, f"shard{g.name}"))
        reads += updated if self.level else []
        largest = max(r.sizes[p] for names in r.gradients.values() for p in names)  # parameters are updated one after the other
        if lay.step_end.norm:
            waits, norm = lower_norm(low, r, [low.whole(r, n) for n in gradients], waits)
            reads.append((norm, 0, low.b.chunks_of(norm)))
        op = low.b.op(
            "optimizer", graph=f"opt{r.stage.index}", stage=r.stage.index, workspace_bytes=UPDATE_BUFFERS * largest * master_ratio(lay), reads=reads,
            writes=[*updated, low.whole(r, "state")],
        )  # fmt: skip
        done = r.compute.compute(op, after=waits)
        if self.level in (1, 2):
            for g in reversed(self.groups.values()):  # the first layers' first
                if len(replicas := self._data(g.name)) > 1:
                    label, weights = self._label("dpw", g.name), r.buffers[f"weights{g.name}"]
                    call_replicas(low, r, r.sync, "weights", label, replicas, weights, g.planned_bytes, ALL_GATHER, after=[done])
