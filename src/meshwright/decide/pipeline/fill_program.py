"""The program of one step of a cycle with its share of the deferrable work, in a filler lane on the compute unit of every rank.

A filler step waits for the action before it, so it never goes first; items that an item waits for on other ranks, in the same step, send it a message
of their own. What is complete in an earlier step needs no edge: steps follow one another.
Names, which an executor reads: op = the item's kind, graph `fill:<item>` (`:<n>/<of>` behind where an item is cut), in a lane of role filler.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...cost import Cost, Priced
from ...program.builder import LaneBuilder, ProgramBuilder, StepRef
from ...program.program import Role, Unit
from .fill import Filling
from .fill_place import Placement

__all__ = ["fill_keys", "fill_prices", "fill_step"]


def fill_keys(filling: Filling) -> dict[Placement, str]:
    """What every piece of work is called in the program."""
    rows: dict[tuple[str, int], list[Placement]] = {}
    for p in filling.placements:
        rows.setdefault((p.item, p.rank), []).append(p)
    found = {}
    for own in rows.values():
        for n, p in enumerate(own):
            found[p] = f"fill:{p.item}" + (f":{n + 1}/{len(own)}" if len(own) > 1 else "")
    return found


def fill_prices(filling: Filling, cost: Cost) -> Cost:
    """`cost` with the seconds of every piece of work."""
    items = {i.name: i for i in filling.work.items}
    table = dict(cost.table)
    for p, key in fill_keys(filling).items():
        table[f"{key}|{items[p.item].kind}"] = Priced(p.end_s - p.start_s)
    return Cost(name=cost.name, table=table, source=cost.source)


def fill_step(builder: ProgramBuilder, compute: Sequence[LaneBuilder], filling: Filling, step: int) -> None:
    """Add the work of one step of the cycle. `compute`: the lane of every rank that runs the actions."""
    _Filler(builder, compute, filling, step).run()


class _Filler:
    def __init__(self, builder: ProgramBuilder, compute: Sequence[LaneBuilder], filling: Filling, step: int) -> None:
        self.b, self.compute = builder, compute
        self.items = {i.name: i for i in filling.work.items}
        self.rows = sorted((p for p in filling.placements if p.step == step), key=lambda p: (p.start_s, p.end_s, p.rank))
        self.keys = fill_keys(filling)
        self.lanes = {r: builder.lane(r, unit=Unit.COMPUTE, role=Role.FILLER) for r in sorted({p.rank for p in self.rows})}
        self.done: dict[tuple[str, int], StepRef] = {}  # last piece of an item on a rank, in this step
        self.out: dict[tuple[str, int, str, int], int] = {}  # what an item sends to another one
        self.lines: dict[tuple[int, int], tuple[int, LaneBuilder, LaneBuilder]] = {}

    def run(self) -> None:
        waits = self.messages()
        pieces = {(p.item, p.rank): p for p in self.rows}  # the last one wins: rows are by time
        out: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        for (waiter, rank), sources in waits.items():
            for name, far in sources:
                size = self.items[name].message_bytes
                buffer = self.b.buffer(far, chunks=1, chunk_bytes=size, role="scratch", name=f"fillout:{name}:{waiter}:{rank}")
                self.out[name, far, waiter, rank] = buffer
                out.setdefault((name, far), []).append((buffer, 0, 1))
        for p in self._in_order():
            item = self.items[p.item]
            after: list[StepRef] = [StepRef(self.compute[p.rank].number, p.place - 1)] if p.place else []
            reads = []
            for name, far in waits.pop((p.item, p.rank), ()):  # its first piece waits
                buffer, ref = self.receive(name, far, p.item, p.rank)
                reads.append((buffer, 0, 1))
                after.append(ref)
            last = pieces[p.item, p.rank] is p
            writes = out.get((p.item, p.rank), []) if last else []
            op = self.b.op(item.kind, graph=self.keys[p], reads=reads, writes=writes)
            self.done[p.item, p.rank] = self.lanes[p.rank].compute(op, after=after)
            for buffer, _, _ in reads:
                self.b.dies_after(buffer, self.done[p.item, p.rank])

    def _in_order(self) -> list[Placement]:
        """By planned start; of those that start together, what others wait for goes first."""
        depth: dict[str, int] = {}

        def level(name: str) -> int:
            stack = [name]
            while stack:
                open_ = [n for n in self.items[stack[-1]].after if n not in depth]
                if open_:
                    stack += open_
                else:
                    depth[stack[-1]] = 1 + max((depth[n] for n in self.items[stack[-1]].after), default=0)
                    stack.pop()
            return depth[name]

        return sorted(self.rows, key=lambda p: (p.start_s, level(p.item), p.end_s, p.rank))

    def messages(self) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """(item, rank) -> (item, rank) of this step that it must hear of: per rank the last one that it waits for."""
        here: dict[str, dict[int, float]] = {}
        for p in self.rows:
            here.setdefault(p.item, {})[p.rank] = p.end_s
        found: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for p in self.rows:
            latest: dict[int, tuple[float, str]] = {}
            for name in self.items[p.item].after:
                ranks = here.get(name, {})
                if p.rank in ranks:
                    continue
                for r, end in ranks.items():
                    latest[r] = max(latest.get(r, (0.0, "")), (end, name))
                    if self.items[name].message_bytes:
                        found.setdefault((p.item, p.rank), []).append((name, r))
            rows = found.setdefault((p.item, p.rank), [])
            rows += [(name, r) for r, (_, name) in latest.items() if (name, r) not in rows]
            found[p.item, p.rank] = list(dict.fromkeys(rows))
        return found

    def receive(self, name: str, far: int, item: str, rank: int) -> tuple[int, StepRef]:
        if (far, rank) not in self.lines:
            self.lines[far, rank] = (self.b.channel(far, rank), self.b.lane(far), self.b.lane(rank))
        channel, send, recv = self.lines[far, rank]
        out = self.out[name, far, item, rank]
        into = self.b.buffer(rank, chunks=1, chunk_bytes=self.items[name].message_bytes, role="scratch", name=f"fillin:{name}:{item}:{far}")
        self.b.dies_after(out, send.send(channel, out, 0, after=[self.done[name, far]]))
        return into, recv.recv(channel, into, 0)
