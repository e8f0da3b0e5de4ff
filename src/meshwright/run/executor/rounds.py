"""All messages of a program in rounds: groups of calls on one communicator, in one order that all ranks keep. For NCCL.

NCCL has no tags, a call holds its stream until both ends are there, and kernels that wait take room on the device. So receives cannot simply be
posted ahead, as they are on gloo. Here every message gets a round, the same at both ends. A rank's group w is everything that it sends and
receives in round w, and it is issued as soon as all of that is ready, after the groups of lower rounds. A message is later than every round that
either end uses before the message is ready there (uses: takes what was received in it, or waits until what was sent in it has gone). Then

- a group is complete before any of its messages is used: what becomes ready behind that use has a higher round;
- rank a's group w needs work that waits for rounds below w alone, at every rank, so by induction over w all groups end, even if every device runs
  all that it does in the order in which its host issued it (`check.issued`, `in_issue_order`).

Compute steps at which ranks meet by messages of their own (`together`) use as much as any of their ranks has used: what becomes ready behind them is
later than all that some rank needs to come to the meeting.

Among the rounds that this allows, a message takes the first in which it can be expected: a rank counts a tick for what it computes and for every
message it takes, and sends no sooner than its own tick. A message that is computed later than another thus has a later round, and what comes early
is taken while the rank computes. When messages are used, and when receives may be posted (what memory is counted by), is the schedule's
(`schedule.compile_schedule`), as it is on gloo.

What it costs against tags: messages of one round at one rank wait for the slowest of them.
Cost: O(steps + messages) after the schedules of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...check.issued import check_issued
from ...check.verdict import Verdict
from ...errors import Deadlock
from ...program.issued import CallOrders, Communicator, Issued, Message
from ...program.program import Kind, Part, Program
from ...program.tables import I32
from .lanes import channel_messages
from .schedule import Receive, Schedule, Send, compile_schedule

__all__ = ["RankRounds", "Round", "compile_rounds", "issued_orders", "require_ends"]

COMPUTE, MESSAGES, MEETINGS = 0, 1, 2  # streams


@dataclass(frozen=True)
class Round:
    """One rank's group of a round; messages of a pair stand in the same order at both ends."""

    number: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass
class RankRounds:
    """`before[p]`: what happens before step p of the walk, in order: a group is issued, or (a number) the send of that step is waited for."""

    schedule: Schedule
    before: dict[int, list[Round | int]] = field(default_factory=lambda: defaultdict(list))


def compile_rounds(
    program: Program, orders: Sequence[I32], *, sends_ahead: int = 0, together: Sequence[Sequence[int]] = ()
) -> list[RankRounds]:
    """Of all ranks; `orders` are their walks. `together`: compute steps of different ranks that end only when all of a group have begun.

    Raises: Deadlock when walks that are no restrictions of one order wait for each other.
    """
    schedules = [compile_schedule(program, orders, rank, sends_ahead=sends_ahead) for rank in range(program.ranks)]
    numbers = _Numbers(program, schedules, together)
    return [_grouped(schedule, numbers) for schedule in schedules]


