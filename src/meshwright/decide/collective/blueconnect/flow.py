"""Steps of many small group exchanges on one in-place buffer per rank, ordered by what they read and write.

A stage writes messages into lanes; the order between lanes follows from the chunks: a send waits for the step that wrote its chunks, a
receive for the sends that still read what it overwrites. So stages and slices overlap wherever the data allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Contract, Program

__all__ = ["LANES_PER_MESSAGE", "Flow", "runs_of"]

Key = tuple[object, ...]
LANES_PER_MESSAGE = 8  # lanes side by side for the stretches of one message, so that their latencies overlap


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, target, count) for stretches in which both lists of chunks count up together."""
    if not sources:
        return []
    cuts = [0, *(i + 1 for i, ((a, b), (c, d)) in enumerate(zip(pairwise(sources), pairwise(targets), strict=True)) if (b, d) != (a + 1, c + 1))]
    return [(sources[i], targets[i], j - i) for i, j in pairwise([*cuts, len(sources)])]


class Flow:
    """A program in the making: lanes and channels by key, and per rank and chunk who wrote it last and who has read it since."""

    def __init__(self, *, ranks: int, chunks: int, chunk_bytes: int, role: str, name: str, repeat: int, depth: int) -> None:
        self.b = ProgramBuilder(ranks=ranks, name=name)
        self.buffers = [self.b.buffer(r, chunks=chunks, chunk_bytes=chunk_bytes, role=role, name=f"data:{r}") for r in range(ranks)]
        self.repeat, self.depth = repeat, depth
        self._lanes: dict[Key, LaneBuilder] = {}
        self._channels: dict[Key, int] = {}
        self._wrote: list[dict[int, StepRef]] = [{} for _ in range(ranks)]
        self._read: list[dict[int, list[StepRef]]] = [{} for _ in range(ranks)]

    def _lane(self, rank: int, key: Key) -> LaneBuilder:
        lane = self._lanes.get((rank, *key))
        if lane is None:
            lane = self._lanes[rank, *key] = self.b.lane(rank, repeat=self.repeat)
        return lane

    def _after(self, lane: LaneBuilder, waits: list[StepRef]) -> list[StepRef]:
        """The last step of every other lane waited for."""
        last: dict[int, StepRef] = {}
        for ref in waits:
            if ref.lane != lane.number and (ref.lane not in last or last[ref.lane].position < ref.position):
                last[ref.lane] = ref
        return [last[number] for number in sorted(last)]

    def channel(self, src: int, dst: int, key: Key) -> int:
        if (src, dst, *key) not in self._channels:
            self._channels[src, dst, *key] = self.b.channel(src, dst, depth=self.depth)
        return self._channels[src, dst, *key]

    def send(self, src: int, dst: int, first: int, count: int, *, lane: Key, channel: Key) -> None:
        out = self._lane(src, lane)
        wrote, read = self._wrote[src], self._read[src]
        waits = [wrote[c] for c in range(first, first + count) if c in wrote]
        step = out.send(self.channel(src, dst, channel), self.buffers[src], first, count, after=self._after(out, waits))
        for c in range(first, first + count):
            read.setdefault(c, []).append(step)

    def receive(self, src: int, dst: int, first: int, count: int, *, lane: Key, channel: Key, add: bool) -> None:
        into = self._lane(dst, lane)
        wrote, read = self._wrote[dst], self._read[dst]
        waits = [wrote[c] for c in range(first, first + count) if c in wrote]
        # Written after the last writer and after all who still read; then these reads need not be waited for again.
        waits += [step for c in range(first, first + count) for step in read.pop(c, [])]
        take = into.recv_add if add else into.recv
        step = take(self.channel(src, dst, channel), self.buffers[dst], first, count, after=self._after(into, waits))
        for c in range(first, first + count):
            wrote[c] = step

    def message(
        self, src: int, dst: int, sources: Sequence[int], targets: Sequence[int], *, stage: Key, peers: bool, add: bool = False
    ) -> None:
        """One exchange: every stretch of chunks is one message, stretches go by up to LANES_PER_MESSAGE lanes side by side, so that their latencies
        overlap. `peers`: lanes per peer, else lanes per stage; receives that add share lanes."""
        for number, (start, target, count) in enumerate(runs_of(sources, targets)):
            strand = (*stage, number % LANES_PER_MESSAGE)
            self.send(src, dst, start, count, lane=(*strand, "out", dst) if peers else (*strand, "out"), channel=strand)
            into = (*strand, "in", src) if peers and not add else (*strand, "in")
            self.receive(src, dst, target, count, lane=into, channel=strand, add=add)

    def build(self, contract: Contract) -> Program:
        self.b.contract = contract
        return self.b.build()
