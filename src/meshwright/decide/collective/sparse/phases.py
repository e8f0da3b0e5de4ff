"""Phases of sparse all-reduces as steps of a `Program`; the strategies put them together.

Every rank has three lanes: work (select, add, decode), out (sends), into (receives). One channel joins a pair of ranks; it carries the messages of
all phases in order. A chunk is a region (or a part of one): the checker follows which ranks' contributions it holds, whatever its bytes. Buffers
have room for the most entries; messages of data have symbols for sizes, those of counts and histograms fixed bytes.

`run.sparse.walk` executes these programs: what a size is at run time, and what a step computes, `run.sparse` says by the names of buffers and ops.
So everything that a rank must know before a message is a step that the message is `after`: counts are gathered, then agreed on by a compute step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from ....graph.graph import Work
from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Contract, Program, Role, Unit
from ..problem import options_of
from .problem import SparsePlan, SparseProblem, SparseSizes

__all__ = ["HISTOGRAM_BINS", "BUCKET_MESSAGES", "EDGE_THRESHOLDS", "HEADER_WORDS", "Phased", "Phases", "greeting", "planned", "quantiles"]

BUCKET_MESSAGES = 2  # of a bucket, added up together
MAX_BUCKETS_UNDER_WAY = 2  # while one is waited for, the next keeps links busy
HISTOGRAM_BINS = (2048, 2048, 512)  # of the three histograms that find the exact k-th value
EDGE_THRESHOLDS = 128  # for which sizes are exchanged at once
HEADER_WORDS = 9  # and one more, one per rank and the quantiles, 8 bytes each
MAX_QUANTILES_PER_RANK = 16  # of a rank's selection that its header has for every region; the error of a region is then 1/16 at most
MAX_QUANTILES = 256  # of a rank altogether where ranks are many


def quantiles(ranks: int) -> int:
    """Quantiles of its selection that a rank's header carries, as many for each region: 16 for up to 16 ranks, fewer beyond."""
    return ranks * max(2, min(MAX_QUANTILES_PER_RANK, MAX_QUANTILES // ranks))


class Lanes(NamedTuple):
    work: LaneBuilder
    out: LaneBuilder
    into: LaneBuilder


class Moved(NamedTuple):
    """A message's two steps."""

    sent: StepRef
    got: StepRef


class Phases:
    """Builds one program. `parts`: into how many parts each region is cut (for balancing), `regions`: how many regions a vector has."""

    def __init__(self, sizes: SparseSizes, name: str, *, regions: int, parts: int = 1) -> None:
        self.sizes, self.n = sizes, sizes.ranks
        self.parts, self.chunks = parts, regions * parts
        self.b = b = ProgramBuilder(ranks=self.n, name=name)
        chunk_bytes = -(-4 * sizes.elements // self.chunks)
        self.inputs = [b.buffer(r, chunks=self.chunks, chunk_bytes=chunk_bytes, role="input", name=f"sums:{r}") for r in range(self.n)]
        self.outputs = [b.buffer(r, chunks=self.chunks, chunk_bytes=chunk_bytes, role="output", name=f"result:{r}") for r in range(self.n)]
        self.lanes = [Lanes(b.lane(r, unit=Unit.COMPUTE, role=Role.COMPUTE), b.lane(r), b.lane(r)) for r in range(self.n)]
        self.channels: dict[tuple[int, int], int] = {}
        self.ready: list[list[StepRef]] = [[] for _ in range(self.n)]  # per rank, what the next phase waits for
        self.works: dict[str, Work] = {}

    # ---- pieces ------------------------------------------------------------------------------------------------------
    def channel(self, source: int, target: int) -> int:
        if (source, target) not in self.channels:
            self.channels[source, target] = self.b.channel(source, target, depth=BUCKET_MESSAGES * MAX_BUCKETS_UNDER_WAY)
        return self.channels[source, target]

    def room(self, rank: int, chunks: int, entries: int, name: str) -> int:
        """A buffer for so many entries in all."""
        size = -(-entries * self.sizes.entry_bytes // chunks)
        return self.b.buffer(rank, chunks=chunks, chunk_bytes=max(1, size), name=f"{name}:{rank}")

    def symbol(self, name: str, expected: float, upper: int | None = None, lower: int = 0) -> int:
        """A size in entries: of `sizes.most` at most unless told."""
        entry, most = self.sizes.entry_bytes, self.sizes.most if upper is None else upper
        return self.b.size(name, lower=lower * entry, expected=min(most, round(expected)) * entry, upper=most * entry)

    def move(
        self, source: int, target: int, src: tuple[int, int], dst: tuple[int, int], count: int, size: int, *, sent: Sequence[StepRef] = (),
        taken: Sequence[StepRef] = (), add: bool = False,
    ) -> Moved:  # fmt: skip
        """One message. `sent`, `taken`: what the send and the receive wait for; a receive's size must be known by then."""
        channel = self.channel(source, target)
        out = self.lanes[source].out.transfer(send=channel, src=src, count=count, size=size, after=sent)
        read = dst if add else (-1, 0)
        return Moved(out, self.lanes[target].into.transfer(recv=channel, src=read, dst=dst, count=count, size=size, add=add, store=True, after=taken))

    def op(
        self, rank: int, key: tuple[str, str], reads: Sequence[tuple[int, int, int]], writes: Sequence[tuple[int, int, int]], moved_bytes: float,
        *, after: Sequence[StepRef] = (), add: bool = False,
    ) -> StepRef:  # fmt: skip
        """A compute step of kind (graph, name), which reads and writes so many bytes of memory."""
        graph, name = key
        self.works.setdefault(f"{graph}|{name}", Work(bytes_read=round(moved_bytes), calls=1))
        return self.lanes[rank].work.compute(self.b.op(name, graph=graph, reads=reads, writes=writes, accumulate=add), after=after)

    # ---- phases ------------------------------------------------------------------------------------------------------
    def select(self, *, exact: bool = False) -> list[int]:
        """Every rank's selection, by chunks; with an exact threshold the vector is read again to find it."""
        found = []
        for r in range(self.n):
            picked = self.room(r, self.chunks, self.sizes.most, "picked")
            graph, moved = ("exact", 24) if exact else ("local", 12)
            step = self.op(r, (graph, "select"), [(self.inputs[r], 0, self.chunks)], [(picked, 0, self.chunks)], moved * self.sizes.elements)
            self.ready[r] = [step]
            found.append(picked)
        return found

    def gather_counts(self, name: str, row_bytes: int, *, always: bool = True) -> None:
        """Rows of fixed length from all to all, all under way at once, and what follows from them; empty where they are not always needed."""
        rows = [self.b.buffer(r, chunks=self.n, chunk_bytes=row_bytes, name=f"{name}:{r}") for r in range(self.n)]
        self.spread(rows, -1 if always else self.b.size(name, lower=0, expected=0, upper=row_bytes))
        self.agree(name, rows, row_bytes)

    def agree(self, name: str, rows: list[int], row_bytes: int) -> None:
        """Every rank learns from all rows what the next messages weigh."""
        for r in range(self.n):
            agreed = self.b.buffer(r, chunks=1, chunk_bytes=row_bytes, name=f"agreed {name}:{r}")
            self.ready[r] = [self.op(r, (name, "merge"), [(rows[r], 0, self.n)], [(agreed, 0, 1)], 0, after=self.ready[r])]

    def spread(self, rows: list[int], size: int = -1) -> None:
        """Rank r's chunk r to all others; a rank goes on when it has all of them and its own is taken."""
        after: list[list[StepRef]] = [[] for _ in rows]
        for i in range(1, self.n):
            for r in range(self.n):
                far = (r - i) % self.n
                moved = self.move(far, r, (rows[far], far), (rows[r], far), 1, size, sent=self.ready[far], taken=self.ready[r])
                after[far].append(moved.sent)
                after[r].append(moved.got)
        self.ready = [steps or ready for steps, ready in zip(after, self.ready, strict=True)]

    def headers(self) -> None:
        """As long for every method, used or not: ranks whose methods differ are told of it by headers."""
        self.gather_counts("headers", 8 * (HEADER_WORDS + 1 + self.n + quantiles(self.n)))

    def histograms(self, sums: list[int], *, always: bool) -> None:
        """Three histograms of the sums, each added up part by part, one to a rank, and spread; of size 0 or whole, where not always needed."""
        n, region = self.n, -(-4 * self.sizes.elements // self.chunks)
        for r in range(n if always else 0):
            found = self.b.buffer(r, chunks=1, chunk_bytes=region, name=f"magnitudes:{r}")
            read_bytes = 4 * self.sizes.elements / n
            self.ready[r] = [self.op(r, ("sums", "merge"), [(sums[r], 0, self.parts)], [(found, 0, 1)], read_bytes, after=self.ready[r])]
        for level, bins in enumerate(HISTOGRAM_BINS):
            chunk = self.sizes.entry_bytes // 2 * -(-bins // n)  # counts are as wide as indices
            counts = [self.b.buffer(r, chunks=n, chunk_bytes=chunk, name=f"histogram{level}:{r}") for r in range(n)]
            size = -1 if always else self.b.size(f"histogram {level}", lower=0, expected=0, upper=chunk)
            after: list[list[StepRef]] = [[] for _ in range(n)]
            for i in range(1, n):
                for r in range(n):
                    far = (r - i) % n
                    moved = self.move(far, r, (counts[far], r), (counts[r], r), 1, size, sent=self.ready[far], taken=self.ready[r], add=True)
                    after[r].append(moved.got)
            for r in range(n):
                part = self.b.buffer(r, chunks=1, chunk_bytes=chunk, name=f"part{level}:{r}")
                self.ready[r] = [self.op(r, ("part", "decode"), [(counts[r], r, 1)], [(part, 0, 1)], 0, after=after[r] or self.ready[r])]
            self.spread(counts, size)
            self.agree(f"histogram{level}", counts, chunk)

    def sum_regions(self, picked: list[int]) -> list[int]:
        """To each rank its region of everybody's selection, added up: rank i starts with rank i + 1, in buckets."""
        n, q, k = self.n, self.parts, self.sizes.k
        sums = []
        per_region = k * 8 / n
        arriving = [self.room(r, max(1, n - 1) * q, self.sizes.most * (n - 1), "arriving") for r in range(n)]
        for r in range(n):
            room = self.b.buffer(r, chunks=q, chunk_bytes=-(-4 * self.sizes.elements // self.chunks), name=f"region:{r}")
            sums.append(room)
            self.op(r, ("own", "accumulate"), [(picked[r], r * q, q)], [(room, 0, q)], 4 * self.sizes.elements / n, after=self.ready[r])
        start = [list(x) for x in self.ready]
        free = [list(start) for _ in range(MAX_BUCKETS_UNDER_WAY)]  # by bucket and rank: what its messages wait for
        for number, first in enumerate(range(1, n, BUCKET_MESSAGES)):
            bucket = range(first, min(n, first + BUCKET_MESSAGES))
            got: list[list[StepRef]] = [[] for _ in range(n)]
            done: list[list[StepRef]] = [[] for _ in range(n)]
            for i in bucket:
                for r in range(n):
                    source = (r - i) % n
                    size, place = self.symbol(f"regions {source}->{r}", k / n), (arriving[r], (i - 1) * q)
                    moved = self.move(source, r, (picked[source], r * q), place, q, size, sent=free[number][source], taken=free[number][r])
                    got[r].append(moved.got)
                    done[r].append(moved.got)
                    done[source].append(moved.sent)
            free.append(done)
            for r in range(n):
                reads = [(arriving[r], (bucket[0] - 1) * q, len(bucket) * q)]
                added = self.op(r, ("region", "accumulate"), reads, [(sums[r], 0, q)], 3 * BUCKET_MESSAGES * per_region, after=got[r], add=True)
                self.ready[r] = [added]
        return sums

    def choose(self, sums: list[int], most: int, *, again: bool = False) -> list[int]:
        """What is kept of every region; `again`: of what was found in a pass before."""
        chosen = []
        for r in range(self.n):
            chosen.append(self.room(r, self.parts, most, "kept" if again else "chosen"))
            moved = 0 if again else 4 * self.sizes.elements / self.n
            key, reads, writes = ("kept" if again else "global", "select"), [(sums[r], 0, self.parts)], [(chosen[r], 0, self.parts)]
            self.ready[r] = [self.op(r, key, reads, writes, moved, after=self.ready[r])]
        return chosen

    def balance(self, chosen: list[int]) -> list[int]:
        """Part q of every region to rank q: messages that are empty unless the regions' results are lopsided."""
        n = self.n
        blocks = [self.room(r, n, self.sizes.most, "block") for r in range(n)]
        start, got = [list(x) for x in self.ready], [list[StepRef]() for _ in range(n)]
        for i in range(1, n):
            for r in range(n):
                source = (r - i) % n
                size = self.symbol(f"balance {source}->{r}", 0)
                got[r].append(self.move(source, r, (chosen[source], r), (blocks[r], source), 1, size, sent=start[source], taken=start[r]).got)
        for r in range(n):
            own = self.op(r, ("block", "encode"), [(chosen[r], r, 1)], [(blocks[r], r, 1)], 0, after=start[r])
            self.ready[r] = [own, *got[r]]
        return blocks

    def gather(self, blocks: list[int], chunks: int, block_entries: float, most_entries: int) -> list[int]:
        """All ranks' blocks of so many chunks to all, by Bruck's rounds: position p of rank r holds the block of rank r + p."""
        n = self.n
        rooms = []
        for r in range(n):
            rooms.append(self.room(r, n * chunks, most_entries, "gathered"))
            step = self.op(r, ("block", "decode"), [(blocks[r], 0, chunks)], [(rooms[r], 0, chunks)], 16 * block_entries, after=self.ready[r])
            self.ready[r] = [step]
        have, start = 1, [list(x) for x in self.ready]
        while have < n:
            more = min(have, n - have)
            got = []
            for r in range(n):
                far = (r + have) % n
                size = self.symbol(f"gather {far}->{r}", more * block_entries, most_entries)
                place = (rooms[r], have * chunks)
                got.append(self.move(far, r, (rooms[far], 0), place, more * chunks, size, sent=self.ready[far], taken=start[r]).got)
            self.ready = [[*self.ready[r], got[r]] for r in range(n)]
            have += more
        return rooms

    def finish(self, rooms: list[int], order: Sequence[int], entries: float) -> None:
        """Decode what was gathered: chunk c of the result is chunk `order[c]` by rank (or the sum of every rank's, for one chunk of several)."""
        n, per = self.n, len(order) // self.n
        for r in range(n):
            where = [((at // per - r) % n) * per + at % per for at in order]
            reads = [(rooms[r], 0, len(order))] if self.chunks < len(order) else [(rooms[r], p, 1) for p in where]
            key = ("result", "merge" if self.chunks < len(order) else "decode")
            self.op(r, key, reads, [(self.outputs[r], 0, self.chunks)], 24 * entries, after=self.ready[r])
        self.promise()

    def promise(self) -> None:
        whole = [tuple((buffer, 0, self.chunks) for buffer in side) for side in (self.inputs, self.outputs)]
        self.b.contract = Contract(op="all-reduce", inputs=whole[0], outputs=whole[1])


def greeting(sizes: SparseSizes) -> Program:
    """What comes before a dense step, which the backend adds up: the headers."""
    p = Phases(sizes, "dense", regions=1)
    p.select()
    p.headers()
    return p.b.build()


class Phased(Protocol):
    """A strategy whose programs `run.sparse` executes: `phases` builds one for a kind of step."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # the usual one first

    def phases(self, sizes: SparseSizes, kind: str) -> Phases: ...


def planned(strategy: Phased, problem: SparseProblem, words: float, notes: Mapping[str, Any] | None = None) -> SparsePlan:
    """All programs of a cycle."""
    made = {kind: strategy.phases(problem.sizes, kind) for kind in strategy.kinds}
    works = {key: work for p in made.values() for key, work in p.works.items()}
    programs = {kind: p.b.build() for kind, p in made.items()}
    return SparsePlan(
        strategy=strategy.name, programs=programs, usual=strategy.kinds[0], words=words, works=works, options=options_of(strategy), notes=notes or {}
    )
