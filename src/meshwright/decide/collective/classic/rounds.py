"""Rounds of messages to a `Program`: what the classic algorithms share.

An algorithm is a list of rounds, a round a list of moves: blocks that one rank sends to another, or copies. All moves of a round read
what was there before it (copies, which come first, excepted). Ranks and blocks are given by *position*; an order of ranks says which rank
plays which position, so that one description serves every order and every root.

`lower` turns rounds into lanes: a sending and a receiving lane per rank and stream, steps in round order. Every step waits for what it
needs and no more: a read for the last write of its blocks, a write for the reads and the write before it. Since all edges and all lanes
follow the order (round, reads before writes), no program made here can deadlock, and none can race.

Blocks of one move that do not lie together are either packed into a staging buffer, sent as one message and unpacked (`pack`), or sent
one run after the other. Staging has two slots per rank and direction, each as large as the largest packed message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, Literal

from ....bound import Bound
from ....errors import Disconnected, Unsupported, UsageError
from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Program
from ..bounds.collective import collective_bound
from ..memo import remember, with_chunk_bytes
from ..problem import CollectivePlan, CollectiveProblem, options_of
from .contract import block_chunks, classic_contract
from .nearness import near_order

__all__ = ["Area", "Move", "Order", "Rounds", "lower", "plan_rounds", "resolve_order", "reverse"]

Order = tuple[int, ...] | Literal["rank", "servers", "near"]
STAGING_SLOTS = 2  # messages that a staging buffer holds: one is filled while the other is sent


@dataclass(frozen=True, slots=True)
class Move:
    """`blocks` of `source` at `src`, in this order, become blocks `into` (default: the same numbers) of `target` at `dst`, or are added to
    them. `src == dst`: a copy. Moves of one `stream` follow each other at either end; streams are independent."""

    src: int
    dst: int
    blocks: tuple[int, ...]
    into: tuple[int, ...] | None = None
    add: bool = False
    source: str = "data"
    target: str = "data"
    stream: int = 0


Rounds = Sequence[Sequence[Move]]


@dataclass(frozen=True)
class Area:
    """A buffer of every rank. `by_rank`: block i belongs to the rank at position i (and may be uneven); else blocks are equal parts."""

    role: str
    blocks: int
    by_rank: bool = False


# ---- positions -------------------------------------------------------------------------------------------------------------
def resolve_order(problem: CollectiveProblem, order: Sequence[int] | str, name: str) -> tuple[int, ...]:
    """Position -> rank. `rank`: as given; `servers`: ranks of one server together, servers in order of their first rank; `near`: see `nearness`.

    Raises: UsageError when it is no permutation of the ranks.
    """
    n = len(problem.ranks)
    if order == "rank":
        return tuple(range(n))
    if order == "servers":
        group = [problem.fabric.device(r).group for r in problem.ranks]
        first = {g: i for i, g in reversed(list(enumerate(group)))}
        return tuple(sorted(range(n), key=lambda r: (first[group[r]], r)))
    if order == "near":
        return near_order(problem)
    if isinstance(order, str) or sorted(order) != list(range(n)):
        raise UsageError(f"order must be 'rank', 'servers', 'near' or hold every rank of 0..{n - 1} once, got {order!r}", where=name)
    return tuple(int(r) for r in order)


def reverse(rounds: Rounds) -> list[list[Move]]:
    """The rounds backwards with sums instead of copies: an all-gather becomes a reduce-scatter, a broadcast a reduce."""
    return [[Move(m.dst, m.src, m.into or m.blocks, m.blocks, True, m.target, m.source, m.stream) for m in step] for step in reversed(rounds)]


def _placed(rounds: Rounds, areas: Mapping[str, Area], order: Sequence[int]) -> list[list[Move]]:
    """Positions become ranks, in moves and in areas whose blocks belong to ranks."""
    plain = tuple(order) == tuple(range(len(order)))

    def blocks(area: str, numbers: Sequence[int]) -> tuple[int, ...]:
        by_rank = area in areas and areas[area].by_rank
        return tuple(order[b] for b in numbers) if by_rank else tuple(numbers)

    def placed(m: Move) -> Move:
        pairs = list(zip(blocks(m.source, m.blocks), blocks(m.target, m.into or m.blocks), strict=True))
        if not plain:  # a message's blocks may stand in any order: the one with the fewest runs
            pairs.sort()
        return replace(m, src=order[m.src], dst=order[m.dst], blocks=tuple(a for a, _ in pairs), into=tuple(b for _, b in pairs))

    return [[placed(m) for m in step if m.blocks] for step in rounds]


# ---- lowering --------------------------------------------------------------------------------------------------------------
class _Hazards:
    """Who wrote and who reads every block, to order steps on the same rank."""

    def __init__(self) -> None:
        self.written: dict[tuple[int, str, int], StepRef] = {}
        self.read: dict[tuple[int, str, int], list[StepRef]] = {}

    def wait(self, lane: LaneBuilder, actor: int, reads: Iterable[tuple[str, int]], writes: Iterable[tuple[str, int]]) -> list[StepRef]:
        """The last steps of other lanes that must come before a step that reads and writes these blocks."""
        latest: dict[int, StepRef] = {}

        def need(step: StepRef) -> None:
            if step.lane != lane.number and (step.lane not in latest or latest[step.lane].position < step.position):
                latest[step.lane] = step

        for area, block in reads:
            if (actor, area, block) in self.written:
                need(self.written[actor, area, block])
        for area, block in writes:
            key = (actor, area, block)
            if key in self.written:
                need(self.written[key])
            for step in self.read.get(key, ()):
                need(step)
        return [latest[number] for number in sorted(latest)]

    def done(self, step: StepRef, actor: int, reads: Iterable[tuple[str, int]], writes: Iterable[tuple[str, int]]) -> None:
        for area, block in reads:
            self.read.setdefault((actor, area, block), []).append(step)
        for area, block in writes:
            self.written[actor, area, block] = step
            self.read.pop((actor, area, block), None)


@dataclass(slots=True)
class _Run:
    """A stretch of blocks that lie together on both sides: first chunks, chunks, and the blocks' numbers."""

    source: int
    target: int
    count: int
    read: list[int]
    written: list[int]


