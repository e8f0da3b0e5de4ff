"""The static schedule of one rank's walk: when each receive is posted and where it lands, when each send is waited on, when values are freed.

Channel semantics from rendezvous messages: a channel of depth d has d receives posted ahead. So the receive of message j is posted
when message j-d has been consumed (the first d when the step begins) and what the receive is `after` is done: its destination takes memory from
then on, which is what the memory checks count. It goes straight into its destination if nothing touches those bytes before the receive's turn,
else into staging. A sender that overwrites the source before message j+d may have to wait for the posting earlier than the walks' order allows;
then the receive is posted without waiting for its `after` (the sender waits on everything else at points that come after it in that order).
A send is waited on as late as possible: before its source is overwritten, before message j+d is sent on its channel (by then the receiver has
consumed it, so this never adds a wait), or at the end of the step; a value that dies within the program sooner, once a message has come that the
receiver sends after it: memory is counted so. Nothing here depends on time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ...program.program import Kind, Part, Program
from ...program.tables import I32
from .lanes import channel_messages
from .tags import TAG_WINDOW

__all__ = ["Receive", "Schedule", "Send", "compile_schedule"]

MAX_SHORT_BYTES = 1 << 16  # of a send that stays ahead of receives due with it: the word that they are posted waits only shortly behind so few bytes
Range = tuple[int, int, int]  # (buffer, first chunk, end chunk)


@dataclass(frozen=True)
class Receive:
    """`direct`: into the destination of the step; else into staging. `source`: where the message's size can be read off."""

    step: int
    peer: int
    tag: int
    direct: bool
    source: Range


@dataclass(frozen=True)
class Send:
    step: int
    peer: int
    tag: int


