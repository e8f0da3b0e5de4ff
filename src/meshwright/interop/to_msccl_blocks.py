"""Steps of ranks as thread blocks: one peer to send to and one to receive from, waits between blocks, and channels without sharing.

A lane of the program may serve several peers; a block may not. So a lane falls apart into the groups of steps that share a connection; a
step that receives and sends ties its two connections into one block. What the lane's order said is said by waits instead. Then a block that
only receives and one that only sends what it received become one, step by step in one common order, and a receipt followed by its
forwarding becomes a fused step (`rcs`, `rrcs`; `rrs` where nobody reads the stored value), as vendor rings are written.

A schedule of many trees has more connections than a GPU holds blocks. Pooled, all messages between two ranks share a few connections: every
block sends to one peer or receives from one, in an order of the messages that all blocks share and that no wait contradicts. So where a GPU has too
many blocks, one that sends and one that receives may become one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from .to_msccl_memory import Memory, Move
from .to_msccl_order import Block, levels_of, root_of, waits_of

__all__ = ["Block", "Blocks", "Connection", "Pool", "blocks_of"]


@dataclass(frozen=True, slots=True)
class Connection:
    """Messages of one program channel, or of a stretch of them."""

    src: int
    dst: int
    channel: int
    stretch: int


@dataclass
class Blocks:
    """`waits[m]`: the moves whose completion move m has to wait for, beyond its block's order; the last one first."""

    moves: list[Move]
    blocks: list[Block]
    connections: list[Connection]
    waits: dict[int, list[int]] = field(default_factory=dict)


def blocks_of(moves: list[Move], memory: Memory, *, stretch: int, merge: bool, relaxed: bool, squeeze: int = 0) -> Blocks:
    """Thread blocks of all ranks.

    Args:
        stretch: messages of a channel after which another connection takes over (shorter blocks, more of them).
        merge: join receiving and sending blocks.
        relaxed: keep a lane's order between its blocks only where steps touch the same chunks; else always.
        squeeze: blocks per rank beyond which also unrelated receiving and sending blocks are joined; 0 = never.
    Raises: Unsupported when the joined order contradicts itself (never without `merge`).
    """
    made = _Maker(moves, memory)
    made.connect(stretch)
    made.untie()
    made.group()
    made.order_lanes(relaxed)
    if merge:
        made.join()
        if squeeze:
            made.squeeze(squeeze)
        made.fuse()
    made.drop_dead_stores()
    made.result.waits = waits_of(made.moves, made.result.blocks)
    return made.result