class _Numbers:
    """`round_of[s]`: the round of the message that step s sends. All ranks are walked at once; a walk stands where a round is used that its other
    end has not come to yet."""

    def __init__(self, program: Program, schedules: Sequence[Schedule], together: Sequence[Sequence[int]]) -> None:
        s = program.steps
        self.program, self.schedules = program, schedules
        self.parts, self.computes = s.parts.tolist(), (s.kind == Kind.COMPUTE).tolist()
        self.sender: dict[int, int] = {}  # receiving step -> sending step
        for sends, receives in zip(*channel_messages(program), strict=True):
            self.sender.update(zip(receives, sends, strict=True))
        self.receiver = {sent: got for got, sent in self.sender.items()}
        self.bound: dict[int, list[int]] = defaultdict(list)  # sending step -> the first rounds that its ends allow
        self.used = [0] * len(schedules)  # the highest round that a rank has used
        self.tick = [1] * len(schedules)
        self.walks = [schedule.order.tolist() for schedule in schedules]
        self.place = [(0, 0)] * len(schedules)  # (position, stage: 0 waits, 1 receives are posted, 2 the step)
        self.meeting = {step: k for k, steps in enumerate(together) for step in steps}
        self.expected = [len(steps) for steps in together]
        self.come: dict[int, set[int]] = defaultdict(set)  # meeting -> ranks that have come to it
        self.standing: dict[int, list[int]] = defaultdict(list)  # sending step -> ranks that stand at its round
        self.todo = list(range(len(schedules)))
        while self.todo:
            self.walk(self.todo.pop())
        stuck = [rank for rank, (position, _) in enumerate(self.place) if position <= len(self.walks[rank])]
        if stuck:
            rank = stuck[0]
            step = self.walks[rank][min(self.place[rank][0], len(self.walks[rank]) - 1)]
            raise Deadlock(
                f"the orders of steps of ranks {', '.join(map(str, stuck[:8]))} wait for each other", where=program.describe(step),
                hint="walks must be restrictions of one order of all steps", data={"ranks": stuck},
            )  # fmt: skip

    def round_of(self, send: int) -> int | None:
        bounds = self.bound[send]
        return max(bounds) if len(bounds) == 2 else None

    def at_least(self, send: int, number: int) -> None:
        self.bound[send].append(number)
        if len(self.bound[send]) == 2:
            self.todo += self.standing.pop(send, [])

    def use(self, rank: int, send: int) -> bool:
        number = self.round_of(send)
        if number is None:
            self.standing[send].append(rank)
            return False
        self.used[rank] = max(self.used[rank], number)
        self.tick[rank] = max(self.tick[rank], number + 1)
        return True

    def meet(self, rank: int, meeting: int) -> bool:
        """Whether all ranks have come; the last to come sets all of them to the same."""
        come = self.come[meeting]
        if len(come) == self.expected[meeting]:
            return True
        come.add(rank)
        if len(come) < self.expected[meeting]:
            return False
        for column in (self.used, self.tick):
            most = max(column[r] for r in come)
            for r in come:
                column[r] = most
        self.todo += come - {rank}
        return True

    def walk(self, rank: int) -> None:
        schedule, walk = self.schedules[rank], self.walks[rank]
        position, stage = self.place[rank]
        while position <= len(walk):
            if stage == 0:
                for step in schedule.waits.get(position, ()):
                    if not self.use(rank, step):
                        self.place[rank] = position, 0
                        return
                stage = 1
            if stage == 1:
                for receive in schedule.posts.get(position, ()):
                    self.at_least(self.sender[receive.step], self.used[rank] + 1)
                stage = 2
            if position < len(walk):
                step = walk[position]
                if step in self.meeting and not self.meet(rank, self.meeting[step]):
                    self.place[rank] = position, 2
                    return
                if self.computes[step]:
                    self.tick[rank] += 1
                elif self.parts[step] & Part.RECV and not self.use(rank, self.sender[step]):
                    self.place[rank] = position, 2
                    return
                if step in self.receiver:
                    self.at_least(step, max(self.used[rank] + 1, self.tick[rank]))
            position, stage = position + 1, 0
        self.place[rank] = position, 0