@dataclass
class Schedule:
    """Positions count steps of the walk; `posts[p]`, `waits[p]` happen before step p, `frees[p]` after it; position len(order) is the end."""

    order: I32
    posts: dict[int, list[Receive]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # steps whose send is waited on
    frees: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # buffers
    receives: dict[int, Receive] = field(default_factory=dict)
    sends: dict[int, Send] = field(default_factory=dict)
    direct_targets: set[int] = field(default_factory=set)  # buffers that messages are received straight into


def compile_schedule(
    program: Program, orders: Sequence[I32], rank: int, *, sends_ahead: int = 0, sends_first: bool = False, staged_ahead: bool = False
) -> Schedule:
    """The schedule of `rank`; `orders` are all ranks' walks (`lanes.fuse_lanes`).

    `sends_ahead`: messages out of buffers that may wait to be taken, where that is more than the channel's depth. A send costs no memory until its
    receive is posted, and a walk that does not wait for it can take in what has come meanwhile. `sends_first`: of receives and short sends that are
    due at the same time the sends go first, since a neighbour may be waiting for them. `staged_ahead`: what is added is received at its
    channel's credit, whatever its step is `after`: it lands in staging, touches nothing before its turn, and has a place for `depth` messages anyway.
    """
    compiler = _Compiler(program, orders, rank, sends_ahead, staged_ahead)
    schedule = compiler.run()
    if sends_first:
        compiler.post_after_sends()
    return schedule


class _Compiler:
    def __init__(self, program: Program, orders: Sequence[I32], rank: int, sends_ahead: int, staged_ahead: bool) -> None:
        self.program, self.orders, self.rank, self.sends_ahead, self.staged_ahead = program, orders, rank, sends_ahead, staged_ahead
        self.order = orders[rank].tolist()
        self.position = {step: i for i, step in enumerate(self.order)}
        self.channel_sends, self.channel_receives = channel_messages(program)
        s = program.steps
        self.parts, self.kind, self.op = s.parts.tolist(), s.kind.tolist(), s.op.tolist()
        self.src = list(zip(s.src_buffer.tolist(), s.src_chunk.tolist(), s.count.tolist(), strict=True))
        self.dst = list(zip(s.dst_buffer.tolist(), s.dst_chunk.tolist(), s.count.tolist(), strict=True))
        self.accesses: dict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)  # buffer -> (position, first, end, overwrites)
        self.lane_of = program.lane_of_step()
        self.peers: dict[int, tuple[dict[int, int], dict[int, list[tuple[int, int, int]]]]] = {}  # positions and overwrites of a peer's walk
        self.replies: dict[int, tuple[dict[int, int], list[int], list[int]]] = {}  # a peer's walk, when it sends to this rank, where that has come
        self.schedule = Schedule(order=orders[rank])

    def run(self) -> Schedule:
        for position, step in enumerate(self.order):
            for (buffer, first, end), overwrites in self.touched(step):
                self.accesses[buffer].append((position, first, end, overwrites))
        self.post_receives()
        self.wait_sends()
        for buffer, touches in self.accesses.items():
            if not self.program.buffers.persistent[buffer]:
                self.schedule.frees[touches[-1][0]].append(buffer)
        return self.schedule

    def touched(self, step: int) -> Iterable[tuple[Range, bool]]:
        """Byte ranges a step reads, or overwrites in place."""
        if self.kind[step] == Kind.TRANSFER:
            if self.parts[step] & Part.READ:
                yield self.range(self.src[step]), False
            if self.parts[step] & Part.STORE:
                yield self.range(self.dst[step]), True
        elif self.kind[step] == Kind.COMPUTE:
            ops, op = self.program.ops, self.op[step]
            is_optimizer, is_backward = ops.name[op] == "optimizer", ops.name[op] in ("B", "I", "W")
            names = self.program.buffers.name
            for lists, writes in ((ops.reads, False), (ops.writes, True)):
                triples = lists[op].tolist()
                for i in range(0, len(triples), 3):
                    buffer, first, count = triples[i : i + 3]
                    if is_backward and names and names[buffer].startswith("act:"):
                        continue  # what backward needs of it, autograd keeps by itself
                    # An optimizer clears the gradients it has read. Other computed values are new tensors, except in persistent buffers.
                    # Only what is overwritten in place endangers a message under way: a new tensor has storage of its own.
                    in_place = bool(self.program.buffers.persistent[buffer]) and (writes or is_optimizer)
                    yield (buffer, first, first + count), in_place

    def range(self, place: tuple[int, int, int]) -> Range:
        buffer, first, count = place
        return (self.root(buffer), first, first + count) if self.root(buffer) == buffer else self.aliased(buffer, first, count)

    def root(self, buffer: int) -> int:
        while (base := int(self.program.buffers.alias_of[buffer])) >= 0:
            buffer = base
        return buffer

    def aliased(self, buffer: int, first: int, count: int) -> Range:
        """A range of an alias, as chunks of the buffer that it lies in, rounded outwards."""
        b = self.program.buffers
        low = first * int(b.chunk_bytes[buffer])
        high = low + count * int(b.chunk_bytes[buffer])
        while (base := int(b.alias_of[buffer])) >= 0:
            low, high = low + int(b.alias_offset_bytes[buffer]), high + int(b.alias_offset_bytes[buffer])
            buffer = base
        chunk = max(1, int(b.chunk_bytes[buffer]))
        return buffer, low // chunk, -(-high // chunk)

    # ---- receives ----------------------------------------------------------------------------------------------
    def post_receives(self) -> None:
        channels = self.program.channels
        found: list[tuple[int, int, int, int]] = []  # (post position, channel, message, step)
        for channel in range(len(channels)):
            if int(channels.dst[channel]) != self.rank:
                continue
            steps, depth = self.channel_receives[channel], int(channels.depth[channel])
            latest = [len(self.order)] * TAG_WINDOW  # messages of one tag are told apart by their order: none is posted after one that follows it
            # From the last message to the first, so that `latest` is the posting of the next message of the same tag.
            for j in reversed(range(len(steps))):
                credit = self.position[steps[j - depth]] + 1 if j >= depth else 0
                latest[j % TAG_WINDOW] = min(latest[j % TAG_WINDOW], self.post_position(steps[j], self.channel_sends[channel][j], credit))
                found.append((latest[j % TAG_WINDOW], channel, j, steps[j]))
        for at, channel, j, step in sorted(found):
            receive = Receive(step, int(channels.src[channel]), channel * TAG_WINDOW + j % TAG_WINDOW, *self.landing(step, at))
            self.schedule.posts[at].append(receive)
            self.schedule.receives[step] = receive
            if receive.direct:
                self.schedule.direct_targets.add(self.dst[step][0])

    def post_after_sends(self) -> None:
        """Receives are posted behind short sends that follow at once, which block nothing unless an earlier one is waited for before the next step.
        Behind a long one the word that a receive is posted would wait on the connection for all of its bytes."""
        posts = self.schedule.posts
        for at in sorted(posts, reverse=True):
            behind = at
            while behind < len(self.order) and self.sends_little(self.order[behind]) and not self.schedule.waits.get(behind + 1):
                behind += 1
            if behind > at:
                posts[behind] = posts.pop(at) + posts.get(behind, [])

    def sends_little(self, step: int) -> bool:
        """The step only sends, and at most MAX_SHORT_BYTES."""
        if self.kind[step] != Kind.TRANSFER or not self.parts[step] & Part.SEND or self.parts[step] & Part.RECV:
            return False
        buffer, _, count = self.src[step]
        return bool(count * int(self.program.buffers.chunk_bytes[buffer]) <= MAX_SHORT_BYTES)

    def post_position(self, step: int, send: int, credit: int) -> int:
        """Where the receive is posted: at its credit, or later when the steps that it is `after` are done."""
        if self.staged_ahead and self.parts[step] & Part.ADD:
            return credit
        s = self.program.steps
        lo, hi = int(s.after_ptr[step]), int(s.after_ptr[step + 1])
        ready = max((self.position[int(a)] + 1 for a, lag in zip(s.after_step[lo:hi], s.after_lag[lo:hi], strict=True) if lag == 0), default=0)
        # A sender that overwrites its source waits until this message is taken. Were the receive held back here until some step is done, that
        # step might need, over other ranks, what this sender does next.
        if ready <= credit or self.overwritten_after(send):
            return credit
        return ready

    def overwritten_after(self, send: int) -> bool:
        """The sender touches what it sends again to overwrite it, so its wait for this message may come early."""
        source = self.sent_range(send)
        if source is None:
            return False
        buffer, first, end = source
        peer = int(self.program.lanes.actor[self.lane_of[send]])
        if peer not in self.peers:
            last: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for position, other in enumerate(self.orders[peer].tolist()):
                for (touched, low, high), overwrites in self.touched(other):
                    if overwrites:
                        last[touched].append((position, low, high))
            self.peers[peer] = {int(x): i for i, x in enumerate(self.orders[peer])}, last
        position_of, overwrites_of = self.peers[peer]
        return any(p > position_of[send] and low < end and first < high for p, low, high in overwrites_of.get(buffer, ()))

    def landing(self, step: int, at: int) -> tuple[bool, Range]:
        parts, here = self.parts[step], self.position[step]
        place = self.dst[step] if parts & Part.STORE or not parts & Part.READ else self.src[step]
        if not parts & Part.STORE or parts & Part.ADD or self.program.steps.size[step] >= 0:
            return False, (place[0], place[1], place[1] + place[2])
        buffer, first, end = self.range(self.dst[step])
        # Anybody who touches the place between posting and arrival would see, or destroy, half a message.
        touched = any(at <= p < here and first < e and f < end for p, f, e, _ in self.accesses[buffer])
        return not touched, (place[0], place[1], place[1] + place[2])

    # ---- sends -------------------------------------------------------------------------------------------------
    def wait_sends(self) -> None:
        channels, end_of_step = self.program.channels, len(self.order)
        overwrites: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for buffer, touches in self.accesses.items():
            overwrites[buffer] = [(p, f, e) for p, f, e, writes in touches if writes]
        for at, posted in self.schedule.posts.items():
            for receive in posted:
                if receive.direct:
                    buffer, first, end = self.range(self.dst[receive.step])
                    overwrites[buffer].append((at, first, end))
        for channel in range(len(channels)):
            if int(channels.src[channel]) != self.rank:
                continue
            steps, depth = self.channel_sends[channel], int(channels.depth[channel])
            for j, step in enumerate(steps):
                self.schedule.sends[step] = Send(step, int(channels.dst[channel]), channel * TAG_WINDOW + j % TAG_WINDOW)
                source = self.sent_range(step)
                # From staging a send holds a slot: more than `depth` of them would be more memory than the program says.
                ahead = depth if source is None else max(depth, self.sends_ahead)
                # When message j + depth may be sent, j has been taken: waiting for it there costs nothing.
                at = self.position[steps[j + ahead]] if j + ahead < len(steps) else end_of_step
                if source is not None:
                    buffer, first, end = source
                    here = self.position[step]
                    at = min([at, *(p for p, f, e in overwrites[buffer] if p > here and f < end and first < e)])
                    if not self.program.buffers.persistent[buffer] and len(self.program.buffers.last[buffer]):  # it dies within the program
                        at = min(at, self.answered(channel, j))
                self.schedule.waits[at].append(step)

    def answered(self, channel: int, message: int) -> int:
        """Where a message of the peer has come that it sends after it received this one: waiting for it is free then, and its value can go."""
        peer = int(self.program.channels.dst[channel])
        if peer not in self.replies:
            walk = {int(x): i for i, x in enumerate(self.orders[peer])}
            pairs = sorted(
                (walk[sent], self.position[got])
                for c in range(len(self.program.channels)) if self.program.channels.src[c] == peer and self.program.channels.dst[c] == self.rank
                for sent, got in zip(self.channel_sends[c], self.channel_receives[c], strict=True)
            )  # fmt: skip
            # soonest[i]: the first step here that takes any message which the peer sends at place i of its walk or later.
            soonest = [*accumulate((got for _, got in reversed(pairs)), min)][::-1]
            self.replies[peer] = walk, [sent for sent, _ in pairs], soonest
        walk, sends, soonest = self.replies[peer]
        # Messages that the peer sends after it took this one; the first of them here proves that it was taken.
        i = bisect_right(sends, walk[self.channel_receives[channel][message]])
        return soonest[i] + 1 if i < len(soonest) else len(self.order)

    def sent_range(self, step: int) -> Range | None:
        """Where a sent message lies; None for one that is sent from staging."""
        parts = self.parts[step]
        if parts & Part.STORE:
            return self.range(self.dst[step])
        return None if parts & Part.RECV else self.range(self.src[step])