class _Maker:
    def __init__(self, moves: list[Move], memory: Memory) -> None:
        self.moves, self.memory = moves, memory
        for m in moves:
            m.order *= 2  # room for what a step is taken apart into
        self.lanes: dict[int, list[int]] = {}
        for k, m in enumerate(moves):
            self.lanes.setdefault(m.lane, []).append(k)
        self.out: dict[int, int] = {}  # move -> connection
        self.into: dict[int, int] = {}
        self.connections: list[Connection] = []
        self.block_of: dict[int, int] = {}
        self.place: dict[int, tuple[int, int, int]] = {}  # pooled move -> its message's place in the order that all blocks keep
        self.joined: dict[int, tuple[Block, Block]] = {}  # joined block -> what it was made of
        self.result = Blocks(moves, [], self.connections)

    # ---- connections ---------------------------------------------------------------------------------------------------
    def connect(self, stretch: int) -> None:
        """A connection for every `stretch` messages of a channel."""
        sent: dict[int, list[int]] = {}
        got: dict[int, list[int]] = {}
        for lane in self.lanes.values():
            for k in lane:
                if self.moves[k].sends >= 0:
                    sent.setdefault(self.moves[k].sends, []).append(k)
                if self.moves[k].receives >= 0:
                    got.setdefault(self.moves[k].receives, []).append(k)
        for channel in sorted(sent):
            for j, (a, b) in enumerate(zip(sent[channel], got[channel], strict=True)):
                if j % stretch == 0:
                    self.connections.append(Connection(self.moves[a].rank, self.moves[b].rank, channel, j // stretch))
                self.out[a] = self.into[b] = len(self.connections) - 1

    def ties(self, lane: list[int]) -> dict[tuple[str, int], tuple[str, int]]:
        """Per port of a lane ("in" or "out", connection) the representative of the ports that fused steps tie to it."""
        label: dict[tuple[str, int], tuple[str, int]] = {}

        def find(x: tuple[str, int]) -> tuple[str, int]:
            while label.setdefault(x, x) != x:
                x = label[x]
            return x

        for k in lane:
            ports = self.ports(k)
            for port in ports:
                label[find(ports[0])] = find(port)
        return {port: find(port) for port in list(label)}

    def ports(self, k: int) -> list[tuple[str, int]]:
        return [*([("in", self.into[k])] if k in self.into else []), *([("out", self.out[k])] if k in self.out else [])]

    def untie(self) -> None:
        """Take fused steps apart where a block would need two peers of one kind."""
        for lane in list(self.lanes.values()):
            tied = self.ties(lane)
            seen: dict[tuple[str, int], dict[str, int]] = {}
            for (side, _), name in tied.items():
                seen.setdefault(name, {}).setdefault(side, 0)
                seen[name][side] += 1
            crowded = {name for name, sides in seen.items() if max(sides.values()) > 1}
            if crowded:
                whole = [k for k in lane if len(self.ports(k)) == 2 and tied[self.ports(k)[0]] in crowded]
                for k in whole:
                    self._take_apart(lane, k)

    def _take_apart(self, lane: list[int], k: int) -> None:
        """Move k becomes the sending half; a new move before it receives."""
        m = self.moves[k]
        dst = m.dst if "D" in m.parts else self.memory.more_scratch(m.rank, m.count)
        parts = m.parts.replace("S", "") if "D" in m.parts else m.parts.replace("S", "D")
        self.moves.append(Move(m.rank, m.lane, m.order - 1, parts, m.receives, -1, m.src, dst, m.count, m.after))
        new = len(self.moves) - 1
        self.into[new] = self.into.pop(k)
        m.parts, m.receives, m.src, m.dst, m.after = "XS", -1, dst, ("", 0), [new]
        lane.insert(lane.index(k), new)

    # ---- blocks --------------------------------------------------------------------------------------------------------
    def group(self) -> None:
        blocks = self.result.blocks
        for lane in self.lanes.values():
            tied, made = self.ties(lane), dict[object, int]()
            names: list[object] = [tied[ports[0]] if (ports := self.ports(k)) else None for k in lane]
            for j in range(1, len(names)):  # local steps stay with the step before them ...
                names[j] = names[j] or names[j - 1]
            for j in range(len(names) - 2, -1, -1):  # ... or, at the start of a lane, after them
                names[j] = names[j] or names[j + 1]
            for k, name in zip(lane, names, strict=True):
                if name not in made:
                    made[name] = len(blocks)
                    blocks.append(Block(self.moves[k].rank, -1, -1, []))
                block = blocks[made[name]]
                block.moves.append(k)
                block.recv = self.into.get(k, block.recv)
                block.send = self.out.get(k, block.send)
                self.block_of[k] = made[name]

    def order_lanes(self, relaxed: bool) -> None:
        """A lane's order, where its steps are now in different blocks."""
        for lane in self.lanes.values():
            if len({self.block_of[k] for k in lane}) == 1:
                continue
            if not relaxed:
                for a, b in pairwise(lane):
                    if self.block_of[a] != self.block_of[b] and a not in self.moves[b].after:
                        self.moves[b].after.append(a)
                continue
            wrote: dict[tuple[str, int], int] = {}
            read: dict[tuple[str, int], list[int]] = {}
            for k in lane:
                reads, writes = self._touched(k)
                before = {wrote[c] for c in (*reads, *writes) if c in wrote} | {x for c in writes for x in read.get(c, ())}
                self.moves[k].after += sorted(x for x in before - set(self.moves[k].after) if x != k)
                for c in reads:
                    read.setdefault(c, []).append(k)
                for c in writes:
                    wrote[c], read[c] = k, []

    def _touched(self, k: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """(chunks read, chunks written) by a move."""
        m = self.moves[k]
        src = [(m.src[0], m.src[1] + j) for j in range(m.count)] if "X" in m.parts else []
        dst = [(m.dst[0], m.dst[1] + j) for j in range(m.count)] if "D" in m.parts else []
        return (src + dst if m.parts == "XAD" else src), dst

    # ---- joining -------------------------------------------------------------------------------------------------------
    def join(self) -> None:
        """Pair receiving blocks with the sending blocks that forward most of what they receive."""
        blocks = self.result.blocks
        forwards: dict[tuple[int, int], int] = {}
        for s, block in enumerate(blocks):
            if block.send < 0 or block.recv >= 0:
                continue
            for k in block.moves:
                for d in self.moves[k].after:
                    r = self.block_of[d]
                    if self._forwards(d, k) and blocks[r].send < 0 and blocks[r].recv >= 0:
                        forwards[r, s] = forwards.get((r, s), 0) + 1
        used: set[int] = set()
        for (r, s), _ in sorted(forwards.items(), key=lambda item: (-item[1], item[0])):
            if r in used or s in used:
                continue
            used |= {r, s}
            self._join_two(r, s)
        self._renumber()

    def _join_two(self, r: int, s: int, *, keep: bool = False) -> None:
        one, two = self.result.blocks[r], self.result.blocks[s]
        if not keep:
            self.joined[id(one)] = (Block(one.rank, -1, one.recv, list(one.moves)), Block(two.rank, two.send, -1, list(two.moves)))
        one.send = two.send
        one.moves = sorted(one.moves + two.moves, key=lambda k: self.place.get(k, (self.moves[k].order, k)))
        two.moves = []

    def squeeze(self, most: int) -> None:
        """Join unrelated blocks of ranks that have too many, where the chains of connections so tied use no connection twice."""
        blocks = self.result.blocks
        chain = list(range(len(self.connections)))
        pairs = [{(c.src, c.dst)} for c in self.connections]

        def tie(a: int, b: int) -> bool:
            a, b = root_of(chain, a), root_of(chain, b)
            if a != b and not pairs[a].isdisjoint(pairs[b]):
                return False
            if a != b:
                a, b = sorted((a, b), key=lambda x: len(pairs[x]))
                chain[a] = b
                pairs[b] |= pairs[a]
            return True

        of_rank: dict[int, list[int]] = {}
        for number, b in enumerate(blocks):
            of_rank.setdefault(b.rank, []).append(number)
            if b.send >= 0 and b.recv >= 0:
                tie(b.recv, b.send)
        for mine in of_rank.values():
            takes = [x for x in mine if blocks[x].recv >= 0 and blocks[x].send < 0]
            gives = [x for x in mine if blocks[x].send >= 0 and blocks[x].recv < 0]
            left = len(mine)
            for r in takes:
                s = next((s for s in gives if left > most and tie(blocks[r].recv, blocks[s].send)), -1)
                if s >= 0:
                    gives.remove(s)
                    self._join_two(r, s, keep=True)
                    left -= 1
        self._renumber()

    def _renumber(self) -> None:
        self.result.blocks[:] = [b for b in self.result.blocks if b.moves]
        self.block_of = {k: number for number, b in enumerate(self.result.blocks) for k in b.moves}

    def _forwards(self, a: int, b: int) -> bool:
        one, two = self.moves[a], self.moves[b]
        return one.parts in ("RD", "RXAD") and two.parts == "XS" and one.dst == two.src and one.count == two.count

    def fuse(self) -> None:
        """A receipt and the sending of what it stored, with nothing between that matters, become one step.

        Blocks that were joined for this and gain nothing are separated again: two blocks wait less than one.
        """
        became: dict[int, int] = {}
        apart: list[Block] = []
        for block in self.result.blocks:
            gone: set[int] = set()
            place = {k: j for j, k in enumerate(block.moves)}
            for j, a in enumerate(block.moves):
                if a in gone or self.moves[a].parts not in ("RD", "RXAD"):
                    continue
                b = self._next_sender(block, j, gone)
                if b < 0 or not self._forwards(a, b):
                    continue
                theirs = {became.get(d, d) for d in self.moves[b].after}
                if any(d != a and place.get(d, len(place)) > j and d not in self.moves[a].after for d in theirs):
                    continue
                self.moves[a].parts += "S"
                self.moves[a].sends = self.moves[b].sends
                became[b] = a
                gone.add(b)
            block.moves = [k for k in block.moves if k not in gone]
            if not gone and id(block) in self.joined:
                one, two = self.joined[id(block)]
                block.send, block.moves = -1, one.moves
                apart.append(two)
        self.result.blocks += apart
        self._renumber()
        for m in self.moves:
            m.after = sorted({became.get(d, d) for d in m.after})
        for b, a in became.items():
            self.block_of[b] = self.block_of[a]
            self.moves[b].after = []
        for a in became.values():
            self.moves[a].after = [d for d in self.moves[a].after if d != a]

    def _next_sender(self, block: Block, j: int, gone: set[int]) -> int:
        """The next step of the block that sends, if all between only receive into other chunks; else -1."""
        _, written = self._touched(block.moves[j])
        mine = set(written)
        for k in block.moves[j + 1 :]:
            if k in gone:
                continue
            m = self.moves[k]
            if "S" in m.parts:
                return k
            reads, writes = self._touched(k)
            if "R" not in m.parts or mine.intersection(reads, writes) or mine.intersection(writes):
                return -1
        return -1

    # ---- stores that nobody reads --------------------------------------------------------------------------------------
    def drop_dead_stores(self) -> None:
        """`rrcs` whose value is overwritten, or left in scratch, unread: `rrs`."""
        unread: dict[tuple[int, str, int], int] = {}
        needed: set[int] = set()
        kept = [k for block in self.result.blocks for k in block.moves]
        for k in sorted(kept, key=lambda k: (self.moves[k].order, k)):
            m = self.moves[k]
            reads, writes = self._touched(k)
            needed.update(unread[m.rank, *c] for c in reads if (m.rank, *c) in unread)
            for c in writes:
                unread[m.rank, *c] = k
        needed.update(k for (_, letter, _), k in unread.items() if letter == "o")
        for k in kept:
            if self.moves[k].parts == "RXADS" and k not in needed:
                self.moves[k].parts, self.moves[k].dst = "RXAS", ("", 0)


class Pool(_Maker):
    """Messages between two ranks share connections, in one order that all blocks keep; from it blocks of any stretch are dealt out.

    Raises: Unsupported where there is no such order.
    """

    def __init__(self, moves: list[Move], memory: Memory) -> None:
        super().__init__(moves, memory)
        self.connect(1)
        for lane in self.lanes.values():
            for k in [k for k in lane if len(self.ports(k)) == 2]:
                self._take_apart(lane, k)
        self.block_of = {k: k for k in range(len(self.moves))}  # every step on its own, so that all that a lane's order meant becomes a wait
        self.order_lanes(relaxed=True)
        self.ends: list[list[int]] = [[-1, -1] for _ in self.connections]  # of a message: who sends and who receives it
        for side, of in enumerate((self.out, self.into)):
            for k, c in of.items():
                self.ends[c][side] = k
        self.between: dict[tuple[int, int], list[int]] = {}
        level = levels_of(self.moves, {b: a for a, b in self.ends})
        for c, (a, b) in enumerate(self.ends):
            self.between.setdefault((self.connections[c].src, self.connections[c].dst), []).append(c)
            self.place[a] = self.place[b] = level[a], self.moves[a].order, c
        for messages in self.between.values():
            messages.sort(key=lambda c: self.place[self.ends[c][0]])
        local: dict[int, list[int]] = {}
        for k in range(len(self.moves)):
            if not self.ports(k):
                local.setdefault(self.moves[k].rank, []).append(k)
        self.local = {rank: sorted(mine, key=lambda k: (level[k], self.moves[k].order, k)) for rank, mine in sorted(local.items())}

    def blocks(self, stretch: int, squeeze: int = 0) -> Blocks:
        """A block per direction and peer, or a few, of at most `stretch` messages each; local steps of a rank in one."""
        blocks: list[Block] = []
        self.connections = []
        self.result = Blocks(self.moves, blocks, self.connections)
        for (src, dst), messages in sorted(self.between.items()):
            many = -(-len(messages) // stretch)
            for number in range(many):  # dealt out in turn, so that early and late messages lie on every connection
                mine = messages[number::many]
                blocks.append(Block(src, len(self.connections), -1, [self.ends[c][0] for c in mine]))
                blocks.append(Block(dst, -1, len(self.connections), [self.ends[c][1] for c in mine]))
                self.connections.append(Connection(src, dst, -1, number))
        blocks += [Block(rank, -1, -1, list(mine)) for rank, mine in self.local.items()]
        if squeeze:
            self.squeeze(squeeze)
        self.result.waits = waits_of(self.moves, blocks)
        return self.result
