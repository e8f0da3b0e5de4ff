"""SwitchML: slots of switches that add. A rank has so many chunks under way; each result makes room for the next chunk of its slot.

Cite: A. Sapio, M. Canini, C.-Y. Ho, J. Nelson, P. Kalnis, C. Kim, A. Krishnamurthy, M. Moshref, D. Ports, P. Richtarik, "Scaling Distributed Machine
Learning with In-Network Aggregation" (NSDI 2021, arXiv 1903.06701), section 4; trees of switches and shards over switches from section 6.
Left open by the paper: how many slots, which switches. Our answer: as many slots as cover a round trip at the narrowest link of a rank, and one;
roots by the load of the busiest link, in equal shards for as long as one more root is quicker. A switch that states its memory
(`Switch.aggregate_bytes`) holds two turns of every slot of every tree through it; one without room for a packet forwards only.
Deviations: chunks of the program are larger than packets where a shard would have more than `MAX_CHUNKS`; loss and repair lie below the program
(`run.aggregate`).
Invariant: a rank sends and receives its data once, whatever their number; a switch holds one chunk per slot.
Cost: O(ranks) routes per switch; (2 ranks + switches) steps per slot, whatever the message's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Self

import numpy as np

from ....cite import Cite
from ....errors import Unsupported, UsageError
from ....program.builder import ProgramBuilder
from ....program.program import Space
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, Use, options_of, require_operation
from ..trees.lower import contract
from .tree import SwitchTree, choose_roots, switch_tree, tree_time

__all__ = ["CITE", "DEVIATIONS", "SwitchML"]

CITE = Cite(
    key="sapio2021switchml", title="Scaling Distributed Machine Learning with In-Network Aggregation",
    authors="A. Sapio, M. Canini, C.-Y. Ho, J. Nelson, P. Kalnis, C. Kim, A. Krishnamurthy, M. Moshref, D. Ports, P. Richtarik", year=2021,
    venue="NSDI", url="https://arxiv.org/abs/1903.06701",
)  # fmt: skip
DEVIATIONS = (
    "chunks of large messages are larger than packets",
    "loss and repair lie below the program",
    "slots by round trip",
    "roots by link load",
)
PACKET_BYTES = 1024  # of payload: the paper's largest
MAX_SLOTS, MAX_CHUNKS = 64, 4096  # of a program and shard; a slot of it then stands for several of a switch's
MAX_SMALL_CHUNKS = 1 << 18  # of a shard where switches have little memory: turns of a program, simulated one by one
TURNS_HELD = 2  # of every slot: ranks may be a turn apart
SPARE_SLOTS = 8  # of those, for the time that chunks themselves take on up to four links each way
MAX_TRIED_ROOTS = 64  # switches that are tried as the root of a tree


@dataclass(frozen=True, kw_only=True)
class SwitchML(CollectiveStrategy):
    """Options.

    slots: chunks that a rank has under way at a root; None = what a round trip takes, and one, up to `MAX_SLOTS`.
    chunk_bytes: what a slot holds; None = `PACKET_BYTES`, or more where a shard would have more than `MAX_CHUNKS`, or a round trip `MAX_SLOTS`.
    shards: roots that share the message; None = as many as make it quicker.
    """

    name: ClassVar[str] = "switchml"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = ("all-reduce",)
    switch_actors: ClassVar[bool] = True

    slots: int | None = None
    chunk_bytes: int | None = None
    shards: int | None = None

    @classmethod
    def applies(cls, problem: CollectiveProblem) -> bool:
        return super().applies(problem) and bool(_able(problem))

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        """Its programs have switches as actors."""
        return (cls(),) if use == "in network" and cls.applies(problem) else ()

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (another operation; no switch that adds and copies and that all reach over switches), UsageError."""
        bound = collective_bound(problem)
        require_operation(problem, self.name, self.operations)
        for option in ("slots", "chunk_bytes", "shards"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where=self.name)
        trees = self._trees(problem)
        elements = problem.size_bytes // problem.element_bytes
        share = -(-elements // len(trees)) * problem.element_bytes
        rate_Bps, flight_s = _path(problem, trees, 0)
        chunk_bytes = self.chunk_bytes or max(PACKET_BYTES, -(-share // MAX_CHUNKS), ceil(rate_Bps * flight_s / (MAX_SLOTS - SPARE_SLOTS)))
        room, tightest = _room(problem, trees)
        chunk_bytes = min(-(-chunk_bytes // problem.element_bytes) * problem.element_bytes, share)
        if not self.chunk_bytes:
            chunk_bytes = min(chunk_bytes, max(room // problem.element_bytes, 1) * problem.element_bytes)
        if chunk_bytes * (self.slots or 1) > room or share > MAX_SMALL_CHUNKS * chunk_bytes:
            text = f"switch {tightest!r} has memory for {room} bytes of sums in each of its trees"
            raise Unsupported(text, where=self.name, hint="smaller or fewer slots, fewer shards, or --strategy ring", data={"strategy": self.name})
        chunks = -(-share // chunk_bytes)
        round_trip_s = _path(problem, trees, chunk_bytes)[1]
        slots = min(self.slots or min(ceil(rate_Bps * round_trip_s / chunk_bytes) + 1, MAX_SLOTS, room // chunk_bytes), chunks)
        turns = -(-chunks // slots)
        slots = -(-chunks // turns)
        # equal chunks of whole elements, so that less than an element per chunk is added to the message; none is larger than before
        chunk_bytes = -(-(share // problem.element_bytes) // (turns * slots)) * problem.element_bytes
        chosen = replace(self, slots=slots, chunk_bytes=chunk_bytes, shards=len(trees))
        used = sorted({v for tree in trees for v in tree.order})
        names = problem.fabric.actor_names
        bandwidth_s = float(tree_time(problem.fabric, trees) * problem.size_bytes)
        stalled_s = turns * (round_trip_s + chunk_bytes / rate_Bps)
        notes: dict[str, Any] = {
            "in_network": True, "switches": [names[v] for v in used], "roots": [names[tree.root] for tree in trees], "slots": slots, "turns": turns,
            "chunk_bytes": chunk_bytes, "shards": len(trees), "height": max(tree.height for tree in trees), "round_trip_s": round_trip_s,
            "bandwidth_time_s": bandwidth_s, "model_time_s": max(bandwidth_s + round_trip_s, stalled_s),
        }  # fmt: skip
        program = _lower(problem, trees, used, slots, turns, chunk_bytes)
        return CollectivePlan(
            program=program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes, switches=tuple(names[v] for v in used)
        )

    def _trees(self, problem: CollectiveProblem) -> list[SwitchTree]:
        able = _able(problem)
        if not able:
            raise Unsupported("no switch adds and copies", where=self.name, hint="use --strategy ring or forestcoll",
                              data={"strategy": self.name})  # fmt: skip
        ranks = [problem.fabric.actor_of[r] for r in problem.ranks]
        found = [switch_tree(problem.fabric, ranks, root, able) for root in sorted(able)[:MAX_TRIED_ROOTS]]
        trees = [tree for tree in found if tree is not None]
        if not trees:
            raise Unsupported("no switch that adds is reached by all ranks over switches alone", where=self.name,
                              hint="use --strategy joint (in network), ring or forestcoll", data={"strategy": self.name})  # fmt: skip
        if self.shards is not None and self.shards > len(trees):
            raise Unsupported(f"{len(trees)} switches can be roots, {self.shards} shards were asked for", where=self.name, hint="fewer shards")
        return choose_roots(problem.fabric, trees, self.shards)


def _able(problem: CollectiveProblem) -> frozenset[int]:
    devices = len(problem.fabric.devices)
    least = TURNS_HELD * min(PACKET_BYTES, problem.size_bytes)

    def fits(memory_bytes: int) -> bool:
        return not memory_bytes or memory_bytes >= least

    return frozenset(devices + i for i, s in enumerate(problem.fabric.switches) if s.aggregate and s.multicast and fits(s.aggregate_bytes))


def _room(problem: CollectiveProblem, trees: list[SwitchTree]) -> tuple[int, str]:
    """(bytes that a tree may have under way, by the switch with the least memory for each of its trees, its name)."""
    found, devices = (problem.size_bytes, ""), len(problem.fabric.devices)
    for v in {v for tree in trees for v in tree.order}:
        switch = problem.fabric.switches[v - devices]
        if switch.aggregate_bytes:
            found = min(found, (switch.aggregate_bytes // (TURNS_HELD * sum(v in tree.order for tree in trees)), switch.name))
    return found


def _path(problem: CollectiveProblem, trees: list[SwitchTree], chunk_bytes: int) -> tuple[float, float]:
    """(a rank's narrowest rate, the longest round trip of a chunk alone: latencies, and its time on every link of the way)."""
    fabric, longest, narrowest = problem.fabric, 0.0, float("inf")
    per_message = 0.0 if problem.transport is None else problem.transport.per_message_s
    for tree in trees:
        for name in problem.ranks:
            v, took = fabric.actor_of[name], 0.0
            while v != tree.root:
                up = tree.parent[v]
                for way in ([fabric.links[x] for x in fabric.route(*ends)] for ends in ((v, up), (up, v))):
                    narrowest = min(narrowest, *(float(x.rate_Bps) for x in way))
                    took += sum(x.latency_s + chunk_bytes / x.rate_Bps for x in way) + per_message + max(x.library_latency_s for x in way)
                v = up
            longest = max(longest, took)
    return narrowest, longest


def _lower(problem: CollectiveProblem, trees: list[SwitchTree], used: list[int], slots: int, turns: int, chunk_bytes: int) -> Any:
    """At every rank a lane that sends and one that receives, slot by slot; a lane per slot at every switch. Iteration i is the slots' i-th turn."""
    n, chunks = len(problem.ranks), len(trees) * slots
    b = ProgramBuilder(ranks=n, switches=len(used), name="switchml all-reduce")
    actor = {problem.fabric.actor_of[r]: i for i, r in enumerate(problem.ranks)} | {v: n + i for i, v in enumerate(used)}
    data = [b.buffer(r, chunks=chunks, chunk_bytes=chunk_bytes, role="input", name=f"data:{r}") for r in range(n)]
    for number, tree in enumerate(trees):
        hops = [(v, p, slot) for v, p in tree.parent.items() if p >= 0 for slot in range(slots)]
        up = {(v, slot): b.channel(actor[v], actor[p]) for v, p, slot in hops}
        down = {(v, slot): b.channel(actor[p], actor[v]) for v, p, slot in hops}
        for v in tree.parent:
            if actor[v] < n:
                sending, receiving = b.lane(actor[v], repeat=turns), b.lane(actor[v], repeat=turns)
                for slot in range(slots):  # one after the other, as they leave a port: side by side, all would be sent and then all come back
                    result = receiving.recv(down[v, slot], data[actor[v]], number * slots + slot)
                    sending.send(up[v, slot], data[actor[v]], number * slots + slot, after=[(result, 1)])
        for v in tree.order:
            below = tree.children(v)
            several = len(below) > 1
            for slot in range(slots):
                sums = b.channel_set([up[u, slot] for u in below]) if several else up[below[0], slot]
                copies = b.channel_set([down[u, slot] for u in below]) if several else down[below[0], slot]
                held = b.buffer(actor[v], chunks=1, chunk_bytes=chunk_bytes, role="scratch", space=Space.SWITCH, window=1)
                lane = b.lane(actor[v], repeat=turns)
                out, split = (copies, several) if v == tree.root else (up[v, slot], False)
                lane.transfer(recv=sums, send=out, dst=(held, 0), add=several, store=True, in_set=several, out_set=split)
                if v != tree.root:
                    lane.transfer(recv=down[v, slot], send=copies, dst=(held, 0), store=True, out_set=several)
    b.contract = contract(problem.op, data, chunks, problem.root)
    return b.build()