class _Lowering:
    """One program in the making; see the module's docstring."""

    def __init__(
        self, b: ProgramBuilder, rounds: Rounds, areas: Mapping[str, Area], sizes: Mapping[str, Sequence[int]], chunk_bytes: int, pack: bool,
        ahead: int,
    ) -> None:  # fmt: skip
        self.b, self.rounds, self.sizes, self.pack, self.ahead = b, rounds, sizes, pack, ahead
        self.start = {name: [0, *accumulate(size)] for name, size in sizes.items()}
        self.hazards = _Hazards()
        self.lanes: dict[tuple[int, str, int], LaneBuilder] = {}
        self.buffer: dict[tuple[int, str], int] = {}
        for name, area in areas.items():
            for rank in range(b.ranks):
                self.buffer[rank, name] = b.buffer(rank, chunks=self.start[name][-1], chunk_bytes=chunk_bytes, role=area.role, name=f"{name}:{rank}")
        self.channels: dict[tuple[int, int, int], int] = {}
        self.traffic: dict[tuple[int, int, int], int] = {}
        self.staged: set[tuple[int, int, int]] = set()  # ways whose messages wait in staging
        slot = {"out": [0] * b.ranks, "in": [0] * b.ranks}
        for step in rounds:
            for m in step:
                if m.src == m.dst:
                    continue
                runs = self.runs(m)
                if not runs:
                    continue
                key = (m.src, m.dst, m.stream)
                self.traffic[key] = self.traffic.get(key, 0) + (1 if pack else len(runs))
                if pack or m.add:
                    self.staged.add(key)
                if pack and len(runs) > 1:
                    total = sum(run.count for run in runs)
                    if not _together(runs, 0):
                        slot["out"][m.src] = max(slot["out"][m.src], total)
                    if not _together(runs, 1):
                        slot["in"][m.dst] = max(slot["in"][m.dst], total)
        self.slot = {side: max(sizes_) for side, sizes_ in slot.items()}
        self.turn: dict[tuple[int, str], int] = {}
        for side, most in self.slot.items():
            for rank in range(b.ranks if most else 0):
                held = STAGING_SLOTS * most
                self.buffer[rank, side] = b.buffer(rank, chunks=held, chunk_bytes=chunk_bytes, role="scratch", name=f"staging {side}:{rank}")

    def runs(self, m: Move) -> list[_Run]:
        """The stretches of a move, in order; blocks of no bytes are left out."""
        out: list[_Run] = []
        starts, ends, size = self.start[m.source], self.start[m.target], self.sizes[m.source]
        for block, into in zip(m.blocks, m.into or m.blocks, strict=True):
            at, to, count = starts[block], ends[into], size[block]
            if not count:
                continue
            last = out[-1] if out else None
            if last and last.source + last.count == at and last.target + last.count == to:
                last.count += count
                last.read.append(block)
                last.written.append(into)
            else:
                out.append(_Run(at, to, count, [block], [into]))
        return out

    def lane(self, rank: int, what: str, stream: int) -> LaneBuilder:
        key = (rank, what, stream)
        if key not in self.lanes:
            self.lanes[key] = self.b.lane(rank)
        return self.lanes[key]

    def channel(self, m: Move) -> int:
        key = (m.src, m.dst, m.stream)
        if key not in self.channels:
            self.channels[key] = self.b.channel(m.src, m.dst, depth=min(2 if key in self.staged else self.ahead, self.traffic[key]))
        return self.channels[key]

    def build(self) -> None:
        for step in self.rounds:
            for m in step:
                if m.src == m.dst:
                    self._copy(m)
            messages = [(m, runs) for m in step if m.src != m.dst and (runs := self.runs(m))]
            for m, runs in messages:
                self._send(m, runs)
            for m, runs in self.by_arrival(messages):
                self._receive(m, runs)

    def by_arrival(self, messages: list[tuple[Move, list[_Run]]]) -> list[tuple[Move, list[_Run]]]:
        """The messages of a round, first those that are there first when all ways begin together. Adds to one block stand in line: behind one that
        comes later, an early message would keep its way's next ones waiting."""
        if not any(m.add for m, _ in messages):
            return messages
        sent: dict[tuple[int, int, int], int] = {}
        timed = []
        for m, runs in messages:
            for some in [runs] if self.pack else [[run] for run in runs]:
                key = m.src, m.dst, m.stream
                sent[key] = sent.get(key, 0) + sum(run.count for run in some)
                timed.append((sent[key], m, some))
        return [(m, some) for _, m, some in sorted(timed, key=itemgetter(0))]

    def _do(self, lane: LaneBuilder, actor: int, act: Callable[..., StepRef], reads: list[tuple[str, int]], writes: list[tuple[str, int]]) -> None:
        step = act(after=self.hazards.wait(lane, actor, reads, writes))
        self.hazards.done(step, actor, reads, writes)

    def _copy(self, m: Move) -> None:
        lane = self.lane(m.src, "copy", m.stream)
        source, target = self.buffer[m.src, m.source], self.buffer[m.dst, m.target]
        for run in self.runs(m):
            into = [(m.target, x) for x in run.written]
            reads = [(m.source, x) for x in run.read] + (into if m.add else [])
            act = partial(lane.copy, (source, run.source), (target, run.target), run.count, add=m.add)
            self._do(lane, m.src, act, reads, into)

    def _next_slot(self, rank: int, side: str) -> int:
        self.turn[rank, side] = (self.turn.get((rank, side), -1) + 1) % STAGING_SLOTS
        return self.turn[rank, side]

    def _send(self, m: Move, runs: list[_Run]) -> None:
        lane, channel = self.lane(m.src, "send", m.stream), self.channel(m)
        source, total = self.buffer[m.src, m.source], sum(run.count for run in runs)
        if not self.pack or _together(runs, 0):
            for run in [_Run(runs[0].source, 0, total, [x for r in runs for x in r.read], [])] if self.pack else runs:
                self._do(lane, m.src, partial(lane.send, channel, source, run.source, run.count), [(m.source, x) for x in run.read], [])
            return
        # A slot is a block to the hazards: what fills it waits until the message before in the same slot has been sent.
        slot = self._next_slot(m.src, "out")
        staging, first = self.buffer[m.src, "out"], slot * self.slot["out"]
        at = first
        for run in runs:
            act = partial(lane.copy, (source, run.source), (staging, at), run.count)
            self._do(lane, m.src, act, [(m.source, x) for x in run.read], [("out", slot)])
            at += run.count
        self._do(lane, m.src, partial(lane.send, channel, staging, first, total), [("out", slot)], [])

    def _receive(self, m: Move, runs: list[_Run]) -> None:
        lane, channel = self.lane(m.dst, "recv", m.stream), self.channel(m)
        target, total = self.buffer[m.dst, m.target], sum(run.count for run in runs)
        take = lane.recv_add if m.add else lane.recv
        if not self.pack or _together(runs, 1):
            for run in [_Run(0, runs[0].target, total, [], [x for r in runs for x in r.written])] if self.pack else runs:
                into = [(m.target, x) for x in run.written]
                self._do(lane, m.dst, partial(take, channel, target, run.target, run.count), into if m.add else [], into)
            return
        slot = self._next_slot(m.dst, "in")
        staging, at = self.buffer[m.dst, "in"], slot * self.slot["in"]
        self._do(lane, m.dst, partial(lane.recv, channel, staging, at, total), [], [("in", slot)])
        for run in runs:
            into = [(m.target, x) for x in run.written]
            act = partial(lane.copy, (staging, at), (target, run.target), run.count, add=m.add)
            self._do(lane, m.dst, act, [("in", slot), *(into if m.add else [])], into)
            at += run.count