def _grouped(schedule: Schedule, numbers: _Numbers) -> RankRounds:
    """A rank's groups, each where the last of its messages is ready and the groups before it are issued."""
    made = RankRounds(schedule)
    length = len(schedule.order)
    # Moments of the walk: before step p first the waits, then the postings; a send is ready behind its step, before the waits of the next.
    ready: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # round -> the last moment at which something of it becomes ready
    sends: dict[int, list[Send]] = defaultdict(list)
    receives: dict[int, list[Receive]] = defaultdict(list)

    def known(send: int) -> int:
        number = numbers.round_of(send)
        assert number is not None
        return number

    for position, step in enumerate(schedule.order.tolist()):
        if step in schedule.sends:
            sends[number := known(step)].append(schedule.sends[step])
            ready[number] = max(ready[number], (position + 1, 0))
    for position, posted in schedule.posts.items():
        for receive in posted:
            receives[number := known(numbers.sender[receive.step])].append(receive)
            ready[number] = max(ready[number], (position, 1))
    rounds: dict[tuple[int, int], list[Round]] = defaultdict(list)
    moment = (0, 0)
    for number in sorted({*sends, *receives}):
        moment = max(moment, ready[number])
        # By the numbers of the sending steps, which both ends know: so the calls of a pair match within a group.
        rounds[moment].append(Round(
            number, tuple(sorted(sends[number], key=lambda x: x.step)), tuple(sorted(receives[number], key=lambda x: numbers.sender[x.step])),
        ))  # fmt: skip
    for position in range(length + 1):
        edge: list[Round | int] = [*rounds.get((position, 0), ()), *schedule.waits.get(position, ()), *rounds.get((position, 1), ())]
        if edge:
            made.before[position] = edge
    return made


def require_ends(program: Program, rounds: Sequence[RankRounds], together: Sequence[Sequence[int]] = ()) -> Verdict:
    """The verdict that all calls end, whatever devices do with their streams. Raises: Deadlock with the circle of waits, CheckFailed."""
    verdict = check_issued(issued_orders(program, rounds, together), in_issue_order=True)
    verdict.raise_if_wrong()
    return verdict


def issued_orders(program: Program, of_ranks: Sequence[RankRounds], together: Sequence[Sequence[int]] = ()) -> CallOrders:
    """What the executor hands to CUDA devices in one run of the program, for `check.issued`: a stream that computes, one of groups of messages.

    A group comes after all that the computing stream was given before it; a step that takes a message, or needs a send to be over, after its group.
    Ranks that meet do so by two groups of messages to all of each other, on a communicator of their own.
    """
    actor = program.lanes.actor[program.lane_of_step()].tolist()
    others = {step: [(actor[x], x) for x in steps if x != step] for steps in together for step in steps}
    sizes = program.message_bytes()
    sender = {got: sent for sends, receives in zip(*channel_messages(program), strict=True) for sent, got in zip(sends, receives, strict=True)}
    kinds, parts = program.steps.kind.tolist(), program.steps.parts.tolist()
    ranks = []
    for rounds in of_ranks:
        entries: list[Issued] = []
        group_of: dict[int, int] = {}  # sending step -> the entry of its group
        last = -1  # on the computing stream
        walk = rounds.schedule.order.tolist()
        for position in range(len(walk) + 1):
            for one in rounds.before.get(position, ()):
                if isinstance(one, Round):
                    calls = [Message(x.peer, True, int(sizes[x.step]), x.step) for x in one.sends]
                    calls += [Message(x.peer, False, int(sizes[sender[x.step]]), x.step) for x in one.receives]
                    for x in one.sends:
                        group_of[x.step] = len(entries)
                    for y in one.receives:
                        group_of[y.step] = len(entries)
                    entries.append(Issued("messages", MESSAGES, 0, tuple(calls), (last,) if last >= 0 else ()))
                else:
                    last = len(entries)
                    entries.append(Issued("work", COMPUTE, after=(group_of[one],), step=one))
            if position < len(walk) and kinds[step := walk[position]] in (Kind.COMPUTE, Kind.TRANSFER):
                for _ in range(2 if step in others else 0):
                    calls = [Message(peer, True, 0, step) for peer, _ in others[step]] + [Message(peer, False, 0, x) for peer, x in others[step]]
                    entries.append(Issued("messages", MEETINGS, 1, tuple(calls), (last,) if last >= 0 else ()))
                    last = len(entries)
                    entries.append(Issued("work", COMPUTE, after=(last - 1,), step=step))
                came = (group_of[step],) if parts[step] & Part.RECV and kinds[step] == Kind.TRANSFER else ()
                last = len(entries)
                entries.append(Issued("work", COMPUTE, after=came, step=step))
        ranks.append(tuple(entries))
    everyone = Communicator(tuple(range(program.ranks)))
    return CallOrders(tuple(ranks), (everyone, everyone))
