"""NCCL's rules, applied to the calls that every rank issues: do all of them end, whatever the times are?

Sources: NCCL's user guide (group calls, point-to-point, using several communicators), torch's ProcessGroupNCCL, and what NCCL's maintainers answer.

- A point-to-point call holds its stream until both ends are there. There are no tags: the k-th send from a to b on a communicator meets the k-th
  receive there. Calls of one group go on side by side; the group is over when all of them are.
- A group in which a pair of ranks meets must hold the same calls of the pair at both ends. Anything else is undefined (NCCL issue 1279), and so are
  groups of more than MAX_GROUP_CALLS calls.
- A communicator that is not there yet is made at its first use, and every member's host stands still until all are there (torch makes one for each
  pair of ranks whose calls are not in a group). Collectives of a communicator meet in the order of their calls.
- Streams are independent of each other, but NCCL does not promise it: waiting kernels take room on the device, and streams share hardware queues.
  With `in_issue_order` a device runs everything in the one order in which its host issued it. Whatever ends under this rule ends under any
  sharing of queues, since a shared queue makes an entry wait for some of those that were issued before it, and this rule for all of them.

Nothing here depends on time or chance: an entry that may begin may still begin later, so one run that goes on as far as it can decides (marked
graphs), and what is left waits for each other in a circle, or for a call that nobody makes. The circle is the witness. O(entries + messages).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from ..program.issued import CallOrders, Issued
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding, Verdict

__all__ = ["MAX_GROUP_CALLS", "check_issued"]

MAX_GROUP_CALLS = 2048  # NCCL's own limit of operations between ncclGroupStart and ncclGroupEnd
MAX_SHOWN_WAITS = 6  # of a circle, in its text; all are in the witness
Node = tuple[int, int]  # (rank, number of the entry)


def check_issued(orders: CallOrders, *, in_issue_order: bool = False) -> Verdict:
    """ok, or wrong with findings "calls" (what NCCL forbids or nobody answers) or "deadlock" (a circle of waits).

    `facts`: ranks; groups and messages of all together; calls of the largest group.
    """
    ends = _Ends(orders)
    groups = [len(entry.messages) for rank in orders.ranks for entry in rank if entry.kind == "messages"]
    facts = {"ranks": len(orders.ranks), "groups": len(groups), "messages": len(ends.partner) // 2, "largest_group": max(groups, default=0)}
    findings = ends.findings
    if not findings:
        findings = _Run(orders, ends, in_issue_order).findings()
    return Verdict(findings=tuple(findings), facts=facts)


def _wrong(message: str, **witness: Any) -> Finding:
    return Finding(check="calls", message=message, witness=witness)


class _Ends:
    """Who meets whom: `partner[rank, entry, call]` is the other end of a point-to-point call, `turn[rank, entry]` the number of a collective."""

    def __init__(self, orders: CallOrders) -> None:
        self.orders = orders
        self.findings: list[Finding] = []
        self.partner: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self.turn: dict[Node, int] = {}
        calls: dict[tuple[int, int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)  # (comm, from, to, sends) -> calls in order
        turns: dict[tuple[int, int], int] = defaultdict(int)
        for rank, entries in enumerate(orders.ranks):
            for number, entry in enumerate(entries):
                self._require_sense(rank, number, entry)
                if entry.kind == "collective":
                    self.turn[rank, number] = turns[entry.comm, rank]
                    turns[entry.comm, rank] += 1
                for k, call in enumerate(entry.messages):
                    ends = (rank, call.peer) if call.sends else (call.peer, rank)
                    calls[entry.comm, *ends, call.sends].append((rank, number, k))
        if not self.findings:
            self._match(calls)
            self._same_turns(turns)
            self._all_come()
        if not self.findings:
            self._same_groups()
        del self.findings[MAX_FINDINGS_OF_A_KIND:]

    def _require_sense(self, rank: int, number: int, entry: Issued) -> None:
        say = self.findings.append
        at = {"rank": rank, "entry": number, "step": entry.step}
        if any(not 0 <= e < number for e in entry.after):
            say(_wrong(f"entry {number} of rank {rank} comes after one that is not issued before it", **at))
        if entry.kind in ("messages", "collective"):
            if not 0 <= entry.comm < len(self.orders.communicators) or rank not in self.orders.communicators[entry.comm].members:
                say(_wrong(f"entry {number} of rank {rank} is on a communicator that the rank is no member of", **at))
                return
            members = self.orders.communicators[entry.comm].members
            if any(call.peer not in members or call.peer == rank for call in entry.messages):
                say(_wrong(f"entry {number} of rank {rank} has a peer outside its communicator", **at))
        if len(entry.messages) > MAX_GROUP_CALLS:
            say(_wrong(f"a group of rank {rank} has {len(entry.messages)} calls, more than the {MAX_GROUP_CALLS} of NCCL", **at))

    def _match(self, calls: dict[tuple[int, int, int, bool], list[tuple[int, int, int]]]) -> None:
        say, ranks = self.findings.append, self.orders.ranks
        for comm, src, dst in dict.fromkeys(key[:3] for key in calls):
            sends, receives = calls.get((comm, src, dst, True), []), calls.get((comm, src, dst, False), [])
            for one, other in zip(sends, receives, strict=False):
                sent, got = (ranks[r][n].messages[k] for r, n, k in (one, other))
                if sent.size_bytes != got.size_bytes:
                    text = f"rank {src} sends {sent.size_bytes} bytes where rank {dst} receives {got.size_bytes}"
                    say(_wrong(f"{text} (steps {sent.step} and {got.step})", ranks=[src, dst], steps=[sent.step, got.step]))
                self.partner[one], self.partner[other] = other, one
            if len(sends) != len(receives):
                odd = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
                call = ranks[odd[0]][odd[1]].messages[odd[2]]
                what = f"send to rank {dst}" if call.sends else f"receive from rank {src}"
                say(_wrong(f"rank {odd[0]}'s {what} (step {call.step}) has no other end", rank=odd[0], entry=odd[1], step=call.step))

    def _same_turns(self, turns: dict[tuple[int, int], int]) -> None:
        for comm in dict.fromkeys(comm for comm, _ in turns):
            made = {rank: turns.get((comm, rank), 0) for rank in self.orders.communicators[comm].members}
            if len(set(made.values())) > 1:
                self.findings.append(_wrong(f"members of communicator {comm} make unequal numbers of collective calls: {made}", made=made))

    def _all_come(self) -> None:
        """A communicator that is made at its first use is used by all members."""
        for comm, made in enumerate(self.orders.communicators):
            users = {rank for rank, entries in enumerate(self.orders.ranks) if any(entry.comm == comm for entry in entries)}
            if users and not made.ready and (absent := sorted(set(made.members) - users)):
                text = f"communicator {comm} is made at its first use, to which rank {absent[0]} never comes"
                self.findings.append(_wrong(text, comm=comm, absent=absent))

    def _same_groups(self) -> None:
        """Calls of a pair that are one group at one end are one group at the other."""
        for rank, entries in enumerate(self.orders.ranks):
            for number, entry in enumerate(entries):
                theirs: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # peer -> its entries -> calls
                for k, call in enumerate(entry.messages):
                    theirs[call.peer][self.partner[rank, number, k][1]] += 1
                for peer, found in theirs.items():
                    there = self.orders.ranks[peer][next(iter(found))]
                    if len(found) > 1 or sum(call.peer == rank for call in there.messages) != sum(found.values()):
                        text = f"ranks {rank} and {peer} group their calls differently, which NCCL leaves undefined"
                        self.findings.append(_wrong(f"{text} (step {entry.messages[0].step})", ranks=[rank, peer], entry=number))
                        return


class _Run:
    """Everything goes on as far as it can."""

    def __init__(self, orders: CallOrders, ends: _Ends, in_issue_order: bool) -> None:
        self.orders, self.ends, self.one_queue = orders, ends, in_issue_order
        self.host = [0] * len(orders.ranks)  # the next entry that each host issues
        self.queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # (rank, stream) -> issued entries that are not over
        self.begun: set[Node] = set()
        self.over: set[Node] = set()
        self.left: dict[Node, int] = {}  # other ends that are not there yet, of groups that have begun
        self.there: dict[tuple[int, int], list[Node]] = defaultdict(list)  # (comm, turn) -> members that have begun
        self.arrived: dict[int, set[int]] = {c: set() for c, made in enumerate(orders.communicators) if not made.ready}
        self.waiting: dict[Node, list[Node]] = defaultdict(list)  # an entry -> who looks again when it is over
        self.todo: deque[tuple[str, int, int]] = deque(("host", rank, 0) for rank in range(len(orders.ranks)))
        while self.todo:
            what, rank, number = self.todo.popleft()
            if what == "host":
                self._issue(rank)
            else:
                self._begin(rank, number)

    def queue(self, rank: int, entry: Issued) -> deque[int]:
        return self.queues[rank, 0 if self.one_queue else entry.stream]

    def _issue(self, rank: int) -> None:
        entries = self.orders.ranks[rank]
        while self.host[rank] < len(entries):
            number = self.host[rank]
            entry = entries[number]
            if not self._meet(rank, entry):
                return
            if entry.kind == "host":
                open_ = next((e for e in entry.after if (rank, e) not in self.over), None)
                if open_ is not None:
                    self.waiting[rank, open_].append((rank, number))
                    return
                self.host[rank] += 1
                self._end(rank, number)
                continue
            self.host[rank] += 1
            queue = self.queue(rank, entry)
            queue.append(number)
            if queue[0] == number:
                self._begin(rank, number)

    def _meet(self, rank: int, entry: Issued) -> bool:
        """Whether the communicator of the entry is there; the hosts that stood at it go on when its last member comes."""
        arrived = self.arrived.get(entry.comm)
        members = self.orders.communicators[entry.comm].members if arrived is not None else ()
        if arrived is None or len(arrived) == len(members):
            return True
        arrived.add(rank)
        if len(arrived) < len(members):
            return False
        self.todo.extend(("host", other, 0) for other in members if other != rank)
        return True

    def _begin(self, rank: int, number: int) -> None:
        """Begin an entry at the head of its queue, unless it waits for another."""
        entry = self.orders.ranks[rank][number]
        if (rank, number) in self.begun or number >= self.host[rank] or self.queue(rank, entry)[0] != number:
            return
        open_ = next((e for e in entry.after if (rank, e) not in self.over), None)
        if open_ is not None:
            self.waiting[rank, open_].append((rank, number))
            return
        self.begun.add((rank, number))
        if entry.kind == "collective":
            there = self.there[entry.comm, self.ends.turn[rank, number]]
            there.append((rank, number))
            if len(there) == len(self.orders.communicators[entry.comm].members):
                for node in there:
                    self._end(*node)
            return
        others = {self.ends.partner[rank, number, k][:2] for k in range(len(entry.messages))}
        self.left[rank, number] = len(others - self.begun)
        for other in others & self.begun:
            self.left[other] -= 1
            if not self.left[other]:
                self._end(*other)
        if not self.left[rank, number]:
            self._end(rank, number)

    def _end(self, rank: int, number: int) -> None:
        self.over.add((rank, number))
        entry = self.orders.ranks[rank][number]
        if entry.kind != "host":
            queue = self.queue(rank, entry)
            queue.popleft()
            if queue:
                self.todo.append(("entry", rank, queue[0]))
        for _, other in self.waiting.pop((rank, number), ()):
            self.todo.append(("host" if self.orders.ranks[rank][other].kind == "host" else "entry", rank, other))

    # ---- what is left ------------------------------------------------------------------------------------------
    def findings(self) -> list[Finding]:
        stuck = next((rank for rank, entries in enumerate(self.orders.ranks) if self.host[rank] < len(entries)), None)
        start: Node | None = (stuck, self.host[stuck]) if stuck is not None else None
        if start is None:
            start = next(((rank, queue[0]) for (rank, _), queue in self.queues.items() if queue), None)
        if start is None:
            return []
        seen: dict[Node, int] = {}
        walk: list[tuple[Node, str]] = []
        at = start
        while at not in seen:
            seen[at] = len(walk)
            then, why = self._waits_for(at)
            walk.append((at, why))
            at = then
        circle = walk[seen[at] :]
        text = "; ".join(f"{self._said(node)} {why}" for node, why in circle[:MAX_SHOWN_WAITS])
        more = f" ... ({len(circle)} waits in all)" if len(circle) > MAX_SHOWN_WAITS else ""
        facts = [{"rank": r, "entry": n, "step": self._step(r, n), "call": self._call(r, n), "waits": why} for (r, n), why in circle]
        rule = "as issued" if self.one_queue else "on their streams"
        return [Finding(
            check="deadlock", message=f"calls wait for each other in a circle: {text}{more}",
            witness={"rule": rule, "cycle": facts, "ranks": sorted({r for (r, _), _ in circle}), "not_over": self._open()},
        )]  # fmt: skip

    def _open(self) -> int:
        return sum(map(len, self.orders.ranks)) - len(self.over)

    def _waits_for(self, node: Node) -> tuple[Node, str]:
        """Something that is not over and that this entry (or the host, which stands at it) waits for."""
        rank, number = node
        entry = self.orders.ranks[rank][number]
        if number > self.host[rank]:
            return (rank, self.host[rank]), "is not issued before the host goes on"
        if number == self.host[rank] and (arrived := self.arrived.get(entry.comm)) is not None and rank in arrived:
            absent = next(r for r in self.orders.communicators[entry.comm].members if r not in arrived)
            return (absent, self.host[absent]), f"makes its communicator, which waits for the host of rank {absent}"
        for other in entry.after:
            if (rank, other) not in self.over:
                return (rank, other), f"waits for entry {other}"
        if number == self.host[rank]:
            raise AssertionError(f"host {rank} stands for no reason")
        queue = self.queue(rank, entry)
        if queue[0] != number:
            return (rank, queue[0]), f"stands behind entry {queue[0]}"
        other_end = next(n for n in self._other_ends(node) if n not in self.begun)
        return other_end, f"waits for rank {other_end[0]}'s end"

    def _other_ends(self, node: Node) -> Iterator[Node]:
        rank, number = node
        entry = self.orders.ranks[rank][number]
        for k in range(len(entry.messages)):
            yield self.ends.partner[rank, number, k][:2]
        if entry.kind == "collective":
            turn = self.ends.turn[node]
            for other in self.orders.communicators[entry.comm].members:
                yield from ((r, n) for (r, n), t in self.ends.turn.items() if r == other and t == turn and self._comm(r, n) == entry.comm)

    def _comm(self, rank: int, number: int) -> int:
        return self.orders.ranks[rank][number].comm

    def _step(self, rank: int, number: int) -> int:
        entry = self.orders.ranks[rank][number]
        return entry.messages[0].step if entry.messages else entry.step

    def _call(self, rank: int, number: int) -> str:
        entry = self.orders.ranks[rank][number]
        if entry.kind != "messages":
            return {"work": "work", "collective": "a collective", "host": "a wait of the host"}[entry.kind]
        shown = ", ".join(f"{'send to' if m.sends else 'receive from'} rank {m.peer}" for m in entry.messages[:3])
        return shown + (f" and {len(entry.messages) - 3} more" if len(entry.messages) > 3 else "")

    def _said(self, node: Node) -> str:
        step = self._step(*node)
        return f"rank {node[0]}, entry {node[1]}" + (f" (step {step})" if step >= 0 else "") + f", {self._call(*node)},"