def _together(runs: Sequence[_Run], side: int) -> bool:
    """The runs follow each other without a gap at the source (0) or at the target (1)."""
    return all((a.target if side else a.source) + a.count == (b.target if side else b.source) for a, b in pairwise(runs))


def lower(problem: CollectiveProblem, rounds: Rounds, areas: Mapping[str, Area], *, pack: bool, name: str, ahead: int = 2) -> Program:
    """The program of the rounds, ranks and blocks already placed. Areas: `data`, or `input` and `output`, besides any others.

    ahead: messages of a way that may be under way where none needs staging; two otherwise.
    """
    sizes, chunk_bytes = block_chunks(problem, {key: (area.blocks, area.by_rank) for key, area in areas.items()})
    b = ProgramBuilder(ranks=len(problem.ranks), name=name)
    lowering = _Lowering(b, rounds, areas, sizes, chunk_bytes, pack, ahead)
    lowering.build()
    where = {key: [lowering.buffer[rank, key] for rank in range(b.ranks)] for key in areas}
    b.contract = classic_contract(problem, where.get("input") or where["data"], where.get("output") or where["data"], sizes)
    return b.build()


def plan_rounds(
    problem: CollectiveProblem, strategy: Any, rounds: Rounds, areas: Mapping[str, Area], *, order: Sequence[int], pack: bool, name: str,
    bound: Bound | None = None, notes: Mapping[str, Any] | None = None, ahead: int = 2,
) -> CollectivePlan:  # fmt: skip
    """The plan of an algorithm given as rounds over positions; `strategy` holds the options with every choice filled in; `ahead`: as in `lower`.

    Raises: Disconnected; Unsupported when two ranks that must talk have no path.
    """
    bound = bound or collective_bound(problem)

    def build() -> Program:
        return lower(problem, _placed(rounds, areas, order), areas, pack=pack, name=f"{name} {problem.op}", ahead=ahead)

    if problem.shard_bytes is None:  # the same program at every size, but for the bytes of a chunk
        key = ("rounds", name, problem.op, problem.ranks, problem.root, problem.peers, problem.numbers, pack, repr(strategy))
        chunk_bytes = block_chunks(problem, {what: (area.blocks, area.by_rank) for what, area in areas.items()})[1]
        program = with_chunk_bytes(remember(problem.fabric, key, build), chunk_bytes)
    else:
        program = build()
    require_paths(problem, program, name)
    messages = sum(1 for step in rounds for m in step if m.src != m.dst and m.blocks)
    facts = {"rounds": len(rounds), "order": [problem.ranks[r] for r in order], "messages": messages}
    return CollectivePlan(program=program, bound=bound, strategy=name, options=options_of(strategy), notes=facts | dict(notes or {}))


def require_paths(problem: CollectiveProblem, program: Program, name: str) -> None:
    """Raises Unsupported when the fabric has no path for one of the program's channels (a broadcast may need fewer than all pairs)."""
    actors = [problem.fabric.actor_of[rank] for rank in problem.ranks]
    for src, dst in sorted(set(zip(program.channels.src.tolist(), program.channels.dst.tolist(), strict=True))):
        try:
            problem.fabric.route(actors[src], actors[dst])
        except Disconnected as error:
            text = f"{name} sends from {problem.ranks[src]} to {problem.ranks[dst]}: {error.message}"
            raise Unsupported(text, hint="use --strategy forestcoll", data=error.data) from None
